"""The installer: what it says before it downloads anything, and that an installation cut short is repaired."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from helpers import ROOT, install

# ---- what can be wrong ---------------------------------------------------------------------------------------------


def test_this_machine_has_none_of_these_problems():
    assert install.system_problem() is install.python_problem() is install.venv_problem() is None


@pytest.mark.parametrize("system, words", [("Darwin", "macOS"), ("Windows", "native Windows"), ("FreeBSD", "FreeBSD")])
def test_other_systems(monkeypatch, system, words):
    monkeypatch.setattr(install.platform, "system", lambda: system)
    sentence, mend = install.system_problem()
    assert words in sentence
    assert mend.startswith("wsl --install" if system == "Windows" else "docker run")


@pytest.mark.parametrize("version, words", [((3, 10), "too old"), ((3, 14), "newer than")])
def test_python_out_of_range(monkeypatch, version, words):
    monkeypatch.setattr(install.sys, "version_info", (*version, 1))
    monkeypatch.setattr(install, "another_python", lambda: "python3.12")
    sentence, mend = install.python_problem()
    assert words in sentence and f"{version[0]}.{version[1]}" in sentence
    assert mend == "make lab PYTHON=python3.12"
    monkeypatch.setattr(install, "another_python", lambda: "")
    assert "uv python install" in install.python_problem()[1]


def test_another_python_is_one_that_starts(monkeypatch, tmp_path):
    for name, status in [("python3.13", 127), ("python3.12", 0)]:  # a version manager's shim may lead nowhere
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert install.another_python() == "python3.12"


def test_no_ensurepip(monkeypatch):
    found = install.importlib.util.find_spec
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else found(name))
    sentence, mend = install.venv_problem()
    assert "ensurepip" in sentence
    assert f"python{sys.version_info[0]}.{sys.version_info[1]}-venv" in mend or "dnf" in mend


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    "free, extras, torch, mend",
    [
        (20, "all", "", None),
        (12, "all", "", "make lab TORCH=cpu"),
        (7, "all", "cpu", "EXTRAS=core TORCH=cpu"),
        (7, "core", "cpu", None),
        (7, "core,site", "cpu", None),
        (1, "core", "cpu", "pip"),
    ],
)
def test_low_disk(monkeypatch, free, extras, torch, mend):
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: Usage(0, 0, free * install.GB))
    problem = install.disk_problem(extras, torch)
    if mend is None:
        assert problem is None
    else:
        assert f"{free}.0 GB free" in problem[0] and mend in problem[1]


@pytest.mark.parametrize(
    "extras, torch", [("al", ""), ("core,tvn", ""), ("all", "rocm6"), ("all", "cu118"), ("", "CPU")]
)
def test_choices_that_mean_nothing(extras, torch):
    with pytest.raises(install.Problem):
        install.check_choice(extras or "all", torch)


@pytest.mark.parametrize(
    "extras, torch, cupy, wanted",
    [
        ("all", "", "cuda13", ".[cuda13,dev,library,tvm,xla,mojo,cutlass]"),
        ("core", "cpu", "cuda13", ".[cuda13,dev]"),
        ("core", "cu126", "cuda13", ".[cuda12,dev]"),
        ("tvm,xla", "cu130", "cuda13", ".[cuda13,dev,tvm,xla]"),
        ("core", "system", "", ".[dev]"),
        ("core,site", "", "cuda13", ".[cuda13,dev,site]"),
        ("all,site", "", "cuda13", ".[cuda13,dev,library,tvm,xla,mojo,cutlass,site]"),
    ],
)
def test_what_pip_is_asked_for(monkeypatch, extras, torch, cupy, wanted):
    monkeypatch.setattr(install.platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert install.requirement(extras, torch, cupy) == (wanted, [])


def test_uv_brings_the_build_of_torch_that_is_asked_for(monkeypatch):
    """And pip the rest, so that only torch and what is built with it come from torch's own index."""
    called = []
    monkeypatch.setattr(install, "call", lambda command, lock, purpose: called.append(command))
    install.fill("core", "cu126", 0)
    assert [command[command.index("install") + 1 :] for command in called] == [
        ["-c", "constraints.txt", "uv"],
        ["--python", install.venv("bin", "python"), "-c", "constraints.txt", "--torch-backend", "cu126", "torch"],
        ["-c", "constraints.txt", "-e", ".[cuda12,dev]"],
    ]
    called.clear()
    install.fill("core", "", 0)
    assert len(called) == 1


