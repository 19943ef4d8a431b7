"""What a kernel's accesses were: by source line, the sectors and bank conflicts of its warps, and races."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from .abi import KINDS, SPACES


@dataclass(frozen=True)
class Access:
    """One line's accesses of one kind to one array. A request is one instruction of one warp.

    space: "global", "shared" or "constant". array: the argument's name (global memory). lanes: accesses by single
    threads. sectors: 32-byte pieces of global memory that the requests touch. ways: passes that shared memory needs
    for a request, 1.0 where no two lanes want different words of one bank.
    """

    line: int
    text: str
    kind: str
    space: str
    array: str
    bytes_per_lane: int
    requests: int
    lanes: int
    bytes: int
    sectors: int
    ways: float

    @property
    def sectors_per_request(self) -> float:
        """Mean sectors a request; for 32 lanes of 4 bytes, 4 is the least and 32 the most."""
        return self.sectors / self.requests if self.space == "global" else 0.0

    @property
    def efficiency(self) -> float:
        """Bytes that lanes wanted over bytes of the sectors fetched; above 1 where lanes share addresses."""
        return self.bytes / (32 * self.sectors) if self.sectors else 0.0


@dataclass(frozen=True)
class Trace:
    """All accesses of a launch (or of its first blocks), in the order of the source."""

    kernel: str
    accesses: tuple[Access, ...]

    def __iter__(self) -> Iterator[Access]:
        return iter(self.accesses)

    def line(self, number: int, kind: str | None = None) -> Access:
        """The one access on a line (of that kind); an error where there are none or several."""
        found = [a for a in self.accesses if a.line == number and kind in (None, a.kind)]
        if len(found) != 1:
            raise LookupError(f"Line {number} has {len(found)} kinds of access{f' ({kind})' if kind else ''}.")
        return found[0]

    def _total(self, what: str, *kinds: str) -> int:
        return sum(getattr(a, what) for a in self.accesses if a.space == "global" and (not kinds or a.kind in kinds))

    @property
    def bytes_read(self) -> int:
        """Bytes that threads asked for from global memory, before any cache."""
        return self._total("bytes", "load", "atomic")

    @property
    def bytes_written(self) -> int:
        """Bytes that threads stored to global memory."""
        return self._total("bytes", "store", "atomic")

    @property
    def sectors(self) -> int:
        """32-byte sectors of all requests to global memory."""
        return self._total("sectors")

    def table(self):
        """The accesses as a table to show."""
        from .. import show  # here, so that kernels run where IPython is not installed

        rows = [
            {
                "line": str(a.line) if a.line else "?",
                "source": a.text,
                "access": f"{a.kind}, {a.space}" + (f" {a.array}" if a.array else ""),
                "requests": a.requests,
                "bytes": a.bytes,
                "sectors per request": f"{a.sectors_per_request:.4g}" if a.space == "global" else "",
                "bank ways": f"{a.ways:.3g}" if a.space == "shared" else "",
            }
            for a in self.accesses
        ]
        return show.table(rows, caption=f"Memory accesses of {self.kernel}, by source line (counted on the CPU)")

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self.table()._repr_mimebundle_(include, exclude)

    def __str__(self) -> str:
        return str(self.table())


@dataclass(frozen=True)
class Race:
    """Two accesses to one address that nothing orders. `line` came later in this run, `other_line` before it.

    space: "shared" or "global"; array: the argument's name where it is one; times: how often these two lines met so.
    """

    line: int
    text: str
    kind: str
    other_line: int
    other_text: str
    other_kind: str
    space: str
    array: str
    thread: int
    other_thread: int
    block: tuple[int, int, int]
    other_block: tuple[int, int, int]
    times: int

    def __str__(self) -> str:
        doing = {"load": "reads", "store": "writes", "atomic": "updates atomically"}
        same = self.block == self.other_block
        where = f"of block {self.block}" if same else f"of block {self.block}, another of block {self.other_block}"
        what = f"`{self.array}`" if self.array else f"{self.space} memory"
        return (
            f"Race in {what}: line {self.line} {doing[self.kind]} (thread {self.thread} {where}) what line "
            f"{self.other_line} {doing[self.other_kind]} (thread {self.other_thread}), and nothing orders the two; "
            f"{self.times:,} such pairs.\n    {self.line}: {self.text}\n    {self.other_line}: {self.other_text}"
        )


def summary(kernel: str, accesses: Sequence, lines: dict[int, int], code: str, names: list[str]) -> Trace:
    """The runtime's rows, one an instruction, joined into one a line, kind and array."""
    joined: dict[tuple, list] = {}
    for a in accesses:
        space = {"array": "global", "module": "constant", "other": "global"}.get(SPACES[a.space], SPACES[a.space])
        array = names[a.range] if a.range >= 0 else ""
        joined.setdefault((lines.get(a.pc, 0), KINDS.index(KINDS[a.kind]), space, array), []).append(a)
    text = code.splitlines()
    out = []
    for (line, kind, space, array), rows in sorted(joined.items()):

        def total(field: str, rows=rows) -> int:
            return sum(getattr(r, field) for r in rows)

        out.append(
            Access(
                line,
                _text(text, line),
                KINDS[kind],
                space,
                array,
                max(r.size for r in rows),
                total("requests"),
                total("lanes"),
                total("bytes"),
                total("sectors") if space == "global" else 0,
                total("passes") / total("least_passes") if space == "shared" else 0.0,
            )
        )
    return Trace(kernel, tuple(out))


def races(found: Sequence, lines: dict[int, int], code: str, names: list[str]) -> tuple[Race, ...]:
    """The runtime's races, joined by pair of lines."""
    text = code.splitlines()
    joined: dict[tuple, Race] = {}
    for r in found:
        line, other = lines.get(r.pc, 0), lines.get(r.other_pc, 0)
        key = (min(line, other), max(line, other), r.space)
        if key in joined:
            joined[key] = replace(joined[key], times=joined[key].times + r.count)
            continue
        joined[key] = Race(
            line,
            _text(text, line),
            KINDS[r.kind],
            other,
            _text(text, other),
            KINDS[r.other_kind],
            "shared" if SPACES[r.space] == "shared" else "global",
            names[r.range] if r.range >= 0 else "",
            r.thread,
            r.other_thread,
            r.block.tuple(),
            r.other_block.tuple(),
            r.count,
        )
    return tuple(joined[k] for k in sorted(joined))


def _text(lines: list[str], number: int) -> str:
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


_logs: list[list[Trace]] = []


@contextmanager
def record() -> Iterator[list[Trace]]:
    """In CPU mode, trace every launch within the block: `with cuda.record() as log:` fills a list of `Trace`."""
    log: list[Trace] = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


def recording() -> list[Trace] | None:
    """The innermost open log."""
    return _logs[-1] if _logs else None
