"""Lab 06, Triton: from one tile that is turned to a matrix product with its epilogue, and what an autotuner tries."""

from functools import lru_cache
from math import ceil, floor, inf, sqrt

import torch

from .. import records
from . import Case, Exercise, Limit, far, padded, spaced, turned

LAB = "06_triton_matmul"
HALF = torch.float16
FAR_BYTES = 5 * 2**30
"""What a case with `far` rows of float16 needs on a GPU."""


def _of_products(*matrices):
    """|a| @ |b|: a sum that happens to be near 0 is not more exact for it."""
    return matrices[0].abs() @ matrices[1].abs()


# --- tile-transpose --------------------------------------------------------------------------------------------

TILE = 32
"""Edge of the tile that the course's answer turns; shorter runs of neighbouring elements waste parts of sectors."""


def _tile_transpose(x):
    return x.mT


def _judge_turned(inputs, outputs, facts):
    if facts["contiguous"] or facts["views"]:  # of x: its memory, which has a finding of its own
        return []
    said = "The result is not contiguous: its values lie in memory as those of x do, and only the strides are turned."
    return [("forbidden", said)]


def _sectors_in_tiles(x):
    """32-byte sectors that a load of x and a store of its transpose touch, in runs of `TILE` elements."""

    def touched(lines, length):  # a run may begin in the middle of a sector, and then ends in one more
        return lines * (ceil(length * x.element_size() / 32) + ceil(length / TILE))

    rows, cols = x.shape
    return touched(rows, cols) + touched(cols, rows)


def _matrix(rows, cols, dtype=torch.float32, put=lambda x: x):
    return lambda draw: (put(draw(rows, cols, dtype=dtype)),)


TILE_TRANSPOSE = Exercise(
    name="tile-transpose",
    lab=LAB,
    rung="triton",
    entry="tile_transpose",
    title="Turn a matrix, tile by tile",
    form="kernel",
    made_of="triton",
    reference=_tile_transpose,
    judge=_judge_turned,
    cases=(
        Case("tiles that end inside the matrix, both ways", _matrix(70, 45), seen=True),
        Case("exactly 2 × 3 tiles, float16", _matrix(64, 96, HALF)),
        Case("one element more than a tile, both ways", _matrix(33, 33)),
        Case("a single element", _matrix(1, 1)),
        Case("one row", _matrix(1, 101)),
        Case("one column, float16", _matrix(77, 1, HALF)),
        Case("no row", _matrix(0, 5)),
        Case("small integers, compared exactly", _matrix(59, 83), kind="integers", exact=True),
        Case("rows further apart than they are long", _matrix(41, 100, HALF, put=padded), kind="outliers"),
        Case("the last row lies beyond element 2**31", _matrix(3, 70, HALF, put=far), memory_bytes=FAR_BYTES),
        Case("4001 × 3000, float16", _matrix(4001, 3000, HALF), mode="gpu"),
    ),
    limits=(
        Limit(
            "bytes",
            lambda x: 2 * x.numel() * x.element_size(),
            "too-many-bytes",
            "The kernel asks for {fact} bytes; {most} are enough where each element is read once and written once.",
        ),
        Limit(
            "sectors",
            _sectors_in_tiles,
            "too-many-bytes",
            "The kernel's loads and stores touch {fact} sectors of 32 bytes, and {most} are enough: some access takes "
            "single elements, or a few, out of each sector.",
        ),
    ),
    hints=(
        "Write down which rows and columns of x one program reads, and which rows and columns of y it writes. "
        "An element at (row, column) of x: where does it lie in y, counted in elements from y's start?",
        "Two blocks of numbers are enough: `row`, the tile's rows, and `col`, its columns. The tile that is read has "
        "row down and col across. Turned by `tl.trans`, it has col down and row across, and so must the addresses and "
        "the mask of the store have.",
        "row = program along rows · TILE + 0 … TILE - 1; col likewise. tile = load x at row[:, None] · x_stride + "
        "col[None, :] where both lie inside. store y at col[:, None] · rows + row[None, :] the turned tile, where both "
        "lie inside. row in 64 bits before it is multiplied.",
    ),
    hints_for={
        "too-many-bytes": (
            "The values are right. Take the tile of one program: how many neighbouring elements of x does it read from "
            "each row, and how many neighbouring elements of y does it write in each row?",
            "A tile that is a row of x is a column of y: each of its elements lies in a sector of its own. A tile of "
            "TILE × TILE has runs of TILE elements on both sides.",
        ),
    },
)


LOW = "bfloat16"
"""Of sums in float32: float16 would overflow far from zero, and then say nothing. Tensor cores keep fewer bits than
float32 while they add (4e-6 of a long sum far from zero on an H200), which is no fault of an answer."""


# --- one-dot ---------------------------------------------------------------------------------------------------


def _dot_tile(a, b, c):
    return c + a @ b.mT


