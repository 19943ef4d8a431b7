"""A class of thirty, some broken, hanging or cheating, is graded in a bounded time, with one row an exercise."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from helpers import __main__, checks, exercises, grading, labs, machine, notebooks

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


EXERCISE = exercises.every()["count-bytes"]


def row(path, message="A message.") -> grading.Row:
    return grading.Row(str(path), EXERCISE.name, False, "exception", message, 0.1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.symlink_to(labs.sources()[0]), "a link or no plain file"),  # to the course's own answers
        (os.mkfifo, "a link or no plain file"),
        (lambda path: path.mkdir(), "a link or no plain file"),
        (lambda path: path.write_text("[" * 100_000), "JSON, but no notebook"),
        (lambda path: large(path, grading.MOST_BYTES + 1), "save it without outputs"),
        (lambda path: path.write_text(cells("x = 1\n" * 50_000)), "300,000 characters of code"),
    ],
)
def test_what_is_handed_in_may_be_anything(tmp_path, make, said):
    path = tmp_path / "01_measuring.ipynb"
    make(path)
    [only] = grading.grade([path])
    assert only.passed is False and said in only.message


def large(path, size) -> None:
    with path.open("w") as file:
        file.truncate(size)


def cells(*sources) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": source} for source in sources]})


@pytest.mark.slow
def test_outputs_of_a_hundred_megabytes_are_no_reason_to_refuse_a_notebook(tmp_path):
    path = tmp_path / "01_measuring.ipynb"
    path.write_text(cells("x = 1").replace("}]", f', "outputs": ["{"x" * 10**8}"]}}]'))
    assert EXERCISE in grading.asked(path)


def test_names_and_messages_may_hold_any_bytes(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff01_measuring.ipynb")
    assert grading.save([row(path, "\ud800")], tmp_path / "marks.csv") == ""
    assert "udcff01_measuring.ipynb" in (tmp_path / "marks.csv").read_text()
    path.write_text("")
    line = [sys.executable, "-m", "helpers", "grade", path]
    done = subprocess.run(line, cwd=tmp_path, env=notebooks.kernel_environment({}), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "") and "The file is empty." in done.stdout


def test_a_fault_of_the_judge_costs_no_row(tmp_path, monkeypatch):
    """Whatever it raises, one thread's end would take all the rows that were its own."""
    path = tmp_path / "01_measuring.ipynb"
    path.write_text(labs.sources()[0].read_text())

    class Desk:
        def do(self, *job, **options):
            raise KeyError("a fault")

        def close(self):
            pass

    monkeypatch.setattr(grading, "Desk", Desk)
    rows = grading.grade([path], journal=tmp_path / "marks.part")
    assert len(rows) == 5 and {(r.passed, r.kind) for r in rows} == {(None, "environment")}


def test_an_answer_nested_beyond_what_python_reads_is_a_finding(tmp_path):
    path = tmp_path / "01_measuring.ipynb"
    path.write_text(cells(f"{EXERCISE.entry} = " + "+".join(["1"] * 50_000)))
    verdict = checks.text_or_verdict(EXERCISE, path)
    assert (verdict.passed, verdict.kind) == (False, "syntax") and "nested more deeply" in verdict.findings[0].message


def test_a_line_that_was_broken_off_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "marks.part"
    path.write_text('{"of": "cut sho')
    for text in ("first", "second"):
        grading.Journal(path).keep(row("a"), EXERCISE, text, None)
    kept = grading.Journal(path)
    assert kept.row("a", EXERCISE, "first", None) == kept.row("a", EXERCISE, "second", None) == row("a")


@pytest.mark.parametrize("way", [[], ["--json"]])
def test_when_the_cluster_goes_what_it_judged_is_shown_where_no_file_keeps_it(tmp_path, monkeypatch, capsys, way):
    def gone(paths, told, journal, address):
        told(1, 2, row("a"))
        raise machine.NotReady("The scheduler is gone.")

    (tmp_path / "01_measuring.ipynb").write_text("")
    monkeypatch.setattr(grading, "grade", gone)
    assert __main__.main(["grade", str(tmp_path), *way]) == 1
    said = capsys.readouterr()
    assert "A message." in said.out and "The scheduler is gone." in said.err
    assert not way or [each["exercise"] for each in json.loads(said.out)] == [EXERCISE.name]


def judging(process: psutil.Process) -> bool:
    """Whether an answer has been at work in it for a second; not where it ended between two looks."""
    with contextlib.suppress(psutil.Error):
        return "zygote" in str(process.cmdline()) and process.cpu_times().user > 1
    return False


@pytest.mark.slow
def test_interrupting_it_leaves_no_process(tmp_path):
    path = tmp_path / "01_measuring.ipynb"  # a kernel lab's are refused before they run, since they hold no kernel
    edited(labs.sources()[0], path, HANGS)
    line = [sys.executable, "-m", "helpers", "grade", path]
    env = notebooks.kernel_environment({})
    running = subprocess.Popen(line, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    try:
        end, busy = time.monotonic() + 60, []
        while time.monotonic() < end and not any(judging(p) for p in busy):
            time.sleep(0.5)
            busy = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=30)[1] == "Interrupted.\n"
        assert running.returncode == 130
        assert busy and gone(busy)
    finally:
        running.kill()
