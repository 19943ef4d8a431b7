"""Bytes: the least an operation must move, what a program asks for, what the DRAM counters saw.

`least` is arithmetic. `requested` counts what a program's loads and stores ask for. `measured`, `durations` and
`profile` run Nsight Compute on a copy of the notebook's code in a child process, because counters need the profiler
around the whole process. What goes to the child is the text that the named functions need (`helpers.source`): they
take no arguments and are defined at the top level of a cell, like the tensors they use.
"""

import ast
import csv
import hashlib
import io
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path

from . import child, cuda, interpreter, locks, machine, show, source
from .cuda import nvrtc
from .records import Measurement

READ, WRITTEN, DURATION = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
IN_RANGES = ["--replay-mode", "app-range"]
"""Of `Program`: counts around all that a program does from its cudaProfilerStart to its cudaProfilerStop."""


@dataclass(frozen=True)
class Bytes:
    """Bytes that one call moved, by direction."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def least(reads=(), writes=()) -> int:
    """The least bytes an operation must move: each input read once, each output written once.

    reads, writes: tensors (anything with `numel()` and `element_size()`).
    """
    return sum(t.numel() * t.element_size() for t in (*reads, *writes))


def requested(call: Callable[[], object]) -> Bytes:
    """The bytes that loads and stores of Triton and CUDA C kernels ask for, counted as CPU mode runs them.

    A GPU does not count them; beside one, call this in `child.run(..., interpreted=True)`, as lesson 01 does.
    Errors: `machine.NotReady` in GPU mode.
    """
    if machine.gpu():
        raise machine.NotReady(
            "What kernels ask for is counted by the interpreter and the CPU runner, and GPU mode uses neither.",
            "HELPERS_MODE=cpu, set before the notebook's kernel starts",
        )
    with interpreter.record() as log, cuda.record() as launches:
        call()
    return Bytes(
        log.bytes_read + sum(launch.bytes_read for launch in launches),
        log.bytes_written + sum(launch.bytes_written for launch in launches),
    )


def measured(*functions: Callable[[], object], given: dict | None = None) -> dict[str, Bytes]:
    """The bytes that each function moved between L2 and DRAM in one call, by name: hardware counters, warm.

    `given`: names that the functions read as globals, and plain values for them in place of the notebook's.

    Memory copies and fills that the driver does without a kernel are counted too, because the counters are read
    around the call as a whole. Errors: `machine.NotReady` without a GPU, Nsight Compute or permission to count.
    """
    rows = _ncu(functions, [READ, WRITTEN], IN_RANGES, repeats=1, given=given, marker=False)
    return {
        f.__name__: Bytes(*(int(_value(row, m)) for m in (READ, WRITTEN)))
        for f, row in zip(functions, rows, strict=True)
    }


def warm(*, inductor: bool = False) -> None:
    """Start the process that the next `measured` will need, without waiting for it: importing what a notebook imports,
    under Nsight Compute, takes most of its time. inductor: its functions are compiled by torch.compile, whose own
    imports take seconds more. In CPU mode and without Nsight Compute nothing is started."""
    if machine.gpu() and not _ahead:
        more = ["torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx"] * inductor
        with suppress(machine.NotReady):
            _ahead.append(Program([READ, WRITTEN], IN_RANGES, ahead=True, packages=more))


_ahead: list["Program"] = []
"""What `warm` has started and nobody has used, one at most."""


class Program:
    """A Python program under Nsight Compute: it imports what notebooks do, then runs the text that it is given.

    metrics, options: what is counted, and how. ahead: it begins now, and not when the text is there; until then it
    touches no GPU. packages: modules that it imports, too. Errors: `machine.NotReady` without Nsight Compute.
    """

    def __init__(self, metrics: list[str], options: list[str], ahead: bool = False, packages: Sequence[str] = ()):
        self.counted = metrics, options
        counting = [find(), "--csv", "--page", "raw", "--print-units", "base", "--cache-control", "none"]
        counting += ["--clock-control", "none", *options, "--metrics", ",".join(metrics), sys.executable]
        self._home = tempfile.TemporaryDirectory()
        self.folder = Path(self._home.name)
        (self.folder / "program.py").write_text(_PROGRAM)
        self._command = [*counting, str(self.folder / "program.py"), str(self.folder / "text.py"), *packages]
        # Inductor's pool of compilers would be started under the profiler too
        env = {"PYTHONPATH": machine.python_path(), "HELPERS_MODE": "gpu", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._more = {"env": env, "output_bytes": 1 << 26}  # a row repeats every attribute of the device: some 4 kB
        self._begun = child.begin(self._command, **self._more) if ahead else None

    def rows(self, text: str) -> list[dict]:
        """The rows of Nsight Compute's table once the text has run; a program runs one. Errors: `machine.NotReady`
        without permission to count, RuntimeError where there were no figures."""
        unfinished = self.folder / "unfinished"
        unfinished.write_text(text)
        unfinished.rename(self.folder / "text.py")  # it is there whole, or not at all
        try:
            if self._begun:
                done = self._begun.result(SECONDS)
            else:
                done = child.command(self._command, seconds=SECONDS, **self._more)
        finally:
            self.end()
        rows = _parse(done.stdout)
        if not rows:
            raise _failure(done)
        return rows

    def end(self) -> None:
        """Of one that got no text: it is stopped."""
        if self._begun:
            self._begun.end()
        self._home.cleanup()


SECONDS = 300
"""What a text may take under Nsight Compute."""

# Triton's key, a hash of all its files, is taken once a process, and what is compiled or found on disk asks for it
_PROGRAM = """
import gc

