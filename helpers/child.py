"""Run a module text, or a program, in a process that may hang, crash or flood, and leave nothing of it behind.

On Linux a zygote (`helpers/zygote.py`) holds torch, triton, numpy and cupy imported; a text runs in a fork of it, so
it starts in milliseconds, and it and all its descendants are killed at its end, daemons too. The zygote starts at
the first call (2 to 3 s) and ends with this process. Elsewhere (macOS, some sandboxes) each call starts a plain
subprocess under the same limits: the packages are imported anew each time, and a descendant that leaves its session
is not found.

The value comes back as JSON that the child wrote: it is data to judge, not a verdict to trust.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile

from . import ROOT, machine

VALUE_BYTES = 1 << 26
SECRET = re.compile(
    r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(?=_|\d|$)|_PWD$|(?:^|_)(?:PASS|PAT|AUTH)(?=_|$)",
    re.IGNORECASE,
)
"""Environment variables that no child gets: not even the zygote, whose memory a text could look through."""

_WITH_PASSWORD = re.compile(r"://[^/?#\s]*@")
"""An address with a user's name, as of a proxy: what runs a text does not get such a variable either."""

_SCRIPT = str(Path(__file__).with_name("zygote.py"))
_zygotes: dict[str, "_Zygote"] = {}
_lock = threading.RLock()


@dataclass(frozen=True)
class Result:
    """What a child left. `exit` is None where a `signal` (a number) ended it; `error` is its exception's last line.

    `seconds` is wall time from its start to its end. stdout and stderr hold at most the bytes allowed. Of a text
    that was stopped for its time, stderr ends with a traceback of where it was. `kin`: how many
    processes it had started without waiting for their end; they were killed with it.
    """

    value: object
    stdout: str
    stderr: str
    exit: int | None
    signal: int | None
    timed_out: bool
    seconds: float
    error: str = ""
    kin: int = 0

    @property
    def ok(self) -> bool:
        return self.exit == 0 and not self.timed_out and not self.error

    def why(self) -> str:
        """One clause that says how it ended."""
        if self.timed_out:
            return f"it was still running after {self.seconds:.1f} s and was stopped"
        if self.signal:
            return f"it was ended by {signal.Signals(self.signal).name}"
        return self.error or (f"it exited with status {self.exit}" if self.exit else "it ended well")


class Stopped(KeyboardInterrupt):
    """Ctrl-C while a text ran; `stderr` ends with a traceback of where it was, unless it kept that back."""

    def __init__(self, stderr: str):
        super().__init__()
        self.stderr = stderr


def run(
    text: str,
    call: str | None = None,
    *,
    env: dict | None = None,
    seconds: float = 60,
    memory_bytes: int | None = None,
    output_bytes: int = 1 << 20,
    interpreted: bool | None = None,
    inductor: bool = False,
    packages: str = "",
    share: Sequence[int] = (),
    sealed: bool = False,
    until: int | None = None,
) -> Result:
    """Run a module text, then the expression `call`, whose JSON-able value comes back.

    `env` changes environment variables once the packages are imported (a value None removes one). `memory_bytes` is
    what it may allocate beyond the preloaded packages. `interpreted` says whether Triton interprets its kernels there,
    by default as in this process: False compiles, also where this process interprets; True is CPU mode, on a GPU too.
    `inductor`: where it is interpreted, Inductor is loaded already and has compiled something for the CPU; else what
    captures a graph is loaded, which touches no GPU.
    `packages`: "tvm", "jax", "max" or "cutlass", loaded in place of Triton; `helpers.apart` asks for it.
    `share`: at most four file descriptors (memory, say) that the text finds, open, in its global `__shared__`.
    `until`: a file descriptor; once there is something to read from it, or its other end is closed, the text is ended
    as if its time were over.
    `sealed`: without the network and the sight of other processes, where the system permits that (`helpers.sealed`);
    what runs on a GPU may still connect to programs on this machine.
    """
    if interpreted is None:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    kind = packages or _kind(interpreted, inductor)
    if sealed:
        sealed = "but for daemons" if machine.gpu() and kind not in ("interpreted", "inductor") else "whole"
    job = {"text": text, "call": call, "argv": None, "env": _environment(env, kind), "sealed": sealed}
    return _carry_out(kind, job, seconds, memory_bytes, output_bytes, share, until)


def python(args: list[str], **limits) -> Result:
    """`command` for a fresh interpreter: `python(["-c", "print(1)"])`."""
    return command([sys.executable, *map(str, args)], **limits)


def command(
    argv: list[str],
    *,
    env: dict | None = None,
    seconds: float = 60,
    memory_bytes: int | None = None,
    output_bytes: int = 1 << 20,
) -> Result:
    """Run a program under the limits of `run`; `value` is None. `env` changes variables of this process's."""
    return _carry_out("bare", _argued(argv, env), seconds, memory_bytes, output_bytes)


