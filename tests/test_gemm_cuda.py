"""Lesson 09's kernels: their values, what they refuse, and that each compiles for every card it is for."""

import re
from dataclasses import replace

import pytest
import torch

from helpers import cuda, machine, reveal, source

RUNGS = source.load("09_gemm", "ALL")

# --- fp32 on CUDA cores: rungs 1 to 9 ----------------------------------------------------------------------------
FP32 = [rung for rung in RUNGS if not rung.linear]
SHAPES = [(1, 1, 1), (1, 4, 4), (3, 260, 1), (45, 71, 19), (129, 131, 37), (131, 136, 36), (257, 12, 8)]
"""(M, N, K): one element, fewer than a tile, one tile and a little, with and without multiples of 4."""


def operands(rung, M, N, K):
    """a, b of random normal values; K and N rounded up to what the rung takes."""
    K, N = (-(-size // multiple) * multiple for size, multiple in zip((K, N), rung.multiples, strict=True))
    g = torch.Generator().manual_seed(M * N + K)
    return (torch.randn(shape, generator=g).to(machine.device()) for shape in ((M, K), (K, N)))


def launch_of(rung, a, b, out):
    """The rung's kernel, and the grid, block, arguments and shared memory of its launch."""
    kernel = cuda.RawModule(code=rung.code, options=rung.options(dtype=a.dtype)).get_function("gemm")
    (M, K), N, config = a.shape, out.shape[1], rung.config()
    return kernel, (rung.blocks(M, N), (config.threads,), (a, b, out, M, N, K), config.shared)


@pytest.mark.parametrize("rung", FP32, ids=str)
def test_fp32_rungs_equal_float64(rung):
    for shape in SHAPES:
        a, b = operands(rung, *shape)
        want = a.double() @ b.double()
        scale = a.double().abs() @ b.double().abs()  # what rounding is proportional to
        assert ((rung(a, b) - want).abs() <= a.shape[1] * 2**-24 * scale).all(), shape


@pytest.mark.parametrize("rung", FP32, ids=str)
def test_fp32_rungs_are_exact_on_small_integers(rung):
    g = torch.Generator().manual_seed(9)
    a, b = (torch.randint(-4, 5, (132, 132), generator=g).to(machine.device(), torch.float32) for _ in range(2))
    assert torch.equal(rung(a, b).double(), a.double() @ b.double())


@pytest.mark.skipif(machine.gpu(), reason="the CPU runner's checks")
@pytest.mark.parametrize("rung", FP32, ids=str)
def test_fp32_rungs_neither_race_nor_leave_their_arrays(rung):
    a, b = operands(rung, 131, 136, 36)
    out = torch.full((a.shape[0], b.shape[1]), float("nan"))
    kernel, launch = launch_of(rung, a, b, out)
    kernel(*launch)
    forward = out.clone()
    kernel(*launch, order="shuffle", seed=1)
    assert torch.equal(out, forward) and not out.isnan().any()
    assert not kernel.check_races(*launch)
    kernel.check_bounds(*launch)


@pytest.mark.parametrize("shape", [(2**31 - 1, 0, 0), (0, 2**31 - 4, 0), (0, 0, 2**31 - 4)])
def test_fp32_rungs_refuse_sizes_that_their_counters_cannot_pass(shape):
    M, N, K = shape
    for rung in FP32:
        with pytest.raises(ValueError, match="32 bits"):
            rung(torch.empty(M, K, device=machine.device()), torch.empty(K, N, device=machine.device()))


# --- bf16 and fp16 on tensor cores: rungs from 10 on -------------------------------------------------------------
LINEAR = [rung for rung in RUNGS if rung.linear]
LINEAR_SHAPES = [(1, 1, 8), (16, 16, 16), (129, 131, 72), (257, 136, 40)]
"""(M, N, K): one element, one fragment, a tile and a little, with N that stores of 16 bytes can and cannot take."""
if machine.gpu():
    LINEAR_SHAPES += [(1000, 4099, 1032), (4096, 4096, 520)]


def linear_operands(M, N, K, dtype):
    g = torch.Generator().manual_seed(M * N + K)
    return (torch.randn(shape, generator=g).to(machine.device(), dtype) for shape in ((M, K), (N, K)))


def is_right(y, x, w) -> bool:
    """Whether y is x @ w.T but for float's rounding of the sums and y's own."""
    want = x.double() @ w.double().T
    scale = x.double().abs() @ w.double().abs().T
    return ((y - want).abs() <= want.abs() * torch.finfo(y.dtype).eps + x.shape[1] * 2**-23 * scale).all().item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rung", LINEAR, ids=str)
def test_tensor_core_rungs_equal_float64(rung, dtype):
    if why := rung.why_not(machine.here().arch):
        pytest.skip(why)
    if not machine.gpu() and not rung.cpu:
        pytest.skip("the CPU runner has no such instructions")
    for M, N, K in LINEAR_SHAPES:
        x, w = linear_operands(M, -(-N // rung.multiples[1]) * rung.multiples[1], K, dtype)
        assert is_right(rung(x, w), x, w), (M, N, K)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rung", [rung for rung in LINEAR if rung.gelu], ids=str)
def test_bias_and_gelu_equal_float64(rung, dtype):
    if not machine.gpu() or rung.why_not(machine.here().arch):
        pytest.skip("needs a GPU that has its instructions")
    for M, N, K in LINEAR_SHAPES:
        x, w = linear_operands(M, -(-N // 8) * 8, K, dtype)
        b = torch.randn(len(w), generator=torch.Generator().manual_seed(N)).to(w)
        z = x.double() @ w.double().T + b.double()
        want = torch.nn.functional.gelu(z, approximate="tanh")
        # what y and the sums are rounded by, and the error of tanh.approx, 2**-11 of half of z
        slack = (
            want.abs() * torch.finfo(dtype).eps + z.abs() * 2**-11 + K * 2**-23 * x.double().abs() @ w.double().abs().T
        )
        assert ((rung(x, w, bias=b) - want).abs() <= slack).all(), (M, N, K)


@pytest.mark.skipif(machine.gpu(), reason="the CPU runner's checks")
def test_wmma_neither_races_nor_leaves_its_arrays():
    x, w = linear_operands(130, 131, 72, torch.float16)
    y = torch.full((130, 131), float("nan"), dtype=torch.float16)
    kernel, launch = launch_of(RUNGS[9], x, w, y)
    kernel(*launch, order="shuffle", seed=1)
    assert is_right(y, x, w)
    assert not kernel.check_races(*launch)
    kernel.check_bounds(*launch)


IN_C = {
    "copy_async": """
__device__ char* pool() {
    extern __shared__ __align__(128) char shared[];
    return shared;
}
__device__ void copy_async(unsigned to, const T* from, bool inside) {
    for (int i = 0; i < 8; ++i) reinterpret_cast<T*>(pool() + to)[i] = inside ? from[i] : T(0.0f);
}
""",
    "commit": "__device__ void commit() {}\n",
    "arrived": "template <int newest> __device__ void arrived() {}\n",
    "ldmatrix": """
__device__ void ldmatrix(unsigned* r, unsigned from) {
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        unsigned row = __shfl_sync(~0u, from, i * 8 + lane / 4);
        r[i] = *reinterpret_cast<unsigned*>(pool() + row + lane % 4 * 4);
    }
}
""",
    "mma": """
__device__ float element(unsigned pair, int k, int lane) {
    unsigned both = __shfl_sync(~0u, pair, lane);
    return float(reinterpret_cast<T*>(&both)[k % 2]);
}
__device__ void mma(float* c, const unsigned* a, const unsigned* b, T*) {
    int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int k = 0; k < 16; ++k) {
        int part = k / 8, holder = k % 8 / 2;
        for (int i = 0; i < 4; ++i)
            c[i] += element(a[part * 2 + i / 2], k, row * 4 + holder) *
                    element(b[part], k, (column + i % 2) * 4 + holder);
    }
}
""",
}
"""What rung 11's instructions do, in C, so that the CPU runner can run all that stands around them."""


def mma_sync_in_c() -> str:
    code = RUNGS[10].code.replace("static_cast<unsigned>(__cvta_generic_to_shared(shared))", "0")
    for name, text in IN_C.items():
        found = re.search(rf"^(#define MMA|[^\n]*__device__ void {name}\().*?\n\n", code, re.S | re.M)
        code = code.replace(found[0], text)
    return code


@pytest.mark.skipif(machine.gpu(), reason="the CPU runner's checks")
@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ((32, 64, 32, 16, 32, 2), 5),
        pytest.param((32, 64, 64, 16, 32, 3), 2, marks=pytest.mark.slow),
        pytest.param((64, 64, 64, 32, 32, 4), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_mma_sync_around_its_instructions_equals_float64(sizes, blocks):
    """Copies that run ahead from tile to tile, the swizzle, the dealt rows of w, the stores; here copies land at once,
    so that only a GPU shows whether the waits suffice."""
    names, (BM, BN, BK, WM, WN, stages) = ("BM", "BN", "BK", "WM", "WN", "STAGES"), sizes
    threads = 32 * (BM // WM) * (BN // WN)
    options = [f"-D{n}={size}" for n, size in zip(names, sizes, strict=True)]
    options += [f"-DTHREADS={threads}", "-DGROUP=2", "-DELEMENT=__half"]
    kernel = cuda.RawModule(code=mma_sync_in_c(), options=options).get_function("gemm")
    for M, N, K in ((77, 131, 72), (65, 136, 200), (1, 1, 8)):
        x, w = linear_operands(M, N, K, torch.float16)
        y = torch.full((M, N), float("nan"), dtype=torch.float16)
        grid = min(blocks, -(-M // BM) * -(-N // BN))
        launch = (grid,), (threads,), (x, w, y, M, N, K), stages * (BM + BN) * BK * 2
        kernel(*launch)
        assert is_right(y, x, w), (M, N, K)
        kernel.check_bounds(*launch)
    ways = [a.ways for a in kernel.trace(*launch) if "row + lane % 4" in a.text]
    assert ways and set(ways) == {1}  # the swizzle: no two rows of a matrix share a bank


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_mma_sync_keeps_everything_in_registers(arch):
    binary = RUNGS[10].binary(arch)
    assert not binary.kernels["gemm"].spill_bytes and not binary.kernels["gemm"].stack_bytes
    assert {"HMMA", "LDSM", "LDGSTS"} <= {op.partition(".")[0] for op in reveal.instructions(binary.sass("gemm"))}


@pytest.mark.parametrize("rung", [RUNGS[10], RUNGS[19]], ids=str)
def test_a_rung_can_be_sized_for_an_older_card(rung):
    older = rung.sized_for("sm_80").config("sm_90")
    binary = rung.sized_for("sm_80").binary("sm_90")
    assert older != rung.config("sm_90")
    assert older.shared + binary.kernels["gemm"].shared_bytes <= machine.shared_limit("sm_80")
    with pytest.raises(ValueError, match="no sizes for the"):
        RUNGS[18].sized_for("sm_75")


def test_tensor_core_rungs_say_what_a_card_lacks():
    assert "sm_80" in RUNGS[10].why_not("sm_75")
    assert not RUNGS[9].why_not("sm_75") and RUNGS[9].config("sm_75").shared <= 64 << 10


# --- what no rung takes ------------------------------------------------------------------------------------------
gemm = source.load("09_gemm", "gemm")
linear_gelu = source.load("09_gemm", "linear_gelu")
HERE = [rung for rung in RUNGS if not rung.why_not(machine.here().arch)]


def square(rung, n=32):
    """Two operands of n x n, in the rung's first dtype."""
    return tuple(torch.randn(n, n).to(machine.device(), rung.dtypes[0]) for _ in range(2))


def shifted(t):
    """A contiguous copy of t that begins one element after a multiple of 16 bytes."""
    return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)


BAD = {
    "takes": lambda a, b: (a[:, :8], b, None),
    "takes torch tensors": lambda a, b: (a.tolist(), b, None),
    "the same for all tensors": lambda a, b: (a.double(), b, None),
    "all tensors, but (b|w) is float64": lambda a, b: (a, b.double(), None),
    "but (a|x) is on 'meta'": lambda a, b: (a.to("meta"), b, None),
    "contiguous tensors": lambda a, b: (a.T, b, None),
    "contiguous tensors; (b|w)": lambda a, b: (a, b.repeat(1, 2)[:, ::2], None),
    "writes": lambda a, b: (a, b, torch.empty(3, 3)),
    "but out is float64": lambda a, b: (a, b, torch.empty_like(a, dtype=torch.float64)),
    "contiguous tensors; out": lambda a, b: (a, b, torch.empty_like(a).T),
    "they share memory": lambda a, b: (a, b, b),
}  # fmt: skip


@pytest.mark.parametrize("rung", HERE, ids=str)
@pytest.mark.parametrize("said", BAD)
def test_what_would_be_wrong_is_refused_with_a_sentence(rung, said):
    a, b, out = BAD[said](*square(rung))
    with pytest.raises(ValueError, match=said) as caught:
        gemm(a, b, rung, out)
    assert str(caught.value).startswith(str(rung)) and str(caught.value).endswith(".")


@pytest.mark.parametrize("rung", [r for r in HERE if r.multiples[0] > 1], ids=str)
def test_what_wide_loads_cannot_read_is_refused(rung):
    a, b = square(rung)
    for x, w, out in ((shifted(a), b, None), (a, shifted(b), None), (a, b, shifted(a))):
        with pytest.raises(ValueError, match="begins between them"):
            rung(x, w, out)
    odd = torch.ones(32, 33).to(a)
    with pytest.raises(ValueError, match=f"takes K that are multiples of {rung.multiples[0]}, not 33"):
        rung(odd, odd if rung.linear else odd.T.contiguous())


@pytest.mark.parametrize("rung", [r for r in HERE if r.multiples[1] > 1], ids=str)
def test_rows_of_the_result_that_no_wide_store_can_write_are_refused(rung):
    a, _ = square(rung)
    odd = torch.ones(33, 32).to(a) if rung.linear else torch.ones(32, 33).to(a)
    with pytest.raises(ValueError, match=f"takes N that are multiples of {rung.multiples[1]}, not 33"):
        rung(a, odd)


def test_more_elements_than_an_index_counts_are_refused():
    a, b = (torch.empty(1, device="meta").expand(*shape) for shape in ((2**16, 2**15), (2**15, 4)))
    with pytest.raises(ValueError, match="counts elements in 32 bits"):
        replace(RUNGS[0], wide=False)(a, b)
    column = torch.empty(1, device="meta").expand(2**16, 1)
    with pytest.raises(ValueError, match="counts elements in 32 bits"):
        replace(RUNGS[0], wide=False)(column, column.T)


def test_a_rung_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(ValueError, match="'fastest' is no rung: they are 01 naive, 02 coalesced"):
        gemm(torch.zeros(2, 2), torch.zeros(2, 2), "fastest")
    a, b = square(RUNGS[0])
    for name in (1, "naive", "01 naive", RUNGS[0]):
        assert torch.equal(gemm(a, b, name), RUNGS[0](a, b))


def test_other_cards_are_told_what_is_not_for_them():
    for rung in RUNGS:
        for arch in ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"):
            why = rung.why_not(arch)
            assert not why or (str(rung) in why and arch in why and why.endswith("."))
            if not rung.linear:
                assert not why, "every card has CUDA cores"
    small = replace(RUNGS[0], configs=(replace(RUNGS[0].configs[0], shared=120_000),))
    assert small.why_not("sm_86") == "01 naive takes 120,000 bytes of shared memory a block, and sm_86 has 101,376."
    with pytest.raises(ValueError, match="sm_86 has"):
        small.options("sm_86")


@pytest.mark.skipif(machine.gpu(), reason="says what CPU mode does")
@pytest.mark.parametrize("rung", [r for r in HERE if not r.cpu], ids=str)
def test_what_only_a_gpu_runs_is_said_in_cpu_mode(rung):
    with pytest.raises(machine.NotReady, match="a GPU's own instructions"):
        rung(*square(rung))


@pytest.mark.parametrize("rung", HERE, ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)])
def test_nothing_times_nothing_is_what_torch_says(rung, M, N, K):
    if not machine.gpu() and not rung.cpu:
        pytest.skip("needs a GPU")
    a, b = (torch.ones(shape).to(machine.device(), rung.dtypes[0]) for shape in ((M, K), (K, N)))
    want = a @ b
    got = rung(a, b.T.contiguous() if rung.linear else b)
    assert got.shape == want.shape and torch.equal(got, want)


@pytest.mark.skipif(not machine.gpu(), reason="needs a GPU")
@pytest.mark.parametrize("rung", HERE, ids=str)
def test_a_launch_is_on_torchs_current_stream_and_refuses_cupys(rung):
    import cupy

    a, b = square(rung, 256)
    want = (a.double() @ (b.double().T if rung.linear else b.double())).float()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = a.clone()  # a launch on another stream would read it too early
        got = rung(late, b)
    stream.synchronize()
    assert (got.float() - want).norm() < 1e-2 * want.norm()
    with cupy.cuda.Stream(non_blocking=True), pytest.raises(cuda.LaunchError, match="CuPy's current stream is another"):
        rung(a, b)
    assert (rung(a, b).float() - want).norm() < 1e-2 * want.norm(), "the process goes on"


MANY = (2**16 + 8, 2**15 + 8)
"""Sides of a matrix of more than 2**31 elements."""


@pytest.mark.skipif(not machine.gpu() or machine.here().memory_bytes < 24 << 30, reason="needs a GPU with 24 GB")
@pytest.mark.parametrize("rung", HERE, ids=str)
@pytest.mark.parametrize("shape", [(MANY[0], 8, MANY[1]), (8, *MANY), (*MANY, 8)], ids=str)
def test_matrices_of_more_than_two_to_the_31_elements(rung, shape):
    M, N, K = shape
    sides = (M, K), (N, K) if rung.linear else (K, N)
    a, b = (torch.randn(s, device="cuda", dtype=rung.dtypes[0]) for s in sides)
    got = rung(a, b)[-8:, -100:].double()
    columns = b[-100:].double().T if rung.linear else b[:, -100:].double()
    want = a[-8:].double() @ columns
    assert (got - want).norm() < (1e-2 if rung.linear else 1e-5) * want.norm()


@pytest.mark.skipif(not machine.gpu(), reason="needs a GPU")
@pytest.mark.parametrize("rung", HERE, ids=str)
def test_a_rung_gives_the_same_every_time(rung):
    """A stage that is refilled too early, or a tile that is overwritten, shows as a difference now and then."""
    a, b = square(rung, 1024)
    first = rung(a, b)
    assert all(torch.equal(rung(a, b), first) for _ in range(30))
