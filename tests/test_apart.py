"""TVM and JAX in processes of their own; what is said where they cannot run."""

import importlib.util
import json
import re
import sys
import threading
import time

import pytest

from helpers import ROOT, apart, child, ledger, machine, reveal, source

tvm_is_here = pytest.mark.skipif(apart.problem("tvm") is not None, reason="TVM is not installed")
jax_is_here = pytest.mark.skipif(apart.problem("jax", gpu=True) is not None, reason="JAX or its plugin is missing")


def twice(n):
    return 2 * n


def counted(folder):
    from pathlib import Path

    with Path(folder, "runs").open("a") as file:
        file.write("x")
        return file.tell()


def crash():
    import os

    os.abort()


def tvm_version(n):
    import tvm

    return [tvm.__version__, twice(n)]


def jax_sum(n):
    import os

    import jax

    total = jax.jit(lambda x: (x * n).sum())(jax.numpy.arange(4.0))
    return [float(total), os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]]


def jax_norm(x):
    import jax

    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def jax_relu(x, w):
    import jax

    return jax.nn.relu(x @ w)


def test_a_function_runs_by_its_text_and_a_crash_stays_apart():
    assert apart.run("torch", twice, 21) == 42
    with pytest.raises(apart.Failed, match="SIGABRT"):
        apart.run("torch", crash)
    assert apart.run("torch", twice, 1) == 2


def test_what_loads_ahead_is_the_process_that_will_be_asked(monkeypatch):
    begun = []
    monkeypatch.setattr(child, "warm", lambda **what: begun.append(what))
    monkeypatch.setattr(apart, "problem", lambda package: package == "tvm")
    apart.warm()
    assert begun == [{"packages": "jax"}]  # TVM has a problem here, and is left alone
    apart.warm("torch", "inductor")
    assert begun[1:] == [{}, {"inductor": True}]


def test_pytorch_s_compiler_is_there_where_it_is_asked_for(monkeypatch):
    asked = []

    def run(seconds, **job):
        asked.append((job["packages"], job["inductor"]))
        return child.Result(7, "", "", 0, None, False, 0.0)

    monkeypatch.setattr(child, "run", run)
    assert [apart.run(package, twice, 21) for package in ("torch", "inductor")] == [7, 7]
    assert asked == [("", False), ("", True)]


def test_a_compiler_can_be_timed_alone():
    done, go = [], threading.Event()

    def slow():
        go.wait(10)
        apart.later(lambda: (time.sleep(0.1), done.append("what it began")))
        done.append("slow")

    apart.later(slow)
    apart.later(lambda: 1 / 0)  # an error of its own is told to whoever asks for it
    threading.Timer(0.05, go.set).start()
    apart.settle()
    assert done == ["slow", "what it began"]
    apart.settle()  # nothing is left


def test_xla_compiles_a_text_once_also_for_two_who_ask_at_the_same_time(monkeypatch):
    ran, go = [], threading.Event()

    def run(text, call, **how):
        ran.append(call)
        go.wait(10)
        error = "" if len(ran) > 1 else "XlaRuntimeError: no"
        value = {name: "" for name in ("stablehlo", "before", "after")}
        value |= {"bytes_before": 1.0, "bytes_after": 1.0, "seconds": 1.0, "dumps": {}}
        return child.Result([value], "", "", 0, None, False, 0.0, error)

    monkeypatch.setattr(apart, "problem", lambda package, gpu: None)
    monkeypatch.setattr(child, "run", run)

    class Made(dict):
        def setdefault(self, key, default):
            if key in self:
                go.set()  # the second one asks while the first waits
            return super().setdefault(key, default)

    monkeypatch.setattr(reveal, "_made_by_xla", Made())
    ahead = apart.later(lambda: reveal.xla(jax_sum, "f32[4]"))
    while not ran:
        time.sleep(0.01)
    for ask in (lambda: reveal.xla(jax_sum, "f32[4]"), ahead.result):
        with pytest.raises(apart.Failed):
            ask()
    assert len(ran) == 1
    assert reveal.xla(jax_sum, "f32[4]") == reveal.xla(jax_sum, "f32[4]")  # what failed is asked anew, once
    assert len(ran) == 2
    reveal.xla(jax_sum, "f32[4]", flags=("--other",))
    assert len(ran) == 3


@jax_is_here
def test_xla_makes_the_same_of_a_function_alone_and_after_another():
    asked = [(jax_norm, ("f16[64,128]",)), (jax_relu, ("f16[64,128]", "f16[128,96]"))]
    together = reveal.xlas(asked)
    for one, (fn, arguments) in zip(together, asked, strict=True):
        alone = reveal.xla(fn, *arguments)
        assert (one.before, one.after, one.bytes_after) == (alone.before, alone.after, alone.bytes_after)
        assert fn.__name__ in one.after


