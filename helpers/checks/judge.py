"""Judge one answer: draw inputs, have the child run it, compare what it left."""

import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import torch

from .. import ROOT, apart, child, cluster, cuda, desk, locks, machine, mojo, reveal, show, source, stage, traffic
from ..cuda import cpu
from ..exercises import Built, Case, Draw, Exercise, travelling
from . import rules, sanitizer
from .compare import Reference, compare, short, tensors
from .findings import caught, composed, failed, limited, owner, still, untouched, visible
from .names import KERNELS
from .verdict import UNJUDGED, Finding, Verdict

GAP = re.compile(r'raise NotImplementedError|#\s*error\b|comptime assert False, "not written yet"')
"""What stands in an unsolved lab for the learner's code."""

MOST_FINDINGS = 3
PRINTED = 2000
"""Characters of what an answer printed that a verdict repeats."""

PAPER = 1000
"""Characters of plain inputs that a finding repeats, cut short; longer ones not at all."""

MEMORY_BYTES = 4 << 30
"""What an answer may allocate on the CPU beyond the packages."""

COMPILING = 120
"""Seconds that Mojo may take to compile an answer."""

MOST_COMPILED = 4
"""Variants of each of an answer's kernels (constants, types) that are compiled for a GPU."""


def judge(
    exercise: Exercise,
    text: str,
    *,
    seed: int | None = None,
    seconds: float | None = None,
    sanitize: bool = False,
    sealed: bool = False,
    address: str = "",
) -> Verdict:
    """Judge the module text of an answer in this machine's mode.

    On a GPU machine the answer first runs as in CPU mode, where stray accesses and races show, then for real (one made
    of PyTorch's operators in both ways at once); where that finds something, and with `sanitize` always,
    compute-sanitizer looks too. seed: of an earlier verdict, to draw its inputs again. seconds: the limit, by default
    the exercise's own. sealed: the answer runs as `child.run` says;
    tools that talk to it over the network, which are compute-sanitizer and Nsight Compute, are then left out. address:
    of a Dask scheduler whose workers judge in place of this machine; where there is none, it is judged here, and the
    verdict says so.
    """
    if address:
        return _judged_there(address, exercise, text, seed=seed, seconds=seconds, sanitize=sanitize)
    began = time.monotonic()
    seed = int.from_bytes(os.urandom(4), "little") >> 1 if seed is None else seed
    trial = Trial(exercise, text, seed, seconds or exercise.seconds, sanitize, sealed)

    def verdict(passed: bool | None, findings: list[Finding]) -> Verdict:
        return Verdict(
            exercise.name,
            passed,
            tuple(findings[:MOST_FINDINGS]),
            "gpu" if machine.gpu() else "cpu",
            time.monotonic() - began,
            seed,
            tuple(trial.checked) if passed is not False else (),
            tuple(trial.unchecked),
            trial.printed,
        )

    try:
        findings = caught("text", trial.read()) or trial.run()
    except KeyboardInterrupt as stop:
        said = f"You stopped the check after {time.monotonic() - began:.1f} s{trial.place}."
        raise Stopped(verdict(None, [Finding("timeout", said)])) from stop
    return verdict(None if findings and findings[0].kind in UNJUDGED else not findings, findings)


@dataclass(frozen=True)
class Price:
    """What one large call of an answer costs. On a GPU µs (unit "us"), against those of a rival, timed in turns; in CPU
    mode the bytes that its kernels ask for, against the least."""

    value: float
    against: float
    unit: str

    @property
    def over(self) -> float:
        """How many times what it is set against: lower is better, on either machine."""
        return self.value / self.against


def price(exercise: Exercise, text: str, inputs: Callable, rival: Callable, *, sealed: bool = False) -> Price | Finding:
    """The price of an answer that has passed; a finding where this call fails.

    inputs, rival: as in `exercises.Speed`; sealed: as for `judge`.
    """
    seed = int.from_bytes(os.urandom(4), "little") >> 1
    trial = Trial(exercise, text, seed, exercise.seconds, sealed=sealed)
    found = trial.timed(inputs, rival) if trial.gpu else trial.asked(inputs)
    return found if isinstance(found, Finding) else Price(*found, "us" if trial.gpu else "bytes")


def bytes_asked(exercise: Exercise, text: str, inputs: tuple) -> int:
    """The bytes that one call with these CPU tensors asks for, counted in CPU mode, beside a GPU too: as in `price`.

    Raises RuntimeError where the call fails.
    """
    found = Trial(exercise, text, 0, exercise.seconds).asked(lambda draw: inputs)
    if isinstance(found, Finding):
        raise RuntimeError(found.message)
    return found[0]


def there(others: cluster.Cluster, exercise: Exercise, text: str, told=lambda text: None, **options) -> Verdict:
    """The verdict of a cluster's worker. Raises `machine.NotReady` where the cluster is gone."""
    mode = others.kind.lower()
    try:
        return others.do("grading.judged", exercise.name, text, mode=mode, label=exercise.name, told=told, **options)
    except desk.Ended:
        return crashed(exercise.name, mode)
    except cluster.GivenUp as why:
        return crashed(exercise.name, mode, str(why))


def crashed(name: str, mode: str, said: str = "It ended the process that judged it, twice.") -> Verdict:
    """The verdict on an answer that takes down what judges it."""
    return Verdict(name, False, (Finding("crash", said, caught_by="process"),), mode, 0.0)


