"""Lesson 10's router: values, ties, experts that nobody or everybody chooses, and what it refuses."""

import pytest
import torch

from helpers import cuda, machine, source

PROGRAM, router = source.load("10_kernels", "ROUTER"), source.load("10_kernels", "router")
runs = pytest.mark.skipif(
    bool(PROGRAM.why_not(machine.here().arch)), reason="a warp's maximum in one instruction: sm_80 on"
)


def normal(tokens, experts):
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens + experts))


def check(logits, k):
    """All that it returns against torch, whose stable sort takes equals as the router does."""
    logits = logits.to(machine.device())
    made = router(logits, k)
    want = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    flat = want.flatten()
    assert torch.equal(made.experts, want.int())
    assert torch.equal(made.order, torch.argsort(flat, stable=True).int())
    assert torch.equal(made.counts, torch.bincount(flat, minlength=logits.shape[1]).int())
    weights = torch.softmax(logits.double(), -1).gather(1, want)
    assert torch.allclose(made.weights.double(), weights, rtol=1e-5, atol=1e-30, equal_nan=True)
    return made


@runs
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(1, 64, 8), (33, 64, 8), (100, 8, 2), (70, 40, 5), (64, 256, 8), (200, 1, 1), (31, 33, 32), (5, 512, 3)],
)
def test_it_equals_torch(tokens, experts, k):
    check(normal(tokens, experts), k)


@runs
def test_of_equals_the_lower_number_wins():
    g = torch.Generator().manual_seed(3)
    check(torch.randint(0, 3, (70, 64), generator=g).float(), 8)
    check(torch.zeros(40, 64), 8)
    zeros = torch.zeros(1, 64)
    zeros[0, ::2] = -0.0
    assert router(zeros.to(machine.device()), 4).experts.tolist() == [[0, 1, 2, 3]]


@runs
def test_experts_that_nobody_or_everybody_chooses():
    logits = normal(100, 64)
    logits[:, 7] = 50
    assert check(logits, 1).counts[7] == 100
    logits[:, 20:] = -50
    assert not check(logits, 8).counts[20:].any()


@runs
def test_infinities_and_nan():
    logits = normal(40, 64)
    logits[3, 5] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 9] = 1
    check(logits, 8)  # the others of row 4 come in the order of their numbers, with weight 0
    logits[6, 11] = torch.nan
    made = router(logits.to(machine.device()), 8)
    assert made.experts[6, 0] == 11 and made.weights[6].isnan().all() and not made.weights[:6].isnan().any()


@runs
def test_the_same_again_in_any_order():
    logits = normal(90, 64)
    first = router(logits.to(machine.device()), 8)
    for _ in range(3):
        assert all(map(torch.equal, router(logits.to(machine.device()), 8), first))


@pytest.mark.skipif(machine.gpu(), reason="the CPU runner's checks")
@pytest.mark.parametrize("blocks", [1, 2])
def test_it_neither_races_nor_leaves_its_arrays(blocks):
    """Of one block and of two, which wait for one another: a worker each."""
    logits, k = normal(110, 64), 8
    want = router(logits, k)
    made = [torch.full_like(t, -1) for t in want]
    launch = (blocks,), (1024,), (logits, *made, torch.zeros(blocks, 64, dtype=torch.int32), 110)
    kernel = cuda.RawModule(code=PROGRAM.code, options=PROGRAM.options(PROGRAM.sizes[0])).get_function("router")
    kernel(*launch)
    assert all(map(torch.equal, made, want))
    if blocks == 1:
        assert not kernel.check_races(*launch)
        kernel.check_bounds(*launch)


@runs
def test_no_tokens():
    made = router(torch.empty(0, 64, device=machine.device()), 8)
    assert made.counts.tolist() == [0] * 64 and made.order.numel() == 0 and made.weights.shape == (0, 8)


@pytest.mark.parametrize(("logits", "k", "said"), [
    (torch.zeros(64), 8, "matrix of logits"),
    (torch.zeros(4, 64).half(), 8, "float32"),
    (torch.zeros(4, 64).T, 2, "contiguous"),
    (torch.zeros(4, 0), 1, "1 to 512 experts, not 0"),
    (torch.zeros(4, 513), 1, "1 to 512 experts, not 513"),
    (torch.zeros(4, 64), 0, "chooses 1 to 32 of 64 experts, not 0"),
    (torch.zeros(4, 64), 33, "chooses 1 to 32 of 64 experts, not 33"),
    (torch.zeros(4, 8), 9, "chooses 1 to 8 of 8 experts, not 9"),
], ids=str)  # fmt: skip
def test_what_would_be_wrong_is_refused_with_a_sentence(logits, k, said):
    with pytest.raises(ValueError, match=said):
        router(logits.to(machine.device()), k)


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (8, 2), (64, 8), (256, 8), (512, 32)])
def test_two_blocks_fit_an_sm(experts, k):
    """1024 threads: 32 registers are half of an SM's."""
    made = PROGRAM.binary({"EXPERTS": experts, "TOP_K": k}, "sm_90").kernels["router"]
    assert made.registers <= 64 and not made.spill_bytes
