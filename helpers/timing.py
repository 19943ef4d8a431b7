"""Time callables on the GPU honestly.

A figure is the GPU's time for one call: the host is left out (lesson 01 shows its part). Calls run in bursts of a few
milliseconds with pauses between, so that the card does not heat up, and walk through several sets of inputs, together
larger than five times L2, so that no call finds its inputs in the cache. A burst of short calls is a CUDA graph; long
ones are queued behind a kernel that spins until the host has launched them all. Rivals take turns, in both orders,
and what is told is the median with its quartiles. Bursts that nobody reads come first, since the card may have idled
while this process waited for it.
Against Nsight Compute this was within 3% from 20 µs up and within 1 µs below (ids `timing.vs_ncu.*`).
"""

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from . import locks, machine, records, refusals, show
from .records import Measurement

BURST_US = 2000.0
"""A burst's aim: long enough that its two events (2 µs) do not count, short enough for steady clocks."""

WARM_S = 0.03
"""Seconds of bursts before those that count: the clock of an idle card is low, and takes some milliseconds to rise."""

ROUNDS = 21
MOST_SETS = 256
GRAPH_BELOW_US = 100.0
"""Calls longer than this are not captured: their launches hide behind the work, and a graph copies memory at half
the speed of a kernel (2.7 against 4.1 TB/s, H200, torch 2.11)."""

QUEUES, GUESSED_BELOW_US = 3, 50_000.0
"""Short queues that a call's length is guessed from, and the calls that are too long for that."""

SPREAD = 0.03
"""A kernel whose quartiles lie further apart than this share of its median gets a note."""

Inputs = Callable[[], tuple]


def measure(fn: Callable, inputs: Inputs | None = None) -> Measurement:
    """The time of `fn(*inputs())` in µs. See `compare`."""
    return compare({getattr(fn, "__name__", "call"): fn}, inputs)[getattr(fn, "__name__", "call")]


def compare(rivals: dict[str, Callable], inputs: Inputs | None = None, rounds: int = ROUNDS) -> dict[str, Measurement]:
    """The time of each rival in µs, measured in turns in this process.

    inputs: makes one fresh set of arguments; it is called as often as sets are needed. Rivals must not depend on
    what an earlier call left in their inputs. Without it rivals take no arguments, and their inputs may sit in L2.
    Errors: `machine.NotReady` in CPU mode; whatever a rival raises in its first call. A rival of torch.compile whose
    compilation fails, or never ends, raises `refusals.CannotCompile`: it is not timed as the eager function it was.
    """
    if not machine.gpu():
        raise machine.NotReady(
            "A GPU's time can only be measured on a GPU, and this is CPU mode.",
            "records.figures(measure, ids...) shows the recorded figure here",
        )
    import torch

    with locks.shared():  # what fills inputs is work on the GPU too
        first, bursts = inputs() if inputs else (), {}
    for name, fn in rivals.items():
        with refusals.strictly(name):
            fn(*first)  # it compiles here, where nobody waits for it
    with locks.shared():  # the rest of what prepares is work on the GPU, so it stays out of others' measurements
        sets, note = _input_sets(first, inputs)
        for name, fn in rivals.items():
            with refusals.strictly(name):
                bursts[name] = _Burst.of(fn, sets)
        torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in rivals}
    order, watch = list(rivals), _Watch()
    with locks.exclusive(", ".join(rivals)):
        _warm(bursts.values())
        began = time.monotonic()
        for i in show.progress(rounds, f"timing {', '.join(rivals)}"):
            for name in order if i % 2 == 0 else reversed(order):
                samples[name].append(bursts[name].run(watch if i % 8 == 4 else None))
            if i >= 8 and time.monotonic() - began > 20:
                break
        torch.cuda.synchronize()
        notes = [note, *watch.notes()]
    return {name: _summary(values, bursts[name].note, notes) for name, values in samples.items()}