def test_what_is_begun_ahead_is_not_run_again(tmp_path):
    apart.ahead("torch", counted, str(tmp_path))
    assert apart.run("torch", counted, str(tmp_path)) == 1  # the one that was begun
    assert apart.run("torch", counted, str(tmp_path)) == 2  # it is taken once
    apart.ahead("torch", crash)
    apart.ahead("torch", counted, str(tmp_path), env={"OTHER": "1"})
    with pytest.raises(apart.Failed, match="SIGABRT"):  # said where the result is asked for
        apart.run("torch", crash)
    assert apart.run("torch", counted, str(tmp_path)) in (3, 4)  # not in this environment: for itself
    assert apart.run("torch", counted, str(tmp_path), env={"OTHER": "1"}) in (3, 4)
    assert not apart._begun


def test_what_is_asked_for_before_its_turn_does_not_wait_for_it(monkeypatch):
    monkeypatch.setattr(apart, "_threads", [None] * 1000)  # none is free
    monkeypatch.setattr(apart, "_waiting", apart.queue.SimpleQueue())
    monkeypatch.setattr(apart, "_given", [])  # which nobody will do
    apart.ahead("torch", twice, 21)
    assert apart.run("torch", twice, 21) == 42
    future, work = apart._waiting.get()
    assert future.cancelled()  # and nobody does it again


@tvm_is_here
def test_tvm_is_loaded_there_and_not_here():
    assert apart.run("tvm", tvm_version, 3)[1] == 6
    assert "tvm" not in sys.modules


@tvm_is_here
def test_loading_tvm_asks_for_no_gpu():
    """Else no fork of that process could use one."""
    script = """
import os, torch
def asked(*args, **kwargs):
    raise SystemExit("CUDA was asked for")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = torch._C._ensureCUDADeviceGuardSet = asked
from helpers import child, zygote
os.environ.update(child._environment(None, "tvm"))
zygote.load_tvm()
import tvm
"""
    # the mode is named, or `helpers` asks which it is; that process itself imports no helpers
    done = child.python(["-c", script], seconds=120, env={"HELPERS_MODE": "cpu"})
    assert done.ok, done.stderr


def test_loading_the_compiler_of_torch_asks_for_no_gpu_and_starts_nothing():
    script = """
import os, pathlib, threading, torch
def asked(*args, **kwargs):
    raise SystemExit("CUDA was asked for")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = torch.cuda.current_device = asked
torch.version.cuda = "13.0"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
from helpers import zygote
zygote.load("captured")
import sys
assert "torch._inductor.compile_fx" in sys.modules and threading.active_count() == 1
assert not pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text()
"""
    done = child.python(["-c", script], seconds=120, env={"HELPERS_MODE": "cpu"})
    assert done.ok, done.stderr


@jax_is_here
@pytest.mark.skipif(machine.gpu(), reason="JAX can use the GPU here")
def test_jax_that_cannot_use_the_gpu_says_why_and_does_not_go_on_with_the_cpu(monkeypatch):
    monkeypatch.setattr(machine, "gpu", lambda: True)
    child.close()  # a process that was started in CPU mode has its platform already
    try:
        why = apart.jax_on_gpu.__wrapped__()
        with pytest.raises(apart.Failed):
            apart.run("jax", jax_sum, 2)
    finally:
        child.close()
    assert why.sentence.startswith("JAX cannot use the GPU here: ") and why.mend == apart.INSTALL


def layout_at(i, j):
    """An index of a layout, which CuTe DSL evaluates while it traces."""
    from cutlass import cute

    found = []

    @cute.jit
    def trace():
        found.append(cute.make_layout((8, 8), stride=(8, 1))((i, j)))

    cute.compile(trace, options="--gpu-arch sm_90a")
    return found


@pytest.mark.skipif(apart.problem("cutlass") is not None, reason="CuTe DSL is not installed")
def test_cute_compiles_there_without_a_gpu():
    assert apart.run("cutlass", layout_at, 2, 3) == [19]
    assert "cutlass" not in sys.modules


@jax_is_here
def test_jax_leaves_the_memory_of_the_gpu_alone():
    assert apart.run("jax", jax_sum, 2) == [12.0, "false"]
    assert "jax" not in sys.modules


def refusal(monkeypatch, package, versions, gpu=True, cuda="13.0"):
    import torch

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(machine, "installed", lambda *names: {n: versions[n] for n in names if n in versions})
    monkeypatch.setattr(torch.version, "cuda", cuda)
    return apart.problem(package, gpu=gpu)


PAIR = {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}
JAX = {"jaxlib": "0.10.2"}


