"""What the two articles claim, and the verdict on each claim: derived from figures and thresholds, never written.

    claims.verdict("gelu-tanh",
        claims.Test("alone, fp16", ratio, at_least=3, unit="x", note="time of the erf form over the tanh form's"),
        claims.Test("alone, fp16, relative error", error, at_most=0.001))

holds: every test does. fails: none does. depends: some do, and the tests say on what. A figure whose spread reaches
across the threshold is not resolved, and one that no GPU has been recorded for is not recorded yet: neither counts
for or against, and while one of them could still change the verdict there is none.

A claim about several rungs of the ladder is judged rung by rung, each in its lesson: `rung="CUDA"` names the one.
"""

import ast
import difflib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from . import show
from .records import Measurement

ARTICLES = {
    "ladder": "how to choose a tool for optimising kernels (the ladder of control)",
    "trend": "where AI compilers and inference engines go: from kernels by hand to generated code",
}
"""The two public articles, by the names that the lessons use."""

HOLDS, FAILS, DEPENDS, UNRESOLVED, UNRECORDED = "holds", "fails", "depends", "not resolved", "not recorded yet"
NOT_TESTABLE = "not testable"


@dataclass(frozen=True)
class Claim:
    """A statement in the course's own words, which of `ARTICLES` makes it (or "both"), and under which heading.

    `untestable` says why no experiment of the course can judge it; empty where one can.
    """

    statement: str
    article: str
    heading: str
    untestable: str = ""

    @property
    def source(self) -> str:
        return f"{'both articles' if self.article == 'both' else f'the {self.article} article'}, on {self.heading}"


_DIMINISHING, _TRITON = "the diminishing return of kernels by hand", "Triton's block-level model in practice"
_AUTOMATION, _LIBRARIES = "the limits of automation", "libraries of CUDA kernels"
CLAIMS = {
    "library-peak": Claim(
        "On tensor cores cuBLAS reaches over 95% of the theoretical peak in fp16.", "trend", _DIMINISHING
    ),
    "gemv-gap": Claim(
        "Kernels by hand win 10 to 20% on special shapes, such as the matrix-vector product M=1, K=8192, N=4096.",
        "trend",
        _DIMINISHING,
    ),
    "extreme-shape": Claim(
        "On the shape M=1, K=128, N=32768 a kernel by hand stays 15 to 25% ahead of Triton.", "trend", _TRITON
    ),
    "common-shapes": Claim(
        "On 80% of the common shapes Triton comes within 5% of CUDA written by hand.", "trend", _TRITON
    ),
    "flash-speedup": Claim("FlashAttention made attention 2 to 4 times as fast.", "trend", _DIMINISHING),
    "fusion-bytes": Claim(
        "A product, its bias and its activation as separate kernels write the intermediate result to HBM and read it "
        "back; one fused kernel saves those trips.",
        "both",
        "fusing a product with its activation",
    ),
    "fused-lines": Claim(
        "Fused by hand, product and GELU take about 200 lines of CUDA, and far fewer in Triton.", "trend", _TRITON
    ),
    "gelu-tanh": Claim(
        "The tanh form of GELU is 3 times as fast as the erf form and loses less than 0.1% of accuracy.",
        "trend",
        _TRITON,
    ),
    "contiguity": Claim(
        "Chains of view and reshape make Inductor insert copies; each is another trip through HBM, and they cancel "
        "what fusion had won.",
        "trend",
        _TRITON,
    ),
    "triton-autotune": Claim(
        "Triton's tuner searches with genetic or Bayesian methods and needs hundreds of trials.", "trend", _AUTOMATION
    ),
    "tvm-trials": Claim("Tuning with AutoTVM takes more than 10,000 trials to converge.", "trend", _AUTOMATION),
    "tvm-peak": Claim(
        "Kernels that a compiler tuned often stay behind the vendor's library.", "ladder", "Apache TVM's limits"
    ),
    "xla-library": Claim(
        "On GPUs XLA owes its peak performance to calls of the vendor's libraries.", "ladder", "XLA's limits"
    ),
    "warp-level": Claim("Triton cannot express operations at the level of a warp.", "trend", _AUTOMATION),
    "registers": Claim(
        "Triton plans shared memory and registers by itself, and spills to local memory where they run out.",
        "trend",
        _TRITON,
    ),
    "portability": Claim(
        "Portability shrinks on the way down the ladder; Mojo compiles one source for GPUs of several vendors.",
        "ladder",
        "the ladder of control, and Mojo",
    ),
    "generation": Claim(
        "A kernel that was tuned for one generation of GPUs does not reach the peak of the next.",
        "ladder",
        _LIBRARIES,
    ),
    "library-coverage": Claim(
        "Libraries cover the patterns that are known and come late to new forms of attention.", "ladder", _LIBRARIES
    ),
    "compiler-flash": Claim(
        "Compilers do not find an algorithm such as FlashAttention by themselves.", "ladder", "Apache TVM's limits"
    ),
    "inductor-triton": Claim(
        "Wherever Triton supports an operator, Inductor generates Triton instead of calling CUDA by hand or ATen.",
        "trend",
        _TRITON,
    ),
    "alignment": Claim(
        "What Inductor's Triton is worth depends on whether it can see that tensors are contiguous and aligned.",
        "trend",
        _TRITON,
    ),
    "templates": Claim(
        "Compilers that search for a schedule still start from templates that people wrote.",
        "trend",
        "the generations of AI compilers",
    ),
    "dialects": Claim(
        "Each dialect of MLIR carries one level of a compilation: linalg tensors, affine loops, llvm vectors.",
        "trend",
        "the generations of AI compilers",
    ),
    "algorithm-shift": Claim(
        "Since FlashAttention progress comes from algorithms, such as state-space models in place of attention, more "
        "than from kernels.",
        "trend",
        _DIMINISHING,
    ),
    "cost-months": Claim(
        "A kernel by hand costs one to two months of an engineer.",
        "trend",
        _DIMINISHING,
        untestable="it would take many engineers and their months; the course can only show its own hours and lines",
    ),
    "eighty-twenty": Claim(
        "Triton for the 80% of operators that are common and kernels by hand for the rest, behind one dispatch, is "
        "what serves in production.",
        "trend",
        _AUTOMATION,
    ),
}
"""Every claim that the course puts to the test, by id."""


