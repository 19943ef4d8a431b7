"""`RawModule` and its kernels: CuPy's interface for CUDA C, on torch tensors, on a GPU or on the CPU."""

import ctypes
import sys
from collections.abc import Sequence
from functools import cached_property
from math import prod

import numpy as np
import torch

from .. import machine
from ..interpreter import span
from . import abi, cpu, faults, nvrtc
from . import trace as tracing
from .arguments import Declared, LaunchError, Value, bind, declared
from .gpu import GpuModule

MOST_THREADS = 1024
MOST_BLOCK = (1024, 1024, 64)
MOST_GRID = (2**31 - 1, 65535, 65535)
MOST_CLUSTER = 8
"""Blocks of a cluster that every card with clusters can run together."""


class RawModule:
    """CUDA C source with one or more kernels, built when the first is asked for.

    code: the source. options: NVRTC's, such as "-DTILE=16" or "-arch=sm_90a". name_expressions: C++ names to
    instantiate, for templates ("scale<float>") and for kernels that are not `extern "C"`.
    The same text runs on the GPU through CuPy and, in CPU mode, on the CPU.
    """

    def __init__(self, code: str, *, options: Sequence[str] = (), name_expressions: Sequence[str] = ()):
        self.code = code
        self.options = tuple(options)
        self.name_expressions = tuple(name_expressions or ())

    @cached_property
    def binary(self) -> nvrtc.Binary:
        """The source compiled for this machine's GPU (sm_90 in CPU mode): PTX, registers, shared memory, SASS."""
        return nvrtc.compile(self.code, options=self.options, name_expressions=self.name_expressions)

    def get_function(self, name: str) -> "Kernel":
        """The kernel `name`: an `extern "C"` name, or one of the name expressions."""
        if name not in self._names:
            plain = name in self.binary.lowered
            mend = (
                f'write extern "C" before __global__, or pass name_expressions=("{name}",)'
                if plain
                else f"there are: {', '.join(self._names) or 'none'}; templates are named in name_expressions"
            )
            raise KeyError(f"{name!r} is not a kernel that can be called by this name: {mend}.")
        return Kernel(self, name)

    def get_global(self, name: str) -> torch.Tensor:
        """The memory of a `__constant__` or `__device__` variable, as a uint8 tensor that shares it.

        `module.get_global("coef").view(torch.float32).copy_(values)` sets it.
        """
        if machine.gpu():
            return self._on_gpu.variable(name)
        address, size = self._on_cpu.variable(name)
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(n for n, entry in self.binary.lowered.items() if n in self.name_expressions or n == entry)

    @cached_property
    def _on_cpu(self) -> cpu.Library:
        return cpu.build(self.code, self._names, self.options)

    @cached_property
    def _on_gpu(self) -> "GpuModule":
        return GpuModule(self.binary)


