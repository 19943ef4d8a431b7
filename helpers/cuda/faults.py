"""What can go wrong in a kernel on the CPU, as exceptions that name the reader's line."""

from .cpu import READ, Library, Outcome

(
    _,
    OUT_OF_BOUNDS,
    MISALIGNED,
    DEADLOCK,
    MIXED,
    NOT_IN_MASK,
    ASSERTION,
    TRAP,
    DIVISION,
    SEGMENTATION,
    INTERRUPTED,
) = range(11)


class KernelError(RuntimeError):
    """A kernel that failed while it ran: the reader's `line` (0: unknown), the `block` and `thread` it happened in."""

    def __init__(self, message: str, line: int = 0, block=(0, 0, 0), thread=(0, 0, 0)):
        super().__init__(message)
        self.line, self.block, self.thread = line, block, thread

    def _render_traceback_(self):
        return [str(self)]


class OutOfBounds(KernelError, IndexError):
    """An access outside every array that the kernel was given."""


class Deadlock(KernelError):
    """Threads wait at a barrier that others never reach."""


class AssertFailed(KernelError):
    """A device-side assert that does not hold."""


def raise_for(
    outcome: Outcome, library: Library, kernel: str, code: str, names: list[str], sizes: list
) -> None:
    """Raise what `outcome` reports; nothing when the kernel ran to its end.

    names: the array arguments' names; sizes: their (low, high) addresses and bytes an element.
    """
    f = outcome.failure
    if f.fault == 0:
        return
    if f.fault == INTERRUPTED:
        raise KeyboardInterrupt
    line = f.line or library.lines([f.pc]).get(f.pc, 0)
    lines = code.splitlines()
    quote = f"\n    {lines[line - 1].strip()}" if 0 < line <= len(lines) else ""
    at = f"{kernel}, line {line}" if line else kernel
    where = f"thread {f.thread.tuple()} of block {f.block.tuple()}"
    kind, message = KernelError, ""
    does = {0: "reads", 1: "writes"}.get(f.kind, "updates")
    if f.fault == OUT_OF_BOUNDS:
        kind, message = OutOfBounds, f"{where} {does} {f.size} bytes {_relative(f, names, sizes)}."
    elif f.fault == MISALIGNED:
        message = f"{where} {does} {f.size} bytes at an address that is no multiple of {f.size}: a GPU refuses that."
    elif f.fault == DEADLOCK:
        kind = Deadlock
        message = f"{where} waits for lanes of its warp that are named in the mask and never reach this call."
        if f.other_line:
            message = (
                message[:-1]
                + f"; {f.waiting} threads of its block wait at __syncthreads() in line {f.other_line}."
            )
    elif f.fault == MIXED:
        kind = Deadlock
        what = "__syncthreads()" if f.text == b"block" else "*_sync calls"
        whose = "one block" if f.text == b"block" else "one warp"
        message = f"threads of {whose} meet at different {what} (lines {line} and {f.other_line}): undefined on a GPU."
    elif f.fault == NOT_IN_MASK:
        message = (
            f"{where} (lane {_lane(f)}) calls a *_sync function with a mask that leaves out its own lane."
        )
    elif f.fault == ASSERTION:
        kind, message = AssertFailed, f"{where}: assertion `{f.text.decode(errors='replace')}` failed."
    elif f.fault == TRAP:
        message = f"{where} called __trap()."
    elif f.fault == DIVISION:
        message = f"{where} divides an integer by zero: the result is undefined on a GPU."
    elif f.fault == SEGMENTATION:
        message = (
            f"{where} touches memory that is not there ({f.address:#x}), or its local arrays are too large."
        )
    raise kind(f"{at}: {message}{quote}", line, f.block.tuple(), f.thread.tuple())


def _lane(f) -> str:
    return f"{f.thread.x % 32}" if f.thread.y == f.thread.z == 0 else "its own"


def _relative(f, names: list[str], sizes: list) -> str:
    """The address in terms of the nearest array: "16 bytes past the end of `x` (element 1028 of 1024)"."""
    if f.range < 0 or not sizes:
        return f"at address {f.address:#x}, which belongs to no argument"
    low, high, item = sizes[f.range]
    name = f"`{names[f.range]}`" if names[f.range] else f"array argument {f.range}"
    count = (high - low) // item
    index = (f.address - low) // item
    if f.address < low:
        if low - f.address > 1 << 32:
            return "at an address far from every array argument (an uninitialised or wrong pointer?)"
        return f"{low - f.address:,} bytes before the start of {name} (element {index:,})"
    if f.address - high > 1 << 32:
        return "at an address far from every array argument (an uninitialised or wrong pointer?)"
    return f"{'past' if f.address >= high else 'across'} the end of {name} (element {index:,} of {count:,})"


__all__ = ["READ", "AssertFailed", "Deadlock", "KernelError", "OutOfBounds", "raise_for"]
