"""The doctor's trials: on every rung something small is run, in a process of its own, and what it says is reported.

A trial's program prints one sentence. Where it begins with "limited: ", the rung works in part or differently here.
A program that fails, crashes or hangs makes its row "missing", with its error in one line.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from . import install, machine
from .doctor import A_GPU, Row, anew

SECONDS = 90
"""A trial that takes longer hangs, as far as the doctor is concerned."""

ALL = "make lab EXTRAS=all"
ANEW = "make clean lab"
GXX = ANEW if shutil.which("g++") else install.package("g++", dnf="gcc-c++")


@dataclass(frozen=True)
class Trial:
    """One row: a program, by mode ("gpu", "cpu"); a sentence stands where there is nothing to try in a mode."""

    name: str
    program: str
    mend: str
    needed: bool = False
    cpu: str = ""
    env: dict[str, str] = field(default_factory=dict)


# Errors come as one line: those of compilers go on for pages, and their last lines say nothing.
TELL = """
import sys

def _tell(kind, error, trace):
    if isinstance(error, ModuleNotFoundError) and error.name:
        said = f"The package {error.name.split('.')[0]} is not installed."
    else:
        first = next(filter(None, map(str.strip, str(error).splitlines())), "it gives no reason")
        said = getattr(error, "sentence", f"{kind.__name__}: {first}")
    print("", said, f"Mend: {getattr(error, 'mend', '')}", sep="\\n", file=sys.stderr)

sys.excepthook = _tell
"""

LIBRARY = """
import cupy, torch
x, w, b = (torch.randn(n, dtype=torch.float16, device="cuda") for n in ((64, 32), (16, 32), (16,)))
fused = torch._addmm_activation(b, x, w.T, use_gelu=True)
plain = torch.nn.functional.gelu(x.float() @ w.T.float() + b.float(), approximate="tanh")
assert (fused - plain).abs().max().item() < 0.05, "cuBLASLt's epilogue gives wrong values"
product = cupy.from_dlpack(x) @ cupy.from_dlpack(w).T
assert abs(torch.from_dlpack(product).float() - x.float() @ w.T.float()).max().item() < 0.1, "CuPy's product is wrong"
print(f"cuBLAS through torch and CuPy {cupy.__version__}; cuBLASLt with a GELU epilogue.")
"""

NVMATH = """
import nvmath
from nvmath.linalg.advanced import Matmul, MatmulEpilog
if device == "cpu":
    print(f"limited: nvmath-python {nvmath.__version__} is installed; it calls cuBLASLt on a GPU only.")
else:
    import torch
    x, w = torch.randn(64, 32, device="cuda").half(), torch.randn(32, 16, device="cuda").half()
    with Matmul(x, w) as product:
        product.plan(epilog=MatmulEpilog.RELU)
        wrong = (product.execute().float() - torch.relu(x.float() @ w.float())).abs().max().item()
    assert wrong < 0.1, f"its product is off by {wrong}"
    print(f"nvmath-python {nvmath.__version__} calls cuBLASLt with an epilogue.")
"""

COMPILE = """
import torch
m = torch.randn(64, 64, device=device)
wrong = (m @ m - (m.double() @ m.double()).float()).abs().max().item()
assert wrong < 1e-2, f"a matrix product is off by {wrong}"
x = torch.randn(1000, device=device)
wrong = (torch.compile(lambda t: torch.relu(t * 2 + 1))(x) - torch.relu(x * 2 + 1)).abs().max().item()
assert wrong < 1e-5, f"it is off by {wrong}"
print("torch multiplies, and torch.compile fuses through " + ("Triton." if device == "cuda" else "C++ (g++)."))
"""

TVM = """
import numpy, tvm
from tvm import te
a = te.placeholder((64,), "float32", name="a")
b = te.compute((64,), lambda i: a[i] * 2.0 + 1.0, name="b")
program = tvm.compile(tvm.IRModule({"main": te.create_prim_func([a, b])}), target="llvm")
x, y = (tvm.runtime.tensor(numpy.arange(64, dtype="float32") * k, tvm.cpu()) for k in (1, 0))
program["main"](x, y)
assert numpy.allclose(y.numpy(), x.numpy() * 2 + 1), "its values are wrong"
print(f"TVM {tvm.__version__} compiles through LLVM and runs on the CPU.")
"""

XLA = """
import jax, jax.numpy as jnp
assert float(jax.jit(lambda x: (x * 2 + 1).sum())(jnp.arange(4.0))) == 16, "its values are wrong"
on = jax.default_backend()
here = "" if on != "cpu" or device == "cpu" else "limited: "
print(f"{here}JAX {jax.__version__} compiles with XLA and runs on the {on.upper()}.")
"""

TRITON = """
import torch
from helpers import machine
import triton, triton.language as tl

