"""What an answer is compared with is computed once, whoever asks, and ahead where a thread does."""

from types import SimpleNamespace

import torch

from helpers.checks.compare import Reference, compare
from helpers.exercises import Case


def test_a_reference_is_run_once_for_each_precision():
    seen = []

    def double(x):
        seen.append(x.dtype)
        return 2 * x

    exercise = SimpleNamespace(reference=double, low="bfloat16", scale=None, dtype=None, rtol=1e-6)
    x, case = torch.randn(200), Case("any", lambda draw: ())
    reference = Reference(exercise, (x,))
    reference.prepare(case)
    assert seen == [torch.float64, torch.float32, torch.bfloat16]
    about = [{"type": "Tensor", "size": [200], "dtype": "float32", "wanted_device": "cpu", "device": "cpu"}]
    assert not compare(reference, case, 2 * x, about)
    (finding,) = compare(reference, case, 2 * x + 1, about)
    assert finding.kind == "wrong-values" and len(seen) == 3


def test_nothing_is_prepared_that_is_compared_exactly():
    seen = []
    exercise = SimpleNamespace(reference=lambda x: seen.append(x.dtype) or x, low="bfloat16", scale=None)
    Reference(exercise, (torch.ones(3),)).prepare(Case("any", lambda draw: (), exact=True))
    assert seen == [torch.float64]
