"""`make test-gpu` has everything in some part, goes on where it was broken off, and says what passed."""

import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import nbformat
import psutil
import pytest

from helpers import ROOT, exercises, machine, records
from tests import answers, on_gpu
from tests.on_gpu import Item


def test_everything_is_an_item():
    names = [item.name for item in on_gpu.items()]
    assert len(set(names)) == len(names)
    for path in [*ROOT.glob("[nls]*/[0-9]*.ipynb"), *ROOT.glob("tests/test_*.py")]:
        assert f"{path.parent.name}/{path.name}" in names
    assert set(on_gpu.SLOW) <= set(exercises.every())
    assert {re.match(r"answers/([\w-]+)", name)[1] for name in names if name.startswith("answers/")} == set(
        exercises.every()
    )


@pytest.mark.parametrize(
    "weights", [{}, json.loads((records.FOLDER / "tests" / "nvidia-h200.json").read_text())["weights"]]
)
def test_parts_take_equally_long_and_leave_nothing_out(weights):
    everything = on_gpu.items()
    parts = [on_gpu.share(everything, weights, part, 4) for part in range(1, 5)]
    assert sorted(item.name for part in parts for item in part) == sorted(item.name for item in everything)
    loads = [sum(weights.get(item.name, item.guess) for item in part) for part in parts]
    assert max(loads) < 1.05 * min(loads)
    for part in parts:  # few lessons run at a time: they begin first, and no part has many more than its share
        lessons = [item.is_lesson for item in part]
        assert lessons == sorted(lessons, reverse=True) and sum(lessons) >= 3


def test_guesses_are_of_lessons_and_exercises_that_there_are():
    assert {ROOT / "notebooks" / f"{name}.ipynb" for name in on_gpu.LESSONS} <= set(ROOT.glob("notebooks/*.ipynb"))
    guesses = {item.name.partition(",")[0]: item.guess for item in on_gpu.items()}
    assert guesses["answers/attention-backend"] < guesses["answers/k-loop"]


def test_shares_of_the_answers_are_all_of_them(monkeypatch, capsys):
    names = [f"{i}" for i in range(7)]
    monkeypatch.setattr(answers, "written", lambda: [answers.Answer("gram", "right", name, "", ()) for name in names])
    monkeypatch.setattr(answers, "every", lambda: {"gram": None})
    monkeypatch.setattr("helpers.checks.judge", lambda *_: SimpleNamespace(seconds=0, kind="", passed=False))
    monkeypatch.setattr(answers, "as_judged", lambda answer, verdict: "odd")
    for share in ("1/3", "2/3", "3/3"):
        assert answers.main(["gram", "--share", share]) == 1
    assert sorted(re.findall(r"gram: right: (\d)", capsys.readouterr().out)) == names


# ---- a run, on a card that is pretended ----------------------------------------------------------------------------


def python(name, text, guess=1.0):
    return Item(name, ("-c", text), guess)


