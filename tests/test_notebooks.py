"""Notebooks are run, saved in one form, and known to be stale when their code has changed; figures come along."""

import json
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest

from helpers import ROOT, __main__, ladder, machine, notebooks, records


def write(path, *sources, tags=()):
    cells = [nbformat.v4.new_code_cell(source, id=f"l98-cell-{i}") for i, source in enumerate(sources)]
    for cell in cells:
        cell.metadata = nbformat.from_dict({"tags": list(tags), "collapsed": True, "execution": {"x": "2026"}})
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"widgets": {"state": {}}}), path)
    return path


def outputs(notebook, cell):
    return notebook.cells[cell].outputs


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    sources = [
        "import sys\nprint('one'); print('two', flush=True); print('three')",
        "import ipywidgets; ipywidgets.IntSlider()",
        "import os, pathlib, helpers; print(helpers.ROOT / 'helpers' / 'show.py', helpers.__file__)",
        "from IPython.display import display\nhandle = display({'text/plain': '...'}, raw=True, display_id=True)\n"
        "handle.update({'text/plain': ''}, raw=True)",
        "import sysconfig; print(pathlib.Path(sysconfig.get_path('purelib'), 'torch', '__init__.py')); object()",
    ]
    return notebooks.run(write(tmp_path_factory.mktemp("run") / "98_run.ipynb", *sources))


def test_outputs_are_kept_in_canonical_form(ran):
    assert ran.failure is None
    assert [o.text for o in outputs(ran.notebook, 0)] == ["one\ntwo\nthree\n"]
    assert [cell.execution_count for cell in ran.notebook.cells] == [1, 2, 3, 4, 5]
    assert [cell.id for cell in ran.notebook.cells] == [f"l98-cell-{i}" for i in range(5)]
    text = notebooks.dumps(ran.notebook)
    assert text == notebooks.dumps(notebooks.normalise(nbformat.reads(text, as_version=4)))
    assert 'execution":' not in text and "collapsed" not in text


def test_widgets_leave_a_sentence_and_no_state(ran):
    (output,) = outputs(ran.notebook, 1)
    assert output.data == {"text/plain": "(interactive: run this cell)"}
    assert "widgets" not in ran.notebook.metadata


def test_no_path_or_address_of_this_machine_is_saved(ran):
    assert outputs(ran.notebook, 2)[0].text == "helpers/show.py helpers/__init__.py\n"
    assert outputs(ran.notebook, 4)[0].text == "site-packages/torch/__init__.py\n"
    assert outputs(ran.notebook, 4)[1].data["text/plain"] == "<object at …>"
    assert str(ROOT) not in notebooks.dumps(ran.notebook)


def test_a_vanished_progress_bar_leaves_nothing(ran):
    assert outputs(ran.notebook, 3) == []


def test_where_outputs_came_from_is_saved(ran):
    made = ran.notebook.metadata.helpers
    assert made["code_hash"] == notebooks.code_hash(ran.notebook)
    assert made["mode"] == machine.here().mode
    assert made["versions"] == machine.versions()
    assert (made["gpu"] is None) == (made["mode"] == "cpu")


def test_a_notebook_is_stale_when_a_kernel_that_it_loads_changes(tmp_path, monkeypatch):
    cell = nbformat.v4.new_code_cell('gemm = source.load("09_test", "gemm")')
    notebook = nbformat.v4.new_notebook(cells=[cell])
    for module in (notebooks, notebooks.source):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    before = notebooks.code_hash(notebook)
    (tmp_path / "notebooks/09_test").mkdir(parents=True)
    hashes = [before]
    for path, text in (("09_test.py", "RUNGS = 1"), ("09_test/01_naive.cu", "// 1"), ("09_test/01_naive.cu", "// 2")):
        (tmp_path / "notebooks" / path).write_text(text)
        hashes.append(notebooks.code_hash(notebook))
    assert len(set(hashes)) == 3 and hashes[0] == hashes[1], "a file without a folder of kernels does not count"


