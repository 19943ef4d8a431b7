"""Lab 12: one operator that no lesson holds, on a rung of the reader's choice."""

import torch

from . import Case, Draw, Exercise, far, padded

LAB = "12_choosing"
GROUP = 128
"""Features that share a scale."""


def weights(codes, scales):
    """What codes and scales stand for, in the dtype of the scales: (2, outputs, features)."""
    digits = torch.stack([codes >> 4 * i & 15 for i in range(4)], -2).flatten(-2)
    return ((digits - 8).to(scales.dtype) * scales[..., None]).transpose(1, 2).flatten(2)


def projected(x, codes, scales, keep):
    gate, up = (x @ w.T for w in weights(codes, scales))
    return torch.where(keep[:, None], torch.nn.functional.silu(gate) * up, 0.0)


def size(x, codes, scales, keep):
    """What an error of the gate, or of the up product, makes of the result: that times the other of the two. A product
    whose terms cancel is as inexact as its terms."""
    sizes = (torch.maximum((x @ w.T).abs(), (x.square() @ w.square().T).sqrt()) for w in weights(codes, scales))
    return torch.prod(torch.stack(tuple(sizes)), 0)


def inputs(
    d: Draw, tokens: int, outputs: int, features: int, kept: float = 0.7, gate: float = 1.0, up: float = 1.0
) -> tuple:
    """x, codes, scales and the mask. kept: the share of tokens; gate, up: the size of the two products, about."""
    x = d(tokens, features).half()
    groups = features // GROUP
    codes = d.integers(-(2**15), 2**15, 2, groups, outputs, GROUP // 4, dtype=torch.int16)
    size = d(2, groups, outputs, kind="normal").abs() + 0.2
    size *= torch.tensor([gate, up])[:, None, None] / (5 * features**0.5)  # the codes' standard deviation is near 5
    return x, codes, size.half(), d.integers(0, 1000, tokens) < 1000 * kept


def with_garbage(d: Draw) -> tuple:
    """What masked tokens hold is whatever lay in that memory."""
    x, *others, keep = inputs(d, 9, 48, 256)
    keep[2], keep[4:6] = True, False
    x[4], x[5, ::3] = float("nan"), float("inf")
    return x, *others, keep


def there_and_back(d: Draw) -> tuple:
    """Integers: sums of products that pass 2**13 on their way, and so do parts of them, and end near 64 and 16. Each
    product has its opposite, anywhere among the features; the scales are 1, and silu of such a gate is the gate."""
    tokens, outputs, features = 6, 32, 512
    half = features // 2 - 1
    x = d.integers(-255, 256, tokens, half).float()
    x[:, 0] = d.integers(-8, 9, tokens)
    digits = d.integers(2, 15, 2, outputs, half)  # 8 is the weight 0
    again = digits.clone()
    again[..., 0] += d.integers(-1, 2, 2, outputs)  # what this adds is left of the sum
    last = torch.tensor([12, 9])[:, None, None].expand(2, outputs, 1), torch.full((2, outputs, 1), 8)
    order = d.random.sample(range(features), features)
    x = torch.cat([x, -x, torch.full((tokens, 1), 16.0), torch.zeros(tokens, 1)], 1)[:, order]
    digits = torch.cat([digits, again, *last], 2)[:, :, order].unflatten(2, (-1, 4, 32)).transpose(1, 2)
    codes = sum(digits[..., i, :].int() << 4 * i for i in range(4)).to(torch.int16).contiguous()
    return x.half(), codes, torch.ones(codes.shape[:3]).half(), torch.ones(tokens, dtype=torch.bool)


def laid(arrange, d: Draw, *shape: int) -> tuple:
    x, *others = inputs(d, *shape)
    return arrange(x), *others


gated_projection = Exercise(
    name="gated-projection",
    lab=LAB,
    rung="any",
    entry="gated_projection",
    title="A gated, masked projection with weights of four bits, on the rung of your choice",
    form="kernel",
    made_of="any",
    reference=projected,
    low="bfloat16",
    scale=size,
    allow=frozenset({"*"}),
    modules=frozenset({"compile"}),
    cases=(
        Case("5 tokens, 32 outputs, 256 features", lambda d: inputs(d, 5, 32, 256), seen=True),
        Case("one token, 16 outputs, one group of features", lambda d: inputs(d, 1, 16, 128, 1.0)),
        Case("16 tokens, 64 outputs, three groups, x far from zero",
             lambda d: inputs(d, 16, 64, 384, gate=0.02, up=0.02), kind="offset"),
        Case("33 tokens, 80 outputs", lambda d: inputs(d, 33, 80, 256)),
        Case("masked tokens that hold NaN and infinities", with_garbage, seen=True),
        Case("no token is kept", lambda d: inputs(d, 4, 32, 128, 0.0)),
        Case("no tokens at all", lambda d: inputs(d, 0, 32, 256)),
        Case("gates of some hundreds, 272 outputs", lambda d: inputs(d, 6, 272, 256, gate=150.0, up=0.2)),
        Case("3 tokens, 8192 features", lambda d: inputs(d, 3, 32, 8192, 1.0), kind="outliers"),
        Case("rows of x eight elements further apart than they are long",
             lambda d: laid(lambda x: padded(x, 8), d, 7, 32, 256)),
        Case("rows of x that lie beyond element 2**31", lambda d: laid(far, d, 4, 16, 128, 1.0), memory_bytes=5 << 30),
        # on a GPU a library may add parts of a sum in fp16
        Case("sums that grow to thousands and come back", there_and_back, exact=True, mode="cpu"),
        Case("16 tokens, 14336 outputs, 4096 features", lambda d: inputs(d, 16, 14336, 4096), mode="gpu"),
        Case("300 tokens, 528 outputs, 1152 features", lambda d: inputs(d, 300, 528, 1152), mode="gpu"),
    ),
    hints=(
        "Read the statement for what it makes you move: the codes are nearly all of it. Which rung lets a code become "
        "a number without a trip through memory? And which of a masked token's elements may still reach the result?",
        "Down to the library a weight must exist before it is multiplied, so it is written and read again in fp16. "
        "On a rung where you write the loop, take a group at a time: words in, four sets of 32 numbers out of them, "
        "each against the 32 features that it belongs to; the group's scale belongs to the sum, not to each code. "
        "A mask chooses, it does not multiply.",
        "For a tile of outputs and of tokens, gate = up = 0. For each group g: c = words of both matrices, one row an "
        "output; for i = 0 … 3: part = x[tokens, 128 g + 32 i … + 31]; sum += ((c >> 4 i) & 15) - 8, times part. Then "
        "gate and up += sum · scale of the output and g. At the end where(keep, gate / (1 + exp(-gate)) · up, 0), "
        "rounded once.",
    ),
    seconds=120,
    points=3,
)  # fmt: skip

EXERCISES = (gated_projection,)
