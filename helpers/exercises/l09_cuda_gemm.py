"""Lab 09: products in CUDA C, from a tile in shared memory to two stages of a pipeline that feeds tensor cores."""

import re
from collections.abc import Callable
from math import ceil

import torch

from . import NO_SPILLS, NOT_SERIALIZED, Case, Exercise, Limit, Look, Needs, far, holds, padded

LAB = "09_cuda_gemm"
FAR = 18 << 30
"""Three rows of float32 whose last lies beyond element 2**32: neither an int nor an unsigned int holds its offset."""

# ----------------------------------------------------------------------------------------------------------------------


def _distances(x, y):
    return (x[:, None] - y[None]).square().sum(2)


def _tiled_sectors(m: int, n: int, k: int) -> int:
    """Blocks of 16 x 16 results: two tiles for each 16 of k, by warps that load two rows of 64 bytes, and the store."""
    return ceil(m / 16) * ceil(n / 16) * 8 * (12 * ceil(k / 16) + 6)


row_distances = Exercise(
    name="row-distances",
    lab=LAB,
    rung="cuda",
    entry="distances",
    title="A tile in shared memory: distances between rows",
    form="kernel",
    made_of="cuda",
    core=True,
    reference=_distances,
    cases=(
        Case("32 rows, 48 rows, 64 numbers each: whole tiles", lambda d: (d(32, 64), d(48, 64)), seen=True),
        Case("37 and 29 rows of 45: no multiples of the tile", lambda d: (d(37, 45), d(29, 45)), seen=True),
        Case("small integers, 20 and 50 rows of 70", lambda d: (d(20, 70), d(50, 70)), kind="integers", exact=True),
        Case("far from zero, 17 and 16 rows of 33", lambda d: (d(17, 33), d(16, 33)), kind="offset"),
        Case("rows shorter than the tile", lambda d: (d(21, 5), d(18, 5)), kind="outliers"),
        Case(
            "rows of x and of y that lie further apart than they are long, each by its own pitch",
            lambda d: (padded(d(18, 40), 3), padded(d(35, 40), 24)),
        ),
        Case("one row and one row", lambda d: (d(1, 19), d(1, 19))),
        Case("rows of one number", lambda d: (d(19, 1), d(33, 1))),
        Case("rows of 500, far longer than a tile", lambda d: (d(3, 500), d(2, 500))),
        Case("rows without numbers: their distance is 0", lambda d: (d(5, 0), d(7, 0)), exact=True),
        Case("no rows", lambda d: (d(0, 9), d(4, 9))),
        Case("the last row of x beyond element 2^32", lambda d: (far(d(3, 20), 2**32), d(18, 20)), memory_bytes=FAR),
        Case("the last row of y beyond element 2^32", lambda d: (d(18, 20), far(d(3, 20), 2**32)), memory_bytes=FAR),
        Case("515 and 777 rows of 259", lambda d: (d(515, 259), d(777, 259)), mode="gpu"),
    ),
    limits=(
        Limit(
            "sectors",
            lambda x, y: _tiled_sectors(x.shape[0], y.shape[0], x.shape[1]),
            "too-many-bytes",
            "The warps' requests to global memory touch {fact} sectors of 32 bytes, and {most} are enough: a block "
            "loads each element of its two tiles once, with neighbouring threads on neighbouring elements of a row.",
        ),
    ),
    hints=(
        "In one turn of the loop over k, a block needs 16 numbers of each of its 16 rows of x, and of its 16 rows of "
        "y. That is one number of either for each thread. Which threads write what a thread then reads?",
        "Load, barrier, add up 16 products, barrier, next turn. The first barrier waits until the tiles are there, the "
        "second until nobody needs them any more. Where a tile reaches beyond the matrix it holds zero: then a "
        "difference of two such elements adds nothing.",
        "for k0 = 0, 16, 32, … below k: xs[ty][tx] = x[row, k0 + tx] or 0; ys[ty][tx] = y[first + ty, k0 + tx] or 0; "
        "barrier; for i below 16: add (xs[ty][i] - ys[tx][i])² to the sum; barrier. Then, if row and col exist, store.",
    ),
    hints_for={
        "race": (
            "Two barriers a turn: which one is missing, the one before the tiles are read, or the one before they are "
            "overwritten?",
        ),
        "nan": (
            "What does a tile hold where the matrix has no element? Shared memory is not zero when a block starts.",
        ),
        "deadlock": ("Threads without a result still load for the others: none may leave before the loop is over.",),
    },
)


