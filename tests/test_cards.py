"""Every Triton kernel of lessons and labs 05 to 07 fits the shared memory of every card, launched as on that card.

The host functions are called with tensors of a GPU's sizes, on the CPU and untouched; what they launch is written
down, not run, and compiled for the card. The compiler does not ask how much a card has.
"""

import json
import re
from collections.abc import Callable

import pytest
import torch

from helpers import ROOT, machine, reveal, source
from helpers.exercises import Draw, every
from helpers.stage.watching import _to_compile
from tests.answers import solved

pytestmark = pytest.mark.skipif(machine.gpu(), reason="compiled as in CPU mode, for all cards")

CARDS = ("sm_75", "sm_86", "sm_90", "sm_100", "sm_80", "sm_120")
"""Those with the least shared memory for each kind of code first: the code for sm_80, sm_89 and sm_120 is like that for
sm_86, and there is as much room or more."""


def half(*shape):
    return torch.empty(shape, dtype=torch.float16)


LAUNCHES: dict[str, list[tuple[str, Callable]]] = {
    "05_triton_first_kernels": [
        ("add", lambda f: f(half(1 << 24), half(1 << 24))),
        ("copy", lambda f: f(half(1 << 24))),
        ("affine", lambda f: f(half(4096, 4096), half(4096), half(4096))),
        *[("softmax", lambda f, n=n: f(half(1 << 24 >> n, 1 << n))) for n in (8, 11, 12, 14, 16)],
    ],
}
"""By lesson: the host functions, and how each is called with what its cells give it on a GPU."""


def launched(call: Callable, text: str, entry: str, arch: str, monkeypatch) -> list[list[dict]]:
    """What `call` of `entry`, a name of the module text, launches on such a card: for each launch its alternatives,
    several where it is tuned."""
    from triton.runtime import autotuner
    from triton.runtime import interpreter as it

    found: list[list[dict]] = []

    def written_down(self, *args, **named):
        found.append([_to_compile(self, args, named)])

    def tuned(self, *args, **named):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        before = len(found)
        for config in self.prune_configs(named):
            if config.pre_hook:
                config.pre_hook({**self.nargs, **named, **config.all_kwargs()})
            self.fn.run(*args, **named, **config.all_kwargs())
        found[before:] = [[alternative for launch in found[before:] for alternative in launch]]

    capability = (int(arch[3:-1]), int(arch[-1]))
    shared = machine.SHARED_KB[arch] << 10
    card = machine.Machine("gpu", "a test", arch, capability, 64, 32 << 20, 8 << 30, shared, shared + 1024, 65536)
    with monkeypatch.context() as patched:
        patched.setattr(machine, "here", lambda: card)
        patched.setattr(machine, "_mode", lambda: ("gpu", "a test"))
        patched.setattr(machine, "device", lambda: "cpu")
        patched.setattr(it.GridExecutor, "__call__", written_down)
        patched.setattr(autotuner.Autotuner, "run", tuned)
        module = source.run(f"{text}\n# on {arch}\n", "cards")
        call(getattr(module, entry))
    return found


def compiled(text: str, launch: dict, arch: str) -> reveal.Compiled:
    types = {name: kind.partition(":")[0] if isinstance(kind, str) else kind for name, kind in launch["types"].items()}
    options = launch["num_warps"], launch["num_stages"]
    return reveal.compiled(text, launch["kernel"], types, launch["constants"], arch, *options)


def too_large(text: str, launches: list[list[dict]], arch: str) -> list[str]:
    """What does not fit: a launch where none of its alternatives does."""
    wrong, seen = [], set()
    for alternatives in launches:
        key = re.sub(r'"i(32|64)(:16)?"', "", json.dumps(alternatives, sort_keys=True))
        if key in seen:
            continue
        seen.add(key)
        made = []
        for launch in alternatives:
            made.append((launch, compiled(text, launch, arch)))
            if made[-1][1].fits:
                break
        else:
            wrong += [f"{launch['kernel']} {launch['constants']} takes {c.shared_bytes} bytes" for launch, c in made]
    return wrong


def on(cards, quick=()):
    marks = {arch: [] if arch in quick else [pytest.mark.slow] for arch in cards}
    return pytest.mark.parametrize("arch", [pytest.param(arch, marks=marks[arch]) for arch in cards])


@on(CARDS, quick=CARDS[:2])
@pytest.mark.parametrize("lesson", LAUNCHES)
def test_what_a_lesson_launches_fits(lesson, arch, monkeypatch):
    wrong = []
    for entry, call in LAUNCHES[lesson]:
        text = source.notebook(ROOT / f"notebooks/{lesson}.ipynb", entry)
        launches = launched(call, text, entry, arch, monkeypatch)
        assert launches, f"{entry} launches nothing"
        wrong += too_large(text, launches, arch)
    assert not wrong


TRITON = [name for name, e in every().items() if e.rung == "triton" and e.form == "kernel" and e.lab[:2] in "05 06 07"]


@on(CARDS[:4])
@pytest.mark.parametrize("name", TRITON)
def test_what_a_solution_launches_fits(name, arch, monkeypatch):
    exercise, text, launches = every()[name], solved(name), []
    for case in exercise.cases:
        if case.mode != "cpu":
            inputs = case.inputs(Draw(0, case.kind))
            launches += launched(lambda f, given=inputs: f(*given), text, exercise.entry, arch, monkeypatch)
    assert launches and not too_large(text, launches, arch)
