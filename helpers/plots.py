"""The course's charts: roofline, memory traffic, bars with their spread, lines over a size.

Each function takes measured objects (`timing.Measurement`, `records.Figures`, `timing.Ceilings`, byte counts) and
returns a `show.Picture`: a matplotlib figure and a description in words that is generated from the same data.
Colours are Okabe and Ito's palette, told apart by readers who cannot tell red from green; hatches and markers repeat
what colour says. Figures are made without pyplot, so a notebook never shows one twice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from helpers import show

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
MARKERS = "osD^vPX"
MISSING = "not recorded yet"


@dataclass(frozen=True)
class Point:
    """One kernel on a roofline: what it must do, and how long it took.

    flops and bytes count the work of one call; time is a `timing.Measurement` in µs (or a number of µs), or None for
    a kernel that is only predicted: it is then drawn, hollow, on its roof. unit names the compute roof that applies:
    "fp16" (tensor cores, fp16 in and fp32 accumulation) or "fp32" (ordinary arithmetic).
    """

    name: str
    flops: float
    bytes: float
    time: object = None
    unit: str = "fp32"

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOP per byte."""
        return self.flops / self.bytes

    def attainable(self, ceilings) -> float:
        """FLOP/s that the roofs allow at this intensity (Williams, Waterman and Patterson, 2009)."""
        return attainable(self.intensity, ceilings, self.unit)

    def rate(self, ceilings) -> float:
        """FLOP/s achieved, or attainable where no time is known."""
        return self.attainable(ceilings) if self.time is None else self.flops / (_value(self.time) * 1e-6)


@dataclass(frozen=True)
class Bytes:
    """DRAM traffic of one operation, bytes of one call: the least it must move, what the program asked for, and what
    the counters saw (a number or a `traffic.Measured`). None where that was not counted."""

    name: str
    least: float
    requested: float | None = None
    measured: object = None


def compute_roof(ceilings, unit: str) -> float:
    """FLOP/s of the measured compute roof: unit "fp16" (tensor cores) or "fp32"."""
    if unit not in ("fp16", "fp32"):
        raise ValueError(f'A roofline has the compute roofs "fp16" and "fp32", not {unit!r}.')
    return ceilings.fp16_matmul if unit == "fp16" else ceilings.fp32


def attainable(intensity: float, ceilings, unit: str) -> float:
    """min(compute roof, intensity x copy bandwidth), FLOP/s."""
    return min(compute_roof(ceilings, unit), intensity * ceilings.copy)