# ----------------------------------------------------------------------------------------------------------------------


def _weight_gradient(x, g):
    return x.T @ g


def _turns(k: int) -> int:
    """k rounded up to 32: room for tiles that are 8, 16 or 32 deep. (For tiles of 128 x 128 it is in the limits.)"""
    return 32 * ceil(k / 32)


weight_gradient = Exercise(
    name="weight-gradient",
    lab=LAB,
    rung="cuda",
    entry="weight_gradient",
    title="A tile in registers: the gradient of a weight",
    form="kernel",
    made_of="cuda",
    core=True,
    reference=_weight_gradient,
    scale=lambda x, g: x.abs().T @ g.abs(),
    cases=(
        Case("32 tokens, 128 x 128: whole tiles", lambda d: (d(32, 128), d(32, 128)), seen=True),
        Case("45 tokens, 70 x 61: no multiples of the tile", lambda d: (d(45, 70), d(45, 61)), seen=True),
        Case("100 tokens, small integers", lambda d: (d(100, 64), d(100, 64)), kind="integers", exact=True),
        Case("far from zero", lambda d: (d(40, 33), d(40, 66)), kind="offset"),
        Case("17 tokens, one more than a tile is deep", lambda d: (d(17, 5), d(17, 90)), kind="outliers"),
        Case(
            "rows that lie further apart than they are long, each by its own pitch",
            lambda d: (padded(d(20, 68), 3), padded(d(20, 40), 60)),
        ),
        Case("500 tokens, far more than a tile holds", lambda d: (d(500, 3), d(500, 2))),
        Case("one token", lambda d: (d(1, 65), d(1, 3))),
        Case("one element", lambda d: (d(1, 1), d(1, 1))),
        Case("no tokens: the gradient is 0", lambda d: (d(0, 9), d(0, 70)), exact=True),
        Case("no columns", lambda d: (d(8, 0), d(8, 6))),
        Case("the last token of x beyond element 2^32", lambda d: (far(d(3, 8), 2**32), d(3, 20)), memory_bytes=FAR),
        Case("the last token of g beyond element 2^32", lambda d: (d(3, 20), far(d(3, 8), 2**32)), memory_bytes=FAR),
        Case("1003 tokens, 515 x 389", lambda d: (d(1003, 515), d(1003, 389)), mode="gpu"),
    ),
    limits=(
        Limit(
            "local_bytes",
            lambda x, g: 0,
            "too-slow",
            "A thread keeps {fact} bytes in local memory, which is DRAM behind caches, so its sums are not in "
            "registers: registers have no addresses, and every index into an array must be known to the compiler.",
        ),
        Limit(
            "sectors",
            lambda x, g: ceil(x.shape[1] / 64) * ceil(g.shape[1] / 64) * (20 * _turns(x.shape[0]) + 2304),
            "too-many-bytes",
            "The warps' requests to global memory touch {fact} sectors of 32 bytes, and {most} are enough: a block "
            "loads each element of its two tiles once, with neighbouring threads on neighbouring columns.",
        ),
        Limit(
            "shared_requests",
            lambda x, g: ceil(x.shape[1] / 128) * ceil(g.shape[1] / 128) * _turns(x.shape[0]) * 360,
            "too-slow",
            "The warps go to shared memory {fact} times, and {most} times are enough: load four elements of either "
            "tile into registers, and make sixteen products of them.",
        ),
    ),
    hints=(
        "With one result for each thread, a product takes two loads from shared memory. A thread that makes 4 x 4 "
        "results needs 4 elements of one tile and 4 of the other for 16 products. Which rows and columns could be its "
        "own, so that the 16 x 16 threads cover 64 x 64 results?",
        "For each of the 16 rows of the tiles: read a[4] and b[4] into registers, then add a[i] * b[j] to sum[i][j]. "
        "The loops over i and j have constant bounds, so the compiler unrolls them, and all of these stay in "
        "registers. The two barriers are those of exercise 1.",
        "for k0 = 0, 16, … below k: load both tiles; barrier; for p below 16: {a[i] = xs[p][ty + 16 * i], b[j] = "
        "gs[p][tx + 16 * j]; sum[i][j] += a[i] * b[j]}; barrier. Then store sum[i][j] at row top + ty + 16 * i, column "
        "left + tx + 16 * j, where these exist.",
    ),
    hints_for={
        "race": ("Which barrier keeps the next tile from being written while this one is still read?",),
        "too-slow": (
            "The values are right. Count for one thread and one p: how many loads from shared memory, how many "
            "products? And are all indices of the arrays known when the compiler has unrolled the loops?",
        ),
    },
)


