"""The static rules: answers that people write break none, cheats break one, and each sentence can be acted on."""

import textwrap
from dataclasses import replace

import pytest

from helpers import source
from helpers.checks import judge
from helpers.checks.rules import broken, settled
from helpers.exercises import Case, Exercise


def exercise(made_of, entry="answer", **more):
    more = {"form": "kernel", "rung": "triton", **more}
    return Exercise("x", "05_x", entry=entry, title="", made_of=made_of, cases=(), hints=("", "", ""), **more)


def judged(made_of, text, **more):
    return broken(textwrap.dedent(text), exercise(made_of, **more))


@pytest.mark.parametrize(
    ("text", "made_of"),
    [
        ("@triton.jit\ndef f(x): pass", "triton"),
        ("from triton import jit", "triton"),
        ("module = cuda.RawModule(code='')", "cuda"),
        ("from helpers.cuda import RawModule as Module", "cuda"),
        ("answer = torch.compile(torch.mm)", "torch"),
        ("def answer(:", "torch"),
    ],
)
def test_where_any_rung_will_do_the_kernels_say_which(text, made_of):
    assert settled(exercise("any"), text).made_of == made_of
    assert settled(exercise("python"), text).made_of == "python"


# ---- answers that people write --------------------------------------------------------------------------------------

LESSONS = {
    "05_": ("triton", "who_owns add copy affine softmax softmax_held softmax_looped double_without_mask"),
    "08_": ("cuda", "who saxpy take rotate absmax softmax softmax_passes squeezed_softmax wrong_flags"),
}


@pytest.mark.parametrize(
    ("prefix", "made_of", "name"), [(p, made_of, n) for p, (made_of, names) in LESSONS.items() for n in names.split()]
)
def test_the_lessons_kernels_break_no_rule(prefix, made_of, name):
    lesson = next(path for path in source.find(prefix) if path.suffix == ".ipynb")
    text = source.notebook(lesson, name)
    assert broken(text, exercise(made_of, entry=name)) == []


TRITON = """
import torch
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    tl.store(out_ptr + offset, tl.load(x_ptr + offset, mask=inside) + 1, mask=inside)

def launch(x):
    out = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
    return out

"""
PLAIN = "def answer(x):\n    return launch(x)\n"

CUDA = '''
import math
import torch
from helpers import cuda, machine

CODE = r"""
#include <cuda_fp16.h>
extern "C" __global__ void plus(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + 1.0f;
}
"""
plus = cuda.RawModule(code=CODE).get_function("plus")

def launch(x):
    out = torch.empty_like(x)
    plus((math.ceil(x.numel() / 256),), (256,), (x, out, x.numel()))
    return out

'''

