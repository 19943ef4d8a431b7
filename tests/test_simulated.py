"""The simulated device does what a GPU does to a timer, one thing at a time, the same for the same seed."""

import pytest
import torch

from helpers.simulated import IN_L2, SLOWED, Device, Event


def elapsed(device, *calls):
    """µs that each call took on the device, between events of its own."""
    marks = [device.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    marks[0].record()
    for call, mark in zip(calls, marks[1:], strict=True):
        call()
        mark.record()
    device.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in zip(marks, marks[1:], strict=False)]


def test_a_launch_returns_before_the_device_is_done():
    device = Device(launch_us=5.0)
    call = device.kernel(100.0)
    began = device.clock()
    call()
    launched = device.clock()
    device.synchronize()
    assert (launched - began) * 1e6 == pytest.approx(5.0, abs=0.2)
    assert (device.clock() - began) * 1e6 == pytest.approx(105.0, abs=3)


def test_an_idle_device_waits_for_the_launch_and_a_busy_one_does_not():
    device = Device(launch_us=5.0)
    first, *others = elapsed(device, *[device.kernel(100.0)] * 4)
    assert first == pytest.approx(105.0)
    assert others == pytest.approx([100.0] * 3)


def test_kernels_shorter_than_their_launch_come_at_its_pace():
    device = Device(launch_us=5.0)
    assert elapsed(device, *[device.kernel(1.0)] * 4)[1:] == pytest.approx([5.5] * 3)  # and the event's part


def test_the_first_call_of_each_kernel_compiles_it():
    device = Device(launch_us=5.0, compile_us=1000.0)
    a, b = device.kernel(10.0), device.kernel(10.0)
    device.synchronize()
    times = []
    for call in (a, a, b, b):
        began = device.clock()
        call()
        times.append((device.clock() - began) * 1e6)
    assert times == pytest.approx([1005.0, 5.0, 1005.0, 5.0], abs=0.2)


def test_the_cache_holds_what_was_used_last():
    device = Device(l2_bytes=100)
    call, a, b, c = device.kernel(40.0), *(device.array(50) for _ in range(3))
    warm = 40.0 / IN_L2
    used = [(a,), (a,), (b,), (a,), (b,), (c,), (a,), (a, b)]
    times = elapsed(device, lambda: call(c), *(lambda arrays=arrays: call(*arrays) for arrays in used))[1:]
    assert times == pytest.approx([40, warm, 40, warm, warm, 40, 40, (warm + 40) / 2])
    large = device.array(101)
    assert elapsed(device, *[lambda: call(large)] * 3)[1:] == pytest.approx([40, 40])


def test_one_call_in_so_many_is_interrupted():
    device = Device(seed=3, interrupted=20)
    times = elapsed(device, *[device.kernel(50.0)] * 101)[1:]
    slow = [t for t in times if t > 60]
    assert slow == pytest.approx([50 * SLOWED] * len(slow))
    assert len(slow) == pytest.approx(5, abs=1)


def test_one_seed_gives_one_course_of_events_and_another_seed_another():
    def times(seed):
        device = Device(seed, noise=0.01, interrupted=20)
        return elapsed(device, *[device.kernel(50.0)] * 40)

    assert times(1) == times(1) != times(2)


def test_an_event_is_as_strict_as_torchs():
    device = Device()
    call = device.kernel(100.0)
    first, last, untimed, unrecorded = (device.Event(enable_timing=i != 2) for i in range(4))
    first.record()
    call()
    last.record()
    untimed.record()
    assert not last.query()
    with pytest.raises(RuntimeError, match="synchronize first"):
        first.elapsed_time(last)
    last.synchronize()
    assert last.query()
    assert first.elapsed_time(last) > 0.1
    assert first.elapsed_time(last) == -last.elapsed_time(first)
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        first.elapsed_time(untimed)
    with pytest.raises(RuntimeError, match="must be recorded"):
        first.elapsed_time(unrecorded)


def test_waiting_in_a_loop_ends():
    device = Device()
    call, last = device.kernel(100.0), device.Event()
    call()
    last.record()
    looks = 0
    while not last.query():
        looks += 1
    assert looks > 100


def test_names_are_those_of_torch_cuda():
    assert {n for n in vars(Event) if n[0] != "_"} <= set(dir(torch.cuda.Event))
    own = {"array", "kernel", "clock"}  # what torch.cuda has no counterpart for
    assert {n for n in vars(Device) if n[0] != "_"} - own <= set(dir(torch.cuda))
