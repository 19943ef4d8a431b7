"""What the doctor and the first cell say, for every machine the course may meet: facts are faked, rows are judged."""

import json
import os
import subprocess
import sys
from collections import namedtuple

import pytest

import helpers
from helpers import ROOT, doctor, install, machine, trials
from helpers.doctor import Driver, Torch

GIB = 2**30
T4 = ("Tesla T4", (7, 5), 15 * GIB, 14 * GIB)
H200 = ("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB)


def driver(version="580.65", cuda=(13, 0), cards=(H200,)):
    return Driver(version, cuda, tuple(card[:2] for card in cards))


def torch(cuda="13.0", card=H200, hip=""):
    return Torch("2.13.0", cuda, hip, card)


@pytest.fixture
def machine_with(monkeypatch):
    """A machine with this driver and this torch, in the mode that HELPERS_MODE would ask for."""

    def fake(driver, torch, wanted=""):
        monkeypatch.setattr(doctor, "nvidia", lambda: driver)
        monkeypatch.setattr(doctor, "the_torch", lambda: torch)
        monkeypatch.setenv("HELPERS_MODE", wanted)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return fake


CPU_BUILD = torch(cuda="", card=None)

NO_CARD = torch(card=None)
V100 = ("Tesla V100", (7, 0), 16 * GIB, 15 * GIB)
ROCM = torch(cuda="", card=("MI300X", (9, 4), 9, 9), hip="7.1")

GPUS = {
    "no GPU": (None, CPU_BUILD, "missing", "no NVIDIA GPU", "Colab"),
    "driver for CUDA 12": (driver("550.54", (12, 4)), NO_CARD, "limited", "runs CUDA up to 12.4", "TORCH=cu126"),
    "driver for CUDA 11": (driver("470.1", (11, 4)), NO_CARD, "limited", "torch needs 12", "driver to 580"),
    "CPU build beside a GPU": (driver(), CPU_BUILD, "limited", "this torch is a CPU build", "TORCH=cu130"),
    "CPU build, older driver": (driver("550.54", (12, 4)), CPU_BUILD, "limited", "CPU build", "TORCH=cu126"),
    "ROCm": (None, torch(cuda="", card=None, hip="7.1"), "limited", "ROCm build", "TORCH=cpu"),
    "ROCm that finds a card": (None, ROCM, "limited", "ROCm", "TORCH=cpu"),
    "old card": (driver(cards=[V100]), torch(card=V100), "limited", "7.0", "Colab"),
    "old card, CPU build": (driver(cards=[("Tesla P100", (6, 0))]), CPU_BUILD, "limited", "needs 7.5", "Colab"),
    "torch sees nothing": (driver(), NO_CARD, "limited", "torch cannot use it", "torch.cuda.init()"),
}  # fmt: skip


@pytest.mark.parametrize("case", GPUS)
def test_where_there_is_no_usable_gpu(machine_with, case):
    driver, torch, state, words, mend = GPUS[case]
    machine_with(driver, torch)
    row = doctor.gpu()
    assert row.state == state and words in row.sentence and mend in row.mend
    assert row.sentence.endswith("So this is CPU mode.") and not row.needed
    # the first cell tells of what can be mended; that there is no GPU at all, its banner says
    assert row.warn == (case != "no GPU")

    machine_with(driver, torch, "gpu")
    row = doctor.gpu()
    assert row.state == "missing" and row.needed and "HELPERS_MODE=gpu" in row.sentence and words in row.sentence
    assert "unset HELPERS_MODE" in row.mend

    machine_with(driver, torch, "cpu")
    row = doctor.gpu()
    assert not row.needed and not row.warn


@pytest.mark.parametrize("card", [H200, T4])
def test_a_usable_gpu(machine_with, card):
    machine_with(driver(cards=[card]), torch(card=card))
    row = doctor.gpu()
    assert row.state == "ok" and card[0] in row.sentence and not row.warn
    machine_with(driver(cards=[card]), torch(card=card), "gpu")
    assert doctor.gpu() == row
    machine_with(driver(cards=[card]), torch(card=card), "cpu")
    assert doctor.gpu().state == "limited" and doctor.gpu().mend == "unset HELPERS_MODE"


@pytest.mark.parametrize(
    "total, free, words, mend", [(6, 5, "8 GiB", "HELPERS_MODE=cpu"), (80, 2, "others use it", "nvidia-smi")]
)
def test_little_memory(machine_with, total, free, words, mend):
    card = ("NVIDIA A100", (8, 0), total * GIB, free * GIB)
    machine_with(driver(cards=[card]), torch(card=card))
    row = doctor.gpu()
    assert row.state == "limited" and row.warn and words in row.sentence and mend in row.mend


def test_a_hidden_card(machine_with, monkeypatch):
    machine_with(driver(), torch(card=None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in doctor.gpu().sentence


def test_a_mode_that_is_none(machine_with):
    machine_with(None, CPU_BUILD, "tpu")
    assert doctor.gpu().needed and "HELPERS_MODE=tpu" in doctor.gpu().sentence


def test_torch_that_does_not_load(monkeypatch):
    def broken():
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(doctor, "the_torch", broken)
    row = doctor.torch()
    assert row.needed and row.state == "missing" and "libcudart.so.12" in row.sentence and row.mend == "make clean lab"


@pytest.mark.parametrize(
    "found, cuda, state, words",
    [
        ({}, "", "missing", "not installed"),
        ({"cupy-cuda13x": "14.2.0"}, "13.0", "ok", "cupy-cuda13x"),
        ({"cupy-cuda13x": "14.2.0"}, "", "ok", "cupy-cuda13x"),
        ({"cupy": "14.2.0"}, "12.8", "ok", "cupy"),
        ({"cupy-cuda12x": "14.2.0"}, "13.0", "limited", "built for CUDA 12"),
        ({"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}, "13.0", "limited", "overwrite one another"),
    ],
)
def test_cupy_for_another_cuda(monkeypatch, found, cuda, state, words):
    monkeypatch.setattr(doctor, "installed", lambda *names: found)
    monkeypatch.setattr(doctor, "the_torch", lambda: torch(cuda=cuda, card=None))
    monkeypatch.setattr(doctor, "_in_venv", lambda: False)
    row = doctor.cupy()
    assert row.state == state and words in row.sentence
    assert row.state == "ok" or row.warn
    if state == "limited":
        assert row.mend.startswith(f"{sys.executable} -m pip uninstall -y cupy-cuda12x")
    if state == "missing":
        assert "install -c" in row.mend and row.mend.endswith("cupy-cuda13x")
        monkeypatch.setattr(doctor, "_in_venv", lambda: True)
        assert doctor.cupy().mend == "make clean lab"


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    row = doctor.compiler()
    assert row.state == "missing" and row.warn and "g++" in row.sentence and "apt-get install -y g++" in row.mend


def test_no_triton(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda *names: {})
    assert doctor.triton().needed and doctor.triton().state == "missing"


Usage = namedtuple("Usage", "total used free")


def test_low_disk(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(0, 0, install.GB // 2))
    assert doctor.disk().state == "limited" and doctor.disk().warn and "0.5 GB" in doctor.disk().sentence


def test_another_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert doctor.folder().state == "ok" and str(tmp_path) in doctor.folder().sentence
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "gpu-kernel-ladder"\n')
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    row = doctor.folder()
    assert row.state == "limited" and row.warn and str(ROOT) in row.sentence
    assert row.mend == f"cd {tmp_path} && make lab"
    monkeypatch.chdir(ROOT / "notebooks")
    assert doctor.folder().state == "ok"


@pytest.mark.parametrize("state, words", [("broken", "cut short"), ("stale", "older than"), ("ready", "EXTRAS=core")])
def test_the_state_of_the_environment(monkeypatch, state, words):
    monkeypatch.setattr(doctor.sys, "prefix", str(ROOT / ".venv"))
    monkeypatch.setattr(install, "state", lambda: state)
    monkeypatch.setattr(install, "read", lambda path: {"extras": "core", "torch": ""})
    monkeypatch.setattr(doctor, "wrong_versions", lambda: [])  # whatever this environment lacks
    row = doctor.packages()
    assert words in row.sentence and row.warn == (state != "ready")
    assert state == "ready" or row.mend == "make install"
    if state == "ready":  # the stamp does not know what pip did to .venv afterwards
        monkeypatch.setattr(doctor, "wrong_versions", lambda: ["nbclient is missing"])
        row = doctor.packages()
        assert row.warn and "nbclient is missing" in row.sentence and row.mend == "make clean lab"


def test_packages_missing_without_a_venv_of_ours(monkeypatch):
    monkeypatch.setattr(doctor.sys, "prefix", "/usr")
    monkeypatch.setattr(doctor, "installed", lambda name: {} if name == "nbformat" else {name: "0.1"})
    row = doctor.packages()
    assert "nbformat is missing" in row.sentence and "torch is 0.1, not >=2.11" in row.sentence
    assert row.warn and row.mend == "make lab"
    monkeypatch.setattr(install, "venv_problem", lambda: ("No ensurepip.", "apt-get install python3-venv"))
    assert "No ensurepip." in doctor.packages().sentence
    assert doctor.packages().mend == "apt-get install python3-venv && make lab"


# ---- the doctor and the first cell say the same --------------------------------------------------------------------


def first_cell(monkeypatch):
    """What `helpers.start()` shows, and what it raises."""
    shown = []
    monkeypatch.setattr(helpers.show, "note", lambda text, kind="note": shown.append(text))
    try:
        helpers.start()
    except machine.NotReady as problem:
        return shown, str(problem)
    return shown, None


@pytest.mark.parametrize("problem, name", [("system_problem", "System"), ("python_problem", "Python")])
def test_what_stops_the_course_is_said_by_both(monkeypatch, capsys, problem, name):
    monkeypatch.setattr(install, problem, lambda: ("A sentence.", "a command"))
    assert first_cell(monkeypatch) == ([], "A sentence.\nMend: a command")
    assert doctor.main(as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert not said["ready"] and said["mode"] is None
    assert {"name": name, "state": "missing", "sentence": "A sentence.", "mend": "a command"}.items() <= [
        row for row in said["rows"] if row["name"] == name
    ][0].items()


def test_what_limits_the_course_is_said_by_both(monkeypatch, machine_with, tmp_path):
    machine_with(*GPUS["CPU build, older driver"][:2])
    monkeypatch.setenv("PATH", str(tmp_path))
    shown, raised = first_cell(monkeypatch)
    assert raised is None
    rows = [row for row in doctor.checks() if row.warn and row.state != "ok"]
    assert {"GPU", "C++ compiler"} <= {row.name for row in rows}
    assert shown[1:] == [f"{row.sentence} Mend: {row.mend}" for row in rows]


def test_the_doctor_and_the_mode_agree():
    usable, _ = doctor.card(doctor.nvidia(), doctor.the_torch())
    assert usable == (machine._no_gpu() is None)


WITHOUT = """
from importlib import metadata
from importlib.machinery import PathFinder

def find_spec(name, path=None, target=None, known=PathFinder.find_spec):
    return None if name.split(".")[0] == MODULE else known(name, path, target)

def version(name, known=metadata.version):
    if name == DISTRIBUTION:
        raise metadata.PackageNotFoundError(name)
    return known(name)

PathFinder.find_spec = find_spec
metadata.version = version
"""


@pytest.mark.parametrize(
    "module, distribution, sentence",
    [
        pytest.param("numpy", "numpy", "numpy is missing", marks=pytest.mark.slow),
        ("triton", "triton", "Triton is not installed"),
        pytest.param("IPython", "ipython", "every lesson needs: ipython is missing", marks=pytest.mark.slow),
        pytest.param("psutil", "psutil", "psutil is missing", marks=pytest.mark.slow),
        pytest.param("pynvml", "nvidia-ml-py", "nvidia-ml-py is missing", marks=pytest.mark.slow),
        pytest.param("packaging", "packaging", "packaging is missing", marks=pytest.mark.slow),
    ],
)
def test_a_package_that_helpers_itself_imports(module, distribution, sentence):
    without = WITHOUT.replace("MODULE", repr(module)).replace("DISTRIBUTION", repr(distribution))
    done = run(f"{without}\nimport helpers; print('imported'); helpers.start()", HELPERS_MODE="cpu")
    said = done.stdout + done.stderr
    assert "imported" in said and sentence in said and "Mend: make" in said
    assert "Error" not in done.stderr, done.stderr
    done = run(f"{without}\nimport json; from helpers import doctor; print([r.sentence for r in doctor.checks()])")
    assert sentence in done.stdout, done.stderr


def test_a_python_too_old_for_the_package_itself():
    done = run("import sys; sys.version_info = (3, 9, 1, 'final', 0); import helpers")
    assert done.returncode == 1 and done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first == "This Python is 3.9, which is too old: the course needs 3.11 to 3.13." and second.startswith(
        "Mend: "
    )


def run(program, **env):
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
    )


def test_triton_before_helpers_in_cpu_mode():
    done = run("import triton.language, helpers; helpers.start()", HELPERS_MODE="cpu", TRITON_INTERPRET="")
    assert "triton was imported before helpers" in done.stderr and "Restart" in done.stderr
    fine = run("import helpers, triton.language; helpers.start()", HELPERS_MODE="cpu", TRITON_INTERPRET="")
    assert fine.returncode == 0, fine.stderr


@pytest.mark.skipif(machine.gpu(), reason="there is a GPU here")
def test_gpu_mode_without_a_gpu():
    done = run("import helpers; print('imported'); helpers.start()", HELPERS_MODE="gpu")
    assert "imported" in done.stdout and "HELPERS_MODE=gpu asks for a GPU" in done.stderr
    done = run(
        "import sys; from helpers.__main__ import main; sys.exit(main(['doctor', '--json']))", HELPERS_MODE="gpu"
    )
    assert done.returncode == 1
    assert "HELPERS_MODE=gpu" in [r for r in json.loads(done.stdout)["rows"] if r["name"] == "GPU"][0]["sentence"]


def test_torch_that_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.9 is missing')")
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"  # before what the environment itself puts there
    done = run(f"{first}; import helpers; print('imported'); helpers.start()", HELPERS_MODE="")
    assert "imported" in done.stdout and "libcudnn.so.9 is missing" in done.stderr and "make clean lab" in done.stderr


# ---- trials --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program, state, words",
    [
        ("print('It runs.')", "ok", "It runs."),
        ("print('limited: It half runs.')", "limited", "It half runs."),
        ("raise ValueError('Why.\\n\\nPages of advice.')", "missing", "ValueError: Why."),
        ("raise SystemExit('It is not installed.')", "missing", "It is not installed."),
        ("import os; os.kill(os.getpid(), 11)", "missing", "-11"),
        ("import time; time.sleep(60)", "missing", "within 2 s"),
    ],
)
def test_a_trial_says_what_happened(monkeypatch, tmp_path, program, state, words):
    monkeypatch.setattr(trials, "SECONDS", 2)
    row = trials.attempt(trials.Trial("a rung", program, "the mend", needed=True), tmp_path)
    assert (row.state, row.needed) == (state, row.state == "missing") and words in row.sentence
    limited = "the mend" if machine.gpu() else doctor.A_GPU
    assert row.mend.endswith({"ok": "", "limited": limited, "missing": "the mend"}[state])
    assert ("less to do" in row.mend) == ("within" in row.sentence)  # a machine that is busy lacks nothing


@pytest.mark.parametrize(
    "program, mend, words, mends",
    [
        ("import no_such_package", "the mend", "The package no_such_package is not installed.", "make"),
        ("import no_such_package", trials.ALL, "The package no_such_package is not installed.", trials.ALL),
        ("from importlib import metadata; metadata.version('no-such')", "the mend", "The package no-such is", "make"),
        ("from helpers import machine; raise machine.NotReady('A.', 'do b')", "the mend", "A.", "do b"),
        ("from helpers import machine; raise machine.NotReady('A.')", "the mend", "A.", "the mend"),
    ],
)
def test_a_trial_names_the_mend_of_what_is_missing(tmp_path, program, mend, words, mends):
    row = trials.attempt(trials.Trial("a rung", program, mend), tmp_path)
    assert row.state == "missing" and row.sentence.startswith(words) and row.mend.startswith(mends)


def test_mojo_is_found_wherever_python_finds_its_package(monkeypatch, tmp_path):
    """After `pip install --target` no program of its lies beside this Python."""
    site, place = tmp_path / "site", tmp_path / "place"
    for file in ("max/__init__.py", "max/engine.py", "mojo/__init__.py", "mojo/run.py"):
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).touch()
    (site / "mojo/run.py").write_text(
        "from types import SimpleNamespace\n"
        "def subprocess_run_mojo(words, **how):\n"
        "    return SimpleNamespace(stdout='42' if words[0] == 'run' else 'Mojo 1.2.0 (0)')\n"
    )
    place.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(site))
    [trial] = [trial for trial in trials.TRIALS if trial.program == trials.MOJO]
    row = trials.attempt(trial, place)
    assert (row.state, row.sentence.split(";")[0]) == ("ok", "Mojo 1.2.0 compiles and runs a program")


@pytest.mark.slow
def test_the_doctor_on_this_machine():
    began = os.times().elapsed
    done = subprocess.run(
        [sys.executable, "-m", "helpers", "doctor", "--json"], cwd=ROOT, capture_output=True, text=True
    )
    said = json.loads(done.stdout)
    assert done.returncode == 0 and said["ready"], [row for row in said["rows"] if row["state"] == "missing"]
    assert said["mode"] == machine.here().mode
    for row in said["rows"]:
        assert row["sentence"].endswith((".", ")")) and (row["state"] == "ok") == (row["mend"] == ""), row
    assert os.times().elapsed - began < 120


def test_a_compiler_that_is_installed_but_not_as_it_has_to_be_gets_a_row(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name)
    problem = machine.NotReady("JAX and its plugin must be of one version.", "python -m pip install jaxlib")
    monkeypatch.setattr(doctor.apart, "problem", lambda package: problem if package == "jax" else None)
    [row] = doctor.compilers()
    assert (row.name, row.state, row.sentence, row.mend) == ("JAX", "limited", problem.sentence, problem.mend)
    assert not row.needed and not row.warn
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.compilers() == []