def _warm(bursts: Iterable["_Burst"]) -> None:
    """Bursts as they will be timed, pauses and all, at least one of each: the card has then the clock it will keep."""
    began, bursts = time.monotonic(), list(bursts)
    while True:
        for burst in bursts:
            burst.run()
        if time.monotonic() - began > WARM_S:
            return


Rivals = dict[str, tuple[Callable[[], object], Callable[[object], object]]]


def queued(rivals: Rivals, rounds: int = ROUNDS, trace: bool = True) -> dict[str, Measurement]:
    """The GPU's time in µs for calls whose work runs on another framework's stream, where events cannot be set.

    Each rival is a pair: `start()` starts one call and returns something that `finish(it)` waits for. Rivals take turns
    in short queues of calls. The time of a call is that from its first kernel to the next call's, as the driver's trace
    tells it (CUPTI, through PyTorch's profiler); the first call of a queue is left out. Where that trace cannot be
    read, or is not to be, the host's clock is, and the note says so. Errors: `machine.NotReady` in CPU mode.
    Against `compare` see `timing.queued_vs_events.*`.
    """
    if not machine.gpu():
        raise machine.NotReady("A GPU's time can only be measured on a GPU, and this is CPU mode.", "use a GPU")
    calls = {}
    for name in rivals:
        _queue(rivals[name], 2)
    with locks.shared():
        for name in rivals:
            for _ in range(2):
                _queue(rivals[name], 2)
            us = _queue(rivals[name], 10)[0] * 1e5
            calls[name] = max(6, min(1000, int(1.5 * BURST_US / us)))
    turns = [name for i in range(rounds) for name in (rivals if i % 2 == 0 else reversed(rivals))]
    with locks.exclusive(", ".join(rivals)):
        watch = _Watch()
        try:
            if not trace:
                raise _NoTrace("no trace was asked for")
            how, samples = "the driver's trace", _traced(rivals, calls, turns, watch)
        except _NoTrace as why:
            how, samples = f"host's clock over a queue: {why}", _by_host(rivals, calls, turns, watch)
    return {name: _summary(values, how, watch.notes()) for name, values in samples.items()}


@cache
def ready_to_trace() -> None:
    """Load what the driver's trace needs, once in a process: seconds that `queued` would spend while others wait."""
    import torch

    torch.zeros(1, device="cuda")
    with _tracing():
        torch.cuda.synchronize()


@contextmanager
def _tracing() -> Iterator:
    """PyTorch's profiler around what is done with it, for kernels alone."""
    from torch.profiler import ProfilerActivity, profile

    seen = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
    with _unsaid():
        seen.__enter__()
    try:
        yield seen
    finally:
        with _unsaid():
            seen.__exit__(None, None, None)


@contextmanager
def _unsaid() -> Iterator[None]:
    """Without what the profiler of torch 2.13 reports of its own start and end, on the process's stderr."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class _NoTrace(RuntimeError):
    """The driver's trace tells nothing, or not what was expected."""


def _queue(rival: tuple[Callable, Callable], calls: int) -> tuple[float, float]:
    """Seconds by the host's clock until these calls are done, and until they are launched."""
    start, finish = rival
    began = time.perf_counter()
    for _ in range(calls):
        last = start()
    launched = time.perf_counter()
    finish(last)
    return time.perf_counter() - began, launched - began


