"""Lab 10: kernels that hands still write, from one row times a matrix to sums that are split between blocks."""

from math import ceil

import torch

from . import Case, Exercise, Limit, far, padded

LAB = "10_hand_written"
HALF = torch.float16
FAR_BYTES = 18 << 30
"""Three rows of float32 whose last lies beyond element 2**32: neither an int nor an unsigned int holds its offset."""


def _warps(rows: int, cols: int, each: int = 32) -> int:
    """Requests that it takes to go through rows x cols elements, row by row, with `each` elements a warp."""
    return rows * ceil(cols / each)


# ----------------------------------------------------------------------------------------------------------------------


def _gemv(x, w):
    return (w * x).sum(1)


def _row_and_matrix(d, rows: int, cols: int) -> tuple:
    """x of `cols` elements and w, whose rows begin at multiples of 16 bytes; behind a row lies NaN."""
    return d(cols).half(), padded(d(rows, cols).half(), -cols % 8)


vector_gemv = Exercise(
    name="vector-gemv",
    lab=LAB,
    rung="cuda",
    entry="gemv",
    title="One row times a matrix, sixteen bytes at a time",
    form="rewrite",
    made_of="cuda",
    core=True,
    reference=_gemv,
    dtype=torch.float32,
    scale=lambda x, w: (w * x).abs().sum(1),
    cases=(
        Case("6 rows of 1024", lambda d: _row_and_matrix(d, 6, 1024), seen=True),
        Case("7 rows of 1003: three elements more than whole pieces", lambda d: _row_and_matrix(d, 7, 1003), seen=True),
        Case("70 rows of 520", lambda d: _row_and_matrix(d, 70, 520)),
        Case("rows of 8: a single piece", lambda d: _row_and_matrix(d, 9, 8), kind="outliers"),
        Case("3 rows of 3001: many rounds of pieces", lambda d: _row_and_matrix(d, 3, 3001)),
        Case("rows of 7: no whole piece", lambda d: _row_and_matrix(d, 5, 7)),
        Case("rows of 263, far from zero", lambda d: _row_and_matrix(d, 4, 263), kind="offset"),
        Case("small integers, rows of 777", lambda d: _row_and_matrix(d, 8, 777), kind="integers", exact=True),
        Case(
            "rows that lie much further apart than they are long",
            lambda d: (d(300).half(), padded(d(5, 300).half(), 84)),
            kind="outliers",
        ),
        Case("one element", lambda d: _row_and_matrix(d, 1, 1)),
        Case("rows without elements: their product is 0", lambda d: _row_and_matrix(d, 3, 0), exact=True),
        Case("no rows", lambda d: _row_and_matrix(d, 0, 40)),
        Case(
            "the last row beyond element 2^32",
            lambda d: (d(140).half(), far(d(3, 140).half(), 2**32)),
            memory_bytes=FAR_BYTES // 2,
        ),
        Case("1001 rows of 4099", lambda d: _row_and_matrix(d, 1001, 4099), mode="gpu"),
    ),
    limits=(
        Limit(
            "load_requests",
            lambda x, w: 1.25 * (2 * _warps(*w.shape, 256) + 2 * w.shape[0]),
            "too-slow",
            "The warps ask global memory {fact} times, and {most} times are enough: let each lane load 16 bytes, of w "
            "and of x, and only what is left at a row's end element by element.",
        ),
        Limit(
            "sectors",
            lambda x, w: 1.25 * (2 * _warps(*w.shape, 16) + 6 * w.shape[0]),
            "too-many-bytes",
            "The warps' requests touch {fact} sectors of 32 bytes, and {most} are enough: neighbouring lanes should "
            "load neighbouring pieces, and one lane should store the sum.",
        ),
        Limit(
            "atomics",
            lambda x, w: 0,
            "forbidden",
            "Threads add to global memory {fact} times; this exercise is about sums that lanes make by shuffles.",
        ),
    ),
    hints=(
        "A piece of 16 bytes is eight fp16 numbers. How many pieces has a row, which of them are lane 5's, and how "
        "many elements are left behind the last whole piece?",
        "View a row and x as arrays of `uint4`. Lane l takes pieces l, l + 32, l + 64, …; each is four `__half2`, "
        "which `__half22float2` makes floats of. Elements behind the last whole piece are loaded one by one. Then the "
        "32 sums are added with shuffles, and lane 0 stores.",
        "sum = 0; for p from lane, below cols / 8, in steps of 32: {a = row as uint4 [p]; b = x as uint4 [p]; for each "
        "of four pairs: sum += both products}; for c from cols / 8 * 8 + lane, below cols, in steps of 32: sum += "
        "row[c] * x[c]. For d = 16, 8, 4, 2, 1: sum += the sum of lane + d. Lane 0: y[row] = sum.",
    ),
    hints_for={
        "out-of-bounds": ("How many whole pieces does a row have? The last, begun piece is not yours to load.",),
        "nan": (
            "Behind the end of a row lies what does not belong to it. Does a piece of yours reach beyond cols?",
            "All 32 lanes call a shuffle: what would it give of a lane that has left?",
        ),
        "precision": ("In which type are the products added up?",),
        "deadlock": ("All 32 lanes call a shuffle, also those whose part of the row is empty.",),
    },
)


# ----------------------------------------------------------------------------------------------------------------------


