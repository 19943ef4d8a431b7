"""Exercises as data: what an answer is called with, what it must give, what it must be made of.

One file a lab, `lNN_topic.py`, holds a tuple `EXERCISES`. It imports torch (and what reads and records generated code,
where that judges an answer), and never enters the process that runs an answer: a reference is computed in the parent,
from its own copy of the inputs, after the answer is dead.
"""

import importlib
import inspect
import mmap
import pkgutil
import random
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch


class Draw:
    """The random inputs of one case, from one seed: the same seed draws the same again.

    Calling it draws a CPU tensor from the case's distribution: `draw(rows, cols, dtype=torch.float16)`.
    """

    def __init__(self, seed: int, kind: str = "normal"):
        self.seed, self.kind = seed, kind
        self.random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32, kind: str = "") -> torch.Tensor:
        """A tensor of `shape` from DISTRIBUTIONS[kind], by default the case's kind."""
        return DISTRIBUTIONS[kind or self.kind](shape, self._generator).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Integers from `low` to below `high`."""
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype)

    def integer(self, low: int, high: int) -> int:
        """One Python int from `low` to `high`, both included: a seed, a size that nobody can know before."""
        return self.random.randint(low, high)


def _outliers(shape, generator):
    x = torch.randn(shape, generator=generator)
    flat = x.view(-1)
    if flat.numel():
        rare = torch.randint(0, flat.numel(), (max(1, flat.numel() // 300),), generator=generator)
        flat[rare] *= 300.0
    return x


DISTRIBUTIONS: dict[str, Callable] = {
    "normal": lambda shape, g: torch.randn(shape, generator=g),
    "offset": lambda shape, g: 200.0 + torch.randn(shape, generator=g),
    "outliers": _outliers,
    "integers": lambda shape, g: torch.randint(-4, 5, shape, generator=g).float(),
}
"""normal; far from zero (a sum of squares, an exponential overflows); one in 300 is 300 times as large; small integers,
on which sums of products are exact."""


def spaced(x: torch.Tensor, step: int = 2) -> torch.Tensor:
    """The values of x in a tensor whose last dimension strides over `step` elements: not contiguous."""
    out = torch.full((*x.shape[:-1], x.shape[-1] * step), float("nan") if x.is_floating_point() else -7, dtype=x.dtype)
    out = out[..., ::step]
    return out.copy_(x)


def padded(x: torch.Tensor, pad: int = 5) -> torch.Tensor:
    """The values of x with rows that lie `pad` elements further apart than they are long."""
    out = torch.full((*x.shape[:-1], x.shape[-1] + pad), float("nan") if x.is_floating_point() else -7, dtype=x.dtype)
    return out[..., : x.shape[-1]].copy_(x)


def turned(x: torch.Tensor) -> torch.Tensor:
    """The values of x, stored column by column."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def far(x: torch.Tensor, beyond: int = 2**31) -> torch.Tensor:
    """The rows of x (3 or more, 2-D) so far apart that the last one lies beyond element `beyond`.

    2**32 is more than an unsigned offset can hold too; but then the stride itself is beyond 2**31, and Triton takes it
    as 64 bits, which mends a product in 32.

    On the CPU virtual memory that is never touched: it costs what the rows hold. A GPU needs the case's `memory_bytes`.
    """
    stride = (beyond // (x.shape[0] - 1) // 64 + 1) * 64  # rows begin where 16 bytes can be loaded at once
    memory = mmap.mmap(-1, (stride * (x.shape[0] - 1) + x.shape[1]) * x.element_size())
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, (stride, 1)).copy_(x)


@dataclass(frozen=True)
class Case:
    """One call of an answer. `about` says in a few words what is special, for the verdict: "one row short of a tile".

    inputs: makes the arguments from a Draw: tensors (CPU; the judge moves them), numbers, strings, lists, dicts, None.
    kind: the distribution that the Draw draws from. exact: compare without tolerance (integers). seen: whether the
    notebook shows the learner this case. memory_bytes: left out, and said so, where less is free on a GPU. mode: "gpu"
    or "cpu" for a case that only one mode runs (sizes that an interpreter would take minutes for).
    """

    about: str
    inputs: Callable[[Draw], tuple]
    kind: str = "normal"
    exact: bool = False
    seen: bool = False
    memory_bytes: int = 0
    mode: str = ""


