"""PTX on the CPU, whoever wrote it; Mojo from a cell, its errors at the reader's line, and what is said without it."""

import json
import platform
import sys
import time
import types

import pytest
import torch

from helpers import apart, cuda, machine, mojo, records, source
from tests import nbval_fixes

mojo_is_here = pytest.mark.skipif(mojo.problem() is not None, reason="Mojo is not installed")


@pytest.fixture(autouse=True)
def in_cpu_mode(monkeypatch):
    """Also where there is a GPU: what the CPU makes of PTX is this file's subject."""
    monkeypatch.setattr(machine, "gpu", lambda: False)


CUDA = r"""
#include <cuda_fp16.h>

extern "C" __global__ void rows(const float* x, const __half* scale, float* out, int n, float shift) {
    __shared__ float sums[8];
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += expf(x[blockIdx.x * n + i] - shift);
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < blockDim.x / 32; ++i) sum += sums[i];
    if (threadIdx.x == 0) out[blockIdx.x] = sum * __half2float(scale[blockIdx.x]) / (n % 7 + 1);
}
"""


def rows_of_nvcc():
    """The kernel above as NVIDIA's compiler writes it in PTX, which differs from LLVM's."""
    return cuda.PtxModule(cuda.compile(CUDA, "sm_90").ptx).get_function("rows")


def test_ptx_of_another_compiler_gives_the_same_values():
    x, scale, out = torch.randn(5, 300), torch.randn(5).half(), torch.empty(5)
    rows_of_nvcc()((5,), (256,), (x, scale, out, 300, 1.5))
    exact = (x.double() - 1.5).exp().sum(1) * scale.double() / (300 % 7 + 1)
    assert torch.allclose(out.double(), exact, rtol=1e-5)


def test_a_fault_in_ptx_names_its_line():
    kernel = rows_of_nvcc()
    with pytest.raises(cuda.OutOfBounds) as said:
        kernel((6,), (256,), (torch.randn(5, 300), torch.randn(6).half(), torch.empty(6), 300, 0.0))
    assert "ld.global" in kernel.module.code.splitlines()[said.value.line - 1]


def test_ptx_that_ptxas_refuses_or_the_runner_lacks_is_said_with_its_line():
    text = cuda.compile(CUDA, "sm_90").ptx
    with pytest.raises(cuda.CompileError, match=r"ptxas refuses[\s\S]*line \d+"):
        cuda.PtxModule(text.replace("bar.sync", "bar.sink")).get_function("rows")
    with pytest.raises(cuda.CompileError, match="activemask.b32 has no counterpart"):
        cuda.PtxModule(text.replace("bar.sync \t0;", "bar.sync \t0;\n\tactivemask.b32 \t%r1;")).get_function("rows")


PRODUCT = r"""
from max.gpu import lane_id
from max.gpu.compute.mma import mma
from max.gpu.host import DeviceContext

comptime Half = Pointer[Float16, MutAnyOrigin]
comptime Floats = Pointer[Float32, MutAnyOrigin]


def product(a: Half, b: Half, c: Floats):
    var g = Int(lane_id()) // 4
    var t = Int(lane_id()) % 4 * 2
    var of_a = SIMD[DType.float16, 8](0)
    var of_b = SIMD[DType.float16, 4](0)
    comptime for i in range(4):
        comptime for j in range(2):
            of_a[2 * i + j] = a[unsafe_offset=(g + i % 2 * 8) * 16 + i // 2 * 8 + t + j]
            comptime if i < 2:
                of_b[2 * i + j] = b[unsafe_offset=g * 16 + i * 8 + t + j]
    var sum = SIMD[DType.float32, 4](0)
    mma(sum, of_a, of_b, sum)
    comptime for i in range(4):
        c[unsafe_offset=(g + i // 2 * 8) * 8 + t + i % 2] = sum[i]


def main() raises:
    var ctx = DeviceContext()
    var a = ctx.enqueue_create_buffer[DType.float16](256)
    var c = ctx.enqueue_create_buffer[DType.float32](128)
    ctx.enqueue_function[product](a, a, c, grid_dim=1, block_dim=32)
"""