# ----------------------------------------------------------------------------------------------------------------------


def _gram(x):
    return x @ x.T


def _blocks(x) -> int:
    """Blocks of 64 x 64 results, of which those who make 128 x 128 in a block do four, also where they need one."""
    return 4 * ceil(x.shape[0] / 128) ** 2


gram = Exercise(
    name="gram",
    lab=LAB,
    rung="cuda",
    entry="gram",
    title="Sixteen bytes at a time, and no bank conflict",
    form="rewrite",
    made_of="cuda",
    reference=_gram,
    scale=lambda x: x.abs() @ x.abs().T,
    cases=(
        Case("128 rows of 32: whole tiles", lambda d: (d(128, 32),), seen=True),
        Case("70 rows of 20: no multiples of the tile", lambda d: (d(70, 20),), seen=True),
        Case("65 rows of 36, small integers", lambda d: (d(65, 36),), kind="integers", exact=True),
        Case("far from zero", lambda d: (d(40, 64),), kind="offset"),
        Case("rows of four numbers", lambda d: (d(67, 4),), kind="outliers"),
        Case("rows that lie further apart than they are long", lambda d: (padded(d(61, 44), 20),)),
        Case("rows of 500, far longer than a tile", lambda d: (d(3, 500),)),
        Case("one row", lambda d: (d(1, 48),)),
        Case("rows without numbers: their products are 0", lambda d: (d(6, 0),), exact=True),
        Case("no rows", lambda d: (d(0, 8),)),
        Case("the last row beyond element 2^32", lambda d: (far(d(3, 24), 2**32),), memory_bytes=FAR),
        Case("515 rows of 516", lambda d: (d(515, 516),), mode="gpu"),
    ),
    limits=(
        Limit(
            "load_requests",
            lambda x: _blocks(x) * 1.25 * _turns(x.shape[1]),
            "too-slow",
            "The warps ask global memory {fact} times, and {most} times are enough: let each lane load 16 bytes.",
        ),
        Limit(
            "load_sectors",
            lambda x: _blocks(x) * 24 * _turns(x.shape[1]),
            "too-many-bytes",
            "The warps' loads from global memory touch {fact} sectors of 32 bytes, and {most} are enough: the four "
            "lanes that load the 64 bytes of one row should be neighbours.",
        ),
        Limit(
            "shared_requests",
            lambda x: _blocks(x) * 21.25 * _turns(x.shape[1]),
            "too-slow",
            "The warps go to shared memory {fact} times, and {most} times are enough: let each lane take 16 bytes, of "
            "either tile, for every load.",
        ),
        Limit(
            "bank_ways",
            lambda x: 1.0,
            "too-slow",
            "In `{where}` shared memory needs {fact} times the steps that it could take, on average: eight "
            "neighbouring lanes with 16 bytes each should meet all 32 banks.",
        ),
    ),
    hints=(
        "A request of 16 bytes a lane is served in four steps, of eight lanes each. Write down the banks that lanes 0 "
        "to 7 meet: once where they store two rows of four pieces into the tile, once where each reads the same piece "
        "of another row.",
        "A row of the tile is four pieces of 16 bytes, half of the 32 banks. So rows r and r + 2 meet the same banks. "
        "A longer row mends the reads and breaks the stores. But a row's four pieces may stand in any order, and the "
        "order may change from one pair of rows to the next.",
        "Piece q of row r stands at place q ^ (r / 2 % 4) of its row: counted in float4, at = 4 * r + (q ^ (r / 2 % "
        "4)), for stores and for reads. A thread loads row t / 4, piece t % 4 of either tile; it makes the results of "
        "rows ty + 16 * i and columns tx + 16 * j, and for each piece p reads four float4 of either tile.",
    ),
    hints_for={
        "crash": (
            "A float4 must lie at a multiple of 16 bytes. Is every index that you read or write one a multiple of 4?",
        ),
        "too-slow": (
            "The values are right. Take the line that the finding is about: which addresses do lanes 0 to 7 want, and "
            "how many bytes does each take?",
        ),
        "race": ("Which barrier keeps the next tile from being written while this one is still read?",),
    },
)


