"""Raw CUDA C: compiled without a GPU, launched as CuPy launches it, run and examined on the CPU."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import cuda, machine, traffic
from helpers.cuda import cpu, nvrtc, translate

DEVICE = machine.device()
on_cpu = pytest.mark.skipif(machine.gpu(), reason="what a GPU does with this kernel is undefined")
needs_gpu = pytest.mark.skipif(not machine.gpu(), reason="needs a GPU")


def numbered(text: str) -> str:
    """Kernel source without the leading newline, so that the first line is line 1."""
    return text.lstrip("\n")


KERNELS = numbered(r"""
#include <cuda_fp16.h>
template <class T> __global__ void scale(T* x, T by, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= by;
}
__global__ void plain(float* x) { x[0] = 1; }
struct Pair { int n; float a; };
extern "C" {
__global__ void scalars(double* o, int a, unsigned b, long long c, size_t d, float e, double f, __half g, bool h,
                        short i) {
  o[0] = a; o[1] = b; o[2] = c; o[3] = d; o[4] = e; o[5] = f; o[6] = __half2float(g); o[7] = h; o[8] = i;
}
__global__ void pair(Pair p, float* out) { out[threadIdx.x] = p.n * p.a; }
__global__ void add(const float* x, const float* y, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + y[i];
}
__global__ void reverse(int* x) {
  __shared__ int s[64];
  int t = threadIdx.x;
  s[t] = x[t];
  x[t] = s[63 - t];
}
__global__ void reverse_right(int* x) {
  __shared__ int s[64];
  int t = threadIdx.x;
  s[t] = x[t];
  __syncthreads();
  x[t] = s[63 - t];
}
__global__ void half_barrier(int* x) {
  if (threadIdx.x < 40)
    __syncthreads();
  else
    x[0] = __shfl_sync(0xffffffffu, 1, 0);
  __syncthreads();
}
__global__ void lost_lanes(int* x) {
  if (threadIdx.x % 2)
    x[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
  __syncthreads();
}
__global__ void two_barriers(int* x) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}
__global__ void tree_in_if(int* x) {
  __shared__ int s[64];
  int t = threadIdx.x;
  s[t] = x[t];
  __syncthreads();
  for (int half = 32; half > 0; half /= 2)
    if (t < half) {
      s[t] = s[t] + s[t + half];
      __syncthreads();
    }
}
__global__ void beyond(const float* x, float* out, int n) {
  if (threadIdx.x >= n) return;
  float other = __shfl_down_sync(0xffffffffu, x[threadIdx.x], 4);
  out[threadIdx.x] = fmaxf(x[threadIdx.x], other);
}
__global__ void checked(const int* x) {
  assert(x[threadIdx.x] < 5);
}
__global__ void divide(int* x) {
  x[0] = x[1] / x[2];
}
__global__ void hello(int n) { printf("%d of %d\n", threadIdx.x, n); }
__global__ void unset(float* out) {
  __shared__ float s[32];
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void early(int* out, int n) {
  __shared__ int base;
  if (threadIdx.x == 0) base = 100;
  __syncthreads();
  if (threadIdx.x >= n) return;
  out[threadIdx.x] = base + __shfl_xor_sync(0xffu, (int)threadIdx.x, 1);
  __syncthreads();
}
__global__ void active(int* out, int* count) {
  int t = threadIdx.x;
  if (t % 3) return;
  unsigned mask = __activemask();
  int lane = t & 31, leader = __ffs(mask) - 1, base = 0;
  if (lane == leader) base = atomicAdd(count, __popc(mask));
  base = __shfl_sync(mask, base, leader);
  out[base + __popc(mask & ((1u << lane) - 1))] = t;
}
__global__ void segments(float* out) {
  float v = threadIdx.x;
  for (int d = 4; d; d /= 2) v += __shfl_down_sync(~0u, v, d, 8);
  out[threadIdx.x] = v;
}
__global__ void spin(int* lock, int* count) {
  while (atomicCAS(lock, 0, 1)) {}
  __threadfence();
  *count += 1;
  __threadfence();
  atomicExch(lock, 0);
}
__global__ void last_block(const float* x, float* partial, float* out, unsigned* done) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = x[blockIdx.x] * 2;
    __threadfence();
    last = atomicAdd(done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0)
    for (int i = 0; i < gridDim.x; i++) out[0] += partial[i];
}
__global__ void fenced_too_soon(const float* x, float* partial, float* out, unsigned* done) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    partial[blockIdx.x] = x[blockIdx.x] * 2;
    last = atomicAdd(done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0)
    for (int i = 0; i < gridDim.x; i++) out[0] += partial[i];
}
__global__ void all_fence(const float* x, float* partial, float* out, unsigned* done) {
  __shared__ bool last;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  partial[i] = x[i] * 2;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(done, 1u) == gridDim.x - 1;
  __syncthreads();
  if (last)
    for (int k = threadIdx.x; k < gridDim.x * blockDim.x; k += blockDim.x) atomicAdd(out, partial[k]);
}
__global__ void counted(int* bins, const int* x) {
  __shared__ int s[4];
  if (threadIdx.x < 4) s[threadIdx.x] = 0;
  __syncthreads();
  s[x[threadIdx.x]]++;
  __syncthreads();
  if (threadIdx.x < 4) bins[threadIdx.x] = s[threadIdx.x];
}
__global__ void columns(const float* x, float* out) {
  __shared__ float tile[32][32];
  __shared__ float padded[32][33];
  int r = threadIdx.y, c = threadIdx.x;
  tile[r][c] = x[r * 32 + c];
  padded[r][c] = x[c * 32 + r];
  __syncthreads();
  out[r * 32 + c] = tile[c][r]
    + padded[c][r];
}
__global__ void vectors(const float4* x, float4* out) {
  out[threadIdx.x] = x[threadIdx.x];
}
__global__ void __launch_bounds__(128) bounded(float* x) { x[threadIdx.x] = 1; }
__global__ void dynamic(float* out, int n) {
  extern __shared__ float s[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = i;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = s[n - 1 - i];
}
}
__constant__ float table[2];
extern "C" __global__ void looked_up(float* out) { out[threadIdx.x] = table[threadIdx.x]; }
""")


@pytest.fixture(scope="module")
def kernels() -> cuda.RawModule:
    return cuda.RawModule(code=KERNELS, name_expressions=("scale<float>", "scale<int>"))


def line_of(text: str, nth: int = 0) -> int:
    found = [i for i, line in enumerate(KERNELS.splitlines(), 1) if text in line]
    return found[nth]


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


# ---- compiling


def test_compiling_needs_no_gpu():
    binary = cuda.compile(KERNELS, arch="sm_90", name_expressions=("scale<float>",))
    assert binary.cubin[:4] == b"\x7fELF" and ".target sm_90" in binary.ptx
    reverse = binary.kernels["reverse_right"]
    assert reverse.shared_bytes == 64 * 4 and 4 < reverse.registers < 64 and reverse.spill_bytes == 0
    assert binary.kernels["bounded"].max_threads == 128
    assert "FADD" in binary.sass("add") and "FMUL" in binary.sass("scale<float>")
    assert "FMUL" not in binary.sass("add")


def test_spills_are_counted():
    code = """
    extern "C" __global__ void __launch_bounds__(1024) many(float* x) {
      float a[80];
      for (int i = 0; i < 80; i++) a[i] = x[i * 1024 + threadIdx.x];
      __syncthreads();
      for (int k = 0; k < 4; k++)
        for (int i = 0; i < 80; i++) a[i] = a[i] * a[(i + 7) % 80] + a[(i * 3) % 80];
      for (int i = 0; i < 80; i++) x[i * 1024 + threadIdx.x] = a[i];
    }"""
    many = cuda.compile(code).kernels["many"]
    assert many.registers == 64 and many.spill_stores_bytes > 0 and many.spill_loads_bytes > 0


@pytest.mark.parametrize(
    "header",
    [
        "cuda_fp16.h",
        "cuda_bf16.h",
        "mma.h",
        "cuda/barrier",
        "cooperative_groups.h",
        "stdint.h",
        "cmath",
        "cfloat",
    ],
)
def test_headers_are_found(header):
    cuda.compile(f'#include <{header}>\nextern "C" __global__ void k(float* x) {{ x[0] = 1; }}')


def test_an_error_names_the_readers_line():
    with pytest.raises(cuda.CompileError) as caught:
        cuda.compile('extern "C" __global__ void k(float* x) {\n  int a = 1;\n  x[0] = undefined_name + a;\n}')
    assert caught.value.errors[0][0] == 3
    assert "line 3" in str(caught.value) and "x[0] = undefined_name + a;" in str(caught.value)


def test_too_much_static_shared_memory_is_a_sentence():
    code = 'extern "C" __global__ void k(float* x) { __shared__ float s[20000]; s[threadIdx.x] = 1; x[0] = s[3]; }'
    with pytest.raises(cuda.CompileError, match=r"k declares 80,000 bytes.*49,152"):
        cuda.compile(code)


def test_an_unknown_architecture_is_a_sentence():
    with pytest.raises(ValueError, match="does not compile for 'sm_70'.*sm_75"):
        cuda.compile(KERNELS, arch="sm_70")


def test_wgmma_compiles_for_sm_90a_only():
    code = 'extern "C" __global__ void k(float* x) { asm volatile("wgmma.fence.sync.aligned;\\n"); x[0] = 1; }'
    assert cuda.compile(code, options=("-arch=sm_90a",)).arch == "sm_90a"
    with pytest.raises(cuda.CompileError):
        cuda.compile(code, arch="sm_90")


def test_several_compiled_together_are_what_each_is_alone_and_travel_to_another_process(tmp_path):
    code = 'extern "C" __global__ void k(float* x) {{ x[0] = {}; }}'
    asked = [(code.format(n), "sm_90", ("-DTOGETHER", "-arch=sm_90a")) for n in (1, 2, 1)]
    together = cuda.compile_all(asked)
    assert together[0] is together[2] is cuda.compile(*asked[0]) and together[1].code == asked[1][0]
    with pytest.raises(cuda.CompileError) as caught:
        cuda.compile_all([(code.format("good" if n else "bad"), "sm_90") for n in range(2)])
    assert '"bad" is undefined' in str(caught.value)
    kept = dict(nvrtc._binaries)
    nvrtc.write_binaries(tmp_path / "made")
    nvrtc._binaries.clear()
    assert cuda.compile(*asked[0]).cubin == together[0].cubin
    nvrtc.read_binaries(tmp_path / "made")
    assert nvrtc._binaries == kept


# ---- arguments


def test_numbers_arrive_as_the_parameters_types(kernels):
    out = zeros(9, dtype=torch.float64)
    values = (-3, 4294967295, -(2**40), 2**41, 1.5, 1 / 3, np.float16(3.5), True, -300)
    kernels.get_function("scalars")((1,), (1,), (out, *values))
    assert out.tolist() == [float(v) for v in values]


def test_a_struct_goes_by_value(kernels):
    out = zeros(3)
    kernels.get_function("pair")((1,), (3,), (np.array([(3, 2.5)], [("n", "i4"), ("a", "f4")]), out))
    assert out.tolist() == [7.5] * 3


@pytest.mark.parametrize(
    "bad, match",
    [
        (lambda x: (x, x, x, 1.5), "argument 3 .int n. is an integer of 4 bytes, but the float 1.5"),
        (lambda x: (x, x, x, np.int64(5)), "numpy int64 of 8 bytes"),
        (lambda x: (x, x, x, 2**40), "does not fit"),
        (lambda x: (x, x.double(), x, 5), "is a tensor of float64, but the kernel reads it as float32"),
        (lambda x: (x, x, 5, 5), "is a pointer, but the number 5"),
        (lambda x: (x, x, x, x), "is an integer of 4 bytes, but a tensor"),
        (lambda x: (x, x, x), "takes 4 arguments .*but 3 were given"),
        (lambda x: (x, x, x.to("meta"), 5), "is on 'meta'"),
        (lambda x: (x, x, "text", 5), "is a str"),
    ],
)
def test_what_does_not_fit_is_refused(kernels, bad, match):
    with pytest.raises(cuda.BadArgument, match=match):
        kernels.get_function("add")((1,), (32,), bad(zeros(32)))


@pytest.mark.parametrize(
    "grid, block, shared, match",
    [
        ((1,), (2048,), 0, "block.x is 2,048; it may be 1 to 1,024"),
        ((1,), (64, 32), 0, "2,048 threads; it may have 1,024"),
        ((0,), (32,), 0, "grid.x is 0"),
        ((1, 70000), (32,), 0, "grid.y is 70,000; it may be 1 to 65,535"),
        ((1,), (32,), 10**6, "1,000,000 bytes of dynamic"),
        ((1.5,), (32,), 0, "1 to 3 integers"),
    ],
)
def test_launches_that_a_gpu_refuses(kernels, grid, block, shared, match):
    x = zeros(32)
    with pytest.raises(cuda.LaunchError, match=match):
        kernels.get_function("add")(grid, block, (x, x, x, 32), shared_mem=shared)


def test_launch_bounds_limit_the_block(kernels):
    with pytest.raises(cuda.LaunchError, match="it may have 128 .its __launch_bounds__"):
        kernels.get_function("bounded")((1,), (256,), (zeros(256),))


CLUSTER = 'extern "C" __global__ void __cluster_dims__({}, 1, 1) k(float* x) {{ x[blockIdx.x] = 1; }}'


@pytest.mark.parametrize(
    "blocks, grid, match",
    [(2, 3, "a grid of .3, 1, 1. is no whole number of clusters of .2, 1, 1. blocks"), (16, 32, "it may have 8")],
)
def test_clusters_that_cannot_be_launched(monkeypatch, blocks, grid, match):
    monkeypatch.setattr(machine, "gpu", lambda: True)  # what is refused here never reaches one
    kernel = cuda.RawModule(code=CLUSTER.format(blocks), options=("-arch=sm_90",)).get_function("k")
    assert kernel.resources.cluster == (blocks, 1, 1)
    with pytest.raises(cuda.LaunchError, match=match):
        kernel((grid,), (32,), (zeros(grid),))


def test_more_registers_than_an_sm_has_are_refused(kernels):
    kernel = kernels.get_function("add")
    kernel.resources = replace(kernel.resources, registers=65)
    x = zeros(32)
    with pytest.raises(cuda.LaunchError, match="1,024 threads of 65 registers need 73,728, and an SM has 65,536"):
        kernel((1,), (1024,), (x, x, x, 32))


@on_cpu
def test_shared_memory_is_limited_as_on_the_card_that_the_code_is_for():
    x = zeros(4)
    for arch, limit in (("sm_86", "101,376"), ("sm_90a", "232,448")):
        kernel = cuda.RawModule(code=KERNELS, options=(f"-arch={arch}",), name_expressions=("scale<float>",))
        with pytest.raises(cuda.LaunchError, match=f"a block may have {limit} in all"):
            kernel.get_function("dynamic")((1,), (32,), (x, 4), shared_mem=240_000)


def test_code_for_another_card_is_refused():
    from helpers.cuda.gpu import runs

    there = {("sm_90a", "sm_90"), ("sm_90", "sm_90"), ("sm_80", "sm_86"), ("sm_86", "sm_89"), ("sm_100f", "sm_103")}
    never = {("sm_90a", "sm_100"), ("sm_86", "sm_80"), ("sm_80", "sm_90"), ("sm_100a", "sm_103"), ("sm_120", "sm_100")}
    assert all(runs(*pair) for pair in there) and not any(runs(*pair) for pair in never)


@pytest.mark.parametrize(
    "tensor, box, options, match",
    [
        (torch.empty(64, 64), (64, 64), {}, "256 bytes is no multiple of 16, and at most the 128 of its swizzle"),
        (torch.empty(64, 64), (64, 2), {"swizzle": 0}, "8 bytes is no multiple of 16"),
        (torch.empty(64, 65), (64, 32), {}, "must be multiples of 16 bytes; pad the rows"),
        (torch.empty(64, 64).T, (64, 32), {}, "the last dimension must be contiguous"),
        (torch.empty(1, 64).expand(64, 64), (64, 32), {}, "must be multiples of 16 bytes"),
        (torch.empty(64, 64)[:, 1:], (64, 32), {}, "does not begin at a multiple of 16 bytes"),
        (torch.empty(0, 64), (64, 32), {}, "there is nothing to map"),
        (torch.empty(4, 64, dtype=torch.complex64), (4, 8), {}, "has no complex64; it has uint8"),
        (torch.empty(512, 64), (512, 32), {}, "each side of a tile is 1 to 256 elements"),
        (torch.empty(64), (64, 32), {}, "1 to 5 dimensions and a box of as many"),
        (torch.empty(64, 64), (64, 32), {"swizzle": 96}, "they are of .0, 32, 64, 128. and"),
    ],
)
def test_what_the_copy_engine_cannot_name_is_refused(tensor, box, options, match):
    with pytest.raises(ValueError, match=match):
        cuda.tensor_map(tensor, box, **options)


@on_cpu
def test_a_tensor_map_takes_a_gpu():
    with pytest.raises(machine.NotReady, match="which sm_90 and later have"):
        cuda.tensor_map(torch.empty(64, 64), (64, 32))


TILE = """
struct alignas(64) TensorMap { unsigned long long opaque[16]; };
extern "C" __global__ void fetch(const __grid_constant__ TensorMap map, float* out, int column, int row) {
  __shared__ alignas(128) float tile[8 * 16];
  __shared__ alignas(8) unsigned long long bar;
  unsigned to = __cvta_generic_to_shared(tile), at = __cvta_generic_to_shared(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" ::"r"(at) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(&map), "r"(at), "r"(column), "r"(row) : "memory");
  }
  __syncthreads();
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(at) : "memory");
  out[threadIdx.x] = tile[threadIdx.x];
}"""
hopper = pytest.mark.skipif(machine.here().capability is None or machine.here().capability < (9, 0), reason="needs TMA")


@hopper
@pytest.mark.parametrize("column, row", [(0, 0), (16, 8), (88, 28), (-4, -2)])
def test_a_tensor_map_reaches_the_kernel_by_value(column, row):
    x, out = torch.randn(30, 100, device="cuda"), zeros(8, 16)
    fetch = cuda.RawModule(code=TILE).get_function("fetch")
    fetch((1,), (128,), (cuda.tensor_map(x, (8, 16), swizzle=0), out, column, row))
    padded = torch.nn.functional.pad(x, (16, 16, 16, 16))
    assert torch.equal(out, padded[16 + row : 24 + row, 16 + column : 32 + column])
    one_row = cuda.tensor_map(x.T.contiguous()[:, :4].reshape(-1, 4)[:1], (1, 4), swizzle=0)
    assert len(one_row.bytes) == 128
    with pytest.raises(cuda.BadArgument, match="a struct or vector of 128 bytes, but a tensor was given"):
        fetch((1,), (128,), (x, out, 0, 0))
    with pytest.raises(cuda.BadArgument, match="but a tensor map of 128 bytes was given"):
        fetch((1,), (128,), (cuda.tensor_map(x, (8, 16), swizzle=0), one_row, 0, 0))


def test_tensor_maps_go_only_where_128_bytes_are_taken():
    tile = cuda.compile(TILE, arch="sm_90")
    assert tile.parameters["fetch"][0].size == 128 and tile.parameters["fetch"][0].align == 64


@on_cpu
def test_a_header_that_changed_is_compiled_anew(tmp_path):
    """What is kept from an earlier process is by the text of all files, not of the kernel's alone."""
    (tmp_path / "inner.h").write_text("#define VALUE 1\n")
    (tmp_path / "outer.h").write_text('#include "inner.h"\n')
    code = '#include "outer.h"\nextern "C" __global__ void put(int* out) { *out = VALUE; }\n'
    out = torch.zeros(1, dtype=torch.int32)
    for value in (1, 2):
        (tmp_path / "inner.h").write_text(f"#define VALUE {value}\n")
        cpu.build.cache_clear()  # as in a new process
        cuda.RawModule(code=code, options=(f"-I{tmp_path}",)).get_function("put")(1, 1, (out,))
        assert out.item() == value


