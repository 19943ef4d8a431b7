"""What `make test-gpu` runs: every lesson, lab, solution, answer and test, in GPU mode; in parts, where one is named.

`python -m tests.on_gpu [--part 2/4]`. Each item is a program of its own, and several run at a time. What passed, in how
many seconds, where and with what, stands in helpers/records/tests/GPU.json, written after each item: what passed with
this code on this GPU and with these versions is not run again, so that a run that was broken off goes on.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import psutil

from helpers import ROOT, copies, exercises, machine, records
from tests import answers

FOLDERS = ("notebooks", "labs", "solutions")
TOGETHER, FEW = 30, 12
"""Answers to one exercise that a process judges, and of one of `SLOW`; more of them are shared among several."""

SLOW = (
    "custom-operator", "fusable-norm", "grouped-launch", "max-operator", "paged-decode", "quantise-cache",
    "specialised-window", "tiled-product", "two-stages", "weight-gradient",
)  # fmt: skip
"""Exercises whose answers take seven seconds each, or more."""

START, ANSWER, BRIEF_ANSWER = 15, 4, 1.5
"""Seconds that a process of answers takes to start, and about those of an answer: of a kernel; of a call of the
library, a choice or a prediction. A guess only where none are recorded."""

LESSONS = {
    "01_measuring": 70, "11_mojo_max": 150, "12_choosing": 35, "12_2_dispatch": 120, "12_3_models": 60, "13_room": 60,
}  # fmt: skip
"""Guesses for lessons of which no seconds are recorded."""

PART_MINUTES = 8.7
"""What a part may take: what would not end by then is not begun, and what has not ended is stopped and left over."""

ITEM_SECONDS = 480
JOB_CPUS, JOB_BYTES, JOB_GPU_BYTES = 8 / 7, 6 << 30, 9 << 30
"""What each of several items at a time takes of a machine's cores, free memory, and free memory of a GPU."""

LESSONS_AT_A_TIME = 3
"""On each GPU: they time what they run, for which everybody else must wait."""

NEEDS = {
    "tests/test_browser.py": ("jupyterlab",),
    "tests/test_install.py": ("make", "ensurepip"),
    "tests/test_jupyterlab.py": ("jupyterlab",),
    "tests/test_project.py": ("make", "ruff"),
}
"""Programs and packages without which a file of tests says nothing; a GPU machine may lack what starts the lab."""

SAID = 300
"""Characters of an item's last line that are kept."""


@dataclass(frozen=True)
class Item:
    """One program: `command` for this Python. guess: its seconds, where none are recorded."""

    name: str
    command: tuple[str, ...]
    guess: float

    @property
    def is_lesson(self) -> bool:
        return self.name.startswith("notebooks/")

    @property
    def lacks(self) -> str:
        """What it needs and this machine does not have."""
        absent = (n for n in NEEDS.get(self.name, ()) if not (shutil.which(n) or importlib.util.find_spec(n)))
        return ", ".join(absent)


def items() -> list[Item]:
    """Everything: notebooks under nbval, the answers to each exercise, each file of tests."""
    pytest, every, found = ("-m", "pytest", "-q", "-p", "no:cacheprovider"), exercises.every(), []
    for folder, guess in zip(FOLDERS, (80, 30, 60), strict=True):
        for path in sorted((ROOT / folder).glob("*.ipynb")):
            command = (*pytest, "-p", "tests.nbval_fixes", "--nbval-lax", str(path))
            seconds = LESSONS.get(path.stem, guess) if folder == "notebooks" else guess
            found.append(Item(f"{folder}/{path.name}", command, seconds))
    for name, count in Counter(answer.exercise for answer in answers.written()).items():
        shares = math.ceil(count / (FEW if name in SLOW else TOGETHER))
        for i in range(1, shares + 1):
            title = f"answers/{name}" + f", {i} of {shares}" * (shares > 1)
            brief = every[name].form in ("choice", "prediction") or every[name].rung == "library"
            guess = START + (BRIEF_ANSWER if brief else ANSWER) * count / shares
            found.append(Item(title, ("-m", "tests.answers", name, "--share", f"{i}/{shares}"), guess))
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        command = (*pytest, str(path))
        if path.name == "test_mutants.py":  # what it judges are items of their own, and cells of solutions/
            command += ("-k", "not is_judged_as_it_should_be and not courses_own_answer")
        text = path.read_text()
        guess = 15 + text.count("\ndef test_") + 10 * text.count("mark.slow")  # those that may be long begin early
        found.append(Item(f"tests/{path.name}", command, guess))
    return found


