"""What an answer sends to PyTorch, and what it launches, seen from outside while it runs."""

import inspect
import math
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from .. import ledger
from .guards import guarded

ALLOCATES = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "new_full", "new_ones"),
    *("zeros", "zeros_like", "full", "full_like", "ones", "ones_like", "scalar_tensor"),
}


_INT_TO_FLOAT = re.compile(r"\bcvt\.(?:[a-z]+\.)*b?f(?:16|32|64)\.[us]\d+\b")
"""In PTX: machine code has such conversions of its own, in divisions of integers."""

_ANSWERS = {"_local_scalar_dense": "item", "equal": "equal"}
"""Operators that launch nothing and give Python a value, with their names in Python."""


class Watch(ledger.Watch):
    """Notes the operators that an answer sends to PyTorch, and gives it guarded, poisoned memory."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile compiles under it; otherwise it would quietly leave every function as it is."""
        return True

    def __init__(self):
        super().__init__()
        self.operators: list[str] = []
        self.given: list[torch.Tensor] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if operator is torch.ops.aten.fill_.Tensor:
            name = "copy_"  # of one element
        before = len(self.launches)
        out = super().__torch_dispatch__(operator, types, args, kwargs)
        if name in ALLOCATES:
            del self.launches[before:]
            if out.layout == torch.strided and out.device.type in ("cpu", "cuda"):
                plain, out = out, guarded(tuple(out.shape), out.stride(), out.dtype, out.device.type)
                if "empty" not in name:
                    out.copy_(plain)
                self.given.append(out)
        elif len(self.launches) > before:  # what only makes a view launches nothing
            self.operators.append(name)
        elif name in _ANSWERS:
            self.operators.append(_ANSWERS[name])
        return out


def only_capture() -> None:
    """torch.compile captures graphs, with all that may go wrong there, and runs them operator by operator: what
    Inductor would make of them for a CPU is not what a GPU gets, and takes a compiler many seconds. A function that was
    captured anew until torch.compile gives up is an error, where it would else be run as if it had not been compiled.
    """
    plain = torch.compile

    def compile(model=None, **named):
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # here, since it takes seconds to load
        return plain(model, **{**named, "backend": "eager", "mode": None, "options": None})

    torch.compile = compile


def watch_values() -> None:
    """Note as an operator what takes values out of tensors, or puts them into others, where no watch sees it."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    def noting(owner, attribute: str, name: str, only_of_tensors: bool = False) -> None:
        plain = getattr(owner, attribute)

        def noted(*args, **named):
            watch = _get_current_dispatch_mode()  # none while torch, a launch or this file is at work
            given = [a for a in (*args, *named.values()) if isinstance(a, list | tuple)]
            if isinstance(watch, Watch) and (not only_of_tensors or leaves(given)):
                watch.operators.append(name)
            return plain(*args, **named)

        setattr(owner, attribute, noted)

    noting(torch._tensor_str, "_str", "repr")
    for name in ("tolist", "numpy", "__array__"):
        noting(torch.Tensor, name, name)
    noting(torch, "tensor", "stack", only_of_tensors=True)
    noting(torch, "as_tensor", "stack", only_of_tensors=True)
    noting(torch.Tensor, "new_tensor", "stack", only_of_tensors=True)


def _watched(modes: list, function):
    """`function`, an answer's own that a launch calls back, under the watch that is set aside for the launch."""

    def call(*args):
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return function(*args)

    return call if callable(function) else function


@dataclass
class Launches:
    """What the answer's kernels were launched with, and how the CUDA runner is to run them. for_gpu: whether a GPU is
    given this case too. idle: products of tensor cores are left out."""

    order: str = "forward"
    seed: int = 0
    for_gpu: bool = True
    races: bool = False
    idle: bool = False
    local_bytes: int = 0
    int_to_float: int = 0
    kernels: list[str] = field(default_factory=list)
    to_compile: list[dict] = field(default_factory=list)
    to_launch: list[dict] = field(default_factory=list)
    inspected: dict[tuple, "Inspected"] = field(default_factory=dict)

    @property
    def last(self) -> str:
        return self.kernels[-1] if self.kernels else ""