def roofline(points: Sequence[Point], ceilings, peaks=None, title: str = "") -> show.Picture:
    """Log-log roofline: measured roofs as solid lines, datasheet roofs dashed (where peaks is given), points named.

    ceilings: `timing.Ceilings` (copy in bytes/s, fp16_matmul and fp32 in FLOP/s); peaks: `machine.Peaks` or None.
    """
    points = list(points)
    figure, axes = _figure(title or "Roofline", height=5.0)
    ridge = ceilings.fp16_matmul / ceilings.copy
    low = min([point.intensity for point in points] + [ceilings.fp32 / ceilings.copy]) / 3
    high = max([point.intensity for point in points] + [ridge * 3]) * 3
    top = max(ceilings.fp16_matmul, peaks.fp16_flops if peaks else 0) / 1e12 * 3
    rates = [rate for point in points if _known(rate := point.rate(ceilings))]
    bottom = min(rates + [low * ceilings.copy]) / 1e12 / 2
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top))
    axes.set(xlabel="arithmetic intensity (FLOP per byte of DRAM traffic)", ylabel="rate (TFLOP/s)")
    axes.grid(True, which="major", color="0.9", linewidth=0.8)

    fp16 = f"fp16 tensor cores {number(ceilings.fp16_matmul / 1e12)} TFLOP/s"
    fp32 = f"fp32 {number(ceilings.fp32 / 1e12)} TFLOP/s"
    slope = f"copy {number(ceilings.copy / 1e12)} TB/s"
    for rate, color, label in ((ceilings.fp16_matmul, BLUE, fp16), (ceilings.fp32, VERMILION, fp32)):
        start = rate / ceilings.copy
        axes.plot([start, high], [rate / 1e12] * 2, color=color, linewidth=2)
        axes.annotate(label, (high, rate / 1e12), (-4, -4), textcoords="offset points", color=color, ha="right",
                      va="top")  # fmt: skip
    axes.plot([low, ridge], [low * ceilings.copy / 1e12, ceilings.fp16_matmul / 1e12], color=BLACK, linewidth=2)
    if peaks:
        edge = peaks.fp16_flops / peaks.bytes_per_s
        dashed = {"color": "0.45", "linewidth": 1.2, "linestyle": (0, (5, 3))}
        axes.plot([low, edge, high],
                  [low * peaks.bytes_per_s / 1e12, peaks.fp16_flops / 1e12, peaks.fp16_flops / 1e12], **dashed)  # fmt: skip
        axes.plot([peaks.fp32_flops / peaks.bytes_per_s, high], [peaks.fp32_flops / 1e12] * 2, **dashed)
        sheet = (
            f"datasheet (dashed): {number(peaks.bytes_per_s / 1e12)} TB/s, fp16 {number(peaks.fp16_flops / 1e12)}, "
            f"fp32 {number(peaks.fp32_flops / 1e12)} TFLOP/s"
        )
        axes.annotate(sheet, (0, 1), (6, -6), xycoords="axes fraction", textcoords="offset points", color="0.35",
                      ha="left", va="top", fontsize=9)  # fmt: skip

    named = []
    for index, point in enumerate(points):
        rate = point.rate(ceilings)
        if not _known(rate):
            continue
        color = BLUE if point.unit == "fp16" else VERMILION
        face = "white" if point.time is None else color
        axes.plot(point.intensity, rate / 1e12, MARKERS[index % len(MARKERS)], color=color, markerfacecolor=face,
                  markersize=8, markeredgewidth=1.6)  # fmt: skip
        named.append((point.name, (point.intensity, rate / 1e12)))
    # angles and free places are known only once the layout is
    figure.draw_without_rendering()
    middle = math.sqrt(low * (ceilings.fp32 / ceilings.copy))
    (x0, y0), (x1, y1) = axes.transData.transform(
        [(middle, middle * ceilings.copy / 1e12), (2 * middle, 2 * middle * ceilings.copy / 1e12)]
    )
    memory = axes.annotate(slope, (middle, middle * ceilings.copy / 1e12), (-5, 7), textcoords="offset points",
                           rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)), rotation_mode="anchor",
                           ha="center", va="bottom")  # fmt: skip
    _place(figure, axes, named, taken=[*axes.texts[:-1], memory])
    return show.Picture(figure, _roofline_text(points, ceilings, peaks))


def _roofline_text(points, ceilings, peaks) -> str:
    parts = [
        f"Roofline. Measured roofs: memory {number(ceilings.copy / 1e12)} TB/s, fp16 tensor cores "
        f"{number(ceilings.fp16_matmul / 1e12)} TFLOP/s (reached above {number(ceilings.fp16_matmul / ceilings.copy)} "
        f"FLOP/byte), fp32 {number(ceilings.fp32 / 1e12)} TFLOP/s (above "
        f"{number(ceilings.fp32 / ceilings.copy)} FLOP/byte)."
    ]
    if peaks:
        parts.append(
            f"Datasheet: {number(peaks.bytes_per_s / 1e12)} TB/s, {number(peaks.fp16_flops / 1e12)} and "
            f"{number(peaks.fp32_flops / 1e12)} TFLOP/s."
        )
    for point in points:
        roof = point.attainable(ceilings)
        bound = "compute" if roof >= compute_roof(ceilings, point.unit) else "memory"
        where = f"{point.name}: {number(point.intensity)} FLOP/byte, {bound}-bound"
        rate = point.rate(ceilings)
        if point.time is None:
            parts.append(f"{where}, predicted {number(roof / 1e12)} TFLOP/s.")
        elif _known(rate):
            parts.append(
                f"{where}, {number(rate / 1e12)} of {number(roof / 1e12)} attainable TFLOP/s "
                f"({rate / roof:.0%})."
            )
        else:
            parts.append(f"{where}, {MISSING}.")
    return " ".join(parts)


