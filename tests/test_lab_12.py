"""Lab 12: the statement by hand, and what its table counts."""

import math

import pytest
import torch

from helpers import child, ladder, source, traffic
from helpers.checks.judge import bytes_asked
from helpers.exercises import Draw, every
from tests.answers import solved

EXERCISE = every()["gated-projection"]
SHAPE = 16, 14336, 4096


def drawn(number: int) -> tuple:
    return EXERCISE.cases[number].inputs(Draw(5))


def by_hand(x, codes, scales, t: int, n: int) -> float:
    """One element, a weight at a time."""
    sums = [0.0, 0.0]
    for m in (0, 1):
        for k in range(x.shape[1]):
            code = (int(codes[m, k // 128, n, k % 32]) & 0xFFFF) >> 4 * (k % 128 // 32) & 15
            sums[m] += float(x[t, k]) * (code - 8) * float(scales[m, k // 128, n])
    return sums[0] / (1 + math.exp(-sums[0])) * sums[1]


def test_the_reference_and_the_lab_s_own_program_are_the_statement():
    x, codes, scales, keep = drawn(0)
    want = EXERCISE.reference(x.double(), codes, scales.double(), keep)
    assert torch.equal(want, source.load("12_choosing", "projected")(x, codes, scales, keep))
    assert keep.any() and not keep.all()
    for t in range(len(x)):
        for n in (0, 31):
            assert float(want[t, n]) == pytest.approx(by_hand(x, codes, scales, t, n) if keep[t] else 0.0)


def test_a_token_that_is_not_kept_may_hold_anything():
    number = next(i for i, case in enumerate(EXERCISE.cases) if "NaN" in case.about)
    x, codes, scales, keep = drawn(number)
    assert x[~keep].isnan().any() and x[~keep].isinf().any()
    assert EXERCISE.reference(x.double(), codes, scales.double(), keep).isfinite().all()


def test_the_least_bytes_are_those_of_all_arguments_and_the_result():
    tokens, outputs, features = SHAPE
    given = [torch.empty(tokens, features, dtype=torch.float16, device="meta")]
    given.append(torch.empty(2, features // 128, outputs, 32, dtype=torch.int16, device="meta"))
    given.append(torch.empty(2, features // 128, outputs, dtype=torch.float16, device="meta"))
    given.append(torch.empty(tokens, dtype=torch.bool, device="meta"))
    result = torch.empty(tokens, outputs, dtype=torch.float16, device="meta")
    assert ladder.CAPSTONE.least == traffic.least(given, [result])
    assert ladder.CAPSTONE.flops == 2 * 2 * math.prod(SHAPE)


def test_bytes_asked_for_are_counted_whatever_an_answer_is_made_of():
    x, codes, scales, keep = given = drawn(0)
    tokens, outputs = len(x), scales.shape[2]
    tiles = -(-outputs // 64)
    kernel = traffic.least([codes, scales], []) + tiles * traffic.least([x, keep], []) + 2 * tokens * outputs
    assert bytes_asked(EXERCISE, solved("gated-projection"), given) == kernel
    every_lane = traffic.least([codes, scales, x], []) + (1 + 2) * tokens * outputs  # asks for its token's `keep`
    assert bytes_asked(EXERCISE, solved("gated-projection", "by_cuda"), given) == every_lane
    product = "import torch\n\n\ndef gated_projection(x, codes, scales, keep):\n    return x.mT @ x\n"
    assert bytes_asked(EXERCISE, product, given) == 2 * traffic.least([x], []) + 2 * x.shape[1] ** 2


def test_of_an_answer_that_fails_no_bytes_are_told():
    wrong = "def gated_projection(x, codes, scales, keep):\n    return x.nothing\n"
    with pytest.raises(RuntimeError, match="nothing"):
        bytes_asked(EXERCISE, wrong, drawn(0))


CAPTURED = """
import torch
from helpers.stage import watching

watching.only_capture()
doubled = torch.compile(lambda x: x + x, mode="max-autotune")
broken = torch.compile(lambda x: x + x.sum().item() if x.sum() > 0 else x, fullgraph=True)


def seen():
    with torch.no_grad(), watching.Watch() as watch:
        out = doubled(torch.ones(3)).tolist()
    try:
        broken(torch.ones(3))
    except Exception as error:
        return out, watch.operators, type(error).__name__
"""


@pytest.mark.slow  # loading what captures graphs takes seconds
def test_without_a_gpu_a_compiled_function_is_captured_and_runs_as_it_is():
    left = child.run(CAPTURED, "seen()", interpreted=True)
    assert left.ok, left.stderr
    assert left.value[0] == [2.0, 2.0, 2.0] and "add" in left.value[1] and left.value[2] != "NoneType"
