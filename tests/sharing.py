"""What the processes of one run of tests share: zygotes, so that packages are loaded once, and compiled CUDA C.

A kernel of a notebook gets a fork of a zygote (`helpers.child`) that is kept here. It serves that kernel only and ends
with it, as one of its own would.
"""

import atexit
import contextlib
import os
import socket
import tempfile
import threading
from functools import cache
from pathlib import Path

from helpers import child, machine

FOUND = "TESTS_SHARE"


@cache
def shared() -> dict[str, str]:
    """Variables with which a process finds it; none where each is to do all by itself, as on a GPU.

    FOUND names the folder for processes of pytest, which for themselves take no part in it.
    """
    if machine.gpu() or not child._can_fork():
        return {}
    if there := os.environ.get(FOUND):
        return _variables(there)
    folder = tempfile.TemporaryDirectory()
    path = str(Path(folder.name) / "zygotes")
    (Path(folder.name) / "binaries").mkdir()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    kept: dict[str, child._Zygote] = {}
    threading.Thread(target=_serve, args=(listener, kept), daemon=True).start()
    atexit.register(_end, kept, folder, os.getpid())
    return _variables(folder.name)


def _variables(folder: str) -> dict[str, str]:
    return {FOUND: folder, "HELPERS_ZYGOTES": f"{folder}/zygotes", "HELPERS_BINARIES": f"{folder}/binaries"}


def _serve(listener: socket.socket, kept: dict) -> None:
    """Who connects says a kind, and hands over the socket that its fork is to serve."""
    while True:
        with contextlib.suppress(OSError):  # of one who has ended meanwhile: the next one must not wait for ever
            asked, _ = listener.accept()
            with asked:
                kind = asked.recv(64).decode()
                _, fds, *_ = socket.recv_fds(asked, 64, 1)
            if not fds:
                continue
            with socket.socket(fileno=fds[0]) as theirs:
                if kind not in kept or not kept[kind].alive():
                    kept[kind] = child._Zygote(kind)
                socket.send_fds(kept[kind].socket, [b"twin"], [theirs.fileno()])


def _end(kept: dict, folder: tempfile.TemporaryDirectory, pid: int) -> None:
    if os.getpid() == pid:
        for zygote in kept.values():
            zygote.part()
        folder.cleanup()