RIGHT_TRITON = {
    "plain": PLAIN,
    "a grid that is a lambda": """
        def answer(x, block=128):
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)
            kernel[grid](x, out, x.numel(), BLOCK=block, num_warps=4, num_stages=2)
            return out
        """,
    "autotune and heuristics": """
        from triton import Config
        CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b in (128, 256) for w in (1, 4)]
        @triton.autotune(configs=CONFIGS, key=["n"])
        @triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
        @triton.jit
        def tuned(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
            tl.static_assert(BLOCK >= 16)
            for start in tl.range(0, n, BLOCK):
                offset = start + tl.arange(0, BLOCK)
                tl.store(out_ptr + offset, tl.load(x_ptr + offset, offset < n, 0.0) + 1, offset < n)
        def answer(x):
            out = torch.empty_like(x)
            tuned[(1,)](x, out, x.numel())
            return out
        """,
    "helper jit functions, tl.math, libdevice": """
        from triton.language.extra import libdevice
        @triton.jit
        def _gelu(x):
            return 0.5 * x * (1 + libdevice.tanh(0.79 * (x + tl.math.exp(x) * tl.extra.cuda.libdevice.erf(x))))
        @triton.jit
        def main(x_ptr, out_ptr, BLOCK: tl.constexpr):
            offset = tl.arange(0, BLOCK)
            tl.store(out_ptr + offset, _gelu(tl.load(x_ptr + offset).to(tl.float32)))
        def answer(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            main[(1,)](x, out, BLOCK=x.numel())
            return out
        """,
    "f-strings, errors, type hints": """
        from typing import Optional
        def answer(x: torch.Tensor, out: Optional[torch.Tensor] = None, dtype: torch.dtype | None = None):
            if x.ndim != 1 or not isinstance(x, (torch.Tensor, torch.nn.Parameter)):
                raise ValueError(f"x has {x.ndim} dimensions {tuple(x.shape)}, {type(x).__name__}, {x.dtype!r:>10}")
            assert x.is_contiguous(), "not contiguous: stride {}".format(x.stride(0))
            return launch(x.contiguous()).view(x.shape)
        """,
    "a dataclass": """
        from dataclasses import dataclass, field
        @dataclass(frozen=True)
        class Tile:
            rows: int = 8
            cols: int = 128
            more: list = field(default_factory=list)
            @property
            def size(self) -> int:
                return self.rows * self.cols
        def answer(x, tile=Tile()):
            return launch(x) if tile.size else launch(x)
        """,
    "a class with state": """
        class Launcher:
            BLOCK = 64
            def __init__(self, warps=4):
                self.warps, self._seen = warps, 0
            def __call__(self, x):
                self._seen += 1
                return launch(x)
        run = Launcher()
        def answer(x):
            return run(x)
        """,
    "a closure and partial": """
        import functools
        from functools import lru_cache, partial
        def make(block):
            @functools.wraps(launch)
            def inner(x):
                return launch(x) if block else None
            return inner
        @lru_cache(maxsize=None)
        def block_for(n):
            return max(16, triton.next_power_of_2(n))
        call = partial(make(block_for(64)))
        def answer(x):
            return call(x)
        """,
    "names that are builtins elsewhere": """
        def answer(input, id=0, vars=()):
            compile, open, type, hash = 1, 2, 3, 4
            max = sum = bytes = compile + open + type + hash + id
            return launch(input)
        """,
    "views, fills, a table": """
        F32 = torch.float32
        SIZES = {torch.float16: 2, torch.float32: torch.float32.itemsize}
        def answer(x):
            y = torch.zeros(x.numel(), dtype=F32, device=x.device).fill_(0).view(-1)
            low, eps = torch.finfo(F32).min, torch.finfo(torch.float16).eps
            table = torch.tensor([1, 2, 4], dtype=torch.int32, device=x.device)
            z = x.reshape(-1)[None].expand(2, -1).transpose(0, 1).flatten()[: x.numel()]
            return launch(z).view_as(x)
        """,
    "the device": """
        import helpers
        from helpers import machine
        DEVICE = machine.device()
        SMS = machine.here().sms or 132
        BLOCK = machine.pick(gpu=1024, cpu=64)
        torch.manual_seed(0)
        def answer(x):
            with torch.cuda.device(x.device), torch.no_grad():
                torch.cuda.get_device_properties(0).multi_processor_count if machine.gpu() else helpers.machine.here()
                return launch(x)
        """,
    "a whole lab's import line": """
        from helpers import cuda, explore, machine, plots, records, reveal, show, source, timing, traffic
        DEVICE = machine.device()
        def answer(x):
            return launch(x)
        """,
    "a choice by type": """
        def answer(x):
            if type(x) is torch.Tensor and x.dtype in (torch.float16, torch.float32):
                return launch(x)
            match x.dtype:
                case torch.float64:
                    return launch(x)
            raise TypeError(f"{type(x)}")
        """,
    "imports in another shape": """
        from torch import Tensor, empty_like as new
        from triton import cdiv
        from triton.language import load, store
        import triton.language.math as tlm
        import math, itertools
        from math import inf, pi
        from collections.abc import Callable, Sequence
        from __future__ import annotations
        def answer(x: Tensor) -> Tensor:
            for a, b in itertools.product(range(2), range(3)):
                pass
            return launch(x)
        """,
    "an alias of a module": """
        lang = tl
        T = torch
        def answer(x):
            t = torch
            return launch(t.ones_like(x).copy_(x) if T.is_tensor(x) else x)
        """,
    "seed, walrus, comprehension, nested functions": """
        def answer(x, seed=0):
            if (n := x.numel()) == 0:
                return torch.empty_like(x)
            parts = [launch(p) for p in x.chunk(1) if (q := p.numel())]
            def pick(i):
                return parts[i]
            total = 0
            total += n
            while total > n:
                total -= 1
            del total
            return pick(0)
        """,
    "global state": """
        CALLS = 0
        def answer(x):
            global CALLS
            CALLS += 1
            return launch(x)
        """,
    "allocation by methods and pinned strides": """
        def answer(x):
            out = x.new_empty(x.shape)
            s = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)
            kernel[(triton.cdiv(x.numel(), 64), 1, 1)](x, out, x.numel(), BLOCK=64)
            return out.T.T.unsqueeze(0).squeeze(0)
        """,
    "blocks through pointers and descriptors": """
        @triton.jit
        def blocks(x_ptr, out_ptr, rows, cols, R: tl.constexpr, C: tl.constexpr):
            block = tl.make_block_ptr(x_ptr, (rows, cols), (cols, 1), (0, 0), (R, C), (1, 0))
            acc = tl.zeros((R, C), dtype=tl.float32)
            for k in tl.static_range(0, 2):
                acc += tl.load(block, boundary_check=(0, 1), padding_option="zero")
                block = tl.advance(block, (0, C))
            tl.device_print("acc", acc)
            acc = tl.where(acc > 0, acc, float("-inf"))
            tl.atomic_add(out_ptr, tl.sum(tl.max(acc, axis=1)), sem="relaxed")
            tl.debug_barrier()
        def answer(x):
            out = torch.zeros(1, device=x.device)
            blocks[(1,)](x, out, *x.shape, R=16, C=16)
            return out
        """,
    "reductions with a combine function": """
        @triton.jit
        def pair(a, b):
            return tl.maximum(a, b)
        @triton.jit
        def reduces(x_ptr, out_ptr, BLOCK: tl.constexpr):
            x = tl.load(x_ptr + tl.arange(0, BLOCK))
            tl.store(out_ptr, tl.reduce(x, 0, pair))
            tl.associative_scan(x, 0, pair)
            tl.rand(0, tl.arange(0, BLOCK))
        def answer(x):
            out = x.new_zeros(())
            reduces[1,](x, out, BLOCK=x.numel())
            return out
        """,
    "a tiled product, as in many tutorials": """
        GROUP, EPS = 8, tl.constexpr(1e-6)
        LOG2E: tl.constexpr = 1.44
        @triton.jit
        def leaky(x):
            return tl.where(x >= 0, x, 0.01 * x)
        @triton.autotune(configs=[triton.Config({"BM": 16, "BK": 16, "GROUP": GROUP}, num_stages=3)], key=["M", "K"])
        @triton.jit
        def product(a_ptr, b_ptr, c_ptr, M, K, stride_am, stride_ak, BM: tl.constexpr, BK: tl.constexpr,
                    GROUP: tl.constexpr, ACTIVATION: tl.constexpr = ""):
            pid = tl.program_id(axis=0)
            first = (pid // GROUP) * GROUP
            size = min(tl.cdiv(M, BM) - first, GROUP)
            pid_m = first + ((pid % GROUP) % size)
            rows = (pid_m * BM + tl.arange(0, BM)) % M
            a_ptrs = a_ptr + (rows[:, None] * stride_am + tl.arange(0, BK)[None, :] * stride_ak)
            acc = tl.zeros((BM, BM), dtype=tl.float32)
            for k in range(0, tl.cdiv(K, BK)):
                a = tl.load(a_ptrs, mask=tl.arange(0, BK)[None, :] < K - k * BK, other=0.0)
                acc = tl.dot(a, tl.trans(a), acc, input_precision="ieee")
                a_ptrs += BK * stride_ak
            if ACTIVATION == "leaky":
                acc = leaky(acc) * LOG2E + EPS
            tl.device_assert(rows < M, "row")
            assert BM > 0
            while tl.atomic_cas(c_ptr, 0, 1) == 1:
                pass
            x, y = acc.to(c_ptr.dtype.element_ty), rows.to(tl.int64)
            tl.store(c_ptr + y[:, None] * M + rows[None, :], x, mask=(rows < M)[:, None] & (rows < M)[None, :])
        def answer(a, b=None, activation=""):
            M, K = a.shape
            c = torch.empty((M, M), device=a.device, dtype=torch.float16)
            grid = lambda META: (triton.cdiv(M, META["BM"]) * triton.cdiv(M, META["BM"]),)
            product[grid](a, b, c, M, K, *a.stride(), ACTIVATION=activation)
            assert c.is_cuda or not a.is_cuda, f"{c.device} is not {a.device}"
            return c
        """,
    "misspelt names, which Python reports": """
        import math
        from helpers import machine
        @triton.jit
        def misspelt(x_ptr):
            tl.store(x_ptr, tl.gelu(tl.load(x_ptr)))
        def answer(x):
            misspelt[(1,)](torch.emtpy_like(x), math.squrt(2), machine.devise())
            return launch(x.contigous())
        """,
    "a kernel with options, made by a call": """
        def body(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
            tl.store(out_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)))
        fast = triton.jit(body)
        @triton.jit(do_not_specialize=["n"])
        def slow(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
            tl.store(out_ptr + tl.arange(0, BLOCK), n)
        def answer(x):
            out = torch.empty_like(x)
            fast[(1,)](x, out, x.numel(), BLOCK=16)
            slow[(1,)](x, out, x.numel(), BLOCK=16)
            return out
        """,
    "a dictionary of kernels": """
        KERNELS = {"plain": kernel}
        def answer(x, which="plain"):
            out = torch.empty_like(x)
            KERNELS[which][(x.numel(),)](x, out, x.numel(), BLOCK=16)
            return out
        """,
}


