"""Lab 03: what torch.compile fuses, what breaks its graph, what makes it copy, recompile or launch too often."""

import torch

from . import Case, Draw, Exercise, turned

LAB = "03_torch_compile"
LIMIT = 8.0
"""The largest magnitude that the block of `graph-breaks` lets through."""


# ---- what-fuses ---------------------------------------------------------------------------------------------------

FUSING = '''\
import torch


def gate(x, y):
    h = torch.sigmoid(x)
    h = h * y
    return h + x


def peek(x, y):
    h = torch.sigmoid(x)
    h = h * y
    return h + x, h


def normalise(x):
    peak = x.abs().amax(-1, keepdim=True)
    return x / (peak + 1e-6)


def straighten(x, y):
    h = (x * 2).t().contiguous()
    return h + y


def project(x, w):
    h = x * 2
    h = h @ w
    return torch.relu(h)


def gated_pair(x, v, w):
    return torch.relu(x @ v) * (x @ w)
'''
"""The functions asked about; every argument and result is a square matrix."""


def look_inside(answer, text, side):
    """The prediction, and what torch.compile makes of each function in `text` on side × side matrices of fp32."""
    import types

    import torch

    from helpers import ledger, machine, reveal, source

    functions = [f for f in vars(source.run(text, "fusing")).values() if isinstance(f, types.FunctionType)]
    matrices = [torch.randn(side, side, device=machine.device()) for _ in range(3)]
    seen = {}
    for fn in functions:
        code = reveal.inductor(fn, *matrices[: fn.__code__.co_argcount], run=False).code
        launches = ledger.compiled(code)
        # a kernel's own few numbers a row are no matrix, and rounding drops them
        seen[fn.__name__] = [len(launches), round(sum(launch.writes for launch in launches) / (4 * side * side))]
    return answer(), {"seen": seen}


def judge_fusing(inputs, outputs, facts):
    """A prediction for each function; says which numbers differ from the generated code, not by how much."""
    seen = facts["seen"]
    pairs = isinstance(outputs, dict) and all(isinstance(p, tuple | list) and len(p) == 2 for p in outputs.values())
    if not pairs or set(outputs) != set(seen):
        asked = ", ".join(f"`{name}`" for name in seen)
        return [("wrong-answer", f"The answer must be a dict with a pair (launches, matrices written) for each of {asked}.")]
    wrong = [
        f"the {what} of `{name}`"
        for name in seen
        for what, said, is_so in zip(("launches", "matrices written"), outputs[name], seen[name], strict=True)
        if isinstance(said, bool) or said != is_so
    ]
    return [("wrong-answer", f"The generated code shows another number for {'; '.join(wrong)}.")] if wrong else []


# ---- graph-breaks, one-compilation --------------------------------------------------------------------------------


def both_ways(answer, weights, calls):
    """A model's outputs for each of `calls`, compiled and eager, and what torch.compile saw of it."""
    import torch

    from helpers import reveal

    # compiled first: what an eager run might leave behind is not there yet
    traced = reveal.graphs(lambda: answer(*weights), [(x,) for x in calls])
    with torch.no_grad():
        model = answer(*weights)
        eager = [model(x) for x in calls]
    facts = {"graphs": traced.graphs, "breaks": traced.breaks, "opaque": traced.opaque}
    return (traced.outputs, eager), facts


def judge_graphs(inputs, outputs, facts):
    """One graph that the compiler can see through, compiled once for all calls."""
    graphs, calls = facts["graphs"], len(inputs[1])
    if facts["breaks"]:
        places = "; ".join(f"`{line}` ({why})" for line, _, why in (b.rpartition(": ") for b in facts["breaks"]))
        return [("graph-break", f"torch.compile has to stop and let Python go on at {places}.")]
    if facts["opaque"]:
        names = ", ".join(f"`{name}`" for name in facts["opaque"])
        return [("graph-break", f"The graph holds {names}, which the compiler cannot look into: a break out of sight.")]
    if not graphs:
        return [("graph-break", "None of the model's operators reach the compiler.")]
    if graphs > 1:
        return [
            (
                "too-many-kernels",
                f"{calls} calls with tensors of the same shapes took {graphs} compilations, each with kernels of its own.",
            )
        ]
    return []


