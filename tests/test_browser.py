"""Lesson 01 in real Chromium: it runs without an error, and the roofline's slider obeys the keyboard."""

import os

import pytest

from tests import browser, lab_server

LESSON = "work/notebooks/01_measuring.ipynb"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if missing := browser.missing():
        if os.environ.get("HELPERS_BROWSER") == "required":
            pytest.fail(f"HELPERS_BROWSER=required, but {missing}")
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("browser")
    (folder / "home").mkdir()
    checkout = lab_server.copy_of_checkout(folder / "checkout")
    with lab_server.serving(checkout, folder / "home", browser.SETTINGS) as lab, browser.page() as page:
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
