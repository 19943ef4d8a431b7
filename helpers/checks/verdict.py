"""What a check says: a verdict, its findings, and how they look in a notebook, in a terminal and as JSON."""

import html
import re
from dataclasses import dataclass, field
from typing import Any

UNJUDGED = ("environment", "needs-hardware")
"""Kinds of finding that say nothing about the answer: it could not be judged here."""

NEXT = {
    "not-attempted": "Replace the line that stands for your code, run the cell, and check again.",
    "syntax": "Mend that line and run the cell again.",
    "compile": "Mend the line that the compiler names.",
    "exception": "Call it yourself on a small input and read the traceback.",
    "wrong-shape": "Look at where the result is allocated.",
    "wrong-dtype": "Look at the dtype that the result is allocated with, and at what is stored into it.",
    "wrong-values": "Work out by hand what one of these elements should be, and which thread or program writes it.",
    "wrong-answer": "Work one of these cases out on paper.",
    "nan": "Ask which operation can meet inf - inf, 0 / 0, or an element that no load filled.",
    "unwritten": "Count the elements that all programs or blocks together store.",
    "out-of-bounds": "Compare the largest index of the last program or block with the size, for this access.",
    "input-modified": "Write into memory that you allocate.",
    "race": "Ask what orders the two accesses: a barrier within a block, an atomic between blocks, or other addresses.",
    "deadlock": "Every thread of a block must reach the same barrier.",
    "timeout": "Look for a loop whose condition never changes, or a wait for what never comes.",
    "crash": "Look at pointers, their types and alignment.",
    "memory": "Work out how many bytes it allocates for this shape.",
    "forbidden": "Do this part with what the exercise asks for.",
    "precision": "Look at the dtype in which sums are kept.",
    "too-slow": "Count what it asks for, and compare with the least it must.",
    "too-many-bytes": "Ask which bytes are moved twice, or fetched and not used.",
    "too-many-kernels": "Ask which two launches could be one.",
    "graph-break": "Look for what the compiler cannot follow: data-dependent Python, prints, foreign calls.",
    "environment": "python -m helpers doctor says what is missing.",
    "needs-hardware": "It can be judged on a machine with a GPU that has it.",
}
"""One next step for each kind of finding; its keys are all the kinds that there are."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: its kind, a sentence with the evidence, and details as data (case, indices, line).

    caught_by: "text" (reading it), "guards" (the interpreter's, the CUDA runner's or the GPU's), "values" (comparing),
    "counts" (of operators, launches, bytes), "compiler", "process" (how it ended), "timer" or "compute-sanitizer".
    next: the step to take, where it is another than `NEXT` has for the kind.
    """

    kind: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    caught_by: str = ""
    next: str = ""

    def __post_init__(self):
        if self.kind not in NEXT:
            raise ValueError(f"{self.kind!r} is no kind of finding")

    def data(self) -> dict:
        return {"kind": self.kind, "message": self.message, **self.details}


@dataclass(frozen=True)
class Verdict:
    """What a check found. passed: None where the answer could not be judged here. mode: "gpu" or "cpu".

    checked, unchecked: sentences on what was looked at and what could not be. seed: with it the same inputs are drawn
    again. printed: what the answer wrote to stdout. judged: in a notebook, which run of which cell was judged.
    """

    exercise: str
    passed: bool | None
    findings: tuple[Finding, ...]
    mode: str
    seconds: float
    seed: int = 0
    checked: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    printed: str = ""
    judged: str = ""
    hint: str = ""

    @property
    def kind(self) -> str:
        """The kind of the first finding; "passed" where there is none."""
        return self.findings[0].kind if self.findings else "passed"

    @property
    def caught_by(self) -> str:
        """What found the first finding."""
        return self.findings[0].caught_by if self.findings else ""

    @property
    def next(self) -> str:
        """The step that the first finding asks for; "" where there is none."""
        return (self.findings[0].next or NEXT[self.kind]) if self.findings else ""

    @property
    def headline(self) -> str:
        if self.passed:
            return "passed" if self.mode == "gpu" else "passed in CPU mode; not run on a GPU"
        if self.passed is None:
            if self.kind == "timeout":
                return "stopped by you"
            if self.checked and self.kind == "needs-hardware":
                return "compiled and looked at, not run: needs-hardware"
            return f"cannot be judged here: {self.kind}"
        return "not attempted yet" if self.kind == "not-attempted" else f"not yet: {self.kind}"

    @property
    def _look(self) -> tuple[str, str]:
        """Icon and colour. An exercise that was not attempted is not wrong, and does not look so."""
        return _LOOKS.get(self.kind) or _LOOKS[self.passed]

    def data(self) -> dict:
        """The object that `check --json` prints."""
        return {
            "exercise": self.exercise,
            "passed": self.passed,
            "findings": [f.data() for f in self.findings],
            "mode": self.mode,
            "seconds": round(self.seconds, 3),
            "seed": self.seed,
            "checked": list(self.checked),
            "unchecked": list(self.unchecked),
            "printed": self.printed,
        }

    def __str__(self) -> str:
        lines = [f"{self._look[0]} {self.exercise}: {self.headline} ({self.seconds:.1f} s)"]
        lines += [f"  {f.message}" for f in self.findings]
        if self.findings:
            lines.append(f"  Next: {self.next}")
        lines += [f"  judged: {self.judged}"] * bool(self.judged)
        lines += [f"  checked: {said}" for said in self.checked]
        lines += [f"  not checked: {said}" for said in self.unchecked]
        if self.hint:
            lines.append(f"  {self.hint}")
        if self.printed:
            lines += ["  It printed:", *(f"  | {line}" for line in self.printed.splitlines())]
        return "\n".join(lines)

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/html": self._html(), "text/plain": str(self)}

    def _html(self) -> str:
        icon, colour = self._look
        head = f"<b>{icon} {_say(self.exercise)}: {_say(self.headline)}</b>"
        body = "".join(
            f'<div style="white-space:pre-wrap;padding-top:4px">{_say(f.message)}</div>' for f in self.findings
        )
        if self.findings:
            body += f'<div style="padding-top:4px"><i>Next:</i> {_say(self.next)}</div>'
        if self.hint:
            body += f'<div style="white-space:pre-wrap;padding-top:4px"><i>{_say(self.hint)}</i></div>'
        small = [
            *filter(None, [self.judged]),
            *self.checked,
            *(f"not checked: {said}" for said in self.unchecked),
            f"{self.seconds:.1f} s",
        ]
        body += f'<div style="padding-top:4px;font-size:90%;opacity:.8">{_say(" · ".join(small))}</div>'
        if self.printed:
            body += f"<details><summary>what it printed</summary><pre>{html.escape(self.printed)}</pre></details>"
        return f'<div style="border-left:5px solid {colour};padding:4px 12px">{head}{body}</div>'


def _say(text: str) -> str:
    """A sentence as HTML, with what stands between backticks or on a line of its own, indented, as code."""
    return re.sub(r"`([^`\n]+)`|(?<=^    )(.+)$", r"<code>\1\2</code>", html.escape(text), flags=re.MULTILINE)


_LOOKS = {
    True: ("✔", "#009E73"),
    False: ("✘", "#D55E00"),
    None: ("?", "#999999"),
    "not-attempted": ("○", "#999999"),
}
