"""Triton's interpreter, made strict: in CPU mode it refuses what a GPU would corrupt, and counts what is asked for.

`install()` (called by `import helpers` in CPU mode) wraps the interpreter so that
- a lane of a load, store or atomic outside its tensor raises `OutOfBounds` before memory is touched. The valid region
  of an argument is the span of its view, from its lowest to its highest address; pointers derived from an argument
  by arithmetic, broadcasting and block pointers are held to that argument, others to any argument of the launch;
- lanes of one store that write different values to one address raise `Race`: which of them stays is chance;
- an address that two programs touch, one of them writing without an atomic, raises `Race`: on a GPU they run at the
  same time. Programs ordered by a scalar atomic on the same address (a lock, a counter of finished programs) are
  taken to be synchronised. Accesses narrower than the tensor's elements are not checked for races;
- lanes of a load that are masked off and have no `other` hold NaN, or 85 where they are integers, not 0;
- bfloat16 raises `Unsupported`, since the interpreter computes it wrongly without saying so;
- `tl.multiple_of(x, n)` raises `Untrue` where x, or the first of a block, is no multiple: a GPU's compiler believes it;
- `and`, `or`, `not` and `if` on a block raise `Unsupported`: the interpreter takes every block for true;
- a tensor descriptor's atomics work: the interpreter lacks them;
- `triton.autotune` picks the first configuration, as CPU times say nothing about a GPU's.
What it cannot see: a load of what other lanes of the same program stored (a GPU needs `tl.debug_barrier` between),
and wrong addresses that lie inside the tensor.
"""

import dis
import itertools
import mmap
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path

import numpy as np

SECTOR_BYTES = 32
"""The unit in which a GPU's L2 cache moves memory."""

_HERE = __file__
_MANY = -1  # in a shadow: more than one program
_logs: list["Log"] = []
_launch: "_Launch | None" = None
_launches = itertools.count()
_idle = False


class _Refusal:
    """Shown by IPython without a traceback: the message holds the kernel's line."""

    def _render_traceback_(self):
        return [f"{type(self).__name__}: {self}"]


class OutOfBounds(_Refusal, IndexError):
    """Lanes of an access fall outside their tensor."""


class Race(_Refusal, RuntimeError):
    """Two programs, or two lanes of a store, touch one address, and one of them writes it without an atomic."""


class Untrue(_Refusal, ValueError):
    """A kernel promises its compiler what does not hold."""


class Unsupported(_Refusal, TypeError):
    """The interpreter cannot compute this rightly."""


@dataclass
class Log:
    """What interpreted kernels asked for. Bytes are those of unmasked lanes, repeated addresses included; an atomic
    counts as a read and a write. Sectors are the distinct 32-byte pieces of each access, summed over accesses; an
    access is one `tl.load`, `tl.store` or atomic of one program. `program_bytes` are those of the program that asked
    for most. wave: how many programs, in the order in which a GPU starts them, are
    taken to run at once and to share what they load; 0 where nobody asks for `wave_bytes`."""

    bytes_read: int = 0
    bytes_written: int = 0
    sectors_read: int = 0
    sectors_written: int = 0
    programs: int = 0
    program_bytes: int = 0
    wave: int = 0
    loaded: dict[tuple, list[np.ndarray]] = field(default_factory=dict)
    """Addresses by (launch, wave, bytes of an element)."""
    _before: int = 0

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def sectors(self) -> int:
        return self.sectors_read + self.sectors_written

    @property
    def wave_bytes(self) -> int:
        """The distinct bytes that each wave loads, summed: what comes from memory where a cache holds one wave's."""
        return sum(np.unique(np.concatenate(parts)).size * key[-1] for key, parts in self.loaded.items())


@contextmanager
def record(wave: int = 0):
    """`with record() as log:` counts the kernels launched inside it. In GPU mode nothing is interpreted, so it raises
    RuntimeError rather than count nothing. wave: as in `Log`."""
    if not _installed():
        raise RuntimeError(
            "Requested bytes are counted by Triton's interpreter, which runs in CPU mode only: "
            "HELPERS_MODE=cpu, set before helpers is imported."
        )
    log = Log(wave=wave)
    _logs.append(log)
    try:
        yield log
    finally:
        _logs[:] = [other for other in _logs if other is not log]