@mojo_is_here
def test_a_kernel_of_mojos_runs_from_its_ptx_tensor_cores_included():
    kernel = mojo.build(PRODUCT, "sm_90a").kernel("product")
    assert mojo.build(PRODUCT, "sm_90a").kernel("product") == kernel  # kept
    a, b, c = torch.randn(16, 16).half(), torch.randn(8, 16).half(), torch.empty(16, 8)
    kernel.launcher()((1,), (32,), (a, b, c))
    assert torch.allclose(c.double(), a.double() @ b.double().T, atol=1e-5)


@mojo_is_here
def test_what_mojo_refuses_is_said_at_the_readers_line(monkeypatch, tmp_path):
    wrong = 'def main():\n    print(1)\n    var x: Int = "four"\n'
    with monkeypatch.context() as patched:
        patched.setattr(machine, "cache", lambda name: tmp_path)
        with pytest.raises(mojo.CompileError) as said:
            mojo.run(wrong)
        assert [line for line, _ in said.value.errors] == [3] and 'var x: Int = "four"' in str(said.value)
        patched.setattr(mojo, "_compile", None)  # it is known by now
        with pytest.raises(mojo.CompileError) as again:
            mojo.run(wrong)
        assert str(again.value) == str(said.value) and again.value.errors == said.value.errors
    with pytest.raises(mojo.CompileError) as said:  # seen only when the kernel is made for a card
        mojo.build(PRODUCT, "gfx942")
    [(line, message)] = said.value.errors
    assert "mma(sum" in PRODUCT.splitlines()[line - 1] and "no valid implementation" in message


def _until(holds, seconds=10):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_what_is_refused_ahead_keeps_no_other_from_being_compiled(monkeypatch):
    asked = []

    def build(code, arch):
        asked.append((code, arch))
        if code == "wrong":
            raise mojo.CompileError(code, [(1, "refused")], "", "This Mojo does not compile.")

    monkeypatch.setattr(mojo, "build", build)
    monkeypatch.setattr(mojo, "problem", lambda: None)
    wanted = [("wrong", "sm_90a"), ("right", "sm_90a"), ("right", "gfx942")]
    mojo.ahead(wanted)
    assert _until(lambda: sorted(asked) == sorted(wanted))
    monkeypatch.setattr(mojo, "problem", lambda: machine.NotReady("no Mojo", "make lab"))
    mojo.ahead(wanted)
    apart.later(lambda: None).result(10)
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("target", "here", "fits"),
    [("sm_90a", "sm_90", True), ("sm_86", "sm_86", True), ("sm_100a", "sm_100", True), ("sm_90a", "sm_75", False)],
)
def test_ptx_for_another_card_is_not_launched_and_said_so(monkeypatch, target, here, fits):
    kernel = mojo.Kernel("softmax", "entry", target, "")
    assert kernel.problem() is None  # in CPU mode each runs
    monkeypatch.setattr(machine, "gpu", lambda: True)
    monkeypatch.setattr(machine, "here", lambda: types.SimpleNamespace(arch=here))
    lacking = kernel.problem()
    assert (lacking is None) == fits
    assert fits or f"softmax is for {target}, and this GPU is {here}" in str(lacking)


@pytest.mark.parametrize("name", ["max_stages", "max_both_ways", "compile_max"])
def test_what_lesson_11_begins_ahead_is_what_it_asks_for_later(name):
    """Else it would be compiled twice: the text of a function as loaded, and as a cell that was run has it."""
    path, text = source.saved("11_mojo_max", name)
    assert path.parent.name == "notebooks" and source.of(source.load("11_mojo_max", name)) == text


def test_lesson_11_asks_for_the_models_whose_compilation_it_has_begun(monkeypatch):
    """In another folder each time: no compiler finds what an earlier one kept."""
    begun, asked, us = [], [], dict(value=1.0, unit="us", low=0.9, high=1.1, n=21)

    def run(package, fn, *args, **how):
        if fn.__name__ == "compile_max":
            asked.append((fn.__name__, args, how))
            return 40.0 + len(asked)
        return {name: {"loaded": 0.1, "error": 0.0, "max": us, "cublas": us} for name, *_ in args[0]}

    monkeypatch.setattr(mojo, "problem", lambda: None)
    monkeypatch.setattr(mojo, "seconds", lambda code, *options: 7.0)
    monkeypatch.setattr(apart, "ahead", lambda package, fn, *args, **how: begun.append((fn.__name__, args, how)))
    monkeypatch.setattr(apart, "run", run)
    measure = source.load("11_mojo_max", "measure_max")
    measure.__globals__["max_begun"][:] = [source.load("11_mojo_max", "begin_max")()]
    for _ in range(2):  # the cell is run again: then it begins them itself
        found = measure()["compile.seconds.max"]
        assert begun == asked and len({str(how) for _, _, how in begun}) == len(begun)
    assert (found.low, found.value, found.high, len(asked)) == (44.0, 45.0, 46.0, 6)
    assert source.load("11_mojo_max", "measure_compilation")()["compile.seconds.mojo"].value == 7.0


