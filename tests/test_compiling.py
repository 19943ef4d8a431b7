"""torch.compile stage by stage, for a GPU on paper; and what it refuses, in sentences."""

import math

import pytest
import torch
import torch.nn.functional as F

from helpers import compiling, ledger, machine, paper, records, refusals, reveal, source


def meta(*shape, dtype=torch.float16, **how):
    return torch.empty(*shape, dtype=dtype, device="meta", **how)


def layer(x, w, b):
    h = x.float()
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True))).to(x.dtype)
    return x + F.gelu(F.linear(h, w, b), approximate="tanh")


SHAPES = (64, 128), (128, 128), (128,)
on_paper = pytest.mark.skipif(machine.gpu(), reason="in GPU mode code is written for the card that is here")


@on_paper
@pytest.mark.parametrize("arch", paper.ARCHS)
def test_inductor_writes_triton_for_a_card_that_is_not_here(arch):
    made = reveal.inductor(layer, *(meta(*shape) for shape in SHAPES), arch=arch)
    assert [k[:10] for k in made.kernels] == ["triton_per", "triton_poi"]
    assert made.extern_calls == ["extern_kernels.addmm"] and f"cc={arch[3:]}" in made.code
    first, product, last = ledger.compiled(made.code)
    assert (product.kind, first.writes, last.writes) == ("library", 2 * 64 * 128, 2 * 64 * 128)


@on_paper
def test_paper_leaves_nothing_behind():
    reveal.inductor(layer, *(meta(*shape) for shape in SHAPES), arch="sm_80")
    assert not torch.cuda.is_available()
    made = reveal.inductor(layer, *(torch.randn(*shape) for shape in SHAPES))
    assert made.kernels and all(kernel.startswith("cpp_") for kernel in made.kernels)
    with pytest.raises(ValueError, match="no card of sm_70 is known on paper"), paper.gpu("sm_70"):
        pass


@on_paper
def test_paper_tensors_keep_strides_offset_and_gradient():
    x = torch.zeros(9, 6, requires_grad=True)
    like, nested = paper.like((x[1:, ::2].detach().t(), {"w": x}))
    assert (like.shape, like.stride(), like.storage_offset()) == ((3, 8), (2, 6), 6)
    assert like.is_cuda and nested["w"].requires_grad and not like.requires_grad
    assert paper.like((like,))[0] is like and paper.like((x,), device="cpu")[0].device.type == "cpu"