EARLY = """
#include <cuda_device_runtime_api.h>
extern "C" __global__ void plus(const float* x, float* y, int n, int wait) {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
    for (long long t = clock64() + wait; clock64() < t;) {}
    cudaGridDependencySynchronize();
#endif
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] + 1.0f;
}
"""


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=needs_gpu)])
def test_kernels_that_begin_early_see_what_those_before_them_wrote(captured):
    plus = cuda.RawModule(code=EARLY).get_function("plus")
    values = [zeros(100_000) for _ in range(9)]

    def run():
        for i, (x, y) in enumerate(zip(values, values[1:], strict=False)):
            plus((391,), (256,), (x, y, y.numel(), 20_000 * (i % 2 == 0)), early=True)

    run()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for y in values[1:]:
            y.zero_()
        graph.replay()
    assert torch.equal(values[-1], torch.full_like(values[-1], 8.0))


@needs_gpu
def test_a_kernel_begins_while_the_one_before_it_runs():
    """Two kernels that both spin take the time of one, where the second may begin early."""
    if machine.here().capability < (9, 0):
        pytest.skip("came with sm_90")
    plus = cuda.RawModule(code=EARLY).get_function("plus")
    x, y = zeros(32), zeros(32)

    def took(early: bool) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        first.record()
        for _ in range(2):
            plus((1,), (32,), (x, y, 32, 1_000_000), early=early)
        last.record()
        last.synchronize()
        return first.elapsed_time(last)

    took(True)
    assert took(True) < 0.75 * took(False)


