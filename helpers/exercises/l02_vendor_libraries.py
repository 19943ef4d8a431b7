"""Lab 02: products that a library runs fast, and what a caller does to make it slow."""

import math

import torch

from . import Case, Exercise, Limit, Speed, padded, turned

LAB = "02_vendor_libraries"
HALF = torch.float16
ANY = frozenset({"*"})
NUMBERS = frozenset({"item", "repr", "equal"})
"""What takes numbers out of tensors: the library is to compute, and no loop of Python."""


def _bytes(*shapes: tuple[int, ...]) -> int:
    """The bytes of fp16 tensors of these shapes."""
    return 2 * sum(math.prod(shape) for shape in shapes)


def _limits(launches: int, most_bytes) -> tuple[Limit, Limit]:
    """So many operators, and no more bytes than these must move."""
    return (
        Limit(
            "launches",
            lambda *inputs: launches,
            "too-many-kernels",
            "The answer launches {fact} operators ({operators}) where {most} will do: each of the others costs a "
            "launch and a trip through memory.",
        ),
        Limit(
            "bytes",
            most_bytes,
            "too-many-bytes",
            "What the answer launches ({operators}) must move {fact} bytes where {most} will do: something is widened "
            "or repeated.",
        ),
    )


# --------------------------------------------------------------------------------------------------- tile-waves


def tile_waves_reference(m, n, sms, tile_m, tile_n):
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    waves = math.ceil(tiles / sms)
    return {"tiles": tiles, "waves": waves, "busy": m * n / (waves * sms * tile_m * tile_n)}


def _product_on_a_card(draw):
    tile_m, tile_n = draw.random.choice([(64, 128), (128, 128), (128, 256), (256, 128)])
    return draw.integer(100, 9000), draw.integer(100, 9000), draw.integer(20, 150), tile_m, tile_n


TILE_WAVES = Exercise(
    name="tile-waves",
    lab=LAB,
    rung="library",
    entry="tile_waves",
    title="Tiles, waves, and the share of the card that works",
    form="prediction",
    made_of="python",
    reference=tile_waves_reference,
    cases=(
        Case("a square product on 132 SMs", lambda draw: (2048, 2048, 132, 128, 256), seen=True),
        Case("one row of tiles more", lambda draw: (2048 + 8, 2048, 132, 128, 256), seen=True),
        Case("exactly two waves", lambda draw: (128 * 12, 256 * 22, 132, 128, 256)),
        Case("one tile more than a wave", lambda draw: (128 * 133, 256, 132, 128, 256)),
        Case("smaller than one tile", lambda draw: (1, 17, 40, 128, 128)),
        Case("far from square", lambda draw: (draw.integer(1, 64), draw.integer(30000, 60000), 108, 64, 128)),
        *(Case("sizes, tile and card that nobody chose", _product_on_a_card) for _ in range(4)),
    ),
    hints=(
        "Look at the edges first: how many tiles cover 2,056 rows if one tile covers 128? Then ask the same of the "
        "tiles themselves: how many rounds do they need if one round holds a tile for each SM?",
        "Both are divisions that round up, and each dimension is rounded by itself, before the two are multiplied. "
        "Work that is wanted is m × n; work that the card has room for in its waves is waves × SMs × one tile.",
        "tiles = up(m / tile_m) × up(n / tile_n); waves = up(tiles / sms); "
        "busy = m × n / (waves × sms × tile_m × tile_n).",
    ),
)

# --------------------------------------------------------------------------------------------------- gemm-layout


def gemm_layout_reference(x, w, dy):
    return x @ w.mT, dy @ w, dy.mT @ x


def _linear(m, n, k, x=lambda t: t, w=lambda t: t, dy=lambda t: t, kind=""):
    """x (m, k), w (n, k), dy (m, n), each stored as its function says; `kind` is that of x alone."""

    def inputs(draw):
        return (
            x(draw(m, k, dtype=HALF, kind=kind)),
            w(draw(n, k, dtype=HALF)),
            dy(draw(m, n, dtype=HALF)),
        )

    return inputs


def _three_products_bytes(x, w, dy):
    return 3 * _bytes(x.shape, w.shape, dy.shape)


def gemm_layout_rival(x, w, dy):
    return x @ w.mT, dy @ w, dy.mT @ x


