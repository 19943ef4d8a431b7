"""What runs beside an answer, in the child: makes its inputs, calls it, and hands over what it left, unjudged.

The parent (`helpers.checks`) puts a job into shared memory; `play` answers with frames in a second piece of it, one
a step, so that what came before a crash is known. Whatever an answer does to this process, only data leaves it.
"""

import inspect
import json
import linecache
import mmap
import os
import struct
import sys
import threading
import traceback
import types
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from . import ledger
from .interpreter import span

POISON = b"\xd5\xff"
"""What unwritten memory holds: not a number in every floating-point type, an unlikely number in every other."""

AROUND = b"\xd3\xff"
"""What lies around inputs and between their elements: as unlikely, and not taken for what nobody wrote."""

GUARD_BYTES = 1024
"""Poisoned memory before and behind each input and each tensor that an answer allocates."""

SPARSE_BYTES = 1 << 28
"""Inputs that span more are laid out in memory that is only touched where values lie."""

SHIPPED_BYTES = 1 << 30
"""Of a larger output only the shape is handed over."""

ORDERS = ("forward", "reverse", "shuffle")
FILE = os.path.abspath("answer.py")


# ---- values as JSON and bytes -------------------------------------------------------------------------------------


def encode(thing: Any, tensors: list[torch.Tensor]) -> Any:
    """`thing` as JSON data; its tensors are appended to `tensors` and stand there as numbers of that list."""
    if isinstance(thing, torch.Tensor):
        tensors.append(thing)
        return {"tensor": len(tensors) - 1}
    if isinstance(thing, dict):
        return {"dict": [[encode(k, tensors), encode(v, tensors)] for k, v in thing.items()]}
    if isinstance(thing, tuple | list):
        return {"list": [encode(x, tensors) for x in thing], "tuple": isinstance(thing, tuple)}
    if isinstance(thing, torch.dtype):
        return {"dtype": str(thing).removeprefix("torch.")}
    if thing is None or isinstance(thing, bool | int | float | str):
        return {"value": thing}
    if hasattr(thing, "item"):  # a numpy scalar
        return {"value": thing.item()}
    return {"other": type(thing).__name__}


@dataclass(frozen=True)
class Other:
    """Stands for an object that is no data: the name of its type."""

    name: str


def decode(data: Any, tensors: list) -> Any:
    """The inverse of `encode`."""
    match data:
        case {"tensor": i}:
            return tensors[i]
        case {"dict": pairs}:
            return {decode(k, tensors): decode(v, tensors) for k, v in pairs}
        case {"list": parts, "tuple": is_tuple}:
            return (tuple if is_tuple else list)(decode(x, tensors) for x in parts)
        case {"dtype": name}:
            return getattr(torch, name)
        case {"other": name}:
            return Other(name)
    return data["value"]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor, in order, as bytes on the CPU."""
    flat = tensor.detach().resolve_conj().contiguous().cpu().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def put(fd: int, message: dict, blobs: list[memoryview]) -> None:
    """Append a frame: the length of its JSON, the JSON, the bytes."""
    text = json.dumps(message | {"sizes": [len(b) for b in blobs]}).encode()
    for part in (struct.pack("<Q", len(text)), text, *blobs):
        part = memoryview(part)
        while part:
            part = part[os.write(fd, part[: 1 << 30]) :]


def frames(memory: memoryview):
    """The frames in `memory`, as (message, [bytes of each blob]); ends quietly where one is cut off or damaged."""
    at = 0
    while at + 8 <= len(memory):
        (length,) = struct.unpack_from("<Q", memory, at)
        end = at + 8 + length
        try:
            message = json.loads(bytes(memory[at + 8 : end]))
            sizes = message["sizes"]
        except (ValueError, KeyError, TypeError):
            return
        blobs = []
        for size in sizes:
            blobs.append(memory[end : end + size])
            end += size
        if end > len(memory):
            return
        yield message, blobs
        at = end


# ---- guarded memory -----------------------------------------------------------------------------------------------


def guarded(size: tuple, stride: tuple, dtype: torch.dtype, device: str, poison: bytes = POISON) -> torch.Tensor:
    """A poisoned tensor of this layout between poisoned guard zones; its storage holds nothing else."""
    item = dtype.itemsize
    reach = sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 if 0 not in size else 0
    nbytes = -(-reach * item // 16) * 16
    whole = nbytes + 2 * GUARD_BYTES
    if nbytes > SPARSE_BYTES and device == "cpu":
        memory = torch.frombuffer(mmap.mmap(-1, whole), dtype=torch.uint8)
    else:
        memory = torch.empty(whole, dtype=torch.uint8, device=device)
    for part in [memory] if nbytes <= SPARSE_BYTES else [memory[:GUARD_BYTES], memory[-GUARD_BYTES:]]:
        part.view(torch.int16).fill_(int.from_bytes(poison, "little", signed=True))
    data = memory[GUARD_BYTES : GUARD_BYTES + nbytes].view(dtype)
    return data.as_strided(size, stride)


def laid_out(values: torch.Tensor, stride: tuple, device: str) -> torch.Tensor:
    """`values` in guarded memory with these strides."""
    out = guarded(tuple(values.shape), stride, values.dtype, device, AROUND)
    with torch.no_grad():
        out.copy_(values)
    return out


def image(tensor: torch.Tensor) -> torch.Tensor:
    """All of a guarded tensor's memory, guard zones included; of a sparse one its two zones and its values."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    if memory.numel() - 2 * GUARD_BYTES <= SPARSE_BYTES:
        return memory.cpu()
    values = tensor.contiguous().reshape(-1).view(torch.uint8)
    return torch.cat([memory[:GUARD_BYTES], values, memory[-GUARD_BYTES:]]).cpu()


