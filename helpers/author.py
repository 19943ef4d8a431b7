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
import socket
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from tempfile import TemporaryDirectory

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
MOST_CODE = 30_000
"""Characters of code that are looked at: of longer texts, reading alone can take minutes."""

UNCHECKED = "It was not checked: you stopped it."

LEVEL = 0.02
"""Share by which a time must be less to count as less: measured again, the same code takes another time, too."""


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

    problem: why there is no verdict or price, a sentence. seconds: that checking took. same_as: the number of an
    earlier answer with the same code, whose verdict and price these are: nothing was run again.
    """

    number: int
    reply: endpoint.Reply
    code: str = ""
    verdict: checks.Verdict | None = None
    price: checks.Price | None = None
    problem: str = ""
    seconds: float = 0.0
    same_as: int = 0

    @property
    def came(self) -> bool:
        """Whether there was an answer at all, an empty one included."""
        return bool(self.reply.text or self.reply.problem)

    @property
    def passed(self) -> bool:
        return bool(self.verdict and self.verdict.passed)

    @property
    def said(self) -> str:
        """The verdict in a few words; the problem where there is none."""
        if not self.verdict:
            return self.problem
        said = self.verdict.kind if self.verdict.findings else self.verdict.headline.partition(";")[0]
        return f"{said}, as answer {self.same_as}" if self.same_as else said

    @property
    def claims(self) -> str:
        """What the text beside the code tries, in words, by its vocabulary: for the reader only."""
        beside = _FENCED.sub("", _after_thinking(self.reply.text))
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
        """The last of `kept`."""
        return next(reversed(self.kept), None)

    @property
    def kept(self) -> list[Attempt]:
        """The rule of the search: what passed takes the place of the one before it where that has no price, or where it
        costs less: fewer bytes, or a time that is less by `LEVEL`. Of equals the first stays."""
        kept: list[Attempt] = []
        for one in (one for one in self.attempts if one.passed):
            before = kept[-1].price if kept else None
            share = 1 - LEVEL if one.price and one.price.unit == "us" else 1
            if not before and (one.price or not kept) or before and one.price and one.price.over < share * before.over:
                kept.append(one)
        return kept

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
        passed, came = sum(one.passed for one in self.attempts), sum(one.came for one in self.attempts)
        said = f"{self.task.exercise.name}: {came} answers, {passed} passed; {calls} calls, "
        said += f"{tokens:,} tokens, {asking:.1f} s of asking, {checking:.1f} s of checking."
        return " ".join(filter(None, [said, "★ is kept." if passed else "", self.ended]))

    def picture(self):
        """The price of each answer that passed, and the best so far."""
        over, one = ("its rival's time", "the rival") if machine.gpu() else ("the least bytes", "the least")
        costs = [one.price.over if one.price else None for one in self.attempts]
        kept = [one.number for one in self.kept if one.price]
        return plots.search(costs, kept, f"times {over}", f"{self.task.exercise.name}: what a search kept", one)

    def look(self, number: int) -> None:
        """Answer `number` (from 1): its code, and the verdict on it. Raises IndexError, a sentence."""
        if not 0 < number <= len(self.attempts):
            raise IndexError(f"There is no answer {number}: the log holds {len(self.attempts)}, counted from 1.")
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


def improve(
    given: Task, ask: Callable[[list[dict]], endpoint.Reply | None], rounds: int = 6, log: Log | None = None
) -> Log:
    """Ask, judge, tell what was found, and ask again, `rounds` times at most; the log says which answer is kept.

    ask: gets the conversation and returns an answer, None where it has no more. log: an earlier one, to go on with: it
    grows with each answer, so whoever holds it has what was paid for, whatever happens here. It ends early, and `ended`
    says why, where nothing can be asked (`endpoint.Refused`), and where you stop it; what had come by then is a row.
    """
    log = log or Log(given)
    if is_open := unsealed():
        show.note(f"This system leaves open what the answers' code should not reach: {is_open}.", "warning")
    is_left = bool(log.attempts) and log.attempts[-1].problem == UNCHECKED  # paid for, and not to be asked for again
    log.ended, reply = "", log.attempts.pop().reply if is_left else None

    def ends(why: str, **about) -> None:
        log.attempts.append(Attempt(len(log.attempts) + 1, **about))
        log.ended = why

    try:
        for _ in show.progress(range(rounds), f"{given.exercise.name}: answers of a model"):
            reply = reply or ask(conversation(log))
            if reply is None:
                break
            log.attempts.append(tried(given, reply, len(log.attempts) + 1, log.attempts))
            reply = None
    except endpoint.Refused as refused:
        asked = endpoint.Reply("", calls=refused.calls, seconds=refused.seconds)
        ends(str(refused), reply=asked, problem="no answer")
    except endpoint.Stopped as stopped:
        asked = endpoint.Reply("", calls=stopped.calls, seconds=stopped.seconds)
        ends("You stopped it.", reply=asked, problem="no answer: you stopped it")
    except KeyboardInterrupt:
        log.ended = "You stopped it."
        if reply:
            ends(log.ended, reply=_shown(reply), problem=UNCHECKED)
    return log


@lru_cache(maxsize=1)
def unsealed() -> str:
    """What this system does not permit to take from the process that answers run in, with its reason; mostly nothing.
    It is asked before any answer is there that could lie about it."""
    done = child.run("from helpers import sealed", f"sealed.seal(daemons={machine.gpu()})")
    if not done.ok:
        return f"all of it, perhaps: the seal could not be tried, {done.why()}"
    return "; ".join(f"{what}, since {why}" for what, why in sorted(done.value.items()) if why)


def _shown(reply: endpoint.Reply) -> endpoint.Reply:
    return replace(reply, text=visible(reply.text), problem=visible(reply.problem))


def tried(given: Task, reply: endpoint.Reply, number: int = 1, earlier: Sequence[Attempt] = ()) -> Attempt:
    """One answer, judged; its code is run nowhere else, and not at all where one of the `earlier` answers holds it."""
    began, reply = time.monotonic(), _shown(reply)
    about = {"number": number, "reply": reply}
    cells = code_in(reply.text, given.exercise.entry)
    code = "\n\n".join(cells)
    if not code.strip():
        others = sorted({_language(one) for one in _FENCED.finditer(_after_thinking(reply.text))} - PYTHON)
        beside = f", only {' and '.join(others)}" if others else ""
        return Attempt(**about, problem=reply.problem or f"The answer holds no code in Python{beside}.")
    if len(code) > MOST_CODE:
        return Attempt(**about, problem=f"Its code is longer than {MOST_CODE:,} characters.")
    judged = (one for one in earlier if one.verdict and one.verdict.passed is not None)
    if same := next((one for one in judged if one.code.strip() == code.strip()), None):
        return replace(same, **about, seconds=0.0, same_as=same.same_as or same.number)
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


PYTHON = {"", "python", "py", "python3", "ipython", "triton"}
_FENCED = re.compile(  # the first fence may follow prose in its line
    r"(?<![^\s:])(`{3,}|~{3,})([^\n`~]{0,200})\n(.*?)(?:^[ \t]*\1[`~]*[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)


def code_in(text: str, entry: str) -> list[str]:
    """The blocks of Python in a model's answer, as cells: later ones may use the earlier. A last fence may be missing,
    where it was cut off; without any fence the whole text counts if it defines the entry point."""
    text = _after_thinking(text)
    cells, is_fenced = [], False
    for block in _FENCED.finditer(text):
        is_fenced, language, inside = True, _language(block), block[3]
        if language in ("markdown", "md"):  # the whole answer stands in a block: its first inner fence has ended it
            cells += code_in(inside, entry)
        elif language in PYTHON:
            cells.append(textwrap.dedent(inside))
    if not is_fenced and re.search(rf"^(?:def|class) {entry}\b", text, re.MULTILINE):
        cells = [text]
    return cells


def _language(block: re.Match) -> str:
    """What a fence says is in it: `python` of "python title=…" and of "{.python}"."""
    return next(iter(re.findall(r"[\w+#-]+", block[2].lower())), "")


def _after_thinking(text: str) -> str:
    """An answer without what it thought before; where a server put the beginning of that into its question, the end
    alone shows."""
    if (end := text.rfind("</think>")) >= 0:
        return text[end + len("</think>") :]
    return "" if text.lstrip().startswith("<think>") else text


# ---- what a model is told --------------------------------------------------------------------------------------------


def conversation(log: Log) -> list[dict]:
    """The task, the last code and what was found of it. What a model said beside its code is not sent back."""
    messages = [{"role": "user", "content": log.task.text}]
    if came := [one for one in log.attempts if one.came]:
        last, entry = came[-1], log.task.exercise.entry
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
    if last.same_as:
        told = f"This is the code of answer {last.same_as} again: change it. {told}"
    if best and best.code != last.code:
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

def connects(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)

def look(pid, secret, program):
    return {
        "open a socket to another machine": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()),
        "talk to a program of this machine": tried(lambda: connects(program)),
        "read the environment of the notebook's process": tried(lambda: open(f"/proc/{pid}/environ").close()),
        "send the notebook's process a signal": tried(lambda: os.kill(pid, 0)),
        "find a key in its own environment": tried(lambda: keys(secret)),
    }
"""


def room():
    """What code of a model can reach on this machine, tried out: a table."""
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as program:
        program.bind(f"{folder}/program")
        program.listen()
        look = f"look({os.getpid()}, {child.SECRET.pattern!r}, {folder + '/program'!r})"
        done = child.run(_PROBE, look, sealed=True)
    if not done.ok:
        raise RuntimeError(f"The room could not be looked at: {done.why()}.")
    rows = [{"what code of a model may try": what, "here": found} for what, found in done.value.items()]
    return show.table(rows, caption="The process that answers of a model run in, tried from inside")