@dataclass(frozen=True)
class Limit:
    """The most that a counted fact may be, in a case. Facts by what the answer is made of:

    triton, cuda: "launches"; "bytes" and "sectors" that its kernels ask for. triton also "program_bytes", those of the
    one program that asks for most; "programs"; and "wave_bytes", the different bytes that each `wave` consecutive
    programs load, summed over the waves. cuda also "bank_ways", the worst of its shared accesses (1.0: no conflict;
    0.0: there are none); "shared_requests" and "load_requests", the instructions of warps that access shared memory,
    and that load from global memory; "load_sectors", the sectors of the latter; "atomics", those of single threads on
    global memory; "local_bytes", what a thread keeps in local memory for want of registers; "int_to_float", the
    conversions of integers in its kernels' PTX. torch: "launches" (operators that launch something) and "bytes" that
    these must move. What `drive` returns as facts counts too. Both modes count all this on the CPU, so exactly. And
    "dram_bytes", triton and cuda: what a call with `inputs` (as in Case, large) reads from memory, by a GPU's counters
    where they may be read.

    most, wave: called with the case's inputs. kind: of the finding. says: one sentence with {fact}, {most} and, if it
    likes, {operators}, the PyTorch operators that launched something, and {where}, the line of the worst bank_ways.
    """

    fact: str
    most: Callable[..., float]
    kind: str
    says: str
    wave: Callable[..., int] | None = None
    inputs: Callable[[Draw], tuple] | None = None


@dataclass(frozen=True)
class Speed:
    """On a GPU only: the answer must reach `least` of a rival's speed, both timed in one run, taking turns.

    rival: a self-contained function with the answer's arguments; its source travels. inputs: as in Case, large.
    """

    rival: Callable
    inputs: Callable[[Draw], tuple]
    least: float
    says: str


@dataclass(frozen=True)
class Built:
    """One kernel that an answer launched, as it was compiled for a GPU: what a `Look` sees.

    ptx: without comments. sass: the machine code. log: the compiler's own words. registers: of a thread;
    spill_bytes: of a thread, written and read again. shared_bytes: of a block, static and the most dynamic that a case
    asked for. threads: of a block, the most that a case asked for.
    """

    kernel: str
    arch: str
    ptx: str
    sass: str
    log: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int


@dataclass(frozen=True)
class Look:
    """One thing that compiled kernels are looked at for.

    about: in a few words, for the list of what was checked: "wgmma in the machine code". right: called with all kernels
    that the answer launched. kind, says: of the finding where it is not right, one sentence.
    """

    about: str
    right: Callable[[list[Built]], bool]
    kind: str
    says: str


def holds(pattern: str) -> Callable[[list[Built]], bool]:
    """For a `Look`: whether the machine code of one of the kernels matches, such as r"\\bHGMMA\\b"."""
    return lambda kernels: any(re.search(pattern, k.sass) for k in kernels)


NO_SPILLS = Look(
    "no spilled registers",
    lambda kernels: not any(k.spill_bytes for k in kernels),
    "too-slow",
    "The kernel needs more registers than a thread has, so some are kept in memory: hold less in each thread, or give "
    "the tile to more threads.",
)
NOT_SERIALIZED = Look(
    "products that overlap (no wgmma was serialized)",
    lambda kernels: not any("serialized" in k.log for k in kernels),
    "too-slow",
    "The compiler serialized the wgmma instructions, so that each waits for the one before: between wgmma.fence and "
    "wgmma.wait_group nothing may touch the accumulators.",
)


@dataclass(frozen=True)
class Needs:
    """What a kernel runs on, where that is not every GPU, and how it is inspected elsewhere.

    Such an answer is never run on the CPU. Everywhere its wrapper is called with each case's inputs, and the kernels
    that it launches are compiled (for `arch`, which the answer gives as the option "-arch=sm_90a") and not run: so an
    exception, a wrong shape or dtype of the result, forbidden operators, a launch that a GPU would refuse, and what the
    `looks` ask for are found without a GPU. Where nothing is found and the GPU's compute capability is not among
    `capabilities`, the verdict is `needs-hardware`: `says` is its sentence, and what was looked at is listed. Where it
    is, the answer is then run and judged as any other.
    Text may then hold inline PTX, and take `tensor_map` from `helpers.cuda`.
    """

    says: str
    looks: tuple[Look, ...]
    arch: str = "sm_90a"
    capabilities: tuple[tuple[int, int], ...] = ((9, 0),)


@dataclass(frozen=True)
class Mojo:
    """What surrounds an answer that is a text of Mojo: the entry is a name for that text, and no Python of it is run.

    main: a program that takes what it needs of the text from the module `program`. Of a `library` it exports functions,
    with the ABI of C: `drive` gets them, a `ctypes.CDLL`, as the answer. Else its main() launches kernels: these are
    compiled for a GPU, and run on the CPU from their PTX; `call` is called with them, by name, and a case's inputs, in
    place of the answer. It is self-contained, and its source travels. looks: of these kernels' PTX, once their values
    are right. Without `main` the text holds operators for MAX, and `drive` gets the folder that they lie in; with
    "gpu" in place of a case's inputs it only has them compiled for that, in another process than the answer's.
    """

    main: str = ""
    library: bool = False
    call: Callable | None = None
    looks: tuple[Look, ...] = ()


