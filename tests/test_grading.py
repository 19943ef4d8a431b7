"""A class of thirty, some broken, hanging or cheating, is graded in a bounded time, with one row an exercise."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from helpers import exercises, grading, labs, notebooks

MINUTES = 5
ODD = ["", "[]", '{"cells": [', '{"cells": [{"cell_type": "code"}]}']
HANGS = "def {0}(*inputs):\n    while True:\n        pass"
SYNTAX = "def {0}(:\n    pass"
CHEATS = [
    "import os\n\n\ndef {0}(*inputs):\n    os._exit(0)",
    "import sys\n\n\ndef {0}(*inputs):\n    sys.exit(0)",
    'def {0}(*inputs):\n    print(\'{{"passed": true, "findings": []}}\')\n    return inputs[0]',
    "import helpers.exercises\n\n\ndef {0}(*inputs):\n    return helpers.exercises.every()",
]


def edited(source, path, text):
    """Save a copy of a solution in which every cell that binds an entry point has `text` in its place."""
    notebook, entries = notebooks.read(source), [e.entry for e in exercises.every().values() if e.lab == source.stem]
    for cell in notebook.cells:
        for entry in entries:
            bound = re.search(rf"^(?:(?:def|class) {entry}\b|{entry} = )", cell.source, re.MULTILINE)
            if bound and cell.cell_type == "code":
                cell.source = text.format(entry)
    notebooks.save(notebook, path)


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """Thirty notebooks, and what each of them is: the kind of its learner."""
    folder, kinds = tmp_path_factory.mktemp("room"), {}
    plan = ["solved"] * 8 + ["unsolved"] * 6 + ["cheats"] * 6 + ["hangs"] * 4 + ["odd"] * 4 + ["syntax"] * 2
    for number, kind in enumerate(plan):
        source = labs.sources()[number % len(labs.sources())]
        path = folder / f"{number:02}_{source.name}"
        kinds[str(path)] = kind
        if kind == "unsolved":
            notebooks.save(labs.built(notebooks.read(source)), path)
        elif kind == "odd":
            path.write_text(ODD[number % len(ODD)])
        elif kind == "solved":
            path.write_bytes(source.read_bytes())
        else:
            edited(source, path, {"hangs": HANGS, "cheats": CHEATS[number % len(CHEATS)], "syntax": SYNTAX}[kind])
    return folder, kinds


def gone(processes) -> bool:
    """Whether all these have ended, or do so within some seconds."""
    end = time.monotonic() + 10
    while (left := [p for p in processes if lives(p)]) and time.monotonic() < end:
        time.sleep(0.2)
    return not left


def lives(process) -> bool:
    """Python's own tracker of resources does not count, nor what only waits for init to take its exit status."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.slow
def test_thirty_notebooks_within_five_minutes(room):
    folder, kinds = room
    began, told, processes = time.monotonic(), [], set()

    def tell(*line):
        told.append(line)
        processes.update(set(psutil.Process().children(recursive=True)) - before)

    before = set(psutil.Process().children(recursive=True))
    rows = grading.grade(grading.found([folder]), tell)
    seconds = time.monotonic() - began
    assert seconds < 60 * MINUTES, f"{seconds:.0f} s on {os.cpu_count()} cores"
    every = exercises.every()
    for path, kind in kinds.items():
        names = [row.exercise for row in rows if row.notebook == path]
        assert names == ([""] if kind == "odd" else [name for name in every if every[name].lab in path])
    found = {kind: {(row.passed, row.kind) for row in rows if kinds[row.notebook] == kind} for kind in kinds.values()}
    assert found["unsolved"] == {(False, "not-attempted")}
    assert found["syntax"] <= {(False, "syntax"), (False, "exception")}
    assert found["odd"] == {(False, "syntax"), (False, "exception")}
    assert not any(passed for passed, _ in found["cheats"] | found["hangs"])
    assert (False, "timeout") in found["hangs"]
    assert not [row for row in rows if kinds[row.notebook] == "solved" and row.passed is False]
    assert [done for done, _, _ in told] == list(range(1, len(told) + 1))
    assert gone(processes)


@pytest.mark.slow
def test_interrupting_it_leaves_no_process(tmp_path):
    path = tmp_path / "01_measuring.ipynb"  # a kernel lab's are refused before they run, since they hold no kernel
    edited(labs.sources()[0], path, HANGS)
    line = [sys.executable, "-m", "helpers", "grade", path]
    env = notebooks.kernel_environment({})
    running = subprocess.Popen(line, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    try:
        end, busy = time.monotonic() + 60, []
        while time.monotonic() < end and not any(p.cpu_times().user > 1 for p in busy if "zygote" in str(p.cmdline())):
            time.sleep(0.5)
            busy = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=30)[1] == "Interrupted.\n"
        assert running.returncode == 130
        assert busy and gone(busy)
    finally:
        running.kill()
