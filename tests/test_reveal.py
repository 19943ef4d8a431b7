"""Generated code: every stage of a Triton kernel compiled without a GPU, and what torch.compile makes of a function."""

import itertools
import re
import warnings

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.tools.tensor_descriptor import TensorDescriptor

from helpers import cuda, machine, reveal, source


@triton.jit
def scale(o_ptr, x_ptr, n, factor: tl.constexpr, kind: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(o_ptr + i, (x * factor).to(kind), mask=i < n)


@triton.autotune([triton.Config({"B": 64}), triton.Config({"B": 128})], key=["n"])
@triton.jit
def product(a_ptr, b_ptr, o_ptr, n, B: tl.constexpr):
    i, j = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    a, b = tl.load(a_ptr + i * B + j), tl.load(b_ptr + i * B + j)
    tl.store(o_ptr + i * B + j, tl.dot(a, b))


def compiled(arch=None, n="i32:16", **options):
    types = {"o_ptr": "*fp16", "x_ptr": torch.zeros(2), "n": n}
    return reveal.triton(scale, types, {"factor": 2.0, "kind": tl.float16, "B": 1024}, arch, **options)


def test_every_stage_of_a_kernel_for_hopper():
    c = compiled("sm_90")
    assert "tt.func public @scale" in c.ttir and "loc(" not in c.ttir
    assert "#blocked" in c.ttgir and "define ptx_kernel void @scale" in c.llir
    assert ".target sm_90a" in c.ptx and "scale" in c.sass
    assert 8 <= c.registers <= 64 and c.spills == 0 and c.shared_bytes == 0
    assert reveal.instructions(c.sass)["LDG.E.128"] == 2  # 1024 floats over 128 threads, 4 at a time
    assert reveal.instructions(c.ptx)["ld.global.v4.b32"] == 2
    assert c.dialects()["ttir"]["tt"] > c.dialects()["ttir"]["arith"] > 0


def test_alignment_decides_the_width_of_loads():
    assert compiled("sm_90", n=1000).sass == compiled("sm_90", n="i32").sass
    assert reveal.instructions(compiled("sm_90", n="i32").sass)["LDG.E.128"] == 0
    assert compiled("sm_90", n=1024).sass == compiled("sm_90", n="i32:16").sass


def test_other_architectures_and_options():
    assert ".target sm_75" in compiled("sm_75").ptx
    amd = compiled("gfx942")
    assert amd.ptx == amd.sass == "" and "global_load_dwordx4" in amd.amdgcn and amd.registers > 0
    assert 'num-warps" = 8' in compiled("sm_90", num_warps=8).ttgir
    assert ".loc" in compiled("sm_90", line_info=True).ptx and ".loc" not in compiled("sm_90").ptx


def test_a_tuned_kernel_and_its_shared_memory():
    c = reveal.triton(product, {"a_ptr": "*fp16", "b_ptr": "*fp16", "o_ptr": "*fp32", "n": "i32"}, {"B": 64}, "sm_90")
    assert c.shared_bytes >= 64 * 64 * 2
    assert any(op.startswith("HGMMA") for op in reveal.instructions(c.sass))


@triton.jit
def tiled(a_ptr, b_ptr, o_ptr, n, B: tl.constexpr):
    i, j = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    for start in range(0, n, 64):
        k = start + tl.arange(0, 64)
        a, b = tl.load(a_ptr + i[:, None] * n + k[None, :]), tl.load(b_ptr + k[:, None] * n + j[None, :])
        total = tl.dot(a, b, total)
    tl.store(o_ptr + i[:, None] * n + j[None, :], total.to(tl.float16))


@triton.jit
def described(a, b, o, n, B: tl.constexpr):
    i, j = tl.program_id(0) * B, tl.program_id(1) * B
    total = tl.zeros((B, B), tl.float32)
    for start in range(0, n, 64):
        total = tl.dot(a.load([i, start]), b.load([start, j]), total)
    o.store([i, j], total.to(tl.float16))


@gluon.jit
def gluon_copy(x_ptr, y_ptr, n, B: gl.constexpr, layout: gl.constexpr):
    i = gl.program_id(0) * B + gl.arange(0, B, layout)
    gl.store(y_ptr + i, gl.load(x_ptr + i, mask=i < n), mask=i < n)


TILED = {"a_ptr": "*fp16", "b_ptr": "*fp16", "o_ptr": "*fp16", "n": "i32:16"}


def test_one_source_for_four_generations_and_two_vendors():
    made = reveal.targets(tiled, TILED, {"B": 128}, ("sm_75", *reveal.ARCHS, "sm_120"), num_warps=8)
    matrix = {arch: [k for k in reveal.MATRIX if c.kinds[k]] for arch, c in made.items()}
    assert matrix == {
        "sm_75": [],
        "sm_80": ["mma.sync"],
        "sm_90": ["wgmma"],
        "sm_100": ["tcgen05"],
        "gfx942": ["mfma"],
        "sm_120": ["mma.sync"],
    }
    for arch in ("sm_80", "sm_90", "sm_100"):  # PTX and machine code agree
        (kind,) = matrix[arch]
        assert reveal.kinds(made[arch].sass)[kind] == made[arch].kinds[kind] > 0
        assert made[arch].kinds["cp.async"] > 0 and made[arch].fits
    rows = [c.row() for c in made.values()]
    assert rows[0]["matrix instructions"].startswith("none (") and "wgmma" in rows[2]["matrix instructions"]
    assert [row["of KB on the card"] for row in rows] == [64, 163, 227, 227, 64, 99]
    assert all(row["lines of assembly"] > 100 for row in rows)


def test_a_kernel_may_want_more_shared_memory_than_a_card_has():
    big = reveal.triton(tiled, TILED, {"B": 128}, "sm_86", num_warps=8, num_stages=5)
    assert big.shared_bytes > 99 * 1024 and not big.fits
    assert reveal.triton(tiled, TILED, {"B": 128}, "sm_86", num_warps=8, num_stages=3).fits


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "gfx942"])
def test_shared_memory_alone_is_the_same_and_quicker(arch):
    text, constants = source.file(__file__, "tiled"), {"B": "128"}
    alone = reveal.shared_bytes(text, "tiled", TILED, constants, arch, 8, 3)
    assert alone == reveal.compiled(text, "tiled", TILED, constants, arch, 8, 3).shared_bytes > 0
    with pytest.raises(reveal.CompileFailed, match="power of 2"):
        reveal.shared_bytes(text, "tiled", TILED, {"B": "100"}, arch, 8, 3)


