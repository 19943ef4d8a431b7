"""Whatever an answer does, the verdict says what happened and where, and the next check is right.

`FAULTS` is the table: code that goes into the course's own answer, and what must be said of it.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
import pytest
import torch
from jupyter_client.manager import KernelManager

from helpers import ROOT, child, machine, notebooks, stage
from helpers.checks import Finding, Verdict, judge, rules, sanitizer
from helpers.checks.findings import failed, place, raised
from helpers.checks.judge import Stopped, Trial
from helpers.exercises import every
from tests.answers import edited, solved
from tests.test_child import running
from tests.test_desk import lives

DAEMON = "sleep 3018"


@dataclass(frozen=True)
class Fault:
    """code: lines that are put into the course's answer to `exercise` before its line that begins with `before`.
    words: what the verdict must say; "{place}" is the code's line that holds `at`, by default its last, counted from
    the `def` above it.
    """

    name: str
    exercise: str
    before: str
    code: str
    kind: str
    words: tuple[str, ...] = ()
    at: str = ""
    seconds: float = 1.0

    @property
    def text(self) -> str:
        text = solved(self.exercise)
        line = next(line for line in text.splitlines() if line.lstrip().startswith(self.before))
        indent = line[: len(line) - len(line.lstrip())]
        code = "".join(f"{indent}{part}\n" for part in self.code.splitlines())
        return edited(text, [{"find": f"{line}\n", "replace": f"{code}{line}\n"}])

    @property
    def place(self) -> str:
        at = self.at or self.code.splitlines()[-1].strip()
        lines = self.text.splitlines()
        last = next(i for i, line in enumerate(lines) if at in line)
        first = max((i for i, line in enumerate(lines[:last]) if line.startswith("def ")), default=last)
        name = lines[first].removeprefix("def ").partition("(")[0]
        while lines[first - 1].startswith("@"):  # a learner counts from there
            first -= 1
        return f"line {last - first + 1} of `{name}` (`{lines[last].strip()}`)"


def python(name, code, kind, *words, **options) -> Fault:
    """In the body of a Python function."""
    return Fault(name, "count-bytes", "### BEGIN SOLUTION", code, kind, words, **options)


def triton(name, code, kind, *words, before="tl.store(", **options) -> Fault:
    """In a Triton kernel, or with another `before` in its wrapper."""
    return Fault(name, "masked-add", before, code, kind, words, **options)


def cuda(name, code, kind, *words, **options) -> Fault:
    """In a CUDA C kernel, before its threads write to shared memory."""
    return Fault(name, "block-sum", "part[t] = sum;", code, kind, words, seconds=4, **options)


FORGE = """import json, os, struct
said = json.dumps({} | {{"sizes": []}}).encode()
for fd in range(3, 64):
    try: os.write(fd, struct.pack("<Q", len(said)) + said)
    except OSError: pass