@needs_gpu
def test_after_refused_launches_the_process_goes_on(kernels):
    x = zeros(32)
    for grid, block, shared in (((1,), (2048,), 0), ((0,), (32,), 0), ((1,), (32,), 10**6)):
        with pytest.raises(cuda.LaunchError):
            kernels.get_function("add")(grid, block, (x, x, x, 32), shared_mem=shared)
    for name in ("sm_75", "sm_120"):
        with pytest.raises(cuda.LaunchError, match=f"compiled for {name}, and the GPU here is"):
            other = cuda.RawModule(
                code=CLUSTER.replace("__cluster_dims__({}, 1, 1)", "").format(), options=(f"-arch={name}",)
            )
            other.get_function("k")((1,), (1,), (x,))
    kernels.get_function("add")((1,), (32,), (x, x + 1, x, 32))
    assert x.tolist() == [1.0] * 32


def test_a_kernel_that_cannot_be_named_says_how(kernels):
    with pytest.raises(KeyError, match='write extern "C"'):
        kernels.get_function("plain")
    with pytest.raises(KeyError, match="name_expressions"):
        kernels.get_function("scale<double>")


# ---- running


def test_templates(kernels):
    real, whole = torch.ones(100, device=DEVICE), torch.ones(100, dtype=torch.int32, device=DEVICE)
    kernels.get_function("scale<float>")((2,), (64,), (real, 2.5, 99))
    kernels.get_function("scale<int>")((2,), (64,), (whole, 3, 100))
    assert real.tolist() == [2.5] * 99 + [1.0] and whole.tolist() == [3] * 100