def traffic(rows: Sequence[Bytes], ceilings=None, title: str = "") -> show.Picture:
    """Horizontal bars per operation: least, requested and measured DRAM bytes, with the floor drawn as a line at the
    least. With ceilings, the floor also carries its time, least / copy bandwidth."""
    rows = list(rows)
    kinds = (
        ("least", GREEN, "", lambda row: row.least),
        ("requested", SKY, "//", lambda row: row.requested),
        ("measured", ORANGE, "..", lambda row: _value(row.measured)),
    )
    counts = [[(kind, color, hatch, get(row)) for kind, color, hatch, get in kinds] for row in rows]
    counts = [[bar for bar in bars if bar[3] is not None] for bars in counts]
    height = 1.5 + 0.30 * sum(len(bars) + 1 for bars in counts)
    figure, axes = _figure(title or "DRAM traffic of one call", height=height)
    widest = max([value for bars in counts for *_, value in bars if _known(value)] + [row.least for row in rows])
    scale, unit = _byte_scale(widest)
    y, ticks, said = 0.0, [], []
    for row, bars in zip(rows, counts, strict=True):
        top, words = y, []
        for kind, color, hatch, value in bars:
            known = _known(value)
            label = f"{number(value / scale)} {unit}" if known else MISSING
            if known and kind != "least":
                label += f" = {value / row.least:.2f}× least"
            axes.barh(y, value / scale if known else 0, 0.9, color=color, hatch=hatch, edgecolor="white", label=kind)
            axes.annotate(label, (value / scale if known else 0, y), (5, 0), textcoords="offset points", va="center",
                          fontsize=9)  # fmt: skip
            words.append(f"{kind} {label}")
            y += 1
        axes.plot([row.least / scale] * 2, [top - 0.6, y - 0.4], color=BLACK, linestyle="--", linewidth=1.3,
                  label="floor")  # fmt: skip
        if ceilings is not None:
            words.append(f"floor {number(row.least / ceilings.copy * 1e6)} µs at copy bandwidth")
        ticks.append(((top + y - 1) / 2, row.name))
        said.append(f"{row.name}: {', '.join(words)}.")
        y += 0.8
    names = [
        name if ceilings is None else f"{name}\nfloor {number(row.least / ceilings.copy * 1e6)} µs"
        for (_, name), row in zip(ticks, rows, strict=True)
    ]
    axes.set_yticks([at for at, _ in ticks], names)
    axes.set(xlabel=f"DRAM bytes of one call ({unit})", xlim=(0, widest / scale * 1.38), ylim=(y - 0.7, -1.0))
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=4, frameon=False)
    return show.Picture(figure, "DRAM traffic. " + " ".join(said))


