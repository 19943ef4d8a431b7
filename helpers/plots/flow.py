"""A decision list as a chart: conditions from the top down, and where each leads."""

import textwrap
from collections.abc import Sequence

from .. import show
from .style import BLACK, PALETTE, blank

WIDTH = 62
"""Characters of a line in a condition's box."""


def flowchart(steps: Sequence[tuple[str, str]], title: str = "") -> show.Picture:
    """Boxes from the top down: where a condition holds, "yes" leads right to its outcome, else "no" leads down.

    steps: (condition, outcome), in order; the last holds always. Outcomes keep a colour each.
    """
    boxes = [textwrap.wrap(condition, WIDTH) for condition, _ in steps]
    heights = [0.75 + 0.42 * len(lines) for lines in boxes]
    outcomes = list(dict.fromkeys(outcome for _, outcome in steps))
    figure, axes = blank(title, height=0.9 + 0.42 * sum(heights), width=8.6)
    axes.axis("off")
    y = 0.0
    for (_, outcome), lines, height in zip(steps, boxes, heights, strict=True):
        middle, last = y + height / 2, y + height >= sum(heights) - 1e-9
        box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": BLACK}
        axes.text(0, middle, "\n".join(lines), va="center", fontsize=9, bbox=box)
        color = PALETTE[outcomes.index(outcome) % len(PALETTE)]
        axes.annotate("" if last else "yes", (6.9, middle), (5.9, middle), va="center", ha="right", fontsize=9,
                      arrowprops={"arrowstyle": "->"})  # fmt: skip
        axes.text(7.05, middle, outcome, va="center", fontsize=10, fontweight="bold",
                  bbox=box | {"edgecolor": color, "linewidth": 1.8})  # fmt: skip
        if not last:
            axes.annotate("no", (0.5, y + height + 0.22), (0.8, y + height), va="center", fontsize=9)
            axes.annotate("", (0.4, y + height + 0.24), (0.4, y + height - 0.24), arrowprops={"arrowstyle": "->"})
        y += height
    axes.set(xlim=(-0.3, 8.6), ylim=(y, 0))
    said = "; otherwise ".join(f"{condition}: {outcome}" for condition, outcome in steps)
    return show.Picture(figure, f"{title or 'Flowchart'}. {said}.")
