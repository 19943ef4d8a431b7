"""Explorers to play with: ipywidgets, each beside a static figure that a saved notebook still shows."""

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ipywidgets as widgets
from IPython.display import display
from matplotlib.lines import Line2D

from . import compiling, guide, ledger, machine, plots, records, refusals, reveal, show, tiles, timing, traffic

# FLOP/byte, as powers of two, that the slider runs over: an addition of fp32 vectors is at 2**-3.6, a large product
# of fp16 matrices at 2**11
LOW, HIGH, STEP = -6.0, 13.0, 0.5
UNITS = {"fp16 with fp32 accumulation (tensor cores)": "fp16", "fp32 (ordinary arithmetic)": "fp32"}
SIZES = {f"{size} of DRAM traffic": count for size, count in (("1 MB", 1e6), ("100 MB", 1e8), ("1 GB", 1e9))}


@dataclass(frozen=True)
class Reading:
    """What the roofline says of one kernel: bound is "memory" or "compute", rate in FLOP/s, seconds for the size."""

    intensity: float
    bound: str
    rate: float
    seconds: float
    text: str


def read(intensity: float, unit: str, size: float, ceilings) -> Reading:
    """The roofline at one arithmetic intensity (FLOP/byte) for a kernel that moves size bytes of DRAM traffic."""
    roof = plots.compute_roof(ceilings, unit)
    rate = plots.attainable(intensity, ceilings, unit)
    ridge = roof / ceilings.copy
    bound = "memory" if intensity < ridge else "compute"
    seconds = intensity * size / rate
    number = plots.number
    text = (
        f"{number(intensity)} FLOP/byte in {unit}: {bound}-bound (the ridge is at {number(ridge)} FLOP/byte); "
        f"attainable {number(rate / 1e12)} TFLOP/s, {rate / roof:.0%} of the compute roof; "
        f"at least {number(seconds * 1e6)} µs for {number(size / 1e6)} MB of traffic, and no "
        f"kernel takes less than about {number(ceilings.empty_kernel_us)} µs."
    )
    return Reading(intensity, bound, rate, seconds, text)


def roofline(ceilings=None, peaks=None) -> None:
    """Show the roofline explorer: a slider of arithmetic intensity (arrow keys move it), the kind of arithmetic, the
    bytes moved, a live figure and what it means in words; and a static roofline for readers of the saved notebook.

    The container has the CSS class `roofline-explorer`, the line of words `roofline-readout`.
    """
    ceilings, peaks = ceilings or timing.ceilings(), peaks or plots.datasheet()
    if not plots.known(ceilings.copy):
        # before the first record there is still something to explore
        ceilings = timing.Ceilings(
            peaks.bytes_per_s, peaks.bytes_per_s, peaks.fp16_flops, peaks.fp32_flops, 2.0,
            f"rates of the {peaks.source}: no ceilings recorded yet",
        )  # fmt: skip
    explorer = Roofline(ceilings, peaks)
    display(explorer.static())
    display(explorer.box)