GEMM_LAYOUT = Exercise(
    name="gemm-layout",
    lab=LAB,
    rung="library",
    entry="linear_products",
    title="The three products of a linear layer, without a copy",
    form="rewrite",
    made_of="torch",
    reference=gemm_layout_reference,
    allow=ANY,
    forbid=NUMBERS,
    cases=(
        Case("every operand stored row by row", _linear(96, 64, 48), seen=True),
        Case("w stored column by column", _linear(40, 56, 72, w=turned), seen=True),
        Case("odd sizes, exact", _linear(37, 29, 53), kind="integers", exact=True),
        Case("square, so that a wrong transpose still fits", _linear(64, 64, 64), kind="integers", exact=True),
        Case("x and dy stored column by column", _linear(48, 40, 64, x=turned, dy=turned)),
        Case("rows that lie further apart than they are long", _linear(33, 24, 40, x=padded, w=padded, dy=padded)),
        Case("one row", _linear(1, 48, 31)),
        Case("one element", _linear(1, 1, 1)),
        Case("x far from zero", _linear(64, 48, 32, kind="offset")),
        Case("rare outliers in x", _linear(80, 48, 300, kind="outliers")),
        Case("no rows at all", _linear(0, 24, 16)),
        Case("a layer of 768 by 512", _linear(1024, 768, 512, w=turned), mode="gpu"),
    ),
    limits=_limits(3, _three_products_bytes),
    speed=Speed(
        gemm_layout_rival,
        _linear(4096, 4096, 4096),
        0.8,
        "The answer reaches {share} of the speed of three products that take their operands as they lie; "
        "{least} is asked for.",
    ),
    hints=(
        "Read each line of the slow version and ask what it launches: a transpose is a view and costs nothing, but "
        "what stands behind it may not be. The table of operators above names every copy.",
        "A library has a kernel for each combination of transposed and plain operands. So hand it the view. And it "
        "adds up in fp32 by itself: widening the operands first only moves more bytes.",
        "y: x times the view of w with its two dimensions swapped. dx: dy times w as it lies. "
        "dw: the swapped view of dy times x. Three operators, nothing before and nothing behind them.",
    ),
    core=True,
)

# --------------------------------------------------------------------------------------------------- epilogue


def epilogue_reference(x, w, b):
    # Halfway between the two forms of GELU (never 5e-4 apart): the library's epilogue is the tanh form on a GPU and the
    # exact one on a CPU, and either is right here.
    linear = x @ w.mT + b
    exact = torch.nn.functional.gelu(linear)
    return (exact + torch.nn.functional.gelu(linear, approximate="tanh")) / 2


def epilogue_careless(x, w, b):
    """GELU by a sigmoid: near, and another function."""
    linear = x @ w.mT + b
    return linear * torch.sigmoid(1.702 * linear)


def _up(batch, tokens, n, k, x=lambda t: t, w=lambda t: t, kind=""):
    """x (batch, tokens, k), w (n, k) so that outputs are about 1, b (n)."""

    def inputs(draw):
        weights = draw(n, k, kind=kind if kind == "integers" else "normal") / max(1, k) ** 0.5
        return x(draw(batch, tokens, k, dtype=HALF)), w(weights.to(HALF)), draw(n, dtype=HALF, kind="normal")

    return inputs


def _up_bytes(x, w, b):
    return _bytes(x.shape, w.shape, b.shape, (*x.shape[:-1], w.shape[0]))


EPILOGUE = Exercise(
    name="epilogue",
    lab=LAB,
    rung="library",
    entry="up_projection",
    title="Bias and GELU inside the product's own launch",
    form="kernel",
    made_of="torch",
    reference=epilogue_reference,
    low=epilogue_careless,
    allow=ANY,
    forbid=NUMBERS,
    cases=(
        Case("two sequences of 24 tokens", _up(2, 24, 96, 64), seen=True),
        Case("odd sizes", _up(3, 7, 29, 53), seen=True),
        Case("square, so that a wrong transpose still fits", _up(2, 16, 32, 32)),
        Case("as many tokens as sequences", _up(8, 8, 40, 24)),
        Case("rows that lie further apart than they are long", _up(2, 9, 24, 40, x=padded, w=padded)),
        Case("w stored column by column", _up(2, 12, 40, 48, w=turned)),
        Case("one token", _up(1, 1, 64, 80)),
        Case("x with rare outliers", _up(2, 20, 48, 300), kind="outliers"),
        Case("x far from zero", _up(2, 10, 48, 64), kind="offset"),
        Case("no tokens at all", _up(2, 0, 16, 24)),
        Case("a layer of 2,048 by 512", _up(4, 128, 2048, 512), mode="gpu"),
    ),
    limits=_limits(1, _up_bytes),
    hints=(
        "Section 5 of the lesson has a call with an epilogue. Compare the number of dimensions that it wants with the "
        "number that x has here.",
        "The product does not care which tokens belong to which sequence: a tensor of two dimensions with all tokens "
        "below each other is a view of x. The result goes back to three dimensions the same way.",
        "rows = x with its first two dimensions flattened into one; y = the fused call on (b, rows, the transposed "
        "view of w) with GELU switched on; return y with its first dimension split again. Give all three sizes: where "
        "there are no tokens, a size of -1 cannot be worked out.",
    ),
    core=True,
)