def share(everything: list[Item], weights: dict[str, float], part: int, parts: int) -> list[Item]:
    """The items of one of several parts that take equally long: each, from the longest, goes where least is so far.

    Lessons are dealt out first, and stand first, since few of them run at a time: else they would be a part's end."""
    loads, chosen = [0.0] * parts, []
    for item in sorted(
        everything, key=lambda item: (not item.is_lesson, -weights.get(item.name, item.guess), item.name)
    ):
        least = loads.index(min(loads))
        loads[least] += weights.get(item.name, item.guess)
        if least == part - 1:
            chosen.append(item)
    return chosen


def code() -> str:
    """16 hex digits over what the items run: all code of the course and of its tests, in notebooks too."""
    digest = hashlib.sha256()
    for folder in ("helpers", "tests", *FOLDERS):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix == ".ipynb":
                cells = nbformat.read(path, as_version=4).cells
                text = "\0".join(cell.source for cell in cells if cell.cell_type == "code").encode()
            elif path.suffix in (".py", ".toml", ".cu", ".cuh", ".h", ".mojo"):
                text = path.read_bytes()
            else:
                continue
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + text)
    return digest.hexdigest()[:16]


def commit() -> str:
    """The commit that is checked out, "-dirty" where files differ; "" where git does not know."""
    line = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError):
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return ""