def test_tensor_descriptors_by_type_and_by_example():
    like = torch.zeros(256, 256, dtype=torch.float16)
    a, b = TensorDescriptor.from_tensor(like, [128, 64]), TensorDescriptor.from_tensor(like, [64, 128])
    o = "tensordesc<fp16[128,128]>"
    c = reveal.triton(described, {"a": a, "b": b, "o": o, "n": 256}, {"B": 128}, "sm_90", num_warps=8)
    assert c.kinds["TMA"] > 0 and c.kinds["global loads"] == c.kinds["cp.async"] == 0 and c.kinds["wgmma"] > 0
    assert reveal.triton(described, {"a": a, "b": b, "o": o, "n": 256}, {"B": 128}, "sm_80").kinds["TMA"] == 0


def test_gluon_kernels_are_compiled_without_a_gpu():
    constants = {"B": 1024, "layout": gl.BlockedLayout([8], [32], [4], [0])}
    types = {"x_ptr": "*fp16", "y_ptr": "*fp16", "n": "i32:16"}
    c = reveal.triton(gluon_copy, types, constants, "sm_90")
    assert c.ttir == "" and "sizePerThread = [8]" in c.ttgir and set(c.dialects()) == {"ttgir"}
    assert reveal.instructions(c.sass)["LDG.E.128"] == 1
    run = reveal.passes(gluon_copy, types, constants, "sm_90")
    assert set(run.stages) == {"ttgir", "llir"} and run["gluon-inline"].stage == "ttgir"