@pytest.mark.parametrize("about", RIGHT_TRITON)
def test_triton_answers_break_no_rule(about):
    text = TRITON + textwrap.dedent(RIGHT_TRITON[about])
    if "__future__" in text:
        text = "from __future__ import annotations\n" + text.replace("from __future__ import annotations\n", "")
    assert broken(text, exercise("triton")) == []


RIGHT_CUDA = {
    "plain": PLAIN,
    "scalars by numpy": """
        import numpy as np
        def answer(x):
            out = torch.empty_like(x)
            plus((1,), (256,), (x, out, np.int32(x.numel())), shared_mem=4 * 256)
            return launch(x)
        """,
    "options, names, templates": '''
        TILE = 16
        PAIR = """
        template <typename T, int N> __global__ void pair(const T* x, T* out) {
            extern __shared__ float tile[];
            #if __CUDA_ARCH__ >= 800
            #pragma unroll
            #endif
            for (int i = 0; i < N; i++) out[i] = x[i];
            __syncthreads();
            if (x[0] < 0) asm("trap;");
            assert(N > 0);
            printf("%d: 50%: done", N);
        }
        """
        NAMES = [f"pair<float, {n}>" for n in (1, 2)]
        module = cuda.RawModule(code=PAIR.replace("out[i]", "out[i]"), options=("-std=c++17", f"-DTILE={TILE}"),
                                name_expressions=NAMES)
        kernels = {n: module.get_function(n) for n in NAMES}
        def answer(x):
            wide = x.data_ptr() % 16 == 0 and x.numel() % 4 == 0
            try_it = kernels[NAMES[0]] if wide else plus
            try_it((1,), (TILE,), (x, x))
            return launch(x)
        ''',
    "a constant's memory": """
        CONSTANT = "__constant__ float w[3]; extern \\"C\\" __global__ void k(float* x) { x[0] = w[0]; }"
        stencil = cuda.RawModule(CONSTANT)
        def answer(x):
            stencil.get_global("w").view(torch.float32).copy_(torch.ones(3))
            stencil.get_function("k")((1,), (1,), (x,))
            return launch(x)
        """,
    "built on the first call": """
        from functools import cache
        @cache
        def built(size):
            return cuda.RawModule(code=CODE, options=(f"-DSIZE={size}",)).get_function("plus")
        def answer(x):
            out = torch.empty_like(x)
            built(32)((-(-x.numel() // 32),), (32,), (x, out, x.numel()))
            return out
        """,
    "headers": '''
        #
        WITH = r"""
        #include <cooperative_groups.h>
        #include <cooperative_groups/reduce.h>
        #include <cuda_bf16.h>   // half as wide
        #include <mma.h>
        #include <cuda/std/type_traits>
        #ifndef _GUARD
        #define _GUARD
        #endif
        #define AT(i, j) ((i) * 32 + (j)) /* a
        comment */ \\
            + 0
        #ifdef LATE
        #endif
        """
        extra = cuda.RawModule(code=WITH)
        def answer(x):
            return launch(x)
        ''',
}