class RaceFound(RuntimeError):
    """Races that the CUDA runner reports."""


def watch_cuda(launches: Launches, on_cpu: bool) -> None:
    from .. import cuda

    plain = cuda.Kernel.__call__

    def __call__(self, grid, block, args=(), shared_mem=0, **named):
        launches.kernels.append(self.name)
        launches.local_bytes = max(launches.local_bytes, self.resources.stack_bytes)
        ptx = self.module.binary.ptx
        launches.int_to_float = max(launches.int_to_float, len(_INT_TO_FLOAT.findall(ptx)))
        with _disable_current_modes():
            if not on_cpu:
                return plain(self, grid, block, args, shared_mem, **named)
            how = {"order": launches.order, "seed": launches.seed, "idle": launches.idle}
            if launches.races and (found := self.check_races(grid, block, args, shared_mem, blocks=None)):
                raise RaceFound(str(found[0]))
            return plain(self, grid, block, args, shared_mem, **how)

    cuda.Kernel.__call__ = __call__


@dataclass
class Inspected:
    """A kernel that was to be launched, with the most that any launch asked for."""

    kernel: Any
    threads: int = 0
    shared_bytes: int = 0

    def data(self) -> dict:
        """As `exercises.Built` takes it."""
        binary, resources = self.kernel.module.binary, self.kernel.resources
        return {
            "kernel": self.kernel.name,
            "arch": binary.arch,
            "ptx": binary.ptx,
            "sass": binary.sass(self.kernel.name),
            "log": binary.log,
            "registers": resources.registers,
            "spill_bytes": resources.spill_bytes,
            "shared_bytes": self.shared_bytes,
            "threads": self.threads,
        }


def watch_inspected(launches: Launches) -> None:
    """Kernels of what only some GPUs have: a launch is checked and noted, and nothing runs."""
    from .. import cuda, machine

    plain_map = cuda.tensor_map

    def tensor_map(tensor, box, **named):
        try:
            return plain_map(tensor, box, **named)
        except machine.NotReady:  # it was checked, and only a driver makes one
            return cuda.TensorMap(tensor, tuple(box), bytes(128))

    def __call__(self, grid, block, args=(), shared_mem=0):
        launches.kernels.append(self.name)
        with _disable_current_modes():
            _, block, _ = self.checked(grid, block, args, shared_mem, "cpu")
        key = (self.name, self.module.code, self.module.options)
        seen = launches.inspected.setdefault(key, Inspected(self))
        seen.threads = max(seen.threads, math.prod(block))
        seen.shared_bytes = max(seen.shared_bytes, self.resources.shared_bytes + shared_mem)

    cuda.RawModule._on_cpu = None  # it is not built for the CPU
    cuda.tensor_map = tensor_map
    cuda.Kernel.__call__ = __call__


def watch_triton(launches: Launches, interpreted: bool) -> None:
    try:
        import triton.runtime
    except ImportError:
        return
    if not interpreted:
        # a descriptor that a kernel makes lies in memory that Triton asks for, and an answer may not say from where
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
        plain_run = triton.runtime.JITFunction.run

        def run(self, *args, **named):
            if not named.get("warmup"):
                launches.kernels.append(self.fn.__name__)
            with _disable_current_modes() as modes:
                return plain_run(self, *args, **named | {"grid": _watched(modes, named.get("grid"))})

        triton.runtime.JITFunction.run = run
        return
    from triton.runtime.interpreter import GridExecutor

    plain = GridExecutor.__call__

    def __call__(self, *args, **named):
        launches.kernels.append(self.fn.__name__)
        with _disable_current_modes() as modes:
            self.grid = _watched(modes, self.grid)
            wanted = _to_compile(self, args, named)
            if wanted not in launches.to_compile:
                launches.to_compile.append(wanted)
            alike = launches.for_gpu and _to_launch(self, args, named)
            if alike and alike not in launches.to_launch:
                launches.to_launch.append(alike)
            return plain(self, *args, **named)

    GridExecutor.__call__ = __call__