@mojo_is_here
def test_a_program_prints_and_one_that_fails_says_so():
    assert mojo.run("def main():\n    print(6 * 7)\n") == "42\n"
    with pytest.raises(mojo.Failed, match="too large"):
        mojo.run('def main() raises:\n    raise Error("too large")\n')


@pytest.mark.parametrize(
    ("libc", "python", "expected"),
    [("2.31", (3, 12), "glibc 2.34"), ("2.39", (3, 9), "Python 3.10 to 3.14"), ("2.39", (3, 12), "not installed")],
)
def test_what_is_missing_is_said_in_a_sentence(monkeypatch, libc, python, expected):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", libc))
    monkeypatch.setattr(sys, "version_info", (*python, 0))
    with pytest.raises(machine.NotReady, match=expected) as said:
        mojo.run("def main():\n    pass\n")
    assert said.value.mend and said.value.sentence == apart.problem("max").sentence


def about_max():
    import os
    from pathlib import Path

    from max.graph import DeviceRef, Graph, TensorType

    graph = Graph("one", forward=lambda x: x + x, input_types=[TensorType(_float32(), (4,), device=DeviceRef.CPU())])
    root = Path(os.environ["MODULAR_MAX_PACKAGE_ROOT"])
    return [str(graph).count("rmo.add"), (root / "lib" / "mojo").is_dir(), os.environ["MODULAR_TELEMETRY_ENABLED"]]


def _float32():
    from max.dtype import DType

    return DType.float32


@mojo_is_here
def test_max_runs_apart_knows_where_its_library_lies_and_tells_nobody():
    assert apart.run("max", about_max) == [1, True, "0"]
    assert "max.engine" not in sys.modules


NEGATED = """
.version 8.5
.target sm_90
.address_size 64
.visible .entry negated(
	.param .u64 .ptr .align 4 negated_param_0
)
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<3>;
	.reg .b64 	%rd<4>;
	ld.param.b64 	%rd1, [negated_param_0];
	cvta.to.global.u64 	%rd2, %rd1;
	mov.u32 	%r1, %tid.x;
	setp.lt.s32 	%p1, %r1, 2;
	not.pred 	%p2, %p1;
	selp.b32 	%r2, 7, 3, %p2;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd3, %rd3, %rd2;
	st.global.b32 	[%rd3], %r2;
	ret;
}
"""


def test_a_predicate_is_negated_as_a_truth_value():
    out = torch.zeros(4, dtype=torch.int32)
    cuda.PtxModule(NEGATED).get_function("negated")((1,), (4,), (out,))
    assert out.tolist() == [3, 3, 7, 7]


@mojo_is_here
@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=() if arch in nbval_fixes.QUICK["HELPERS_TARGETS"].split() else pytest.mark.slow)
        for arch in source.load("11_mojo_max", "TARGETS")
    ],
)
def test_lesson_11_has_recorded_what_is_made_for_each_of_its_targets(arch):
    """The lesson as make test runs it shows the record."""
    made_for = source.load("11_mojo_max", "compiled_for")
    for key, text, kernel in (("tiled", "TILED", "tiled"), ("linear", "LINEAR", "linear_gelu")):
        made = made_for(source.load("11_mojo_max", text), [kernel], [arch])
        recorded = json.loads("".join(records.load(records.OUTPUTS)["texts"][f"mojo.targets.{key}"]))
        assert json.loads(json.dumps(made)) == {arch: recorded[arch]}


def test_it_compiles_for_no_other_gpus_where_some_are_named(monkeypatch):
    monkeypatch.setenv("HELPERS_TARGETS", "sm_90a gfx942")
    with pytest.raises(machine.NotReady, match="without sm_80"):
        mojo.build("def main(): pass", "sm_80")