@pytest.mark.parametrize("about", RIGHT_CUDA)
def test_cuda_answers_break_no_rule(about):
    assert broken(CUDA + textwrap.dedent(RIGHT_CUDA[about]), exercise("cuda")) == []


ANY = frozenset({"*"})
RIGHT_TORCH = {
    "a functional rewrite": (
        """
        import torch
        import torch.nn.functional as F
        from torch import nn
        def answer(x, w, b, activation=F.silu):
            y = torch.addmm(b, x, w.t()) if x.dim() == 2 else F.linear(x, w, b)
            y = torch.linalg.vector_norm(y, dim=-1, keepdim=True) + torch.softmax(y, -1).mean().item()
            try:
                return F.gelu(y, approximate="tanh").to(torch.float16) * torch.special.expit(y)
            except RuntimeError as error:
                raise ValueError(str(error)) from error
        """,
        {"allow": ANY},
    ),
    "a module": (
        """
        import torch
        from torch import nn
        class answer(nn.Module):
            def __init__(self, width, bias=None):
                super().__init__()
                self.project = nn.Linear(width, width)
                self.norm, self._scale = nn.LayerNorm(width), nn.Parameter(torch.ones(width))
                self.register_buffer("steps", torch.zeros(()))
            def forward(self, x):
                return torch.nn.functional.gelu(self.project(self.norm(x))) * self._scale
        """,
        {"allow": ANY},
    ),
    "aten by name": (
        """
        import torch
        def answer(x, w, b):
            return torch.ops.aten._addmm_activation(b, x, w.t(), use_gelu=True)
        """,
        {"allow": frozenset({"_addmm_activation", "t"})},
    ),
    "compiled": (
        """
        import torch
        @torch.compile(dynamic=False, fullgraph=True)
        def inner(x):
            return torch.relu(x) + x.sum()
        def answer(x):
            return inner(x)
        """,
        {"allow": ANY, "modules": frozenset({"compile"})},
    ),
    "named operators only": (
        """
        import torch
        def answer(x, w):
            return torch.bmm(x, w) + x.mm(w) @ torch.nn.functional.linear(x, w)
        """,
        {"allow": frozenset({"bmm", "mm", "linear"})},
    ),
}


@pytest.mark.parametrize("about", RIGHT_TORCH)
def test_torch_answers_break_no_rule(about):
    text, more = RIGHT_TORCH[about]
    assert judged("torch", text, form="rewrite", **more) == []


RIGHT_PYTHON = {
    "bytes": "def answer(rows, cols):\n    bytes = 8 * rows * cols\n    return {'add': bytes, 'all': sum([bytes])}\n",
    "a choice": "def answer():\n    return 'b'\n",
    "a timer": """
        import statistics
        import time
        from itertools import repeat
        def answer(device, work, repeats=20):
            out = []
            for _ in repeat(None, repeats):
                device.synchronize()
                began = time.perf_counter()
                work()
                device.synchronize()
                out.append(time.perf_counter() - began)
            try:
                low, middle, high = statistics.quantiles(out, n=4, method="inclusive")
            except statistics.StatisticsError:
                middle = out[0]
            return statistics.median(out), middle, min(out)
        """,
    "a class": """
        import math
        from typing import NamedTuple
        class Roof(NamedTuple):
            bandwidth: float
            flops: float = math.inf
            def ridge(self):
                return self.flops / self.bandwidth
        def answer(machine, cuda, torch=None):
            machine.seen = True
            return {"memory": Roof(machine.bandwidth).ridge(), "text": "{:.2f} {name}".format(3.0, name=str(cuda))}
        """,
}


@pytest.mark.parametrize("about", RIGHT_PYTHON)
def test_python_answers_break_no_rule(about):
    found = judged("python", RIGHT_PYTHON[about], form="prediction", modules=frozenset({"time", "statistics"}))
    assert found == []


# ---- cheats ---------------------------------------------------------------------------------------------------------

