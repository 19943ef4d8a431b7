"""Slices: what they hold, what they leave out, that they run alone, and what is said when a name is missing."""

import gc
import json
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers import slicing, source
from helpers.slicing import module_text


def slice_of(*cells_and_names):
    *cells, names = cells_and_names
    return module_text([textwrap.dedent(c) for c in cells], names.split(), "these cells")


def value(name, *cells):
    """The value of `name` after its slice alone has run."""
    space = {"__name__": "alone"}
    exec(slice_of(*cells, name), space)
    return space[name]


def test_keeps_what_a_function_needs_and_nothing_else():
    text = slice_of(
        "import helpers\nhelpers.start()\nimport math as m, json\nfrom os import path",
        "SIZE = 4  # elements\nother = 1\nprint(other)",
        "def area(r):\n    return m.pi * r * SIZE",
        "area",
    )
    assert text == "import math as m, json\nSIZE = 4  # elements\n\n\ndef area(r):\n    return m.pi * r * SIZE\n"


def test_last_binding_wins_for_bodies_and_the_binding_before_its_use_for_statements():
    cells = ["scale = 2", "def f(x):\n    return x * scale", "early = f(1)", "scale = 5", "late = f(1)"]
    assert value("early", *cells) == 2
    assert value("late", *cells) == 5
    assert value("f", *cells)(1) == 5
    assert value("x", "x = 1", "x = x + 1", "x = x + 1") == 3  # a cell that was run twice
    assert "x = 1" not in slice_of("x = 1", "x = 2", "x")


@pytest.mark.parametrize(
    "name, expected, cells",
    [
        ("x", 3, ["x = 1", "x += 2"]),
        ("x", 1, ["x = 1", "if False:\n    x = 2"]),
        ("x", [0, 1], ["x = []", "for i in range(2):\n    x.append(i)"]),
        ("x", 6, ["x = 0", "for i in range(4):\n    x += i"]),
        ("x", "ab", ["import io", "with io.StringIO('ab') as f:\n    x = f.read()"]),
        ("x", 0, ["try:\n    import nowhere_at_all as x\nexcept ImportError:\n    x = 0"]),
        ("x", [7, 2], ["x = [1, 2]", "x[0] = 7"]),
        ("x", [7, 2], ["x = [1, 2]", "i, v = 0, 7", "x[i] = v"]),
        ("x", [1, 2], ["x = [5]", "x[0] = 9", "x = [1, 2]"]),
        ("x", [2, 3], ["k = 2", "x = [i + j for i in range(2) for j in [k]]"]),
        ("x", 5, ["y = 4", "x = (lambda a: a + y)(1)"]),
        ("x", 3, ["a, *b = 1, 2, 3", "x = b[-1]"]),
        ("x", 2, ["a = 1; b = 2; c = 3", "x = b"]),
        ("x", 4, ["[(w := i) for i in range(5)]; z = 0", "v = [w := 4]", "x = w"]),
        (
            "x",
            8,
            [
                "n = 8",
                "class C:\n    size = n\n    def get(self):\n        return self.size",
                "x = C().get()",
            ],
        ),
        ("x", "é=1", ["a = 'é='; b = 1", "x = f'{a}{b}'"]),
        ("x", 3.0, ["from math import *", "x = sqrt(9)"]),
        ("x", 1, ["import os.path as p", "x = len(p.basename('/a/b'))"]),
        ("x", 2, ["match [1, 2]:\n    case [_, x]:\n        pass"]),
        ("x", 5, ["def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)", "x = f(5)"]),
        ("x", 9, ["count = 0", "def f():\n    global count\n    count += 9\n    return count", "x = f()"]),
        ("x", 1, ["%matplotlib inline\nx = 1\n!ls"]),
        ("x", 1, ["%%time\nx = 1", "%%bash\nx=2"]),
        ("x", 3, ["x = (7\n% 4)"]),
        ("x", 2, ["x = 2", "x = = 3"]),
        ("x", 6, ["x: int = 6", "x: float"]),
    ],
)
def test_a_slice_runs_alone(name, expected, cells):
    assert value(name, *cells) == expected


def test_changes_of_tensors_and_seeds_are_kept_and_shows_are_not():
    text = slice_of(
        "import torch\ntorch.manual_seed(0)\nx = torch.zeros(3)\nx[0] = 3\nx.add_(1)\nx.sum()\nx.show = 2\nprint(x)",
        "x",
    )
    assert text.splitlines() == [
        "import torch", "torch.manual_seed(0)", "x = torch.zeros(3)", "x[0] = 3", "x.add_(1)", "x.show = 2"
    ]  # fmt: skip


def test_what_is_registered_with_an_operator_is_kept():
    cell = (
        "op = make()\n@op.register_fake\ndef shape(x):\n    return like(x)\nop.register_autograd(back)\nop.show()\n"
        "@other.register_fake\ndef apart(x):\n    return x\ndef model(x):\n    return op(x)"
    )
    text = slice_of("def make(): pass\nlike = back = make\nother = make()", cell, "model")
    assert "register_fake\ndef shape" in text and "like = back" in text and "op.register_autograd(back)" in text
    assert "show" not in text and "apart" not in text


def test_future_imports_come_first():
    assert slice_of("x = 1", "from __future__ import annotations\ny: int = x", "y").startswith("from __future__")


