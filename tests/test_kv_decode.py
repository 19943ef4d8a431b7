"""Lesson 10's cache of 8 bits: its values, what it refuses, and that unpacking stays in registers."""

from collections import Counter

import pytest
import torch

from helpers import cuda, machine, reveal, source

PROGRAM, COMBINE = source.load("10_kernels", "KV_DECODE"), source.load("10_kernels", "KV_COMBINE")
decode_kv8, quantise_kv = source.load("10_kernels", "decode_kv8"), source.load("10_kernels", "quantise_kv")
DTYPES = (torch.int8, torch.float8_e4m3fn)
runs = pytest.mark.skipif(bool(PROGRAM.why_not(machine.here().arch)), reason="tensor cores of sm_80 on")


def sample(batch, kv_heads, group, tokens, dtype, seed=0):
    """The arguments of decode_kv8 but for lengths, and the keys and values that they stand for, in float64."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, kv_heads * group, 128, generator=g).half()
    k, v = (quantise_kv(torch.randn(batch, kv_heads, tokens, 128, generator=g), dtype) for _ in range(2))
    exact = [x.double() * scale.double()[:, :, None, None] for x, scale in (k, v)]
    given = (q, k[0], v[0], k[1], v[1])
    return [t.to(machine.device()) for t in given], exact


def reference(q, k, v, lengths):
    """Attention in float64 to the first `lengths` tokens; 0 where there are none."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i, n in enumerate(lengths):
        if n:
            keys, values = (t[i, :, :n].repeat_interleave(group, 0) for t in (k, v))
            weights = torch.softmax(q[i].double()[:, None] @ keys.mT * 128**-0.5, -1)
            out[i] = (weights @ values)[:, 0]
    return out


def error(got, want):
    return ((got.cpu() - want).norm() / want.norm()).item()


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=machine.device())


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "tokens", "lengths", "splits"),
    [
        (2, 4, 100, [100, 1, 0], 1),
        (1, 8, 150, [133, 37], 3),
        (3, 1, 64, [64], 2),
        (1, 3, 33, [32, 33], None),
        (1, 4, 8, [8], 5),  # more splits than there is work for
    ],
    ids=str,
)
def test_it_equals_float64(dtype, kv_heads, group, tokens, lengths, splits):
    given, exact = sample(len(lengths), kv_heads, group, tokens, dtype)
    want = reference(given[0].cpu(), *exact, lengths)
    assert error(decode_kv8(*given, int32(lengths), splits), want) < 6e-4


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_of_a_byte_is_unpacked_right(dtype):
    """One token: the output is its value, bit for bit as fp16 has it; all 256 bytes but fp8's NaN."""
    bytes_ = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    v = bytes_.view(dtype).view(1, 2, 1, 128)
    v = torch.where(v.isnan(), v[0, 0, 0, 0], v.float()).to(dtype) if dtype.is_floating_point else v
    one = torch.ones(1, 2, device=machine.device())
    q = torch.randn(1, 2, 128, generator=torch.Generator().manual_seed(1)).half().to(machine.device())
    v = v.to(machine.device())
    assert torch.equal(decode_kv8(q, v, v, one, one, int32([1])), v[:, :, 0].half())


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_are_unpacked_right(dtype):
    """With a large scale the weights show which key fits best: a one in one dimension, for all dimensions."""
    k = torch.eye(128).mul(-100)[None, None].to(dtype).to(machine.device())
    v = torch.eye(128).mul(64)[None, None].to(dtype).to(machine.device())
    one = torch.ones(1, 1, device=machine.device())
    for d in (0, 1, 2, 3, 15, 16, 63, 64, 101, 127):
        q = torch.zeros(1, 1, 128, dtype=torch.float16, device=machine.device())
        q[0, 0, d] = -1
        out = decode_kv8(q, k, v, one * 4, one, int32([128]))[0, 0]
        assert out.argmax() == d and out[d] == 64


@runs
def test_scales_of_zero_and_large_queries():
    (q, k, v, k_scale, v_scale), exact = sample(1, 1, 4, 90, torch.int8)
    want = reference(q.cpu() * 40, *exact, [90])
    assert error(decode_kv8(q * 40, k, v, k_scale, v_scale, int32([90])), want) < 2e-3
    mean = decode_kv8(q, k, v, k_scale * 0, v_scale, int32([90]))
    assert error(mean, exact[1].mean(2).expand(1, 4, 128)) < 1e-3  # all keys alike
    assert not decode_kv8(q, k, v, k_scale, v_scale * 0, int32([90])).any()


