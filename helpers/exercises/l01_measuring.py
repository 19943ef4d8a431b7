"""Lab 01: count bytes, predict a time, mend a timer, write one, read a roofline."""

from . import Case, Draw, Exercise

LAB = "01_measuring"

# ---- count-bytes --------------------------------------------------------------------------------------------------


def _least_bytes(m, n, k, size):
    return {
        "add_bias": (2 * m * n + n) * size,
        "row_sums": (m * n + m) * size,
        "softmax": 2 * m * n * size,
        "to_fp32": m * n * (size + 4),
        "gather": 2 * k * n * size + 8 * k,
        "product": (m * k + k * n + m * n) * size,
    }


def _shape(draw: Draw, size: int) -> tuple[int, int, int, int]:
    """(m, n, k, size) with k below m, as the gather needs."""
    k = draw.integer(2, 700)
    return k + draw.integer(1, 700), draw.integer(2, 5000), k, size


COUNT_BYTES = Exercise(
    name="count-bytes",
    lab=LAB,
    rung="measuring",
    entry="least_bytes",
    title="Count the least bytes of six operations",
    form="prediction",
    made_of="python",
    reference=_least_bytes,
    cases=(
        Case("m, n, k = 4, 8, 2, elements of 2 bytes", lambda draw: (4, 8, 2, 2), seen=True),
        Case("elements of 2 bytes", lambda draw: _shape(draw, 2)),
        Case("elements of 4 bytes", lambda draw: _shape(draw, 4)),
        Case("elements of 8 bytes", lambda draw: _shape(draw, 8)),
        Case("elements of one byte", lambda draw: _shape(draw, 1)),
        Case("one row", lambda draw: (1, draw.integer(2, 5000), 1, 2)),
        Case("one column", lambda draw: (draw.integer(50, 5000), 1, draw.integer(2, 49), 4)),
        Case("one element", lambda draw: (1, 1, 1, 4)),
        Case("more bytes than 32 bits can count", lambda draw: (2**17 + draw.integer(1, 999), 2**16, 2**15, 4)),
    ),
    hints=(
        "For each operation, list the tensors that it reads and the tensors that it writes, with their shapes. "
        "One operation is one kernel: nothing in between goes to memory.",
        "Each element that is needed is read once, each result written once. A tensor that serves every row is still "
        "read once, and a row that nobody asks for is not read at all. Then mind the bytes of an element: they are "
        "not `size` in every tensor.",
        "bytes = sum of (elements · bytes of one) over the tensors read, plus the same over those written. For the "
        "bias: m · n and n elements read, m · n written. For the gather: which of the three tensors has elements of "
        "8 bytes, and how many rows of x does it touch?",
    ),
    core=True,
)

# ---- predict-time -------------------------------------------------------------------------------------------------


def _predicted_us(kernels, machine):
    launched = done = 0.0
    for kernel in kernels:
        launched += machine["launch_us"]
        seconds = max(kernel["bytes"] / machine["copy"], kernel["flops"] / machine[kernel["unit"]])
        done = max(launched, done) + seconds * 1e6
    return done


def _machine(draw: Draw) -> dict:
    """Rates per second of a card that nobody sells, and µs of a launch."""
    real = draw.random.uniform
    return {
        "copy": real(0.3e12, 5e12),
        "fp16": real(60e12, 900e12),
        "fp32": real(8e12, 60e12),
        "launch_us": real(3.0, 9.0),
    }


def _kernel(draw: Draw, machine: dict, us: float, bound: str, unit: str = "", other: float = 0.0) -> dict:
    """A kernel whose least time is `us`, and whose other side takes the share `other` of that."""
    unit, less = unit or draw.random.choice(("fp16", "fp32")), other or draw.random.uniform(0.05, 0.8)
    memory, arithmetic = (1.0, less) if bound == "memory" else (less, 1.0)
    return {
        "bytes": round(us * 1e-6 * memory * machine["copy"]),
        "flops": round(us * 1e-6 * arithmetic * machine[unit]),
        "unit": unit,
    }


