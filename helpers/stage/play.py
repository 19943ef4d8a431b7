"""Do a job: make the inputs of each case, call the answer, and append a frame for each step."""

import linecache
import mmap
import os
import sys
import threading
import traceback
import types
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from .. import ledger
from . import guards
from .guards import SPARSE_BYTES, image, laid_out, strayed
from .parcels import as_bytes, decode, encode, frames, put
from .watching import (
    Launches,
    Watch,
    compile_ahead,
    only_capture,
    watch_cuda,
    watch_inspected,
    watch_triton,
    watch_values,
)

SHIPPED_BYTES = 1 << 30
"""Of a larger output only the shape is handed over."""

TRACED = ("sectors", "bytes", "bank_ways", "shared_requests", "load_requests", "load_sectors", "atomics")
"""Facts of CUDA kernels that only a trace of their accesses tells."""

ORDERS = ("forward", "reverse", "shuffle")
FILE = os.path.abspath("answer.py")


def play(shared: tuple[int, int]) -> None:
    """Read the job from the first file of `shared`, do it, append frames to the second."""
    job_fd, out = shared
    with mmap.mmap(job_fd, 0, access=mmap.ACCESS_READ) as told:
        job, blobs = next(frames(memoryview(told)))
        blobs = [bytearray(b) for b in blobs]
    for module in ("helpers.exercises", "helpers.checks"):
        sys.modules[module] = None  # an answer that imports them gets an ImportError
    if job.get("sanitized"):  # the sanitizer watches the allocations themselves, which guards would widen
        guards.GUARD_BYTES = 0
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
            if self.job["inspected"]:
                watch_inspected(self.launches)
            else:
                watch_cuda(self.launches, not self.gpu)
            watch_triton(self.launches, not self.gpu)
            watch_values()
            if not self.gpu and not self.job["drive"]:
                only_capture()
            self.put(event="import")
            answer = self.answer()
            if self.gpu and not self.job.get("sanitized"):
                compile_ahead(sys.modules["answer"], self.job["ahead"])
            for i, case in enumerate(self.job["cases"]):
                at = {"case": i}
                self.put(event="case", **at)
                self.case(answer, case, i)
            if speed := self.job.get("speed"):
                at = {"case": len(self.job["cases"])}
                self.put(event="case", **at)
                self.put(event="speed", seconds=self.timed(answer, speed))
            inspected = [kernel.data() for kernel in self.launches.inspected.values()]
            launches = {"to_compile": self.launches.to_compile, "to_launch": self.launches.to_launch}
            self.put(event="end", **launches, inspected=inspected)
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
        if self.job.get("counted"):
            self.in_a_range(answer, self.inputs(case, "inputs")[1])
            return
        ordered = self.job["made_of"] == "cuda" and not self.gpu and not self.job["inspected"]
        self.launches.for_gpu = case["mode"] != "cpu"
        self.returned: list[torch.Tensor] = []
        runs = ORDERS if ordered or self.job["same_bits"] else ORDERS[:1]
        for order in runs:
            self.launches.order, self.launches.seed = order, self.job["seed"] + number
            tensors, arguments = self.inputs(case, "inputs")
            sparse = any(t.untyped_storage().nbytes() > SPARSE_BYTES for t in tensors)  # looking for races copies
            self.launches.races = order == "forward" and not self.gpu and not sparse
            self.hand_over(answer, arguments, tensors, case["wave"], case=number, order=order)
            if self.job["idle"] and number == 0 and order == "forward":
                self.idle(answer, case)
            if "again" in case and order == "forward":  # the same objects, at the same addresses, with other values
                others, arguments = self.inputs(case, "again")
                for mine, other in zip(tensors, others, strict=True):
                    mine.copy_(other)
                self.launches.races = False
                self.hand_over(
                    answer, decode(case["again"], tensors), tensors, case["wave"], case=number, order="again"
                )

    def idle(self, answer, case: dict) -> None:
        """One call in which tensor cores multiply nothing."""
        from .. import interpreter

        tensors, arguments = self.inputs(case, "inputs")
        self.launches.races, self.launches.idle = False, True
        with interpreter.idle():
            self.hand_over(answer, arguments, tensors, 0, case=0, order="idle")
        self.launches.idle = False

    def in_a_range(self, answer, arguments) -> None:
        """One warm call that a profiler outside counts; what it returns was judged before."""
        with torch.no_grad():
            for _ in range(2):  # the first compiles
                answer(*arguments)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            answer(*arguments)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()

    def hand_over(self, answer, arguments, tensors, wave: int, **about) -> None:
        """One call, and all it left: outputs, inputs as they are now, what was counted."""
        driven, before = bool(self.job["drive"]), threads()
        watch = Watch()
        del self.launches.kernels[:]
        with ExitStack() as stack:
            traces = stack.enter_context(self.counting(wave))
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
        facts["threads"] = threads() - before
        found: list[torch.Tensor] = []
        tree = encode(out, found)
        given = {t.untyped_storage().data_ptr() for t in tensors}
        facts["views"] = sum(t.untyped_storage().data_ptr() in given for t in found)  # of inputs
        memory = given | {t.untyped_storage().data_ptr() for t in watch.given}
        facts["foreign"] = sum(t.numel() > 0 and t.untyped_storage().data_ptr() not in memory for t in found)
        mine = {t.untyped_storage().data_ptr() for t in self.returned if t.numel()} - given
        facts["reused"] = sum(t.untyped_storage().data_ptr() in mine for t in found)  # of what it returned before
        if not self.gpu:  # kept, so that its memory is not given out again
            self.returned += found
        facts["contiguous"] = all(t.is_contiguous() for t in found)
        left = [_about(t) for t in found]
        blobs = [as_bytes(t) if t.numel() * t.element_size() <= SHIPPED_BYTES else memoryview(b"") for t in found]
        watched = guards.GUARD_BYTES and self.job["made_of"] != "python"
        images = [image(t) for t in tensors] if watched else []
        stray = [s for t in watch.given if (s := strayed(t))] if watched else []
        blobs += [as_bytes(i) for i in images]
        self.put(blobs, event="left", outputs=tree, tensors=left, facts=facts, stray=stray, **about)

    @contextmanager
    def counting(self, wave: int):
        """What kernels ask for, counted where the case runs on the CPU and somebody wants to know."""
        if self.gpu or self.job["made_of"] not in ("triton", "cuda"):
            yield None
        elif self.job["made_of"] == "triton":
            from .. import interpreter

            with interpreter.record(wave) as log:
                yield log
        elif self.job["trace"]:
            from .. import cuda

            with cuda.record() as log:
                yield log
        else:
            yield None

    def facts(self, log, watch: Watch) -> dict:
        facts: dict[str, Any] = {"operators": watch.operators, "operator_bytes": ledger.total(watch.launches)}
        if self.job["made_of"] == "torch":
            facts["launches"] = len(watch.launches)
            facts["bytes"] = facts["operator_bytes"]
            return facts
        facts["launches"] = len(self.launches.kernels)
        facts["local_bytes"], facts["int_to_float"] = self.launches.local_bytes, self.launches.int_to_float
        if isinstance(log, list):
            facts["sectors"] = sum(t.sectors for t in log)
            facts["bytes"] = sum(t.bytes_read + t.bytes_written for t in log)
            shared = [a for t in log for a in t if a.space == "shared"]
            facts["bank_ways"] = max([a.ways for a in shared], default=0.0)
            facts["shared_requests"] = sum(a.requests for a in shared)
            loads = [a for t in log for a in t if (a.kind, a.space) == ("load", "global")]
            facts["load_requests"] = sum(a.requests for a in loads)
            facts["load_sectors"] = sum(a.sectors for a in loads)
            facts["atomics"] = sum(a.lanes for t in log for a in t if (a.kind, a.space) == ("atomic", "global"))
            facts["where"] = max(shared, key=lambda a: a.ways).text if shared else ""
        elif log is not None:
            facts["sectors"] = log.sectors
            facts["bytes"], facts["program_bytes"] = log.bytes, log.program_bytes
            facts["programs"] = log.programs
            if log.wave:
                facts["wave_bytes"] = log.wave_bytes
        return facts

    def timed(self, answer, speed: dict) -> list[float]:
        """[median, quartiles] in µs of the answer, then of its rival."""
        from .. import timing

        driver = getattr(_module("rival", os.path.abspath("rival.py"), speed["text"]), speed["name"])
        rivals = {"answer": answer, "rival": driver}
        found = timing.compare(rivals, lambda: self.inputs(speed["case"], "inputs")[1], rounds=11)
        return [[m.value, m.low, m.high] for m in (found["answer"], found["rival"])]


def threads() -> int:
    """How many threads there are. The one that watches tqdm's bars is not counted: where tqdm is installed,
    torch.compile starts it."""
    monitor = getattr(sys.modules.get("tqdm._monitor"), "TMonitor", None)
    return sum(type(thread) is not monitor for thread in threading.enumerate())


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
    frames = [f for e in _chain(error) for f in traceback.extract_tb(e.__traceback__) if f.filename == FILE]
    last = frames[-1] if frames else None
    return {
        "classes": [f"{c.__module__}.{c.__qualname__}" for c in type(root).__mro__],
        "message": str(root),
        "line": last.lineno if last else getattr(root, "lineno", None),
        "text": (last.line if last else getattr(root, "text", None)) or "",
    }


def _chain(error: BaseException | None) -> list[BaseException]:
    out = []
    while error is not None and error not in out:
        out.append(error)
        error = error.__cause__
    return out
