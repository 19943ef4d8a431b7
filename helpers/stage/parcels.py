"""Values as JSON and bytes, in frames that follow one another: how parent and child hand things over."""

import json
import os
import struct
from dataclasses import dataclass
from typing import Any

import torch


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

    def __repr__(self) -> str:
        return f"an object of type {self.name}"


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
