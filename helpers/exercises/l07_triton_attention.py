"""Lab 07, Triton: rows in one pass, a gate for experts, and attention in the layouts that servers keep it in."""

import torch

from . import Case, Exercise, Limit, far, padded

LAB = "07_triton_attention"
NAN, INF = float("nan"), float("inf")
FAR_BYTES = 5 * 2**30
"""What a case with `far` rows of float16 needs on a GPU."""
HALF = torch.float16


def _exponentials(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest, exp(scores - largest)) along the last dimension; where all are -inf, zeros in place of NaN."""
    top = scores.amax(-1, keepdim=True)
    return top, (scores - top.masked_fill(top == -INF, 0.0)).exp()


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    if not scores.numel():
        return scores
    _, e = _exponentials(scores)
    return e / e.sum(-1, keepdim=True).clamp_min(1.0)  # the largest adds 1, so only an all-masked row is below


# --- softmax-statistics ----------------------------------------------------------------------------------------


def _softmax_statistics(x, block):
    top, e = _exponentials(x)
    return top.squeeze(-1), e.sum(-1)


def _rows(rows, cols, block, dtype=torch.float32, put=lambda x: x):
    return lambda draw: (put(draw(rows, cols, dtype=dtype)), block)


def _hidden_in_turn(x):
    """Row r sees its first columns only, row 0 none: later blocks hold only -inf."""
    rows, cols = x.shape
    return x.masked_fill_(torch.arange(cols) >= torch.arange(rows)[:, None] * cols // rows, -INF)


def _late(x):
    """The first three quarters of each row are hidden: the first blocks hold only -inf."""
    x[:, : x.shape[1] * 3 // 4] = -INF
    return x


SOFTMAX_STATISTICS = Exercise(
    name="softmax-statistics",
    lab=LAB,
    rung="triton",
    entry="softmax_statistics",
    title="What a softmax must know of a row, in one pass",
    form="kernel",
    made_of="triton",
    core=True,
    dtype=torch.float32,
    reference=_softmax_statistics,
    cases=(
        Case("rows of a little more than three blocks", _rows(3, 100, 32), seen=True),
        Case("row r sees its first columns only, row 0 none", _rows(5, 110, 32, put=_hidden_in_turn), seen=True),
        Case("the first blocks hold nothing but -inf", _rows(2, 107, 32, put=_late)),
        Case("exactly one block", _rows(3, 32, 32)),
        Case("one row of more than a million columns", _rows(1, 2**20 + 7, 2048), mode="cpu"),
        Case("one column more than a block, float16", _rows(4, 33, 32, HALF)),
        Case("rows shorter than a block", _rows(3, 21, 32), kind="outliers"),
        Case("one column", _rows(3, 1, 32)),
        Case("no row", _rows(0, 50, 32)),
        Case("far from zero", _rows(2, 85, 32), kind="offset"),
        Case("far below zero, float16", _rows(2, 90, 32, HALF, lambda x: x - 300.0)),
        Case("the largest at the end", _rows(2, 125, 32, put=lambda x: x.sort(-1).values * 20)),
        Case("the largest at the start", _rows(2, 125, 32, put=lambda x: x.sort(-1, True).values * 20)),
        Case("rows further apart than they are long", _rows(3, 101, 32, put=padded)),
        Case("the last row lies beyond element 2**31", _rows(3, 70, 32, HALF, far), memory_bytes=FAR_BYTES),
        Case("71 rows of 40,000 columns, float16", _rows(71, 40_000, 4096, HALF), mode="gpu"),
    ),
    limits=(
        Limit(
            "bytes",
            lambda x, block: 1.02 * x.numel() * x.element_size() + 8 * x.shape[0],
            "too-many-bytes",
            "The kernels ask for {fact} bytes; reading x once and writing two numbers a row take no more than {most}.",
        ),
    ),
    hints=(
        "Two groups of numbers, each known only by its maximum and its sum: what are maximum and sum of both together? "
        "Then put a group of nothing but -inf into your formula: its maximum is -inf, and its sum 0.",
        "A sum of exp(x - m) becomes a sum of exp(x - M) when it is multiplied by exp(m - M), with M the larger "
        "maximum. m - M is -inf - (-inf), so NaN, where neither group has a finite number: subtract 0 there instead. "
        "Each block of the row is a group, and so are all blocks before it.",
        "merge: M = maximum(m, n); c = 0 where M is -inf, else M; (M, s · exp(m - c) + t · exp(n - c)). Kernel: m = "
        "-inf, s = 0; for each block of the row: x = load, -inf beyond the end; n = max(x); c = 0 where n is -inf, "
        "else n; t = sum(exp(x - c)); m, s = merge(m, s, n, t). Store m and s.",
    ),
    hints_for={
        "nan": (
            "Look for a difference of two infinities: a lane, a block or a whole row may hold only -inf.",
            "Subtract 0 in place of a maximum of -inf: exp(-inf - 0) is 0, as it should be.",
        ),
        "too-many-bytes": (
            "The row is read more than once. Which number do you wait for before you read it again?",
            "The sum need not wait for the maximum of the whole row: it can be mended when a larger one comes.",
        ),
    },
)


# --- cross-entropy ---------------------------------------------------------------------------------------------


def _cross_entropy(logits, labels, ignore, block):
    kept = labels != ignore
    picked = logits.gather(1, labels.where(kept, 0)[:, None]).squeeze(1)
    return torch.where(kept, torch.logsumexp(logits, -1) - picked, 0.0)


def _labelled(rows, vocabulary, block, dtype=HALF, put=lambda x: x, ignore=-100, ignored=0.25, label=None):
    """label: None for random ones, or the one that every row has."""

    def inputs(draw):
        logits = draw(rows, vocabulary, dtype=dtype)
        labels = draw.integers(0, vocabulary, rows, dtype=torch.int64)
        if label is not None:
            labels[:] = label
        left_out = draw.integers(0, 1000, rows) < 1000 * ignored
        left_out[:1] |= ignored > 0
        labels[left_out] = ignore
        logits[labels == ignore] = NAN  # what an ignored row holds is nobody's business
        return put(logits), labels, ignore, block

    return inputs


def _banned(logits):
    """Every third column is -inf in all rows but the first: labels among them cost infinitely much."""
    logits[1:, ::3] = -INF
    return logits


def _only_late(logits):
    """Nothing but the last column is allowed, so all blocks but the last hold only -inf."""
    logits[:, :-1] = -INF
    return logits


def _least_of_cross_entropy(logits, labels, ignore, block):
    rows, vocabulary = logits.shape
    kept = int((labels != ignore).sum())
    return kept * (vocabulary + 1) * logits.element_size() + rows * (8 + 4)


CROSS_ENTROPY = Exercise(
    name="cross-entropy",
    lab=LAB,
    rung="triton",
    entry="cross_entropy",
    title="Cross-entropy that reads its logits once",
    form="kernel",
    made_of="triton",
    core=True,
    dtype=torch.float32,
    reference=_cross_entropy,
    cases=(
        Case("a vocabulary that ends inside a block", _labelled(7, 100, 32), seen=True),
        Case("exactly one block", _labelled(5, 32, 32)),
        Case("a vocabulary shorter than a block", _labelled(6, 21, 32), kind="outliers"),
        Case("50,257 words", _labelled(2, 50_257, 1024, ignored=0.0), mode="cpu"),
        Case("a single word", _labelled(3, 1, 32, ignored=0.0)),
        Case("no row", _labelled(0, 50, 32)),
        Case("the first word is the label", _labelled(4, 70, 32, label=0, ignored=0.0)),
        Case("the last word is the label", _labelled(4, 65, 32, label=64, ignored=0.0)),
        Case("the ignored label is 0, a word's own number", _labelled(9, 90, 32, ignore=0)),
        Case("every row is ignored", _labelled(5, 70, 32, ignored=1.0)),
        Case("far from zero", _labelled(4, 85, 32, torch.float32, ignored=0.0), kind="offset"),
        Case("logits near 30,000 and far apart", _labelled(4, 100, 32, put=lambda x: x * 150), kind="offset"),
        Case("words that are switched off with -inf", _labelled(8, 75, 32, put=_banned, label=4)),
        Case("a label that is switched off", _labelled(4, 90, 32, put=_banned, label=3, ignored=0.0)),
        Case("the first blocks hold nothing but -inf", _labelled(3, 100, 32, put=_only_late, label=99, ignored=0.0)),
        Case("rows further apart than they are long", _labelled(6, 101, 32, put=padded)),
        Case(
            "the last row lies beyond element 2**31",
            _labelled(3, 70, 32, put=far, ignored=0.0),
            memory_bytes=FAR_BYTES,
        ),
        Case("201 rows of 128,256 words", _labelled(201, 128_256, 8192), mode="gpu"),
    ),
    limits=(
        Limit(
            "bytes",
            _least_of_cross_entropy,
            "too-many-bytes",
            "The kernels ask for {fact} bytes; reading the rows that count once, the labels and their logits, and "
            "writing the losses are {most}.",
        ),
    ),
    hints=(
        "The loss needs three numbers of a row: its maximum, its sum, and one of its logits. For which of them must "
        "the row be read to its end? And what may a program do once it has seen that its label is the ignored one?",
        "loss = (m + log s) - x[label]: maximum and sum are the statistics of the exercise before, in one pass. The "
        "label's logit is one more load of one number. An ignored row needs none of these loads: a loop that ends "
        "before it begins, or an `if` around it.",
        "row = program in 64 bits; label = load; kept = label ≠ ignore; walk the columns from 0 to (cols where kept, "
        "else 0): m, s = merge(…); then picked = load at label, masked by kept; store (m - picked) + log s where kept, "
        "else 0. Where nothing was walked, s is 0: select the 0, do not multiply by it.",
    ),
    hints_for={
        "nan": (
            "An ignored row may hold NaN, and 0 · NaN is NaN. Does anything of such a row reach the result?",
            "A block, or a lane, may hold only -inf so far: subtract 0 in place of a maximum of -inf.",
        ),
        "out-of-bounds": (
            "Which address does the label of an ignored row lead to, where the ignored label is -100?",
            "Mask the load of the label's logit by `label != ignore`, and the blocks by the number of columns.",
        ),
    },
)


# --- top-k-gate ------------------------------------------------------------------------------------------------


def _top_k_gate(scores, k):
    best, experts = scores.sort(dim=-1, descending=True, stable=True)  # stable: of equal scores the lower index first
    best, experts = best[:, :k], experts[:, :k]
    tokens = torch.bincount(experts.flatten(), minlength=scores.shape[1])
    return _softmax(best), experts.to(torch.int32), tokens.to(torch.int32)


def _gated(rows, experts, k, dtype=torch.float32, put=lambda x: x):
    return lambda draw: (put(draw(rows, experts, dtype=dtype)), k)


def _one_left(scores):
    """All but the last expert are switched off."""
    scores[:, :-1] = -INF
    return scores


def _alike(scores):
    scores[:] = 0.5
    return scores


def _least_of_gate(scores, k):
    rows, experts = scores.shape
    histograms = 8 * experts * -(-rows // 4)  # for those who add up a tile's choices first
    return scores.numel() * scores.element_size() + 32 * rows * k + histograms


TOP_K_GATE = Exercise(
    name="top-k-gate",
    lab=LAB,
    rung="triton",
    entry="top_k_gate",
    title="The gate of a mixture of experts",
    form="kernel",
    made_of="triton",
    dtype=torch.float32,
    reference=_top_k_gate,
    cases=(
        Case("19 tokens, 2 of 12 experts", _gated(19, 12, 2), seen=True),
        Case("small integers: many ties", _gated(37, 24, 3), kind="integers", seen=True),
        Case("8 of 64 experts, float16", _gated(21, 64, 8, HALF)),
        Case("a prime number of experts", _gated(9, 29, 3), kind="outliers"),
        Case("all scores are equal", _gated(5, 24, 3, put=_alike)),
        Case("all experts are taken", _gated(6, 7, 7)),
        Case("a single token", _gated(1, 24, 3)),
        Case("a single expert", _gated(5, 1, 1)),
        Case("no token", _gated(0, 16, 2)),
        Case("far from zero", _gated(17, 22, 3), kind="offset"),
        Case("far below zero, float16", _gated(17, 22, 3, HALF, lambda x: x - 300.0)),
        Case("all but one expert are switched off, and three are asked for", _gated(6, 24, 3, put=_one_left)),
        Case("rows further apart than they are long", _gated(18, 29, 3, put=padded)),
        Case("the last row lies beyond element 2**31", _gated(3, 29, 3, HALF, far), memory_bytes=FAR_BYTES),
        Case("8,209 tokens, 8 of 256 experts", _gated(8209, 256, 8, HALF), mode="gpu"),
    ),
    limits=(
        Limit(
            "bytes",
            _least_of_gate,
            "too-many-bytes",
            "The kernels ask for {fact} bytes; reading the scores once, writing k weights and indices a token, and "
            "counting each choice take no more than {most}.",
        ),
    ),
    hints=(
        "The weights are renormalised over the chosen k: which part of the softmax over all experts is left in them? "
        "And how do you keep a chosen expert from being chosen again, even where others stand at -inf?",
        "k rounds of: the largest of those not taken yet, and of equal ones the lowest index. `tl.argmax` gives the "
        "lower index of equal ones. Keep which lanes are taken apart from the scores: a score of -inf is a score "
        "too. The weights are the softmax of the k chosen scores. Many programs count for one expert: an atomic.",
        "token = program · ROWS + lanes; x = scores, -inf beyond the last expert; free = expert < experts. For i in "
        "range(k): top = max(x where free, else -inf); pick = min(expert where free and x = top, else a large number); "
        "free = free and expert ≠ pick; store pick at (token, i); atomic_add(tokens + pick, 1); keep top in column i "
        "of a tile. Then softmax over that tile's first k columns; store.",
    ),
    hints_for={
        "race": (
            "Tokens of different programs choose the same expert, and each wants to count.",
            "`tl.atomic_add(pointers, 1, mask=…)` lets them count one after the other, also lanes of one program.",
        ),
    },
)


# --- causal-attention ------------------------------------------------------------------------------------------


def _attention(q, k, v, visible):
    """q (..., T, D), k and v (..., S, D), visible broadcast to (..., T, S)."""
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return _softmax(scores.masked_fill(~visible, -INF)) @ v


def _causal_attention(qkv, window, block):
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    at = torch.arange(qkv.shape[1])
    behind = at[:, None] - at[None, :]
    return _attention(q, k, v, (behind >= 0) & (behind < window)).transpose(1, 2)


def _causal_scale(qkv, window, block):
    q, k, v = qkv.unbind(2)
    return _causal_attention(torch.stack((q, k, v.abs()), 2), window, block)


EVERYTHING = 2**31 - 1
"""A window that hides nothing."""


def _packed(batch, tokens, heads, width, block, window=EVERYTHING, put=lambda x: x, size=1.0, above=0.0):
    """put: changes the (batch, everything) matrix. size: of q and k, so its square is that of the scores. above: what
    the values lie around."""

    def inputs(draw):
        qkv = draw(batch, tokens, 3, heads, width, dtype=HALF)
        qkv[:, :, :2] *= size
        qkv[:, :, 2] = above + draw(batch, tokens, heads, width, kind="normal")  # a float16 p cannot meet outliers
        return put(qkv.flatten(1)).unflatten(1, (tokens, 3, heads, width)), window, block

    return inputs


def _one_heavy(tokens, width, block):
    """A first key that weighs exp(10.5) times as much as each of the others: what a block of 16 of these adds to a sum
    near 1 is less than float16 keeps, and what all of them add is not."""

    def inputs(draw):
        qkv = torch.zeros(1, tokens, 3, 1, width)
        qkv[:, :, 0, :, 0], qkv[:, 0, 1, :, 0] = width**0.5, 10.5
        qkv[:, :, 2] = -0.7 - 0.05 * draw(1, tokens, 1, width).abs()
        qkv[:, 0, 2] *= -1.7
        return qkv.to(HALF), EVERYTHING, block

    return inputs


def _apart(qkv):
    """Tokens lie further apart than they are long, as where they are a slice of a wider projection."""

    def inputs(draw):
        packed, window, block = qkv(draw)
        return padded(packed.flatten(2), 16).unflatten(2, packed.shape[2:]), window, block

    return inputs


def _keys_of_causal(qkv, window, block):
    """Keys that the tiles of one head must see, and what is left over in their first or last block."""
    tokens = qkv.shape[1]
    total = 0
    for first in range(0, tokens, block):
        last = min(first + block, tokens)
        total += min(last, last - max(0, first - window + 1) + block - 1)
    return total


def _least_of_causal(qkv, window, block):
    batch, tokens, _, heads, width = qkv.shape
    return 2 * width * batch * heads * 2 * (tokens + _keys_of_causal(qkv, window, block))


CAUSAL_ATTENTION = Exercise(
    name="causal-attention",
    lab=LAB,
    rung="triton",
    entry="causal_attention",
    title="Causal attention with a window, from one packed tensor",
    form="kernel",
    made_of="triton",
    core=True,
    reference=_causal_attention,
    scale=_causal_scale,
    multiplied=0,
    low="bfloat16",
    cases=(
        Case("50 tokens, two heads", _packed(1, 50, 2, 32, 16), seen=True),
        Case("a window of 20 tokens", _packed(1, 75, 1, 32, 16, 20), seen=True),
        Case("exactly one block", _packed(1, 16, 1, 32, 16)),
        Case("one token more than four blocks", _packed(1, 65, 1, 32, 16)),
        Case("a single token", _packed(2, 1, 3, 32, 16)),
        Case("no token", _packed(1, 0, 1, 32, 16)),
        Case("each token sees itself only", _packed(1, 37, 2, 32, 16, 1), exact=True),
        Case("a window of exactly one block", _packed(1, 70, 1, 32, 16, 16)),
        Case("a window of two blocks and one", _packed(1, 90, 1, 32, 16, 33)),
        Case("scores of several hundred", _packed(1, 60, 1, 32, 16, size=14.0)),
        Case("outliers among queries and keys", _packed(1, 70, 1, 32, 16, 40), kind="outliers"),
        Case("three sequences, tokens further apart than they are long", _apart(_packed(3, 20, 2, 32, 16))),
        Case("one key outweighs each of 200 others", _one_heavy(201, 32, 16)),
        Case("wide heads, values around 300 that weigh the same", _packed(1, 230, 1, 64, 32, size=0.1, above=300.0)),
        Case(
            "the last sequence lies beyond element 2**31",
            _packed(3, 17, 1, 32, 16, put=far),
            memory_bytes=FAR_BYTES,
        ),
        Case("2 × 1,000 tokens, 3 heads, a window of 300", _packed(2, 1000, 3, 64, 64, 300), mode="gpu"),
    ),
    limits=(
        Limit(
            "bytes",
            _least_of_causal,
            "too-many-bytes",
            "The kernel asks for {fact} bytes; {most} are enough where a tile of queries reads only blocks of keys "
            "that one of its queries can see.",
        ),
    ),
    hints=(
        "Take the tile of queries from 32 to 47 with a window of 20. Which keys does its first query see, which its "
        "last? From which block to which must the loop go? In the first of these blocks, which queries see nothing?",
        "The loop runs from the first block that the tile's first query sees to the block of its last query: nothing "
        "right of it is loaded. Inside, the mask decides by query and key. A query that has seen nothing yet has the "
        "maximum -inf: subtract 0 in its place. When the maximum grows, the sum and the accumulated output are both "
        "multiplied by exp(old - new).",
        "t = tile · BLOCK + lanes; q = load at t · t_stride, 0 beyond T. m = -inf, s = 0, acc = 0. For start from "
        "max(0, first - window + 1) // BLOCK · BLOCK to min(T, first + BLOCK), by BLOCK: j = start + lanes; scores = "
        "dot(q, kᵀ) · scale, -inf unless t - window < j ≤ t; M = max(m, row maximum); c = 0 where M is -inf, else M; p "
        "= exp(scores - c); old = exp(m - c); s = s · old + sum(p); acc = dot(p, v, acc · old); m = M. Store acc / s.",
    ),
    hints_for={
        "nan": (
            "With a window, the first block of a tile may hold no key that the tile's last queries see. What is their "
            "maximum after it?",
            "exp(-inf - (-inf)) is NaN: where the maximum is -inf, subtract 0 instead of it.",
        ),
        "too-many-bytes": (
            "Write down the loop's first and last block for the second and for the last tile of queries.",
            "Keys after the tile's last query are seen by none, nor are keys before its first query's window: the loop "
            "should not go there. A mask alone makes the values right, and reads everything.",
        ),
    },
    seconds=20,
)


# --- grouped-attention -----------------------------------------------------------------------------------------


def _grouped_attention(q, k, v, block):
    new, heads, _ = q.shape
    past, groups = k.shape[0], k.shape[1]
    q = q.transpose(0, 1).unflatten(0, (groups, heads // groups))
    k, v = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None]
    visible = torch.arange(past) <= torch.arange(past - new, past)[:, None]
    return _attention(q, k, v, visible).flatten(0, 1).transpose(0, 1)


def _grouped_scale(q, k, v, block):
    return _grouped_attention(q, k, v.abs(), block)


def _chunk(new, past, heads, groups, width, block, cache=lambda x: x, size=1.0, above=0.0):
    """`new` queries at the end of `past` keys; cache: how k and v lie; size, above: as in `_packed`."""

    def inputs(draw):
        q = size * draw(new, heads, width, dtype=HALF)
        k = cache(size * draw(past, groups, width, dtype=HALF))
        return q, k, cache(above + draw(past, groups, width, dtype=HALF, kind="normal")), block

    return inputs


def _by_head(x):
    """(tokens, heads, width) of a cache that holds one head after the other, with room for more tokens."""
    tokens, heads, width = x.shape
    room = torch.full((heads, tokens + 9, width), NAN, dtype=x.dtype)
    return room[:, :tokens].copy_(x.transpose(0, 1)).transpose(0, 1)


def _far_tokens(x):
    return far(x.flatten(1)).unflatten(1, x.shape[1:])


def _least_of_grouped(q, k, v, block):
    (new, heads, width), (past, groups, _) = q.shape, k.shape
    rows = new * heads // groups
    keys = 0
    for first in range(0, rows, block):
        seen = past - new + (min(first + block, rows) - 1) * groups // heads + 1
        keys += min(past, seen + block - 1)
    return 2 * width * (2 * new * heads + 2 * groups * keys)


GROUPED_ATTENTION = Exercise(
    name="grouped-attention",
    lab=LAB,
    rung="triton",
    entry="grouped_attention",
    title="New tokens of grouped-query heads against a cache",
    form="kernel",
    made_of="triton",
    reference=_grouped_attention,
    scale=_grouped_scale,
    multiplied=2,
    low="bfloat16",
    cases=(
        Case("5 new tokens after 61, 8 heads on 2", _chunk(5, 66, 8, 2, 32, 16), seen=True),
        Case("tokens without a past", _chunk(70, 70, 2, 1, 32, 16), seen=True),
        Case("one key head for all six", _chunk(7, 40, 6, 1, 32, 16)),
        Case("each head has keys of its own", _chunk(19, 50, 2, 2, 32, 16)),
        Case("groups of three", _chunk(11, 35, 9, 3, 32, 16)),
        Case("exactly one tile of rows and of keys", _chunk(4, 16, 4, 1, 32, 16)),
        Case("a single new token", _chunk(1, 33, 8, 2, 32, 16)),
        Case("one token in all", _chunk(1, 1, 4, 4, 32, 16), exact=True),
        Case("no new token", _chunk(0, 12, 4, 2, 32, 16)),
        Case("a cache that is stored head by head, with room", _chunk(6, 45, 4, 2, 32, 16, _by_head)),
        Case("scores of several hundred", _chunk(9, 50, 4, 2, 32, 16, size=14.0)),
        Case("outliers among queries and keys", _chunk(6, 70, 8, 2, 32, 32), kind="outliers"),
        Case("wide heads, values around 300 that weigh the same", _chunk(3, 300, 8, 1, 64, 32, size=0.1, above=300.0)),
        Case(
            "the last keys lie beyond element 2**31",
            _chunk(2, 5, 4, 2, 32, 16, _far_tokens),
            memory_bytes=2 * FAR_BYTES,
        ),
        Case("33 new tokens after 4,000, 32 heads on 8", _chunk(33, 4033, 32, 8, 64, 64), mode="gpu"),
    ),
    limits=(
        Limit(
            "bytes",
            _least_of_grouped,
            "too-many-bytes",
            "The kernel asks for {fact} bytes; {most} are enough where the query heads of a group share a tile of "
            "rows, so that keys and values are read once for all, and only as far as the tile's last token sees.",
        ),
    ),
    hints=(
        "Write down the rows of one tile: a row is a pair of a new token and a query head of the group. Which token "
        "and which head is row r, where a group has G heads? Which position in the cache has new token t?",
        "All G · T rows of a group need the same keys, so they can stand in one tile: row r is token r // G and head "
        "group · G + r % G. New token t stands at position S - T + t, and sees keys up to and including that one. The "
        "addresses of q follow from token and head, the mask from the position; the rest is the loop that you know.",
        "r = tile · BLOCK + lanes; token = r // G; head = group · G + r % G; position = S - T + token; q = load at "
        "(token, head) where r < T · G. End: min(S, S - T + (token of the tile's last row) + 1). For start from 0 to "
        "end by BLOCK: j = start + lanes, in 64 bits; scores = dot(q, kᵀ) · scale, -inf unless j ≤ position; then "
        "maximum, sum and acc as before. Store acc / s at (token, head).",
    ),
    hints_for={
        "too-many-bytes": (
            "How many programs read the keys of one group? Does that number grow with the heads of the group?",
            "Let one tile hold rows of all the heads of a group, and end the loop at the last key that the tile's last "
            "token sees.",
        ),
        "wrong-values": (
            "Which keys may the first new token see, where the cache holds S and T are new? It is not the first key "
            "only.",
            "New token t stands at position S - T + t. Compare keys with that, and not with t.",
        ),
    },
    seconds=20,
)


# --- paged-decode ----------------------------------------------------------------------------------------------


def _paged_decode(q, k_pages, v_pages, table, lengths, splits):
    page, groups = k_pages.shape[1:3]
    out = torch.zeros_like(q)
    for b, length in enumerate(lengths.tolist()):
        pages = table[b, : -(-length // page)].long()
        k, v = (x[pages].flatten(0, 1)[:length].transpose(0, 1) for x in (k_pages, v_pages))
        rows = q[b].unflatten(0, (groups, q.shape[1] // groups))
        if length:
            out[b] = _attention(rows, k, v, torch.tensor(True)).flatten(0, 1)
    return out


def _paged_scale(q, k_pages, v_pages, table, lengths, splits):
    return _paged_decode(q, k_pages, v_pages.abs(), table, lengths, splits)


def _paged(lengths, heads, groups, width, splits, page=16, put=lambda x: x, size=1.0, above=0.0, wide=0):
    """Pages in random order; what no sequence owns is NaN, and table entries that none needs lead nowhere.

    put: how the keys lie. size, above: as in `_packed`. wide: how many entries more than it needs the table has.
    """

    def inputs(draw):
        needed = [-(-length // page) for length in lengths]
        pages = sum(needed) + 2
        owned = [pages - 1, *draw.random.sample(range(pages - 1), max(sum(needed) - 1, 0))]  # the last one always
        draw.random.shuffle(owned)
        q = size * draw(len(lengths), heads, width, dtype=HALF)
        keys, values = (torch.full((pages, page, groups, width), NAN, dtype=HALF) for _ in "kv")
        table = torch.full((len(lengths), max([*needed, 1]) + wide), 2**30, dtype=torch.int32)
        for b, length in enumerate(lengths):
            for i in range(needed[b]):
                table[b, i] = own = owned.pop()
                used = min(page, length - i * page)
                keys[own, :used] = size * draw(used, groups, width, dtype=HALF)
                values[own, :used] = above + draw(used, groups, width, dtype=HALF, kind="normal")
        return q, put(keys), values, table, torch.tensor(lengths, dtype=torch.int32), splits

    return inputs


def _slots_by_head(pages):
    """(pages, page, heads, width) of a cache whose pages hold one head after the other."""
    return pages.transpose(1, 2).contiguous().transpose(1, 2)


def _longest_run(page, lengths, splits):
    """Keys of the longest share, where each sequence's pages are shared out evenly."""
    pages = [-(-n // page) for n in lengths.tolist()]
    return max([min(n, -(-p // splits) * page) for n, p in zip(lengths.tolist(), pages, strict=True)], default=0)


def _partial_bytes(q, splits):
    """What goes along with keys and values: queries, and the partial results of each split, there and back."""
    batch, heads, width = q.shape
    return batch * heads * (splits * (2 * width + 8 * (width + 2) + 16) + 2 * width)


def _least_of_paged(q, k_pages, v_pages, table, lengths, splits):
    groups, width = k_pages.shape[2:]
    entries = 8 * table.numel() * groups * max(1, splits)
    return int(lengths.sum()) * groups * width * 4 + _partial_bytes(q, splits) + entries


def _least_of_a_program(q, k_pages, v_pages, table, lengths, splits):
    page, groups, width = k_pages.shape[1:]
    share = _longest_run(page, lengths, splits)
    return share * width * 4 + _partial_bytes(q[:1, : q.shape[1] // groups], splits) + 8 * (share // page + 16)


PAGED_DECODE = Exercise(
    name="paged-decode",
    lab=LAB,
    rung="triton",
    entry="paged_decode",
    title="One new token against a paged cache, in splits",
    form="kernel",
    made_of="triton",
    reference=_paged_decode,
    scale=_paged_scale,
    low="bfloat16",
    cases=(
        Case("two sequences, three splits", _paged((100, 37), 8, 2, 32, 3), seen=True),
        Case("an empty sequence, and one shorter than its splits", _paged((0, 5, 130), 4, 1, 32, 4), seen=True),
        Case("one split", _paged((70, 16), 4, 1, 32, 1)),
        Case("seven splits, and pages that they do not divide", _paged((16 * 15 + 1, 90), 4, 1, 32, 7)),
        Case("25 pages for nine splits", _paged((16 * 25 - 3,), 1, 1, 32, 9)),
        Case("exactly one page", _paged((16,), 4, 2, 32, 2)),
        Case("a single key", _paged((1, 1), 6, 2, 32, 2), exact=True),
        Case("each head has keys of its own", _paged((50,), 3, 3, 32, 2)),
        Case("groups of five", _paged((60,), 10, 2, 32, 3)),
        Case("larger pages", _paged((150, 31), 4, 1, 64, 3, page=32)),
        Case("nothing but empty sequences", _paged((0, 0), 4, 1, 32, 2)),
        Case("no sequence", _paged((), 4, 2, 32, 4)),
        Case("a table wider than any sequence needs", _paged((70,), 4, 1, 32, 3, wide=40)),
        Case("scores of several hundred", _paged((60, 20), 4, 1, 32, 2, size=14.0)),
        Case("outliers among queries and keys", _paged((90,), 8, 2, 32, 2), kind="outliers"),
        Case("keys and values in different layouts", _paged((70, 45), 4, 2, 32, 2, put=_slots_by_head)),
        Case("500 values around 300 that weigh the same", _paged((500,), 2, 1, 32, 2, size=0.1, above=300.0)),
        Case(
            "the last page of keys lies beyond element 2**31",
            _paged((35, 20), 4, 2, 32, 2, put=_far_tokens),
            memory_bytes=FAR_BYTES,
        ),
        Case("five sequences of up to 5,000", _paged((5000, 0, 4097, 33, 1600), 32, 8, 64, 7), mode="gpu"),
    ),
    limits=(
        Limit(
            "bytes",
            _least_of_paged,
            "too-many-bytes",
            "The kernels ask for {fact} bytes; {most} are enough where the query heads of a group share what is read "
            "of its keys and values, and nothing beyond a sequence's length is read.",
        ),
        Limit(
            "program_bytes",
            _least_of_a_program,
            "too-many-bytes",
            "One program asks for {fact} bytes; {most} are enough where each sequence's pages are shared out evenly "
            "among its splits.",
        ),
    ),
    hints=(
        "Three levels: page i of sequence b, the slot in the page, the key's position. Which of them decides whether a "
        "key counts, and which leads to its address? Then take a sequence with fewer pages than splits: what do the "
        "splits without a page hand over?",
        "Each program takes the pages from split · share to (split + 1) · share, with share = the sequence's pages "
        "divided by splits, rounded up. It hands over maximum, sum and an output that is not divided yet; without a "
        "key -inf, 0 and zeros. The second kernel rescales each with exp(m - M), M the largest maximum, adds them up, "
        "and divides once. A weight of 0 does not hide a NaN: load 0 for slots without a key.",
        "Partial: pages = cdiv(length, PAGE); for i from split · share to min(pages, (split + 1) · share): own = "
        "table[b, i] in 64 bits; position = i · PAGE + slot; k, v = load at own · page_stride + slot · slot_stride + "
        "group · head_stride where position < length, else 0; scores, maximum, sum and acc as before; store acc, m, s. "
        "Merge, for each head: m, s of all splits (-inf, 0 beyond); M = max(m), 0 where -inf; w = exp(m - M); store "
        "sum(w · acc) / sum(w · s), with 1 in place of a sum of 0.",
    ),
    hints_for={
        "nan": (
            "A slot that no token owns holds NaN here, and 0 · NaN is NaN. What do your loads give there?",
            "A split without a key has the maximum -inf, and a sequence without one has it in all its splits: "
            "subtract 0 in its place, and divide by 1 where the sum is 0.",
        ),
        "out-of-bounds": (
            "The table has entries that no sequence needs: they lead nowhere. How many pages has this sequence?",
            "Only entries before cdiv(length, PAGE) are pages. The product of a page's number and its stride may pass "
            "2³¹: compute it in 64 bits.",
        ),
    },
    seconds=20,
)


EXERCISES = (
    SOFTMAX_STATISTICS,
    CROSS_ENTROPY,
    TOP_K_GATE,
    CAUSAL_ATTENTION,
    GROUPED_ATTENTION,
    PAGED_DECODE,
)