os._exit(0)"""
"""Writes a frame of its own wherever it can, for the parent to read."""

CASE = "(Case: "
IN_LINE = "in {place}"
KIN = "started a process and did not wait"
FAULTS = [
    python("loop", "while True: pass", "timeout", "still running after", IN_LINE, CASE),
    python("sleep", "import time\ntime.sleep(1000)", "timeout", "still running", IN_LINE, CASE),
    python("recursion", "return least_bytes(m, n, k, size)", "exception", "RecursionError", IN_LINE, CASE),
    python("segmentation fault", "import ctypes\nctypes.string_at(0)", "crash", "SIGSEGV", IN_LINE, CASE),
    python("abort", "import os\nos.abort()", "crash", "SIGABRT", IN_LINE, CASE),
    python("ends itself", "import os\nos._exit(0)", "crash", "ended by itself (status 0)", CASE),
    python("forges its end", FORGE.format('{"event": "end", "to_compile": []}'), "crash", "ended by itself (status 0)"),
    python(
        "forges a result", FORGE.format('{"event": "left", "case": 0, "order": "forward"}'), "crash", "is damaged", CASE
    ),
    python("exits", "import sys\nsys.exit(0)", "exception", "sys.exit", CASE),
    python("interrupts itself", "raise KeyboardInterrupt", "exception", "KeyboardInterrupt", IN_LINE, CASE),
    python("kills itself", "import os\nos.kill(os.getpid(), 9)", "crash", "SIGKILL", "another process", CASE),
    python("stops itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout", "still running", CASE),
    python("memory at once", "bytearray(1 << 40)", "memory", "MemoryError", IN_LINE, CASE),
    python("memory bit by bit", "kept = []\nwhile True: kept.append(bytes(1 << 26))", "memory", IN_LINE, CASE),
    python("200 MB of output", "for _ in range(20): print('x' * 10_000_000)", "passed", "more characters", seconds=5),
    python("output without end", "while True: print('x' * 10_000)", "timeout", "still running", IN_LINE, CASE),
    python("errors without end", "import sys\nwhile True: sys.stderr.write('x' * 10_000)", "timeout", IN_LINE, CASE),
    python("fork", "import os\nos.fork()", "forbidden", KIN),
    python("forks", "import os, time\nfor _ in range(4): os.fork()\ntime.sleep(1000)", "timeout", IN_LINE, CASE),
    python(
        "daemon",
        f"import subprocess\nsubprocess.Popen({DAEMON.split()}, start_new_session=True)",
        "forbidden",
        KIN,
    ),
    python(
        "daemon of a dead parent",
        "import os\n"
        "if (pid := os.fork()) == 0:\n"
        "    os.setsid()\n"
        f"    if os.fork() == 0: os.execvp('sleep', {DAEMON.split()})\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)",
        "forbidden",
        KIN,
    ),
    python("prints Unicode", "print('é 漢 😀')", "passed", "é 漢 😀"),
    python("prints bytes", "import os\nos.write(1, b'\\xff\\xfe\\x00')", "passed", "It printed"),
    python("draws on a terminal", "print('\\x1b[2J\\x1b[Hfine')", "passed", "\ufffd[2J\ufffd[Hfine"),
    python("raises no Unicode", "raise ValueError('\\ud800\\x1b[2J')", "exception", "\ufffd\ufffd[2J", IN_LINE, CASE),
    python("closes stdout", "import sys\nsys.stdout.close()", "passed"),
    python("closes stdout and stderr below", "import os\nfor fd in 1, 2:\n  try: os.close(fd)\n  except OSError: pass",
           "passed"),
    python("has no stdout", "import sys\nsys.stdout = sys.stderr = None", "passed"),
    python("closes everything", "import os\nos.closerange(0, 256)", "crash", "ended by itself", CASE),
    python("syntax error", "return {1: 2", "syntax", "cannot read line 3 (`return {1: 2`)"),
    triton("kernel loop", "while True: pass", "timeout", "still running", IN_LINE, CASE),
    triton("kernel writes far away", "tl.store(out_ptr + offset + (1 << 28), x, mask=inside)", "out-of-bounds",
           IN_LINE, "store", "past its end", CASE),
    triton("kernel assert", "tl.static_assert(BLOCK < 0, 'BLOCK is large')", "exception", "BLOCK is large", IN_LINE,
           CASE),
    triton("wrapper memory", "kept = torch.empty(1 << 40, device=x.device)", "memory", IN_LINE, CASE,
           before="n = x.numel()"),
    cuda("CUDA kernel loop", "while (1) ;", "timeout", "still running", IN_LINE, CASE,
         at="kernel((rows"),
    cuda("CUDA illegal address", "out[1 << 28] = sum;", "out-of-bounds", "writes 4 bytes",
         "out[1 << 28] = sum;", CASE),
    cuda("CUDA null pointer", "*(float*)0 = sum;", "out-of-bounds", "null pointer", "*(float*)0 = sum;", CASE),
    cuda("CUDA misaligned address", "sum += *(const long long*)(row + 1);", "crash", "no multiple of 8",
         "long long", CASE),
    cuda("CUDA assert", "assert(cols < 0);", "exception", "assertion `cols < 0` failed", "thread (", CASE),
    cuda("CUDA trap", "__trap();", "crash", "called __trap()", "rule out", CASE),
    cuda("CUDA division by zero", "sum += cols % (cols / 99999);", "crash", "divides an integer by zero", "divisor",
         CASE),
    cuda("CUDA mask without its own lane", "sum += __shfl_sync(1u << (t + 1) % 32, 1, 0);", "crash",
         "leaves out its own lane", "__ballot_sync", CASE),
]  # fmt: skip


ON_A_GPU = [
    triton("GPU loop", "while tl.load(mask_ptr, volatile=True) < 100:\n    tl.atomic_add(out_ptr, 0.0)", "timeout",
           "The kernel `masked_add_kernel`, launched last, was still running", CASE),
    triton("GPU illegal address", "tl.store(out_ptr + offset + (1 << 40), x, mask=inside)", "out-of-bounds",
           "illegal memory access", "`masked_add_kernel`", CASE),
    triton("GPU memory", "kept = torch.empty(1 << 40, dtype=torch.int8, device=x.device)", "memory",
           "OutOfMemoryError", IN_LINE, CASE, before="n = x.numel()"),
    cuda("GPU CUDA loop", "while (((volatile float*)out)[0] != 1234.5f) part[t] = sum;", "timeout",
         "The kernel `block_sum`, launched last, was still running", CASE),
    cuda("GPU CUDA illegal address", "out[1ll << 40] = sum;", "out-of-bounds", "illegal memory access",
         "`block_sum`", CASE),
    cuda("GPU CUDA misaligned address", "sum += *(volatile const long long*)(row + 1);", "crash",
         "misaligned address", "`block_sum`", CASE),
    cuda("GPU CUDA assert", "assert(cols < 0);", "exception", "device-side assert", "Line 11", "`cols < 0` failed",
         "`block_sum`", CASE),
    cuda("GPU CUDA trap", "__trap();", "crash", "`block_sum`", CASE),
]  # fmt: skip


@pytest.fixture
def no_rules(monkeypatch):
    """What the rules would refuse unread gets to run."""
    monkeypatch.setattr(rules, "broken", lambda text, exercise: [])


def few(name: str, mode: str = ""):
    """The exercise with its first two cases, to be played in one mode only or in all."""
    exercise = every()[name]
    return dataclasses.replace(exercise, cases=tuple(dataclasses.replace(c, mode=mode) for c in exercise.cases[:2]))


def forks(pid: int) -> list[psutil.Process]:
    """What the zygotes of a process have started and still runs: a twin that ended waits there for the next sweep."""
    zygotes = [p for p in psutil.Process(pid).children() if child._SCRIPT in p.cmdline()]
    started = [fork for zygote in zygotes for fork in zygote.children(recursive=True)]
    return [fork for fork in started if lives(fork)]


def left(pid: int) -> list[psutil.Process]:
    """`forks` that stay: what closes its socket as it ends is still seen for a moment, and ends within 10 s."""
    end = time.monotonic() + 10
    while (found := forks(pid)) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def healthy(*names: str) -> None:
    """Nothing is left behind, this process lives and its CUDA context too, and right answers pass."""
    assert running(DAEMON) == []
    assert left(os.getpid()) == []
    if machine.gpu():
        assert torch.ones(1000, device="cuda").sum().item() == 1000
    for name in names:
        verdict = judge(few(name), solved(name))
        assert verdict.passed, verdict


def said(fault: Fault, verdict: Verdict) -> None:
    assert verdict.kind == fault.kind, verdict
    text = str(verdict)
    text.encode()
    for word in fault.words:
        assert word.replace("{place}", fault.place) in text, (word, fault.place, text)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_fault(fault, no_rules):
    healthy()
    began = time.monotonic()
    verdict = judge(few(fault.exercise), fault.text, seconds=fault.seconds)
    said(fault, verdict)
    assert time.monotonic() - began < fault.seconds + 15
    healthy(fault.exercise)


@pytest.mark.skipif(not machine.gpu(), reason="needs a GPU")
@pytest.mark.parametrize("fault", ON_A_GPU, ids=lambda fault: fault.name.replace(" ", "_"))
def test_fault_on_a_gpu(fault, no_rules):
    healthy()
    verdict = judge(few(fault.exercise, "gpu"), fault.text, seconds=4)
    said(fault, verdict)
    healthy(fault.exercise)


# ---- from outside -------------------------------------------------------------------------------------------------

LOOP = next(f for f in FAULTS if f.name == "loop")


def when_it_runs(act, pid: int = 0) -> threading.Thread:
    """Call `act` with the process of the answer that is being judged, once it has run for a moment.

    There has been a check before: the packages that a zygote imports start processes of their own.
    """
    assert left(pid or os.getpid()) == []  # or the first one found is of that check

    def watch():
        end = time.monotonic() + 40
        while time.monotonic() < end:
            if found := forks(pid or os.getpid()):
                time.sleep(0.3)
                act(found[0])
                return
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_killed_from_outside(no_rules):
    healthy("count-bytes")
    thread = when_it_runs(lambda process: process.kill())
    verdict = judge(few("count-bytes"), LOOP.text)
    thread.join()
    assert verdict.kind == "crash" and "SIGKILL" in str(verdict) and "another process" in str(verdict), verdict
    healthy("count-bytes")


@pytest.mark.slow
def test_the_keeper_killed_from_outside(no_rules):
    healthy("count-bytes")
    thread = when_it_runs(lambda process: process.parent().kill())
    verdict = judge(few("count-bytes"), LOOP.text)
    thread.join()
    assert verdict.kind == "crash" and "SIGKILL" in str(verdict), verdict
    healthy("count-bytes")


def test_stopped_by_the_learner(no_rules):
    healthy("count-bytes")
    thread = when_it_runs(lambda process: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as stop:
        judge(few("count-bytes"), LOOP.text)
    thread.join()
    assert isinstance(stop.value, Stopped)
    verdict = stop.value.verdict
    assert verdict.passed is None and verdict.headline == "stopped by you"
    for word in ("You stopped the check after", IN_LINE.replace("{place}", LOOP.place), "in the case: m, n, k = 4"):
        assert word in str(verdict), verdict
    healthy("count-bytes")


def test_two_checks_at_once_in_threads(no_rules):
    names = ["count-bytes", "masked-add", "block-sum"]
    with ThreadPoolExecutor(4) as pool:
        hanging = pool.submit(judge, few("count-bytes"), LOOP.text, seconds=1)
        right = list(pool.map(lambda name: judge(few(name), solved(name)), names))
    assert hanging.result().kind == "timeout"
    assert [v.kind for v in right] == ["passed"] * 3, right
    assert [v.exercise for v in right] == names
    healthy()


@pytest.mark.slow
def test_two_checks_at_once_in_processes(tmp_path):
    file = tmp_path / "answer.py"
    file.write_text(solved("masked-add"))
    command = [sys.executable, "-m", "helpers", "check", "masked-add", str(file), "--json"]
    environment = os.environ | {"PYTHONPATH": machine.python_path(), "HELPERS_PROGRESS": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=ROOT) as other:
        while other.poll() is None:
            healthy("count-bytes")
            time.sleep(0.3)
        theirs = json.loads(other.stdout.read())
    assert (theirs["exercise"], theirs["passed"]) == ("masked-add", True), theirs


def test_a_compiler_that_crashes_is_told_from_an_answer_that_does():
    for file, kind, said in (
        ("nvrtc.py", "compile", "The compiler itself was ended by SIGSEGV"),
        ("cpu.py", "crash", "It was ended by SIGSEGV"),
    ):
        trace = f'Thread 0x1 (most recent call first):\n  File "/helpers/cuda/{file}", line 9 in run\n'
        trace += '  File "answer.py", line 1 in f'
        found = failed({}, child.Result(None, "", trace, None, 11, False, 0.1), "def f(): pass")
        assert found.kind == kind and found.message.startswith(f"{said} in line 1 of `f`")


def test_lines_are_counted_from_the_first_that_a_learner_wrote():
    text = "import triton\n\n\n@triton.autotune(\n    [], [])\n@triton.jit\ndef f(x):\n    y = x\n    z = y\n\nz = 1\n"
    assert place(text, 9) == "line 6 of `f` (`z = y`)" and place(text, 4).startswith("line 1 of `f`")
    assert place(text, 11) == "`z = 1`" and place(text, 99) == "your code"
    text = "class A:\n    x = 1\n\n    @property\n    def b(self):\n        return 1 / 0\n"
    assert place(text, 6) == "line 3 of `b` (`return 1 / 0`)" and place(text, 2) == "line 2 of `A` (`x = 1`)"


def test_what_a_gpu_says_comes_in_one_sentence():
    """Its errors come late, with advice for others than the learner, and name no kernel."""
    told = "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in the manual.\nCompile with …"
    stderr = "kernel.cu:11: void f(int): block: [0,0,0], thread: [3,0,0] Assertion `n < 0` failed.\n" * 2
    found = raised({"classes": ["torch.AcceleratorError"], "message": told, "kernel": "f"}, stderr, text="")
    assert found.kind == "exception"
    assert found.message == (
        "AcceleratorError: CUDA error: device-side assert triggered; the kernel launched last was `f`. "
        "Line 11 of its text: assertion `n < 0` failed, block: [0,0,0], thread: [3,0,0]."
    )


# ---- in a notebook ------------------------------------------------------------------------------------------------


class Notebook:
    """A live Jupyter kernel: what its cells show, as text."""

    def __init__(self):
        self.manager = KernelManager(kernel_spec_manager=notebooks._ThisPython())
        self.manager.start_kernel(env=notebooks.kernel_environment({"HELPERS_PROGRESS": ""}))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid

    def run(self, cell: str) -> str:
        """What a cell shows; an error's name and message at the end."""
        said = []

        def hear(message):
            content = message["content"]
            match message["header"]["msg_type"]:
                case "stream":
                    said.append(content["text"])
                case "display_data" | "execute_result" | "update_display_data":
                    said.append(content["data"]["text/plain"])
                case "error":
                    said.append(f"{content['ename']}: {content['evalue']}")

        self.count = self.client.execute_interactive(cell, output_hook=hear, timeout=120)["content"]["execution_count"]
        return "\n".join(said)

    def healthy(self) -> None:
        assert left(self.pid) == []
        self.run(solved("count-bytes"))
        assert "✔ count-bytes: passed" in self.run('check("count-bytes", least_bytes)')

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def notebook():
    live = Notebook()
    try:
        assert live.run("import helpers\nfrom helpers.checks import check\nfrom helpers import exercises") == ""
        yield live
    finally:
        live.close()


