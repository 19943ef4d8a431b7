"""Figures measured on named GPUs, and the one way for a lesson to show a figure.

`figures(measure, "id", ...)` measures on a GPU; in CPU mode it returns what was recorded, labelled with its GPU,
date and versions. Ids are string literals, so that a test can find each in exactly one cell. The file of a GPU is
`{"machine": {…}, "figures": {id: {"value", "unit", "low", "high", "n", "note"}}, "texts": {id: [line, …]}}`.
"""

import ast
import datetime
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path

from filelock import FileLock

from .. import ROOT, machine, show

FOLDER = Path(__file__).parent
REFERENCE = FOLDER / "nvidia-h200.json"
"""The record that CPU mode shows."""
OUTPUTS = FOLDER / "outputs.json"
"""What `output` shows where a package is missing; `HELPERS_OUTPUTS=FILE` has it written."""
NOT_YET = "not recorded yet"
"""What is said of a figure without a record, and of where figures were made of which none has one."""


@dataclass(frozen=True)
class Measurement:
    """A figure: the median of n samples, and their quartiles `low` and `high`, all in `unit`."""

    value: float
    unit: str
    low: float
    high: float
    n: int = 1
    note: str = ""

    @classmethod
    def exact(cls, value: float, unit: str, note: str = "") -> "Measurement":
        """A figure that is counted rather than sampled."""
        return cls(value, unit, value, value, 1, note)

    @property
    def resolved(self) -> bool:
        """Of a ratio: whether 1 lies outside its quartiles, so that one side is faster beyond the spread."""
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        spread = "" if self.low == self.high else f" ({show.number(self.low)} – {show.number(self.high)}, n={self.n})"
        return f"{show.number(self.value)} {self.unit}{spread}" + (f"; {self.note}" if self.note else "")


class Missing(LookupError):
    """A figure that no GPU has been recorded for."""


@dataclass(frozen=True)
class Figures(Mapping):
    """Measurements by id, with where they were made. `live`: measured by this very run."""

    values_by_id: dict[str, Measurement]
    live: bool
    where: str

    def __getitem__(self, key: str) -> Measurement:
        return self.values_by_id[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_id)

    def __len__(self) -> int:
        return len(self.values_by_id)

    def rows(self) -> list[dict]:
        return [
            {
                "figure": key,
                "value": "–" if math.isnan(m.value) else m.value,
                "unit": m.unit,
                "quartiles": f"{show.number(m.low)} – {show.number(m.high)}" if m.low < m.high else "",
                "n": m.n,
                "note": m.note,
            }
            for key, m in self.values_by_id.items()
        ]

    def _table(self):
        caption = f"{'Measured here' if self.live else 'Recorded'}: {self.where}"
        return show.table(self.rows(), caption=caption if self.where != NOT_YET else NOT_YET.capitalize())

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self._table()._repr_mimebundle_()

    def __str__(self) -> str:
        return str(self._table())


def figures(measure: Callable[[], Mapping[str, Measurement]], *ids: str, rarely: bool = False) -> Figures:
    """The figures `ids`: measured by `measure()` on a GPU, recorded ones in CPU mode. rarely: it takes minutes, or what
    not every reader has, so that recorded ones are shown unless `python -m helpers measure --only ID` asks for them.

    A GPU that cannot measure them (no permission to read its counters, say) shows the recorded ones too, and says
    so, unless a record is being made. Errors: ValueError where `measure` returns other ids than it declares; where
    recorded figures are shown as `recorded`.
    """
    held = rarely and set(ids) <= set(load()["figures"]) and not set(ids) & set(_only())
    if machine.gpu() and not held:
        try:
            measured = dict(measure())
        except machine.NotReady as missing:
            if os.environ.get("HELPERS_RECORD"):
                raise
            show.note(f"{missing} Recorded figures are shown instead.", kind="warning")
            return recorded(*ids)
        if set(measured) != set(ids):
            raise ValueError(
                f"declared but not measured: {sorted(set(ids) - set(measured))}; "
                f"measured but not declared: {sorted(set(measured) - set(ids))}"
            )
        found = {key: measured[key] for key in ids}
        _save("figures", {key: asdict(m) for key, m in found.items()})
        return Figures(found, True, label(this_machine()))
    return recorded(*ids)


