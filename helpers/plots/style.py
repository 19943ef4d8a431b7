"""What the charts have in common: colours, the empty figure, and numbers as they are printed on it."""

import math

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..records import NOT_YET as MISSING

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
MARKERS = "osD^vPX"


def blank(title: str, height: float, width: float = 7.6, source: str = ""):
    """An empty figure and its axes: white, title at the left, and below it where the figures were measured."""
    figure = Figure(figsize=(width, height), dpi=100, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor="white")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if title:
        axes.set_title(title, loc="left", fontsize=11, pad=20 if source else 6)
    if source:
        axes.annotate(source, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", fontsize=8.5,
                      color="0.35")  # fmt: skip
    return figure, axes


def value_of(thing):
    """The number in a Measurement, the sum of a traffic.Bytes, or the number itself."""
    if thing is None or isinstance(thing, (int, float)):
        return thing
    return thing.total if hasattr(thing, "total") else thing.value


def source_of(figures) -> str:
    """Where `records.Figures` or `timing.Ceilings` were measured, in a few words; empty for other things."""
    where = getattr(figures, "where", "")
    if hasattr(figures, "live") and where != MISSING:
        where = f"{'measured here' if figures.live else 'recorded'}: {where}"
    return ", ".join(where.split(", ")[:2])


def known(number) -> bool:
    """Whether there is a number: neither None nor the NaN of a figure without a record."""
    return number is not None and math.isfinite(number)


def known_or(number, otherwise):
    """`number` where it is known, else `otherwise`."""
    return number if known(number) else otherwise


def unit_name(unit: str) -> str:
    """A unit as it is written on a chart."""
    return {"us": "µs"}.get(unit, unit)


def number(value: float) -> str:
    """Three significant digits, never an exponent between 0.0001 and a million."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "not known"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(value: float) -> str:
    """256, 4k, 1M: powers of two as people say them."""
    for step, suffix in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if value >= step and value % step == 0:
            return f"{int(value // step)}{suffix}"
    return number(value)


def byte_scale(most: float) -> tuple[float, str]:
    """(bytes a unit, the unit) in which `most` bytes read well."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if most >= scale:
            return scale, unit
    return 1.0, "bytes"
