"""The project's own files agree with one another: dependencies, pins, environment.yml, Makefile, README, form."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from helpers import ROOT, install

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = [Requirement(line) for lines in (PROJECT["dependencies"], *EXTRAS.values()) for line in lines]
DIRECT = [r for r in DIRECT if r.name != PROJECT["name"]]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PINS = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}


def test_constraints_are_plain_versions():
    """No addresses, no local labels such as +cpu, no paths, no markers; each name once."""
    odd = [line for line in LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line)]
    assert not odd
    assert len(PINS) == len(LINES)


@pytest.mark.parametrize("wanted", DIRECT, ids=lambda r: r.name)
def test_every_direct_dependency_is_pinned_within_its_range(wanted):
    assert canonicalize_name(wanted.name) in PINS
    assert wanted.specifier.contains(PINS[canonicalize_name(wanted.name)], prereleases=True)


@pytest.mark.skipif(install.state() == "absent" or sys.prefix != install.venv(), reason="not in .venv")
def test_this_environment_has_the_pinned_versions():
    if install.read(install.venv("asked")).get("torch") == "system":
        pytest.skip("TORCH=system keeps an image's versions")
    # not the version that the path finds last: setuptools puts copies of its own at the end of the path
    names = {canonicalize_name(d.metadata["Name"]) for d in metadata.distributions()} & set(PINS)
    assert {name: Version(metadata.version(name)).public for name in names} == {name: PINS[name] for name in names}


def test_environment_yml_is_the_same_environment():
    lines = (ROOT / "environment.yml").read_text().splitlines()
    assert lines[lines.index("channels:") + 1 :] == [
        "  - conda-forge",
        "dependencies:",
        "  - python=3.12",
        "  - pip",
        "  - pip:",
        "      - -c constraints.txt",
        "      - -e .[all]",
    ]


def test_extras_are_what_make_takes():
    def flat(extra):
        [line] = [Requirement(line) for line in EXTRAS[extra]]
        return line.extras

    assert flat("core") == {"cuda13", "dev"}
    assert flat("all") == {"cuda13", "dev", *install.RUNGS}


def test_optional_wheels_carry_a_marker():
    """A wheel that a platform lacks must not fail the whole installation there."""
    pure = {"furo", "jax", "jupyterhub", "myst-nb", "nbval", "playwright", "pytest", "ruff", "sphinx"}
    bare = [r.name for extra in EXTRAS for r in map(Requirement, EXTRAS[extra]) if r.marker is None]
    assert set(bare) - pure == {PROJECT["name"]}


def test_python_versions_agree():
    low, high = install.OLDEST, install.NEWEST
    assert PROJECT["requires-python"] == f">={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"


def test_an_old_python_can_read_the_installer():
    """It has to say in words that it is too old."""
    ast.parse((ROOT / "helpers/install.py").read_text(), feature_version=(3, 6))


def test_what_helpers_imports_is_declared():
    declared = {canonicalize_name(r.name) for r in DIRECT}
    owners = metadata.packages_distributions()
    missing = set()
    for path in (ROOT / "helpers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names} - {"helpers", *sys.stdlib_module_names}:
                if not {canonicalize_name(owner) for owner in owners.get(top, [])} & declared:
                    missing.add(f"{path.name} imports {top}")
    assert not missing


def make(*arguments):
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}  # make may have started these tests
    done = subprocess.run(["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {name for line in re.findall(r"^([a-z -]+):(?!=)", MAKEFILE, flags=re.MULTILINE) for name in line.split()}


def test_make_alone_lists_every_command():
    status, said = make()
    assert status == 0
    listed = set(re.findall(r"make ([a-z-]+)", said))
    assert listed == TARGETS - {"help"}


def test_commands_in_the_readme_exist():
    assert set(re.findall(r"(?:^|`|!|&& )make ([a-z][a-z-]*)", README, flags=re.MULTILINE)) <= TARGETS
    options = set(re.findall(r"\b([A-Z][A-Z_]+)=", README)) - {"HELPERS_MODE"}
    assert options == {"EXTRAS", "TORCH", "PYTHON", "LAB_ARGS", "TEST_ARGS", "PART", "WHEELS"}
    assert options == set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, flags=re.MULTILINE))


def test_the_readme_tells_each_command_of_the_course():
    named = re.findall(r'commands\.add_parser\(\s*"(\w+)"', (ROOT / "helpers" / "__main__.py").read_text())
    assert len(named) > 9
    table = re.findall(r"^\| `python -m helpers (\w+)", README, flags=re.MULTILINE)
    assert sorted(set(table)) == sorted(named)


def test_licence_is_the_one_that_is_declared():
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_form(command):
    done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_modules_import_only_what_stands_before_them_in_the_list():
    listed = re.search(r"stand before it in this list: ([\w, ]+)\.", (ROOT / "CONTRIBUTING.md").read_text())[1]
    order = listed.split(", ")
    package = ROOT / "helpers"
    modules = {path.relative_to(package).parts[0].removesuffix(".py") for path in package.rglob("*.py")}
    assert modules - {"__init__", "__main__"} == set(order)
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        name = parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.ImportFrom) and node.level == len(parts) and name in order):
                continue
            taken = {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
            upward = {other for other in taken & set(order) if order.index(other) > order.index(name)}
            # the doctor ends by starting the trials, which are written in its terms
            assert upward <= ({"trials"} if name == "doctor" else set()), f"{path}: {upward}"
