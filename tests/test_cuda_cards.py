"""Every CUDA source of the course compiles for every card that has its instructions, and fits its shared memory.

The compiler needs no GPU. Sources are found, not listed: the kernels of lessons 09 and 10, and in lessons and the files
beside them, solutions (which the labs are made from) and the conformance set what stands in a call of `cuda.RawModule`
or `cuda.compile`, with its options and name expressions, or in a string of its own.
"""

import ast
import contextlib
import json
import re
from functools import cache

import pytest
import torch

from helpers import ROOT, cuda, machine, source

CARDS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
PLAIN = tuple(card for card in CARDS if not card.endswith("a"))
BETWEEN = {"sm_86": ("sm_80", "sm_120"), "sm_89": ("sm_80", "sm_120"), "sm_100": ("sm_90", "sm_90")}
"""Cards for which make test does not compile: one that it does compile for has no instruction more, and one as much
shared memory. `test_a_card_that_is_left_out_has_nothing_of_its_own` watches that."""
each_card = pytest.mark.parametrize(
    "arch", [pytest.param(card, marks=pytest.mark.slow if card in BETWEEN else ()) for card in CARDS]
)
RUNGS = source.load("09_gemm", "ALL")
PROGRAMS = source.load("10_kernels", "PROGRAMS")
FOLDERS = ("notebooks", "solutions")
NEEDS = {
    r"wgmma|setmaxnreg": ("sm_90a",),
    r"cp\.async\.bulk|mbarrier\.try_wait|__cluster_dims__|__grid_constant__ TensorMap|cudaGridDependency": (
        "sm_90",
        "sm_100",
        "sm_120",
    ),  # fmt: skip
    r"cp\.async\b|__pipeline_memcpy_async|bfloat16|bf16": tuple(c for c in PLAIN if c != "sm_75"),
}
"""What a text is written in, and the cards that have it; a text with none of it is for all."""


def cards_of(code: str) -> tuple[str, ...]:
    return next((cards for names, cards in NEEDS.items() if re.search(names, code)), PLAIN)


def number(arch: str) -> str:
    return arch.rstrip("a")


def strings(tree: ast.AST) -> set[str]:
    """String literals with a whole kernel in them."""
    texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {text for text in texts if re.search(r"__global__[^;{}]*\w+\s*\([^;{}]*\)\s*\{.*\}", text, re.S)}


def calls(tree: ast.AST) -> list[tuple[str, set[str]]]:
    """The arguments of each call that compiles CUDA C, as the text of a dict, and the names that they use."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("cuda.RawModule", "cuda.compile"):
            given = {k.arg: k.value for k in node.keywords if k.arg in ("code", "options", "name_expressions")}
            given |= {"code": node.args[0]} if node.args else {}
            if not isinstance(given["code"], ast.Name | ast.Constant):
                continue  # broken on purpose, or varied by a loop
            text = "{" + ", ".join(f"{name!r}: {ast.unparse(value)}" for name, value in given.items()) + "}"
            used = (n for value in given.values() for n in ast.walk(value))
            found.append((text, {n.id for n in used if isinstance(n, ast.Name)}))
    return found


def in_python(path) -> list[tuple[str, tuple, tuple]]:
    return [(text, (), ()) for text in sorted(strings(ast.parse(path.read_text())))]


def in_notebook(path) -> list[tuple[str, tuple, tuple]]:
    """(code, options, name expressions) of the CUDA C in a notebook. A call inside a function whose arguments are the
    function's own is passed over: what it is given stands in a string, which is compiled as it is."""
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    texts = ["\n".join("" if line.startswith(("%", "!")) else line for line in "".join(c["source"]).splitlines())
             for c in cells]  # fmt: skip
    out = {}
    for tree in map(ast.parse, texts):
        for text, names in calls(tree):
            try:
                module = source.run(source.notebook(path, *names), path.stem) if names else None
            except source.Missing:
                continue
            given = eval(text, dict(vars(module)) if module else {})
            key = given["code"], tuple(given.get("options", ())), tuple(given.get("name_expressions", ()))
            out[key] = None
    compiled = {code for code, *_ in out}
    for tree in map(ast.parse, texts):
        out |= {(text, (), ()): None for text in strings(tree) if text not in compiled}
    return list(out)