@pytest.mark.parametrize(
    ("package", "versions", "sentence", "mend"),
    [
        ("tvm", {"apache-tvm-ffi": "0.1.15.post2"}, "crashes TVM", "apache-tvm-ffi==0.1.14.post1"),
        ("jax", JAX, "without its plugin for GPUs", "make lab"),
        ("jax", JAX | PAIR | {"jax-cuda12-plugin": "0.10.2"}, "two major versions of CUDA", "uninstall -y jax-cuda12"),
        ("jax", JAX | PAIR | {"jax-cuda13-pjrt": "0.9.1"}, "must be of one version", "jax-cuda13-pjrt==0.10.2"),
        ("jax", {"jaxlib": "0.11.2"} | PAIR, "must be of one version", "jax-cuda13-plugin==0.11.2"),
        ("jax", JAX | {"jax-cuda13-plugin": "0.10.2"}, "must be of one version", "jax-cuda13-pjrt==0.10.2"),
    ],
)
def test_what_is_wrong_is_said_with_its_mend(monkeypatch, package, versions, sentence, mend):
    problem = refusal(monkeypatch, package, versions)
    assert sentence in problem.sentence and mend in problem.mend


def test_nothing_is_said_where_nothing_is_wrong(monkeypatch):
    assert refusal(monkeypatch, "tvm", {"apache-tvm-ffi": "0.1.14.post1"}) is None
    assert refusal(monkeypatch, "jax", JAX | PAIR) is None
    assert refusal(monkeypatch, "jax", JAX, gpu=False) is None


def test_a_plugin_for_another_cuda_than_torchs_is_named_on_a_gpu(monkeypatch):
    monkeypatch.setattr(machine, "gpu", lambda: True)
    problem = refusal(monkeypatch, "jax", JAX | PAIR, cuda="12.6")
    assert "for CUDA 13" in problem.sentence and "jax-cuda12-plugin" in problem.mend


@pytest.mark.parametrize(("package", "name"), [("tvm", "TVM"), ("jax", "JAX"), ("cutlass", "CuTe DSL")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, package, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problem = apart.problem(package)
    assert problem.sentence.startswith(f"{name} is not installed") and problem.mend
    with pytest.raises(machine.NotReady, match="is not installed"):
        apart.run(package, twice, 1)


def jax_layer(x, w, b):
    import jax

    y = x @ w.T + b
    return y * jax.nn.sigmoid(1.702 * y)


@jax_is_here
def test_xla_compiles_for_a_card_that_is_not_here():
    arguments = ("f16[512,256]", "f16[384,256]", "f16[384]")
    least = 2 * (512 * 256 + 384 * 256 + 384) + 2 * 512 * 384
    generated = reveal.xla(jax_layer, *arguments)
    assert "stablehlo.dot_general" in generated.stablehlo and "metadata=" not in generated.after
    product, activation = ledger.xla(generated.after)
    assert (product.kind, activation.kind) == ("Triton", "XLA")
    assert ledger.total([product, activation]) == generated.bytes_after == least + 4 * 512 * 384
    assert generated.bytes_before > 3 * generated.bytes_after and not generated.mlir
    called = ledger.xla(reveal.xla(jax_layer, *arguments, flags=("--xla_gpu_enable_triton_gemm=false",)).after)
    assert called[0].kind == "library" and "epilogue BIAS" in called[0].name and called[0].writes == 2 * 512 * 384


@jax_is_here
def test_the_dialects_of_a_generated_kernel():
    found = reveal.xla(jax_layer, "f16[64,64]", "f16[64,64]", "f16[64]", mlir=True).dialects()
    assert found["StableHLO"]["stablehlo"] > 10
    lasts = [counts for stage, counts in found.items() if stage.endswith("last")]
    assert lasts and all(counts["llvm"] > 10 and not counts["tt"] for counts in lasts)


@jax_is_here
def test_what_xla_refuses_is_told():
    with pytest.raises(apart.Failed, match="did not compile"):
        reveal.xla(jax_layer, "f16[64,63]", "f16[64,64]", "f16[64]")


@pytest.mark.parametrize("lesson", ["04_tvm_xla", "11_mojo_max"])
def test_what_a_lesson_begins_ahead_is_the_text_that_it_asks_for_later(lesson):
    """Else the work would be done twice, and nobody would notice."""
    cells = json.loads((ROOT / "notebooks" / f"{lesson}.ipynb").read_text())["cells"]
    cells = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = set(re.findall(r'apart\.ahead\(\s*"\w+", later\("(\w+)"\)', "\n".join(cells)))
    assert names
    for name in names:
        asks = next(i for i, cell in enumerate(cells) if re.search(rf"apart\.run\(\s*\S+, {name}\b", cell))
        asked = source.module_text(cells[: asks + 1], [name], "the lesson as far as it has run")
        assert source.of(source.load(lesson, name)) == asked, name
