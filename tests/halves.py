"""`make test` and `make test-slow`, each in two processes beside each other, for either keeps a core busy.

`python -m tests.halves [slow] [options of pytest]`. On a GPU one follows the other, since some of them time what they
do.
"""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers import ROOT, machine

BESIDE = {
    "not slow": [
        "notebooks",
        "labs",
        "solutions",
        "tests/test_cuda_cards.py",
        "tests/test_gemm_hopper.py",
    ],
    "slow": ["tests/test_mutants.py"],
}
"""By the marks of the tests: what the second process runs, that the two take as long as each other. The first runs the
rest of tests/."""
NOTHING = 5
"""pytest's exit status where no test was chosen, as `-k` may do for one of the two."""


def main(options: list[str], root: Path = ROOT, together: bool = True, marks: str = "not slow") -> int:
    """Run both; the first is heard at once, the one beside it at the end. The exit status is the worse one."""
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "-m", marks]
    beside = [name for name in BESIDE[marks] if (root / name).exists()]
    first = ["tests", *(f"--ignore={name}" for name in beside)]
    apart = ["-o", "cache_dir=.pytest_cache/beside"]  # what failed last is noted by each for itself
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
    arguments = sys.argv[1:]
    marks = "slow" if arguments[:1] == ["slow"] else "not slow"
    sys.exit(main(arguments[marks == "slow" :], together=not machine.gpu(), marks=marks))
