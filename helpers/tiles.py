"""Tiles of a matrix product: in which order programs take them, and the bytes that a model of this order predicts.

    product = tiles.Product(4096, 4096, 4096, tile=(128, 256, 64), group=8)
    product.order()                   # which tile of C the first program computes, the second, ...
    tiles.predict(product).read       # bytes from DRAM, on this card or, in CPU mode, on an H200

The model: programs run in waves, as many at once as the SMs hold, and go through K in step. In each step a wave wants
the pieces of A's row panels and of B's column panels that its tiles need, each once, however many programs share it.
L2 keeps what was wanted last. So a panel that the next wave wants again comes from DRAM again unless all that was
wanted in between left room for it: which tiles share a wave decides what a product reads.

How far to trust it: of 29 launches whose reads Nsight Compute counted on an H200, the model was within 1% for half and
within 5% for two thirds (`tests/test_tiles.py` has them). Programs fall out of step where K is short or the tiles are
small, and the model is then off by up to a factor of two or three.
"""

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from . import machine
from .traffic import Bytes

USABLE = 0.6
"""The part of L2 that keeps data. Kernels that read the same bytes over and over on an H200, whose driver reports
60 MiB, found all of 32 MiB there, most of 40 and little of 48: each half of L2 caches for the SMs beside it (NVIDIA's
A100 whitepaper), so what both want is kept twice."""


@dataclass(frozen=True)
class Card:
    """What the model asks of a GPU: SMs, bytes of L2, bytes of shared memory of one SM and of what one block may take,
    registers of one SM."""

    name: str
    sms: int
    l2_bytes: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    registers_per_sm: int = 65536


H200 = Card("NVIDIA H200", 132, 60 << 20, 228 << 10, 227 << 10)
"""As its driver reports it; what `card` gives in CPU mode."""


def card() -> Card:
    """This machine's GPU, or in CPU mode an H200."""
    m = machine.here()
    if m.mode == "cpu":
        return H200
    return Card(m.name, m.sms, m.l2_bytes, m.shared_bytes_per_sm, m.shared_bytes_per_block, m.registers_per_sm)