# --------------------------------------------------------------------------------------------------- batched-gemm


def batched_gemm_reference(x, w):
    return torch.einsum("thd,hdr->thr", x, w.expand(x.shape[1], -1, -1))


def _heads(tokens, heads, d, r, shared=False, x=lambda t: t, w=lambda t: t):
    """x (tokens, heads, d), w (heads or 1, d, r)."""
    return lambda draw: (x(draw(tokens, heads, d, dtype=HALF)), w(_small(draw, 1 if shared else heads, d, r)))


def _small(draw, *shape):
    """Weights that keep products of outliers within fp16's range."""
    return draw(*shape, dtype=HALF, kind="integers" if draw.kind == "integers" else "normal")


def _heads_bytes(x, w):
    tokens, heads, d = x.shape
    return _bytes(x.shape, (heads, d, w.shape[2]), (tokens, heads, w.shape[2]))


def batched_gemm_rival(x, w):
    import torch

    return torch.bmm(x.transpose(0, 1), w.expand(x.shape[1], -1, -1)).transpose(0, 1)


BATCHED_GEMM = Exercise(
    name="batched-gemm",
    lab=LAB,
    rung="library",
    entry="per_head",
    title="A loop of small products in one launch",
    form="rewrite",
    made_of="torch",
    reference=batched_gemm_reference,
    allow=ANY,
    forbid=NUMBERS,
    cases=(
        Case("five tokens, four heads", _heads(5, 4, 16, 24), seen=True),
        Case("one weight for all heads", _heads(7, 6, 16, 8, shared=True), seen=True),
        Case("odd sizes, exact", _heads(13, 5, 29, 11), kind="integers", exact=True),
        Case("all sizes equal, so that a wrong order still fits", _heads(8, 8, 8, 8), kind="integers", exact=True),
        Case("one weight, all sizes equal", _heads(8, 8, 8, 8, shared=True), kind="integers", exact=True),
        Case("one token", _heads(1, 12, 32, 16)),
        Case("one head", _heads(9, 1, 32, 16)),
        Case("each weight stored column by column", _heads(10, 3, 24, 40, w=turned)),
        Case("rows that lie further apart than they are long", _heads(6, 4, 16, 24, x=padded, w=padded)),
        Case("x far from zero", _heads(12, 4, 64, 16), kind="offset"),
        Case("rare outliers in x", _heads(12, 4, 300, 16), kind="outliers"),
        Case("256 tokens, 32 heads", _heads(256, 32, 128, 256), mode="gpu"),
    ),
    limits=_limits(1, _heads_bytes),
    speed=Speed(
        batched_gemm_rival,
        _heads(512, 128, 128, 512),
        0.7,
        "The answer reaches {share} of the speed of one batched product on views; {least} is asked for.",
    ),
    hints=(
        "In the loop, which dimension of x and of w does the index run over? A batched product wants that dimension "
        "first, in both.",
        "Moving a dimension of x to the front is a view; the library takes the distance between two rows, and that "
        "between two matrices, as numbers. One weight for all heads is a distance of zero: a view as well. A product "
        "of tensors with more dimensions than three may copy to get down to three.",
        "Swap the first two dimensions of x (view); make w as long as x has heads by expanding it (view); one batched "
        "product; swap the first two dimensions of the result back (view).",
    ),
    core=True,
)

# --------------------------------------------------------------------------------------------------- odd-edges


def odd_edges_reference(w, first, second):
    return first @ w.mT, second @ w.mT


