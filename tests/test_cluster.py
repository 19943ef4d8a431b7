"""Answers judged on a Dask cluster: as here, each once, whatever happens to workers; and faults in a sentence."""

import collections
import contextlib
import dataclasses
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest
import yaml
from traitlets.config import Config

from helpers import ROOT, __main__, checks, cluster, exercises, grading, machine, notebooks, rehearsal, source

if os.environ.get("HELPERS_DASK") != "required":
    pytest.importorskip("distributed", reason="not installed: make install EXTRAS=all,cluster")

NAME = "count-bytes"
EXERCISE = exercises.every()[NAME]
SOLVED = ROOT / "solutions" / f"{EXERCISE.lab}.ipynb"
NOBODY = "tcp://127.0.0.1:9"
LONGEST = 240
"""Seconds that a test may wait: nobody else ends the wait for a worker that never comes."""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A file in which the workers write what they were given, a line an answer: the worker's pid, the exercise."""
    return tmp_path_factory.mktemp("given") / "given"


@pytest.fixture(scope="module")
def two(given):
    """A cluster of two workers in CPU mode: its address, and the workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTS_GIVEN", str(given))
        patch.setenv("PYTHONPATH", str(ROOT))
        with rehearsal.cluster(["CPU", "CPU"], ["tests.cluster_faults"]) as started:
            yield started


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Short waits, a room for what is logged, and no trace in anybody's progress."""
    monkeypatch.setattr(cluster, "PATIENCE", 3.0)
    monkeypatch.setenv("HELPERS_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setenv("HELPERS_ROOM", str(tmp_path))
    for name in ("HELPERS_STRICT", "HELPERS_CLUSTER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def in_bounded_time():
    def over(*_):
        pytest.fail(f"it still waited after {LONGEST} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(LONGEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def no_gpu_here(monkeypatch):
    """This machine judges as the two workers do, in CPU mode, also where it has a GPU."""
    monkeypatch.setattr(machine, "gpu", lambda: False)


def logged(tmp_path) -> str:
    return "".join(path.read_text() for path in tmp_path.glob("*.log"))


def answer(text: str = "") -> str:
    return source.notebook(SOLVED, EXERCISE.entry) + text


# ---- one answer -----------------------------------------------------------------------------------------------------


def test_a_check_is_judged_there_as_it_is_here(two, given, no_gpu_here, capsys):
    address, workers = two
    here = [__main__.main(["check", NAME, str(SOLVED), "--json", "--seed", "7"]), json.loads(capsys.readouterr().out)]
    there = [__main__.main(["check", NAME, str(SOLVED), "--json", "--seed", "7", "--cluster", address])]
    there.append(json.loads(capsys.readouterr().out))
    assert here[0] == there[0] == 0
    assert {**here[1], "seconds": 0} == {**there[1], "seconds": 0}
    assert {int(line.split()[0]) for line in given.read_text().splitlines()} <= {worker.pid for worker in workers}


def test_a_notebook_names_the_cluster_in_a_variable(two, given, monkeypatch):
    shown, before = [], given.read_text() if given.exists() else ""
    monkeypatch.setenv("HELPERS_CLUSTER", two[0])
    monkeypatch.setattr(checks.notebook, "display", shown.append)
    monkeypatch.setattr(source, "live", lambda entry: answer())
    monkeypatch.setattr(source, "ran", lambda entry: "")
    checks.check(NAME)
    assert shown[0].passed and given.read_text() != before


@pytest.mark.slow
def test_who_waits_is_told_the_place_in_the_queue(two):
    told, hang = [], rehearsal.PARTS["hangs"].format(EXERCISE.entry)
    with cluster.joined(two[0]) as there:

        def wait(text, told, seconds):
            checks.there(there, EXERCISE, text, told, seconds=seconds)

        first = [threading.Thread(target=wait, args=(hang, lambda text: None, 10)) for _ in range(2)]
        for thread in first:
            thread.start()
        while len(there._waiting()) < 2:
            time.sleep(0.05)
        wait(answer(), told.append, 12)
        for thread in first:
            thread.join()
    assert "number 3 in the queue of 2 workers" in told


@pytest.mark.slow
def test_while_the_gpu_is_waited_for_a_mistake_is_found_here(two, no_gpu_here, monkeypatch):
    """A worker offers a GPU, and others are before this answer: CPU mode here has already found what is wrong."""
    with cluster.joined(two[0]) as there:
        there.kind = "GPU"  # which nobody offers: the answer waits
        monkeypatch.setattr(cluster, "joined", lambda address: contextlib.nullcontext(there))
        monkeypatch.setattr(there, "_present", lambda: {"a worker"})
        verdict = checks.judge(EXERCISE, rehearsal.PARTS["wrong"].format(EXERCISE.entry), address=two[0])
    assert (verdict.passed, verdict.kind) == (False, "wrong-answer")
    assert any("left the queue" in said for said in verdict.unchecked)


# ---- many, and what workers suffer ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_answer_that_ends_its_worker_gets_a_finding_and_no_second_worker(two, given, tmp_path):
    address, workers = two
    before = {worker.pid for worker in workers}
    with cluster.joined(address) as there:
        verdict = checks.there(there, EXERCISE, answer("\n# end this worker\n"))
        assert (verdict.passed, verdict.kind) == (False, "crash") and "no third one" in verdict.findings[0].message
        assert checks.there(there, EXERCISE, answer()).passed
    assert len(before & {worker.pid for worker in workers}) == 1, "one of the two was never touched"
    assert "no third one" in logged(tmp_path)


@pytest.mark.slow
def test_of_twelve_answers_each_has_one_verdict_though_a_worker_is_killed(two, given, tmp_path, monkeypatch):
    """The worker that is killed is at an answer; its nanny is gone too, so another gets that answer."""
    monkeypatch.setattr(rehearsal, "names", lambda: ["count-bytes", "predict-time", "roofline"])
    quick = [dataclasses.replace(exercises.every()[name], seconds=4) for name in rehearsal.names()]
    monkeypatch.setattr(grading, "asked", lambda path: quick)
    rehearsal.hand_in(tmp_path / "class", 4)
    here = rehearsal.graded(tmp_path / "class")
    assert len(here.verdicts) == 12 and len(set(map(str, here.verdicts.values()))) >= 5
    address, workers = two
    before = given.read_text()

    def kill(done):
        if done == 4:
            workers[0].kill(whole=True)

    there = rehearsal.graded(tmp_path / "class", address, kill)
    assert not there.lost(here)
    assert workers[0].nanny.wait(5) and workers[1].pid
    counted = collections.Counter(line.split()[1] for line in given.read_text()[len(before) :].splitlines())
    assert sum(counted.values()) <= 12 + 1, "only what the lost worker was at is judged again"


LESSON = """
import helpers
from helpers import records

records.figures(lambda: {"a.b": records.Measurement.exact(2.0, "us")}, "a.b")
"""


@pytest.mark.slow
def test_figures_are_measured_by_a_worker_and_merged_here(two, tmp_path, monkeypatch, capsys):
    """The lesson runs on a real worker, in CPU mode; what a GPU would have recorded is laid beside it."""
    path, out = tmp_path / "01_a.ipynb", tmp_path / "figures.json"
    notebooks.save(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LESSON.strip(), id="l01-a")]), path)
    monkeypatch.setattr(notebooks, "lessons", lambda: [path])
    monkeypatch.setattr(__main__, "ROOT", tmp_path)
    figure = {"value": 2.0, "unit": "us", "low": 2.0, "high": 2.0, "n": 1, "note": ""}
    ran_there = []

    class There:
        card, kind = "A card", "GPU"

        def do(self, function, name, only, label, told):
            with cluster.joined(two[0]) as there:
                ran, made = there.do(function, path, only, label=label, told=told)
            ran_there.append(ran.failure is None and "not recorded yet" in str(ran.notebook.cells[0].outputs))
            return ran, {**made, "figures": {"a.b": figure}, "machine": {"gpu": "A card", "date": "2026-01-01"}}

    real = cluster.joined
    monkeypatch.setattr(cluster, "joined", lambda a: contextlib.nullcontext(There()) if a == "there" else real(a))
    assert __main__.main(["measure", "--cluster", "there", "--out", str(out)]) == 0
    assert ran_there == [True]
    saved = json.loads(out.read_text())
    assert saved["figures"]["a.b"]["value"] == 2.0
    assert saved["figures"]["a.b"]["code"] == notebooks.code_hash(notebooks.read(path))


