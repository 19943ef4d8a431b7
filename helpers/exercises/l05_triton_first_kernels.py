"""Lab 05, Triton: masks, reductions, random numbers, and a stranger's kernel to review."""

from functools import lru_cache

import torch

from . import Case, Exercise, Limit, far, padded, spaced, turned

LAB = "05_triton_first_kernels"
NAN, INF = float("nan"), float("inf")
FAR_BYTES = 5 * 2**30
"""What a case with `far` rows of float16 needs on a GPU."""


# --- masked-add ------------------------------------------------------------------------------------------------


def _masked_add(x, y, mask):
    return torch.where(mask != 0, x + y, x)


def _vectors(n, *, unused=None):
    """x and y of n elements and a mask with zeros, negative and large numbers; y is `unused` where the mask is 0."""

    def inputs(draw):
        x, y = draw(n), draw(n)
        mask = draw.integers(-2, 3, n, dtype=torch.int8) * draw.integers(0, 2, n, dtype=torch.int8)
        return x, y if unused is None else y.masked_fill_(mask == 0, unused), mask

    return inputs


MASKED_ADD = Exercise(
    name="masked-add",
    lab=LAB,
    rung="triton",
    entry="masked_add",
    title="Add only where a mask says so",
    form="kernel",
    made_of="triton",
    core=True,
    reference=_masked_add,
    cases=(
        Case("a vector that ends inside a block", _vectors(1009), seen=True),
        Case("exactly one block", _vectors(256)),
        Case("one element more than two blocks", _vectors(513), kind="outliers"),
        Case("a single element", _vectors(1)),
        Case("no element", _vectors(0)),
        Case("small integers, compared exactly", _vectors(777), kind="integers", exact=True),
        Case("far from zero", _vectors(300), kind="offset"),
        Case("y is NaN wherever the mask is 0", _vectors(301, unused=NAN)),
        Case("a mask of zeros", lambda draw: (draw(259), draw(259), torch.zeros(259, dtype=torch.int8))),
        Case("two million elements", _vectors(2_000_003), mode="gpu"),
    ),
    hints=(
        "Two masks are at work: one says which lanes have an element at all, the other comes from memory. "
        "Which of your loads and stores needs which?",
        "Load the mask like any other vector, with a value for the lanes beyond the end, and compare it with zero. "
        "A lane that is not chosen must not let y through, whatever y holds: select, or do not load. A product with "
        "0 keeps a NaN.",
        "offset = program · BLOCK + lanes; inside = offset < n; chosen = (mask at offset, 0 where not inside) ≠ 0; "
        "load x where inside; load y where chosen, 0 elsewhere; store the sum where inside.",
    ),
    hints_for={
        "nan": (
            "The NaN comes from a place of y that is not chosen. What is NaN times zero?",
            "Either do not load those lanes (a load has a mask, and a value for the lanes that it leaves out), or "
            "choose between two finished values with `tl.where`.",
        ),
    },
)


# --- seeded-dropout --------------------------------------------------------------------------------------------


def _uniform(seed: int, i: torch.Tensor) -> torch.Tensor:
    """tl.rand(seed, i) bit for bit: float32 in [0, 1), from the first word of Philox 4x32-10 (Salmon et al., SC 2011).

    i: int64 from 0. The counter is (low word of i, high word of i, 0, 0), the key the two words of the seed.
    """
    low = 0xFFFFFFFF
    a, b, c, d = i & low, i >> 32 & low, torch.zeros_like(i), torch.zeros_like(i)
    key, other = seed & low, seed >> 32 & low
    for _ in range(10):  # a product may pass 2**63 and wrap, which leaves its 64 bits as they are
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 & low ^ b ^ key, second & low, first >> 32 & low ^ d ^ other, first & low
        key, other = key + 0x9E3779B9 & low, other + 0xBB67AE85 & low
    folded = torch.where(a < 2**31, a, low - a)  # Triton reads the word as signed, and turns negative x into -x - 1
    return folded.float() * 4.6566127342e-10


@lru_cache(maxsize=1)
def _uniforms(seed: int, n: int) -> torch.Tensor:
    """The first n of them: the reference is run in several precisions, and they are the same in each."""
    return _uniform(seed, torch.arange(n))


def _seeded_dropout(x, p, seed):
    keep = _uniforms(seed, x.numel()).reshape(x.shape) > torch.tensor(p, dtype=torch.float32)
    return torch.where(keep, x / (1 - p), 0)