def test_early_return_and_barriers(kernels):
    out = zeros(64, dtype=torch.int32)
    kernels.get_function("early")((1,), (64,), (out, 8))
    assert out.tolist() == [101, 100, 103, 102, 105, 104, 107, 106] + [0] * 56


def test_activemask_of_divergent_lanes(kernels):
    out, count = zeros(64, dtype=torch.int32), zeros(1, dtype=torch.int32)
    kernels.get_function("active")((1,), (64,), (out, count))
    assert count.item() == 22 and sorted(out[:22].tolist()) == list(range(0, 64, 3))


def test_shuffles_keep_to_their_width(kernels):
    out = zeros(32)
    kernels.get_function("segments")((1,), (32,), (out,))
    assert out[::8].tolist() == [28.0, 92.0, 156.0, 220.0]


def test_dynamic_shared_memory_above_48_kb(kernels):
    out = zeros(20000)
    kernels.get_function("dynamic")((1,), (256,), (out, 20000), shared_mem=80000)
    assert torch.equal(out, torch.arange(20000.0, device=DEVICE).flip(0))


def test_constants_are_set_through_get_global(kernels):
    kernels.get_global("table").view(torch.float32).copy_(torch.tensor([3.0, 4.0]))
    out = zeros(2)
    kernels.get_function("looked_up")((1,), (2,), (out,))
    assert out.tolist() == [3.0, 4.0]


def test_printf_reaches_pythons_stdout(kernels, capsys):
    kernels.get_function("hello")((1,), (3,), (7,))
    assert capsys.readouterr().out == "0 of 7\n1 of 7\n2 of 7\n"


def test_a_spin_lock_ends(kernels):
    count = zeros(1, dtype=torch.int32)
    kernels.get_function("spin")((2,), (32,), (zeros(1, dtype=torch.int32), count))
    assert count.item() == 64


# ---- what goes wrong, on the CPU


@on_cpu
def test_the_order_of_threads_shows_a_missing_barrier(kernels):
    want = list(range(63, -1, -1))
    for order in ("forward", "reverse", "shuffle"):
        wrong, right = torch.arange(64, dtype=torch.int32), torch.arange(64, dtype=torch.int32)
        kernels.get_function("reverse")((1,), (64,), (wrong,), order=order)
        kernels.get_function("reverse_right")((1,), (64,), (right,), order=order)
        assert wrong.tolist() != want and right.tolist() == want


