"""What a call left, and how its process ended, as findings: all but the values, which `compare` looks at."""

import ast
import dataclasses
import re
import signal
from collections import Counter

import torch

from .. import child, stage
from ..exercises import Exercise
from ..slicing import parse
from .compare import tensors
from .verdict import Finding

MOST_FILLS = 16
"""How often a kernel's wrapper may call fill_ in a call: enough to clear buffers, not to write a result by elements."""


def caught(by: str, findings: list[Finding]) -> list[Finding]:
    """The findings with what found them."""
    return [dataclasses.replace(f, caught_by=by) for f in findings]


# ---- one call -----------------------------------------------------------------------------------------------------


def untouched(inputs: tuple, images: list[torch.Tensor]) -> list[Finding]:
    """Inputs, their guard zones and the gaps between their elements are bit for bit what they were."""
    for i, (t, now) in enumerate(zip(tensors(inputs), images, strict=False)):
        was = stage.image(stage.laid_out(t, t.stride(), "cpu"))
        if torch.equal(was, now):
            continue
        hit = (was != now).nonzero().flatten()
        outside = bool(hit[0] < stage.guards.GUARD_BYTES) or bool(hit[-1] >= len(was) - stage.guards.GUARD_BYTES)
        if outside:
            return [Finding("out-of-bounds", f"It wrote outside its input {i}, of shape {tuple(t.shape)}.")]
        return [Finding("input-modified", f"Input {i}, of shape {tuple(t.shape)}, was changed by the answer.")]
    return []


def composed(exercise: Exercise, facts: dict, empty: bool) -> list[Finding]:
    """Whether the answer is made of what is asked for: its operators, memory of its own, and, unless there is
    nothing to do (`empty`), kernels of its own."""
    if facts.get("threads") and not exercise.drive:  # a compiler that a drive asks keeps threads of its own
        return [Finding("forbidden", "The answer left a thread running: its work must be done when it returns.")]
    if facts.get("reused") and not exercise.drive:
        said = "The result lies in the memory of an earlier call's result, which its owner may still need"
        return [Finding("forbidden", f"{said}: return memory of its own each time.")]
    operators = facts.get("operators", [])
    if exercise.made_of in ("triton", "cuda", "mojo"):
        wrong = [n for n in operators if n not in exercise.allow | {"fill_", "zero_"} and "*" not in exercise.allow]
        if "repr" in wrong:
            said = "The answer turns a tensor into text, in print or an f-string: print it in a cell of its own."
            return [Finding("forbidden", said)]
        what = {"triton": "Triton", "cuda": "CUDA", "mojo": "Mojo"}[exercise.made_of]
        if wrong:
            called = ", ".join(f"torch's `{n}`" for n in dict.fromkeys(wrong))
            return [Finding("forbidden", f"The answer called {called}; a {what} kernel of yours is to do that.")]
        if facts["foreign"] and not (exercise.drive or exercise.allow):
            return [
                Finding(
                    "forbidden",
                    f"The result is no tensor that was allocated for a {what} kernel to write: take one from "
                    "torch.empty, and let the kernel fill it.",
                )
            ]
        if operators.count("fill_") > MOST_FILLS:
            said = f"The answer filled tensors {operators.count('fill_')} times from Python"
            return [Finding("forbidden", f"{said}; a {what} kernel of yours is to write what it returns.")]
        if not (exercise.drive or empty or facts["kernels"] or "*" in exercise.allow):
            return [Finding("forbidden", f"No {what} kernel was launched: the kernel is what the exercise asks for.")]
        if facts["views"] and not (exercise.drive or empty):
            return [Finding("forbidden", "The result lies in an input's memory: write it into memory of its own.")]
    elif operators:
        wrong = [n for n in operators if n in exercise.forbid]
        if "*" not in exercise.allow and exercise.allow:
            wrong += [n for n in operators if n not in exercise.allow | {"fill_", "zero_"}]
        if wrong:
            called = ", ".join(f"torch's `{n}`" for n in dict.fromkeys(wrong))
            return [Finding("forbidden", f"The answer called {called}, which this exercise asks you to do without.")]
    return []