def _judged_there(address: str, exercise: Exercise, text: str, **options) -> Verdict:
    """The verdict of a worker; that of this machine where the cluster cannot be had, or while the answer would wait for
    a GPU and CPU mode finds something here."""
    began = time.monotonic()
    try:
        with cluster.joined(address) as others, show.saying() as say, ThreadPoolExecutor(1) as pool:
            waits = threading.Event()

            def told(said):
                say(said)
                waits.set() if "in the queue" in said else None

            future = pool.submit(there, others, exercise, text, told, **options)
            try:
                while not future.done() and not waits.wait(0.1):
                    continue
                if not future.done() and others.kind == "GPU" and not machine.gpu():
                    here = judge(exercise, text, **options)
                    if here.passed is False:
                        return dataclasses.replace(here, unchecked=(*here.unchecked, "its time: it left the queue"))
                return future.result()
            except KeyboardInterrupt:
                took = time.monotonic() - began
                found = Finding("timeout", f"You stopped the check after {took:.1f} s, at the cluster of {address}.")
                raise Stopped(Verdict(exercise.name, None, (found,), others.kind.lower(), took)) from None
            finally:
                others.leave()  # whatever ended the wait: the thread that waits there is to end too
    except machine.NotReady as gone:
        here = judge(exercise, text, **options)
        return dataclasses.replace(here, unchecked=(*here.unchecked, f"on the cluster: {gone.sentence}"))


class Stopped(machine.Plain, KeyboardInterrupt):
    """Ctrl-C, or a notebook's stop button, while an answer was judged: `verdict` says where that was."""

    def __init__(self, verdict: Verdict):
        super().__init__(verdict.findings[0].message)
        self.verdict = verdict


def check_file(exercise: Exercise, path: Path, **options) -> Verdict:
    """Judge the answer in a `.py` file (run after the lab's import cell) or in a notebook.

    Raises FileNotFoundError; a name that is bound nowhere and a syntax error are findings.
    """
    text = text_or_verdict(exercise, Path(path))
    return text if isinstance(text, Verdict) else judge(exercise, text, **options)


def text_or_verdict(exercise: Exercise, path: Path) -> str | Verdict:
    """The module text of the answer in a file, or the verdict on what holds none."""
    try:
        return answer_text(exercise, path)
    except (source.Missing, SyntaxError, ValueError) as error:
        return unread(exercise, error, path)
    except (RecursionError, MemoryError):  # what Python's own parser says then
        return unread(exercise, ValueError("It is nested more deeply than Python reads."), path)


def answer_text(exercise: Exercise, path: Path) -> str:
    """The module text of the answer in a file. Raises `source.Missing`, SyntaxError, ValueError (no notebook)."""
    if path.suffix == ".ipynb":
        return source.notebook(path, exercise.entry)
    text = path.read_text(encoding="utf-8")
    compile(text, str(path), "exec")
    return complete(exercise, [text], path.name)


def complete(exercise: Exercise, cells: list[str], where: str) -> str:
    """The module text of the answer in some cells, which find the lab's imports done. Raises `source.Missing`, which
    says `where` in words."""
    return source.module_text([import_cell(exercise), *cells], [exercise.entry], where)


def import_cell(exercise: Exercise) -> str:
    """The lab's first code cell: what a `.py` answer finds imported."""
    cells = json.loads((ROOT / "labs" / f"{exercise.lab}.ipynb").read_text())["cells"]
    return next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def unread(exercise: Exercise, error: Exception, path: Path | None = None) -> Verdict:
    """The verdict on an answer whose text could not be had whole: `source.Missing`, or what reading it raised.

    path: the file that was read; without it, the answer was looked for in the running notebook.
    """
    if not isinstance(error, source.Missing):
        finding = Finding("syntax", str(error))
    elif GAP.search(error.text):
        finding = Finding("not-attempted", f"Your code is still missing in `{exercise.entry}`: {error}")
    elif error.unreadable and exercise.entry in error.names:
        finding = Finding("syntax", f"{error} {unreadable(error.unreadable)}")
    elif exercise.entry in error.names and (path is None or path.suffix == ".ipynb" and exercise.lab not in path.stem):
        said = f"{error} The exercise {exercise.name} is in the lab {exercise.lab}."
        step = f"Write `{exercise.entry}` in {exercise.lab}.ipynb, run its cell there, and check it there."
        finding = Finding("exception", said, next=step)
    else:
        step = f"Bind {', '.join(f'`{name}`' for name in error.names)} at the top level of a cell or file, not inside"
        finding = Finding("exception", str(error), next=f"{step} a function, and check again.")
    return Verdict(exercise.name, False, (finding,), "gpu" if machine.gpu() else "cpu", 0.0)


def unreadable(error: SyntaxError) -> str:
    """A syntax error in one sentence."""
    return f"Python cannot read line {error.lineno} (`{(error.text or '').strip()}`): {error.msg}."