class Roofline:
    """The explorer's state: one figure, drawn once, in which only the marker and its drop line move."""

    def __init__(self, ceilings, peaks=None):
        self.ceilings, self.peaks = ceilings, peaks
        ends = [plots.Point("", 2.0**power, 1.0) for power in (LOW, HIGH)]
        self.figure = plots.roofline(ends, ceilings, peaks, title="Where does a kernel of this intensity stand?").figure
        self.axes = self.figure.axes[0]
        for line in list(self.axes.lines[-len(ends) :]):
            line.remove()
        self.figure.set_dpi(90)
        self.figure.draw_without_rendering()
        # the layout is done: keep it, so that a redraw is cheap and the picture never jumps
        self.figure.set_layout_engine("none")
        self.marker = Line2D([], [], marker="o", markersize=11, markeredgecolor="black", linestyle="none")
        self.drop = Line2D([], [], color="0.4", linewidth=1, linestyle=":")
        self.axes.add_line(self.drop)
        self.axes.add_line(self.marker)

        wide = {"description_width": "150px"}
        full = widgets.Layout(width="98%", max_width="680px")
        self.intensity = widgets.FloatLogSlider(
            value=1.0, base=2, min=LOW, max=HIGH, step=STEP, description="FLOP per byte", readout_format=".3g",
            style=wide, layout=full,
        )  # fmt: skip
        self.unit = widgets.Dropdown(options=UNITS, value="fp16", description="arithmetic", style=wide, layout=full)
        self.size = widgets.Dropdown(options=SIZES, value=1e8, description="bytes moved", style=wide, layout=full)
        self.picture = widgets.HTML()
        self.readout = widgets.HTML()
        self.readout.add_class("roofline-readout")
        self.box = widgets.VBox([self.intensity, self.unit, self.size, self.readout, self.picture])
        self.box.add_class("roofline-explorer")
        for control in (self.intensity, self.unit, self.size):
            control.observe(self.update, names="value")
        self.update()

    def update(self, _change=None) -> None:
        reading = read(self.intensity.value, self.unit.value, self.size.value, self.ceilings)
        color = plots.BLUE if self.unit.value == "fp16" else plots.VERMILION
        self.marker.set_data([reading.intensity], [reading.rate / 1e12])
        self.marker.set_color(color)
        self.drop.set_data([reading.intensity] * 2, [self.axes.get_ylim()[0], reading.rate / 1e12])
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png")
        image = base64.b64encode(buffer.getvalue()).decode()
        # an img of our own, since an alt text of Output's images is not rendered
        self.picture.value = f'<img style="max-width:100%" alt="{reading.text}" src="data:image/png;base64,{image}">'
        bound = f"{reading.bound}-bound"
        self.readout.value = f'<p role="status">{reading.text.replace(bound, f"<b>{bound}</b>", 1)}</p>'

    def static(self) -> show.Picture:
        """A few well-known operations on the same roofs, for a notebook that is read without a kernel."""
        n = 4096
        examples = [
            plots.Point("add, fp32", 1, 12),
            plots.Point("softmax, fp32", 5, 8),
            plots.Point(f"one-row product {n}×{n}, fp16", 2 * n * n, 2 * (n * n + 2 * n), unit="fp16"),
            plots.Point(f"product {n}³, fp16", 2 * n**3, 2 * 3 * n * n, unit="fp16"),
        ]
        return plots.roofline(examples, self.ceilings, self.peaks, title="Predictions on the measured roofs")


SIDES = (256, 512, 1024, 2048, 4096, 8192, 16384)
TILES = ((32, 32, 64), (64, 64, 64), (64, 128, 64), (128, 64, 64), (128, 128, 32), (128, 128, 64), (128, 256, 64),
         (256, 128, 64), (256, 256, 64))  # fmt: skip
GROUPS = (1, 2, 4, 8, 16, 32, 64)


def products(
    first: tiles.Product | None = None,
    measured: Mapping | None = None,
    measure: Callable | None = None,
    source=None,
    on: tiles.Card | None = None,
) -> None:
    """Show the tile picture: choose a product, its tiles, stages and grouping; see the order of the launch, what L2
    serves, shared memory and the bytes that `helpers.tiles` predicts, beside those that were counted.

        explore.products(measured={tiles.Product(4096, 4096, 4096, group=8): figures["gemm.read.group8"].value})

    first: the product to begin with. measured: the bytes that were counted, by product, as `plots.launch` takes them;
    each can be chosen by name. measure: a function of a product that counts (`traffic.measured` with `given`), behind
    a button on a GPU. source: the `records.Figures` of `measured`. on: the card, `tiles.card()` by default. The
    container has the CSS class `tile-explorer`, the line of words `tile-readout`.
    """
    explorer = Products(first, measured, measure, source, on)
    display(explorer.static())
    display(explorer.box)