def test_passes_say_which_ran_in_which_order_and_what_each_changed():
    run = reveal.passes(tiled, TILED, {"B": 128}, "sm_90", num_warps=8)
    assert list(run.stages) == ["ttir", "ttgir", "llir"] and len(run) > 50
    assert [p.stage for p in run] == sorted((p.stage for p in run), key=list(run.stages).index)
    for one, following in itertools.pairwise(run):
        assert one.after == following.before
    assert list(run)[-1].after == run.stages["llir"].strip()
    faster = run["tritongpu-accelerate-matmul"]
    assert faster.changed and faster.lost["tt.dot"] == faster.gained["ttng.warp_group_dot"] == 1
    assert faster.name == "TritonGPUAccelerateMatmul"
    assert any(line.startswith("-") and "tt.dot" in line for line in faster.diff().splitlines())
    assert run["tritongpu-pipeline"].gained["ttg.async_copy_global_to_local"] > 0
    assert not run["tritongpu-F32DotTC"].changed and run["tritongpu-F32DotTC"].diff() == ""
    counts = run.dialects()
    assert set(counts["ttir"]) == {"tt", "arith", "scf"} and {"ttg", "ttng"} < set(counts["ttgir"])
    assert set(counts["llir"]) == {"llvm", "nvvm"}
    rows = run.rows()
    assert {"stage": "ttgir", "pass": "tritongpu-F32DotTC", "adds": "", "removes": ""} not in rows
    assert len(run.rows(changed=False)) == len(run) > len(rows) > 10
    assert run.stages["ttir"].strip() == reveal.triton(tiled, TILED, {"B": 128}, "sm_90", num_warps=8).ttir.strip()
    with pytest.raises(KeyError, match="tritonamdgpu-pipeline did not run over tiled for sm_90"):
        run["tritonamdgpu-pipeline"]


def test_passes_for_another_vendor():
    run = reveal.passes(tiled, TILED, {"B": 128}, "gfx942", num_warps=8)
    assert run["tritonamdgpu-accelerate-matmul"].changed and "rocdl" in run.dialects()["llir"]


def test_kinds_of_instructions_by_the_names_of_each_assembly():
    ptx = "  @%p1 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\n  cp.async.commit_group;\n"
    sass = "        /*0120*/                   HGMMA.64x128x16.F32 R24, gdesc[UR8], R24 ;\n"
    amd = "\tv_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[4:5], a[0:15]\n\ts_waitcnt lgkmcnt(0)\n"
    assert [dict(reveal.kinds(code)) for code in (ptx, sass, amd)] == [{"cp.async": 1}, {"wgmma": 1}, {"mfma": 1}]
    assert reveal.instructions(amd) == {"v_mfma_f32_32x32x8_f16": 1, "s_waitcnt": 1}


def test_what_is_wrong_is_said():
    with pytest.raises(TypeError, match="scale needs the type or value of kind, B; its arguments are o_ptr, x_ptr"):
        reveal.triton(scale, {"o_ptr": "*fp16", "x_ptr": "*fp32", "n": "i32"}, {"factor": 2.0})
    with pytest.raises(reveal.CompileFailed, match="scale did not compile for sm_90(?s:.)*power of 2"):
        types = {"o_ptr": "*fp16", "x_ptr": "*fp32", "n": "i32"}
        reveal.triton(scale, types, {"factor": 2.0, "kind": tl.float16, "B": 1000}, "sm_90")