CHEATS = {
    # what is imported
    "numpy": "import numpy as np\ndef answer(x):\n    return launch(x)\n",
    "os": "import os\nos._exit(0)\n" + PLAIN,
    "sys in a function": "def answer(x):\n    import sys\n    sys.exit()\n",
    "the course's references": "from helpers import exercises\n" + PLAIN,
    "the references, spelled out": "import helpers.exercises\n" + PLAIN,
    "the lessons' kernels": "from helpers import source\nsoftmax = source.load('05_', 'softmax')\n" + PLAIN,
    "the lessons' kernels, spelled out": "import helpers\nadd = helpers.source.load('05_', 'add')\n" + PLAIN,
    "a star": "from torch import *\n" + PLAIN,
    "a relative import": "from . import exercises\n" + PLAIN,
    "a module of one's own": "import mine\n" + PLAIN,
    "os by way of a helper": "from helpers import machine\nmachine.os._exit(0)\n" + PLAIN,
    "sys out of a helper": "from helpers.machine import sys\n" + PLAIN,
    "os out of torch": "from torch import os\n" + PLAIN,
    "an alias of an alias": "a = b = torch\nc = a\ndef answer(x):\n    return launch(c.os)\n",
    "sys through dataclasses": "import dataclasses\ndef answer(x):\n    dataclasses.sys.exit()\n",
    "inspect through typing": "import functools, typing\ndef answer(x):\n    return typing.sys.modules\n",
    "cupy": "import cupy\ndef answer(x):\n    return cupy.asarray(x)\n",
    "ctypes": "import ctypes\n" + PLAIN,
    "threading": "from threading import Thread\n" + PLAIN,
    "importlib": "from importlib import import_module as load\n" + PLAIN,
    "gc": "import gc\ndef answer(x):\n    return [o for o in gc.get_objects()]\n",
    "an import under a condition": "if True:\n    import operator\n" + PLAIN,
    # builtins
    "getattr": "def answer(x):\n    return launch(getattr(torch, 'soft' + 'max')(x))\n",
    "getattr by another name": "g = getattr\ndef answer(x):\n    return launch(g(x, 'softmax')(-1))\n",
    "getattr as a default": "def answer(x, get=getattr):\n    return launch(get(x, 'sum')())\n",
    "getattr in a list": "def answer(x):\n    return [*map(getattr, [x], ['sum'])][0]()\n",
    "getattr that is bound too late": "if False:\n    getattr = 1\ndef answer(x):\n    return getattr(x, 'sum')()\n",
    "getattr in a class": "class A:\n    getattr = getattr\ndef answer(x):\n    return A.getattr(x, 'sum')()\n",
    "getattr through a partial": "from functools import partial\np = partial(getattr, torch)\n" + PLAIN,
    "import as a call": "def answer(x):\n    return __import__('os')\n",
    "eval": "def answer(x):\n    return eval('x.sum()')\n",
    "exec as a decorator": "@exec\ndef code(): pass\n" + PLAIN,
    "globals": "def answer(x):\n    globals()['torch'].allclose = None\n    return launch(x)\n",
    "open": "def answer(x):\n    open('/proc/self/mem')\n    return launch(x)\n",
    "builtins": "def answer(x):\n    return __builtins__['eval']('1')\n",
    "vars of a module": "def answer(x):\n    return vars(torch)['softmax'](x, -1)\n",
    "a way out": "def answer(x):\n    raise SystemExit(0)\n",
    "exit": "def answer(x):\n    exit()\n",
    "id as a key": "SEEN = {}\ndef answer(x):\n    return SEEN.setdefault(id(x), launch(x))\n",
    "data_ptr as a key": "SEEN = {}\ndef answer(x):\n    return SEEN.setdefault(x.data_ptr(), launch(x))\n",
    "type that makes a class": "K = type('K', (), {})\n" + PLAIN,
    "a class from an object, changed": "def answer(x):\n    t = type(x)\n    t.sum = None\n    return launch(x)\n",
    # attributes
    "the frame of a function": "def answer(x):\n    return launch.__globals__\n",
    "the frame of a generator": "def answer(x):\n    return (i for i in x).gi_frame.f_back.f_locals\n",
    "a traceback's frame": "def answer(x):\n    e = ValueError()\n    return e.__traceback__.tb_frame\n",
    "subclasses": "def answer(x):\n    return ().__class__.__base__.__subclasses__()\n",
    "mro": "def answer(x):\n    return int.mro()[-1]\n",
    "torch's C side": "def answer(x):\n    return torch._C._VariableFunctions.softmax(x, -1)\n",
    "a module's dict": "def answer(x):\n    return torch.__dict__['softmax'](x, -1)\n",
    "a class pattern": "def answer(x):\n    match launch:\n        case object(__globals__=g):\n            return g\n",
    "a format string": "def answer(x):\n    return '{0.__class__}'.format(x)\n",
    "a format string by another name": "T = '{0.__class__}'\ndef answer(x):\n    return T.format(x)\n",
    "a format method of str": "def answer(x):\n    return str.format('{0.__class__}', x)\n",
    "a format map": "def answer(x):\n    return '{x[0]}'.format_map({'x': x})\n",
    "the kernel's function": "def answer(x):\n    return kernel.fn(x)\n",
    # changes
    "patching torch": "torch.allclose = lambda *a, **k: True\n" + PLAIN,
    "patching tl": "tl.load = None\n" + PLAIN,
    "patching in a loop": "for torch.allclose in [lambda *a: True]:\n    pass\n" + PLAIN,
    "patching in a comprehension": "[0 for torch.allclose in [1]]\n" + PLAIN,
    "patching by with": "def answer(x):\n    with torch.no_grad() as torch.equal:\n        return launch(x)\n",
    "patching a class": "torch.Tensor.sum = None\n" + PLAIN,
    "patching a class by alias": "T = torch.Tensor\nT.sum = None\n" + PLAIN,
    "patching a class from a function": "def patch(c):\n    c.sum = None\npatch(torch.Tensor)\n" + PLAIN,
    "patching through a method": "class A:\n    def go(self):\n        self.sum = 0\nA.go(torch.Tensor)\n" + PLAIN,
    "deleting": "del torch.softmax\n" + PLAIN,
    "a switch of precision": "torch.backends.cuda.matmul.allow_tf32 = True\n" + PLAIN,
    "a call that lowers precision": "torch.set_float32_matmul_precision('medium')\n" + PLAIN,
    "another print": "def print(*a):\n    pass\n" + PLAIN,
    "a class called triton": "class triton:\n    jit = staticmethod(lambda f: f)\n" + PLAIN,
    "tl that is torch": "import torch as tl\n" + PLAIN,
    "torch as a parameter": "def answer(x, torch=None):\n    return launch(x)\n",
    "torch from a walrus": "(torch := None)\n" + PLAIN,
    "torch from a handler": "def answer(x):\n    global torch\n    torch = x\n    return launch(x)\n",
    "a module's dunder": "def __getattr__(name):\n    return 0\n" + PLAIN,
    "an object that is equal to all": "class E:\n    def __eq__(self, o):\n        return True\n" + PLAIN,
    "a tensor of one's own": "class T(torch.Tensor):\n    pass\n" + PLAIN,
    "a metaclass": "class M(metaclass=list):\n    pass\n" + PLAIN,
    # modules as values
    "a module as a default": "def answer(x, t=torch):\n    return launch(t.softmax(x, -1))\n",
    "a module in a list": "def answer(x):\n    return launch([torch][0].softmax(x, -1))\n",
    "a module in a class": "class A:\n    t = torch\ndef answer(x):\n    return launch(A.t.softmax(x, -1))\n",
    "a module by walrus": "def answer(x):\n    return launch((t := torch).softmax(x, -1))\n",
    "a module matched": "def answer(x):\n    match torch:\n        case t:\n            return launch(t.exp(x))\n",
    "a module in a loop": "def answer(x):\n    for t in (torch,):\n        return launch(t.softmax(x, -1))\n",
    "a module from a lambda": "t = lambda: torch\ndef answer(x):\n    return launch(t().softmax(x, -1))\n",
    "a module in an annotation": "def answer(x: (t := torch) = None):\n    return launch(x)\n",
    "a module that is yielded": "def g():\n    yield torch\ndef answer(x):\n    return launch(next(g()).exp(x))\n",
    # torch and triton
    "torch's own operator": "def answer(x):\n    return launch(torch.softmax(x, -1))\n",
    "an operator by import": "from torch import softmax\ndef answer(x):\n    return launch(softmax(x, -1))\n",
    "an operator by alias": "s = torch.softmax\ndef answer(x):\n    return launch(s(x, -1))\n",
    "functional": "import torch.nn.functional as F\ndef answer(x):\n    return launch(F.softmax(x, -1))\n",
    "functional, deep": "def answer(x):\n    return launch(torch.nn.functional.gelu(x))\n",
    "ops": "def answer(x):\n    return launch(torch.ops.aten.softmax(x, -1))\n",
    "compile": "fast = torch.compile(launch)\n" + PLAIN,
    "jit": "fast = torch.jit.script(launch)\n" + PLAIN,
    "the dispatcher": "from torch.utils._python_dispatch import _disable_current_modes\n" + PLAIN,
    "utils": "import torch.utils.cpp_extension\n" + PLAIN,
    "a stream": "s = torch.cuda.Stream()\ndef answer(x):\n    with torch.cuda.stream(s):\n        return launch(x)\n",
    "a graph": "g = torch.cuda.CUDAGraph()\n" + PLAIN,
    "loading": "w = torch.load('w.pt')\n" + PLAIN,
    "from a buffer": "def answer(x):\n    return torch.frombuffer(b'1234', dtype=torch.float32)\n",
    "numbers out of torch": "def answer(x):\n    return launch(torch.tensor([v + 1 for v in x.tolist()]))\n",
    "numpy out of torch": "def answer(x):\n    return launch(torch.as_tensor(x.numpy() + 1))\n",
    "element by element": "def answer(x):\n    return launch(x.clone().apply_(lambda v: v + 1))\n",
    "the storage": "def answer(x):\n    return launch(x.set_(x.untyped_storage()))\n",
    "printing options": "torch.set_printoptions(threshold=10**9)\n" + PLAIN,
    "triton's testing": "triton.testing.do_bench(lambda: 0)\n" + PLAIN,
    "triton's runtime": "triton.runtime.interpreter.interpreter_builder = None\n" + PLAIN,
    "triton's core": "tl.core.builtin\n" + PLAIN,
    "triton's knobs": "triton.knobs.runtime.interpret = False\n" + PLAIN,
    "a finding swallowed": "def answer(x):\n    try:\n        return launch(x)\n    except:\n        return x\n",
    "string annotations that are run": "import typing\ntyping.get_type_hints(launch)\n" + PLAIN,
    "update_wrapper as setattr": "import functools\nfunctools.update_wrapper(launch, kernel)\n" + PLAIN,
    "wraps as setattr": "from functools import wraps\nwraps(kernel, assigned=('fn',))(launch)\n" + PLAIN,
    # hooks into what a launch runs
    "tolist of oneself": "class A:\n    def go(self):\n        return self.tolist()\ny = A.go\n" + PLAIN,
    "storage of oneself": "class A:\n    def go(self):\n        self._storage = self._storage()\n" + PLAIN,
    "a private method of Tensor": "f = torch.Tensor._typed_storage\n" + PLAIN,
    "a dunder of Tensor": "f = torch.Tensor.__array__\n" + PLAIN,
    "a kernel's hooks": "kernel.pre_run_hooks.append(print)\n" + PLAIN,
    "a kernel's parts by alias": "k = kernel\nk.rewriter\n" + PLAIN,
    "something like a tensor": "class A:\n    def data_ptr(self):\n        return 16\n" + PLAIN,
    "a tuple of one's own": "class A(tuple):\n    pass\n" + PLAIN,
    "print to an object": "def answer(x):\n    print(x, file=launch)\n    return launch(x)\n",
    "jit passed on": "from functools import partial\n@partial(triton.jit)\ndef odd(x):\n    x.go()\n" + PLAIN,
    "jit of a parameter": "def deco(f):\n    return triton.jit(f)\n" + PLAIN,
    "jit of a lambda": "odd = triton.jit(lambda x: x.go())\n" + PLAIN,
    "a kernel that calls Python": "def f():\n    pass\n@triton.jit\ndef odd(x):\n    f()\n" + PLAIN,
    "a kernel that calls its argument": "@triton.jit\ndef odd(x, f):\n    f()\n" + PLAIN,
    "a kernel that reads a tensor": "X = torch.zeros(4)\n@triton.jit\ndef odd(x):\n    tl.store(x, X.sum())\n" + PLAIN,
    "a kernel with a closure": "def f(y):\n    @triton.jit\n    def odd(x):\n        y.add_(1)\n    return odd\n"
    + PLAIN,
    "a kernel that uses torch": "@triton.jit\ndef odd(x):\n    torch.zeros(1)\n" + PLAIN,
    "a kernel that sets an element": "@triton.jit\ndef odd(x):\n    x[0] = 1\n" + PLAIN,
    "gradients": "def answer(x):\n    return launch(x.requires_grad_())\n",
    "another allocator": "triton.set_allocator(lambda *a: None)\n" + PLAIN,
    "a helper's path": "from helpers import machine\nmachine.Path('x').read_text()\n" + PLAIN,
    "a verdict of one's own": "from helpers import show\nshow.note('passed')\n" + PLAIN,
    "the wrapped function of a helper": "from helpers import machine\nmachine.here.__wrapped__\n" + PLAIN,
    # no kernel at all
    "no kernel": "def answer(x):\n    return torch.empty_like(x).copy_(x)\n",
    "a kernel that nothing uses": "def answer(x):\n    return x + 1\n",
    "returning the input": "def answer(x):\n    return x\n",
}