def test_a_notebook_is_interrupted_in_the_middle_of_a_check(notebook):
    notebook.healthy()
    notebook.run("def least_bytes(m, n, k, size):\n    while True:\n        pass")
    thread = when_it_runs(lambda process: notebook.manager.interrupt_kernel(), notebook.pid)
    said = notebook.run('check("count-bytes", least_bytes)')
    thread.join()
    for words in (
        "? count-bytes: stopped by you",
        "You stopped the check after",
        " of `least_bytes` (`",
    ):
        assert words in said, said
    assert said.splitlines()[-1].startswith("Stopped: "), said
    notebook.healthy()


def test_a_notebook_says_which_run_of_a_cell_was_judged(notebook):
    right = solved("count-bytes")
    notebook.run(right)
    ran = notebook.count
    assert f"your `least_bytes` as last run, in cell [{ran}]" in notebook.run('check("count-bytes", least_bytes)')
    # the learner spoils it, but never runs the cell; then runs it with a syntax error
    notebook.run(right.replace("return {", "return {{"))
    said = notebook.run('check("count-bytes", least_bytes)')
    assert "✔ count-bytes" in said and f"in cell [{ran}]; cell [{ran + 2}] defines it anew" in said, said
    notebook.run(right.replace("2 * m * n + n", "2 * m * n"))
    said = notebook.run('check("count-bytes", least_bytes)')
    assert "✘ count-bytes: not yet: wrong-answer" in said and f"as last run, in cell [{ran + 4}]" in said, said
    notebook.healthy()