def _chain(*parts):
    """Inputs of predict-time: kernels from (times a launch takes: low, high; bound; unit; how many)."""

    def inputs(draw: Draw):
        machine, kernels = _machine(draw), []
        for low, high, bound, unit, count in parts:
            for _ in range(count):
                us = draw.random.uniform(low, high) * machine["launch_us"]
                kernels.append(_kernel(draw, machine, us, bound or draw.random.choice(("memory", "compute")), unit))
        return kernels, machine

    return inputs


def _example(draw: Draw):
    add = {"bytes": 12_000_000, "flops": 1_000_000, "unit": "fp32"}
    product = {"bytes": 6_000_000, "flops": 2_000_000_000, "unit": "fp16"}
    return [add, product], {"copy": 2e12, "fp16": 200e12, "fp32": 20e12, "launch_us": 5.0}


PREDICT_TIME = Exercise(
    name="predict-time",
    lab=LAB,
    rung="measuring",
    entry="predicted_us",
    title="Predict the time of a chain of kernels",
    form="prediction",
    made_of="python",
    reference=_predicted_us,
    cases=(
        Case("the addition and the product of the table", _example, seen=True),
        Case("one kernel, more time for its bytes", _chain((20, 90, "memory", "fp32", 1))),
        Case("one kernel, more time for its fp32 arithmetic", _chain((20, 90, "compute", "fp32", 1))),
        Case("one kernel, more time for its fp16 arithmetic", _chain((20, 90, "compute", "fp16", 1))),
        Case("a copy: no arithmetic", lambda draw: ([{"bytes": 10**8, "flops": 0, "unit": "fp32"}], _machine(draw))),
        Case(
            "one kernel, bound by memory, then one by arithmetic",
            _chain((9, 20, "memory", "fp32", 1), (9, 20, "compute", "fp16", 1)),
        ),
        Case("many kernels, all longer than a launch", _chain((2, 9, "", "", 12))),
        Case("many kernels, all shorter than a launch", _chain((0.1, 0.8, "", "", 40))),
        Case("long kernels, then short ones", _chain((3, 6, "", "", 4), (0.1, 0.5, "", "", 30))),
        Case("short kernels, then long ones", _chain((0.1, 0.5, "", "", 12), (3, 6, "", "", 5))),
        Case("long and short kernels mixed", _chain((0.2, 0.7, "", "", 6), (2, 5, "", "", 1), (0.1, 0.6, "", "", 9))),
        Case("no kernel", lambda draw: ([], _machine(draw))),
    ),
    hints=(
        "Look at the two rows of the picture: the host's, and the device's. When does each kernel begin?",
        "A kernel's own time is the longer of two: bytes over the rate of a copy, operations over the rate of its "
        "unit. It begins when two things have happened: its launch is over, and the kernel before it has ended. So "
        "carry two times along the chain.",
        "launched, done = 0, 0. For each kernel: add a launch to launched; the kernel begins at the later of launched "
        "and done; done becomes that plus the kernel's own time, in µs. The answer is done.",
    ),
    rtol=1e-6,
)

# ---- repair-timer and honest-timer --------------------------------------------------------------------------------


def _drive(answer, spec):
    """What the answer says of a kernel: on a simulated device or, where the case asks for it, on this GPU.

    The parent knows the true time of a simulated kernel. A real one spins for some cycles, and is timed around it.
    """
    if "cycles" not in spec:
        from helpers import simulated

        device = simulated.Device(**spec["device"])
        sets = [tuple(device.array(spec["nbytes"]) for _ in range(3)) for _ in range(spec["sets"])]
        return answer(device, device.kernel(spec["us"]), sets), {}
    import torch

    spin, calls = torch.cuda._sleep, []

    def call(number):
        if not calls:
            spin(100 * spec["cycles"])  # the first call is slow here too
        calls.append(number)
        spin(spec["cycles"])

    def true_us():
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(50):
            spin(spec["cycles"])
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e3 / 50

    true_us()  # so that the clocks are up
    before = true_us()
    said = answer(torch.cuda, call, [(i,) for i in range(spec["sets"])])
    return said, {"true_us": (before + true_us()) / 2}