class Trial:
    """One answer being judged. `checked` and `unchecked` collect what the verdict tells of it; `place`: in words,
    where the answer was when the learner stopped it."""

    def __init__(self, exercise: Exercise, text: str, seed: int, seconds: float, sanitize=False, sealed=False):
        self.exercise, self.text, self.seed, self.seconds = rules.settled(exercise, text), text, seed, seconds
        self.sanitize, self.sealed, self.traces = sanitize, sealed, False
        self.checked: list[str] = []
        self.unchecked: list[str] = []
        if exercise.made_of == "any":
            rung = {"triton": "a Triton kernel", "cuda": "CUDA C", "torch": "PyTorch"}[self.exercise.made_of]
            self.checked.append(f"judged as {rung}")
        if not machine.gpu() and "compile" in exercise.modules and re.search(r"\btorch\.compile\b", text):
            self.unchecked.append("what torch.compile makes of the graph: it was captured, and run as it is")
        self.printed = self.place = ""
        self.counting: traffic.Program | None = None
        self.large_job: Future | None = None
        self.second: Future | None = None
        self.second_cases: list[tuple[int, Case]] = []
        self.launched: list[dict] = []
        self.begun: child.Begun | None = None
        self.gpu = machine.gpu()
        self.draws: dict[tuple[int, bool], tuple] = {}
        self.references: dict[tuple[int, bool], Reference] = {}
        self.drawing, self.finished, self.over = threading.RLock(), set(), False
        self.program = text  # what its process runs
        self.has_kernels = self.exercise.made_of in KERNELS or bool(exercise.mojo and exercise.mojo.call)

    # ---- reading ----

    def read(self) -> list[Finding]:
        """What the text alone says: a gap left open, a syntax error, rules that it breaks."""
        lines = self.text.splitlines()
        if gap := next((i for i, line in enumerate(lines, 1) if GAP.search(line)), 0):
            return [Finding("not-attempted", f"Your code is still missing in `{owner(lines, gap)}`.", {"line": gap})]
        try:
            compile(self.text, "answer.py", "exec")
        except SyntaxError as error:
            return [Finding("syntax", unreadable(error))]
        broken = rules.broken(self.text, self.exercise)
        return [Finding("forbidden", sentence, {"line": line}) for line, sentence in broken]

    # ---- running ----

    def run(self) -> list[Finding]:
        """Both passes, and what they leave open; ends at the first that finds something."""
        if self.exercise.package and (lacking := apart.problem(self.exercise.package)):
            return caught("process", [Finding("environment", str(lacking))])
        if self.exercise.mojo:  # what the first pass runs in is loaded while its Mojo is compiled
            child.warm(interpreted=True, **self.loaded)
            if self.exercise.mojo.call:
                apart.later(cpu.made)
        if self.gpu:
            # what the second pass runs in, and what counts bytes, is loaded while the first one is at work
            if self.has_second_pass():
                child.warm(**self.loaded)
            if any(limit.inputs for limit in self.exercise.limits) and not self.sealed:
                with contextlib.suppress(machine.NotReady):  # `few_bytes` says so
                    self.counting = sanitizer.counting()
                    if not self.exercise.mojo:  # its program is not there before its Mojo is compiled
                        pool = ThreadPoolExecutor(1)
                        self.large_job = pool.submit(self.written)
                        pool.shutdown(wait=False)
            if self.exercise.mojo and not self.exercise.mojo.main and not self.sealed:
                self.begun = self.load()  # while the first pass compiles it for the CPU
            if self.exercise.reference and not self.exercise.needs:
                # no daemon: one that is at work inside torch when Python ends would take it down with it
                threading.Thread(target=self.prepare).start()
        try:
            return self.passes()
        finally:
            self.over = True
            if self.counting:
                self.counting.end()
            if self.begun:  # what the first pass refuses, nobody waits for
                self.begun.end()

    @property
    def loaded(self) -> dict:
        """What its process has loaded before it begins, in the words of `child`."""
        generated = bool(self.exercise.mojo and self.exercise.mojo.main)
        return {
            "inductor": self.exercise.rung == "compiler" and bool(self.exercise.drive),
            "packages": "" if generated else self.exercise.package,
        }

    def passes(self) -> list[Finding]:
        if self.gpu and self.may_run_beside():
            with self.begun_beside():
                findings = self.on_cpu() or self.on("gpu")
            return findings or self.measured()
        findings = self.on_cpu()
        if not findings and not self.can_run():
            here = f"this GPU is {machine.here().arch}" if self.gpu else "this machine has no GPU"
            said = f"{self.exercise.needs.says} Here nothing was run: {here}. What could be seen without is right."
            findings = caught("compiler", [Finding("needs-hardware", said)])
        elif not findings and self.gpu:
            if self.begun:
                self.begun.result(self.seconds)
            findings = self.on("gpu")
            if findings and self.exercise.alone:  # the lock does not keep off who uses the card without it
                findings = self.on("gpu")
            worth = self.sanitize or (findings and findings[0].kind not in ("timeout", "memory", "environment"))
            if worth and self.has_kernels:
                with self.lock():
                    findings += caught("compute-sanitizer", self.sanitized())
            findings = findings or self.measured()
        elif self.sanitize and not self.gpu:
            self.unchecked.append("compute-sanitizer: it needs a GPU")
        return findings

    def has_second_pass(self) -> bool:
        """Whether there is a case that only runs for real once it runs on the GPU."""
        every = enumerate(self.exercise.cases)
        return any(case.mode != "cpu" and not self.seen_on_cpu(i, case) for i, case in every)

    def may_run_beside(self) -> bool:
        """Whether both passes may run at the same time: where the answer is made of PyTorch's operators (kernels come
        to a GPU once the first pass has seen that they keep to their tensors), and needs no GPU of its own."""
        exercise = self.exercise
        plain = exercise.made_of == "torch" and not exercise.package and not exercise.needs
        return plain and not exercise.alone and self.has_second_pass()

    @contextlib.contextmanager
    def begun_beside(self) -> Iterator[None]:
        """Begin the second pass; at the end it is over, or is ended."""
        self.second_cases = list(self.cases("gpu"))
        until, self.end_second = os.pipe()

        def play():
            try:
                return self.played("gpu", self.second_cases, until=until)
            finally:
                os.close(until)

        self.second = apart.later(play)
        try:
            yield
        finally:
            os.close(self.end_second)
            if self.second.cancel():  # its turn has not come
                os.close(until)
            else:
                wait([self.second], 2)  # one whose process is not ready yet ends before it begins

    def lock(self):
        """What keeps the second pass out of others' timings, and of an answer that is a timer all others."""
        if not self.has_second_pass():
            return contextlib.nullcontext()
        return locks.exclusive(f"an answer to {self.exercise.name}") if self.exercise.alone else locks.shared()

    def can_run(self) -> bool:
        """Whether this machine, in one of its modes, runs what the exercise asks for."""
        needs = self.exercise.needs
        return not needs or (self.gpu and machine.here().capability in needs.capabilities)

    def on_cpu(self) -> list[Finding]:
        """As in CPU mode. What this machine lacks for it (g++) is no finding where a GPU judges as well, which is not
        so of generated code: that is written, for one card on every machine, and counted in this pass alone."""
        findings = self.on("cpu")
        judged_again = self.gpu and self.exercise.rung != "compiler"
        if judged_again and findings and findings[0].kind == "environment":
            self.unchecked.append(f"as in CPU mode: {findings[0].message}")
            return []
        return findings

    def on(self, mode: str) -> list[Finding]:
        begun = self.second if mode == "gpu" else None
        cases = [] if begun else list(self.cases(mode))
        if not cases and not begun:
            return []
        looked: list[Built] = []
        if self.exercise.mojo:
            try:
                looked = self.translated()
            except mojo.CompileError as refused:
                return caught("compiler", [Finding("compile", str(refused))])
        if begun:
            cases = self.second_cases
            left, done = self.awaited()
        else:
            left, done = self.played(mode, cases)
        self.printed = _printed(done)
        findings = self.compared(mode, cases, left)
        if not findings:
            findings = self.ended(mode, cases, left, done)
        asks_compiler = self.exercise.made_of == "torch" or self.exercise.drive  # which keeps processes of its own
        if not findings and done.kin and not asks_compiler:
            said = "The answer started a process and did not wait for its end: its work must be done when it returns."
            findings = caught("process", [Finding("forbidden", said)])
        if findings:
            return findings
        if findings := [Finding(k.kind, k.says) for k in self.looks if not k.right(looked)]:
            return caught("compiler", findings)
        if mode == "cpu" and self.exercise.needs:
            return caught("compiler", self.inspected(left[-1][0].get("inspected")))
        if mode == "cpu":
            wanted, self.launched = (left[-1][0].get(name, []) for name in ("to_compile", "to_launch"))
            findings = caught("compiler", _odd(wanted) or ([] if self.gpu else self.compiled(wanted)))
        where = "on the GPU" if mode == "gpu" else "interpreted" if self.exercise.made_of == "triton" else "on the CPU"
        if self.has_kernels or mode == "gpu":
            self.checked.append(f"{len(cases)} cases {where}")
        else:
            self.checked.append(f"{len(cases)} cases")
        return findings

    @property
    def looks(self) -> tuple:
        return self.exercise.mojo.looks if self.exercise.mojo else ()

    def translated(self) -> list[Built]:
        """Have an answer's Mojo compiled, and write the program that runs it. Returns its kernels, where it has some.

        Raises `mojo.CompileError`.
        """
        around, entry = self.exercise.mojo, self.exercise.entry
        code = rules.mojo_text(self.text, entry)
        if not around.main:
            self.program = f"{entry} = {str(mojo.package(code))!r}\n"
            return []
        if around.library:
            path = mojo.library(code, "answer", main=around.main, seconds=COMPILING)
            self.program = f"import ctypes\n\n{entry} = ctypes.CDLL({str(path)!r})\n"
            return []
        arch = machine.here().arch
        built = mojo.build(code, "sm_90a" if arch == "sm_90" else arch, main=around.main, seconds=COMPILING)
        ptx = {k.name: k.text.replace(k.entry, k.name) for k in built.kernels}
        self.program = (
            f"from helpers import cuda\n\n{travelling(around.call)}\n\nCODE, PTX = {code!r}, {ptx!r}\n"
            f"KERNELS = {{n: cuda.PtxModule(p, ({mojo.FILE!r}, CODE)).get_function(n) for n, p in PTX.items()}}\n\n\n"
            f"def {entry}(*inputs):\n    return {around.call.__name__}(KERNELS, *inputs)\n"
        )
        modules = {name: cuda.PtxModule(text, (mojo.FILE, code)) for name, text in ptx.items()}
        with ThreadPoolExecutor() as pool:  # what g++ or the runner refuses is said by the process that runs it
            wait([pool.submit(module.compile_for_cpu) for module in modules.values()])
        made = []
        for name, text in ptx.items():
            used = modules[name].binary.kernels[name]
            bare = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)
            made.append(Built(name, built.arch, bare, "", "", used.registers, used.spill_bytes, used.shared_bytes, 0))
        said = ", ".join(f"`{k.kernel}`: {k.registers} registers" for k in made)
        told = [f"compiled for {built.arch}: {said}", *(look.about for look in around.looks)]
        self.checked += [one for one in told if one not in self.checked]  # a GPU's pass tells the same again
        return made

    def load(self) -> child.Begun | None:
        """Begin to have MAX compile an operator for the GPU, in a process of its own; the answer's finds it kept."""
        folder, drive = mojo.package(rules.mojo_text(self.text, self.exercise.entry)), self.exercise.drive
        call = f"{drive.__name__}({str(folder)!r}, 'gpu')"
        text = f"import os\n\n{travelling(drive)}\n\n{call}\nos._exit(0)  # at a normal end MAX may abort\n"
        return child.begin([sys.executable, "-c", text], env=mojo.OFF)

    def cases(self, mode: str) -> Iterator[tuple[int, Case]]:
        """The cases of a mode with their numbers, which their seeds come from; too large ones are told."""
        for i, case in enumerate(self.exercise.cases):
            if case.mode not in ("", mode) or (mode == "gpu" and self.seen_on_cpu(i, case)):
                continue
            if mode == "gpu" and case.memory_bytes > 0.8 * machine.here().free_bytes():
                self.unchecked.append(f"{case.about}: it needs {case.memory_bytes / 2**30:.1f} GiB")
            else:
                yield i, case

    def seen_on_cpu(self, number: int, case: Case) -> bool:
        """Whether a case, once it has run as in CPU mode, would be the same on a GPU: plain Python, of plain values."""
        plain = self.exercise.made_of == "python" and not self.exercise.package and not case.mode
        return plain and not tensors(self.drawn(number, case))

    def drawn(self, number: int, case: Case, again: bool = False) -> tuple:
        """The inputs of a case; `again`: of its second call, other values of the same shapes."""
        key = (number, again)
        with self.drawing:
            if key not in self.draws:
                self.draws[key] = self.draw(number, case, again)
            return self.draws[key]

    def draw(self, number: int, case: Case, again: bool = False) -> tuple:
        """`drawn` anew."""
        return case.inputs(Draw(self.seed + 7919 * number + 104729 * again, case.kind))

    def reference(self, number: int, case: Case, again: bool = False) -> Reference:
        """What the outputs of a call are compared with."""
        inputs = self.drawn(number, case, again)
        with self.drawing:
            return self.references.setdefault((number, again), Reference(self.exercise, inputs))

    def prepare(self) -> None:
        """Compute what outputs will be compared with, in both passes, until the check is over: for a thread, since the
        answer's processes are at work meanwhile."""
        for number, case in enumerate(self.exercise.cases):
            if self.over:
                return
            if case.mode != "cpu" and number not in self.finished:
                with contextlib.suppress(Exception):  # the comparison says so
                    self.reference(number, case).prepare(case)

    def large(self) -> list[tuple[int, Case]]:
        """The calls whose bytes from the GPU's memory are counted, numbered as cases are."""
        calls = [Case("a large call", limit.inputs) for limit in self.exercise.limits if limit.inputs]
        return list(enumerate(calls, len(self.exercise.cases) + 1))

    def written(self):
        """The job of `few_bytes`, in a file. It takes seconds, so a thread does it beside the passes; None where they
        are over before."""
        for number, case in self.large():
            if self.over:
                return None
            made = self.draw(number, case)  # not under the lock that the passes draw under
            with self.drawing:
                self.draws.setdefault((number, False), made)
        return None if self.over else sanitizer.counted(*self.job("gpu", self.large(), counted=True))

    def job(
        self, mode: str, cases: list, speed: dict | None = None, counted: bool = False
    ) -> tuple[dict, list[memoryview]]:
        """What the child is told, and the values of its inputs. counted: it makes one call of each case for a profiler,
        and compiles what that launches."""
        blobs: list[memoryview] = []

        def packed(number: int, case: Case, again: bool) -> dict:
            found: list[torch.Tensor] = []
            out = {"mode": case.mode, "inputs": stage.encode(self.drawn(number, case), found)}
            out["tensors"] = [_spec(t, "inputs", blobs) for t in found]
            waves = [limit.wave(*self.drawn(number, case)) for limit in self.exercise.limits if limit.wave]
            out["wave"] = max(waves, default=0)
            if again:
                other: list[torch.Tensor] = []
                tree = stage.encode(self.drawn(number, case, again=True), other)
                if [(t.shape, t.stride(), t.dtype) for t in found] == [(t.shape, t.stride(), t.dtype) for t in other]:
                    out["again"] = tree
                    for spec, t in zip(out["tensors"], other, strict=True):
                        spec |= {"again": _spec(t, "again", blobs)["again"]}
            return out

        inspected = mode == "cpu" and bool(self.exercise.needs)
        # a drive may call the answer as often as it likes; where it compiles it, a second time would double the wait
        drives = self.exercise.drive and self.exercise.rung == "compiler"
        twice = self.exercise.made_of in ("triton", "cuda", "mojo", "torch") and not (drives or inspected or counted)
        job = {
            "mode": mode,
            "text": self.program,
            "entry": self.exercise.entry,
            "made_of": "cuda" if self.exercise.mojo and self.has_kernels else self.exercise.made_of,
            "seed": self.seed,
            "inspected": inspected,
            "ahead": self.launched if mode == "gpu" and speed is None and not counted else [],
            "counted": counted,
            "same_bits": bool(self.exercise.same_bits) and not inspected,
            "idle": mode == "cpu" and self.exercise.multiplied is not None,
            "trace": self.traces or any(limit.fact in stage.TRACED for limit in self.exercise.limits),
            "drive": _travel(self.exercise.drive),
            "cases": [packed(i, case, twice and n == 0) for n, (i, case) in enumerate(cases)],
            "speed": speed,
        }
        if speed:
            speed["case"] = packed(len(self.exercise.cases), speed.pop("as_case"), False)
        return job, blobs

    def awaited(self) -> tuple[list, child.Result]:
        """What `played` gave of the second pass that was begun beside the first. Where its turn has not come, it runs
        now; and once more, alone, where its time was over: on a busy machine the first one may have taken it."""
        if not self.second.cancel():
            try:
                left, done = self.second.result()
            except KeyboardInterrupt:
                os.write(self.end_second, b".")
                left, done = self.second.result()
                self.stopped(done.stderr, left, self.second_cases)
                raise
            if not done.timed_out:
                return left, done
        return self.played("gpu", self.second_cases)

    def stopped(self, stderr: str, left: list, cases: list) -> None:
        """Note where the answer was when the learner stopped it."""
        at = next((m["case"] for m, _ in reversed(left) if "case" in m), -1)
        case = f", in the case: {cases[at][1].about}" if 0 <= at < len(cases) else ""
        self.place = f"{still(stderr, self.text)}{case}"

    def played(
        self, mode: str, cases: list, speed: dict | None = None, until: int | None = None
    ) -> tuple[list, child.Result]:
        """Run the answer; returns the frames that it left, and how its process ended. until: as in `child.run`."""
        limit = self.seconds * (3 if mode == "gpu" else 1)
        kept_out = self.lock() if mode == "gpu" and cases else contextlib.nullcontext()
        with kept_out, TemporaryFile(buffering=0) as job_file, TemporaryFile(buffering=0) as left_file:
            stage.put(job_file.fileno(), *self.job(mode, cases, speed))
            try:
                done = child.run(
                    "from helpers import stage\n\nstage.play(__shared__)",
                    # by itself, Inductor would start a process for each core, and a thread that stays
                    env={"HELPERS_MODE": mode, "HELPERS_STRICT": None, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
                    seconds=limit,
                    memory_bytes=MEMORY_BYTES if mode == "cpu" else None,
                    interpreted=mode == "cpu",
                    **self.loaded,
                    share=(job_file.fileno(), left_file.fileno()),
                    sealed=self.sealed,
                    until=until,
                )
            except child.Stopped as stopped:
                self.stopped(stopped.stderr, _left(left_file), cases)
                raise
            return _left(left_file), done

    def sanitized(self) -> list[Finding]:
        """What compute-sanitizer sees of the answer on the GPU: its first report of each tool."""
        path = sanitizer.program()
        if path is None or self.sealed:
            why = "it is not installed" if path is None else "it reaches its program over the network, which is shut"
            self.unchecked.append(f"compute-sanitizer: {why}")
            return []
        cases = [(i, case) for i, case in self.cases("gpu") if not case.memory_bytes and case.mode != "gpu"]
        # not for copies that a unit makes
        for_threads = self.exercise.made_of in ("cuda", "mojo") and not self.exercise.needs
        tools = sanitizer.TOOLS if for_threads else sanitizer.TOOLS[:1]
        found = []
        for tool in tools if cases else ():
            report = sanitizer.run(path, tool, *self.job("gpu", cases))
            found += [Finding(kind, said) for kind, said in report]
        if not found:
            self.checked.append(f"compute-sanitizer: {', '.join(tools)}")
        return found

    def measured(self) -> list[Finding]:
        """What an answer whose results are right does too often, or too slowly."""
        findings = []
        if any(limit.inputs for limit in self.exercise.limits):
            findings = caught("counts", self.few_bytes())
        if not findings and self.exercise.speed:
            findings = caught("timer", self.fast_enough())
        return findings

    # ---- comparing ----

    def compared(self, mode: str, cases: list, left: list) -> list[Finding]:
        """The first case of which something is wrong, and what."""
        firsts: dict[tuple[int, int], memoryview] = {}
        for message, blobs in left:
            if message.get("event") != "left":
                continue
            number, case = cases[message["case"]]
            again = message["order"] == "again"
            inputs, reference = self.drawn(number, case, again), self.reference(number, case, again)
            if mode == "gpu" or not self.gpu:  # the last pass: what was compared may be large, and goes
                self.finished.add(number)
                for key in [k for k in self.references if k != (number, again) and k[0] in self.finished]:
                    self.references.pop(key, None)
            try:
                judged = self.judged if message["order"] != "idle" else self.judged_idle
                findings = judged(mode, case, reference, message, blobs)
            except Unreadable:
                findings = [Finding("crash", "What came back from its process is damaged.")]
            if not findings and not again and message["order"] != "idle":
                findings = caught("values", self.unsteady(message, blobs, firsts))
            if findings:
                how = {"again": "on a second call with other values in the same tensors"}.get(message["order"], "")
                if message["order"] in stage.ORDERS[1:]:
                    in_order = f"with threads taken in {message['order']} order"
                    how = in_order if mode == "cpu" else "in a further call with the same inputs"
                return [self.told(f, case, how, inputs) for f in findings]
        return []

    def unsteady(self, message: dict, blobs: list, firsts: dict) -> list[Finding]:
        """Outputs that are to be the same in each call with the same inputs, and are not. firsts: those of the first
        calls so far, by case and number of the output."""
        for i in self.exercise.same_bits:
            if firsts.setdefault((message["case"], i), blobs[i]) != blobs[i]:
                said = f"Result {i} is not the same, bit for bit, in two calls with the same inputs"
                return [Finding("race", f"{said}: it is added in the order in which blocks or threads happen to come.")]
        return []

    def judged(self, mode: str, case: Case, reference: Reference, message: dict, blobs: list) -> list[Finding]:
        """What is wrong with one call."""
        inputs = reference.inputs
        about, got, outputs, tree, facts = _unpacked(message, blobs, "cuda" if mode == "gpu" else "cpu")
        is_inspected = mode == "cpu" and self.exercise.needs
        findings = untouched(inputs, got[len(about) :])
        if message["stray"]:
            first, last = message["stray"][0]
            place = f"{-first} bytes before the start" if first < 0 else "past the end"
            findings.append(Finding("out-of-bounds", f"A kernel wrote {place} of a tensor that the answer allocated."))
        if self.exercise.reference and not findings:
            findings = compare(reference, case, tree, about, values=not is_inspected)
        if self.exercise.judge and not findings and not is_inspected:
            said = self.exercise.judge(inputs, tree, facts)
            self.checked += [sentence for kind, sentence in said if kind == "checked"]
            findings = [Finding(kind, sentence) for kind, sentence in said if kind != "checked"]
        empty = (bool(about) and not any(t.numel() for t in outputs)) or not all(t.numel() for t in tensors(inputs))
        counted = [] if findings else composed(self.exercise, facts, empty) or limited(self.exercise, inputs, facts)
        return caught("values", findings) or caught("counts", counted)

    def judged_idle(self, mode: str, case: Case, reference: Reference, message: dict, blobs: list) -> list[Finding]:
        """What is wrong with a call in which tensor cores multiplied nothing: what there still is comes from elsewhere,
        and what is no longer there comes from them."""
        exercise = self.exercise
        _, _, outputs, _, _ = _unpacked(message, blobs, "cpu")
        nothing = [torch.zeros_like(t) if i == exercise.multiplied else t for i, t in enumerate(reference.inputs)]
        (want,) = tensors(Reference(exercise, tuple(nothing)).expected)
        if [t.shape for t in outputs] != [want.shape]:
            raise Unreadable
        (have,) = outputs
        off = have.double() != want
        if not off.any():
            return []
        what = {"triton": "`tl.dot`", "cuda": "`wmma::mma_sync`"}[exercise.made_of]
        share = f"{int(off.sum()):,} of {off.numel():,} values of the result"
        said = f"Not all products are made by {what}: with those left out, {share} still depend on the inputs, and the "
        said += (
            "tensor cores have no part in that. Write all products with it, and let the result depend on them alone."
        )
        return caught("counts", [Finding("forbidden", said)])

    def told(self, finding: Finding, case: Case, how: str = "", inputs: tuple = ()) -> Finding:
        """The finding, and how to see it again; plain inputs are shown, where they can be worked out on paper."""
        if inputs and not self.exercise.drive and not tensors(inputs) and len(repr(inputs)) < PAPER:
            shown = (short(repr(x), 400 // len(inputs)) for x in inputs)
            how = f"{how} for {', '.join(shown)}".strip()
        where = f"{case.about}{f', {how}' if how else ''}; seed {self.seed}"
        details = finding.details | {"case": case.about, "seed": self.seed}
        apart = "\n" if "\n" in finding.message else " "  # the last line may be one of the answer's
        return dataclasses.replace(finding, message=f"{finding.message}{apart}(Case: {where}.)", details=details)

    # ---- how it ended ----

    def ended(self, mode: str, cases: list, left: list, done: child.Result) -> list[Finding]:
        """What the process's end says, where its outputs said nothing."""
        last = left[-1][0] if left else {}
        whole = {m["case"] for m, _ in left if m.get("event") == "left"} == set(range(len(cases)))
        if last.get("event") == "end" and done.exit == 0 and whole:
            return []
        at = last.get("case", -1)
        # the lines of Python around a text of Mojo are not the answer's: none of them is quoted
        finding = failed(last, done, "" if self.exercise.mojo else self.program)
        words = f"{done.stderr}\n{last.get('message', '')}"  # where MAX compiles, in the answer's process
        if self.exercise.mojo and not self.exercise.mojo.main and (refused := mojo.refused(words)):
            code = rules.mojo_text(self.text, self.exercise.entry)
            said = str(mojo.CompileError(code, refused, "", "This Mojo does not compile."))
            return caught("compiler", [Finding("compile", said)])
        if 0 <= at < len(cases) and finding.kind != "environment":
            finding = self.told(finding, cases[at][1])
        return caught("guards" if last.get("event") == "error" else "process", [finding])

    # ---- more than values ----

    def inspected(self, kernels: list[dict]) -> list[Finding]:
        """What the compiled kernels of an answer that was not run look like, against the exercise's looks."""
        needs = self.exercise.needs
        try:
            built = [Built(**kernel) for kernel in kernels]
            built = [dataclasses.replace(k, ptx=re.sub(r"//[^\n]*|/\*.*?\*/", " ", k.ptx, flags=re.S)) for k in built]
        except TypeError:
            return [Finding("crash", "What came back from its process is damaged.")]
        for k in built:
            if k.arch != needs.arch:
                said = f"`{k.kernel}` is compiled for {k.arch}, and this exercise is about {needs.arch}"
                return [Finding("compile", f'{said}: give the module options=("-arch={needs.arch}",).')]
        findings = [Finding(look.kind, look.says) for look in needs.looks if not look.right(built)]
        self.checked += [
            f"`{k.kernel}` compiled for {k.arch}: {k.registers} registers, {k.spill_bytes} bytes spilled, "
            f"{k.shared_bytes:,} bytes of shared memory"
            for k in built
        ]
        self.checked += ["launches, shapes and dtypes", *(look.about for look in needs.looks)]
        return findings

    def compiled(self, wanted: list[dict]) -> list[Finding]:
        """Compile the answer's Triton kernels for a GPU, as they were launched."""
        unique = {}
        for launch in wanted:
            types = {n: _without_multiple(t) for n, t in launch["types"].items()}
            unique[json.dumps(launch | {"types": types}, sort_keys=True)] = launch | {"types": types}
        by_kernel: dict[str, list[dict]] = {}
        for launch in unique.values():
            by_kernel.setdefault(launch["kernel"], []).append(launch)
        launches = []
        for variants in by_kernel.values():  # the last ones and the first: of large constants, which may not fit, first
            half = MOST_COMPILED // 2
            launches += (
                variants[::-1] if len(variants) <= MOST_COMPILED else variants[: -half - 1 : -1] + variants[:half]
            )
        for launch in launches:
            try:
                made = reveal.compiled(
                    self.text,
                    launch["kernel"],
                    launch["types"],
                    launch["constants"],
                    machine.here().arch,
                    launch["num_warps"],
                    launch["num_stages"],
                    sealed=self.sealed,
                )
            except (reveal.CompileFailed, TypeError) as refused:
                return [Finding("compile", f"The interpreter runs it, a GPU's compiler refuses it. {refused}")]
            if not made.fits:
                takes, limit = made.shared_bytes >> 10, machine.shared_limit(made.arch) >> 10
                said = (
                    f"The interpreter runs it, a GPU cannot launch it: a program of `{made.name}` takes {takes} KB of "
                )
                said += f"shared memory, and {made.arch} has {limit}. Take smaller blocks, or fewer stages."
                return [Finding("compile", said)]
        if launches:
            self.checked.append(f"compiled for {machine.here().arch}")
        return []

    def few_bytes(self) -> list[Finding]:
        """What large calls read from the GPU's memory, by its counters, against the exercise's limits."""
        if self.sealed:
            self.unchecked.append("bytes from the GPU's memory: the profiler needs the network, which is shut")
            return []
        cases = self.large()
        try:
            program, job = self.counting or sanitizer.counting(), self.large_job.result() if self.large_job else None
            with locks.exclusive("bytes from memory, under Nsight Compute"):
                read = sanitizer.bytes_read(program, job or self.written())
        except RuntimeError as missing:
            reason = str(missing).partition("\n")[0]
            self.unchecked.append(f"bytes from the GPU's memory: {reason}")
            return []
        if len(read) != len(cases):
            self.unchecked.append(f"bytes from the GPU's memory: {len(read)} of {len(cases)} calls were counted")
            return []
        for (i, case), found in zip(cases, read, strict=True):
            if findings := limited(self.exercise, self.drawn(i, case), {"dram_bytes": found}):
                return [self.told(f, case) for f in findings]
        self.checked.append("bytes from the GPU's memory")
        return []

    def fast_enough(self) -> list[Finding]:
        """Time the answer against its rival, in one process."""
        speed = self.exercise.speed
        times = self.timed(speed.inputs, speed.rival)
        if isinstance(times, Finding):
            return [times]
        mine, rival = times
        share = rival / mine
        if share < speed.least:
            said = speed.says.format(share=f"{share:.2f}", least=f"{speed.least:.2f}")
            return [Finding("too-slow", said, {"us": mine, "rival_us": rival, "share": share})]
        self.checked.append(f"{share:.2f} of its rival's speed (at least {speed.least:.2f})")
        return []

    def timed(self, inputs: Callable, rival: Callable) -> tuple[float, float] | Finding:
        """µs of the answer and of a rival, in turns in one process, on a GPU; or how that process ended."""
        left, done = self.played("gpu", [], {**_travel(rival), "as_case": Case("timed", inputs)})
        times = next((m["seconds"] for m, _ in left if m.get("event") == "speed"), None)
        return failed(left[-1][0] if left else {}, done, self.text) if times is None else (times[0][0], times[1][0])

    def asked(self, inputs: Callable) -> tuple[float, float] | Finding:
        """Bytes that the kernels of one call ask for, and operators of PyTorch's must move, counted in CPU mode; and
        the least: each tensor that comes in read once, each that goes out written once. Or how the process ended."""
        self.traces = True
        left, done = self.played("cpu", [(0, Case("counted", inputs))])
        one = next((m for m, _ in left if m.get("event") == "left"), None)
        if one is None:
            return failed(left[-1][0] if left else {}, done, self.text)
        out = sum(math.prod(said["size"]) * getattr(torch, said["dtype"]).itemsize for said in one["tensors"])
        given = tensors(self.drawn(0, Case("counted", inputs)))
        beside = one["facts"]["operator_bytes"] if self.has_kernels else 0
        return one["facts"]["bytes"] + beside, traffic.least(given) + out


class Unreadable(ValueError):
    """A frame that an answer damaged."""


# -------------------------------------------------------------------------------------------------------------------


def _spec(t: torch.Tensor, which: str, blobs: list) -> dict:
    blobs.append(stage.as_bytes(t))
    return {
        "dtype": str(t.dtype).removeprefix("torch."),
        "size": list(t.shape),
        "stride": list(t.stride()),
        which: len(blobs) - 1,
    }


def _odd(launches: list[dict]) -> list[Finding]:
    """The first launch with what no GPU can be given. The interpreter takes it, and a launch on a GPU says less."""
    for launch in launches:
        for name, said in [*launch["types"].items(), *launch["constants"].items()]:
            if said == "?":
                said = f"`{launch['kernel']}` is launched with something as `{name}` that no GPU can be given"
                said += ": pass tensors, numbers, and as constants also texts and tl's types."
                return [Finding("compile", said)]
    return []


def _without_multiple(spelled: str | dict) -> str | dict:
    """A type without what is known of its values: "i32" of "i32:16"; also in a tuple's parts."""
    if isinstance(spelled, dict):
        return spelled | {"parts": [_without_multiple(part) for part in spelled["parts"]]}
    return spelled.partition(":")[0]


def _bits(data: torch.Tensor, said: dict) -> torch.Tensor:
    """An output's bytes in its own dtype and shape; empty where they were not handed over."""
    dtype = getattr(torch, said["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(said["dtype"])
    try:
        return data.view(dtype).reshape(said["size"])
    except RuntimeError:
        return torch.empty(0, dtype=dtype)


def _unpacked(message: dict, blobs: list, device: str) -> tuple:
    """Of the frame of a call: what is told of its outputs, which should lie on `device`, all its bytes, the outputs,
    their tree, the facts. Raises `Unreadable`."""
    got = [torch.frombuffer(bytearray(b), dtype=torch.uint8) if b else torch.empty(0, dtype=torch.uint8) for b in blobs]
    try:
        about = [said | {"wanted_device": device} for said in message["tensors"]]
        outputs = [_bits(t, said) for t, said in zip(got, about, strict=False)]
        return about, got, outputs, stage.decode(message["outputs"], outputs), dict(message["facts"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Unreadable from error


def _travel(function) -> dict | None:
    return {"text": travelling(function), "name": function.__name__} if function else None


def _left(file) -> list:
    """The frames in a file that a child wrote."""
    file.seek(0)
    return list(stage.frames(memoryview(file.read())))


def _printed(done: child.Result) -> str:
    said = visible(done.stdout.strip("\n"))
    return said if len(said) <= PRINTED else said[:PRINTED] + f"\n[{len(said) - PRINTED:,} more characters]"
