"""How things look in a notebook: notes, tables, pictures with a description, progress, excerpts of code.

Everything has a plain-text form too, so that scripts, screen readers and saved notebooks can be read.
"""

import base64
import html
import io
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from IPython import get_ipython
from IPython.display import display

_CELL = "padding:2px 10px;text-align:{};border-bottom:1px solid #8884"


@dataclass(frozen=True)
class _Both:
    """Something with an HTML form for the notebook and a text form for everything else."""

    html: str
    text: str

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/html": self.html, "text/plain": self.text}

    def __str__(self) -> str:
        return self.text


def _escape(text: str) -> str:
    """Text as HTML. A dollar in a tag of its own is no delimiter of mathematics to JupyterLab."""
    return html.escape(text).replace("$", "<span>$</span>")


def _folding(text: str, longest: int = 30) -> str:
    """HTML whose words beyond so many characters may be folded at an underscore: the names of generated kernels would
    make a table wider than the page, which is cut off there."""
    return re.sub(rf"\S{{{longest + 1},}}", lambda word: word[0].replace("_", "_<wbr>"), text)


def note(text: str, kind: str = "note") -> None:
    """Show one line of text. kind: "note" or "warning"."""
    colour = {"note": "#0072B2", "warning": "#D55E00"}[kind]
    style = f"border-left:4px solid {colour};padding:4px 10px"
    word = "Warning: " if kind == "warning" else ""
    display(_Both(f'<div style="{style}">{word}{_escape(text)}</div>', word + text))


def paragraph(text: str, bold: bool = False) -> str:
    """HTML of a line of plain text, as it stands above or below a table."""
    return f'<div style="padding:4px 0{";font-weight:bold" if bold else ""}">{_escape(text)}</div>'


def table(rows: list[dict], columns: list[str] | None = None, caption: str = "") -> _Both:
    """A table of `rows` (dicts); `columns` chooses and orders the keys. Numbers are shown to 4 significant digits."""
    columns = columns or list(dict.fromkeys(k for row in rows for k in row))
    cells = [[number(row.get(c, "")) for c in columns] for row in rows]
    right = [all(_is_number(r.get(c, 0)) for r in rows) for c in columns]
    head = "".join(
        f'<th style="{_CELL.format("right" if r else "left")}">{_folding(_escape(c), 0)}</th>'
        for c, r in zip(columns, right, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="{_CELL.format("right" if r else "left")}">'
            f"{_folding(_escape(v).replace(' × ', '&nbsp;×&nbsp;'))}</td>"
            for v, r in zip(row, right, strict=True)
        )
        + "</tr>"
        for row in cells
    )
    # not a <caption>: that would be folded to the width of a narrow table
    top = paragraph(caption) if caption else ""
    label = f' aria-label="{html.escape(caption)}"' if caption else ""
    widths = [max([len(c), *(len(row[i]) for row in cells)]) for i, c in enumerate(columns)]

    def line(values):
        padded = (v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    text = "\n".join([*([caption] if caption else []), line(columns), *map(line, cells)])
    return _Both(f"{top}<table{label}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", text)


def _is_number(value) -> bool:
    """Whether it may stand in a column of numbers: one, or what says that there is none."""
    return isinstance(value, int | float) or (isinstance(value, str) and value in ("", "–"))


def number(value) -> str:
    """A number as the course prints it: 4 significant digits, thousands apart."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Picture:
    """A matplotlib figure and its description in words, shown together: the text for those who cannot see it."""

    figure: object
    text: str

    def _ipython_display_(self) -> None:
        import matplotlib.pyplot as plt

        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight", facecolor="white")
        plt.close(self.figure)
        # Jupyter keeps "alt" but does not render it yet, so the description is printed beneath as well
        display(
            {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": self.text},
            raw=True,
            metadata={"image/png": {"alt": self.text}},
        )
        display(_Both(f'<div style="font-size:90%;max-width:60em">{_escape(self.text)}</div>', self.text))


def progress(work: Iterable | int, label: str, total: int | None = None) -> Iterator:
    """Iterate over `work` (or range(work)) with a progress bar that vanishes at the end, or when the loop is left.

    It is drawn only once two seconds have passed: nothing flashes by for quick work.
    """
    work = range(work) if isinstance(work, int) else work
    total = total or (len(work) if hasattr(work, "__len__") else None)
    began, handle = time.monotonic(), None
    try:
        for i, item in enumerate(work):
            if time.monotonic() - began > 2:
                of = f"{i}/{total}" if total else str(i)
                bar = f'<progress value="{i}" max="{total}"></progress>' if total else "<progress></progress>"
                both = _Both(f"{_escape(label)} {bar} {of}", f"{label}: {of}")
                if handle:
                    handle.update(both)
                else:
                    handle = display(both, display_id=True)
            yield item
    finally:  # also where the loop around it breaks off or fails
        if handle:
            handle.update(_Both("", ""))


@contextmanager
def working(label: str) -> Iterator[None]:
    """Show, once two seconds have passed, that something of unknown length is going on, until it ends.

    Of what another thread does nothing is shown: it would stand in whichever cell runs then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handle = display(_Both("", ""), display_id=True) if get_ipython() else None
    bar = _Both(f"{_escape(label)} <progress></progress>", f"{label} ...")
    timer = threading.Timer(2, handle.update if handle else print, [bar])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if handle:
            handle.update(_Both("", ""))


@contextmanager
def saying() -> Iterator[Callable[[str], None]]:
    """A line that what goes on can change, and that is gone at the end; in a terminal a new line for each change."""
    handle, last = display(_Both("", ""), display_id=True) if get_ipython() else None, ""

    def say(text: str) -> None:
        nonlocal last
        if text != last:
            last = text
            (handle.update if handle else print)(_Both(f"{_escape(text)} <progress></progress>", f"{text} ..."))

    try:
        yield say
    finally:
        if handle:
            handle.update(_Both("", ""))


def code(
    text: str, language: str = "", lines: slice | None = None, mark: str | None = None, caption: str = ""
) -> _Both:
    """An excerpt of generated code, scrolling where it is longer than 40 lines.

    lines: which lines to show (a slice of 0-based line numbers); mark: a regular expression whose lines stand out.
    """
    every = text.splitlines()
    chosen = list(enumerate(every, 1))[lines or slice(None)]
    pattern = re.compile(mark) if mark else None
    width = len(str(len(every)))
    out_html, out_text = [], []
    for number, content in chosen:
        hit = bool(pattern and pattern.search(content))
        out_text.append(f"{'>' if hit else ' '} {number:{width}} {content}")
        style = "background:#F0E44266;font-weight:bold;" if hit else ""
        out_html.append(
            f'<div style="{style}white-space:pre"><span style="opacity:.75">{number:{width}}</span> '
            f"{_escape(content)}</div>"
        )
    title = " · ".join(filter(None, [caption, language, f"{len(chosen)} of {len(every)} lines"]))
    height = "max-height:26em;" if len(chosen) > 40 else ""
    block = (
        f'<div style="{height}overflow:auto;font-family:monospace;font-size:12px;border:1px solid #8884;'
        f'padding:6px">{"".join(out_html)}</div>'
    )
    return _Both(f'<div style="font-size:90%">{_escape(title)}</div>{block}', "\n".join([title, *out_text]))
