"""Lab 04 without its packages; and of an answer that schedules a loop nest only the list of its rewrites counts."""

import json

import pytest

from helpers import apart, checks, machine
from helpers.checks import judge, rules
from helpers.exercises import Draw, every, l04_tvm_xla
from tests.answers import solved

tvm_is_here = pytest.mark.skipif(apart.problem("tvm") is not None, reason="TVM is not installed")
EXERCISE = every()["tensorir-schedule"]
TIMED = EXERCISE.cases[-1].inputs(Draw(1))


@pytest.fixture
def without_tvm(monkeypatch):
    problem = machine.NotReady("TVM is not installed.", apart.INSTALL)
    monkeypatch.setattr(apart, "problem", lambda package, **named: problem)


def test_without_tvm_nothing_is_judged_and_the_command_is_named(without_tvm):
    verdict = judge(EXERCISE, solved(EXERCISE.name))
    assert (verdict.passed, verdict.kind) == (None, "environment"), verdict
    assert "TVM is not installed." in verdict.findings[0].message and apart.INSTALL in verdict.findings[0].message
    assert "cannot be judged here" in verdict.headline


def test_without_jax_the_recorded_graphs_judge(monkeypatch):
    problem = machine.NotReady("JAX is not installed.", apart.INSTALL)
    monkeypatch.setattr(apart, "problem", lambda package, **named: problem)
    made = l04_tvm_xla.modules, l04_tvm_xla.eight
    for of in made:
        of.cache_clear()
    try:
        assert judge(every()["hlo-bytes"], solved("hlo-bytes")).passed
        assert judge(every()["xla-fuses"], solved("xla-fuses")).passed
        assert not any(of().live for of in made)
    finally:
        for of in made:
            of.cache_clear()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("def schedule(sch):\n    raise NotImplementedError()", "not-attempted"),
        ("import numpy\n\ndef schedule(sch):\n    numpy.ones(1)", "forbidden"),
    ],
)
def test_what_the_text_alone_tells_is_told_without_tvm(without_tvm, text, kind):
    assert judge(EXERCISE, text).kind == kind


def test_a_notebook_goes_on_without_tvm_but_nbgrader_gives_no_point(without_tvm, monkeypatch):
    monkeypatch.setenv("HELPERS_PROGRESS", "")
    monkeypatch.setenv("HELPERS_STRICT", "1")
    monkeypatch.setattr("helpers.source.live", lambda name: solved(EXERCISE.name))
    checks.check(EXERCISE.name)
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    with pytest.raises(checks.NotPassed, match="TVM is not installed"):
        checks.check(EXERCISE.name)


ESCAPES = {
    "patches the clock, the compiler and the reader of traces": """
import time

import tvm
from tvm.s_tir.schedule import Trace


def schedule(sch):
    nothing = lambda *args, **named: None
    time.process_time_ns = time.perf_counter_ns = lambda: 0
    tvm.compile = nothing
    Trace.apply_json_to_schedule = staticmethod(nothing)
""",
    "sleeps whenever the plain nest is run": """
import time

import tvm


def schedule(sch):
    run = tvm.runtime.Module.__getitem__
    tvm.runtime.Module.__getitem__ = lambda self, name: time.sleep(1) or run(self, name)
""",
    "has computed everything before": """
import numpy as np
import tvm

RESULT = np.ones((256, 512), "float32")


def schedule(sch):
    tvm.compile = lambda *args, **named: {"main": lambda *given: given[-1].copyfrom(RESULT)}
""",
    "puts another program under the schedule": """
def schedule(sch):
    first = sch.get_loops(sch.get_sblock("difference"))
    sch.state.replace(sch.get_sref(first[0]), sch.get_sref(first[1]).stmt, {})
""",
}


@tvm_is_here
@pytest.mark.slow
@pytest.mark.parametrize("about", ESCAPES)
def test_what_an_answer_does_to_its_own_process_gains_nothing(about, monkeypatch):
    monkeypatch.setattr(rules, "broken", lambda text, exercise: [])
    verdict = judge(EXERCISE, ESCAPES[about])
    assert (verdict.passed, verdict.kind) == (False, "too-slow"), verdict


def trace(*instructions) -> str:
    """A trace as an answer's process would send it: (kind, inputs, attributes, outputs) each."""
    return json.dumps([instructions, []])


GET = (("GetSBlock", [], ["distance", "main"], ["b0"]), ("GetLoops", ["b0"], [], ["l1", "l2", "l3"]))


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        ("", "crash"),
        (None, "crash"),
        ("[[[1]], []]", "crash"),
        (trace(*GET, ("Annotate", ["l1", '"int f;"'], ["pragma_import_c"], [])), "forbidden"),
        (trace(*GET, ("Annotate", ["b0", '"x"'], ["pragma_unroll_explicit", "pragma_import_llvm"], [])), "forbidden"),
        (trace(*GET, ("Tensorize", ["l2"], ["any", True], [])), "forbidden"),
        (trace(*GET, ("UnsafeHideBufferAccess", ["b0"], ["read", [0]], [])), "forbidden"),
        (trace(*GET, ("Bind", ["l1"], ["threadIdx.x"], [])), "compile"),
    ],
)
def test_what_no_schedule_may_hold_is_found_before_anything_runs(sent, kind):
    [(found, _)] = EXERCISE.judge(TIMED, sent, {})
    assert found == kind


@tvm_is_here
@pytest.mark.parametrize(
    "sent", [trace(*GET, ("Parallel", ["l3"], [], [])), trace(*GET, ("Unroll", ["l9"], [], [])), trace(("Split",) * 4)]
)
def test_a_forged_trace_is_refused_where_it_is_carried_out(sent):
    [(found, said)] = EXERCISE.judge(TIMED, sent, {})
    assert found == "crash", said


@tvm_is_here
def test_a_fast_schedule_says_how_fast():
    verdict = judge(EXERCISE, solved(EXERCISE.name))
    assert verdict.passed, verdict
    [said, _] = verdict.checked
    assert float(said.split()[0]) >= l04_tvm_xla.LEAST and "on one core" in said


@tvm_is_here
def test_a_refusal_comes_with_its_line_and_in_plain_words():
    text = solved(EXERCISE.name).replace("sch.vectorize(j1)", "sch.vectorize(r)")
    verdict = judge(EXERCISE, text)
    said = verdict.findings[0].message
    assert verdict.kind == "compile" and "(`sch.vectorize(r)`): TVM refuses `vectorize`" in said
    assert "The loop runs over a sum." in said and "#" not in said.partition("Case")[0]
