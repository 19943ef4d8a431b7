"""One timer at a time on a GPU that several people share.

Timing takes the GPU's lock exclusively, for the measured region only and never for compilation, and Nsight Compute's
runs take it whole. Other GPU work of the course may take it shared, which keeps it out of measurements.
"""

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import ReadWriteLock, Timeout

from . import machine, show

_held = threading.local()


def folder() -> Path:
    """Where locks live: one folder for all accounts of this machine.

    It is without the sticky bit, because Linux (fs.protected_regular) refuses to open another account's file for
    writing in a sticky folder such as /tmp itself.
    """
    path = Path(tempfile.gettempdir()) / "gpu-kernel-ladder-locks"
    if not path.exists():
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
    return path


@contextmanager
def exclusive(what: str) -> Iterator[None]:
    """Hold this GPU alone among the course's processes. `what` is shown to those who wait."""
    if getattr(_held, "exclusive", False):  # a timing inside a timing is already alone
        yield
        return
    lock, holder = _lock()
    with _waiting(lock.acquire_write, holder):
        holder.unlink(missing_ok=True)  # of another account that was killed: only its owner may chmod it
        holder.write_text(json.dumps({"pid": os.getpid(), "user": _user(), "what": what}))
        holder.chmod(0o666)
        _held.exclusive = True
        try:
            yield
        finally:
            _held.exclusive = False
            holder.unlink(missing_ok=True)


@contextmanager
def shared() -> Iterator[None]:
    """Use the GPU beside others of the course, but not while one of them is timing."""
    if getattr(_held, "exclusive", False):
        yield
        return
    lock, holder = _lock()
    with _waiting(lock.acquire_read, holder):
        yield


def _lock() -> tuple[ReadWriteLock, Path]:
    name = machine.here().uuid or "cpu"
    path = folder() / f"{name}.lock"
    if not path.exists():
        path.touch()
        path.chmod(0o666)
    return ReadWriteLock(path), path.with_suffix(".holder")


def _waiting(acquire, holder: Path):
    """The acquired lock; after half a second of waiting, say for whom."""
    try:
        return acquire(timeout=0.5)
    except Timeout:
        with show.working(f"waiting for the GPU: {_who(holder)}"):
            return acquire()


def _who(holder: Path) -> str:
    try:
        at = json.loads(holder.read_text())
        return f"{at['user']} (process {at['pid']}) is timing {at['what']}"
    except (OSError, ValueError, KeyError, TypeError):  # released, or being written, just now; anybody may write there
        return "other work of the course is running"


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"user {os.getuid()}"