def _nan_where_dropped(draw):
    x, p, seed = draw(3, 91), 0.5, draw.integer(0, 2**31 - 1)
    drop = _uniforms(seed, x.numel()).reshape(x.shape) <= p
    return x.masked_fill_(drop, NAN), p, seed


def _dropped(rows, cols, p, dtype=torch.float32, put=lambda x: x, seeds=(0, 2**31 - 1)):
    return lambda draw: (put(draw(rows, cols, dtype=dtype)), p, draw.integer(*seeds))


SEEDED_DROPOUT = Exercise(
    name="seeded-dropout",
    lab=LAB,
    rung="triton",
    entry="seeded_dropout",
    title="Dropout that a seed repeats",
    form="kernel",
    made_of="triton",
    reference=_seeded_dropout,
    cases=(
        Case("five rows, one in four dropped", _dropped(5, 77, 0.25), seen=True),
        Case("exactly two blocks", _dropped(4, 128, 0.5)),
        Case("small integers, compared exactly", _dropped(3, 101, 0.5), kind="integers", exact=True),
        Case("a seed of more than 32 bits", _dropped(7, 43, 0.5, seeds=(2**33, 2**62))),
        Case("rows further apart than they are long", _dropped(6, 59, 0.75, put=padded)),
        Case("nothing is dropped: p is 0", _dropped(3, 91, 0.0), kind="offset"),
        Case("x is NaN wherever it is dropped", _nan_where_dropped),
        Case("float16 with outliers", _dropped(3, 257, 0.9375, torch.float16), kind="outliers"),
        Case("a single element", _dropped(1, 1, 0.5)),
        Case("no element", _dropped(0, 5, 0.5)),
        Case(
            "the last row lies beyond element 2**31", _dropped(3, 70, 0.5, torch.float16, far), memory_bytes=FAR_BYTES
        ),
        Case("201 rows of 4099", _dropped(201, 4099, 0.1, torch.float16), mode="gpu"),
    ),
    limits=(
        Limit(
            "bytes",
            lambda x, p, seed: 2 * x.numel() * x.element_size(),
            "too-many-bytes",
            "The kernels ask for {fact} bytes; reading x once and writing the result once are {most}: random numbers "
            "and masks need not go through memory.",
        ),
    ),
    hints=(
        "Which numbers does `tl.rand` need to give element (row, col) the same value whatever the block size, and "
        "whatever lies between the rows? Follow one lane of the second block.",
        "The random number belongs to the element's linear index, row · cols + col, and not to its lane nor to its "
        "place in memory. From the linear index follow the row and the column, and from these the place.",
        "i = program · BLOCK + lanes; row = i // cols in 64 bits; col = i % cols; load x at row · x_stride + col where "
        "i < n; store, at i, x / (1 - p) where rand(seed, i) > p, else 0.",
    ),
    hints_for={
        "nan": (
            "An element that is dropped may be NaN. What is NaN times zero?",
            "Choose between two finished values with `tl.where`: then it does not matter what the other one was.",
        ),
    },
)


# --- bias-gelu -------------------------------------------------------------------------------------------------


