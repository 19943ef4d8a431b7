"""Lab 11 without its packages; what a text of Mojo may hold; and where its faults are told."""

import contextlib

import pytest

from helpers import apart, checks, child, machine, mojo
from helpers.checks import judge, rules
from helpers.checks.judge import Trial
from helpers.checks.verdict import Finding
from helpers.exercises import every
from tests.answers import solved

mojo_is_here = pytest.mark.skipif(mojo.problem() is not None, reason="Mojo is not installed")
EXERCISE, OPERATOR = every()["vector-sum"], every()["max-operator"]


@pytest.fixture
def without_mojo(monkeypatch):
    problem = machine.NotReady("MAX is not installed.", apart.INSTALL)
    monkeypatch.setattr(apart, "problem", lambda package, **named: problem)


@pytest.mark.parametrize("name", ["vector-sum", "tiled-product", "specialised-window", "max-operator"])
def test_without_mojo_nothing_is_judged_and_the_command_is_named(without_mojo, name):
    verdict = judge(every()[name], solved(name))
    assert (verdict.passed, verdict.kind) == (None, "environment"), verdict
    assert "MAX is not installed." in verdict.findings[0].message and apart.INSTALL in verdict.findings[0].message


def test_a_notebook_goes_on_without_mojo_but_nbgrader_gives_no_point(without_mojo, monkeypatch):
    monkeypatch.setenv("HELPERS_PROGRESS", "")
    monkeypatch.setenv("HELPERS_STRICT", "1")
    monkeypatch.setattr("helpers.source.live", lambda name: solved(EXERCISE.name))
    checks.check(EXERCISE.name, "a text")
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    with pytest.raises(checks.NotPassed, match="MAX is not installed"):
        checks.check(EXERCISE.name, "a text")


def found(code: str, exercise=EXERCISE) -> list[tuple[int, str]]:
    return rules.broken(f'{exercise.entry} = r"""\n{code}\n"""\n', exercise)


@pytest.mark.parametrize("name", ["vector-sum", "tiled-product", "specialised-window", "max-operator"])
def test_the_courses_texts_break_no_rule(name):
    assert rules.broken(solved(name), every()[name]) == []


@pytest.mark.parametrize(
    "code",
    [
        "from std.math import exp, sqrt as root\nfrom std.memory import (\n    AddressSpace,\n    stack_allocation,\n)",
        "def open_end(max: Int) -> Int:\n    return max  # import os, std.os, `x`",
        "def f():\n    '''Reads open(\"x\") and \\n std.os.'''\n    print(\"from std.os import\", max(1, 2))",
        "comptime std_deviation = 1\nvar t00 = 1",
        "@always_inline\ndef f(x: Int) -> Int:\n    return x",
    ],
)
def test_what_computes_is_allowed(code):
    assert found(code) == []


@pytest.mark.parametrize(
    "line",
    [
        "from std.os import getenv",
        "from std.ffi import external_call",
        "from std.sys import simd_width_of, exit",
        "from std.math import *",
        "from .program import x",
        "from main import rows",
        "import std.os",
        "import std.os as math",
        "from std import os",
        "from std.math import exp; import std.os",
        "from \\\n  std.os import getenv",
        "    print(std.os.getenv('HOME'))",
        "    print(std . os . getenv('HOME'))",
        "    print(max.gpu.host.DeviceContext())",
        "    print(`std`.os)",
        '    print(t"{std.os.getenv(x)}")',
        "    with open('x') as f:",
        "    print(1, file=3)",
        "    var p = Pointer[Int, MutAnyOrigin](unsafe_from_address=8)",
        "    _ = __mlir_op.`index.add`",
        "@export",
        "@extensibility.register('token_shift')",
        "def f() abi('C'):",
    ],
)
def test_what_reaches_further_is_refused_at_its_line(line):
    said = found(f"comptime F = DType.float32\n\n{line}\n")
    assert said and said[0][0] in (4, 5), said


def test_an_operator_may_use_what_it_needs_and_no_other_text_may():
    code = "import extensibility\nfrom max.gpu.host import DeviceContext\n\n\n"
    code += '@extensibility.register("x")\nstruct X:\n    pass'
    assert found(code, OPERATOR) == [] and len(found(code)) >= 3


@pytest.mark.parametrize(
    "text",
    ['SUM_OF_SQUARES = "a" + "b"', "SUM_OF_SQUARES = open('x').read()", 'print(1)\nSUM_OF_SQUARES = "a"', "x = 1"],
)
def test_no_python_of_an_answer_is_run(text):
    [(_, said)] = rules.broken(text, EXERCISE)
    assert "not one text that is written out" in said


