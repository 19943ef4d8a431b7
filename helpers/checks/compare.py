"""An answer's outputs against the reference: shapes, dtypes, every element, and how far off is too far."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..exercises import Case, Exercise
from ..stage import POISON, Other
from .verdict import Finding

FEW = 64
"""Of fewer elements than this the root mean square says little, and the largest error alone counts."""


class Reference:
    """What an exercise's reference makes of the inputs of a call: computed when it is first asked for, and once. A
    thread may ask for it ahead (`prepare`), since a large case takes seconds."""

    def __init__(self, exercise: Exercise, inputs: tuple):
        self.exercise, self.inputs = exercise, inputs
        self._lock, self._known = threading.RLock(), {}

    def _once(self, what, make: Callable) -> Any:
        with self._lock:
            if what not in self._known:
                self._known[what] = make()
            return self._known[what]

    @property
    def expected(self) -> Any:
        """In float64."""
        return self._once("expected", lambda: self.exercise.reference(*mapped(self.inputs, _to(torch.float64))))

    @property
    def runs(self) -> tuple:
        """In float32, and in the lower precision (None where it cannot be run in that)."""
        return self._once("runs", lambda: _runs(self.exercise, self.inputs))

    def scale(self, i: int) -> torch.Tensor:
        """What errors of the result's tensor `i` are measured by."""
        return self._once(i, lambda: _scale(self.exercise, self.inputs, tensors(self.expected)[i]))

    def prepare(self, case: Case) -> None:
        """Compute what `compare` will ask for."""
        for i, want in enumerate(tensors(self.expected)):
            if _by_tolerance(case, want):
                self.runs, self.scale(i)  # noqa: B018


def _by_tolerance(case: Case, want: torch.Tensor) -> bool:
    return not (want.is_meta or case.exact) and want.is_floating_point()


def compare(reference: Reference, case: Case, outputs: Any, about: list[dict], values: bool = True) -> list[Finding]:
    """What is wrong with the outputs of one call; nothing where they are right.

    reference: with the inputs as drawn, on the CPU. outputs: the tree that the answer returned, its tensors on the CPU
    as bits. about: dtype, size and device of each of these tensors, in order. Where the reference gives a tensor on
    "meta", only shape and dtype are compared: its values are for the exercise's judge. values: False where no kernel
    has run, and shapes and dtypes are all there is.
    """
    exercise, inputs, expected = reference.exercise, reference.inputs, reference.expected
    problem = _structure(expected, outputs, "what it returned")
    if problem:
        return [problem]
    wanted, got = tensors(expected), tensors(outputs)
    names = places(expected)
    for i, (want, have, said) in enumerate(zip(wanted, got, about, strict=True)):
        name = "its result" if len(wanted) == 1 else f"result {names[i]}"
        dtype = exercise.dtype or _dtype(inputs)
        dtype = dtype if want.is_floating_point() else want.dtype
        if problem := _layout(name, want, dtype, have, said):
            return [problem]
        if not values:
            continue
        have = have.view(dtype)
        if problem := _filled(name, want, have):
            return [problem]
        if want.is_meta:
            continue
        if not _by_tolerance(case, want):
            problem = _exact(name, want, have, dtype)
        else:
            runs = [None if run is None else tensors(run)[i] for run in reference.runs]
            problem = _close(name, want, have, dtype, reference.scale(i), runs)
        if problem:
            return [problem]
    return _plain(expected, outputs, exercise.rtol, "its answer") if values else []


@dataclass(frozen=True)
class Tolerance:
    """The most that the largest error and the root mean square may be, in units of the scale; `careless` is what the
    lower-precision run of the reference gave."""

    largest: float
    mean: float
    careless: float


def tolerance(want: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, good, low) -> Tolerance:
    """Between what the reference gives in float32 and what it gives in a lower precision: their geometric mean.

    Never below four times the first: another order of summation is no mistake.
    """
    half_ulp = torch.finfo(dtype).eps / 2
    g = errors(want, good.to(dtype).double(), scale)
    # of few numbers that were summed up in float32 the reference's may be right to the last digit by luck
    floor = 16 * half_ulp if want.numel() < FEW and dtype == torch.float32 else half_ulp
    top, mean = max(float(g.max()), floor), max(float(g.square().mean().sqrt()), half_ulp / 4)
    loose, loose_mean = math.inf, math.inf
    if low is not None:
        e = errors(want, low.to(dtype).double(), scale)
        loose, loose_mean = float(e.max()), float(e.square().mean().sqrt())
    careful = math.isfinite(loose_mean) and loose_mean > 1.5 * mean and want.numel() >= FEW
    return Tolerance(
        max(4 * top, math.sqrt(top * loose) if math.isfinite(loose) else 0),
        math.sqrt(mean * loose_mean) if careful else math.inf,
        loose if math.isfinite(loose) else 64 * top,
    )


