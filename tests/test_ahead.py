"""Kernels of an answer that are compiled ahead of their launches: those that will be launched, and no others."""

import textwrap

import pytest

from helpers import child, machine
from helpers.checks.judge import Trial
from helpers.exercises import every
from tests.answers import solved

KERNEL = textwrap.dedent(
    """
    import torch
    import triton
    import triton.language as tl


    @triton.jit
    def part(x_ptr, y_ptr, n, stride, scale, nothing, BLOCK: tl.constexpr, KIND: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + i * stride, (tl.load(x_ptr + i, mask=i < n) * scale).to(KIND), mask=i < n)


    part_tuned = triton.heuristics({"BLOCK": lambda given: 64})(part)
    SIZES = (40, 1), (32, 1), (48, 2), (33, 16), (33, 17)


    def launches(**how):
        for dtype in (torch.float16, torch.float32):
            for n, stride in SIZES:
                for first in (0, 1):  # the second one does not lie at 16 bytes
                    x, y = torch.zeros(n + 1, dtype=dtype)[first:], torch.zeros(64 * stride, dtype=dtype)
                    arguments = x, y, n, stride, 0.5, None
                    kind = {torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
                    if how:
                        part.run(*arguments, 64, kind, grid=(1,), num_warps=2, **how)
                    else:
                        part_tuned[(1,)](*arguments, KIND=kind, num_warps=2)
    """
)

NOTE = """
from helpers.stage import watching

noted = watching.Launches()
watching.watch_triton(noted, interpreted=True)
launches()
"""

COMPILE = """
import sys
from helpers.stage import watching
from triton.backends.compiler import GPUTarget


class Card:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


triton.runtime.driver.set_active(Card())
compiled = []
triton.knobs.compilation.listener = lambda **about: compiled.append(about["cache_hit"])


def compile_and_launch(ahead):
    watching.compile_ahead(sys.modules["cells"], ahead)
    before = len(compiled)
    launches(warmup=True)
    return before, len(compiled) - before
"""


@pytest.mark.parametrize("known", [True, False])
def test_a_launch_finds_what_was_compiled_ahead(known, tmp_path):
    noted = child.run(KERNEL + NOTE, "noted.to_launch", interpreted=True, env={"HELPERS_MODE": "cpu"})
    assert noted.ok, noted.stderr
    assert len(noted.value) == 20  # 2 dtypes, 5 kinds of sizes, 2 kinds of addresses
    env = {"HELPERS_MODE": "cpu", "TRITON_CACHE_DIR": tmp_path}
    ahead = noted.value if known else noted.value[:2]
    done = child.run(KERNEL + COMPILE, f"compile_and_launch({ahead!r})", interpreted=False, env=env, seconds=120)
    assert done.ok, done.stderr
    assert done.value == ([20, 0] if known else [2, 18])


def test_what_cannot_be_compiled_is_left_to_its_launch():
    call = "watching.compile_ahead(sys.modules['cells'], [{'kernel': 'gone'}, {'kernel': 'part', 'examples': {}}])"
    done = child.run(KERNEL + COMPILE, call, interpreted=False, env={"HELPERS_MODE": "cpu"})
    assert done.ok, done.stderr


def test_what_only_the_cpu_is_given_is_not_compiled_ahead():
    """Its blocks of 16,384 would take the compiler longer than all others together."""
    trial = Trial(every()["row-softmax"], solved("row-softmax"), seed=7, seconds=60)
    left, _ = trial.played("cpu", list(trial.cases("cpu")))
    end = left[-1][0]
    launched = {kind: {launch["constants"]["BLOCK"] for launch in end[kind]} for kind in ("to_launch", "to_compile")}
    assert launched["to_compile"] - launched["to_launch"] == {"16384"}


@pytest.mark.parametrize(("name", "passes"), [("gemm-layout", 2), ("graph-breaks", 2), ("hlo-bytes", 1)])
def test_what_loads_while_the_first_pass_runs_is_what_the_second_runs_in(name, passes, monkeypatch):
    exercise, begun, used = every()[name], [], []
    monkeypatch.setattr(machine, "gpu", lambda: True)
    monkeypatch.setattr(child, "warm", lambda **what: begun.append(kind(**what)))
    left = child.Result(None, "", "", 0, None, False, 0.0)
    monkeypatch.setattr(child, "run", lambda *_, **asked: used.append(kind(**asked)) or left)
    monkeypatch.setattr(Trial, "prepare", lambda self: None)
    monkeypatch.setattr(Trial, "job", lambda self, mode, cases, speed=None: ({}, []))
    monkeypatch.setattr(Trial, "passes", lambda self: self.played("gpu", [])[0])
    Trial(exercise, solved(name), 0, 60).run()
    assert begun == (used if passes == 2 else []) and len(used) == 1


def kind(interpreted=False, inductor=False, packages="", **_):
    return packages or child._kind(interpreted, inductor)