class Kernel:
    """One kernel. `kernel(grid, block, args, shared_mem=0)` launches it."""

    def __init__(self, module: RawModule, name: str):
        self.module, self.name = module, name
        self.resources = module.binary.kernels[name]
        self._parameters = module.binary.parameters[name]
        self._declared: tuple[Declared, ...] = declared(module.code, name, len(self._parameters))
        self._accepted: set[tuple] = set()  # launches that were looked at
        if not machine.gpu():
            _ = module._on_cpu  # what the CPU runner cannot run is said here, not at the first launch

    def __repr__(self) -> str:
        return f"<kernel {self.name}({', '.join(f'{d.type} {d.name}'.strip() for d in self._declared)})>"

    def __call__(
        self,
        grid,
        block,
        args=(),
        shared_mem: int = 0,
        *,
        early: bool = False,
        order: str = "forward",
        seed: int = 0,
        idle: bool = False,
    ) -> None:
        """Launch on torch's current stream (GPU) or run to the end (CPU).

        grid, block: 1 to 3 numbers of blocks, of threads a block. args: torch tensors, numbers, numpy scalars,
        size-1 numpy arrays (structs, by value). shared_mem: bytes of dynamic shared memory.
        early: it may begin before the kernel before it on the stream has ended ("programmatic dependent launch", from
        sm_90 on; elsewhere it waits as always), and must call cudaGridDependencySynchronize() before it touches what
        that one reads or writes.
        order ("forward", "reverse", "shuffle") and seed change in which order the CPU runner takes threads: a kernel
        whose result changes lacks a barrier or an atomic. idle: the CPU runner's tensor cores (wmma) multiply nothing,
        and pass on what they add to. On a GPU all three mean nothing.
        """
        if order not in abi.ORDERS:
            raise ValueError(f"order={order!r}: it is one of {', '.join(abi.ORDERS)}.")
        grid, block, values = self.checked(grid, block, args, shared_mem, machine.device())
        if machine.gpu():
            self.module._on_gpu.launch(self.name, grid, block, values, shared_mem, early)
            return
        recording = tracing.recording()
        mode = abi.RUN if recording is None else abi.TRACE
        outcome = self._run(grid, block, values, shared_mem, mode, order, seed, idle=idle)
        if recording is not None:
            recording.append(self._trace(outcome, values))

    def checked(self, grid, block, args, shared_mem: int, device: str) -> tuple[tuple, tuple, list[Value]]:
        """The grid and the block with three sides each, and the arguments as the kernel's parameters are.

        Errors: `LaunchError` and `BadArgument` for what a GPU would refuse. device: "cuda" or "cpu", where arrays are.
        """
        grid, block = _three(grid, "grid"), _three(block, "block")
        if (grid, block, shared_mem) not in self._accepted:
            self._check_launch(grid, block, shared_mem)
            self._accepted.add((grid, block, shared_mem))
        return grid, block, bind(self.name, self._parameters, self._declared, args, device)

    def trace(self, grid, block, args=(), shared_mem: int = 0, blocks: int | None = 1) -> tracing.Trace:
        """Every memory access of the first `blocks` blocks (None: all), by source line; run on copies of `args`.

        It is always the CPU runner's, on a GPU machine too: accesses as the source writes them; those of a wmma
        fragment as NVIDIA's compiler makes them, in requests of 4 or 8 bytes a lane (see runner_wmma.h).
        """
        outcome, values = self._on_copies(grid, block, args, shared_mem, abi.TRACE, blocks or 0)
        return self._trace(outcome, values)

    def check_races(
        self, grid, block, args=(), shared_mem: int = 0, blocks: int | None = 4
    ) -> tuple[tracing.Race, ...]:
        """Pairs of accesses to one address, by different threads, that no barrier orders and of which one writes.

        Looks at the first `blocks` blocks (None: all), on copies of `args`; empty when there are none.
        """
        outcome, values = self._on_copies(grid, block, args, shared_mem, abi.RACES, blocks or 0)
        found = self.module._on_cpu.lines([pc for r in outcome.races for pc in (r.pc, r.other_pc)])
        return tracing.races(outcome.races, found, self.module.code, _array_names(values))

    def check_bounds(self, grid, block, args=(), shared_mem: int = 0, blocks: int | None = None) -> None:
        """Raise `OutOfBounds` at the first access outside the arrays in `args`, each from its view's lowest to its
        highest address; run on copies of them."""
        self._on_copies(grid, block, args, shared_mem, abi.RUN, blocks or 0)

    def _on_copies(self, grid, block, args, shared_mem: int, mode: int, blocks: int) -> tuple[cpu.Outcome, list[Value]]:
        copies: dict[int, torch.UntypedStorage] = {}
        grid, block, values = self.checked(grid, block, [_copy(a, copies) for a in args], shared_mem, "cpu")
        return self._run(grid, block, values, shared_mem, mode, "forward", 0, blocks), values

    def _run(self, grid, block, values, shared_mem, mode, order, seed, blocks=0, idle=False) -> cpu.Outcome:
        arrays = [v.array for v in values if isinstance(v.array, torch.Tensor)]
        ranges = [span(a) for a in arrays]
        library = self.module._on_cpu
        outcome = library.run(
            self.name,
            grid,
            block,
            [v.bytes for v in values],
            ranges,
            shared_bytes=shared_mem,
            strict=self._all_known(values),
            mode=mode,
            order=order,
            seed=seed,
            blocks=blocks,
            idle=idle,
            workers=1 if "printf" in self.module.code or order != "forward" else 0,
        )
        if outcome.printed:
            sys.stdout.write(outcome.printed)
        elements = [(low, high, a.element_size()) for (low, high), a in zip(ranges, arrays, strict=True)]
        faults.raise_for(outcome, library, self.name, self.module.code, _array_names(values), elements)
        return outcome

    def _all_known(self, values: list[Value]) -> bool:
        """Whether every address the kernel can form comes from an array argument: then any other is an error."""
        for value, parameter, spelled in zip(values, self._parameters, self._declared, strict=True):
            if isinstance(value.array, torch.Tensor):
                if spelled.type.count("*") > 1:
                    return False
            elif parameter.kind == "bytes" and parameter.size >= 8 and not _VECTOR.get(spelled.type):
                return False  # a struct may hold pointers
            elif spelled.pointer and any(value.bytes):
                return False
        return True

    def _trace(self, outcome: cpu.Outcome, values: list[Value]) -> tracing.Trace:
        lines = self.module._on_cpu.lines([a.pc for a in outcome.accesses])
        return tracing.summary(self.name, outcome.accesses, lines, self.module.code, _array_names(values))

    def _check_launch(self, grid: tuple[int, int, int], block: tuple[int, int, int], shared_mem: int) -> None:
        """Refuse what the driver refuses, with a sentence."""
        threads = block[0] * block[1] * block[2]
        for axis, g, most_g, b, most_b in zip("xyz", grid, MOST_GRID, block, MOST_BLOCK, strict=True):
            if not 1 <= g <= most_g:
                raise LaunchError(f"{self.name}: grid.{axis} is {g:,}; it may be 1 to {most_g:,}.")
            if not 1 <= b <= most_b:
                raise LaunchError(f"{self.name}: block.{axis} is {b:,}; it may be 1 to {most_b:,}.")
        most = self.resources.max_threads or MOST_THREADS
        if threads > most:
            why = " (its __launch_bounds__)" if self.resources.max_threads else ""
            raise LaunchError(f"{self.name}: a block of {block} has {threads:,} threads; it may have {most:,}{why}.")
        registers = (self.resources.registers + 7) // 8 * 8 * ((threads + 31) // 32 * 32)
        if registers > 65536:
            raise LaunchError(
                f"{self.name}: {threads:,} threads of {self.resources.registers} registers need {registers:,}, and an "
                f"SM has 65,536: use fewer threads, or __launch_bounds__({threads}), which limits the registers."
            )
        sides = self.resources.cluster
        if any(g % c for g, c in zip(grid, sides, strict=True)):
            raise LaunchError(f"{self.name}: a grid of {grid} is no whole number of clusters of {sides} blocks.")
        if prod(sides) > MOST_CLUSTER:
            raise LaunchError(
                f"{self.name}: a cluster of {sides} has {prod(sides)} blocks; it may have {MOST_CLUSTER}."
            )
        arch = self.module.binary.arch.rstrip("af")
        limit = machine.shared_limit(arch if arch in machine.SHARED_KB and not machine.gpu() else "")
        if shared_mem < 0 or self.resources.shared_bytes + shared_mem > limit:
            raise LaunchError(
                f"{self.name}: {shared_mem:,} bytes of dynamic and {self.resources.shared_bytes:,} of static shared "
                f"memory; a block may have {limit:,} in all."
            )


