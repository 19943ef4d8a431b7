"""What this machine's mode computes equals what an H200 computed, and float64 references, within rounding."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent / "conformance"
SAVED = HERE / "nvidia-h200.npz"
AGAIN = f"python {HERE.relative_to(HERE.parent.parent)}/run.py --save {SAVED.relative_to(HERE.parent.parent)}"


def load():
    spec = importlib.util.spec_from_file_location("conformance_run", HERE / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = load()
CASES = {case.name: case for case in run.CASES}


@pytest.fixture(scope="module")
def computed():
    """Every kernel's results here, each computed once."""
    kept = {}

    def get(name: str):
        if name not in kept:
            kept[name] = run.results(CASES[name])
        return kept[name]

    return get


@pytest.fixture(scope="module")
def saved():
    assert SAVED.exists(), f"{SAVED.name} is missing: on the H200, {AGAIN}"
    with np.load(SAVED) as file:
        return dict(file)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name, computed):
    got, want = computed(name), run.expected(CASES[name])
    assert got.keys() == want.keys()
    for key, value in got.items():
        assert run.apart(value, want[key]) <= CASES[name].tolerance, f"{name}: {key}"


@pytest.mark.parametrize("name", CASES)
def test_equals_the_h200(name, computed, saved):
    for key, value in computed(name).items():
        assert f"{name}/{key}" in saved, f"{SAVED.name} has no {name}: on the H200, {AGAIN}"
        assert run.apart(value, saved[f"{name}/{key}"]) <= CASES[name].tolerance, f"{name}: {key}"


def test_the_saved_results_come_from_a_gpu(saved):
    about = json.loads(str(saved["about"]))
    assert about["mode"] == "gpu" and "H200" in about["machine"]
    assert SAVED.stat().st_size < 2_000_000


def test_there_are_enough_kernels():
    rungs = [case.rung for case in run.CASES]
    assert rungs.count("cuda") >= 10 and rungs.count("triton") >= 10 and len(CASES) >= 20


def test_a_wrong_result_is_noticed():
    want = run.expected(CASES["cuda.softmax"])["out"]
    off = want.copy()
    off[want.argmax()] *= 1.0001
    assert run.apart(want, want) == 0.0
    assert run.apart(off, want) > CASES["cuda.softmax"].tolerance
    off[5] = np.nan
    assert run.apart(off, want) == float("inf")


def test_inputs_do_not_depend_on_what_ran_before():
    a, b = CASES["cuda.matmul"].inputs(), CASES["cuda.matmul"].inputs()
    assert all(np.array_equal(a[k], b[k]) for k in a)
