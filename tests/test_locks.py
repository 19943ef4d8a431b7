"""One timer at a time: a second process waits, and is told for whom."""

import contextlib
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

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


def test_who_waits_can_be_stopped():
    other = holder(60)
    line = [sys.executable, "-c", HOLD.format("exclusive('mine')", 0)]
    with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as waiting:
        while "waiting for the GPU" not in (said := waiting.stdout.readline()):
            assert waiting.poll() is None, said
        time.sleep(0.2)
        waiting.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in waiting.stderr.read() and waiting.wait(5) != 0
    other.kill()
    other.wait()


def test_other_work_is_shared_among_itself_and_keeps_timing_waiting():
    other = holder(1.5, "shared()")
    began = time.monotonic()
    with locks.shared():
        assert time.monotonic() - began < 1.0
    with locks.exclusive("mine"):
        assert time.monotonic() - began > 1.0
        assert other.wait(5) == 0


AGAIN = """
import time
from helpers import locks
print("held", flush=True)
for _ in range(100):
{}
"""
WORK = "    with locks.shared(): time.sleep(0.4)"
TIMING = "    with locks.shared(): pass\n    with locks.exclusive('a kernel'): time.sleep(0.2)"


@contextlib.contextmanager
def room(*loops: str):
    """Processes that each take the lock again as soon as they gave it back."""
    line = [sys.executable, "-c"]
    started = [subprocess.Popen([*line, AGAIN.format(loop)], cwd=ROOT, stdout=subprocess.PIPE) for loop in loops]
    try:
        for process in started:
            assert process.stdout.readline() == b"held\n"
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def longest(take, times: int = 5) -> float:
    waits = []
    for _ in range(times):
        began = time.monotonic()
        with take():
            waits.append(time.monotonic() - began)
    return max(waits)


def test_a_timer_gets_in_beside_others_whose_work_never_pauses():
    with room(WORK, WORK, WORK):
        assert longest(lambda: locks.exclusive("mine")) < 2


def test_nobody_waits_for_longer_than_a_turn_of_the_others():
    with room(WORK, WORK, TIMING, TIMING, TIMING):
        assert longest(locks.shared) < 4
        assert longest(lambda: locks.exclusive("mine")) < 4


def test_who_comes_to_time_does_not_overtake_work_that_waits():
    """However slowly those wake who wait: on a busy machine work would else be passed by again and again."""
    order = []

    def take(name: str, lock) -> None:
        with lock:
            order.append(name)

    with ThreadPoolExecutor() as pool, locks.exclusive("first"):
        for name, lock in (("work", locks.shared()), ("timer", locks.exclusive("mine"))):
            pool.submit(take, name, lock)
            time.sleep(0.8)  # longer than it only tries
        assert order == []
    assert order == ["work", "timer"]


def test_what_would_wait_for_itself_is_refused():
    with locks.shared(), pytest.raises(RuntimeError, match="would wait for itself"), locks.exclusive("mine"):
        pass
    with locks.exclusive("mine"), locks.shared():
        pass


def test_shared_work_within_shared_work_does_not_wait_for_a_timer_that_waits_for_it():
    with locks.shared(), room(TIMING):
        time.sleep(0.5)
        assert longest(locks.shared) < 0.1