def _one_tile(m, n, k):
    return lambda draw: (draw(m, k, dtype=HALF), draw(n, k, dtype=HALF), draw(m, n))


ONE_DOT = Exercise(
    name="one-dot",
    lab=LAB,
    rung="triton",
    entry="dot_tile",
    title="One product of two tiles",
    form="kernel",
    made_of="triton",
    dtype=torch.float32,
    reference=_dot_tile,
    low=LOW,
    scale=lambda a, b, c: c.abs() + a.abs() @ b.abs().mT,
    multiplied=0,
    cases=(
        Case("16 × 32, summed over 64", _one_tile(16, 32, 64), seen=True),
        Case("the smallest tile: 16 × 16 × 16", _one_tile(16, 16, 16)),
        Case("a square tile, where a wrong transpose still fits", _one_tile(64, 64, 64)),
        Case("tall: 128 × 16", _one_tile(128, 16, 32)),
        Case("wide: 16 × 128", _one_tile(16, 128, 16)),
        Case("a long sum: 32 × 16 over 256", _one_tile(32, 16, 256)),
        Case("small integers, compared exactly", _one_tile(32, 64, 128), kind="integers", exact=True),
        Case("far from zero", _one_tile(16, 64, 32), kind="offset"),
        Case("with outliers", _one_tile(64, 16, 64), kind="outliers"),
    ),
    limits=(
        Limit(
            "bytes",
            lambda a, b, c: 2 * (a.numel() + b.numel()) + 8 * c.numel(),
            "too-many-bytes",
            "The kernel asks for {fact} bytes; {most} are enough where each element is read or written once.",
        ),
    ),
    hints=(
        "`tl.dot` takes a tile of (M, K) and a tile of (K, N). Which shape does the tile of b have when you load it "
        "as it lies in memory?",
        "Either load b as it lies, (N, K), and turn it with `tl.trans`, or let its addresses do that: a tile whose "
        "element (k, n) is read from row n and column k of b. The third argument of `tl.dot` is what the product is "
        "added to; it is float32, and so is the result.",
        "m, n, k = 0 … M - 1, 0 … N - 1, 0 … K - 1. a at m[:, None] · K + k[None, :]; b at n[None, :] · K + "
        "k[:, None]; c at m[:, None] · N + n[None, :]. y = dot(a, b, c), stored where c was read.",
    ),
)


# --- k-loop ----------------------------------------------------------------------------------------------------


def _long_dot(a, b):
    return a @ b


def _long(m, n, k, put=lambda x: x):
    return lambda draw: (put(draw(m, k, dtype=HALF)), put(draw(k, n, dtype=HALF)))


K_LOOP = Exercise(
    name="k-loop",
    lab=LAB,
    rung="triton",
    entry="long_dot",
    title="A sum longer than a tile",
    form="kernel",
    made_of="triton",
    dtype=torch.float32,
    core=True,
    reference=_long_dot,
    low=LOW,
    scale=_of_products,
    multiplied=0,
    cases=(
        Case("a sum over 100: three tiles and a tail", _long(16, 32, 100), seen=True),
        Case("exactly four tiles", _long(32, 16, 128)),
        Case("one element more than a tile", _long(16, 16, 33)),
        Case("shorter than a tile", _long(32, 32, 7)),
        Case("a sum over one element", _long(16, 64, 1)),
        Case("a sum over nothing", _long(16, 16, 0)),
        Case("small integers, compared exactly", _long(64, 32, 75), kind="integers", exact=True),
        Case("rows further apart than they are long", _long(32, 16, 61, put=padded)),
        Case("a long sum far from zero", _long(16, 16, 700), kind="offset"),
        Case("a long sum with outliers", _long(32, 64, 500), kind="outliers"),
        Case("a very long sum", _long(16, 16, 2500)),
        Case("the rows lie beyond element 2**31", _long(16, 16, 40, put=far), memory_bytes=2 * FAR_BYTES),
    ),
    hints=(
        "How many steps of BLOCK_K does the loop take, and which numbers of k does its last step stand for? Which of "
        "them exist?",
        "Start from a tile of zeros in float32 and let each step add a product to it. In the last step the lanes "
        "beyond K must load 0 on both sides: 0 · NaN is NaN, so a mask on one side alone is not enough.",
        "total = zeros (M, N) in float32. For start from 0 below K in steps of BLOCK_K: k = start + 0 … BLOCK_K - 1; "
        "a at m[:, None] · a_stride + k[None, :], 0 where k ≥ K; b at k[:, None] · b_stride + n[None, :], 0 where "
        "k ≥ K; total = dot(a, b, total). Store total. m and k in 64 bits where a stride multiplies them.",
    ),
    hints_for={
        "nan": (
            "Between the rows of a and b may lie anything. Which lanes of the last step read beyond the end of a row?",
            "Both loads need the mask, and a value for the lanes that it leaves out.",
        ),
        "precision": ("In which type are the products of all steps added up? The third argument of `tl.dot` decides.",),
    },
)