class Products:
    """The explorer's state: its controls, and what has been counted so far."""

    def __init__(self, first=None, measured=None, measure=None, source=None, on=None):
        self.on, self.source, self.measure = on or tiles.card(), source, measure
        self.measured = dict(measured or {})
        self.first = first or next(iter(self.measured), tiles.Product(4096, 4096, 4096))
        known = [self.first, *self.measured]

        def slider(options, extra, label):
            return widgets.SelectionSlider(
                options=sorted({*options, *extra}), description=label, style=wide, layout=full, continuous_update=False
            )

        wide, full = {"description_width": "150px"}, widgets.Layout(width="98%", max_width="680px")
        sides = {side: slider(SIDES, [getattr(p, side) for p in known], side.upper()) for side in "mnk"}
        shapes = {" × ".join(map(str, tile)): tile for tile in sorted({*TILES, *(p.tile for p in known)})}
        self.controls = sides | {
            "tile": widgets.Dropdown(options=shapes, description="tile of M × N × K", style=wide, layout=full),
            "group": slider(GROUPS, [p.group for p in known], "rows in a group"),
            "stages": slider((2, 3, 4, 5), [p.stages for p in known], "stages"),
        }
        named = {"": None} | {str(p): p for p in self.measured}
        self.choice = widgets.Dropdown(options=named, description="counted products", style=wide, layout=full)
        self.button = widgets.Button(description="Count on this GPU", tooltip="Nsight Compute: about 10 seconds")
        self.readout, self.picture = widgets.HTML(), widgets.HTML()
        self.readout.add_class("tile-readout")
        shown = [*self.controls.values(), self.readout, self.picture]
        if self.measured:
            shown.insert(0, self.choice)
        if measure and machine.gpu():
            shown.insert(-2, self.button)
        self.box = widgets.VBox(shown)
        self.box.add_class("tile-explorer")
        self.choose(self.first)
        for control in self.controls.values():
            control.observe(self.update, names="value")
        self.choice.observe(lambda change: change["new"] and self.choose(change["new"]), names="value")
        self.button.on_click(self.count)
        self.update()

    @property
    def product(self) -> tiles.Product:
        """What the controls say; warps are those of the first product that was counted with this tile, or 8."""
        chosen = {name: control.value for name, control in self.controls.items()}
        alike = (p.warps for p in (self.first, *self.measured) if p.tile == chosen["tile"])
        return tiles.Product(**chosen, warps=next(alike, 8))

    def choose(self, product: tiles.Product) -> None:
        """Set the controls to `product`."""
        self.still = True  # one update for all of them
        for name, control in self.controls.items():
            control.value = getattr(product, name)
        self.still = False
        self.update()

    def update(self, _change=None) -> None:
        if self.still:
            return
        picture = self.drawn(self.product)
        buffer = io.BytesIO()
        picture.figure.savefig(buffer, format="png")
        image = base64.b64encode(buffer.getvalue()).decode()
        self.picture.value = f'<img style="max-width:100%" alt="{picture.text}" src="data:image/png;base64,{image}">'
        self.readout.value = f'<p role="status">{picture.text}</p>'

    def count(self, _button=None) -> None:
        """Count the bytes of the product that is shown, and show them."""
        self.button.disabled, product = True, self.product
        try:
            self.measured[product] = self.measure(product)
        except machine.NotReady as missing:  # no permission to count
            self.readout.value = f'<p role="status">{missing}</p>'
        else:
            self.update()
        finally:
            self.button.disabled = False

    def drawn(self, product: tiles.Product) -> show.Picture:
        counted = self.measured.get(product)
        prediction = tiles.predict(product, self.on, warm=counted is not None)
        return plots.launch(prediction, counted, source=self.source if counted is not None else None)

    def static(self) -> show.Picture:
        """The first product, for a notebook that is read without a kernel."""
        return self.drawn(self.first)


@dataclass(frozen=True)
class Step:
    """One rung of a ladder of kernels, as `rungs` shows it.

    name: "05 register_tile_2d". part: which of the ladder's parts, "fp32 on CUDA cores". idea: one line. fraction: of
    the library's speed, a figure. loop: `reveal.hot_loop` of its SASS. counters: of its run, where they were recorded.
    """

    name: str
    part: str
    idea: str
    fraction: records.Measurement
    loop: reveal.Loop | None = None
    counters: traffic.Counters | None = None


def rungs(steps: Sequence[Step], whole: str = "cuBLAS", source=None) -> None:
    """Show the ladder of kernels: choose a rung (arrow keys move along it); see its figure among the others, its idea,
    what the hardware counted, and the loop of machine code where its time goes; and the ladder as a static figure.

        explore.rungs([explore.Step(str(r), "fp32 on CUDA cores", r.idea, figures["gemm.cuda_ladder.01"], loop, seen)])

    whole: what the figures are parts of. source: the `records.Figures` they came from. The container has the CSS class
    `ladder-explorer`, the lines of words `ladder-readout`.
    """
    explorer = Rungs(steps, whole, source)
    display(explorer.static())
    display(explorer.box)


