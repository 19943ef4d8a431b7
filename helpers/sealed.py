"""Take the network, and the sight of other processes, from this process and all it starts, for good.

For code that a language model wrote (`child.run(..., sealed=True)`). It needs no privileges: a seccomp filter refuses
sockets that lead out of this machine, and, where no GPU's driver needs them, connections to other programs on it; a
Landlock domain keeps it from reading, tracing or signalling processes outside, such as the notebook's, whose
environment may hold a key. Linux only; `seal` says what a system refused.
Sources: the documentation of seccomp_filter and Landlock, and linux/{seccomp,filter,landlock,capability}.h.
"""

import ctypes
import os
import platform
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 13
"""What a filter answers: go on; fail with EACCES."""

MACHINES = {"x86_64": (0xC000003E, 41, 42), "aarch64": (0xC00000B7, 198, 203)}
"""The audit number of an architecture, and its numbers of the system calls `socket` and `connect`."""

IO_URING_SETUP, PIDFD_GETFD = 425, 438
"""Two other ways to a socket: the same numbers everywhere."""

AF_UNIX, AF_NETLINK = 1, 16
"""Families that end on this machine. CUDA's driver may talk to its own daemons by them; so may code to a service that
does what it is told, such as a container engine."""

PTRACE, ADMIN, PERFMON = 19, 21, 38
"""Capabilities by which root looks into other processes whatever Landlock says."""

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
REFER = 1 << 13
"""The right to rename across folders, the one that a domain withholds unless it is given: compilers' caches need it."""


def seal(daemons: bool = True) -> dict[str, str]:
    """Seal this process; `daemons`: it may connect to programs on this machine. Returns, for "network" and "processes",
    nothing, or a clause that says why it is still open.

    A process that has threads seals the one that calls; call it before there are others.
    """
    if sys.platform != "linux":
        return dict.fromkeys(("network", "processes"), f"{sys.platform} has no such means")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):  # without it neither is permitted to an ordinary user
        return dict.fromkeys(("network", "processes"), _why("no_new_privs"))
    return {"processes": _domain(libc), "network": _filter(libc, daemons)}


def _why(what: str) -> str:
    return f"{what} is not permitted here ({os.strerror(ctypes.get_errno())})"


def _filter(libc, daemons: bool) -> str:
    """Refuse sockets of other families than AF_UNIX and AF_NETLINK, system calls of another architecture, and without
    `daemons` every `connect`."""
    if platform.machine() not in MACHINES:
        return f"no filter is written for {platform.machine()}"
    audit, socket, connect = MACHINES[platform.machine()]
    load, equal, above, answer = 0x20, 0x15, 0x35, 0x06  # BPF: LD|W|ABS, JMP|JEQ|K, JMP|JGE|K, RET|K
    # struct seccomp_data: the call's number at 0, the architecture at 4, the first argument's low half at 16; a jump's
    # two numbers are the instructions that it passes over where the comparison holds and where it does not
    program = [
        (load, 0, 0, 4),
        (equal, 0, 10, audit),
        (load, 0, 0, 0),
        (above, 8, 0, 0x40000000),  # x86-64's second set of numbers
        (equal, 0 if daemons else 7, 0, connect),
        (equal, 6, 0, IO_URING_SETUP),
        (equal, 5, 0, PIDFD_GETFD),
        (equal, 0, 3, socket),
        (load, 0, 0, 16),
        (equal, 1, 0, AF_UNIX),
        (equal, 0, 1, AF_NETLINK),
        (answer, 0, 0, ALLOW),
        (answer, 0, 0, REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    given = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(given), 0, 0):
        return _why("a seccomp filter")
    return ""


def _domain(libc) -> str:
    """Enter a Landlock domain of its own, which may do with files what it could before."""
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 2:
        return _why("Landlock") if version < 0 else "this kernel's Landlock is too old"
    scoped = 3 if version >= 6 else 0  # from then on signals and abstract sockets stay inside, too
    rights = struct.pack("QQQ", REFER, 0, scoped)[: 24 if scoped else 8]
    rules = libc.syscall(LANDLOCK_CREATE, ctypes.c_char_p(rights), ctypes.c_size_t(len(rights)), 0)
    if rules < 0:
        return _why("a Landlock domain")
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        beneath = struct.pack("=Qi", REFER, root)
        if libc.syscall(LANDLOCK_ADD, rules, 1, ctypes.c_char_p(beneath), 0):
            return _why("a Landlock rule")
        if libc.syscall(LANDLOCK_RESTRICT, rules, 0):
            return _why("a Landlock domain")
    finally:
        os.close(root)
        os.close(rules)
    return _give_up(libc, PTRACE, ADMIN, PERFMON)


def _give_up(libc, *capabilities: int) -> str:
    """Drop capabilities that this process may have."""
    head = ctypes.c_char_p(struct.pack("=Ii", 0x20080522, 0))  # version 3 of the structure; this process
    held = ctypes.create_string_buffer(24)
    if libc.capget(head, held):
        return _why("asking for capabilities")
    words = list(struct.unpack("=6I", held.raw))  # effective, permitted, inheritable: the low words, then the high
    for number in capabilities:
        low = 3 * (number // 32)
        words[low : low + 3] = [word & ~(1 << number % 32) for word in words[low : low + 3]]
    return _why("giving up capabilities") if libc.capset(head, ctypes.c_char_p(struct.pack("=6I", *words))) else ""