# --- any-matmul ------------------------------------------------------------------------------------------------


def _any_matmul(a, b):
    return a @ b


def _product(m, n, k, a=lambda x: x, b=lambda x: x):
    return lambda draw: (a(draw(m, k, dtype=HALF)), b(draw(k, n, dtype=HALF)))


def _inner(x):
    """The values of x as the middle of a larger matrix: a slice, whose storage begins before it and ends after it."""
    rows, cols = x.shape
    whole = torch.full((rows + 3, cols + 7), float("nan"), dtype=x.dtype)
    return whole[2 : 2 + rows, 3 : 3 + cols].copy_(x)


def _there_and_back(rows, cols, half):
    """a (rows, 2 half) and b (2 half, cols): a sum of products that passes 2**11 on its way and ends near 0, and so do
    the parts of it, wherever it is cut: each product and its opposite lie anywhere along k."""

    def inputs(draw):
        p, r = draw.integers(1, 64, rows, half), draw.integers(1, 64, half, cols)
        r_again = r.clone()
        r_again[0] += draw.integers(-1, 2, cols)
        order = draw.random.sample(range(2 * half), 2 * half)
        return torch.cat([p, -p], 1)[:, order].to(HALF), torch.cat([r, r_again], 0)[order].to(HALF)

    return inputs


def _far_turned(x):
    return far(x.mT).mT


def _very_far(x):
    return far(x, 2**31 * (x.shape[0] - 1))


ANY_MATMUL = Exercise(
    name="any-matmul",
    lab=LAB,
    rung="triton",
    entry="any_matmul",
    title="Any M, N and K, any strides",
    form="kernel",
    made_of="triton",
    core=True,
    reference=_any_matmul,
    scale=_of_products,
    multiplied=0,
    cases=(
        Case("sizes that end inside a tile", _product(70, 45, 50), seen=True),
        Case("a turned and b as it lies", _product(40, 33, 37, a=turned), seen=True),
        Case("both turned", _product(35, 66, 20, a=turned, b=turned)),
        Case("the middle of larger matrices", _product(33, 40, 65, a=_inner, b=_inner)),
        Case("every other column", _product(20, 34, 33, a=spaced, b=spaced)),
        Case("turned slices of rows that are padded", _product(36, 18, 40, a=lambda x: padded(x.mT).mT, b=padded)),
        Case("a power of two each way", _product(64, 32, 128)),
        Case("a single element", _product(1, 1, 1)),
        Case("one row", _product(1, 90, 31)),
        Case("one column", _product(75, 1, 17)),
        Case("nothing to sum", _product(5, 6, 0)),
        Case("no row", _product(0, 6, 5)),
        Case("no column", _product(7, 0, 5)),
        Case("small integers, compared exactly", _product(33, 34, 70), kind="integers", exact=True),
        Case("a long sum with outliers", _product(17, 20, 600), kind="outliers"),
        Case(
            "a far from zero",
            lambda draw: (draw(34, 9, dtype=HALF), draw(9, 19, dtype=HALF, kind="normal") / 16),
            "offset",
        ),
        Case("sums that grow to thousands and come back", _there_and_back(11, 13, 300), exact=True),
        Case("the rows of a lie beyond element 2**31", _product(3, 20, 18, a=far), memory_bytes=FAR_BYTES),
        Case("the columns of a lie beyond element 2**31", _product(20, 5, 3, a=_far_turned), memory_bytes=FAR_BYTES),
        Case("the rows of b lie beyond element 2**31", _product(9, 20, 3, b=far), memory_bytes=FAR_BYTES),
        Case("the columns of b lie beyond element 2**31", _product(9, 3, 20, b=_far_turned), memory_bytes=FAR_BYTES),
        Case("a stride that is itself beyond 2**31", _product(3, 9, 17, a=_very_far), memory_bytes=2 * FAR_BYTES),
        Case("1000 × 1100 × 700, both turned", _product(1000, 1100, 700, a=turned, b=turned), mode="gpu"),
    ),
    hints=(
        "Six sizes and strides of the inputs decide every address: M, N, K, and two strides each. Which of them does a "
        "kernel use that works for contiguous matrices only? And how many programs does a matrix of no rows need?",
        "An element (i, j) of a matrix lies at i · stride(0) + j · stride(1), whichever way it is stored. Each index "
        "has a mask of its own: rows below M, columns below N, k below K; a load needs the two of its tile. An index "
        "in 32 bits times a stride in 32 bits is a product in 32 bits.",
        "program = (tile row, tile column). rows, columns and k in 64 bits. Loop over k as before: a at "
        "rows[:, None] · stride_am + k[None, :] · stride_ak where rows < M and k < K, b at k[:, None] · stride_bk + "
        "columns[None, :] · stride_bn where k < K and columns < N, 0 elsewhere. Store total, as float16, where rows < "
        "M and columns < N.",
    ),
    hints_for={
        "out-of-bounds": (
            "The message names the tensor and how far outside it is. A few elements: a mask. Billions: an offset in 32 "
            "bits. What lies between: a stride that the kernel took for another.",
            "Make the index 64 bits wide before it is multiplied: tl.program_id(0).to(tl.int64), or rows.to(tl.int64).",
        ),
        "exception": (
            "With no row or no column there is no tile, and the size of a block, or a division, may "
            "break where a size is 0: what can the wrapper return without a launch?",
        ),
    },
)