@dataclass(frozen=True)
class Test:
    """One figure against one threshold. Raises ValueError without exactly one threshold.

    `where`: under which conditions ("alone, fp16"). `value`: a number, bool, string or `records.Measurement`, whose
    quartiles must then all lie on one side. `at_least` and `at_most` are numbers in the value's unit.
    """

    __test__ = False  # pytest collects classes of this name

    where: str
    value: object
    at_least: float | None = None
    at_most: float | None = None
    equals: object = None
    unit: str = ""
    note: str = ""

    def __post_init__(self):
        given = [t for t in (self.at_least, self.at_most, self.equals) if t is not None]
        if len(given) != 1:
            raise ValueError(f"the test {self.where!r} needs one threshold: at_least, at_most or equals")
        if self.equals is None and not (isinstance(self.value, Measurement) or _is_number(self.value)):
            raise ValueError(f"the test {self.where!r} compares {self.value!r}, which is no number, with {given[0]}")
        if isinstance(given[0], float) and math.isnan(given[0]):
            raise ValueError(f"the threshold of the test {self.where!r} is not a number")

    @property
    def result(self) -> str:
        """HOLDS, FAILS, UNRESOLVED or UNRECORDED."""
        if not isinstance(self.value, Measurement):
            low = high = self.value
        else:
            low, high = self.value.low, self.value.high
        if any(isinstance(v, float) and math.isnan(v) for v in (low, high)):
            return UNRECORDED
        if self.equals is not None:
            if low == high:
                return HOLDS if low == self.equals else FAILS
            return UNRESOLVED if low <= self.equals <= high else FAILS
        sure, possible = (low, high) if self.at_most is None else (-high, -low)
        threshold = self.at_least if self.at_most is None else -self.at_most
        return HOLDS if sure >= threshold else FAILS if possible < threshold else UNRESOLVED

    @property
    def threshold(self) -> str:
        sign, value = next(
            (s, v) for s, v in (("≥", self.at_least), ("≤", self.at_most), ("=", self.equals)) if v is not None
        )
        return f"{sign} {_spelled(value)}"

    def row(self) -> dict:
        """The line of the table."""
        value, unit = self.value, self.unit
        if isinstance(value, Measurement):
            value, unit = show.number(value.value), unit or value.unit
            if self.value.low != self.value.high and self.result != UNRECORDED:
                value += f" ({show.number(self.value.low)} – {show.number(self.value.high)})"
        shown = "–" if self.result == UNRECORDED else f"{_spelled(value)} {unit}".rstrip()
        row = {"test": self.where, "value": shown, "threshold": f"{self.threshold} {unit}".rstrip()}
        return row | {"holds": {HOLDS: "yes", FAILS: "no"}.get(self.result, self.result), "note": self.note}


