"""Lesson 07's Gluon kernel: what it refuses, and what the compiler makes of it. Its values need a Hopper GPU."""

import pytest
import torch

from helpers import machine, reveal, source

attention = source.load("07_attention_gluon", "attention_gluon")
kernel = source.load("07_attention_gluon", "attention_gluon_kernel")
CONFIGS = source.load("07_attention_gluon", "GLUON_CONFIGS")
hopper = pytest.mark.skipif(not (machine.gpu() and machine.here().arch == "sm_90"), reason="needs a Hopper GPU")


def inputs(B=1, H=2, T=40, S=40, D=64, dtype=torch.float16):
    return [torch.randn(B, H, n, D).to(machine.device(), dtype) for n in (T, S, S)]


@pytest.mark.parametrize(
    ("qkv", "causal", "said"),
    [
        (inputs(dtype=torch.float32), False, "float16 or all bfloat16"),
        ([inputs()[0], inputs()[1].bfloat16(), inputs()[2]], False, "not torch.float16, torch.bfloat16"),
        (inputs(D=96), False, "64 or 128, not 96"),
        (inputs(T=0), False, "at least one"),
        (inputs(S=0), False, "at least one"),
        (inputs(T=3, S=5), True, "as many queries as keys"),
        ([x[0] for x in inputs()], False, "Wanted q"),
        ([inputs()[0], *inputs(H=1)[1:]], False, "Wanted q"),
        ([x.transpose(1, 2) for x in inputs(T=2, S=2)], False, "contiguous"),
        ([x[..., ::2] for x in inputs(D=128)], False, "contiguous"),
        ([torch.randn(x.numel() + 1, device=x.device).half()[1:].view(x.shape) for x in inputs()], False, "16 bytes"),
    ],
)
def test_what_it_cannot_do_it_refuses_with_a_sentence(qkv, causal, said):
    with pytest.raises(ValueError, match=said):
        attention(*qkv, causal)


@pytest.mark.skipif(machine.gpu(), reason="for machines without one")
def test_without_a_hopper_gpu_it_says_what_it_is_for():
    with pytest.raises(ValueError, match="Hopper"):
        attention(*inputs())


@pytest.mark.slow
@pytest.mark.parametrize(("D", "causal"), CONFIGS)
def test_it_fits_the_card_and_its_products_stay_in_flight(D, causal):
    config = dict(CONFIGS[D, causal])
    N = config.pop("N")
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)"
    q, k = (f"tensordesc<fp16[1, {rows}, {D}],{layout}>" for rows in (64, N))
    types = {"q": q, "k": k, "v": k, "out": q if config["ENGINE"] else "*fp16", "scale": "fp32"}
    types |= dict.fromkeys(("tiles", "rows", "queries", "keys"), "i32")
    code = reveal.triton(kernel, types, {**config, "CAUSAL": causal}, "sm_90")
    assert code.fits
    assert code.spills < 200, "the loop spills"
    found = reveal.instructions(code.sass)
    products = sum(n for name, n in found.items() if name.startswith("HGMMA"))
    waits = code.sass.count("WARPGROUP.DEPBAR")
    # each warpgroup waits at four places; where the assembler gives up on overlap, it waits after every product
    assert products >= 24 * config["WGS"] and waits == 4 * config["WGS"], (products, waits)


@hopper
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (77, 77), (1000, 1000), (2049, 2049), (300, 1025), (1025, 5)])
def test_its_values_at_any_length(D, dtype, T, S):
    q, k, v = inputs(2, 3, T, S, D, dtype)
    for causal in (False, True) if T == S else (False,):
        scores = q.double() @ k.double().mT / D**0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        want = scores.softmax(-1) @ v.double()
        error = (attention(q, k, v, causal) - want).norm() / want.norm()
        assert error < {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype], (causal, error)