def odd_edges_drive(answer, w, first, second):
    """Both calls of one layer, the second with other numbers in the memory of the first, and what reaches the library.

    Facts: "products"; "copies" (other operators that read a tensor and write memory); "unaligned": matrices of a
    product whose rows do not start at multiples of 16 bytes, or whose rows do not hold a multiple of 8 elements.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    from helpers.ledger import Mode

    def fast(matrix):
        rows, columns = matrix.shape[-2:]
        to_next_row, to_next_column = matrix.stride()[-2:]
        if to_next_column != 1:  # stored column by column
            (rows, columns), (to_next_row, to_next_column) = (columns, rows), (to_next_column, to_next_row)
        ends = matrix.data_ptr() % 16 == 0 and (rows == 1 or to_next_row * matrix.element_size() % 16 == 0)
        return to_next_column == 1 and columns % 8 == 0 and ends

    class Watch(Mode):
        facts = {"products": 0, "copies": 0, "unaligned": 0}

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            out = operator(*args, **(kwargs or {}))
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            written = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            memory = {t.untyped_storage().data_ptr() for t in read}
            name = operator.overloadpacket.__name__
            if any(part in name for part in ("mm", "mv", "dot", "linear", "conv")):  # whatever multiplies
                self.facts["products"] += 1
                self.facts["unaligned"] += sum(not fast(t) for t in [*read, *written] if t.dim() > 1)
            elif read and name not in ("new_zeros", "new_empty", "zeros_like", "empty_like", "zero_", "fill_"):
                new = [t for t in written if t.untyped_storage().data_ptr() not in memory]
                self.facts["copies"] += bool(written and (new or operator._schema.is_mutable))
            return out

    layer = answer(w)
    x = torch.empty_like(first).copy_(first)
    with Watch() as watch:
        y = layer(x)
    x.copy_(second)
    with watch:
        z = layer(x)
    return (y, z), watch.facts


def _odd(m, n, k):
    """w (n, k) and two x (m, k)."""
    return lambda draw: (
        draw(n, k, dtype=HALF, kind="integers" if draw.kind == "integers" else "normal"),
        draw(m, k, dtype=HALF),
        draw(m, k, dtype=HALF),
    )


ODD_EDGES = Exercise(
    name="odd-edges",
    lab=LAB,
    rung="library",
    entry="Bordered",
    title="A border of zeros, paid for once",
    form="rewrite",
    made_of="torch",
    reference=odd_edges_reference,
    allow=ANY,
    forbid=NUMBERS,
    drive=odd_edges_drive,
    cases=(
        Case("a vocabulary of 257, 64 features", _odd(24, 257, 64), seen=True),
        Case("63 by 63", _odd(17, 63, 63), seen=True),
        Case("odd features, even vocabulary", _odd(16, 64, 95)),
        Case("nothing is odd", _odd(24, 64, 48)),
        Case("sizes that a half of 16 bytes divides", _odd(16, 60, 36)),
        Case("even sizes that 8 does not divide, exact", _odd(9, 50, 90), kind="integers", exact=True),
        Case("odd and exact", _odd(11, 29, 53), kind="integers", exact=True),
        Case("one row", _odd(1, 101, 40)),
        Case("one element", _odd(1, 1, 1)),
        Case("x far from zero", _odd(12, 33, 65), kind="offset"),
        Case("rare outliers in x", _odd(12, 43, 301), kind="outliers"),
        Case("a vocabulary of 50,257", _odd(48, 50257, 64), mode="gpu"),
        Case("4,095 by 1,023", _odd(255, 4095, 1023), mode="gpu"),
    ),
    limits=(
        Limit(
            "unaligned",
            lambda *inputs: 0,
            "too-slow",
            "{fact} of the matrices that reached the library in two calls have rows that do not start at multiples of "
            "16 bytes, or do not hold a multiple of 8 elements.",
        ),
        Limit(
            "copies",
            lambda w, first, second: 2 * (w.shape[1] % 8 > 0),
            "too-many-kernels",
            "In two calls the layer ran {fact} operators besides the product, where {most} will do: w can get its "
            "border before, x needs one only where its own rows are odd, and cutting the result is a view.",
        ),
        Limit(
            "products",
            lambda *inputs: 2,
            "too-many-kernels",
            "Two calls ran {fact} products, where {most} will do.",
        ),
    ),
    hints=(
        "Write down the three matrices of the product x @ w.T and the length of a row of each, as they lie in memory. "
        "Which sizes appear there, and which does not?",
        "The rows of x and of w hold k elements, those of the result n. Zeros behind the k features add nothing to "
        "any sum, and rows of zeros under w give columns of the result that are cut off. What concerns w alone can be "
        "done once, when the layer is made. And padding by nothing still copies.",
        "When made: n and k rounded up to multiples of 8; keep w in a border of zeros of that size, and n itself. "
        "When called: if k had to be rounded up, put x in a border to the right; multiply by the transposed view of "
        "the kept weight; return the first n columns.",
    ),
)

# --------------------------------------------------------------------------------------------------- grouped-heads


def grouped_heads_reference(q, keys, bias, scale):
    grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[2])
    return scale * torch.einsum("bgrd,bgsd->bgrs", grouped, keys).flatten(1, 2) + bias


def grouped_heads_scale(q, keys, bias, scale):
    # What is added up: a sum near zero of a large product and a large bias is as far off as these allow.
    size = grouped_heads_reference(q, keys, torch.zeros_like(bias), scale).abs() + bias.abs()
    return torch.maximum(size, size.mean(-1, keepdim=True))


def _decode(batch, groups, share, d, length, room=0, scale=0.125, x=lambda t: t):
    """q (batch, groups * share, d), keys (batch, groups, length, d) as the begin of a cache with more room, bias."""

    def inputs(draw):
        keys = torch.full((batch, groups, length + room, d), float("nan"), dtype=HALF)[:, :, :length]
        keys.copy_(draw(batch, groups, length, d, kind="integers" if draw.kind == "integers" else "normal"))
        bias = draw(length, dtype=HALF, kind="integers" if draw.kind == "integers" else "normal")
        return draw(batch, groups * share, d, dtype=HALF), x(keys), bias, scale

    return inputs


def _decode_bytes(q, keys, bias, scale):
    scores = (*q.shape[:2], keys.shape[2])
    return _bytes(q.shape, keys.shape, scores, scores)  # the bias may be expanded to the scores: a view


def grouped_heads_rival(q, keys, bias, scale):
    import torch

    repeated = keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)
    return scale * torch.matmul(q[:, :, None], repeated.mT)[:, :, 0] + bias


GROUPED_HEADS = Exercise(
    name="grouped-heads",
    lab=LAB,
    rung="library",
    entry="decode_scores",
    title="Grouped heads without repeating the cache",
    form="rewrite",
    made_of="torch",
    reference=grouped_heads_reference,
    scale=grouped_heads_scale,
    low="bfloat16",
    allow=ANY,
    forbid=NUMBERS,
    cases=(
        Case("two sequences, 8 heads over 2 groups", _decode(2, 2, 4, 16, 21), seen=True),
        Case("the begin of a longer cache", _decode(2, 2, 3, 16, 13, room=19), seen=True),
        Case("odd sizes, exact", _decode(3, 5, 7, 11, 29, room=2, scale=2.0), kind="integers", exact=True),
        Case(
            "all sizes equal, so that a wrong order still fits",
            _decode(4, 4, 4, 4, 4, scale=1.0),
            kind="integers",
            exact=True,
        ),
        Case("as many groups as heads", _decode(2, 6, 1, 32, 17, room=3)),
        Case("one group for all heads", _decode(2, 1, 12, 32, 17, room=3)),
        Case("one position", _decode(2, 2, 4, 16, 1)),
        Case("keys whose rows lie further apart than they are long", _decode(2, 2, 4, 16, 9, x=padded)),
        Case("q far from zero", _decode(2, 2, 2, 64, 31, scale=1 / 64), kind="offset"),
        Case("rare outliers in q", _decode(2, 3, 2, 64, 50, room=14), kind="outliers"),
        Case("a negative scale", _decode(1, 2, 3, 24, 40, scale=-0.5)),
        Case("2,000 positions of a cache with room for 2,048", _decode(4, 4, 8, 128, 2000, room=48), mode="gpu"),
    ),
    limits=_limits(1, _decode_bytes),
    speed=Speed(
        grouped_heads_rival,
        _decode(8, 8, 8, 128, 4000, room=96),
        1.5,
        "The answer reaches {share} times the speed of one that repeats the cache; at least {least} is asked for, as "
        "the keys are nearly all that there is to move.",
    ),
    hints=(
        "Which heads read the same keys? They stand next to each other in q. In the slow version each of them gets a "
        "copy of the keys, and multiplies a single row.",
        "The heads of one group are the rows of one matrix, which multiplies the keys of that group: one product a "
        "group and sequence, no matter how many heads share it. Sequences and groups together are the batch: both "
        "flatten into one dimension as a view. The batched product that adds a tensor also takes a factor.",
        "rows = q as (batch × groups, heads a group, d); columns = keys as (batch × groups, length, d), last two "
        "dimensions swapped; one call: bias plus scale × rows times columns; return it as (batch, heads, length).",
    ),
)

# --------------------------------------------------------------------------------------------------- expert-products


def expert_products_reference(x, w, owner):
    return torch.einsum("tk,thk->th", x, w[owner])


def _experts(tokens, experts, wide, hidden, of=None, x=lambda t: t, w=lambda t: t):
    """x (tokens, wide), w (experts, hidden, wide), both bf16, and each token's owner, one of the experts `of`."""

    def inputs(draw):
        used = of or range(experts)
        owner = torch.tensor([draw.random.choice(used) for _ in range(tokens)], dtype=torch.int64)
        kind = "integers" if draw.kind == "integers" else "normal"
        weights = draw(experts, hidden, wide, dtype=torch.bfloat16, kind=kind)
        return x(draw(tokens, wide, dtype=torch.bfloat16)), w(weights), owner

    return inputs


