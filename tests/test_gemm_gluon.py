"""Lesson 06's Gluon kernels: what they refuse, and what the compiler makes of them. Their values need a Hopper GPU."""

import pytest
import torch

from helpers import machine, reveal, source

matmul = source.load("06_gemm_gluon", "matmul")
linear_gelu = source.load("06_gemm_gluon", "linear_gelu")
descriptors = source.load("06_gemm_gluon", "descriptors")
hopper = pytest.mark.skipif(not (machine.gpu() and machine.here().arch == "sm_90"), reason="needs a Hopper GPU")


def normal(*shape, dtype=torch.float16):
    return torch.randn(shape).to(machine.device(), dtype)


@pytest.mark.parametrize(
    ("x", "w", "said"),
    [
        (normal(16, 8), normal(16, 16), "share K"),
        (normal(8), normal(16, 8), "share K"),
        (normal(16, 8, dtype=torch.float32), normal(16, 8), "both float16"),
    ],
)
def test_what_they_cannot_do_they_refuse_with_a_sentence(x, w, said):
    for call in (matmul, lambda x, w: linear_gelu(x, w, normal(w.shape[0]))):
        with pytest.raises(ValueError, match=said):
            call(x, w)


@pytest.mark.skipif(machine.gpu(), reason="for machines without one")
def test_without_a_hopper_gpu_they_say_what_they_are_for():
    with pytest.raises(ValueError, match=r"compute capability 9\.0"):
        matmul(normal(16, 8), normal(16, 8))


@hopper
@pytest.mark.parametrize(
    ("x", "w"),
    [
        (normal(16, 12), normal(16, 12)),
        (normal(16, 8), normal(12, 8)),
        (normal(8, 16).T, normal(16, 8)),
        (normal(16, 32)[:, 1:9], normal(16, 8)),
        (normal(0, 8), normal(16, 8)),
        (normal(16, 0), normal(16, 0)),
    ],
)
def test_what_the_copy_engine_cannot_name_is_refused(x, w):
    with pytest.raises(ValueError, match="copy engine"):
        matmul(x, w)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "partitions"), [("matmul_kernel", 3), ("linear_gelu_kernel", 3)])
def test_they_fit_the_card_and_their_products_stay_in_flight(name, partitions):
    examples = descriptors(*(torch.empty(256, 256, dtype=torch.float16) for _ in range(3)))
    types = dict(zip(("x_desc", "w_desc", "out_desc"), examples, strict=True))
    if name == "linear_gelu_kernel":
        types["bias_ptr"] = "*fp16"
    kernel = source.load("06_gemm_gluon", name)
    code = reveal.triton(kernel, types | dict.fromkeys("MNK", "i32"), {"GROUP_M": 16, "STAGES": 3}, "sm_90")
    assert code.fits and code.spills == 0
    # two consumers, four steps of 16 along K each; where the assembler gives up on overlap it waits after each product
    assert code.sass.count("HGMMA.64x256x16") == 8
    assert code.sass.count("WARPGROUP.DEPBAR") == 4
    assert code.sass.count("USETMAXREG") >= partitions, "no registers change hands"


@hopper
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 8, 8), (128, 256, 64), (129, 264, 1024), (1000, 520, 136), (3000, 4104, 72), (5000, 2048, 64)]
)
def test_their_values_at_any_size(M, N, K):
    x, w, b = normal(M, K), normal(N, K), normal(N)
    sums = x.double() @ w.double().T
    for got, want in (
        (matmul(x, w), sums),
        (linear_gelu(x, w, b), torch.nn.functional.gelu(sums + b.double(), approximate="tanh")),
        (matmul(x.repeat(1, 2)[:, :K], w), sums),
    ):
        assert (got - want).norm() / want.norm() < 1e-3


@hopper
def test_their_values_are_the_same_every_time():
    """A stage that is refilled too early, or a tile that is overwritten, shows as a difference now and then."""
    x, w, b = normal(4096, 1024), normal(4096, 1024), normal(4096)
    first = matmul(x, w), linear_gelu(x, w, b)
    for _ in range(50):
        assert torch.equal(matmul(x, w), first[0]) and torch.equal(linear_gelu(x, w, b), first[1])
