"""Lab 01: count bytes, predict a time, mend a timer, write one, read a roofline."""

from . import Case, Draw, Exercise

LAB = "01_measuring"


def _least_bytes(m, n, k, size):
    return {
        "add_bias": (2 * m * n + n) * size,
        "row_sums": (m * n + m) * size,
        "softmax": 2 * m * n * size,
        "to_fp32": m * n * (size + 4),
        "gather": 2 * k * n * size + 8 * k,
        "product": (m * k + k * n + m * n) * size,
    }


def _shape(draw: Draw, size: int) -> tuple[int, int, int, int]:
    """(m, n, k, size) with k below m, as the gather needs."""
    k = draw.integer(2, 700)
    return k + draw.integer(1, 700), draw.integer(2, 5000), k, size


COUNT_BYTES = Exercise(
    name="count-bytes",
    lab=LAB,
    rung="measuring",
    entry="least_bytes",
    title="Count the least bytes of six operations",
    form="prediction",
    made_of="python",
    reference=_least_bytes,
    cases=(
        Case("the example of the table", lambda draw: (4, 8, 2, 2), seen=True),
        Case("fp16", lambda draw: _shape(draw, 2)),
        Case("fp32", lambda draw: _shape(draw, 4)),
        Case("fp64", lambda draw: _shape(draw, 8)),
        Case("one byte an element", lambda draw: _shape(draw, 1)),
        Case("one row", lambda draw: (1, draw.integer(2, 5000), 1, 2)),
        Case("one column", lambda draw: (draw.integer(50, 5000), 1, draw.integer(2, 49), 4)),
        Case("one element", lambda draw: (1, 1, 1, 4)),
        Case("more bytes than 32 bits can count", lambda draw: (2**17 + draw.integer(1, 999), 2**16, 2**15, 4)),
    ),
    hints=(
        "For each operation list the tensors that it reads and those that it writes, with their shapes. "
        "The operation is one kernel: nothing in between goes to memory.",
        "The least is each element that is needed read once, each result written once. A tensor that is used for every "
        "row still is read once; a row that nobody asks for is not read at all. Then mind how many bytes an element of "
        "each tensor has: they are not all of `size`.",
        "operation: (elements read) * (their bytes) + (elements written) * (their bytes). add_bias reads m*n and n "
        "elements. gather reads k indices of 8 bytes and k rows, and writes k rows. to_fp32 writes elements of 4 bytes.",
    ),
    core=True,
)

EXERCISES = (COUNT_BYTES,)
