"""One timer at a time: a second process waits, and is told for whom."""

import subprocess
import sys
import time

from helpers import ROOT, locks

HOLD = """
import time
from helpers import locks
with locks.exclusive("a long kernel"):
    print("held", flush=True)
    time.sleep({})
"""


def holder(seconds: float) -> subprocess.Popen:
    code = HOLD.format(seconds)
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


def test_a_killed_holder_leaves_no_lock_behind():
    other = holder(60)
    other.kill()
    other.wait()
    began = time.monotonic()
    with locks.exclusive("mine"), locks.exclusive("nested"):
        assert time.monotonic() - began < 5
