"""What the two articles claim, and the verdict on each claim: derived from figures and thresholds, never written.

    claims.verdict("gelu-tanh",
        claims.Test("alone, fp16", ratio, at_least=3, unit="x", note="time of the erf form over the tanh form's"),
        claims.Test("alone, fp16, relative error", error, at_most=0.001))

holds: every test does. fails: none does. depends: some do, and the tests say on what. A figure whose spread reaches
across the threshold is not resolved, and one that no GPU has been recorded for is not recorded yet: neither counts
for or against, and while one of them could still change the verdict there is none.

A claim about several rungs of the ladder is judged rung by rung, each in its lesson: `rung="CUDA"` names the one.

`ledger()` gathers them all without running a lesson: it reads what those cells last showed, in the course's notebooks
(on an H200) and in the reader's copies. So a figure and its threshold stand in one place, the cell that judges.
"""

import ast
import difflib
import html
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import ROOT, WORK, records, show
from .records import Measurement

ARTICLES = {
    "ladder": "how to choose a tool for optimising kernels (the ladder of control)",
    "trend": "where AI compilers and inference engines go: from kernels by hand to generated code",
}
"""The two public articles, by the names that the lessons use."""

HOLDS, FAILS, DEPENDS, UNRESOLVED, UNRECORDED = "holds", "fails", "depends", "not resolved", records.NOT_YET
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
        return judged(self.claim, (test.result for test in self.tests))

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


def judged(claim: Claim, results: Iterable[str]) -> str:
    """The verdict on a claim from the results of its tests; UNRECORDED where there are none."""
    if claim.untestable:
        return NOT_TESTABLE
    results = set(results) or {UNRECORDED}
    if {HOLDS, FAILS} <= results:
        return DEPENDS
    return next((open for open in (UNRECORDED, UNRESOLVED) if open in results), None) or results.pop()


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


_SAID = {"yes": HOLDS, "no": FAILS}
_HEADING = re.compile(r"Claim ([\w-]+)(?:, for (.+?))? \((?:the \w+ article|both articles), on ")
_COLUMNS = re.compile(r"(?:^|(?<=  ))(?:test|value|threshold|holds|note)(?=  |$)")


@dataclass(frozen=True)
class Entry:
    """A ruling as a saved notebook shows it: its tests' rows (`Test.row`), its cell, and the GPU of that run, or ""."""

    key: str
    rung: str
    rows: tuple[dict, ...]
    notebook: str
    cell: str
    where: str

    @property
    def results(self) -> list[str]:
        return [_SAID.get(row["holds"], row["holds"]) for row in self.rows]

    @property
    def lesson(self) -> str:
        """The lesson's number, "12_2"."""
        return re.match(r"\d+(_\d+)?", self.notebook)[0]

    @property
    def link(self) -> str:
        """The cell, from beside the lessons: JupyterLab opens the notebook there."""
        return f"{self.notebook}#cell-id={self.cell}"


def parsed(text: str) -> tuple[str, str, tuple[dict, ...]] | None:
    """Key, rung and rows of a ruling from its plain text; None for a text that is none.

    The columns begin where their names do, as `show.table` sets them.
    """
    heading, _, rest = text.partition("\n")
    match = _HEADING.match(heading)
    if not match or match[1] not in CLAIMS:
        return None
    names, *lines = rest.splitlines()[:-1] or [""]
    found = [(at.group(), at.start()) for at in _COLUMNS.finditer(names)]
    ends = [start for _, start in found[1:]] + [None]
    rows = [{name: line[start:end].strip() for (name, start), end in zip(found, ends, strict=True)} for line in lines]
    return match[1], match[2] or "", tuple({"note": "", **row} for row in rows)