# ---- one item -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How an item ended. passed: None where the part's time was up, or this machine lacks what it needs. said: the last
    line of what it printed, or what is wrong; log: the end of what it printed."""

    passed: bool | None
    seconds: float
    said: str
    log: str = ""


def run(item: Item, env: dict[str, str], until: float = math.inf) -> Outcome:
    """Run an item in a session of its own, to its end or its time limit; `until`, by the monotonic clock, stops it."""
    began = time.monotonic()
    limit = min(ITEM_SECONDS, until - began)
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        here = dict(cwd=ROOT, env={**os.environ, **env}, stdout=printed, stderr=printed, stdin=subprocess.DEVNULL)
        with subprocess.Popen([sys.executable, *item.command], start_new_session=True, **here) as process:
            RUNNING.add(process.pid)
            try:
                status = process.wait(max(0, limit))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                RUNNING.discard(process.pid)
                end(process.pid)  # also what it left behind
        printed.seek(0)
        log = printed.read().strip()
    seconds = round(time.monotonic() - began, 1)
    if status is None and limit < ITEM_SECONDS:
        return Outcome(None, seconds, "the part's time was up")
    said = f"still running after {limit:g} s" if status is None else log.rpartition("\n")[2][:SAID]
    return Outcome(status == 0, seconds, said, log[-6000:])


RUNNING: set[int] = set()
"""The sessions of items that run now."""


def end(session: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


# ---- the summary --------------------------------------------------------------------------------------------------


class Summary:
    """The file of what passed: {"runs": {number: about}, "items": {name: {passed, seconds, said, run}}, "weights"}.

    A run's entry tells GPU, date, versions, commit, code, part and how it went. weights: seconds that parts are
    balanced by; they change only when everything has passed, since all parts of a run must draw the same borders.
    """

    def __init__(self, path: Path, about: dict):
        self.path = path
        saved = json.loads(path.read_text()) if path.exists() else {}
        self.runs, self.items = saved.get("runs", {}), saved.get("items", {})
        self.weights = saved.get("weights", {})
        self.about = about
        self.run = str(max(map(int, self.runs), default=0) + 1)
        self.runs[self.run] = about

    def holds(self, item: Item) -> bool:
        """Whether the item has passed with this code, on this GPU and with these versions."""
        entry = self.items.get(item.name)
        return bool(entry and entry["passed"]) and self._same(self.runs[entry["run"]])

    def _same(self, run: dict) -> bool:
        ours = {"date", "commit", "part", "jobs", "gpus", "seconds"}
        return all(run.get(key) == value for key, value in self.about.items() if key not in ours)

    def add(self, item: Item, outcome: Outcome) -> None:
        about = {"passed": outcome.passed, "seconds": outcome.seconds, "said": outcome.said, "run": self.run}
        self.items[item.name] = about

    def save(self, everything: list[Item]) -> None:
        """Write the file, without what is no item any more and runs that nothing is left of."""
        guesses = {item.name: item.guess for item in everything}
        self.items = {name: self.items[name] for name in guesses if name in self.items}
        if all(self.holds(item) or item.lacks for item in everything):
            self.weights = {name: entry["seconds"] for name, entry in self.items.items() if entry["passed"]}
        self.weights = {name: self.weights[name] for name in guesses if name in self.weights}
        used = {entry["run"] for entry in self.items.values()}
        runs = {number: about for number, about in self.runs.items() if number in used}
        text = {"runs": runs, "items": self.items, "weights": self.weights}
        copies.write(self.path, (json.dumps(text, indent=1, ensure_ascii=False) + "\n").encode())


# ---- all of them --------------------------------------------------------------------------------------------------


@dataclass
class Room:
    """Threads that run items in the order of `share`, each on the GPU that has least to do."""

    todo: list[Item]
    summary: Summary
    everything: list[Item]
    gpus: list[str]
    until: float
    expected: dict[str, float]
    busy: list[tuple[Item, str]] = field(default_factory=list)
    failed: list[Item] = field(default_factory=list)
    left: list[Item] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def work(self, jobs: int) -> None:
        threads = [threading.Thread(target=self._drain, args=(jobs,), daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            with self.changed:  # nothing is noted or begun any more
                for session in list(RUNNING):
                    end(session)
                raise SystemExit("Stopped; the same command goes on with what is left.") from None

    def _drain(self, jobs: int) -> None:
        while True:
            with self.changed:
                while self.todo and not (chosen := self._chosen()):
                    self.changed.wait()
                if not self.todo:
                    return
                item, gpu = chosen
                self.todo.remove(item)
                if time.monotonic() + min(self.expected[item.name], ITEM_SECONDS) > self.until:
                    self.left.append(item)
                    continue
                self.busy.append((item, gpu))
            threads = str(min(4, max(1, len(os.sched_getaffinity(0)) // jobs)))
            outcome = run(item, {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": threads} if gpu else {}, self.until)
            with self.changed:
                self.busy.remove((item, gpu))
                self.changed.notify_all()
                self._note(item, outcome)

    def _chosen(self) -> tuple[Item, str] | None:
        loads, lessons = Counter(gpu for _, gpu in self.busy), Counter(g for i, g in self.busy if i.is_lesson)
        for item in self.todo:
            free = [gpu for gpu in self.gpus if not item.is_lesson or lessons[gpu] < LESSONS_AT_A_TIME]
            if free:
                return item, min(free, key=lambda gpu: (loads[gpu], lessons[gpu]))
        return None

    def _note(self, item: Item, outcome: Outcome) -> None:
        if outcome.passed is None:
            self.left.append(item)
        else:
            self.summary.add(item, outcome)
            self.summary.save(self.everything)
        if outcome.passed is False:
            self.failed.append(item)
        word = {True: "ok", False: "FAILED", None: "left"}[outcome.passed]
        print(f"{word:6} {outcome.seconds:6.1f} s  {item.name}  {outcome.said}", flush=True)
        if outcome.passed is False:
            print("\n".join(f"       | {line}" for line in outcome.log.splitlines()[-40:]), flush=True)


def jobs_here(gpus: int) -> int:
    """How many items this machine runs at a time."""
    cpu = len(os.sched_getaffinity(0)) / JOB_CPUS
    room = psutil.virtual_memory().available / JOB_BYTES
    return max(1, int(min(cpu, room, gpus * machine.here().free_bytes() / JOB_GPU_BYTES)))


def visible() -> list[str]:
    """The GPUs that items may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.on_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the Ith of N parts that take equally long")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="items whose names have one of these")
    parser.add_argument("--again", action="store_true", help="run also what has passed already")
    parser.add_argument(
        "--list", action="store_true", help="say what would be run, and how long it is expected to take"
    )
    parser.add_argument("--minutes", type=float, metavar="M", help=f"stop after these; of a part {PART_MINUTES}")
    parser.add_argument("--jobs", type=int, metavar="N", help="items at a time; by default what fits this machine")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="in place of helpers/records/tests/GPU.json")
    parser.add_argument("--commit", default="", help="where git does not know it")
    options = parser.parse_args(arguments)
    part, parts = map(int, options.part.split("/"))
    if not 1 <= part <= parts:
        parser.error(f"there is no part {options.part}")
    if not machine.gpu():
        print(f"These tests need a GPU, and this is CPU mode: {machine.here().why}.", file=sys.stderr)
        return 1
    began = time.monotonic()
    minutes = options.minutes or (PART_MINUTES if parts > 1 else math.inf)
    gpus = visible()
    jobs = options.jobs or jobs_here(len(gpus))
    about = records.this_machine() | {"commit": options.commit or commit(), "code": code()}
    about |= {"part": options.part, "jobs": jobs, "gpus": len(gpus)}
    name = f"{machine.here().name.lower().replace(' ', '-')}.json"
    summary = Summary(options.summary or records.FOLDER / "tests" / name, about)
    everything = items()
    chosen = share(everything, summary.weights, part, parts)
    chosen = [item for item in chosen if not options.only or any(word in item.name for word in options.only)]
    todo = [item for item in chosen if options.again or not summary.holds(item)]
    expected = {item.name: summary.weights.get(item.name, item.guess) for item in everything}
    total = sum(expected[item.name] for item in todo)
    print(
        f"{len(todo)} of {len(chosen)} items are to be run, {jobs} at a time: {total / 60 / jobs:.0f} minutes or more"
    )
    if options.list:
        print("\n".join(f"{expected[item.name]:6.0f} s  {item.name}" for item in todo))
        return 0
    for item in todo:
        if item.lacks:
            summary.add(item, Outcome(None, 0.0, f"not run: there is no {item.lacks} here"))
    todo = [item for item in todo if not item.lacks]
    room = Room(list(todo), summary, everything, gpus, began + 60 * minutes, expected)
    room.work(jobs)
    if room.failed and jobs > 1:  # once more, alone: others may have taken its time or its memory
        room.todo, room.failed = room.failed, []
        room.work(1)
    about["seconds"] = round(time.monotonic() - began, 1)
    summary.save(everything)
    ran = [summary.items[item.name]["passed"] for item in todo if item not in room.left]
    print(f"{sum(ran)} passed, {len(ran) - sum(ran)} failed, {len(room.left)} left over, in {about['seconds']:.0f} s")
    for item in room.failed:
        print(f"failed: {item.name}: {summary.items[item.name]['said']}")
    if room.left:
        print(f"left over: {', '.join(item.name for item in room.left)}; the same command goes on with them")
    return 1 if room.failed or room.left else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it ends its items as by Ctrl-C
    sys.exit(main(sys.argv[1:]))