def bars(
    figures: Mapping, title: str = "", labels: Mapping[str, str] | None = None, floor=None,
    floor_label: str = "floor", better: str = "",
) -> show.Picture:  # fmt: skip
    """Horizontal bars of medians with whiskers over the interquartile range.

    figures: `records.Figures` or any mapping of name to `timing.Measurement`, all of one unit (ValueError otherwise).
    labels renames them for the reader; floor is a Measurement or number in the same unit, drawn as a dashed line;
    better is "lower" or "higher" (worked out from the unit when empty).
    """
    items = list(figures.items())
    units = {measurement.unit for _, measurement in items} | (
        {floor.unit} if getattr(floor, "unit", None) else set()
    )
    if len(units) != 1:
        raise ValueError(f"Bars of one chart share a unit; these have {', '.join(sorted(units)) or 'none'}.")
    unit = _unit(units.pop())
    better = better or ("lower" if unit in ("µs", "ms", "s", "ns", "MB", "GB", "bytes", "J") else "higher")
    limit = _value(floor)
    figure, axes = _figure(title, height=1.4 + 0.45 * len(items))
    values = [measurement.value for _, measurement in items]
    highs = [max(_or(measurement.high, measurement.value), measurement.value) for _, measurement in items]
    widest = max([high for high in highs if _known(high)] + [limit if _known(limit) else 0.0]) or 1.0
    names = [(labels or {}).get(name, name) for name, _ in items]
    said = []
    for y, (name, (_, measurement)) in enumerate(zip(names, items, strict=True)):
        if not _known(measurement.value):
            axes.annotate(MISSING, (0, y), (5, 0), textcoords="offset points", va="center", color="0.35", fontsize=9)
            said.append(f"{name} {MISSING}")
            continue
        low = min(_or(measurement.low, measurement.value), measurement.value)
        axes.barh(y, measurement.value, 0.65, color=PALETTE[y % len(PALETTE)])
        axes.errorbar(measurement.value, y, xerr=[[measurement.value - low], [highs[y] - measurement.value]],
                      color=BLACK, capsize=4, linewidth=1.4)  # fmt: skip
        axes.annotate(number(measurement.value), (highs[y], y), (6, 0), textcoords="offset points", va="center")
        said.append(
            f"{name} {number(measurement.value)} (quartiles {number(low)} to {number(highs[y])})"
        )
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel=f"{unit} ({better} is better)", xlim=(min(0, *values, 0) if _known(min(values)) else 0, widest * 1.18))
    axes.set_ylim(len(names) - 0.4, -0.6)
    if _known(limit):
        axes.axvline(limit, color=BLACK, linestyle="--", linewidth=1.3, label=f"{floor_label} {number(limit)} {unit}")
        figure.legend(loc="outside lower center", frameon=False)
        said.append(f"{floor_label} {number(limit)}")
    heading = f"{title}: bars" if title else "Bars"
    return show.Picture(figure, f"{heading} in {unit}, {better} is better: {'; '.join(said)}.{_best(names, items, better)}")


def _best(names, items, better) -> str:
    known = [(name, m) for name, (_, m) in zip(names, items, strict=True) if _known(m.value)]
    if len(known) < 2:
        return ""
    known.sort(key=lambda pair: pair[1].value, reverse=better == "higher")
    (first, a), (second, b) = known[:2]
    apart = a.low > b.high if better == "higher" else a.high < b.low
    return f" Best: {first}." if apart else f" {first} and {second} are not told apart: their quartiles overlap."