@on_cpu
def test_shared_memory_is_not_zero_at_first(kernels):
    out = zeros(32)
    kernels.get_function("unset")((1,), (32,), (out,))
    assert out.isnan().all()
    for order, sign in (("reverse", 1), ("shuffle", -1)):  # a maximum, a minimum would pass over a NaN
        kernels.get_function("unset")((1,), (32,), (out,), order=order)
        assert (sign * out > 1e36).all() and (sign * out.view(torch.float16) > 6e4).all()


@on_cpu
def test_what_a_lane_that_has_returned_would_have_said_is_not_used_unseen(kernels):
    x, out = torch.arange(32.0), zeros(32)
    kernels.get_function("beyond")((1,), (32,), (x, out, 28), order="reverse")
    assert out[:24].tolist() == x[4:28].tolist() and (out[24:28] > 1e36).all()


@on_cpu
def test_out_of_bounds_names_line_and_array(kernels):
    x = torch.zeros(100)
    with pytest.raises(
        cuda.OutOfBounds, match=r"thread \(100, 0, 0\).*past the end of `x` \(element 100 of 100\)"
    ) as caught:
        kernels.get_function("add")((1,), (128,), (x, torch.zeros(128), torch.zeros(128), 128))
    assert caught.value.line == line_of("out[i] = x[i] + y[i]")
    assert isinstance(caught.value, IndexError)


STRUCTS = r"""
#include <cuda_fp16.h>

struct Pair { float a, b; };

__device__ __noinline__ Pair pair(float v) {
  Pair made;
  made.a = v, made.b = -v;
  return made;
}

__device__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }

extern "C" __global__ void halves(__half* out, __half* more, int first) {
  int i = first + threadIdx.x;
  more[threadIdx.x] = __float2half(fibonacci(5));
  out[i] = __float2half(i);
}

extern "C" __global__ void pairs(Pair* out, Pair* more, int first) {
  int i = first + threadIdx.x;
  more[threadIdx.x] = pair(fibonacci(5));
  out[i] = pair(i);
}
"""


@on_cpu
@pytest.mark.parametrize("kernel", ["halves", "pairs"])
def test_a_struct_that_a_function_returns_is_seen_where_it_is_stored(kernel):
    """Each kernel calls its function twice, which g++ alone would not make part of it."""
    run = cuda.RawModule(code=STRUCTS).get_function(kernel)
    dtype, each = (torch.half, 1) if kernel == "halves" else (torch.float32, 2)
    out, more = torch.zeros(32 * each, dtype=dtype), torch.zeros(32 * each, dtype=dtype)
    run((1,), (32,), (out, more, 0))
    assert out[::each].tolist() == list(range(32)) and more[0] == 5
    with pytest.raises(cuda.OutOfBounds, match="past the end of `out`"):
        run((1,), (32,), (out, more, 1))
    assert run.trace((1,), (32,), (out, more, 0)).bytes_written == out.nbytes + more.nbytes
    assert run.check_races((2,), (32,), (out, more, 0))


@on_cpu
@pytest.mark.parametrize(
    "kernel, error, line, match",
    [
        (
            "half_barrier",
            cuda.Deadlock,
            "else",
            r"thread \(40, 0, 0\).*40 threads of its block wait at __syncthreads",
        ),
        ("lost_lanes", cuda.Deadlock, "if (threadIdx.x % 2)", "lanes of its warp that are named in the mask"),
        ("two_barriers", cuda.Deadlock, "if (threadIdx.x < 32)", "different __syncthreads"),
        (
            "tree_in_if",
            cuda.Deadlock,
            "s[t] = s[t] + s[t + half]",
            r"in an `if`; 32 threads wait here, and thread \(32, 0, 0\) .* returned",
        ),
        ("checked", cuda.AssertFailed, None, "assertion `x.threadIdx.x. < 5` failed"),
        ("divide", cuda.KernelError, None, "divides an integer by zero"),
    ],
)
def test_failures_are_exceptions_with_the_line(kernels, kernel, error, line, match):
    x = torch.full((64,), 9, dtype=torch.int32) if kernel == "checked" else torch.zeros(64, dtype=torch.int32)
    with pytest.raises(error, match=match) as caught:
        kernels.get_function(kernel)((1,), (64,), (x,))
    texts = {"checked": "assert(x", "divide": "x[0] = x[1]"}
    assert caught.value.line == (line_of(line) + 1 if line else line_of(texts[kernel]))


@on_cpu
def test_the_process_lives_on_after_a_failure(kernels):
    for _ in range(3):
        with pytest.raises(cuda.KernelError):
            kernels.get_function("divide")((1,), (1,), (torch.zeros(3, dtype=torch.int32),))
    out = torch.zeros(4)
    kernels.get_function("add")((1,), (4,), (torch.ones(4), torch.ones(4), out, 4))
    assert out.tolist() == [2.0] * 4


@on_cpu
def test_a_misaligned_vector_is_refused(kernels):
    x = torch.zeros(64)
    with pytest.raises(cuda.KernelError, match="no multiple of 16"):
        kernels.get_function("vectors")((1,), (4,), (x[1:], torch.zeros(64)))


@on_cpu
def test_what_only_a_gpu_has_is_named():
    code = 'extern "C" __global__ void k(float* x) {\n  asm volatile("" ::: "memory");\n  x[0] = 1;\n}'
    with pytest.raises(cuda.CompileError, match="(?s)line 2: inline PTX.*asm volatile"):
        cuda.RawModule(code=code).get_function("k")


@on_cpu
@pytest.mark.parametrize("loop", ["while (x[0] == 0) {}", "for (;;) asm_free = asm_free * 3 + 1;"])
def test_an_endless_kernel_can_be_interrupted(loop):
    code = f'extern "C" __global__ void k(volatile int* x) {{ volatile int asm_free = 1; {loop} }}'
    kernel = cuda.RawModule(code=code).get_function("k")
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        kernel((1,), (2,), (torch.zeros(1, dtype=torch.int32),))


# ---- tensor-core fragments

