"""Lab 11: kernels in Mojo for a CPU and for a GPU, one of them specialised, and an operator for MAX's graphs."""

import re

import torch

from . import Case, Draw, Exercise, Limit, Look, Mojo, padded

LAB = "11_mojo_max"


# ---- vector-sum ---------------------------------------------------------------------------------------------------

LEAST = 4
"""How many times as fast as the plain loop: four numbers to a register are enough on any x86-64."""

SUMS = """
from program import sum_of_squares

comptime Floats = Pointer[Float32, MutAnyOrigin]
comptime Row = def(Floats, Int) thin -> Float32


@no_inline
def one_by_one(x: Floats, n: Int) -> Float32:
    var sum = Float32(0)
    for i in range(n):
        sum += x[unsafe_offset=i] * x[unsafe_offset=i]
    return sum


@no_inline
def answered(x: Floats, n: Int) -> Float32:
    return sum_of_squares(x, n)


def rows[row: Row](x: Floats, count: Int, pitch: Int, n: Int, sums: Floats):
    for r in range(count):
        sums[unsafe_offset=r] = row(x.unsafe_offset(r * pitch), n)


@export
def plain_rows(x: Floats, count: Int, pitch: Int, n: Int, sums: Floats) abi("C"):
    rows[one_by_one](x, count, pitch, n, sums)


@export
def answered_rows(x: Floats, count: Int, pitch: Int, n: Int, sums: Floats) abi("C"):
    rows[answered](x, count, pitch, n, sums)
"""
"""Functions of C's: a module for Python would take its compiler three times as long."""


def summed(sums, x, how):
    """The sums of all rows; "timed", also the time of a plain loop over that of the answer. how: "fenced" where nothing
    may be touched before the first row, nor behind the last."""
    import ctypes
    import time

    import torch

    from helpers.stage import guards

    out = torch.full((x.shape[0],), float("nan"))
    best = {}

    def call(name, x):
        given = (x.data_ptr(), x.shape[0], x.stride(0), x.shape[1], out.data_ptr())
        getattr(sums, name)(*map(ctypes.c_int64, given))

    for at_end in (False, True) if how == "fenced" else ():
        call("answered_rows", guards.fenced(x, at_end))
    for _ in range(25 if how == "timed" else 0):
        for name in ("plain_rows", "answered_rows"):
            began = time.perf_counter_ns()
            call(name, x)
            best[name] = min(best.get(name, 1 << 62), time.perf_counter_ns() - began)
    if best:  # the sums are those of the last call that was timed
        return out, {"times": best["plain_rows"] / best["answered_rows"]}
    call("answered_rows", x)
    return out, {}


def judge_sums(inputs, outputs, facts):
    ratio = facts.get("times")
    if ratio is None:
        return []
    if ratio >= LEAST:
        return [("checked", f"{ratio:.1f} times as fast as the plain loop, both on one core (at least {LEAST})")]
    said = f"On one core it is {ratio:.1f} times as fast as the plain loop; {LEAST} times is asked for."
    return [
        ("too-slow", f"{said} How many numbers does one step load and multiply, also in long rows of an odd length?")
    ]


