"""A class that never came: forty learners' answers, graded here and on a cluster of this machine's own processes.

It shows an instructor, the day before, that grading works on this machine, and it is where the figures `cluster.*` come
from. The answers are those of lab 01, which take a moment each: right, wrong, not written, hanging and crashing ones.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from . import ROOT, exercises, machine, notebooks
from .cluster import dask
from .records import Measurement

LAB = "01_measuring"
LEARNERS = 40
PARTS = {
    "wrong": "def {0}(*given):\n    return -1.0",
    "raises": "def {0}(*given):\n    return [][len(given)]",
    "unreadable": "def {0}(:\n    pass",
    "hangs": "def {0}(*given):\n    while True:\n        pass",
    "crashes": (
        "def {0}(*given):\n    deep = iter([1])\n    for _ in range(3 * 10**5):\n        deep = filter(None, deep)\n"
        "    return next(deep)"
    ),
}
"""What a learner may have written in place of an answer."""


def plan(learners: int = LEARNERS) -> list[tuple[str, ...]]:
    """For each learner what stands in place of each answer of the lab, "" for a right one. Few hang: it takes time."""
    count, kinds = len(names()), ("wrong", "raises", "crashes")
    out = [["" if (i + j) % 3 else kinds[i % 3] for j in range(count)] for i in range(learners)]
    out[1 % learners][0] = out[learners // 2][-1] = "hangs"
    out[-1][count // 2] = "unreadable"
    return [tuple(parts) for parts in out]


def names() -> list[str]:
    """The exercises of the lab."""
    return [e.name for e in exercises.every().values() if e.lab == LAB]


def hand_in(folder: Path, learners: int = LEARNERS) -> None:
    """Write the learners' notebooks."""
    for number, parts in enumerate(plan(learners)):
        notebook = notebooks.read(ROOT / "solutions" / f"{LAB}.ipynb")
        for name, part in zip(names(), parts, strict=True):
            entry = exercises.every()[name].entry
            for cell in notebook.cells:
                if part and cell.cell_type == "code" and f"def {entry}(" in cell.source:
                    cell.source = PARTS[part].format(entry)
        notebooks.save(notebook, folder / f"learner_{number:02}" / f"{LAB}.ipynb")


@dataclass(frozen=True)
class Worker:
    """A Dask worker's nanny, as this process started it."""

    nanny: subprocess.Popen

    def kill(self, whole: bool = False) -> None:
        """End the worker without warning, and with `whole` its nanny too, as if its machine were gone."""
        doomed = [self.pid, *[self.nanny.pid] * whole]
        for pid in reversed(doomed):
            os.kill(pid, signal.SIGKILL)

    @property
    def pid(self) -> int:
        """Of the worker that the nanny has now."""
        below = psutil.Process(self.nanny.pid).children()
        return next(p.pid for p in below if "spawn_main" in str(p.cmdline()))


Started = tuple[str, list[Worker]]


@contextlib.contextmanager
def cluster(kinds: list[str], preload: tuple[str, ...] = ()) -> Iterator[Started]:
    """A scheduler and workers ("CPU" or "GPU") on this machine; its address, and the workers, once they are there."""
    distributed = dask()
    env = {**os.environ, "PYTHONPATH": machine.python_path()}
    program = [sys.executable, "-m", "dask"]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(*line, **more):
            log = stack.enter_context((folder / "log").open("a"))
            started = subprocess.Popen([*program, *line], cwd=folder, env={**env, **more}, stdout=log, stderr=log)
            stack.callback(_ended, started)
            return started

        start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", "at.json")
        at = folder / "at.json"
        _until(at.exists, 60, folder)
        address = json.loads(at.read_text())["address"]
        workers = []
        for kind in kinds:
            more = [word for name in ("helpers.worker", *preload) for word in ("--preload", name)]
            # without a limit: Dask's own is this worker's share of the RAM, of which a machine may have little at first
            limits = ("--nthreads", "1", "--memory-limit", "0", "--resources", f"{kind}=1")
            line = ("worker", address, *limits, "--no-dashboard", *more)
            mode = {"HELPERS_MODE": "cpu"} if kind == "CPU" else {}
            workers.append(Worker(start(*line, "--local-directory", str(folder), **mode)))
        with distributed.Client(address, set_as_default=False) as client:
            _until(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == len(kinds), 180, folder)
        yield address, workers