@pytest.mark.parametrize("about", CHEATS)
def test_cheats_are_found(about):
    found = broken(TRITON + CHEATS[about], exercise("triton"))
    assert found
    for line, sentence in found:
        assert 1 <= line <= (TRITON + CHEATS[about]).count("\n")
        assert (TRITON + CHEATS[about]).splitlines()[line - 1].strip()[:100] in sentence
        assert sentence.endswith(".") and "\n" not in sentence
    assert judged("triton", TRITON + PLAIN) == []


CUDA_CHEATS = {
    "a header by path": '#include "/etc/passwd"',
    "a relative header": '#include "../solution.cuh"',
    "a host header": "#include <stdlib.h>",
    "a header by macro": "#define H <x>\n#include H",
    "a line that is cut": '#inc\\\nlude "x.h"',
    "a shell": 'void f() { system("ls"); }',
    "another compiler": "#ifndef __CUDACC_RTC__\n#define __CUDACC_RTC__\n#endif",
    "what the runner defines": "#if defined(CC_HALF)\n#endif",
    "cub": "#include <cub/cub.cuh>",
    "a file in assembly": 'asm(".incbin \\"x\\"");',
    "a digraph": "%:include <x>",
}


@pytest.mark.parametrize("about", CUDA_CHEATS)
def test_cuda_text_is_held_to_the_gpu(about):
    code = CUDA_CHEATS[about]
    text = CUDA.replace("#include <cuda_fp16.h>", code) + PLAIN
    found = broken(text, exercise("cuda"))
    assert found and all("\n" not in sentence for _, sentence in found)


