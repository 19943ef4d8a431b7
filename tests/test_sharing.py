"""What processes of one run of tests share: loaded zygotes, of which each has forks of its own, and compiled CUDA C."""

import os
import subprocess
import sys

import pytest

from helpers import child, cuda, machine
from helpers.cuda import nvrtc
from tests import sharing

pytestmark = pytest.mark.skipif(
    machine.gpu() or not child._can_fork(), reason="on a GPU, and where nothing is forked, each loads its own"
)


def shared(monkeypatch):
    for name, value in sharing.shared().items():
        monkeypatch.setenv(name, value)
    child.close()


def test_a_process_has_a_fork_of_its_own_which_ends_with_it(monkeypatch):
    shared(monkeypatch)
    asks = "import os, sys", "[os.getppid(), 'torch' in sys.modules]"
    text = f"from helpers import child\nprint(*child.run(*{asks!r}).value)"
    told = [subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split()
            for _ in range(2)]  # fmt: skip
    told.append(list(map(str, child.run(*asks).value)))
    assert len({pid for pid, _ in told}) == 3 and {loaded for _, loaded in told} == {"True"}
    assert child.run("import os", "os.environ.get('HELPERS_ZYGOTES')").value is None
    assert not any(os.path.exists(f"/proc/{pid}/exe") for pid, _ in told[:2])
    child.close()


def test_without_the_one_who_shares_a_process_loads_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("HELPERS_ZYGOTES", str(tmp_path / "nobody"))
    child.close()
    assert child.run("", "7").value == 7
    child.close()


def test_what_one_process_compiled_another_takes_over(monkeypatch, tmp_path):
    monkeypatch.setenv("HELPERS_BINARIES", str(tmp_path))
    code = 'extern "C" __global__ void shared_once(float* x) { x[0] = 3; }'
    made = cuda.compile(code, "sm_90")
    monkeypatch.setattr(nvrtc, "_binaries", {})
    monkeypatch.setattr(nvrtc.compiler, "made", None)  # nothing is compiled again
    assert cuda.compile(code, "sm_90") == made and cuda.compile_all([(code, "sm_90")]) == [made]
