"""Raw CUDA C: compile it with NVRTC (no GPU needed), launch it through CuPy, or run it on the CPU.

    module = cuda.RawModule(code=text)
    add = module.get_function("add")
    add((blocks,), (256,), (x, y, out, n))

The same constructor and call as `cupy.RawModule`, on torch tensors, on torch's current stream. In CPU mode the same
unmodified source is compiled with g++ and run for its values; `Kernel.trace` and `Kernel.check_races` work anywhere.
`tensor_map` describes a tensor to the copy engine (TMA) of sm_90 and later; a kernel gets it by value.
"""

from .arguments import BadArgument, LaunchError
from .faults import AssertFailed, Deadlock, KernelError, OutOfBounds
from .module import Kernel, RawModule
from .nvrtc import Binary, CompileError, Resources, compile, compile_all, tool  # noqa: A004  (cuda.compile: its name)
from .ptx import PtxModule
from .tma import TensorMap, tensor_map
from .trace import Access, Race, Trace, record

__all__ = [
    "Access",
    "AssertFailed",
    "BadArgument",
    "Binary",
    "CompileError",
    "Deadlock",
    "Kernel",
    "KernelError",
    "LaunchError",
    "OutOfBounds",
    "PtxModule",
    "Race",
    "RawModule",
    "Resources",
    "TensorMap",
    "Trace",
    "compile",
    "compile_all",
    "record",
    "tensor_map",
    "tool",
]