def begin(argv: list[str], *, env: dict | None = None, output_bytes: int = 1 << 20) -> "Begun | None":
    """`command`, begun and not waited for, while other calls go on. None where no zygote can be (see above)."""
    if not _can_fork():
        return None
    return Begun(_argued(argv, env), output_bytes)


class Begun:
    """A program that runs under a zygote of its own; it ends with this process at the latest."""

    LONGEST = 1 << 20
    """Seconds it may take from its start on; a learner may read for hours before its result is asked for."""

    def __init__(self, job: dict, output_bytes: int):
        self._key, self._left = f"begun {id(self)}", None
        with _lock:
            zygote = _zygotes[self._key] = _Zygote("bare")
        job = _placed(job, None)

        def watch():
            with contextlib.suppress(OSError, RuntimeError):  # it was ended, and the zygote with it
                self._left = zygote.carry_out(job, self.LONGEST, output_bytes, ())

        self._watch = threading.Thread(target=watch, daemon=True)
        self._watch.start()

    def result(self, seconds: float) -> Result:
        """Wait until it has ended by itself, `seconds` at most, then it is ended."""
        began = time.monotonic()
        try:
            self._watch.join(seconds)
        finally:
            left = self._left
            self.end()
        return left or Result(None, "", "", None, signal.SIGKILL, True, time.monotonic() - began)

    def end(self) -> None:
        """Kill it and all that it started; without effect where it has ended."""
        with _lock:
            zygote = _zygotes.pop(self._key, None)
        if zygote:
            zygote.close()


def warm(*, interpreted: bool = False, inductor: bool = False, packages: str = "") -> None:
    """Start the zygote that `run` (or with False, compiling) will need, without waiting for it."""
    if _can_fork():
        with _lock:
            _zygote(packages or _kind(interpreted, inductor))


def _kind(interpreted: bool, inductor: bool) -> str:
    if interpreted:
        return "inductor" if inductor else "interpreted"
    return "captured" if inductor else "compiled"


def close() -> None:
    """End the zygotes; the next call starts one anew."""
    with _lock:
        for zygote in _zygotes.values():
            zygote.part()  # all of them, before one is waited for
        while _zygotes:
            _zygotes.popitem()[1].close()


# ------------------------------------------------------------------------------------------------------------