WMMA = numbered(r"""
#include <mma.h>
using namespace nvcuda;
using A = wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major>;
using Sum = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
template <class L> constexpr bool by_rows = false;
template <> constexpr bool by_rows<wmma::row_major> = true;
template <int M, int N, int K, class T, class S, class LA, class LB>
__global__ void product(const typename wmma::fragment<wmma::matrix_a, M, N, K, T, LA>::storage_element_type* a,
                        const typename wmma::fragment<wmma::matrix_b, M, N, K, T, LB>::storage_element_type* b, S* c,
                        bool rows) {
  wmma::fragment<wmma::matrix_a, M, N, K, T, LA> fa;
  wmma::fragment<wmma::matrix_b, M, N, K, T, LB> fb;
  wmma::fragment<wmma::accumulator, M, N, K, S> sum;
  wmma::layout_t layout = rows ? wmma::mem_row_major : wmma::mem_col_major;
  wmma::load_matrix_sync(sum, c, rows ? N : M, layout);
  wmma::load_matrix_sync(fa, a, by_rows<LA> ? K : M);
  wmma::load_matrix_sync(fb, b, by_rows<LB> ? N : K);
  wmma::mma_sync(sum, fa, fb, sum);
  for (int i = 0; i < sum.num_elements; i++) sum.x[i] = sum.x[i] * S(2.0f);
  wmma::store_matrix_sync(c, sum, rows ? N : M, layout);
}
extern "C" {
__global__ void narrow(const half* a, float* c) { A fa; wmma::load_matrix_sync(fa, a, 20); }
__global__ void shifted(const half* a, float* c) { A fa; wmma::load_matrix_sync(fa, a + 8, 24); }
__global__ void narrow_sum(const half* a, float* c) {
  Sum f;
  wmma::fill_fragment(f, 0.0f);
  wmma::store_matrix_sync(c, f, 18, wmma::mem_row_major);
}
__global__ void half_a_warp(const half* a, float* c) {
  A fa;
  if (threadIdx.x < 16) wmma::load_matrix_sync(fa, a, 16);
  __syncthreads();
}
__global__ void after_return(const half* a, float* c) {
  A fa;
  if (threadIdx.x > 27) return;
  wmma::load_matrix_sync(fa, a, 16);
}
__global__ void own_tiles(const half* a, float* c) { A fa; wmma::load_matrix_sync(fa, a + 16 * threadIdx.x, 16); }
__global__ void two_calls(const half* a, float* c) {
  A fa;
  if (threadIdx.x < 16) wmma::load_matrix_sync(fa, a, 16);
  else wmma::load_matrix_sync(fa, a + 256, 16);
}
__global__ void past(const half* a, float* c) { A fa; wmma::load_matrix_sync(fa, a + 256, 56); }
__global__ void past_shared(const half* a, float* c) {
  __shared__ float s[240];
  Sum f;
  wmma::fill_fragment(f, 0.0f);
  wmma::store_matrix_sync(s, f, 16, wmma::mem_row_major);
}
__global__ void unfilled(const half* a, float* c) { Sum f; wmma::store_matrix_sync(c, f, 16, wmma::mem_row_major); }
__global__ void overlapping(const half* a, float* c) {
  __shared__ float s[512];
  Sum f;
  wmma::fill_fragment(f, 0.0f);
  wmma::store_matrix_sync(s + 128 * (threadIdx.x / 32), f, 16, wmma::mem_row_major);
}
__global__ void staged(const half* a, float* c) {
  __shared__ half s[256];
  __shared__ float sums[256];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) s[i] = a[i];
  BARRIER
  A fa;
  wmma::load_matrix_sync(fa, s, 16);
  Sum f;
  wmma::fill_fragment(f, 0.0f);
  wmma::store_matrix_sync(sums, f, 16, wmma::mem_row_major);
  BARRIER
  c[threadIdx.x] = sums[threadIdx.x];
}
__global__ void pitches(const half* a, float* c) {
  __shared__ half s[1024];
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) s[i] = a[i];
  __syncthreads();
  A fa;
  wmma::load_matrix_sync(fa, s, 64);
  wmma::load_matrix_sync(fa, s, 16);
  wmma::load_matrix_sync(fa, s, 24);
  wmma::load_matrix_sync(fa, a, 32);
  Sum f;
  wmma::fill_fragment(f, 0.0f);
  wmma::store_matrix_sync(c, f, 16, wmma::mem_row_major);
  wmma::store_matrix_sync(c, f, 16, wmma::mem_col_major);
}
}
""")
SHAPES = [
    *((m, n, 16, kind, dtype) for m, n in ((16, 16), (32, 8), (8, 32)) for kind, dtype in (
        ("__half", torch.float16), ("__nv_bfloat16", torch.bfloat16))),
    (16, 16, 8, "nvcuda::wmma::precision::tf32", torch.float32),
]  # fmt: skip


def products() -> dict[str, tuple]:
    """Name expressions of `product`, with the shape, the dtypes and whether a and b are stored by rows."""
    layouts = {True: "nvcuda::wmma::row_major", False: "nvcuda::wmma::col_major"}
    out = {}
    for m, n, k, kind, dtype in SHAPES:
        for sums in ("float", "__half")[: 1 + (kind == "__half")]:
            for a, b in ((True, False), (False, True)):
                name = f"product<{m}, {n}, {k}, {kind}, {sums}, {layouts[a]}, {layouts[b]}>"
                out[name] = (m, n, k, dtype, {"float": torch.float32, "__half": torch.float16}[sums], a, b)
    return out


@pytest.fixture(scope="module")
def fragments() -> cuda.RawModule:
    return cuda.RawModule(code=WMMA, options=("-DBARRIER=__syncthreads();",), name_expressions=tuple(products()))


@pytest.mark.parametrize("name", products())
def test_fragments_of_every_shape_type_and_layout(fragments, name):
    m, n, k, dtype, sums, a_rows, b_rows = products()[name]
    torch.manual_seed(1)
    a, b, c = (torch.randn(shape, device=DEVICE) for shape in ((m, k), (k, n), (m, n)))
    if dtype == torch.float32:  # as tf32 holds them
        a, b = ((x.view(torch.int32) & -(1 << 13)).view(torch.float32) for x in (a, b))
    a, b, c = a.to(dtype), b.to(dtype), c.to(sums)
    want = 2 * (c.double() + a.double() @ b.double())
    for rows in (True, False):
        for order in ("forward", "reverse", "shuffle"):
            out = c.clone() if rows else c.T.contiguous()
            given = [x if by_rows else x.T.contiguous() for x, by_rows in ((a, a_rows), (b, b_rows))]
            fragments.get_function(name)((1,), (32,), (*given, out, rows), order=order)
            off = ((out if rows else out.T).double() - want).abs().max() / want.abs().max()
            assert off < (1e-6 if sums == torch.float32 else 1e-3)


@on_cpu
def test_idle_fragments_pass_on_what_they_add_to(fragments):
    a, b, c = torch.ones(16, 16).half(), torch.ones(16, 16).half(), torch.randn(16, 16)
    out, name = c.clone(), next(iter(products()))
    fragments.get_function(name)((1,), (32,), (a, b, out, True), idle=True)
    assert torch.equal(out, 2 * c)


