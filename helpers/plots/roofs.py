"""The roofline: kernels against the rates that this machine can sustain."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.text import Text
from matplotlib.transforms import Bbox

from .. import machine, records, show
from .style import BLACK, BLUE, MARKERS, MISSING, VERMILION, blank, known, number, source_of, value_of


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
        return self.attainable(ceilings) if self.time is None else self.flops / (value_of(self.time) * 1e-6)


def datasheet() -> machine.Peaks | None:
    """The datasheet rates of this GPU, or in CPU mode of the GPU whose records are shown; None for an unknown card."""
    if machine.gpu():
        return machine.here().peaks
    return machine.DATASHEETS.get(records.load()["machine"].get("gpu", "NVIDIA H200"))


def compute_roof(ceilings, unit: str) -> float:
    """FLOP/s of the measured compute roof: unit "fp16" (tensor cores) or "fp32"."""
    if unit not in ("fp16", "fp32"):
        raise ValueError(f'A roofline has the compute roofs "fp16" and "fp32", not {unit!r}.')
    return ceilings.fp16_matmul if unit == "fp16" else ceilings.fp32_matmul


def attainable(intensity: float, ceilings, unit: str) -> float:
    """min(compute roof, intensity x copy bandwidth), FLOP/s."""
    return min(compute_roof(ceilings, unit), intensity * ceilings.copy)


def roofline(points: Sequence[Point], ceilings, peaks=None, title: str = "") -> show.Picture:
    """Log-log roofline: measured roofs as solid lines, datasheet roofs dashed (where peaks is given), points named.

    ceilings: `timing.Ceilings` (bytes/s and FLOP/s); peaks: `machine.Peaks` or None.
    """
    points = list(points)
    where = source_of(ceilings)
    figure, axes = blank(title or "Roofline", height=5.0, source=where)
    if not known(ceilings.copy):
        axes.set_axis_off()
        return show.Picture(figure, f"Roofline: this machine's ceilings are {MISSING}.")
    ridge = ceilings.fp16_matmul / ceilings.copy
    low = min([point.intensity for point in points] + [ceilings.fp32_matmul / ceilings.copy]) / 3
    high = max([point.intensity for point in points] + [ridge * 4]) * 8
    top = max(ceilings.fp16_matmul, peaks.fp16_flops if peaks else 0) / 1e12 * 3
    rates = [rate for point in points if known(rate := point.rate(ceilings))]
    bottom = min(rates + [low * ceilings.copy]) / 1e12 / 2
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top))
    axes.set(xlabel="arithmetic intensity (FLOP per byte of DRAM traffic)", ylabel="rate (TFLOP/s)")
    axes.grid(True, which="major", color="0.9", linewidth=0.8)

    fp16 = f"fp16 matmul {number(ceilings.fp16_matmul / 1e12)} TFLOP/s"
    fp32 = f"fp32 {number(ceilings.fp32_matmul / 1e12)} TFLOP/s"
    slope = f"copy {number(ceilings.copy / 1e12)} TB/s"
    for rate, color, label in ((ceilings.fp16_matmul, BLUE, fp16), (ceilings.fp32_matmul, VERMILION, fp32)):
        start = rate / ceilings.copy
        axes.plot([start, high], [rate / 1e12] * 2, color=color, linewidth=2)
        axes.annotate(label, (high, rate / 1e12), (-4, -4), textcoords="offset points", color=color, ha="right",
                      va="top", fontsize=9.5)  # fmt: skip
    axes.plot([low, ridge], [low * ceilings.copy / 1e12, ceilings.fp16_matmul / 1e12], color=BLACK, linewidth=2)
    if peaks:
        edge = peaks.fp16_flops / peaks.bytes_per_s
        dashed = {"color": "0.45", "linewidth": 1.2, "linestyle": (0, (5, 3))}
        memory = [low * peaks.bytes_per_s / 1e12, peaks.fp16_flops / 1e12, peaks.fp16_flops / 1e12]
        axes.plot([low, edge, high], memory, **dashed)
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
        if not known(rate):
            continue
        color = BLUE if point.unit == "fp16" else VERMILION
        face = "white" if point.time is None else color
        axes.plot(point.intensity, rate / 1e12, MARKERS[index % len(MARKERS)], color=color, markerfacecolor=face,
                  markersize=8, markeredgewidth=1.6)  # fmt: skip
        named.append((point.name, (point.intensity, rate / 1e12)))
    # angles and free places are known only once the layout is
    figure.draw_without_rendering()
    # between the two ridges: few kernels are there
    middle = math.sqrt(ceilings.fp32_matmul / ceilings.copy * ridge)
    (x0, y0), (x1, y1) = axes.transData.transform(
        [(middle, middle * ceilings.copy / 1e12), (2 * middle, 2 * middle * ceilings.copy / 1e12)]
    )
    memory = axes.annotate(slope, (middle, middle * ceilings.copy / 1e12), (-5, 7), textcoords="offset points",
                           rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)), rotation_mode="anchor",
                           ha="center", va="bottom", fontsize=9.5)  # fmt: skip
    _place(figure, axes, named, taken=[*axes.texts[:-1], memory])
    text = _roofline_text(points, ceilings, peaks)
    return show.Picture(figure, f"{text} Ceilings: {where}." if where else text)


def _roofline_text(points, ceilings, peaks) -> str:
    parts = [
        f"Roofline. Measured roofs: memory {number(ceilings.copy / 1e12)} TB/s, fp16 tensor cores "
        f"{number(ceilings.fp16_matmul / 1e12)} TFLOP/s (reached above {number(ceilings.fp16_matmul / ceilings.copy)} "
        f"FLOP/byte), fp32 {number(ceilings.fp32_matmul / 1e12)} TFLOP/s (above "
        f"{number(ceilings.fp32_matmul / ceilings.copy)} FLOP/byte)."
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
        elif known(rate):
            parts.append(
                f"{where}, {number(rate / 1e12)} of {number(roof / 1e12)} attainable TFLOP/s ({rate / roof:.0%})."
            )
        else:
            parts.append(f"{where}, {MISSING}.")
    return " ".join(parts)


def _place(figure, axes, named, taken) -> None:
    """Write each name beside its point, at the first of a few places where it covers no other text and is inside."""
    renderer = figure.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    boxes = [text.get_window_extent(renderer) for text in taken]
    # markers and lines are in the way too: lines as a row of dots
    marks = [Bbox.from_bounds(x - 7, y - 7, 14, 14) for x, y in axes.transData.transform([at for _, at in named])]
    dots = []
    for line in axes.lines:
        corners = axes.transData.transform(line.get_xydata())
        for (x0, y0), (x1, y1) in zip(corners, corners[1:], strict=False):
            steps = max(2, int(math.hypot(x1 - x0, y1 - y0) / 3))
            dots += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1)]
    right = [(9, dy, "left") for dy in (-4, -15, 7, -28, 20, -41, -54, -67, 33)]
    left = [(-9, dy, "right") for dy in (7, -15, 20, 33, 46)]
    places = [
        *right[:3],
        *left[:2],
        (0, -22, "center"),
        (0, 12, "center"),
        *right[3:],
        *left[2:],
        (0, -34, "center"),
    ]
    for index, (name, at) in enumerate(named):
        fewest, best = None, None
        for dx, dy, side in places:
            leader = {"arrowstyle": "-", "color": "0.6", "shrinkA": 0} if abs(dy) > 16 else None
            text = axes.annotate(
                name, at, (dx, dy), textcoords="offset points", ha=side, fontsize=9.5, arrowprops=leader
            )
            # of the words alone, without the leader
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)
            hits = sum(box.overlaps(other) for other in boxes)
            hits += sum(box.overlaps(mark) for mark in marks[:index] + marks[index + 1 :])
            hits += 0.5 * any(box.contains(*dot) for dot in dots)
            hits += 5 * (box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1)
            if fewest is None or hits < fewest:
                if best is not None:
                    best.remove()
                fewest, best = hits, text
            else:
                text.remove()
            if fewest == 0:
                break
        boxes.append(Text.get_window_extent(best, renderer))