def test_an_answer_that_is_lost_judged_twice_or_otherwise_is_counted_and_named():
    here = {("a/learner_00/x.ipynb", name): [(True, "")] for name in ("one", "two", "three", "four")}
    there = {key: list(found) for key, found in here.items()}
    there["a/learner_00/x.ipynb", "one"] = [(True, ""), (True, "")]
    there["a/learner_00/x.ipynb", "two"] = [(False, "wrong-answer")]
    del there["a/learner_00/x.ipynb", "three"]
    said = rehearsal.Graded(there, 1.0).lost(rehearsal.Graded(here, 1.0))
    assert said == [
        "learner_00, one: passed and passed, not passed",
        "learner_00, three: no verdict, not passed",
        "learner_00, two: wrong-answer, not passed",
    ]


@pytest.mark.slow
def test_forty_learners_two_hundred_answers_and_a_worker_killed():
    lost = rehearsal.figures("CPU", *["GPU"] * machine.gpu())
    assert lost["cluster.lost"].value == 0, lost["cluster.lost"].note
    assert lost["cluster.answers_per_minute.cpu"].value > 0


@pytest.mark.slow
def test_a_run_that_was_broken_off_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "names", lambda: ["count-bytes"])
    rehearsal.hand_in(tmp_path / "class", 4)
    folder, journal, judged = tmp_path / "class", tmp_path / "rows.csv.part", []
    monkeypatch.setattr(grading, "asked", lambda path: [EXERCISE])

    class Desk:
        def do(self, function, name, text, **options):
            judged.append(text)
            if len(judged) == 3:
                raise machine.NotReady("The scheduler is gone.")
            return checks.Verdict(name, True, (), "cpu", 0.1)

        def close(self):
            pass

    monkeypatch.setattr(grading, "Desk", Desk)
    monkeypatch.setattr(grading, "MOST_WORKERS", 1)
    with pytest.raises(machine.NotReady):
        grading.grade(grading.found([folder]), journal=journal)
    assert len(journal.read_text().splitlines()) == 2
    with journal.open("a") as file:
        file.write('{"of": "cut sho')
    rows = grading.grade(grading.found([folder]), journal=journal)
    assert len(rows) == 4 and len(judged) == 3 + 1, "the third again; the fourth is no Python"
    assert grading.save(rows, tmp_path / "rows.csv", journal) == "" and not journal.exists()
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 5


