"""What `timing` and `records` promise, as far as it shows without a GPU; the figures themselves are lesson 01's."""

import contextlib
import json
import sys

import pytest
import torch

from helpers import machine, records, timing
from helpers.records import Measurement
from tests.simulated_card import Card, watched

cpu_only = pytest.mark.skipif(machine.gpu(), reason="says what CPU mode does")


def test_a_ratio_is_the_rivals_time_over_ours_and_says_when_it_is_not_resolved():
    fast, slow = Measurement(10, "us", 9.9, 10.1, 21), Measurement(15, "us", 14.8, 15.1, 21)
    assert timing.ratio(fast, slow).value == pytest.approx(1.5)
    assert timing.ratio(fast, slow).resolved and timing.ratio(slow, fast).resolved
    level = timing.ratio(fast, Measurement(10.05, "us", 9.8, 10.2, 21))
    assert not level.resolved and "not resolved" in level.note
    with pytest.raises(ValueError, match="one unit"):
        timing.ratio(fast, Measurement(1, "TB/s", 1, 1))


def test_a_summary_is_the_median_with_quartiles_and_names_a_wide_spread():
    tight = timing._summary([10.0, 10.1, 9.9, 10.0, 10.05], "", [])
    assert (tight.value, tight.low, tight.high, tight.n, tight.note) == (10.0, 10.0, 10.05, 5, "")
    assert "spread 20%" in timing._summary([9.0, 9.0, 10.0, 11.0, 11.0], "", []).note


