"""Judge the answers in many notebooks: a row an exercise, whatever the notebooks hold.

Several worker processes judge one answer each at a time. An answer that hangs costs its exercise's time limit, and
each further one of the same notebook a smaller share of its own, so that a folder ends in a bounded time.
"""

import csv
import json
import multiprocessing
import os
import re
import signal
import sys
import textwrap
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import psutil

from . import exercises, machine

MOST_WORKERS = 8
WORKER_BYTES, WORKER_GPU_BYTES = 3 << 30, 16 << 30
"""Free memory for each worker, for what it forks answers from and the largest cases; and of a GPU's."""

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


def grade(paths: Iterable[Path], told: Callable[[int, int, Row], None] | None = None) -> list[Row]:
    """A row for each exercise of each notebook's lab, in order. told: called with (rows done, rows in all, a row)."""
    rows, jobs = {}, []
    for path in paths:
        wanted = asked(path)
        if isinstance(wanted, Row):
            rows[path, ""] = wanted
            continue
        jobs += [(path, exercise) for exercise in wanted]
        rows |= {(path, exercise.name): None for exercise in wanted}
    _Room(jobs, rows, told).work()
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
        if not path.stat().st_size:
            return _broken(path, "syntax", "The file is empty.")
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        graded = [str(cell.get("metadata", {}).get("nbgrader", {}).get("grade_id", "")) for cell in cells]
    except OSError as error:
        return _broken(path, "exception", f"The file cannot be read: {error.strerror}.")
    except ValueError as error:  # of JSON, or of UTF-8
        return _broken(path, "syntax", f"The file is not JSON: {error}.")
    except (KeyError, TypeError, AttributeError):
        return _broken(path, "exception", "The file is JSON, but no notebook.")
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
    """Threads, each with a worker process, that share the jobs and put their rows in place."""

    def __init__(self, jobs: list[tuple[Path, exercises.Exercise]], rows: dict, told: Callable | None):
        self.jobs, self.rows, self.told, self.total = deque(jobs), rows, told, len(jobs)
        self.hung: Counter[Path] = Counter()
        self.lock, self.workers, self.closed = threading.Lock(), [], False

    def work(self) -> None:
        most = [os.cpu_count() or 1, MOST_WORKERS, self.total, psutil.virtual_memory().available // WORKER_BYTES]
        if machine.gpu():
            most.append(machine.here().free_bytes() // WORKER_GPU_BYTES)
        count = max(1, min(most))
        threads = [threading.Thread(target=self._drain, daemon=True) for _ in range(count if self.total else 0)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # also when the instructor interrupts
            with self.lock:
                self.closed = True
                for worker in self.workers:
                    worker.process.terminate()
                for worker in self.workers:
                    worker.process.join(10)
                    worker.process.kill()
                    worker.process.join()

    def _drain(self) -> None:
        worker = self._hired()
        while True:
            with self.lock:
                if self.closed or not self.jobs:
                    return
                path, exercise = self.jobs.popleft()
                share = max(LEAST_SHARE, 1 / (1 + self.hung[path]))
            row = worker.judge(path, exercise, share)
            if row is None and not self.closed:
                worker = self._hired()
                row = worker.judge(path, exercise, share)  # once more: others may have used up the memory
            if row is None and not self.closed:
                worker = self._hired()
                row = Row(str(path), exercise.name, False, "crash", "It ended the process that judged it, twice.", 0.0)
            with self.lock:
                if self.closed:
                    return
                if row.kind == "timeout":
                    self.hung[path] += 1
                self.rows[path, exercise.name] = row
                if self.told:
                    self.told(self.total - sum(r is None for r in self.rows.values()), self.total, row)

    def _hired(self) -> "_Worker":
        worker = _Worker()
        with self.lock:
            self.workers.append(worker)
        return worker


class _Worker:
    """A process that judges answers, one after another."""

    def __init__(self):
        spawning = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawning.Pipe()
        self.process = spawning.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def judge(self, path: Path, exercise: exercises.Exercise, share: float) -> Row | None:
        """The row for one answer; None where the process died over it."""
        try:
            self.pipe.send((path, exercise.name, share))
            return self.pipe.recv()
        except (EOFError, OSError):
            return None


def _serve(pipe) -> None:
    """What a worker does until its pipe closes. What it prints is not for the instructor's table."""
    os.setsid()  # Ctrl-C goes to the parent, which ends its workers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # in order: what they forked ends first
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from . import checks

    while True:
        try:
            path, name, share = pipe.recv()
        except EOFError:
            return
        exercise = exercises.every()[name]
        try:
            verdict = checks.check_file(exercise, path, seconds=exercise.seconds * share)
        except Exception as error:  # a fault of the judge is nobody's answer, and the other rows must come
            message = f"It could not be judged: {type(error).__name__}: {error}"
            pipe.send(Row(str(path), name, None, "environment", message, 0.0))
        else:
            pipe.send(_row(path, verdict, share))


def _row(path: Path, verdict, share: float) -> Row:
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


# ---- out ----------------------------------------------------------------------------------------------------------


def save(rows: list[Row], path: Path) -> None:
    """Write the rows as CSV; passed is true, false or empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, [field.name for field in fields(Row)])
        out.writeheader()
        for row in rows:
            passed = "" if row.passed is None else str(row.passed).lower()
            out.writerow({**asdict(row), "passed": passed})


def shown(rows: list[Row]) -> list[dict]:
    """The rows for a terminal: messages in one short line, passed in words."""
    words = {True: "passed", False: "no", None: "not judged"}
    return [{**asdict(row), "passed": words[row.passed], "message": textwrap.shorten(row.message, 90)} for row in rows]