def errors(want: torch.Tensor, have: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """|have - want| over scale, 0 where they are equal (infinities too)."""
    off = ((have - want).abs() / scale).where(have != want, torch.zeros_like(want))
    return torch.nan_to_num(off, nan=math.inf, posinf=math.inf)


def mapped(tree: Any, change: Callable) -> Any:
    """The tree with `change` applied to its tensors."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {k: mapped(v, change) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(mapped(x, change) for x in tree)
    return tree


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in order."""
    found: list[torch.Tensor] = []
    mapped(tree, found.append)
    return found


def places(tree: Any, at: str = "") -> list[str]:
    """Where each tensor of a tree stands: "1" in a tuple, "eager[0][1]" in lists in a dict."""
    if isinstance(tree, torch.Tensor):
        return [at]
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, tuple | list) else ()
    return [place for key, part in parts for place in places(part, f"{at}[{key}]" if at else str(key))]


# -------------------------------------------------------------------------------------------------------------------


def _to(dtype: torch.dtype) -> Callable:
    return lambda t: t.to(dtype) if t.is_floating_point() else t.clone()


def _dtype(inputs: tuple) -> torch.dtype:
    return next((t.dtype for t in tensors(inputs) if t.is_floating_point()), torch.float32)


def _runs(exercise: Exercise, inputs: tuple) -> tuple:
    good = exercise.reference(*mapped(inputs, _to(torch.float32)))
    if callable(exercise.low):
        return good, exercise.low(*mapped(inputs, _to(torch.float32)))
    try:
        return good, exercise.reference(*mapped(inputs, _to(getattr(torch, exercise.low))))
    except (RuntimeError, NotImplementedError):  # an operator without a CPU kernel for this dtype
        return good, None


def _scale(exercise: Exercise, inputs: tuple, want: torch.Tensor) -> torch.Tensor:
    if exercise.scale:
        scale = exercise.scale(*mapped(inputs, _to(torch.float64))).abs()
    else:
        size = want.abs()
        finite = torch.nan_to_num(size, posinf=0.0)
        row = finite.mean(-1, keepdim=True) if want.ndim and want.shape[-1] else finite
        scale = torch.maximum(size, row)
    return torch.nan_to_num(scale, posinf=1.0).clamp_min(1e-30)


def _structure(want: Any, have: Any, what: str) -> Finding | None:
    if have is None and want is not None:
        return Finding("wrong-answer", f"It returned None where {_called(want)} is asked for: a return may be missing.")
    if isinstance(want, torch.Tensor) or isinstance(have, torch.Tensor):
        if not (isinstance(want, torch.Tensor) and isinstance(have, torch.Tensor)):
            return Finding("wrong-answer", f"{what.capitalize()} is {_called(have)}; {_called(want)} is asked for.")
        return None
    if isinstance(want, tuple | list):
        if not isinstance(have, tuple | list) or len(have) != len(want):
            return Finding("wrong-answer", f"{what.capitalize()} is {_called(have)}; {_called(want)} is asked for.")
        pairs = zip(want, have, range(len(want)), strict=True)
        return next((p for w, h, i in pairs if (p := _structure(w, h, f"part {i} of {what}"))), None)
    if isinstance(want, dict):
        if not isinstance(have, dict) or set(have) != set(want):
            keys = f" with the keys {', '.join(map(repr, want))}"
            return Finding("wrong-answer", f"{what.capitalize()} is {_called(have)}; a dict{keys} is asked for.")
        return next((p for k in want if (p := _structure(want[k], have[k], f"{k!r} of {what}"))), None)
    return None


