"""Conformance cases in Triton: what the interpreter must compute as a GPU does. fp32, fp16 and integers, never bf16."""

import numpy as np
import torch
import triton
import triton.language as tl
from case import F16, F32, Case, Tensors, integers, normal
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(
        out_ptr + offsets,
        tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask),
        mask=mask,
    )


def run_add(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    add_kernel[(triton.cdiv(out.numel(), 256),)](t["x"], t["y"], out, out.numel(), BLOCK=256)
    return {"out": out}


@triton.jit
def softmax_kernel(x_ptr, out_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + columns, mask=columns < cols, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * cols + columns, e / tl.sum(e, axis=0), mask=columns < cols)


def run_softmax(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    softmax_kernel[(out.shape[0],)](t["x"], out, out.shape[1], BLOCK=512)
    return {"out": out}


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        inner = k + tl.arange(0, BK)
        a = tl.load(a_ptr + rows[:, None] * K + inner, mask=(rows[:, None] < M) & (inner < K), other=0.0)
        b = tl.load(b_ptr + inner[:, None] * N + columns, mask=(inner[:, None] < K) & (columns < N), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(c_ptr + rows[:, None] * N + columns, total, mask=(rows[:, None] < M) & (columns < N))


def run_matmul(t: Tensors) -> Tensors:
    (m, k), n = t["a"].shape, t["b"].shape[1]
    out = torch.empty(m, n, device=t["a"].device)
    matmul_kernel[(triton.cdiv(m, 32), triton.cdiv(n, 32))](t["a"], t["b"], out, m, n, k, BM=32, BN=32, BK=32)
    return {"out": out}


@triton.jit
def layernorm_kernel(x_ptr, w_ptr, b_ptr, out_ptr, cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < cols
    x = tl.load(x_ptr + row * cols + columns, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, x - tl.sum(x, axis=0) / cols, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / cols + eps)
    w, b = tl.load(w_ptr + columns, mask=mask), tl.load(b_ptr + columns, mask=mask)
    tl.store(out_ptr + row * cols + columns, (centred * scale * w + b).to(tl.float16), mask=mask)


def run_layernorm(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    layernorm_kernel[(out.shape[0],)](t["x"], t["w"], t["b"], out, out.shape[1], 1e-5, BLOCK=512)
    return {"out": out}


def layernorm_reference(t: Tensors) -> Tensors:
    x, w, b = t["x"].double(), t["w"].double(), t["b"].double()
    return {"out": torch.nn.functional.layer_norm(x, x.shape[1:], w, b, 1e-5)}


@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    inner = 0.7978845608 * (x + 0.044715 * x * x * x)
    tl.store(out_ptr + offsets, x * tl.sigmoid(2.0 * inner), mask=offsets < n)


def run_gelu(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    gelu_kernel[(triton.cdiv(out.numel(), 512),)](t["x"], out, out.numel(), BLOCK=512)
    return {"out": out}


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    keep = tl.rand(seed, offsets) > p
    tl.store(out_ptr + offsets, tl.where(keep, x / (1 - p), 0.0), mask=offsets < n)


def run_dropout(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    dropout_kernel[(triton.cdiv(out.numel(), 256),)](t["x"], out, out.numel(), 0.3, 1234, BLOCK=256)
    return {"out": out}


def philox(seed: int, offsets: np.ndarray) -> np.ndarray:
    """First word of Philox-4x32-10 (Salmon et al., SC 2011) for counters (offset, 0, 0, 0), as float32 in [0, 1)."""
    c = [offsets.astype(np.uint64), *(np.zeros(offsets.shape, np.uint64) for _ in range(3))]
    key, low = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)], np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ key[0], b & low, (a >> np.uint64(32)) ^ c[3] ^ key[1], a & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    signed = c[0].astype(np.uint32).view(np.int32)
    return np.where(signed < 0, -signed - 1, signed).astype(np.float32) * np.float32(4.6566127342e-10)


def dropout_reference(t: Tensors) -> Tensors:
    x = t["x"].double()
    keep = torch.from_numpy(philox(1234, np.arange(x.numel())) > np.float32(0.3))
    return {"out": torch.where(keep, x / 0.7, 0.0)}


@triton.jit
def cumsum_kernel(x_ptr, out_ptr, COLS: tl.constexpr):
    offsets = tl.program_id(0) * COLS + tl.arange(0, COLS)
    tl.store(out_ptr + offsets, tl.cumsum(tl.load(x_ptr + offsets), axis=0))


def run_cumsum(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    cumsum_kernel[(out.shape[0],)](t["x"], out, COLS=out.shape[1])
    return {"out": out}


@triton.jit
def argmax_kernel(x_ptr, out_ptr, most_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + columns, mask=columns < cols, other=-float("inf"))
    tl.store(out_ptr + row, tl.argmax(x, axis=0))
    tl.store(most_ptr + row, tl.max(x, axis=0))


def run_argmax(t: Tensors) -> Tensors:
    rows, cols = t["x"].shape
    where = torch.empty(rows, dtype=torch.int32, device=t["x"].device)
    most = torch.empty(rows, device=t["x"].device)
    argmax_kernel[(rows,)](t["x"], where, most, cols, BLOCK=256)
    return {"where": where, "most": most}


@triton.jit
def sort_kernel(x_ptr, out_ptr, COLS: tl.constexpr):
    offsets = tl.program_id(0) * COLS + tl.arange(0, COLS)
    tl.store(out_ptr + offsets, tl.sort(tl.load(x_ptr + offsets), descending=True))


def run_sort(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    sort_kernel[(out.shape[0],)](t["x"], out, COLS=out.shape[1])
    return {"out": out}


@triton.jit
def gather_kernel(x_ptr, index_ptr, out_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)
    tl.store(out_ptr + offsets, tl.gather(tl.load(x_ptr + offsets), tl.load(index_ptr + offsets), axis=1))


def run_gather(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    gather_kernel[(1,)](t["x"], t["index"], out, ROWS=out.shape[0], COLS=out.shape[1])
    return {"out": out}


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, cols, BR: tl.constexpr, BC: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    x = tl.load(x_ptr + r[:, None] * cols + c, mask=(r[:, None] < rows) & (c < cols))
    tl.store(out_ptr + c[:, None] * rows + r, tl.trans(x), mask=(c[:, None] < cols) & (r < rows))


def run_transpose(t: Tensors) -> Tensors:
    rows, cols = t["x"].shape
    out = torch.empty(cols, rows, device=t["x"].device, dtype=t["x"].dtype)
    transpose_kernel[(triton.cdiv(rows, 32), triton.cdiv(cols, 16))](t["x"], out, rows, cols, BR=32, BC=16)
    return {"out": out}


@triton.jit
def atomics_kernel(x_ptr, counts_ptr, most_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    tl.atomic_add(counts_ptr + x, 1, mask=offsets < n)
    tl.atomic_max(most_ptr, tl.max(x, axis=0))


def run_atomics(t: Tensors) -> Tensors:
    counts = torch.zeros(64, dtype=torch.int32, device=t["x"].device)
    most = torch.zeros(1, dtype=torch.int32, device=t["x"].device)
    atomics_kernel[(triton.cdiv(t["x"].numel(), 128),)](t["x"], counts, most, t["x"].numel(), BLOCK=128)
    return {"counts": counts, "most": most}


@triton.jit
def recurrence(a, x, b, y):
    return a * b, x * b + y


@triton.jit
def scan_kernel(a_ptr, x_ptr, out_ptr, COLS: tl.constexpr):
    offsets = tl.program_id(0) * COLS + tl.arange(0, COLS)
    _, h = tl.associative_scan((tl.load(a_ptr + offsets), tl.load(x_ptr + offsets)), 0, recurrence)
    tl.store(out_ptr + offsets, h)


def run_scan(t: Tensors) -> Tensors:
    out = torch.empty_like(t["x"])
    scan_kernel[(out.shape[0],)](t["a"], t["x"], out, COLS=out.shape[1])
    return {"out": out}


def scan_reference(t: Tensors) -> Tensors:
    a, x = t["a"].double(), t["x"].double()
    h, out = torch.zeros(x.shape[0], dtype=torch.float64), []
    for k in range(x.shape[1]):
        h = a[:, k] * h + x[:, k]
        out.append(h)
    return {"out": torch.stack(out, 1)}


@triton.jit
def attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, n, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    rows, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + d, mask=rows[:, None] < n, other=0.0)
    most, total = tl.full((BM,), -float("inf"), tl.float32), tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    for start in range(0, n, BN):
        keys = start + tl.arange(0, BN)
        k = tl.load(k_ptr + keys[:, None] * D + d, mask=keys[:, None] < n, other=0.0)
        v = tl.load(v_ptr + keys[:, None] * D + d, mask=keys[:, None] < n, other=0.0)
        scores = tl.where(keys[None, :] <= rows[:, None], tl.dot(q, tl.trans(k)) * scale, -1e30)
        higher = tl.maximum(most, tl.max(scores, axis=1))
        p, shrink = tl.exp(scores - higher[:, None]), tl.exp(most - higher)
        total = total * shrink + tl.sum(p, axis=1)
        out = out * shrink[:, None] + tl.dot(p.to(tl.float16), v)
        most = higher
    tl.store(out_ptr + rows[:, None] * D + d, (out / total[:, None]).to(tl.float16), mask=rows[:, None] < n)


def run_attention(t: Tensors) -> Tensors:
    out = torch.empty_like(t["q"])
    n, d = out.shape
    attention_kernel[(triton.cdiv(n, 32),)](t["q"], t["k"], t["v"], out, n, d**-0.5, BM=32, BN=32, D=d)
    return {"out": out}


def attention_reference(t: Tensors) -> Tensors:
    q, k, v = (t[name].double() for name in "qkv")
    return {"out": torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]}


@triton.jit
def column_sums_kernel(x, out_ptr, rows, cols, BR: tl.constexpr, BC: tl.constexpr):
    total = tl.zeros((BC,), tl.float32)
    for row in range(0, rows, BR):
        total += tl.sum(x.load([row, tl.program_id(0) * BC]), axis=0)  # zero beyond the tensor's edge
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    tl.store(out_ptr + columns, total, mask=columns < cols)


def run_column_sums(t: Tensors) -> Tensors:
    rows, cols = t["x"].shape
    out = torch.empty(cols, device=t["x"].device)
    x = TensorDescriptor.from_tensor(t["x"], [16, 32])
    column_sums_kernel[(triton.cdiv(cols, 32),)](x, out, rows, cols, BR=16, BC=32)
    return {"out": out}


def gelu_reference(t: Tensors) -> Tensors:
    return {"out": torch.nn.functional.gelu(t["x"].double(), approximate="tanh")}


def atomics_reference(t: Tensors) -> Tensors:
    return {"counts": torch.bincount(t["x"].long(), minlength=64), "most": t["x"].max()[None]}


def argmax_reference(t: Tensors) -> Tensors:
    most = t["x"].max(1)
    return {"where": most.indices, "most": most.values}


def one(*shape: int):
    return lambda g: {"x": normal(g, *shape)}


CASES = [
    Case(
        "triton.add",
        "triton",
        lambda g: {"x": normal(g, 1000), "y": normal(g, 1000)},
        run_add,
        lambda t: {"out": t["x"] + t["y"]},
        0,
    ),
    Case(
        "triton.softmax",
        "triton",
        one(13, 300),
        run_softmax,
        lambda t: {"out": t["x"].double().softmax(1)},
        F32,
    ),
    Case(
        "triton.matmul_fp16",
        "triton",
        lambda g: {
            "a": normal(g, 70, 100, dtype=torch.float16),
            "b": normal(g, 100, 50, dtype=torch.float16),
        },
        run_matmul,
        lambda t: {"out": t["a"].double() @ t["b"].double()},
        F32,
    ),
    Case(
        "triton.matmul_fp32",
        "triton",
        lambda g: {"a": normal(g, 50, 64), "b": normal(g, 64, 40)},
        run_matmul,
        lambda t: {"out": t["a"].double() @ t["b"].double()},
        F32,
    ),
    Case(
        "triton.layernorm_fp16",
        "triton",
        lambda g: {
            "x": normal(g, 9, 400, dtype=torch.float16),
            "w": normal(g, 400),
            "b": normal(g, 400),
        },
        run_layernorm,
        layernorm_reference,
        F16,
    ),
    Case("triton.gelu", "triton", one(2000), run_gelu, gelu_reference, F32),
    Case("triton.dropout", "triton", one(2000), run_dropout, dropout_reference, F32),
    Case("triton.cumsum", "triton", one(8, 256), run_cumsum, lambda t: {"out": t["x"].double().cumsum(1)}, F32),
    Case("triton.argmax", "triton", one(30, 200), run_argmax, argmax_reference, 0),
    Case(
        "triton.sort",
        "triton",
        one(6, 128),
        run_sort,
        lambda t: {"out": t["x"].sort(1, descending=True).values},
        0,
    ),
    Case(
        "triton.gather",
        "triton",
        lambda g: {"x": normal(g, 16, 64), "index": integers(g, 64, 16, 64)},
        run_gather,
        lambda t: {"out": t["x"].gather(1, t["index"].long())},
        0,
    ),
    Case(
        "triton.transpose",
        "triton",
        lambda g: {"x": normal(g, 50, 37, dtype=torch.float16)},
        run_transpose,
        lambda t: {"out": t["x"].T},
        0,
    ),
    Case("triton.atomics", "triton", lambda g: {"x": integers(g, 60, 1000)}, run_atomics, atomics_reference, 0),
    Case(
        "triton.associative_scan",
        "triton",
        lambda g: {"a": torch.rand(8, 128, generator=g), "x": normal(g, 8, 128)},
        run_scan,
        scan_reference,
        F32,
    ),
    Case(
        "triton.attention_fp16",
        "triton",
        lambda g: {name: normal(g, 90, 32, dtype=torch.float16) for name in "qkv"},
        run_attention,
        attention_reference,
        F16,
    ),
    Case(
        "triton.column_sums",
        "triton",
        one(75, 72),
        run_column_sums,
        lambda t: {"out": t["x"].double().sum(0)},
        F32,
    ),
]
