"""Progress survives restarts, is written whole by several processes, and says what comes next."""

import datetime
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from helpers import ROOT, checks, exercises, machine, progress


def today() -> str:
    return datetime.date.today().isoformat()


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """A file of its own, and four exercises in three labs."""
    path = tmp_path / "new" / "progress.json"
    monkeypatch.setenv("HELPERS_PROGRESS", str(path))
    monkeypatch.delenv("HELPERS_STRICT", raising=False)
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)
    made = {
        name: SimpleNamespace(name=name, lab=lab, core=core, title=name.title())
        for name, lab, core in [
            ("count", "01_measuring", False),
            ("time", "01_measuring", True),
            ("matmul", "06_matmul", True),
            ("reduce", "08_cuda", True),
        ]
    }
    monkeypatch.setattr(exercises, "every", lambda: made)
    return path


def verdict(name, kind="", message="It is wrong.", passed=False):
    findings = (SimpleNamespace(kind=kind, message=message),) if kind else ()
    return SimpleNamespace(exercise=name, passed=passed, findings=findings)


def test_a_repeated_finding_is_counted_until_another_one_or_a_pass():
    seen = [progress.record(verdict("time", kind)) for kind in ("nan", "nan", "race", "nan")]
    assert [(e.attempts, e.kind, e.repeats) for e in seen] == [
        (1, "nan", 1),
        (2, "nan", 2),
        (3, "race", 1),
        (4, "nan", 1),
    ]
    before = today()
    passed = progress.record(verdict("time", passed=True))
    assert passed.passed in (before, today())  # midnight may come between
    when = {"passed": passed.passed, "since": seen[0].since, "last": passed.last}
    assert passed == progress.of("time") == progress.Entry(attempts=5, **when)
    assert "" < passed.since <= passed.last
    later = progress.record(verdict("time", "nan"))
    assert (later.passed, later.kind, later.repeats) == (passed.passed, "nan", 1)


def test_what_was_not_attempted_or_not_judged_changes_nothing(file):
    progress.record(verdict("time", "nan"))
    before = file.read_text()
    progress.record(verdict("time", "not-attempted"))
    progress.record(verdict("time", "needs-hardware", passed=None))
    assert file.read_text() == before


def test_a_repeated_finding_offers_the_next_hint_up_to_the_last():
    one = SimpleNamespace(name="time", hints=("where", "idea", "code"), hints_for={"nan": ("zero over zero",)})

    def offered(kind):
        verdict = checks.Verdict("time", False, (checks.Finding(kind, "It is wrong."),), "cpu", 0.1)
        return checks.remembered(one, verdict).hint.rpartition(": ")[2]

    assert [offered("race") for _ in range(5)] == ["", "where", "idea", "code", "code"]
    assert [offered("nan") for _ in range(3)] == ["", "zero over zero", "zero over zero"]
    assert [offered("not-attempted") for _ in range(3)] == [""] * 3


@pytest.mark.parametrize(
    ("name", "value"), [("HELPERS_STRICT", "1"), ("NBGRADER_EXECUTION", "autograde"), ("HELPERS_PROGRESS", "")]
)
def test_nothing_is_recorded_where_no_learner_is_at_work(file, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert progress.record(verdict("time", "nan")).attempts == 1
    assert progress.of("time") == progress.Entry()
    assert not file.exists()


def test_next_come_the_core_exercises_in_the_paths_order():
    order = []
    while exercise := progress.following():
        order.append(exercise.name)
        progress.record(verdict(exercise.name, passed=True))
    assert order == ["time", "reduce", "matmul", "count"]


def test_the_summary_names_state_last_finding_and_the_next_exercise():
    passed = progress.record(verdict("time", passed=True)).passed
    progress.record(verdict("reduce", "race", "Threads 0 and 32 write to shared[0]."))
    progress.record(verdict("reduce", "race", "Threads 0 and 32 write to shared[0]."))
    progress.reveal("reduce")
    lines = str(progress.summary()).splitlines()
    assert lines[0].startswith(
        "1 of 4 exercises passed. Next: reduce in 08_cuda. The labs stand in the order that README"
    )
    rows = [" ".join(line.split()) for line in lines[1:]]
    assert rows == [
        "lab exercise core state last finding",
        "01_measuring count",
        f"time core passed {passed}",
        "08_cuda reduce core tried 2 times, solution seen race: Threads 0 and 32 write to shared[0].",
        "06_matmul matmul core",
    ]


def test_the_path_is_the_readme_s():
    [line] = [line for line in (ROOT / "README.md").read_text().splitlines() if "**Recommended path:**" in line]
    assert tuple(re.findall(r"\b\d\d\b", line)) == progress.PATH


def test_a_damaged_file_is_set_aside_and_said_so(file, capsys):
    progress.record(verdict("time", "nan"))
    for text in ("{", "[]", '{"time": 3}'):
        file.write_text(text)
        assert progress.of("time") == progress.Entry()
        assert "was damaged" in capsys.readouterr().out
        assert file.with_name("progress.json.damaged").read_text() == text


def test_what_a_later_version_knows_more_is_passed_over(file):
    progress.record(verdict("time", "nan"))
    saved = json.loads(file.read_text())
    saved["time"]["mood"] = "fine"
    file.write_text(json.dumps(saved))
    assert progress.of("time").attempts == 1


def test_a_folder_that_cannot_be_written_withholds_no_verdict(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HELPERS_PROGRESS", str(tmp_path / "file" / "progress.json"))
    assert progress.record(verdict("time", "nan")).kind == "nan"
    assert "could not be saved" in capsys.readouterr().out


def test_several_processes_write_one_file(file):
    text = (
        "from types import SimpleNamespace as S; from helpers import progress\n"
        "for i in range(30): progress.record(S(exercise='time', passed=False, findings=[S(kind='nan', message='')]))"
    )
    line = [sys.executable, "-c", text]
    env = {**os.environ, "PYTHONPATH": machine.python_path()}
    running = [subprocess.Popen(line, cwd=ROOT, env=env) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert progress.of("time").attempts == progress.of("time").repeats == 90