class Rungs:
    """The explorer's state: the slider over the rungs, and what is shown of the one it stands on."""

    def __init__(self, steps: Sequence[Step], whole: str = "cuBLAS", source=None):
        self.steps, self.whole, self.source = {step.name: step for step in steps}, whole, source
        wide, full = {"description_width": "60px"}, widgets.Layout(width="98%", max_width="680px")
        self.choice = widgets.SelectionSlider(
            options=list(self.steps), description="rung", style=wide, layout=full, continuous_update=False
        )
        self.readout, self.picture, self.code = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.readout.add_class("ladder-readout")
        self.box = widgets.VBox([self.choice, self.readout, self.picture, self.code])
        self.box.add_class("ladder-explorer")
        self.choice.observe(self.update, names="value")
        self.update()

    def update(self, _change=None) -> None:
        step = self.steps[self.choice.value]
        picture = self.drawn(step.name)
        buffer = io.BytesIO()
        picture.figure.savefig(buffer, format="png")
        image = base64.b64encode(buffer.getvalue()).decode()
        self.picture.value = f'<img style="max-width:100%" alt="{picture.text}" src="data:image/png;base64,{image}">'
        first, *more = (html.escape(sentence) for sentence in self.sentences(step))
        items = "".join(f"<li>{sentence}</li>" for sentence in more)
        self.readout.value = f'<div role="status"><p>{first}</p><ul>{items}</ul></div>'
        loop = step.loop.text if step.loop else ""
        self.code.value = show.code(loop, "SASS", mark=reveal.MULTIPLIES, caption=f"Hot loop of {step.name}").html

    def sentences(self, step: Step) -> list[str]:
        """What is known of a rung, in words: its figure and idea, what was counted, what its hot loop is made of."""
        figure = step.fraction
        part = f"{plots.number(figure.value)} of {self.whole}" if plots.known(figure.value) else "not recorded yet"
        counted = step.counters.sentences() if step.counters else ["Counters: not recorded yet."]
        return [
            f"{step.name}: {part}. {step.idea[:1].upper()}{step.idea[1:]}",
            *counted,
            f"Hot loop: {step.loop or 'none'}.",
        ]

    def drawn(self, chosen: str = "") -> show.Picture:
        steps = [(step.name, step.part, step.fraction) for step in self.steps.values()]
        return plots.ladder(steps, self.whole, "The ladder", chosen, self.source)

    def static(self) -> show.Picture:
        """The ladder, for a notebook that is read without a kernel."""
        return self.drawn()


def choose(answers: Mapping[str, str] | None = None) -> None:
    """Show the decision guide: seven questions, and the rung that `guide.RULES` advise, why, on what evidence, and what
    would change it; and the rules as a static flowchart.

    answers: the first ones, by question; the others begin with their first answer. Sliders take the keyboard (Tab,
    arrows left and right). The container has the CSS class `guide-form`, the answer `guide-readout`.
    """
    form = Guide(answers)
    display(form.static())
    display(form.box)


class Guide:
    """The form's state: a slider a question; the advice follows each change."""

    def __init__(self, answers: Mapping[str, str] | None = None):
        first = {name: next(iter(question.answers)) for name, question in guide.QUESTIONS.items()} | dict(answers or {})
        # sliders, since JupyterLab keeps a list's arrow keys up and down to itself, and letters are its commands
        self.controls = {
            name: widgets.SelectionSlider(
                options=[(text, answer) for answer, text in question.answers.items()],
                value=first[name],
                readout=False,
                layout=widgets.Layout(width="98%", max_width="420px"),
            )
            for name, question in guide.QUESTIONS.items()
        }
        self.words = {name: widgets.HTML() for name in self.controls}
        self.readout, self.evidence = widgets.HTML(), widgets.HTML()
        self.readout.add_class("guide-readout")
        asked = [widget for name, control in self.controls.items() for widget in (self.words[name], control)]
        room = widgets.Layout(padding="0 8px")  # a handle at a slider's end reaches beyond it
        self.box = widgets.VBox([*asked, self.readout, self.evidence], layout=room)
        self.box.add_class("guide-form")
        for control in self.controls.values():
            control.observe(self.update, names="value")
        self.update()

    @property
    def answers(self) -> dict[str, str]:
        return {name: control.value for name, control in self.controls.items()}

    def update(self, _change=None) -> None:
        for name, answer in self.answers.items():
            question = guide.QUESTIONS[name]
            self.words[name].value = f"{html.escape(question.text)} <b>{html.escape(question.answers[answer])}</b>"
        advice = guide.decide(self.answers)
        first, *more = (html.escape(sentence) for sentence in advice.sentences())
        items = "".join(f"<li>{sentence}</li>" for sentence in more)
        self.readout.value = f'<div role="status"><p><b>{first}</b></p><ul>{items}</ul></div>'
        self.evidence.value = advice.table().html

    def static(self) -> show.Picture:
        """The rules as a flowchart, for a notebook that is read without a kernel."""
        return guide.flowchart()


