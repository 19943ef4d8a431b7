"""Who was busy when: a row for the host, a row for the device, a block for each thing they did."""

from collections.abc import Sequence
from dataclasses import dataclass

from .. import show
from .style import BLACK, PALETTE, blank, number


@dataclass(frozen=True)
class Span:
    """Something that a row ("host", "GPU") was busy with, from start to end, both in the chart's unit."""

    row: str
    label: str
    start: float
    end: float


def timeline(
    spans: Sequence[Span],
    unit: str = "ms",
    title: str = "",
    marks: dict[str, float] | None = None,
    xlabel: str = "",
    order: Sequence[str] = (),
) -> show.Picture:
    """Rows of blocks over time, or over what xlabel says. What takes no time is drawn as a sliver, and the legend says
    so. marks: label -> time of a vertical dashed line (where a
    stopwatch was read). order: labels that keep their colours from one chart to the next."""
    spans = list(spans)
    rows = list(dict.fromkeys(span.row for span in spans))
    labels = [label for label in dict.fromkeys([*order, *(span.label for span in spans)]) if label != "wait"]
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    instants = {s.label for s in spans} - {s.label for s in spans if s.end - s.start > (last - first) / 1e4}
    figure, axes = blank(title, height=1.6 + 0.55 * len(rows))
    for span in spans:
        color = "0.75" if span.label == "wait" else PALETTE[labels.index(span.label) % len(PALETTE)]
        # blocks that touch are told apart by a white edge, which would swallow a sliver
        width, sliver = span.end - span.start, (last - first) / 200
        label = f"{span.label} (takes no time)" if span.label in instants else span.label
        axes.barh(rows.index(span.row), max(width, sliver), left=span.start, height=0.6, label=label, color=color,
                  edgecolor="white" if width > 3 * sliver else color, linewidth=1.5)  # fmt: skip
    for label, at in (marks or {}).items():
        axes.axvline(at, color=BLACK, linestyle="--", linewidth=1.3)
        axes.annotate(
            f"{label}: {number(at)} {unit}",
            (at, -0.72),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(rows)), rows)
    axes.set(
        xlabel=xlabel or f"time ({unit})", ylim=(len(rows) - 0.5, -1.0), xlim=(first, last + (last - first) * 0.12)
    )
    handles, names = axes.get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=4, frameon=False)
    said = [f"{s.row}: {s.label} from {number(s.start)} to {number(s.end)}" for s in spans]
    said += [f"{label} at {number(at)}" for label, at in (marks or {}).items()]
    return show.Picture(figure, f"{title or 'Timeline'}, in {unit}. {'; '.join(said)}.")
