"""Judge the answers in many notebooks: a row an exercise, whatever the notebooks hold.

Several processes judge one answer each at a time, here or on a cluster. An answer that hangs costs its exercise's
time limit, and each further one of the same notebook a smaller share of its own, so that a folder ends in a bounded
time.
"""

import csv
import json
import os
import re
import stat
import sys
import textwrap
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import psutil

from . import checks, cluster, exercises, machine, room
from .desk import Desk, Ended

MOST_WORKERS = 8
WORKER_BYTES, WORKER_GPU_BYTES = 3 << 30, 16 << 30
"""Free memory for each desk, for what it forks answers from and the largest cases; and of a GPU's."""

MOST_BYTES, MOST_CODE = 256 << 20, 256 << 10
"""Of a notebook's file, outputs and all, and of the code in its cells: ten times what the longest solution has."""

LEAST_SHARE = 1 / 3
"""Of an exercise's time limit: what is left of it for a notebook that hangs again and again."""

CHECKED = re.compile(r"""\bcheck\(\s*["']([\w-]+)["']""")


@dataclass(frozen=True)
class Row:
    """What is said of one answer. exercise is "" where no answer could be found; passed None: not judged here."""

    notebook: str
    exercise: str
    passed: bool | None
    kind: str
    message: str
    seconds: float


def grade(
    paths: Iterable[Path],
    told: Callable[[int, int, Row], None] | None = None,
    journal: Path | None = None,
    address: str = "",
) -> list[Row]:
    """A row for each exercise of each notebook's lab, in order. told: called with (rows done, rows in all, a row).

    journal: a file in which rows stand as they come, and from which a run that was broken off goes on. address: of a
    Dask scheduler whose workers judge. Raises `machine.NotReady` where that is gone; what was judged is in the journal.
    """
    rows, jobs = {}, []
    for path in paths:
        wanted = asked(path)
        if isinstance(wanted, Row):
            rows[path, ""] = wanted
            continue
        jobs += [(path, exercise) for exercise in wanted]
        rows |= {(path, exercise.name): None for exercise in wanted}
    kept = Journal(journal)
    with cluster.joined(address) if address else nullcontext() as there:
        _Room(jobs, rows, told, kept).work(there)
    return list(rows.values())


