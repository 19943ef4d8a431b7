"""The process that child processes are forked from: run by `helpers.child` as a script, never imported by it.

It imports the heavy packages once, and never touches CUDA or runs anything of a reader's. For each job it forks; the
fork gets a session of its own, limits, and its pipes, and either runs a module text or becomes another program.
On "end" the fork and all its descendants are killed: whoever loses its parent becomes this process's child
(it is a subreaper), so a daemon does not get away. It ends, and takes everything down, when its socket closes.

Messages (SOCK_SEQPACKET): "run" with the file descriptors [job, stdout, stderr, value, shared...] is answered by the
fork's pid and its pidfd; "end" by {"status", "left", "kin"}. The job is JSON in an anonymous file. "twin" with a socket
is answered there: another such process, which has the packages at once, serves it, whatever becomes of this one.
"""

import contextlib
import gc
import importlib
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SWEEP_SECONDS = 5
FILE_BYTES = 1 << 32
"""The largest file that a child may write."""


def serve(sock: socket.socket, preload: str) -> None:
    """Answer the messages on `sock` until it closes; an error while preloading is sent instead of "ready"."""
    gc.disable()  # what packages make stays: to look through it again and again takes a fifth of the time
    try:
        load(preload)
    except BaseException as e:  # the parent raises it: nothing can be run without these packages
        sock.send(f"{type(e).__name__}: {e}".encode()[:4000])
        return
    if preload == "captured" and began_cuda():  # the packages of another version: better without them than in vain
        os.set_inheritable(sock.fileno(), True)
        os.execv(sys.executable, [sys.executable, "-P", "-X", "utf8", __file__, str(sock.fileno()), "compiled"])
    gc.collect()
    gc.freeze()  # a fork's collector need not walk through the packages, nor copy their pages by doing so
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    sock.send(b"ready %d" % os.getpid())
    pid = None
    while True:
        message, fds, *_ = socket.recv_fds(sock, 4096, 8)
        if message == b"run":
            pid = os.fork()
            if pid == 0:
                sock.close()
                become(*fds)
            pidfd = os.pidfd_open(pid)
            socket.send_fds(sock, [str(pid).encode()], [pidfd])
            for fd in (pidfd, *fds):
                os.close(fd)
        elif message == b"twin":
            if twin := os.fork():
                twins.add(twin)
                os.close(fds[0])
                continue
            os.setsid()
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # a fork does not inherit this
            sock.close()
            sock, pid = socket.socket(fileno=fds[0]), None
            twins.clear()
            sock.send(b"ready %d" % os.getpid())
        elif message == b"end":
            status, left, kin = sweep(pid)
            sock.send(json.dumps({"status": status, "left": left, "kin": kin}).encode())
        else:
            sweep(pid)
            while twins:  # without this parent, their own parent's next sweep would take them for a job's
                sock.close()  # nobody need wait for them
                twins.discard(os.wait()[0])
                sweep(None)
            os._exit(0)  # tearing torch down would take a second


twins: set[int] = set()
"""Forks of this process that serve sockets of their own: no descendants that are to end with a job."""