class Nvml:
    """NVML as a card answers it: clocks and reasons, or an error where it refuses."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM = 1
    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksEventReasonSwThermalSlowdown = 32
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128

    def __init__(self, reasons=0, processes=1, refuses=""):
        self.reasons, self.processes, self.refuses = reasons, processes, refuses

    def __getattr__(self, name):
        def call(*args):
            if self.refuses and self.refuses in name:
                raise self.NVMLError("Not Supported")
            answers = {
                "EventReasons": self.reasons,
                "MaxClock": 1980,
                "ClockInfo": 1500,
                "Processes": [0] * self.processes,
            }
            return next((value for key, value in answers.items() if key in name), "handle")

        return call


@pytest.mark.parametrize(
    "nvml, notes",
    [
        (Nvml(), []),
        (Nvml(reasons=4 | 64), ["clock held by power cap, heat: 1500 of 1980 MHz"]),
        (Nvml(processes=3), ["2 other process(es) on the GPU"]),
        (Nvml(processes=0), []),
        (Nvml(reasons=4, refuses="EventReasons"), ["clocks not watched: Not Supported"]),
        (Nvml(refuses="ByUUID"), ["clocks not watched: Not Supported"]),
        (Nvml(reasons=4, refuses="Processes"), [
            "clock held by power cap: 1500 of 1980 MHz", "clocks not watched: Not Supported"]),
    ],
)  # fmt: skip
def test_what_spoils_a_figure_is_noted_and_so_is_not_knowing(monkeypatch, nvml, notes):
    machine.here()  # it asks the real one, once
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    watch = timing._Watch()
    watch.look()
    assert watch.notes() == notes


@cpu_only
def test_no_time_is_measured_in_cpu_mode():
    with pytest.raises(machine.NotReady, match="only be measured on a GPU"):
        timing.measure(lambda: None)


@cpu_only
def test_figures_come_from_the_record_in_cpu_mode_with_gpu_date_and_versions(tmp_path, monkeypatch):
    about = {"gpu": "NVIDIA Test", "date": "2026-01-02", "torch": "2.13.0"}
    path = tmp_path / "nvidia-test.json"
    records.merge(path, "figures", {"a.b": vars(Measurement(1.5, "us", 1.4, 1.6, 9, "why"))}, about, code="abc")
    monkeypatch.setattr(records, "REFERENCE", path)
    found = records.figures(lambda: pytest.fail("must not measure"), "a.b")
    assert found["a.b"] == Measurement(1.5, "us", 1.4, 1.6, 9, "why")
    assert not found.live and "NVIDIA Test, 2026-01-02, torch 2.13.0" in str(found)
    monkeypatch.delenv("HELPERS_RECORDS", raising=False)
    assert "not recorded yet" in str(records.figures(lambda: {}, "no.such"))
    monkeypatch.setenv("HELPERS_RECORDS", "strict")
    with pytest.raises(records.Missing, match=r"no\.such"):
        records.figures(lambda: {}, "no.such")
    assert json.loads(path.read_text())["figures"]["a.b"]["code"] == "abc"
    with pytest.raises(ValueError, match="NVIDIA Test"):
        records.merge(path, "figures", {}, {"gpu": "another"})


def test_what_is_declared_is_what_is_measured(monkeypatch):
    monkeypatch.setattr(machine, "gpu", lambda: True)
    monkeypatch.setattr(records, "this_machine", lambda: {"gpu": "x", "date": "d"})
    monkeypatch.delenv("HELPERS_RECORD", raising=False)
    with pytest.raises(ValueError, match="declared but not measured: .'b'.*not declared: .'c'"):
        records.figures(lambda: {"a": Measurement.exact(1, "us"), "c": Measurement.exact(1, "us")}, "a", "b")


def test_declared_ids_are_found_and_must_be_literals(tmp_path):
    def notebook(*cells):
        path = tmp_path / "n.ipynb"
        path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": c} for c in cells]}))
        return path

    cells = "records.figures(f, 'a',\n 'b')", "%time 1\nx = records.figure('c', f)", "records.text('d', f)"
    assert records.declared(notebook(*cells)) == {"a": [0], "b": [0], "c": [1], "d": [2]}
    with pytest.raises(ValueError, match="string literal"):
        records.declared(notebook("records.figures(f, *ids)"))


@cpu_only
def test_calls_ahead_are_a_gpus_alone():
    timing.ahead([lambda: pytest.fail("nothing is compiled in CPU mode")])


def test_a_queue_of_calls_is_timed_without_its_start_and_its_end(monkeypatch):
    """A device of a simulated clock: 300 µs a call, and 500 µs for the first launch and the waiting."""
    clock = {"host": 0.0, "device": 0.0}

    def no_trace(*args):
        raise timing._NoTrace("none here")

    monkeypatch.setattr(machine, "gpu", lambda: True)
    monkeypatch.setattr(timing, "_traced", no_trace)
    monkeypatch.setattr(timing, "_Watch", lambda: type("Quiet", (), {"look": lambda s: None, "notes": lambda s: []})())
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock["host"])
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)

    def call(launch):
        def start():
            clock["host"] += launch
            clock["device"] = max(clock["device"], clock["host"]) + 300e-6

        def finish(last):
            clock["host"] = max(clock["host"], clock["device"]) + 500e-6

        return start, finish

    quick, slow = timing.queued({"quick": call(20e-6), "slow": call(400e-6)}).values()
    assert quick.value == pytest.approx(300, rel=0.01) and "host's clock" in quick.note and "none here" in quick.note
    assert slow.value == pytest.approx(400, rel=0.1)


class Trace:
    """A driver's trace: (name, nanosecond at which it began) for each kernel."""

    def __init__(self, kernels):
        import torch

        def event(name, ns):
            told = {"name": name, "start_ns": ns, "device_type": torch.autograd.DeviceType.CUDA}
            return type("Event", (), {key: lambda self, value=value: value for key, value in told.items()})()

        events = [event(*one) for one in kernels]
        results = type("Results", (), {"events": lambda self: events})()
        self.profiler = type("Profiler", (), {"kineto_results": results})()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_queue_of_calls_is_timed_by_the_drivers_trace(monkeypatch, spoilt):
    """Two kernels a call, 300 µs from call to call; the first call of each turn is late."""
    import torch

    kernels, ns = [], 0
    for _ in range(3):
        for call in range(6):
            kernels += [("gemm", ns), ("gelu", ns + 200_000)]
            ns += 900_000 if call == 0 else 300_000
        kernels.append(("spin_kernel(long)", ns))
        ns += 5_000_000
    monkeypatch.setattr(torch.profiler, "profile", lambda **options: Trace(kernels[:-3] if spoilt else kernels))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    watch = type("Quiet", (), {"look": lambda self: None})()
    asked = {"layer": (lambda: None, lambda it: None)}, {"layer": 6}, ["layer"] * 3, watch
    if spoilt:
        with pytest.raises(timing._NoTrace, match="2 of 3 turns"):
            timing._traced(*asked)
    else:
        assert timing._traced(*asked) == {"layer": [300.0, 300.0, 300.0]}


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(timing, "_Watch", lambda: type("Quiet", (), {"look": lambda s: None, "notes": lambda s: []})())
    card = Card()
    card.put_in(monkeypatch)
    return card