@cache
def asked() -> dict[tuple[str, str], tuple]:
    """(what, arch) -> (arguments of `cuda.compile`, threads a block, dynamic shared memory)."""
    asked = {}
    for rung in RUNGS:
        for arch in CARDS:
            if arch.endswith("a") != rung.arch.endswith("a") or rung.why_not(number(arch)):
                continue
            dtypes = [d for d in rung.dtypes if arch != "sm_75" or d != torch.bfloat16]
            # the other dtype differs in a word: on one card it is tried too
            for dtype in dtypes if arch in ("sm_80", "sm_90a") else dtypes[:1]:
                for gelu in {False, rung.gelu}:
                    options, config = rung.options(number(arch), dtype, gelu), rung.config(number(arch))
                    what = f"{rung} {dtype}{' gelu' if gelu else ''}"
                    asked[what, arch] = (rung.code, arch, options, ()), config.threads, config.shared
    for program in PROGRAMS:
        for arch in CARDS:
            if arch.endswith("a") != program.arch.endswith("a") or program.why_not(number(arch)):
                continue
            for sizes in program.sizes:
                options = program.options(sizes, number(arch))
                asked[f"{program} {sizes}", arch] = (program.code, arch, options, ()), 0, program.shared
    found = {path: in_notebook(path) for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.ipynb"))}
    found |= {path: in_python(path) for folder in ("notebooks", "tests/conformance")
              for path in sorted((ROOT / folder).glob("*.py"))}  # fmt: skip
    for path, sources in found.items():
        for i, (code, options, names) in enumerate(sources):
            fixed = [o.partition("=")[2] for o in options if o.startswith("-arch=")]
            for arch in fixed or cards_of(code):
                asked[f"{path.relative_to(ROOT)} {i}", arch] = (code, arch, options, names), 0, 0
    return asked


@cache
def compilations(arch: str) -> dict[str, tuple]:
    """What is for this card -> (Binary or CompileError, threads a block, dynamic shared memory)."""

    def made(*one):
        try:
            return cuda.compile(*one)
        except cuda.CompileError as error:
            return error

    ours = {what: those for (what, card), those in asked().items() if card == arch}
    with contextlib.suppress(cuda.CompileError):  # which of them it was is asked one by one
        cuda.compile_all(one for one, *_ in ours.values())
    return {what: (made(*one), threads, shared) for what, (one, threads, shared) in ours.items()}


@each_card
def test_it_compiles_for_the_cards_that_have_its_instructions(arch):
    wrong = {what: str(made) for what, (made, *_) in compilations(arch).items() if isinstance(made, Exception)}
    assert compilations(arch) and not wrong


@each_card
def test_it_fits_the_card(arch):
    wrong = []
    for what, (made, threads, shared) in compilations(arch).items():
        if isinstance(made, Exception):
            continue
        for name, needs in made.kernels.items():
            if needs.shared_bytes + shared > machine.shared_limit(number(arch)):
                wrong.append(f"{what}, {name}: {needs.shared_bytes + shared:,} bytes of shared memory")
            most = threads or needs.max_threads
            if -(-needs.registers // 8) * 8 * most > 65536:
                wrong.append(f"{what}, {name}: {most} threads of {needs.registers} registers")
    assert not wrong


@pytest.mark.parametrize("arch", BETWEEN)
def test_a_card_that_is_left_out_has_nothing_of_its_own(arch):
    """The same texts are for it, with the same macros, threads and shared memory, as for one that is compiled for."""

    def of(card):
        plain = {what: those for (what, one), those in asked().items() if one == card}
        return {
            what: (code, [o for o in options if not o.startswith("-arch=")], names, *sizes)
            for what, ((code, _, options, names), *sizes) in plain.items()
        }

    older, alike = BETWEEN[arch]
    assert machine.shared_limit(arch) == machine.shared_limit(alike)
    assert (
        not {older, alike} & set(BETWEEN)
        and of(arch).items() <= of(alike).items()
        and of(arch).keys() <= of(older).keys()
    )


def test_every_file_of_lesson_10_is_a_program():
    files = sorted(p.name for p in (ROOT / "notebooks/10_kernels").glob("*.cu"))
    assert sorted(program.path.name for program in PROGRAMS) == files


@pytest.mark.parametrize("rung", [r for r in RUNGS if r.arch != "sm_75"], ids=str)
def test_a_card_that_a_rung_is_not_for_could_not_run_it(rung):
    arch = "sm_100" if rung.arch.endswith("a") else "sm_75"
    assert rung.why_not(arch)
    options = [o for o in rung.options(number(rung.arch)) if not o.startswith("-arch")]
    with pytest.raises(cuda.CompileError):
        cuda.compile(rung.code, arch, options)


@pytest.mark.parametrize("path", [p for folder in FOLDERS for p in sorted((ROOT / folder).glob("*.ipynb"))], ids=str)
def test_no_kernel_of_a_notebook_is_overlooked(path):
    """Each name of a kernel in its cells stands in a source that was compiled."""
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    named = {name for c in cells for name in re.findall(r"get_function\(\"(\w+)\"\)", "".join(c["source"]))}
    known = {
        re.sub(r"<.*", "", name)
        for arch in CARDS
        if arch not in BETWEEN
        for what, (made, *_) in compilations(arch).items()
        if what.startswith(str(path.relative_to(ROOT))) and not isinstance(made, Exception)
        for name in made.kernels
    }
    assert named - {"gemm"} <= known  # the ladder's
