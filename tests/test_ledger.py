"""Bytes launch by launch: what the dispatcher sees in eager mode, and what Inductor's wrapper says."""

import pytest
import torch
import torch.nn.functional as F

from helpers import ledger, reveal, traffic
from helpers.exercises import l04_tvm_xla


def paper(*shape, dtype=torch.float16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def linear_gelu(x, w, b):
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def test_eager_counts_every_operator_at_its_whole_size():
    x, s, h = paper(64, 32), paper(32), paper(64, 32)
    launches = ledger.eager(lambda x, s: torch.relu(x * s), x, s)
    assert [launch.name for launch in launches] == ["mul", "relu"]
    by_hand = traffic.least(reads=(x, s), writes=(h,)) + traffic.least(reads=(h,), writes=(h,))
    assert ledger.total(launches) == by_hand


def test_a_view_launches_nothing_and_a_change_in_place_does():
    x = paper(64, 32)
    assert ledger.eager(lambda x: x.t().view(8, 4, 64)[1:], x) == []
    (change,) = ledger.eager(lambda x: x.mul_(2), x)
    assert (change.reads, change.writes) == (64 * 32 * 2, 64 * 32 * 2)


def test_a_reshape_that_has_to_copy_is_counted():
    (copy,) = ledger.eager(lambda x: x.t().reshape(-1), paper(64, 32))
    assert copy.name == "clone" and copy.reads == copy.writes == 64 * 32 * 2


def test_compiled_tells_library_calls_from_generated_kernels():
    x, w, b = torch.randn(64, 32).half(), torch.randn(48, 32).half(), torch.randn(48).half()
    # on a GPU the same wrapper launches Triton: this test pins the C++ one
    code = reveal.inductor(linear_gelu, x, w, b).code
    product, gelu = ledger.compiled(code)
    assert (product.kind, product.name) == ("library", "extern_kernels.addmm")
    assert product.reads == 2 * (64 * 32 + 48 * 32 + 48) and product.writes == 2 * 64 * 48
    assert gelu.kind == "C++" and gelu.reads == gelu.writes == 2 * 64 * 48
    assert ledger.compiled(ledger.tidy(code)) == ledger.compiled(code)
    assert "loadu" in ledger.kernels(code) and "extern_kernels.addmm" in ledger.wrapper(code)


def test_graphs_after_a_break_are_counted_one_after_another():
    def broken(x):
        h = x * 2
        torch._dynamo.graph_break()
        return torch.relu(h + 1)

    first, second = ledger.compiled(reveal.inductor(broken, torch.randn(64, 32)).code)
    assert first.reads == first.writes == second.reads == second.writes == 64 * 32 * 4


TRITON = """
# AOT ID: ['0_inference']
triton_poi_fused_mul_0 = async_compile.triton('triton_poi_fused_mul_0', '''
@triton.jit
def triton_poi_fused_mul_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + (x2), None).to(tl.float32)
    tl.store(out_ptr0 + (x2), tmp0, None)
''', device_str='cuda')
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cuda((64, 32), (32, 1), torch.float16)
            # Topologically Sorted Source Nodes: [mul], Original ATen: [aten.mul]
            raw_stream0 = get_raw_stream(0)
            triton_poi_fused_mul_0.run(arg0_1, buf0, 2048, stream=raw_stream0)
            buf1 = empty_strided_cuda((64, SIDE), (SIDE, 1), torch.float32)
            # Topologically Sorted Source Nodes: [mm], Original ATen: [aten.view, aten.mm]
            extern_kernels.mm(reinterpret_tensor(buf0, (64, 32), (32, 1), 0), arg1_1, out=buf1)
            # Topologically Sorted Source Nodes: [topk], Original ATen: [aten.topk]
            buf2 = torch.ops.aten.topk.default(buf1, 5)
        return (buf2, )

# arg0_1 = rand_strided((64, 32), (32, 1), device='cuda:0', dtype=torch.float16)
# arg1_1 = rand_strided((32, SIDE), (SIDE, 1), device='cuda:0', dtype=torch.float16)
"""


def test_triton_wrappers_are_read():
    scale, product, top = ledger.compiled(TRITON.replace("SIDE", "48"))
    assert (scale.kind, scale.operators, scale.reads, scale.writes) == ("Triton", ("mul",), 4096, 4096)
    assert (product.kind, product.reads, product.writes) == ("library", 4096 + 32 * 48 * 2, 64 * 48 * 4)
    assert (top.kind, top.name, top.reads) == ("ATen", "aten.topk.default", None)
    with pytest.raises(ValueError, match="does not tell the bytes of aten.topk.default"):
        ledger.total([scale, product, top])


def moves(name, lines, arguments):
    """TRITON with another first kernel."""
    body = "\n".join(f"    {line}" for line in lines)
    kernel = f"@triton.jit\ndef triton_poi_fused_{name}_0({arguments}, xnumel, XBLOCK : tl.constexpr):\n{body}\n"
    start, end = TRITON.index("@triton.jit"), TRITON.index("''', device_str")
    return (TRITON[:start] + kernel + TRITON[end:]).replace("fused_mul_0", f"fused_{name}_0").replace("SIDE", "48")


def test_a_kernel_that_only_moves_data_is_a_copy_and_what_it_leaves_a_round_trip():
    load, store = "tmp0 = tl.load(in_ptr0 + (x2), None).to(tl.float32)", "tl.store(out_ptr0 + (x2), tmp0, None)"
    copy, product, _ = ledger.compiled(moves("clone", [load, store], "in_ptr0, out_ptr0"))
    assert copy.copies and not product.copies and (copy.sources, copy.targets) == (("arg0_1",), ("buf0",))
    assert product.sources == ("buf0", "arg1_1") and product.targets == ("buf1",)
    assert ledger.round_trips([copy, product]) == {"buf0": ("triton_poi_fused_clone_0", "extern_kernels.mm")}
    scaled = [load, "tmp1 = tmp0 * 2.0", "tl.store(out_ptr0 + (x2), tmp1, None)"]
    carrying, *_ = ledger.compiled(moves("clone_mul", scaled, "in_ptr0, out_ptr0"))
    assert not carrying.copies
    (clone,) = ledger.eager(lambda x: x.t().contiguous(), paper(4, 8))
    assert clone.copies


def test_a_copy_is_told_from_a_kernel_that_computes_on_a_cpu_too():
    def heads(x):
        return x.view(4, 16, 4, 16).transpose(1, 2)

    x, y = torch.randn(64, 64), torch.randn(64, 64)
    alone = ledger.compiled(reveal.inductor(lambda x, y: heads(x).reshape(64, 64) @ y, x, y, run=False).code)
    riding = ledger.compiled(
        reveal.inductor(lambda x, y: torch.relu(heads(x)).reshape(64, 64) @ y, x, y, run=False).code
    )
    assert [launch.copies for launch in alone] == [True, False] and not any(launch.copies for launch in riding)
    assert list(ledger.round_trips(alone)) == ["buf0"] == list(ledger.round_trips(riding))


def test_a_kernel_of_the_readers_is_a_launch_that_does_not_tell_its_bytes():
    text = TRITON.replace("raw_stream0 = get_raw_stream(0)", "softmax_row_0.run(arg0_1, buf0, 64, stream=raw_stream0)")
    own, *rest = ledger.compiled(text.replace("SIDE", "48"))
    assert (own.kind, own.name, own.reads) == ("own", "softmax_row_0", None) and len(rest) == 3


def test_a_symbolic_shape_leaves_the_bytes_open():
    _, product, _ = ledger.compiled(TRITON.replace("SIDE", "s0"))
    assert product.reads is None and product.writes is None


def test_text_without_a_wrapper_is_refused():
    with pytest.raises(ValueError, match="no wrapper"):
        ledger.compiled("(compile.code.chain: not recorded yet)")


HLO = """HloModule jit_f, is_scheduled=true

%fused_gelu (p: f16[64,32]) -> f16[64,32] {
  %p = f16[64,32]{1,0} parameter(0)
  %c = f16[] constant(0.5)
  %half = f16[64,32]{1,0} broadcast(%c), dimensions={}
  %t = f16[64,32]{1,0} tanh(%p)
  ROOT %m = f16[64,32]{1,0} multiply(%half, %t)
}

%group (a: f16[64,16], b: f16[32,16]) -> f16[64,32] {
  %a = f16[64,16]{1,0} parameter(0)
  %b = f16[32,16]{1,0} parameter(1)
  %call.1 = (f16[64,32]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"epilogue":"BIAS_GELU"}}
  %first = f16[64,32]{1,0} get-tuple-element(%call.1), index=0
  ROOT %gelu = f16[64,32]{1,0} fusion(%first), kind=kLoop, calls=%fused_gelu
}

ENTRY %main (x: f16[64,16], w: f16[32,16]) -> f16[64,32] {
  %x = f16[64,16]{1,0} parameter(0)
  %w = f16[32,16]{1,0} parameter(1)
  ROOT %graph = f16[64,32]{1,0} call(%x, %w), to_apply=%group
}
"""


def test_an_optimised_hlo_module_is_read_launch_by_launch():
    call, gelu = ledger.xla(HLO)  # what becomes one CUDA graph is still two launches
    assert call.kind == "library" and call.name == "cublas lt matmul, epilogue BIAS_GELU"
    assert (call.reads, call.writes) == (2 * (64 * 16 + 32 * 16), 2 * 64 * 32)  # the workspace is nobody's traffic
    assert (gelu.kind, gelu.operators) == ("XLA", ("tanh", "multiply"))
    assert gelu.reads == gelu.writes == 2 * 64 * 32
    with pytest.raises(ValueError, match="no HLO module"):
        ledger.xla("")


def test_hlo_before_optimisation_counts_every_operator():
    text = """HloModule jit_f

ENTRY main.1 {
  x.1 = f32[8,4]{1,0} parameter(0)
  transpose.1 = f32[4,8]{0,1} transpose(x.1), dimensions={1,0}
  ROOT add.1 = f32[4,8]{0,1} add(transpose.1, transpose.1)
}
"""
    turned, added = ledger.xla(text)
    assert turned.copies and not added.copies
    assert (turned.reads, turned.writes, added.reads, added.writes) == (128, 128, 128, 128)


SLICED = """HloModule jit_f

%fused (p: f16[100,8], q: f16[6,8], n: s32[5]) -> f16[5,8] {
  %p = f16[100,8]{1,0} parameter(0)
  %n = s32[5]{0} parameter(2)
  %rows = f16[5,8]{1,0} gather(%p, %n), offset_dims={1}
  %last = f16[2,8]{1,0} slice(%p), slice={[98:100], [0:8]}
  %q = f16[6,8]{1,0} parameter(1)
  %part = f16[5,8]{1,0} slice(%q), slice={[0:5], [0:8]}
  %turned = f16[8,6]{0,1} transpose(%q), dimensions={1,0}
  ROOT %sum = f16[5,8]{1,0} add(%rows, %part)
}

ENTRY %main (x: f16[100,8], y: f16[6,8], n: s32[5]) -> f16[5,8] {
  %x = f16[100,8]{1,0} parameter(0)
  %y = f16[6,8]{1,0} parameter(1)
  %k = s32[5]{0} parameter(2)
  ROOT %fusion = f16[5,8]{1,0} fusion(%x, %y, %k), kind=kLoop, calls=%fused
}
"""


def test_of_what_is_only_sliced_no_more_is_read_than_that():
    x, y, k, fusion = ledger.hlo(SLICED)
    assert [one.op for one in (x, y, k)] == ["parameter"] * 3 and x.arrays == (("f16", (100, 8)),)
    assert {one.name: one.operands for one in fusion.inside if one.op == "parameter"} == {
        "p": ("x",), "q": ("y",), "n": ("k",)
    }  # fmt: skip
    [launch] = ledger.carried_out([x, y, k, fusion])
    sliced, whole, numbers = 2 * 8 * (5 + 2), 2 * 8 * 6, 4 * 5  # of y a transposition needs all
    assert (launch.reads, launch.writes) == (sliced + whole + numbers, 2 * 8 * 5)
    assert ledger.xla(SLICED) == [launch]
    few = SLICED.replace("f16[100,8]", "f16[6,8]")  # slices that overlap read no more than there is
    assert ledger.xla(few)[0].reads == 2 * 6 * 8 + whole + numbers


def test_xlas_own_count_of_lab_04s_modules_is_this_one():
    """But for calls, which it does not see; a gather, of which it counts the whole table; and slices of what is read
    besides, which it counts as well."""
    differ = set()
    for name, module in l04_tvm_xla.modules().value.items():
        last, launches = ledger.hlo(module["hlo"])[-1], ledger.xla(module["hlo"])
        # a tuple holds pointers to its results: XLA counts each, and since JAX 0.11 one for all
        pointers = {8, 8 * len(last.arrays)} if last.op == "tuple" else {0}
        more = module["bytes"] - ledger.total(launches)
        if not any(one.kind == "library" for one in launches) and more not in pointers:
            differ.add(name)
    assert differ == {"rows of a table, by number", "each token with the one before"}


RELAX = """
@I.ir_module
class Module:
    @T.prim_func(private=True)
    def transpose(w: T.Buffer((32, 16), "float16"), out: T.Buffer((16, 32), "float16")):
        pass

    @R.function
    def main(x: R.Tensor((64, 16), dtype="float16"), w: R.Tensor((32, 16), dtype="float16")) -> R.Tensor((64, 32)):
        cls = Module
        with R.dataflow():
            lv = R.call_tir(cls.transpose, (w,), out_ty=R.Tensor((16, 32), dtype="float16"))
            lv_1: R.Tensor((64, 32), dtype="float32") = cls.fused_matmul_gelu(x, lv)
            gv: R.Tensor((64, 32), dtype="float32") = lv_1
            R.output(gv)
        return gv
"""


def test_a_relax_module_is_read_launch_by_launch():
    turned, product = ledger.relax(RELAX)
    assert turned.copies and (turned.reads, turned.writes) == (2 * 32 * 16, 2 * 32 * 16)
    assert product.name == "fused_matmul_gelu" and product.sources == ("x", "lv")
    assert (product.reads, product.writes) == (2 * (64 * 16 + 16 * 32), 4 * 64 * 32)
    with pytest.raises(ValueError, match="no Relax module"):
        ledger.relax("")
