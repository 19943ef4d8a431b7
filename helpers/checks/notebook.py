"""What a lab's cells call: check an answer, see a solution, see how far one has come."""

import dataclasses
import difflib
import importlib
import os
import re
from functools import cache

from IPython.display import display

from .. import ROOT, apart, ledger, machine, reveal, show, source
from .. import progress as memory
from ..exercises import Exercise, every
from .judge import Stopped, bytes_asked, judge, unread
from .verdict import Verdict


class NotPassed(machine.Plain, AssertionError):
    """An answer that did not pass, where a check must raise: HELPERS_STRICT=1, or under nbgrader."""


class NoSuchExercise(machine.Plain, LookupError):
    """A name that no exercise has."""


def check(name: str, answer=None, *, seed: int | None = None, sanitize: bool = False) -> None:
    """Judge an answer and show the verdict: `check("row-softmax", row_softmax)`.

    answer: the function or class, by default the one that the exercise names; what counts is its text in the cells as
    last run. seed: that of an earlier verdict, to see the same inputs again. sanitize: on a GPU, ask NVIDIA's
    compute-sanitizer too (a minute). For a learner it never raises, so that *Run all* goes on; with HELPERS_STRICT=1
    and under nbgrader it raises `NotPassed`: for what only other hardware or a package that is not here can judge,
    under nbgrader alone. A name that no exercise has raises `NoSuchExercise` there, and is a warning for a learner.
    Stopped by the learner, it says where the answer was, and raises `Stopped`, a KeyboardInterrupt. HELPERS_CLUSTER
    names a Dask scheduler whose workers judge in place of this machine.
    """
    if not (exercise := _exercise(name)):
        return
    loading = None
    if machine.gpu() and exercise.rung == "compiler" and exercise.made_of != "mojo" and not exercise.package:
        loading = apart.later(_load_compiler)  # the cells of this lab look at what torch.compile makes, too
    entry = getattr(answer, "__name__", exercise.entry)
    try:
        text = source.live(entry)
    except source.Missing as missing:
        verdict = unread(exercise, missing)
    else:
        if entry != exercise.entry:
            text += f"\n{exercise.entry} = {entry}\n"
        try:
            with show.working(f"checking {name}"):
                address = os.environ.get("HELPERS_CLUSTER", "")
                verdict = judge(exercise, text, seed=seed, sanitize=sanitize, address=address)
                if loading:  # the next cell must not begin to import what a thread has imported by half
                    loading.exception()
        except Stopped as stopped:
            display(dataclasses.replace(stopped.verdict, judged=source.ran(entry)))
            raise
        verdict = dataclasses.replace(verdict, judged=source.ran(entry))
    if _strict():
        elsewhere = verdict.kind == "needs-hardware" or (verdict.kind == "environment" and exercise.package)
        if not verdict.passed and not (elsewhere and not os.environ.get("NBGRADER_EXECUTION")):
            raise NotPassed(str(verdict))
    else:
        verdict = remembered(exercise, verdict)
    display(verdict)


@cache
def _load_compiler() -> None:
    """What torch.compile imports at its first call: seconds, here, while an answer is judged in another process."""
    for module in ("torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx"):
        importlib.import_module(module)


def requested(name: str, answer, *inputs) -> int:
    """The bytes that loads and stores ask for in one call of `answer(*inputs)`, whatever it is made of.

    Of an operator of PyTorch's it is what it must read and write, and of torch.compile's the same for each launch of
    the code that it generates for an H200. Kernels are counted as CPU mode runs them, in a process of their own; so
    give these a part of the problem. inputs: tensors; of those for torch.compile only shapes and dtypes count.
    Raises RuntimeError where a call fails.
    """
    text = source.of(answer)
    if re.search(r"\btorch\.compile\b", text):
        return ledger.total(ledger.compiled(reveal.inductor(answer, *inputs, arch="sm_90").code))
    exercise = every()[name]
    return bytes_asked(exercise, f"{text}\n{exercise.entry} = {answer.__name__}\n", inputs)


def solution(name: str, sure: bool = False) -> None:
    """Show the course's answer: after you have passed, or when you are sure that you want to see it."""
    if not (exercise := _exercise(name)):
        return
    if not (sure or memory.of(name).passed):
        show.note(f'You have not passed {name} yet. To see the answer all the same: solution("{name}", sure=True)')
        return
    solved = ROOT / "solutions" / f"{exercise.lab}.ipynb"
    if not solved.exists():
        show.note("The course's answers are not on this machine: your instructor has them.")
        return
    memory.reveal(name)
    text = source.notebook(solved, exercise.entry)
    text = re.sub(r".*### (BEGIN|END) SOLUTION.*\n?", "", text)
    display(show.code(text, "python", caption=f"The course's answer to {name}; yours may differ and be as good"))


def progress() -> None:
    """Show what is passed, the last finding of what is not, and the next exercise."""
    display(memory.summary())


def _exercise(name: str) -> Exercise | None:
    """The exercise; None, and a sentence that names near ones, where a learner mistyped it."""
    if name in every():
        return every()[name]
    if _strict():
        raise NoSuchExercise(no_such(name))
    show.note(no_such(name), kind="warning")


def no_such(name: str) -> str:
    """A sentence for a name that no exercise has."""
    near = difflib.get_close_matches(name, every(), 3)
    hint = f"Did you mean {' or '.join(near)}?" if near else "python -m helpers exercises lists them."
    return f"There is no exercise {name!r}. {hint}"


def _strict() -> bool:
    return os.environ.get("HELPERS_STRICT") == "1" or bool(os.environ.get("NBGRADER_EXECUTION"))


def remembered(exercise: Exercise, verdict: Verdict) -> Verdict:
    """Record a verdict in the learner's progress. Where the same kind of finding comes again, it gets the next hint."""
    known = memory.record(verdict)
    if verdict.passed is not False or verdict.kind == "not-attempted" or known.repeats < 2:
        return verdict
    hints = exercise.hints_for.get(verdict.kind) or exercise.hints
    step = min(known.repeats - 1, len(hints))
    said = f"The same kind of finding again; hint {step} of {len(hints)}: {hints[step - 1]}"
    return dataclasses.replace(verdict, hint=said)