def _experts_bytes(x, w, owner):
    """Tokens brought into order and back, each read and written once more than by the product; places as integers."""
    out = x.shape[0] * w.shape[1]
    return 2 * (4 * x.numel() + 2 * w.numel() + 6 * out) + 160 * (x.shape[0] + w.shape[0])


def expert_products_rival(x, w, owner):
    import torch

    y = torch.empty(len(x), w.shape[1], dtype=x.dtype, device=x.device)
    for expert in range(len(w)):
        mine = owner == expert
        y[mine] = x[mine] @ w[expert].T
    return y


EXPERT_PRODUCTS = Exercise(
    name="expert-products",
    lab=LAB,
    rung="library",
    entry="expert_products",
    title="Every token to its expert, in one grouped product",
    form="rewrite",
    made_of="torch",
    reference=expert_products_reference,
    low="bfloat16",
    allow=ANY,
    forbid=NUMBERS,
    cases=(
        Case("twelve tokens, three experts", _experts(12, 3, 16, 24), seen=True),
        Case("an expert without tokens", _experts(20, 4, 16, 8, of=(0, 1, 3)), seen=True),
        Case("neither the first nor the last expert is used", _experts(15, 5, 24, 16, of=(1, 3))),
        Case("all tokens to one expert", _experts(9, 4, 32, 16, of=(2,))),
        Case("more experts than tokens", _experts(5, 16, 16, 16)),
        Case("one token", _experts(1, 6, 16, 40)),
        Case("one expert", _experts(11, 1, 24, 8)),
        Case("all sizes equal, so that a wrong transpose still fits, exact", _experts(8, 8, 8, 8), kind="integers",
             exact=True),
        Case("rows that lie further apart than they are long", _experts(14, 3, 16, 16, x=lambda t: padded(t, 8))),
        Case("each weight stored column by column", _experts(14, 3, 16, 32, w=turned)),
        Case("many tokens for many narrow experts", _experts(200, 16, 8, 16)),
        Case("x far from zero", _experts(16, 4, 64, 16), kind="offset"),
        Case("rare outliers in x", _experts(16, 4, 320, 16), kind="outliers"),
        Case("2,048 tokens, 32 experts", _experts(2048, 32, 512, 256), mode="gpu"),
    ),
    limits=_limits(9, _experts_bytes),
    speed=Speed(
        expert_products_rival,
        _experts(8192, 64, 1024, 512),
        2.0,
        "The answer reaches {share} times the speed of a loop over experts; at least {least} is asked for.",
    ),
    hints=(
        "A grouped product wants the rows of each expert next to each other, and the places where each expert's rows "
        "end. What does the loop spend its launches on instead?",
        "Sorting the owners tells where each token goes. In the sorted owners the end of each expert is the place "
        "where the next larger number would begin: also of an expert that owns nothing. When the product is done, "
        "each row has to go back to its token.",
        "owners, order = sort(owner); ends = for each expert the number of owners up to it, as int32 (a search in the "
        "sorted owners, from the right); z = grouped product of x[order] and the weights' transposed view, with these "
        "ends; y = empty, y[order] = z.",
    ),
)  # fmt: skip