PYTHON_CUDA_CHEATS = {
    "no module": "def answer(x):\n    return x + 1\n",
    "cupy": "import cupy\n" + PLAIN,
    "numpy's rest": "import numpy as np\ndef answer(x):\n    return np.asarray(x)\n",
    "the helpers' own compiler": "cuda.nvrtc.os\n" + PLAIN,
    "the helpers' ctypes": "from helpers.cuda import module\n" + PLAIN,
    "an order of threads": "def answer(x):\n    plus((1,), (1,), (x,), order='forward')\n    return launch(x)\n",
    "a compiler option": "m = cuda.RawModule(code=CODE, options=('-I/root',))\n" + PLAIN,
    "patching RawModule": "cuda.RawModule.get_function = None\n" + PLAIN,
    "Triton": "import triton\n@triton.jit\ndef k(x):\n    pass\n" + PLAIN,
    "changing the source": "m = cuda.RawModule(code=CODE)\nm.code = ''\n" + PLAIN,
}


@pytest.mark.parametrize("about", PYTHON_CUDA_CHEATS)
def test_cheats_around_cuda_are_found(about):
    assert broken(CUDA + PYTHON_CUDA_CHEATS[about], exercise("cuda"))


TORCH_CHEATS = {
    "compile": "answer = torch.compile(lambda x: x)\n",
    "utils": "def answer(x):\n    return torch.utils.cpp_extension.load(x)\n",
    "a small module as a base": "def answer(x):\n    return torch.newmodule.function(x)\n",
    "deep in an operator": "def answer(x):\n    return torch.ops.aten.add.default.redispatch\n",
    "a compiler of one's own": "answer = torch.compile(print, backend=lambda graph, inputs: graph)\n",
    "a tensor class": "class answer(torch.Tensor):\n    pass\n",
    "a function protocol": "class answer:\n    def __torch_function__(self, *a):\n        return 1\n",
    "private operators": "def answer(x):\n    return torch.ops.aten._softmax(x, -1, False)\n",
    "other libraries' operators": "def answer(x):\n    return torch.ops.mkldnn.linear(x)\n",
    "numpy": "def answer(x):\n    return torch.from_numpy(x.numpy())\n",
    "precision": "torch.set_float32_matmul_precision('medium')\ndef answer(x):\n    return x\n",
    "precision by attribute": "torch.backends.cuda.matmul.allow_tf32 = True\ndef answer(x):\n    return x\n",
    "patching": "torch.allclose = None\ndef answer(x):\n    return x\n",
    "functional's torch": "import torch.nn.functional as F\ndef answer(x):\n    return F.torch.os\n",
    "linalg's torch": "def answer(x):\n    return torch.linalg.torch.os\n",
    "patching a layer": "torch.nn.Linear.forward = None\ndef answer(x):\n    return x\n",
    "autograd": "def answer(x):\n    return torch.autograd.Function\n",
    "a stream": "def answer(x):\n    with torch.cuda.stream(torch.cuda.Stream()):\n        return x\n",
}