def _causal_scores(q, k, scale):
    return _masked(scale * (q @ k.T))


def _masked(scores):
    later = torch.ones(scores.shape, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -float("inf"))


def _rounded(x, w, start):
    """start + x @ w.T, rounded to bfloat16 after each 16 products.

    A GPU's float accumulators lose some bits as well, since tensor cores cut off where they add. That is to pass, and
    sums in float16 are not: the bound lies between this and float32, and float16 would overflow far from zero.
    """
    for at in range(0, x.shape[1], 16):
        start = (start + x[:, at : at + 16] @ w[:, at : at + 16].T).bfloat16().float()
    return start


def _careless_scores(q, k, scale):
    return _masked(scale * _rounded(q, k, torch.zeros(q.shape[0], k.shape[0])))


def _halves(d, m: int, n: int, k: int, scale: float = 0.125) -> tuple:
    return d(m, k, dtype=torch.float16), d(n, k, dtype=torch.float16), scale


causal_scores = Exercise(
    name="causal-scores",
    lab=LAB,
    rung="cuda",
    entry="causal_scores",
    title="One tile on a tensor core: scores with a mask",
    form="kernel",
    made_of="cuda",
    core=True,
    reference=_causal_scores,
    dtype=torch.float32,
    low=_careless_scores,
    scale=lambda q, k, scale: scale * (q.abs() @ k.abs().T),
    multiplied=0,
    cases=(
        Case("32 queries, 32 keys, 64 numbers each", lambda d: _halves(d, 32, 32, 64), seen=True),
        Case(
            "48 queries, 80 keys: blocks of which some warps have no tile", lambda d: _halves(d, 48, 80, 32), seen=True
        ),
        Case("one tile", lambda d: _halves(d, 16, 16, 16, 0.25)),
        Case("small integers", lambda d: _halves(d, 32, 48, 80, 0.5), kind="integers", exact=True),
        Case("far from zero", lambda d: _halves(d, 16, 32, 128), kind="offset"),
        Case("rows of 1024 numbers", lambda d: _halves(d, 32, 16, 1024, 1 / 32)),
        Case("outliers", lambda d: _halves(d, 64, 32, 48), kind="outliers"),
        Case(
            "rows that lie further apart than they are long, each by its own pitch",
            lambda d: (padded(d(32, 48).half(), 8), padded(d(48, 48).half(), 40), -0.5),
        ),
        Case("more keys than queries", lambda d: _halves(d, 16, 112, 32)),
        Case("no queries", lambda d: _halves(d, 0, 32, 32)),
        Case(
            "the last queries beyond element 2^32",
            lambda d: (far(d(32, 32).half(), 2**33), d(32, 32).half(), 1.0),
            memory_bytes=18 << 30,
        ),
        Case(
            "the last keys beyond element 2^32",
            lambda d: (d(32, 32).half(), far(d(32, 32).half(), 2**33), 1.0),
            memory_bytes=18 << 30,
        ),
        Case("528 queries, 1040 keys, 128 numbers", lambda d: _halves(d, 528, 1040, 128), mode="gpu"),
    ),
    limits=(
        Limit(
            "bytes",
            lambda q, k, scale: q.shape[0] * k.shape[0] // 256 * 2 * (64 * q.shape[1] + 1024),
            "too-many-bytes",
            "The warps ask global memory for {fact} bytes, and {most} are enough: for a tile of scores, its rows of q "
            "and of k are loaded once.",
        ),
    ),
    hints=(
        "For one tile of 16 x 16 scores: which 16 x 16 elements of q does a step along k take, where do they begin, "
        "and how far apart are their rows in memory? The same for the keys: as a matrix of k rows and 16 columns, "
        "which of its two dimensions is contiguous?",
        "A fragment is loaded from the address of its first element and the distance between its rows, or columns, in "
        "elements. Rows of keys are columns of the second factor: `col_major`. The sums stay in a float accumulator. "
        "Which lane holds which score is not for you to know, so a mask takes a trip through shared memory.",
        "fill(c, 0); for k0 = 0, 16, … below d: load(a, q + top * q_pitch + k0, q_pitch); load(b, k + left * k_pitch + "
        "k0, k_pitch); mma(c, a, b, c). Store c to the warp's own 16 x 16 floats, row by row; __syncwarp; for e = "
        "lane, lane + 32, … below 256: row = top + e / 16, col = left + e % 16; out[row, col] = scale * score, or "
        "minus infinity where col > row.",
    ),
    hints_for={
        "race": ("Who wrote the score that this lane reads, and what makes sure that it has been written?",),
        "out-of-bounds": (
            "The leading dimension is in elements, from one row in memory to the next. And what does a warp do whose "
            "tile does not exist?",
        ),
        "wrong-values": (
            "If it is wrong only with threads in another order, the kernel counts on which lane holds which element of "
            "a fragment. CUDA leaves that open, and the check changes it.",
        ),
        "precision": ("In which type are the sums kept while the loop runs?",),
    },
)


