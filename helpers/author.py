"""Kernels written by a model: put an exercise into words, judge what comes back, tell the model, keep the best.

    log = author.improve(author.task("rmsnorm", inputs=…, rival=…), author.stored("12_3_models"))

Who answers is a function of the conversation so far: an `endpoint.Endpoint`, or answers that are there already
(`stored`, `pasted`). What a model says beside its code has no effect on anything: the verdict is the check's, and the
code runs in a child process with its limits, without the network and the notebook's environment where the system
permits that (`room` shows what it does).
"""

import json
import os
import re
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from IPython.display import display

from . import ROOT, checks, child, endpoint, machine, plots, show, source
from .checks.findings import visible
from .checks.verdict import NEXT
from .exercises import Draw, Exercise, every

RULES = {
    "triton": """\
- Import `torch`, `triton`, `triton.language as tl` and, if you like, `math`, `functools` or `typing`; nothing else.
- All arithmetic happens in kernels of yours under `@triton.jit`. PyTorch may allocate, fill and view{allowed}.
- Kernels are interpreted first: `libdevice` and inline assembly do not exist there.""",
    "cuda": """\
- Import `torch`, `math` and `from helpers import cuda, machine`; nothing else.
- All arithmetic happens in CUDA C of yours: `cuda.RawModule(code=TEXT).get_function(NAME)`, called as
  `kernel(grid, block, (arguments))` with tensors and numbers. PyTorch may allocate, fill and view{allowed}.""",
}
COMMON = """\
- The result is new memory; the inputs stay as they are. Shapes, strides and values are also others than those above.
- No files, network, environment, threads, `try` or attributes with underscores; nothing is kept between calls.
- A program judges: every element against float64, every access against its tensor, operators and launches by count,
  and then the cost, {cost}. It reads nothing but the code.

Answer with one block of Python code, a whole module with its imports that defines `{entry}`."""
COST = {"gpu": "the time of a large call", "cpu": "the bytes that the loads and stores of a large call ask for"}
MOST_CODE = 100_000
"""Characters of code that are looked at."""


@dataclass(frozen=True)
class Task:
    """An exercise for a model. inputs, rival: of the call that gives a price, as in `exercises.Speed`."""

    exercise: Exercise
    inputs: Callable[[Draw], tuple]
    rival: Callable

    @cached_property
    def text(self) -> str:
        """All that a model is told: the lab's own question, what is given, calls, and rules. Neither the answer nor the
        reference is read for it."""
        one, mode = self.exercise, "gpu" if machine.gpu() else "cpu"
        allowed = f", and call {', '.join(f'`{name}`' for name in sorted(one.allow))}" if one.allow else ""
        rules = f"{RULES[one.made_of].format(allowed=allowed)}\n{COMMON.format(cost=COST[mode], entry=one.entry)}"
        calls = "\n".join(f"- {case.about}: {_call(one, case.inputs(Draw(0, case.kind)))}" for case in _seen(one))
        return f"{_question(one)}\n\nCalls, for example:\n{calls}\n\nRules:\n{rules}"


def task(name: str, inputs: Callable[[Draw], tuple], rival: Callable) -> Task:
    """The exercise `name` as a task. Raises KeyError where there is none of this name, and ValueError for one that asks
    for no kernel of Triton or CUDA C."""
    one = every()[name]
    if one.made_of not in RULES:
        raise ValueError(f"{name} asks for no kernel of {' or '.join(RULES)}: a model cannot be given it.")
    return Task(one, inputs, rival)


@dataclass(frozen=True)
class Attempt:
    """One answer: what came (`reply`, its text visible), the code in it, the verdict on that, its price once it passed.

    problem: why there is no verdict or price, a sentence. seconds: that checking took.
    """

    number: int
    reply: endpoint.Reply
    code: str = ""
    verdict: checks.Verdict | None = None
    price: checks.Price | None = None
    problem: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.verdict and self.verdict.passed)

    @property
    def said(self) -> str:
        """The verdict in a few words; the problem where there is none."""
        if not self.verdict:
            return self.problem
        return self.verdict.kind if self.verdict.findings else self.verdict.headline.partition(";")[0]

    @property
    def claims(self) -> str:
        """What the text beside the code tries, in words, by its vocabulary: for the reader only."""
        beside = re.sub(r"```.*?(?:```|\Z)", "", self.reply.text, flags=re.DOTALL)
        return ", ".join(what for what, words in CLAIMS.items() if re.search(words, beside, re.IGNORECASE)) or "–"


