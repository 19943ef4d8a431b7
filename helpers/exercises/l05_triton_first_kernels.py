"""Lab 05, Triton: masks, reductions, random numbers, and a stranger's kernel to review."""

import torch

from . import Case, Exercise, far, padded

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
        Case("ten million elements", _vectors(10_000_019), mode="gpu"),
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
        Case("rows of a little more than three blocks", _scores(5, 200, 64), seen=True),
        Case("row r sees its first columns only, row 0 none", _scores(6, 150, 32, put=_causal), seen=True),
        Case("the first blocks hold nothing but -inf", _scores(4, 203, 32, put=_late)),
        Case("exactly one block", _scores(3, 128, 128)),
        Case("one column more than a block, float16", _scores(4, 129, 128, torch.float16)),
        Case("rows shorter than a block", _scores(3, 37, 256), kind="outliers"),
        Case("one column", _scores(3, 1, 16)),
        Case("no row", _scores(0, 50, 32)),
        Case("far from zero", _scores(4, 333, 64), kind="offset"),
        Case("far below zero", _scores(3, 90, 32, put=lambda x: x - 300.0)),
        Case("float16 with outliers", _scores(4, 500, 128, torch.float16), kind="outliers"),
        Case("rows further apart than they are long", _scores(5, 101, 32, put=padded)),
        Case("the largest at the end", _scores(3, 250, 64, put=lambda x: x.sort(-1).values * 20)),
        Case("the last row lies beyond element 2**31", _scores(3, 70, 32, torch.float16, far), memory_bytes=FAR_BYTES),
        Case("one row of more than a million columns", _scores(1, 2**20 + 7, 8192)),
        Case("4096 rows of 40,000 columns, float16", _scores(4096, 40_000, 4096, torch.float16), mode="gpu"),
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


EXERCISES = (MASKED_ADD, ROW_SOFTMAX)