_VECTOR = dict.fromkeys(
    [f"{t}{n}" for t in ("float", "int", "uint", "double", "half", "__half") for n in (2, 3, 4)], True
)


def _array_names(values: list[Value]) -> list[str]:
    return [v.name for v in values if isinstance(v.array, torch.Tensor)]


def _three(value, what: str) -> tuple[int, int, int]:
    numbers = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not 1 <= len(numbers) <= 3 or not all(isinstance(n, int | np.integer) for n in numbers):
        raise LaunchError(f"{what} is {value!r}: it is 1 to 3 integers, such as (n,) or (n, m).")
    return (*(int(n) for n in numbers), *(1,) * (3 - len(numbers)))


def _copy(arg, copies: dict[int, torch.UntypedStorage]):
    """A copy of a tensor on the CPU that keeps its strides and offset; tensors that share memory share a copy."""
    if hasattr(arg, "__cuda_array_interface__") and not isinstance(arg, torch.Tensor):
        arg = torch.as_tensor(arg, device="cuda")
    if not isinstance(arg, torch.Tensor):
        return arg
    storage = arg.untyped_storage()
    if storage.data_ptr() not in copies:
        copies[storage.data_ptr()] = storage.cpu() if arg.is_cuda else storage.clone()
    out = torch.empty(0, dtype=arg.dtype)
    return out.set_(copies[storage.data_ptr()], arg.storage_offset(), arg.size(), arg.stride())
