"""What `make test` runs: lessons and labs, solved or not, in a process beside the rest, for either keeps a core busy.

`python -m tests.halves [options of pytest]`. On a GPU one follows the other, since some of them time what they do.
"""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers import ROOT, machine

FIRST, BESIDE = ["tests"], ["notebooks", "labs", "solutions"]
TESTS_BESIDE = ["tests/test_cuda_cards.py", "tests/test_gemm_hopper.py"]
"""Those of FIRST that go with BESIDE, so that the two take as long as each other."""
NOTHING = 5
"""pytest's exit status where no test was chosen, as `-k` may do for one of the two."""


def main(options: list[str], root: Path = ROOT, together: bool = True) -> int:
    """Run both; the first is heard at once, the one beside it at the end. The exit status is the worse one."""
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "-m", "not slow"]
    moved = [name for name in TESTS_BESIDE if (root / name).exists()]
    first, beside = [*FIRST, *(f"--ignore={name}" for name in moved)], [*BESIDE, *moved]
    apart = ["-o", "cache_dir=.pytest_cache/notebooks"]  # what failed last is noted by each for itself
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen([*command, *beside, *apart, *options], cwd=root, stdout=said, stderr=said) as other:
            if not together:
                other.wait()
            status = subprocess.run([*command, *first, *options], cwd=root).returncode
        said.seek(0)
        print(said.read(), flush=True)
    return worse(status, other.returncode)


def worse(*statuses: int) -> int:
    """The exit status of both; one that a signal ended counts as failed."""
    return max({1 if status < 0 else status for status in statuses} - {NOTHING}, default=NOTHING)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)  # both hear of Ctrl-C and end in their own words
    sys.exit(main(sys.argv[1:], together=not machine.gpu()))
