"""The products and attentions of lessons 06 and 07 on any input: a right answer or a sentence, never a wrong one.

In CPU mode, where the interpreter also refuses accesses outside a tensor and races.
"""

import pytest
import torch

from helpers import machine, source
from helpers.exercises import far, padded, spaced, turned

pytestmark = pytest.mark.skipif(machine.gpu(), reason="the interpreter checks every access")

HALF = torch.float16


def normal(*shape, dtype=HALF):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def shifted(x):
    """The values of x, beginning one element after a multiple of 16 bytes."""
    out = torch.empty(x.numel() + 9, dtype=x.dtype)
    start = (-out.data_ptr() // x.element_size()) % 8 + 1
    return out[start : start + x.numel()].view(x.shape).copy_(x)


def repeated(x):
    """A row of x as all its rows, by a stride of 0."""
    return x[:1].expand(x.shape)


LAID = {"contiguous": lambda x: x, "columns": turned, "every second": spaced, "padded": padded, "shifted": shifted,
        "repeated": repeated, "beyond 2**31": lambda x: far(x) if len(x) > 2 else x}  # fmt: skip
SHAPES = ((0, 5, 8), (5, 0, 8), (5, 7, 0), (0, 0, 0), (1, 1, 1), (1, 70, 8), (33, 1, 24), (17, 100, 40), (65, 64, 7))


def answered(call, want, *inputs):
    """Whether `call(*inputs)` is `want`, to within fp16's rounding; True also where it refuses with a sentence."""
    kept = [x.clone() for x in inputs]
    try:
        got = call(*inputs)
    except ValueError as refused:
        assert len(str(refused)) > 20, refused
        return True
    assert all(torch.equal(x, k) for x, k in zip(inputs, kept, strict=True)), "inputs are not written"
    assert got.shape == want.shape and got.dtype == inputs[0].dtype
    return torch.allclose(
        got.double(), want, rtol=4e-3, atol=4e-3 * max(1.0, want.abs().max().item() if want.numel() else 0)
    )


PRODUCTS = ("naive", "group", "descriptor", "persistent", "thin")


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_any_shape(name):
    call = source.load("06_triton_matmul", name)
    for M, N, K in SHAPES:
        x, w = normal(M, K), normal(N, K)
        assert answered(call, x.double() @ w.double().T, x, w), (M, N, K)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("laid", LAID)
def test_products_of_matrices_however_they_lie(name, laid):
    call = source.load("06_triton_matmul", name)
    for M, N, K in ((3, 70, 33),) if laid == "beyond 2**31" else ((17, 40, 24),):
        for x, w in ((LAID[laid](normal(M, K)), normal(N, K)), (normal(M, K), LAID[laid](normal(N, K)))):
            assert answered(call, x.double() @ w.double().T, x, w), (M, N, K)


@pytest.mark.parametrize("laid", LAID)
def test_the_fused_layer_however_its_input_lies(laid):
    call = source.load("06_triton_matmul", "linear_gelu")
    for M, N, K in ((3, 70, 40), *SHAPES[:5]):
        x, w, b = LAID[laid](normal(M, K)) if M and K else normal(M, K), normal(N, K) * 0.1, normal(N)
        want = torch.nn.functional.gelu(x.double() @ w.double().T + b.double(), approximate="tanh")
        assert answered(call, want, x, w, b), (M, N, K)


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_cannot_be_multiplied_is_refused(name):
    call = source.load("06_triton_matmul", name)
    for x, w in (
        (normal(4, 8), normal(4, 9)),
        (normal(4, 8), normal(4, 8, dtype=torch.float32)),
        (normal(8), normal(4, 8)),
    ):
        with pytest.raises(ValueError, match=r"\w+ \w+ .*"):
            call(x, w)


def attended(q, k, v, causal=False):
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = q.double() @ k.mT / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), -torch.inf)
    return torch.nan_to_num(s.softmax(-1)) @ v


HEADS = {"contiguous": lambda x: x, "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
         "padded": padded, "every second": spaced, "shifted": shifted,
         "slice": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]]}  # fmt: skip


@pytest.mark.parametrize("laid", HEADS)
def test_attention_however_its_input_lies(laid):
    call = source.load("07_triton_attention", "flash")
    q, k, v = HEADS[laid](normal(2, 4, 40, 64)), HEADS[laid](normal(2, 2, 40, 64)), HEADS[laid](normal(2, 2, 40, 64))
    for causal in (False, True):
        assert answered(lambda *x, c=causal: call(*x, c), attended(q, k, v, causal), q, k, v), causal


@pytest.mark.parametrize("queries, keys", [(0, 5), (5, 0), (1, 1), (1, 70), (70, 3), (33, 65)])
def test_attention_of_any_length(queries, keys):
    call = source.load("07_triton_attention", "flash")
    q, k, v = normal(1, 2, queries, 32), normal(1, 1, keys, 32), normal(1, 1, keys, 32)
    for causal in (False, True):
        assert answered(lambda *x, c=causal: call(*x, c), attended(q, k, v, causal), q, k, v), causal


def test_attention_beyond_2_31_elements():
    call = source.load("07_triton_attention", "flash")
    rows = far(normal(3, 20 * 32))  # three sequences, the last beyond element 2**31
    q = rows.unflatten(1, (1, 20, 32))
    assert q.stride(0) * 2 > 2**31
    assert answered(call, attended(q, q, q), q, q, q)
