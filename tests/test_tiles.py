"""The model of a product's launch order: cases counted by hand, its bounds, its picture, its explorer."""

import math
import time

import numpy as np
import pytest
import triton
import triton.language as tl

from helpers import explore, machine, plots, reveal, tiles, traffic
from helpers.tiles import Card, Product, predict
from tests.test_plots import texts_inside


def card(room: float, sms: int = 4) -> Card:
    """A card whose L2 keeps `room` bytes; each SM holds one program, for want of shared memory."""
    return Card("made up", sms, math.ceil(room / tiles.USABLE), 1, 1)


def small(**other) -> Product:
    """4 × 4 tiles of C; a row or column panel has 16 pieces of 512 bytes."""
    return Product(**{"m": 64, "n": 64, "k": 256, "tile": (16, 16, 16), "group": 1} | other)


PANEL = 16 * 512


def test_programs_take_the_rows_of_a_group_column_by_column():
    assert small(m=80, n=48, group=2).order().tolist() == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11], [12, 13, 14]]
    assert small(m=32, n=48, group=1).order().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert small(m=32, n=48, group=99).order().tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("group", [1, 3, 8, 100])
def test_every_tile_is_taken_once(group):
    product = Product(1000, 3000, 64, (64, 128, 32), group)
    order = product.order()
    assert order.shape == (16, 24) and sorted(order.ravel()) == list(range(384))
    assert order[tuple(product.places[17])] == 17


def test_bytes_that_a_product_needs_and_asks_for():
    product = Product(100, 60, 32, (64, 32, 16))  # 2 × 2 tiles
    assert (product.least.read, product.least.written) == (2 * 32 * 160, 2 * 100 * 60)
    assert product.requested == 2 * 32 * (100 * 2 + 60 * 2)
    assert product.shared_bytes == 3 * 16 * (64 + 32) * 2


@pytest.mark.parametrize("group", [1, 2, 4])
def test_where_everything_fits_the_least_is_read_and_written(group):
    prediction = predict(small(group=group), card(1 << 20))
    assert (prediction.a, prediction.b, prediction.written) == (4 * PANEL, 4 * PANEL, 64 * 64 * 2)
    warm = predict(small(group=group), card(1 << 20), warm=True)
    assert (warm.read, warm.written, warm.hits) == (0, 0, 1)


def test_without_an_l2_all_that_is_asked_for_is_read():
    product = Product(100, 60, 32, (64, 32, 16))
    prediction = predict(product, card(0))
    assert prediction.read == product.requested and prediction.hits == 0
    assert prediction.written == predict(product, card(0), warm=True).written == product.least.written


def test_an_l2_that_holds_one_step_shares_within_a_wave_only():
    """Row by row each wave of four programs reads one panel of A and all four of B; in groups of two, two and two."""
    rows, square = (predict(small(group=group), card(10 * 512)) for group in (1, 2))
    assert (rows.waves, rows.panels, rows.a, rows.b) == (4, (1, 4), 4 * PANEL, 16 * PANEL)
    assert (square.waves, square.panels, square.a, square.b) == (4, (2, 2), 8 * PANEL, 8 * PANEL)


def test_an_l2_that_holds_a_wave_keeps_what_the_next_one_shares():
    """All panels of B and one of A, and the tiles of C beside them: B is read once."""
    prediction = predict(small(), card(6 * PANEL))
    assert (prediction.a, prediction.b) == (4 * PANEL, 4 * PANEL)


def test_a_prediction_lies_between_the_least_and_what_is_asked_for():
    rng = np.random.default_rng(0)
    for _ in range(20):
        m, n, k = (int(x) for x in rng.integers(1, 3000, 3))
        product = Product(m, n, k, (64, 128, 32), group=int(rng.integers(1, 9)))
        prediction = predict(product, card(float(rng.integers(1, 1 << 22)), sms=int(rng.integers(1, 40))))
        assert product.least.read - 2 <= prediction.read <= product.requested + 2
        assert prediction.written == product.least.written
        assert prediction.wave.max() == prediction.waves - 1


# MB read from DRAM in one launch of the plain grouped product (fp16, three stages) on an H200: Nsight Compute 2025.3,
# triton 3.7.1, warm. {(shape, tile, warps, whether persistent): {group: MB}}
COUNTED = {
    ((4096, 4096, 4096), (128, 256, 64), 8, False): {1: 171.0, 2: 174.0, 4: 180.2, 8: 185.9, 16: 146.0, 32: 174.0},
    ((8192, 8192, 8192), (128, 256, 64), 8, False): {1: 2456.2, 4: 2369.8, 8: 1494.0, 16: 1225.4, 64: 2491.5},
    ((16384, 4096, 1024), (128, 256, 64), 8, False): {1: 33.8, 8: 38.7, 128: 227.4},
    ((4096, 4096, 4096), (128, 128, 64), 8, False): {1: 170.9, 8: 189.3, 32: 170.8},
    ((8192, 8192, 8192), (128, 128, 64), 8, False): {1: 3153.6, 8: 1460.2, 16: 1194.6},
    ((8192, 8192, 1024), (128, 256, 64), 8, False): {1: 36.7, 8: 93.9, 64: 50.7},
    ((4096, 4096, 16384), (128, 256, 64), 8, False): {1: 683.8, 8: 746.6},
    ((4096, 4096, 4096), (64, 64, 64), 4, False): {1: 282.0, 8: 284.9},
    ((8192, 8192, 8192), (128, 256, 64), 8, True): {8: 1506.1},
    ((4096, 4096, 4096), (128, 256, 64), 8, True): {8: 184.1},
}