def _called(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return f"a tensor of shape {tuple(thing.shape)}"
    if isinstance(thing, Other):
        return f"an object of type {thing.name}"
    if isinstance(thing, tuple | list):
        return f"a {type(thing).__name__} of {len(thing)}"
    if isinstance(thing, dict):
        return short(f"a dict with the keys {', '.join(map(repr, thing))}")
    return short(repr(thing))


def short(text: str, most: int = 300) -> str:
    """The beginning of a text that is long."""
    return text if len(text) <= most else f"{text[:most]} …"


def _layout(name: str, want, dtype, have, said: dict) -> Finding | None:
    if said["type"] != "Tensor":
        return Finding("forbidden", f"{name.capitalize()} is a {said['type']}, not a plain torch.Tensor.")
    if list(want.shape) != said["size"]:
        shapes = f"{tuple(said['size'])}, and {tuple(want.shape)} is asked for"
        return Finding("wrong-shape", f"{name.capitalize()} has shape {shapes}.")
    if said["dtype"] != str(dtype).removeprefix("torch."):
        asked = str(dtype).removeprefix("torch.")
        return Finding("wrong-dtype", f"{name.capitalize()} is {said['dtype']}, and {asked} is asked for.")
    if said["device"] != said["wanted_device"]:
        return Finding(
            "wrong-dtype", f"{name.capitalize()} lies on {said['device']}, the inputs on {said['wanted_device']}."
        )
    return None


def _filled(name: str, want: torch.Tensor, have: torch.Tensor) -> Finding | None:
    """Elements that still hold the poison, and NaN where a number is expected."""
    if not have.numel():
        return None
    item = have.element_size()
    poison = (POISON * 4)[:item]
    bits = have.contiguous().reshape(-1).view(torch.uint8).view(-1, item)
    unwritten = (bits == torch.tensor(list(poison), dtype=torch.uint8)).all(1).view(have.shape)
    if item > 1 and unwritten.any():
        share = f"{int(unwritten.sum()):,} of {have.numel():,} elements"
        return Finding(
            "unwritten", f"{share} of {name} were never written: {_where(unwritten)}.", {"indices": _some(unwritten)}
        )
    if have.is_floating_point() and not want.is_meta:
        nan = have.isnan() & ~want.isnan()
        if nan.any():
            share = f"{int(nan.sum()):,} of {have.numel():,} elements"
            return Finding("nan", f"{share} of {name} are NaN: {_where(nan)}.", {"indices": _some(nan)})
    return None


def _exact(name, want, have, dtype) -> Finding | None:
    off = (have != want.to(dtype)) & ~(have.isnan() & want.isnan() if dtype.is_floating_point else False)
    return _values("wrong-values", name, want, have, off) if off.any() else None


def _close(name, want, have, dtype, scale, runs) -> Finding | None:
    if not want.numel():
        return None
    limit = tolerance(want, scale, dtype, *runs)
    nan = want.isnan()
    e = errors(want, have.double(), scale).where(~(nan & have.isnan()), torch.zeros_like(want))
    off = e > limit.largest
    mean = float(e.square().mean().sqrt())
    if not off.any() and not mean > limit.mean:
        return None
    if float(e.max()) <= 4 * max(limit.careless, limit.largest):
        worst = float(e.max())
        said = f"{name.capitalize()} is near, but less precise than it can be: off by {worst:.1e} of the size of the "
        if limit.mean < math.inf:
            said += f"values at most, {mean:.1e} on average (rms), where {limit.largest:.1e} and {limit.mean:.1e} are "
        else:
            said += f"values at most, where {limit.largest:.1e} is "
        return Finding("precision", f"{said}allowed.", {"error": worst, "mean_error": mean})
    return _values("wrong-values", name, want, have, off)


def _values(kind, name, want, have, off) -> Finding:
    count = int(off.sum())
    at = tuple(off.nonzero()[0].tolist())
    gave, asked = have[at].item(), want[at].item()
    share = f"{count:,} of {off.numel():,} values of {name} {'is' if count == 1 else 'are'} wrong"
    return Finding(
        kind,
        f"{share}: {_where(off)}. At {list(at)} it gives {_number(gave)}, expected {_number(asked)}.",
        {"indices": _some(off), "wrong": count, "of": off.numel()},
    )


def _number(value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _some(mask: torch.Tensor) -> list:
    return mask.nonzero()[:5].tolist()


def _where(mask: torch.Tensor) -> str:
    """Where a mask is true, in words: the ranges of its indices in each dimension."""
    if mask.ndim == 0:
        return "the only one"
    if mask.all():
        return "all of them"
    places = mask.nonzero()
    low, high = places.min(0).values.tolist(), places.max(0).values.tolist()
    names = ["index"] if mask.ndim == 1 else ["row", "column"] if mask.ndim == 2 else [f"index {i}" for i in range(9)]
    parts = []
    for i, (a, b) in enumerate(zip(low, high, strict=True)):
        if (a, b) == (0, mask.shape[i] - 1):
            continue
        parts.append(f"{names[i]} {a}" if a == b else f"{names[i]} {a} to {b}")
    box = 1
    for a, b in zip(low, high, strict=True):
        box *= b - a + 1
    dense = "" if box == len(places) else "some of "
    return (dense + ", ".join(parts)) if parts else "scattered over all of it"


def _plain(want: Any, have: Any, rtol: float, name: str) -> list[Finding]:
    """What is wrong with values that are not tensors."""
    if isinstance(want, torch.Tensor):
        return []
    if isinstance(want, dict):
        return next((f for k in want if (f := _plain(want[k], have[k], rtol, f"{name} for {k!r}"))), [])
    if isinstance(want, tuple | list):
        return next((f for i, w in enumerate(want) if (f := _plain(w, have[i], rtol, f"part {i} of {name}"))), [])
    if isinstance(want, bool) or not isinstance(want, int | float):
        right = type(have) is type(want) and have == want
        shown = ""
    else:
        number = isinstance(have, int | float) and not isinstance(have, bool)
        finite = number and abs(have) < 1e300  # an int may be larger than every float
        right = number and have == want or finite and math.isclose(have, want, rel_tol=rtol)
        shown = f", {have / want:.3g} times what it should be" if finite and not right and want and have else ""
    return (
        []
        if right
        else [Finding("wrong-answer", f"{name.capitalize()} is {_called(have)}, which is not right{shown}.")]
    )