def _simulation(low: float, high: float, sets: int = 0, **disturbed) -> object:
    """Inputs of a timer's case: a kernel of `low` to `high` µs on a device with what `disturbed` names: compile, l2,
    interrupted. sets: how many sets of inputs; by default as many as exceed five times L2."""

    def inputs(draw: Draw):
        l2 = 2**20 * draw.integer(30, 60)
        nbytes = l2 // draw.integer(20, 30)
        device = {
            "seed": draw.integer(0, 2**31),
            "launch_us": draw.random.uniform(4.0, 7.0),
            "noise": 0.03,
            "compile_us": draw.random.uniform(2e4, 8e4) if disturbed.get("compile") else 0.0,
            "interrupted": disturbed.get("interrupted", 0),
            "l2_bytes": l2 if disturbed.get("l2") else 0,
        }
        count = sets or 5 * l2 // (3 * nbytes) + 2
        return (
            {
                "device": device,
                "us": draw.random.uniform(low, high),
                "sets": count,
                "nbytes": 2 * l2 if sets else nbytes,
            },
        )

    return inputs


def _judge_timer(inputs, said, facts):
    [spec] = inputs
    if isinstance(said, bool) or not isinstance(said, int | float) or not abs(said) < 1e300:
        called = f"{said:.4g}" if isinstance(said, float) else f"an object of type {type(said).__name__}"
        return [("wrong-answer", f"The timer returned {called}, not one sensible number of µs.")]
    real = "cycles" in spec
    true = facts.get("true_us", 0.0) if real else spec["us"]
    if real and not spec["cycles"] / 4000 < true < spec["cycles"] / 200:  # no card runs at over 4 GHz, or below 0.2
        return [("environment", "The length of the kernel to be timed could not be measured on this GPU.")]
    ratio, tolerance = said / true, 0.15 if real else 0.04
    if abs(ratio - 1) <= tolerance:
        return []
    sees = f"It says {said:.4g} µs of a kernel that takes {true:.4g} µs"
    return [("wrong-answer", f"{sees}: {_reason(spec, said, true)}")]


def _reason(spec: dict, said: float, true: float) -> str:
    """What most likely went wrong, from what this device does and how far off the timer is."""
    for factor, unit in ((1e-3, "milliseconds"), (1e-6, "seconds")):
        if abs(said / true / factor - 1) < 0.05:
            return f"that looks like {unit}, and µs are asked for."
    device = spec.get("device", {"launch_us": 20.0, "compile_us": 1.0, "interrupted": 0, "l2_bytes": 0})
    if said < true:
        if said < 1.5 * device["launch_us"] + 1:
            return "that is about what a launch takes, so the watch stopped before the device was done."
        if device["l2_bytes"]:
            return "too little for inputs from memory, so some calls found theirs in L2."
        return "less than the typical call takes. Is it the fastest call, or were more calls counted than made?"
    if device["compile_us"] and (said > 3 * true or not device["interrupted"]):
        return "the first call of a kernel compiles it, and that is in the figure."
    if device["interrupted"]:
        return "a call is interrupted now and then, and those few calls are in the figure."
    return "more than the kernel is in the figure: the host's part of a launch, waiting, or only the slowest calls."


TIMER_HINTS = {
    "exception": (
        "Read the error: on the device the rules are torch's. An event keeps time only if asked to, must be recorded, "
        "and can be read only after the device has reached it. And there may be two sets of inputs, or fifty.",
    ),
}

