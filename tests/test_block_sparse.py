"""Lesson 10's block-sparse attention: values and waits on a CPU (tests/hopper), what it refuses, its machine code."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from helpers import machine, reveal, source

PROGRAM = source.load("10_kernels", "BLOCK_SPARSE")
block_sparse, plan = source.load("10_kernels", "block_sparse"), source.load("10_kernels", "plan")
EMULATED = Path(__file__).parent / "hopper"
SHAPES = [(1, 200, 300, 60, 2), (2, 130, 640, 50, 2), (3, 300, 1200, 40, 2), (1, 129, 1025, 90, 1)]
"""Heads, queries, keys, how many blocks in a hundred count, thread blocks that run at one time."""


def emulated(folder, change=("", ""), shapes=SHAPES):
    """What running the kernel on the CPU prints: nothing where it is right. change: an edit of its text."""
    code = PROGRAM.code.replace(*change) if change[0] else PROGRAM.code
    assert change[0] in PROGRAM.code
    places = {
        "extern __shared__ unsigned char memory[];": "unsigned char* memory = me->block->shared.data() + 1024;",
        "__shared__ u64 barriers[2 * STAGES + 4];": "u64* barriers = (u64*)me->block->shared.data();",
        "__shared__ Row of_consumer[2];": "Row* of_consumer = (Row*)(me->block->shared.data() + 512);",
    }
    for declared, placed in places.items():
        assert declared in code
        code = code.replace(declared, placed)
    (folder / "kernel.cpp").write_text(code)
    sizes = PROGRAM.sizes[0] | {"SHARED": 230_400}
    for blocks in {shape[-1] for shape in shapes}:
        options = [f"-D{name}={value}" for name, value in (sizes | {"CLUSTER_BLOCKS": blocks}).items()]
        subprocess.run(
            ["g++", "-std=c++17", "-O1", "-w", f"-I{EMULATED}", f'-DKERNEL="{folder / "kernel.cpp"}"', *options,
             EMULATED / "attention.cpp", "-o", folder / "kernel"], check=True,
        )  # fmt: skip
        words = [str(n) for shape in shapes if shape[-1] == blocks for n in shape]
        ran = subprocess.run([folder / "kernel", *words], capture_output=True, text=True, timeout=120)
        if ran.stdout or ran.returncode:
            return ran.stdout.strip() or f"ended with {ran.returncode}"
    return ""


def test_values_and_waits(tmp_path):
    assert emulated(tmp_path) == ""


@pytest.mark.parametrize(
    "change",
    [
        ("wait_for_products<1>();", "wait_for_products<2>();"),  # scores are used before they are there
        ("word ^= 1u << bit", "word &= word - 1"),  # the lowest bit goes, not the one that was taken
        ("if (row.first * N + N > keys)", "if (false)"),  # keys beyond the last count
        ("tiles + gridDim.x - 1", "tiles + gridDim.x"),  # the next launch finds tickets drawn
        (
            "fetch(v, last, head);\n                    } else",
            "fetch(v, i * 32 + bit, head);\n                    } else",
        ),  # V of the block whose scores are not made yet
        ("o[j] *= shrink[j / 2 % 2]", "o[j] *= shrink[0]"),  # a thread has two rows
        ("^ lane % 8", ""),  # not swizzled
        ("if (thread == 0) arrive(q_free + 8 * me);\n                wait", "wait"),  # the next tile never begins
        ("if (thread == 0) stores_have_read<0>();\n            sync", "sync"),  # results are overwritten unread
        ("outputs(at.slot, i > 1)", "outputs(at.slot, true)"),  # added to what the tile before left
        ("hand_back(k_slot);\n                    soften(shrink);", "round();\n                    soften(shrink);"),
    ],
    ids=lambda change: change[0][:24],
)
def test_broken_ones_are_seen(change, tmp_path):
    """That the emulation shows what it is for."""
    assert emulated(tmp_path, change, SHAPES[1:3])


def test_rows_are_taken_head_by_head_the_longest_first():
    mask = torch.tensor([[[1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 0, 1]], [[0, 1, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]])
    assert plan(mask[None].bool()).tolist() == [1, 3, 0, 2, 7, 6, 4, 5]


def sample(B=1, H=2, T=200, S=300, density=0.5):
    g = torch.Generator().manual_seed(T + S)
    q, k, v = (torch.randn(B, H, n, 128, generator=g).to(machine.device(), torch.float16) for n in (T, S, S))
    mask = torch.rand(B, H, -(-T // 128), -(-S // 128), generator=g) < density
    return q, k, v, mask.to(machine.device())


hopper = pytest.mark.skipif(machine.here().capability != (9, 0), reason="written for Hopper")


@hopper
@pytest.mark.parametrize(
    "shape", [(1, 1, 128, 128, 1.0), (1, 2, 200, 300, 0.5), (2, 3, 1000, 1111, 0.4), (1, 8, 4096, 4096, 0.1)], ids=str
)
def test_it_equals_float64(shape):
    q, k, v, mask = sample(*shape)
    wide = mask.repeat_interleave(128, 2)[:, :, : q.shape[2]].repeat_interleave(128, 3)[..., : k.shape[2]]
    scores = (q.double() @ k.double().mT * 128**-0.5).masked_fill(~wide, -torch.inf)
    want = torch.softmax(scores, -1).nan_to_num(0.0) @ v.double()
    for _ in range(2):  # the second launch finds the tickets as the first left them
        assert ((block_sparse(q, k, v, mask) - want).norm() / want.norm()) < 1e-3


@hopper
def test_rows_that_name_no_block_and_masks_that_name_none():
    q, k, v, mask = sample()
    mask[0, 0, 1] = False
    assert not block_sparse(q, k, v, mask)[0, 0, 128:].any()
    assert not block_sparse(q, k, v, torch.zeros_like(mask)).any()


BAD = {
    "takes k of shape": lambda q, k, v, mask: (q, k[:, :1], v, mask),
    "takes q in float16 here, not bfloat16": lambda q, k, v, mask: (q.bfloat16(), k, v, mask),
    "takes v of shape": lambda q, k, v, mask: (q, k, v[:, :, :-1], mask),
    "takes mask of shape": lambda q, k, v, mask: (q, k, v, mask[..., :-1]),
    "takes mask in bool here, not uint8": lambda q, k, v, mask: (q, k, v, mask.byte()),
    "takes q .B, H, T, 128.": lambda q, k, v, mask: (q[0], k, v, mask),
    "contiguous": lambda q, k, v, mask: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v, mask),
    "takes order of shape": lambda q, k, v, mask: (q, k, v, mask, plan(mask)[:-1]),
    "takes order in int32": lambda q, k, v, mask: (q, k, v, mask, plan(mask).long()),
}


@pytest.mark.skipif(bool(PROGRAM.why_not(machine.here().arch)), reason="this card is refused as a whole")
@pytest.mark.parametrize("said", BAD)
def test_what_would_be_wrong_is_refused_with_a_sentence(said):
    with pytest.raises(ValueError, match=said):
        block_sparse(*BAD[said](*sample()))


@pytest.mark.skipif(machine.gpu(), reason="what CPU mode says")
def test_cpu_mode_says_what_it_lacks():
    with pytest.raises(machine.NotReady, match="07 block_sparse is written in a GPU's own instructions"):
        block_sparse(*sample())


def test_nothing_waits_for_a_product_that_it_need_not_wait_for():
    """ptxas takes wgmma apart into one product at a time, with a remark, where it cannot keep accumulators in place."""
    binary = PROGRAM.binary()
    made = binary.kernels["block_sparse"]
    counts = Counter(op.partition(".")[0] for op in reveal.instructions(binary.sass("block_sparse")).elements())
    assert not re.search(r"C75\d\d", binary.log) and not made.spill_bytes and not made.stack_bytes
    assert counts["HGMMA"] == 32 and not counts["HMMA"]


def test_the_registers_that_consumers_ask_for_are_there():
    """A block has what it was launched with, and no more: consumers that want more than is left wait for ever."""
    given = PROGRAM.binary().kernels["block_sparse"].registers * 384
    fewer, more = (int(re.search(rf"{name}_registers<(\d+)>", PROGRAM.code)[1]) for name in ("fewer", "more"))
    assert 128 * fewer + 256 * more <= given and not (fewer % 8 or more % 8)
