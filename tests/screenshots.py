"""Pictures of lessons as JupyterLab shows them after they were run here, to be looked at.

    python tests/screenshots.py OUTDIR [NOTEBOOK …] [--saved]

Each lesson becomes OUTDIR/NN_topic.01.png, .02.png, …, a window's height each. `--saved` takes the outputs that the
file holds instead of running it.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers import ROOT  # noqa: E402
from tests import browser, lab_server  # noqa: E402

SCROLLER = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer"


def slices(page, out: Path, name: str) -> int:
    """Scroll through the open notebook and take a picture of each window's height; returns how many."""
    notebook = page.locator(SCROLLER).first
    height, whole = notebook.evaluate("e => [e.clientHeight, e.scrollHeight]")
    # JupyterLab leaves a window's height empty below the last cell
    last = notebook.evaluate(
        "e => Math.max(...[...e.querySelectorAll('.jp-Cell')].map(c => c.offsetTop + c.offsetHeight))"
    )
    number = 0
    for top in range(0, min(whole, last + 40), height - 60):
        number += 1
        notebook.evaluate("(e, top) => e.scrollTo(0, top)", top)
        page.wait_for_timeout(250)
        notebook.screenshot(path=out / f"{name}.{number:02}.png")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--saved", action="store_true", help="do not run the notebooks")
    parser.add_argument("--height", type=int, default=1600, help="of the window, in pixels")
    parser.add_argument("--seconds", type=float, default=300, help="longest time for one notebook")
    options = parser.parse_args()
    if missing := browser.missing():
        print(missing, file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    paths = options.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb"))
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        home.mkdir()
        checkout = lab_server.copy_of_checkout(Path(folder) / "checkout")
        with lab_server.serving(checkout, home, browser.SETTINGS) as lab:
            for path in paths:
                (checkout / "work" / "notebooks" / path.name).write_bytes(path.read_bytes())
                with browser.page(height=options.height) as page:
                    browser.open_notebook(page, lab, f"work/notebooks/{path.name}")
                    page.keyboard.press("Control+B")
                    if not options.saved:
                        browser.run_all(page, options.seconds)
                    page.wait_for_timeout(1500)
                    count = slices(page, options.out, path.stem)
                    errors = page.locator(browser.RED).all_inner_texts()
                    wrong += bool(errors or page.failures)
                    print(f"{path.name}: {count} pictures", *errors, *page.failures, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
