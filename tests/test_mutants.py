"""The checker is good: right answers pass, also those written differently; broken and cheating ones are caught."""

import statistics
from collections import Counter

import pytest

from helpers import machine
from helpers.checks import judge
from helpers.exercises import every
from tests.answers import GROUPS, as_judged, solved, written

ANSWERS = written()
LEAST = {"right": 2, "broken": 8, "cheat": 3}


def sampled() -> set[int]:
    """Indices of a fixed sample of the wrong ones, spread over groups and kinds: one of each exercise, for make test.

    Right ones take longest, as every case is run; in make test those in solutions/ stand for them.
    """
    wrong: dict[str, list[int]] = {}
    for i, answer in enumerate(ANSWERS):
        if answer.group != "right":
            wrong.setdefault(answer.exercise, []).append(i)
    return {those[sum(map(ord, exercise)) % len(those)] for exercise, those in wrong.items()}


SAMPLE = sampled()


def skip_what_was_only_inspected(title: str, verdict) -> None:
    """Where no GPU can run it, it has been compiled and looked at, and nothing was found; or a package is missing."""
    if verdict.passed is None:
        pytest.skip(f"only a machine with what it needs can judge {title}: python -m tests.answers, there")


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(a, id=a.title.replace(" ", "_"), marks=[] if i in SAMPLE else [pytest.mark.slow])
        for i, a in enumerate(ANSWERS)
    ],
)
def test_is_judged_as_it_should_be(answer, record_property):
    verdict = judge(every()[answer.exercise], answer.text, seed=answer.seed)
    assert not as_judged(answer, verdict), as_judged(answer, verdict)
    skip_what_was_only_inspected(answer.title, verdict)
    record_property("caught", [answer.exercise, answer.group, verdict.kind, verdict.caught_by])


@pytest.mark.slow  # make test runs solutions/, where a check that does not pass raises
@pytest.mark.parametrize("name", every())
def test_the_courses_own_answer_passes(name):
    verdict = judge(every()[name], solved(name))
    if (every()[name].needs and verdict.kind == "needs-hardware") or (
        every()[name].package and verdict.kind == "environment"
    ):
        skip_what_was_only_inspected(name, verdict)
    assert verdict.passed, verdict
    if verdict.seconds >= 15:  # the first check of a process starts those that answers are forked from
        verdict = judge(every()[name], solved(name))
    assert verdict.seconds < 15


@pytest.mark.parametrize("name", every())
def test_there_are_enough_answers_of_each_group(name):
    groups = Counter(a.group for a in ANSWERS if a.exercise == name)
    assert {g: groups[g] >= LEAST[g] for g in GROUPS} == dict.fromkeys(GROUPS, True), groups


def test_every_answer_is_of_an_exercise():
    assert {a.exercise for a in ANSWERS} == set(every())


@pytest.mark.slow
@pytest.mark.skipif(machine.gpu(), reason="the figures of a GPU are check.warm_seconds.*, which lesson 00 records")
def test_a_warm_verdict_on_a_small_kernel_takes_half_a_second():
    exercise, text = every()["masked-add"], solved("masked-add")
    judge(exercise, text)
    assert statistics.median(judge(exercise, text).seconds for _ in range(9)) <= 0.5