def recorded(*ids: str, path: Path | None = None) -> Figures:
    """Figures from a record, the reference's by default, whatever the mode.

    A figure without a record is NaN, "not recorded yet", or raises `Missing` where HELPERS_RECORDS=strict.
    """
    record = load(path)
    missing = [key for key in ids if key not in record["figures"]]
    if missing and os.environ.get("HELPERS_RECORDS") == "strict":
        raise Missing(
            f"no record of {', '.join(missing)} in {(path or REFERENCE).name}: python -m helpers measure, on that GPU"
        )
    absent = {
        "value": math.nan,
        "unit": "",
        "low": math.nan,
        "high": math.nan,
        "n": 0,
        "note": NOT_YET,
    }
    found = {key: record["figures"].get(key, absent) for key in ids}
    fields = [f.name for f in dataclass_fields(Measurement)]
    values = {key: Measurement(**{f: entry[f] for f in fields}) for key, entry in found.items()}
    abouts = [record["figures"][key].get("made_with", record["machine"]) for key in ids if key not in missing]
    return Figures(values, False, "; ".join(dict.fromkeys(map(label, abouts))) or NOT_YET)


def figure(key: str, measure: Callable[[], Measurement]) -> Figures:
    """`figures` for a single id, whose `measure` returns the measurement itself."""
    return figures(lambda: {key: measure()}, key)


def text(key: str, make: Callable[[], str], *, rarely: bool = False) -> str:
    """Generated text that takes a GPU to make (a compiler's output, a tool's report): made there, recorded here.

    A GPU machine that lacks what it takes (`machine.NotReady`) shows the recorded text, as `figures` does. rarely:
    it takes minutes to make, so that a recorded one is kept unless `python -m helpers measure --only KEY` asks for it.
    """
    if machine.gpu() and not (rarely and _kept(key)):
        try:
            made = make()
        except machine.NotReady as missing:
            if os.environ.get("HELPERS_RECORD"):
                raise
            show.note(f"{missing} A recorded text is shown instead.", kind="warning")
        else:
            _save("texts", {key: made.splitlines()})
            return made
    record = load()
    if key not in record["texts"]:
        if os.environ.get("HELPERS_RECORDS") == "strict":
            raise Missing(f"no record of {key} in {REFERENCE.name}: python -m helpers measure, on that GPU")
        return f"({key}: {NOT_YET})"
    about = record["texts_made_with"].get(key, record["machine"])
    return f"[recorded: {label(about)}]\n" + "\n".join(record["texts"][key])


_told: set[str] = set()


def output(key: str, make: Callable[[], object]) -> "Output":
    """What takes no GPU to make but a package that may not be installed: made where it can be, recorded elsewhere.

    `make` returns plain data, such as JSON carries, or raises `machine.NotReady`: then the recorded data are taken,
    and a note says so with the command that mends it. Errors: what `make` raised, where nothing is recorded.
    """
    packages = ("apache-tvm", "jax", "nvidia-cutlass-dsl", "mojo-compiler", "max")
    about = {**this_machine(), **machine.installed(*packages)}
    try:
        value = json.loads(json.dumps(make()))
    except machine.NotReady as missing:
        entry = load(OUTPUTS)["texts"].get(key)
        if entry is None:
            raise
        if missing.sentence not in _told:  # once in a lesson
            show.note(f"{missing.sentence} What follows are recorded outputs. Mend: {missing.mend}", kind="warning")
            _told.add(missing.sentence)
        return Output(json.loads("".join(entry)), False, label(load(OUTPUTS)["texts_made_with"][key]))
    if path := os.environ.get("HELPERS_OUTPUTS"):
        path = ROOT / path  # the kernel runs in the notebook's folder
        with FileLock(f"{path}.lock"):
            record = load(path)
            record["texts"][key] = json.dumps(value, ensure_ascii=False, indent=1).splitlines()
            record["texts_made_with"][key] = about | {"gpu": f"made on {about['gpu']}"}
            kept = {name: dict(sorted(record[name].items())) for name in ("texts", "texts_made_with")}
            path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    return Output(value, True, label(about))


@dataclass(frozen=True)
class Output:
    """Data from `output`, whether they were made by this very run, and where they were made."""

    value: object
    live: bool
    where: str

    @property
    def caption(self) -> str:
        """For the end of a caption."""
        return "made here" if self.live else f"recorded: {self.where}"


def _only() -> list[str]:
    """What `python -m helpers measure --only` asks for."""
    return os.environ.get("HELPERS_ONLY", "").split()