REPAIR_TIMER = Exercise(
    name="repair-timer",
    lab=LAB,
    rung="measuring",
    entry="mended_us",
    title="Repair a timer that lies in four ways",
    form="rewrite",
    made_of="python",
    modules=frozenset({"itertools", "statistics", "time"}),
    drive=_drive,
    judge=_judge_timer,
    cases=(
        Case("an undisturbed device", _simulation(600, 1500), seen=True),
        Case("a first call that compiles", _simulation(600, 1500, compile=True)),
        Case("inputs of which several sets fit in L2", _simulation(600, 1500, l2=True)),
        Case("one call in 30 is interrupted", _simulation(600, 1500, interrupted=30)),
        Case("again, one call in 30 is interrupted", _simulation(600, 1500, interrupted=30)),
        Case("two sets of inputs, each larger than L2", _simulation(600, 1500, sets=2, compile=True, l2=True)),
        Case("all of these at once", _simulation(600, 1500, compile=True, l2=True, interrupted=30)),
        Case("all of these, another device", _simulation(600, 1500, compile=True, l2=True, interrupted=30)),
    ),
    hints=(
        "Compare the table's rows: each device does one thing that the first does not. The sign of the error says "
        "which fault it is: does the figure contain too much, or too little?",
        "Four faults: when is the device done with a call? What is in the first call that no other has? Where "
        "do inputs come from that were used a moment ago? And which average is not moved by a few slow calls?",
        "Call once or twice and wait, before the loop. In the loop: wait until the device is idle, read the clock, "
        "call with the next set of inputs (i modulo their number), wait, read the clock. Return the median.",
    ),
    hints_for=TIMER_HINTS,
    core=True,
)

HONEST_TIMER = Exercise(
    name="honest-timer",
    lab=LAB,
    rung="measuring",
    entry="time_us",
    title="Write a timer that does not lie",
    form="rewrite",
    made_of="python",
    modules=frozenset({"itertools", "math", "statistics"}),
    drive=_drive,
    judge=_judge_timer,
    alone=True,
    cases=(
        Case("a long kernel", _simulation(200, 400), seen=True),
        Case("a kernel a few launches long", _simulation(22, 45)),
        Case("a first call that compiles", _simulation(30, 60, compile=True)),
        Case("inputs of which several sets fit in L2", _simulation(50, 90, l2=True)),
        Case("one call in 60 is interrupted", _simulation(30, 60, interrupted=60)),
        Case("two sets of inputs, each larger than L2", _simulation(30, 60, sets=2, l2=True, compile=True)),
        Case("a single set of inputs, larger than L2", _simulation(30, 60, sets=1, l2=True)),
        Case("all of these at once", _simulation(30, 60, compile=True, l2=True, interrupted=60)),
        Case("all of these, a longer kernel", _simulation(100, 300, compile=True, l2=True, interrupted=60)),
        Case(
            "a kernel that spins, on this GPU",
            lambda draw: ({"cycles": draw.integer(150_000, 300_000), "sets": 5},),
            mode="gpu",
        ),
        Case(
            "a long kernel that spins, on this GPU",
            lambda draw: ({"cycles": draw.integer(1_000_000, 2_000_000), "sets": 3},),
            mode="gpu",
        ),
    ),
    hints=(
        "Your timer has no clock of the host's, so it can only ask events. What does the device do between an event "
        "and the kernel that is launched after it, if it has nothing else to do?",
        "Launch so many calls in a row that the device always has the next one waiting: then no gap lies between two "
        "events. An event after each call gives the time of each, and the median of those is what is asked for.",
        "Warm up. Make 101 events; record the first; then 100 times: call with the next set of inputs, record the next "
        "event. Wait. Times are those between neighbouring events, in milliseconds. Return their median in µs.",
    ),
    hints_for=TIMER_HINTS,
)

# ---- roofline -----------------------------------------------------------------------------------------------------