def load(preload: str) -> None:
    """Import what jobs will need. preload: "bare" (nothing), "compiled" or "interpreted" (how Triton runs there),
    "captured" (compiled, and torch.compile is imported), "inductor" (interpreted, and it has compiled), "tvm",
    "jax", "max", "cutlass"."""
    if preload == "bare":
        return
    packages = {"tvm": load_tvm, "jax": load_jax, "max": load_max, "cutlass": load_cutlass}
    if preload in packages:
        packages[preload]()
        return
    import numpy  # noqa: F401
    import torch

    try:
        import triton.compiler
        import triton.language
        import triton.runtime.interpreter  # noqa: F401
    except ImportError:
        return  # a machine without triton still runs torch in a child
    if preload in ("interpreted", "inductor"):
        from helpers import interpreter

        interpreter.install()
    # the first two: 5 s of a first graph, and one more of its code; neither asks for a GPU while it is imported
    captured = "torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx"
    packages = {"captured": captured, "inductor": ()}
    for package in ("IPython", *packages.get(preload, ("cupy", "triton.experimental.gluon.nvidia.hopper"))):
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    if preload in ("compiled", "captured"):
        with contextlib.suppress(ImportError, AttributeError):  # it has moved between Triton's versions
            triton.runtime.cache.triton_key()  # reads all of Triton's files, once a process
    if preload in ("interpreted", "inductor"):  # the compiling process must not look for a GPU before it forks
        from helpers import reveal, stage  # noqa: F401
    if preload == "inductor":  # loading it and its patterns takes longer than a check does afterwards
        importlib.import_module("torch._inductor.compile_fx")
        gc.freeze()  # Dynamo collects garbage after each graph: all that was imported would be looked through
        x = torch.ones(16, 16)
        reveal.inductor(lambda: torch.softmax(x @ x, -1), run=False)


def began_cuda() -> bool:
    """Whether CUDA's driver is at work in this process: then no fork of it could use a GPU."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia-uvm"):
                return True
    return False


def load_tvm() -> None:
    """TVM with its schedules, its search and its tensor-core instructions, and torch, from which it takes models."""
    import inspect

    # TVM parses its 250 instructions from Python, and for each looks at the stack with the source around every frame:
    # 40 s, of which the source, which it does not use, takes 36
    inspect.stack = _stack
    for module in ("relax.frontend.torch", "s_tir.dlight", "s_tir.meta_schedule", "s_tir.tensor_intrin"):
        importlib.import_module(f"tvm.{module}")
    # what the first export imports takes seconds; the export itself would ask for a GPU, and then no fork could use it
    for module in ("torch._dynamo", "torch.export._trace", "torch._export.non_strict_utils"):
        importlib.import_module(module)


def load_jax() -> None:
    """JAX; no device is touched before a job asks for one."""
    import jax.numpy  # noqa: F401

    if os.environ.get("JAX_PLATFORMS") == "cuda":  # there jobs take times, for which they need torch
        import torch  # noqa: F401


def load_max() -> None:
    """MAX's graphs and its engine; no session is opened, and so no thread started, before a job asks for one."""
    before = dict(os.environ)
    for module in ("graph", "engine", "driver"):
        importlib.import_module(f"max.{module}")
    _set_by_packages.update({name: value for name, value in os.environ.items() if name not in before})


_set_by_packages: dict[str, str] = {}
"""Variables by which a package knows later where it lies."""


def load_cutlass() -> None:
    """CuTe DSL; it looks for no device where a job names the card that it compiles for."""
    importlib.import_module("cutlass.cute")


def _stack(context: int = 1) -> list:
    """`inspect.stack`, without source."""
    import inspect

    frame, found = sys._getframe(1), []
    while frame:
        code = frame.f_code
        found.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
        frame = frame.f_back
    return found


def sweep(first: int | None) -> tuple[int | None, int, int]:
    """Kill every descendant. Returns the wait status of `first`, how many could not be killed, and how many besides
    `first` there were."""
    status, end = None, time.monotonic() + SWEEP_SECONDS
    kin = sum(pid != first for pid in descendants(os.getpid()))  # also ended ones, which nobody waited for
    while below := descendants(os.getpid()):
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        while True:
            try:
                pid, how = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            twins.discard(pid)  # one that has ended by itself
            status = how if pid == first else status
        if time.monotonic() > end:
            return status, len(below), kin
        time.sleep(0.001)
    return status, 0, kin


def descendants(pid: int) -> list[int]:
    """The pids of all processes below `pid`, but for `twins` and what is below them."""
    found, look = [], [pid]
    while look:
        parent = look.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
            lists = [Path(f"/proc/{parent}/task/{t}/children").read_text() for t in threads]
        except (FileNotFoundError, ProcessLookupError):  # it ended between two looks
            continue
        kids = [int(kid) for line in lists for kid in line.split() if int(kid) not in twins]
        found += kids
        look += kids
    return found