STEPS = {
    "": None,
    "h * 1.5 + 0.5": lambda h, x, w: h * 1.5 + 0.5,
    "gelu(h)": lambda h, x, w: functional().gelu(h, approximate="tanh"),
    "h + x": lambda h, x, w: h + x,
    "h.t()": lambda h, x, w: h.t(),
    "roll(h, 1, 0)": lambda h, x, w: h.roll(1, 0),
    "h - h.mean(-1, keepdim=True)": lambda h, x, w: h - h.mean(-1, keepdim=True),
    "softmax(h, -1)": lambda h, x, w: h.softmax(-1),
    "softmax(h, 0)": lambda h, x, w: h.softmax(0),
    "h @ w": lambda h, x, w: h @ w,
    "cumsum(h, -1)": lambda h, x, w: h.cumsum(-1),
    "sort(h, -1)": lambda h, x, w: h.sort(-1).values,
}
"""What the fusion explorer can put in a row: `h`, at first x, becomes each in turn; x, h, w are (4096, 4096), fp16."""

SIDE, LENGTH, MOST_LAUNCHES = 4096, 5, 9
EXAMPLES = (
    ("h * 1.5 + 0.5", "gelu(h)", "h + x"),
    ("h.t()", "gelu(h)", "h + x"),
    ("h * 1.5 + 0.5", "softmax(h, -1)", "gelu(h)"),
    ("h * 1.5 + 0.5", "softmax(h, 0)", "gelu(h)"),
    ("h @ w", "gelu(h)"),
    ("gelu(h)", "h @ w", "h + x", "softmax(h, -1)"),
    ("h - h.mean(-1, keepdim=True)", "softmax(h, -1)", "cumsum(h, -1)"),
    ("gelu(h)", "sort(h, -1)", "h + x"),
)
"""The rows of its static figure."""
LAUNCHED = ("Triton, pointwise", "Triton, reduction", "library call", "a kernel of PyTorch's own (ATen)")
"""The commonest kinds of launches, which keep their colours."""


def functional():
    """torch.nn.functional, looked up when a step runs: this module is imported where torch is not needed yet."""
    import torch

    return torch.nn.functional


def fusion(first: Sequence[str] = EXAMPLES[5]) -> None:
    """Show the fusion explorer: put expressions in a row, predict how many launches they become, and ask Inductor,
    who shows its nodes, in which launch each ended, its reasons and its kernels; and as a static figure some examples.

    first: the expressions to begin with, of `STEPS`. Dropdowns, slider and button take the keyboard (Tab, arrows,
    space). In CPU mode the code is written for an H200 that is not here. The container has the CSS class
    `fusion-explorer`, the lines of words `fusion-readout`.
    """
    explorer = Fusion(first)
    display(explorer.static())
    display(explorer.box)


