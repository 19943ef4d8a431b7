"""Lab 08: kernels in CUDA C, from which thread takes which element to a histogram with atomics."""

from math import ceil

import torch

from . import Case, Exercise, Limit, far, padded, spaced

LAB = "08_cuda_first_kernels"
FAR_BYTES = 18 << 30
"""Three rows of float32 whose last lies beyond element 2**32: neither an int nor an unsigned int holds its offset."""


def _requests(rows: int, cols: int) -> int:
    """Warps that it takes to go through rows x cols elements, row by row."""
    return rows * ceil(cols / 32)


# ----------------------------------------------------------------------------------------------------------------------


def _scale_columns(x, gain):
    return x * gain


coalescing = Exercise(
    name="coalescing",
    lab=LAB,
    rung="cuda",
    entry="scale_columns",
    title="Neighbouring threads, neighbouring addresses",
    form="rewrite",
    made_of="cuda",
    core=True,
    reference=_scale_columns,
    cases=(
        Case("100 rows of 96 columns", lambda d: (d(100, 96), d(96)), seen=True),
        Case("37 x 61, far from zero", lambda d: (d(37, 61), d(61)), kind="offset"),
        Case("rows that lie further apart than they are long", lambda d: (padded(d(40, 70)), d(70)), kind="outliers"),
        Case("small integers, 33 x 130", lambda d: (d(33, 130), d(130)), kind="integers", exact=True),
        Case("one row, longer than a block", lambda d: (d(1, 1100), d(1100))),
        Case("one column", lambda d: (d(301, 1), d(1))),
        Case("one element", lambda d: (d(1, 1), d(1))),
        Case("no rows", lambda d: (d(0, 5), d(5))),
        Case("the last row beyond element 2^32", lambda d: (far(d(3, 40), 2**32), d(40)), memory_bytes=FAR_BYTES),
        Case("70,001 rows, more than a grid may be high", lambda d: (d(70_001, 5), d(5)), mode="gpu"),
        Case("515 x 2049", lambda d: (d(515, 2049), d(2049)), mode="gpu"),
    ),
    limits=(
        Limit(
            "sectors",
            lambda x, gain: 15 * _requests(*x.shape),  # x, gain and out: 5 each where a row is not aligned
            "too-many-bytes",
            "The warps' requests touch {fact} sectors of 32 bytes; with neighbouring threads on neighbouring columns, "
            "{most} are enough.",
        ),
    ),
    hints=(
        "Take one warp of the given kernel and one turn of its loop. Write down the addresses that lanes 0, 1 and 2 "
        "load. How many bytes lie between them?",
        "A request is cheap where `threadIdx.x` runs along the dimension that is contiguous in memory. Here that is "
        "the column. So neighbouring threads share a row, and the loop walks over columns in steps of the block.",
        "launch one block for each row; in the kernel: row = the block's number; for col from the thread's number, "
        "below cols, in steps of the block's size: out[row, col] = gain[col] * x[row, col].",
    ),
    hints_for={
        "too-many-bytes": (
            "The values are right. Which index changes from one lane of a warp to the next: the row or the column?",
        ),
        "out-of-bounds": ("With which rows and columns does the last block start, and what keeps it inside?",),
    },
)


# ----------------------------------------------------------------------------------------------------------------------


def _block_sum(x):
    return x.sum(1)


block_sum = Exercise(
    name="block-sum",
    lab=LAB,
    rung="cuda",
    entry="block_sum",
    title="One sum a block: a tree in shared memory",
    form="kernel",
    made_of="cuda",
    core=True,
    reference=_block_sum,
    scale=lambda x: x.abs().sum(1),
    cases=(
        Case("6 rows of 1000", lambda d: (d(6, 1000),), seen=True),
        Case("rows of 50: blocks of 64 threads", lambda d: (d(7, 50),), seen=True),
        Case("rows of 64, as many as threads", lambda d: (d(3, 64),), kind="outliers"),
        Case("rows of 257, one more than threads, far from zero", lambda d: (d(4, 257),), kind="offset"),
        Case("rows of 256, as many as threads", lambda d: (d(2, 256),), kind="integers", exact=True),
        Case("rows of 2081, more than a block may have threads", lambda d: (d(3, 2081),), kind="integers", exact=True),
        Case("rows that lie further apart than they are long", lambda d: (padded(d(5, 131)),)),
        Case("one element", lambda d: (d(1, 1),)),
        Case("rows without elements: their sum is 0", lambda d: (d(3, 0),), exact=True),
        Case("no rows", lambda d: (d(0, 9),)),
        Case("the last row beyond element 2^32", lambda d: (far(d(3, 100), 2**32),), memory_bytes=FAR_BYTES),
        Case("300 rows of 5011", lambda d: (d(300, 5011),), mode="gpu"),
    ),
    limits=(
        Limit(
            "sectors",
            lambda x: 5 * _requests(*x.shape) + x.shape[0],
            "too-many-bytes",
            "The warps' requests touch {fact} sectors of 32 bytes, and {most} are enough: let the whole block read the "
            "row, neighbouring threads neighbouring elements.",
        ),
        Limit(
            "bank_ways",
            lambda x: 1.0,
            "too-slow",
            "A request to shared memory takes {fact} steps on average, and {most} is enough: let the threads that "
            "still work, and the elements they add, lie next to one another.",
        ),
    ),
    hints=(
        "Three steps: each thread adds up its own share of the row; the shares go into shared memory; the block makes "
        "one number of them. Which of these need a barrier after them?",
        "At each level of the tree the first half of the threads adds what the second half holds, then half of those, "
        "down to one. A level reads what the level before wrote, so there is a barrier between them, and every thread "
        "must reach it.",
        "sum = own elements, in steps of blockDim.x; part[t] = sum; barrier; for half = blockDim.x / 2, then half of "
        "that, down to 1: {if t < half: part[t] += part[t + half]; barrier for all}; thread 0 writes part[0].",
    ),
    hints_for={
        "race": ("Who reads this word, who wrote it, and which barrier have both passed in between?",),
        "deadlock": ("Which threads take the branch that the barrier stands in? It must be all of the block.",),
    },
)


