"""Every Triton kernel of lessons and labs 05 to 07, 10 and 12_2 fits every card's shared memory, launched as there.

The host functions are called with tensors of a GPU's sizes, on the CPU and untouched; what they launch is written
down, not run, and compiled for the card. The compiler does not ask how much a card has.
"""

import inspect
import json
from collections.abc import Callable

import pytest
import torch

from helpers import machine, reveal, source
from helpers.checks import judge
from helpers.exercises import Draw, every
from helpers.stage.watching import _to_compile
from tests.answers import solved

pytestmark = pytest.mark.skipif(machine.gpu(), reason="compiled as in CPU mode, for all cards")

CARDS = ("sm_75", "sm_86", "sm_90", "sm_100")
"""Of each kind of code the card with the least shared memory: code for sm_80, sm_89 and sm_120 is like that for sm_86,
and they have as much room or more."""


def half(*shape):
    return torch.empty(shape, dtype=torch.float16)


def heads(tokens, dim, count=16, batch=1):
    return half(batch, count, tokens, dim)


LAUNCHES: dict[str, list[tuple[str, Callable]]] = {
    "05_triton_first_kernels": [
        ("add", lambda m: m.add(half(1 << 24), half(1 << 24))),
        ("copy", lambda m: m.copy(half(1 << 24))),
        ("affine", lambda m: m.affine(half(4096, 4096), half(4096), half(4096))),
        ("softmax", lambda m: [m.softmax(half(1 << 24 >> n, 1 << n)) for n in (8, 11, 12, 14, 16)]),
    ],
    "06_triton_matmul": [
        ("naive", lambda m: m.naive(half(4096, 4096), half(4096, 4096))),
        ("LADDER", lambda m: [m.LADDER[n](half(4096, 4096), half(4096, 4096)) for n in m.LADDER if n != "cublas"]),
        ("linear_gelu", lambda m: m.linear_gelu(half(16384, 1024), half(4096, 1024), half(4096))),
        ("gelu_alone", lambda m: m.gelu_alone(half(1 << 26), "erf")),
        ("thin", lambda m: [m.thin(half(M, 8192), half(8192, 8192)) for M in (16, 32, 512)]),
        ("tuned SPACE", lambda m: m.tuned(m.SPACE, None)[0](half(4096, 4096), half(4096, 4096))),
        ("tuned SPACE prune", lambda m: m.tuned(m.SPACE, None, prune_configs_by={"early_config_prune": m.prune})[0](
            half(4096, 4096), half(4096, 4096))),
    ],
    "07_triton_attention": [
        ("flash attention", lambda m: [call(*[heads(4096, d)] * 3, True) for call in (m.flash, m.attention)
                                       for d in (64, 128)]),
        ("flash", lambda m: m.flash(*[heads(4096, 256)] * 3)),
        ("packed", lambda m: m.packed(*[half(8192, 16, 128)] * 3, torch.tensor([0, 4096, 8192]).int(), 4096)),
        ("decode", lambda m: m.decode(half(16, 32, 128), *[heads(32768, 128, 8, 16)] * 2, torch.full((16,), 9))),
        ("selective_scan", lambda m: m.selective_scan(half(1, 4096, 2048), half(1, 4096, 2048), torch.empty(16, 2048),
                                                      *[torch.empty(1, 4096, 16)] * 2, torch.empty(2048))),
    ],
    "10_triton": [
        ("gemv", lambda m: [m.gemv(half(1, K), half(N, K)) for N, K in ((4096, 8192), (32768, 128), (4096, 512))]),
    ],
    "12_2_kernels": [
        ("norm_linear_row", lambda m: [m.norm_linear_row(half(1, K), half(K), half(N, K), 1e-5)
                                       for N, K in ((1280, 768), (32000, 768), (4096, 4096))]),
        ("norm_swiglu_row", lambda m: [m.norm_swiglu_row(half(1, 768), half(768), half(N, 768), 1e-5)
                                       for N in (4096, 2)]),
        ("linear_add_row", lambda m: m.linear_add_row(half(1, 2048), half(768, 2048), half(1, 768))),
        ("decode_attention_row", lambda m: [m.decode_attention_row(half(1, 20 * d), half(4, n, d), half(4, n, d),
                                            half(2, n, d // 2), torch.zeros(1).long(), 12)
                                            for n, d in ((4096, 64), (4096, 128), (1, 64))]),
        ("rotate_and_keep", lambda m: [m.rotate_and_keep(half(t, 1280), half(4, n, 64), half(4, n, 64),
                                                         half(2, n, 32), 12) for t, n in ((2048, 4096), (1, 1))]),
        ("swiglu", lambda m: m.swiglu(half(2048, 4096))),
        ("plus", lambda m: m.plus(half(2048, 768), half(2048, 768))),
    ],
}  # fmt: skip
"""By lesson: names that it defines, and how a GPU's cells call them, as a function of a module that holds them."""


def launched(call: Callable, text: str, arch: str, monkeypatch) -> list[list[dict]]:
    """What `call`, of the module that `text` makes, launches on such a card: for each launch its alternatives, several
    where it is tuned."""
    from triton.runtime import autotuner
    from triton.runtime import interpreter as it

    found: list[list[dict]] = []

    def written_down(self, *args, **named):
        wanted = _to_compile(self, args, named)
        given = inspect.getcallargs(self.fn, *args, **{n: v for n, v in named.items() if n in self.arg_names})
        for name in [n for n in wanted["types"] if isinstance(given[n], int) and given[n] == 1]:
            del wanted["types"][name]  # Triton compiles a 1, such as the stride of neighbours, as a constant
            wanted["constants"][name] = "1"
        found.append([wanted])

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
        call(source.run(f"{text}\n# on {arch}\n", "cards"))
    return found


def too_large(text: str, launches: list[list[dict]], arch: str) -> list[str]:
    """What does not fit: a launch where none of its alternatives does."""
    wrong, seen = [], set()
    for alternatives in launches:
        key = json.dumps(alternatives, sort_keys=True)
        if key in seen:
            continue
        seen.add(key)
        takes = []
        for launch in alternatives:
            options = launch["num_warps"], launch["num_stages"]
            takes.append(
                reveal.shared_bytes(text, launch["kernel"], launch["types"], launch["constants"], arch, *options)
            )
            if takes[-1] <= machine.shared_limit(arch):
                break
        else:
            wrong += [f"{launch['kernel']} {launch['constants']} takes {n} bytes"
                      for launch, n in zip(alternatives, takes, strict=True)]  # fmt: skip
    return wrong


TILED = """
import triton
import triton.language as tl
from helpers import machine


@triton.jit
def tiled(x_ptr, o_ptr, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i, j, total = tl.arange(0, M), tl.arange(0, N), tl.zeros((M, N), tl.float32)
    for start in range(0, n, K):
        k = start + tl.arange(0, K)
        total = tl.dot(tl.load(x_ptr + i[:, None] * n + k), tl.load(x_ptr + j[None, :] * n + k[:, None]), total)
    tl.store(o_ptr + i[:, None] * N + j, total)


def product(x, o, choose):
    tile = (128, 256, 64) if machine.shared_limit() > 150_000 or not choose else (64, 64, 32)
    tiled[(1,)](x, o, 4096, *tile, num_warps=8, num_stages=4)


def tuned(x, o, choices):
    configs = [triton.Config(dict(zip("MNK", tile)), num_warps=8, num_stages=4) for tile in choices]
    triton.autotune(configs, key=[])(tiled)[(1,)](x, o, 4096)
"""


def test_what_does_not_fit_is_found(monkeypatch):
    def wrong(call, arch):
        return too_large(TILED, launched(call, TILED, arch, monkeypatch), arch)

    x, o = half(256, 4096), torch.empty(128, 256)
    (said,) = wrong(lambda m: m.product(x, o, False), "sm_86")
    assert said == "tiled {'M': '128', 'N': '256', 'K': '64'} takes 147456 bytes"
    assert not wrong(lambda m: m.product(x, o, False), "sm_90")
    assert not wrong(lambda m: m.product(x, o, True), "sm_86") and machine.here().mode == "cpu"
    assert not wrong(lambda m: m.tuned(x, o, [(128, 256, 64), (64, 64, 32)]), "sm_86")
    assert len(wrong(lambda m: m.tuned(x, o, [(128, 256, 64), (128, 256, 128)]), "sm_86")) == 2


def test_an_answer_that_no_gpu_could_launch_is_told_in_cpu_mode(monkeypatch):
    monkeypatch.setitem(machine.SHARED_KB, "sm_90", 1)
    verdict = judge(every()["k-loop"], solved("k-loop"), seed=1)
    assert verdict.kind == "compile" and verdict.passed is False
    assert "KB of shared memory, and sm_90 has 1. Take smaller blocks" in verdict.findings[0].message


@pytest.mark.slow
@pytest.mark.parametrize("arch", CARDS)
@pytest.mark.parametrize("lesson", LAUNCHES)
def test_what_a_lesson_launches_fits(lesson, arch, monkeypatch):
    wrong = []
    path = source.find(lesson)[0]
    read = source.notebook if path.suffix == ".ipynb" else source.file
    for names, call in LAUNCHES[lesson]:
        text = read(path, *names.split())
        launches = launched(call, text, arch, monkeypatch)
        assert launches, f"{names} launches nothing"
        wrong += too_large(text, launches, arch)
    assert not wrong


TRITON = [name for name, e in every().items() if e.made_of == "triton" and e.lab[:2] in ("05", "06", "07")]


@pytest.mark.slow
@pytest.mark.parametrize("arch", CARDS)
@pytest.mark.parametrize("name", TRITON)
def test_what_a_solution_launches_fits(name, arch, monkeypatch):
    exercise, text, launches = every()[name], solved(name), []
    for case in exercise.cases:
        if case.mode != "cpu":
            inputs = case.inputs(Draw(0, case.kind))
            call = lambda module, given=inputs: getattr(module, exercise.entry)(*given)  # noqa: E731
            launches += launched(call, text, arch, monkeypatch)
    assert launches and not too_large(text, launches, arch)
