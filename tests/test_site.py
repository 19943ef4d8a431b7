"""The pages of `make site`: complete, linked, loaded from nowhere else, and readable by everyone, in real Chromium."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

from helpers import ROOT
from tests import browser

pytestmark = pytest.mark.slow

AXE = "4.14.1"
"""The version of axe-core that looks at the pages; HELPERS_AXE names an axe.min.js where there is no npm."""

FRONT, CHINESE = "index.html", "README.zh.html"
LESSON, GLOSSARY = "notebooks/01_measuring.html", "notebooks/glossary.html"
LESSONS = sorted(f"notebooks/{path.stem}.html" for path in (ROOT / "notebooks").glob("*.ipynb"))
LOOKS = [(name, "dark", 390) for name in (FRONT, CHINESE, GLOSSARY, *LESSONS)]
LOOKS += [(name, scheme, 1300) for name in (FRONT, LESSON, GLOSSARY) for scheme in ("light", "dark")]
"""What axe-core looks at: a page, the colours its reader prefers, the width of the window in pixels."""


def need(there: object, sentence: str) -> None:
    """Skip what needs something that this machine lacks; fail where HELPERS_BROWSER=required forbids that."""
    if not there:
        (pytest.fail if os.environ.get("HELPERS_BROWSER") == "required" else pytest.skip)(sentence)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a site that Sphinx built as `make site` does, without a word."""
    need(importlib.util.find_spec("myst_nb"), "the packages that build the site are not installed (make site)")
    folder = tmp_path_factory.mktemp("site")
    recipe = re.search(r"^\t@\$\(run\) (sphinx .+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1]
    command = [sys.executable, "-m", *recipe.replace("build/", f"{folder}/").split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder / "site"


class Page(HTMLParser):
    """What a page's HTML holds: its ids, what it links to, what it loads, its pictures with their descriptions."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids, self.links, self.loads, self.pictures, self.titles = set(), [], [], [], 0
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found["id"]} if "id" in found else set()
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag != "a":
            self.loads += [found[name] for name in ("src", "href") if found.get(name)]
        self.titles += tag == "h1"
        if tag == "img":
            self.pictures.append(found.get("alt"))


@pytest.fixture(scope="module")
def pages(site):
    return {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}


# ---- what is in it -------------------------------------------------------------------------------------------------


def test_every_lesson_is_a_page_and_every_lab_a_download(site, pages):
    assert {*LESSONS, FRONT, "README.html", CHINESE, GLOSSARY, "search.html"} <= set(pages)
    assert {name for name, page in pages.items() if page.titles != 1} <= {"search.html"}
    downloads = {path.name: path.read_bytes() for path in (site / "_downloads").rglob("*.ipynb")}
    assert downloads == {path.name: path.read_bytes() for path in (ROOT / "labs").glob("*.ipynb")}


def test_no_solution_is_published(site):
    text = [path for path in site.rglob("*") if path.suffix in {".html", ".ipynb", ".js", ".py", ".txt"}]
    assert not [path for path in text if "### BEGIN SOLUTION\n" in path.read_text()]


def test_every_figure_is_described_as_its_notebook_describes_it(pages):
    described = 0
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        outputs = [output for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", [])]
        figures = [output.metadata["image/png"]["alt"] for output in outputs if "image/png" in output.get("data", {})]
        assert pages[f"notebooks/{path.stem}.html"].pictures == figures
        described += len(figures)
    assert described > 50


def test_links_within_the_site_lead_somewhere(site, pages):
    broken = defaultdict(list)
    for name, page in pages.items():
        for target in page.links:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (site / name).parent / unquote(parts.path) if parts.path else site / name
            other = pages.get(os.path.relpath(path, site))
            anchored = not parts.fragment or (other and unquote(parts.fragment) in other.ids)
            if not path.is_file() or not anchored:
                broken[name].append(target)
    assert not broken
    assert sum(len(page.links) for page in pages.values()) > 1000


def test_pages_load_only_what_lies_beside_them(site, pages):
    for name, page in pages.items():
        for target in page.loads:
            assert not urlsplit(target).netloc and urlsplit(target).scheme in ("", "data"), f"{name}: {target}"
            assert ((site / name).parent / unquote(urlsplit(target).path)).exists(), f"{name}: {target}"


def test_formulas_are_drawn_without_a_script(site):
    assert (site / "notebooks/07_triton_attention.html").read_text().count("<math") > 5


# ---- what a reader sees --------------------------------------------------------------------------------------------


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """A server of tests keeps its log to itself."""


@contextmanager
def serving(folder: Path):
    """A server of the files in `folder`; gives its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium(site):
    """Opens a page of the site, put on a server, in one tab of Chromium; its `asked` are the addresses asked for."""
    need(not browser.missing(), browser.missing())
    with serving(site) as address, browser.page() as tab:
        tab.asked = []
        tab.on("request", lambda request: tab.asked.append(request.url))

        def show(name: str, scheme: str = "light", width: int = 1300, media: str = "screen"):
            tab.set_viewport_size({"width": width, "height": 900})
            tab.emulate_media(color_scheme=scheme, media=media)
            tab.goto(f"{address}/{name}")
            return tab

        show.tab, show.address = tab, address
        yield show


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """The source of axe-core, which npm brings."""
    if named := os.environ.get("HELPERS_AXE"):
        return Path(named).read_text()
    need(shutil.which("npm"), "there is no npm to bring axe-core (apt-get install npm), and HELPERS_AXE names no file")
    folder = tmp_path_factory.mktemp("axe")
    quiet = ["--prefix", ".", "--no-audit", "--no-fund", "--ignore-scripts", "--no-save"]
    done = subprocess.run(["npm", "install", *quiet, f"axe-core@{AXE}"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (folder / "node_modules/axe-core/axe.min.js").read_text()


@pytest.mark.parametrize("name, scheme, width", LOOKS)
def test_axe_finds_no_serious_violation(chromium, axe, name, scheme, width):
    page = chromium(name, scheme, width)
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    grave = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
    assert not grave, json.dumps([[v["id"], [n["html"] for n in v["nodes"][:3]]] for v in grave], indent=1)
    assert {"color-contrast", "image-alt" if name == LESSON else "link-name"} <= {
        rule["id"] for rule in found["passes"]
    }


def test_axe_would_find_what_is_wrong(chromium, axe):
    page = chromium(LESSON)
    page.evaluate("document.querySelector('.cell_output img').removeAttribute('alt')")
    page.evaluate("document.querySelector('article p').style.color = '#ccc'")
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert {"image-alt", "color-contrast"} <= {violation["id"] for violation in found["violations"]}


@pytest.mark.parametrize("name", [FRONT, CHINESE, GLOSSARY, *LESSONS])
def test_a_phone_shows_a_page_without_scrolling_sideways(chromium, name):
    page = chromium(name, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    # what is wider than the screen lies in something that scrolls, and no text is cut off
    lost = page.evaluate(
        """() => [...document.querySelectorAll("article *")].filter(box => {
            if (box.getBoundingClientRect().right <= innerWidth + 1 || box.closest("math")) return false;
            for (let up = box.parentElement; up; up = up.parentElement)
                if (["auto", "scroll"].includes(getComputedStyle(up).overflowX)) return false;
            return true;
        }).map(box => box.outerHTML.slice(0, 200))"""
    )
    assert not lost


def test_search_finds_a_word(chromium):
    page = chromium(FRONT)
    page.get_by_role("textbox", name="Search").fill("mbarrier")
    page.keyboard.press("Enter")
    page.locator("#search-results li a").first.wait_for()
    assert any("CUDA: the GEMM ladder" in found for found in page.locator("#search-results li a").all_inner_texts())
    page.locator("#search-results li a", has_text="The ladder of GPU kernels").first.click()
    assert page.url.partition("?")[0].endswith("README.html")


def test_dark_mode_is_switched_and_kept(chromium):
    page = chromium(LESSON)
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.locator(".theme-toggle:visible").click()
    assert page.evaluate("document.body.dataset.theme") == "dark"
    assert page.evaluate(background) != light
    assert chromium(GLOSSARY).evaluate("document.body.dataset.theme") == "dark"
    page.evaluate("localStorage.clear()")


def test_the_keyboard_reaches_what_the_mouse_does(chromium):
    page = chromium(LESSON)
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "(({tagName, className, name, href}) => `${tagName} ${className} ${name || href || ''}`)"
                "(document.activeElement)"
            )
        )
    words = "\n".join(reached)
    assert "skip-to-content" in reached[0]
    for control in ("INPUT sidebar-search q", "BUTTON theme-toggle", "notebooks/glossary.html", "PRE"):
        assert control in words, control


def test_hints_open_by_keyboard_and_on_paper(chromium, site):
    page = chromium("notebooks/00_start_here.html")
    hint = page.locator("details").first
    inside = hint.locator(":scope > :not(summary)").first
    assert not inside.is_visible()
    hint.locator("summary").focus()
    page.keyboard.press("Enter")
    assert inside.is_visible()
    page = chromium("notebooks/00_start_here.html", media="print")
    assert page.locator("details[open]").count() == 0
    hidden = page.evaluate("[...document.querySelectorAll('details > *')].filter(e => !e.checkVisibility()).length")
    assert page.locator("details").count() > 0 and hidden == 0


def test_nothing_was_asked_of_any_other_place(chromium, site):
    """Runs last in this file: every page above was opened in the same tab."""
    for path in sorted(site.glob("notebooks/*.html")):
        chromium(path.relative_to(site).as_posix())
    assert [url for url in chromium.tab.asked if not url.startswith((f"{chromium.address}/", "data:"))] == []
    assert len(chromium.tab.asked) > 100 and chromium.tab.failures == []
