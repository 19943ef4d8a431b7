"""A small simulated GPU to practise timers on: launches return at once, and the time that passes is virtual.

Names are torch.cuda's where it has them: `synchronize()`, and `Event(enable_timing=True)` with `record()`,
`synchronize()`, `query()` and `elapsed_time()`. There is one stream. `clock()` stands for `time.perf_counter()`.
Nothing sleeps, and one seed gives one course of events, so a timer can be judged in milliseconds, on any machine.
"""

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

RECORD_US, SYNCHRONIZE_US, LOOK_US = 0.5, 2.0, 0.05
"""What the host needs to record an event, to return from waiting, and to read a clock or query an event."""

SLOWED = 12.0
"""How many times as long a call takes that is interrupted."""

IN_L2 = 4.0
"""How many times as fast a kernel is whose inputs all lie in L2."""


@dataclass(frozen=True)
class Array:
    """A simulated tensor: a size in bytes, and which one it is."""

    nbytes: int
    number: int


class Device:
    """One simulated GPU.

    seed: of noise and interruptions. launch_us: the host's part of a call. compile_us: what the host does in the first
    call of each kernel besides. noise: standard deviation of a call's time, relative. interrupted: one call in each
    run of that many takes SLOWED times as long; 0 for none. l2_bytes: a cache of the arrays used last; 0 for none.
    """

    def __init__(
        self,
        seed: int = 0,
        launch_us: float = 5.0,
        compile_us: float = 0.0,
        noise: float = 0.0,
        interrupted: int = 0,
        l2_bytes: int = 0,
    ):
        self._random = random.Random(seed)
        self._launch_us, self._compile_us, self._noise = launch_us, compile_us, noise
        self._interrupted, self._l2_bytes = interrupted, l2_bytes
        self._host = 1e6 * self._random.uniform(100, 1000)  # µs; when the machine was started is nobody's business
        self._free = self._host  # when all that was launched will be done
        self._held: OrderedDict[int, int] = OrderedDict()  # arrays in L2, the least recently used first
        self._numbers, self._calls, self._slow = itertools.count(), 0, -1

    def array(self, nbytes: int) -> Array:
        """A new array, not in L2."""
        return Array(nbytes, next(self._numbers))

    def kernel(self, us: float) -> Callable[..., None]:
        """A function of arrays that launches a kernel of `us` µs (with inputs from memory, undisturbed)."""
        compiled = False

        def call(*arrays: Array) -> None:
            nonlocal compiled
            self._host += self._launch_us + (0.0 if compiled else self._compile_us)
            compiled = True
            self._free = max(self._host, self._free) + us * self._pace(arrays)

        return call

    def _pace(self, arrays) -> float:
        """This call's time relative to an undisturbed one with inputs from memory."""
        every = self._interrupted
        if every and self._calls % every == 0:
            self._slow = self._calls + self._random.randrange(every)
        slowed = SLOWED if every and self._calls == self._slow else 1.0
        self._calls += 1
        noise = 1.0 + self._noise * max(-3.0, min(3.0, self._random.gauss(0.0, 1.0)))
        return self._from_memory(arrays) * noise * slowed

    def _from_memory(self, arrays) -> float:
        """1 where every array had to come from memory, 1 / IN_L2 where none had to."""
        total = sum(a.nbytes for a in arrays)
        if not self._l2_bytes or not total:
            return 1.0
        hits = 0
        for array in arrays:
            hits += array.nbytes if self._held.pop(array.number, None) else 0
            self._held[array.number] = array.nbytes
            while sum(self._held.values()) > self._l2_bytes:
                self._held.popitem(last=False)
        return 1.0 - hits / total * (1.0 - 1.0 / IN_L2)

    def clock(self) -> float:
        """The host's clock in seconds, like `time.perf_counter()`."""
        self._host += LOOK_US
        return self._host * 1e-6

    def synchronize(self) -> None:
        """Wait until the device has done all that was launched."""
        self._host = max(self._host, self._free) + SYNCHRONIZE_US

    def Event(self, enable_timing: bool = False) -> "Event":
        """A marker for the stream, by torch.cuda's name. As there, it keeps no time unless asked to."""
        return Event(self, enable_timing)


class Event:
    """A marker that the device stamps with its time when it comes to it in the stream."""

    def __init__(self, device: Device, enable_timing: bool):
        self._device, self._timed, self._at = device, enable_timing, None

    def record(self) -> None:
        """Put the marker into the stream."""
        self._device._host += RECORD_US
        self._at = max(self._device._host, self._device._free)

    def query(self) -> bool:
        """Whether the device has come to it; True where it was never recorded, as in torch."""
        self._device._host += LOOK_US
        return self._at is None or self._at <= self._device._host

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        if self._at is not None:
            self._device._host = max(self._device._host, self._at) + SYNCHRONIZE_US

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this marker to `end`.

        Raises RuntimeError where one of them keeps no time, was not recorded, or has not been reached yet.
        """
        if not (self._timed and end._timed):
            raise RuntimeError("Both events must be created with enable_timing=True.")
        if self._at is None or end._at is None:
            raise RuntimeError("Both events must be recorded before the time between them can be asked for.")
        if max(self._at, end._at) > self._device._host:
            raise RuntimeError("The device has not reached both events yet: synchronize first.")
        return (end._at - self._at) * 1e-3
