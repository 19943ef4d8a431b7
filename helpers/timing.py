"""Time callables on the GPU honestly: `compare`, `measure`, `ratio`, and this machine's measured ceilings."""

from .records import Measurement as Measurement
