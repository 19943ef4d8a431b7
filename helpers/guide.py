"""The decision guide: from answers about an operator to the rung to start on, by rules to read and argue with.

    guide.decide({"operator": "chain", "backends": "one vendor", ...})

`QUESTIONS` are those that the ladder article ends on, and three more. `RULES` are tried from the top: the first that
fits says the rung and why. What it rests on is measured: the ladder of the nearest of the course's workloads, by
`NEAREST`. What would change the answer is found by asking again with one answer changed at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from . import ladder, plots, show


@dataclass(frozen=True)
class Question:
    """A question, and its answers: what is stored -> what a reader chooses."""

    text: str
    answers: dict[str, str]


QUESTIONS = {
    "operator": Question(
        "What is the operator?",
        {
            "standard": "a standard one: a library has exactly this",
            "chain": "standard ones in a row, with pointwise work between or after them",
            "variant": "a known one with a change of yours, such as a new mask or score",
            "new": "a new one, whose steps no library has",
        },
    ),
    "backends": Question(
        "Where must it run?",
        {
            "one card": "on one generation of one vendor's cards",
            "one vendor": "on several generations of NVIDIA's cards",
            "several vendors": "on cards of several vendors",
        },
    ),
    "team": Question(
        "What does the team know, and will keep knowing?",
        {
            "pytorch": "PyTorch",
            "compiler": "PyTorch, and how to read what a compiler generated",
            "kernel": "tiles, memory traffic, kernels in Triton",
            "cuda": "all that, and CUDA down to the instructions",
        },
    ),
    "purpose": Question(
        "What is it for?",
        {
            "product": "infrastructure of a product, kept for years",
            "frontier": "a frontier model, where a few percent of this kernel pay",
        },
    ),
    "shape": Question(
        "What limits it?",
        {
            "large": "arithmetic: large matrix products or attention over a prompt",
            "rows": "memory: one pass over large tensors",
            "one row": "memory: few rows against large weights or a cache, as in decoding",
            "small": "launches: many small steps over little data",
        },
    ),
    "precision": Question(
        "In which numbers?",
        {"16": "fp16 or bf16", "32": "fp32", "8": "8 bits: fp8 or int8", "4": "4 bits"},
    ),
    "deadline": Question(
        "When must it run?",
        {"afternoon": "this afternoon", "week": "within a week", "month": "within a month or later"},
    ),
}
"""By the name that rules use."""


@dataclass(frozen=True)
class Rule:
    """When each question in `when` has one of its answers, start on `rung`, because of `reason` (of `lesson`)."""

    when: dict[str, tuple[str, ...]]
    rung: str
    reason: str
    lesson: str

    def fits(self, answers: Mapping[str, str]) -> bool:
        return all(answers[name] in allowed for name, allowed in self.when.items())

    @property
    def condition(self) -> str:
        """In words, short enough for a box of the flowchart."""
        return "; ".join(f"{name}: {' or '.join(allowed)}" for name, allowed in self.when.items()) or "anything else"


_NVIDIA, _TIME = ("one card", "one vendor"), ("week", "month")
RULES = (
    Rule({"operator": ("standard",), "shape": ("one row",), "precision": ("16",), "purpose": ("frontier",),
          "team": ("kernel", "cuda"), "deadline": _TIME},
         "Triton", "one row times a matrix is where the library leaves time, and a short kernel takes it", "10"),
    Rule({"operator": ("standard",)},
         "library", "people with more time than you have tuned it; measure how far it is from the floor first", "02"),
    Rule({"shape": ("large",), "backends": ("one card",), "team": ("cuda",),
          "purpose": ("frontier",), "deadline": ("month",)},
         "CUDA", "the last percent of a large product or of attention are in instructions of one generation", "09"),
    Rule({"operator": ("chain", "new"), "shape": ("small",), "backends": _NVIDIA, "team": ("cuda",),
          "deadline": _TIME},
         "CUDA", "dependent small steps fit into one kernel whose blocks and warps you arrange", "10"),
    Rule({"shape": ("one row",), "precision": ("8", "4"),
          "backends": _NVIDIA, "team": ("cuda",), "deadline": _TIME},
         "CUDA", "narrow numbers are limited by instructions a byte, and those you choose only here", "10"),
    Rule({"operator": ("chain",), "shape": ("large",), "backends": _NVIDIA, "precision": ("16", "32", "8")},
         "library", "a product's bias and activation fit into the library's epilogue; the compilers of the course "
         "left the product's result in memory", "02"),
    Rule({"operator": ("chain",), "precision": ("16", "32", "8")},
         "AI compiler", "fusing neighbours is what a compiler does well, and it stays the model's own code", "03"),
    Rule({"team": ("pytorch", "compiler")},
         "AI compiler", "written as PyTorch's operators, or as FlexAttention's functions, it is fused without a "
         "kernel of yours; step down when its distance from the floor matters", "03, 07"),
    Rule({"deadline": ("afternoon",), "precision": ("16", "32")},
         "AI compiler", "an afternoon buys a version that is right and fused; a kernel also wants its tests", "03"),
    Rule({"operator": ("new",), "backends": ("several vendors",), "team": ("cuda",), "purpose": ("product",),
          "deadline": ("month",)},
         "Mojo", "one source for several vendors with control below the tile, if a young toolchain is acceptable",
         "11"),
    Rule({}, "Triton", "tiles by hand, threads by the compiler: near the floor with few lines, on several cards",
         "05, 06, 07"),
)  # fmt: skip
"""From the top: the first that fits counts; the last fits always."""

NEAREST = (
    ({"shape": ("small",)}, "router, 4096 tokens, 8 of 64 experts"),
    ({"shape": ("one row",), "operator": ("variant",), "precision": ("8", "4")},
     "attention, decode, the same with an int8 cache"),
    ({"shape": ("one row",), "operator": ("variant",)}, "attention, decode, 16 × 32 heads × 32768 × 128"),
    ({"shape": ("one row",), "precision": ("8", "4")}, "GEMV, 1 × 8192 × 4096, int4 weights"),
    ({"shape": ("one row",)}, "GEMV, 1 × 8192 × 4096, fp16"),
    ({"shape": ("rows",), "precision": ("32",)}, "softmax, 16384 × 4096, fp32"),
    ({"shape": ("rows",)}, "RMSNorm, 16384 × 4096, fp16"),
    ({"operator": ("variant",)}, "attention, prefill, 4 × 16 heads × 4096 × 128"),
    ({"operator": ("standard",)}, "linear + GELU, 4096 × 4096 × 4096"),
    ({}, "linear + GELU, 16384 × 4096 × 1024"),
)  # fmt: skip
"""Which of `ladder.WORKLOADS` is nearest, by the same kind of rule."""

CAUTIONS = (
    ({"backends": ("several vendors",)}, ("library",),
     "Each vendor has its own library: call it through PyTorch's operator, which takes whichever is there."),
    ({"backends": ("one vendor", "several vendors")}, ("CUDA", "Triton", "Mojo"),
     "What compiles for every card is tuned for one: measure and tune on each (lesson 06)."),
    ({"precision": ("4", "8")}, ladder.RUNGS,
     "Narrow numbers change results: hold the error against float64 beside the time, as lesson 10 does."),
    ({"purpose": ("product",)}, ("CUDA", "Mojo"),
     "Somebody has to own this kernel for years; keep the rung above it as its test and its fallback."),
    ({"purpose": ("frontier",)}, ("CUDA",), "A better algorithm may replace it within months (lesson 07's scan)."),
)  # fmt: skip
"""(when, rungs, what to mind): all that fit are told."""


@dataclass(frozen=True)
class Advice:
    """What the guide answers; a table in a notebook, text elsewhere.

    changes: for each answer that would lead to another rung, (question, answer, rung).
    """

    rung: str
    rule: Rule
    cautions: tuple[str, ...]
    workload: ladder.Workload
    changes: tuple[tuple[str, str, str], ...]

    def sentences(self) -> list[str]:
        """The answer in words: the rung and why, what to mind, what would change it."""
        rule, lessons = 1 + RULES.index(self.rule), f"lesson{'s' * (',' in self.rule.lesson)} {self.rule.lesson}"
        by_rung: dict[str, list[str]] = {}
        for question, answer, rung in self.changes:
            by_rung.setdefault(rung, []).append(f"{question}: {answer}")
        return [
            f"Start on: {self.rung}. Rule {rule}: {self.rule.reason} ({lessons}).",
            *self.cautions,
            *(f"It would be {rung} with {', or '.join(those)}." for rung, those in by_rung.items()),
        ]

    def evidence(self) -> list[dict]:
        """The ladder of the nearest workload: what each rung gave there, and its lines."""
        keep = ("rung", "tool", "µs", "over the floor", "lines")
        rows = [{key: row[key] for key in keep} for row in ladder.rows(self.workload)]
        return [row | {"advised": "yes" if row["rung"] == self.rung else ""} for row in rows]

    def table(self):
        """The evidence, as it is shown."""
        return show.table(self.evidence(), caption=f"Nearest workload: {self.workload.name}; {ladder.ceilings().where}")

    def _repr_mimebundle_(self, include=None, exclude=None):
        words = "".join(show.paragraph(s, bold=i == 0) for i, s in enumerate(self.sentences()))
        return {"text/html": words + self.table().html, "text/plain": str(self)}

    def __str__(self) -> str:
        return "\n".join([*self.sentences(), str(self.table())])


def decide(answers: Mapping[str, str]) -> Advice:
    """The rung to start on. Raises ValueError, naming the choices, for a question without an answer of `QUESTIONS`."""
    for name, question in QUESTIONS.items():
        if answers.get(name) not in question.answers:
            raise ValueError(f"{name}: {' or '.join(question.answers)}, not {answers.get(name)!r}")
    if unknown := set(answers) - set(QUESTIONS):
        raise ValueError(f"the guide asks {', '.join(QUESTIONS)}, not {', '.join(sorted(unknown))}")
    rule = _first(answers)
    others = [
        (name, answer, _first({**answers, name: answer}).rung)
        for name, question in QUESTIONS.items()
        for answer in question.answers
    ]
    nearest = next(name for when, name in NEAREST if Rule(when, "", "", "").fits(answers))
    return Advice(
        rule.rung,
        rule,
        tuple(text for when, rungs, text in CAUTIONS if rule.rung in rungs and Rule(when, "", "", "").fits(answers)),
        next(workload for workload in ladder.WORKLOADS if workload.name == nearest),
        tuple(change for change in others if change[2] != rule.rung),
    )


def _first(answers: Mapping[str, str]) -> Rule:
    return next(rule for rule in RULES if rule.fits(answers))


def flowchart() -> show.Picture:
    """The rules as a chart to go through by hand, for readers of a saved notebook."""
    steps = [(f"{i}. {rule.condition}", rule.rung) for i, rule in enumerate(RULES, 1)]
    return plots.flowchart(steps, "Which rung to start on: the first rule that fits")


def rules():
    """The rules as a table, in the order in which they are tried."""
    rows = [
        {"rule": i, "when": rule.condition, "start on": rule.rung, "because": rule.reason, "lesson": rule.lesson}
        for i, rule in enumerate(RULES, 1)
    ]
    return show.table(rows, caption="Tried from the top: the first that fits counts")
