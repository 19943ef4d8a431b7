"""Answers that only some GPUs run: without one they are compiled and looked at, with one they are judged as others."""

import dataclasses
import re

import pytest
import torch

from helpers import machine
from helpers.checks import judge, rules
from helpers.exercises import NO_SPILLS, NOT_SERIALIZED, Case, Exercise, Look, Needs, holds

NEEDS = Needs(
    says="wgmma exists on GPUs of sm_90 only.",
    looks=(
        Look("wgmma in the machine code", holds(r"\bHGMMA\b"), "forbidden", "The compiled kernel holds no wgmma."),
        Look("a tile by TMA", holds(r"\bUTMALDG\b"), "forbidden", "The compiled kernel holds no TMA copy of a tile."),
        Look("a wait at an mbarrier", holds(r"\bSYNCS\b.*TRYWAIT"), "race", "The compiled kernel waits for no copy."),
        NO_SPILLS,
        NOT_SERIALIZED,
    ),
)
TILE = Exercise(
    name="wgmma-tile",
    lab="08_cuda_first_kernels",
    rung="cuda",
    entry="tile",
    title="One tile",
    form="kernel",
    made_of="cuda",
    cases=(
        Case("one tile", lambda d: (d(64, 64, dtype=torch.float16), d(8, 64, dtype=torch.float16))),
        Case("integers", lambda d: (d(64, 64, dtype=torch.float16), d(8, 64, dtype=torch.float16)), "integers", True),
    ),
    hints=("", "", ""),
    reference=lambda x, w: x @ w.T,
    dtype=torch.float32,
    needs=NEEDS,
)
ANSWER = r'''
import torch
from helpers import cuda

SOURCE = r"""
struct alignas(64) Map { unsigned long long opaque[16]; };
__device__ unsigned address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ unsigned long long described(unsigned a) {  // rows of 128 bytes, swizzled in groups of eight rows
  return (a & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ void load(unsigned to, const Map& map, unsigned barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %3}], [%2];" ::"r"(to), "l"(&map), "r"(barrier), "r"(0) : "memory");
}
extern "C" __global__ void __launch_bounds__(128)
    tile(const __grid_constant__ Map x, const __grid_constant__ Map w, float* y) {
  __shared__ alignas(1024) unsigned char xs[64 * 128];
  __shared__ alignas(1024) unsigned char ws[8 * 128];
  __shared__ alignas(8) unsigned long long word;
  unsigned barrier = address(&word);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(72 * 128) : "memory");
    load(address(xs), x, barrier);
    load(address(ws), w, barrier);
  }
  asm volatile("{\n.reg .pred over;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
               "@!over bra again;\n}" ::"r"(barrier), "r"(0) : "memory");
  float c[4] = {};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int k = 0; k < 4; k++)
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "l"(described(address(xs) + 32 * k)), "l"(described(address(ws) + 32 * k)));
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
  for (int i = 0; i < 4; i++) y[(row + i / 2 * 8) * 8 + col + i % 2] = c[i];
}
"""


def tile(x, w):
    y = torch.empty(64, 8, dtype=torch.float32, device=x.device)
    kernel = cuda.RawModule(code=SOURCE, options=("-arch=sm_90a",)).get_function("tile")
    kernel((1,), (128,), (cuda.tensor_map(x, (64, 64)), cuda.tensor_map(w, (8, 64)), y))
    return y
'''
RUNS = machine.here().capability == (9, 0)


def edited(find: str, replace: str) -> str:
    assert ANSWER.count(find) == 1, find
    return ANSWER.replace(find, replace)


def test_a_right_answer_is_inspected_or_run():
    verdict = judge(TILE, ANSWER)
    assert any("compiled for sm_90a" in said for said in verdict.checked), verdict
    assert {look.about for look in NEEDS.looks} <= set(verdict.checked)
    if RUNS:
        assert verdict.passed
    else:
        assert (verdict.passed, verdict.kind) == (None, "needs-hardware")
        assert verdict.headline == "compiled and looked at, not run: needs-hardware"
        assert "wgmma exists on GPUs of sm_90 only. Here nothing was run" in str(verdict)
        assert "checked: wgmma in the machine code" in str(verdict)


@pytest.mark.parametrize(
    "find, replace, kind, said",
    [
        ("float c[4] = {};", "\n#error your code\n", "not-attempted", "missing in `tile`"),
        ("float c[4] = {};", "float c[4] = {}", "compile", "expected a"),
        ("wgmma.fence.sync.aligned;", "wgmma.fence.aligned;", "compile", r"line 30: \.sync modifier required"),
        (', options=("-arch=sm_90a",)', "", "compile", "line 30: Instruction 'wgmma.fence' not supported"),
        ('options=("-arch=sm_90a",)', 'options=("-arch=sm_100a",)', "compile", "wgmma.fence' not supported"),
        ("torch.empty(64, 8,", "torch.empty(64, 9,", "wrong-shape", "64, 9"),
        ("torch.float32, device", "torch.float64, device", "exception", "argument 2 .*is a tensor of float64"),
        ("kernel((1,), (128,)", "kernel((1,), (256,)", "exception", "it may have 128"),
        (", y))", ", y), shared_mem=240_000)", "exception", "240,000 bytes of dynamic"),
        ("cuda.tensor_map(w, (8, 64))", "cuda.tensor_map(w, (8, 60))", "exception", "no multiple of 16"),
        ("    return y\n", "    return y + 0\n", "forbidden", "`add`"),
        ("    kernel((1,)", "    0 and kernel((1,)", "forbidden", "No CUDA kernel was launched"),
        ("import torch\n", "import torch, subprocess\n", "forbidden", "`subprocess` is imported"),
        ("  load(address(xs), x, barrier);\n    load(address(ws), w, barrier);", "", "forbidden", "no TMA"),
        ("for (int k = 0; k < 4; k++)\n", "for (int k = 0; k < 4 && y == 0; k++)\n", "too-slow", "serialized"),
    ],
)  # fmt: skip
def test_what_needs_no_gpu_is_found_without_one(find, replace, kind, said):
    verdict = judge(TILE, edited(find, replace))
    assert (verdict.passed, verdict.kind) == (False, kind), verdict
    assert re.search(said, str(verdict)), verdict


def test_tensor_maps_are_for_exercises_that_need_them():
    assert not rules.broken(ANSWER, TILE)
    broken = rules.broken(ANSWER, dataclasses.replace(TILE, needs=None))
    assert broken and all("`cuda.tensor_map` is used" in sentence for _, sentence in broken)


WRONG = [
    ("the bytes of one tile expected", '"r"(72 * 128)', '"r"(73 * 128)', "timeout"),
    ("the parity of the phase before", 'n}" ::"r"(barrier), "r"(0)', 'n}" ::"r"(barrier), "r"(1)', None),
    ("half of the columns", "k < 4; k++)\n", "k < 2; k++)\n", "wrong-values"),
]  # fmt: skip


@pytest.mark.parametrize("find, replace, kind", [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_what_only_a_gpu_shows(find, replace, kind):
    verdict = judge(dataclasses.replace(TILE, seconds=4), edited(find, replace))
    if not RUNS:
        assert (verdict.passed, verdict.kind) == (None, "needs-hardware"), verdict
        pytest.skip("only a GPU with wgmma shows what is wrong; without one it was compiled and looked at")
    assert verdict.passed is False and kind in (None, verdict.kind), verdict
    if kind == "timeout":
        assert "`tile`, launched last, was still running" in str(verdict) and "mbarrier" in str(verdict)
        assert judge(TILE, ANSWER).passed, "the GPU works after a kernel that hung"
