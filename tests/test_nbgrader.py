"""An instructor may grade the labs with nbgrader: solved gives full marks. It is none of the course's dependencies."""

import csv
import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import nbformat
import pytest

from helpers import exercises, labs, machine, notebooks

LAB = "01_measuring"
[SOURCE] = [path for path in labs.sources() if path.stem == LAB]


@pytest.fixture(scope="module")
def nbgrader(tmp_path_factory):
    """A function that runs nbgrader's commands, from an environment of its own that sees the course's packages."""
    folder = tmp_path_factory.mktemp("nbgrader")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    ).stdout.strip()
    Path(packages, "course.pth").write_text("\n".join({sysconfig.get_path(p) for p in ("purelib", "platlib")}) + "\n")
    # it starts alembic by its name, which must be of this environment even where JupyterHub has brought the course one
    for what in (["nbgrader>=0.9.5,<1"], ["--force-reinstall", "--no-deps", "alembic"]):
        line = [python, "-m", "pip", "install", "--disable-pip-version-check", *what]
        done = subprocess.run(line, capture_output=True, text=True, timeout=600)
        if done.returncode and re.search(r"connection (broken|error)|unreachable|name resolution", done.stderr, re.I):
            pytest.skip("there is no network to install nbgrader from")
        assert done.returncode == 0, done.stderr
    env = {**os.environ, "PYTHONPATH": machine.python_path(), "JUPYTER_CONFIG_DIR": str(folder / "config")}
    env["PATH"] = os.pathsep.join([str(python.parent), env["PATH"]])

    def run(course, *arguments):
        line = [python, "-m", "nbgrader", *map(str, arguments)]
        done = subprocess.run(line, cwd=course, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_solved_gives_full_marks_and_unsolved_none(nbgrader, tmp_path):
    (tmp_path / "nbgrader_config.py").write_text(
        "c = get_config()\nc.CourseDirectory.course_id = 'ladder'\nc.Execute.timeout = 300\n"
    )
    notebooks.save(notebooks.read(SOURCE), tmp_path / "source" / LAB / SOURCE.name)
    nbgrader(tmp_path, "generate_assignment", LAB)
    released = nbformat.read(tmp_path / "release" / LAB / SOURCE.name, as_version=4)
    built = labs.built(notebooks.read(SOURCE))
    assert [cell.source for cell in released.cells] == [cell.source for cell in built.cells]

    submitted = tmp_path / "submitted"
    notebooks.save(notebooks.read(SOURCE), submitted / "solved" / LAB / SOURCE.name)
    notebooks.save(built, submitted / "unsolved" / LAB / SOURCE.name)
    nbgrader(tmp_path, "autograde", LAB)
    nbgrader(tmp_path, "export", "--to", tmp_path / "grades.csv")
    with (tmp_path / "grades.csv").open(newline="") as file:
        marks = {row["student_id"]: (float(row["score"]), float(row["max_score"])) for row in csv.DictReader(file)}
    points = sum(e.points for e in exercises.every().values() if e.lab == LAB)
    assert marks == {"solved": (points, points), "unsolved": (0, points)}
