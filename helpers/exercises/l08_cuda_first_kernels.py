"""Lab 08: kernels in CUDA C, from which thread takes which element to a histogram with atomics."""

from math import ceil

import torch

from . import Case, Exercise, Limit, far, padded

LAB = "08_cuda_first_kernels"
FAR_BYTES = 9 << 30
"""Three rows of float32 whose last lies beyond element 2**31."""


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
        Case("the last row beyond element 2^31", lambda d: (far(d(3, 40)), d(40)), memory_bytes=FAR_BYTES),
        Case("2048 x 4099", lambda d: (d(2048, 4099), d(4099)), mode="gpu"),
    ),
    limits=(
        Limit(
            "sectors",
            lambda x, gain: 15 * _requests(*x.shape),  # x, gain and out: 5 each where a row is not aligned
            "too-many-bytes",
            "the warps' requests touch {fact} sectors of 32 bytes; with neighbouring threads on neighbouring columns, "
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
        Case("rows of 1021, small integers", lambda d: (d(3, 1021),), kind="integers", exact=True),
        Case("rows that lie further apart than they are long", lambda d: (padded(d(5, 131)),)),
        Case("one element", lambda d: (d(1, 1),)),
        Case("rows without elements: their sum is 0", lambda d: (d(3, 0),), exact=True),
        Case("no rows", lambda d: (d(0, 9),)),
        Case("the last row beyond element 2^31", lambda d: (far(d(3, 100)),), memory_bytes=FAR_BYTES),
        Case("1000 rows of 30011", lambda d: (d(1000, 30011),), mode="gpu"),
    ),
    limits=(
        Limit(
            "sectors",
            lambda x: 5 * _requests(*x.shape) + x.shape[0],
            "too-many-bytes",
            "the warps' requests touch {fact} sectors of 32 bytes, and {most} are enough: let the whole block read the "
            "row, neighbouring threads neighbouring elements.",
        ),
        Limit(
            "bank_ways",
            lambda x: 1.0,
            "too-slow",
            "a request to shared memory takes {fact} steps on average, and {most} is enough: let the threads that "
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


EXERCISES = (coalescing, block_sum)
