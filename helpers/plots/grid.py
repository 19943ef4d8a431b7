"""The tiles of a product in the order of their launch, and the bytes that this order moves."""

import numpy as np
from matplotlib.collections import LineCollection

from .. import show
from .style import BLACK, GREEN, MISSING, ORANGE, SKY, blank, byte_scale, known, number, source_of

OPERANDS = (("A read", SKY, ""), ("B read", ORANGE, "//"), ("C written", GREEN, ".."))
NUMBERED = 16
"""A grid of at most so many tiles a side has room for their numbers."""


def launch(prediction, measured=None, title: str = "", source=None) -> show.Picture:
    """C's tiles coloured by when programs take them, a line around each wave, beside the DRAM bytes of one launch.

    prediction: a `tiles.Prediction`. measured: `traffic.Bytes` that were counted, or the bytes read alone; NaN where
    they are not recorded yet. source: the `records.Figures` that they came from.
    """
    product = prediction.product
    figure, left = blank(title or str(product), height=4.2, width=9.6, source=source_of(source))
    grid = figure.add_gridspec(1, 2, width_ratios=(1, 1.15))
    left.set_subplotspec(grid[0])
    _tiles(left, prediction)
    right = figure.add_subplot(grid[1], facecolor="white")
    right.spines[["top", "right"]].set_visible(False)
    rows = _rows(prediction, measured)
    scale, unit = byte_scale(max(sum(filter(known, parts)) for _, parts in rows))
    for y, (name, parts) in enumerate(rows):
        end = 0.0
        for (label, color, hatch), part in zip(OPERANDS, parts, strict=True):
            if known(part):
                right.barh(y, part / scale, 0.62, left=end, color=color, hatch=hatch, edgecolor="white", label=label)
                end += part / scale
        if name == "measured" and known(parts[0]):  # the counters do not tell A from B
            right.barh(y, parts[0] / scale, 0.62, color="0.75", edgecolor="white", label="A and B read")
        if name == "measured" and not known(parts[2]):
            said = f"{number(parts[0] / scale)} read" if known(parts[0]) else MISSING
        else:
            said = number(end)
        right.annotate(said, (end, y), (5, 0), textcoords="offset points", va="center", fontsize=9)
    widest = max(sum(filter(known, parts)) for _, parts in rows) / scale
    right.set_yticks(range(len(rows)), [name for name, _ in rows])
    right.set(xlabel=f"DRAM bytes of one launch ({unit})", xlim=(0, widest * 1.22), ylim=(len(rows) - 0.4, -0.6))
    handles, labels = right.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=4, frameon=False)
    return show.Picture(figure, describe(prediction, measured))


def describe(prediction, measured=None) -> str:
    """The picture in words."""
    product, card = prediction.product, prediction.card
    least, read = product.least.read, prediction.read
    rows, columns = prediction.panels
    scale, unit = byte_scale(max(least, read))
    fits = "" if prediction.fits else f", more than the {card.shared_bytes_per_block >> 10} that a block may take here"
    asked, asked_unit = byte_scale(product.requested)
    text = (
        f"{product}: {product.rows * product.columns} programs, {prediction.programs} at once ({card.name}), "
        f"{prediction.waves} {_waves(prediction)}. The first wave shares {rows} of {product.rows} row panels of A and "
        f"{columns} of {product.columns} column panels of B. Read from DRAM: at least {number(least / scale)} {unit}, "
        f"predicted {number(read / scale)} {unit} ({number(read / least)} times the least; "
        f"A {number(prediction.a / scale)}, B {number(prediction.b / scale)}). "
    )
    if measured is not None:
        counted = getattr(measured, "read", measured)
        found = f"{number(counted / scale)} {unit} ({number(counted / least)} times the least)"
        text += f"Measured: {found if known(counted) else MISSING}. "
    return text + (
        f"Programs ask for {number(product.requested / asked)} {asked_unit}, and L2 has {prediction.hits:.0%} of it. "
        f"Shared memory of a program: {product.shared_bytes / 1024:.0f} KB{fits}."
    )


def _waves(prediction) -> str:
    return "wave" if prediction.waves == 1 else "waves"


def _rows(prediction, measured) -> list[tuple[str, tuple]]:
    product, least = prediction.product, prediction.product.least
    a, b = (size * product.k * product.element_bytes for size in (product.m, product.n))
    rows = [("least", (a, b, least.written)), ("predicted", (prediction.a, prediction.b, prediction.written))]
    if measured is not None:
        rows.append(("measured", (getattr(measured, "read", measured), None, getattr(measured, "written", None))))
    return rows


def _tiles(axes, prediction) -> None:
    order, wave = prediction.product.order(), prediction.wave
    axes.imshow(order, cmap="cividis", aspect="auto", interpolation="nearest", vmin=0, vmax=max(order.size - 1, 1))
    upright = np.argwhere(wave[:, 1:] != wave[:, :-1])
    level = np.argwhere(wave[1:] != wave[:-1])
    lines = [[(x + 0.5, y - 0.5), (x + 0.5, y + 0.5)] for y, x in upright]
    lines += [[(x - 0.5, y + 0.5), (x + 0.5, y + 0.5)] for y, x in level]
    axes.add_collection(LineCollection(lines, colors="white", linewidths=2.4))
    axes.add_collection(LineCollection(lines, colors=BLACK, linewidths=1.0))
    if max(order.shape) <= NUMBERED:
        for (y, x), when in np.ndenumerate(order):
            dark = when < order.size / 2
            axes.annotate(str(when), (x, y), ha="center", va="center", fontsize=8, color="white" if dark else BLACK)
    axes.set(
        xlabel=f"column panels of B (first taken dark; {prediction.waves} {_waves(prediction)})",
        ylabel="row panels of A",
    )
    axes.locator_params(integer=True)