def _peak(d, place):
    """A row whose largest element is at `place`, an odd number beyond 2**24: no float32 holds that."""
    return d(1, place + 9).index_fill_(1, torch.tensor([place]), 100.0)


def _warp_argmax(x):
    return x.argmax(1).to(torch.int32)


warp_argmax = Exercise(
    name="warp-argmax",
    lab=LAB,
    rung="cuda",
    entry="warp_argmax",
    title="A warp finds where the largest element is",
    form="kernel",
    made_of="cuda",
    reference=_warp_argmax,
    dtype=torch.int32,
    cases=(
        Case("8 rows of 100", lambda d: (d(8, 100),), exact=True, seen=True),
        Case("5 rows of 32: one element a lane", lambda d: (d(5, 32),), kind="outliers", exact=True, seen=True),
        Case("small integers, so many are equally large", lambda d: (d(9, 200),), kind="integers", exact=True),
        Case("rows of 33, one more than lanes", lambda d: (d(6, 33),), kind="offset", exact=True),
        Case("rows of 7, fewer than lanes", lambda d: (d(10, 7),), exact=True),
        Case("all elements equal", lambda d: (d(1, 1).expand(3, 90).contiguous(),), exact=True),
        Case("all elements below zero", lambda d: (-(d(5, 61).abs() + 1),), exact=True),
        Case("all elements minus infinity", lambda d: (torch.full((2, 45), -float("inf")),), exact=True),
        Case("the largest last", lambda d: (d(64, 64) + 1000 * torch.eye(64),), kind="integers", exact=True),
        Case("rows that lie further apart than they are long", lambda d: (padded(d(7, 83)),), exact=True),
        Case("one element", lambda d: (d(1, 1),), exact=True),
        Case("no rows", lambda d: (d(0, 40),), exact=True),
        Case("the last row beyond element 2^32", lambda d: (far(d(3, 70), 2**32),), exact=True, memory_bytes=FAR_BYTES),
        Case("5001 rows of 301", lambda d: (d(5001, 301),), exact=True, mode="gpu"),
        Case("the largest at place 2^24 + 3", lambda d: (_peak(d, 2**24 + 3),), exact=True, mode="gpu"),
    ),
    limits=(
        Limit(
            "sectors",
            lambda x: 5 * _requests(*x.shape) + x.shape[0],
            "too-many-bytes",
            "The warps' requests touch {fact} sectors of 32 bytes, and {most} are enough: neighbouring lanes should "
            "read neighbouring elements of one row.",
        ),
        Limit(
            "bank_ways",
            lambda x: 0.0,
            "forbidden",
            "The kernel uses shared memory; this exercise is about registers that lanes hand to one another.",
        ),
    ),
    hints=(
        "Each lane needs two things: the largest value that it has seen, and where that was. What should a lane hold "
        "that has seen nothing, because the row is short?",
        "`__shfl_down_sync(0xffffffffu, v, d)` gives a lane the `v` of the lane d further up. All 32 lanes call it, "
        "both for the value and for its place. With d = 16, 8, 4, 2, 1, lane 0 has heard of everyone.",
        "best = minus infinity, at = cols; for own elements: if larger, or equal and further left: take it. For d from "
        "16, halved down to 1: other, where = both from lane + d; take them by the same rule. Lane 0 writes `at`.",
    ),
    hints_for={
        "wrong-values": (
            "When two elements are equally large, which does your comparison keep? When all are negative, what does a "
            "lane start from?",
        ),
        "deadlock": ("Does every lane that the mask names reach this shuffle, also when the row is short?",),
    },
)