def test_inductor_counts_kernels_library_calls_and_graphs():
    def layer(x, w):
        return torch.softmax(x @ w, -1)

    def broken(x):
        y = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(y)

    x = torch.randn(32, 32)
    before = torch.compile(layer, backend="eager")
    for _ in range(2):  # the second time the code comes out of Inductor's cache
        made = reveal.inductor(before, x, x)
        assert made.extern_calls == ["extern_kernels.mm"] and made.graphs == 1
        assert len(made.kernels) == 1 and made.kernels[0] in made.code and "softmax" in made.kernels[0]
        assert "def call(" in made.code and "benchmark" not in made.code.split("def call(")[1]
    made = reveal.inductor(broken, x)
    assert made.graphs == len(made.kernels) == 2


@pytest.mark.filterwarnings("error:TensorFloat32")
@pytest.mark.skipif(machine.gpu(), reason="there Inductor warns by itself, once a process")
def test_fp32_products_need_no_warning_of_tensor_cores(monkeypatch):
    from torch._inductor import compile_fx

    def warn():
        warnings.warn("TensorFloat32 tensor cores for float32 matrix multiplication available", stacklevel=2)

    monkeypatch.setattr(compile_fx, "_warn_tf32_disabled", warn)
    assert reveal.inductor(lambda x: x @ x, torch.randn(17, 17), arch="sm_90").extern_calls


def test_inductor_reads_code_without_running_it():
    def shifted(x):
        return torch.tanh(x) * 1.25

    x = torch.randn(24, 40)
    for _ in range(2):  # a compilation that was ended leaves nothing half done behind
        only_written = reveal.inductor(shifted, x, run=False)
    ran = reveal.inductor(shifted, x)
    numbered, code = zip(*(made.code.split("\n", 1) for made in (only_written, ran)), strict=True)
    assert all(line.startswith("# AOT ID") for line in numbered) and code[0] == code[1]
    assert only_written.kernels == ran.kernels and len(ran.kernels) == 1
    assert torch.allclose(torch.compile(shifted)(x), shifted(x))


class Counts(torch.nn.Module):
    """Reads a Python number that changes with each call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def prints(x):
    print("a side effect before any operator")
    return x * 2


def branches(x):
    x = x * 2
    return x + 1 if x.sum() > 0 else x


@torch.compiler.allow_in_graph
def unread(x):
    return x * 2


def test_graphs_of_a_function_that_the_compiler_follows():
    calls = [(torch.full((3,), value),) for value in (1.0, -1.0)]
    traced = reveal.graphs(lambda: lambda x: torch.relu(x) + 1, calls)
    assert (traced.graphs, traced.breaks, traced.recompiled, traced.opaque) == (1, [], "", [])
    assert [float(y[0]) for y in traced.outputs] == [2.0, 1.0]


def test_graphs_says_where_and_why_one_is_broken():
    x = torch.ones(3)
    for function, line in (
        (branches, "return x + 1 if x.sum() > 0 else x: "),
        (prints, 'print("a side effect before any operator"): '),
    ):
        (said,) = reveal.graphs(lambda function=function: function, [(x,)]).breaks
        assert said.startswith(line) and len(said) > len(line)


def test_graphs_says_what_a_recompilation_had_assumed():
    traced = reveal.graphs(Counts, [(torch.ones(3),)] * 3)
    assert (traced.graphs, traced.breaks, traced.recompiled) == (3, [], "fn.calls == 0")


def test_graphs_names_what_no_compiler_can_look_into():
    assert reveal.graphs(lambda: lambda x: unread(x) + 1, [(torch.ones(3),)]).opaque == ["unread"]


def test_several_at_once_are_what_each_is_alone():
    asked = [("sm_80", 1), ("sm_90", 2), ("sm_90", 4), ("gfx942", 4)]

    def make(one):
        return compiled(one[0], num_warps=one[1])

    reveal._compiled.clear()
    together = reveal.at_once(make, asked)
    kept = list(reveal._compiled.values())
    assert len(kept) == 4 and all(any(made is k for k in kept) for made in together)
    reveal._compiled.clear()
    assert together == [make(one) for one in asked]


def test_what_is_begun_ahead_is_what_it_is_alone(monkeypatch):
    asked = [("sm_80", 1), ("sm_90", 2)]

    def make(one):
        return compiled(one[0], num_warps=one[1])

    reveal._compiled.clear()
    reveal.ahead(make, asked)
    with monkeypatch.context() as patched:
        patched.setattr(reveal, "_compile", lambda *_: pytest.fail("it was compiled once more"))
        made = [make(one) for one in asked]
    reveal.ahead(make, asked)
    assert not reveal._begun  # they are there
    reveal._compiled.clear()
    assert made == [make(one) for one in asked]


def test_what_does_not_compile_ahead_says_so_to_whoever_asks_for_it():
    def make(block):
        types = {"o_ptr": "*fp16", "x_ptr": "*fp32", "n": "i32"}
        return reveal.triton(scale, types, {"factor": 2.0, "kind": tl.float16, "B": block})

    reveal.ahead(make, [96, 128])
    assert make(128).name == "scale"
    with pytest.raises(reveal.CompileFailed, match="power of 2"):
        make(96)


def test_one_of_several_that_does_not_compile_raises_as_it_does_alone():
    def make(factor):
        return reveal.triton(
            scale, {"o_ptr": "*fp16", "x_ptr": "*fp32", "n": "i32"}, {"factor": factor, "kind": tl.float16, "B": 96}
        )

    with pytest.raises(reveal.CompileFailed, match="power of 2"):
        reveal.at_once(make, [2.0, 3.0])


LOOPS = """
#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void sums(const float* x, float* out, int n) {
  float s[8] = {};
  for (int row = 0; row < n; ++row) {
    while (((volatile const float*)x)[row] < 0) {}
#pragma unroll 1
    for (int i = 0; i < n; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) s[j] = s[j] * x[8 * i + j] + 0.5f;
  }
