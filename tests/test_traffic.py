"""Bytes by arithmetic and by counting requests; what needs hardware counters is lesson 01's to show."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from helpers import machine, traffic

cpu_only = pytest.mark.skipif(machine.gpu(), reason="says what CPU mode does")


@triton.jit
def twice(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + tl.load(x_ptr + i, mask=i < n), mask=i < n)


def test_least_counts_each_tensor_once_by_its_own_element_size():
    half, single = torch.empty(10, 20, dtype=torch.float16), torch.empty(7)
    assert traffic.least(reads=(half, single), writes=(single,)) == 10 * 20 * 2 + 2 * 7 * 4


@cpu_only
def test_requests_count_unmasked_lanes_only_and_every_load():
    x, y = torch.randn(1000), torch.empty(1000)
    asked = traffic.requested(lambda: twice[(8,)](x, y, 1000, BLOCK=128))
    assert (asked.read, asked.written, asked.total) == (2 * 4000, 4000, 12000)


@cpu_only
def test_counters_are_refused_in_cpu_mode_with_a_sentence():
    with pytest.raises(machine.NotReady, match="DRAM counters are a GPU's"):
        traffic.measured(test_least_counts_each_tensor_once_by_its_own_element_size)


def test_values_that_are_given_replace_the_notebooks(monkeypatch, tmp_path):
    scripts = []

    def profiled(command, **_):
        scripts.append(Path(command[-1]).read_text())
        names = f'"ID","{traffic.READ}","{traffic.WRITTEN}"'
        return SimpleNamespace(stdout=f'{names}\n"","byte","byte"\n"0","1,024","64"\n', stderr="")

    def tile():
        pass

    monkeypatch.setattr(machine, "gpu", lambda: True)
    monkeypatch.setattr(machine, "cache", lambda name: tmp_path)
    monkeypatch.setattr(traffic, "find", lambda: "ncu")
    monkeypatch.setattr(traffic.source, "live", lambda *names: "CASE = (1, 2)\n\n\ndef tile():\n    print(CASE)\n")
    monkeypatch.setattr(traffic.child, "command", profiled)
    counted = traffic.measured(tile, given={"CASE": (4096, "fp16")})
    assert counted["tile"] == traffic.Bytes(1024, 64)
    code = scripts[0]
    assert code.index("CASE = (1, 2)") < code.index("CASE = (4096, 'fp16')") < code.index("_functions, _repeats")
    traffic.measured(tile, given={"CASE": (4096, "fp16")})  # out of the cache
    traffic.measured(tile, given={"CASE": (8192, "fp16")})
    assert len(scripts) == 2


def test_a_profile_is_split_into_calls_at_the_marker_kernel():
    def rows(*names):
        return [{"Kernel Name": n} for n in names]

    marker = "at::cuda::spin_kernel(long)"
    calls = traffic._by_call(rows("a", "b", marker, "a", marker, marker, "c", marker), functions=2, repeats=2)
    assert [[[r["Kernel Name"] for r in call] for call in function] for function in calls] == [
        [["a", "b"], ["a"]],
        [[], ["c"]],
    ]
    with pytest.raises(RuntimeError, match="4 calls were profiled, but 1 came back"):
        traffic._by_call(rows("a", marker), functions=2, repeats=2)


def test_ncu_tables_lose_their_chatter_and_row_of_units():
    text = '==PROF== Connected\nprinted by the program\n"ID","Kernel Name","m"\n"","","byte"\n"0","k(int)","1,024"\n'
    (row,) = traffic._parse(text)
    assert row["Kernel Name"] == "k(int)" and traffic._value(row, "m") == 1024.0


def test_missing_permission_is_named_with_its_mend():
    done = type("Done", (), {"stdout": "==ERROR== ERR_NVGPUCTRPERM", "stderr": "", "exit": 1, "timed_out": False})
    problem = traffic._failure(done)
    assert isinstance(problem, machine.NotReady) and "NVreg_RestrictProfilingToAdminUsers=0" in problem.mend


def test_counters_become_sentences_and_travel_as_text(monkeypatch, tmp_path):
    values = {m: "0" for m in traffic._COUNTED.values()} | {
        traffic._COUNTED["registers"]: "128",
        traffic._COUNTED["occupancy"]: "24.96",
        traffic.READ: "67,000,000",
        traffic._COUNTED["conflicts"]: "20",
        traffic._COUNTED["shared"]: "100",
        traffic._COUNTED["latency"]: "8",
        traffic._COUNTED["gmma"]: "4",
        traffic._COUNTED["selected"]: "1",
        traffic._COUNTED["long_scoreboard"]: "2",
    }
    table = [{"Kernel Name": "gemm(float)"} | values | {traffic.DURATION: "190,000"}]
    columns = list(table[0])
    text = "\n".join(",".join(f'"{row[c]}"' for c in columns) for row in [dict(zip(columns, columns, strict=True)),
                     dict.fromkeys(columns, ""), *table])  # fmt: skip
    monkeypatch.setattr(machine, "gpu", lambda: True)
    monkeypatch.setattr(machine, "here", lambda: machine.Machine("gpu", "a test", "a card", (9, 0)))
    monkeypatch.setattr(machine, "cache", lambda name: tmp_path)
    monkeypatch.setattr(traffic, "find", lambda: "ncu")
    monkeypatch.setattr(traffic.source, "live", lambda *names: "def product():\n    pass\n")
    monkeypatch.setattr(traffic.child, "command", lambda command, **_: SimpleNamespace(stdout=text, stderr=""))

    def product():
        pass

    written = traffic.counters(product)
    found = traffic.read_counters(f"[recorded: a GPU]\n{written}")["product"]
    assert (found.kernel, found.us, found.registers, found.conflicts) == ("gemm", 190.0, 128, 0.25)
    assert found.stalls[:2] == (("waiting for wgmma", 50.0), ("waiting for global memory or L2", 25.0))
    said = " ".join(found.sentences())
    with pytest.raises(RuntimeError, match="2 functions started 1 kernels; for counters each starts one"):
        traffic.counters(product, product)
    assert "Occupancy 25%, 128 registers" in said and "67 MB read" in said and "waiting for wgmma 50%" in said


def stand_in_for_ncu(monkeypatch, folder):
    """In place of Nsight Compute: it runs the program, and prints what that prints."""
    ncu = folder / "ncu"
    ncu.write_text('#!/bin/sh\nwhile [ "$1" != --metrics ]; do shift; done\nshift 2\nexec env HELPERS_MODE=cpu "$@"\n')
    ncu.chmod(0o755)
    monkeypatch.setattr(traffic, "find", lambda: str(ncu))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_program_runs_its_text_once_it_has_one(monkeypatch, tmp_path, ahead):
    stand_in_for_ncu(monkeypatch, tmp_path)
    program = traffic.Program([traffic.READ], traffic.IN_RANGES, ahead)
    text = f'import inspect\ndef f():\n    pass\nprint(\'"{traffic.READ}","f"\')\nprint(\'"byte",""\')\n'
    (row,) = program.rows(text + 'print(f\'"7","{len(inspect.getsource(f))}"\')')
    assert traffic.read_in_ranges([row]) == [7] and row["f"] == str(len("def f():\n    pass\n"))
    assert not program.folder.exists()


@pytest.mark.parametrize("packages", [(), ("torch._inductor.compile_fx",)])
def test_a_program_has_loaded_what_its_text_will_import(monkeypatch, tmp_path, packages):
    stand_in_for_ncu(monkeypatch, tmp_path)
    program = traffic.Program([traffic.READ], traffic.IN_RANGES, packages=packages)
    loaded = 'import sys\nloaded = "torch._inductor.compile_fx" in sys.modules\n'
    (row,) = program.rows(f'{loaded}print(\'"loaded"\\n""\')\nprint(f\'"{{loaded}}"\')')
    assert row["loaded"] == str(bool(packages))


def test_what_was_started_ahead_is_used_once(monkeypatch, tmp_path):
    class Program:
        def __init__(self, *counted, ahead=False, packages=()):
            self.counted, self.ahead, self.folder, self.packages = counted, ahead, tmp_path, packages

        def rows(self, text):
            used.append(self.ahead)
            return [{traffic.READ: "1", traffic.WRITTEN: "2"}]

    used = []
    monkeypatch.setattr(machine, "gpu", lambda: True)
    monkeypatch.setattr(machine, "cache", lambda name: tmp_path)
    monkeypatch.setattr(traffic, "Program", Program)
    monkeypatch.setattr(traffic.source, "live", lambda *names: "def tile():\n    pass\n")

    def tile():
        pass

    traffic.warm(inductor=True)
    assert "torch._inductor.compile_fx" in traffic._ahead[0].packages
    for case in range(2):
        traffic.measured(tile, given={"CASE": case})
    assert used == [True, False] and not traffic._ahead


def test_a_copy_has_its_kernels_on_the_lines_where_they_stand_here(monkeypatch):
    kernel = SimpleNamespace(starting_line_number=7)
    monkeypatch.setattr(sys.modules["__main__"], "add_kernel", kernel, raising=False)
    text = "def add_kernel(x):\n    pass\n\n\ndef add(x):\n    add_kernel(x)\n"
    assert traffic._lines(text) == "\nadd_kernel.starting_line_number = 7"
