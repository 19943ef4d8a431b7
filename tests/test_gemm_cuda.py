"""Lesson 09's kernels: their values, what they refuse, and that each compiles for every card it is for."""

import re

import pytest
import torch

from helpers import cuda, machine, reveal, source

RUNGS = source.load("09_gemm", "RUNGS")

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


# --- tensor cores through a warp's instructions: rungs 10 and 11 -------------------------------------------------
LINEAR_SHAPES = [(1, 1, 8), (16, 16, 16), (129, 131, 72), (257, 136, 40)]
"""(M, N, K): one element, one fragment, a tile and a little, with N that stores of 16 bytes can and cannot take."""


def linear_operands(M, N, K, dtype):
    g = torch.Generator().manual_seed(M * N + K)
    return (torch.randn(shape, generator=g).to(machine.device(), dtype) for shape in ((M, K), (N, K)))


def is_right(y, x, w) -> bool:
    """Whether y is x @ w.T but for float's rounding of the sums and y's own."""
    want = x.double() @ w.double().T
    scale = x.double().abs() @ w.double().abs().T
    return ((y - want).abs() <= want.abs() * torch.finfo(y.dtype).eps + x.shape[1] * 2**-23 * scale).all().item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wmma_equals_float64(dtype):
    for shape in LINEAR_SHAPES:
        x, w = linear_operands(*shape, dtype)
        assert is_right(RUNGS[9](x, w), x, w), shape


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
    [((32, 64, 64, 16, 32, 3), 2), ((32, 64, 32, 16, 32, 2), 5), ((64, 64, 64, 32, 32, 4), 1)],
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


def test_tensor_core_rungs_say_what_a_card_lacks():
    assert "sm_80" in RUNGS[10].why_not("sm_75")
    assert not RUNGS[9].why_not("sm_75") and RUNGS[9].config("sm_75").shared <= 64 << 10