def _traced(rivals: Rivals, calls: dict[str, int], turns: list[str], watch: "_Watch") -> dict[str, list[float]]:
    """µs a call in each turn, by the driver's trace of all kernels of this process."""
    import torch

    with _tracing() as seen:
        for i, name in enumerate(turns):
            _queue(rivals[name], calls[name])
            torch.cuda._sleep(0)  # a kernel that nothing else here uses: it ends the turn
            torch.cuda.synchronize()
            if i % 8 == 4:
                watch.look()
            time.sleep(0.005)
    on_gpu = [e for e in seen.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    found = [[]]
    for start, kernel in sorted((e.start_ns(), e.name()) for e in on_gpu):
        if "spin_kernel" in kernel:
            found.append([])
        else:
            found[-1].append(start)
    found.pop()
    if len(found) != len(turns):
        raise _NoTrace(f"{len(found)} of {len(turns)} turns are in the driver's trace")
    samples = {name: [] for name in rivals}
    for name, starts in zip(turns, found, strict=True):
        kernels, more = divmod(len(starts), calls[name])
        if more or not kernels:
            raise _NoTrace(f"{len(starts)} kernels for {calls[name]} calls in the driver's trace")
        firsts = starts[kernels::kernels]
        samples[name].append(statistics.median(b - a for a, b in itertools.pairwise(firsts)) * 1e-3)
    return samples


def _by_host(rivals: Rivals, calls: dict[str, int], turns: list[str], watch: "_Watch") -> dict[str, list[float]]:
    """µs a call in each turn: the difference of a long queue and a short one, so that neither the first launch nor the
    waiting has a part in it."""
    samples = {name: [] for name in rivals}
    for i, name in enumerate(turns):
        count, less = 2 * calls[name], max(2, calls[name] // 3)
        short, _ = _queue(rivals[name], less)
        time.sleep(0.005)
        long, launched = _queue(rivals[name], count)
        if i % 8 == 4:
            watch.look()
        samples[name].append((long - short) * 1e6 / (count - less))
        if launched > 0.9 * long:
            samples[name][-1] = launched * 1e6 / count  # the host is no faster than the GPU
        time.sleep(0.005)
    return samples


def ahead(calls: Iterable[Callable[[], object]]) -> None:
    """On a GPU, makes each call once, all in threads, so that what they compile is compiled at the same time.

    For kernels that are about to be timed or checked one after another; not for what times itself, such as an
    autotuner. In CPU mode nothing is compiled, and nothing is called. Errors: whatever a call raises.
    """
    if not machine.gpu():
        return
    import torch

    def ready():  # a thread begins without a CUDA context
        torch.cuda.set_device(torch.cuda.current_device())
        torch.zeros(1, device="cuda").add_(1)

    calls = list(calls)
    with show.working(f"compiling for {len(calls)} calls"), ThreadPoolExecutor(12, initializer=ready) as pool:
        list(pool.map(lambda call: call(), calls))
    torch.cuda.synchronize()


def ratio(a: Measurement, b: Measurement) -> Measurement:
    """How many times faster `a` is than `b`: b's time over a's, above 1 where a is faster.

    Its quartiles are the most and least that those of a and b allow. Where they include 1 the difference is no
    larger than the spread: `resolved` is False and the note says so.
    """
    if a.unit != b.unit:
        raise ValueError(f"a ratio needs one unit, not {a.unit} and {b.unit}")
    out = Measurement(b.value / a.value, "x", b.low / a.high, b.high / a.low, min(a.n, b.n))
    return out if out.resolved else replace(out, note="not resolved: the spread is larger than the difference")


@dataclass(frozen=True)
class Ceilings:
    """What this machine was measured to reach: bytes/s of a copy (read plus written) and of a read; FLOP/s of a
    large fp16 and fp32 matrix product; µs of an empty kernel. `where` names the machine."""

    copy: float
    read: float
    fp16_matmul: float
    fp32_matmul: float
    empty_kernel_us: float
    where: str


CEILINGS = (
    "machine.copy_bandwidth",
    "machine.read_bandwidth",
    "machine.fp16_matmul.8192",
    "machine.fp32_matmul.4096",
    "machine.empty_kernel",
)
_measured: dict[str, Measurement] = {}


def measure_ceilings() -> dict[str, Measurement]:
    """The ceilings by record id (`CEILINGS`): TB/s, TFLOP/s, µs. Measured once in a process, about 3 s."""
    if _measured:
        return dict(_measured)
    import torch

    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False  # the fp32 ceiling is CUDA cores', not tensor cores'
    elements = int(min(2**30, machine.here().free_bytes() // 24)) // 2

    def normal(*shape, dtype=torch.float16):
        return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)

    def matmul(n, dtype):
        us = measure(torch.matmul, lambda: (normal(n, n, dtype=dtype), normal(n, n, dtype=dtype)))
        return _rate(us, 2 * n**3 * 1e-6, "TFLOP/s")

    def copy(x, out):  # a kernel that reads and writes once; copy_ itself may become the driver's memcpy
        return torch.neg(x, out=out)

    def read(x):
        return x.view(-1, 4096).sum(1)

    elements -= elements % 4096
    _measured["machine.copy_bandwidth"] = _rate(
        measure(copy, lambda: (normal(elements), normal(elements))), 4e-6 * elements, "TB/s"
    )
    _measured["machine.read_bandwidth"] = _rate(measure(read, lambda: (normal(elements),)), 2e-6 * elements, "TB/s")
    _measured["machine.fp16_matmul.8192"] = matmul(8192, torch.float16)
    _measured["machine.fp32_matmul.4096"] = matmul(4096, torch.float32)
    one = torch.empty(1, device="cuda")
    _measured["machine.empty_kernel"] = measure(lambda: one.fill_(1.0))
    torch.backends.cuda.matmul.allow_tf32 = tf32
    return dict(_measured)


def ceilings() -> Ceilings:
    """This machine's ceilings, measured once in a process; in CPU mode the recorded ones."""
    if machine.gpu():
        found, where = measure_ceilings(), records.label(records.this_machine())
    else:
        found = records.recorded(*CEILINGS)
        where = f"recorded: {found.where}"
    copy, read, fp16, fp32, empty = (found[key].value for key in CEILINGS)
    return Ceilings(copy * 1e12, read * 1e12, fp16 * 1e12, fp32 * 1e12, empty, where)


def _rate(us: Measurement, work: float, unit: str) -> Measurement:
    """A time turned into a rate: `work` in units of 1e6 of what is counted, so that work / µs is in tera-units."""
    return Measurement(work / us.value, unit, work / us.high, work / us.low, us.n, us.note)


def _input_sets(first: tuple, inputs: Inputs | None) -> tuple[list[tuple], str]:
    """Sets of arguments, `first` among them, that together exceed five times L2, and a note where memory or number did
    not allow it."""
    import torch

    size = sum(t.numel() * t.element_size() for t in first if isinstance(t, torch.Tensor) and t.is_cuda)
    if not size:
        return [first], ""
    wanted = -(-5 * machine.here().l2_bytes // size) + 1
    room = int(machine.here().free_bytes() * 0.4 // size)
    count = max(1, min(wanted, MOST_SETS, room + 1))
    sets = [first, *(inputs() for _ in range(count - 1))]
    return sets, "" if count * size >= 5 * machine.here().l2_bytes else "inputs partly in L2"


@dataclass(frozen=True)
class _Burst:
    """`calls` calls of one rival, ready to run: as a CUDA graph, or launched one by one.

    `ahead` is how many cycles the GPU must be kept busy until the host has launched them all.
    """

    launch: Callable[[], object]
    calls: int
    ahead: int
    note: str = ""

    @classmethod
    def of(cls, fn: Callable, sets: list[tuple]) -> "_Burst":
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up on a side stream, as capture demands: compiles, allocates, selects
            for i in range(3):
                fn(*sets[i % len(sets)])
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            side.synchronize()
            began = time.perf_counter()
            first.record()
            for i in range(3):
                fn(*sets[i % len(sets)])
            last.record()
            host_us = (time.perf_counter() - began) * 1e6 / 3
            last.synchronize()
            guess = first.elapsed_time(last) * 1e3 / 3
            # That was the host's pace, perhaps, and others may have had the GPU in each gap that the host left: what
            # the GPU takes shows in queues, and the shortest of them is this call's own.
            for _ in range(QUEUES):
                if guess > GUESSED_BELOW_US:
                    break
                queue = 10 if guess < GRAPH_BELOW_US else 2
                torch.cuda._sleep(_cycles(queue * host_us))
                first.record()
                for i in range(queue):
                    fn(*sets[i % len(sets)])
                last.record()
                last.synchronize()
                guess = min(guess, first.elapsed_time(last) * 1e3 / queue)
        torch.cuda.current_stream().wait_stream(side)
        guess = max(guess, 1.0)
        calls = max(1, min(1000, int(BURST_US / guess)))
        calls = max(calls, min(len(sets), int(5000 / guess)))
        kept = [None] * len(sets)

        def call_all():
            for i in range(calls):
                # outputs rotate like the inputs: one that is reused at once would stay in L2
                kept[i % len(sets)] = fn(*sets[i % len(sets)])

        queued = cls(call_all, calls, _cycles(calls * host_us))
        if guess > GRAPH_BELOW_US:
            return queued
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call_all()
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            torch.cuda.synchronize()
            return replace(queued, note="launches included: not capturable in a CUDA graph")
        graph.replay()
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        host_us = (time.perf_counter() - began) * 1e6
        torch.cuda.synchronize()
        return cls(graph.replay, calls, max(200_000, _cycles(host_us)))

    def run(self, watch: "_Watch | None" = None) -> float:
        """One burst: µs a call. A pause as long follows: at full duty the card would settle at a lower clock."""
        import torch

        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(self.ahead)
        first.record()
        self.launch()
        last.record()
        if watch:
            watch.look()
        last.synchronize()
        us = first.elapsed_time(last) * 1e3
        time.sleep(min(0.005, us * 1e-6))
        return us / self.calls


def _cycles(host_us: float) -> int:
    """How long the GPU must spin for the host to be ahead of it: half as long again as the host takes, and 50 µs."""
    return min(int(2000 * (host_us * 1.5 + 50)), 40_000_000)


class _Watch:
    """What may spoil a figure: other processes on the GPU, clocks held down.

    Where NVML does not tell (WSL2, some containers), a note says that nobody looked.
    """

    def __init__(self):
        import pynvml

        self.nvml, self.reasons, self.clocks, self.blind, self.handle = pynvml, 0, [], "", None
        try:
            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(machine.here().uuid.encode())
        except pynvml.NVMLError as error:
            self.blind = str(error)

    def look(self) -> None:
        """Ask for the clock and what holds it, while the GPU is busy."""
        if self.blind:
            return
        try:
            self.reasons |= self.nvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle)
            self.clocks.append(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))
        except self.nvml.NVMLError as error:
            self.blind = str(error)

    def notes(self) -> list[str]:
        """What was seen, in clauses; nothing where all was well."""
        out = []
        names = {
            "power cap": self.nvml.nvmlClocksEventReasonSwPowerCap,
            "heat": self.nvml.nvmlClocksEventReasonSwThermalSlowdown
            | self.nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
            "power brake": self.nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        }
        try:
            held = [name for name, bits in names.items() if self.reasons & bits]
            if held and self.clocks:
                top = self.nvml.nvmlDeviceGetMaxClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)
                out.append(f"clock held by {', '.join(held)}: {min(self.clocks)} of {top} MHz")
            if self.handle:
                # counted, not told apart by pid: in a container NVML's are not this process's own
                others = len(self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)) - 1
                out += [f"{others} other process(es) on the GPU"] if others > 0 else []
        except self.nvml.NVMLError as error:
            self.blind = str(error)
        return [*out, f"clocks not watched: {self.blind}"] if self.blind else out


def _summary(samples: list[float], how: str, notes: list[str]) -> Measurement:
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    wide = f"spread {(high - low) / middle:.0%}" if high - low > SPREAD * middle else ""
    return Measurement(middle, "us", low, high, len(samples), "; ".join(filter(None, [how, wide, *notes])))