class Full(type(Path())):
    """A path on a disk that is full."""

    def open(self, mode="r", **options):
        if mode == "r":
            return super().open(mode, **options)
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_a_full_disk_loses_no_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grading, "asked", lambda path: [EXERCISE])
    rehearsal.hand_in(tmp_path / "class", 1)
    rows = grading.grade(grading.found([tmp_path / "class"]), journal=Full(tmp_path / "rows.part"))
    assert len(rows) == 1
    assert "rows.part cannot be written (No space left on device)" in capsys.readouterr().err
    assert "cannot be written" in logged(tmp_path)
    assert "could not be written" in grading.save(rows, Full(tmp_path / "rows.csv"))


# ---- faults --------------------------------------------------------------------------------------------------------


def test_a_wrong_address_is_a_sentence_and_a_check_goes_on_here(tmp_path, capsys):
    for address in (NOBODY, "nonsense", "ftp://127.0.0.1:1"):
        with pytest.raises(machine.NotReady, match="No Dask scheduler answers"), cluster.joined(address):
            pass
    assert __main__.main(["check", NAME, str(SOLVED), "--cluster", NOBODY]) == 0
    assert "on the cluster: No Dask scheduler answers" in capsys.readouterr().out
    assert __main__.main(["grade", str(SOLVED), "--cluster", NOBODY]) == 1
    assert "ask your instructor" in capsys.readouterr().err
    assert NOBODY in logged(tmp_path)


def test_something_else_that_listens_there_and_says_nothing_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(machine.NotReady, match="No Dask scheduler answers"), cluster.joined(address):
            pass
        assert time.monotonic() - began < 30


def test_a_scheduler_of_another_python_gets_nothing_to_run(two, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster.platform, "python_version_tuple", lambda: ("3", "99", "0"))
    said = r"not one of the course's: python 3\.\d+, here 3\.99"
    with pytest.raises(machine.NotReady, match=said), cluster.joined(two[0]):
        pass
    assert "not one of the course's" in logged(tmp_path)