def _until(there, seconds: float, folder: Path) -> None:
    end = time.monotonic() + seconds
    while not there():
        if time.monotonic() > end:
            raise machine.NotReady(f"Dask did not start in {seconds:.0f} s: {(folder / 'log').read_text()[-1000:]}")
        time.sleep(0.1)


def _ended(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Graded:
    """Verdicts by (notebook, exercise), each a list of all (passed, kind) that were given; seconds of the grading."""

    verdicts: dict[tuple[str, str], list[tuple]]
    seconds: float

    def lost(self, other: "Graded") -> list[str]:
        """The answers that have not exactly one verdict, that of `other`, each with both in words."""
        every = sorted(set(self.verdicts) | set(other.verdicts))
        pairs = [(key, self.verdicts.get(key, []), other.verdicts.get(key, [])) for key in every]
        return [
            f"{Path(notebook).parent.name}, {exercise}: {_said(mine)}, not {_said(theirs)}"
            for (notebook, exercise), mine, theirs in pairs
            if mine != theirs or len(mine) != 1
        ]


def _said(verdicts: list[tuple]) -> str:
    return " and ".join(kind or ("passed" if passed else "not judged") for passed, kind in verdicts) or "no verdict"


def graded(folder: Path, address: str = "", on_row=lambda done: None) -> Graded:
    """Grade what was handed in, on a cluster or here. on_row: called with the number of rows that are there."""
    from . import grading

    began = time.monotonic()
    rows = grading.grade(grading.found([folder]), lambda done, total, row: on_row(done), address=address)
    found: dict[tuple[str, str], list[tuple]] = {}
    for row in rows:
        found.setdefault((row.notebook, row.exercise), []).append((row.passed, row.kind))
    return Graded(found, time.monotonic() - began)


CLUSTERS = {"CPU": ["CPU", "CPU"], "GPU": ["GPU"]}
"""What is started: two workers in CPU mode, or one with a GPU."""


def figures(*kinds: str) -> dict[str, Measurement]:
    """`cluster.answers_per_minute.cpu`, `.gpu` and `cluster.lost`, with one worker killed in the middle of each run.
    kinds: of `CLUSTERS`; they are at work at the same time where each has four cores, and else one after another."""
    with tempfile.TemporaryDirectory() as folder:
        hand_in(Path(folder))
        here = graded(Path(folder))
        together = len(kinds) if (os.cpu_count() or 1) >= 4 * len(kinds) else 1
        with ThreadPoolExecutor(together) as pool:
            runs = list(pool.map(lambda kind: _killed(Path(folder), CLUSTERS[kind], whole=kind == "CPU"), kinds))
    answers, rates = LEARNERS * len(names()), {}
    for kind, there in zip(kinds, runs, strict=True):
        count = len(CLUSTERS[kind])
        note = f"{answers} answers, {count} worker{'s' * (count > 1)}, one killed in the middle"
        rates[f"cluster.answers_per_minute.{kind.lower()}"] = Measurement.exact(
            answers * 60 / there.seconds, "answers/min", note
        )
    lost = [said for there in runs for said in there.lost(here)]
    note = "; ".join(["without exactly one verdict, the same as without a cluster", *lost[:3]])
    return {**rates, "cluster.lost": Measurement.exact(len(lost), "answers", note)}


def _killed(folder: Path, kinds: list[str], whole: bool) -> Graded:
    """Grade on a cluster whose first worker is killed when half is done; whole: as in `Worker.kill`."""
    with cluster(kinds) as (address, workers):

        def kill(done):
            if done == LEARNERS * len(names()) // 2:
                workers[0].kill(whole)

        return graded(folder, address, kill)
