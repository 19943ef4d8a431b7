"""Tensors in poisoned memory between guard zones, where a stray write and a missing one both leave their mark."""

import ctypes
import mmap

import torch

from ..interpreter import span

POISON = b"\xd5\xff"
"""What unwritten memory holds: not a number in every floating-point type, an unlikely number in every other."""

AROUND = b"\xd3\xff"
"""What lies around inputs and between their elements: as unlikely, and not taken for what nobody wrote."""

GUARD_BYTES = 1024
"""Poisoned memory before and behind each input and each tensor that an answer allocates."""

SPARSE_BYTES = 1 << 28
"""Inputs that span more are laid out in memory that is only touched where values lie."""


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


def fenced(values: torch.Tensor, at_end: bool) -> torch.Tensor:
    """A copy on the CPU beside a page that nobody may touch: before its first element, or behind its last one.

    A load that goes there ends the process, also where what it brings is thrown away: no poison shows that.
    """
    low, high = span(values)
    inner = -(-(high - low) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, inner + 2 * mmap.PAGESIZE), dtype=torch.uint8)
    for start in (0, mmap.PAGESIZE + inner):
        where = ctypes.c_void_p(memory.data_ptr() + start)
        if ctypes.CDLL(None).mprotect(where, ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise OSError("A page cannot be closed to an answer.")
    first = mmap.PAGESIZE + (inner - (high - low) if at_end else 0)
    out = memory[first : first + high - low].view(values.dtype).as_strided(values.shape, values.stride())
    return out.copy_(values)


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