@triton.jit
def centre(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(y + i, v - tl.sum(v) / n, mask=i < n)

x = torch.randn(100, device=machine.device())
y = torch.empty_like(x)
centre[(1,)](x, y, 100, BLOCK=128)
assert (y - (x - x.mean())).abs().max().item() < 1e-5, "its values are wrong"
where = "on the GPU" if machine.gpu() else "in its interpreter, on the CPU"
print(f"triton {triton.__version__} runs a kernel {where}.")
"""

COMPILER = """
import pathlib, subprocess
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def double(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i) * 2)

source = ASTSource(double, {"x": "*fp32", "y": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 128})
code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
cubin = pathlib.Path("double.cubin")
cubin.write_bytes(code["cubin"])
tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
sass = subprocess.run([tool, cubin], capture_output=True, text=True, check=True).stdout
assert "STG" in sass and ".ptx" not in sass, "no machine code came out"
print(f"Triton writes PTX ({len(code['ptx'].splitlines())} lines) and machine code for sm_90, to be read here.")
"""

CUDA = """
import torch
from helpers import cuda, machine
module = cuda.RawModule(code='''extern "C" __global__ void turn(const float* x, float* y, int n) {
  __shared__ float s[128];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[n - 1 - threadIdx.x];
}''')
x = torch.randn(128, device=machine.device())
y = torch.empty_like(x)
module.get_function("turn")((1,), (128,), (x, y, 128))
assert torch.equal(y, x.flip(0)), "its values are wrong"
print("CUDA C runs on the " + ("GPU, launched through CuPy." if machine.gpu() else "CPU, compiled with g++."))
"""

NVRTC = """
from helpers import cuda
code = '''#include <cuda_fp16.h>
extern "C" __global__ void twice(__half* x) { x[threadIdx.x] = __hmul(x[threadIdx.x], __float2half(2.f)); }'''
made = cuda.compile(code, arch="sm_90")
assert "twice" in made.sass(), "no machine code came out"
print(f"NVRTC compiles CUDA C for sm_90 ({made.kernels['twice'].registers} registers), to be read here.")
"""

COUNTERS = """
import pathlib, subprocess, sys
from helpers import traffic
ncu = traffic.find()
pathlib.Path("one.py").write_text("import torch; torch.ones(1 << 20, device='cuda').add_(1); torch.cuda.synchronize()")
options = ["--metrics", "dram__bytes_read.sum", "--launch-count", "1", "--csv"]
done = subprocess.run([ncu, *options, sys.executable, "one.py"], capture_output=True, text=True)
said = done.stdout + done.stderr
if traffic.FORBIDDEN in said:
    raise traffic.forbidden()
if "dram__bytes_read" not in said:
    raise SystemExit("ncu counted nothing: " + (said.strip().splitlines() or ["it said nothing"])[-1])
print(f"{ncu} reads the DRAM counters.")
"""

SANITIZER = """
import glob, os, pathlib, shutil, subprocess, sys
places = ["/usr/local/cuda/bin/compute-sanitizer", *glob.glob("/usr/local/cuda*/compute-sanitizer/compute-sanitizer")]
tool = next(filter(None, [shutil.which("compute-sanitizer"), *filter(os.path.exists, places)]), None)
if tool is None:
    raise SystemExit("compute-sanitizer, which finds invalid accesses and races, is not installed.")
pathlib.Path("one.py").write_text("import cupy; cupy.ones(8).sum()")
done = subprocess.run([tool, sys.executable, "one.py"], capture_output=True, text=True)
if "ERROR SUMMARY: 0 errors" not in done.stdout:
    raise SystemExit("compute-sanitizer does not work here: " + (done.stdout + done.stderr).strip().splitlines()[-1])
print(f"{tool} watches a CUDA program.")
"""

MOJO = """
import pathlib
import max.engine
from mojo.run import subprocess_run_mojo  # it may not lie beside this Python, as after `pip install --target`

def mojo(*words):
    return subprocess_run_mojo(list(words), capture_output=True, text=True, check=True).stdout

pathlib.Path("hello.mojo").write_text("def main():\\n    print(6 * 7)\\n")
assert mojo("run", "hello.mojo").strip() == "42", "its program prints something else"
version = mojo("--version").split()[1]
print(f"Mojo {version} compiles and runs a program; MAX can be imported.")
"""

CUTE = """
import cutlass, cutlass.cute as cute
@cute.jit
def rows():
    assert cute.make_layout((8, 8), stride=(8, 1))((2, 3)) == 19
