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
    assert log.program_bytes == 2 * 4 * 128  # the last program has fewer


@triton.jit
def product(o_ptr, x_ptr, B: tl.constexpr):
    at = tl.arange(0, B)[:, None] * B + tl.arange(0, B)
    x = tl.load(x_ptr + at)
    tl.store(o_ptr + at, tl.dot(x, tl.trans(x), x.to(tl.float32)))


def test_an_idle_dot_passes_on_what_it_adds_to():
    x, o = torch.randn(16, 16).half(), torch.empty(16, 16)
    with interpreter.idle():
        product[(1,)](o, x, 16)
    assert torch.equal(o, x.float())
    product[(1,)](o, x, 16)
    assert torch.allclose(o, x.float() + x.float() @ x.float().T, atol=1e-4)


@triton.jit
def outer(o_ptr, x_ptr, y_ptr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    j = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    tl.store(o_ptr + i * B * tl.num_programs(1) + j, tl.load(x_ptr + i) * tl.load(y_ptr + j))


def test_what_a_wave_loads_is_counted_once_and_x_runs_fastest():
    x, y, o = torch.randn(64), torch.randn(32).half(), torch.empty(64, 32)
    for wave, strips_x, strips_y in ((1, 8, 8), (4, 8, 2), (8, 4, 2), (100, 4, 2)):
        with interpreter.record(wave) as log:
            outer[(4, 2)](o, x, y, B=16)
        assert log.wave_bytes == 16 * (4 * strips_x + 2 * strips_y), wave
    with interpreter.record(100) as log:
        for _ in range(2):
            outer[(4, 2)](o, x, y, B=16)
    assert log.wave_bytes == 2 * 16 * (4 * 4 + 2 * 2)  # a launch begins anew


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


@triton.jit
def some_rows(o_ptr, x_ptr, rows, cols, ROWS: tl.constexpr, B: tl.constexpr):
    col = tl.arange(0, B)
    for i in range(ROWS):
        row = tl.program_id(0) * ROWS + i
        inside = (col < cols) & (row < rows)  # a block and a number: the interpreter makes integers of the latter
        tl.store(o_ptr + row * cols + col, tl.load(x_ptr + row * cols + col, mask=inside), mask=inside)


def test_a_mask_that_is_partly_a_number():
    x, o = torch.randn(5, 12), torch.empty(5, 12)
    with interpreter.record() as log:
        some_rows[(2,)](o, x, 5, 12, ROWS=4, B=16)
    assert torch.equal(x, o) and log.bytes_read == log.bytes_written == 4 * x.numel()


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


@triton.jit
def copy_tiles(o, x, M: tl.constexpr, N: tl.constexpr, FIRST: tl.constexpr = 0):
    i, j = FIRST + tl.program_id(0) * M, tl.program_id(1) * N
    o.store([i, j], x.load([i, j]))


def descriptor(x, *block):
    return TensorDescriptor.from_tensor(x, list(block))


def test_tiles_of_a_descriptor_may_reach_over_every_edge():
    x, o = torch.randn(20, 24), torch.zeros(20, 24)
    with interpreter.record() as log:
        copy_tiles[(3, 4)](descriptor(o, 8, 8), descriptor(x, 8, 8), 8, 8)  # the last column of programs has none
    assert torch.equal(x, o) and log.bytes_read == log.bytes_written == 20 * 24 * 4 and log.programs == 12
    o.zero_()
    copy_tiles[(4, 3)](descriptor(o, 8, 8), descriptor(x, 8, 8), 8, 8, FIRST=-8)
    assert torch.equal(x, o)


def test_descriptors_of_slices_keep_to_them():
    x, o = torch.randn(16, 64), torch.zeros(16, 40)
    copy_tiles[(2, 5)](descriptor(o, 8, 8), descriptor(x[:, 16:56], 8, 8), 8, 8)
    assert torch.equal(o, x[:, 16:56])
    kept = x.clone()
    copy_tiles[(2, 8)](descriptor(x[:, 16:56], 8, 8), descriptor(torch.zeros(16, 64), 8, 8), 8, 8)
    assert not x[:, 16:56].any() and torch.equal(x[:, :16], kept[:, :16]) and torch.equal(x[:, 56:], kept[:, 56:])
    with pytest.raises(AssertionError, match="16-byte aligned"):
        descriptor(x.T[:15], 8, 8)  # a descriptor's last dimension is contiguous: transpose inside the kernel
    lying = TensorDescriptor(x[:8], [16, 64], [64, 1], [8, 8])
    with pytest.raises(interpreter.OutOfBounds, match="this load, in program .*outside x, which spans 512 elements"):
        copy_tiles[(2, 1)](descriptor(torch.zeros(16, 64), 8, 8), lying, 8, 8)


def test_stores_through_descriptors_that_overlap_race():
    x, o = torch.randn(20, 24), torch.zeros(20, 24)
    with pytest.raises(interpreter.Race) as caught:
        copy_tiles[(3, 3)](descriptor(o, 16, 8), descriptor(x, 16, 8), 8, 8)
    assert "copy_tiles, line" in str(caught.value)
    assert "this store of program (1, 0) touches element 192 of o, which a store of program (0, 0)" in str(caught.value)

    @triton.jit
    def mixed(o_ptr, x, n, B: tl.constexpr):
        o = tl.make_tensor_descriptor(o_ptr, [n, B], [B, 1], [B, B])
        o.store([0, 0], x.load([tl.program_id(0) * B, 0]))

    with pytest.raises(interpreter.Race, match="element 0 of o_ptr, which a store of program 0 touches too"):
        mixed[(2,)](torch.zeros(8, 8), descriptor(torch.randn(16, 8), 8, 8), 8, B=8)


@triton.jit
def reduced(o, x, B: tl.constexpr, OP: tl.constexpr, STORE: tl.constexpr = False):
    value = x.load([tl.program_id(0) * B, 0])
    if STORE:
        o.store([0, 0], value)
    if OP == "add":
        o.atomic_add([0, 0], value)
    elif OP == "max":
        o.atomic_max([0, 0], value)
    else:
        o.atomic_or([0, 0], value)


def test_atomics_of_descriptors():
    x, o = torch.randn(32, 8), torch.zeros(5, 8)
    with interpreter.record() as log:
        reduced[(4,)](descriptor(o, 8, 8), descriptor(x, 8, 8), 8, "add")
    torch.testing.assert_close(o, x.view(4, 8, 8).sum(0)[:5])
    assert log.bytes_written == 4 * 5 * 8 * 4  # rows beyond the end are left out
    for dtype in (torch.int32, torch.int64):
        x, o = torch.randint(-100, 100, (32, 8), dtype=dtype), torch.zeros(8, 8, dtype=dtype)
        if dtype == torch.int32:
            reduced[(4,)](descriptor(o, 8, 8), descriptor(x, 8, 8), 8, "max")
            assert torch.equal(o, x.view(4, 8, 8).amax(0).clamp(min=0))
        else:
            reduced[(4,)](descriptor(o, 8, 8), descriptor(x, 8, 8), 8, "or")
            parts = x.view(4, 8, 8)
            assert torch.equal(o, parts[0] | parts[1] | parts[2] | parts[3])
    x, o = torch.randn(32, 8, dtype=torch.float16), torch.zeros(8, 8, dtype=torch.float16)
    with pytest.raises(interpreter.Unsupported, match="no atomic max of fractions"):
        reduced[(4,)](descriptor(o, 8, 8), descriptor(x, 8, 8), 8, "max")
    with pytest.raises(interpreter.Race):
        reduced[(4,)](descriptor(o, 8, 8), descriptor(x, 8, 8), 8, "add", STORE=True)


@triton.jit
def copy_far(o_ptr, x_ptr, rows, stride, first, B: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [rows, 16], [stride, 1], [B, 16])
    o = tl.make_tensor_descriptor(o_ptr, [B, 16], [16, 1], [B, 16])
    o.store([0, 0], x.load([first, 0]))


def test_rows_beyond_2_31_elements():
    rows, stride = 65664, 32768  # 2.15e9 bytes, of which only those that are touched exist
    x, o = torch.empty(rows, stride, dtype=torch.int8)[:, :16], torch.zeros(128, 16, dtype=torch.int8)
    x[-128:] = torch.randint(1, 100, (128, 16))
    copy_far[(1,)](o, x, rows, stride, rows - 128, B=128)
    assert torch.equal(o, x[-128:])
    o.zero_()
    copy_tiles[(2, 1)](descriptor(x, 64, 16), descriptor(o, 64, 16), 64, 16)
    assert not x[:128].any() and x[-128:].all()

    @triton.jit
    def narrow(o_ptr, x_ptr, stride, first, B: tl.constexpr):
        i, j = first + tl.arange(0, B)[:, None], tl.arange(0, 16)[None, :]
        tl.store(o_ptr + i * 0 + j, tl.load(x_ptr + i * stride + j))

    with pytest.raises(interpreter.OutOfBounds, match="before its start"):  # 32 bits of index are not enough
        narrow[(1,)](o, x, stride, rows - 64, B=64)


def test_tensors_without_an_element():
    for rows, columns in ((0, 8), (8, 0), (0, 0)):
        x, o = torch.zeros(rows, columns), torch.zeros(rows, columns)
        copy[(0,)](o, x, 0, B=8, MASKED=True)
        copy[(1,)](o, x, 0, B=8, MASKED=True)
        with pytest.raises(interpreter.OutOfBounds):
            copy[(1,)](o, x, 0, B=8, MASKED=False)
    with pytest.raises(AssertionError, match="positive"):  # Triton's own, on a GPU too
        descriptor(torch.zeros(0, 8), 8, 8)


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


@triton.jit
def inside(o_ptr, x_ptr, B: tl.constexpr, HOW: tl.constexpr):
    i, j = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    x = tl.load(x_ptr + i * B + j)
    if HOW == "operands":
        y = tl.dot(x.to(tl.bfloat16), x.to(tl.bfloat16))
    elif HOW == "accumulator":
        y = tl.dot(x, x, tl.zeros((B, B), tl.bfloat16))
    elif HOW == "constant":
        y = x + tl.full((B, B), 1.0, tl.bfloat16)
    elif HOW == "bits":
        y = x.to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif HOW == "pointer":
        y = tl.load((x_ptr + i * B + j).to(tl.pointer_type(tl.bfloat16)))
    else:
        y = tl.make_tensor_descriptor(x_ptr.to(tl.pointer_type(tl.bfloat16)), [B, B], [B, 1], [B, B]).load([0, 0])
    tl.store(o_ptr + i * B + j, y.to(tl.float32))


@pytest.mark.parametrize("how", ["operands", "accumulator", "constant", "bits", "pointer", "descriptor"])
def test_bf16_is_refused_wherever_it_comes_up(how):
    with pytest.raises(interpreter.Unsupported, match=r"bfloat16 in inside, line \d+.*use torch.float16"):
        inside[(1,)](torch.zeros(16, 16), torch.ones(16, 16, dtype=torch.float16), 16, how)


def test_bf16_is_refused_behind_a_descriptor():
    x = torch.ones(16, 16, dtype=torch.bfloat16)
    with pytest.raises(interpreter.Unsupported, match="x is a bfloat16 tensor"):
        copy_tiles[(1, 1)](descriptor(torch.zeros(16, 16), 16, 16), descriptor(x, 16, 16), 16, 16)


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


@triton.jit
def after(a, b, c, d):
    """x -> c * (a * x + b) + d: associative, not commutative."""
    return a * c, c * b + d


@triton.jit
def folded(o_ptr, a_ptr, b_ptr, N: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    _, scanned = tl.associative_scan((a, b), 1, after)
    _, backwards = tl.associative_scan((a, b), 1, after, reverse=True)
    _, whole = tl.reduce((a, b), 1, after)
    tl.store(o_ptr + at, scanned)
    tl.store(o_ptr + 4 * N + at, backwards)
    tl.store(o_ptr + 8 * N + tl.arange(0, 4), whole)
    tl.store(o_ptr + 8 * N + 4 + at, tl.sort(b))


def test_reductions_and_scans_with_a_function_of_ones_own():
    a, b = torch.rand(4, 32) + 0.3, torch.randn(4, 32)
    o = torch.empty(12 * 32 + 4)
    began = time.process_time()
    folded[(1,)](o, a, b, N=32)
    assert time.process_time() - began < 1
    want, x = torch.empty(2, 4, 32), torch.zeros(2, 4)
    for i in range(32):
        want[0, :, i] = x[0] = a[:, i] * x[0] + b[:, i]
        want[1, :, 31 - i] = x[1] = a[:, 31 - i] * x[1] + b[:, 31 - i]
    torch.testing.assert_close(o[:256].reshape(2, 4, 32), want)
    torch.testing.assert_close(o[256:260], want[0, :, -1])
    assert torch.equal(o[260:].reshape(4, 32), b.sort(-1).values)


@triton.jit
def promises(x_ptr, o_ptr, stride, B: tl.constexpr, N: tl.constexpr):
    stride = tl.multiple_of(stride, N)
    i = tl.max_contiguous(tl.multiple_of(tl.program_id(0) * B + tl.arange(0, B), B), B)
    tl.store(o_ptr + i, tl.load(x_ptr + i * stride))


def test_a_promise_of_divisibility_is_held_to():
    x, o = torch.arange(192.0), torch.empty(16)
    promises[(2,)](x, o, 12, B=8, N=4)
    assert torch.equal(o, x[::12])
    with pytest.raises(interpreter.Untrue, match="promises, line .*multiple of 8, and 12 is given"):
        promises[(2,)](x, o, 12, B=8, N=8)


@triton.jit
def both(o_ptr, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o_ptr + i, i, mask=(i >= 0) and (i < n))


def test_a_block_has_no_truth_value():
    with pytest.raises(interpreter.Unsupported, match="both, line .* no single truth value"):
        both[(1,)](torch.empty(5), 5, B=8)