gc.disable()  # what packages make stays: to look through it again and again takes a fifth of the time

import importlib
import os
import sys
import time

from helpers import cuda, interpreter, plots, records, reveal, show, source, stage, timing, traffic

try:
    import triton.language
    from triton.runtime.cache import triton_key as _key

    _key()
except ImportError:
    pass
for _name in sys.argv[2:]:
    try:
        importlib.import_module(_name)
    except Exception:
        pass  # where the text needs it, it says so
gc.freeze()
gc.enable()

__file__, _parent = sys.argv[1], os.getppid()
while not os.path.exists(__file__):
    if os.getppid() != _parent:  # nobody is left to write it
        sys.exit()
    time.sleep(0.01)
with open(__file__) as _text:
    exec(compile(_text.read(), __file__, "exec"))
"""


def read_in_ranges(rows: list[dict]) -> list[int]:
    """The bytes that came from DRAM in each of the `IN_RANGES` of a `Program` that counts READ."""
    return [int(_value(row, READ)) for row in rows]


def durations(*functions: Callable[[], object], repeats: int = 9) -> dict[str, Measurement]:
    """The GPU's time for one call of each function in µs, by Nsight Compute: the sum over the kernels it starts.

    A second opinion on `helpers.timing`: one kernel at a time, so clocks have not yet fallen under load.
    """
    rows = _ncu(functions, [DURATION], ["--profile-from-start", "off"], repeats=repeats)
    out = {}
    for function, calls in zip(functions, _by_call(rows, len(functions), repeats), strict=True):
        us = [sum(_value(row, DURATION) for row in call) / 1e3 for call in calls]
        low, middle, high = statistics.quantiles(us, n=4, method="inclusive")
        out[function.__name__] = Measurement(middle, "us", low, high, len(us), "Nsight Compute")
    return out


PROFILE = {
    "us": DURATION,
    "read MB": READ,
    "written MB": WRITTEN,
    "DRAM % of peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sectors/load": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "sectors/store": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
    "bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "registers": "launch__registers_per_thread",
}
"""Columns of `profile` and the counters behind them, by Nsight Compute's names."""


def profile(*functions: Callable[[], object]) -> list[dict]:
    """One row for each kernel that each function starts: the columns of `PROFILE`, from hardware counters."""
    rows = _ncu(functions, list(PROFILE.values()), ["--profile-from-start", "off"], repeats=1)
    scale = {"us": 1e-3, "read MB": 1e-6, "written MB": 1e-6}
    return [
        {"function": function.__name__, "kernel": row["Kernel Name"].split("(")[0]}
        | {column: _value(row, metric) * scale.get(column, 1) for column, metric in PROFILE.items()}
        for function, calls in zip(functions, _by_call(rows, len(functions), 1), strict=True)
        for call in calls
        for row in call
    ]


STALLS = {
    "long_scoreboard": "waiting for global memory or L2",
    "short_scoreboard": "waiting for shared memory or special functions",
    "mio_throttle": "waiting for room in the queue to shared memory",
    "lg_throttle": "waiting for room in the queue to global memory",
    "math_pipe_throttle": "waiting for an arithmetic unit",
    "gmma": "waiting for wgmma",
    "barrier": "waiting at a barrier of the block",
    "wait": "waiting a fixed time after an instruction",
    "not_selected": "ready while another warp was chosen",
    "selected": "issuing",
    "no_instruction": "waiting for the next instruction to be fetched",
    "dispatch_stall": "held up by the dispatcher",
}
"""What Nsight Compute calls the states of a warp, in words; rare ones are left out, since each costs a counter, and the
more counters there are, the more often a kernel is run again."""

