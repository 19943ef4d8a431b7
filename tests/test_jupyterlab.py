"""JupyterLab as `make lab` starts it: README first and rendered, lesson 00 beside it, no questions, nothing fetched."""

import re

import pytest

from tests import lab_server


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    (folder / "home").mkdir()
    with lab_server.serving(lab_server.copy_of_checkout(folder / "checkout"), folder / "home") as lab:
        yield lab


def setting(lab, plugin, name):
    return lab.get(f"/lab/api/settings/{plugin}")["schema"]["properties"][name]["default"]


def test_it_opens_on_the_readme(lab):
    assert lab.landing().endswith("/lab/tree/work/README.md")
    assert setting(lab, "@jupyterlab/docmanager-extension:plugin", "defaultViewers") == {"markdown": "Markdown Preview"}


def test_lesson_00_is_open_beside_it(lab):
    workspace = lab.get("/lab/api/workspaces/default")["data"]
    opened = workspace["layout-restorer:data"]["main"]["dock"]["widgets"]
    assert opened == ["markdownviewer-widget:work/README.md", "notebook:work/notebooks/00_start_here.ipynb"]
    for name in opened:
        assert lab.get(f"/api/contents/{workspace[name]['data']['path']}?content=0")["writable"]


def test_no_news_and_no_update_check(lab):
    notification = "@jupyterlab/apputils-extension:notification"
    assert setting(lab, notification, "fetchNews") == "false"
    assert setting(lab, notification, "checkForUpdates") is False
    page = lab.get("/lab")
    assert re.search(r'"news":\s*{"disabled":\s*true}', page)


def test_lessons_and_glossary_are_copies_in_work(lab):
    names = {entry["name"] for entry in lab.get("/api/contents/work/notebooks")["content"]}
    assert names == {path.name for path in (lab.root / "notebooks").iterdir()}


def test_a_token_is_needed_and_only_this_machine_is_served(lab):
    assert lab.status("/api/contents") == 403
    assert "http://localhost:" in lab.log()


def test_it_starts_without_a_warning(lab):
    assert "http://localhost:" in lab.log() and "Warning" not in lab.log()


def test_a_second_start_keeps_the_learners_tabs(lab):
    from helpers.copies import first_layout

    file = next((lab.root / "work" / ".jupyter" / "workspaces").iterdir())
    before = file.read_text()
    first_layout(lab.root / "work")
    assert file.read_text() == before


def test_a_notebook_that_is_open_twice_loses_nothing(lab):
    """The window that saves last does not know what the other has saved: JupyterLab asks, and here it insisted."""
    path = "/api/contents/work/notebooks/01_measuring.ipynb"
    one, other = lab.get(path), lab.get(path)
    [first, second] = [i for i, cell in enumerate(one["content"]["cells"]) if cell["cell_type"] == "code"][1:3]
    one["content"]["cells"][first]["source"] = "one = 1"
    lab.put(path, one)
    one["content"]["cells"][first]["source"] = "one = 11"  # the same window goes on: nothing to keep
    lab.put(path, one)
    folder = lab.root / "work" / "notebooks"
    assert not list(folder.glob("*.before*"))
    other["content"]["cells"][second]["source"] = "other = 2"
    lab.put(path, other)
    assert "one = 11" in (folder / "01_measuring.before.ipynb").read_text()
    assert "other = 2" in (folder / "01_measuring.ipynb").read_text()
    lab.put(path, one)
    assert "other = 2" in (folder / "01_measuring.before2.ipynb").read_text()
    assert f"01_measuring.ipynb is open twice, it seems: cells {one['content']['cells'][first]['id']} were" in lab.log()