CLAIMS = {
    "right": r"\b(?:correct|passes|passed|verified|works|handles|tested)\b",
    "gives orders": r"\b(?:ignore|disregard|override|you must|system:|new instructions)\b",
    "wants a key": r"\b(?:api[_ ]?key|environment variable|credential|token)s?\b",
}


@dataclass
class Log:
    """All that was tried for a task, in order; `ended`: why it ended early, if it did."""

    task: Task
    attempts: list[Attempt] = field(default_factory=list)
    ended: str = ""

    @property
    def best(self) -> Attempt | None:
        """The one with the least price of those that passed; the first of equals."""
        passed = [one for one in self.attempts if one.passed]
        return min(passed, key=lambda one: one.price.over if one.price else float("inf"), default=None)

    def table(self):
        """A row for each answer, with what it cost to ask and to check."""
        on_gpu, best = machine.gpu(), self.best
        rows = []
        for one in self.attempts:
            price = {"µs": "–", "over its rival": "–"} if on_gpu else {"bytes asked for": "–", "over the least": "–"}
            if one.price:
                price = dict(zip(price, (one.price.value, one.price.over), strict=True))
            rows.append(
                {
                    "": f"{one.number}{' ★' if one is best else ''}",
                    "answer": one.reply.about or f"{len(one.code.splitlines())} lines",
                    "says": one.claims,
                    "verdict": one.said,
                    "found by": (one.verdict.caught_by or "text") if one.verdict and not one.passed else "",
                    **price,
                    "calls": one.reply.calls,
                    "tokens": one.reply.tokens,
                    "asking (s)": one.reply.seconds,
                    "checking (s)": one.seconds,
                }
            )
        return show.table(rows, caption=self.cost)

    @property
    def cost(self) -> str:
        """What the search took, in one line."""
        calls, tokens = (sum(getattr(one.reply, what) for one in self.attempts) for what in ("calls", "tokens"))
        asking, checking = sum(one.reply.seconds for one in self.attempts), sum(one.seconds for one in self.attempts)
        passed = sum(one.passed for one in self.attempts)
        said = f"{self.task.exercise.name}: {len(self.attempts)} answers, {passed} passed; {calls} calls, "
        said += f"{tokens:,} tokens, {asking:.1f} s of asking, {checking:.1f} s of checking."
        return " ".join(filter(None, [said, "★ is kept." if passed else "", self.ended]))

    def picture(self):
        """The price of each answer that passed, and the best so far."""
        over, one = ("its rival's time", "the rival") if machine.gpu() else ("the least bytes", "the least")
        costs = [one.price.over if one.price else None for one in self.attempts]
        return plots.search(costs, f"times {over}", f"{self.task.exercise.name}: what a search kept", one)

    def look(self, number: int) -> None:
        """Answer `number` (from 1): its code, and the verdict on it."""
        one = self.attempts[number - 1]
        if one.code:
            display(show.code(one.code, "python", caption=f"answer {number}: {one.reply.about or 'the model'}"))
        if one.verdict:
            display(one.verdict)
        if one.problem:
            show.note(one.problem)

    def _ipython_display_(self) -> None:
        display(self.table())
        if self.attempts:
            display(self.picture())


def improve(given: Task, ask: Callable[[list[dict]], endpoint.Reply | None], rounds: int = 6) -> Log:
    """Ask, judge, tell what was found, and ask again, `rounds` times at most; the log says which answer is kept.

    ask: gets the conversation and returns an answer, None where it has no more. It ends early, and `ended` says why,
    where nothing can be asked (`endpoint.Refused`), and where you stop it.
    """
    log = Log(given)
    try:
        for number in show.progress(range(1, rounds + 1), f"{given.exercise.name}: answers of a model"):
            if (reply := ask(conversation(log))) is None:
                break
            log.attempts.append(tried(given, reply, number))
    except endpoint.Refused as refused:
        reply = endpoint.Reply("", calls=refused.calls, seconds=refused.seconds)
        log.attempts.append(Attempt(len(log.attempts) + 1, reply, problem="no answer"))
        log.ended = str(refused)
    except KeyboardInterrupt:
        log.ended = "You stopped it."
    return log