def _environment(changes: dict | None, kind: str) -> dict:
    env = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
    if kind != "bare":  # a program may have to ask a proxy
        env = {name: value for name, value in env.items() if not _WITH_PASSWORD.search(value)}
    if kind in ("interpreted", "inductor"):
        env["TRITON_INTERPRET"] = "1"
        env["HELPERS_MODE"] = "cpu"  # what is interpreted runs on the CPU, beside a GPU too; CUDA stays untouched,
        env["CUDA_VISIBLE_DEVICES"] = ""  # also by Inductor, which asks for it while it is loaded
    elif kind in ("compiled", "captured"):
        env.pop("TRITON_INTERPRET", None)
    elif kind == "jax":
        env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
        if machine.gpu():  # named, or JAX would go on with the CPU where it cannot use the GPU
            env |= {"JAX_PLATFORMS": "cuda"}
        else:  # it compiles for a GPU nevertheless, and needs none of CUDA's libraries for that
            env |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    elif kind == "tvm":  # an extension for torch's tensors, not used here: it asks for a GPU before anything is forked
        env["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
    elif kind == "max":  # it would look up a host; no other switch keeps it from that
        env["MODULAR_TELEMETRY_ENABLED"] = "0"
    for name, value in (changes or {}).items():
        env.pop(name, None) if value is None else env.__setitem__(name, str(value))
    return env


@lru_cache(maxsize=1)
def _can_fork() -> bool:
    """Whether this system has what the zygote needs: Linux with pidfds and lists of children (some sandboxes lack)."""
    if sys.platform != "linux" or not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _argued(argv: list[str], env: dict | None) -> dict:
    return {"text": None, "call": None, "argv": list(map(str, argv)), "env": _environment(env, "bare")}


def _placed(job: dict, memory_bytes: int | None) -> dict:
    return job | {
        "memory_bytes": memory_bytes,
        "cwd": os.getcwd(),
        "path": [p for p in sys.path if p] + [str(ROOT)],
    }


def _carry_out(kind, job, seconds, memory_bytes, output_bytes, share=(), until=None) -> Result:
    job = _placed(job, memory_bytes)
    if not _can_fork():
        return _plain(kind, job, seconds, output_bytes, share, until)
    with _zygote_for(kind) as zygote:
        return zygote.carry_out(job, seconds, output_bytes, share, until)


@contextlib.contextmanager
def _zygote_for(kind: str) -> Iterator["_Zygote"]:
    """A zygote for one job: the one that waits, or another where a thread has that at work. One of a kind is kept."""
    with _lock:
        zygote = _zygote(kind)
        busy = f"{kind} {id(zygote)}"
        _zygotes[busy] = _zygotes.pop(kind)
    try:
        yield zygote
    except Stopped:  # in order: the zygote waits for the next job
        raise
    except BaseException:  # it may not have started
        zygote.close()
        raise
    finally:
        with _lock:
            ours = _zygotes.pop(busy, None)  # None: `close` has ended it
            kept = ours and zygote.alive() and _zygotes.setdefault(kind, zygote) is zygote
        if ours and not kept:
            zygote.close()


def _zygote(kind) -> "_Zygote":
    if kind not in _zygotes or not _zygotes[kind].alive():
        at_work = (one for one in _zygotes.values() if one.kind == kind != "bare" and one.alive())
        _zygotes[kind] = _Zygote(kind, next(at_work, None))
    return _zygotes[kind]


class _Zygote:
    """Started anew, or as a fork of `other`, as soon as that has its packages: no second import of them."""

    def __init__(self, kind: str, other: "_Zygote | None" = None):
        self.kind, self.pid, self.process = kind, 0, None
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if other:
                with contextlib.suppress(OSError):  # it has just ended: then this one is not alive either
                    socket.send_fds(other.socket, [b"twin"], [theirs.fileno()])
            else:
                self._start(theirs)

    def _start(self, theirs: socket.socket) -> None:
        env = {"PYTHONPATH": os.pathsep.join([p for p in sys.path if p] + [str(ROOT)])}
        if self.kind == "captured":  # no process of Inductor's a processor, and whether there is a GPU NVML tells:
            env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # it will be forked
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-X", "utf8", _SCRIPT, str(theirs.fileno()), self.kind],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(env, self.kind),
        )

    def _ready(self) -> int:
        """Its pid, once it has its packages. Where a fork came to nothing, since `other` ended, it is started anew."""
        said = self.socket.recv(4096)
        if not said and not self.process:
            self.socket.close()
            self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._start(theirs)
            said = self.socket.recv(4096)
        if not said.startswith(b"ready"):
            raise RuntimeError(f"The process that runs code apart could not start: {said.decode() or 'it died'}.")
        return int(said.split()[1])

    def alive(self) -> bool:
        if self.process:
            return self.process.poll() is None
        ended = select.poll()  # a fork of another one is that one's child, but its end of the socket tells
        ended.register(self.socket, 0)
        return not ended.poll(0)

    def part(self) -> None:
        """Tell it to end."""
        with contextlib.suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Have it end, and wait for that, 10 s at most; one that still loads has nothing to tidy up."""
        self.part()
        self.socket.settimeout(10)
        with contextlib.suppress(OSError):  # it took too long, or has ended without a word
            while (self.pid or not self.process) and self.socket.recv(4096):
                continue
        self.kill()
        self.socket.close()

    def kill(self) -> None:
        """End what is left of it at once."""
        if self.process:
            self.process.kill()
            self.process.wait()
        elif self.pid and self.alive():
            os.kill(self.pid, signal.SIGKILL)

    def carry_out(self, job, seconds, output_bytes, share, until=None) -> Result:
        self.pid = self.pid or self._ready()
        pipes = [os.pipe() for _ in range(3)]
        with TemporaryFile() as f, contextlib.ExitStack() as reading:
            f.write(json.dumps(job).encode())
            f.flush()
            ends = [reading.enter_context(os.fdopen(r, "rb", buffering=0)) for r, _ in pipes]
            try:
                socket.send_fds(self.socket, [b"run"], [f.fileno(), *(w for _, w in pipes), *share])
            finally:
                for _, w in pipes:
                    os.close(w)
            start = time.monotonic()
            _, fds, *_ = socket.recv_fds(self.socket, 64, 1)
            pidfd = reading.enter_context(os.fdopen(fds[0], "rb", buffering=0))
            watch = _Watch(ends, output_bytes)
            try:
                timed_out = not watch.until(start + seconds, pidfd, until)
                if timed_out and job["text"]:
                    watch.ask(lambda: signal.pidfd_send_signal(fds[0], signal.SIGUSR1))
            except KeyboardInterrupt:
                watch.ask(lambda: signal.pidfd_send_signal(fds[0], signal.SIGUSR1))
                raise Stopped(watch.texts()[1]) from None
            finally:
                taken = time.monotonic() - start
                answer = self._end()
            watch.until(time.monotonic() + 2)  # what was written just before the end
        if not answer:
            self.kill()
            return Result(None, *watch.texts(), None, signal.SIGKILL, False, taken, "it killed the process that ran it")
        answer = json.loads(answer)
        code = os.waitstatus_to_exitcode(answer["status"] or 0)
        note = f"\n[{answer['left']} processes of it could not be killed]" if answer["left"] else ""
        return dataclasses.replace(watch.result(code, timed_out, taken, note), kin=answer["kin"])

    def _end(self) -> bytes:
        """Have the fork and its descendants killed; returns nothing where the zygote itself is dead."""
        try:
            self.socket.send(b"end")
            return self.socket.recv(4096)
        except ConnectionError:
            return b""


class _Watch:
    """Reads three pipes (stdout, stderr, value) and keeps what fits."""

    def __init__(self, pipes, output_bytes):
        self.room = [output_bytes, output_bytes, VALUE_BYTES]
        self.kept, self.cut = [bytearray() for _ in pipes], [False] * 3
        self.open = dict(zip(pipes, range(3), strict=True))

    def until(self, deadline: float, ended=None, stop: int | None = None) -> bool:
        """Read until `ended` is readable, or every pipe is closed; False when the deadline, or `stop`, came first."""
        with selectors.DefaultSelector() as selector:
            for pipe in [*self.open, *([ended] if ended else []), *([stop] if stop is not None else [])]:
                selector.register(pipe, selectors.EVENT_READ)
            while ended or self.open:
                left = deadline - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if left <= 0:
                    return False
                for key, _ in ready:
                    if key.fileobj is ended:
                        return True
                    if key.fileobj is stop:
                        return False
                    if not self._take(key.fileobj):
                        selector.unregister(key.fileobj)
        return True

    def ask(self, send) -> None:
        """Have a text say where it is (`faulthandler` of the zygote answers the signal), and read that."""
        self.room[1] = 1 << 17  # also where it has flooded stderr: what is in the pipe comes first
        with contextlib.suppress(ProcessLookupError):
            send()
        self.until(time.monotonic() + 0.2)

    def _take(self, pipe) -> bool:
        i, data = self.open[pipe], pipe.read(1 << 16)
        if not data:
            del self.open[pipe]
            return False
        self.kept[i] += data[: self.room[i]]
        self.cut[i] |= len(data) > self.room[i]
        self.room[i] -= min(len(data), self.room[i])
        return True

    def texts(self) -> tuple[str, str]:
        texts = [bytes(k).decode(errors="replace") for k in self.kept[:2]]
        cut = [f"\n[cut after {len(t)} characters]" if c else "" for t, c in zip(texts, self.cut, strict=False)]
        return texts[0] + cut[0], texts[1] + cut[1]

    def result(self, code: int, timed_out: bool, seconds: float, note: str = "") -> Result:
        out, err = self.texts()
        if code < 0:
            err = err.partition("\n\nExtension modules:")[0]  # 80 names that say nothing
        report = {}
        if self.kept[2]:
            try:
                report = json.loads(self.kept[2])
            except ValueError:
                report = {"error": "its value is damaged or longer than 64 MiB"}
        return Result(
            report.get("value"),
            out,
            err + note,
            code if code >= 0 else None,
            -code if code < 0 else None,
            timed_out,
            seconds,
            report.get("error", ""),
        )


def _plain(kind, job, seconds, output_bytes, share, until=None) -> Result:
    """One job without a zygote: a subprocess of its own session."""
    pipes = [os.pipe() for _ in range(3)]
    with contextlib.ExitStack() as reading, TemporaryFile() as f:
        f.write(json.dumps(job).encode())
        f.seek(0)
        ends = [reading.enter_context(os.fdopen(r, "rb", buffering=0)) for r, _ in pipes]
        (_, out), (_, err), (_, value) = pipes
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-P", _SCRIPT, "--once", kind, str(value), *map(str, share)],
            stdin=f,
            stdout=out,
            stderr=err,
            pass_fds=[value, *share],
            start_new_session=True,
            env=_environment({"PYTHONPATH": os.pathsep.join([p for p in sys.path if p] + [str(ROOT)])}, kind),
        )
        for _, w in pipes:
            os.close(w)
        watch = _Watch(ends, output_bytes)
        try:
            timed_out = not watch.until(start + seconds, stop=until)
            if not timed_out:
                process.wait(max(0, start + seconds - time.monotonic()))
            elif job["text"]:
                watch.ask(lambda: process.send_signal(signal.SIGUSR1))
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            taken = time.monotonic() - start
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    return watch.result(code, timed_out, taken)


def _forget() -> None:
    """A fork of this process has no business with its parent's zygotes."""
    for zygote in _zygotes.values():
        zygote.socket.close()
    _zygotes.clear()


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