# ----------------------------------------------------------------------------------------------------------------------


def _transpose(x):
    return x.T.contiguous()


transpose = Exercise(
    name="transpose",
    lab=LAB,
    rung="cuda",
    entry="transpose",
    title="A transpose without bank conflicts and without padding",
    form="kernel",
    made_of="cuda",
    core=True,
    reference=_transpose,
    cases=(
        Case("64 x 96: whole tiles", lambda d: (d(64, 96),), seen=True),
        Case("70 x 45: neither a multiple of the tile", lambda d: (d(70, 45),), seen=True),
        Case("one tile", lambda d: (d(32, 32),), kind="integers", exact=True),
        Case("33 x 31: one more, one fewer than a tile", lambda d: (d(33, 31),), kind="offset"),
        Case("one row", lambda d: (d(1, 77),), kind="outliers"),
        Case("one column", lambda d: (d(101, 1),)),
        Case("one element", lambda d: (d(1, 1),)),
        Case("rows that lie further apart than they are long", lambda d: (padded(d(40, 67)),), kind="outliers"),
        Case("no rows", lambda d: (d(0, 8),)),
        Case("the last row beyond element 2^32", lambda d: (far(d(3, 50), 2**32),), memory_bytes=FAR_BYTES),
        Case("1025 x 2047", lambda d: (d(1025, 2047),), mode="gpu"),
    ),
    limits=(
        Limit(
            "sectors",
            lambda x: 5 * (_requests(*x.shape) + _requests(*x.T.shape)),
            "too-many-bytes",
            "The warps' requests touch {fact} sectors of 32 bytes, and {most} are enough: both the loads and the "
            "stores must run along rows.",
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
        "With rows of 32 words the bank of tile[r * 32 + c] is c. A warp that writes a row meets 32 banks, a warp that "
        "reads a column one. Which freedom is left, if the rows may not become longer?",
        "Nobody says that element (r, c) must lie at column c of its row. Let the column depend on r, so that both a "
        "row and a column meet all 32 banks. Whoever reads must use the same rule as whoever writes.",
        "Write element (r, c) to tile[32 * r + (c ^ r)]: for a fixed r, and for a fixed c, the exclusive or takes each "
        "value from 0 to 31 once. Barrier. Then a warp stores a row of the result: lane = r, element (lane, c).",
    ),
    hints_for={
        "race": ("Which thread wrote the element that this thread reads? What makes sure that it has been written?",),
        "out-of-bounds": (
            "The wrapper gives the block 4096 bytes: 32 rows of 32 floats, so no row may be longer. At the edges, "
            "compare with rows and cols both before the load and before the store.",
        ),
    },
)


# ----------------------------------------------------------------------------------------------------------------------


def _blur_rows(x, w):
    radius = w.numel() // 2
    wide = torch.nn.functional.pad(x, (radius, radius))
    return sum(w[k] * wide[:, k : k + x.shape[1]] for k in range(w.numel()))


stencil = Exercise(
    name="stencil",
    lab=LAB,
    rung="cuda",
    entry="blur_rows",
    title="A stencil: a tile and its halo",
    form="kernel",
    made_of="cuda",
    reference=_blur_rows,
    scale=lambda x, w: _blur_rows(x.abs(), w.abs()),
    cases=(
        Case("2 rows of 300, radius 3", lambda d: (d(2, 300), d(7)), seen=True),
        Case("a row of 128, as long as a block, radius 1", lambda d: (d(1, 128), d(3)), seen=True),
        Case("3 rows of 129, radius 8, far from zero", lambda d: (d(3, 129), d(17, kind="normal")), kind="offset"),
        Case("small integers, radius 2", lambda d: (d(4, 260), d(5)), kind="integers", exact=True),
        Case("a halo wider than a block: radius 150", lambda d: (d(2, 401), d(301)), kind="integers", exact=True),
        Case("a radius longer than the row", lambda d: (d(2, 5), d(41)), kind="outliers"),
        Case("radius 0", lambda d: (d(3, 131), d(1))),
        Case("rows that lie further apart than they are long", lambda d: (padded(d(5, 140)), d(9)), kind="outliers"),
        Case("one element", lambda d: (d(1, 1), d(3))),
        Case("the last row beyond element 2^32", lambda d: (far(d(3, 150), 2**32), d(5)), memory_bytes=FAR_BYTES),
        Case("100 rows of 5003, radius 16", lambda d: (d(100, 5003), d(33)), mode="gpu"),
    ),
    limits=(
        Limit(
            "sectors",
            lambda x, w: _blur_sectors(*x.shape, w.numel()),
            "too-many-bytes",
            "The warps' requests touch {fact} sectors of 32 bytes, and {most} are enough: an element that several "
            "threads need should come from global memory once, and from the tile after that.",
        ),
    ),
    hints=(
        "A block of 128 threads makes 128 results. Which elements of x do they need, first to last? Which of these "
        "lie before the row's start or behind its end?",
        "The tile holds blockDim.x + 2 * radius elements: more than there are threads, so loading is a loop. Element k "
        "of the tile is element first - radius + k of the row, or zero where the row has none.",
        "for k from the thread's number, below the tile's length, in steps of the block: tile[k] = element first - "
        "radius + k, or 0; barrier; if this thread has a result: sum over k of w[k] * tile[t + k].",
    ),
    hints_for={
        "race": ("A thread's sum uses what its neighbours loaded. What must happen between the two?",),
        "nan": ("What does the tile hold where the row has no element?",),
    },
)


def _blur_sectors(rows: int, cols: int, weights: int) -> int:
    """What blocks of 128 threads need, half as much again: the tile once, each weight once a warp, the results."""
    block = 5 * ceil((127 + weights) / 32) + 4 * weights + 4 * 5
    return 3 * rows * ceil(cols / 128) * block // 2


# ----------------------------------------------------------------------------------------------------------------------


def _histogram(x, bins):
    inside = x[(x >= 0) & (x < bins)].long()
    return torch.bincount(inside, minlength=bins).to(torch.int32)


histogram = Exercise(
    name="histogram",
    lab=LAB,
    rung="cuda",
    entry="histogram",
    title="A histogram: atomics, twice",
    form="kernel",
    made_of="cuda",
    reference=_histogram,
    dtype=torch.int32,
    cases=(
        Case("5000 values, 64 bins", lambda d: (d.integers(0, 64, 5000), 64), exact=True, seen=True),
        Case("values that have no bin", lambda d: (d.integers(-9, 50, 3001), 40), exact=True, seen=True),
        Case("all values equal", lambda d: (torch.full((4999,), d.integer(0, 6), dtype=torch.int32), 7), exact=True),
        Case("more bins than threads: 1000", lambda d: (d.integers(0, 1000, 20_000), 1000), exact=True),
        Case("10,007 bins, most of them empty", lambda d: (d.integers(0, 10_007, 2000), 10_007), exact=True),
        Case("a value in every second place", lambda d: (spaced(d.integers(0, 100, 2500)), 100), exact=True),
        Case("one bin", lambda d: (d.integers(-1, 2, 1000), 1), exact=True),
        Case("one value", lambda d: (d.integers(0, 31, 1), 31), exact=True),
        Case("no values", lambda d: (d.integers(0, 2, 0), 12), exact=True),
        Case("10^6 values, 4096 bins", lambda d: (d.integers(0, 4096, 1_000_000), 4096), exact=True, mode="gpu"),
        Case(
            "the last value beyond element 2^32",
            lambda d: (far(d.integers(1, 4, 3, 1), 2**32)[:, 0], 4),  # none is 0, as the memory between them is
            exact=True,
            memory_bytes=FAR_BYTES,
        ),
    ),
    limits=(
        Limit(
            "sectors",
            lambda x, bins: _histogram_sectors(x.numel(), x.stride(0), bins),
            "too-many-bytes",
            "The warps' requests to global memory touch {fact} sectors of 32 bytes, and {most} are enough: count in "
            "shared memory, and let few blocks, with many values each, add what they counted to the result.",
        ),
    ),
    hints=(
        "Two threads may meet at one bin twice: threads of one block in its shared histogram, and blocks in the "
        "result. Which steps of the kernel must be over before the next begins?",
        "Zero the block's counts, count, add to the result: three loops, two barriers between them. There may be more "
        "bins than threads, so the first and the last are loops over bins in steps of the block.",
        "out = zeros; some blocks, each for a few thousand values. In each: counts[b] = 0 for all b; barrier; for own "
        "values (grid-stride) with a bin: atomicAdd(&counts[v], 1); barrier; for all b: atomicAdd(&out[b], counts[b]).",
    ),
    hints_for={
        "race": (
            "`counts[v] += 1` is three steps: read, add, write. What happens when two threads do them at once? And "
            "is every count zeroed before the first one is raised?",
        ),
        "out-of-bounds": ("What is counted when a value is negative, or not below bins?",),
    },
)


def _histogram_sectors(values: int, stride: int, bins: int) -> int:
    """Each value once, the result zeroed, and one merge of it for each 1024 values begun, a fifth as much again."""
    reading = ceil(values / 32) * min(32, 4 * stride + 1)
    return 6 * (reading + (1 + ceil(values / 1024)) * ceil(bins / 32) * 5) // 5


EXERCISES = (coalescing, block_sum, transpose, warp_argmax, stencil, histogram)
