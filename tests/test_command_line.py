"""What tests outside the project call: exercises, check, grade and progress, their JSON and their exit statuses."""

import csv
import json
import os
import subprocess
import sys

import nbformat
import pytest

from helpers import ROOT, __main__, checks, desk, exercises, grading, labs, machine, notebooks, source

NAME = "masked-add"
EXERCISE = exercises.every()[NAME]
SOLVED = ROOT / "solutions" / f"{EXERCISE.lab}.ipynb"


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """No trace in the progress of whoever runs the tests."""
    monkeypatch.setenv("HELPERS_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.delenv("HELPERS_STRICT", raising=False)


@pytest.fixture(scope="module")
def unsolved(tmp_path_factory):
    """The lab of the exercise, as it is built from the solution."""
    path = tmp_path_factory.mktemp("labs") / SOLVED.name
    notebooks.save(labs.built(notebooks.read(SOLVED)), path)
    return path


def command(*arguments) -> int:
    """The exit status of a command, run in this process."""
    try:
        return __main__.main(list(map(str, arguments)))
    except SystemExit as misuse:  # argparse
        return misuse.code


def test_exercises_are_listed(capsys):
    assert command("exercises", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [set(one) for one in listed] == [{"name", "lab", "rung", "entry_point", "form", "title"}] * len(listed)
    assert [one["name"] for one in listed] == list(exercises.every())
    assert command("exercises") == 0
    assert EXERCISE.title in capsys.readouterr().out


def test_a_pass_is_one_json_object_and_status_0(tmp_path):
    line = [sys.executable, "-m", "helpers", "check", NAME, str(SOLVED), "--json", "--seed", "7"]
    env = {**os.environ, "PYTHONPATH": machine.python_path()}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    said = json.loads(done.stdout)
    assert done.returncode == 0
    assert (said["exercise"], said["passed"], said["findings"], said["seed"]) == (NAME, True, [], 7)
    assert said["mode"] == machine.here().mode and said["seconds"] > 0


def test_a_file_finds_the_labs_imports_done(tmp_path, capsys):
    lines = source.notebook(SOLVED, EXERCISE.entry).splitlines()
    text = "\n".join(line for line in lines if not line.startswith(("import ", "from ")))
    (tmp_path / "mine.py").write_text(text)
    assert command("check", NAME, tmp_path / "mine.py") == 0
    assert f"{NAME}: passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("def f(:", "syntax"),
        ("x = 1", "exception"),
        (f"def {EXERCISE.entry}(*inputs):\n    raise NotImplementedError()", "not-attempted"),
        ("\ud800", "syntax"),
    ],
)
def test_what_is_not_passed_is_status_1(tmp_path, capsys, text, kind):
    (tmp_path / "mine.py").write_bytes(text.encode(errors="surrogatepass"))
    assert command("check", NAME, tmp_path / "mine.py", "--json") == 1
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert finding["kind"] == kind and finding["message"]


def test_an_unsolved_lab_is_not_attempted(unsolved, capsys):
    assert command("check", NAME, unsolved) == 1
    assert "not attempted" in capsys.readouterr().out


def test_what_cannot_be_judged_here_is_status_3(unsolved, monkeypatch, capsys):
    finding = checks.Finding("needs-hardware", "It needs a GPU.")
    verdict = checks.Verdict(NAME, None, (finding,), "cpu", 0.1)
    monkeypatch.setattr(checks, "check_file", lambda *_, **__: verdict)
    assert command("check", NAME, unsolved, "--json") == 3
    assert json.loads(capsys.readouterr().out)["passed"] is None


def test_another_lab_s_notebook_is_told_which_lab_holds_the_exercise(capsys):
    other = ROOT / "labs" / "01_measuring.ipynb"
    assert command("check", NAME, other) == 1
    said = capsys.readouterr().out
    assert f"looked in the code cells of labs/{other.name}. The exercise {NAME} is in the lab {EXERCISE.lab}." in said
    assert f"Next: Write `{EXERCISE.entry}` in {EXERCISE.lab}.ipynb, run its cell there" in said


def test_a_name_that_is_bound_nowhere_is_to_be_bound(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(f"def {EXERCISE.entry}(*inputs):\n    return fill(*inputs)")
    assert command("check", NAME, tmp_path / "mine.py") == 1
    said = capsys.readouterr().out
    assert "Next: Bind `fill` at the top level of a cell or file" in said and "is in the lab" not in said


def test_a_reader_that_has_enough_is_no_error():
    env = {**os.environ, "PYTHONPATH": machine.python_path()}
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        done = subprocess.run([sys.executable, "-m", "helpers", "progress"], cwd=ROOT, env=env, stdout=nobody,
                              stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")


def test_a_mistyped_name_in_a_notebook_is_a_sentence_and_raises_only_where_a_check_must(monkeypatch, capsys):
    for ask in (checks.check, checks.solution):
        ask(NAME[:-1])
        assert capsys.readouterr().out.startswith(f"Warning: There is no exercise {NAME[:-1]!r}. Did you mean {NAME}")
    monkeypatch.setenv("HELPERS_STRICT", "1")
    with pytest.raises(checks.NoSuchExercise, match="python -m helpers exercises lists them"):
        checks.check("%%%")


def test_misuse_is_status_2_and_names_what_is_near(unsolved, tmp_path, capsys):
    assert command("check", NAME[:-1], unsolved) == 2
    assert f"Did you mean {NAME}" in capsys.readouterr().err
    assert command("check", "no such thing", unsolved) == 2
    assert "python -m helpers exercises" in capsys.readouterr().err
    for path in (tmp_path / "none.ipynb", tmp_path):
        assert command("check", NAME, path) == 2
        assert "there is no such file" in capsys.readouterr().err
    assert command("check", NAME) == command("grade") == 2
    assert command("grade", tmp_path) == 2


def test_progress_remembers_checks_of_the_command_line(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("x = 1")
    said = [(command("check", NAME, tmp_path / "mine.py"), capsys.readouterr().out)[1] for _ in range(2)]
    assert [EXERCISE.hints[0] in text for text in said] == [False, True]
    assert command("progress") == 0
    said = capsys.readouterr().out
    [line] = [line for line in said.splitlines() if f" {NAME} " in line]
    assert "tried 2 times" in line and "exception" in line
    assert "Next: " in said


# ---- grade --------------------------------------------------------------------------------------------------------


def notebook(path, *sources):
    cells = [nbformat.v4.new_code_cell(text, id=f"c-{i}") for i, text in enumerate(sources)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


BROKEN = {
    "cut.ipynb": ('{"cells": [', "syntax", "not JSON"),
    "empty.ipynb": ("", "syntax", "empty"),
    "list.ipynb": ("[]", "exception", "no notebook"),
    "cells.ipynb": ('{"cells": [3]}', "exception", "no notebook"),
    "latin.ipynb": ("\xe9".encode("latin-1"), "syntax", "not JSON"),
    "bare.ipynb": ('{"cells": []}', "exception", "No cell"),
}


def test_a_broken_notebook_is_a_row(tmp_path, capsys):
    for name, (text, *_) in BROKEN.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / ".ipynb_checkpoints").mkdir()
    notebook(tmp_path / ".ipynb_checkpoints" / "cut-checkpoint.ipynb")
    assert command("grade", tmp_path, tmp_path / "none.ipynb", "--json", "--csv", tmp_path / "out" / "rows.csv") == 1
    rows = json.loads(capsys.readouterr().out)
    expected = BROKEN | {"none.ipynb": ("", "exception", "cannot be read")}
    assert {row["notebook"] for row in rows} == {str(tmp_path / name) for name in expected}
    for row in rows:
        _, kind, message = expected[os.path.basename(row["notebook"])]
        assert (row["exercise"], row["passed"], row["kind"]) == ("", False, kind)
        assert message in row["message"]
    with open(tmp_path / "out" / "rows.csv", newline="") as file:
        saved = list(csv.DictReader(file))
    assert [(r["notebook"], r["passed"], r["kind"]) for r in saved] == [
        (r["notebook"], "false", r["kind"]) for r in rows
    ]


def test_the_exercises_of_a_notebook_are_those_of_its_lab(tmp_path):
    lab = [e for e in exercises.every().values() if e.lab == EXERCISE.lab]
    assert grading.asked(notebook(tmp_path / f"ada_{EXERCISE.lab} (1).ipynb")) == lab
    assert grading.asked(notebook(tmp_path / "homework.ipynb", f'check("{NAME}", f)', 'check("unknown", f)')) == lab
    path = notebook(tmp_path / "by_id.ipynb", "")
    text = path.read_text().replace('"metadata": {}', f'"metadata": {{"nbgrader": {{"grade_id": "{NAME}-check"}}}}', 1)
    path.write_text(text)
    assert grading.asked(path) == lab


def test_every_exercise_of_an_unsolved_lab_is_a_row_and_progress_stays_untouched(unsolved, tmp_path, capsys):
    assert command("grade", unsolved, "--json") == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["exercise"] for row in rows] == [e.name for e in exercises.every().values() if e.lab == EXERCISE.lab]
    assert {(row["passed"], row["kind"]) for row in rows} == {(False, "not-attempted")}
    assert not (tmp_path / "progress.json").exists()


def test_a_judge_that_dies_costs_one_row(unsolved, monkeypatch):
    asked, died = desk.Desk._asked, []

    def dies(worker, job):
        if job[1][0] == NAME:
            raise EOFError(died.append(worker))
        return asked(worker, job)

    monkeypatch.setattr(desk.Desk, "_asked", dies)
    rows = {row.exercise: row for row in grading.grade([unsolved])}
    assert (rows.pop(NAME).kind, len(died)) == ("crash", 2)
    assert {row.kind for row in rows.values()} == {"not-attempted"}


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["def {0}(:\n    pass"], "syntax"),
        (["def {0}(x):\n    ### gap\n    raise NotImplementedError()\n    return y_bound_in_the_gap"], "not-attempted"),
        (["def {0}(x):\n    return y_bound_nowhere"], "exception"),
        (["def other(:", "y = 1"], "syntax"),
        (["x = 1"], "exception"),
    ],
)
def test_an_answer_that_cannot_be_read_whole_is_named_as_what_it_is(tmp_path, cells, kind):
    path = notebook(tmp_path / "mine.ipynb", *(text.format(EXERCISE.entry) for text in cells))
    verdict = checks.check_file(EXERCISE, path)
    assert (verdict.passed, verdict.kind) == (False, kind)