# --- grouped-launch --------------------------------------------------------------------------------------------


def _grouped_matmul(a, b, block_m, block_n, wave):
    return a @ b


def _grouped(tiles_m: int, tiles_n: int, height: int) -> list[tuple[int, int]]:
    """Tiles in the order: `height` rows of tiles at a time, column after column."""
    starts = range(0, tiles_m, height)
    return [(m, n) for s in starts for n in range(tiles_n) for m in range(s, min(s + height, tiles_m))]


def _wave_bytes(order: list[tuple[int, int]], m: int, n: int, k: int, block_m: int, block_n: int, wave: int) -> int:
    """Bytes of the strips of a (m, k) and b (k, n), float16, that each `wave` consecutive tiles need, summed."""

    def edge(size, block, i):
        return min(block, size - i * block)

    lines = 0
    for start in range(0, len(order), wave):
        tiles = order[start : start + wave]
        lines += sum(edge(m, block_m, i) for i in {i for i, _ in tiles})
        lines += sum(edge(n, block_n, j) for j in {j for _, j in tiles})
    return 2 * k * lines


def good_wave_bytes(a, b, block_m, block_n, wave) -> int:
    """The bytes that waves load together where groups are as high, or as wide, as tiles and wave ask for, rounded
    either way."""
    (m, k), n = a.shape, b.shape[1]
    tiles_m, tiles_n = ceil(m / block_m), ceil(n / block_n)
    height, width = sqrt(wave * block_n / block_m), sqrt(wave * block_m / block_n)
    orders = [_grouped(tiles_m, tiles_n, h) for h in (max(1, floor(height)), ceil(height))]
    for w in (max(1, floor(width)), ceil(width)):
        orders.append([(i, j) for j, i in _grouped(tiles_n, tiles_m, w)])
    return max(_wave_bytes(order, m, n, k, block_m, block_n, wave) for order in orders)


SLACK = 1.05
"""How many times the bytes of `good_wave_bytes` an order may load: room for others that are as good."""


def _in_tiles(m, n, k, block_m=16, block_n=16, wave=16):
    return lambda draw: (draw(m, k, dtype=HALF), draw(k, n, dtype=HALF), block_m, block_n, wave)


def _tiles_nobody_knows(draw):
    block_m, block_n = draw.random.choice([(16, 16), (16, 32), (32, 16), (16, 64)])
    m, n = block_m * draw.integer(5, 6) - draw.integer(0, 15), block_n * draw.integer(4, 5) - draw.integer(0, 15)
    return draw(m, 16, dtype=HALF), draw(16, n, dtype=HALF), block_m, block_n, draw.integer(9, 16)


def _judge_grouped(inputs, outputs, facts):
    a, b, block_m, block_n, _ = inputs
    tiles = ceil(a.shape[0] / block_m) * ceil(b.shape[1] / block_n)
    tile_bytes = 2 * (a.shape[1] * (block_m + block_n) + block_m * block_n)
    if facts.get("programs", tiles) != tiles:
        said = f"{facts['programs']} programs were launched for {tiles} tiles of {block_m} × {block_n}"
    elif (most := facts.get("program_bytes", 0)) > tile_bytes:
        said = f"One program asks for {most:,} bytes, and a tile of {block_m} × {block_n} takes {tile_bytes:,}"
    else:
        return []
    return [("wrong-answer", f"{said}: one program a tile is asked for.")]


