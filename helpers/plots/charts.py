"""Bars and lines of measurements, and of the bytes that operations move."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import show
from .style import (
    BLACK,
    GREEN,
    MARKERS,
    MISSING,
    ORANGE,
    PALETTE,
    SKY,
    blank,
    byte_scale,
    known,
    known_or,
    number,
    size,
    source_of,
    unit_name,
    value_of,
)


@dataclass(frozen=True)
class Moved:
    """DRAM traffic of one operation, bytes of one call: the least it must move, what the program asked for, and what
    the counters saw (numbers or `traffic.Bytes`). None where that was not counted."""

    name: str
    least: float
    requested: object = None
    measured: object = None


def traffic(rows: Sequence[Moved], ceilings=None, title: str = "", source=None) -> show.Picture:
    """Horizontal bars per operation: least, requested and measured DRAM bytes, with the floor drawn as a line at the
    least. With ceilings, the floor also carries its time, least / copy bandwidth. source: the `records.Figures` that
    the measured bytes came from, named under the title."""
    rows = list(rows)
    kinds = (
        ("least", GREEN, "", lambda row: row.least),
        ("requested", SKY, "//", lambda row: value_of(row.requested)),
        ("measured", ORANGE, "..", lambda row: value_of(row.measured)),
    )
    counts = [[(kind, color, hatch, get(row)) for kind, color, hatch, get in kinds] for row in rows]
    counts = [[bar for bar in bars if bar[3] is not None] for bars in counts]
    height = 1.5 + 0.30 * sum(len(bars) + 1 for bars in counts)
    figure, axes = blank(title or "DRAM traffic of one call", height=height, source=source_of(source))
    widest = max([value for bars in counts for *_, value in bars if known(value)] + [row.least for row in rows])
    scale, unit = byte_scale(widest)
    y, ticks, said = 0.0, [], []
    for row, bars in zip(rows, counts, strict=True):
        top, words = y, []
        for kind, color, hatch, value in bars:
            counted = known(value)
            label = f"{number(value / scale)} {unit}" if counted else MISSING
            if counted and kind != "least":
                label += f" = {value / row.least:.2f}× least"
            axes.barh(
                y,
                value / scale if counted else 0,
                0.9,
                color=color,
                hatch=hatch,
                edgecolor="white",
                label=kind,
            )
            # beyond the floor's line too, where the bar ends just short of it
            end = max(value, row.least) if counted and value > 0.6 * row.least else value if counted else 0
            axes.annotate(label, (end / scale, y), (5, 0), textcoords="offset points", va="center",
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
    floor_label: str = "floor", better: str = "", source=None,
) -> show.Picture:  # fmt: skip
    """Horizontal bars of medians with whiskers over the interquartile range.

    figures: `records.Figures` or any mapping of name to `timing.Measurement`, all of one unit (ValueError otherwise).
    labels renames them for the reader; floor is a Measurement or number in the same unit, drawn as a dashed line;
    better is "lower" or "higher" (worked out from the unit when empty); source: the
    `records.Figures` that the bars came from, where `figures` is not those themselves.
    """
    items = list(figures.items())
    # a figure without a record has no unit either
    units = {m.unit for m in [*figures.values(), floor] if hasattr(m, "unit") and known(m.value)}
    if len(units) > 1:
        raise ValueError(f"Bars of one chart share a unit; these have {', '.join(sorted(units))}.")
    unit = unit_name(units.pop()) if units else MISSING
    better = better or ("lower" if unit in ("µs", "ms", "s", "ns", "MB", "GB", "bytes", "J") else "higher")
    limit = value_of(floor)
    where = source_of(source or figures)
    figure, axes = blank(title, height=1.4 + 0.45 * len(items), source=where)
    values = [measurement.value for _, measurement in items]
    highs = [max(known_or(measurement.high, measurement.value), measurement.value) for _, measurement in items]
    widest = max([high for high in highs if known(high)] + [limit if known(limit) else 0.0]) or 1.0
    names = [(labels or {}).get(name, name) for name, _ in items]
    said = []
    for y, (name, (_, measurement)) in enumerate(zip(names, items, strict=True)):
        if not known(measurement.value):
            axes.annotate(MISSING, (0, y), (5, 0), textcoords="offset points", va="center", color="0.35", fontsize=9)
            said.append(f"{name} {MISSING}")
            continue
        low = min(known_or(measurement.low, measurement.value), measurement.value)
        axes.barh(y, measurement.value, 0.65, color=PALETTE[y % len(PALETTE)])
        axes.errorbar(measurement.value, y, xerr=[[measurement.value - low], [highs[y] - measurement.value]],
                      color=BLACK, capsize=4, linewidth=1.4)  # fmt: skip
        across = known(limit) and 0 <= limit - highs[y] < widest / 10  # the label would stand on the dashed line
        axes.annotate(number(measurement.value), (limit if across else highs[y], y), (6, 0),
                      textcoords="offset points", va="center",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})  # fmt: skip
        said.append(f"{name} {number(measurement.value)} (quartiles {number(low)} to {number(highs[y])})")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel=f"{unit} ({better} is better)", xlim=(min([0, *filter(known, values)]), widest * 1.18))
    axes.set_ylim(len(names) - 0.4, -0.6)
    if known(limit):
        axes.axvline(limit, color=BLACK, linestyle="--", linewidth=1.3, label=f"{floor_label} {number(limit)} {unit}")
        figure.legend(loc="outside lower center", frameon=False)
        said.append(f"{floor_label} {number(limit)}")
    if where:
        said.append(where)
    heading = f"{title}: bars" if title else "Bars"
    text = f"{heading} in {unit}, {better} is better: {'; '.join(said)}.{_verdict(names, items, better, limit)}"
    return show.Picture(figure, text)


def ladder(
    steps: Sequence[tuple[str, str, object]], whole: str = "cuBLAS", title: str = "", chosen: str = "", source=None
) -> show.Picture:
    """Upright bars of the rungs of a ladder, as parts of `whole`, which is a dashed line at 1.

    steps: (name, part of the ladder, `timing.Measurement`), in order; the figures of one part are of one colour.
    chosen: the name of a rung that stands out. source: the `records.Figures` they came from.
    """
    where = source_of(source)
    figure, axes = blank(title, height=4.2, source=where)
    parts = list(dict.fromkeys(part for _, part, _ in steps))
    said = {part: [] for part in parts}
    top = max([1.0, *(m.high for *_, m in steps if known(m.high))])
    for x, (name, part, measurement) in enumerate(steps):
        color, hatch = PALETTE[parts.index(part) % len(PALETTE)], ("", "//", "..")[parts.index(part) % 3]
        there = known(measurement.value)
        bold = "bold" if name == chosen else "normal"
        if there:
            spread = [[measurement.value - known_or(measurement.low, measurement.value)],
                      [known_or(measurement.high, measurement.value) - measurement.value]]  # fmt: skip
            axes.bar(x, measurement.value, 0.75, color=color, hatch=hatch, edgecolor="white", label=part)
            if name == chosen:
                axes.bar(x, measurement.value, 0.75, fill=False, edgecolor=BLACK, linewidth=2.2)
            axes.errorbar(x, measurement.value, yerr=spread, color=BLACK, capsize=2, linewidth=1)
        # the label of a bar that ends just below the dashed line stands above that line
        across = there and 0 <= 1 - measurement.value < 0.06 * top
        axes.annotate(f"{measurement.value:.2f}" if there else "?",
                      (x, 1 if across else measurement.value if there else 0), (0, 5),
                      textcoords="offset points", ha="center", fontsize=8, fontweight=bold,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip
        said[part].append(f"{name} {number(measurement.value) if there else MISSING}")
    axes.axhline(1, color=BLACK, linestyle="--", linewidth=1.3, label=whole)
    names = [name.partition(" ")[0] if name[:1].isdigit() else name for name, *_ in steps]
    axes.set_xticks(range(len(steps)), names)
    for tick, (name, *_) in zip(axes.get_xticklabels(), steps, strict=True):
        tick.set_fontweight("bold" if name == chosen else "normal")
    axes.set(xlabel="rung", ylabel=f"part of {whole}", ylim=(0, top * 1.12), xlim=(-0.7, len(steps) - 0.3))
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=4, frameon=False)
    words = "; ".join(f"{part}: {', '.join(each)}" for part, each in said.items())
    text = f"{title or 'The ladder'}: parts of {whole}, higher is better. {words}."
    return show.Picture(figure, f"{text} {where}." if where else text)


def climb(points: Mapping[str, Sequence], rungs: Sequence[str], title: str = "", source=None) -> show.Picture:
    """The ladder at large: a line a workload, a mark a tool, by its time over the floor, which is a dashed line at 1.

    points: workload -> sequence of (tool, rung, `timing.Measurement` of the time over the floor). rungs: in the order
    of the ladder; each has its colour and its marker. source: the `records.Figures` they came from.
    """
    where = source_of(source)
    figure, axes = blank(title, height=1.9 + 0.5 * len(points), width=8.6, source=where)
    said, widest = [], 1.0
    for y, (workload, ways) in enumerate(points.items()):
        there = [(tool, rung, over) for tool, rung, over in ways if known(over.value)]
        widest = max([widest, *(over.value for *_, over in there)])
        axes.plot([1, max([1.0, *(over.value for *_, over in there)])], [y, y], color="0.85", linewidth=1.5, zorder=1)
        for _, rung, over in there:
            at = rungs.index(rung)
            # marks of one line would hide each other: each rung keeps to a height of its own
            axes.plot(over.value, y + 0.09 * (at - (len(rungs) - 1) / 2), MARKERS[at], color=PALETTE[at],
                      markersize=7.5, markeredgecolor="white", label=rung, zorder=2)  # fmt: skip
        words = ", ".join(f"{tool} ({rung}) {number(over.value)}" for tool, rung, over in there)
        absent = [tool for tool, _, over in ways if not known(over.value)]
        best = min(there, key=lambda way: way[2].value)[0] if there else ""
        words += f"; least: {best}" if len(there) > 1 else ""
        said.append(f"{workload}: {words}" + (f"; {MISSING}: {', '.join(absent)}" if absent else ""))
    axes.axvline(1, color=BLACK, linestyle="--", linewidth=1.3, label="floor")
    axes.set_yticks(range(len(points)), list(points))
    axes.set(xscale="log", xlabel="time over the floor (lower is better)", ylim=(len(points) - 0.5, -0.5))
    axes.set_xlim(0.8, widest * 1.25)
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100) if tick <= widest * 1.25]
    axes.set_xticks(ticks, [f"{number(tick)}×" for tick in ticks])
    axes.minorticks_off()
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    order = [name for name in (*rungs, "floor") if name in unique]
    figure.legend([unique[name] for name in order], order, loc="outside lower center", ncols=6, frameon=False)
    return show.Picture(figure, f"{title or 'The ladder'}: time over the floor, lower is better. {'. '.join(said)}.")


def _verdict(names, items, better, limit) -> str:
    """What the bars say together. A figure beyond the floor is no winner: it measured something else."""
    there = [(name, m) for name, (_, m) in zip(names, items, strict=True) if known(m.value)]
    beyond = [name for name, m in there if known(limit) and (m.high < limit if better == "lower" else m.low > limit)]
    if beyond:
        return f" Beyond the dashed line: {', '.join(beyond)}."
    if len(there) < 2:
        return ""
    there.sort(key=lambda pair: pair[1].value, reverse=better == "higher")
    (first, a), (second, b) = there[:2]
    apart = a.low > b.high if better == "higher" else a.high < b.low
    return f" Best: {first}." if apart else f" {first} and {second} are not told apart: their quartiles overlap."


def lines(
    series: Mapping[str, Sequence], xlabel: str, ylabel: str, title: str = "", xlog: bool = True, ylog: bool = False,
    marks: Mapping[str, float] | None = None, source=None,
) -> show.Picture:  # fmt: skip
    """Lines over a size, the interquartile range as a band.

    series: name -> sequence of (x, y), y a `timing.Measurement` or a number, in the unit that ylabel names.
    marks: label -> y of horizontal dashed lines (a floor, a peak). source: the `records.Figures` they came from.
    """
    where = source_of(source)
    figure, axes = blank(title, height=4.4, source=where)
    said, ends, xs = [], [], set()
    for index, (name, pairs) in enumerate(series.items()):
        pairs = sorted((pair for pair in pairs if known(value_of(pair[1]))), key=lambda pair: pair[0])
        if not pairs:
            said.append(f"{name} {MISSING}")
            continue
        x = [at for at, _ in pairs]
        y = [value_of(value) for _, value in pairs]
        xs.update(x)
        color = PALETTE[index % len(PALETTE)]
        # each line thinner than the one before, so that it does not hide one it coincides with
        width, marker = max(3.2 - 0.5 * index, 1.2), max(9 - index, 5)
        dashes = ("-", "--", "-.", ":")[index // len(PALETTE) % 4]
        axes.plot(x, y, dashes, color=color, marker=MARKERS[index % len(MARKERS)], linewidth=width,
                  markersize=marker, label=name)  # fmt: skip
        axes.fill_between(x, [known_or(getattr(v, "low", None), value_of(v)) for _, v in pairs],
                          [known_or(getattr(v, "high", None), value_of(v)) for _, v in pairs], color=color, alpha=0.2,
                          linewidth=0)  # fmt: skip
        ends.append((name, y))
        least, most = min(range(len(y)), key=y.__getitem__), max(range(len(y)), key=y.__getitem__)
        said.append(
            f"{name} goes from {number(y[0])} at {size(x[0])} to {number(y[-1])} at {size(x[-1])} "
            f"(least {number(y[least])} at {size(x[least])}, most {number(y[most])} at {size(x[most])})"
        )
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if xlog:
        axes.set_xscale("log", base=2)
        if 0 < len(xs) <= 12:
            axes.set_xticks(sorted(xs), [size(x) for x in sorted(xs)])
            axes.minorticks_off()
    if ylog:
        axes.set_yscale("log", subs=(2, 5))
        axes.yaxis.set_major_formatter(lambda value, _: number(value))
        axes.yaxis.set_minor_formatter(lambda value, _: number(value))
    else:
        every = [value for _, y in ends for value in y] + [value_of(at) for at in (marks or {}).values()]
        every = [value for value in every if known(value)] or [1.0]
        axes.set_ylim(min(0.0, *every), max(every) * 1.12)
    for label, at in (marks or {}).items():
        if known(value_of(at)):
            axes.axhline(value_of(at), color=BLACK, linestyle="--", linewidth=1.2)
            axes.annotate(f"{label} {number(value_of(at))}", (0, value_of(at)), (4, 3), textcoords="offset points",
                          xycoords=("axes fraction", "data"), fontsize=9)  # fmt: skip
            said.append(f"dashed line {label} at {number(value_of(at))}")
    axes.grid(True, color="0.9", linewidth=0.8)
    if ends:
        figure.legend(loc="outside lower center", ncols=min(3, len(ends)), frameon=False)
    if where:
        said.append(where)
    heading = f"{title}: lines" if title else "Lines"
    return show.Picture(figure, f"{heading} of {ylabel} over {xlabel}. {'; '.join(said)}.")


def search(
    tries: Sequence[float | None], kept: Sequence[int], ylabel: str, title: str = "", floor_label: str = ""
) -> show.Picture:
    """What a search tried, one after another, and the best so far: lower is better, and 1 is what it is set against.

    tries: of each the cost, or None where it was no answer; these are crosses at the foot. kept: the numbers, from 1,
    of those that were the best in turn. floor_label: what 1 is.
    """
    there = {i: cost for i, cost in enumerate(tries, 1) if known(cost)}
    failed = [i for i in range(1, len(tries) + 1) if i not in there]
    best = [(i, there[i]) for i in kept]
    figure, axes = blank(title, height=3.6)
    axes.plot(list(there), list(there.values()), "o", color=SKY, markersize=8, label="passed")
    axes.plot(failed, [0.0] * len(failed), "x", color=PALETTE[1], markersize=8, clip_on=False, label="did not")
    ends = [*best, *([(len(tries), best[-1][1])] if best else [])]
    axes.step([i for i, _ in ends], [cost for _, cost in ends], where="post", color=PALETTE[0], linewidth=2.4,
              label="best so far")  # fmt: skip
    axes.axhline(1.0, color=BLACK, linestyle="--", linewidth=1.2, label=floor_label or None)
    axes.set(xlabel="answer", ylabel=ylabel, xlim=(0.5, len(tries) + 0.5), ylim=(0, 1.15 * max([1.0, *there.values()])))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(True, color="0.9", linewidth=0.8)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    said = "; ".join(f"{number(cost)} from answer {i}" for i, cost in best) or "none"
    told = f"{len(there)} of {len(tries)} answers passed; best so far, {ylabel}: {said}."
    return show.Picture(figure, f"{title}. {told}" if title else told)
