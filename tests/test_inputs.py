"""The products and attentions of lessons 06 and 07 on any input: a right answer or a sentence, never a wrong one.

In CPU mode, where the interpreter also refuses accesses outside a tensor and races.
"""

import itertools
import math

import pytest
import torch

from helpers import ROOT, machine, source
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


def lying(x, axis):
    """x, its slices along `axis` so far apart that the third is beyond element 2**31."""
    x = x.movedim(axis, 0)
    return far(x.flatten(1)).unflatten(1, x.shape[1:]).movedim(0, axis)


def rows_apart(x, stride):
    """The rows of x (3 of them) `stride` elements apart, which is a multiple of 64."""
    out = far(x, 2 * (stride - 64))
    assert out.stride(0) == stride
    return out


FAR = {"q": (True, False, False), "k": (False, True, False), "v": (False, False, True), "all": (True, True, True)}


@pytest.mark.parametrize("which", FAR)
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["sequences", "heads", "tokens"])
def test_attention_beyond_2_31_elements(which, axis):
    call = source.load("07_triton_attention", "flash")
    shape = [2, 2, 20, 32]
    shape[axis] = 3
    given = (normal(*shape) for _ in range(3))
    q, k, v = (lying(x, axis) if apart else x for x, apart in zip(given, FAR[which], strict=True))
    assert q.stride(axis) * 2 > 2**31 or which in "kv"
    for causal in (False, True):
        want = attended(*(x.contiguous() for x in (q, k, v)), causal)
        assert answered(lambda *x, c=causal: call(*x, c), want, q, k, v), causal


@pytest.mark.parametrize("group", [1, 3])
def test_results_of_attention_beyond_2_31_elements(group):
    """`flash` makes its result contiguous, so that one whose heads hold 2**31 elements would be that large."""
    kernel = source.load("07_triton_attention", "flash_kernel")
    q, k, v = normal(1, 3, 20, 32), *(normal(1, 3 // group, 20, 32) for _ in range(2))
    o = lying(torch.zeros_like(q), 1)
    strides = [stride for x in (q, k, v, o) for stride in x.stride()[:3]]
    scale2 = 32**-0.5 / math.log(2)
    kernel[(1, 3)](q, k, v, o, *strides, 3, 20, 20, scale2, GROUP=group, CAUSAL=False, D=32, BM=32, BN=16)
    assert torch.allclose(o.double(), attended(q, k, v), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("which", FAR)
@pytest.mark.parametrize("axis", [0, 1], ids=["tokens", "heads"])
def test_packed_attention_beyond_2_31_elements(which, axis):
    call = source.load("07_triton_attention", "packed")
    given = (normal(3, 3, 32) for _ in range(3))
    q, k, v = (lying(x, axis) if apart else x for x, apart in zip(given, FAR[which], strict=True))
    for starts in ([0, 1, 1, 3], [0, 3]):
        parts = [[x[a:b].transpose(0, 1)[None].contiguous() for x in (q, k, v)] for a, b in itertools.pairwise(starts)]
        want = torch.cat([attended(*part)[0].transpose(0, 1) for part in parts])
        start = torch.tensor(starts, dtype=torch.int32)
        assert answered(lambda *x, start=start: call(*x, start, 3), want, q, k, v), starts


def test_decoding_beyond_2_31_elements():
    """Many heads times splits: the kernels' own arguments say so, and the memory between them is not there."""
    split, combine = (source.load("07_triton_attention", f"decode_{name}") for name in ("split", "combine"))
    apart, dim, tokens = 2**24 + 64, 64, 20  # heads of a group, or splits, of which 16 are asked for
    q, (k, v) = normal(3, 16 * dim), (normal(3, tokens, dim) for _ in range(2))
    part, top, total = (
        rows_apart(torch.zeros(3, 16 * dim), apart * dim),
        *(rows_apart(torch.zeros(3, 16), apart) for _ in range(2)),
    )
    split[(1, 3)](
        rows_apart(q, apart * dim), k, v, part, top, total, torch.full((3,), tokens, dtype=torch.int32), 0.1, tokens, 1,
        GROUP=apart, ROWS=16, DIM=dim, BLOCK=16,
    )  # fmt: skip
    s = q.unflatten(1, (16, dim)).double() @ k.double().mT * (0.1 * math.log(2))
    want = s.softmax(-1) @ v.double()
    assert torch.allclose(part.unflatten(1, (16, dim)).double() / total[..., None], want, rtol=4e-3, atol=4e-3)

    out = torch.zeros(3, dim)  # as if the sixteen rows of each were sixteen splits of one head
    combine[(3,)](part, top, total, out, apart, DIM=dim, SPLITS=16)
    weight = total * torch.exp2(top - top.amax(1, keepdim=True))
    want = (want * (weight / weight.sum(1, keepdim=True))[..., None]).sum(1)
    assert torch.allclose(out.double(), want, rtol=4e-3, atol=4e-3)


def answer(lab, *names):
    """`names` of the course's answer to a lab."""
    module = source.run(source.notebook(ROOT / "solutions" / f"{lab}.ipynb", *names), lab)
    return [getattr(module, name) for name in names]


def test_gated_products_beyond_2_31_elements():
    (call,) = answer("06_triton_matmul", "gated_matmul")
    x, gate, up = normal(3, 40), normal(20, 40), normal(20, 40)
    want = torch.nn.functional.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    assert answered(call, want, far(x), gate, up)


def test_new_tokens_beyond_2_31_elements():
    (kernel,) = answer("07_triton_attention", "grouped_attention_kernel")
    heads, dim = 2**25 + 2, 32  # of which the kernel answers the two of a group
    q, k, v = normal(3, 2 * dim), normal(20, 1, dim), normal(20, 1, dim)
    out = rows_apart(torch.zeros(3, 2 * dim, dtype=HALF), heads * dim)
    kernel[(1, 1)](rows_apart(q, heads * dim), k, v, out, 3, 20, heads, dim, dim, dim**-0.5, 2, D=dim, BLOCK=16)
    q = q.unflatten(1, (2, dim)).transpose(0, 1)[None]
    want = attended(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], causal=True)[0].transpose(0, 1)
    assert torch.allclose(out.unflatten(1, (2, dim)).double(), want, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["pages", "slots", "heads"])
def test_pages_beyond_2_31_elements(which, axis):
    (call,) = answer("07_triton_attention", "paged_decode")
    shape = [2, 16, 2, 32]
    if axis != 1:
        shape[axis] = 3
    k, v, q = normal(*shape), normal(*shape), normal(1, shape[2], 32)
    table, lengths = torch.arange(shape[0] - 1, -1, -1, dtype=torch.int32)[None], torch.tensor([shape[0] * 16 - 3])
    inputs = lying(k, axis) if which == "k" else k, lying(v, axis) if which == "v" else v
    want = attended(q[:, :, None], *(x.flip(0).flatten(0, 1)[: lengths[0]].transpose(0, 1)[None] for x in (k, v)))
    assert answered(lambda k, v: call(q, k, v, table, lengths.int(), 2), want[:, :, 0], *inputs)