def _residual_linear(x, w, r):
    return r + x @ w.T


def _layer(d, m: int, n: int, k: int) -> tuple:
    return d(m, k, dtype=torch.float16), d(n, k, dtype=torch.float16), d(m, n)


_STEPS = re.compile(
    r"^(?P<label>\$L__\w+):|\bbra(?:\.uni)?\s+(?P<to>\$L__\w+)|(?P<W>\bmbarrier\.(?:try|test)_wait)|"
    r"(?P<M>\bwgmma\.mma_async)|(?P<C>\bwgmma\.commit_group)|(?P<F>\bwgmma\.wait_group)|"
    r"(?P<B>\b(?:bar|barrier)(?:\.cta)?\.sync|\bmbarrier\.arrive\.(?!expect_tx))|(?P<T>\bcp\.async\.bulk\.tensor)",
    re.M,
)


def _steps(ptx: str) -> tuple[str, list[str], str]:
    """What a kernel does, a letter an instruction; what each of its outermost loops around products does, and what
    stands outside of them.

    W waits at an mbarrier, M multiplies, C commits, F waits for products, T asks for a tile; B is a barrier at which a
    warp can tell others that it is done: one of a block, or a plain arrival.
    """
    steps, labels, loops = "", {}, set()
    for found in _STEPS.finditer(ptx):
        if found["label"]:
            labels[found["label"]] = len(steps)
        elif not found["to"]:
            steps += found.lastgroup
        elif "M" in steps[(begin := labels.get(found["to"], len(steps))) :]:
            loops.add((begin, len(steps)))
    outer = [a for a in loops if not any(a != b and b[0] <= a[0] and a[1] <= b[1] for b in loops)]
    outside = "".join(letter for i, letter in enumerate(steps) if not any(a <= i < b for a, b in outer))
    return steps, [steps[begin:end] for begin, end in outer] or [steps], outside


