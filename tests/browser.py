"""Chromium, driven as a reader would: open a notebook in JupyterLab, run all cells, look."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from tests.lab_server import Lab

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SETTINGS = {"@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"}}
"""Settings of JupyterLab under which every cell is in the page, so that it can be looked at."""

RED = '[data-mime-type="application/vnd.jupyter.stderr"]'
"""Outputs that JupyterLab shows in red: a traceback, or what went to stderr."""


def missing() -> str:
    """What is lacking to drive a browser, as a clause; empty where nothing is."""
    if not importlib.util.find_spec("playwright"):
        return "playwright is not installed (pip install playwright)"
    if not _executable():
        return "there is no Chromium (apt-get install chromium)"
    return ""


def _executable() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def page(width: int = 1300, height: int = 1000) -> Iterator:
    """A page of a fresh Chromium. Its `failures` collects uncaught errors of the page's scripts."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=_executable(), args=FLAGS)
        try:
            new = chromium.new_page(viewport={"width": width, "height": height})
            new.failures = []
            new.on("pageerror", lambda error: new.failures.append(str(error)))
            new.set_default_timeout(60_000)
            yield new
        finally:
            chromium.close()


def open_notebook(page, lab: Lab, path: str) -> None:
    """Open a notebook, alone in a workspace of its own, and wait until its kernel is idle."""
    name = "".join(c for c in path if c.isalnum())
    page.goto(lab.page(f"/lab/workspaces/{name}/tree/{path}"))
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    for _ in range(300):  # the page says "idle" before there is a kernel: the server knows
        kernels = [s["kernel"] for s in lab.get("/api/sessions") if s["path"] == path]
        if any(k["execution_state"] == "idle" and k["connections"] for k in kernels):
            break
        page.wait_for_timeout(200)
    _until_idle(page, 60)


def run_all(page, seconds: float) -> None:
    """Choose Run > Run All Cells, and wait until each code cell has its number, or one shows a red box."""
    page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
    page.locator(".lm-Menu-itemLabel").get_by_text("Run All Cells", exact=True).click()
    page.wait_for_function(_FINISHED, arg=RED, timeout=seconds * 1000)
    _until_idle(page, seconds)


_FINISHED = r"""red => {
    const cells = [...document.querySelectorAll('.jp-Notebook .jp-CodeCell')];
    const left = cells.filter(cell => !/\[\d+\]/.test(cell.querySelector('.jp-InputPrompt').innerText)
                                      && cell.querySelector('.cm-content').innerText.trim());
    return cells.length && (!left.length || document.querySelector(red));
}"""


def _until_idle(page, seconds: float) -> None:
    page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').first.wait_for(
        state="attached", timeout=seconds * 1000
    )