@dataclass(frozen=True)
class Exercise:
    """What is asked of one answer.

    name: unique, as in check("row-softmax", …). lab: the notebook's stem, "05_triton_first_kernels". rung: "measuring",
    "library", "compiler", "triton", "cuda", "mojo", "any". entry: the function (or class) that the answer defines, or
    for "mojo" the name of its text. form: "kernel", "rewrite" (of given code), "prediction" (returns numbers) or
    "choice".
    made_of: "triton", "cuda", "torch", "python", "mojo"; or "any", for an answer of a rung of its own choice: it is
    judged as made of "triton" or "cuda" where it holds such kernels, and else of "torch".

    reference: called with float64 copies of the case's inputs (integers and plain values as they are), returns what
    the answer must: a tensor, a number, a string, or a tuple, list or dict of these. A tensor on the device "meta" asks
    for its shape and dtype only, and leaves its values to `judge`. It is also run in float32 (how far
    off a good answer is) and in `low` (how far off a careless one is); the tolerance lies between.
    dtype: of the outputs, a torch dtype, or None for that of the first floating-point input.
    low: "float16" or "bfloat16", or a function with the reference's arguments (fp32) that loses what it must not.
    scale: called like the reference (float64); what errors are measured against, elementwise; by default |expected|
    and the mean |expected| of its row. rtol: for numbers that are not tensors.
    allow: PyTorch operators that the answer may call beyond allocation, fill and views ("clone", "mm"); "*" is any.
    forbid: operators it may not, where allow is "*". modules: what it may import beyond its made_of's own.
    drive: a self-contained function that runs in the answer's process as drive(answer, *inputs) -> (outputs, facts) in
    place of answer(*inputs); its source travels, so it imports what it needs, and it sees no reference.
    judge: called with (inputs, outputs, facts) of a case, returns [(kind, sentence)]: what a reference cannot say.
    Of the kind "checked" is a sentence for the list of what was looked at, as `Verdict.checked`, and no finding.
    facts: those of `Limit`, and "contiguous" (all outputs are).
    multiplied: of an answer made of "triton" or "cuda" the number of an input that reaches the result through products
    of tensor cores only (tl.dot, wmma). On the CPU the first case is called once more with these products left out; the
    result is then to be that of zeros in this input's place, or some of it was made without tensor cores.
    same_bits: which of its outputs (their numbers) must be the same bit for bit in every call with the same inputs:
    on the CPU in each order of threads and blocks, on a GPU in several calls.
    needs: for a kernel of instructions that only some GPUs have (made_of "cuda", no drive): see `Needs`.
    mojo: for an answer made of "mojo": see `Mojo`.
    package: "tvm" where the answer's process has TVM loaded, for `drive` to use, "max" where Mojo or MAX compiles it;
    without it the verdict is `environment`.
    alone: an answer, or its drive, measures times on a GPU, which nobody else of the course may use meanwhile.
    hints: three steps: where to look, the idea, pseudocode. hints_for: by kind of finding, instead of these.
    seconds: how long all calls may take in CPU mode. points: in nbgrader.
    """

    name: str
    lab: str
    rung: str
    entry: str
    title: str
    form: str
    made_of: str
    cases: tuple[Case, ...]
    hints: tuple[str, str, str]
    reference: Callable[..., Any] | None = None
    dtype: torch.dtype | None = None
    low: str | Callable = "float16"
    scale: Callable[..., torch.Tensor] | None = None
    rtol: float = 1e-6
    allow: frozenset[str] = frozenset()
    forbid: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    drive: Callable | None = None
    judge: Callable[..., list[tuple[str, str]]] | None = None
    multiplied: int | None = None
    same_bits: tuple[int, ...] = ()
    limits: tuple[Limit, ...] = ()
    speed: Speed | None = None
    needs: Needs | None = None
    mojo: Mojo | None = None
    package: str = ""
    alone: bool = False
    hints_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    core: bool = False
    seconds: float = 12
    points: int = 1


def travelling(function: Callable) -> str:
    """The source of a self-contained top-level function, as module text."""
    return textwrap.dedent(inspect.getsource(function))


@lru_cache(maxsize=1)
def every() -> dict[str, Exercise]:
    """All exercises by name, in the order of the labs and of each lab's file."""
    found: dict[str, Exercise] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        for exercise in importlib.import_module(f"{__name__}.{module}").EXERCISES:
            if exercise.name in found:
                raise ValueError(f"two exercises are called {exercise.name!r}")
            found[exercise.name] = exercise
    return found