def gone(pid):
    """Whether a process has ended, be it that nobody has asked how."""
    try:
        process, end = psutil.Process(pid), time.monotonic() + 5
        while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
            time.sleep(0.05)
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A function that runs given items as `make test-gpu` does; returns the status, what was said, and the summary."""
    here = SimpleNamespace(name="A card", driver="1", free_bytes=lambda: 1 << 40)
    monkeypatch.setattr(machine, "gpu", lambda: True)
    monkeypatch.setattr(machine, "here", lambda: here)
    monkeypatch.setattr(on_gpu, "visible", lambda: ["0"])
    monkeypatch.setattr(on_gpu, "code", lambda: "c0de")
    file = tmp_path / "tests" / "a-card.json"

    def tested(capsys, found, *options):
        monkeypatch.setattr(on_gpu, "items", lambda: found)
        status = on_gpu.main(["--summary", str(file), "--commit", "abc", "--jobs", "2", *options])
        return status, capsys.readouterr().out, json.loads(file.read_text())

    return tested


def test_what_passed_is_not_run_again_with_the_same_code(card, capsys, tmp_path, monkeypatch):
    count = tmp_path / "count"
    once = python("tests/a", f"open({str(count)!r}, 'a').write('x'); print('first'); print('done')")
    flaky = python("tests/b", f"import sys; print(7); sys.exit(open({str(count)!r}).read().count('x') < 2)")
    status, said, summary = card(capsys, [once, flaky])
    assert status == 1 and "failed: tests/b: 7" in said and "1 passed, 1 failed, 0 left over" in said
    (number, run), *none = summary["runs"].items()
    assert not none and summary["items"]["tests/a"] | {"seconds": 0} == {
        "passed": True, "seconds": 0, "said": "done", "run": number,
    }  # fmt: skip
    assert summary["items"]["tests/b"]["passed"] is False and not summary["weights"]
    wanted = {"gpu": "A card", "commit": "abc", "code": "c0de", "part": "1/1", "jobs": 2, "gpus": 1, "driver": "1"}
    assert wanted.items() <= run.items() and {"date", "torch", "seconds"} <= set(run)
    status, said, summary = card(capsys, [once, flaky], "--list")
    assert status == 0 and "1 of 2 items" in said and count.read_text() == "x"
    count.write_text("xx")
    status, said, summary = card(capsys, [once, flaky])
    assert status == 0 and "1 passed, 0 failed" in said and count.read_text() == "xx"
    assert len(summary["runs"]) == 2 and set(summary["weights"]) == {"tests/a", "tests/b"}
    monkeypatch.setattr(on_gpu, "code", lambda: "other")
    status, said, summary = card(capsys, [once])  # the other is no item any more
    assert status == 0 and count.read_text() == "xxx"
    assert set(summary["items"]) == {"tests/a"} and len(summary["runs"]) == 1
    assert card(capsys, [once], "--again")[0] == 0 and count.read_text() == "xxxx"


def test_parts_are_runs_of_one_summary(card, capsys):
    found = [python(f"tests/{i}", "print(1)") for i in range(6)]
    for part in (1, 2):
        status, said, summary = card(capsys, found, "--part", f"{part}/2")
        assert status == 0 and "3 of 3 items are to be run" in said
    assert len(summary["items"]) == 6 and [run["part"] for run in summary["runs"].values()] == ["1/2", "2/2"]
    status, said, _ = card(capsys, found)
    assert status == 0 and "0 of 6 items are to be run" in said


def test_a_part_ends_in_time_and_says_what_is_left(card, capsys):
    found = [python("tests/hangs", "import time; time.sleep(60)"), python("tests/long", "", guess=30)]
    began = time.monotonic()
    status, said, summary = card(capsys, found, "--minutes", "0.05")
    assert status == 1 and time.monotonic() - began < 20
    assert "left over: tests/long, tests/hangs;" in said and not summary["items"]


def test_an_item_that_hangs_fails_and_leaves_nothing_behind(card, capsys, monkeypatch):
    monkeypatch.setattr(on_gpu, "ITEM_SECONDS", 2)
    text = "import os, time; print('began', flush=True); print(pid := os.fork(), flush=True); time.sleep(60)"
    status, said, summary = card(capsys, [python("tests/hangs", text)], "--jobs", "1")
    assert status == 1 and summary["items"]["tests/hangs"]["said"] == "still running after 2 s"
    forked = int(re.search(r"\| (\d\d+)\n", said)[1])
    assert gone(forked)


@pytest.mark.slow  # each is a pytest of its own, with a kernel
def test_notebooks_run_under_nbval(card, capsys, tmp_path):
    """With what tests/nbval_fixes.py adds, so that one that only warns fails too."""
    for folder, code in (("notebooks", "import sys; print('a warning', file=sys.stderr)"), ("labs", "print(1)")):
        (tmp_path / folder).mkdir()
        cell = nbformat.v4.new_code_cell(code, id="l98-a")
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / folder / "98_a.ipynb")
    every = {item.name: item for item in on_gpu.items()}
    found = []
    for folder, like in (("notebooks", "notebooks/00_start_here.ipynb"), ("labs", "labs/01_measuring.ipynb")):
        *command, _ = every[like].command
        found.append(Item(folder, (*command, str(tmp_path / folder / "98_a.ipynb")), 1))
    status, said, summary = card(capsys, found)
    assert status == 1 and "wrote to stderr" in said and summary["items"]["notebooks"]["passed"] is False
    assert summary["items"]["labs"]["passed"] and "1 passed" in summary["items"]["labs"]["said"]


def test_what_a_machine_lacks_is_no_failure_and_is_told(card, capsys, monkeypatch):
    monkeypatch.setattr(on_gpu, "NEEDS", {"tests/a": ("json", "no_such_package"), "tests/b": ("json", "sh")})
    status, said, summary = card(capsys, [python("tests/a", "1 / 0"), python("tests/b", "print(1)")])
    assert status == 0 and "1 passed, 0 failed, 0 left over" in said and set(summary["weights"]) == {"tests/b"}
    about = summary["items"]["tests/a"]
    assert about["passed"] is None and about["said"] == "not run: there is no no_such_package here"


def test_lessons_run_few_at_a_time_and_each_gpu_gets_its_share():
    lessons = [python(f"notebooks/{i}", "") for i in range(9)]
    room = on_gpu.Room([*lessons, python("tests/a", "")], None, [], ["0", "1"], 0, {})
    given = []
    while chosen := room._chosen():
        room.todo.remove(chosen[0])
        room.busy.append(chosen)
        given.append((chosen[0].name, chosen[1]))
    assert given == [*((f"notebooks/{i}", str(i % 2)) for i in range(2 * on_gpu.LESSONS_AT_A_TIME)), ("tests/a", "0")]


def test_ctrl_c_ends_what_runs(tmp_path):
    started = tmp_path / "pid"
    text = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    program = (
        "from tests import on_gpu\n"
        f"room = on_gpu.Room([on_gpu.Item('a', ('-c', {text!r}), 1)], None, [], [''], float('inf'), {{'a': 1}})\n"
        "room.work(1)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while not (started.exists() and started.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(2)
        assert "goes on with what is left" in process.stderr.read()
    assert process.returncode == 1
    assert gone(int(started.read_text()))


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(machine, "gpu", lambda: False)
    assert on_gpu.main([]) == 1
    assert "need a GPU, and this is CPU mode" in capsys.readouterr().err


def test_nothing_that_the_committed_summaries_tell_of_failed():
    for path in (records.FOLDER / "tests").glob("*.json"):
        summary = json.loads(path.read_text())
        assert not [name for name, item in summary["items"].items() if item["passed"] is False], path.name
        assert {item["run"] for item in summary["items"].values()} == set(summary["runs"])
