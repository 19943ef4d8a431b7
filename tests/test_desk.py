"""A process apart that does jobs: it is begun anew where a job ends it, and ends with whoever asked."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from helpers import ROOT, desk


class Deadly:
    """What ends the process that reads it."""

    def __reduce__(self):
        return os.abort, ()


@pytest.fixture
def one():
    made = desk.Desk()
    yield made
    made.close()


def test_jobs_go_by_name_and_come_back_with_their_value_or_their_error(one):
    assert one.do("show.number", 12) == "12"
    pid = one.process.pid
    with pytest.raises(AttributeError):
        one.do("show.no_such_function")
    assert one.do("show.number", 13) == "13" and one.process.pid == pid


def test_one_that_died_is_begun_anew_and_a_job_that_kills_it_twice_is_given_back(one):
    one.do("show.number", 1)
    os.kill(one.process.pid, signal.SIGKILL)
    assert one.do("show.number", 2) == "2"
    with pytest.raises(desk.Ended):
        one.do("show.number", Deadly())
    assert one.do("show.number", 3) == "3"


@pytest.mark.skipif(sys.platform != "linux", reason="it is the kernel that tells of a parent's end")
def test_it_ends_with_its_parent_though_that_is_killed_during_a_job():
    code = (
        "import signal\nfrom helpers import desk\n\nclass Long:\n    def __reduce__(self):\n"
        "        return signal.pause, ()\n\none = desk.Desk()\none.do('show.number', 1)\n"
        "print(one.process.pid, flush=True)\none.do('show.number', Long())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    apart = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.5)
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 20
    while lives(apart) and time.monotonic() < end:
        time.sleep(0.1)
    assert not lives(apart)


def lives(process: psutil.Process) -> bool:
    """Not where it has ended, also between two looks, and only waits for its parent to ask how."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