@on_paper
def test_views_indices_and_constants_are_compiled_on_paper():
    def views(x, i):
        moved = x[1:, None, :-1].flatten(1)[..., ::2] * 2 + x.t().contiguous()[i, 0] + torch.full_like(x[0, :1], 3.0)
        return torch.where(torch.arange(16, device=x.device) // 4 == i, moved, 0.0)

    made = reveal.inductor(views, meta(33, 33), meta(16, dtype=torch.int64), arch="sm_90")
    assert len(made.kernels) == 1 and not made.extern_calls


@on_paper
def test_the_width_of_accesses_follows_alignment():
    def act(x):
        return torch.relu(x) * 2

    def first_row_off(x):
        return act(x[1:])

    def first_element_off(x):
        return act(x.flatten()[1:])

    x = meta(256, 256)
    asked = (act, x), (first_row_off, x), (first_element_off, x), (act, meta(256 * 256 + 1)[1:])
    made = [reveal.inductor(fn, tensor, arch="sm_90") for fn, tensor in asked]
    loads = [
        {op for op in reveal.instructions(kernel.ptx) if op.startswith("ld.global")}
        for kernel in reveal.machine_code(*made)
    ]
    assert loads == [{"ld.global.v4.b32"}, {"ld.global.v4.b32"}, {"ld.global.b16"}, {"ld.global.b16"}]


OPERATORS = ["float", "pow", "mean", "rsqrt", "mul", "to", "linear", "gelu", "add"]


def test_the_first_two_stages_as_tables():
    seen = compiling.captured(layer, *(meta(*shape) for shape in SHAPES))
    assert [row["operator"] for row in seen.dynamo] == OPERATORS
    assert seen.dynamo[-1]["from the line"].startswith("return x + F.gelu(")
    assert [row["argument"] for row in seen.guards] == ["b", "w", "x"]
    assert "size=[64, 128]" in seen.guards[2]["assumed"] and seen.checks > len(seen.guards)
    assert {"addmm", "tanh", "rsqrt"} < set(seen.forward) and "gelu" not in seen.forward
    assert seen.backward == seen.saved == []


def test_the_cheapest_cut_keeps_less_than_every_formula_asks_for():
    shapes = [meta(*shape, requires_grad=True) for shape in SHAPES]
    cuts = [compiling.captured(layer, *shapes, keep=keep) for keep in ("all", "min-cut")]
    most, least = (sum(n for _, n in cut.saved) for cut in cuts)
    assert 0 < least < most and len(cuts[0].backward) < len(cuts[1].backward)


@on_paper
def test_nodes_groups_and_reasons():
    found = compiling.fused(layer, *(meta(*shape) for shape in SHAPES), arch="sm_90")
    assert [node.kind for node in found.nodes] == ["reduction", "pointwise", "library", "pointwise"]
    assert found.groups == (("buf0", "buf1"), ("buf2",), ("buf3",))
    assert found.apart == ["1 and 3 stay apart: intermediate nodes between node1 & node2"]
    assert found.rows()[0]["over"] == "64, along 128" and [row["group"] for row in found.rows()] == [1, 1, 2, 3]
    assert [launch.kind for launch in found.launches] == ["Triton", "library", "Triton"]


@on_paper
def test_candidates_of_a_product_and_the_code_with_one_of_them():
    def product(x, w):
        return torch.relu(x @ w)

    args = meta(1024, 512), meta(512, 256)
    listed, made = compiling.candidates(product, *args, take=lambda c: c.settings.get("BLOCK_M") == 64, arch="sm_90")
    assert listed[0].source == "library" and {c.source for c in listed[1:]} == {"template"} and len(listed) > 10
    assert all(math.isnan(c.us) and c.settings["num_warps"] for c in listed[1:])
    assert [k[:10] for k in made.kernels] == ["triton_tem"] and not made.extern_calls
    (launch,) = ledger.compiled(made.code)
    assert launch.reads == 2 * (1024 * 512 + 512 * 256) and launch.writes == 2 * 1024 * 256
    with pytest.raises(refusals.CannotCompile, match="none of the .* candidates was taken"):
        compiling.candidates(product, *args, take=lambda c: False, arch="sm_90")


def test_tuned_compiles_with_an_empty_cache_and_tells_what_it_took():
    def act(x):
        return torch.relu(x) * 1.75

    x = torch.randn(8, 8, device=machine.device())
    made = compiling.tuned(act, x, mode="default")
    assert torch.allclose(made.call(x), act(x)) and made.seconds > 0 and "def call(" in made.code
    assert made.candidates == ()


# ---- refusals ------------------------------------------------------------------------------------------------------


def branches(x):
    x = x * 2
    if x.sum() > 0:
        return x
    return x + 1


def test_a_function_that_cannot_be_captured_is_refused_with_its_line_and_a_mend():
    with pytest.raises(refusals.CannotCompile) as refused:
        compiling.captured(branches, torch.ones(3))
    assert "branches cannot be captured in one graph at the line `if x.sum() > 0:`" in refused.value.sentence
    assert "torch.cond" in refused.value.mend and "\nMend: " in str(refused.value)


def test_shapes_that_do_not_fit_are_told_with_the_operators_own_words():
    with pytest.raises(refusals.CannotCompile, match="at the line `.*x @ w.*RuntimeError.'a and b must have same"):
        compiling.captured(lambda x, w: x @ w, torch.ones(3, 4), torch.ones(5, 6))


def test_sizes_without_end_are_refused_and_never_run_uncompiled():

    torch._dynamo.reset()
    fn = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    with pytest.raises(refusals.CannotCompile, match="twice was compiled 8 times"), refusals.strictly("twice"):
        for length in range(2, 20):
            fn(torch.randn(length))
    torch._dynamo.reset()


def test_a_backend_that_fails_is_never_replaced_by_eager():
    def backend(graph, inputs):
        raise RuntimeError("no such instruction")

    torch._dynamo.reset()
    fn = torch.compile(lambda x: x - 3, backend=backend)
    refused = pytest.raises(refusals.CannotCompile, match="failed on minus. RuntimeError: no such instruction")
    with torch._dynamo.config.patch(suppress_errors=True), refused, refusals.strictly("minus"):
        fn(torch.ones(3))
    torch._dynamo.reset()


def test_a_compiled_function_is_not_compiled_again_for_being_called_strictly():
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    fn = torch.compile(lambda x: x - 4, backend=backend)
    fn(torch.ones(3))
    with refusals.strictly():
        fn(torch.ones(3))
    assert len(seen) == 1


def test_no_cpp_compiler_is_a_matter_of_the_machine():
    settings = {"cpp.cxx": (None, "no-such-compiler"), "fx_graph_cache": False}
    refused = pytest.raises(machine.NotReady, match="There is no C\\+\\+ compiler")
    with torch._inductor.config.patch(settings), refused as missing:
        reveal.inductor(lambda x: x * 2 + 0.3, torch.randn(5, 3))
    assert "g++" in missing.value.mend


def test_torch_compile_switched_off_is_said(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    refused = pytest.raises(machine.NotReady, match="TORCH_COMPILE_DISABLE=1 switches torch.compile off")
    with refused, refusals.strictly():
        pass


@on_paper
def test_paper_writes_what_an_h200_wrote():
    chain, softmax = (source.load("03_torch_compile", name) for name in ("chain", "softmax"))
    x, s = meta(16384, 4096), meta(4096)
    recorded = records.load()["texts"]
    for key, fn, args in (("chain", chain, (x, x.clone(), s)), ("softmax", softmax, (x, s))):
        there = ledger.kernels("\n".join(recorded[f"compile.code.{key}"]))
        assert ledger.kernels(reveal.inductor(fn, *args, arch="sm_90").code) == there, key