vector_sum = Exercise(
    name="vector-sum",
    lab=LAB,
    rung="mojo",
    entry="SUM_OF_SQUARES",
    title="A sum of squares, a register at a time",
    form="kernel",
    made_of="mojo",
    package="max",
    mojo=Mojo(SUMS, library=True),
    drive=summed,
    judge=judge_sums,
    core=True,
    reference=lambda x, how: x.square().sum(1),
    low=lambda x, how: x.half().float().square().sum(1),
    dtype=torch.float32,
    cases=(
        Case("6 rows of 1000", lambda d: (d(6, 1000), ""), seen=True, mode="cpu"),
        Case("rows of 1024", lambda d: (d(3, 1024), ""), kind="integers", exact=True, mode="cpu"),
        Case("rows of 4099, a prime", lambda d: (d(3, 4099), ""), kind="outliers", mode="cpu"),
        Case("rows of 127", lambda d: (d(5, 127), ""), kind="integers", exact=True, mode="cpu"),
        Case("rows of 3, fewer than a register holds", lambda d: (d(9, 3), "fenced"), mode="cpu"),
        Case("rows of 509, far from zero", lambda d: (d(4, 509), ""), kind="offset", mode="cpu"),
        Case("rows that begin at odd addresses", lambda d: (padded(d(8, 256), 3), ""), mode="cpu"),
        Case("one element", lambda d: (d(1, 1), ""), mode="cpu"),
        Case("rows without elements: their sum is 0", lambda d: (d(3, 0), "fenced"), exact=True, mode="cpu"),
        Case("rows of 77, and nothing may be read beyond them", lambda d: (d(7, 77), "fenced"), mode="cpu"),
        Case("16 rows of 4099, timed", lambda d: (d(16, 4099), "timed"), seen=True, mode="cpu"),
    ),
    hints=(
        "The plain loop adds one product a step, and each step waits for the sum of the one before. Which type holds "
        "`W` sums at once, and how does one load bring `W` numbers?",
        "Keep a `SIMD[F, W]` of sums, each of every W-th number, and make one number of it at the end. Where `n` is no "
        "multiple of `W`, the last few are left: they need a loop of their own. Two or four such registers hide the "
        "wait.",
        "sums = SIMD of zeros; whole = n // W * W; for i from 0 below whole in steps of W: piece = load W numbers at "
        "i; sums += piece * piece. total = sums.reduce_add(); for i from whole below n: total += x[i] * x[i].",
    ),
    hints_for={
        "nan": ("Which numbers does the last load bring, where `n` is no multiple of `W`?",),
        "crash": (
            "A load may end the process where it touches memory that is not the row's, also if its value is not used. "
            "For every `n`, which are the first and the last number that each load brings, and are they the row's? "
            "Rows begin anywhere, so no alignment may be asked for either.",
        ),
    },
    seconds=20,
)


# ---- tiled-product ------------------------------------------------------------------------------------------------

TILE = 16
PRODUCT = """
from max.gpu.host import DeviceContext

from program import tiled


def main() raises:
    var ctx = DeviceContext()
    var a = ctx.enqueue_create_buffer[DType.float32](256)
    ctx.enqueue_function[tiled](a, a, a, Int32(1), Int32(1), Int32(1), grid_dim=(1, 1), block_dim=(16, 16))
"""