def limited(exercise: Exercise, inputs: tuple, facts: dict) -> list[Finding]:
    for limit in exercise.limits:
        if limit.fact not in facts:  # what kernels ask for is counted on the CPU only
            continue
        fact, most = facts[limit.fact], limit.most(*inputs)
        if fact > most * (1 + 1e-9):
            ran = _counted(facts.get("operators", []))
            where = facts.get("where", "")
            said = limit.says.format(fact=_amount(fact), most=_amount(most), operators=ran, where=where)
            return [Finding(limit.kind, said, {limit.fact: fact, "most": most})]
    return []


# ---- how it ended ----


def failed(last: dict, done: child.Result, text: str) -> Finding:
    """The finding that the end of a process stands for: an exception, a limit reached, a signal. last: its last frame;
    text: the answer's."""
    if last.get("event") == "error":
        return raised(last, done.stderr, text)
    where = still(done.stderr, text)
    while_ = " while its definitions were run" * (last.get("event") == "import")
    if done.timed_out and not last:  # CUDA begins in it before the answer does
        said = f"Its process was not ready after {done.seconds:.1f} s, and nothing of it was run: this machine is busy."
        return Finding("environment", said, next="Check again when others are done.")
    if done.timed_out:
        what = f"The kernel `{last['kernel']}`, launched last," if last.get("kernel") else "It"
        said = f"{what} was still running after {done.seconds:.1f} s{while_}{where}, and was stopped."
        if last.get("kernel") and "mbarrier" in text:
            said += " A wait at an mbarrier ends when its phase has had all its arrivals and all the bytes it was told "
            said += "to expect, and where it waits for the parity of that phase, not of another."
        return Finding("timeout", said)
    if done.signal and re.search(r'recent call first\):\n *File "[^"]*/cuda/nvrtc\.py"', done.stderr):
        said = f"The compiler itself was ended by {signal.Signals(done.signal).name}{where}, so it names no line."
        said += " Look for inline PTX whose operands make no sense, such as a descriptor of zero."
        return Finding("compile", said)
    if done.signal:
        said = f"It was ended by {signal.Signals(done.signal).name}{while_}{where}."
        if done.signal == signal.SIGKILL:
            said += " The answer did that, another process, or the system for want of memory."
        return Finding("crash", said)
    return Finding("crash", f"Its process ended by itself (status {done.exit}){while_}, before it returned.")