def entries(notebook: Path) -> list[Entry]:
    """The rulings that a saved notebook shows, from its outputs."""
    saved, out, where = json.loads(notebook.read_text()), [], ""
    for cell in saved["cells"]:
        for output in cell.get("outputs", []):
            text = "".join(output.get("data", {}).get("text/plain", ""))
            if text.startswith("GPU mode:"):
                where = text.splitlines()[0]
            if found := parsed(text):
                out.append(Entry(*found, notebook.name, cell["id"], where))
    return out


def _recorded_where(notebook: Path) -> str:
    """Where the outputs of the course's own notebook were made: GPU, date, versions."""
    about = json.loads(notebook.read_text())["metadata"].get("helpers", {})
    if about.get("mode") != "gpu":
        return f"figures of the record: {records.label(records.load()['machine'])}"
    return records.label({"gpu": about["gpu"], "date": about["date"], **about["versions"]})


@dataclass(frozen=True)
class Judged:
    """A claim of the ledger: what the course's notebooks show of it, and what the reader's copies do.

    here: the reader's entry for each of `course`, None where the copy has not been run on a GPU.
    """

    key: str
    claim: Claim
    course: tuple[Entry, ...]
    here: tuple[Entry | None, ...]

    @property
    def verdict(self) -> str:
        return judged(self.claim, (result for entry in self.course for result in entry.results))

    @property
    def verdict_here(self) -> str:
        """The verdict from the reader's figures alone; "–" before any lesson has given one."""
        results = [result for entry in self.here if entry for result in entry.results]
        return judged(self.claim, results) if results else "–"

    def rows(self) -> list[dict]:
        """A line a test: the reader's figure beside the recorded one."""
        out = []
        for entry, mine in zip(self.course, self.here, strict=True):
            values = {row["test"]: row for row in mine.rows} if mine else {}
            for row in entry.rows:
                own = values.get(row["test"], {})
                out.append(
                    {
                        "for": entry.rung,
                        "test": row["test"],
                        "here": own.get("value", "–"),
                        "recorded": row["value"],
                        "threshold": row["threshold"],
                        "holds here": own.get("holds", "–"),
                        "holds": row["holds"],
                        "note": row["note"],
                    }
                )
        return [row if any(r["for"] for r in out) else {k: v for k, v in row.items() if k != "for"} for row in out]


_ABOUT = (
    f"Statements of two articles: {'; '.join(f'the {name} article, on {what}' for name, what in ARTICLES.items())}. "
    "A course in notebooks put each to the test.",
    f"A verdict follows from figures and thresholds. {HOLDS}: every test does; {FAILS}: none does; {DEPENDS}: some do; "
    f"{NOT_TESTABLE}: no experiment of a course can say. What is recorded was measured for the course, what stands "
    "under “here” by whoever saved this file. Links lead to the cells where the file lies beside the notebooks.",
)
"""What someone has to know who is handed the file alone."""


