"""Run every conformance kernel in this machine's mode and say how far each is from its float64 reference.

    python tests/conformance/run.py                                            compare with the references
    python tests/conformance/run.py --save tests/conformance/nvidia-h200.npz   on a GPU: keep what it computed

The inputs are the same everywhere. `tests/test_conformance.py` holds CPU mode's results against the saved ones.
"""

# ruff: noqa: I001  (helpers first: it sets the mode before triton is imported)
import argparse
import datetime
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

import helpers  # noqa: F401, E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from case import Case  # noqa: E402
from cuda_kernels import CASES as CUDA  # noqa: E402
from remaining_kernels import CASES as REMAINING  # noqa: E402
from triton_kernels import CASES as TRITON  # noqa: E402
from wmma_kernels import CASES as WMMA  # noqa: E402

from helpers import machine  # noqa: E402

CASES: list[Case] = [*CUDA, *WMMA, *REMAINING, *TRITON]
MOST = 4096
"""Values kept of one result; of larger ones, a sample at even distances."""


def sample(result: torch.Tensor) -> np.ndarray:
    """At most `MOST` values of a result as numpy: 16-bit floats widen to float32, integers stay integers."""
    flat = result.detach().cpu().reshape(-1)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    if flat.numel() > MOST:
        flat = flat[torch.linspace(0, flat.numel() - 1, MOST).long()]
    return flat.numpy()


def results(case: Case) -> dict[str, np.ndarray]:
    """What the kernel computes here, sampled."""
    inputs = {k: v.to(machine.device()) for k, v in case.inputs().items()}
    return {k: sample(v) for k, v in case.run(inputs).items()}


def expected(case: Case) -> dict[str, np.ndarray]:
    """What it should compute, sampled at the same places."""
    return {k: sample(v) for k, v in case.reference(case.inputs()).items()}


def apart(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the largest magnitude wanted; infinite where shapes or NaNs differ."""
    if got.shape != want.shape:
        return float("inf")
    if got.dtype.kind in "iub" and want.dtype.kind in "iub":
        return 0.0 if np.array_equal(got.astype(np.int64), want.astype(np.int64)) else float("inf")
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64)).max(initial=0.0)
    scale = np.abs(want.astype(np.float64)).max(initial=0.0)
    return float("inf") if np.isnan(difference) else float(difference / (scale or 1.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the sampled results to this .npz")
    options = parser.parse_args()
    print(machine.banner())
    saved, wrong = {}, []
    for case in CASES:
        try:
            got, want = results(case), expected(case)
        except Exception as why:  # named in the summary and in the exit status; the other kernels still run
            wrong.append(case.name)
            print(f"{case.name:26} {type(why).__name__}: {why}")
            continue
        worst = max(apart(got[k], want[k]) for k in want)
        right = worst <= case.tolerance and got.keys() == want.keys()
        wrong += [] if right else [case.name]
        print(f"{case.name:26} {worst:9.2e} of {case.tolerance:7.1e}  {'ok' if right else 'WRONG'}")
        saved |= {f"{case.name}/{k}": v for k, v in got.items()}
    if options.save:
        about = {"mode": machine.here().mode, "machine": machine.here().name, **machine.versions()}
        about["date"] = datetime.date.today().isoformat()
        np.savez_compressed(options.save, about=json.dumps(about), **saved)
        print(
            f"saved {len(saved)} results of {len(CASES)} kernels, {options.save.stat().st_size:,} bytes: {options.save}"
        )
    print(
        f"{len(CASES) - len(wrong)} of {len(CASES)} kernels right" + (f"; wrong: {', '.join(wrong)}" if wrong else "")
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
