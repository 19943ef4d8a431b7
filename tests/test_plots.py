"""Charts say in words what they draw, from the same data, and refuse what cannot be compared."""

import base64
import io
import math
import re
from types import SimpleNamespace

import pytest
from matplotlib.text import Text

import helpers  # noqa: F401  (decides the mode before triton is imported)
from helpers import explore, machine, plots, reveal, traffic
from helpers.records import Figures, Measurement

CEILINGS = SimpleNamespace(copy=4e12, read=4.1e12, fp16_matmul=640e12, fp32_matmul=48e12, empty_kernel_us=2.0)
H200 = machine.DATASHEETS["NVIDIA H200"]


def us(value, spread=0.01):
    return Measurement(value, "us", value * (1 - spread), value * (1 + spread), 30)


def texts_inside(figure) -> None:
    """Every text lies within the picture, as it is saved."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        low, high = sorted(axes.get_ylim())
        ticks = [t for t in axes.get_yticklabels() if low <= t.get_position()[1] <= high]
        for text in [*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label, *ticks]:
            box = text.get_window_extent(renderer)
            if text.get_text():
                assert box.x0 >= -1 and box.x1 <= figure.bbox.width + 1, text.get_text()
                assert box.y0 >= -1 and box.y1 <= figure.bbox.height + 1, text.get_text()


def test_a_point_knows_its_intensity_its_roof_and_its_rate():
    add = plots.Point("add", flops=1e6, bytes=12e6, time=us(4.0))
    assert add.intensity == pytest.approx(1 / 12)
    assert add.attainable(CEILINGS) == pytest.approx(4e12 / 12)
    assert add.rate(CEILINGS) == pytest.approx(1e6 / 4e-6)
    product = plots.Point("product", 2 * 4096**3, 6 * 4096**2, unit="fp16")
    assert product.attainable(CEILINGS) == product.rate(CEILINGS) == 640e12


def test_roofline_describes_each_point_from_the_data():
    points = [
        plots.Point("add", 1e6, 12e6, us(6.0)),
        plots.Point("product", 2 * 4096**3, 6 * 4096**2, us(250), "fp16"),
        plots.Point("guess", 1, 1),
        plots.Point("unknown", 1, 1, us(math.nan)),
    ]
    picture = plots.roofline(points, CEILINGS, H200)
    assert "add: 0.0833 FLOP/byte, memory-bound, 0.167 of 0.333 attainable TFLOP/s (50%)." in picture.text
    assert "product: 1365 FLOP/byte, compute-bound, 550 of 640 attainable TFLOP/s (86%)." in picture.text
    assert "guess: 1 FLOP/byte, memory-bound, predicted 4 TFLOP/s." in picture.text
    assert "unknown: 1 FLOP/byte, memory-bound, not recorded yet." in picture.text
    assert "Datasheet: 4.8 TB/s, 989 and 67 TFLOP/s." in picture.text
    drawn = [text.get_text() for text in picture.figure.axes[0].texts]
    assert {"add", "product", "guess"} <= set(drawn) and "unknown" not in drawn
    texts_inside(picture.figure)


def test_names_of_crowded_points_do_not_cover_each_other():
    points = [plots.Point(f"softmax number {i}", 5e6, 8e6, us(4 + i / 10)) for i in range(5)]
    figure = plots.roofline(points, CEILINGS).figure
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    boxes = [Text.get_window_extent(t, renderer) for t in figure.axes[0].texts if t.get_text().startswith("softmax")]
    assert len(boxes) == 5
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_an_unknown_compute_roof_is_refused():
    with pytest.raises(ValueError, match="fp8"):
        plots.attainable(1.0, CEILINGS, "fp8")


def test_traffic_compares_with_the_least_and_names_the_floor():
    seen = SimpleNamespace(read=70_000_000, written=80_000_000, total=150_000_000)
    rows = [plots.Moved("linear", 75e6, measured=seen), plots.Moved("copy", 8e6, requested=8e6)]
    picture = plots.traffic(rows, CEILINGS)
    assert "linear: least 75 MB, measured 150 MB = 2.00× least, floor 18.8 µs at copy bandwidth." in picture.text
    assert "copy: least 8 MB, requested 8 MB = 1.00× least, floor 2 µs at copy bandwidth." in picture.text
    # three bars were counted and two floors drawn: nothing is drawn that was not counted
    axes = picture.figure.axes[0]
    assert sorted(round(bar.get_width()) for bar in axes.patches) == [8, 8, 75, 150]
    assert len(axes.lines) == 2
    texts_inside(picture.figure)


def test_bars_of_two_units_are_refused():
    with pytest.raises(ValueError, match="TB/s, us"):
        plots.bars({"a": us(1), "b": Measurement.exact(1.0, "TB/s")})
    with pytest.raises(ValueError, match="TB/s, us"):
        plots.bars({"a": us(1)}, floor=Measurement.exact(1.0, "TB/s"))


def test_bars_name_the_best_only_where_quartiles_are_apart():
    apart = plots.bars({"x": us(10), "y": us(20)})
    assert "lower is better" in apart.text and apart.text.endswith("Best: x.")
    close = plots.bars({"x": us(10), "y": us(10.1)})
    assert close.text.endswith("x and y are not told apart: their quartiles overlap.")
    rates = {"x": Measurement(1, "TB/s", 0.9, 1.1, 9), "y": Measurement(3, "TB/s", 2.9, 3.1, 9)}
    assert plots.bars(rates).text.endswith("Best: y.")


def test_a_bar_beyond_the_floor_is_not_called_the_best():
    assert plots.bars({"warm": us(3), "cold": us(8)}, floor=5.0).text.endswith("Beyond the dashed line: warm.")
    rates = {"x": Measurement(6, "TB/s", 5.9, 6.1, 9), "y": Measurement(3, "TB/s", 2.9, 3.1, 9)}
    assert plots.bars(rates, floor=4.8).text.endswith("Beyond the dashed line: x.")


def test_bars_show_a_missing_record_as_missing_and_the_source_of_the_others():
    missing = Measurement(math.nan, "", math.nan, math.nan, 0, "not recorded yet")
    figures = Figures({"a.long.identifier": us(10), "b": missing}, False, "NVIDIA H200, 2026-11-29, torch 2.13")
    picture = plots.bars(figures, "Softmax", labels={"a.long.identifier": "Triton"}, floor=us(8))
    assert "Triton 10 (quartiles 9.9 to 10.1); b not recorded yet; floor 8" in picture.text
    assert "recorded: NVIDIA H200, 2026-11-29" in picture.text
    assert len([patch for patch in picture.figure.axes[0].patches if patch.get_width()]) == 1
    texts_inside(picture.figure)
    assert "not recorded yet" in plots.bars({"b": missing}).text


def test_lines_describe_ends_and_extremes():
    series = {"torch": [(256, us(4)), (512, us(2)), (4096, us(9))], "none": [(256, us(math.nan))]}
    picture = plots.lines(series, "columns", "µs", marks={"floor": 1.5})
    expected = "torch goes from 4 at 256 to 9 at 4k (least 2 at 512, most 9 at 4k); none not recorded yet"
    assert expected in picture.text and "dashed line floor at 1.5" in picture.text
    texts_inside(picture.figure)


def test_a_search_tells_each_step_of_its_best():
    picture = plots.search([None, 3.0, 3.5, math.nan, 1.25, 1.24], [2, 5], "times the least", "rmsnorm", "the least")
    assert picture.text == (
        "rmsnorm. 4 of 6 answers passed; best so far, times the least: 3 from answer 2; 1.25 from answer 5."
    )
    texts_inside(picture.figure)
    assert plots.search([None], [], "x").text == "0 of 1 answers passed; best so far, x: none."


@pytest.mark.parametrize(
    ("value", "printed"),
    [(0.0833333, "0.0833"), (1234.5, "1234"), (4.0, "4"), (989e12, "9.89e+14"), (100, "100")],
)
def test_numbers_are_printed_to_three_digits(value, printed):
    assert plots.number(value) == printed


def test_reading_the_roofline():
    low = explore.read(1.0, "fp16", 4e6, CEILINGS)
    assert (low.bound, low.rate, low.seconds) == ("memory", 4e12, pytest.approx(1e-6))
    high = explore.read(1600.0, "fp16", 4e6, CEILINGS)
    assert (high.bound, high.rate, high.seconds) == ("compute", 640e12, pytest.approx(1e-5))
    assert explore.read(100.0, "fp32", 4e6, CEILINGS).bound == "compute"


def test_without_recorded_ceilings_nothing_is_made_up():
    empty = SimpleNamespace(copy=math.nan, read=math.nan, fp16_matmul=math.nan, fp32_matmul=math.nan, where="")
    picture = plots.roofline([plots.Point("add", 1, 12)], empty)
    assert picture.text == "Roofline: this machine's ceilings are not recorded yet."


def test_a_timeline_says_who_was_busy_when():
    spans = [plots.Span("host", "launch", 0, 0.1), plots.Span("device", "kernel", 0.1, 30)]
    picture = plots.timeline(spans, marks={"stopwatch read": 0.2})
    assert "host: launch from 0 to 0.1; device: kernel from 0.1 to 30; stopwatch read at 0.2." in picture.text
    assert len(picture.figure.axes[0].patches) == 2
    texts_inside(picture.figure)


def test_a_sliver_that_takes_no_time_says_so():
    spans = [plots.Span("copies", "copy", t, t + 1e-6) for t in (1, 2)] + [plots.Span("unit", "product", 2, 9)]
    (legend,) = plots.timeline(spans).figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["copy (takes no time)", "product"]
    (legend,) = plots.timeline([*spans, plots.Span("copies", "copy", 3, 4)]).figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["copy", "product"]


def pixels(explorer) -> bytes:
    image = re.search(r'base64,([^"]+)"', explorer.picture.value).group(1)
    assert base64.b64decode(image).startswith(b"\x89PNG")
    return base64.b64decode(image)


def test_moving_the_slider_changes_picture_words_and_alt_text():
    explorer = explore.Roofline(CEILINGS, H200)
    before, words = pixels(explorer), explorer.readout.value
    assert "memory-bound" in words
    explorer.intensity.value *= 2**8
    assert pixels(explorer) != before
    assert "compute-bound" in explorer.readout.value and "compute-bound" in explorer.picture.value
    fp16 = pixels(explorer)
    explorer.unit.value = "fp32"
    assert pixels(explorer) != fp16


def test_the_browser_test_finds_the_explorer_by_its_classes():
    explorer = explore.Roofline(CEILINGS)
    assert "roofline-explorer" in explorer.box._dom_classes
    assert "roofline-readout" in explorer.readout._dom_classes


def test_the_static_roofline_can_be_saved():
    picture = explore.Roofline(CEILINGS, H200).static()
    buffer = io.BytesIO()
    picture.figure.savefig(buffer, format="png")
    assert buffer.tell() > 10_000 and "product 4096³, fp16" in picture.text
    texts_inside(picture.figure)


def ladder() -> list[explore.Step]:
    loop = reveal.Loop("0040  FFMA R1, R2, R3, R1\n0050  @P0 BRA 0x40")
    counted = traffic.Counters("f", "gemm", 9, 64, 50, 0, 80, 10**8, 10**7, 10**9, 0.1, (("issuing", 60.0),))
    part = Measurement(0.5, "of cuBLAS", 0.48, 0.52, 9)
    missing = Measurement(math.nan, "", math.nan, math.nan, 0, "not recorded yet")
    return [
        explore.Step("01 naive", "fp32", "one thread, <one> element.", part, loop, counted),
        explore.Step("10 wmma", "bf16", "fragments.", missing),
    ]


def test_a_ladder_is_told_by_its_parts():
    steps = [(step.name, step.part, step.fraction) for step in ladder()]
    picture = plots.ladder(steps, chosen="01 naive", title="GEMM")
    assert picture.text.startswith("GEMM: parts of cuBLAS, higher is better. fp32: 01 naive 0.5; bf16: 10 wmma not rec")
    assert len([p for p in picture.figure.axes[0].patches if p.get_height()]) == 2  # a bar and the frame of the chosen
    texts_inside(picture.figure)


@pytest.mark.parametrize("value", [0.93, 0.97, 0.999, 1.0, 1.04])
def test_no_label_of_a_ladder_is_struck_by_the_dashed_line(value):
    near = Measurement(value, "of cuBLAS", value, value, 9)
    figure = plots.ladder([("01 naive", "fp32", ladder()[0].fraction), ("16 walks", "bf16", near)]).figure
    axes = figure.axes[0]
    figure.canvas.draw()
    label = next(text for text in axes.texts if text.get_text() == f"{value:.2f}").get_window_extent()
    line = axes.transData.transform((0, 1))[1]
    assert not label.y0 <= line <= label.y1


def test_the_explorer_of_the_ladder_says_what_is_known_of_a_rung():
    explorer = explore.Rungs(ladder())
    said = explorer.readout.value
    assert 'role="status"' in said and "01 naive: 0.5 of cuBLAS. One thread, &lt;one&gt; element." in said
    assert "Occupancy 50%, 64 registers" in said and "Hot loop: 2 instructions: 1 FFMA, 1 BRA." in said
    assert "0040  FFMA" in explorer.code.value and "ladder-explorer" in explorer.box._dom_classes
    before = pixels(explorer)
    explorer.choice.value = "10 wmma"  # what an arrow key does
    assert pixels(explorer) != before and 'alt="The ladder: parts of cuBLAS' in explorer.picture.value
    assert "Counters: not recorded yet." in explorer.readout.value and "Hot loop: none." in explorer.readout.value
    assert "01 naive 0.5" in explorer.static().text


def test_the_fusion_explorer_holds_a_prediction_against_inductor():
    explorer = explore.Fusion(["gelu(h)", "h @ w"])
    assert "fusion-explorer" in explorer.box._dom_classes and "fusion-readout" in explorer.readout._dom_classes
    assert "h = x; h = gelu(h); h = h @ w. Predict" in explorer.readout.value and not explorer.code.value
    explorer.guess.value = 2  # what an arrow key does
    explorer.button.click()
    said = explorer.readout.value
    assert (
        'role="status"' in said
        and "2 launches, as you predicted." in said
        and "library call: extern_kernels.mm" in said
    )
    assert pixels(explorer) and 'alt="What is launched' in explorer.picture.value
    assert "buf0" in explorer.nodes.value and "gelu" in explorer.code.value
    explorer.steps[2].value = "softmax(h, 0)"  # another row: what was shown goes, so that it is predicted first
    assert not explorer.code.value and "softmax(h, 0)" in explorer.readout.value
    explorer.ask()
    assert "you predicted 2" in explorer.readout.value and "stay apart" in explorer.readout.value
    for step in explorer.steps:
        step.value = ""
    assert explorer.button.disabled and "nothing: choose a step" in explorer.readout.value


def test_every_step_of_the_fusion_explorer_compiles_and_the_static_figure_is_drawn():
    explorer = explore.Fusion()
    for step in filter(None, explore.STEPS):
        assert explorer.made((step,)).nodes or step == "h.t()", step
    picture = explorer.static()
    assert picture.text.count("→") > 8 and "library call" in picture.text and "MB" in picture.text
    texts_inside(picture.figure)
