"""Each gap of nbval that tests/nbval_fixes.py closes, shown on notebooks of one to three cells."""

import re
import subprocess
import sys

import nbformat
import pytest

from helpers import notebooks

LESSONS = {
    "sound": ["x = 1", "x + In.count('x = 1')"],
    "dead": ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "1", "2"],
    "magic": ["%no_such_magic"],
    "raises": ["# raises-exception\n1 / 0", "1"],
    "silent": ["# raises-exception\n1 + 1", "2"],
    "cascade": ["x = 1 / 0", "x", "x"],
    "warning": ["import warnings; warnings.warn('deprecated')"],
    "c_stderr": ["import os, time; os.write(2, b'a C library complains\\n'); time.sleep(0.5)"],
}


def run(folder, lessons, *options):
    """Run pytest on these notebooks: ({name: [outcome of each cell]}, what pytest printed)."""
    for name, sources in lessons.items():
        cells = [nbformat.v4.new_code_cell(source, id=f"c-{i}") for i, source in enumerate(sources)]
        for cell in cells:
            cell.metadata["tags"] = ["raises-exception"] if cell.source.startswith("# raises-exception") else []
        nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "--color=no", "--nbval-lax", *options, "."]
    env = notebooks.kernel_environment({"PYTEST_ADDOPTS": ""})
    # less time for all of them than the plugin gives one cell
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    found = re.findall(r"^(\w+)(?:\.|::)ipynb::Cell \d+ (PASSED|FAILED|SKIPPED)", done.stdout, re.MULTILINE)
    outcomes = {name: [what.lower() for n, what in found if n == name] for name in lessons}
    return outcomes, done.stdout


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return run(tmp_path_factory.mktemp("lessons"), LESSONS, "-p", "tests.nbval_fixes")


def test_a_sound_notebook_passes_and_leaves_history(ran):
    assert ran[0]["sound"] == ["passed", "passed"], ran[1]


def test_a_dead_kernel_fails_within_seconds_and_the_rest_is_skipped(ran):
    """Within the time that `run` gives to all of them, less than a cell's own limit."""
    assert ran[0]["dead"] == ["failed", "skipped", "skipped"], ran[1]
    assert "the kernel died" in ran[1]


def test_an_unknown_magic_fails(ran):
    assert ran[0]["magic"] == ["failed"], ran[1]


def test_raises_exception_must_raise(ran):
    assert ran[0]["raises"] == ["passed", "passed"], ran[1]
    assert ran[0]["silent"] == ["failed", "skipped"], ran[1]
    assert "nothing was raised" in ran[1]


def test_after_a_failure_the_rest_of_that_notebook_is_skipped(ran):
    assert ran[0]["cascade"] == ["failed", "skipped", "skipped"], ran[1]
    assert "Cell 0 (c-0) failed, further up" in ran[1]


def test_what_goes_to_stderr_fails(ran):
    assert ran[0]["warning"] == ran[0]["c_stderr"] == ["failed"], ran[1]
    assert "a C library complains" in ran[1]


@pytest.mark.slow
def test_nbval_alone_has_these_gaps(tmp_path):
    """The reason for the plugin: where this fails, nbval has closed a gap and the plugin can shrink."""
    lessons = {name: LESSONS[name] for name in ("magic", "silent", "warning", "cascade")}
    outcomes, said = run(tmp_path, lessons, "--nbval-current-env")
    assert outcomes["magic"] == outcomes["warning"] == ["passed"], said
    assert outcomes["silent"] == ["passed", "passed"], said
    assert outcomes["cascade"] == ["failed", "failed", "failed"], said


def test_checks_are_strict_in_solutions_and_leave_no_trace_from_labs(tmp_path):
    asks = "import os; seen = os.environ.get('HELPERS_STRICT'), os.environ.get('HELPERS_PROGRESS'); assert seen == "
    for folder, expected in {"solutions": ("1", None), "labs": (None, ""), "notebooks": (None, None)}.items():
        (tmp_path / folder).mkdir()
        cell = nbformat.v4.new_code_cell(f"{asks}{expected}", id="c-0")
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / folder / "asks.ipynb")
    _, said = run(tmp_path, {}, "-p", "tests.nbval_fixes")
    assert "3 passed" in said, said