rows()
print(f"CuTe DSL {cutlass.__version__} traces a layout" + (" (its kernels need a GPU)." if device == "cpu" else "."))
"""

JUPYTER = """
import sys
from importlib import metadata
from pathlib import Path
from jupyter_client.kernelspec import KernelSpecManager
page = Path(sys.prefix, "share/jupyter/lab/static/index.html")
assert page.is_file(), f"JupyterLab's page {page} is missing"
argv = KernelSpecManager().get_kernel_spec("python3").argv
other = argv[0] not in ("python", "python3", sys.executable)
which = f"but its kernel python3 is another Python, {argv[0]}" if other else "with a kernel of this Python"
print(f"{'limited: ' if other else ''}JupyterLab {metadata.version('jupyterlab')}, {which}.")
"""

BROWSER = """
import shutil, subprocess
from importlib import metadata
browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if browser is None:
    raise SystemExit("No Chromium: the test that opens a lesson in a browser is skipped (lessons need none but yours).")
said = subprocess.run([browser, "--version"], capture_output=True, text=True, check=True).stdout.strip()
print(f"{said}, driven by Playwright {metadata.version('playwright')}.")
"""

TRIALS = [
    Trial(
        "cuBLAS, cuBLASLt",
        LIBRARY,
        ANEW,
        cpu="They run on a GPU; here torch's CPU library computes the values, and recorded times are shown.",
    ),
    Trial("nvmath-python", NVMATH, ALL),
    Trial(
        "torch.compile",
        COMPILE,
        GXX,
        needed=True,
        env={"TORCHINDUCTOR_COMPILE_THREADS": "1"},
    ),
    Trial("TVM", TVM, ALL),
    Trial("XLA", XLA, ALL),
    Trial("Triton runs", TRITON, ANEW, needed=True),
    Trial("Triton compiles", COMPILER, ANEW, needed=True, env={"TRITON_INTERPRET": "0"}),
    Trial("CUDA C runs", CUDA, GXX, needed=True),
    Trial("CUDA C compiles", NVRTC, ANEW, needed=True),
    Trial(
        "Nsight Compute",
        COUNTERS,
        "install the CUDA toolkit's nsight-compute",
        cpu="Hardware counters are a GPU's; here requested bytes are counted, and recorded bytes are shown.",
    ),
    Trial(
        "compute-sanitizer",
        SANITIZER,
        "install the CUDA toolkit's cuda-sanitizer",
        cpu="compute-sanitizer needs a GPU; here the CPU runner reports out-of-bounds accesses and races.",
    ),
    Trial("Mojo, MAX", MOJO, ALL),
    Trial("CuTe DSL", CUTE, ALL, env={"CUTE_DSL_ARCH": "sm_90a"}),
    Trial("JupyterLab", JUPYTER, ANEW, needed=True),
    Trial("Browser test", BROWSER, install.package("chromium")),
]

QUIET = {"MODULAR_TELEMETRY_ENABLED": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONWARNINGS": "ignore"}


def rows() -> Iterator[Row]:
    """The rows of all trials, in their order, each as soon as it is known. The slow ones start first."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        slow = ["torch.compile", "Nsight Compute", "compute-sanitizer", "CuTe DSL", "XLA"]
        queue = sorted(TRIALS, key=lambda t: slow.index(t.name) if t.name in slow else len(slow))
        waiting = {trial.name: pool.submit(attempt, trial, Path(folder)) for trial in queue}
        for trial in TRIALS:
            yield waiting[trial.name].result()


def attempt(trial: Trial, folder: Path) -> Row:
    """Run one trial in this machine's mode. folder: where its files may lie."""
    mode = machine.here().mode
    if mode == "cpu" and trial.cpu:
        return Row(trial.name, "limited", trial.cpu, A_GPU)
    place = folder / trial.name.replace(" ", "_")
    place.mkdir()
    (place / "trial.py").write_text(f"device = {machine.device()!r}\n{TELL}{trial.program}")
    env = os.environ | QUIET | {"HELPERS_MODE": mode, "PYTHONPATH": machine.python_path()} | trial.env
    if mode == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    if "helpers" not in trial.program:
        env["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    try:
        command = [sys.executable, "trial.py"]
        done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        mend = f"run it again when this machine has less to do; if it stays so: {trial.mend}"
        return Row(trial.name, "missing", f"It did not end within {SECONDS} s.", mend, trial.needed)
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = said[-1] if said else f"It died, exit status {done.returncode}, and said nothing."
    if done.returncode:
        mend = trial.mend
        if last.startswith("Mend:"):
            last, mend = said[-2], last.removeprefix("Mend:").strip() or mend
        if last.startswith("The package ") and mend != ALL:
            mend = anew()
        return Row(trial.name, "missing", last, mend, trial.needed)
    limited = last.startswith("limited: ")
    return Row(
        trial.name,
        "limited" if limited else "ok",
        last.removeprefix("limited: "),
        (trial.mend if mode == "gpu" or trial.name == "JupyterLab" else A_GPU) if limited else "",
    )