@mojo_is_here
def test_the_stub_of_a_lab_is_refused_by_the_compiler_with_its_words():
    with pytest.raises(mojo.CompileError, match="line 2: .*not written yet"):
        mojo.run('def main():\n    comptime assert False, "not written yet"\n')


@mojo_is_here
@pytest.mark.slow
def test_faults_of_a_kernel_name_the_line_of_mojo():
    text = solved("tiled-product").replace("        barrier()\n        comptime for i", "        comptime for i")
    verdict = judge(every()["tiled-product"], text)
    assert verdict.kind == "race" and "sum += shared_a[unsafe_offset=ty * TILE + i]" in str(verdict), verdict
    text = solved("tiled-product").replace(
        "        barrier()\n        comptime for i", "        barier()\n        comptime for i"
    )
    verdict = judge(every()["tiled-product"], text)
    number = text.partition('r"""')[2].splitlines().index("        barier()") + 1
    assert verdict.kind == "compile" and f"line {number}: " in str(verdict), verdict


@mojo_is_here
@pytest.mark.slow
@pytest.mark.parametrize(
    ("find", "replace"),
    [
        ("return here + share", "return missing + share"),
        ("var share", 'comptime assert width == 1, "one at a time"\n            var share'),
    ],
)
def test_what_max_refuses_of_an_operator_is_said_at_its_line(find, replace):
    verdict = judge(OPERATOR, solved(OPERATOR.name).replace(find, replace))
    assert verdict.kind == "compile" and replace.splitlines()[0] in str(verdict), verdict


@pytest.fixture
def told(monkeypatch, tmp_path):
    """What judging an operator on a GPU does, in order, where MAX compiles it without an end."""
    told = []

    class Begun:
        def __init__(self, argv, env):
            assert "token_shift" in argv[-1] and "'gpu')" in argv[-1] and env == mojo.OFF
            compile(argv[-1], "compiling", "exec")
            told.append("begun")

        def result(self, seconds):
            told.append(f"awaited for {seconds} s")

        def end(self):
            told.append("ended")

    def on(self, mode):
        told.append(mode)
        return [Finding("compile", "MAX refuses it.")] * ("missing" in self.text)

    monkeypatch.setattr(apart, "problem", lambda package, **named: None)
    monkeypatch.setattr(machine, "cache", lambda name: tmp_path)
    monkeypatch.setattr(machine, "gpu", lambda: True)
    monkeypatch.setattr(child, "warm", lambda **what: None)
    monkeypatch.setattr(child, "begin", lambda argv, env: Begun(argv, env))
    monkeypatch.setattr(Trial, "prepare", lambda self: None)
    monkeypatch.setattr(Trial, "lock", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(Trial, "on", on)
    return told


def test_an_operator_is_compiled_for_the_gpu_while_the_first_pass_compiles_it_for_the_cpu(told):
    """And the second pass begins when that is done."""
    assert Trial(OPERATOR, solved(OPERATOR.name), 0, 60).run() == []
    assert told == ["begun", "cpu", "awaited for 60 s", "gpu", "ended"]
    del told[:]
    assert Trial(OPERATOR, solved(OPERATOR.name), 0, 60, sealed=True).run() == []
    assert told == ["cpu", "gpu"]  # the text of a model is compiled where it is sealed in


def test_nobody_waits_for_the_second_compilation_of_what_the_first_pass_refuses(told):
    wrong = solved(OPERATOR.name).replace("return here", "return missing")
    assert [found.kind for found in Trial(OPERATOR, wrong, 0, 60).run()] == ["compile"]
    assert told == ["begun", "cpu", "ended"]


def test_where_no_process_can_be_begun_the_second_pass_compiles_by_itself(told, monkeypatch):
    monkeypatch.setattr(child, "begin", lambda argv, env: None)
    assert Trial(OPERATOR, solved(OPERATOR.name), 0, 60).run() == []
    assert told == ["cpu", "gpu"]


@pytest.mark.slow
@mojo_is_here
def test_of_a_kernel_that_never_ends_no_line_of_the_checks_own_is_told():
    text = solved("tiled-product").replace("for start in range(0, k, TILE):", "var start = 0\n    while start < k:")
    finding = judge(every()["tiled-product"], text, seconds=5).findings[0]
    assert finding.kind == "timeout" and "in your code" in finding.message and "multiplied" not in finding.message