def _each_turn(*letters: str) -> Callable:
    """For a `Look`: whether a kernel does these things in each loop around products."""
    return lambda kernels: any(all(x in turn for turn in _steps(k.ptx)[1] for x in letters) for k in kernels)


def _refills_after_a_barrier(kernels: list) -> bool:
    """Whether one kernel has a barrier for this, and where products and copies share a loop it lies between them."""
    for steps, turns, _ in (_steps(k.ptx) for k in kernels):
        if steps.count("B") > 1 and not any(re.search("M[^B]*T", 2 * turn) for turn in turns):
            return True
    return False


def _waits_at_two(kernels: list) -> bool:
    """Whether one kernel waits at more than one mbarrier, as far as addresses are constants."""
    return any(len(at := _waited(k.ptx)) > 1 or not all(at) for k in kernels)


def _waited(ptx: str) -> set[str]:
    """The addresses that a kernel waits at: a name and what is added to it, or "" for what is not constant."""
    made: dict[str, list] = {}
    for name, register, given in re.findall(r"^\s*(?:\{[^}\n]*;\s*)?(\w+)[\w.:]*\s+(%\w+), ([^;]*);", ptx, re.M):
        made.setdefault(register, []).append((name, given.split(", ")))

    def address(register: str) -> str:
        match made.get(register, []):
            case [("mov" | "cvta" | "cvt", [one])]:
                return address(one) if one[0] == "%" else one
            case [("add", [one, number])] if number.isdigit() and (base := address(one)):
                return f"{base}+{number}"
        return ""

    return {address(r) for r in re.findall(r"\bmbarrier\.(?:try|test)_wait[^;\[]*\[(%\w+)\]", ptx)}


