"""Lesson 09's kernels: their values, what they refuse, and that each compiles for every card it is for."""

import pytest
import torch

from helpers import cuda, machine, source

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
    """The rung's kernel, and the grid, block and arguments of its launch."""
    kernel = cuda.RawModule(code=rung.code, options=rung.options()).get_function("gemm")
    (M, K), N = a.shape, b.shape[1]
    return kernel, (rung.blocks(M, N), (rung.config().threads,), (a, b, out, M, N, K))


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