@dataclass(frozen=True)
class Product:
    """C = A @ B of shapes (m, k) and (k, n), row-major, computed in tiles (tile_m, tile_n, tile_k) of C and K.

    `group`: programs take the tiles of `group` rows of tiles column by column, then those of the next rows; 1 is
    row by row, and as many as there are rows of tiles is column by column. `stages` and `warps` are the launch's.
    Raises ValueError where a number is below 1.
    """

    m: int
    n: int
    k: int
    tile: tuple[int, int, int] = (128, 256, 64)
    group: int = 8
    stages: int = 3
    warps: int = 8
    element_bytes: int = 2

    def __post_init__(self):
        if min(self.m, self.n, self.k, *self.tile, self.group, self.stages, self.warps, self.element_bytes) < 1:
            raise ValueError(f"sizes, group, stages and warps are at least 1, not {self}")

    @property
    def rows(self) -> int:
        """How many tiles lie below one another in C."""
        return -(-self.m // self.tile[0])

    @property
    def columns(self) -> int:
        """How many tiles lie beside one another in C."""
        return -(-self.n // self.tile[1])

    @property
    def least(self) -> Bytes:
        """Bytes that no product can avoid: A and B read once, C written once."""
        return Bytes(self.element_bytes * self.k * (self.m + self.n), self.element_bytes * self.m * self.n)

    @property
    def requested(self) -> int:
        """Bytes that the programs read, all together: each its panel of A and its panel of B."""
        return self.element_bytes * self.k * (self.m * self.columns + self.n * self.rows)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one program: on sm_90, a piece of A and one of B in each stage."""
        tile_m, tile_n, tile_k = self.tile
        return self.stages * tile_k * (tile_m + tile_n) * self.element_bytes

    @cached_property
    def places(self) -> np.ndarray:
        """(tiles, 2): row and column of each tile, in the order in which programs take them."""
        number = np.arange(self.rows * self.columns)
        first = number // (self.group * self.columns) * self.group
        height = np.minimum(self.rows - first, self.group)
        within = number % (self.group * self.columns)
        return np.stack([first + within % height, within // height], axis=1)

    def order(self) -> np.ndarray:
        """(rows, columns): when each tile of C is taken, from 0."""
        out = np.empty((self.rows, self.columns), int)
        out[tuple(self.places.T)] = np.arange(len(self.places))
        return out

    def __str__(self) -> str:
        tile = " × ".join(map(str, self.tile))
        return f"{self.m} × {self.n} × {self.k} in tiles of {tile}, groups of {self.group}, {self.stages} stages"

    def programs_per_sm(self, card: Card) -> int:
        """How many programs one SM holds at once, at least 1: as shared memory and an estimate of registers allow.

        Each block takes another KB of shared memory. A thread keeps its part of the fp32 tile in registers, and about
        48 more (what the compiler took for such kernels on sm_90), at most 255.
        """
        threads = 32 * self.warps
        registers = min(255, self.tile[0] * self.tile[1] // threads + 48) * threads
        return max(1, min(card.shared_bytes_per_sm // (self.shared_bytes + 1024), card.registers_per_sm // registers))


@dataclass(frozen=True)
class Prediction:
    """What the model says of one launch: `a` and `b` bytes of each operand read from DRAM, `written` bytes of C;
    `programs` run at once on all SMs; `wave`, of the shape of `order`, is the wave in which each tile is computed."""

    product: Product
    card: Card
    a: int
    b: int
    written: int
    programs: int

    @property
    def read(self) -> int:
        return self.a + self.b

    @property
    def waves(self) -> int:
        return -(-len(self.product.places) // self.programs)

    @property
    def wave(self) -> np.ndarray:
        return self.product.order() // self.programs

    @property
    def panels(self) -> tuple[int, int]:
        """How many row panels of A and column panels of B the programs of the first wave share."""
        first = self.product.places[: self.programs]
        return len(set(first[:, 0])), len(set(first[:, 1]))

    @property
    def fits(self) -> bool:
        """Whether a block of the card may take the shared memory that a program needs."""
        return self.product.shared_bytes <= self.card.shared_bytes_per_block

    @property
    def hits(self) -> float:
        """The part of what programs read that L2 has."""
        return 1 - self.read / self.product.requested


def predict(product: Product, on: Card | None = None, programs: int = 0, warm: bool = False) -> Prediction:
    """The bytes that `product` moves between L2 and DRAM, by the model above; 10 ms or so.

    `on`: `card()` by default. `programs`: how many run at once, by default as many as `on` holds; a persistent kernel
    has one for each SM. `warm`: L2 begins with what an earlier launch of the same left in it, as it does when
    `traffic.measured` counts, and what stays there at the end is not counted as written.
    """
    on = on or card()
    programs = programs or on.sms * product.programs_per_sm(on)
    tile_m, tile_n, _ = product.tile
    heights = np.minimum(tile_m, product.m - np.arange(product.rows) * tile_m)
    widths = np.minimum(tile_n, product.n - np.arange(product.columns) * tile_n)
    waves = [product.places[i : i + programs] for i in range(0, len(product.places), programs)]
    # pieces of K as large as keep the walk short; a wave's programs are not in step to the last tile of K anyway
    panels = sum(len(set(w[:, 0])) + len(set(w[:, 1])) for w in waves)
    pieces = max(1, min(16, 100_000 // panels, -(-product.k // product.tile[2])))
    depth = product.element_bytes * product.k / pieces
    l2 = _L2(on.l2_bytes * USABLE)
    for _ in range(2 if warm else 1):
        l2.read, l2.written = {"a": 0.0, "b": 0.0}, 0.0
        for wave in waves:
            rows, columns = np.unique(wave[:, 0]), np.unique(wave[:, 1])
            if (heights[rows].sum() + widths[columns].sum()) * depth > l2.room:  # nothing can be shared
                l2.read["a"] += heights[wave[:, 0]].sum() * depth * pieces
                l2.read["b"] += widths[wave[:, 1]].sum() * depth * pieces
                rows = columns = ()
            for piece in range(pieces):
                for row in rows:
                    l2.wants("a", (row, piece), heights[row] * depth)
                for column in columns:
                    l2.wants("b", (column, piece), widths[column] * depth)
            for row, column in wave:
                l2.takes(("c", row, column), heights[row] * widths[column] * product.element_bytes)
    written = l2.written + (0 if warm else l2.dirty())
    return Prediction(product, on, round(l2.read["a"]), round(l2.read["b"]), round(written), programs)


class _L2:
    """A cache of `room` bytes that gives up what was wanted longest ago."""

    def __init__(self, room: float):
        self.room, self.held = room, 0.0
        self.lines: OrderedDict[tuple, tuple[float, bool]] = OrderedDict()  # name -> bytes, whether still to be written
        self.read, self.written = {}, 0.0

    def wants(self, operand: str, which: tuple, size: float) -> None:
        key = (operand, *which)
        if key in self.lines:
            self.lines.move_to_end(key)
        else:
            self.read[operand] += size
            self._keep(key, size, False)

    def takes(self, key: tuple, size: float) -> None:
        """A part of the result, to be written to DRAM when it is given up."""
        if key in self.lines:
            self.held -= self.lines.pop(key)[0]
        self._keep(key, size, True)

    def dirty(self) -> float:
        return sum(size for size, unwritten in self.lines.values() if unwritten)

    def _keep(self, key, size, unwritten) -> None:
        self.lines[key] = size, unwritten
        self.held += size
        while self.held > self.room:
            _, (gone, was_unwritten) = self.lines.popitem(last=False)
            self.held -= gone
            self.written += gone * was_unwritten