def _placed(kernel, machine):
    peak = machine[kernel["unit"]]
    intensity = kernel["flops"] / kernel["bytes"]
    memory, compute = kernel["bytes"] / machine["copy"] * 1e6, kernel["flops"] / peak * 1e6
    reached = max(memory, compute) / kernel["us"]
    verdict = "memory" if memory >= compute else "compute"
    if reached > 1.05:
        verdict = "impossible"
    elif reached < 0.5:
        verdict = "neither"
    return {
        "intensity": intensity,
        "attainable": min(peak, intensity * machine["copy"]),
        "reached": reached,
        "verdict": verdict,
    }


def _measured(bound: str, low: float, high: float, unit: str = "", flops: bool = True, other: float = 0.0, **rates):
    """Inputs of roofline: a kernel bound so, that reaches `low` to `high` of its roof, on a machine with `rates`."""

    def inputs(draw: Draw):
        machine = _machine(draw) | rates
        least = draw.random.uniform(20, 2000)
        kernel = _kernel(draw, machine, least, bound, unit, other)
        if not flops:
            kernel["flops"] = 0
        return {**kernel, "us": least / draw.random.uniform(low, high)}, machine

    return inputs


def _example_kernel(draw: Draw):
    kernel = {"bytes": 12_000_000, "flops": 1_000_000, "unit": "fp32", "us": 7.5}
    return kernel, {"copy": 2e12, "fp16": 200e12, "fp32": 20e12, "launch_us": 5.0}


ROOFLINE = Exercise(
    name="roofline",
    lab=LAB,
    rung="measuring",
    entry="placed",
    title="Place kernels on a roofline",
    form="prediction",
    made_of="python",
    reference=_placed,
    cases=(
        Case("the addition of the picture", _example_kernel, seen=True),
        Case("left of the ridge, near the roof", _measured("memory", 0.7, 0.99, "fp32")),
        Case("left of the ridge, fp16", _measured("memory", 0.6, 0.99, "fp16")),
        Case("right of the ridge, near the roof", _measured("compute", 0.7, 0.99, "fp16")),
        Case("right of the ridge, fp32", _measured("compute", 0.6, 0.99, "fp32")),
        Case(
            "left of a ridge that lies far to the right",
            _measured("memory", 0.7, 0.99, "fp16", other=0.5, copy=0.3e12, fp16=900e12),
        ),
        Case(
            "right of a ridge that lies far to the left",
            _measured("compute", 0.7, 0.99, "fp32", other=0.5, copy=5e12, fp32=8e12),
        ),
        Case("left of the ridge, far below the roof", _measured("memory", 0.05, 0.45)),
        Case("right of the ridge, far below the roof", _measured("compute", 0.05, 0.45)),
        Case("a little above the roof", _measured("memory", 1.005, 1.04)),
        Case("above the slope", _measured("memory", 1.1, 2.5)),
        Case("above the flat roof", _measured("compute", 1.1, 2.5)),
        Case("a copy: no operations", _measured("memory", 0.7, 0.99, "fp32", flops=False)),
        Case("a copy that is too fast", _measured("memory", 1.2, 3.0, "fp32", flops=False)),
    ),
    hints=(
        "Two questions, two pairs of numbers. Where does the kernel stand: bytes and flops only. How far from the roof "
        "is it: its time, beside the least time of exercise 2.",
        "The roof at an intensity is the lower of the flat one (the unit's rate) and the slope (intensity times the "
        "copy's rate). The share reached is the least time over the measured one, which also works for a copy, where "
        "a share of FLOP/s would be 0 over 0. Look at the share first: above the roof, or far below it, no roof binds.",
        "memory = bytes / copy; compute = flops / rate of the unit; reached = the larger, in µs, over us. If "
        "reached > 1.05: impossible; if reached < 0.5: neither; else the name of the larger.",
    ),
    core=True,
)

EXERCISES = (COUNT_BYTES, PREDICT_TIME, REPAIR_TIMER, HONEST_TIMER, ROOFLINE)