def test_predictions_hold_against_counters():
    """What the module's docstring says of the model's error."""
    errors = []
    for (shape, tile, warps, persistent), counted in COUNTED.items():
        for group, mb in counted.items():
            programs = tiles.H200.sms if persistent else 0
            prediction = predict(Product(*shape, tile, group, warps=warps), tiles.H200, programs, warm=True)
            errors.append(abs(prediction.read / 1e6 / mb - 1))
    assert len(errors) == 29 and np.median(errors) < 0.01
    assert sum(error < 0.05 for error in errors) >= 29 * 0.65 and max(errors) < 2


def test_programs_that_an_sm_holds():
    assert Product(1, 1, 1, (128, 256, 64), stages=3, warps=8).programs_per_sm(tiles.H200) == 1
    assert Product(1, 1, 1, (128, 128, 64), stages=3, warps=8).programs_per_sm(tiles.H200) == 2
    assert Product(1, 1, 1, (64, 64, 64), stages=3, warps=4).programs_per_sm(tiles.H200) == 4
    assert predict(Product(4096, 4096, 64), tiles.H200).programs == 132
    assert predict(Product(4096, 4096, 64), tiles.H200, programs=7).waves == math.ceil(512 / 7)


def test_sizes_below_one_are_refused():
    for wrong in ({"m": 0}, {"group": 0}, {"tile": (16, 0, 16)}):
        with pytest.raises(ValueError, match="at least 1"):
            small(**wrong)


def test_large_products_are_predicted_quickly():
    began = time.monotonic()
    predict(Product(8192, 8192, 8192), tiles.H200)
    predict(Product(16384, 16384, 16384, (64, 64, 64), warps=4), tiles.H200)
    assert time.monotonic() - began < 10  # 0.5 s on an idle machine


@triton.jit
def tiled(a_ptr, b_ptr, o_ptr, n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, n, BK):
        k = start + tl.arange(0, BK)
        a, b = tl.load(a_ptr + i[:, None] * n + k[None, :]), tl.load(b_ptr + k[:, None] * n + j[None, :])
        total = tl.dot(a, b, total)
    tl.store(o_ptr + i[:, None] * n + j[None, :], total.to(tl.float16))


@pytest.mark.parametrize(("tile", "stages", "warps"), [((128, 256, 64), 3, 8), ((128, 128, 64), 3, 8)])
def test_shared_memory_is_what_the_compiler_takes(tile, stages, warps):
    types = {"a_ptr": "*fp16", "b_ptr": "*fp16", "o_ptr": "*fp16", "n": "i32:16"}
    constants = dict(zip(("BM", "BN", "BK"), tile, strict=True))
    made = reveal.triton(tiled, types, constants, "sm_90", num_warps=warps, num_stages=stages)
    product = Product(4096, 4096, 4096, tile, stages=stages, warps=warps)
    assert product.shared_bytes <= made.shared_bytes <= product.shared_bytes + 1024
    assert tiles.H200.registers_per_sm // (made.registers * 32 * warps) == product.programs_per_sm(tiles.H200)


def test_the_picture_says_what_it_shows():
    prediction = predict(Product(1024, 1000, 512, (128, 128, 64), group=4), tiles.H200)
    picture = plots.launch(prediction, traffic.Bytes(4_146_176, 2_048_000))
    assert "64 programs, 264 at once (NVIDIA H200), 1 wave. The first wave shares 8 of 8 row panels" in picture.text
    assert "at least 2.07 MB, predicted 2.07 MB (1 times the least; A 1.05, B 1.02)" in picture.text
    assert "Measured: 4.15 MB (2 times the least)." in picture.text
    assert "Shared memory of a program: 96 KB." in picture.text
    left, right = picture.figure.axes
    assert {t.get_text() for t in left.texts} == {str(i) for i in range(64)}
    assert [t.get_text() for t in right.get_yticklabels()] == ["least", "predicted", "measured"]
    texts_inside(picture.figure)
    big = plots.launch(predict(Product(8192, 8192, 8192, stages=5), tiles.H200), math.nan)
    assert "Measured: not recorded yet." in big.text and "240 KB, more than the 227 that a block may take" in big.text
    assert not big.figure.axes[0].texts
    texts_inside(big.figure)


def test_the_explorer_follows_its_controls_and_shows_what_was_counted():
    recorded = {Product(2048, 2048, 2048, group=4): 30e6, Product(1000, 2048, 64, group=3): math.nan}
    explorer = explore.Products(measured=recorded)
    assert explorer.product == next(iter(recorded))
    assert "Measured: 30 MB" in explorer.readout.value and 'role="status"' in explorer.readout.value
    assert 'src="data:image/png;base64,' in explorer.picture.value
    explorer.controls["group"].value = 1
    assert "groups of 1" in explorer.readout.value and "Measured" not in explorer.readout.value
    explorer.choice.value = list(recorded)[1]
    assert explorer.product == list(recorded)[1] and "Measured: not recorded yet" in explorer.readout.value
    assert "Measured: 30 MB" in explorer.static().text
    assert explorer.button not in explorer.box.children  # nothing can be counted here


def test_the_explorer_counts_on_a_gpu(monkeypatch):
    asked = []

    def count(product):
        asked.append(product)
        if product.group == 1:
            raise machine.NotReady("This account may not read the GPU's hardware counters.")
        return traffic.Bytes(40_000_000, 8_000_000)

    monkeypatch.setattr(machine, "gpu", lambda: True)
    explorer = explore.Products(Product(2048, 2048, 2048, group=4), measure=count, on=tiles.H200)
    assert explorer.button in explorer.box.children
    explorer.button.click()
    assert asked == [explorer.product] and "Measured: 40 MB" in explorer.readout.value
    explorer.controls["group"].value = 1
    explorer.button.click()
    assert "may not read" in explorer.readout.value and not explorer.button.disabled