def strayed(tensor: torch.Tensor) -> list[int]:
    """[first, last] byte written outside a guarded tensor's elements, counted from its first; empty if none was."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    if memory.numel() - 2 * GUARD_BYTES > SPARSE_BYTES:
        return []
    low, high = span(tensor)
    end = GUARD_BYTES + high - low
    changed = (memory != _poisoned(memory)).cpu()
    changed[GUARD_BYTES:end] = False
    places = changed.nonzero().flatten().tolist()
    return [places[0] - GUARD_BYTES, places[-1] - GUARD_BYTES] if places else []


def _poisoned(memory: torch.Tensor) -> torch.Tensor:
    return torch.full_like(memory.view(torch.int16), int.from_bytes(POISON, "little", signed=True)).view(torch.uint8)


# ---- watching -----------------------------------------------------------------------------------------------------

ALLOCATES = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "new_full", "new_ones"),
    *("zeros", "zeros_like", "full", "full_like", "ones", "ones_like", "scalar_tensor"),
}


_ANSWERS = {"_local_scalar_dense": "item", "equal": "equal"}
"""Operators that launch nothing and give Python a value, with their names in Python."""


class Watch(ledger.Watch):
    """Notes the operators that an answer sends to PyTorch, and gives it guarded, poisoned memory."""

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


def _watch_values() -> None:
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
    """What the answer's kernels were launched with, and how the CUDA runner is to run them."""

    order: str = "forward"
    seed: int = 0
    races: bool = False
    kernels: list[str] = field(default_factory=list)
    to_compile: list[dict] = field(default_factory=list)

    @property
    def last(self) -> str:
        return self.kernels[-1] if self.kernels else ""


class RaceFound(RuntimeError):
    """Races that the CUDA runner reports."""


def _watch_cuda(launches: Launches, on_cpu: bool) -> None:
    from . import cuda

    plain = cuda.Kernel.__call__

    def __call__(self, grid, block, args=(), shared_mem=0, **named):
        launches.kernels.append(self.name)
        with _disable_current_modes():
            if not on_cpu:
                return plain(self, grid, block, args, shared_mem, **named)
            plain_order = {"order": launches.order, "seed": launches.seed}
            if launches.races and (found := self.check_races(grid, block, args, shared_mem, blocks=None)):
                raise RaceFound(str(found[0]))
            return plain(self, grid, block, args, shared_mem, **plain_order)

    cuda.Kernel.__call__ = __call__


def _watch_triton(launches: Launches, interpreted: bool) -> None:
    try:
        import triton.runtime
    except ImportError:
        return
    if not interpreted:
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


def _type_of(value) -> str:
    from . import reveal

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


# ---- the play -----------------------------------------------------------------------------------------------------