_COUNTED = {
    "ns": DURATION,
    "registers": "launch__registers_per_thread",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "tensor_busy": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "fma_busy": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "dram_read": READ,
    "dram_written": WRITTEN,
    "l2_bytes": "lts__t_bytes.sum",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "latency": "smsp__average_warp_latency_per_inst_issued.ratio",
} | {reason: f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in STALLS}


@dataclass(frozen=True)
class Counters:
    """What the hardware counted while one kernel ran.

    us: its time. occupancy, tensor_busy, fma_busy: percent of the warps that an SM can hold, and of the cycles in which
    tensor cores, or the multiply-adds of CUDA cores, were at work. dram_read, dram_written: bytes between DRAM and L2.
    l2_bytes: bytes that L2's slices looked up, for SMs or for the other half of L2; requests that were joined on their
    way count once. conflicts: extra passes over shared memory, for bank conflicts, for each that was needed. stalls:
    what warps did or waited for, (words, percent of their time), the five longest.
    """

    function: str
    kernel: str
    us: float
    registers: int
    occupancy: float
    tensor_busy: float
    fma_busy: float
    dram_read: int
    dram_written: int
    l2_bytes: int
    conflicts: float
    stalls: tuple[tuple[str, float], ...]

    def sentences(self) -> list[str]:
        """What it says, in words."""
        waits = ", ".join(f"{why} {share:.0f}%" for why, share in self.stalls[:3])
        return [
            f"Occupancy {self.occupancy:.0f}%, {self.registers} registers a thread.",
            f"Tensor cores at work {self.tensor_busy:.0f}% of the time, "
            f"multiply-adds of CUDA cores {self.fma_busy:.0f}%.",
            f"DRAM: {self.dram_read / 1e6:.0f} MB read, {self.dram_written / 1e6:.0f} MB written; "
            f"L2's slices looked up {self.l2_bytes / 1e6:.0f} MB.",
            f"Shared memory: {self.conflicts:.2f} extra passes, for bank conflicts, for each that was needed.",
            f"How its warps spend their time: {waits}.",
        ]


def counters(*functions: Callable[[], object]) -> str:
    """What the hardware counted while each function's kernel ran, a line of JSON each: for `records.text`, and
    `read_counters` makes `Counters` of it. One process for all of them. Each starts one kernel, else RuntimeError:
    a second one, to tell calls apart, would be run as often as the first, once for every few counters."""
    counted = {n: m for n, m in _COUNTED.items() if n != "gmma" or machine.here().arch == "sm_90"}
    rows = _ncu(functions, list(counted.values()), ["--profile-from-start", "off"], repeats=1, warm=1, marker=False)
    if len(rows) != len(functions):
        raise RuntimeError(f"{len(functions)} functions started {len(rows)} kernels; for counters each starts one.")
    lines = []
    for function, row in zip(functions, rows, strict=True):
        found = {name: _value(row, metric) for name, metric in counted.items()}
        total = found["latency"]
        waits = {words: 100 * found[reason] / total for reason, words in STALLS.items() if reason in found}
        waits["other"] = 100 - sum(waits.values())
        lines.append(
            Counters(
                function.__name__,
                row["Kernel Name"].split("(")[0],
                round(found["ns"] / 1e3, 2),
                int(found["registers"]),
                round(found["occupancy"], 1),
                round(found["tensor_busy"], 1),
                round(found["fma_busy"], 1),
                int(found["dram_read"]),
                int(found["dram_written"]),
                int(found["l2_bytes"]),
                round(found["conflicts"] / max(found["shared"] - found["conflicts"], 1), 3),
                tuple(sorted(((w, round(s, 1)) for w, s in waits.items()), key=lambda pair: -pair[1])[:5]),
            )
        )
    return "\n".join(json.dumps(asdict(line)) for line in lines)


def read_counters(text: str) -> dict[str, Counters]:
    """What `counters` wrote, by function; a line that is none of it (where it was recorded) is passed over."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {one["function"]: Counters(**one | {"stalls": tuple(map(tuple, one["stalls"]))}) for one in found}


# The marker splits the list of kernels into calls; torch's spin kernel, for no cycles, is one that no lesson uses.
_SCRIPT = """
import torch as _torch
_functions, _repeats, _marker = [{names}], {repeats}, {marker}
for _f in _functions:
    for _ in range({warm}):
        _f()
    _torch.cuda.synchronize()
    for _ in range(_repeats):
        _torch.cuda.cudart().cudaProfilerStart()
        _f()
        if _marker:
            _torch.cuda._sleep(0)
        _torch.cuda.synchronize()
        _torch.cuda.cudart().cudaProfilerStop()
