"""On a GPU an answer runs as in CPU mode and then for real: what of that is left out, and who waits for whom."""

import contextlib
import os
import sys
import threading
import types
from concurrent.futures import Future

import pytest

from helpers import apart, child, exercises, locks, machine
from helpers.checks.judge import Trial
from helpers.stage.play import threads

EVERY = exercises.every()


@pytest.fixture
def trial(monkeypatch):
    """A trial of an exercise as on a machine with a GPU."""
    monkeypatch.setattr(machine, "gpu", lambda: True)
    return lambda name: Trial(EVERY[name], "", seed=1, seconds=12)


@pytest.fixture
def taken(monkeypatch):
    """The locks that are taken."""
    taken = []
    monkeypatch.setattr(locks, "exclusive", lambda what: taken.append(what) or contextlib.nullcontext())
    monkeypatch.setattr(locks, "shared", lambda: taken.append("shared") or contextlib.nullcontext())
    return taken


@pytest.mark.parametrize("name", ["count-bytes", "predict-time", "repair-timer", "roofline", "tile-waves"])
def test_plain_python_of_plain_values_runs_once_and_waits_for_nobody(trial, taken, name):
    """A second run would be the same, and cost a process and a CUDA context."""
    one = trial(name)
    assert list(one.cases("cpu")) and not list(one.cases("gpu")) and not one.has_second_pass()
    assert one.on("gpu") == []
    with one.lock():
        assert not taken


def test_an_answer_that_is_a_timer_has_the_gpu_alone_and_its_simulated_devices_do_without(trial, taken):
    one = trial("honest-timer")
    assert [case.mode for _, case in one.cases("gpu")] == ["gpu", "gpu"]
    with one.lock():
        assert taken == ["an answer to honest-timer"]


def test_what_runs_on_the_gpu_runs_there_again_beside_others(trial, taken):
    names = [e.name for e in EVERY.values() if e.made_of in ("triton", "cuda", "torch") and not e.alone and not e.needs]
    assert len(names) > 20
    for name in names:
        one = trial(name)
        assert {i for i, c in enumerate(one.exercise.cases) if c.mode != "cpu"} >= {i for i, _ in one.cases("gpu")}
        both = {i for i, c in enumerate(one.exercise.cases) if not c.mode and not c.memory_bytes}
        assert both <= {i for i, _ in one.cases("gpu")}, name
    with trial("row-softmax").lock():
        assert taken == ["shared"]


def test_a_timer_that_others_may_have_spoilt_is_judged_once_more(trial, monkeypatch):
    """Seen beside 13 other programs on one GPU: two of 200 answers, honest timers, got wrong times."""
    monkeypatch.setattr(child, "warm", lambda **named: None)
    monkeypatch.setattr(Trial, "prepare", lambda self: None)
    monkeypatch.setattr(Trial, "on_cpu", lambda self: [])
    monkeypatch.setattr(Trial, "measured", lambda self: [])
    monkeypatch.setattr(Trial, "on", lambda self, mode: found.pop(0))
    wrong = [types.SimpleNamespace(kind="timeout")]  # a kind that asks for nothing further
    for name, found, verdict in (
        ("honest-timer", [wrong, []], []),
        ("honest-timer", [wrong, wrong], wrong),
        ("row-softmax", [wrong], wrong),
    ):
        assert trial(name).run() == verdict and not found


def test_only_what_drives_a_timer_on_the_gpu_keeps_all_others_off():
    assert [e.name for e in EVERY.values() if e.alone] == ["honest-timer"]


def test_what_the_second_pass_compiles_leaves_no_thread_of_inductor_s(trial, monkeypatch, tmp_path):
    """Such a thread would be taken for one of the answer's: seen on a machine of 16 cores."""
    asked, real = {}, child.run
    monkeypatch.setattr(child, "run", lambda *words, env, **named: asked.update(env=env) or real("", seconds=20))
    one = trial("gated-projection")
    one.played("gpu", [])
    text = """
import torch
from helpers.stage.play import threads
torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
print(threads())
"""
    env = asked["env"] | {"TORCHINDUCTOR_CACHE_DIR": tmp_path}  # it compiles
    assert real(text, env=env, interpreted=False, seconds=60).stdout == "1\n"


def test_python_does_not_end_while_a_reference_is_computed(trial, monkeypatch):
    """A daemon thread inside torch takes a process that ends down with it."""
    seen = []
    monkeypatch.setattr(child, "warm", lambda **named: None)
    monkeypatch.setattr(Trial, "prepare", lambda self: seen.append(threading.current_thread().daemon))
    monkeypatch.setattr(Trial, "passes", lambda self: [])
    assert trial("row-softmax").run() == [] and seen == [False]


def test_the_gpu_is_shared_for_as_long_as_the_answer_s_process_uses_it(trial, taken, monkeypatch):
    """What times the answer takes the lock by itself, in that process."""
    real = child.run
    monkeypatch.setattr(child, "run", lambda *words, **named: taken.append("ran") or real("", seconds=20))
    one = trial("row-softmax")
    cases = list(one.cases("cpu"))[:1]
    for mode, given, found in ("cpu", cases, ["ran"]), ("gpu", [], ["ran"]), ("gpu", cases, ["shared", "ran"]):
        one.played(mode, given)
        assert taken == found
        taken.clear()