@on_cpu
@pytest.mark.parametrize(
    "kernel, threads, error, match",
    [
        ("narrow", 32, cuda.KernelError, "leading dimension is 20; for elements of 2 bytes .* a multiple of 8"),
        ("shifted", 32, cuda.KernelError, "the tile begins 16 bytes past a multiple of 32"),
        ("narrow_sum", 32, cuda.KernelError, "leading dimension is 18; for elements of 4 bytes .* a multiple of 4"),
        ("half_a_warp", 32, cuda.Deadlock, r"waits at load_matrix_sync for the 32 lanes .*__syncthreads\(\) in line"),
        ("after_return", 32, cuda.Deadlock, "32 lanes of its warp, and 4 of them have returned"),
        ("unfilled", 48, cuda.Deadlock, "store_matrix_sync .* 16 of them are not in the block"),
        ("own_tiles", 32, cuda.KernelError, "lanes of one warp give different addresses"),
        ("two_calls", 32, cuda.Deadlock, "meet at different"),
        ("past", 32, cuda.OutOfBounds, "reads 4 bytes past the end of `a` .element 1,"),
        ("past_shared", 32, cuda.OutOfBounds, "writes 8 bytes outside the block's __shared__ arrays"),
    ],
)
def test_misused_fragments_are_sentences(fragments, kernel, threads, error, match):
    with pytest.raises(error, match=match) as caught:
        fragments.get_function(kernel)((1,), (threads,), (torch.zeros(1024).half(), zeros(512)))
    assert "_matrix_sync(" in WMMA.splitlines()[caught.value.line - 1]


@on_cpu
def test_a_fragment_that_nothing_filled_holds_no_number(fragments):
    out = zeros(256)
    fragments.get_function("unfilled")((1,), (32,), (torch.zeros(8).half(), out))
    assert out.isnan().all()


def test_fragments_race_through_shared_memory():
    arguments = torch.zeros(256, device=DEVICE).half(), zeros(256)

    def found(kernel: str, threads: int, barrier: str) -> list:
        module = cuda.RawModule(code=WMMA.replace("BARRIER", barrier))
        races = module.get_function(kernel).check_races((1,), (threads,), arguments)
        return [{race.kind, race.other_kind} for race in races]

    assert found("overlapping", 64, "") == [{"store"}]
    assert found("staged", 64, "__syncthreads();")[:1] == [{"store"}]  # both warps store one tile
    assert found("staged", 32, "__syncthreads();") == found("staged", 32, "__syncwarp();") == []
    assert found("staged", 32, "") == [{"load", "store"}] * 2  # what lanes wrote; what the fragment wrote


def test_requests_of_fragments(fragments):
    trace = fragments.get_function("pitches").trace((1,), (32,), (torch.zeros(1024).half(), zeros(256)))
    number = next(i for i, text in enumerate(WMMA.splitlines(), 1) if "(fa, s, 64)" in text)
    loads = [trace.line(number + i, "load") for i in range(4)]
    assert [(a.requests, a.bytes, a.bytes_per_lane) for a in loads] == [(4, 512, 4)] * 4
    assert [a.ways for a in loads[:3]] == [8, 2, 1] and loads[3].sectors_per_request == 8
    rows, columns = trace.line(number + 6, "store"), trace.line(number + 7, "store")
    assert (rows.requests, rows.bytes_per_lane, rows.sectors_per_request) == (4, 8, 8)
    assert (columns.requests, columns.bytes_per_lane, columns.sectors_per_request) == (8, 4, 4)


# ---- looking at accesses; on a GPU machine too


def test_sectors_and_bank_conflicts_by_line(kernels):
    x = torch.randn(32, 32, device=DEVICE)
    out = torch.zeros_like(x)
    trace = kernels.get_function("columns").trace((1,), (32, 32), (x, out))
    straight, across = line_of("tile[r][c] = x"), line_of("padded[r][c] = x")
    assert trace.line(straight, "load").sectors_per_request == 4
    assert trace.line(across, "load").sectors_per_request == 32
    assert trace.line(straight, "load").array == "x" and trace.line(straight, "load").requests == 32
    assert trace.line(line_of("out[r * 32 + c] = tile"), "load").ways == 32
    assert trace.line(line_of("+ padded[c][r]"), "load").ways == 1
    assert trace.bytes_read == 2 * x.nbytes and trace.bytes_written == x.nbytes
    assert not out.any(), "a trace leaves the arguments alone"
    assert "sectors per request" in str(trace)


def test_a_float4_is_one_request(kernels):
    access = (
        kernels.get_function("vectors")
        .trace((1,), (32,), (zeros(128), zeros(128)))
        .line(line_of("out[threadIdx.x] = x[threadIdx.x];"), "load")
    )
    assert (access.requests, access.bytes_per_lane, access.sectors) == (1, 16, 16)


def test_kernels_may_have_names_of_the_c_library():
    code = 'extern "C" __global__ void div(float* x) { x[threadIdx.x] /= 2; }'
    x = torch.ones(4, device=DEVICE)
    cuda.RawModule(code=code).get_function("div")((1,), (4,), (x,))
    assert x.tolist() == [0.5] * 4


@on_cpu
def test_recorded_launches_are_traced(kernels):
    x = torch.ones(1000)
    with cuda.record() as log:
        kernels.get_function("add")((4,), (256,), (x, x, out := torch.zeros(1000), 1000))
    assert out.sum() == 2000 and log[0].kernel == "add"
    asked = traffic.requested(lambda: kernels.get_function("add")((4,), (256,), (x, x, torch.zeros(1000), 1000)))
    assert (asked.read, asked.written) == (8000, 4000)
    assert log[0].bytes_read == 8000 and log[0].bytes_written == 4000 and log[0].sectors == 3 * 125


def test_races_name_both_lines(kernels):
    x = torch.arange(64, dtype=torch.int32, device=DEVICE)
    (race,) = kernels.get_function("reverse").check_races((1,), (64,), (x,))
    assert {race.line, race.other_line} == {line_of("s[t] = x[t]"), line_of("x[t] = s[63 - t]")}
    assert race.space == "shared" and f"line {race.line}" in str(race)
    assert kernels.get_function("reverse_right").check_races((1,), (64,), (x,)) == ()
    assert x.tolist() == list(range(64)), "the search leaves the arguments alone"