def _to_compile(executor, args, named) -> dict:
    """One launch as `reveal` takes it: the kernel's name, its arguments' types, its constants, its options."""
    bound = inspect.getcallargs(executor.fn, *args, **{k: v for k, v in named.items() if k in executor.arg_names})
    constants = {n: v for n, v in bound.items() if n in executor.constexprs or v is None}
    types = {n: _type_of(v) for n, v in bound.items() if n not in constants}
    return {
        "kernel": executor.fn.__name__,
        "types": types,
        "constants": {n: _spelled(v) for n, v in constants.items()},
        "num_warps": named.get("num_warps") or 4,
        "num_stages": named.get("num_stages") or 3,
    }


def _to_launch(executor, args, named) -> dict | None:
    """One launch as `compile_ahead` takes it, arguments in place of which others would be compiled alike; None where
    one of them has no such place."""
    bound = inspect.getcallargs(executor.fn, *args, **{k: v for k, v in named.items() if k in executor.arg_names})
    constants = {n: _spelled(v) for n, v in bound.items() if n in executor.constexprs or v is None}
    examples = {n: _example(v) for n, v in bound.items() if n not in constants}
    if None in examples.values() or "?" in constants.values():
        return None
    options = {n: v for n, v in named.items() if n not in executor.arg_names and n not in ("grid", "warmup")}
    if not all(isinstance(v, int | str | None) for v in options.values()):
        return None
    return {"kernel": executor.fn.__name__, "examples": examples, "constants": constants, "options": options}


def _example(value):
    """What Triton's compiler asks of an argument: a tensor's dtype and whether it lies at 16 bytes; of an integer
    whether it is 1, a multiple of 16, wider than 32 bits."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "address": value.data_ptr() % 16}
    if isinstance(value, bool) or value == 1:
        return value
    if isinstance(value, int):
        wide = next((w for w in (2**63, 2**31) if value >= w or value < -w), 0)
        return wide + (16 if value % 16 == 0 else 3)
    return 0.5 if isinstance(value, float) else None


class _Example:
    """A tensor, as Triton's compiler looks at one."""

    def __init__(self, dtype: str, address: int):
        self.dtype, self.address = getattr(torch, dtype), address

    def data_ptr(self) -> int:
        return self.address


MOST_AHEAD = 32
"""Launches that are compiled ahead."""


def compile_ahead(module, launches: list[dict], threads: int = 8) -> None:
    """Compile kernels of `module` as they are going to be launched, side by side; a launch then finds them. What does
    not compile says so when it is launched."""
    if len(launches) < 2:
        return
    import triton

    def one(launch: dict) -> None:
        with suppress(Exception):
            kernel = getattr(module, launch["kernel"])
            while not isinstance(kernel, triton.runtime.JITFunction):
                kernel = kernel.fn  # inside @triton.autotune, @triton.heuristics
            given = {n: _Example(**e) if isinstance(e, dict) else e for n, e in launch["examples"].items()}
            constants = {n: eval(text, {"triton": triton}) for n, text in launch["constants"].items()}
            kernel.warmup(**given, **constants, grid=(1,), **launch["options"])

    triton.runtime.driver.active.get_current_device()  # what is made once, made by one thread
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, launches[:MOST_AHEAD]))


def _type_of(value) -> str | dict:
    from .. import reveal

    try:
        return reveal.type_of(value)
    except TypeError:
        return "?"


def _spelled(value) -> str:
    """A constant as an expression; "?" where it has none."""
    value = getattr(value, "value", value)  # inside tl.constexpr
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if type(value) is tuple and "?" not in (parts := [_spelled(v) for v in value]):
        return f"({''.join(f'{part}, ' for part in parts)})"
    name = getattr(value, "name", "")  # tl.float16
    return f"triton.language.dtype({name!r})" if type(value).__name__ == "dtype" else "?"


def leaves(tree: Any) -> list:
    """The tensors in nested tuples, lists and dicts."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
