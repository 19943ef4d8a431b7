"""Tensor maps: what the copy engine (TMA) of sm_90 and later is told of a tensor, made by the driver.

A kernel takes one as `const __grid_constant__ TensorMap map`, where TensorMap is any struct of 128 bytes that is
aligned to 64. Importing this needs no GPU; a map is made of a tensor that lies on one.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from .. import machine

BYTES, ALIGNED = 128, 64
_TYPES = {
    torch.uint8: 0, torch.int8: 0, torch.uint16: 1, torch.int16: 1, torch.uint32: 2, torch.int32: 3, torch.uint64: 4,
    torch.int64: 5, torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}


@dataclass(frozen=True)
class TensorMap:
    """The driver's 128 bytes for tiles of `box` elements of `tensor`; a kernel gets them by value."""

    tensor: torch.Tensor = field(repr=False)
    box: tuple[int, ...]
    bytes: bytes = field(repr=False)


def tensor_map(tensor: torch.Tensor, box: Sequence[int], *, swizzle: int = 128, l2: int = 256) -> TensorMap:
    """A map of a tensor on the GPU, 1 to 5 dimensions, from which the copy engine moves tiles of `box` elements.

    box: the tile's size in each dimension, in torch's order, the last one contiguous; coordinates in the kernel run
    the other way, the contiguous one first. Beyond the tensor a tile reads zeros and writes nothing. swizzle: the
    span in bytes (0, 32, 64, 128) within which 16-byte pieces change places in shared memory, so that a column of a
    tile lies in different banks. l2: bytes that L2 fetches at a time (0, 64, 128, 256).
    Errors: ValueError for what the copy engine cannot name, `machine.NotReady` without a GPU that has one.
    """
    laid_out = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.element_size()
    box = tuple(box)
    if tensor.is_cuda and torch.cuda.current_device() != tensor.get_device():
        raise ValueError(f"A tensor map names memory of the current GPU, but the tensor is on {str(tensor.device)!r}.")
    return TensorMap(tensor, box, _encoded(*laid_out, box, swizzle, l2, tensor.is_cuda))


def _check(address: int, dtype, shape, strides, size: int, box, swizzle: int, l2: int) -> None:
    """Refuse what cuTensorMapEncodeTiled refuses, with a sentence. The limits are those of the CUDA driver API."""
    if dtype not in _TYPES:
        known = ", ".join(str(t).removeprefix("torch.") for t in _TYPES)
        raise ValueError(f"The copy engine has no {str(dtype).removeprefix('torch.')}; it has {known}.")
    if not 1 <= len(shape) <= 5 or len(box) != len(shape):
        raise ValueError(f"A tensor map has 1 to 5 dimensions and a box of as many: {shape}, box {box}.")
    if swizzle not in _SWIZZLES or l2 not in _PROMOTIONS:
        raise ValueError(f"swizzle={swizzle}, l2={l2}: they are of {[*_SWIZZLES]} and of {[*_PROMOTIONS]} bytes.")
    if not all(isinstance(side, int) and 1 <= side <= 256 for side in box):
        raise ValueError(f"box {box}: each side of a tile is 1 to 256 elements.")
    if box[-1] * size % 16 or (swizzle and box[-1] * size > swizzle):
        most = f", and at most the {swizzle} of its swizzle" if swizzle else ""
        raise ValueError(f"box {box}: a row of {box[-1] * size} bytes is no multiple of 16{most}.")
    if not all(1 <= side <= 2**32 for side in shape):
        raise ValueError(f"The shape {shape} has a side that is not 1 to 2**32: there is nothing to map.")
    if address % 16:
        raise ValueError("The tensor does not begin at a multiple of 16 bytes, as the copy engine wants: .clone() it.")
    *outer, last = strides
    if shape[-1] > 1 and last != 1:
        raise ValueError(f"Strides {strides}: the last dimension must be contiguous; .contiguous() makes it so.")
    if any(stride * size % 16 or not 0 < stride * size < 2**40 for stride in outer):
        raise ValueError(
            f"Strides {strides} of {size} bytes: all but the last must be multiples of 16 bytes; pad the rows."
        )


@lru_cache(maxsize=4096)
def _encoded(address: int, dtype, shape, strides, size: int, box, swizzle: int, l2: int, on_gpu: bool) -> bytes:
    """The map's bytes. They say where and how, not what: the same for whatever is at that address later."""
    # the stride of a dimension of size 1 is never used: the least that the copy engine takes will do
    strides = tuple(16 // size if n == 1 else stride for n, stride in zip(shape, strides, strict=True))
    _check(address, dtype, shape, strides, size, box, swizzle, l2)
    here = machine.here()
    if not on_gpu or here.capability is None or here.capability < (9, 0):
        why = "the tensor is on the CPU" if here.capability else f"this is {here.name}"
        if on_gpu:
            why = f"this is {here.arch}"
        raise machine.NotReady(
            f"A tensor map is made by a GPU's driver for its copy engine (TMA), which sm_90 and later have; {why}."
        )
    rank = len(shape)
    raw = ctypes.create_string_buffer(BYTES + ALIGNED)
    aligned = -(-ctypes.addressof(raw) // ALIGNED) * ALIGNED
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        _TYPES[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * rank)(*(stride * size for stride in reversed(strides[:-1]))),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # no interleave
        _SWIZZLES[swizzle],
        _PROMOTIONS[l2],
        0,  # zeros beyond the tensor
    )
    if status:
        said = ctypes.c_char_p()
        driver().cuGetErrorName(status, ctypes.byref(said))
        raise ValueError(
            f"The driver made no tensor map of shape {shape}, strides {strides}, box {box}, swizzle {swizzle}: "
            f"{(said.value or str(status).encode()).decode()}."
        )
    return ctypes.string_at(aligned, BYTES)


@lru_cache(maxsize=1)
def driver() -> ctypes.CDLL:
    """CUDA's driver, for what CuPy does not pass on. Errors: `machine.NotReady` where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as why:
        raise machine.NotReady(f"The GPU's driver cannot be loaded: {why}.") from why