# --------------------------------------------------------------------------------------------------- two-convolutions


def two_convolutions_reference(x, w1, b1, w2, b2):
    conv = torch.nn.functional.conv2d
    return conv(torch.relu(conv(x, w1, b1, padding=1)), w2, b2, padding=1)


def two_convolutions_scale(x, w1, b1, w2, b2):
    # What the second convolution adds up: a sum near zero of large products is as far off as these allow.
    conv = torch.nn.functional.conv2d
    return conv(torch.relu(conv(x, w1, b1, padding=1)), w2.abs(), b2.abs(), padding=1)


def two_convolutions_drive(answer, x, w1, b1, w2, b2):
    """One call, and how each convolution's operands lie.

    Facts: "convolutions"; "elsewhere": operands and results of theirs whose channels are not neighbours in memory;
    "others": operators besides them that read a tensor and write memory.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    from helpers.ledger import Mode

    class Watch(Mode):
        facts = {"convolutions": 0, "elsewhere": 0, "others": 0}

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            out = operator(*args, **(kwargs or {}))
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            written = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            memory = {t.untyped_storage().data_ptr() for t in read}
            name = operator.overloadpacket.__name__
            if "conv" in name and "im2col" not in name:
                self.facts["convolutions"] += 1
                images = [t for t in read if t.dim() == 4]
                self.facts["elsewhere"] += sum(not t.is_contiguous(memory_format=torch.channels_last) for t in images)
            elif read and name not in ("new_zeros", "new_empty", "zeros_like", "empty_like", "zero_", "fill_"):
                new = [t for t in written if t.untyped_storage().data_ptr() not in memory]
                self.facts["others"] += bool(written and (new or operator._schema.is_mutable))
            return out

    with torch.no_grad(), Watch() as watch:
        y = answer(x, w1, b1, w2, b2)
    return y, watch.facts


def two_convolutions_judge(inputs, outputs, facts):
    if facts["contiguous"]:
        return []
    said = "The result's values are right, but it does not lie as x does: image by image, channel by channel (NCHW)."
    return [("wrong-shape", said)]


def _images(n, c, middle, out, height, width):
    """x as NCHW; filters and biases, the filters stored channels last, as a model keeps them."""

    def inputs(draw):
        def filters(to, come):
            w = draw(to, come, 3, 3, kind="integers" if draw.kind == "integers" else "normal")
            w = w if draw.kind == "integers" else w / (9 * come) ** 0.5
            return w.to(HALF).to(memory_format=torch.channels_last), draw(to, dtype=HALF, kind="integers")

        return draw(n, c, height, width, dtype=HALF), *filters(middle, c), *filters(out, middle)

    return inputs


def two_convolutions_rival(x, w1, b1, w2, b2):
    import torch

    conv = torch.nn.functional.conv2d
    x = x.to(memory_format=torch.channels_last)
    return conv(conv(x, w1, b1, padding=1).relu_(), w2, b2, padding=1).contiguous()


TWO_CONVOLUTIONS = Exercise(
    name="two-convolutions",
    lab=LAB,
    rung="library",
    entry="two_convolutions",
    title="The fastest of three ways to call two convolutions",
    form="rewrite",
    made_of="torch",
    reference=two_convolutions_reference,
    scale=two_convolutions_scale,
    low="bfloat16",
    allow=ANY,
    forbid=NUMBERS,
    drive=two_convolutions_drive,
    judge=two_convolutions_judge,
    cases=(
        Case("two images of 16 channels", _images(2, 16, 24, 16, 6, 7), seen=True),
        Case("one image", _images(1, 8, 16, 8, 5, 5), seen=True),
        Case("square, as many channels as pixels in a row", _images(2, 8, 8, 8, 8, 8)),
        Case("few channels, exact", _images(2, 2, 2, 2, 4, 5), kind="integers", exact=True),
        Case("three channels in", _images(2, 3, 16, 8, 6, 5)),
        Case("one pixel high", _images(3, 8, 8, 16, 1, 9)),
        Case("images far from zero", _images(1, 8, 16, 8, 6, 6), kind="offset"),
        Case("rare outliers", _images(2, 8, 16, 8, 7, 7), kind="outliers"),
        Case("32 channels, 28 × 28", _images(4, 32, 64, 32, 28, 28), mode="gpu"),
    ),
    limits=(
        Limit(
            "elsewhere",
            lambda *inputs: 0,
            "too-slow",
            "{fact} of the images and filters that reached a convolution do not have the channels of a pixel next to "
            "each other, so the library has to move them before its tensor cores can start.",
        ),
        Limit(
            "others",
            lambda *inputs: 3,
            "too-many-kernels",
            "Besides the convolutions {fact} operators ran, where {most} will do: each of the others is a trip through "
            "memory.",
        ),
        Limit("convolutions", lambda *inputs: 2, "too-many-kernels", "{fact} convolutions ran, where {most} will do."),
    ),
    speed=Speed(
        two_convolutions_rival,
        _images(32, 128, 128, 128, 56, 56),
        0.8,
        "The answer reaches {share} of the speed of one that changes the layout once, before the first convolution, "
        "and once after the second; {least} is asked for.",
    ),
    hints=(
        "Follow one image through each of the three ways in the table: how often do its bytes change their order, "
        "whoever does it?",
        "A convolution's result lies as its input did, and so does what an elementwise operator makes of it. So a "
        "layout that was changed once stays, until somebody asks for another.",
        "x to channels last; convolution; relu; convolution; contiguous.",
    ),
)

# --------------------------------------------------------------------------------------------------- attention-backend

SIZES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def attention_backend_reference(call, backends):
    (batch, heads, queries, dim), (_, kv_heads, keys, _), value = call["q"], call["k"], call["v"][3]

    def against(b):
        def fits(size):
            return size <= b["most"] and size % b["multiple"] == 0

        return [
            word
            for word, fault in (
                ("dtype", call["dtype"] not in b["dtypes"]),
                ("head", not fits(dim)),
                ("value", not fits(value) or value != dim and not b["other_value"]),
                ("mask", call["mask"] not in b["masks"]),
                ("groups", heads != kv_heads and not b["groups"]),
            )
            if fault
        ]

    refused = {}
    for b in backends:
        if not (why := against(b)):
            return {"backend": b["name"], "refused": refused, "extra_bytes": 0}
        refused[b["name"]] = why
    scores = batch * heads * queries * keys * SIZES[call["dtype"]]
    return {"backend": "math", "refused": refused, "extra_bytes": 4 * scores}


def _backend(name, dtypes, most, multiple, masks, other_value, groups):
    return {
        "name": name,
        "dtypes": dtypes,
        "most": most,
        "multiple": multiple,
        "masks": masks,
        "other_value": other_value,
        "groups": groups,
    }


BACKENDS = [
    _backend("cudnn", ["fp16", "bf16"], 128, 8, ["none", "causal", "bias"], True, True),
    _backend("flash", ["fp16", "bf16"], 256, 8, ["none", "causal"], False, True),
    _backend("efficient", ["fp16", "bf16", "fp32"], 512, 4, ["none", "causal", "boolean", "bias"], True, False),
]
"""A rule book in the form of the exercise, near to what one version of PyTorch had on one card."""


def _call(q, k=None, value=None, dtype="fp16", mask="none"):
    k = k or q
    return {"q": q, "k": k, "v": (*k[:3], value or k[3]), "dtype": dtype, "mask": mask}


def _any_call(draw):
    """A call and a rule book that nobody chose."""
    r = draw.random
    backends = [
        _backend(
            name,
            r.sample(list(SIZES), r.randint(1, 3)),
            r.choice([64, 128, 256]),
            r.choice([1, 8, 16]),
            r.sample(["none", "causal", "boolean", "bias"], r.randint(1, 4)),
            r.random() < 0.5,
            r.random() < 0.5,
        )
        for name in r.sample(["cudnn", "flash", "efficient", "fourth", "fifth"], r.randint(1, 4))
    ]
    kv_heads, dim = r.choice([1, 2, 4]), r.choice([40, 64, 72, 128, 192, 256])
    value = dim if r.random() < 0.6 else r.choice([64, 128])
    batch, queries, keys = r.randint(1, 8), r.randint(1, 300), r.randint(1, 300)
    q, k = (batch, kv_heads * r.choice([1, 1, 4]), queries, dim), (batch, kv_heads, keys, dim)
    return _call(q, k, value, r.choice(list(SIZES)), r.choice(["none", "causal", "boolean", "bias"])), backends


ATTENTION_BACKEND = Exercise(
    name="attention-backend",
    lab=LAB,
    rung="library",
    entry="attention_backend",
    title="Which backend will take this attention?",
    form="choice",
    made_of="python",
    reference=attention_backend_reference,
    cases=(
        Case("16 heads of 128, causal", lambda draw: (_call((4, 16, 4096, 128), mask="causal"), BACKENDS), seen=True),
        Case("a boolean mask", lambda draw: (_call((2, 8, 512, 64), mask="boolean"), BACKENDS), seen=True),
        Case("grouped heads of 256", lambda draw: (_call((1, 32, 1000, 256), (1, 8, 1000, 256)), BACKENDS)),
        Case("nobody takes it: grouped heads in fp32",
             lambda draw: (_call((2, 8, 300, 64), (2, 2, 500, 64), dtype="fp32"), BACKENDS)),
        Case("values shorter than keys", lambda draw: (_call((1, 16, 700, 192), value=128), BACKENDS)),
        Case("values that are too long, of short keys", lambda draw: (_call((1, 4, 90, 64), value=520), BACKENDS)),
        Case("a head size that 8 does not divide", lambda draw: (_call((1, 4, 64, 100)), BACKENDS)),
        Case("one query against a cache", lambda draw: (_call((8, 32, 1, 128), (8, 8, 8192, 128)), BACKENDS)),
        Case("the other order of preference", lambda draw: (_call((2, 8, 64, 64)), BACKENDS[::-1])),
        Case("no backend at all", lambda draw: (_call((2, 8, 64, 32), dtype="bf16"), [])),
        *(Case("a call and rules that nobody chose", _any_call) for _ in range(8)),
    ),
    hints=(
        "Take the rules one by one for one backend and one call, and write down every word that applies, not the "
        "first only. Which sizes does the call give twice, and must they agree?",
        "The order of the list is the order of preference, so the first backend without a word against it is the "
        "answer, and only those before it have refused. Only when all have refused is the matrix of scores in memory: "
        "written and read, and the weights too.",
        "for each backend: words = those of dtype, head, value, mask, groups whose rule is broken; without words "
        "return it, with what was refused so far, and 0 bytes; else note the words. After the loop: math, and "
        "4 × batch × heads × queries × keys × bytes of the dtype.",
    ),
)  # fmt: skip

EXERCISES = (
    TILE_WAVES,
    GEMM_LAYOUT,
    EPILOGUE,
    BATCHED_GEMM,
    ODD_EDGES,
    GROUPED_HEADS,
    ATTENTION_BACKEND,
    TWO_CONVOLUTIONS,
    EXPERT_PRODUCTS,
)