def test_what_is_made_of_pytorch_runs_in_both_passes_at_once(trial, monkeypatch):
    """Kernels wait until the first pass has seen that they keep to their tensors."""
    monkeypatch.setattr(child, "warm", lambda **named: None)
    begun, stopped = threading.Event(), []

    def played(self, mode, cases, speed=None, until=None):
        begun.set()
        return [({"event": "end"}, [])], child.run(f"import time\ntime.sleep({self.text})", until=until)

    def first(self):
        assert begun.wait(30)
        return self.found

    monkeypatch.setattr(Trial, "prepare", lambda self: None)
    monkeypatch.setattr(Trial, "played", played)
    monkeypatch.setattr(Trial, "on_cpu", first)
    monkeypatch.setattr(Trial, "compared", lambda self, mode, cases, left: [])
    monkeypatch.setattr(Trial, "ended", lambda self, mode, cases, left, done: stopped.append(done.timed_out) or [])
    for name in ("graph-breaks", "fusable-norm"):
        one = trial(name)
        one.found, one.text = [], "0.1"
        assert one.run() == [] and one.checked == [f"{len(one.exercise.cases)} cases on the GPU"]
        assert stopped == [False]
        stopped.clear(), begun.clear()
    one.found, one.text, one.second = ["a finding"], "100", None
    assert one.run() == ["a finding"] and one.second.result()[1].timed_out and not stopped
    assert not trial("row-softmax").may_run_beside() and not trial("honest-timer").may_run_beside()


@pytest.mark.parametrize("others", ["took its time", "have all threads"])
def test_a_second_pass_that_had_no_chance_beside_the_first_runs_alone_after_it(trial, taken, monkeypatch, others):
    """Seen once, on a busy machine: a right answer's process had not come to its first case when its time was over."""
    monkeypatch.setattr(child, "warm", lambda **named: None)
    seconds, begun = iter([0.3] * (others == "took its time") + [20]), threading.Event()

    def played(self, mode, cases, speed=None, until=None):
        begun.set()
        return [({"event": "end"}, [])], child.run("import time\ntime.sleep(1)", seconds=next(seconds), until=until)

    monkeypatch.setattr(Trial, "prepare", lambda self: None)
    monkeypatch.setattr(Trial, "played", played)
    monkeypatch.setattr(Trial, "on_cpu", lambda self: [] if others == "have all threads" or begun.wait(30) else None)
    monkeypatch.setattr(Trial, "compared", lambda self, mode, cases, left: [])
    monkeypatch.setattr(Trial, "ended", lambda self, mode, cases, left, done: [] if done.ok else [done.why()])
    if others == "have all threads":
        monkeypatch.setattr(apart, "later", lambda work: Future())
    one = trial("graph-breaks")
    assert one.run() == [] and one.checked == [f"{len(one.exercise.cases)} cases on the GPU"] and not list(seconds)


@pytest.mark.parametrize(
    ("left", "kind", "said"),
    [
        ([({"event": "import"}, [])], "timeout", "s while its definitions were run, and was stopped"),
        ([], "environment", "was not ready after"),
    ],
)
def test_a_second_pass_that_hangs_alone_too_is_a_finding(trial, taken, monkeypatch, left, kind, said):
    """Of an answer whose text was not even begun nothing can be said."""
    monkeypatch.setattr(child, "warm", lambda **named: None)
    alone, begun = [], threading.Event()

    def played(self, mode, cases, speed=None, until=None):
        alone.append(until is None)
        begun.set()
        return left, child.run("import time\ntime.sleep(100)", seconds=0.3, until=until)

    monkeypatch.setattr(Trial, "prepare", lambda self: None)
    monkeypatch.setattr(Trial, "played", played)
    monkeypatch.setattr(Trial, "on_cpu", lambda self: [] if begun.wait(30) else None)
    [found] = trial("graph-breaks").run()
    assert found.kind == kind and said in found.message
    assert alone == [False, True]


def test_the_thread_that_watches_tqdm_s_bars_is_none_of_the_answer_s(monkeypatch):
    """torch.compile starts it where tqdm is installed. What only looks like it counts."""
    before, over = threads(), threading.Event()
    monitor = type("TMonitor", (threading.Thread,), {})
    others = [threading.Thread, type("TMonitor", (monitor,), {}), type("TMonitor", (threading.Thread,), {})]
    begun = [kind(target=over.wait, name="tqdm_monitor") for kind in (monitor, *others)]
    try:
        for thread in begun:
            thread.start()
        monkeypatch.delitem(sys.modules, "tqdm._monitor", raising=False)
        assert threads() == before + 4
        monkeypatch.setitem(sys.modules, "tqdm._monitor", types.SimpleNamespace(TMonitor=monitor))
        assert threads() == before + 3
    finally:
        over.set()
        for thread in begun:
            thread.join()


def test_a_text_ends_when_it_is_told_to():
    until, tell = os.pipe()
    with os.fdopen(until), os.fdopen(tell, "w") as teller:
        threading.Timer(0.3, teller.close).start()
        done = child.run("import time\ndef waits():\n    time.sleep(100)\nwaits()", until=until)
    assert done.timed_out and done.seconds < 20 and "in waits" in done.stderr