@runs
def test_lengths_beyond_the_cache_and_below_zero_are_cut_off():
    given, _ = sample(2, 1, 4, 40, torch.int8)
    assert torch.equal(decode_kv8(*given, int32([99, -5])), decode_kv8(*given, int32([40, 0])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantising_keeps_the_largest_and_zeros(dtype):
    x = torch.randn(2, 3, 50, 128)
    x[0, 1] = 0
    values, scale = quantise_kv(x, dtype)
    again = values.float() * scale[:, :, None, None]
    step = scale[:, :, None, None] / 2 if dtype == torch.int8 else x.abs() / 16 + scale[:, :, None, None] * 2**-10
    assert ((again - x).abs() <= step * 1.0001).all()
    assert scale[0, 1] == 0 and not values[0, 1].float().any()
    assert quantise_kv(x[:, :, :0], dtype)[1].eq(0).all()


BAD = {
    "in int8 or fp8": lambda q, k, v, ks, vs, n: (q, k.float(), v, ks, vs, n),
    "takes v in int8 here, not float8_e4m3fn": lambda q, k, v, ks, vs, n: (q, k, v.to(torch.float8_e4m3fn), ks, vs, n),
    "takes q in float16": lambda q, k, v, ks, vs, n: (q.float(), k, v, ks, vs, n),
    "takes k_scale of shape": lambda q, k, v, ks, vs, n: (q, k, v, ks[0], vs, n),
    "takes v_scale in float32": lambda q, k, v, ks, vs, n: (q, k, v, ks, vs.double(), n),
    "takes lengths in int32": lambda q, k, v, ks, vs, n: (q, k, v, ks, vs, n.long()),
    "1 to 8 query heads": lambda q, k, v, ks, vs, n: (q.repeat(1, 3, 1), k, v, ks, vs, n),
    "takes v of shape": lambda q, k, v, ks, vs, n: (q, k, v[:, :, :-1], ks, vs, n),
    "contiguous": lambda q, k, v, ks, vs, n: (q, k.transpose(2, 3).contiguous().transpose(2, 3), v, ks, vs, n),
    "but lengths is of type list": lambda q, k, v, ks, vs, n: (q, k, v, ks, vs, [3, 3]),
}


@pytest.mark.parametrize("said", BAD)
def test_what_would_be_wrong_is_refused_with_a_sentence(said):
    given, _ = sample(2, 1, 4, 40, torch.int8)
    with pytest.raises(ValueError, match=said):
        decode_kv8(*BAD[said](*given, int32([3, 3])))


@pytest.mark.parametrize(("x", "dtype", "said"), [
    (torch.zeros(1, 1, 4, 128), torch.int16, "int8 or float8_e4m3fn, not int16"),
    (torch.zeros(1, 1, 4, 64), torch.int8, "128"),
    (torch.zeros(1, 1, 4, 128, dtype=torch.int8), torch.int8, "of floats"),
])  # fmt: skip
def test_quantising_refuses_with_a_sentence(x, dtype, said):
    with pytest.raises(ValueError, match=said):
        quantise_kv(x, dtype)


@runs
def test_no_tokens_and_no_sequences():
    given, _ = sample(2, 1, 4, 0, torch.int8)
    assert not decode_kv8(*given, int32([0, 0])).any()
    given, _ = sample(0, 1, 4, 8, torch.int8)
    assert decode_kv8(*given, int32([])).shape == (0, 4, 128)


@pytest.mark.skipif(machine.gpu(), reason="the CPU runner's checks")
@pytest.mark.parametrize("sizes", PROGRAM.sizes, ids=str)
def test_it_neither_races_nor_leaves_its_arrays(sizes):
    (q, k, v, k_scale, v_scale), _ = sample(1, 2, 2, 77, DTYPES[sizes["FP8"]])
    part, state = torch.empty(4, 2, 128), torch.empty(4, 2, 2)
    launch = (2, 2), (128,), (q, k, v, k_scale, v_scale, int32([77]), part, state, 77, 2, 2, 0.1)
    kernel = cuda.RawModule(code=PROGRAM.code, options=PROGRAM.options(sizes)).get_function("kv_decode")
    kernel(*launch)
    first = part.clone()
    kernel(*launch, order="shuffle", seed=1)
    assert torch.equal(part, first)
    assert not kernel.check_races(*launch)
    kernel.check_bounds(*launch)


@pytest.mark.parametrize("sizes", PROGRAM.sizes, ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_it_unpacks_without_conversions_and_spills_nothing(arch, sizes):
    """A permutation and a logical operation for two elements; conversions are those of a few divisions of integers."""
    binary = PROGRAM.binary(sizes, arch)
    made = binary.kernels["kv_decode"]
    counts = Counter(op.partition(".")[0] for op in reveal.instructions(binary.sass("kv_decode")).elements())
    assert not made.spill_bytes and not made.stack_bytes
    assert counts["HMMA"] == 24 and counts["PRMT"] >= 64 and counts["I2F"] + counts["I2FP"] + counts["F2F"] < 8