def test_an_old_glibc_leaves_mojo_out_and_says_so(monkeypatch):
    monkeypatch.setattr(install.platform, "libc_ver", lambda: ("glibc", "2.31"))
    wanted, [told] = install.requirement("all", "")
    assert "mojo" not in wanted and "2.31" in told


# ---- a whole installation, of a project that needs nothing from outside -------------------------------------------

BACKEND = '''"""Builds an editable wheel without setuptools; waits where a file named `wait` says so."""
import os, time, zipfile
def build_editable(folder, settings=None, metadata=None):
    open("building", "w").close()
    while os.path.exists("wait"):
        time.sleep(0.05)
    info = "tiny-1.dist-info/"
    with zipfile.ZipFile(os.path.join(folder, "tiny-1-py3-none-any.whl"), "w") as wheel:
        extras = "".join(f"Provides-Extra: {e}\\n" for e in ("cuda13", "dev", "site", "tvm"))
        extras += "Requires-Dist: tool; extra == 'dev'\\n" if "tool" in open("pyproject.toml").read() else ""
        wheel.writestr("tiny.pth", os.getcwd())
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n" + extras)
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return "tiny-1-py3-none-any.whl"
build_wheel = build_editable
'''
PYPROJECT = """[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "tiny"
version = "1"
[project.optional-dependencies]
cuda13 = []
dev = []
site = []
tvm = []
"""


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "a checkout"
    (root / "helpers").mkdir(parents=True)
    for name in ("Makefile", "helpers/install.py"):
        shutil.copy(ROOT / name, root / name)
    (root / "backend.py").write_text(BACKEND)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "constraints.txt").write_text("")
    return root


@pytest.fixture(autouse=True)
def no_make_above(monkeypatch):
    """These tests may themselves have been started by make, whose options must not reach the make under test."""
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "EXTRAS", "TORCH", "PYTHON"):
        monkeypatch.delenv(name, raising=False)


def make(root: Path, *arguments: str, path: str = "") -> str:
    """Run `make install`, with `path` first on the PATH, and return what it said."""
    env = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["make", "install", *arguments], cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(root: Path) -> Path:
    return root / ".venv" / "bin" / "python"


@pytest.mark.slow
def test_installs_once_then_is_quick_and_follows_changes(checkout):
    assert "EXTRAS=core" in make(checkout, "EXTRAS=core")
    assert subprocess.run([python(checkout), "-c", "import backend"], cwd="/").returncode == 0

    began = time.monotonic()
    assert make(checkout) == ""  # nothing said, and the choice is remembered
    assert time.monotonic() - began < 2

    marker = checkout / ".venv" / "marker"
    marker.touch()
    (checkout / "constraints.txt").write_text("# changed\n")
    assert "Installing" in make(checkout)
    assert marker.exists()  # brought up to date in place
    make(checkout, "EXTRAS=tvm")
    assert marker.exists()  # more of the same
    make(checkout, "add=--add site")  # as make site does
    assert marker.exists()
    make(checkout, "EXTRAS=core")
    assert not marker.exists()  # what is not asked for any more goes, except what a command has added
    assert json.loads((checkout / ".venv" / "asked").read_text())["extras"] == "core,site"
    assert make(checkout, "EXTRAS=core") == ""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_installation_cut_short_is_repaired_by_the_next(checkout, how):
    (checkout / "wait").touch()
    first = subprocess.Popen(
        ["make", "install", "EXTRAS=core"], cwd=checkout, start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    while not (checkout / "building").exists():
        assert first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, how)  # as Ctrl-C does: make, the installer and pip are one process group
    said = first.communicate(timeout=30)[0]
    assert how != signal.SIGINT or "Stopped" in said
    assert not (checkout / ".venv" / "installed").exists()

    (checkout / "wait").unlink()
    assert "cut short" in make(checkout)
    assert make(checkout) == ""
    assert json.loads((checkout / ".venv" / "asked").read_text())["extras"] == "core"