def capped_block(weights, calls):
    """See `graph-breaks`: (outputs compiled, outputs eager), each a list of (y, level)."""
    up, down = weights

    def forward(x):
        peak = x.abs().max()
        x = x * (LIMIT / peak) if peak > LIMIT else x
        h = torch.relu(x @ up)
        level = h.sum() / max(int((h > 0).sum()), 1)
        return x + (h / (level + 1e-3)) @ down, level

    return [forward(x) for x in calls], [forward(x) for x in calls]


def block_inputs(tokens, width, hidden, *batches):
    """Inputs of `graph-breaks`. batches: functions of (draw, tokens, width), a call each."""

    def inputs(draw: Draw):
        weights = draw(width, hidden, kind="normal") / width**0.5, draw(hidden, width, kind="normal") / hidden**0.5
        return weights, [batch(draw, tokens, width) for batch in batches]

    return inputs


def drawn(draw, tokens, width):
    return draw(tokens, width)


def calm(draw, tokens, width):
    return draw(tokens, width, kind="normal").clamp(-LIMIT, LIMIT)


def loud(draw, tokens, width):
    return 10 * draw(tokens, width, kind="normal")


def zero(draw, tokens, width):
    return torch.zeros(tokens, width)


def sunk(draw, tokens, width):
    """The largest magnitude belongs to a negative number."""
    x = draw(tokens, width, kind="normal").clamp(-LIMIT, LIMIT)
    x[tokens // 2, width // 2] = -30.0
    return x


def silent(draw: Draw):
    """Weights and inputs for which no hidden unit is positive."""
    up, down = -draw(16, 24, kind="normal").abs(), draw(24, 16, kind="normal")
    return (up, down), [draw(5, 16, kind="normal").abs().clamp(0.1, 6.0), 10 + draw(5, 16, kind="normal").abs()]


graph_breaks = Exercise(
    name="graph-breaks",
    lab=LAB,
    rung="compiler",
    entry="WholeBlock",
    title="A block in one graph",
    form="rewrite",
    made_of="torch",
    cases=(
        Case("one call below the limit, one above", block_inputs(8, 16, 24, calm, loud), seen=True),
        Case("rare outliers, zeros", block_inputs(33, 24, 40, drawn, zero, calm), kind="outliers"),
        Case("one token; the peak is negative", block_inputs(1, 16, 24, calm, sunk)),
        Case("no hidden unit is positive", silent),
        Case(
            "all above the limit, stored column by column",
            block_inputs(7, 16, 24, lambda d, t, w: turned(d(t, w)), lambda d, t, w: turned(calm(d, t, w))),
            kind="offset",
        ),
        Case("4096 tokens of 1024", block_inputs(4096, 1024, 2048, calm, loud), mode="gpu"),
    ),
    reference=capped_block,
    allow=frozenset({"*"}),
    drive=both_ways,
    judge=judge_graphs,
    hints=(
        "Four lines of `forward` ask for something that only the device knows, or do something that is no tensor "
        "operation. The verdict names those at which the compiler had to stop; mend one and look at the next.",
        "A number that stays on the device is a tensor of one element: it divides, multiplies and compares just as well. "
        "An `if` over it becomes a formula that is right on both sides (what is the factor when the peak is small?). "
        "A mean over a selection is a sum over everything, with zeros where nothing was selected, divided by a count.",
        "factor = LIMIT / peak, but at most 1 (`clamp`)  ·  no print  ·  after `relu` all that is not positive is zero, "
        "so the sum over `active` is the sum over `h`; the count is the sum of `h > 0`, but at least 1.",
    ),
    core=True,
    seconds=60,
)


EXERCISES = (graph_breaks,)