@pytest.mark.parametrize(
    ("source", "tags", "error"),
    [
        ("print('before'); {}['key']", (), "KeyError: 'key'"),
        ("%no_such_magic", (), "UsageError: Line magic function `%no_such_magic` not found."),
        ("1 + 1", ("raises-exception",), "is tagged raises-exception, but nothing was raised"),
        ("import os; os._exit(1)", (), "DeadKernelError: the process died (a crash, os._exit, or out of memory)"),
        ("import time; time.sleep(60)", (), "TimeoutError: still running after 2 s"),
    ],
)
def test_a_failure_names_the_cell_and_the_error(tmp_path, source, tags, error):
    ran = notebooks.run(write(tmp_path / "98_fails.ipynb", source, tags=tags), cell_seconds=2)
    assert (ran.failure.cell, ran.failure.error) == ("l98-cell-0", error)


def test_an_error_that_is_meant_is_no_failure(tmp_path):
    assert notebooks.run(write(tmp_path / "98_meant.ipynb", "1 / 0", tags=["raises-exception"])).failure is None


# ---- the command line ---------------------------------------------------------------------------------------------


def test_run_saves_what_ran_and_says_what_failed(tmp_path):
    good = write(tmp_path / "98_good.ipynb", "6 * 7")
    bad = write(tmp_path / "99_bad.ipynb", "print('kept')", "1 / 0", "print('never')")
    line = [sys.executable, "-m", "helpers", "run", good, bad, "--out", tmp_path / "out"]
    env = notebooks.kernel_environment({})
    done = subprocess.run(line, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "99_bad.ipynb: cell l98-cell-1 failed" in done.stdout
    assert "ZeroDivisionError: division by zero" in done.stdout
    saved = nbformat.read(tmp_path / "out" / "99_bad.ipynb", as_version=4)
    assert outputs(saved, 0)[0].text == "kept\n"
    assert outputs(saved, 1)[0].ename == "ZeroDivisionError"
    assert outputs(saved, 2) == []
    saved = nbformat.read(tmp_path / "out" / "98_good.ipynb", as_version=4)
    assert outputs(saved, 0)[0].data["text/plain"] == "42"


def command(*arguments) -> int:
    """The exit status of a command, run in this process."""
    try:
        return __main__.main(list(map(str, arguments)))
    except SystemExit as misuse:  # argparse
        return misuse.code


def test_exit_statuses(tmp_path, capsys):
    assert command("run", write(tmp_path / "98_a.ipynb", "1"), "--out", tmp_path / "out") == 0
    capsys.readouterr()
    assert command("run", tmp_path / "none.ipynb", "--out", tmp_path) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'none.ipynb'}: there is no such notebook\n"
    for text in ("{broken", "[]", "{}", '{"cells": 3, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'):
        (tmp_path / "98_broken.ipynb").write_text(text)
        assert command("run", tmp_path / "98_broken.ipynb", "--out", tmp_path / "out") == 1
        said = capsys.readouterr().err.splitlines()
        assert "98_broken.ipynb is no notebook" in said[0] and said[1].startswith("Mend: ") and len(said) == 2
    assert command("run", "x.ipynb") == 2
    assert command("no-such-command") == 2


def test_interrupting_a_run_ends_its_kernel(tmp_path):
    touched = tmp_path / "pid"
    cell = f"import os, pathlib, time\npathlib.Path({str(touched)!r}).write_text(str(os.getpid()))\ntime.sleep(100)"
    line = [
        sys.executable,
        "-m",
        "helpers",
        "run",
        str(write(tmp_path / "98_long.ipynb", cell)),
        "--out",
        str(tmp_path),
    ]
    running = subprocess.Popen(line, cwd=ROOT, env=notebooks.kernel_environment({}), stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not touched.exists() and time.monotonic() < end:
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=30)[1] == "Interrupted.\n"
        assert running.returncode == 130
        assert not psutil.pid_exists(int(touched.read_text()))
    finally:
        running.kill()


def test_measure_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(machine, "gpu", lambda: False)
    assert command("measure") == 1
    assert capsys.readouterr().err.startswith("Figures are measured on a GPU, and this is CPU mode: ")


def test_tidy_keeps_outputs(tmp_path, ran):
    path = tmp_path / "98_tidy.ipynb"
    path.write_text(json.dumps(json.loads(notebooks.dumps(ran.notebook)), indent=4))
    assert command("tidy", path) == 0
    assert path.read_text() == notebooks.dumps(ran.notebook)


# ---- measuring, with a machine that says it has a GPU ---------------------------------------------------------------

PRETEND = "from helpers import machine, records\nmachine.gpu = lambda: True"