@pytest.mark.parametrize("launch_us", [4, 15, 40])
def test_a_short_calls_time_does_not_depend_on_how_busy_the_host_is(card, monkeypatch, launch_us):
    """On a machine that others use too a launch takes longer: a burst must not become shorter for that."""
    monkeypatch.setattr(timing, "WARM_S", 0.0)
    card.launch_s = launch_us * 1e-6
    found = timing.measure(lambda: card.work(2.5e-6))
    [graph] = card.graphs
    assert timing.BURST_US * 0.75 <= sum(graph) * 1e6 <= timing.BURST_US
    assert found.value == pytest.approx(2.5, rel=0.01)


def test_a_short_calls_burst_is_the_same_graph_beside_others_work(card, monkeypatch):
    """Every second gap that this process leaves while it prepares is filled by another one's work, for 2 ms."""
    monkeypatch.setattr(timing, "WARM_S", 0.0)
    work, crowded, gaps = card.work, True, 0

    def after_others(seconds):
        nonlocal gaps
        if crowded and card.graph is None and card.device < card.host + card.launch_s:
            gaps += 1
            card.device = max(card.device, card.host) + 2e-3 * (gaps % 2 == 0)
        work(seconds)

    @contextlib.contextmanager
    def alone(what):
        nonlocal crowded
        crowded = False
        yield

    monkeypatch.setattr(card, "work", after_others)
    monkeypatch.setattr(timing.locks, "exclusive", alone)
    found = timing.measure(lambda: card.work(2.5e-6))
    [graph] = card.graphs
    assert timing.BURST_US * 0.75 <= sum(graph) * 1e6 <= timing.BURST_US
    assert found.value == pytest.approx(2.5, rel=0.01)


def test_bursts_that_nobody_reads_warm_the_card_up_while_it_is_held_and_nothing_else_runs(card, monkeypatch):
    """A card whose clock is low after it idled: its first 20 ms of work take half as long again."""
    log, began = [], []
    watched(monkeypatch, log)
    monkeypatch.setattr(timing.time, "monotonic", lambda: card.host)

    def inputs():
        log.append("inputs")
        return (torch.zeros(1),)

    def call(x):
        card.work(50e-6)

    run = timing._Burst.run

    def cold(burst, watch=None):
        began.append(card.host) if not began else None
        us, slow = run(burst, watch), card.host - began[0] < 0.02
        log.append("burst")
        return us * 1.5 if slow else us

    monkeypatch.setattr(timing._Burst, "run", cold)
    found = timing.measure(call, inputs)
    assert (found.value, found.high) == pytest.approx((50, 50), rel=0.01), "none of the slow ones counts"
    assert log[:3] == ["shared taken", "inputs", "shared given back"]
    assert log[-1] == "exclusive given back" and log.count("burst") >= timing.ROUNDS + 5
    assert log[log.index("exclusive taken") + 1 : -1] == ["burst"] * log.count("burst")
    assert len(card.slept) == log.count("burst"), "a pause follows each"
