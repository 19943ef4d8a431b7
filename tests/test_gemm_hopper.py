"""Rungs 12 and up around their instructions: values, waits, deadlocks, on a CPU (tests/hopper) and without a GPU.

Only a GPU shows that each instruction is what `hopper.cuh` takes it for; `test_gemm_cuda.py` runs them there.
"""

import subprocess
from pathlib import Path

import pytest

from helpers import source

EMULATED = Path(__file__).parent / "hopper"
RUNGS = [rung for rung in source.load("09_gemm", "ALL") if rung.arch == "sm_90a"]
SHAPES = [(8, 8, 8, 4), (200, 328, 200, 4), (640, 264, 72, 4)]
"""M, N, K, and blocks at one time: fewer tiles than blocks, K shorter than the ring, a cluster half outside."""


def emulated(rung, folder, gelu=False, change=("", ""), **macros):
    """What running `rung` on the CPU prints: nothing where it is right. change: an edit of its text."""
    config = rung.config("sm_90")
    code = rung.code.replace(*change) if change[0] else rung.code
    assert change[0] in rung.code
    places = {
        "extern __shared__ unsigned char memory[];": "unsigned char* memory = me->block->shared.data() + 1024;",
        "__shared__ u64 barriers[2 * STAGES];": "u64* barriers = (u64*)me->block->shared.data();",
        "__shared__ Barrier loaded;": "Barrier& loaded = *(Barrier*)me->block->shared.data();",
        "__shared__ Barrier full[STAGES], empty[STAGES];":
            "Barrier *full = (Barrier*)me->block->shared.data(), *empty = full + STAGES;",
    }  # fmt: skip
    for declared, placed in places.items():
        code = code.replace(declared, placed)
    (folder / "kernel.cpp").write_text(code)
    sizes = dict(zip(("BM", "BN", "BK"), config.tile, strict=True)) | {"THREADS": config.threads}
    sizes |= dict(m.split("=") for m in config.macros) | {"GELU": int(gelu), "SHARED": config.shared}
    rows = [rows for rows, _ in (*config.boxes, (0, 0))[:3]]
    sizes |= dict(zip(("X_ROWS", "W_ROWS", "Y_ROWS"), rows, strict=True)) | macros
    sizes |= {"CLUSTER_BLOCKS": sizes.get("CLUSTER", 1)}
    options = [f"-D{name}={size}" for name, size in sizes.items()]
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-w", f"-I{EMULATED}", f'-DKERNEL="{folder / "kernel.cpp"}"', *options,
         EMULATED / "main.cpp", "-o", folder / "kernel"], check=True,
    )  # fmt: skip
    shapes = [size if rung.grid == "persistent" or i % 4 < 3 else 0 for s in SHAPES for i, size in enumerate(s)]
    ran = subprocess.run([folder / "kernel", *map(str, shapes)], capture_output=True, text=True, timeout=120)
    return ran.stdout.strip() or (f"ended with {ran.returncode}" if ran.returncode else "")


def those(rungs) -> list:
    """All of them, in make test the simplest and the last."""
    return [pytest.param(r, marks=[] if r in (rungs[0], rungs[-1]) else pytest.mark.slow, id=str(r)) for r in rungs]


@pytest.mark.parametrize("rung", those(RUNGS))
def test_values_and_waits(rung, tmp_path):
    assert emulated(rung, tmp_path) == ""


@pytest.mark.parametrize("rung", those([r for r in RUNGS if r.gelu]))
def test_values_with_bias_and_gelu(rung, tmp_path):
    assert emulated(rung, tmp_path, gelu=True) == ""


@pytest.mark.slow
def test_four_blocks_share(tmp_path):
    rung = next(r for r in RUNGS if r.name == "async_stores")
    assert emulated(rung, tmp_path, CLUSTER=4, GROUP=1, STAGES=2, W_ROWS=64) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        ("wait_for_products<1>();", "wait_for_products<2>();"),  # a stage is handed back while it is read
        ("wait(full + 8 * stage, step / STAGES & 1);", ""),  # read before it is filled
        ("~(step / STAGES) & 1", "step / STAGES & 1"),  # the first round waits for an emptied stage
        ("if (leader) stores_have_read<1>();", ""),  # a buffer is overwritten before it is written to y
        ("2 * CLUSTER);", "2);"),  # only this block's consumers are waited for
        ("(BM + BN) * BK * 2);", "(BM + SHARE) * BK * 2);"),  # half of w is waited for
        ("^ lane % 8", ""),  # not swizzled
    ],
)
def test_broken_ones_are_seen(change, tmp_path):
    """That the emulation shows what it is for."""
    assert emulated(next(r for r in RUNGS if r.name == "async_stores"), tmp_path, change=change)