two_stages = Exercise(
    name="two-stages",
    lab=LAB,
    rung="cuda",
    entry="residual_linear",
    title="Two stages and a wgmma tile",
    form="kernel",
    made_of="cuda",
    reference=_residual_linear,
    dtype=torch.float32,
    low=_rounded,
    scale=lambda x, w, r: r.abs() + x.abs() @ w.abs().T,
    needs=Needs(
        says="This kernel is made of TMA and wgmma, which exist together on GPUs of sm_90 (H100, H200) only.",
        looks=(
            Look(
                "products by wgmma",
                lambda kernels: any("M" in _steps(k.ptx)[0] for k in kernels),  # a commit alone becomes an HGMMA too
                "forbidden",
                "The compiled kernel holds no wgmma: make the products with `multiply`.",
            ),
            Look(
                "tiles by TMA",
                holds(r"\bUTMALDG\b"),
                "forbidden",
                "The compiled kernel asks for no tile by TMA: bring the tiles with `load`.",
            ),
            Look(
                "waits at an mbarrier in each turn",
                _each_turn("W"),
                "race",
                "Not every turn of the compiled kernel waits at an mbarrier, so nothing says when a tile has arrived.",
            ),
            Look(
                "a fence before the products, a commit and a wait behind them in each turn",
                lambda kernels: any("wgmma.fence" in k.ptx and _each_turn("C", "F")([k]) for k in kernels),
                "race",
                "Products of wgmma want `begin` before them, `commit` and `finish` behind them, in each turn: one of "
                "the three is missing, so nothing says when registers and tiles may be used again.",
            ),
            Look(
                "a barrier before a stage is filled again",
                _refills_after_a_barrier,
                "race",
                "Between the products of a turn and the next `load` the compiled kernel has no barrier of all warps: a "
                "stage may be filled again while others still multiply what it holds.",
            ),
            Look(
                "a tile that is asked for ahead of the turns",
                lambda kernels: any("T" in _steps(k.ptx)[2] for k in kernels),
                "too-slow",
                "The compiled kernel asks for tiles in its turns alone, so each turn waits for its own tiles, and "
                "nothing arrives while products are made: fill both stages first.",
            ),
            Look(
                "waits at more than one mbarrier",
                _waits_at_two,
                "too-slow",
                "The compiled kernel waits at one mbarrier only, so it has a single stage: let odd turns use the other "
                "one, with its tiles and its mbarrier.",
            ),
            Look(
                "functions that return what they should",
                lambda kernels: not any("missing return statement" in k.log for k in kernels),
                "compile",
                "A function that is to return a value, such as `descriptor`, ends without `return`.",
            ),
            NO_SPILLS,
            NOT_SERIALIZED,
        ),
    ),
    cases=(
        Case("64 x 64, five turns along k", lambda d: _layer(d, 64, 64, 160), seen=True),
        Case("one turn", lambda d: _layer(d, 64, 64, 32), seen=True),
        Case("two turns: each stage once", lambda d: _layer(d, 64, 64, 64)),
        Case("nine turns, small integers", lambda d: _layer(d, 64, 128, 288), kind="integers", exact=True),
        Case("k that is no multiple of 32", lambda d: _layer(d, 64, 64, 232)),
        Case("k of 8, less than a turn", lambda d: _layer(d, 64, 64, 8)),
        Case("100 x 70: no multiples of the tile", lambda d: _layer(d, 100, 70, 96), kind="outliers"),
        Case("one row and one column", lambda d: _layer(d, 1, 1, 264)),
        Case("far from zero", lambda d: _layer(d, 64, 64, 512), kind="offset"),
        Case(
            "rows that lie further apart than they are long, each by its own pitch",
            lambda d: (padded(d(80, 72).half(), 8), padded(d(40, 72).half(), 56), d(80, 40)),
        ),
        Case("many blocks, many turns: 1000 x 1100 x 2056", lambda d: _layer(d, 1000, 1100, 2056), mode="gpu"),
    ),
    hints=(
        "Write the table's last column: for turn 0 the barrier of stage 0 is in its phase 0, for turn 2 in its phase "
        "1, for turn 4 in its phase 2. Then count the bytes that one stage gets in one turn, from both matrices.",
        "One thread announces the bytes of both tiles at the stage's barrier and asks for both. Everyone waits there, "
        "multiplies, and waits for the products. A barrier of the whole block comes before the thread fills that stage "
        "again, now for the turn after the next. The parity is that of how often the stage was used before.",
        "descriptor: (tile & 0x3ffff) >> 4, 1 at bit 16, 8 rows * 64 bytes / 16 = 32 at bit 32, 2 at bit 62. "
        "fill(turn): expect both tiles' bytes; load x at (top, 32 * turn), w at (left, 32 * turn). Thread 0 fills "
        "turns 0 and 1, if there are so many. Each turn: wait(&full[turn % 2], turn / 2 % 2); begin; multiply(a, b); "
        "multiply(a + 2, b + 2); commit; finish; __syncthreads; thread 0 fills turn + 2, if there is one.",
    ),
    hints_for={
        "timeout": (
            "A wait that never ends: are exactly the bytes announced that come, and does somebody fill the stage for "
            "every turn that waits for it?",
            "What TMA writes beyond the matrix counts too: a tile always has all its bytes.",
        ),
        "wrong-values": (
            "Which cases are right? One turn alone tells of descriptor and coordinates; from the third turn on a stage "
            "is used again, and the parity and the wait before refilling begin to count.",
        ),
        "nan": ("Was the tile there when it was multiplied? A wait for the wrong parity returns at once.",),
        "too-slow": (
            "Which registers may be touched between the first product of a turn and the wait for its end, and what "
            "tells the compiler where that is?",
        ),
    },
    seconds=5,
)


EXERCISES = (row_distances, weight_gradient, gram, causal_scores, two_stages)