@pytest.fixture
def course(tmp_path, monkeypatch):
    """Two notebooks that declare figures, and a folder of records; this process and the kernels think to have a GPU."""
    figures = "records.figures(lambda: {'a.x': records.Measurement(%s, 'us', 1.0, 3.0)}, 'a.x')"
    first = write(tmp_path / "98_first.ipynb", PRETEND, figures % "2.0")
    second = write(tmp_path / "99_second.ipynb", PRETEND, "records.text('b.text', lambda: 'l1\\nl2')", "")
    monkeypatch.setattr(machine, "gpu", lambda: True)
    monkeypatch.setattr(notebooks, "lessons", lambda: [first, second])
    monkeypatch.setattr(records, "FOLDER", tmp_path / "records")
    (tmp_path / "records").mkdir()
    return first, second, tmp_path / "records"


def test_measure_saves_outputs_and_figures_of_the_same_run(course):
    first, second, folder = course
    assert command("measure") == 0
    (file,) = folder.glob("*.json")
    record = json.loads(file.read_text())
    assert record["figures"]["a.x"]["value"] == 2.0
    assert record["texts"]["b.text"] == ["l1", "l2"]
    saved = nbformat.read(first, as_version=4)
    assert record["figures"]["a.x"]["code"] == saved.metadata.helpers["code_hash"]
    assert "a.x" in outputs(saved, 1)[0].data["text/plain"]


def test_only_some_figures_into_another_file(course, tmp_path):
    first, second, folder = course
    before = first.read_text(), second.read_text()
    assert command("measure", "--only", "a.x", "--out", tmp_path / "mine.json") == 0
    assert list(json.loads((tmp_path / "mine.json").read_text())["figures"]) == ["a.x"]
    assert not list(folder.glob("*.json"))
    assert (first.read_text(), second.read_text()) == before


def test_the_ladder_of_a_reader_s_card_goes_on_where_it_was_broken_off(course, tmp_path, monkeypatch, capsys):
    first, _, folder = course
    own = tmp_path / "work" / "ladder.json"
    monkeypatch.setattr(ladder, "OWN", own)
    monkeypatch.setattr(ladder, "ids", lambda: {"a.x"})
    before = first.read_text()
    assert command("measure", "--ladder") == 0
    assert list(json.loads(own.read_text())["figures"]) == ["a.x"]  # the other notebook declares none of them
    assert first.read_text() == before and not list(folder.glob("*.json"))
    assert capsys.readouterr().out.startswith("1 of 1: 98_first.ipynb\n98_first.ipynb: 2 cells in ")
    write(first, PRETEND, "1 / 0", "records.figure('a.x', None)")  # to be run is to fail
    assert command("measure", "--ladder") == 0
    assert capsys.readouterr().out == "1 of 1: 98_first.ipynb: its figures are there already\n"
    record = json.loads(own.read_text())
    own.write_text(json.dumps(record | {"machine": record["machine"] | {"torch": "1.0"}}))  # made with others
    assert command("measure", "--ladder") == 1
    own.write_text(json.dumps(record | {"machine": record["machine"] | {"gpu": "another card"}}))
    capsys.readouterr()
    assert command("measure", "--ladder") == 1
    assert "is of another GPU, another card: move it away" in capsys.readouterr().err


def test_what_cannot_be_measured_fails_and_is_not_saved(course, capsys):
    first, _, folder = course
    write(first, PRETEND, "1 / 0", "records.figure('a.x', None)")
    before = first.read_text()
    assert command("measure", "--only", "a.x", "no.such") == 1
    assert "no.such: no notebook declares this figure" in capsys.readouterr().err
    assert first.read_text() == before
    assert not list(folder.glob("*.json"))


def test_stale_outputs_and_figures_are_named(course):
    first, second, _ = course
    unmade = [f"98_first.ipynb{what}" for what in (" has no saved outputs", ": a.x is not recorded yet")]
    assert notebooks.stale([first]) == unmade
    assert command("measure") == 0
    only_cpu = [f"{path.name}: its outputs were saved in CPU mode" for path in (first, second)]
    assert notebooks.stale([first, second]) == (only_cpu if machine.here().mode == "cpu" else [])
    changed = nbformat.read(first, as_version=4)
    changed.cells[1].source += "  # changed"
    nbformat.write(changed, first)
    said = notebooks.stale([first])
    assert said[0].startswith("98_first.ipynb: its code changed after its outputs were saved on 20")
    assert "a.x was measured on" in said[1]