def play(shared: tuple[int, int]) -> None:
    """Read the job from the first file of `shared`, do it, append frames to the second."""
    job_fd, out = shared
    with mmap.mmap(job_fd, 0, access=mmap.ACCESS_READ) as memory:
        job, blobs = next(frames(memoryview(memory)))
        blobs = [bytearray(b) for b in blobs]
    for module in ("helpers.exercises", "helpers.checks"):
        sys.modules[module] = None  # an answer that imports them gets an ImportError
    if job.get("sanitized"):  # the sanitizer watches the allocations themselves, which guards would widen
        globals()["GUARD_BYTES"] = 0
    Play(job, blobs, out).run()


class Play:
    def __init__(self, job: dict, blobs: list, out: int):
        self.job, self.blobs, self.out = job, blobs, out
        self.gpu = job["mode"] == "gpu"
        self.device = "cuda" if self.gpu else "cpu"
        self.launches = Launches()
        self.pid = os.getpid()

    def put(self, blobs=(), **message) -> None:
        if os.getpid() != self.pid:  # a fork that the answer made: its frames would fall between ours
            os._exit(0)
        put(self.out, message, list(blobs))

    def run(self) -> None:
        at = {"case": -1}
        try:
            _watch_cuda(self.launches, not self.gpu)
            _watch_triton(self.launches, not self.gpu)
            _watch_values()
            self.put(event="import")
            answer = self.answer()
            for i, case in enumerate(self.job["cases"]):
                at = {"case": i}
                self.put(event="case", **at)
                self.case(answer, case, i)
            if speed := self.job.get("speed"):
                at = {"case": len(self.job["cases"])}
                self.put(event="case", **at)
                self.put(event="speed", seconds=self.timed(answer, speed))
            self.put(event="end", to_compile=self.launches.to_compile)
        except BaseException as error:
            self.put(event="error", **at, **described(error), kernel=self.launches.last)

    def answer(self):
        """Run the answer's text; returns what a case calls: the entry point, or the drive with it."""
        module = _module("answer", FILE, self.job["text"])
        entry = getattr(module, self.job["entry"])
        if not (drive := self.job["drive"]):
            return entry
        driver = getattr(_module("drive", os.path.abspath("drive.py"), drive["text"]), drive["name"])
        return lambda *inputs: driver(entry, *inputs)

    def inputs(self, case: dict, which: str) -> tuple[list[torch.Tensor], tuple]:
        """(guarded tensors, arguments) of a case. which: "inputs", or "again" for other values of the same shapes."""
        tensors = []
        for t in case["tensors"]:
            dtype = getattr(torch, t["dtype"])
            blob = self.blobs[t[which]]
            values = torch.frombuffer(blob, dtype=dtype) if blob else torch.empty(0, dtype=dtype)
            tensors.append(laid_out(values.reshape(t["size"]), tuple(t["stride"]), self.device))
        return tensors, decode(case[which], tensors)

    def case(self, answer, case: dict, number: int) -> None:
        runs = ORDERS if self.job["made_of"] == "cuda" and not self.gpu else ORDERS[:1]
        for order in runs:
            self.launches.order, self.launches.seed = order, self.job["seed"] + number
            tensors, arguments = self.inputs(case, "inputs")
            sparse = any(t.untyped_storage().nbytes() > SPARSE_BYTES for t in tensors)  # looking for races copies
            self.launches.races = order == "forward" and not self.gpu and not sparse
            self.hand_over(answer, arguments, tensors, case=number, order=order)
            if "again" in case and order == "forward":  # the same objects, at the same addresses, with other values
                others, arguments = self.inputs(case, "again")
                for mine, other in zip(tensors, others, strict=True):
                    mine.copy_(other)
                self.launches.races = False
                self.hand_over(answer, decode(case["again"], tensors), tensors, case=number, order="again")

    def hand_over(self, answer, arguments, tensors, **about) -> None:
        """One call, and all it left: outputs, inputs as they are now, what was counted."""
        driven, before = bool(self.job["drive"]), threading.active_count()
        watch = Watch()
        del self.launches.kernels[:]
        with ExitStack() as stack:
            traces = stack.enter_context(self.counting())
            if not driven:
                stack.enter_context(torch.no_grad() if self.job["made_of"] != "python" else nullcontext())
                stack.enter_context(watch)
            out = answer(*arguments)
        if self.gpu:
            self.put(event="returned", kernel=self.launches.last, **about)
            torch.cuda.synchronize()
        facts = dict(out[1]) if driven else {}
        out = out[0] if driven else out
        facts |= self.facts(traces, watch) if not driven else {}
        facts["kernels"] = list(self.launches.kernels)
        facts["threads"] = threading.active_count() - before
        found: list[torch.Tensor] = []
        tree = encode(out, found)
        memory = {t.untyped_storage().data_ptr() for t in tensors}
        facts["views"] = sum(t.untyped_storage().data_ptr() in memory for t in found)  # of inputs
        memory |= {t.untyped_storage().data_ptr() for t in watch.given}
        facts["foreign"] = sum(t.numel() > 0 and t.untyped_storage().data_ptr() not in memory for t in found)
        left = [_about(t) for t in found]
        blobs = [as_bytes(t) if t.numel() * t.element_size() <= SHIPPED_BYTES else memoryview(b"") for t in found]
        watched = GUARD_BYTES and self.job["made_of"] != "python"
        images = [image(t) for t in tensors] if watched else []
        stray = [s for t in watch.given if (s := strayed(t))] if watched else []
        blobs += [as_bytes(i) for i in images]
        self.put(blobs, event="left", outputs=tree, tensors=left, facts=facts, stray=stray, **about)

    @contextmanager
    def counting(self):
        """What kernels ask for, counted where the case runs on the CPU and somebody wants to know."""
        if self.gpu or self.job["made_of"] not in ("triton", "cuda"):
            yield None
        elif self.job["made_of"] == "triton":
            from . import interpreter

            with interpreter.record() as log:
                yield log
        elif self.job["trace"]:
            from . import cuda

            with cuda.record() as log:
                yield log
        else:
            yield None

    def facts(self, log, watch: Watch) -> dict:
        facts: dict[str, Any] = {"operators": watch.operators}
        if self.job["made_of"] == "torch":
            facts["launches"] = len(watch.launches)
            facts["bytes"] = ledger.total(watch.launches)
            return facts
        facts["launches"] = len(self.launches.kernels)
        if isinstance(log, list):
            facts["sectors"] = sum(t.sectors for t in log)
            facts["bytes"] = sum(t.bytes_read + t.bytes_written for t in log)
            facts["bank_ways"] = max([a.ways for t in log for a in t if a.space == "shared"], default=0.0)
        elif log is not None:
            facts["sectors"] = log.sectors
            facts["bytes"] = log.bytes_read + log.bytes_written
        return facts

    def timed(self, answer, speed: dict) -> list[float]:
        """[median, quartiles] in µs of the answer, then of its rival."""
        from . import timing

        driver = getattr(_module("rival", os.path.abspath("rival.py"), speed["text"]), speed["name"])
        rivals = {"answer": answer, "rival": driver}
        found = timing.compare(rivals, lambda: self.inputs(speed["case"], "inputs")[1], rounds=11)
        return [[m.value, m.low, m.high] for m in (found["answer"], found["rival"])]


