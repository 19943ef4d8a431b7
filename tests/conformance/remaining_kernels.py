"""Conformance cases from lesson 10: bits that are moved, lanes that vote, blocks that wait for one another."""

import torch
from case import F16, F32, Case, Tensors, integers, normal

from helpers import source

decode_kv8, router = source.load("10_kernels", "decode_kv8"), source.load("10_kernels", "router")
gemv, rmsnorm = source.load("10_kernels", "gemv"), source.load("10_kernels", "rmsnorm")
four_bits = source.run(
    source.file(source.find("10_kernels")[0], "gemv_int4", "packed_int4", "unpacked_int4", "Int4"), "four_bits"
)


def row_and_matrix(N: int, K: int):
    def make(g: torch.Generator) -> Tensors:
        return {"x": normal(g, 1, K, dtype=torch.float16), "w": normal(g, N, K, dtype=torch.float16)}

    return make


def gemv_case(name: str, N: int, K: int) -> Case:
    return Case(
        name, "cuda", row_and_matrix(N, K), lambda t: {"y": gemv(t["x"], t["w"])},
        lambda t: {"y": t["x"].double() @ t["w"].double().T}, F16,
    )  # fmt: skip


def row_and_four_bits(g: torch.Generator) -> Tensors:
    packed = four_bits.packed_int4(normal(g, 70, 1152, dtype=torch.float16))
    return {"x": normal(g, 1, 1152, dtype=torch.float16), "words": packed.words, "scales": packed.scales}


def packed(t: Tensors):
    return four_bits.Int4(t["words"], t["scales"], 70)


def rmsnorm_reference(t: Tensors) -> Tensors:
    x = t["x"].double()
    return {"y": x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * t["w"].double()}


def cache(g: torch.Generator) -> Tensors:
    """Three sequences, one of them of one token and one of none; four query heads for each of two of the cache."""
    return {
        "q": normal(g, 3, 8, 128, dtype=torch.float16),
        "k": integers(g, 255, 3, 2, 90, 128, dtype=torch.uint8),
        "v": integers(g, 255, 3, 2, 90, 128, dtype=torch.uint8),
        "k_scale": torch.rand(3, 2, generator=g) / 64,
        "v_scale": torch.rand(3, 2, generator=g) / 64,
        "lengths": torch.tensor([90, 1, 0], dtype=torch.int32),
    }


def finite(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers of 8 bits; fp8's two NaN become 0."""
    return bits.where((bits & 0x7F != 0x7F) | (dtype == torch.int8), 0).view(dtype)


def run_decode(dtype: torch.dtype):
    def run(t: Tensors) -> Tensors:
        given = (finite(t[name], dtype) for name in "kv")
        return {"out": decode_kv8(t["q"], *given, t["k_scale"], t["v_scale"], t["lengths"])}

    return run


def decode_reference(dtype: torch.dtype):
    def reference(t: Tensors) -> Tensors:
        k, v = (
            (finite(t[n], dtype).double() * t[f"{n}_scale"].double()[:, :, None, None]).repeat_interleave(4, 1)
            for n in "kv"
        )
        out = torch.zeros(3, 8, 128, dtype=torch.float64)
        for i, n in enumerate(t["lengths"].tolist()):
            if n:
                weights = torch.softmax(t["q"][i].double()[:, None] @ k[i, :, :n].mT * 128**-0.5, -1)
                out[i] = (weights @ v[i, :, :n])[:, 0]
        return {"out": out}

    return reference


def router_reference(t: Tensors) -> Tensors:
    experts = torch.sort(t["logits"], dim=-1, descending=True, stable=True).indices[:, :8]
    return {
        "weights": torch.softmax(t["logits"].double(), -1).gather(1, experts),
        "experts": experts,
        "order": torch.argsort(experts.flatten(), stable=True),
        "counts": torch.bincount(experts.flatten(), minlength=64),
    }


def router_case(name: str, make, tolerance: float) -> Case:
    return Case(name, "cuda", make, lambda t: router(t["logits"], 8)._asdict(), router_reference, tolerance)


CASES: list[Case] = [
    *(
        Case(f"cuda.kv_decode_{name}", "cuda", cache, run_decode(dtype), decode_reference(dtype), F16)
        for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn))
    ),
    gemv_case("cuda.gemv_long_rows", 131, 2184),
    gemv_case("cuda.gemv_short_rows", 301, 120),
    Case(
        "cuda.gemv_int4",
        "cuda",
        row_and_four_bits,
        lambda t: {"y": four_bits.gemv_int4(t["x"], packed(t))},
        lambda t: {"y": t["x"].double() @ four_bits.unpacked_int4(packed(t)).double().T},
        F16,
    ),
    Case(
        "cuda.rmsnorm",
        "cuda",
        lambda g: {"x": normal(g, 9, 4104, dtype=torch.float16), "w": normal(g, 4104, dtype=torch.float16)},
        lambda t: {"y": rmsnorm(t["x"], t["w"], 1e-6)},
        rmsnorm_reference,
        F16,
    ),  # fmt: skip
    router_case("cuda.router", lambda g: {"logits": normal(g, 70, 64)}, F32),
    router_case("cuda.router_ties", lambda g: {"logits": integers(g, 3, 70, 64, dtype=torch.float32)}, F32),
]
