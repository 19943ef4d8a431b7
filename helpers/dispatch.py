"""One operator, several implementations, and for each shape the one that was measured to be the fastest on this card.

    block = dispatch.Dispatcher("l12", OPERATORS)
    block.measure("linear_add", inputs)        # checks all implementations, times those that are right, keeps the times
    torch.ops.l12.linear_add(x, w, residual)   # the fastest of them for this shape; inside torch.compile, too
    block.linear_add(x, w, residual)           # the same; outside a graph it spares PyTorch's way to an operator

An `Operator` lists its implementations by rung. The first is its definition: PyTorch's own operators, which take every
shape and dtype. It is what the others are checked against, in float64, and the fallback where nothing was measured. An
implementation that fails to build here or gives wrong values is dropped, with the reason kept. One that raises
ValueError, before it has written anything, refuses these arguments alone: the next best runs. So an implementation
looks at its arguments itself, and the key that finds it holds no more than its time depends on. Times stay on disk, in
a file for each card and its versions (`Times`).
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import log2
from pathlib import Path

import torch
from filelock import FileLock

from . import ROOT, ladder, machine, records, show, timing

NEAR = 4
"""A time speaks for up to so many times as many rows, and as few, where those were not measured themselves."""

LOOSE = 4
"""An implementation may be off from float64 by so many times what the definition is off, in the inputs' own dtype."""

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, int, float})
"""What a call outside a graph may be made of: a tensor of another class may stand for one that is elsewhere."""


@dataclass(frozen=True)
class Implementation:
    """One way to run an operator.

    name: for tables and the file of times. rungs: those of `ladder.RUNGS` that it needs, its own last: a kernel in
    Triton around the library's product is ("library", "Triton"). make: loads or compiles it and returns a function with
    the operator's arguments; what it raises is the reason why the implementation is dropped. takes: whether it is for
    these arguments, told by nothing but what is in the operator's key.
    """

    name: str
    rungs: tuple[str, ...]
    make: Callable[[], Callable]
    takes: Callable[..., bool] = lambda *_: True

    @property
    def rung(self) -> str:
        return self.rungs[-1]


@dataclass(frozen=True)
class Operator:
    """What is computed, and the ways to do it.

    schema: torch's, such as "scale(Tensor x, float by) -> Tensor", a tensor first; "Tensor(a!) x" is one that is
    written. like: an empty result for given arguments, of its shape and dtype. key: (rows, kind) of arguments: how many
    rows, the number that changes from call to call, and what else a time depends on, anything hashable.
    implementations: the definition first.
    """

    schema: str
    like: Callable[..., torch.Tensor]
    key: Callable[..., tuple[int, tuple]]
    implementations: tuple[Implementation, ...]

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @property
    def definition(self) -> Implementation:
        return self.implementations[0]


class Times:
    """Measured times on disk: {operator: {kind: {rows: {implementation: µs}}}}, for one card and set of versions.

    The file's name has the card and a hash of `about`, and the file repeats `about`: one that was copied from another
    machine, or that cannot be read, is not believed; a note says so, and the next `add` replaces it. Writers take
    turns (a lock beside the file), and a reader never sees half a file.
    """

    def __init__(self, about: dict, folder: Path | None = None):
        self.about = {key: value for key, value in about.items() if key != "date"}
        name = "".join(c if c.isalnum() else "-" for c in about["gpu"].lower())
        code = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()[:10]
        self.path = (folder or machine.cache("dispatch")) / f"{name}-{code}.json"

    def read(self) -> dict:
        """The times; none where there is no file, or none to believe."""
        try:
            kept = json.loads(self.path.read_text())
            about, times = kept["about"], kept["times"]
            shapes = [shape for kinds in times.values() for rows in kinds.values() for shape in rows.items()]
            if not all(int(rows) > 0 for rows, _ in shapes):
                raise ValueError("a time of no rows")
            if not all(isinstance(us, float) and us > 0 for _, each in shapes for us in each.values()):
                raise ValueError("a time that is no positive number")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as why:
            show.note(f"{self.path.name} cannot be read ({why}): measure again. Fallbacks run until then.", "warning")
            return {}
        if about != self.about:
            other = ", ".join(f"{k} {about.get(k)}" for k in {*about, *self.about} if about.get(k) != self.about.get(k))
            show.note(f"{self.path.name} was measured with other versions ({other}): not used.", "warning")
            return {}
        return times

    def add(self, operator: str, kind: str, rows: int, us: dict[str, float]) -> dict:
        """Merge the times of one shape into the file; returns all that are in it then.

        OSError where the folder cannot be written, or its lock is not to be had in a minute.
        """
        with FileLock(f"{self.path}.lock", timeout=60):
            times = merged(self.read(), operator, kind, rows, us)
            half = self.path.with_suffix(f".{os.getpid()}")
            half.write_text(json.dumps({"about": self.about, "times": times}, indent=1))
            half.replace(self.path)
        return times