GROUPED_LAUNCH = Exercise(
    name="grouped-launch",
    lab=LAB,
    rung="triton",
    entry="grouped_matmul",
    title="Which program takes which tile",
    form="kernel",
    made_of="triton",
    reference=_grouped_matmul,
    scale=lambda a, b, *rest: _of_products(a, b),
    judge=_judge_grouped,
    cases=(
        Case("sizes that end inside a tile", _in_tiles(70, 85, 37, wave=9), seen=True),
        Case("6 × 6 square tiles, 9 at a time", _in_tiles(96, 96, 16, wave=9), seen=True),
        Case("tiles four times as wide as high", _in_tiles(128, 256, 16, 16, 64)),
        Case("tiles four times as high as wide", _in_tiles(256, 128, 16, 64, 16)),
        Case("the last group is one column of tiles", _in_tiles(96, 64, 20, wave=9)),
        Case("one row of tiles", _in_tiles(16, 130, 33)),
        Case("one column of tiles", _in_tiles(130, 9, 17)),
        Case("a single tile", _in_tiles(5, 7, 11)),
        Case("no row", _in_tiles(0, 7, 11)),
        Case("one program at a time", _in_tiles(30, 50, 16, wave=1)),
        Case("more programs at a time than tiles", _in_tiles(50, 60, 16, wave=500)),
        Case("small integers, compared exactly", _in_tiles(100, 40, 40, 32, 16, 8), kind="integers", exact=True),
        Case("sizes, tiles and waves that nobody knows before", _tiles_nobody_knows),
        Case("1000 × 1100 × 700", _in_tiles(1000, 1100, 700, 64, 128, 132), mode="gpu"),
    ),
    limits=(
        Limit(
            "wave_bytes",
            lambda *inputs: SLACK * good_wave_bytes(*inputs),
            "too-many-bytes",
            "Programs that run at the same time load {fact} different bytes of a and b, summed over the waves; in a "
            "good order, {most} are enough.",
            wave=lambda a, b, block_m, block_n, wave: wave,
        ),
        *(
            Limit(
                "dram_bytes",
                lambda *inputs: 2 * good_wave_bytes(*inputs),
                "too-many-bytes",
                "The GPU read {fact} bytes from its memory, by its own counters; in a good order, {most} are enough.",
                inputs=_in_tiles(m, n, 1024, 128, 128, 264),
            )
            for m, n in ((2048, 65536), (65536, 2048))  # one is hard for rows of tiles, the other for columns
        ),
    ),
    hints=(
        "Draw the tiles and mark those that one wave takes. How many strips of a does it need, how many of b, and how "
        "many elements has each? Then stretch the marked area: fewer columns, more rows.",
        "A wave that covers h rows and w columns of tiles loads h · block_m rows of a and w · block_n columns of b; "
        "h · w is the size of the wave. The sum is least where both parts are equal. For the order: cut the columns of "
        "tiles into groups of w; walk a group row by row; the last group may be narrower.",
        "w = √(wave · block_m / block_n), a whole number, at least 1. first = program // (w · tiles_m) · w; width = "
        "min(w, tiles_n - first); place = program % (w · tiles_m); tile row = place // width; tile column = first + "
        "place % width.",
    ),
    hints_for={
        "too-many-bytes": (
            "Is the group as wide as its tiles and the wave ask for? Work out h · block_m + w · block_n for w one less "
            "and one more.",
            "Where tiles are four times as wide as high, a square of tiles is no square of elements.",
        ),
        "unwritten": (
            "Some tile has no program, and another has two. Follow the last group, which may have fewer columns.",
        ),
    },
    seconds=20,
)


# --- gated-epilogue --------------------------------------------------------------------------------------------


def _gated_matmul(x, w_gate, w_up):
    gate = x @ w_gate.mT
    return gate * torch.sigmoid(gate) * (x @ w_up.mT)


def _gated_scale(x, w_gate, w_up):
    """The size of the factors: SiLU is at most |gate|, and both sums are as exact as their terms are large."""
    gate, up = x @ w_gate.mT, x @ w_up.mT
    terms = x.abs() @ w_gate.abs().mT, x.abs() @ w_up.abs().mT
    return 1e-3 + gate.abs() * terms[1] / 8 + up.abs() * terms[0] / 8 + (gate * up).abs()


def _gated(tokens, features, k, put=lambda x: x, spread=1.0):
    def inputs(draw):
        weights = [draw(features, k, kind="normal").mul_(spread / max(1, k) ** 0.5).to(HALF) for _ in "gu"]
        return put(draw(tokens, k, dtype=HALF)), *weights

    return inputs


def _exact_gate(draw):
    """Gates so large that SiLU is the identity or 0 to the last bit of float16, and sums for up that pass 2**11 and
    come back: all integers."""
    p, r = draw.integers(1, 9, 19, 300), draw.integers(1, 9, 21, 300)
    p[:, 0] = 1
    x = torch.cat([draw.integers(-2, 3, 19, 1), torch.ones(19, 1), p, -p], 1)
    w_up = torch.cat([draw.integers(-3, 4, 21, 2), r, r], 1)
    w_up[:, 302] += draw.integers(-1, 2, 21)
    w_gate = torch.zeros_like(w_up)
    w_gate[:, 0], w_gate[:, 1] = 64, draw.integers(31, 34, 21)
    return x.to(HALF), w_gate.to(HALF), w_up.to(HALF)


def _between_halves(draw):
    """Gates and ups just above 32 that float16 cannot hold, whose product depends on what it would round off."""
    odd = [(2 * draw.integers(0, 32, n, 1) + 1) / 64 for n in (21, 23)]
    ones, none = ([torch.full((n, 1), value) for n in (21, 23)] for value in (1.0, 0.0))
    x = torch.cat([ones[0], odd[0], ones[0]], 1)
    w_gate = torch.cat([32 * ones[1], ones[1], none[1]], 1)
    w_up = torch.cat([32 * ones[1], none[1], odd[1]], 1)
    return x.to(HALF), w_gate.to(HALF), w_up.to(HALF)