def _parts(packed, scales, zeros, group):
    """Of each weight: its four bits, its zero and its scale, (rows, cols) each."""
    col = torch.arange(8 * packed.shape[1])
    q = packed[:, col // 8] >> (4 * (col % 8)) & 15
    return q, zeros[:, col // group], scales[:, col // group]


def _int4_product(x, packed, scales, zeros, group):
    q, zero, scale = _parts(packed, scales, zeros, group)
    return ((q - zero) * scale * x).sum(1)


def _int4_size(x, packed, scales, zeros, group):
    q, zero, scale = _parts(packed, scales, zeros, group)
    return ((q + zero) * scale * x).abs().sum(1)


def _quantised(d, rows: int, cols: int, group: int, exact: bool = False) -> tuple:
    """x; weights of four bits, eight in a word; for each `group` columns of a row a scale and a zero, in fp16."""
    words, groups = d.integers(-(2**31), 2**31, rows, cols // 8), ceil(cols / group)
    scales = 2.0 ** d.integers(-2, 3, rows, groups) if exact else 0.05 * d(rows, groups, kind="normal").abs() + 0.01
    return d(cols).half(), words, scales.half(), d.integers(0, 16, rows, groups).half(), group


def _without_scales(d) -> tuple:
    """Every second group has the scale 0."""
    x, words, scales, zeros, group = _quantised(d, 5, 256, 32)
    scales[:, ::2] = 0
    return x, words, scales, zeros, group


def _int4_sectors(packed) -> float:
    """Words and x once for each row, and scales and zeros where at worst each word has its own."""
    return 12 * _warps(*packed.shape) + packed.numel() / 2 + packed.shape[0]


int4_unpack = Exercise(
    name="int4-unpack",
    lab=LAB,
    rung="cuda",
    entry="int4_product",
    title="Eight weights in a word, and no conversion",
    form="kernel",
    made_of="cuda",
    core=True,
    reference=_int4_product,
    dtype=torch.float32,
    scale=_int4_size,
    cases=(
        Case("6 rows of 512, groups of 128", lambda d: _quantised(d, 6, 512, 128), seen=True),
        Case("5 rows of 200, groups of 64: the last is short", lambda d: _quantised(d, 5, 200, 64), seen=True),
        Case("groups of 8: one word each", lambda d: _quantised(d, 9, 72, 8)),
        Case("a group longer than a row", lambda d: _quantised(d, 4, 96, 128)),
        Case("one word", lambda d: _quantised(d, 3, 8, 8), kind="outliers"),
        Case("33 words, one more than lanes", lambda d: _quantised(d, 7, 264, 24), kind="outliers"),
        Case("3 rows of 2008: many rounds of words", lambda d: _quantised(d, 3, 2008, 64)),
        Case("x far from zero", lambda d: _quantised(d, 4, 320, 64), kind="offset"),
        Case(
            "small integers, scales that are powers of two", lambda d: _quantised(d, 8, 400, 40, True), "integers", True
        ),
        Case(
            "all bits set",
            lambda d: (d(64).half(), torch.full((3, 8), -1, dtype=torch.int32), *_quantised(d, 3, 64, 16)[2:]),
        ),
        Case("every second group has the scale 0", _without_scales),
        Case("no rows", lambda d: _quantised(d, 0, 64, 32)),
        Case("1001 rows of 4096, groups of 128", lambda d: _quantised(d, 1001, 4096, 128), mode="gpu"),
    ),
    limits=(
        Limit(
            "int_to_float",
            lambda *inputs: 0,
            "forbidden",
            "The compiled kernel converts integers to floating-point numbers in {fact} places. The exercise asks for "
            "none: put the four bits under the exponent of a number that you know, and subtract that number.",
        ),
        Limit(
            "load_requests",
            lambda x, packed, *rest: 1.25 * 7 * _warps(*packed.shape),
            "too-slow",
            "The warps ask global memory {fact} times, and {most} times are enough: a lane loads a word of eight "
            "weights at once, and the eight elements of x that belong to it as 16 bytes.",
        ),
        Limit(
            "load_sectors",
            lambda x, packed, *rest: 1.25 * _int4_sectors(packed),
            "too-many-bytes",
            "The warps' loads touch {fact} sectors of 32 bytes, and {most} are enough: neighbouring lanes should load "
            "neighbouring words of one row.",
        ),
    ),
    hints=(
        "Take one word and write down which of its bits `word & 0x000f000f` keeps. Of which two columns are they? And "
        "what is the fp16 number with the bits 0x6400: what does its last bit weigh?",
        "0x6400 is 1024, and its last bit weighs 1. So `0x6400 | q` is 1024 + q, without a conversion, and one `&` and "
        "one `|` make two such numbers, of the columns j and j + 4. Subtract 1024 and the zero: all of it is exact in "
        "fp16, since whole numbers up to 2048 are. `__byte_perm` brings x into the same pairs.",
        "for c from lane, below words, in steps of 32: {word = packed[c]; x = 16 bytes, as (x0 x1), (x2 x3), (x4 x5), "
        "(x6 x7); pairs (x0 x4), (x1 x5), (x2 x6), (x3 x7) by __byte_perm with 0x5410 and 0x7632; part = 0; for j "
        "below 4: q = (word >> 4 j & 0x000f000f) | 0x64006400 as half2, minus (1024 + zero) twice; part += q.x * x_j + "
        "q.y * x_(j + 4), in float; sum += scale * part, scale and zero those of group 8 c / group}. Then the "
        "shuffles.",
    ),
    hints_for={
        "wrong-values": (
            "Which cases are right? With one word a row only the order of the eight weights counts; the group comes in "
            "with longer rows.",
            "Which columns do the two halves of `word >> 4 * j & 0x000f000f` belong to, and which elements of x do you "
            "multiply them with?",
        ),
        "precision": (
            "Whole numbers up to 2048 are exact in fp16; a product with x is not. From which step on is it float?",
        ),
        "crash": ("16 bytes are loaded from a multiple of 16 bytes. At which element of x does word c begin?",),
    },
)


# ----------------------------------------------------------------------------------------------------------------------


def _top_k(x, k):
    values, columns = x.sort(dim=1, descending=True, stable=True)
    return values[:, :k].contiguous(), columns[:, :k].to(torch.int32)


def _zeros_of_both_signs(d) -> torch.Tensor:
    return torch.where(d(6, 50) > 0, 0.0, -0.0)


warp_top_k = Exercise(
    name="warp-top-k",
    lab=LAB,
    rung="cuda",
    entry="warp_top_k",
    title="The best k of a row, kept by a warp",
    form="kernel",
    made_of="cuda",
    core=True,
    reference=_top_k,
    dtype=torch.float32,
    cases=(
        Case("6 rows of 100, the best 8", lambda d: (d(6, 100), 8), exact=True, seen=True),
        Case("small integers, many of them equal", lambda d: (d(5, 90), 12), kind="integers", exact=True, seen=True),
        Case("rows of 32, the best 32: all of them in order", lambda d: (d(5, 32), 32), kind="outliers", exact=True),
        Case("rows of 33, one more than lanes, the best 32", lambda d: (d(4, 33), 32), exact=True),
        Case("the best one, far from zero", lambda d: (d(7, 130), 1), kind="offset", exact=True),
        Case("2 rows of 900: many rounds of columns", lambda d: (d(2, 900), 20), exact=True),
        Case("rows of 5, all of them", lambda d: (d(9, 5), 5), exact=True),
        Case("all elements equal", lambda d: (d(1, 1).expand(3, 70).contiguous(), 9), exact=True),
        Case("all elements minus infinity", lambda d: (torch.full((2, 45), -float("inf")), 7), exact=True),
        Case("zeros of both signs are equal", lambda d: (_zeros_of_both_signs(d), 10), exact=True),
        Case("each element larger than all before", lambda d: (d(2, 99).sort(dim=1).values, 20), exact=True),
        Case(
            "each element smaller than all before", lambda d: (d(2, 99).sort(dim=1, descending=True)[0], 20), exact=True
        ),
        Case("rows that lie further apart than they are long", lambda d: (padded(d(5, 61)), 6), exact=True),
        Case("one element", lambda d: (d(1, 1), 1), exact=True),
        Case("no rows", lambda d: (d(0, 40), 4), exact=True),
        Case(
            "the last row beyond element 2^32",
            lambda d: (far(d(3, 70), 2**32), 3),
            exact=True,
            memory_bytes=FAR_BYTES,
        ),
        Case("2001 rows of 1003, the best 17", lambda d: (d(2001, 1003), 17), exact=True, mode="gpu"),
        Case("rows of 3000 small integers, the best 31", lambda d: (d(40, 3000), 31), "integers", True, mode="gpu"),
    ),
    limits=(
        Limit(
            "bank_ways",
            lambda x, k: 0.0,
            "forbidden",
            "The kernel uses shared memory; this exercise is about registers that lanes hand to one another.",
        ),
        Limit(
            "local_bytes",
            lambda x, k: 0,
            "too-slow",
            "A thread keeps {fact} bytes in local memory: the best k are a register of each lane, not an array of one.",
        ),
        Limit(
            "load_requests",
            lambda x, k: 1.25 * _warps(*x.shape),
            "too-slow",
            "The warps ask global memory {fact} times, and {most} times are enough: each row is read once, by all 32 "
            "lanes together.",
        ),
        Limit(
            "sectors",
            lambda x, k: 5 * _warps(*x.shape) + 20 * x.shape[0],
            "too-many-bytes",
            "The warps' requests touch {fact} sectors of 32 bytes, and {most} are enough: neighbouring lanes should "
            "load neighbouring elements, and store neighbouring results.",
        ),
    ),
    hints=(
        "Lane i holds the i-th best so far. Somebody offers a value: how does each lane know whether what it holds "
        "comes before it, and how do all know at which place it belongs?",
        "The lanes whose own comes before the offer are the first ones, since what they hold is in order: a ballot, "
        "and `__popc` of it is the place. Lanes behind it take over what the lane below them holds (`__shfl_up_sync`), "
        "the lane of that number takes the offer. A first ballot, against what lane k - 1 holds, says who has anything "
        "to offer at all: most turns nobody.",
        "held = minus infinity, at = cols. For each 32 columns: load, or nothing where the row ends; waiting = "
        "ballot(I have an element, and it is larger than lane k - 1's, or that one is still empty); while waiting: "
        "{from = its lowest bit, taken out; offer = shuffle(value, from); place = popc(ballot(held > offer, or equal "
        "and at < cols)); above, above_at = shuffles up by one; lane > place: take these; lane == place: take offer "
        "and its column}. Lanes below k store.",
    ),
    hints_for={
        "deadlock": (
            "Every lane that the mask names must come to a shuffle and to a ballot, also a lane whose column does not "
            "exist. Are all your branches around them the same for the whole warp?",
        ),
        "wrong-values": (
            "Which cases are right? With equal elements only the comparison counts: an offer belongs behind what is "
            "equal to it, since that stood further left.",
            "What is held by a lane that nobody has offered anything yet, and does an element of minus infinity come "
            "before it?",
        ),
    },
)


# ----------------------------------------------------------------------------------------------------------------------


def _split_dots(a, b, splits):
    products = a * b
    each = ceil(a.shape[1] / splits)
    filled = torch.nn.functional.pad(products, (0, each * splits - a.shape[1]))
    parts = filled.view(-1, splits, each).sum(2) if each else products.new_zeros(a.shape[0], splits)
    return products.sum(1), products.sum(1), parts.T.contiguous()


def _judge_ways(inputs, outputs, facts):
    """Sums do not say how they were added; that the first way was taken, only the number of atomics does."""
    a, _, splits = inputs
    rows, cols = a.shape
    parts = rows * ceil(cols / ceil(cols / splits)) if cols else 0
    added = facts.get("atomics", parts)  # what a GPU does is not counted
    if splits == 1 or added >= parts:
        return []
    said = f"Both results are right, but threads update global memory atomically {added:,} times, and {parts:,} blocks "
    return [("forbidden", f"{said}have a part: in the first way each adds its own to the result by an atomic.")]


def _two(d, rows: int, cols: int, splits: int) -> tuple:
    return d(rows, cols), d(rows, cols), splits


two_ways_to_split = Exercise(
    name="two-ways-to-split",
    lab=LAB,
    rung="cuda",
    entry="split_dots",
    title="Two ways to split a sum: atomics, or a second pass",
    form="kernel",
    made_of="cuda",
    reference=_split_dots,
    scale=lambda a, b, splits: (a * b).abs().sum(1),
    judge=_judge_ways,
    same_bits=(1, 2),
    seconds=20,
    cases=(
        Case("2 rows of 3000 between 6 blocks", lambda d: _two(d, 2, 3000, 6), seen=True),
        Case("3 rows of 1003 between 4 blocks: no equal parts", lambda d: _two(d, 3, 1003, 4), seen=True),
        Case("one row of 5003 between 140 blocks", lambda d: _two(d, 1, 5003, 140), kind="outliers"),
        Case("1 block a row of 2100: nothing is split", lambda d: _two(d, 3, 2100, 1)),
        Case("more blocks than elements: some have nothing", lambda d: _two(d, 3, 7, 12)),
        Case("9 elements between 4 blocks: the last has nothing", lambda d: _two(d, 2, 9, 4), kind="outliers"),
        Case("far from zero", lambda d: _two(d, 4, 900, 5), kind="offset"),
        Case("small integers", lambda d: _two(d, 3, 1500, 8), kind="integers", exact=True),
        Case("140 short rows, one block each", lambda d: _two(d, 140, 5, 1)),
        Case(
            "rows of a and of b that lie further apart than they are long, each by its own pitch",
            lambda d: (padded(d(3, 600), 3), padded(d(3, 600), 50), 5),
        ),
        Case("rows without elements: their product is 0", lambda d: _two(d, 3, 0, 4), exact=True),
        Case("no rows", lambda d: _two(d, 0, 50, 4)),
        Case(
            "the last row of a beyond element 2^32",
            lambda d: (far(d(3, 90), 2**32), d(3, 90), 2),
            memory_bytes=FAR_BYTES,
        ),
        Case(
            "the last row of b beyond element 2^32",
            lambda d: (d(3, 90), far(d(3, 90), 2**32), 2),
            memory_bytes=FAR_BYTES,
        ),
        Case("8 rows of 1,000,003 between 100 blocks", lambda d: _two(d, 8, 1_000_003, 100), mode="gpu"),
    ),
    limits=(
        Limit(
            "launches",
            lambda a, b, splits: 3,
            "too-many-kernels",
            "It launches {fact} kernels, and {most} are enough: one that adds at once, one that keeps the parts, one "
            "that adds these up.",
        ),
        Limit(
            "load_sectors",
            lambda a, b, splits: 2 * a.shape[0] * splits * (10 * ceil(ceil(a.shape[1] / splits) / 32) + 10),
            "too-many-bytes",
            "The warps' loads touch {fact} sectors of 32 bytes, and {most} are enough: a block reads its own part of a "
            "row, neighbouring threads neighbouring elements.",
        ),
        Limit(
            "atomics",
            lambda a, b, splits: 8 * a.shape[0] * splits,
            "too-slow",
            "Threads update global memory atomically {fact} times, and {most} are more than enough: a block has one "
            "part to hand on, and one thread does it.",
        ),
    ),
    hints=(
        "Which columns does block 2 of 6 have, if there are 3000 of them, and if there are 7? Who may write `out[row]` "
        "in the first way, and what stands there before anybody has?",
        "With atomics the result must be zero before the launch, and each block adds its part whenever it is done: in "
        "an order that nobody knows, and float addition depends on it. In the second way each part has a place of its "
        "own, and one thread adds a row's parts from the first to the last. A launch on the same stream begins when "
        "the one before it has ended.",
        "each = ceil(cols / splits); first = split * each; last = min(first + each, cols); sum the products of own "
        "columns in steps of the block, then block_sum. First way: thread 0 does atomicAdd(&out[row], part). Second: "
        "thread 0 does parts[split * rows + row] = part; in the second kernel a thread for each row adds its splits "
        "parts in order. In Python: zeros for the first, (splits, rows) of parts for the second.",
    ),
    hints_for={
        "race": (
            "The second result must not depend on which block ends first. Is there a place for each block's part, and "
            "one thread that adds them in the order of their numbers?",
        ),
        "unwritten": ("A row without elements has a result too, and a block without elements a part: 0.",),
        "nan": ("What stands in the result before the first block adds to it? And in a part that nobody wrote?",),
        "deadlock": ("All threads of a block call `block_sum`, also those without an element.",),
    },
)


# ----------------------------------------------------------------------------------------------------------------------

NEAR_A_HALF = 127 * 2.0**-21
"""How near to a half a quotient of float32 may come before either neighbour is right: by a division, and by a product
with the reciprocal, it differs in the last bits. Where the scale is a power of two, both are exact."""


def _block_scales(x, span):
    """The largest |x| of each head's `span` tokens over 127, rounded to float32; x: (heads, tokens, d) float64."""
    if not x.numel():
        return x.new_zeros(len(x), ceil(x.shape[1] / span))
    largest = torch.stack([part.abs().amax((1, 2)) for part in x.split(span, 1)], 1)
    return (largest.float() / 127).double()


def _quantise_cache(x, span):
    return torch.empty(x.shape, dtype=torch.int8, device="meta"), _block_scales(x, span)


def _judge_codes(inputs, outputs, facts):
    """Codes against the best ones, by the error that each leaves in the restored cache, in steps of the scale."""
    x, span = inputs[0].double(), inputs[1]
    codes, scales = outputs[0].double(), outputs[1].view(torch.float32).double()
    if not codes.numel():
        return []
    wide = [s.repeat_interleave(span, 1)[:, : x.shape[1], None] for s in (_block_scales(x, span), scales)]
    step = torch.where(wide[0] > 0, wide[0], 1.0)
    exact, best = x / step, torch.round(x / step)
    allowed = torch.where(torch.frexp(step).mantissa == 0.5, 0.0, NEAR_A_HALF)
    off = ((codes - exact).abs() > (best - exact).abs() + allowed) | ((allowed == 0) & (codes != best))
    if not off.any():
        return []
    at = off.nonzero()[0].tolist()
    scale = wide[0].expand_as(x)[tuple(at)].item()
    said = f"{int(off.sum()):,} of {off.numel():,} codes are wrong. At {at}, x is {x[tuple(at)].item():.6g} and the "
    said += f"scale {scale:.6g}" + (f", so x / scale is {exact[tuple(at)].item():.7g}" if scale else "")
    said += f"; the code is {int(codes[tuple(at)])}."
    if bool((off == (off & (exact - exact.floor() == 0.5))).all()):
        said += " Only quotients exactly between two codes are wrong: of two equally near, the even one is asked for."
    else:
        mine, least = (((c * wide[1] - x) / step).square().mean().sqrt().item() for c in (codes, best))
        said += (
            f" Restored from its codes, the cache is off by {mine:.3g} of a step (rms), and {least:.3g} is possible."
        )
    return [("wrong-values", said)]


def _cache(heads, tokens, d, span, put=lambda x: x):
    return lambda draw: (put(draw(heads, tokens, d, dtype=HALF)), span)


def _some_empty(draw):
    """Blocks of four tokens: one all zeros, one all zeros but for a sign, one with zeros in all tokens but the last."""
    x = draw(3, 18, 40, dtype=HALF)
    x[0, 4:8], x[1, :4], x[2, 12:15] = 0, -0.0, 0
    return x, 4


def _halves(draw):
    """Blocks of three tokens whose scale is a power of two, all elements halves of it: every second one is a tie."""
    x = draw.integers(-254, 255, 2, 11, 48).double() / 2
    x[:, ::3, 9] = torch.where(draw.integers(0, 2, 2, 4) > 0, 127.0, -127.0)
    powers = 2.0 ** draw.integers(-7, 9, 2, 4).double().repeat_interleave(3, 1)[:, :11, None]
    return (x * powers).to(HALF), 3


def _roomy(x):
    """The values of x in a cache with room for more tokens, which nobody has written yet."""
    whole = torch.full((x.shape[0], x.shape[1] + 7, x.shape[2]), float("nan"), dtype=x.dtype)
    return whole[:, : x.shape[1]].copy_(x)


def _cache_sectors(x, span) -> int:
    """Of 32 neighbouring elements, 3 sectors of x and 2 of the codes; and either the ends of the tokens that they lie
    in, or the last elements of a token by themselves."""
    heads, tokens, d = x.shape
    n = min(span, tokens)
    return heads * ceil(tokens / span) * (max(ceil(n * d / 32) * (5 + ceil(31 / d)), n * ceil(d / 32) * 5) + 1)


quantise_cache = Exercise(
    name="quantise-cache",
    lab=LAB,
    rung="cuda",
    entry="quantise_cache",
    title="A cache in 8 bits, a scale for each block of tokens",
    form="kernel",
    made_of="cuda",
    reference=_quantise_cache,
    dtype=torch.float32,
    scale=lambda x, span: _block_scales(x, span),
    judge=_judge_codes,
    cases=(
        Case("3 heads, 24 tokens of 64, a scale for every 8", _cache(3, 24, 64, 8), seen=True),
        Case("blocks of zeros among others", _some_empty, seen=True),
        Case("quotients exactly between two codes", _halves),
        Case("a scale for each token, outliers", _cache(2, 7, 48, 1), kind="outliers"),
        Case("a scale for every 16 tokens, outliers", _cache(2, 40, 33, 16), kind="outliers"),
        Case("the last block shorter, far from zero", _cache(2, 21, 40, 8), kind="offset"),
        Case("fewer tokens than a block", _cache(2, 10, 35, 64)),
        Case("the largest is negative", _cache(2, 9, 65, 4, lambda x: -x.abs())),
        Case("tiny numbers", _cache(2, 6, 50, 3, lambda x: x * 1e-5)),
        Case("large numbers", _cache(2, 6, 50, 3, lambda x: x.clamp(-3, 3) * 20_000)),
        Case("a cache with room for more tokens", _cache(3, 10, 32, 4, _roomy)),
        Case("tokens that lie further apart than they are long", _cache(2, 9, 41, 4, padded)),
        Case("16,384 numbers a block, the most", _cache(1, 65, 256, 64)),
        Case("one number a token", _cache(2, 37, 1, 32)),
        Case("one element", _cache(1, 1, 1, 1)),
        Case("no tokens", _cache(3, 0, 64, 8)),
        Case("no heads", _cache(0, 9, 64, 8)),
        Case(
            "the last head beyond element 2^32",
            lambda draw: (far(draw(3, 40, dtype=HALF), 2**32).unsqueeze(1), 2),
            memory_bytes=FAR_BYTES // 2,
        ),
        Case(
            "the last token beyond element 2^32",
            lambda draw: (far(draw(3, 40, dtype=HALF), 2**32).unsqueeze(0), 4),
            memory_bytes=FAR_BYTES // 2,
        ),
        Case("16 heads, 4096 tokens of 128, a scale for every 64", _cache(16, 4096, 128, 64), mode="gpu"),
    ),
    limits=(
        Limit(
            "bytes",
            lambda x, span: 3 * x.numel() + 4 * x.shape[0] * ceil(x.shape[1] / span),
            "too-many-bytes",
            "The kernel asks for {fact} bytes of global memory; {most} are enough where each number is read once, and "
            "nothing but its code and one scale a block is written.",
        ),
        Limit(
            "sectors",
            _cache_sectors,
            "too-many-bytes",
            "The warps' requests touch {fact} sectors of 32 bytes, and {most} are enough: let neighbouring threads "
            "take neighbouring elements of a token.",
        ),
    ),
    hints=(
        "No code can be written before the largest magnitude of all `span` tokens is known, and the numbers may be "
        "read once. Where do they wait? What does a block of zeros divide by, and which instruction rounds a half to "
        "the even neighbour?",
        "Each thread takes every 128th number of the block, keeps it in `kept`, and remembers its largest magnitude. "
        "Shuffles make one maximum of a warp, four words of shared memory one of the block. A conversion by a cast "
        "cuts off; `__float2int_rn` rounds to the nearest, and a half to even.",
        "n = min(span, tokens - first) * d; for i from the thread's number, below n, in steps of the block: load "
        "element i % d of token first + i / d, keep it, raise `largest`; maximum over the warp, lane 0 writes "
        "`most[warp]`; barrier; maximum of the four; scale = largest / 127; for own i: code = scale > 0 ? "
        "round(kept[i] / scale) : 0; one thread writes the scale.",
    ),
    hints_for={
        "race": ("Which warp's maximum does this thread read, and what makes sure that it has been written?",),
        "out-of-bounds": ("How many tokens has the last block of a head?",),
        "nan": ("How many tokens has the last block of a head, and what lies behind them?",),
        "too-many-bytes": (
            "The values are right. How often is each number read from global memory, and who stores the scale?",
        ),
    },
)


# ----------------------------------------------------------------------------------------------------------------------

TALL, WIDE = 8, 32
"""Rows and columns of a block of the sparse matrix."""


def _sparse_product(mask, first, blocks, x, m):
    rows, columns = mask.nonzero(as_tuple=True)
    wide = torch.nn.functional.pad(x, (0, mask.shape[1] * WIDE - len(x))).view(-1, 1, WIDE)
    parts = (blocks.nan_to_num() * wide[columns]).sum(2)  # what lies beyond the matrix is NaN, and no part of it
    return parts.new_zeros(mask.shape[0], TALL).index_add(0, rows, parts).flatten()[:m]


def _stored(draw, mask, m, n, put=lambda blocks: blocks):
    """The arguments for a mask (its blocks drawn): what of an outer block lies beyond the matrix is NaN."""
    rows, columns = mask.nonzero(as_tuple=True)
    blocks = draw(len(rows), TALL, WIDE)
    inside = (rows[:, None] * TALL + torch.arange(TALL) < m)[:, :, None]
    inside = inside & (columns[:, None] * WIDE + torch.arange(WIDE) < n)[:, None]
    counts = (mask > 0).sum(1)
    first = (counts.cumsum(0) - counts).to(torch.int32)
    x = draw(n, kind="integers" if draw.kind == "integers" else "normal")
    return mask, first, put(blocks.where(inside, float("nan"))), x, m


def _mask(draw, m, n, percent):
    """Bytes for an m x n matrix of which about `percent` of the blocks are there: zero, or any other value."""
    shape = ceil(m / TALL), ceil(n / WIDE)
    there = draw.integers(0, 100, *shape) < percent
    return torch.where(there, draw.integers(1, 256, *shape), 0).to(torch.uint8)


def _sparse(m, n, percent):
    return lambda draw: _stored(draw, _mask(draw, m, n, percent), m, n)


def _some_masked(draw):
    """Rows of blocks with nothing in them: the first, the last, and two in the middle."""
    mask = _mask(draw, 62, 1200, 40)
    mask[[0, 3, 4, -1]] = 0
    return _stored(draw, mask, 62, 1200)


def _corners(draw):
    """Blocks at the ends of the words that a ballot makes, and nowhere else: of nine words, two or three a warp."""
    mask = torch.zeros(2, 289, dtype=torch.uint8)
    mask[0, [0, 31, 32, 63, 127, 128, 159, 256]] = 1
    mask[1, [31, 64, 95, 96, 160, 255, 288]] = 128
    return _stored(draw, mask, 16, 289 * WIDE)


def _far_blocks(draw):
    """Three blocks, a row of blocks each, so far apart that the last lies beyond element 2**32."""
    mask = torch.tensor([[1, 0], [1, 0], [0, 1]], dtype=torch.uint8)
    return _stored(draw, mask, 24, 64, lambda blocks: far(blocks.flatten(1), 2**32).unflatten(1, (TALL, WIDE)))


def _walk_requests(mask, first, blocks, x, m) -> int:
    """A set block: its rows and its part of x. A row of blocks, for each of four warps: `first`, and once
    more, and the mask."""
    return len(blocks) * (TALL + 1) + 4 * mask.shape[0] * (2 + ceil(mask.shape[1] / 32))


def _walk_sectors(mask, first, blocks, x, m) -> int:
    """As `_walk_requests`: five sectors for 32 floats that need not be aligned, two for 32 bytes."""
    return len(blocks) * (TALL + 1) * 5 + 4 * mask.shape[0] * (2 + 2 * ceil(mask.shape[1] / 32))


mask_walk = Exercise(
    name="mask-walk",
    lab=LAB,
    rung="cuda",
    entry="sparse_product",
    title="Walk a mask: blocks that are not there cost nothing",
    form="kernel",
    made_of="cuda",
    reference=_sparse_product,
    dtype=torch.float32,
    scale=lambda mask, first, blocks, x, m: _sparse_product(mask, first, blocks.abs(), x.abs(), m),
    cases=(
        Case("a matrix of 40 x 320, half of its blocks", _sparse(40, 320, 50), seen=True),
        Case("rows of blocks with nothing in them", _some_masked, seen=True),
        Case("blocks at the ends of words only", _corners),
        Case("small integers, 160 columns of blocks, a tenth of them", _sparse(24, 5120, 10), "integers", exact=True),
        Case("all blocks, far from zero", _sparse(16, 1056, 100), kind="offset"),
        Case("141 columns of blocks, a fifth of them, outliers", _sparse(24, 4500, 20), kind="outliers"),
        Case("33 columns of blocks: one more than lanes", _sparse(32, 33 * WIDE, 60)),
        Case("neither rows nor columns a multiple of a block", _sparse(43, 477, 70)),
        Case("one row", _sparse(1, 700, 50)),
        Case("one element", _sparse(1, 1, 100)),
        Case("no blocks at all", _sparse(20, 300, 0), exact=True),
        Case("no columns", _sparse(20, 0, 0), exact=True),
        Case("no rows", _sparse(0, 90, 50)),
        Case("the last block beyond element 2^32", _far_blocks, memory_bytes=FAR_BYTES),
        Case("4100 x 16,390, a tenth of the blocks", _sparse(4100, 16_390, 10), mode="gpu"),
    ),
    limits=(
        Limit(
            "load_requests",
            _walk_requests,
            "too-many-bytes",
            "Its warps load {fact} times from global memory, and {most} are enough: a warp reads 32 bytes of the mask "
            "at once, and of blocks that are not there nothing, not even their part of x.",
        ),
        Limit(
            "load_sectors",
            _walk_sectors,
            "too-many-bytes",
            "What its warps load touches {fact} sectors of 32 bytes, and {most} are enough: let the lanes of a warp "
            "take the 32 columns of a block, and nothing of blocks that are not there.",
        ),
    ),
    hints=(
        "A warp can read 32 bytes of the mask in one request, but then each lane knows one byte only. Which "
        "instruction tells all lanes about all 32? And how does a warp know where in `blocks` its own ones begin, when "
        "other warps take the words before?",
        "`__ballot_sync` makes a word with one bit for each lane, the same in all lanes. `__ffs(word) - 1` is its "
        "lowest set bit, and `word & (word - 1)` is the word without it: one turn for each block that is there. Words "
        "of other warps are not walked, but `__popc` of them says how many blocks to pass over.",
        "place = first[row of blocks]; for c = 0, 32, 64, … below columns: word = ballot(c + lane < columns and "
        "mask[c + lane]); if word number c / 32 is this warp's: for left = word; left; left without its lowest bit: "
        "column = (c + place of that bit) * 32 + lane; if column < n: for r of 8: sum[r] += element (r, lane) of the "
        "block * x[column]; next block. In any case: place of the next word = place + popc(word).",
    ),
    hints_for={
        "deadlock": ("Does every lane that the mask names reach this ballot, also where the row of blocks ends?",),
        "nan": (
            "What lies in a block beyond the edge of the matrix was never written: not even zero times it is zero.",
        ),
        "wrong-values": (
            "How many blocks lie before this one in the same row, in words of this warp and of others? Is a byte of "
            "the mask that is not zero always 1?",
        ),
        "unwritten": ("What is the product of a row whose blocks are all missing, and who writes it?",),
    },
)


# ----------------------------------------------------------------------------------------------------------------------

TILE = 256
"""Elements of a row that a block takes: two for each of its threads, one after the other."""


def _prefix_sum(x):
    return x.cumsum(1)


def _scan_sectors(rows: int, n: int) -> int:
    """Elements read once by a row of one tile, twice by longer ones, written once; and the same for the tiles' sums."""
    tiles = ceil(n / TILE)
    if tiles < 2:
        return rows * ceil(n / 32) * 10
    return rows * (ceil(n / 32) * 15 + tiles * 5) + _scan_sectors(rows, tiles)


scan = Exercise(
    name="scan",
    lab=LAB,
    rung="cuda",
    entry="prefix_sum",
    title="A scan: sums along rows that are longer than a block",
    form="kernel",
    made_of="cuda",
    reference=_prefix_sum,
    low=lambda x: x.half().float().cumsum(1),
    scale=lambda x: x.abs().cumsum(1),
    seconds=30,
    cases=(
        Case("3 rows of 1000: four tiles", lambda d: (d(3, 1000),), seen=True),
        Case("2 rows of 200, less than a tile", lambda d: (d(2, 200),), seen=True),
        Case("small integers, rows of 256: a whole tile", lambda d: (d(3, 256),), kind="integers", exact=True),
        Case("rows of 257, one more than a tile, far from zero", lambda d: (d(2, 257),), kind="offset"),
        Case("rows of 129, one more than threads", lambda d: (d(2, 129),), kind="outliers"),
        Case("rows of 33, one more than lanes", lambda d: (d(4, 33),)),
        Case("rows of 31", lambda d: (d(5, 31),), kind="integers", exact=True),
        Case("2 rows of 66,000, more than a tile of tiles", lambda d: (d(2, 66_000),), kind="integers", exact=True),
        Case("a row of ones", lambda d: (torch.ones(1, 2500),), exact=True),
        Case("rows that lie further apart than they are long", lambda d: (padded(d(4, 600)),)),
        Case("one element", lambda d: (d(1, 1),)),
        Case("rows without elements", lambda d: (d(3, 0),)),
        Case("no rows", lambda d: (d(0, 700),)),
        Case("the last row beyond element 2^32", lambda d: (far(d(3, 300), 2**32),), memory_bytes=FAR_BYTES),
        Case("1000 rows of 5003", lambda d: (d(1000, 5003),), mode="gpu"),
        Case("2 rows of 5,000,003", lambda d: (d(2, 5_000_003),), mode="gpu"),
    ),
    limits=(
        Limit(
            "sectors",
            lambda x: _scan_sectors(*x.shape),
            "too-many-bytes",
            "The warps' requests touch {fact} sectors of 32 bytes, and {most} are enough: neighbouring threads on "
            "neighbouring elements, each read once for its tile's sum and once for the result.",
        ),
        Limit(
            "bank_ways",
            lambda x: 1.0,
            "too-slow",
            "A request to shared memory takes {fact} steps on average, and {most} is enough: lanes of one request want "
            "different words of one bank.",
        ),
    ),
    hints=(
        "An element's result has four parts: what lies before it in its warp, in the warps before, in the rounds "
        "before, and in the tiles before. Which of these come by shuffle, which through shared memory, and which can "
        "only come from another launch?",
        "`__shfl_up_sync(mask, v, d)` hands a lane the `v` of the lane d further down; with d = 1, 2, 4, 8, 16 each "
        "lane has the sum up to itself, if lanes below d add nothing. The last lane of a warp holds the warp's sum. "
        "The sums of the tiles are a row, too, and what must be known before a tile is their prefix sum.",
        "before = tile > 0 ? carry[tile - 1] : 0; for each of two rounds: v = own element, or 0 beyond the end; for d "
        "= 1, 2, 4, 8, 16: o = v of lane - d; if lane >= d: v += o; lane 31: sums[warp] = v; barrier; store before + "
        "sums of the warps below + v; before += all four sums; barrier. In Python, if there are two tiles or more: "
        "tile_sums into totals, carry = prefix_sum(totals).",
    ),
    hints_for={
        "race": (
            "There are two rounds, and both use `sums`. Who still reads the first round's sums when the second "
            "round's are written? And may a block read what another block of the same launch writes?",
        ),
        "deadlock": ("Does every thread come to each barrier and each shuffle, also behind the end of the row?",),
        "wrong-values": (
            "Try rows of 32, 128, 256 and 257 in turn: at which does it begin to be wrong? A shuffle gives lanes "
            "below d their own value.",
        ),
    },
)


EXERCISES = (vector_gemv, int4_unpack, warp_top_k, two_ways_to_split, quantise_cache, mask_walk, scan)