class Fusion:
    """The explorer's state: the expressions chosen, the reader's prediction, and what Inductor made of those asked."""

    def __init__(self, first: Sequence[str] = EXAMPLES[5]):
        self.known: dict[tuple[str, ...], compiling.Fused] = {}
        wide, full = {"description_width": "150px"}, widgets.Layout(width="98%", max_width="680px")
        chosen = [*first, *[""] * (LENGTH - len(first))]
        self.steps = [
            widgets.Dropdown(options=list(STEPS), value=step, description=f"step {i}: h =", style=wide, layout=full)
            for i, step in enumerate(chosen, 1)
        ]
        self.guess = widgets.IntSlider(
            value=1, min=1, max=MOST_LAUNCHES, description="launches, predicted", style=wide, layout=full
        )
        self.button = widgets.Button(description="Ask Inductor", tooltip="compiles, without running anything")
        self.readout, self.picture, self.nodes, self.code = (widgets.HTML() for _ in range(4))
        self.readout.add_class("fusion-readout")
        shown = [*self.steps, self.guess, self.button, self.readout, self.picture, self.nodes, self.code]
        self.box = widgets.VBox(shown)
        self.box.add_class("fusion-explorer")
        for control in self.steps:
            control.observe(self.clear, names="value")
        self.button.on_click(self.ask)
        self.clear()

    @property
    def chosen(self) -> tuple[str, ...]:
        """The expressions in a row, without the empty ones."""
        return tuple(step.value for step in self.steps if step.value)

    def clear(self, _change=None) -> None:
        """Another row was chosen: what is shown of the last one goes, so that the next is predicted first."""
        row = "; ".join(f"h = {html.escape(step)}" for step in self.chosen) or "nothing: choose a step"
        self.readout.value = f'<p role="status">h = x; {row}. Predict the launches, then ask.</p>'
        self.picture.value = self.nodes.value = self.code.value = ""
        self.button.disabled = not self.chosen

    def ask(self, _button=None) -> None:
        """Compile the row, and hold it beside the prediction."""
        self.button.disabled = True
        try:
            made = self.made(self.chosen)
        except refusals.CannotCompile as refused:
            self.readout.value = f'<p role="status">{html.escape(str(refused))}</p>'
            return
        finally:
            self.button.disabled = False
        first, *more = (html.escape(sentence) for sentence in self.sentences(made))
        items = "".join(f"<li>{sentence}</li>" for sentence in more)
        self.readout.value = f'<div role="status"><p>{first}</p><ul>{items}</ul></div>'
        picture = self.drawn([self.chosen], "What is launched")
        buffer = io.BytesIO()
        picture.figure.savefig(buffer, format="png")
        image = base64.b64encode(buffer.getvalue()).decode()
        self.picture.value = f'<img style="max-width:100%" alt="{picture.text}" src="data:image/png;base64,{image}">'
        self.nodes.value = show.table(made.rows(), caption="Inductor's nodes, and the group that each ended in").html
        mark = r"tl\.load|tl\.store"
        self.code.value = show.code(ledger.kernels(made.made.code), "Triton", mark=mark, caption="Kernels").html

    def made(self, row: tuple[str, ...]) -> compiling.Fused:
        """What Inductor makes of a row, compiled once. Raises `refusals.CannotCompile`."""
        if row not in self.known:
            import torch

            steps = [STEPS[step] for step in row]

            def chain(x, w):
                h = x
                for step in steps:
                    h = step(h, x, w)
                return h

            device = machine.pick(gpu="cuda", cpu="meta")
            tensors = [torch.empty(SIDE, SIDE, dtype=torch.float16, device=device) for _ in "xw"]
            self.known[row] = compiling.fused(chain, *tensors, arch=machine.pick(gpu=None, cpu="sm_90"))
        return self.known[row]

    def sentences(self, made: compiling.Fused) -> list[str]:
        """The prediction beside what came out, launch by launch, and why nodes stayed apart."""
        launches = made.launches
        predicted, count = self.guess.value, len(launches)
        verdict = "as you predicted" if predicted == count else f"you predicted {predicted}"
        said = [f"{count} launch{'es' * (count != 1)}, {verdict}."]
        for launch in launches:
            moved = "" if launch.reads is None else f", {(launch.reads + launch.writes) / 1e6:.0f} MB"
            said.append(f"{kind(launch)}: {launch.name}{moved}.")
        return said + [f"Groups {why}." for why in made.apart]

    def drawn(self, rows: Sequence[tuple[str, ...]], title: str) -> show.Picture:
        """Launches side by side, as wide as the bytes that they move; a call that tells none is drawn as one pass."""
        spans, said = [], []
        for row in rows:
            at = 0.0
            for launch in self.made(row).launches:
                one = 2e-6 * 2 * SIDE * SIDE
                size = one if launch.reads is None else max((launch.reads + launch.writes) / 1e6, one / 8)
                spans.append(plots.Span(" → ".join(row), kind(launch), at, at + size))
                at += size
            kinds = ", ".join(map(kind, self.made(row).launches))
            said.append(f"{' → '.join(row)}: {kinds}, {at:.0f} MB in all")
        title = f"{title}, {SIDE} × {SIDE}, fp16"
        picture = plots.timeline(spans, "MB", title, xlabel="bytes read and written (MB)", order=LAUNCHED)
        return show.Picture(picture.figure, f"{title}. {'; '.join(said)}.")

    def static(self) -> show.Picture:
        """Some rows that the reader may try, for a notebook that is read without a kernel."""
        return self.drawn(EXAMPLES, "Launches that Inductor makes of a row of expressions")


def kind(launch: ledger.Launch) -> str:
    """What carries a launch out, in words."""
    if launch.kind != "Triton":
        return {"library": "library call", "ATen": "a kernel of PyTorch's own (ATen)"}.get(launch.kind, launch.kind)
    if launch.copies:
        return "Triton, a copy"
    names = {"poi": "pointwise", "red": "reduction", "per": "reduction", "spl": "scan", "tem": "template"}
    return f"Triton, {names.get(launch.name.split('_')[1], 'other')}"
