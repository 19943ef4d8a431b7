"""What a conformance case is: one kernel, its seeded inputs, and what its results must equal."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One kernel. Results of the two modes, and of each and `reference`, may differ by `tolerance` x max |reference|.

    rung: "cuda" or "triton". make: inputs on the CPU, from a seeded generator. run: inputs on the device -> results.
    reference: the same results in float64 (integers where they are integers) from inputs on the CPU.
    tolerance: 0 where a result must be equal bit for bit; else the rounding that the number format explains.
    """

    name: str
    rung: str
    make: Callable[[torch.Generator], Tensors]
    run: Callable[[Tensors], Tensors]
    reference: Callable[[Tensors], Tensors]
    tolerance: float

    def inputs(self) -> Tensors:
        """The same values on every machine: torch's CPU generator, seeded by the case's name."""
        return self.make(torch.Generator().manual_seed(zlib.crc32(self.name.encode())))


def normal(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random normal values."""
    return torch.randn(*shape, generator=g).to(dtype)


def integers(g: torch.Generator, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Random integers from 0 up to, not including, `high`."""
    return torch.randint(0, high, shape, generator=g).to(dtype)


F32, F16, BF16 = 1e-6, 6e-4, 4e-3
"""Tolerances: a few roundings of 24, 11 and 8 significant bits."""
