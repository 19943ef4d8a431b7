"""One timer at a time on a GPU that several people share.

Timing takes the GPU's lock exclusively, for the measured region only and never for compilation, and Nsight Compute's
runs take it whole. Other GPU work of the course may take it shared, which keeps it out of measurements.

Work comes in by a gate that those who wait to time keep shut: what is at work ends, they time one after another, and
then all work that waited goes on together. Who comes to time while work waits in the line goes after it. So nobody
waits for longer than the rest of such a turn and the next one, and the GPU is not emptied for each timing anew.
Locks are the system's (flock): a process that dies leaves none behind.
"""

import fcntl
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

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
    """Hold this GPU alone among the course's processes. `what` is shown to those who wait.

    Errors: RuntimeError within `shared` of the same thread.
    """
    if getattr(_held, "exclusive", False):  # a timing inside a timing is already alone
        yield
        return
    if getattr(_held, "shared", False):
        raise RuntimeError("What works on the GPU beside others cannot have it alone: it would wait for itself.")
    line, gate, lock, holder = (_file(end) for end in ("line", "gate", "lock", "holder"))
    with ExitStack() as held:
        with _locked(line, fcntl.LOCK_EX, holder):  # after the work that waits already
            held.enter_context(_locked(gate, fcntl.LOCK_SH, holder))
        held.enter_context(_locked(lock, fcntl.LOCK_EX, holder))
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
    if getattr(_held, "exclusive", False) or getattr(_held, "shared", False):
        yield
        return
    line, gate, lock, holder = (_file(end) for end in ("line", "gate", "lock", "holder"))
    with ExitStack() as held:
        with _locked(line, fcntl.LOCK_SH, holder), _locked(gate, fcntl.LOCK_EX, holder):
            held.enter_context(_locked(lock, fcntl.LOCK_SH, holder))
        _held.shared = True
        try:
            yield
        finally:
            _held.shared = False


def _file(end: str) -> Path:
    return folder() / f"{machine.here().uuid or 'cpu'}.{end}"


@contextmanager
def _locked(path: Path, how: int, holder: Path) -> Iterator[None]:
    """The system's lock of a file; after half a second of waiting, say for whom."""
    file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if os.fstat(file).st_uid == os.getuid():  # whatever this account's umask is
            os.fchmod(file, 0o666)
        if not _taken(file, how):
            with show.working(f"waiting for the GPU: {_who(holder)}"):
                fcntl.flock(file, how)  # whoever waits longest is woken first
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing would not do, where a process was forked meanwhile
        os.close(file)


def _taken(file: int, how: int) -> bool:
    """Whether the lock was free within half a second, and is held now."""
    until = time.monotonic() + 0.5
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, how | fcntl.LOCK_NB)
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.01)


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