def test_cells_run_out_of_order_are_judged_as_they_ran(notebook):
    text = solved("count-bytes")
    notebook.run(text.replace("(m * n + m) * size", "ROWS(m, n) * size"))
    assert "NameError" not in (said := notebook.run('check("count-bytes", least_bytes)')), said
    assert "`ROWS` is bound nowhere" in said and "looked in the cells run since" in said, said
    notebook.run("def ROWS(m, n):\n    return m * n + m")  # below the answer, and run after it
    assert "✔ count-bytes" in notebook.run('check("count-bytes", least_bytes)')
    notebook.run("ROWS = None")
    said = notebook.run('check("count-bytes", least_bytes)')
    assert "✘ count-bytes: not yet: exception" in said and "TypeError in line" in said, said
    notebook.run("del least_bytes")
    said = notebook.run('check("count-bytes")')
    assert "`least_bytes` is bound nowhere" in said and "Run the cell that defines it first." in said, said
    notebook.healthy()


@pytest.mark.slow
def test_run_all_goes_on_to_the_end_of_a_hostile_notebook(tmp_path):
    """Cells with faults and their checks in turn; nothing raises, each verdict is right, the last answer passes."""
    names = ["loop", "segmentation fault", "memory at once", "200 MB of output", "closes everything", "recursion",
             "kernel loop", "kernel writes far away", "CUDA assert", "CUDA illegal address"]  # fmt: skip
    faults = [next(f for f in FAULTS if f.name == name) for name in names]
    cells = ["import helpers\nhelpers.start()\nfrom helpers.checks import check, rules\n"
             "rules.broken = lambda text, exercise: []  # what they would refuse unread gets to run"]  # fmt: skip
    for fault in faults:
        cells += [fault.text, f'check("{fault.exercise}")']
    cells += [solved("masked-add"), 'check("masked-add", masked_add)']
    path = tmp_path / "99_hostile.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), path)
    ran = notebooks.run(path, env={"HELPERS_PROGRESS": ""})
    assert ran.failure is None
    shown = ["\n".join(o.data["text/plain"] for o in cell.outputs if "data" in o) for cell in ran.notebook.cells[2::2]]
    for fault, said in zip(faults, shown, strict=False):
        assert f"{fault.exercise}: {'' if fault.kind == 'passed' else 'not yet: '}{fault.kind}" in said, (fault, said)
    assert "✔ masked-add: passed" in shown[-1], shown[-1]
    assert running(DAEMON) == []


