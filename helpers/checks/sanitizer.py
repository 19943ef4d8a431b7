"""NVIDIA's tools over an answer on the GPU: compute-sanitizer, for stray and misaligned accesses, races and divergent
barriers, and Nsight Compute, for the bytes that come from memory."""

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .. import child, machine, stage, traffic

TOOLS = ("memcheck", "racecheck", "synccheck")
SECONDS = 60
"""For each tool: starting torch under it takes most of that, and it slows kernels down by 10 to 100 times."""

_PLAY = """
import os, sys
from helpers import stage
stage.play((os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_WRONLY)))
"""

_REPORTS = (
    (r"Invalid __\w+__ (?:read|write|atomic)", "out-of-bounds"),
    (r"[Mm]isaligned", "crash"),
    (r"[Rr]ace reported", "race"),
    (r"[Bb]arrier error|[Dd]ivergent thread", "deadlock"),
)


def program() -> str | None:
    """Path of compute-sanitizer; None where it is not installed."""
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(usual) if usual.exists() else None)


def run(path: str, tool: str, job: dict, blobs: list[memoryview]) -> list[tuple[str, str]]:
    """(kind, sentence) of the first report of one tool; nothing where it reports nothing."""
    with _playing(job | {"sanitized": True}, blobs) as files:
        done = child.command(
            [path, f"--tool={tool}", "--print-limit=4", sys.executable, "-c", _PLAY, *files],
            env={
                "HELPERS_MODE": "gpu",
                "PYTHONPATH": machine.python_path(),
                "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # else every tensor lies in one large allocation
            },
            seconds=SECONDS,
        )
    return reports(tool, done.stdout + done.stderr)


def counting() -> traffic.Program:
    """The process that `bytes_read` needs: it starts while other things are done. Errors: as `traffic.Program`."""
    return traffic.Program([traffic.READ], traffic.IN_RANGES, ahead=True)


def counted(job: dict, blobs: list[memoryview]):
    """A job of `bytes_read`, in a file that goes when nobody needs it."""
    with ExitStack() as failing:
        file = failing.enter_context(tempfile.NamedTemporaryFile(buffering=0))
        stage.put(file.fileno(), job, blobs)
        failing.pop_all()
    return file


def bytes_read(program: traffic.Program, job) -> list[int]:
    """What one warm call of each case of a `counted` job reads from memory, in bytes. Errors: as
    `traffic.Program.rows`."""
    with job, tempfile.NamedTemporaryFile() as left:
        text = f"import sys\n\nsys.argv[1:] = {[job.name, left.name]}\n{_PLAY}"
        return traffic.read_in_ranges(program.rows(text))


@contextmanager
def _playing(job: dict, blobs: list[memoryview]) -> Iterator[list[str]]:
    """The arguments of `_PLAY`: the files of a job and of what it leaves."""
    with tempfile.TemporaryDirectory() as folder:
        job_file, left = Path(folder, "job"), Path(folder, "left")
        with job_file.open("wb", buffering=0) as f:
            stage.put(f.fileno(), job, blobs)
        left.touch()
        yield [str(job_file), str(left)]


def reports(tool: str, said: str) -> list[tuple[str, str]]:
    """The first report in compute-sanitizer's output, as (kind, its own words in one sentence)."""
    lines = [line.removeprefix("=========").strip() for line in said.splitlines() if line.startswith("=========")]
    for i, line in enumerate(lines):
        kind = next((kind for pattern, kind in _REPORTS if re.search(pattern, line)), None)
        if kind:
            more = [text for text in lines[i + 1 : i + 4] if text and not text.startswith(("Saved", "Host", "Device"))]
            return [(kind, f"compute-sanitizer ({tool}): {'; '.join([line, *more])}.")]
    return []