"""


def _ncu(
    functions,
    metrics: list[str],
    options: list[str],
    repeats: int,
    given: dict | None = None,
    warm: int = 3,
    marker: bool = True,
) -> list[dict]:
    """Rows of Nsight Compute's table for a copy of this notebook's code that calls `functions`: `warm` times before
    it counts, then `repeats` times, each with a `marker` kernel after it or without."""
    if not machine.gpu():
        raise machine.NotReady(
            "DRAM counters are a GPU's, and this is CPU mode.",
            "records.figures(measure, ids...) shows the recorded figure here",
        )
    names = [f.__name__ for f in functions]
    replaced = "".join(f"\n{name} = {value!r}" for name, value in (given or {}).items())
    script = _SCRIPT.format(names=", ".join(names), warm=warm, repeats=repeats, marker=marker)
    slice = source.live(*names)
    text = slice + replaced + script
    about = [text, metrics, options, machine.here().name, machine.versions()]
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
    cached = machine.cache("ncu") / f"{key}.json"
    if cached.exists() and not os.environ.get("HELPERS_RECORD"):  # a record is always measured anew
        return json.loads(cached.read_text())
    import torch

    torch.cuda.empty_cache()  # the child needs room for the same tensors
    ready = _ahead and _ahead[0].counted == (metrics, options)
    program = _ahead.pop() if ready else Program(metrics, options)
    with (
        locks.exclusive("bytes and kernels, under Nsight Compute"),
        show.working(f"Nsight Compute: {', '.join(names)}"),
    ):
        # the copy need not compile what this process has
        nvrtc.write_binaries(compiled := program.folder / "compiled")
        read = f"from helpers.cuda import nvrtc as _nvrtc\n_nvrtc.read_binaries({str(compiled)!r})\n"
        rows = program.rows(read + slice + _lines(slice) + replaced + script)
    cached.write_text(json.dumps(rows))
    return rows


def _lines(text: str) -> str:
    """Statements that tell the Triton kernels of a slice the lines on which they stand here: by them too Triton looks
    kernels up on disk, and what this process has launched need not be compiled once more."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    here = shell.user_ns if shell else vars(sys.modules["__main__"])
    defined = [s.name for s in ast.parse(text).body if isinstance(s, ast.FunctionDef)]
    found = {name: getattr(here.get(name), "starting_line_number", None) for name in defined}
    return "".join(f"\n{name}.starting_line_number = {line}" for name, line in found.items() if line)


def find() -> str:
    """The path of Nsight Compute's `ncu`. Errors: `machine.NotReady` where it is not installed."""
    places = ["/usr/local/cuda/bin/ncu", *sorted(glob("/opt/nvidia/nsight-compute/*/ncu"), reverse=True)]
    for place in filter(None, [shutil.which("ncu"), *places]):
        if os.access(place, os.X_OK):
            return place
    raise machine.NotReady(
        "Nsight Compute (ncu), which reads the hardware counters, is not installed.",
        "install the CUDA toolkit's package nsight-compute and put ncu on the PATH",
    )


FORBIDDEN = "ERR_NVGPUCTRPERM"
"""What ncu prints where the driver lets only the administrator read the counters."""


def forbidden() -> machine.NotReady:
    """What to tell an account that may not read the counters."""
    return machine.NotReady(
        f"This account may not read the GPU's hardware counters ({FORBIDDEN}).",
        "as root write 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' to "
        "/etc/modprobe.d/nvidia-profiling.conf and reboot; a rented container usually cannot",
    )


def _failure(done) -> Exception:
    if FORBIDDEN in done.stdout + done.stderr:
        return forbidden()
    tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
    return RuntimeError(f"Nsight Compute gave no figures (exit {done.exit}, timed out: {done.timed_out}):\n{tail}")


def _parse(output: str) -> list[dict]:
    """The rows of ncu's raw CSV page: its first line names the columns, its second their units."""
    table = list(csv.DictReader(io.StringIO("\n".join(line for line in output.splitlines() if line.startswith('"')))))
    return table[1:]


def _value(row: dict, metric: str) -> float:
    return float(row[metric].replace(",", ""))


def _by_call(rows: list[dict], functions: int, repeats: int) -> list[list[list[dict]]]:
    """Rows grouped by function and call, which end with the marker kernel."""
    calls: list[list[dict]] = [[]]
    for row in rows:
        if "spin_kernel" in row["Kernel Name"]:
            calls.append([])
        else:
            calls[-1].append(row)
    calls.pop()
    if len(calls) != functions * repeats:
        raise RuntimeError(f"{functions * repeats} calls were profiled, but {len(calls)} came back")
    return [calls[i * repeats : (i + 1) * repeats] for i in range(functions)]