def multiplied(kernels, a, b):
    import torch

    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device)
    if c.numel() > 0:
        kernels["tiled"]((-(-n // 16), -(-m // 16)), (16, 16), (a, b, c, m, n, k))
    return c


def _loads(a, b):
    """Requests of warps for global memory: each block goes through k in steps of a tile, and fetches two of them."""
    (m, k), n = a.shape, b.shape[1]
    blocks = -(-m // TILE) * -(-n // TILE)
    return blocks * -(-k // TILE) * 2 * (TILE * TILE // 32)


tiled_product = Exercise(
    name="tiled-product",
    lab=LAB,
    rung="mojo",
    entry="TILED",
    title="A product through tiles in shared memory, on a GPU",
    form="kernel",
    made_of="mojo",
    package="max",
    mojo=Mojo(PRODUCT, call=multiplied),
    core=True,
    reference=lambda a, b: a @ b,
    scale=lambda a, b: a.abs() @ b.abs(),
    cases=(
        Case("32 x 48 x 32: whole tiles", lambda d: (d(32, 48), d(48, 32)), seen=True),
        Case("one tile, small integers", lambda d: (d(16, 16), d(16, 16)), kind="integers", exact=True),
        Case("37 x 41 x 29: nothing is a multiple of a tile", lambda d: (d(37, 41), d(41, 29)), seen=True),
        Case("17 x 33 x 18, outliers", lambda d: (d(17, 33), d(33, 18)), kind="outliers"),
        Case("one row", lambda d: (d(1, 50), d(50, 40)), kind="integers", exact=True),
        Case("one column", lambda d: (d(40, 20), d(20, 1))),
        Case("one element", lambda d: (d(1, 1), d(1, 1))),
        Case("a sum of one product", lambda d: (d(20, 1), d(1, 24))),
        Case("a sum of none: zeros", lambda d: (d(5, 0), d(0, 7)), exact=True),
        Case("1000 x 777 x 515", lambda d: (d(1000, 777), d(777, 515)), mode="gpu"),
    ),
    limits=(
        Limit(
            "load_requests",
            _loads,
            "too-many-bytes",
            "Warps ask global memory {fact} times; with a tile of each matrix in shared memory, {most} times are "
            "enough.",
        ),
        Limit(
            "load_sectors",
            lambda a, b: 6 * _loads(a, b),
            "too-many-bytes",
            "Loads touch {fact} sectors of 32 bytes, and {most} are enough: let `thread_idx.x` run along rows.",
        ),
        Limit(
            "bank_ways",
            lambda a, b: 2.0,
            "too-slow",
            "A request to shared memory takes {fact} steps on average, at {where}; {most} are enough: let "
            "`thread_idx.x` run along a tile's rows.",
        ),
    ),
    hints=(
        "Each number of `a` is needed by 16 threads of the block, and each of `b` too. What does a thread fetch for "
        "the others, and when may they read it?",
        "Go through `depth` a tile at a time: every thread of the block puts one number of `a` and one of `b` into "
        "shared memory, zero where the matrix has ended; then all wait; then each adds up sixteen products; then all "
        "wait again before the next tile overwrites this one.",
        "for start from 0 below k in steps of TILE: shared_a[ty, tx] = a[row, start + tx] or 0; shared_b[ty, tx] = "
        "b[start + ty, col] or 0; barrier; for i in range(TILE): sum += shared_a[ty, i] * shared_b[i, tx]; barrier. "
        "If row < m and col < n: c[row, col] = sum.",
    ),
    hints_for={
        "race": ("Two threads touch one word, and no barrier lies between them: before the reads, or after?",),
        "deadlock": ("All threads of a block must reach a barrier, also those whose row or column does not exist.",),
        "out-of-bounds": ("Three accesses go to global memory. Which two sides does each of them have to keep to?",),
    },
    seconds=30,
)


# ---- specialised-window -------------------------------------------------------------------------------------------

WINDOWS = {
    "edges_1_float32": ("float32", 1, True),
    "edges_4_float32": ("float32", 4, True),
    "edges_3_float16": ("float16", 3, True),
    "inside_1_float32": ("float32", 1, False),
    "inside_9_float32": ("float32", 9, False),
    "inside_3_float16": ("float16", 3, False),
}
"""The kernels that one text is compiled to: type, radius, whether the ends of the row have to be seen to."""


def _main_of_windows() -> str:
    text = "from max.gpu.host import DeviceContext\n\nfrom program import window\n\n"
    for name, (dtype, radius, edges) in WINDOWS.items():
        kind = f"Pointer[Scalar[DType.{dtype}], MutAnyOrigin]"
        text += (
            f"\ndef {name}(x: {kind}, y: {kind}, n: Int32):\n    window[DType.{dtype}, {radius}, {edges}](x, y, n)\n\n"
        )
    text += "\ndef main() raises:\n    var ctx = DeviceContext()\n"
    for dtype in ("float32", "float16"):
        text += f"    var {dtype} = ctx.enqueue_create_buffer[DType.{dtype}](256)\n"
    for name, (dtype, _, _) in WINDOWS.items():
        text += f"    ctx.enqueue_function[{name}]({dtype}, {dtype}, Int32(1), grid_dim=1, block_dim=256)\n"
    return text


def averaged(kernels, x, radius, edges):
    import torch

    n = len(x) if edges else len(x) - 2 * radius
    y = torch.empty(n, device=x.device, dtype=x.dtype)
    name = f"{'edges' if edges else 'inside'}_{radius}_{str(x.dtype).removeprefix('torch.')}"
    kernels[name]((-(-n // 256),), (256,), (x, y, n))
    return y


def _window(x, radius, edges):
    if edges:
        x = torch.nn.functional.pad(x, (radius, radius))
    return x.unfold(0, 2 * radius + 1, 1).mean(1)


def _scale_of_window(x, radius, edges):
    return _window(x.abs(), radius, edges)


def _summed_in_half(x, radius, edges):
    """What a sum in fp16 gives: each partial sum is rounded."""
    x = torch.nn.functional.pad(x, (radius, radius)) if edges else x
    total = torch.zeros(len(x) - 2 * radius, dtype=torch.float16)
    for column in x.half().unfold(0, 2 * radius + 1, 1).unbind(1):
        total = total + column
    return (total / (2 * radius + 1)).float()


def great(d: Draw) -> tuple:
    """Numbers of 2**14 and -2**14: sums of seven pass what fp16 holds, and no sum of fewer is rounded."""
    return (d.integers(0, 2, 518) * 2 - 1).half() * 2**14, 3, False


def _loops(ptx: str) -> bool:
    """Whether some branch goes back."""
    lines = [line.strip() for line in ptx.splitlines()]
    at = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\$\w+:", line)}
    jumps = [(i, hit[1]) for i, line in enumerate(lines) if (hit := re.search(r"\bbra\S*\s+(\$\w+)", line))]
    return any(at.get(label, i) < i for i, label in jumps)


def _inside(kernels):
    return [k for k in kernels if k.kernel.startswith("inside")]


specialised_window = Exercise(
    name="specialised-window",
    lab=LAB,
    rung="mojo",
    entry="WINDOW",
    title="One source, kernels without what they do not need",
    form="kernel",
    made_of="mojo",
    package="max",
    core=True,
    mojo=Mojo(
        _main_of_windows(),
        call=averaged,
        looks=(
            Look(
                "no loop in the PTX of any of the six",
                lambda kernels: not any(_loops(k.ptx) for k in kernels),
                "too-slow",
                "A branch in the PTX goes back: the loop over the window is still there. `RADIUS` is known when the "
                "kernel is compiled, so the loop can be gone by then.",
            ),
            Look(
                "no comparison and no branch where EDGES is False",
                lambda kernels: not any(re.search(r"\b(setp|selp|bra|min|max)\b", k.ptx) for k in _inside(kernels)),
                "too-slow",
                "The PTX of `window[…, False]` still compares or branches: where `EDGES` is False nothing has to be "
                "looked at before a load, and nothing may be left of it.",
            ),
            Look(
                "as many loads as the window is wide where EDGES is False",
                lambda kernels: all(
                    len(re.findall(r"\bld\.global", k.ptx)) == 2 * WINDOWS[k.kernel][1] + 1 for k in _inside(kernels)
                ),
                "too-many-bytes",
                "The PTX of `window[…, False]` does not load each element of its window once: count the loads.",
            ),
        ),
    ),
    reference=_window,
    scale=_scale_of_window,
    low=_summed_in_half,
    cases=(
        Case("1000 elements, radius 1", lambda d: (d(1000), 1, True), seen=True),
        Case("256 elements, radius 4: one block", lambda d: (d(256), 4, True), kind="integers"),
        Case("257 elements, radius 4", lambda d: (d(257), 4, True), kind="outliers"),
        Case("fewer elements than the window has, radius 4", lambda d: (d(3), 4, True)),
        Case("one element, radius 1", lambda d: (d(1), 1, True)),
        Case("300 elements in fp16, far from zero", lambda d: (d(300, dtype=torch.float16), 3, True), kind="offset"),
        Case("512 elements with their neighbours, radius 1", lambda d: (d(514), 1, False), seen=True),
        Case("256 elements with their neighbours, radius 9", lambda d: (d(274), 9, False), kind="integers"),
        Case("512 in fp16 with their neighbours", lambda d: (d(518, dtype=torch.float16), 3, False), kind="offset"),
        Case("512 in fp16, whose sums fp16 cannot hold", great, exact=True),
        Case("100,003 elements, radius 4", lambda d: (d(100_003), 4, True), mode="gpu"),
    ),
    hints=(
        "Three things are known when a kernel is compiled: the type, the radius, whether there are edges. For each of "
        "them: what would a kernel that is written for one value alone leave out?",
        "`comptime for` writes its body once for each value, and `comptime if` keeps one branch and drops the other. "
        "Where there are no edges, `x` begins a radius earlier than `y`, so nothing has to be subtracted or compared. "
        "Whatever the type, sum in fp32.",
        "i = block * 256 + thread; comptime if EDGES: leave where i >= n; sum = Float32(0); comptime for j in range(2 "
        "* RADIUS + 1): comptime if EDGES: at = i + j - RADIUS, add x[at] where 0 <= at < n; else: add x[i + j]. y[i] "
        "= (sum / (2 * RADIUS + 1)).cast[F]().",
    ),
    hints_for={
        "out-of-bounds": (
            "With `EDGES`, the first and the last window reach beyond the row, and the last block beyond the last "
            "element. Without, `x` holds the neighbours too: which of its elements does `y[0]` need first?",
        ),
    },
    seconds=30,
)


# ---- max-operator -------------------------------------------------------------------------------------------------


def run_operator(folder, x, mix=None, fenced=False):
    """A graph of MAX's that holds the operator alone, loaded once in this process. x "gpu", no mix: it is not run.

    fenced: on a CPU, nothing may be read before x.
    """
    from pathlib import Path

    from max import driver, engine
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, ops

    on_gpu = x == "gpu" if mix is None else x.is_cuda
    if not hasattr(run_operator, "model"):
        where = DeviceRef.GPU(0) if on_gpu else DeviceRef.CPU()
        kinds = [TensorType(DType.float32, sides, device=where) for sides in (("m", "n"), ("n",))]

        def forward(x, mix):
            return ops.custom("token_shift", where, [x, mix], [TensorType(DType.float32, x.shape, device=where)])[0]

        graph = Graph("shift", forward=forward, input_types=kinds, custom_extensions=[Path(folder)])
        session = engine.InferenceSession(devices=[driver.Accelerator() if on_gpu else driver.CPU()])
        try:
            run_operator.model = session.load(graph)
        except RuntimeError as refused:  # the compiler's own words come beneath
            raise RuntimeError(str(refused.__cause__ or refused.__context__ or refused)) from None
    if mix is None:
        return None
    import torch  # the answer's process has it

    from helpers.stage import guards

    x = guards.fenced(x, at_end=False) if fenced else x
    wait = torch.cuda.synchronize if on_gpu else lambda: None  # MAX has a stream of its own
    wait()
    out = run_operator.model.execute(driver.Buffer.from_dlpack(x), driver.Buffer.from_dlpack(mix))[0]
    wait()
    return torch.from_dlpack(out).clone(), {}


def _shifted(x, mix, fenced=False):
    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    return x + mix * (before - x)


max_operator = Exercise(
    name="max-operator",
    lab=LAB,
    rung="mojo",
    entry="TOKEN_SHIFT",
    title="An operator of your own in a graph of MAX's",
    form="kernel",
    made_of="mojo",
    package="max",
    mojo=Mojo(),
    drive=run_operator,
    reference=_shifted,
    scale=lambda x, mix, fenced=False: x.abs() + mix.abs() * (torch.cat([x[:1], x[:-1].abs() + x[1:].abs()]) + x.abs()),
    low="bfloat16",
    cases=(
        Case("6 tokens of 64", lambda d: (d(6, 64), d(64)), seen=True),
        Case("5 tokens of 37: no multiple of a register", lambda d: (d(5, 37), d(37)), kind="outliers"),
        Case("33 tokens of 130, small integers", lambda d: (d(33, 130), d(130)), kind="integers", exact=True),
        Case("one token: nothing comes before it", lambda d: (d(1, 40), d(40))),
        Case("tokens of one number", lambda d: (d(9, 1), d(1))),
        Case("two tokens far from zero", lambda d: (d(2, 77), d(77)), kind="offset"),
        Case("3 tokens of 70, and nothing may be read before x", lambda d: (d(3, 70), d(70), True), mode="cpu"),
        Case("2000 tokens of 1023", lambda d: (d(2000, 1023), d(1023)), mode="gpu"),
    ),
    hints=(
        "Which row and which columns do the `width` numbers have that one call makes? Both `x` and `mix` can be read "
        "at a place that you name.",
        "`at[0]` is the row and `at[1]` the first column; `Int(at[0])` is a number to compute with. A token's "
        "predecessor lies at `Coord(row - 1, at[1])`; the first token has none, and zeros stand for it.",
        "here = x at `at`; before = zeros, or x at (row - 1, column) where row > 0; share = mix at (column); return "
        "here + share * (before - here).",
    ),
    hints_for=dict.fromkeys(("nan", "crash"), ("What is read for the first token, which has none before it?",)),
    seconds=300,  # MAX compiles a graph's first operator for 45 s, and for minutes where others are at work, too
)

EXERCISES = (vector_sum, tiled_product, specialised_window, max_operator)