def _module(name: str, file: str, text: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__, module.__slice__ = file, text
    sys.modules[name] = module
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), module.__dict__)
    return module


def _about(tensor: torch.Tensor) -> dict:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "size": list(tensor.shape),
        "device": tensor.device.type,
        "type": type(tensor).__name__,
    }


def described(error: BaseException) -> dict:
    """An exception as data: the names of its classes, its message, the answer's line that it came from."""
    root = error
    while root.__cause__ is not None and type(root).__name__ in ("InterpreterError", "CompilationError"):
        root = root.__cause__
    shown = traceback.TracebackException.from_exception(root)
    frames = [f for e in _chain(error) for f in traceback.extract_tb(e.__traceback__) if f.filename == FILE]
    last = frames[-1] if frames else None
    return {
        "classes": [f"{c.__module__}.{c.__qualname__}" for c in type(root).__mro__],
        "message": str(root),
        "line": last.lineno if last else getattr(root, "lineno", None),
        "text": (last.line if last else getattr(root, "text", None)) or "",
        "function": last.name if last else "",
        "traceback": "".join(shown.format())[-4000:],
    }


def _chain(error: BaseException | None) -> list[BaseException]:
    out = []
    while error is not None and error not in out:
        out.append(error)
        error = error.__cause__
    return out


def leaves(tree: Any) -> list:
    """The tensors in nested tuples, lists and dicts."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


if __name__ == "__main__":  # under compute-sanitizer: the job's file, then the file for what is left
    with open(sys.argv[1], "rb") as job_file, open(sys.argv[2], "wb") as left_file:
        play((job_file.fileno(), left_file.fileno()))
