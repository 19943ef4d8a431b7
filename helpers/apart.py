"""TVM, JAX, MAX and CuTe DSL, each in processes of their own; what keeps them from running here, and what mends it.

    apart.run("tvm", stages, 256, 512)      # stages: a function of this notebook that imports tvm inside
    apart.ahead("tvm", stages, 256, 512)    # begun, not waited for: that `run`, when it comes, takes what comes of it
    apart.settle()                          # nothing that was begun is at work any more: time a compiler alone

The text of the function travels, with what it needs, into a fork of a process that has the package imported, and a
value that JSON can carry comes back. So a compiler that crashes takes no notebook with it, JAX leaves the GPU's memory
to PyTorch, and none of them has to be installed for the rest of a lesson.
"""

import importlib.util
import os
import platform
import queue
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import cache

from . import child, machine, source

INSTALL = "make lab EXTRAS=all"
FFI = "0.1.14"
"""The last apache-tvm-ffi that TVM 0.27 works with: newer ones crash where a schedule is written down."""

_NAMES = {"tvm": "TVM", "jax": "JAX", "max": "MAX", "cutlass": "CuTe DSL"}
"""By the name under which each is imported."""
GLIBC, PYTHON = (2, 34), ((3, 10), (3, 14))
"""What the wheels of Mojo and MAX ask for: glibc from here on, and Python from the first to the last."""


class Failed(machine.Plain, RuntimeError):
    """A compiler refused, crashed or did not end; the message is its own, as far as it gave one."""


def run(package: str, fn: Callable, *args, seconds: float = 300, env: dict | None = None):
    """`fn(*args)` in a process of its own with `package` imported: "tvm", "jax", "max", "cutlass", or what is always
    there, "torch", and "inductor", which is PyTorch with its compiler.

    args: plain values, which `repr` can spell. env: environment variables for this call. Returns what JSON carries of
    the value. Raises `machine.NotReady` where the package cannot run here, and `Failed`.
    """
    from . import show  # it needs IPython, and the doctor asks for `problem` where that may be missing

    name = _NAMES.get(package, "PyTorch")
    if package in _NAMES and (lacking := problem(package)):
        raise lacking
    job = _job(package, fn, args, env)
    with show.working(f"{name}: {fn.__name__}"):
        begun = _begun.pop(repr(job), None)
        waits = begun is None or begun.cancel()  # its turn has not come: then it is ours
        done = child.run(**job, seconds=seconds) if waits else begun.result()
    if not done.ok:
        raise Failed(f"{name} did not get through {fn.__name__}: {_short(done.why())}")
    return done.value


def ahead(package: str, fn: Callable, *args, seconds: float = 300, env: dict | None = None) -> None:
    """Begin this `run` and do not wait: the next one of the same text, values and `env` takes what comes of it.

    Nothing is begun where the package cannot run here, which that `run` will say.
    """
    if package not in _NAMES or not problem(package):
        job = _job(package, fn, args, env)
        _begun[repr(job)] = later(lambda: child.run(**job, seconds=seconds))


def settle() -> None:
    """Wait until nothing that `ahead` and `later` have begun is at work, or still to come."""
    while _given:
        wait([_given.pop()])


def later(work: Callable[[], object]) -> Future:
    """Have `work()` done by a thread while this one goes on: as many at a time as there are cores, the first first."""
    future = Future()
    _given.append(future)
    _waiting.put((future, work))
    if len(_threads) < (os.cpu_count() or 1):
        _threads.append(threading.Thread(target=_serve, daemon=True))  # daemon: no end of a notebook waits for it
        _threads[-1].start()
    return future


_begun: dict[str, Future] = {}
_given: list[Future] = []
_waiting: queue.SimpleQueue = queue.SimpleQueue()
_threads: list[threading.Thread] = []


def _serve() -> None:
    while True:
        future, work = _waiting.get()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as why:
                future.set_exception(why)


def _job(package: str, fn: Callable, args: tuple, env: dict | None) -> dict:
    """What `child.run` is given."""
    call = f"{fn.__name__}({', '.join(map(repr, args))})"
    packages = package if package in _NAMES else ""
    return {"text": source.of(fn), "call": call, "packages": packages, "inductor": package == "inductor", "env": env}


def _short(said: str) -> str:
    """A compiler's error without the program that it prints in the middle."""
    return said if len(said) < 1000 else f"{said[:300]}\n...\n{said[-600:]}"


def warm(*packages: str) -> None:
    """Start loading those that are installed, by default TVM and JAX, without waiting for it; "torch" and "inductor"
    always are."""
    for package in packages or ("tvm", "jax"):
        if package not in _NAMES:
            child.warm(**{"inductor": True} if package == "inductor" else {})
        elif not problem(package):
            child.warm(packages=package)