def test_missing_says_what_and_where():
    with pytest.raises(source.Missing, match=r"`b`, `c` are bound nowhere: looked in these cells\.") as caught:
        slice_of("def f():\n    return b + c + len([])", "f")
    assert caught.value.names == ("b", "c")
    with pytest.raises(source.Missing, match="`x` is bound nowhere"):
        slice_of("x = 1", "del x", "x")
    with pytest.raises(source.Missing, match="Cell 2 could not be read as Python"):
        slice_of("x = 1", "y = = 2", "y")


KERNEL = """
import torch, triton
import triton.language as tl
from functools import partial
BLOCK: tl.constexpr = tl.constexpr(8)
UNUSED = 3

@triton.jit
def twice(x):
    return 2 * x

@triton.jit
def kernel(x_ptr, o_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, B)
    tl.store(o_ptr + i, twice(tl.load(x_ptr + i, mask=i < n)), mask=i < n)

def double(x):
    o = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), BLOCK.value),)](x, o, x.numel(), B=8)
    return o
"""


def test_load_runs_a_notebooks_kernel(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(source, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "solutions").mkdir()
    cells = [{"cell_type": "code", "source": KERNEL.splitlines(keepends=True)}]
    (tmp_path / "notebooks" / "05_first.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "solutions" / "05_first.ipynb").write_text(
        json.dumps({"cells": [{"cell_type": "code", "source": "answer = 42\nraise SystemExit"}]})
    )
    double = source.load("05_", "double")
    x = torch.randn(20, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.testing.assert_close(double(x), 2 * x)
    assert source.load("05_", "double") is double
    assert source.load("05_first", "answer") == 42
    text = source.of(double)
    assert "UNUSED" not in text and "def twice" in text and source.of(double.__globals__["kernel"]) in text
    with pytest.raises(source.Missing, match=r"looked in notebooks/05_first.ipynb and solutions/05_first.ipynb"):
        source.load("05_", "nothing")
    with pytest.raises(FileNotFoundError, match="starts with '99_'"):
        source.load("99_", "double")


def test_live_reads_the_cells_as_last_run():
    script = """
        from IPython.core.interactiveshell import InteractiveShell
        run = lambda text: InteractiveShell.instance().run_cell(text, store_history=True).raise_error()
        run("a = 1\\ndef f():\\n    return a")
        run("%time a = 2\\na = 3")
        run("from helpers import source\\ntext = source.live('f')\\nb = 4")
        run("try:\\n    source.live('late')\\nexcept source.Missing as e:\\n    said = str(e)\\nlate = 1")
        run("print(text); print(said); print(source.of(f) == text)")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    said = "the cells run since this kernel started. Run the cell that defines it first."
    wanted = ["def f():", "    return a", "a = 3", f"`late` is bound nowhere: looked in {said}", "True"]
    assert [line for line in done.stdout.splitlines() if line][-5:] == wanted, done.stderr


def test_threads_may_parse_at_once():
    """Python 3.11 raises SystemError where another thread parses meanwhile, as one does that the collector let in."""
    deep, flat = "x = " + "(" * 40 + "1" + " + 1)" * 40, "y = 1\n" * 50
    callback, before, each = (lambda *_: time.sleep(0)), gc.get_threshold(), sys.getswitchinterval()
    gc.callbacks.append(callback)
    try:
        gc.set_threshold(5)
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as pool:
            for tree in pool.map(lambda i: [slicing.parse(deep if i % 2 else flat) for _ in range(20)][-1], range(160)):
                assert tree.body
    finally:
        gc.callbacks.remove(callback)
        gc.set_threshold(*before)
        sys.setswitchinterval(each)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_where_python_ends_them(end):
    """A statement is cut out where it stands, whatever letters and separators stand before it."""
    cell = end.join(
        ["é = '\u2028'; a = 'ü' + é; b = (a,", " 'ß'); c = b", "@staticmethod", "def f():", "    return c, '\x0c'"]
    )
    text = source.module_text([cell], ["f"], "here")
    space = {}
    exec(text, space)
    assert space["f"]() == (("ü\u2028", "ß"), "\x0c") and "@staticmethod" in text


def test_a_slice_of_anybodys_notebook_imports_nothing_of_theirs(tmp_path, monkeypatch):
    """A grader reads it in its own process, and whoever handed it in may have handed in a module too."""
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nx = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(source.Missing):
        slice_of("from theirs import *", "y = x", "y")
    for module in ("torch.utils.bottleneck.__main__", "torch.no_such"):
        with pytest.raises(source.Missing):
            slice_of(f"from {module} import *", "y = x_of_it", "y")
    assert not (tmp_path / "ran").exists()
    assert value("y", "from math import *", "y = sqrt(9)") == 3


def test_a_cell_of_a_thousand_magics_takes_no_minutes():
    assert slice_of("!ls\n" * 1000 + "x = 1", "x") == "x = 1\n"


@pytest.mark.parametrize("text", ["[]", '{"cells": 5}', '{"cells": [5]}', '{"cells": [{}]}', "[" * 100_000])
def test_json_that_is_no_notebook_is_said_to_be_none(tmp_path, text):
    (tmp_path / "a.ipynb").write_text(text)
    with pytest.raises(ValueError, match="JSON, but no notebook"):
        source.notebook(tmp_path / "a.ipynb", "x")