def _kept(key: str) -> bool:
    """Whether a recorded text will do; where a record is being made, it is taken over if it is this GPU's."""
    record = load()
    if key not in record["texts"] or key in _only():
        return False
    if os.environ.get("HELPERS_RECORD"):
        if record["machine"]["gpu"] != machine.here().name:
            return False
        merge(Path(os.environ["HELPERS_RECORD"]), "texts", {key: record["texts"][key]},
              record["texts_made_with"].get(key, record["machine"]))  # fmt: skip
    return True


def load(path: Path | None = None) -> dict:
    """A GPU's record, the reference's by default; an empty one where the file does not exist yet."""
    path = path or REFERENCE
    empty = {"machine": {}, "figures": {}, "texts": {}, "texts_made_with": {}}
    return {**empty, **json.loads(path.read_text())} if path.exists() else empty


def this_machine() -> dict:
    """What a record says of the machine it was made on."""
    m = machine.here()
    return {"gpu": m.name, "date": datetime.date.today().isoformat(), **machine.versions()}


def label(about: dict) -> str:
    """One line: GPU, date, versions."""
    if not about:
        return "no record yet"
    rest = ", ".join(f"{k} {v}" for k, v in about.items() if k not in ("gpu", "date"))
    return f"{about['gpu']}, {about['date']}, {rest}"


def _save(kind: str, entries: dict) -> None:
    """Merge entries into the file that `python -m helpers measure` names in HELPERS_RECORD; else do nothing."""
    if path := os.environ.get("HELPERS_RECORD"):
        merge(Path(path), kind, entries, this_machine())


def merge(path: Path, kind: str, entries: dict, about: dict, code: str = "") -> None:
    """Write `entries` into the record at `path`; a figure is stamped with its date and the hash of its notebook's code.

    `machine` in the file tells the versions that all figures share; those of a later run with others carry their own,
    as "made_with", and texts in "texts_made_with". Errors: ValueError where the record is another GPU's.
    """
    with FileLock(f"{path}.lock"):
        record = load(path)
        if record["machine"] and record["machine"]["gpu"] != about["gpu"]:
            raise ValueError(f"{path} holds figures of a {record['machine']['gpu']}, not of a {about['gpu']}")
        texts_made_with = {key: record["texts_made_with"].get(key, record["machine"]) for key in record["texts"]}
        for key, entry in entries.items():
            stamp = {"date": about["date"], "code": code, "made_with": about}
            record[kind][key] = entry | stamp if kind == "figures" else entry
            if kind == "texts":
                texts_made_with[key] = about
        figures = record["figures"].values()
        made = [figure.get("made_with", record["machine"]) for figure in figures]
        if not record["machine"] or all(_versions(one) == _versions(about) for one in made):
            record["machine"] = about
        for figure in figures:
            if _versions(figure.get("made_with", {})) == _versions(record["machine"]):
                del figure["made_with"]
        others = {k: v for k, v in texts_made_with.items() if _versions(v) != _versions(record["machine"])}
        ordered = {"machine": record["machine"]} | {k: dict(sorted(record[k].items())) for k in ("figures", "texts")}
        if others:
            ordered["texts_made_with"] = dict(sorted(others.items()))
        path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def made_here(path: Path, ids: Iterable[str]) -> bool:
    """Whether the record at `path` has all of these figures, made on this GPU with the versions installed now."""
    record, now = load(path), _versions(this_machine())
    made = [record["figures"].get(key, {"made_with": {}}).get("made_with", record["machine"]) for key in ids]
    return all(_versions(about) == now for about in made)


def _versions(about: dict) -> dict:
    return {name: version for name, version in about.items() if name != "date"}


def declared(path: Path, calls: tuple[str, ...] = ()) -> dict[str, list[int]]:
    """The ids that a notebook or a `.py` declares, each with the indices of its cells: literals in calls of
    records.figures and its like, or in `calls`."""
    out: dict[str, list[int]] = {}
    text = path.read_text()
    cells = [{"cell_type": "code", "source": text}] if path.suffix == ".py" else json.loads(text)["cells"]
    for index, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        source = "\n".join("" if line.startswith(("%", "!")) else line for line in "".join(cell["source"]).splitlines())
        for node in ast.walk(ast.parse(source)):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) in (calls or _CALLS)):
                continue
            first = 1 if ast.unparse(node.func) == "records.figures" else 0
            for argument in node.args[first:] if first else node.args[:1]:
                if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                    raise ValueError(
                        f"{path.name}, cell {index}: an id must be a string literal: {ast.unparse(argument)}"
                    )
                out.setdefault(argument.value, []).append(index)
    return out


_CALLS = ("records.figure", "records.figures", "records.text")
