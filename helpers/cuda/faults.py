"""What can go wrong in a kernel on the CPU, as exceptions that name the reader's line."""

from ..machine import Plain
from . import abi
from .cpu import Library, Outcome


class KernelError(Plain, RuntimeError):
    """A kernel that failed while it ran: the reader's `line` (0: unknown), the `block` and `thread` it happened in."""

    def __init__(self, message: str, line: int = 0, block=(0, 0, 0), thread=(0, 0, 0)):
        super().__init__(message)
        self.line, self.block, self.thread = line, block, thread


class OutOfBounds(KernelError, IndexError):
    """An access outside every array that the kernel was given."""


class Deadlock(KernelError):
    """Threads wait at a barrier that others never reach."""


class AssertFailed(KernelError):
    """A device-side assert that does not hold."""


def raise_for(outcome: Outcome, library: Library, kernel: str, code: str, names: list[str], sizes: list) -> None:
    """Raise what `outcome` reports; nothing when the kernel ran to its end.

    names: the array arguments' names; sizes: their (low, high) addresses and bytes an element.
    """
    f = outcome.failure
    if f.fault == 0:
        return
    if f.fault == abi.INTERRUPTED:
        raise KeyboardInterrupt
    line = f.line or library.lines([f.pc]).get(f.pc, 0)
    lines = code.splitlines()
    quote = f"\n    {lines[line - 1].strip()}" if 0 < line <= len(lines) else ""
    at = f"{kernel}, line {line}" if line else kernel
    where = f"thread {f.thread.tuple()} of block {f.block.tuple()}"
    kind, message = KernelError, ""
    does = {0: "reads", 1: "writes"}.get(f.kind, "updates")
    if f.fault == abi.OUT_OF_BOUNDS:
        kind, message = OutOfBounds, f"{where} {does} {f.size} bytes {_relative(f, names, sizes)}."
    elif f.fault == abi.MISALIGNED:
        message = f"{where} {does} {f.size} bytes at an address that is no multiple of {f.size}: a GPU refuses that."
    elif f.fault == abi.DEADLOCK:
        kind = Deadlock
        message = f"{where} waits for lanes of its warp that are named in the mask and never reach this call."
        if f.text == b"left":
            message = (
                f"this __syncthreads() stands in an `if`; {f.waiting} threads wait here, and {where} returned without "
                "coming here: undefined on a GPU."
            )
        elif f.text:
            message = f"{where} waits at {f.text.decode()}: all of a warp must reach this call together."
        if f.text != b"left" and f.other_line:
            message = (
                message[:-1] + f"; {f.waiting} threads of its block wait at __syncthreads() in line {f.other_line}."
            )
    elif f.fault == abi.MIXED:
        kind = Deadlock
        what = "__syncthreads()" if f.text == b"block" else "*_sync calls"
        whose = "one block" if f.text == b"block" else "one warp"
        message = f"threads of {whose} meet at different {what} (lines {line} and {f.other_line}): undefined on a GPU."
    elif f.fault == abi.NOT_IN_MASK:
        message = f"{where} (lane {_lane(f)}) calls a *_sync function with a mask that leaves out its own lane."
    elif f.fault == abi.ASSERTION:
        kind, message = AssertFailed, f"{where}: assertion `{f.text.decode(errors='replace')}` failed."
    elif f.fault == abi.MISUSE:
        message = f"{where}, {f.text.decode()}."
    elif f.fault == abi.TRAP:
        message = f"{where} called __trap()."
    elif f.fault == abi.DIVISION:
        message = f"{where} divides an integer by zero: the result is undefined on a GPU."
    elif f.fault == abi.SEGMENTATION:
        message = f"{where} touches memory that is not there ({f.address:#x}), or its local arrays are too large."
    raise kind(f"{at}: {message}{quote}", line, f.block.tuple(), f.thread.tuple())


def _lane(f) -> str:
    return f"{f.thread.x % 32}" if f.thread.y == f.thread.z == 0 else "its own"


def _relative(f, names: list[str], sizes: list) -> str:
    """The address in terms of the nearest array: "past the end of `x` (element 1,028 of 1,024)"."""
    if f.address < 4096:
        return "through a null pointer"
    if f.range in _SHARED:
        return f"outside the block's {_SHARED[f.range]}"
    low, high, item = sizes[f.range] if 0 <= f.range < len(sizes) else (0, 0, 1)
    if max(low - f.address, f.address - high) > 1 << 32:
        return "at an address far from every array argument (an uninitialised or wrong pointer?)"
    name = f"`{names[f.range]}`" if names[f.range] else f"array argument {f.range}"
    if f.address < low:
        return f"{low - f.address:,} bytes before the start of {name} (element {(f.address - low) // item:,})"
    side = "past" if f.address >= high else "across"
    return f"{side} the end of {name} (element {(f.address - low) // item:,} of {(high - low) // item:,})"


_SHARED = {-2: "dynamic shared memory (see the launch's shared_mem)", -3: "__shared__ arrays"}