@pytest.mark.parametrize(
    ("counted", "kind", "said"),
    [
        ([10**8, 10**10], "too-many-bytes", "The GPU read 10,000,000,000 bytes from its memory"),
        ([10**8, 10**8], None, "bytes from the GPU's memory"),
        (machine.NotReady("This account may not read the GPU's hardware counters."), None, "may not read"),
    ],
)
def test_bytes_from_a_gpus_memory_are_held_against_the_limit(counted, kind, said, monkeypatch):
    def bytes_read(program, job):
        if isinstance(counted, Exception):
            raise counted
        return counted

    monkeypatch.setattr(sanitizer, "counting", lambda: None)
    monkeypatch.setattr(sanitizer, "bytes_read", bytes_read)
    trial = Trial(every()["grouped-launch"], solved("grouped-launch"), 1, 10)
    found = trial.few_bytes()
    assert [f.kind for f in found] == [kind] * bool(kind)
    assert said in "".join([*(f.message for f in found), *trial.checked, *trial.unchecked])


def test_the_calls_whose_bytes_are_counted_are_written_down_beside_the_passes(monkeypatch):
    exercise = every()["grouped-launch"]
    small = [dataclasses.replace(one, inputs=one.inputs and exercise.cases[0].inputs) for one in exercise.limits]
    trial = Trial(dataclasses.replace(exercise, limits=tuple(small)), solved("grouped-launch"), 1, 10)
    trial.launched = ["what the passes launch, which these calls do not"]
    with trial.written() as file:
        [(job, blobs)] = stage.frames(memoryview(Path(file.name).read_bytes()))
    assert job["counted"] and not job["ahead"] and job["text"] == trial.program
    assert len(job["cases"]) == 2 and len(blobs) == 4 and not any("again" in case for case in job["cases"])
    drawn = trial.drawn(*trial.large()[1])
    assert bytes(blobs[2]) == bytes(stage.as_bytes(drawn[0])) and bytes(blobs[3]) == bytes(stage.as_bytes(drawn[1]))
    trial.over = True
    assert trial.written() is None


@pytest.mark.parametrize("name, is_judged_again", [("row-softmax", True), ("what-fuses", False)])
def test_what_a_gpu_machine_lacks_for_the_pass_on_the_cpu(name, is_judged_again, monkeypatch):
    trial = Trial(every()[name], "", 0, 1.0)
    trial.gpu = True
    monkeypatch.setattr(trial, "on", lambda mode: [Finding("environment", "There is no compiler.")])
    assert [f.kind for f in trial.on_cpu()] == ([] if is_judged_again else ["environment"])
    assert trial.unchecked == (["as in CPU mode: There is no compiler."] if is_judged_again else [])
