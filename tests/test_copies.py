"""A learner's copies in work/: brought up to date, never overwritten where edited."""

import errno
import json

import nbformat
import pytest

from helpers import copies
from helpers.copies import copy_to_work


def notebook(*sources, outputs=False):
    cells = []
    for i, source in enumerate(sources):
        cells.append(nbformat.v4.new_code_cell(source, id=f"l07-part-{i}"))
        if outputs:
            cells[-1].outputs = [nbformat.v4.new_output("stream", text="ran\n")]
            cells[-1].execution_count = i + 1
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells))


@pytest.fixture
def course(tmp_path):
    """A small checkout; `course / "work"` is the learner's."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "labs").mkdir()
    links = "[00](notebooks/07_topic.ipynb) [lab](labs/) [how](CONTRIBUTING.md) [out](https://example.org) [here](#top)"
    (tmp_path / "README.md").write_text(links)
    (tmp_path / "notebooks" / "glossary.md").write_text("# Glossary")
    (tmp_path / "notebooks" / "07_topic.ipynb").write_text(notebook("a = 1", "b = 2"))
    copy_to_work(tmp_path)
    return tmp_path


def same(copy, source):
    """Whether two notebooks have the same cells with the same outputs."""
    cells = [nbformat.read(path, as_version=4).cells for path in (copy, source)]
    return cells[0] == cells[1]


def source_and_copy(course, name="notebooks/07_topic.ipynb"):
    return course / name, course / "work" / name


def test_a_first_start_copies_lessons_glossary_and_readme(course):
    assert same(*source_and_copy(course))
    assert (course / "work" / "notebooks" / "glossary.md").read_text() == "# Glossary"
    readme = (course / "work" / "README.md").read_text()
    assert readme == (course / "README.md").read_text().replace("(CONTRIBUTING.md)", "(../CONTRIBUTING.md)")
    assert copy_to_work(course) == []


def test_an_untouched_copy_is_updated(course):
    source, copy = source_and_copy(course)
    source.write_text(notebook("a = 1", "b = 3"))
    (said,) = copy_to_work(course)
    assert "was updated" in said
    assert same(copy, source)


def test_running_a_copy_is_no_edit(course):
    source, copy = source_and_copy(course)
    ran = notebook("a = 1", "b = 2", "", outputs=True)  # JupyterLab appends an empty cell
    copy.write_text(ran)
    assert copy_to_work(course) == []
    assert copy.read_text() == ran, "outputs of one's own run stay until there is an update"
    source.write_text(notebook("a = 1", "b = 3"))
    copy_to_work(course)
    assert same(copy, source)


def test_newly_saved_outputs_reach_a_copy_that_was_not_run(course):
    source, copy = source_and_copy(course)
    source.write_text(notebook("a = 1", "b = 2", outputs=True))
    assert copy_to_work(course) == []
    assert same(copy, source)


def test_an_edited_copy_stays_and_the_update_arrives_beside_it_once(course):
    source, copy = source_and_copy(course)
    mine = notebook("a = 1", "b = 'my answer'")
    copy.write_text(mine)
    assert copy_to_work(course) == [], "an edit alone is nothing to report"
    source.write_text(notebook("a = 10", "b = 2", "c = 3"))
    (said,) = copy_to_work(course)
    assert "07_topic.new.ipynb" in said
    assert "cells changed l07-part-0; added l07-part-2" in said
    assert copy.read_text() == mine
    beside = copy.with_name("07_topic.new.ipynb")
    assert same(beside, source)
    beside.unlink()  # merged by hand
    assert copy_to_work(course) == []
    assert not beside.exists()


def test_a_second_update_replaces_an_untouched_first_but_not_an_edited_one(course):
    source, copy = source_and_copy(course)
    copy.write_text(notebook("mine"))
    source.write_text(notebook("a = 2", "b = 2"))
    copy_to_work(course)
    source.write_text(notebook("a = 3", "b = 2"))
    copy_to_work(course)
    first = copy.with_name("07_topic.new.ipynb")
    assert same(first, source)
    first.write_text(notebook("working here now"))
    source.write_text(notebook("a = 4", "b = 2"))
    (said,) = copy_to_work(course)
    assert "07_topic.new2.ipynb" in said
    assert "working here now" in first.read_text()


def test_a_copy_of_unknown_origin_or_one_that_is_broken_is_never_overwritten(course):
    source, copy = source_and_copy(course)
    (course / "work" / ".copied.json").unlink()
    copy.write_text('{"cells": [')
    glossary = course / "work" / "notebooks" / "glossary.md"
    glossary.write_text("my notes")
    said = copy_to_work(course)
    assert len(said) == 2
    assert copy.read_text() == '{"cells": ['
    assert glossary.read_text() == "my notes"
    assert same(copy.with_name("07_topic.new.ipynb"), source)
    assert glossary.with_name("glossary.new.md").read_text() == "# Glossary"


@pytest.mark.parametrize("broken", ["[]", "null", '{"cells": 5}', '{"cells": [5]}', '{"cells": [{}]}', "[" * 100_000])
def test_whatever_a_learner_made_of_a_file_it_stays_and_the_next_start_goes_on(course, broken):
    """A server that did not start could not mend it."""
    source, copy = source_and_copy(course)
    copy.write_text(broken)
    (course / "work" / ".copied.json").write_text(broken)
    (course / "work" / "NEWS.md").write_bytes(b"\xff")
    [said] = copy_to_work(course)
    copies.tell([said], course / "work")
    assert copy.read_text() == broken
    assert same(copy.with_name("07_topic.new.ipynb"), source)


def test_a_deleted_copy_comes_back(course):
    source, copy = source_and_copy(course)
    copy.unlink()
    copy_to_work(course)
    assert same(copy, source)


def test_what_is_remembered_is_readable(course):
    known = json.loads((course / "work" / ".copied.json").read_text())
    assert [cell for cell, _ in known["notebooks/07_topic.ipynb"]["copied"]] == ["l07-part-0", "l07-part-1"]


def test_a_folder_of_the_learners_own_elsewhere(course, tmp_path):
    work = tmp_path / "home of ada" / "work"
    assert copy_to_work(course, work) == []
    assert same(work / "notebooks" / "07_topic.ipynb", course / "notebooks" / "07_topic.ipynb")
    readme = (work / "README.md").read_text()
    assert readme == (course / "README.md").read_text().replace("[how](CONTRIBUTING.md)", "how")


def test_news_stand_on_top_of_older_news(tmp_path):
    copies.tell(["one", "two"], tmp_path)
    copies.tell(["three"], tmp_path)
    lines = (tmp_path / "NEWS.md").read_text().split("\n")
    assert [line for line in lines if line.startswith("- ")] == ["- three", "- one", "- two"]


def test_a_full_disk_leaves_a_file_as_it_was_and_no_half(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("before")

    def full(self, content):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(copies.Path, "write_bytes", full)
    with pytest.raises(OSError):
        copies.write(tmp_path / "a", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "before"