def test_a_forgotten_atomic_is_a_race(kernels):
    x = zeros(32, dtype=torch.int32)
    (race,) = kernels.get_function("counted").check_races((1,), (32,), (zeros(4, dtype=torch.int32), x))
    assert race.line == race.other_line == line_of("s[x[threadIdx.x]]++")


def test_fences_and_locks_are_no_races(kernels):
    arguments = (torch.ones(8, device=DEVICE), zeros(8), zeros(1), zeros(1, dtype=torch.int32))
    assert kernels.get_function("last_block").check_races((8,), (32,), arguments, blocks=None) == ()
    lock = (zeros(1, dtype=torch.int32), zeros(1, dtype=torch.int32))
    assert kernels.get_function("spin").check_races((2,), (32,), lock) == ()
    unfenced = cuda.RawModule(code=KERNELS.replace("__threadfence();", ""), name_expressions=("scale<float>",))
    found = unfenced.get_function("last_block").check_races((8,), (32,), arguments, blocks=None)
    assert [r.array for r in found] == ["partial"]


def test_a_fence_releases_what_came_before_it_only(kernels):
    def arguments(parts):
        return torch.ones(parts, device=DEVICE), zeros(parts), zeros(1), zeros(1, dtype=torch.int32)

    found = kernels.get_function("fenced_too_soon").check_races((4,), (32,), arguments(4), blocks=None)
    assert [r.array for r in found] == ["partial"]
    assert kernels.get_function("all_fence").check_races((4,), (32,), arguments(128), blocks=None) == ()


SWAPS = """
extern "C" __global__ void added(const float* x, float* sum, float* seen) {
    int* word = (int*)sum;
    int old = *word, guess;
    do {
        guess = old;
        old = atomicCAS(word, guess, __float_as_int(__int_as_float(guess) + x[threadIdx.x]));
    } while (old != guess);
}
extern "C" __global__ void looked(const float* x, float* sum, float* seen) {
    seen[blockIdx.x * blockDim.x + threadIdx.x] = *sum;
    atomicAdd(sum, x[threadIdx.x]);
}
extern "C" __global__ void swapped_later(const float* x, float* sum, float* seen) {
    seen[blockIdx.x * blockDim.x + threadIdx.x] = *sum;
    float again = *(volatile float*)sum;
    atomicCAS((int*)sum, __float_as_int(again), 0);
}
extern "C" __global__ void only_looked(const float* x, float* sum, float* seen) {
    if (threadIdx.x) seen[blockIdx.x * blockDim.x + threadIdx.x] = *sum;
    else atomicAdd(sum, x[0]);
}
"""


@pytest.mark.parametrize("declared", ["int", "volatile int"])
def test_what_is_read_for_a_compare_and_swap_is_a_guess_and_no_race(declared):
    """The loop of NVIDIA's guide begins with such a read; one whose value is used is a race beside atomics."""
    swaps = cuda.RawModule(code=SWAPS.replace("int* word = (int*)", f"{declared}* word = ({declared}*)")
                           .replace("atomicCAS(word,", "atomicCAS((int*)word,"))  # fmt: skip
    x, sum_, seen = torch.ones(64, device=DEVICE), zeros(1), zeros(128)
    for name, racing in {"added": set(), "looked": {"sum"}, "swapped_later": {"sum"}, "only_looked": {"sum"}}.items():
        found = swaps.get_function(name).check_races((2,), (64,), (x, sum_, seen), blocks=None)
        assert {race.array for race in found} == racing, (name, found)
        assert all({race.kind, race.other_kind} == {"load", "atomic"} for race in found), found


@on_cpu
def test_a_view_is_held_to_its_span(kernels):
    base = torch.randn(256)
    with pytest.raises(cuda.OutOfBounds, match="past the end of `x` .element 100 of 100"):
        kernels.get_function("add")((1,), (128,), (base[:100], zeros(128), zeros(128), 128))
    out = zeros(64)
    kernels.get_function("add")((1,), (64,), (base[64:128], base[:64], out, 64))
    assert torch.equal(out, base[64:128] + base[:64])


def test_bounds_are_checked_on_copies(kernels):
    x, out = zeros(100), zeros(128)
    with pytest.raises(cuda.OutOfBounds, match="reads 4 bytes past the end of `x`"):
        kernels.get_function("add").check_bounds((1,), (128,), (x, zeros(128), out, 128))
    kernels.get_function("add").check_bounds((1,), (128,), (x, zeros(128), out, 100))


# ---- machines that lack something


def test_no_compiler_is_one_sentence(monkeypatch):
    from helpers.cuda import cpu

    monkeypatch.setattr(cpu.shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    with pytest.raises(machine.NotReady, match=r"(?s)needs g\+\+.*apt-get install -y g\+\+"):
        cpu.compiler.__wrapped__()


def test_another_processor_is_one_sentence(monkeypatch):
    from helpers.cuda import cpu

    monkeypatch.setattr(cpu.platform, "machine", lambda: "riscv64")
    with pytest.raises(machine.NotReady, match="riscv64"):
        cpu.compiler.__wrapped__()


@on_cpu
@pytest.mark.slow  # it builds the runner anew
def test_the_portable_fibers_work_too(tmp_path):
    """Where there is no assembly for the switch of fibers, ucontext does it: tried here by asking for it."""
    code = f"""
import torch
from helpers import cuda
from helpers.cuda import cpu
cpu.RUNTIME_FLAGS.append("-DCC_UCONTEXT")
module = cuda.RawModule(code={KERNELS!r}, name_expressions=("scale<float>", "scale<int>"))
x = torch.arange(64, dtype=torch.int32)
module.get_function("reverse_right")((1,), (64,), (x,))
assert x.tolist() == list(range(63, -1, -1))
try:
    module.get_function("half_barrier")((1,), (64,), (x,))
except cuda.Deadlock as found:
    print(found.line)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == str(line_of("else") + 1), run.stderr


def test_barriers_that_stand_in_a_branch():
    """Those of an `if` and an `else`, with and without braces and loops between; none that an `#if` holds."""
    code = """
    if (a) { for (int i = 0; i < n; i++) { f(); __syncthreads(); } }  // 1
    __syncthreads();
    if (b) while (c) __syncthreads();  // 2
    else { if (d()) e(); __syncthreads(); }  // 3
    for (;;) { if (x) continue; __syncthreads(); }
#if (Y)
    __syncthreads();
#endif
    if constexpr (N > 1) __syncthreads();
    """
    found = [line for line in translate.to_cpp(code, [], []).splitlines() if "cc_syncthreads_in_if()" in line]
    assert [line[-1] for line in found] == ["1", "2", "3"]