GATE_TILE = 32
"""Edges of the tiles that the given wrapper launches with."""


def _gated_bytes(x, w_gate, w_up):
    (tokens, k), features = x.shape, w_gate.shape[0]
    strips = ceil(features / GATE_TILE) * tokens + 2 * ceil(tokens / GATE_TILE) * features
    return 2 * (k * strips + tokens * features)


GATED_EPILOGUE = Exercise(
    name="gated-epilogue",
    lab=LAB,
    rung="triton",
    entry="gated_matmul",
    title="SiLU times gate, at the end of the product",
    form="kernel",
    made_of="triton",
    core=True,
    reference=_gated_matmul,
    scale=_gated_scale,
    multiplied=0,
    cases=(
        Case("40 tokens, 50 features", _gated(40, 50, 37), seen=True),
        Case("exactly one tile", _gated(32, 32, 32)),
        Case("one element more than a tile, each way", _gated(33, 33, 33)),
        Case("a single element", _gated(1, 1, 1)),
        Case("one token", _gated(1, 70, 48)),
        Case("one feature", _gated(45, 1, 20)),
        Case("a sum over nothing", _gated(6, 5, 0)),
        Case("no token", _gated(0, 5, 9)),
        Case("gates so large that SiLU is the identity or nothing", _exact_gate, exact=True),
        Case("gates and ups that float16 would round", _between_halves, exact=True),
        Case("gates far below zero, whose exponential overflows", _gated(20, 24, 64, spread=60.0)),
        Case("x with outliers", _gated(35, 20, 100), kind="outliers"),
        Case("x far from zero", _gated(18, 40, 30, spread=0.2), kind="offset"),
        Case("rows of x further apart than they are long", _gated(34, 36, 50, put=padded)),
        Case("1000 tokens, 1500 features, 700 inputs", _gated(1000, 1500, 700), mode="gpu"),
    ),
    limits=(
        Limit(
            "launches",
            lambda *inputs: 1,
            "too-many-kernels",
            "The answer launches {fact} kernels where {most} will do: what the first leaves in memory, the second has "
            "to fetch again.",
        ),
        Limit(
            "bytes",
            _gated_bytes,
            "too-many-bytes",
            "The kernel asks for {fact} bytes, and {most} are enough where each tile of x is loaded once for both "
            "products and nothing but the result is stored.",
        ),
    ),
    hints=(
        "Two products share x. What must a program keep until the last step along K, and what of it goes to memory?",
        "Two tiles of float32, one for each product, grow in one loop: each step loads one tile of x and one of each "
        "weight. After the loop both are complete in registers, and SiLU is arithmetic on one of them: "
        "g · sigmoid(g), which no large |g| can break.",
        "gate, up = zeros, zeros. For each k: x tile; gate = dot(x tile, turned tile of w_gate, gate); up = dot(x "
        "tile, turned tile of w_up, up). Store gate · sigmoid(gate) · up as float16 where the row is below M and the "
        "column below N.",
    ),
    hints_for={
        "nan": (
            "What is exp(-g) for g = -200, in float32? And what becomes of g / (1 + exp(-g)) or g · exp(g) / (1 + "
            "exp(g)) then?",
            "`tl.sigmoid` holds for every g.",
        ),
        "too-many-bytes": (
            "Is the tile of x loaded once a step, or once for each of the two products?",
            "Does anything but the finished result leave the kernel?",
        ),
    },
)


# --- int8-rows -------------------------------------------------------------------------------------------------


def _scales(x):
    """The largest |x| of each row over 127, rounded to float32 as the exercise says; x: float64."""
    largest = x.abs().amax(1).float() if x.shape[1] else torch.zeros(x.shape[0])
    return (largest / 127).double()


def _quantise_rows(x):
    return torch.empty(x.shape, dtype=torch.int8, device="meta"), _scales(x)


NEAR_A_HALF = 127 * 2.0**-21
"""How near to a half a quotient of float32 may come before either neighbour is right: divisions differ in the last
bits. Where the scale is a power of two, the quotient is exact, and so is the rounding."""