def found(paths: Iterable[Path]) -> list[Path]:
    """The notebooks that are meant: files as they are, of folders all that they hold, save in hidden folders."""
    out = []
    for path in paths:
        inside = sorted(path.rglob("*.ipynb")) if path.is_dir() else [path]
        out += [p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    return list(dict.fromkeys(out))


def asked(path: Path) -> list[exercises.Exercise] | Row:
    """The exercises of a notebook's lab: by its file name, else by what its cells check. A row where there are none."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):  # whose text it leads to, nobody knows; a pipe never ends
            return _broken(path, "exception", "It is a link or no plain file: the notebook itself must be handed in.")
        if not found.st_size:
            return _broken(path, "syntax", "The file is empty.")
        if found.st_size > MOST_BYTES:
            said = f"The file has {found.st_size >> 20} MB, more than {MOST_BYTES >> 20}: save it without outputs."
            return _broken(path, "memory", said)
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        graded = [str(cell.get("metadata", {}).get("nbgrader", {}).get("grade_id", "")) for cell in cells]
    except OSError as error:
        return _broken(path, "exception", f"The file cannot be read: {error.strerror}.")
    except ValueError as error:  # of JSON, or of UTF-8
        return _broken(path, "syntax", f"The file is not JSON: {error}.")
    except (KeyError, TypeError, AttributeError, RecursionError):
        return _broken(path, "exception", "The file is JSON, but no notebook.")
    if (length := sum(map(len, sources))) > MOST_CODE:
        return _broken(path, "memory", f"Its cells hold {length:,} characters of code, more than {MOST_CODE:,}.")
    every = exercises.every()
    labs = {e.lab for e in every.values() if e.lab in path.stem}
    if not labs:
        names = {name for source in sources for name in CHECKED.findall(source)}
        names |= {name.removesuffix("-check") for name in graded}
        labs = {every[name].lab for name in names & set(every)}
    if not labs:
        return _broken(path, "exception", "No cell of it checks an exercise of the course.")
    return [e for e in every.values() if e.lab in labs]


def _broken(path: Path, kind: str, message: str) -> Row:
    return Row(str(path), "", False, kind, message, 0.0)


# ---- workers ------------------------------------------------------------------------------------------------------


class _Room:
    """Threads, each with a desk of its own or a place at a cluster's, that share the jobs and put rows in place."""

    def __init__(self, jobs: list[tuple[Path, exercises.Exercise]], rows: dict, told: Callable | None, kept: "Journal"):
        self.jobs, self.rows, self.told, self.total, self.kept = deque(jobs), rows, told, len(jobs), kept
        self.hung: Counter[Path] = Counter()
        self.lock, self.desks, self.closed, self.problem = threading.Lock(), [], False, None

    def work(self, there: cluster.Cluster | None) -> None:
        most = [os.cpu_count() or 1, MOST_WORKERS, psutil.virtual_memory().available // WORKER_BYTES]
        if machine.gpu():
            most.append(machine.here().free_bytes() // WORKER_GPU_BYTES)
        count = 2 * len(there.fit) if there else max(1, min(most))  # so that no worker waits for its next answer
        threads = [threading.Thread(target=self._drain, args=(there,), daemon=True) for _ in range(count)]
        try:
            for thread in threads[: self.total]:
                thread.start()
            for thread in threads[: self.total]:
                thread.join()
        finally:  # also when the instructor interrupts
            with self.lock:
                self.closed = True
                for desk in self.desks:
                    desk.close()
        if self.problem:
            raise self.problem

    def _drain(self, there: cluster.Cluster | None) -> None:
        desk = None if there else self._desk()
        while True:
            with self.lock:
                if self.closed or not self.jobs:
                    return
                path, exercise = self.jobs.popleft()
                share = max(LEAST_SHARE, 1 / (1 + self.hung[path]))
            text = None
            try:
                text = checks.text_or_verdict(exercise, path)
                row = self.kept.row(path, exercise, text, there) or _row(
                    path, self._verdict(exercise, text, exercise.seconds * share, there, desk), share
                )
            except machine.NotReady as problem:  # the cluster is gone: what is judged is kept
                with self.lock:
                    self.closed, self.problem = True, problem
                return
            except Exception as error:  # a file that vanished, say: a thread that ended over it would lose its rows
                row = _row(path, _unjudged(exercise.name, error), share)
            with self.lock:
                if self.closed:
                    return
                if row.kind == "timeout":
                    self.hung[path] += 1
                self.rows[path, exercise.name] = row
                self.kept.keep(row, exercise, text, there)
                if self.told:
                    self.told(self.total - sum(r is None for r in self.rows.values()), self.total, row)

    def _verdict(self, exercise, text, seconds, there, desk) -> checks.Verdict:
        if isinstance(text, checks.Verdict):
            return text
        if there:
            return checks.there(there, exercise, text, seconds=seconds)
        try:
            return desk.do("grading.judged", exercise.name, text, seconds=seconds)
        except Ended:
            return checks.crashed(exercise.name, machine.here().mode)

    def _desk(self) -> Desk:
        desk = Desk()
        with self.lock:
            self.desks.append(desk)
        return desk


def judged(name: str, text: str, mode: str = "", **options) -> checks.Verdict:
    """The verdict on an answer; a fault of the judge is nobody's answer, and the other rows must come.

    mode: what a cluster's worker offers, "gpu" or "cpu". Raises `cluster.Unfit` where this is another.
    """
    if mode and mode != machine.here().mode:
        raise cluster.Unfit(f"it offers a {mode.upper()}, and it is in {machine.here().mode.upper()} mode")
    try:
        return checks.judge(exercises.every()[name], text, **options)
    except Exception as error:
        return _unjudged(name, error)


def _unjudged(name: str, error: Exception) -> checks.Verdict:
    said = f"It could not be judged: {type(error).__name__}: {error}"
    return checks.Verdict(name, None, (checks.Finding("environment", said),), machine.here().mode, 0.0)


def _row(path: Path, verdict: checks.Verdict, share: float) -> Row:
    first = verdict.findings[0] if verdict.findings else None
    row = Row(
        str(path),
        verdict.exercise,
        verdict.passed,
        first.kind if first else "",
        first.message if first else verdict.headline,
        round(verdict.seconds, 3),
    )
    if row.kind == "timeout" and share < 1:
        early = f"It had {share:.0%} of its time, since others of this notebook hung; judge it alone to give it all."
        return replace(row, message=f"{row.message} {early}")
    return row


# ---- what is kept while it goes on ----------------------------------------------------------------------------------


class Journal:
    """Rows as they come, a line of JSON each, in a file that `save` removes.

    A run that was broken off finds in it what was judged, and judges the rest: a row is taken over where answer,
    exercise, code of helpers and mode are the same. What could not be judged is not kept.
    """

    def __init__(self, path: Path | None):
        self.path, self.rows, self.full = path, {}, ""
        before = path.read_text(encoding="utf-8") if path and path.exists() else ""
        self.begin = "\n" if before and not before.endswith("\n") else ""  # after a line that was broken off
        for line in before.splitlines():
            try:
                entry = json.loads(line)
                self.rows[entry["of"]] = Row(**entry["row"])
            except (ValueError, KeyError, TypeError):  # the run was broken off in this line
                continue

    def row(self, path: Path, exercise, text, there) -> Row | None:
        return self.rows.get(self._of(path, exercise, text, there))

    def keep(self, row: Row, exercise, text, there) -> None:
        if self.path is None or self.full or row.passed is None:
            return
        if (of := self._of(row.notebook, exercise, text, there)) in self.rows:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(self.begin + json.dumps({"of": of, "row": asdict(row)}) + "\n")
                self.begin = ""
        except OSError as error:
            self.full = f"{self.path} cannot be written ({error.strerror}): if this run is broken off, it begins anew."
            print(self.full, file=sys.stderr)
            room.log(self.full)

    @staticmethod
    def _of(path, exercise, text, there) -> str:
        mode = there.kind if there else machine.here().mode.upper()
        what = text if isinstance(text, str) else text.data()["findings"]
        return cluster.digest(str(path), exercise.name, what, mode)


# ---- out ----------------------------------------------------------------------------------------------------------


def save(rows: list[Row], path: Path, journal: Path | None = None) -> str:
    """Write the rows as CSV, passed being true, false or empty, and remove the journal. Returns why it could not be
    written; empty where it was."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # names of files may be any bytes, and messages hold what an answer said
        with partial.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            out = csv.DictWriter(file, [field.name for field in fields(Row)])
            out.writeheader()
            for row in rows:
                passed = "" if row.passed is None else str(row.passed).lower()
                out.writerow({**asdict(row), "passed": passed})
        partial.replace(path)
    except OSError as error:
        said = f"{path} could not be written ({error.strerror}): its rows stand above; the same command tries again."
        room.log(said)
        return said
    if journal:
        journal.unlink(missing_ok=True)
    return ""


def shown(rows: list[Row]) -> list[dict]:
    """The rows for a terminal: messages in one short line, passed in words."""
    words = {True: "passed", False: "no", None: "not judged"}
    return [{**asdict(row), "passed": words[row.passed], "message": textwrap.shorten(row.message, 90)} for row in rows]
