"""What runs beside an answer, in the child: makes its inputs, calls it, and hands over what it left, unjudged.

The parent (`helpers.checks`) puts a job into a file; `play` answers with frames in a second one, one a step, so that
what came before a crash is known. Whatever an answer does to this process, only data leaves it.
"""

from .guards import POISON, image, laid_out
from .parcels import Other, as_bytes, decode, encode, frames, put
from .play import ORDERS, TRACED, play

__all__ = [
    "ORDERS",
    "POISON",
    "TRACED",
    "Other",
    "as_bytes",
    "decode",
    "encode",
    "frames",
    "image",
    "laid_out",
    "play",
    "put",
]