def _judge_quantised(inputs, outputs, facts):
    x, (q, _) = inputs[0].double(), outputs
    scale = _scales(x)[:, None]
    exact = torch.where(scale > 0, x / torch.where(scale > 0, scale, 1.0), 0.0)
    is_power = torch.frexp(scale).mantissa == 0.5
    near = torch.where(is_power, 0.0, NEAR_A_HALF)
    low, high = torch.round(exact - near), torch.round(exact + near)
    off = (q.double() < low) | (q.double() > high)
    if not off.any():
        return []
    i, j = off.nonzero()[0].tolist()
    said = f"{int(off.sum()):,} of {q.numel():,} integers are wrong. At {[i, j]}, x is {x[i, j].item():.6g} and the "
    said += f"row's scale {scale[i].item():.6g}, so x / scale is {exact[i, j].item():.7g}: it gives {q[i, j].item()}."
    ties = off & (exact - exact.floor() == 0.5)
    if bool((off == ties).all()):
        said += (
            " Only quotients exactly between two integers are wrong: of two equally near, the even one is asked for."
        )
    return [("wrong-values", said)]


def _rows(rows, cols, dtype=torch.float32, put=lambda x: x):
    return lambda draw: (put(draw(rows, cols, dtype=dtype)),)


def _some_zero(draw):
    x = draw(9, 60)
    x[::3] = 0
    x[1] = -0.0
    return (x,)


def _halves(draw):
    """Rows whose scale is a power of two, and whose elements are halves of it: every second quotient is a tie."""
    x = draw.integers(-254, 255, 13, 90).double() / 2
    x[:, 7] = torch.where(draw.integers(0, 2, 13) > 0, 127.0, -127.0)
    return ((x * 2.0 ** draw.integers(-20, 9, 13, 1).double()).float(),)


INT8_ROWS = Exercise(
    name="int8-rows",
    lab=LAB,
    rung="triton",
    entry="quantise_rows",
    title="Rows as 8-bit integers and a scale",
    form="kernel",
    made_of="triton",
    dtype=torch.float32,
    reference=_quantise_rows,
    judge=_judge_quantised,
    cases=(
        Case("five rows of 77", _rows(5, 77), seen=True),
        Case("rows of zeros among others", _some_zero, seen=True),
        Case("quotients exactly between two integers", _halves),
        Case("a power of two of columns, float16", _rows(6, 128, HALF)),
        Case("one column", _rows(7, 1)),
        Case("a single element, float16", _rows(1, 1, HALF)),
        Case("no row", _rows(0, 20)),
        Case("far from zero", _rows(4, 90), kind="offset"),
        Case("with outliers, float16", _rows(6, 400, HALF), kind="outliers"),
        Case("the largest is negative", _rows(4, 65, put=lambda x: -x.abs())),
        Case("tiny numbers", _rows(4, 50, put=lambda x: x * 1e-30)),
        Case("large numbers, float16", _rows(3, 70, HALF, put=lambda x: x.clamp_(-3, 3) * 20000)),
        Case("rows further apart than they are long", _rows(5, 101, put=padded)),
        Case("rows of 3000", _rows(2, 3000)),
        Case("the last row lies beyond element 2**31", _rows(3, 70, HALF, put=far), memory_bytes=FAR_BYTES),
        Case("4000 rows of 5120, float16", _rows(4000, 5120, HALF), mode="gpu"),
    ),
    limits=(
        Limit(
            "bytes",
            lambda x: x.numel() * (x.element_size() + 1) + 4 * x.shape[0],
            "too-many-bytes",
            "The kernel asks for {fact} bytes; {most} are enough where x is read once and nothing but the integers and "
            "the scales is written.",
        ),
    ),
    hints=(
        "What does a row of zeros divide by? And what does a conversion to an integer do with 2.7, with -2.7 and with "
        "2.5?",
        "One program takes a row and holds it whole. Its scale is the largest |x| over 127; where that is 0, divide by "
        "1 instead. A conversion to int8 cuts off what stands behind the point, so round first: `tl.floor` gives the "
        "integer below, the distance from it decides, and at exactly one half it is whether that integer is even.",
        "x = row as float32, 0 beyond the end; scale = div_rn(max |x|, 127); v = div_rn(x, scale, or 1 where it is 0); "
        "low = floor(v); rest = v - low; up = rest > 0.5, or rest = 0.5 and low odd; q = low + up, as int8.",
    ),
    hints_for={
        "nan": ("Which rows divide 0 by 0?",),
    },
)


# --- prune-configs ---------------------------------------------------------------------------------------------

KEPT, LOSS, LOSS_OF_SOME = 10, 0.03, 0.10
"""How many configurations an answer may keep, and by how much of the fastest's time the fastest of them may be slower:
of all that were recorded, and of some drawn at random, where a good estimate may have to do without its favourites."""

H200 = {"sms": 132, "shared_bytes": 232448, "registers": 65536}
SIZES = "BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"
Shape = tuple[int, int, int]


@lru_cache(maxsize=1)
def recorded_times() -> dict[Shape, dict[tuple[int, ...], float]]:
    """µs by shape (M, N, K) and configuration (its `SIZES`), on an H200; infinite where it does not fit."""
    head, *rows = (line.split() for line in records.load()["texts"]["gemm.triton_configs"])
    rows = [(tuple(map(int, row[: len(SIZES)])), list(map(float, row[len(SIZES) :]))) for row in rows]
    shapes = [tuple(map(int, name.split("x"))) for name in head[len(SIZES) :]]
    return {shape: {config: times[i] for config, times in rows} for i, shape in enumerate(shapes)}


