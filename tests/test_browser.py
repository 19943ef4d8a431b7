"""In real Chromium: lesson 01 runs without an error, and explorers obey the keyboard."""

import os

import nbformat
import pytest

from tests import browser, lab_server

pytestmark = pytest.mark.slow

LESSON = "work/notebooks/01_measuring.ipynb"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    if missing := browser.missing():
        if os.environ.get("HELPERS_BROWSER") == "required":
            pytest.fail(f"HELPERS_BROWSER=required, but {missing}")
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("browser")
    (folder / "home").mkdir()
    checkout = lab_server.copy_of_checkout(folder / "checkout")
    with lab_server.serving(checkout, folder / "home", browser.SETTINGS) as lab:
        yield lab


@pytest.fixture(scope="module")
def page(lab):
    with browser.page() as page:
        browser.open_notebook(page, lab, LESSON)
        page.wait_for_timeout(1000)
        page.changed_on_opening = page.locator(".lm-TabBar-tab.jp-mod-dirty").count()
        browser.run_all(page, seconds=240)
        yield page


def test_all_cells_run_without_error_or_noise(page):
    assert page.locator(browser.RED).all_inner_texts() == []
    assert page.failures == []
    assert page.changed_on_opening == 0, "JupyterLab counts the lesson as changed before it is touched"
    assert page.locator(".jp-Dialog").count() == 0, page.locator(".jp-Dialog").first.inner_text()


def test_the_rooflines_slider_moves_by_keyboard_and_the_figure_follows(page):
    explorer = page.locator(".roofline-explorer").first
    explorer.scroll_into_view_if_needed()
    readout, figure = explorer.locator(".roofline-readout"), explorer.locator("img")
    words, picture = readout.inner_text(), figure.get_attribute("src")
    handle = explorer.locator(".noUi-handle").first
    handle.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "before => document.querySelector('.roofline-explorer .roofline-readout').innerText !== before", arg=words
    )
    page.wait_for_function("before => document.querySelector('.roofline-explorer img').src !== before", arg=picture)
    assert "FLOP/byte" in readout.inner_text()


def test_the_fusion_explorer_is_worked_by_keyboard_alone(lab, page):
    cells = ["import helpers\nhelpers.start()\nfrom helpers import explore", "explore.fusion(['gelu(h)'])"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab.root / "work" / "notebooks" / "fusion.ipynb")
    browser.open_notebook(page, lab, "work/notebooks/fusion.ipynb")
    browser.run_all(page, seconds=120)
    explorer = page.locator(".fusion-explorer").first
    explorer.wait_for()
    assert explorer.locator(".fusion-readout").inner_text().startswith("h = x; h = gelu(h). Predict")
    second = explorer.locator("select").nth(1)
    second.focus()
    page.keyboard.type("h @ w")  # a list of choices is searched by typing
    page.wait_for_function(_READS, arg="h = gelu(h); h = h @ w")
    page.keyboard.press("Tab")
    for _ in range(3):
        page.keyboard.press("Tab")  # past the other steps, to the slider
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    while page.evaluate("document.activeElement.tagName") != "BUTTON":
        page.keyboard.press("Tab")
    page.keyboard.press("Space")
    page.wait_for_function(_READS, arg="2 launches, as you predicted", timeout=60_000)
    assert "extern_kernels.mm" in explorer.inner_text() and page.failures == []
    assert "gelu(h)" in explorer.locator("img").get_attribute("alt")


def test_the_guide_is_filled_and_read_by_keyboard_alone(lab, page):
    cells = ["import helpers\nhelpers.start()\nfrom helpers import explore", "explore.choose()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab.root / "work" / "notebooks" / "guide.ipynb")
    browser.open_notebook(page, lab, "work/notebooks/guide.ipynb")
    browser.run_all(page, seconds=120)
    form = page.locator(".guide-form").first
    form.wait_for()
    assert form.locator(".guide-readout").inner_text().startswith("Start on: library.")
    form.locator(".noUi-handle").first.focus()
    for key in ("ArrowRight", "ArrowRight"):  # past standard ones in a row, to a known one with a change
        page.keyboard.press(key)
    page.wait_for_function(_ADVISES, arg="Start on: AI compiler.")
    for key in ("Tab", "Tab", "ArrowRight", "ArrowRight", "Tab", "Tab", "Tab", "Tab", "ArrowRight"):
        page.keyboard.press(key)  # what the team knows; the deadline
    page.wait_for_function(_ADVISES, arg="Start on: Triton.")
    words = form.inner_text()
    assert "It would be AI compiler with" in words and "Nearest workload: attention, prefill" in words
    assert page.failures == []


_ADVISES = "words => document.querySelector('.guide-form .guide-readout').innerText.startsWith(words)"
_READS = "words => document.querySelector('.fusion-explorer .fusion-readout').innerText.includes(words)"