#pragma unroll 1
  for (int i = 0; i < n; ++i) out[i] = out[i] * 2 + s[i % 8];
}
extern "C" __global__ void products(const __half* x, float* out, int n) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> a;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::row_major> b;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
  wmma::fill_fragment(c, 0.0f);
#pragma unroll 1
  for (int k = 0; k < n; ++k) {
    wmma::load_matrix_sync(a, x + 16 * k, n);
    wmma::load_matrix_sync(b, x + 16 * k, n);
    wmma::mma_sync(c, a, b, c);
  }
#pragma unroll 1
  for (int k = 0; k < n; ++k)
#pragma unroll
    for (int i = 0; i < 8; ++i) c.x[i] = c.x[i] * 0.5f + 1;
  wmma::store_matrix_sync(out, c, n, wmma::mem_row_major);
}
extern "C" __global__ void straight(float* x) { x[threadIdx.x] += 1; }
"""


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_the_hot_loop_is_the_innermost_with_most_of_the_arithmetic(arch):
    binary = cuda.compile(LOOPS, arch)
    loop = reveal.hot_loop(binary.sass("sums"))
    assert loop.instructions["FFMA"] + 2 * loop.instructions["FFMA2"] == 8 and loop.instructions["BRA"] == 1
    assert 0.2 < loop.share < 1 and re.match(r"\d+ instructions: \d FFMA2?, ", str(loop))
    products = reveal.hot_loop(binary.sass("products"))
    assert products.instructions["HMMA"] >= 2 and products.instructions["FFMA"] == 0
    assert reveal.hot_loop(binary.sass("straight")) is None


def test_the_hot_loop_of_what_nvdisasm_writes_is_the_same():
    labelled = """
.L_x_0:
        /*0040*/                   FFMA R1, R2, R3, R1 ;
        /*0050*/              @!P0 FFMA R4, R2, R3, R4 ;
        /*0060*/               @P1 BRA `(.L_x_0) ;
        /*0070*/                   EXIT ;
"""
    assert reveal.hot_loop(labelled).instructions == {"FFMA": 2, "BRA": 1}