def _gelu(x):
    """GELU, tanh form (Hendrycks and Gimpel, 2016), written out, so that a run in float16 rounds at each step."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def _bias_gelu(x, bias):
    return _gelu(x + bias)


def _biased(rows, cols, dtype=torch.float32, put=lambda x: x):
    return lambda draw: (put(draw(rows, cols, dtype=dtype)), draw(cols, dtype=dtype, kind="normal"))


BIAS_GELU = Exercise(
    name="bias-gelu",
    lab=LAB,
    rung="triton",
    entry="bias_gelu",
    title="Bias and GELU in one kernel, for any strides",
    form="kernel",
    made_of="triton",
    reference=_bias_gelu,
    cases=(
        Case("a matrix that ends inside a tile both ways", _biased(37, 101), seen=True),
        Case("exactly one tile", _biased(16, 64)),
        Case("one row and one column more than a tile", _biased(17, 65, torch.float16)),
        Case("one row", _biased(1, 130)),
        Case("one column", _biased(35, 1)),
        Case("no row", _biased(0, 40)),
        Case("values near 200: powers of e overflow", _biased(5, 70), kind="offset"),
        Case("values near -200", _biased(5, 70, put=lambda x: x.neg_()), kind="offset"),
        Case("float16 with outliers", _biased(9, 80, torch.float16), kind="outliers"),
        Case("rows further apart than they are long", _biased(19, 67, torch.float16, padded)),
        Case("stored column by column", _biased(21, 66, put=turned)),
        Case("every second element of longer rows", _biased(18, 33, put=spaced)),
        Case("the last row lies beyond element 2**31", _biased(3, 70, torch.float16, far), memory_bytes=FAR_BYTES),
        Case(
            "the last column lies beyond element 2**31",
            _biased(70, 3, torch.float16, lambda x: far(x.mT).mT),
            memory_bytes=FAR_BYTES,
        ),
        Case("701 rows of 4097, float16", _biased(701, 4097, torch.float16), mode="gpu"),
    ),
    limits=(
        Limit(
            "launches",
            lambda x, bias: 1,
            "too-many-kernels",
            "{fact} kernels were launched: one can do all of it, without a trip through memory between the steps.",
        ),
    ),
    hints=(
        "Three addresses: x's, the bias's, y's. Write for each how it depends on row and column, and which of the "
        "sizes and strides it needs. Then ask what your tanh gives for 200 and for -200.",
        "A block of rows with `[:, None]` and a block of columns with `[None, :]` make a tile of addresses. Triton's "
        "language has no tanh, but tanh(u) = 2 · sigmoid(2u) - 1, and `tl.sigmoid` neither overflows nor divides two "
        "infinities.",
        "r = program 0 · ROWS + lanes in 64 bits; c = program 1 · COLS + lanes; z = x at r · x_row + c · x_col, plus "
        "the bias at c, in float32; u = 0.7978845608 · (z + 0.044715 · z³); store z · sigmoid(2u) at r · cols + c, "
        "where r < rows and c < cols.",
    ),
    hints_for={
        "exception": (
            "If it is about tanh: `tl` has none, and libdevice's gives nothing back in the interpreter. What else in "
            "`tl` is made of an exponential?",
            "tanh(u) = 2 · sigmoid(2u) - 1, and `tl.sigmoid` exists.",
        ),
        "nan": (
            "Compute exp(2u) by hand for an x of 200. What is infinity divided by infinity?",
            "`tl.sigmoid(2u)` is 1 / (1 + exp(-2u)): an infinite denominator gives 0, and nothing is divided by it.",
        ),
    },
)


# --- rmsnorm ---------------------------------------------------------------------------------------------------


def _rmsnorm(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _normed(rows, cols, eps=1e-6, put=lambda x: x):
    def inputs(draw):
        return put(draw(rows, cols, dtype=torch.float16)), draw(cols, dtype=torch.float16, kind="normal"), eps

    return inputs


def _with_zeros(x):
    x[1] = 0.0
    return x


RMSNORM = Exercise(
    name="rmsnorm",
    lab=LAB,
    rung="triton",
    entry="rmsnorm",
    title="RMSNorm of float16 rows, summed in float32",
    form="kernel",
    made_of="triton",
    core=True,
    reference=_rmsnorm,
    low="bfloat16",  # coarse, where float16 would overflow and say nothing
    cases=(
        Case("rows shorter than a block", _normed(5, 100), seen=True),
        Case("the width of a power of two", _normed(4, 256)),
        Case("a prime number of columns", _normed(3, 4099), kind="outliers"),
        Case("one column", _normed(6, 1)),
        Case("one row", _normed(1, 333)),
        Case("no row", _normed(0, 64)),
        Case("far from zero: squares beyond float16", _normed(4, 777), kind="offset"),
        Case("values near 30,000", _normed(3, 300, put=lambda x: x * 150), kind="offset"),
        Case("values near 0.0001: squares below float16", _normed(4, 200, 1e-12, lambda x: x * 1e-4)),
        Case("an eps that weighs as much as the row", _normed(4, 150, 1.0)),
        Case("a row of zeros", _normed(3, 90, put=_with_zeros)),
        Case("rows further apart than they are long", _normed(5, 129, put=padded)),
        Case("the last row lies beyond element 2**31", _normed(3, 70, put=far), memory_bytes=FAR_BYTES),
        Case("701 rows of 4096", _normed(701, 4096), mode="gpu"),
    ),
    limits=(
        Limit(
            "launches",
            lambda x, weight, eps: 1,
            "too-many-kernels",
            "{fact} kernels were launched: a row that is held in registers needs one.",
        ),
    ),
    hints=(
        "Which value must lanes beyond the end have, so that the sum does not notice them? By what is the sum divided? "
        "And where in the kernel do the numbers stop being float16?",
        "Convert right after the load, and convert back in the store: a float16 ends at 65,504, so the square of 300 "
        "is already infinite. The block is a power of two, the mean is over cols. eps is added under the root.",
        "row = program in 64 bits; col = lanes; x = load at row · x_stride + col, 0 where col ≥ cols, to float32; "
        "scale = rsqrt(sum(x · x) / cols + eps); w = load at col, to float32; store x · scale · w at row · cols + col "
        "where col < cols. Wrapper: an empty y; BLOCK = next_power_of_2(cols); one program a row.",
    ),
)


# --- row-softmax -----------------------------------------------------------------------------------------------


def _row_softmax(x, block):
    top = x.amax(-1, keepdim=True)
    e = (x - top.masked_fill(top == -INF, 0.0)).exp()
    return e / e.sum(-1, keepdim=True).clamp_min(1.0)  # the largest adds 1, so only an all-masked row is below


def _scores(rows, cols, block, dtype=torch.float32, put=lambda x: x):
    return lambda draw: (put(draw(rows, cols, dtype=dtype)), block)


def _causal(x):
    """Row r sees its first r columns: row 0 sees none, and the later blocks of most rows hold only -inf."""
    rows, cols = x.shape
    return x.masked_fill_(torch.arange(cols) >= torch.arange(rows)[:, None] * cols // rows, -INF)


def _late(x):
    """The first three quarters of each row are masked: the first blocks hold only -inf."""
    x[:, : x.shape[1] * 3 // 4] = -INF
    return x


ROW_SOFTMAX = Exercise(
    name="row-softmax",
    lab=LAB,
    rung="triton",
    entry="row_softmax",
    title="Softmax of masked rows longer than a block",
    form="kernel",
    made_of="triton",
    core=True,
    reference=_row_softmax,
    cases=(
        Case("rows of a little more than three blocks", _scores(3, 200, 64), seen=True),
        Case("row r sees its first columns only, row 0 none", _scores(5, 110, 32, put=_causal), seen=True),
        Case("the first blocks hold nothing but -inf", _scores(2, 107, 32, put=_late)),
        Case("exactly one block", _scores(3, 128, 128)),
        # not among the last: those are compiled as well, which takes long for so large a block
        Case("one row of more than a million columns", _scores(1, 2**20 + 7, 16384), mode="cpu"),
        Case("one column more than a block, float16", _scores(4, 129, 128, torch.float16)),
        Case("rows shorter than a block", _scores(3, 37, 256), kind="outliers"),
        Case("one column", _scores(3, 1, 16)),
        Case("no row", _scores(0, 50, 32)),
        Case("far from zero", _scores(2, 170, 64), kind="offset"),
        Case("far below zero", _scores(2, 90, 32, put=lambda x: x - 300.0)),
        Case("float16 with outliers", _scores(2, 300, 128, torch.float16), kind="outliers"),
        Case("rows further apart than they are long", _scores(3, 101, 32, put=padded)),
        Case("the largest at the end", _scores(2, 250, 64, put=lambda x: x.sort(-1).values * 20)),
        Case("the last row lies beyond element 2**31", _scores(3, 70, 32, torch.float16, far), memory_bytes=FAR_BYTES),
        Case("71 rows of 40,000 columns, float16", _scores(71, 40_000, 4096, torch.float16), mode="gpu"),
    ),
    hints=(
        "Write down what you know after each block: the largest value so far and the sum so far. When a later block "
        "brings a larger value, which of the two has to be mended? Then follow a row whose first block holds only -inf "
        "through your formula, by hand.",
        "A sum of exp(x - m) becomes a sum of exp(x - M) when it is multiplied by exp(m - M). While nothing but -inf "
        "was seen, m - M is -inf - (-inf), which is NaN: subtract a finite number instead. A first pass finds maximum "
        "and sum, a second one writes.",
        "m = -inf, s = 0. For each block: M = max(m, block); c = 0 if M is -inf, else M; s = s · exp(m - c) + "
        "sum(exp(block - c)); m = M. Afterwards for each block: store exp(x - c) / s, with 1 in place of an s of 0. "
        "m and s may be numbers, or blocks with one entry a lane that are combined after the loop.",
    ),
    hints_for={
        "nan": (
            "Look for a difference of two infinities: a row, or the first blocks of a row, may hold only -inf.",
            "And a sum that overflowed, divided by itself, is NaN too: is the maximum subtracted everywhere?",
            "Where the maximum so far is -inf, subtract 0 instead of it; where the sum is 0, divide by 1.",
        ),
    },
)


# --- tile-order ------------------------------------------------------------------------------------------------


def _strips(order: list[tuple[int, int]], wave: int) -> float:
    """Strips of A (rows of tiles) and of B (columns) that `wave` consecutive programs touch together, on average."""
    waves = [order[start : start + wave] for start in range(0, len(order), wave)]
    return sum(len({row for row, _ in w}) + len({column for _, column in w}) for w in waves) / len(waves)


def _grouped(tiles_m: int, tiles_n: int, group: int) -> list[tuple[int, int]]:
    """The order to compare with: `group` rows of tiles at a time, column after column."""
    starts = range(0, tiles_m, group)
    return [(m, n) for s in starts for n in range(tiles_n) for m in range(s, min(s + group, tiles_m))]


SLACK = 1.1
"""How many times the strips of `_grouped` an order may touch: room for others that are as good, none for rows."""


def _order_found(order: list[tuple[int, int]], tiles_m: int, tiles_n: int, group: int) -> list[tuple[str, str]]:
    """Findings about an order: a tile without a program or with two, or waves that touch many strips."""
    every = {(m, n) for m in range(tiles_m) for n in range(tiles_n)}
    grid = f"{tiles_m} × {tiles_n} tiles"
    if outside := [(p, tile) for p, tile in enumerate(order) if tile not in every]:
        program, tile = outside[0]
        return [("out-of-bounds", f"Of {grid}, program {program} takes tile {tile}, which does not exist.")]
    if missing := sorted(every - set(order)):
        return [("wrong-values", f"Of {grid}, no program takes tile {missing[0]}, and another tile is taken twice.")]
    touched, good = _strips(order, group**2), _strips(_grouped(tiles_m, tiles_n, group), group**2)
    if touched <= SLACK * good:
        return []
    says = (
        f"Of {grid}, each {group**2} consecutive programs touch {touched:.1f} strips of A and B on average; "
        f"groups of {group} rows of tiles would touch {good:.1f}."
    )
    return [("too-many-bytes", says)]


def _tile_order(tiles_m, tiles_n, group):
    return torch.empty((tiles_m * tiles_n, 2), dtype=torch.int32, device="meta")


def _judge_tile_order(inputs, outputs, facts):
    return _order_found([tuple(tile) for tile in outputs.tolist()], *inputs)


TILE_ORDER = Exercise(
    name="tile-order",
    lab=LAB,
    rung="triton",
    entry="tile_order",
    title="An order of tiles that the cache likes",
    form="kernel",
    made_of="triton",
    reference=_tile_order,
    judge=_judge_tile_order,
    cases=(
        Case("8 × 8 tiles, groups of 4 rows", lambda draw: (8, 8, 4), seen=True),
        Case("the last group is one row short", lambda draw: (7, 10, 4)),
        Case("the last group is a single row", lambda draw: (9, 5, 4)),
        Case("one row of tiles", lambda draw: (1, 9, 4)),
        Case("one column of tiles", lambda draw: (9, 1, 4)),
        Case("a single tile", lambda draw: (1, 1, 4)),
        Case("groups of one row", lambda draw: (5, 6, 1)),
        Case("groups larger than the matrix", lambda draw: (3, 21, 8)),
        Case("a tall matrix", lambda draw: (67, 12, 5)),
        Case(
            "sizes that nobody knows before", lambda draw: (*(draw.integer(17, 60) for _ in "mn"), draw.integer(3, 6))
        ),
    ),
    hints=(
        "Draw the 8 × 8 tiles and number them so that the first 16 programs fill a square of 4 × 4. Which number "
        "do the first tile of the second square and the first tile of the fifth row have?",
        "Cut the rows of tiles into groups of GROUP. A group holds GROUP · tiles_n programs and is walked column by "
        "column. The last group may have fewer rows: then its columns are shorter, and a wrong divisor skips tiles.",
        "first = program // (GROUP · tiles_n) · GROUP; height = min(GROUP, tiles_m - first); place = program % "
        "(GROUP · tiles_n); row = first + place % height; column = place // height.",
    ),
)


# --- review-a-kernel -------------------------------------------------------------------------------------------


def _matmul_gelu(a, b, tile, group):
    tiles = -(-a.shape[0] // tile), -(-b.shape[1] // tile)
    return _gelu(a @ b), torch.empty(tiles, dtype=torch.int32, device="meta")


def _product(m, n, k, tile=16, group=4, put=lambda x: x):
    def inputs(draw):
        return put(draw(m, k, dtype=torch.float16)), put(draw(k, n, dtype=torch.float16)), tile, group

    return inputs


def _judge_matmul_gelu(inputs, outputs, facts):
    owner, group = outputs[1], inputs[3]
    walked = sorted((program, divmod(i, owner.shape[1])) for i, program in enumerate(owner.flatten().tolist()))
    if [program for program, _ in walked] != list(range(owner.numel())):
        return [("wrong-values", f"owner should name each of the programs 0 to {owner.numel() - 1} once; it does not.")]
    return _order_found([tile for _, tile in walked], *owner.shape, group)


REVIEW_A_KERNEL = Exercise(
    name="review-a-kernel",
    lab=LAB,
    rung="triton",
    entry="matmul_gelu",
    title="Review a kernel from an article",
    form="rewrite",
    made_of="triton",
    dtype=torch.float32,
    reference=_matmul_gelu,
    scale=lambda a, b, tile, group: a.abs() @ b.abs(),  # a sum that happens to be near 0 is not more exact for it
    judge=_judge_matmul_gelu,
    cases=(
        Case("sizes that end inside a tile", _product(40, 50, 37), seen=True),
        Case("exactly one tile", _product(16, 16, 16)),
        Case("a single element", _product(1, 1, 1)),
        Case("one row", _product(1, 65, 33)),
        Case("one column", _product(35, 1, 20)),
        Case("a sum shorter than a tile", _product(33, 17, 5), kind="outliers"),
        Case("a sum far from zero", _product(20, 34, 50), kind="offset"),
        Case("a long sum", _product(9, 10, 150)),
        Case("rows further apart than they are long", _product(21, 39, 18, put=padded)),
        Case("8 × 8 tiles, walked in groups of 3", _product(125, 121, 9, group=3)),
        Case("larger tiles, 4 × 3", _product(110, 70, 40, tile=32, group=2)),
        Case("1000 × 1100 × 700", _product(1000, 1100, 700, tile=64, group=3), mode="gpu"),
    ),
    hints=(
        "Three faults, of three kinds: one line cannot run; some lanes read what is not theirs although the result is "
        "right; one line decides how far the data of neighbouring programs lie apart. Let the check name them one at a "
        "time.",
        "Ask of each name of `tl` whether it exists (`hasattr(tl, …)`). Ask of each load what its address is for the "
        "last lanes of the last tile, in both directions. Ask which strips of A and of B the first GROUP² programs "
        "read.",
        "GELU: total · sigmoid(2 · 0.7978845608 · (total + 0.044715 · total³)). Mask of a: rows < M and along < K; "
        "mask of b: down < K and columns < N. The tile of a program: groups of GROUP rows, as in `tile_of`.",
    ),
    hints_for={
        "exception": (
            "The message names what the language does not have. Which function does the article need it for? "
            "(libdevice has one on a GPU, and gives nothing back in the interpreter.)",
            "tanh(u) = 2 · sigmoid(2u) - 1, and `tl.sigmoid` exists.",
        ),
        "out-of-bounds": (
            "The result is right because the store is masked; the load is not less dangerous for that. Which of the "
            "two directions of this tile has no mask?",
            "A tile of a needs rows < M and along < K, a tile of b needs down < K and columns < N.",
        ),
        "too-many-bytes": (
            "Write down row and column of the first GROUP² programs. How many different ones are there?",
            "A square of GROUP × GROUP tiles needs 2 · GROUP strips; a column of GROUP² tiles needs GROUP² + 1.",
            "Call the `tile_of` of the exercise before, or write its lines here.",
        ),
    },
    seconds=20,
)


EXERCISES = (MASKED_ADD, SEEDED_DROPOUT, BIAS_GELU, RMSNORM, ROW_SOFTMAX, TILE_ORDER, REVIEW_A_KERNEL)