@pytest.mark.parametrize("about", TORCH_CHEATS)
def test_cheats_around_torch_are_found(about):
    assert broken("import torch\n" + TORCH_CHEATS[about], exercise("torch", allow=ANY, form="rewrite"))


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ndef answer():\n    return 1\n",
        "import time\ndef answer():\n    return time.time()\n",
        "from statistics import sys\ndef answer():\n    return sys.argv\n",
        "def answer():\n    return eval('1')\n",
        "def answer(device):\n    return device.__dict__\n",
        "def answer(device):\n    return device.launch.__func__.__globals__\n",
    ],
)
def test_cheats_in_plain_python_are_found(text):
    assert judged("python", text, form="prediction")


PLUS_ONE = exercise("triton")
PLUS_ONE = replace(PLUS_ONE, cases=(Case("a few", lambda draw: (draw(70),)),), reference=lambda x: x + 1)
BACKWARDS = replace(PLUS_ONE, reference=lambda x: x.flip(0))

AT_RUN_TIME = {
    "in the grid": """
        def answer(x):
            out = torch.empty_like(x)
            def grid(meta):
                out.copy_(x + 1)
                return (1,)
            kernel[grid](out, out, 0, BLOCK=16)
            return out
        """,
    "number by number": """
        def answer(x):
            out = torch.tensor([float(x[i]) + 1 for i in range(x.shape[0])])
            kernel[(1,)](out, out, 0, BLOCK=16)
            return out
        """,
    "by way of text": """
        def value(bits):
            exponent, fraction = bits >> 23 & 255, bits & 0x7FFFFF
            return (-1 if bits < 0 else 1) * (1 + fraction * 2.0**-23) * 2.0 ** (exponent - 127)
        def answer(x):
            text = f"{x.view(torch.int32)}"
            inside = text[text.index("[") + 1 : text.index("]")]
            out = torch.tensor([value(int(part)) + 1 for part in inside.split(",")])
            kernel[(1,)](out, out, 0, BLOCK=16)
            return out
        """,
    "in what the kernel is given": """
        @triton.jit
        def odd(x_ptr, out_ptr, n, more, BLOCK: tl.constexpr):
            offset = tl.arange(0, BLOCK)
            tl.store(out_ptr + offset, tl.load(x_ptr + offset, mask=offset < n) + 1, mask=offset < n)
        def answer(x):
            out = torch.empty_like(x)
            odd[(1,)](x, out, x.numel(), [x], BLOCK=128)
            return out
        """,
}


MOVES = {
    "a tensor of tensors": "torch.tensor([*reversed(x)])",
    "a new tensor of tensors": "x.new_tensor([x[-1 - i] for i in range(len(x))])",
    "as a tensor": "torch.as_tensor(data=[*reversed(x)])",
    "filled one by one": "fill(torch.empty_like(x), x)",
    "numbers": "torch.tensor([float(v) for v in reversed(x)])",
}


@pytest.mark.parametrize("about", MOVES)
def test_moving_values_without_a_kernel_shows_at_run_time(about):
    text = f"""
def fill(out, x):
    for i in range(len(x)):
        out[i : i + 1].fill_(x[len(x) - 1 - i])
    return out

def answer(x):
    out = {MOVES[about]}
    kernel[(1,)](out, out, 0, BLOCK=16)
    return out
"""
    verdict = judge(BACKWARDS, TRITON + text)
    assert [finding.kind for finding in verdict.findings] == ["forbidden"]


@pytest.mark.parametrize("about", AT_RUN_TIME)
def test_what_the_text_does_not_tell_shows_at_run_time(about):
    text = TRITON + textwrap.dedent(AT_RUN_TIME[about])
    assert broken(text, PLUS_ONE) == []
    verdict = judge(PLUS_ONE, text)
    assert verdict.passed is False
    assert verdict.findings[0].kind == ("compile" if "given" in about else "forbidden")


def test_a_forbidden_operator_is_named():
    found = judged("torch", "import torch\ndef answer(x, w):\n    return torch.matmul(x, w)\n", allow=ANY,
                   forbid=frozenset({"matmul"}))  # fmt: skip
    assert found and "torch.matmul" in found[0][1]


def test_a_sentence_names_the_line_and_the_way_out():
    [(line, sentence)] = judged("triton", TRITON + "import numpy as np\n" + PLAIN)
    assert line == TRITON.count("\n") + 1
    assert sentence.startswith("`numpy` is imported in `import numpy as np`: ")
    assert "torch" in sentence and "test" in sentence


def test_text_that_is_no_python_is_for_the_compiler_to_say():
    assert judged("triton", "def answer(x:\n") == []


def test_a_name_that_grows_comes_to_an_end():
    assert judged("triton", "t = torch\nfor _ in range(3):\n    t = t.nn\n    t = t.parent\n" + TRITON + PLAIN)


def test_deep_nesting_is_a_finding():
    assert judged("python", "def answer():\n    return " + "-" * 3000 + "1\n", form="prediction")