@pytest.mark.slow
def test_workers_that_were_left_out_are_not_asked_again_when_no_other_is_left(two, given, tmp_path, monkeypatch):
    """A GPU that falls off its bus: each worker in turn says so, and then there is nobody, which ends in a sentence."""
    monkeypatch.setattr(cluster, "DESERTED", 3.0)
    before = given.read_text() if given.exists() else ""
    with cluster.joined(two[0]) as there, pytest.raises(machine.NotReady, match="its GPU no longer answers"):
        workers = len(there.fit)
        checks.there(there, EXERCISE, answer("\n# this worker is unfit\n"))
    assert len(given.read_text()[len(before) :].splitlines()) == workers, "each was asked once"
    assert "is left out" in logged(tmp_path)


def test_without_dask_a_sentence_says_how_it_comes(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(machine.NotReady, match="make install EXTRAS=all,cluster"), cluster.joined(NOBODY):
        pass


def test_other_versions_are_named_and_their_workers_left_out(two, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "code", lambda: "0123abcd")
    with pytest.raises(machine.NotReady, match=r"helpers \w{8}, here 0123abcd"), cluster.joined(two[0]):
        pass
    assert "its versions are not these" in logged(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(machine.gpu(), reason="there is one")
def test_a_worker_without_the_gpu_that_it_claims_is_left_out_and_gets_nothing(tmp_path):
    with rehearsal.cluster(["GPU"]) as (address, _):
        with pytest.raises(machine.NotReady, match="claims a GPU, and this is CPU mode"), cluster.joined(address):
            pass
        from distributed import Client

        with Client(address, set_as_default=False) as client:
            [about] = client.scheduler_info(n_workers=-1)["workers"].values()
            assert about["resources"] == {"GPU": 0}
    assert "claims a GPU" in logged(tmp_path)


@pytest.mark.slow
def test_a_scheduler_that_goes_away_ends_the_run_with_a_sentence(tmp_path):
    hang = rehearsal.PARTS["hangs"].format(EXERCISE.entry)
    with rehearsal.cluster(["CPU"]) as (address, _), cluster.joined(address) as there:

        def end():
            with contextlib.suppress(OSError):  # it is gone before it can answer
                there.client.sync(there.client.scheduler.terminate)

        threading.Timer(2.0, end).start()
        with pytest.raises(machine.NotReady, match="no longer answers"):
            checks.there(there, EXERCISE, hang, seconds=60)
    assert "no longer answers" in logged(tmp_path)


# ---- starting workers elsewhere --------------------------------------------------------------------------------------


def shown(what: str) -> str:
    """The block of code of the instructions that holds `what`."""
    [block] = [part for part in (ROOT / "workshop/cluster.md").read_text().split("```") if what in part]
    return block.partition("\n")[2]


def test_slurms_job_starts_a_worker_as_the_instructions_say(tmp_path):
    text = shown("SLURMCluster(").partition("there.scale")[0] + "print(there.job_script())\n"
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    script = done.stdout
    assert done.returncode == 0, done.stderr
    for part in ("--nthreads 1", "--resources GPU=1", "--preload helpers.worker", "#SBATCH --gres=gpu:1"):
        assert part in script, script


def test_a_gateways_environment_makes_the_worker(tmp_path):
    config = Config()
    exec(shown("KubeClusterConfig"), {"c": config})
    code = "import dask, distributed; w = dask.config.get('distributed.worker'); print(w['preload'], w['resources'])"
    env = {**os.environ, **config.KubeClusterConfig.environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "['helpers.worker'] {'GPU': 1}\n", done.stderr
    assert config.KubeClusterConfig.worker_cores == 1


def test_the_operators_containers_run_commands_that_dask_takes():
    from distributed.cli import dask_scheduler, dask_worker

    spec = yaml.safe_load((ROOT / "workshop/dask-cluster.yaml").read_text())["spec"]
    [worker], [scheduler] = (spec[part]["spec"]["containers"] for part in ("worker", "scheduler"))
    taken = dask_worker.main.make_context("worker", worker["args"][2:], ignore_unknown_options=False).params
    assert (taken["nthreads"], taken["resources"], taken["preload"]) == (1, "GPU=1", ("helpers.worker",))
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert dask_scheduler.main.make_context("scheduler", scheduler["args"][2:])
    assert scheduler["ports"][0]["containerPort"] == spec["scheduler"]["service"]["ports"][0]["port"] == 8786


@pytest.mark.parametrize("what", ["dask worker ", "dask scheduler"])
def test_the_commands_of_the_instructions_are_taken(what):
    from distributed.cli import dask_scheduler, dask_worker

    line = shown(f".venv/bin/{what}").split()[2:]
    main = dask_worker.main if "worker" in what else dask_scheduler.main
    assert main.make_context("dask", line)