def problem(package: str, *, gpu: bool = False) -> machine.NotReady | None:
    """What keeps `package` from running here; None where nothing does. gpu: JAX is to compile for a GPU, too."""
    if importlib.util.find_spec(package) is None:
        return _absent(package)
    known = {"tvm": _ffi, "jax": lambda: _plugins(gpu), "max": _compiler, "cutlass": lambda: None}
    return known[package]()


@cache
def jax_on_gpu() -> machine.NotReady | None:
    """What keeps JAX from using this machine's GPU; None where nothing does. JAX itself is asked, once: seconds."""
    if lacking := problem("jax", gpu=True):
        return lacking
    done = child.run("import jax", "jax.devices()[0].platform", packages="jax", seconds=120)
    if done.value == "gpu":
        return None
    said = re.findall(r"^\w+Error: (.+)", done.stderr, re.MULTILINE)
    return machine.NotReady(f"JAX cannot use the GPU here: {said[0] if said else done.why()}", INSTALL)


def _absent(package: str) -> machine.NotReady:
    name, kind = {"max": "Mojo with MAX"}.get(package) or _NAMES[package], platform.machine()
    if package in ("tvm", "max") and (platform.system(), kind) != ("Linux", "x86_64"):
        sentence = f"{name} is not installed, and has no wheel here for {platform.system()} on {kind}."
        return machine.NotReady(sentence, "run this lesson on Linux on x86-64; recorded outputs are shown here")
    if package == "max" and (old := _too_old()):
        return old
    return machine.NotReady(f"{name} is not installed.", INSTALL)


def _too_old() -> machine.NotReady | None:
    """What of this system the wheels of Mojo and MAX are not made for."""
    libc, version = platform.libc_ver()
    if libc == "glibc" and _numbers(version) < GLIBC:
        sentence = f"Mojo and MAX need glibc {_dotted(GLIBC)}, and this system has {version}."
        return machine.NotReady(sentence, "run this lesson on a newer system; recorded outputs are shown here")
    here, (first, last) = sys.version_info[:2], PYTHON
    if not first <= here <= last:
        sentence = f"Mojo and MAX need Python {_dotted(first)} to {_dotted(last)}, and this is {_dotted(here)}."
        return machine.NotReady(sentence, "make lab EXTRAS=all PYTHON=python3.12")
    return None


def _compiler() -> machine.NotReady | None:
    """MAX comes with Mojo's compiler; without it, neither can compile."""
    if importlib.util.find_spec("mojo") is None:
        return machine.NotReady("MAX is installed without mojo-compiler, which it compiles with.", INSTALL)
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _ffi() -> machine.NotReady | None:
    found = machine.installed("apache-tvm-ffi").get("apache-tvm-ffi", "")
    if not found or _numbers(found) <= _numbers(FFI):
        return None
    sentence = f"apache-tvm-ffi is {found}: from 0.1.15 on it crashes TVM 0.27 where a schedule is written down."
    return machine.NotReady(sentence, "python -m pip install apache-tvm-ffi==0.1.14.post1")


def _plugins(gpu: bool) -> machine.NotReady | None:
    """JAX's plugins for CUDA come in pairs, for one major version of CUDA each, and in the version of jaxlib."""
    import torch

    listed = {
        major: machine.installed(*(f"jax-cuda{major}-{part}" for part in ("plugin", "pjrt"))) for major in ("12", "13")
    }
    there = {major: found for major, found in listed.items() if found}
    cuda = (torch.version.cuda or "13").partition(".")[0]
    if len(there) > 1:
        wrong = next((major for major in there if major != cuda), "12")
        return machine.NotReady(
            f"JAX has plugins for two major versions of CUDA here, {' and '.join(there)}, and takes either.",
            f"python -m pip uninstall -y {' '.join(there[wrong])}",
        )
    if not there:
        lacks = machine.NotReady("JAX is here without its plugin for GPUs, so it can compile for CPUs alone.", INSTALL)
        return lacks if gpu else None
    [(major, found)] = there.items()
    if machine.gpu() and major != cuda:
        sentence = f"JAX's plugin is for CUDA {major}, and torch, whose libraries it would load, for CUDA {cuda}."
        right = f"jax-cuda{cuda}-plugin jax-cuda{cuda}-pjrt"
        return machine.NotReady(
            sentence, f"python -m pip uninstall -y {' '.join(found)} && python -m pip install {right}"
        )
    mine = machine.installed("jaxlib").get("jaxlib", "")
    if len(found) < 2 or any(_numbers(version) != _numbers(mine) for version in found.values()):
        said = ", ".join(f"{name} {version}" for name, version in found.items())
        wanted = f"jax-cuda{major}-plugin=={mine} jax-cuda{major}-pjrt=={mine}"
        return machine.NotReady(
            f"JAX and its plugin must be of one version: jaxlib {mine}, {said}.", f"python -m pip install {wanted}"
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