def tried(given: Task, reply: endpoint.Reply, number: int = 1) -> Attempt:
    """One answer, judged; its code is run nowhere else."""
    began, text = time.monotonic(), visible(reply.text)
    about = {"number": number, "reply": endpoint.Reply(**(vars(reply) | {"text": text}))}
    cells = code_in(text, given.exercise.entry)
    code = "\n\n".join(cells)
    if not code.strip():
        return Attempt(**about, problem=reply.problem or "The answer holds no code.")
    if len(code) > MOST_CODE:
        return Attempt(**about, problem=f"Its code is longer than {MOST_CODE:,} characters.")
    try:
        whole = checks.complete(given.exercise, cells, "the answer's code")
    except (source.Missing, SyntaxError, ValueError) as error:
        verdict, price = checks.unread(given.exercise, error), None
    except (RecursionError, MemoryError):
        return Attempt(**about, code=code, problem="Its code is nested too deeply to be read.")
    else:
        verdict = checks.judge(given.exercise, whole, sealed=True)
        price = checks.price(given.exercise, whole, given.inputs, given.rival, sealed=True) if verdict.passed else None
    problem = ""
    if isinstance(price, checks.Finding):
        price, problem = None, f"It passed, and the large call failed: {price.message}"
    return Attempt(**about, code=code, verdict=verdict, price=price, problem=problem or reply.problem,
                   seconds=time.monotonic() - began)  # fmt: skip


def code_in(text: str, entry: str) -> list[str]:
    """The blocks of Python in a model's answer, as cells: later ones may use the earlier. A last fence may be missing,
    where it was cut off; without any fence the whole text counts if it defines the entry point."""
    text = re.sub(r"<think>.*?(?:</think>|\Z)", "", text, flags=re.DOTALL)
    fenced = re.findall(
        r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", text, re.MULTILINE | re.DOTALL
    )
    cells = [textwrap.dedent(code) for language, code in fenced if language.lower() in ("", "python", "py", "python3")]
    if not fenced and re.search(rf"^(?:def|class) {entry}\b", text, re.MULTILINE):
        cells = [text]
    return cells


# ---- what a model is told --------------------------------------------------------------------------------------------


def conversation(log: Log) -> list[dict]:
    """The task, the last code and what was found of it. What a model said beside its code is not sent back."""
    messages = [{"role": "user", "content": log.task.text}]
    if log.attempts:
        last, entry = log.attempts[-1], log.task.exercise.entry
        code = f"```python\n{last.code.strip()}\n```" if last.code.strip() else "(no code)"
        messages.append({"role": "assistant", "content": code})
        messages.append({"role": "user", "content": feedback(last, log.best, entry)})
    return messages


def feedback(last: Attempt, best: Attempt | None, entry: str) -> str:
    """What the check found, in the words that a learner reads; nothing of hints or of the course's own answer."""
    if last.verdict is None:
        told = last.problem
    elif not last.passed:
        found = "\n".join(f"- {finding.message}" for finding in last.verdict.findings)
        told = f"It did not pass ({last.verdict.kind}):\n{found}\n{NEXT[last.verdict.kind]}"
    else:
        told = f"It passed. {_priced(last)} Make it cost less, and let it stay right."
    if best and best is not last:
        told += f"\n\nThe best so far: {_priced(best)}\n```python\n{best.code.strip()}\n```"
    return f"{told}\n\nAnswer with one block of Python code, the whole module that defines `{entry}`."


def _priced(one: Attempt) -> str:
    if not one.price:
        return one.problem
    if one.price.unit == "us":
        return f"A large call takes {one.price.value:.1f} µs; {one.price.over:.2f} times the library's time."
    return f"A large call asks for {one.price.value:,.0f} bytes; {one.price.over:.2f} times the least."


def _seen(one: Exercise) -> list:
    return [case for case in one.cases if case.seen] or list(one.cases[:1])