def merged(times: dict, operator: str, kind: str, rows: int, us: dict[str, float]) -> dict:
    """`times` with those of one more shape, in place of what it held of that."""
    times.setdefault(operator, {}).setdefault(kind, {})[str(rows)] = us
    return times


@dataclass(frozen=True)
class Checked:
    """What one implementation gave for one set of inputs: its error, the largest over the largest element, against
    float64; or why it is out. us: its time, where it was measured."""

    implementation: Implementation
    error: float | None
    why_not: str = ""
    us: float | None = None

    def row(self) -> dict:
        return {
            "implementation": self.implementation.name,
            "rung": self.implementation.rung,
            "error": "–" if self.error is None else self.error,
            "µs": "–" if self.us is None else self.us,
            "out because": self.why_not,
        }


class Dispatcher:
    """Operators of torch in the namespace `name`, each call of which runs the implementation chosen for its shape.

    A call goes through the attribute of the operator's name, or through `torch.ops`. A second dispatcher of the same
    name takes the first one's place. versions: what times depend on besides the card and the versions of
    `records.this_machine`, such as a hash of the kernels' text. folder: where the times are kept, by default this
    account's cache. A CUDA graph holds what was chosen when it was recorded.
    """

    _living: dict[str, torch.library.Library] = {}

    def __init__(self, name: str, operators: tuple[Operator, ...], versions: str = "", folder: Path | None = None):
        self.name, self.operators = name, {operator.name: operator for operator in operators}
        self.dropped: dict[tuple[str, str], str] = {}
        self.times = Times({**records.this_machine(), "kernels": versions}, folder)
        self._measured = self.times.read()
        self._without: frozenset[str] = frozenset()
        self._built: dict[tuple[str, str], Callable] = {}
        self._chosen: dict[str, dict] = {operator: {} for operator in self.operators}
        if name in self._living:
            self._living.pop(name)._destroy()
        self._living[name] = library = torch.library.Library(name, "DEF")
        for operator in operators:
            library.define(operator.schema)
            call, like = self._dispatched(operator), self._shaped(operator)
            for key in ("CPU", "CUDA"):
                library.impl(operator.name, call, key)
            torch.library.register_fake(f"{name}::{operator.name}", like, lib=library)
            setattr(self, operator.name, self._shortcut(operator))

    def __getattr__(self, name: str):
        raise AttributeError(f"{name!r} is no operator here: they are {', '.join(self.__dict__.get('operators', {}))}")

    # --- choosing: the first call of a shape; later ones find it in a dictionary ---

    def _dispatched(self, operator: Operator) -> Callable:
        """What torch calls, after its own dispatcher."""
        chosen, key = self._chosen[operator.name], operator.key

        def call(*args):
            if torch.is_grad_enabled():
                self._refuse_gradients(operator, args)
            try:
                run = chosen[key(*args)]
            except (KeyError, IndexError):
                return self._first(operator, args)
            try:
                return run(*args)
            except ValueError:
                return self._first(operator, args)

        return call

    def _shortcut(self, operator: Operator) -> Callable:
        """A call without torch's dispatcher, wherever nobody would miss it.

        Compilers, modes (a trace, fake tensors), functorch's transforms and tensors of other classes get the operator;
        so does what is called for the first time, or with arguments that its schema may refuse. What is left is the
        common case, and there each line counts: names are bound here once.
        """
        through = getattr(getattr(torch.ops, self.name), operator.name).default
        chosen, key, compiling, plain = self._chosen[operator.name], operator.key, torch.compiler.is_compiling, PLAIN
        graded, modes, traced = torch.is_grad_enabled, torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
        transforms = torch._C._functorch.peek_interpreter_stack

        def call(*args, **named):
            if compiling() or modes() or transforms() or traced() or named:
                return through(*args, **named)
            for arg in args:
                if type(arg) not in plain:
                    return through(*args)
            if graded():
                self._refuse_gradients(operator, args)
            try:
                run = chosen[key(*args)]
            except (KeyError, TypeError, IndexError):  # not known yet, or not what the schema says: it says so
                return through(*args)
            try:
                return run(*args)
            except ValueError:
                return self._first(operator, args)

        return call

    def _shaped(self, operator: Operator) -> Callable:
        def like(*args):
            if torch.is_grad_enabled():
                self._refuse_gradients(operator, args)
            return operator.like(*args)

        return like

    def _refuse_gradients(self, operator: Operator, args: tuple) -> None:
        if any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            raise NotImplementedError(
                f"{self.name}::{operator.name} has no backward: its kernels compute results alone. Call it under "
                "torch.no_grad(); to train, call the operator's definition, which PyTorch differentiates."
            )

    def _first(self, operator: Operator, args: tuple):
        """The first call of a shape, or one that was refused: the best candidate that runs. One that fails is dropped
        if a later one takes the same arguments; else they are at fault, and what the definition says of them is raised.
        Memory that is short is no fault of a candidate.
        """
        if args[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return self._recorded(operator, args)
        try:
            key = operator.key(*args)
        except IndexError:  # fewer dimensions than an operator of these is for: its definition has the word
            return self._build(operator, operator.definition)(*args)
        failed, refused = {}, False
        for candidate in self.candidates(operator.name, *args):
            try:
                run = self._build(operator, candidate)
                out = run(*args)
            except Exception as why:
                if candidate is operator.definition:
                    raise
                if isinstance(why, (ValueError, torch.OutOfMemoryError)):
                    refused = True
                else:
                    failed[operator.name, candidate.name] = _reason(why)
                continue
            self.dropped |= failed
            if not refused:
                self._chosen[operator.name][key] = run
            return out

    def _recorded(self, operator: Operator, args: tuple):
        """The definition: nothing is built, compiled or tuned while a CUDA graph is recorded."""
        show.note(
            f"{self.name}::{operator.name} was recorded into a CUDA graph before a call of this shape had run: the "
            "graph holds its definition. Call it once, then record.",
            "warning",
        )
        return self._build(operator, operator.definition)(*args)

    def _build(self, operator: Operator, implementation: Implementation) -> Callable:
        key = operator.name, implementation.name
        if key not in self._built:
            self._built[key] = implementation.make()
        return self._built[key]

    def candidates(self, operator: str, *args) -> list[Implementation]:
        """What may run for these arguments, the best first. The definition stands where its time puts it; behind all
        others where its own rung is out; and it is the only one where nothing near was measured."""
        found = self.operators[operator]
        _, us = self._nearest(operator, *found.key(*args))
        able = [each for each in found.implementations if each.name in us and self._usable(found, each, args)]
        ranked = sorted(able, key=lambda each: us[each.name])
        return ranked if found.definition in ranked else [*ranked, found.definition]

    def _usable(self, operator: Operator, implementation: Implementation, args: tuple) -> bool:
        out = (operator.name, implementation.name) in self.dropped or self._without & set(implementation.rungs)
        return not out and implementation.takes(*args)

    def _nearest(self, operator: str, rows: int, kind: tuple) -> tuple[int | None, dict[str, float]]:
        """The measured number of rows that is nearest to `rows`, within NEAR times, and its times; else none."""
        measured = {int(n): us for n, us in self._measured.get(operator, {}).get(str(kind), {}).items()}
        near = min(measured, key=lambda n: abs(log2(n) - log2(max(rows, 1))), default=None)
        if near is None or not near / NEAR <= max(rows, 1) <= near * NEAR:
            return None, {}
        return near, measured[near]

    def choice(self, operator: str, *args) -> tuple[Implementation, str]:
        """What a call with these arguments would run first, and why, in a few words."""
        rows, kind = self.operators[operator].key(*args)
        near, us = self._nearest(operator, rows, kind)
        first = self.candidates(operator, *args)[0]
        if first.name not in us:
            return first, "the definition: not measured" if near is None else "the definition: no other is left"
        return first, "measured" if near == rows else f"measured for {near} rows"

    # --- measuring ---

    def check(self, operator: str, inputs: Callable[[], tuple]) -> list[Checked]:
        """Run every implementation on `inputs()` and compare result and written arguments with the definition in
        float64, and the result's form with what the compiler is told. Those that fail are dropped, and their rows say
        why."""
        found, given = self.operators[operator], inputs()
        exact = _wide(_fresh(given))
        exact = [self._build(found, found.definition)(*exact), *exact]
        out, allowed = [], 0.0
        for each in found.implementations:
            if (operator, each.name) in self.dropped or not each.takes(*given):
                continue
            args = _fresh(given)
            try:
                result = self._build(found, each)(*args)
                error = _error([result, *args], exact)
            except Exception as why:
                if each is found.definition:
                    raise
                refused = isinstance(why, ValueError)
                out.append(Checked(each, None, _reason(why)) if refused else self._drop(found, each, _reason(why)))
                continue
            allowed = allowed or LOOSE * max(error, torch.finfo(given[0].dtype).eps)
            form, due = _form(result), _form(found.like(*given))
            if not error <= allowed:
                out.append(self._drop(found, each, f"wrong values: off by {error:.1e}, {allowed:.1e} allowed", error))
            elif form != due:
                out.append(self._drop(found, each, f"a result that is {form}, where {due} is due", error))
            else:
                out.append(Checked(each, error))
        return out

    def _drop(self, operator: Operator, implementation: Implementation, why: str, error=None) -> Checked:
        self.dropped[operator.name, implementation.name] = why
        self._chosen[operator.name].clear()
        return Checked(implementation, error, why)

    def measure(self, operator: str, inputs: Callable[[], tuple], rounds: int = timing.ROUNDS) -> list[Checked]:
        """`check`, then time those that passed, keep the times, and choose anew. inputs: as for `timing.compare`.

        `machine.NotReady` in CPU mode, where nothing can be timed and definitions run.
        """
        found = self.operators[operator]
        size, kind = found.key(*inputs())
        if size < 1:
            raise ValueError(f"{operator} of no rows has no time to measure; its definition runs")
        rows = self.check(operator, inputs)
        right = {row.implementation.name: self._build(found, row.implementation) for row in rows if not row.why_not}
        us = {name: time.value for name, time in timing.compare(right, inputs, rounds).items()}
        try:
            self._measured = self.times.add(operator, str(kind), size, us)
        except OSError as why:
            show.note(f"the times hold for this process alone: they cannot be kept ({_reason(why)})", "warning")
            self._measured = merged(self._measured, operator, str(kind), size, us)
        self._chosen[operator].clear()
        return [Checked(row.implementation, row.error, row.why_not, us.get(row.implementation.name)) for row in rows]

    @contextmanager
    def without(self, *rungs: str) -> Iterator[None]:
        """While it is entered, the implementations of these rungs are out; definitions stay, being the fallback.

        ValueError for what is no rung of `ladder.RUNGS`.
        """
        if unknown := set(rungs) - set(ladder.RUNGS):
            raise ValueError(f"the rungs are {', '.join(ladder.RUNGS)}, not {', '.join(sorted(unknown))}")
        before, self._without = self._without, self._without | set(rungs)
        try:
            self._forget()
            yield
        finally:
            self._without = before
            self._forget()

    def _forget(self) -> None:
        for chosen in self._chosen.values():
            chosen.clear()


def stamp(*files: str) -> str:
    """A hash of the code in these files of notebooks/, for a `Dispatcher`'s versions."""
    texts = []
    for name in files:
        text = (ROOT / "notebooks" / name).read_text(encoding="utf-8")
        if name.endswith(".ipynb"):
            text = "".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code")
        texts.append(text)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:10]


def _reason(why: Exception) -> str:
    """The first line of what was raised."""
    return f"{type(why).__name__}: {(str(why).strip() or 'no reason given').splitlines()[0]}"


def _fresh(args: tuple) -> tuple:
    """The same arguments, tensors copied: an operator may write them."""
    return tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)


def _form(result) -> str:
    """What torch.compile takes for granted of a result."""
    if not isinstance(result, torch.Tensor):
        return type(result).__name__
    return f"{tuple(result.shape)} {result.dtype}{'' if result.is_contiguous() else f', strides {result.stride()}'}"


def _wide(args: tuple) -> tuple:
    return tuple(arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args)


def _error(found: list, exact: list) -> float:
    """The largest error of any tensor over its largest element; infinite where shapes differ or NaN appears."""
    worst = 0.0
    for one, other in zip(found, exact, strict=True):
        if not isinstance(other, torch.Tensor) or not other.is_floating_point() or not other.numel():
            continue
        if one.shape != other.shape:
            return float("inf")
        off = ((one.double() - other).abs().max() / other.abs().max().clamp(min=1e-30)).item()
        worst = max(worst, off if off == off else float("inf"))
    return worst