def lines(
    series: Mapping[str, Sequence], xlabel: str, ylabel: str, title: str = "", xlog: bool = True, ylog: bool = False,
    marks: Mapping[str, float] | None = None,
) -> show.Picture:  # fmt: skip
    """Lines over a size, the interquartile range as a band.

    series: name -> sequence of (x, y), y a `timing.Measurement` or a number, in the unit that ylabel names.
    marks: label -> y of horizontal dashed lines (a floor, a peak).
    """
    figure, axes = _figure(title, height=4.4)
    said, ends, xs = [], [], set()
    for index, (name, pairs) in enumerate(series.items()):
        pairs = sorted((pair for pair in pairs if _known(_value(pair[1]))), key=lambda pair: pair[0])
        if not pairs:
            said.append(f"{name} {MISSING}")
            continue
        x = [at for at, _ in pairs]
        y = [_value(value) for _, value in pairs]
        xs.update(x)
        color = PALETTE[index % len(PALETTE)]
        axes.plot(x, y, color=color, marker=MARKERS[index % len(MARKERS)], linewidth=1.8, markersize=6, label=name,
                  linestyle=("-", "--", "-.", ":")[index // len(PALETTE) % 4])  # fmt: skip
        axes.fill_between(x, [_or(getattr(v, "low", None), _value(v)) for _, v in pairs],
                          [_or(getattr(v, "high", None), _value(v)) for _, v in pairs], color=color, alpha=0.2,
                          linewidth=0)  # fmt: skip
        ends.append((name, y))
        least, most = min(range(len(y)), key=y.__getitem__), max(range(len(y)), key=y.__getitem__)
        said.append(
            f"{name} goes from {number(y[0])} at {number(x[0])} to {number(y[-1])} at {number(x[-1])} "
            f"(least {number(y[least])} at {number(x[least])}, most {number(y[most])} at {number(x[most])})"
        )
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if xlog:
        axes.set_xscale("log", base=2)
        if 0 < len(xs) <= 12:
            axes.set_xticks(sorted(xs), [_size(x) for x in sorted(xs)])
            axes.minorticks_off()
    if ylog:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min([0.0] + [value for _, y in ends for value in y]))
    for label, at in (marks or {}).items():
        if _known(_value(at)):
            axes.axhline(_value(at), color=BLACK, linestyle="--", linewidth=1.2)
            axes.annotate(f"{label} {number(_value(at))}", (0, _value(at)), (4, 3), textcoords="offset points",
                          xycoords=("axes fraction", "data"), fontsize=9)  # fmt: skip
            said.append(f"dashed line {label} at {number(_value(at))}")
    axes.grid(True, color="0.9", linewidth=0.8)
    if ends:
        figure.legend(loc="outside lower center", ncols=min(3, len(ends)), frameon=False)
    heading = f"{title}: lines" if title else "Lines"
    return show.Picture(figure, f"{heading} of {ylabel} over {xlabel}. {'; '.join(said)}.")


def _figure(title: str, height: float, width: float = 7.6):
    figure = Figure(figsize=(width, height), dpi=100, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor="white")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    return figure, axes


def _place(figure, axes, named, taken) -> None:
    """Write each name beside its point, at the first of a few places where it covers no other text and is inside."""
    renderer = figure.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    boxes = [text.get_window_extent(renderer) for text in taken]
    # a marker is an obstacle too
    marks = [axes.transData.transform(at) for _, at in named]
    places = [(9, -4, "left"), (9, -15, "left"), (9, 7, "left"), (-9, 7, "right"), (-9, -15, "right"),
              (0, -22, "center"), (0, 12, "center"), (9, -28, "left"), (9, 20, "left"), (-9, 20, "right")]  # fmt: skip
    for index, (name, at) in enumerate(named):
        fewest, best = None, None
        for dx, dy, side in places:
            text = axes.annotate(name, at, (dx, dy), textcoords="offset points", ha=side, fontsize=9.5)
            box = text.get_window_extent(renderer)
            hits = sum(box.overlaps(other) for other in boxes)
            hits += sum(box.contains(*mark) for mark in marks[:index] + marks[index + 1 :])
            hits += 5 * (box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1)
            if fewest is None or hits < fewest:
                if best is not None:
                    best.remove()
                fewest, best = hits, text
            else:
                text.remove()
            if fewest == 0:
                break
        boxes.append(best.get_window_extent(renderer))


def _value(thing):
    """The number in a Measurement, the DRAM bytes in a traffic.Measured, or the number itself."""
    if thing is None or isinstance(thing, (int, float)):
        return thing
    if hasattr(thing, "read_bytes"):
        return thing.read_bytes + thing.written_bytes
    return thing.value


def _known(number) -> bool:
    return number is not None and math.isfinite(number)


def _or(number, otherwise):
    return number if _known(number) else otherwise


def _unit(unit: str) -> str:
    return {"us": "µs"}.get(unit, unit)


def number(value: float) -> str:
    """Three significant digits, never an exponent between 0.001 and a million."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "not known"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _size(value: float) -> str:
    """256, 4k, 1M: powers of two as people say them."""
    for step, suffix in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if value >= step and value % step == 0:
            return f"{int(value // step)}{suffix}"
    return number(value)


def _byte_scale(most: float) -> tuple[float, str]:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if most >= scale:
            return scale, unit
    return 1.0, "bytes"
