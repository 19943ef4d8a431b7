"""Child processes: values come back, and whatever a text does, the next call is right."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers import child


def running(mark: str) -> list[str]:
    """Command lines of the live processes that hold `mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if mark in line:
            found.append(line)
    return found


def right() -> None:
    r = child.run("import torch\nx = torch.arange(3)\nprint('out')", "x * 2")
    assert (r.value, r.stdout, r.exit, r.ok) == ([0, 2, 4], "out\n", 0, True), r


def test_a_value_comes_back_and_the_fork_is_warm():
    right()
    r = child.run("import torch, triton, numpy", "[1.5, {'a': None}, numpy.float32(2)]")
    assert r.value == [1.5, {"a": None}, 2.0] and r.seconds < 1
    assert child.run("", "float('nan')").value != child.run("", "0").value
    assert child.run("import os", "os.environ['A'], os.getcwd()", env={"A": 7}).value == ["7", os.getcwd()]
    assert child.run("x = 3").value is None


def test_errors_name_the_texts_own_line():
    r = child.run("x = 1\ndef f():\n    return x / 0", "f()")
    assert r.error == "ZeroDivisionError: division by zero" and r.exit == 1 and not r.ok
    assert 'cells.py", line 3, in f' in r.stderr and "zygote" not in r.stderr
    assert child.run("import sys\nsys.exit(3)").exit == 3
    assert "cannot carry" in child.run("", "object()").error
    assert child.run("x = = 1").error.startswith("SyntaxError")


HOSTILE = {
    "loop": ("while True: pass", lambda r: r.timed_out and r.signal == signal.SIGKILL and "still running" in r.why()),
    "exit": ("import os; os._exit(0)", lambda r: r.exit == 0 and r.value is None),
    "segfault": ("import ctypes; ctypes.string_at(0)", lambda r: r.signal == 11 and "SIGSEGV" in r.why()),
    "abort": ("import os; os.abort()", lambda r: r.signal == signal.SIGABRT),
    "stop": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", lambda r: r.timed_out),
    "deaf": ("import signal\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
             lambda r: r.timed_out),
    "flood": ("while True: print('x' * 100000)", lambda r: r.timed_out and len(r.stdout) < 70000),
    "memory": ("x = bytearray(1 << 31)", lambda r: r.error.startswith("MemoryError")),
    "closes": ("import os\nos.closerange(0, 100)\nos._exit(5)", lambda r: r.exit == 5),
    "kin": ("import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(300)",
            lambda r: r.exit == 0),
    "daemon": ("import subprocess\nfor _ in range(3):\n    subprocess.Popen(['sleep', '3017'], start_new_session=True)",
               lambda r: r.exit == 0),
    "storm": ("import os, time\nfor _ in range(5):\n    os.fork()\ntime.sleep(300)", lambda r: r.timed_out),
    "kills its keeper": ("import os\nos.kill(os.getppid(), 9)\nimport time\ntime.sleep(300)",
                         lambda r: r.error == "it killed the process that ran it" and not r.ok),
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the zygote")
@pytest.mark.parametrize("name", HOSTILE)
def test_survives(name):
    text, holds = HOSTILE[name]
    limits = {"seconds": 1.0, "memory_bytes": 1 << 30, "output_bytes": 1 << 16}
    start = time.monotonic()
    r = child.run(text, "1", **limits)
    assert holds(r), r
    assert time.monotonic() - start < 12
    right()
    assert running("sleep 3017") == []
    zygote = child._zygotes["interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "compiled"]
    below = Path(f"/proc/{zygote.pid}/task/{zygote.pid}/children").read_text()
    assert below == ""


def test_an_interrupt_reaches_the_caller_and_the_next_call_is_right():
    def interrupt(*_):
        raise KeyboardInterrupt

    right()
    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            child.run("while True: pass", seconds=20)
    finally:
        signal.signal(signal.SIGALRM, old)
    right()


def test_a_fresh_interpreter_and_other_programs():
    r = child.python(["-c", "import sys, os; print(os.environ['A'], 'torch' in sys.modules)"], env={"A": "b"})
    assert r.stdout == "b False\n" and r.exit == 0
    assert child.python(["-c", "while True: pass"], seconds=0.5).timed_out
    assert child.command(["sh", "-c", "echo no >&2; exit 4"]).stderr == "no\n"
    assert child.command(["no-such-program"]).exit != 0


def test_interpreting_and_compiling_children_side_by_side():
    text = "import triton\n@triton.jit\ndef k(x):\n    pass"
    assert child.run(text, "type(k).__name__", interpreted=True).value == "InterpretedFunction"
    assert child.run(text, "type(k).__name__", interpreted=False).value == "JITFunction"


def test_inductor_can_be_loaded_beforehand():
    text, loaded = "import sys", "'torch._inductor.compile_fx' in sys.modules"
    assert child.run(text, loaded, interpreted=True, inductor=True).value is True
    captures = "'functorch.compile' in sys.modules and 'TRITON_INTERPRET' not in sys.modules['os'].environ"
    assert child.run(text, captures, interpreted=False, inductor=True).value is True
    assert child.run(text, loaded, interpreted=True).value is False


@pytest.mark.parametrize("interpreted", [True, False])
def test_watching_an_answer_needs_no_compiler_of_torch(interpreted):
    """Neither before a text runs nor where its operators are watched: importing it took longer than most checks."""
    text = (
        "import sys, torch\n"
        "from helpers.stage.watching import Watch, watch_values\n"
        "watch_values()\n"
        "def count():\n"
        "    with torch.no_grad(), Watch() as watch:\n"
        "        torch.empty(3).fill_(2).sum().item()\n"
        "    return len(watch.launches), len(watch.given), 'torch._dynamo' in sys.modules\n"
    )
    r = child.run(text, "count()", interpreted=interpreted, env={"HELPERS_MODE": "cpu"})
    assert r.value == [2, 1, False], r.stderr


def test_without_a_zygote(monkeypatch):
    monkeypatch.setattr(child, "_can_fork", lambda: False)
    assert child.run("print('out')", "1 + 1", interpreted=False).value == 2
    r = child.python(["-c", "while True: print('x' * 100)"], seconds=0.5, output_bytes=1000)
    assert r.timed_out and len(r.stdout) < 1100


@pytest.mark.parametrize(
    "end", ["import os; os.kill(os.getpid(), 9)", pytest.param("", id="at its end", marks=pytest.mark.slow)]
)
def test_a_zygote_ends_with_its_parent(end):
    script = (
        "from helpers import child\nchild.python(['-c', ''])\nprint(child._zygotes['bare'].process.pid, flush=True)\n"
    )
    pid = int(subprocess.run([sys.executable, "-c", script + end], capture_output=True, text=True).stdout)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the zygote")
def test_calls_of_several_threads_run_side_by_side(tmp_path):
    """Each waits for the other: one after the other, the first would wait in vain."""
    text = (
        "import pathlib, time\n"
        "def meet(mine, other):\n"
        "    pathlib.Path(mine).touch()\n"
        "    while not pathlib.Path(other).exists():\n"
        "        time.sleep(0.01)\n"
        "    return 'met'\n"
    )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    with ThreadPoolExecutor() as pool:
        met = pool.map(lambda pair: child.run(text, f"meet{pair}", interpreted=False, seconds=40), [(a, b), (b, a)])
    assert [one.value for one in met] == ["met", "met"]
    assert sum("compiled" in kind for kind in child._zygotes) == 1  # the other one has ended
    assert child.run("", "6 * 7", interpreted=False).value == 42


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the zygote")
def test_a_second_process_of_a_kind_is_a_fork_of_the_first():
    def alive(pid):
        line = Path(f"/proc/{pid}/cmdline")
        return line.exists() and line.read_bytes()  # empty: it has ended, and nobody has asked how

    text = "import os, subprocess, time\nsubprocess.Popen(['sleep', '60'])\nbegan = time.monotonic()"
    wait = "time.sleep(0.5), os.getppid(), began, time.monotonic()"
    child.close()
    with ThreadPoolExecutor(3) as pool:
        made = [done.result() for done in [pool.submit(child.run, text, wait, interpreted=False) for _ in range(3)]]
    assert [(done.why(), done.kin) for done in made] == [("it ended well", 1)] * 3  # each sweeps its own
    _, parents, starts, ends = zip(*(done.value for done in made), strict=True)
    assert len(set(parents)) == 3 and max(starts) < min(ends)  # side by side
    first = next(iter(child._zygotes.values()))
    assert child.run("import os", "os.getppid()", interpreted=False).value == first.pid
    child.close()
    end = time.monotonic() + 10
    while (left := [pid for pid in parents if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.01)  # one that has been forked from waits for its fork's end
    assert not left


def test_a_program_that_was_begun_runs_beside_others(tmp_path):
    wait = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nprint('seen')"
    begun = child.begin([sys.executable, "-c", wait, tmp_path / "sign"])
    right()
    (tmp_path / "sign").touch()
    done = begun.result(20)
    assert (done.stdout, done.exit, done.ok) == ("seen\n", 0, True)
    stopped, late = (child.begin([sys.executable, "-c", wait, tmp_path / name]) for name in ("never", "late"))
    stopped.end()
    done = late.result(0.2)
    assert done.timed_out and not done.ok
    assert not running(str(tmp_path / "never")) and not running(str(tmp_path / "late"))
    assert not [kind for kind in child._zygotes if kind.startswith("begun")]
