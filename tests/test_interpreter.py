"""Triton's interpreter in CPU mode: it refuses what a GPU would corrupt, and counts bytes."""

import time
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from helpers import interpreter, machine

pytestmark = pytest.mark.skipif(machine.gpu(), reason="kernels are interpreted in CPU mode only")


@triton.jit
def copy(o_ptr, x_ptr, n, B: tl.constexpr, MASKED: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    if MASKED:
        tl.store(o_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)
    else:
        tl.store(o_ptr + i, tl.load(x_ptr + i))


@triton.jit
def total(o_ptr, x_ptr, n, B: tl.constexpr, ATOMIC: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    part = tl.sum(tl.load(x_ptr + i, mask=i < n, other=0), 0)
    if ATOMIC:
        tl.atomic_add(o_ptr, part)
    else:
        tl.store(o_ptr, tl.load(o_ptr) + part)


def line(text: str) -> int:
    """The number of the line of this file that starts with `text`."""
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, found in enumerate(lines, 1) if found.strip().startswith(text))


def test_in_bounds_is_right_and_counted():
    x, o = torch.randn(1000), torch.empty(1000)
    with interpreter.record() as log:
        copy[(8,)](o, x, 1000, B=128, MASKED=True)
    assert torch.equal(x, o)
    assert (log.bytes_read, log.bytes_written, log.sectors, log.programs) == (4000, 4000, 250, 8)


def test_an_unmasked_lane_raises_and_writes_nothing():
    x, o = torch.randn(1000), torch.zeros(1000)
    with pytest.raises(IndexError) as caught:
        copy[(8,)](o, x, 1000, B=128, MASKED=False)
    at = line("tl.store(o_ptr + i, tl.load(x_ptr + i))")
    assert f"copy, line {at} of test_interpreter.py (`tl.store(o_ptr + i, tl.load(x_ptr + i))`)" in str(caught.value)
    assert "24 of the 128 unmasked lanes of this load, in program 7," in str(caught.value)
    assert "outside x_ptr, which spans 1000 elements: up to 24 elements past its end" in str(caught.value)
    big = torch.randn(1024)
    with pytest.raises(interpreter.OutOfBounds, match="this store, in program 7, fall outside o_ptr"):
        copy[(8,)](o, big, 1000, B=128, MASKED=False)
    copy[(8,)](o, big, 1000, B=128, MASKED=True)  # nothing is left behind by the error
    assert torch.equal(o, big[:1000])


def test_lanes_masked_off_without_other_are_undefined_as_on_a_gpu():
    @triton.jit
    def sums(o_ptr, x_ptr, n, B: tl.constexpr, OTHER: tl.constexpr):
        i = tl.arange(0, B)
        x = tl.load(x_ptr + i, mask=i < n, other=0) if OTHER else tl.load(x_ptr + i, mask=i < n)
        tl.store(o_ptr, tl.sum(x, 0))

    for dtype, wrong in ((torch.float32, "nan"), (torch.int32, str(10 + 3 * 85))):
        x, o = torch.full((5,), 2).to(dtype), torch.empty(1, dtype=dtype)
        sums[(1,)](o, x, 5, B=8, OTHER=True)
        assert o.item() == 10
        sums[(1,)](o, x, 5, B=8, OTHER=False)
        assert str(o.item()) == wrong
        sums[(1,)](o, torch.full((8,), 2).to(dtype), 8, B=8, OTHER=False)  # no lane is masked off
        assert o.item() == 16


def test_a_neighbour_in_memory_does_not_lend_its_room():
    both = torch.randn(2048)
    with pytest.raises(IndexError, match="fall outside o_ptr"):
        copy[(8,)](both[:1000], both[1024:], 1024, B=128, MASKED=True)


def test_views_count_by_their_span():
    x = torch.arange(64.0).reshape(8, 8)
    o = torch.empty(4)

    @triton.jit
    def column(o_ptr, x_ptr, stride, B: tl.constexpr):
        i = tl.arange(0, B)
        tl.store(o_ptr + i, tl.load(x_ptr + i * stride))

    with interpreter.record() as log:
        column[(1,)](o, x[1:5, 3], 8, B=4)
    assert o.tolist() == [11, 19, 27, 35] and log.sectors_read == 4
    with pytest.raises(IndexError, match="outside x_ptr, which spans 25 elements: up to 32 elements past"):
        column[(1,)](torch.empty(8), x[1:5, 3], 8, B=8)
    with pytest.raises(IndexError, match="8 elements before its start"):
        column[(1,)](o, x[4:, 0], -8, B=2)


def test_atomics_and_device_functions_are_held_to_bounds():
    @triton.jit
    def fetch(p, i):
        return tl.load(p + i)

    @triton.jit
    def shifted(o_ptr, x_ptr, B: tl.constexpr):
        i = tl.arange(0, B)
        tl.atomic_add(o_ptr + i + 1, fetch(x_ptr, i))

    globals()["fetch"] = fetch
    x, o = torch.ones(8), torch.zeros(8)
    with pytest.raises(IndexError, match="shifted, line .*: 1 of the 8 unmasked lanes of this atomic"):
        shifted[(1,)](o, x, B=8)
    with pytest.raises(IndexError, match="fetch, line .*4 of the 8"):
        shifted[(1,)](o, x[:4], B=8)


@triton.jit
def transpose_blocks(o_ptr, x_ptr, M, N, B: tl.constexpr, CHECK: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (M, N), (N, 1), (0, 0), (B, B), (1, 0))
    o = tl.make_block_ptr(o_ptr, (N, M), (M, 1), (0, 0), (B, B), (1, 0))
    if CHECK:
        tl.store(o, tl.trans(tl.load(x, boundary_check=(0, 1))), boundary_check=(0, 1))
    else:
        tl.store(o, tl.trans(tl.load(x)))


@triton.jit
def through_descriptors(o_desc, x_ptr, M, N, B: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [B, B])
    o_desc.store([0, 0], x.load([0, 0]) * 2)


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
def test_block_pointers_and_descriptors():
    x, o = torch.randn(12, 8), torch.zeros(8, 12)
    with interpreter.record() as log:
        transpose_blocks[(1,)](o, x, 12, 8, B=16, CHECK=True)
    assert torch.equal(o, x.T) and log.bytes_read == log.bytes_written == 12 * 8 * 4
    with pytest.raises(IndexError, match=r"of the 256 unmasked lanes of this load.*outside x_ptr"):
        transpose_blocks[(1,)](o, x, 12, 8, B=16, CHECK=False)
    o = torch.zeros(12, 8)
    through_descriptors[(1,)](TensorDescriptor.from_tensor(o, [16, 16]), x, 12, 8, B=16)
    assert torch.equal(o, 2 * x)
    with pytest.raises(IndexError, match="outside x_ptr"):
        through_descriptors[(1,)](TensorDescriptor.from_tensor(o, [16, 16]), x, 16, 8, B=16)


def test_a_forgotten_atomic_is_a_race():
    x, o = torch.ones(1000), torch.zeros(1)
    with pytest.raises(interpreter.Race) as caught:
        total[(8,)](o, x, 1000, B=128, ATOMIC=False)
    assert f"line {line('tl.store(o_ptr, tl.load(o_ptr) + part)')}" in str(caught.value)
    assert "program 1 touches element 0 of o_ptr, which a store of program 0 touches too" in str(caught.value)
    o.zero_()
    total[(8,)](o, x, 1000, B=128, ATOMIC=True)
    assert o.item() == 1000
    total[(1,)](o, x, 1000, B=1024, ATOMIC=False)  # one program alone may


def test_lanes_of_one_store_that_collide():
    @triton.jit
    def halves(o_ptr, x_ptr, n, B: tl.constexpr):
        i = tl.arange(0, B)
        tl.store(o_ptr + i // 2, tl.load(x_ptr + i), mask=i < n)

    x, o = torch.arange(8.0), torch.zeros(4)
    with pytest.raises(interpreter.Race, match="lanes of this store, in program 0, .* to element 0 of o_ptr"):
        halves[(1,)](o, x, 8, B=8)
    halves[(1,)](o, x, 1, B=8)  # a single lane is left
    same = torch.tensor([1, 1, 2, 2, 3, 3, torch.nan, torch.nan])
    halves[(1,)](o, same, 8, B=8)  # equal values do no harm
    assert o[:3].tolist() == [1, 2, 3] and o[3].isnan()


def test_a_kernel_that_reads_what_a_neighbour_writes_is_a_race():
    @triton.jit
    def shift(x_ptr, n, B: tl.constexpr):
        i = tl.program_id(0) * B + tl.arange(0, B)
        tl.store(x_ptr + i, tl.load(x_ptr + i + 1, mask=i + 1 < n))

    with pytest.raises(interpreter.Race, match="this store of program 1 touches element 8 of x_ptr, which a load"):
        shift[(2,)](torch.ones(16), 16, B=8)
    shift[(1,)](torch.ones(16), 16, B=16)


def test_programs_ordered_by_a_counter_do_not_race():
    @triton.jit
    def last_one_adds(o_ptr, parts_ptr, count_ptr, x_ptr, ORDERED: tl.constexpr, B: tl.constexpr):
        p = tl.program_id(0)
        tl.store(parts_ptr + p, tl.sum(tl.load(x_ptr + p * B + tl.arange(0, B)), 0))
        done = 3
        if ORDERED:
            done = tl.atomic_add(count_ptr, 1)
        if done == tl.num_programs(0) - 1:
            tl.store(o_ptr, tl.sum(tl.load(parts_ptr + tl.arange(0, 4)), 0))

    x, parts, o = torch.randn(32), torch.zeros(4), torch.zeros(1)
    last_one_adds[(4,)](o, parts, torch.zeros(1, dtype=torch.int32), x, ORDERED=True, B=8)
    torch.testing.assert_close(o[0], x.sum())
    with pytest.raises(interpreter.Race):
        last_one_adds[(4,)](o, parts, torch.zeros(1, dtype=torch.int32), x, ORDERED=False, B=8)


def test_bf16_is_refused_as_argument_and_inside():
    x = torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="o_ptr is a bfloat16 tensor: .*use torch.float16"):
        copy[(1,)](x, x, 8, B=8, MASKED=True)

    @triton.jit
    def rounds(o_ptr, B: tl.constexpr):
        i = tl.arange(0, B)
        tl.store(o_ptr + i, tl.load(o_ptr + i).to(tl.bfloat16).to(tl.float32))

    with pytest.raises(TypeError, match=r"bfloat16 in rounds, line \d+ of test_interpreter.py"):
        rounds[(1,)](torch.ones(8), B=8)


def test_autotune_takes_the_first_configuration():
    @triton.autotune([triton.Config({"B": 128}), triton.Config({"B": 256})], key=["n"])
    @triton.jit
    def negate(o_ptr, x_ptr, n, B: tl.constexpr):
        i = tl.program_id(0) * B + tl.arange(0, B)
        tl.store(o_ptr + i, -tl.load(x_ptr + i, mask=i < n), mask=i < n)

    x, o = torch.randn(1000), torch.empty(1000)
    with interpreter.record() as log:
        negate[lambda meta: (triton.cdiv(1000, meta["B"]),)](o, x, 1000)
    assert torch.equal(o, -x) and log.programs == 8 and negate.best_config.kwargs == {"B": 128}


@triton.jit
def matmul(c_ptr, a_ptr, b_ptr, M, N, K, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    j = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    acc = tl.zeros((B, B), tl.float32)
    for k in range(0, K, B):
        ks = k + tl.arange(0, B)
        acc = tl.dot(tl.load(a_ptr + i * K + ks[None, :]), tl.load(b_ptr + ks[:, None] * N + j), acc)
    tl.store(c_ptr + i * N + j, acc)


def test_a_matmul_is_quick_and_its_bytes_are_those_of_its_tiles():
    a, b, c = torch.randn(256, 256), torch.randn(256, 256), torch.empty(256, 256)
    matmul[(4, 4)](c, a, b, 256, 256, 256, B=64)
    torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)
    took = []
    for _ in range(3):
        start = time.process_time()
        matmul[(4, 4)](c, a, b, 256, 256, 256, B=64)
        took.append(time.process_time() - start)
    assert min(took) < 0.5, took
    with interpreter.record() as log:
        matmul[(4, 4)](c, a, b, 256, 256, 256, B=64)
    assert log.bytes_read == 4 * 2 * 256 * 256 * 4 and log.bytes_written == 256 * 256 * 4
    assert log.sectors_read == log.bytes_read // 32 and log.programs == 16