@dataclass(frozen=True)
class Ruling:
    """What the tests say of a claim; a table in a notebook, text elsewhere.

    `verdict` is HOLDS, FAILS, DEPENDS, NOT_TESTABLE, or, where there is none, UNRESOLVED or UNRECORDED.
    """

    key: str
    claim: Claim
    tests: tuple[Test, ...]
    rung: str = ""

    @property
    def heading(self) -> str:
        """What is judged, in a line: the claim, who makes it, and for which rung of the ladder."""
        where = f"Claim {self.key}{f', for {self.rung}' if self.rung else ''} ({self.claim.source})"
        return f"{where}: {self.claim.statement}"

    @property
    def verdict(self) -> str:
        if self.claim.untestable:
            return NOT_TESTABLE
        results = {test.result for test in self.tests}
        if {HOLDS, FAILS} <= results:
            return DEPENDS
        return next((open for open in (UNRECORDED, UNRESOLVED) if open in results), None) or results.pop()

    @property
    def sentence(self) -> str:
        """The verdict in words: what it depends on, or what is missing."""

        def those(result):
            return "; ".join(test.where for test in self.tests if test.result == result)

        return {
            HOLDS: "holds in every test",
            FAILS: "fails in every test",
            DEPENDS: f"depends. It holds for: {those(HOLDS)}. It fails for: {those(FAILS)}",
            UNRESOLVED: f"not resolved, the spread reaches across the threshold: {those(UNRESOLVED)}",
            UNRECORDED: f"none yet, no GPU's figures are recorded for: {those(UNRECORDED)}",
            NOT_TESTABLE: f"not testable: {self.claim.untestable}",
        }[self.verdict]

    def _table(self):
        columns = ["test", "value", "threshold", "holds", "note"]
        rows = [test.row() for test in self.tests]
        columns = columns if any(row["note"] for row in rows) else columns[:-1]
        return show.table(rows, columns, caption=self.heading)

    def _repr_mimebundle_(self, include=None, exclude=None):
        above = self._table()._repr_mimebundle_()["text/html"] if self.tests else show.paragraph(self.heading)
        return {"text/html": above + show.paragraph(f"Verdict: {self.sentence}.", bold=True), "text/plain": str(self)}

    def __str__(self) -> str:
        return f"{self._table() if self.tests else self.heading}\nVerdict: {self.sentence}."


def verdict(key: str, *tests: Test, rung: str = "") -> Ruling:
    """The verdict on the claim `key` from `tests`, to be shown as a cell's result.

    rung: the rung of the ladder that the tests are about ("CUDA"), where other lessons judge the claim on others.
    A claim that is not testable takes no tests. Raises LookupError for an unknown claim, naming the near ones;
    ValueError for a testable claim without tests, or one that is not testable with some.
    """
    claim = look_up(key)
    if bool(tests) == bool(claim.untestable):
        raise ValueError(f"the claim {key} " + (f"takes no tests: {claim.untestable}" if tests else "needs a test"))
    return Ruling(key, claim, tests, rung)


def look_up(key: str) -> Claim:
    """The claim `key`. Raises LookupError, naming the near ones."""
    if key not in CLAIMS:
        near = difflib.get_close_matches(key, CLAIMS, cutoff=0.4) or sorted(CLAIMS)
        raise LookupError(f"there is no claim {key!r}; near it: {', '.join(near)}")
    return CLAIMS[key]


def declared(notebook: Path) -> dict[str, list[str]]:
    """The claims that a notebook gives a verdict on, each with the ids of its cells. Raises ValueError.

    Their ids are literals in calls of `claims.verdict`, as those of figures are; so are the rungs that they are judged
    for, which follow an id after a comma: "fusion-bytes, CUDA".
    """
    out: dict[str, list[str]] = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        lines = "".join(cell["source"]).splitlines()
        for node in ast.walk(ast.parse("\n".join("" if line.startswith(("%", "!")) else line for line in lines))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "claims.verdict":
                key = node.args[0] if node.args else None
                if not (isinstance(key, ast.Constant) and key.value in CLAIMS):
                    raise ValueError(
                        f"{notebook.name}, cell {cell['id']}: claims.verdict takes a claim's id, literally"
                    )
                rungs = [ast.literal_eval(k.value) for k in node.keywords if k.arg == "rung"]
                out.setdefault(", ".join([key.value, *rungs]), []).append(cell["id"])
    return out


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _spelled(value) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else show.number(value)