def become(job_fd: int, out: int, err: int, value_fd: int, *shared: int) -> None:
    """What the fork does; it never returns."""
    code = 1
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with os.fdopen(job_fd, "rb") as f:
            f.seek(0)
            job = json.load(f)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        code = carry_out(job, value_fd, shared)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def carry_out(job: dict, value_fd: int, shared: tuple[int, ...] = ()) -> int:
    """Set limits, then run a text (returns the exit code) or become another program (does not return)."""
    os.chdir(job["cwd"])
    limit(job["memory_bytes"])
    if job["argv"]:
        os.closerange(3, 1 << 16)
        os.execvpe(job["argv"][0], job["argv"], job["env"])
    os.environ.clear()
    os.environ.update(_set_by_packages | job["env"])
    sys.path[:0] = [""]
    sys.path += [p for p in job["path"] if p not in sys.path]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    import faulthandler

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # with it the parent asks where the text is, before it stops it
    if job["sealed"]:
        from helpers import sealed

        sealed.seal(daemons=job["sealed"] == "but for daemons")
    return run_text(job["text"], job["call"], value_fd, shared)


def limit(memory_bytes: int | None) -> None:
    """No core files, no file above FILE_BYTES, and `memory_bytes` of data beside what the process holds already."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lower(resource.RLIMIT_FSIZE, FILE_BYTES)
    if memory_bytes is not None:
        status = Path("/proc/self/status")  # what the preloaded packages hold does not count
        held = re.search(r"VmData:\s*(\d+) kB", status.read_text()) if status.exists() else None
        now = int(held[1]) * 1024 if held else 0
        lower(resource.RLIMIT_DATA, now + memory_bytes)


def lower(what: int, most: int) -> None:
    """Limit this process to `most`, or to what it is limited to already where that is less: only root may raise it."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def run_text(text: str, call: str | None, value_fd: int, shared: tuple[int, ...]) -> int:
    """Run a module text, then `call`; its value goes to `value_fd` as JSON. Returns the exit code."""
    import linecache
    import random
    import types

    random.seed()  # a fork would repeat its parent's numbers
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    module = types.ModuleType("cells")
    module.__file__, module.__slice__, module.__shared__ = os.path.abspath("cells.py"), text, shared
    sys.modules["cells"] = module
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    try:
        exec(compile(text, module.__file__, "exec"), module.__dict__)
        value = eval(call, module.__dict__) if call else None
        report, code = json.dumps({"value": value}, default=plain_data), 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        report = json.dumps({"error": f"SystemExit: {e.code}"})
    except BaseException as e:
        import traceback

        shown = traceback.TracebackException.from_exception(e)
        while shown.stack and shown.stack[0].filename == __file__:
            del shown.stack[0]
        print("".join(shown.format()), file=sys.stderr, end="")
        report, code = json.dumps({"error": f"{type(e).__name__}: {e}"}), 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the text may have closed or replaced it
            stream.flush()
    with os.fdopen(value_fd, "wb") as f:
        f.write(report.encode())
    return code


def plain_data(thing):
    """Tensors and arrays become lists, their scalars numbers."""
    if hasattr(thing, "tolist"):
        return thing.tolist()
    raise TypeError(f"the value holds a {type(thing).__name__}, which JSON cannot carry to the parent process")


def prctl(option: int, argument: int) -> None:
    """The system call of this name; raises OSError."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    if sys.argv[1] == "--once":  # where there is no zygote: one job, from stdin
        job = json.load(sys.stdin)
        load(sys.argv[2])
        sys.exit(carry_out(job, int(sys.argv[3]), tuple(map(int, sys.argv[4:]))))
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
