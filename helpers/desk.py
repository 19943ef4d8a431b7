"""A process apart that does jobs of this package, one after another: what a job does to it is no matter to others.

Jobs go there by the name of a function ("grading.judged"), and come back as bytes, so that a process that only passes
them on need not import what judges.
"""

import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from multiprocessing.connection import Connection

from . import machine, zygote


class Ended(Exception):
    """The process ended over a job, and again over the same one."""


class Desk:
    """Such a process: started with its first job, and anew where a job ended it."""

    def __init__(self):
        self.process = self.pipe = None
        self.closed = False

    def do(self, function: str, *args, **options):
        """What a function gives there. Raises `Ended`, and what the function raises."""
        return result(self.ask(function, *args, **options))

    def ask(self, function: str, *args, **options) -> bytes:
        """The same, for `result`."""
        for _ in range(2):  # once more: others may have used up the memory
            try:
                return self._asked((function, args, options))
            except (EOFError, OSError):
                self._end()
                if self.closed:
                    break
        return pickle.dumps((None, Ended()))

    def _asked(self, job: tuple) -> bytes:
        if self.process is None:
            self.pipe, theirs = multiprocessing.Pipe()
            with theirs:
                program = f"from helpers import desk; desk.serve({theirs.fileno()})"
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", program],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": machine.python_path()},
                )
        self.pipe.send(job)
        return self.pipe.recv_bytes()

    def close(self) -> None:
        """End it; whoever waits for a job of it gets `Ended`."""
        self.closed = True
        self._end()

    def _end(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


def result(reply: bytes):
    """What a job gave; raises what it raised."""
    value, error = pickle.loads(reply)
    if error:
        raise error
    return value


def serve(fd: int) -> None:
    """What the process does until its pipe closes. What it prints is not for whoever waits for its jobs."""
    os.setsid()  # Ctrl-C goes to the parent, which ends its desks
    signal.signal(signal.SIGTERM, _leave)
    if sys.platform == "linux":  # also where the parent is killed during a job
        zygote.prctl(zygote.PR_SET_PDEATHSIG, signal.SIGTERM)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    pipe = Connection(fd)
    while True:
        try:
            function, args, options = pipe.recv()
        except EOFError:
            return
        module, _, name = function.partition(".")
        try:
            reply = getattr(importlib.import_module(f"helpers.{module}"), name)(*args, **options), None
        except Exception as error:
            reply = None, error
        pipe.send_bytes(pickle.dumps(reply))


def _leave(*_) -> None:
    """End in order, so that what a job forked ends first, and once: the parent may ask and the kernel too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()