def _call(one: Exercise, inputs: tuple) -> str:
    """A call in words: `rmsnorm(float16 (5, 100), float16 (100,), 1e-06)`."""

    def spelled(thing) -> str:
        if not isinstance(thing, torch.Tensor):
            return repr(thing) if isinstance(thing, int | float | str | bool | None) else type(thing).__name__
        apart = "" if thing.is_contiguous() else f" with strides {tuple(thing.stride())}"
        return f"{str(thing.dtype).removeprefix('torch.')} {tuple(thing.shape)}{apart}"

    return f"`{one.entry}({', '.join(map(spelled, inputs))})`"


def _question(one: Exercise) -> str:
    """The exercise as the unsolved lab puts it: its text, without links and hints, and the code with its gaps."""
    told, given = [], []
    for cell in json.loads((ROOT / "labs" / f"{one.lab}.ipynb").read_text(encoding="utf-8"))["cells"]:
        text, graded = "".join(cell["source"]), cell["metadata"].get("nbgrader", {})
        if re.fullmatch(rf"x\d\d-{one.name}-\d+", cell["id"]) is None or text.startswith("<details>"):
            continue
        if cell["cell_type"] == "markdown":
            told.append(re.sub(r"\[([^\]]*)\]\([^)\s]*\.(?:md|ipynb)[^)\s]*\)|^## \d+ · ", r"\1", text))
        elif graded.get("solution") or (one.form == "rewrite" and not graded.get("grade")):
            given.append(text)
    code = "\n\n\n".join(given)
    return "\n\n".join(told) + f"\n\nThis is given; your code takes its place:\n\n```python\n{code}\n```"


# ---- answers that are there already ----------------------------------------------------------------------------------


def stored(name: str) -> Callable[[list[dict]], endpoint.Reply | None]:
    """The answers in notebooks/NAME.toml, one after another, whatever is found of them."""
    return _in_turn((one["answer"], one["about"]) for one in candidates(name))


def candidates(name: str) -> list[dict]:
    """What a file of stored answers holds: of each `about`, `answer`, and `kind`, the finding, or "passed"."""
    return tomllib.loads((ROOT / "notebooks" / f"{name}.toml").read_text(encoding="utf-8"))["candidate"]


def pasted(*answers: str) -> Callable[[list[dict]], endpoint.Reply | None]:
    """Answers that you copied from wherever a model gave them."""
    return _in_turn((text, "pasted") for text in answers if text.strip())


def _in_turn(answers: Iterator[tuple[str, str]]) -> Callable[[list[dict]], endpoint.Reply | None]:
    left = iter(list(answers))

    def ask(messages: Sequence[dict]) -> endpoint.Reply | None:
        text, about = next(left, (None, ""))
        return None if text is None else endpoint.Reply(text, calls=0, about=about)

    return ask


# ---- where it runs -------------------------------------------------------------------------------------------------


_PROBE = r"""
import os, pathlib, re, socket

def tried(act):
    try:
        found = act()
    except OSError as error:
        return f"refused ({error.strerror})"
    return found or "it can"

def keys(secret):
    names = [part.partition(b"=")[0].decode() for part in pathlib.Path("/proc/self/environ").read_bytes().split(b"\0")]
    return ", ".join(n for n in {*names, *os.environ} if re.search(secret, n, re.IGNORECASE)) or "there is none"

def look(pid, secret):
    return {
        "open a socket to another machine": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()),
        "read the environment of the notebook's process": tried(lambda: open(f"/proc/{pid}/environ").close()),
        "send the notebook's process a signal": tried(lambda: os.kill(pid, 0)),
        "find a key in its own environment": tried(lambda: keys(secret)),
    }
"""


def room():
    """What code of a model can reach on this machine, tried out: a table."""
    done = child.run(_PROBE, f"look({os.getpid()}, {child.SECRET.pattern!r})", sealed=True)
    if not done.ok:
        raise RuntimeError(f"The room could not be looked at: {done.why()}.")
    rows = [{"what code of a model may try": what, "here": found} for what, found in done.value.items()]
    return show.table(rows, caption="The process that answers of a model run in, tried from inside")
