"""Launch compiled CUDA C on the GPU: CuPy underneath, on torch's current stream."""

import ctypes
import os
import re
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch

from .. import machine
from .arguments import LaunchError, Value
from .nvrtc import Binary
from .tma import driver


class GpuModule:
    """A compiled binary loaded through CuPy."""

    def __init__(self, binary: Binary):
        import cupy

        if not runs(binary.arch, machine.here().arch):
            raise LaunchError(f"This was compiled for {binary.arch}, and the GPU here is {machine.here().arch}.")
        self._binary = binary
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "kernel.cubin")
        path.write_bytes(binary.cubin)
        self._module = cupy.RawModule(path=str(path))
        self._functions: dict = {}
        self._shared: dict[str, int] = {}
        self._prints = "vprintf" in binary.ptx

    def launch(self, name: str, grid, block, values: list[Value], shared_mem: int, early: bool = False) -> None:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._module.get_function(self._binary.lowered[name])
        if shared_mem + self._binary.kernels[name].shared_bytes > 48 << 10 and shared_mem > self._shared.get(name, 0):
            function.max_dynamic_shared_size_bytes = shared_mem
            self._shared[name] = shared_mem
        early = early and machine.here().capability >= (9, 0)
        printing = _printing() if self._prints and not torch.cuda.is_current_stream_capturing() else nullcontext()
        try:
            with _stream(name) as stream, printing:
                if early:
                    _launch_early(function.kernel.ptr, grid, block, values, shared_mem, stream.ptr)
                else:
                    raw = (np.frombuffer(v.bytes, _RAW.get(len(v.bytes)) or _raw_type(len(v.bytes))) for v in values)
                    function(grid, block, tuple(raw), shared_mem=shared_mem)
        except _driver_error() as error:
            if not str(error).startswith(_REFUSALS):
                raise
            tried = f"grid {grid}, block {block}, {shared_mem:,} bytes of dynamic shared memory"
            raise LaunchError(f"{name}: the GPU refused this launch ({tried}): {error}") from error

    def variable(self, name: str) -> torch.Tensor:
        import cupy

        pointer = self._module.get_global(name)
        found = cupy.ndarray((_size_in_ptx(self._binary.ptx, name),), cupy.uint8, pointer)
        return torch.as_tensor(found, device="cuda")


_RAW = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}


@cache
def _raw_type(size: int) -> np.dtype:
    """A numpy type of `size` bytes: CuPy passes numpy arrays of size 1 by value, whatever their layout."""
    return np.dtype([("bytes", "u1", (size,))])


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute; 6 is "programmatic stream serialization", whose value is a yes or no."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class _Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def _launch_early(function: int, grid, block, values: list[Value], shared_mem: int, stream: int) -> None:
    """A launch that may begin before the kernel before it on the stream has ended; CuPy has none."""
    held = [ctypes.create_string_buffer(v.bytes, len(v.bytes)) for v in values]
    arguments = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
    attribute = ctypes.pointer(_Attribute(id=6, value=1))
    config = _Config((*grid,), (*block,), shared_mem, stream, attribute, 1)
    if status := driver().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), arguments, None):
        raise _driver_error()(status)


def _size_in_ptx(ptx: str, name: str) -> int:
    m = re.search(rf"\.(?:const|global)\s+(?:\.align\s+\d+\s+)?\.[usbf](\d+)\s+{re.escape(name)}(?:\[(\d+)\])?", ptx)
    if not m:
        raise KeyError(f"The source has no __constant__ or __device__ variable {name!r}.")
    return int(m[1]) // 8 * int(m[2] or 1)


def runs(built: str, here: str) -> bool:
    """Whether code for one architecture runs on another: of the same generation and not newer; "sm_90a" on sm_90."""
    (major, minor), (our_major, our_minor) = (divmod(int(re.sub(r"\D", "", a)), 10) for a in (built, here))
    return major == our_major and (minor == our_minor if built.endswith("a") else minor <= our_minor)


_REFUSALS = tuple(
    f"CUDA_ERROR_{why}" for why in ("INVALID_VALUE", "LAUNCH_OUT_OF_RESOURCES", "INVALID_CLUSTER_SIZE", "NOT_SUPPORTED")
)
"""What the driver refuses before anything has run; other errors pass as they are."""


@cache
def _driver_error() -> type[Exception]:
    import cupy

    return cupy.cuda.driver.CUDADriverError


def _stream(name: str):
    """Torch's current stream as CuPy's: launches are ordered with torch's work, and captured in its graphs.

    LaunchError where CuPy has a stream of its own, entered with `with stream:`: torch, whose tensors these are, does
    not wait for it."""
    import cupy

    ours, theirs = torch.cuda.current_stream().cuda_stream, cupy.cuda.get_current_stream().ptr
    if theirs and theirs != ours:
        raise LaunchError(
            f"{name}: kernels are launched on torch's current stream, but CuPy's current stream is another: "
            f"with torch.cuda.stream(torch.cuda.ExternalStream({theirs})) makes it torch's too."
        )
    return _adopted(ours, torch.cuda.current_device())


@lru_cache(maxsize=64)
def _adopted(address: int, device: int):
    """A stream of torch's, for CuPy. Streams of torch's live as long as the process."""
    import cupy

    return cupy.cuda.Stream.from_external(_Protocol(address))


class _Protocol:
    """A stream by its address, for CuPy; older torch streams do not speak the protocol themselves."""

    def __init__(self, address: int):
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


@contextmanager
def _printing():
    """What a kernel prints appears in the cell that launched it: the C library's output is taken and passed on."""
    libc = ctypes.CDLL(None)
    torch.cuda.synchronize()
    libc.fflush(None)
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
            torch.cuda.synchronize()
            libc.fflush(None)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        sys.stdout.write(file.read().decode(errors="replace"))