@contextmanager
def idle():
    """Inside it, kernels that are interpreted get of a `tl.dot` what it adds to, and no product."""
    global _idle
    _idle = True
    try:
        yield
    finally:
        _idle = False


# ------------------------------------------------------------------------------------------------------------


@dataclass
class _Region:
    """The bytes from `low` to `high` that a tensor argument's view spans."""

    name: str
    low: int
    high: int
    item: int
    shadow: "_Shadow"

    def holds(self, low: int, high: int) -> bool:
        return self.low <= low and high <= self.high


@dataclass
class _Shadow:
    """Which programs touched each element of a storage: 0 none, the program's number from 1, or `_MANY`."""

    low: int
    high: int
    item: int
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def of(self, kind: str) -> np.ndarray:
        if kind not in self.arrays:
            elements = -(-(self.high - self.low) // self.item)
            # memory that is only there where it is touched: a view may span gigabytes between its rows
            self.arrays[kind] = np.frombuffer(mmap.mmap(-1, max(elements, 1) * 4), np.int32)
        return self.arrays[kind]


def span(tensor) -> tuple[int, int]:
    """The lowest address of a torch view, and one past its highest; equal where it has no element."""
    low = tensor.data_ptr()
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (reach + 1) * tensor.element_size() if tensor.numel() else low


class _Launch:
    """One launch: its arguments' regions, who touched what, and the program that runs now."""

    def __init__(self, named_args):
        self.regions, self.program, self.turn, self.number = [], 0, 0, next(_launches)
        self.released: dict[int, set] = {}  # by address of a scalar atomic: the programs that went through it
        self.acquired: list[set] = []  # those that the running program is ordered after
        shadows: dict[int, _Shadow] = {}
        for name, tensor in named_args:
            (low, high), item = span(tensor), tensor.element_size()
            shadow = shadows.setdefault(tensor.untyped_storage().data_ptr(), _Shadow(low, high, item))
            shadow.low, shadow.high = min(shadow.low, low), max(shadow.high, high)
            shadow.item = min(shadow.item, item)
            self.regions.append(_Region(name, low, high, item, shadow))

    def region_of(self, tensor) -> _Region | None:
        return next((r for r in self.regions if (r.low, r.high) == span(tensor)), None)

    def begin(self, number: int, turn: int) -> None:
        """A program starts. number: in the interpreter's order; turn: in a GPU's, where x runs fastest."""
        self.program, self.turn, self.acquired = number + 1, turn, []

    def check(self, access: str, addresses: np.ndarray, size: int, origin: _Region | None) -> None:
        low, high = int(addresses.min()), int(addresses.max()) + size
        allowed = [origin] if origin else self.regions
        inside = next((r for r in allowed if r.holds(low, high)), None)
        if inside:
            self._watch(access, addresses, size, inside)
            return
        outside = np.ones(addresses.shape, bool)
        for region in allowed:
            mine = (addresses >= region.low) & (addresses + np.uint64(size) <= region.high)
            outside &= ~mine
        if outside.any():
            raise OutOfBounds(self._outside(access, addresses, outside, origin))
        for region in allowed:
            mine = (addresses >= region.low) & (addresses < region.high)
            if mine.any():
                self._watch(access, addresses[mine], size, region)

    def _outside(self, access, addresses, outside, origin) -> str:
        lanes = f"{int(outside.sum())} of the {outside.size} unmasked lanes"
        where = "outside every tensor that the kernel was given"
        if origin:
            past = (int(addresses.max()) + origin.item - origin.high) // origin.item
            before = -(-(origin.low - int(addresses.min())) // origin.item)
            ways = [f"{_elements(past)} past its end"] * (past > 0)
            ways += [f"{_elements(before)} before its start"] * (before > 0)
            spans = _elements((origin.high - origin.low) // origin.item)
            where = f"outside {origin.name}, which spans {spans}: up to {' and '.join(ways)}"
        program = f"in program {_shown(self.program)}"
        return f"Out of bounds in {_place()}: {lanes} of this {access}, {program}, fall {where}."

    def _watch(self, access: str, addresses, size: int, region: _Region) -> None:
        shadow = region.shadow
        if size < shadow.item:
            return
        index = ((addresses - np.uint64(shadow.low)) // np.uint64(shadow.item)).astype(np.int64)
        if size > shadow.item:
            index = (index[:, None] + np.arange(size // shadow.item)).reshape(-1)
        rivals = {
            "load": ("store", "atomic"),
            "atomic": ("store", "load"),
            "store": ("store", "load", "atomic"),
        }
        for rival in rivals[access]:
            if rival in shadow.arrays:
                touched = shadow.of(rival)[index]
                others = (touched != 0) & (touched != self.program)
                if others.any():
                    self._conflict(access, rival, touched[others], index[others], region)
        mine = shadow.of(access)
        if access == "store":
            mine[index] = self.program
        else:
            now = mine[index]
            mine[index] = np.where((now == 0) | (now == self.program), self.program, _MANY)

    def _conflict(self, access, rival, touched, index, region) -> None:
        ordered = set().union(*self.acquired)
        unordered = [p for p in np.unique(touched).tolist() if p not in ordered and not (p == _MANY and ordered)]
        if not unordered:
            return
        element = int(index[touched == unordered[0]][0]) * region.shadow.item + region.shadow.low
        names = " or ".join(r.name for r in self.regions if r.shadow is region.shadow and r.holds(element, element + 1))
        number = (element - region.low) // region.item
        other = "several programs" if unordered[0] == _MANY else f"program {_shown(unordered[0])}"
        raise Race(
            f"Race in {_place()}: this {access} of program {_shown(self.program)} touches element {number} of {names}, "
            f"which a {rival} of {other} touches too. On a GPU they run at the same time, in no order: "
            "give each program addresses of its own, or use an atomic."
        )

    def collision(self, address: int, origin: _Region | None) -> None:
        """Raise what two lanes of one store do at an address."""
        region = origin or next(r for r in self.regions if r.holds(address, address + 1))
        number = (address - region.low) // region.item
        raise Race(
            f"Race in {_place()}: lanes of this store, in program {_shown(self.program)}, write different values to "
            f"element {number} of {region.name}, and which one stays is chance on a GPU: "
            "give each lane an address of its own, mask all but one, or use an atomic."
        )

    def order(self, address: int) -> None:
        """A scalar atomic with acquire and release: this program comes after those that went through the address."""
        before = self.released.setdefault(address, set())
        for known in self.acquired:
            if known is not before:
                before |= known
        before.add(self.program)
        if not any(known is before for known in self.acquired):
            self.acquired.append(before)


def _lanes(mask) -> np.ndarray:
    """A mask as booleans: Triton's interpreter makes integers of one that a single comparison was spread over."""
    return np.asarray(mask if isinstance(mask, np.ndarray) else mask.data, dtype=bool)


def _access(access: str, pointers, mask) -> None:
    if _launch is None:
        return
    addresses = pointers.data
    if mask is not None:
        kept = _lanes(mask)
        addresses = addresses.reshape(-1) if kept.all() else np.broadcast_to(addresses, kept.shape)[kept]
    addresses = addresses.reshape(-1)
    if not addresses.size:
        return
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    _launch.check(access, addresses, size, getattr(pointers, "origin", None))
    if _logs:
        sectors = addresses // np.uint64(SECTOR_BYTES)
        steps = np.diff(sectors.astype(np.int64))
        distinct = int(np.count_nonzero(steps)) + 1 if (steps >= 0).all() else np.unique(sectors).size
        for log in _logs:
            if access != "store":
                log.bytes_read += addresses.size * size
                log.sectors_read += distinct
                if log.wave:
                    key = (_launch.number, _launch.turn // log.wave, size)
                    log.loaded.setdefault(key, []).append(np.unique(addresses))
            if access != "load":
                log.bytes_written += addresses.size * size
                log.sectors_written += distinct * (access == "store")
            log.program_bytes = max(log.program_bytes, log.bytes - log._before)


def _collide(pointers, value, mask) -> None:
    """Refuse a store whose lanes leave different values at one address; equal ones do no harm."""
    if _launch is None:
        return
    kept = np.broadcast_to(_lanes(mask), pointers.data.shape)
    addresses = pointers.data[kept]
    steps = np.diff(addresses.astype(np.int64))
    if (steps > 0).all() or (steps < 0).all():  # the common case, for the price of a difference
        return
    found, first, which = np.unique(addresses, return_index=True, return_inverse=True)
    if found.size == addresses.size:
        return
    values = np.broadcast_to(value.data, kept.shape)[kept]
    rival = values[first][which.reshape(-1)]
    differ = (values != rival) & ((values == values) | (rival == rival))  # two NaN are alike
    if differ.any():
        _launch.collision(int(addresses[differ][0]), getattr(pointers, "origin", None))


def _elements(count: int) -> str:
    return f"{count} element{'s' * (count != 1)}"


def _place() -> str:
    """The reader's line that runs now: the innermost frame that is neither Triton's nor numpy's nor this file's."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename == _HERE or _is_library(frame.f_code.co_filename)):
        frame = frame.f_back
    import linecache

    name, line = frame.f_code.co_filename, frame.f_lineno
    file = "" if "ipykernel" in name or name.startswith("<") else f" of {Path(name).name}"
    text = linecache.getline(name, line).strip()
    return f"{frame.f_code.co_name}, line {line}{file}" + (f" (`{text}`)" if text else "")


def _is_library(filename: str) -> bool:
    folders = [Path(sys.modules[m].__file__).parent for m in ("triton", "numpy")]
    return any(filename.startswith(f"{folder}/") for folder in folders)


def _shown(program: int) -> str:
    from triton.runtime.interpreter import interpreter_builder

    x, y, z = interpreter_builder.grid_dim
    n = program - 1
    return str(n) if y == z == 1 else str((n // (y * z), n // z % y, n % z)[: 2 if z == 1 else 3])


def _tensors(names, values):
    for name, value in zip(names, values, strict=False):
        if isinstance(value, tuple):
            yield from _tensors([f"{name}[{i}]" for i in range(len(value))], value)
        elif hasattr(value, "block_shape") and hasattr(value, "base"):  # a tensor descriptor
            yield name, value.base
        elif hasattr(value, "data_ptr"):
            yield name, getattr(value, "base", value)  # a TensorWrapper reinterprets its base


# ------------------------------------------------------------------------------------------------------------


def _installed() -> bool:
    module = sys.modules.get("triton.runtime.interpreter")
    return hasattr(module, "_helpers_installed")


def install() -> None:
    """Wrap the interpreter, once. Does nothing where Triton is not installed."""
    try:
        from triton.runtime import driver
        from triton.runtime import interpreter as it
    except ModuleNotFoundError:
        return
    if _installed():
        return
    it._helpers_installed = True
    driver.set_active(_Driver())
    _watch_memory(it)
    _keep_origins(it)
    _watch_launches(it)
    _watch_promises(it)
    _mend_index(it)
    _combine_blocks(it)


def _watch_memory(it) -> None:
    builder = it.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas
    dot = builder.create_dot

    def create_masked_load(self, ptrs, mask, other, *rest, **named):
        _access("load", ptrs, mask)
        if other is None and not _lanes(mask).all():
            other = undefined(ptrs)
        return load(self, ptrs, mask, other, *rest, **named)

    def undefined(ptrs):
        """For lanes that are masked off and have no `other`: a GPU may put anything there, and the interpreter 0."""
        dtype = ptrs.get_element_ty()
        kind = it._get_np_dtype(dtype)
        value = np.nan if kind.kind == "f" else True if kind.kind == "b" else np.array(0x55, kind)
        return it.TensorHandle(np.full(ptrs.data.shape, value, kind), dtype)

    def create_masked_store(self, ptrs, value, mask, *rest, **named):
        _access("store", ptrs, mask)
        _collide(ptrs, value, mask)
        return store(self, ptrs, value, mask, *rest, **named)

    def ordering(ptr, sem):
        if _launch and ptr.data.size == 1 and "RELAXED" not in str(sem).upper():
            _launch.order(int(ptr.data.reshape(-1)[0]))

    def create_atomic_rmw(self, op, ptr, value, mask, sem, scope):
        _access("atomic", ptr, mask)
        ordering(ptr, sem)
        return rmw(self, op, ptr, value, mask, sem, scope)

    def create_atomic_cas(self, ptr, compare, value, sem, scope):
        _access("atomic", ptr, None)
        ordering(ptr, sem)
        return cas(self, ptr, compare, value, sem, scope)

    def create_dot(self, a, b, d, *rest, **named):
        return d if _idle else dot(self, a, b, d, *rest, **named)

    def create_descriptor_reduce(self, kind, desc, value, indices):
        """`desc.atomic_add` and its like, which the interpreter lacks."""
        operation, dtype = kind.name, value.dtype.scalar
        if dtype.is_floating():
            if operation != "ADD":
                raise Unsupported(f"{_place()}: the interpreter has no atomic {operation.lower()} of fractions.")
            operation = "FADD"
        elif operation in ("MIN", "MAX") and dtype.is_int_unsigned():
            operation = f"U{operation}"
        pointers, inside = desc.materialize_pointers(indices)
        named = it._ir.ATOMIC_OP.__members__[operation]
        relaxed, gpu = it._ir.MEM_SEMANTIC.RELAXED, it._ir.MEM_SYNC_SCOPE.GPU
        return self.create_atomic_rmw(named, pointers, value, it.TensorHandle(inside, it.tl.int1), relaxed, gpu)

    def get_bf16_ty(self, *_):
        raise Unsupported(f"bfloat16 in {_place()}: {_BF16}")

    builder.get_bf16 = get_bf16_ty  # a constant's
    for method in (
        create_masked_load,
        create_masked_store,
        create_atomic_rmw,
        create_atomic_cas,
        create_dot,
        create_descriptor_reduce,
        get_bf16_ty,
    ):
        setattr(builder, method.__name__, method)


_BF16 = (
    "Triton's interpreter gets bfloat16 arithmetic wrong without saying so. In CPU mode use torch.float16 "
    "(tl.float16), which moves the same bytes."
)


def _keep_origins(it) -> None:
    """Pointers remember the argument they come from, through arithmetic and changes of shape."""

    def keeps(method):
        @wraps(method)
        def wrapped(self, *args, **named):
            out = method(self, *args, **named)
            origin = next((a.origin for a in args if hasattr(a, "origin")), None)
            if origin is not None and hasattr(out, "dtype"):
                out.origin = origin
            return out

        return wrapped

    for name in ["addptr", "splat", "unsplat", "broadcast", "expand_dims", "reshape", "trans", "bitcast"]:
        method = getattr(it.InterpreterBuilder, f"create_{name}", None)
        if method is not None:
            setattr(it.InterpreterBuilder, f"create_{name}", keeps(method))

    def keeps_base(method):
        @wraps(method)
        def wrapped(self, *args):
            pointers, mask = method(self, *args)
            if hasattr(self.base, "origin"):
                pointers.origin = self.base.origin
            return pointers, mask

        return wrapped

    for handle in (it.BlockPointerHandle, it.TensorDescHandle):
        handle.materialize_pointers = keeps_base(handle.materialize_pointers)
    convert = it._implicit_cvt

    def _implicit_cvt(arg):
        out = convert(arg)
        if hasattr(arg, "data_ptr") and _launch is not None:
            region = _launch.region_of(getattr(arg, "base", arg))
            if region is not None:
                out.handle.origin = region
        return out

    it._implicit_cvt = _implicit_cvt


def _watch_launches(it) -> None:
    executor, builder = it.GridExecutor, it.InterpreterBuilder
    init_args, call, set_index = executor._init_args_hst, executor.__call__, builder.set_grid_idx

    def _init_args_hst(self, args, kwargs):
        global _launch
        args_hst, kwargs_hst = init_args(self, args, kwargs)
        tensors = list(_tensors([*self.arg_names, *kwargs_hst], [*args_hst]))
        tensors += list(_tensors(kwargs_hst, kwargs_hst.values()))
        for name, tensor in tensors:
            if str(tensor.dtype) == "torch.bfloat16":
                raise Unsupported(f"{name} is a bfloat16 tensor: {_BF16}")
        _launch = _Launch(tensors)
        return args_hst, kwargs_hst

    def set_grid_idx(self, x, y, z):
        set_index(self, x, y, z)
        if _launch is not None:
            across, down, deep = self.grid_dim
            _launch.begin((x * down + y) * deep + z, (z * down + y) * across + x)
            for log in _logs:
                log.programs += 1
                log._before = log.bytes

    def __call__(self, *args, **kwargs):
        global _launch
        try:
            return call(self, *args, **kwargs)
        except it.InterpreterError as e:
            cause = e
            while cause is not None and not isinstance(cause, _Refusal):
                cause = cause.__cause__
            if cause is None:
                raise
        finally:
            _launch = None
        raise cause.with_traceback(None)

    executor._init_args_hst, executor.__call__, builder.set_grid_idx = _init_args_hst, __call__, set_grid_idx


def _watch_promises(it) -> None:
    """Divisibility is what wide loads rest on: a GPU faults, or reads something else, where it is not there."""
    handle = it.TensorHandle
    plain = handle.set_attr

    def set_attr(self, key, value):
        if key == "tt.divisibility" and len(value) == 1 and self.data.size:
            first, divisor = int(self.data.flat[0]), int(value[0])
            if first % divisor:
                what = f"{first} is" if self.data.size == 1 else f"a block that begins with {first} is"
                raise Untrue(
                    f"{_place()}: tl.multiple_of promises a multiple of {divisor}, and {what} given. A GPU's compiler "
                    "believes that, and loads from wrong places, or faults."
                )
        return plain(self, key, value)

    handle.set_attr = set_attr


def _mend_index(it) -> None:
    """Triton 3.6 with numpy 2.4 fails where a run-time scalar is an index, as in `range(0, n, BLOCK)`; and every block
    is true."""
    patch = it._patch_lang_tensor

    def truth(self) -> bool:
        if self.handle.data.size == 1:
            return bool(self.handle.data)
        if not _is_library(sys._getframe(1).f_code.co_filename):  # Triton itself asks so whether there is a mask
            raise Unsupported(
                f"{_place()}: a block has no single truth value, as `if`, `and`, `or` and `not` ask for. Write & and | "
                "between comparisons in parentheses, and tl.where in place of if."
            )
        return True

    def _patch_lang_tensor(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])
        tensor.__bool__ = truth

    it._patch_lang_tensor = _patch_lang_tensor


def _combine_blocks(it) -> None:
    """`tl.reduce` and `tl.associative_scan` combine halves of a block at once, where the interpreter goes element by
    element and `tl.sort` takes seconds. A function that branches is left to it: a branch is for a single element."""

    def combined(op, like, left, right) -> list:
        def tensors(arrays):
            return [op.to_tensor(array, t.dtype) for array, t in zip(arrays, like, strict=True)]

        out = op.combine_fn.fn(*tensors(left), *tensors(right))
        out = out if isinstance(out, tuple) else (out,)
        values = [getattr(getattr(o, "handle", None), "data", o) for o in out]
        return [np.broadcast_to(v, a.shape).astype(a.dtype) for v, a in zip(values, left, strict=True)]

    reduce, scan = it.ReduceOps.generic_reduce, it.ScanOps.generic_scan

    def generic_reduce(self, given):
        if self.axis is None or _branches(self.combine_fn):
            return reduce(self, given)
        parts = [np.moveaxis(t.handle.data, self.axis, 0) for t in given]
        while len(parts[0]) > 1:
            parts = combined(self, given, [p[0::2] for p in parts], [p[1::2] for p in parts])
        parts = [np.moveaxis(p, 0, self.axis) if self.keep_dims else p[0] for p in parts]
        return [self.to_tensor(p, t.dtype) for p, t in zip(parts, given, strict=True)]

    def generic_scan(self, given):
        if _branches(self.combine_fn):
            return scan(self, given)
        parts = [np.moveaxis(t.handle.data, self.axis, 0) for t in given]
        place, step = np.arange(len(parts[0])), 1
        while step < len(place):
            after = combined(self, given, [p[np.maximum(place - step, 0)] for p in parts], parts)
            parts = [np.concatenate([p[:step], a[step:]]) for p, a in zip(parts, after, strict=True)]
            step *= 2
        return [self.to_tensor(np.moveaxis(p, 0, self.axis), t.dtype) for p, t in zip(parts, given, strict=True)]

    it.ReduceOps.generic_reduce, it.ScanOps.generic_scan = generic_reduce, generic_scan


def _branches(kernel) -> bool:
    """Whether a kernel's function, or one that it calls, has a branch or a loop."""
    function = kernel.fn
    called = [function.__globals__.get(name) for name in function.__code__.co_names]
    if any("JUMP" in step.opname for step in dis.get_instructions(function)):
        return True
    return any(_branches(k) for k in called if hasattr(k, "fn") and k is not kernel)


class _Driver:
    """Stands where Triton looks for a GPU's driver: enough for `triton.autotune` and for code that asks for SMs."""

    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {
            "multiprocessor_count": 132,
            "max_shared_mem": 232448,
            "max_num_regs": 65536,
            "warpSize": 32,
        }
    )

    def get_benchmarker(self):
        return lambda kernel_call, quantiles=None, **options: [1.0] * len(quantiles or (0.5,))

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def __getattr__(self, name):
        raise AttributeError(
            f"There is no GPU driver in CPU mode (Triton asked it for {name}): GPU times exist on a GPU only."
        )