def raised(error: dict, stderr: str, text: str) -> Finding:
    """The finding that an exception in the child stands for. stderr: of the child, where a GPU's asserts are told."""
    names = [name.rpartition(".")[2] for name in error["classes"]]
    message, kind = visible(error["message"].strip()), "exception"
    message = re.sub(r"\w+, line (\d+) of answer\.py(?: \(`.*?`\)(?=:|$))?", lambda m: place(text, int(m[1])), message)
    by_name = {
        "NotReady": "environment",
        "OutOfBounds": "out-of-bounds",
        "Race": "race",
        "RaceFound": "race",
        "Deadlock": "deadlock",
        "CompileError": "compile",
        "CompilationError": "compile",
        "ScheduleError": "compile",
        "OutOfResources": "compile",
        "AssertFailed": "exception",
        "KernelError": "crash",
        "OutOfMemoryError": "memory",
        "MemoryError": "memory",
    }
    kind = next((by_name[n] for n in names if n in by_name), kind)
    if kind == "exception":
        for pattern, better in (
            (r"not enough memory|can't allocate memory|[Oo]ut of memory", "memory"),
            (r"illegal memory access", "out-of-bounds"),
            (r"misaligned address|unspecified launch failure|an illegal instruction", "crash"),
        ):
            if re.search(pattern, message):
                kind = better
    if "libdevice" in text and re.search(r"`_semantic` argument|'NoneType'", message):  # interpreted, it gives None
        message = "The check interprets a kernel first, and functions of libdevice exist on a GPU only: write it with "
        message += "operations of tl."
    if re.search(r"Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available", message):
        message = (
            "The check runs on the CPU first, and torch knows no GPU there: machine.here() has the card's numbers."
        )
    if names[0] == "FailOnRecompileLimitHit":
        message = (
            "torch.compile captured it anew for shape after shape, or value after value, and gives up after so many."
        )
        message += " Let it keep sizes open: leave `dynamic` out, or say True; and compile once, not in each call."
    if kind == "exception" and names[0] == "SystemExit":
        message = "It ended its own process with sys.exit."
        return Finding(kind, message)
    if message.startswith(("CUDA error: ", "CUDA_ERROR_")):  # it comes later than its cause, and goes on for lines
        message = message.partition("\n")[0].rstrip(".")
        message += f"; the kernel launched last was `{error['kernel']}`." if error.get("kernel") else "."
        if m := re.search(r"(\d+): [^\n]*?(block: \[.*?\], thread: \[.*?\]) Assertion `(.*)` failed", stderr):
            message += f" Line {m[1]} of its text: assertion `{m[3]}` failed, {m[2]}."
    where = f" in {place(text, error['line'])}" if error.get("text") and error.get("line") else ""
    short = message if len(message) < 1200 else message[:1200] + " …"
    told = kind in ("exception", "memory", "crash") and names[0] not in ("AssertFailed", "KernelError")
    if told or "ScheduleError" in names:
        short = f"{names[0]}{where}: {short}"
    step = next((step for said, step in _STEPS.items() if kind == "crash" and said in message), "")
    return Finding(kind, short, {"line": error.get("line")}, next=step)


_STEPS = {
    "leaves out its own lane": (
        "Who calls must be named in the mask: let __ballot_sync make it from what decides who calls, or let the whole "
        "warp call, with 0xffffffff."
    ),
    "divides an integer by zero": "Ask at which size, or in which block, this divisor is 0.",
    "called __trap()": "Ask what the text wants to rule out before this line, and which input does it nevertheless.",
}
"""The next step for what the CUDA runner says and no pointer is to blame for."""


def visible(text: str) -> str:
    """`text` without what a terminal would obey (an answer could write over its verdict) or could not encode."""
    text = re.sub(r"\r\n?", "\n", text)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


def still(stderr: str, text: str) -> str:
    """The answer's line that ran last, from the traceback that the child leaves before it is stopped."""
    found = re.search(r'File "[^"]*answer\.py", line (\d+) in ', stderr)
    return f" in {place(text, int(found[1]))}" if found else ""


def place(text: str, number: int) -> str:
    """A line of an answer's text as its reader counts: from the first line, decorators too, of the function or class
    that it stands in."""
    lines = text.splitlines()
    quoted = f"`{lines[number - 1].strip()}`" if 0 < number <= len(lines) else ""
    around = [
        (min([node.lineno, *(d.lineno for d in node.decorator_list)]), node)
        for node in ast.walk(parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    around = [(first, node.name) for first, node in around if first <= number <= node.end_lineno]
    if not around:
        return quoted or "your code"
    first, name = max(around)
    return f"line {number - first + 1} of `{name}`" + f" ({quoted})" * bool(quoted)


def owner(lines: list[str], number: int) -> str:
    """The function in whose text a line stands."""
    # the parts of a CUDA function's head may stand in several lines
    starts = r"^[ \t]*(?:def|class) (\w+)|\bvoid\s+(?:__\w+__\s*\([^)]*\)\s*)?(?!__)(\w+)\s*\("
    starts += r"|\b__device__\s[\w\s*&]*?(\w+)\s*\("
    found = re.findall(starts, "\n".join(lines[:number]), re.M)
    return "".join(found[-1]) if found else lines[number - 1].strip()


def _counted(names: list[str]) -> str:
    """Names in the order in which they first occur, with how often: "clone, mm ×3"."""
    return ", ".join(name if n == 1 else f"{name} ×{n}" for name, n in Counter(names).items())


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2f}"
