"""One timer at a time: a second process waits, and is told for whom."""

import subprocess
import sys
import time

from helpers import ROOT, locks

HOLD = """
import time
from helpers import locks
with locks.{}:
    print("held", flush=True)
    time.sleep({})
"""


def holder(seconds: float, kind: str = "exclusive('a long kernel')") -> subprocess.Popen:
    code = HOLD.format(kind, seconds)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_timing_waits_for_another_process_and_says_for_which(monkeypatch):
    told = []
    monkeypatch.setattr(locks.show, "working", lambda text: told.append(text) or __import__("contextlib").nullcontext())
    other = holder(1.5)
    began = time.monotonic()
    with locks.exclusive("mine"):
        assert time.monotonic() - began > 1.0
        assert other.wait(5) == 0
    assert f"process {other.pid}" in told[0] and "a long kernel" in told[0]


def test_a_holder_file_of_another_account_is_replaced(monkeypatch):
    with locks.exclusive("mine"):
        pass
    left = next(locks.folder().glob("*.lock")).with_suffix(".holder")
    left.write_text("{}")
    before = left.stat().st_ino
    keep = left.open()  # so that its inode is not given out again
    with locks.exclusive("mine"):
        assert left.stat().st_ino != before, "chmod of another account's file is refused"
    keep.close()


def test_a_killed_holder_leaves_no_lock_behind():
    other = holder(60)
    other.kill()
    other.wait()
    began = time.monotonic()
    with locks.exclusive("mine"), locks.exclusive("nested"):
        assert time.monotonic() - began < 5


def test_other_work_is_shared_among_itself_and_keeps_timing_waiting():
    other = holder(1.5, "shared()")
    began = time.monotonic()
    with locks.shared():
        assert time.monotonic() - began < 1.0
    with locks.exclusive("mine"):
        assert time.monotonic() - began > 1.0
        assert other.wait(5) == 0