@pytest.mark.slow
def test_a_second_make_waits_for_the_first(checkout):
    (checkout / "wait").touch()
    command = ["make", "install", "EXTRAS=core"]
    both = [subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True)]
    while not (checkout / "building").exists():
        time.sleep(0.05)
    both.append(subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True))
    time.sleep(0.5)
    (checkout / "wait").unlink()
    first, second = (p.communicate(timeout=120)[0] for p in both)
    assert [p.returncode for p in both] == [0, 0]
    assert "Installing" in first and "waiting" in second and "Installing" not in second


@pytest.mark.slow
def test_made_anew_from_within_itself(checkout):
    """`python3` may be the very .venv that is to be made anew, where a shell has activated it."""
    make(checkout, "EXTRAS=core")
    (checkout / ".venv" / "installed").unlink()
    assert "cut short" in make(checkout, path=str(checkout / ".venv" / "bin"))
    assert subprocess.run([python(checkout), "-c", "import backend"], cwd="/").returncode == 0


@pytest.mark.slow
def test_torch_system_keeps_what_this_python_has(checkout):
    (checkout / "constraints.txt").write_text("torch==1.0\ncupy-cuda13x==1.0\ntriton==1.0\nabsent==2.0\n")
    make(checkout, "EXTRAS=core", "TORCH=system", f"PYTHON={sys.executable}")
    assert (checkout / ".venv" / "constraints.txt").read_text() == "absent==2.0\n"
    where = "import torch; print(torch.__file__)"
    ours = subprocess.check_output([sys.executable, "-c", where], text=True)
    assert subprocess.check_output([python(checkout), "-c", where], cwd="/", text=True) == ours


@pytest.mark.slow
def test_a_bundle_installs_without_a_network(checkout, tmp_path, monkeypatch):
    index, wheels = tmp_path / "index", tmp_path / "the wheels"
    index.mkdir()
    info = "tool-3.dist-info/"
    with zipfile.ZipFile(index / "tool-3-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tool.py", "")
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: tool\nVersion: 3\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")
    (checkout / "pyproject.toml").write_text(PYPROJECT.replace("dev = []", 'dev = ["tool"]'))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    command = ["make", "bundle", f"WHEELS={wheels}", "EXTRAS=core"]
    said = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout
    assert "1 wheels in" in said and sorted(p.name for p in wheels.iterdir()) == [
        "bundle.json",
        "tool-3-py3-none-any.whl",
    ]

    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")  # nobody answers there
    shutil.rmtree(checkout / ".venv")
    assert "EXTRAS=core" in make(checkout, f"WHEELS={wheels}")  # as the bundle was made
    assert subprocess.run([python(checkout), "-c", "import backend, tool"], cwd="/").returncode == 0
    assert make(checkout) == ""  # and needs the folder no more


@pytest.mark.parametrize(
    "made, words", [(None, "no whole bundle"), ({"python": "3.10", "extras": "all"}, "is for Python 3.10")]
)
def test_a_folder_that_is_no_bundle_for_this_python(tmp_path, made, words):
    if made:
        (tmp_path / "bundle.json").write_text(json.dumps(made))
    with pytest.raises(install.Problem) as raised:
        install.bundled(str(tmp_path))
    assert words in raised.value.sentence and str(tmp_path) in raised.value.mend