def _space(shape: Shape, share: float):
    """The shape, the card, and this share of all configurations, in any order."""

    def inputs(draw):
        every = list(recorded_times()[shape])
        some = draw.random.sample(every, round(share * len(every)))
        return shape, H200, [dict(zip(SIZES, config, strict=True)) for config in some]

    return inputs


def _judge_pruned(inputs, outputs, facts):
    shape, _, configs = inputs
    if not isinstance(outputs, list | tuple):
        return [("wrong-answer", f"It returned {outputs!r:.80}; a list of configurations is asked for.")]
    if strange := [c for c in outputs if c not in configs]:
        return [
            ("wrong-answer", f"It keeps {strange[0]!r:.120}, which is none of the configurations that it was given.")
        ]
    if not 0 < len(outputs) <= KEPT:
        return [("wrong-answer", f"It keeps {len(outputs)} configurations; from 1 to {KEPT} are asked for.")]
    times = recorded_times()[shape]

    def fastest(some):
        best = min(some, key=lambda c: times[tuple(c[size] for size in SIZES)])
        return times[tuple(best[size] for size in SIZES)], best

    (kept, config), (least, better) = fastest(outputs), fastest(configs)
    most = LOSS if len(configs) == len(times) else LOSS_OF_SOME
    if kept <= (1 + most) * least:
        return []
    if kept == inf:
        said = "none of those that it keeps fits the card"
    else:
        said = f"the fastest that it keeps takes {kept:.4g} µs ({_spelled(config)})"
    product = " × ".join(map(str, shape))
    said = f"Of {len(configs)} configurations for {product}, {said}; {_spelled(better)} takes {least:.4g} µs"
    return [("too-slow", f"{said}, and {most:.0%} more would do.")]


def _spelled(config: dict) -> str:
    return "{} × {} × {}, {} warps, {} stages".format(*(config[size] for size in SIZES))


SEEN = ((1024, 1024, 1024), (4096, 4096, 4096), (16384, 4096, 1024))
UNSEEN = (
    *((512, 512, 512), (64, 4096, 14336), (256, 4096, 4096), (2048, 2048, 2048), (512, 16384, 4096)),
    *((1024, 16384, 4096), (8192, 8192, 1024)),
)

PRUNE_CONFIGS = Exercise(
    name="prune-configs",
    lab=LAB,
    rung="triton",
    entry="prune",
    title="Ten configurations that are worth a try",
    form="kernel",
    made_of="python",
    judge=_judge_pruned,
    cases=(
        *(Case(f"{m} × {n} × {k}, every configuration", _space((m, n, k), 1), seen=True) for m, n, k in SEEN),
        *(Case(f"{m} × {n} × {k}, every configuration", _space((m, n, k), 1)) for m, n, k in UNSEEN),
        *(Case(f"{m} × {n} × {k}, some configurations", _space((m, n, k), 0.75)) for m, n, k in (*SEEN, *UNSEEN)),
    ),
    hints=(
        "Look at the table: which tiles win where the result has many tiles for each SM, and which where it has "
        "fewer tiles than SMs? What have the winners of the smallest product in common besides their tile?",
        "Estimate the cycles of a configuration, sort by that, and keep ten. An SM holds as many programs as its "
        "shared memory, its registers and its warps allow. All programs take a whole number of turns. One step along K "
        "costs what is largest: the arithmetic of the resident programs, the loading of their tiles, or one trip to "
        "memory, which num_stages - 1 steps share.",
        "shared = 2 · stages · BLOCK_K · (BLOCK_M + BLOCK_N) bytes; registers = BLOCK_M · BLOCK_N / (32 · warps) + 40 "
        "a thread, more than 255 spill. A step of r programs: the largest of r · BLOCK_M · BLOCK_N · BLOCK_K / 1500, "
        "r · 2 · BLOCK_K · (BLOCK_M + BLOCK_N) / 20 and 2000 / (stages - 1) cycles; BLOCK_M below 64 multiplies the "
        "first by 4. cycles = steps · (full turns · a step of all that fit + a step of what the last turn leaves to an "
        "SM); of those that cost the same, fewer warps come first, then fewer steps.",
    ),
    hints_for={
        "too-slow": (
            "Compare the two configurations that the message names: how many tiles for how many SMs, how many bytes on "
            "their way at once, how many multiplications for each byte? Which of these does your estimate not see?",
        ),
    },
)


EXERCISES = (
    TILE_TRANSPOSE,
    ONE_DOT,
    K_LOOP,
    ANY_MATMUL,
    GROUPED_LAUNCH,
    GATED_EPILOGUE,
    INT8_ROWS,
    PRUNE_CONFIGS,
)