@dataclass(frozen=True)
class Ledger:
    """Every claim with its verdict; a table that unfolds in a notebook, text elsewhere, and a file to share."""

    claims: tuple[Judged, ...]
    sources: dict[str, str]
    """Where the outputs of each of the course's notebooks were made."""

    @property
    def missing(self) -> list[str]:
        """Claims that no lesson judges yet."""
        return [each.key for each in self.claims if not each.course and not each.claim.untestable]

    def rows(self) -> list[dict]:
        """A line a claim."""
        return [
            {
                "claim": each.key,
                "statement": each.claim.statement,
                "article": each.claim.article,
                "judged in": ", ".join(dict.fromkeys(entry.lesson for entry in each.course)) or "–",
                "verdict here": each.verdict_here,
                "verdict, recorded": each.verdict,
            }
            for each in self.claims
        ]

    def markdown(self) -> str:
        """The whole ledger as Markdown: a section a claim. Links lead to the cells where it lies beside the lessons."""
        out = ["# The claims ledger", "", *(f"{line}\n" for line in _ABOUT), *_pipes(self.rows())]
        for each in self.claims:
            out += ["", f"## {each.key}: {each.verdict}", "", f"{each.claim.statement} ({each.claim.source}.)", ""]
            if each.claim.untestable:
                out += [f"Not testable: {each.claim.untestable}.", ""]
            for entry, mine in zip(each.course, each.here, strict=True):
                out.append(f"- [{entry.notebook}, cell {entry.cell}]({entry.link}). {self._from(entry, mine)}")
            out += ["", *_pipes(each.rows())] if each.course else []
        return "\n".join(out) + "\n"

    def html(self) -> str:
        """The whole ledger as HTML: each claim unfolds to its tests. Needs no other file."""
        out = []
        for each in self.claims:
            own = "" if each.verdict_here == "–" else f"; here: {each.verdict_here}"
            out.append(
                f"<details><summary><b>{html.escape(each.verdict)}</b>{html.escape(own)} · <code>{each.key}</code>: "
                f"{html.escape(each.claim.statement)} <i>({html.escape(each.claim.source)})</i></summary>"
            )
            if each.claim.untestable:
                out.append(show.paragraph(f"Not testable: {each.claim.untestable}."))
            for entry, mine in zip(each.course, each.here, strict=True):
                place = f'<a href="{entry.link}">{entry.notebook}, cell {entry.cell}</a>'
                out.append(f"<p>{place}. {html.escape(self._from(entry, mine))}</p>")
            if each.course:
                out.append(show.table(each.rows()).html)
            out.append("</details>")
        return "\n".join(out)

    def _from(self, entry: Entry, mine: Entry | None) -> str:
        here = f"Here: {mine.where}." if mine else "Here: not run on a GPU yet."
        return f"Recorded: {self.sources[entry.notebook]}. {here}"

    def save(self, path: Path | str) -> Path:
        """Write the ledger to a file to share, HTML or Markdown by its suffix. Raises ValueError for another."""
        path = Path(path)
        if path.suffix not in (".html", ".md"):
            raise ValueError(f"the ledger is written as .html or .md, not as {path.name}")
        head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>The claims ledger</title>'
        style = "<style>body{font-family:sans-serif;max-width:70em;margin:2em auto}details{margin:.5em 0}</style>"
        about = "\n".join(f"<p>{html.escape(line)}</p>" for line in _ABOUT)
        page = f"{head}{style}<h1>The claims ledger</h1>\n{about}\n{self.html()}\n</html>\n"
        path.write_text(page if path.suffix == ".html" else self.markdown())
        return path

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/html": self.html(), "text/plain": str(self)}

    def __str__(self) -> str:
        return str(show.table(self.rows(), caption=f"{len(self.claims)} claims"))


def ledger(course: Path = ROOT / "notebooks", mine: Path | None = WORK / "notebooks") -> Ledger:
    """The ledger of all of `CLAIMS`, from saved notebooks.

    course: the folder of the course's lessons. mine: that of the reader's copies; a copy counts once its outputs come
    from a GPU and are not those that it was copied with.
    """
    found: dict[str, list[tuple[Entry, Entry | None]]] = {key: [] for key in CLAIMS}
    sources = {}
    for path in sorted(course.glob("*.ipynb")):
        own, sources[path.name] = {}, _recorded_where(path)
        if mine and (copy := mine / path.name).exists():
            own = {(e.key, e.rung): e for e in entries(copy) if e.where}
        for entry in filter(lambda entry: entry.rows, entries(path)):
            here = own.get((entry.key, entry.rung))
            found[entry.key].append((entry, None if here == entry else here))
    judgements = (
        Judged(key, CLAIMS[key], tuple(e for e, _ in pairs), tuple(h for _, h in pairs)) for key, pairs in found.items()
    )
    return Ledger(tuple(judgements), sources)


def _pipes(rows: list[dict]) -> list[str]:
    """Lines of a table in Markdown."""
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def line(cells):
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return [line(columns), line("---" for _ in columns), *(line(row.get(c, "") for c in columns) for row in rows)]


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _spelled(value) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else show.number(value)
