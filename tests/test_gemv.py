"""Lesson 10's one-row products, CUDA and Triton, and RMSNorm: values, what they refuse, what their code is made of."""

import re

import pytest
import torch

from helpers import machine, reveal, source

DEVICE = machine.device()
GEMV, gemv = (source.load("10_kernels", name) for name in ("GEMV", "gemv"))
triton_gemv = source.load("10_triton", "gemv")
on_cpu = pytest.mark.skipif(machine.gpu(), reason="the CPU runner's checks")

SHAPES = [(1, 8), (70, 128), (5, 16), (131, 200), (37, 264), (9, 1032), (1027, 2056), (3, 4096)]
"""(N, K): one row, rows shorter and longer than what a group of threads reads at once, rests of both."""
if machine.gpu():
    SHAPES += [(4096, 8192), (32768, 128), (4099, 14336)]


def operands(N, K, dtype=torch.float16):
    g = torch.Generator().manual_seed(N + K)
    return tuple(torch.randn(shape, generator=g).to(DEVICE, dtype) for shape in ((1, K), (N, K)))


def is_right(y, x, w) -> bool:
    """Whether y is x @ w.T but for fp32's rounding of the sums and y's own."""
    want, scale = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    slack = want.abs() * torch.finfo(y.dtype).eps + x.shape[1] * 2**-24 * scale + torch.finfo(y.dtype).tiny
    return ((y - want).abs() <= slack).all().item()


@pytest.mark.parametrize("product", [gemv, triton_gemv], ids=["cuda", "triton"])
def test_it_equals_float64(product):
    for N, K in SHAPES:
        x, w = operands(N, K)
        assert is_right(product(x, w), x, w), (N, K)


@pytest.mark.parametrize("product", [gemv, triton_gemv], ids=["cuda", "triton"])
def test_it_is_exact_on_small_integers(product):
    g = torch.Generator().manual_seed(1)
    x, w = (torch.randint(-3, 4, shape, generator=g).to(DEVICE, torch.float16) for shape in ((1, 264), (45, 264)))
    assert torch.equal(product(x, w).double(), x.double() @ w.double().T)


def test_every_size_serves_every_shape():
    for sizes in GEMV.sizes:
        for N, K in ((1, 8), (37, 264), (70, 2056)):
            x, w = operands(N, K)
            y = torch.full((1, N), float("nan"), device=DEVICE, dtype=torch.float16)
            GEMV.kernel(sizes)(*launch(sizes, x, w, y))
            assert is_right(y, x, w), (sizes, N, K)


def launch(sizes, x, w, y):
    """Grid, block and arguments of a launch of GEMV."""
    N, K = w.shape
    rows = sizes["THREADS"] // sizes["LANES"] * sizes["ROWS"]
    return (-(-N // rows),), (sizes["THREADS"],), (x, w, y, N, K)


@on_cpu
@pytest.mark.parametrize("sizes", GEMV.sizes, ids=str)
def test_it_neither_races_nor_leaves_its_arrays(sizes):
    x, w = operands(37, 2056)
    y = torch.full((1, 37), float("nan"), dtype=torch.float16)
    kernel, asked = GEMV.kernel(sizes), launch(sizes, x, w, y)
    kernel(*asked, order="shuffle", seed=1)
    assert is_right(y, x, w)
    assert not kernel.check_races(*asked)
    kernel.check_bounds(*asked)


@on_cpu
def test_a_piece_of_w_is_read_once_and_in_whole_sectors():
    x, w = operands(64, 2048)
    sizes = GEMV.sizes[0]
    trace = GEMV.kernel(sizes).trace(*launch(sizes, x, w, torch.empty(1, 64, dtype=torch.float16)), blocks=None)
    read = [a for a in trace if "__ldcs" in a.text]
    assert sum(a.bytes for a in read) == w.nbytes == 32 * sum(a.sectors for a in read)


@pytest.mark.parametrize("early", [False, True])
def test_a_chain_of_products_is_in_order(early):
    """Each reads what the one before wrote, which may not have ended when it begins."""
    g = torch.Generator().manual_seed(2)
    w = (torch.randn(256, 256, generator=g) / 16).to(DEVICE, torch.float16)
    x = torch.randn(1, 256, generator=g).to(DEVICE, torch.float16)
    step = want = x
    for _ in range(12):
        step, want = gemv(step, w, early=early), gemv(want, w).clone()
    assert torch.equal(step, want) and step.abs().max() > 0


def test_nothing_to_add_is_zero():
    x, w = torch.ones(1, 0, device=DEVICE).half(), torch.ones(5, 0, device=DEVICE).half()
    assert gemv(x, w).tolist() == [[0.0] * 5] == triton_gemv(x, w).tolist()
    assert gemv(torch.ones(1, 8, device=DEVICE).half(), torch.ones(0, 8, device=DEVICE).half()).shape == (1, 0)


def test_what_is_not_finite_stays_in_its_row():
    x, w = operands(40, 264)
    w[7, 100], w[8, 3] = float("nan"), float("inf")
    y = gemv(x, w)
    rest = torch.tensor([i not in (7, 8) for i in range(40)])
    assert y[0, 7].isnan() and y[0, 8].isinf() and y[0, rest].isfinite().all()


HALF = {"device": DEVICE, "dtype": torch.float16}
REFUSED = {
    "x as a matrix, .* it is 1 dimensions": lambda: (torch.ones(8, **HALF), torch.ones(4, 8, **HALF)),
    "w as a matrix, .* it is a list": lambda: (torch.ones(1, 8, **HALF), [[1.0] * 8]),
    r"x of shape \(1, 8\) here, not \(2, 8\)": lambda: (torch.ones(2, 8, **HALF), torch.ones(4, 8, **HALF)),
    r"x of shape \(1, 16\) here, not \(1, 8\)": lambda: (torch.ones(1, 8, **HALF), torch.ones(4, 16, **HALF)),
    "w in float16 here, not float32": lambda: (torch.ones(1, 8, **HALF), torch.ones(4, 8, device=DEVICE)),
    "multiple of 8, not 12": lambda: (torch.ones(1, 12, **HALF), torch.ones(4, 12, **HALF)),
    "contiguous tensors; w has strides": lambda: (torch.ones(1, 8, **HALF), torch.ones(8, 8, **HALF).T),
    "but w begins between them": lambda: (torch.ones(1, 8, **HALF), torch.ones(33, **HALF)[1:].view(4, 8)),
    r"out of shape \(1, 4\) here, not \(4,\)": lambda: (
        torch.ones(1, 8, **HALF), torch.ones(4, 8, **HALF), torch.ones(4, **HALF),
    ),
    "out in float16 here, not float32": lambda: (
        torch.ones(1, 8, **HALF), torch.ones(4, 8, **HALF), torch.ones(1, 4, device=DEVICE),
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_take_is_refused_in_a_sentence(words):
    with pytest.raises(ValueError, match=words):
        gemv(*REFUSED[words]())


def test_it_does_not_write_over_what_it_reads():
    x = torch.ones(1, 8, **HALF)
    with pytest.raises(ValueError, match="cannot write out while it reads x there"):
        gemv(x, torch.ones(8, 8, **HALF), x)


@pytest.mark.skipif(not machine.gpu(), reason="on the CPU everything is on the CPU")
def test_tensors_of_another_device_are_refused():
    with pytest.raises(ValueError, match="runs on 'cuda:0', but w is on 'cpu'"):
        gemv(torch.ones(1, 8, **HALF), torch.ones(4, 8).half())


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("sizes", GEMV.sizes, ids=str)
def test_all_loads_of_w_come_before_the_wait_and_nothing_spills(sizes, arch):
    binary = GEMV.binary(sizes, arch)
    assert not binary.kernels["gemv"].spill_bytes and not binary.kernels["gemv"].stack_bytes
    order = [line[1] for line in re.finditer(r"\b(LDG\.E\.EF\.128|ACQBULK|LDG\.E\.128)\b", binary.sass("gemv"))]
    ahead = ["LDG.E.EF.128"] * (sizes["ROWS"] * sizes["AHEAD"])
    if int(arch[3:]) >= 90:
        assert order[: len(ahead) + 1] == [*ahead, "ACQBULK"]
    assert set(order) - {"ACQBULK"} <= {"LDG.E.EF.128", "LDG.E.128"} and "LDG.E.EF.128" in order


# --- weights of four bits ----------------------------------------------------------------------------------------

four_bits = source.run(
    source.file(source.find("10_kernels")[0], "GEMV_INT4", "gemv_int4", "packed_int4", "unpacked_int4"), "four_bits"
)
INT4_SHAPES = [(1, 128), (37, 384), (48, 1152), (16, 2304)]
"""(N, K): fewer groups than warps, tiles of 16 rows and rests of them, groups that the warps cannot share evenly."""
if machine.gpu():
    INT4_SHAPES += [(4096, 8192), (4099, 14336)]


def int4_operands(N, K):
    x, w = operands(N, K)
    return x, w, four_bits.packed_int4(w)


def test_four_bits_equal_float64_with_the_same_weights():
    for N, K in INT4_SHAPES:
        x, _, packed = int4_operands(N, K)
        # sums of tensor cores may lose what lies below their largest part
        want = x.double() @ four_bits.unpacked_int4(packed).double().T
        scale = x.double().abs() @ four_bits.unpacked_int4(packed).double().abs().T
        slack = want.abs() * 2**-10 + 2**-20 * scale
        assert ((four_bits.gemv_int4(x, packed) - want).abs() <= slack).all(), (N, K)


def test_each_of_the_four_bits_reaches_its_place():
    """Products with a single one in x are the weights themselves."""
    g = torch.Generator().manual_seed(5)
    w = torch.randint(-8, 8, (19, 256), generator=g)
    w[:, ::128] = -7  # the largest magnitude is 7: a step of 1
    w = w.clamp(-7, 7).to(DEVICE, torch.float16)
    packed = four_bits.packed_int4(w)
    assert torch.equal(four_bits.unpacked_int4(packed).half(), w)
    for column in (0, 1, 2, 3, 5, 14, 17, 63, 64, 127, 128, 200, 255):
        x = torch.zeros(1, 256, device=DEVICE).half()
        x[0, column] = 1
        assert torch.equal(four_bits.gemv_int4(x, packed)[0], w[:, column]), column


def test_four_bits_are_off_by_half_a_step_at_most():
    _, w = operands(33, 512)
    step = (w.float().view(33, 4, 128).abs().amax(-1, keepdim=True) / 7).half().float()
    off = (four_bits.unpacked_int4(four_bits.packed_int4(w)) - w.float()).view(33, 4, 128).abs()
    assert (off <= step * 0.5 + 7 * step * 2**-11).all()


def test_groups_of_zeros_and_of_almost_nothing_are_zeros():
    x, w = operands(20, 384)
    w[:, :128] = 0
    w[3] = 0
    w[4] = 1e-7  # a step of fp16 would be 0
    packed = four_bits.packed_int4(w)
    y = four_bits.gemv_int4(x, packed)
    assert y.isfinite().all() and y[0, 3] == 0 == y[0, 4]
    w[4] = 0
    assert torch.equal(four_bits.gemv_int4(x, four_bits.packed_int4(w)), y)


def test_nothing_to_add_or_to_write_in_four_bits():
    empty = four_bits.packed_int4(torch.ones(5, 0, **HALF))
    assert four_bits.gemv_int4(torch.ones(1, 0, **HALF), empty).tolist() == [[0.0] * 5]
    none = four_bits.packed_int4(torch.ones(0, 128, **HALF))
    assert four_bits.gemv_int4(torch.ones(1, 128, **HALF), none).shape == (1, 0)
    assert four_bits.unpacked_int4(none).shape == (0, 128)


def launch_int4(x, packed, y):
    program = four_bits.GEMV_INT4
    K, threads = x.shape[1], 32 * program.sizes[0]["WARPS"]
    arguments = (x, packed.words, packed.scales, y, packed.rows, K)
    return (len(packed.words),), (threads,), arguments


@on_cpu
def test_four_bits_neither_race_nor_leave_their_arrays():
    x, _, packed = int4_operands(37, 384)
    y = torch.full((1, 37), float("nan"), dtype=torch.float16)
    kernel, asked = four_bits.GEMV_INT4.kernel(four_bits.GEMV_INT4.sizes[0]), launch_int4(x, packed, y)
    kernel(*asked, order="shuffle", seed=1)
    assert torch.equal(y, four_bits.gemv_int4(x, packed))
    assert not kernel.check_races(*asked)
    kernel.check_bounds(*asked)


INT4_REFUSED = {
    "groups of 128 columns, and they do not divide the 200 of w": lambda: four_bits.packed_int4(operands(4, 200)[1]),
    "groups of 96 columns, and they do not divide": lambda: four_bits.packed_int4(torch.ones(4, 256, **HALF), 96),
    "groups of 128 columns, a multiple .*, not of 64": lambda: four_bits.packed_int4(torch.ones(4, 256, **HALF), 64),
    "groups of 0 columns": lambda: four_bits.packed_int4(torch.ones(4, 256, **HALF), 0),
    "w holds infinities or NaN": lambda: four_bits.packed_int4(torch.full((4, 128), float("nan"), **HALF)),
    "w as a matrix": lambda: four_bits.packed_int4(torch.ones(128, **HALF)),
    "do not divide the 200 of x": lambda: four_bits.gemv_int4(torch.ones(1, 200, **HALF), int4_operands(4, 256)[2]),
    r"w.words of shape \(1, 2, 32, 4\) here, not \(1, 4, 32, 4\)": lambda: four_bits.gemv_int4(
        torch.ones(1, 128, **HALF), int4_operands(4, 256)[2]
    ),
    "w.scales in float16 here, not float32": lambda: four_bits.gemv_int4(
        torch.ones(1, 128, **HALF), (packed := int4_operands(4, 128)[2])._replace(scales=packed.scales.float())
    ),
}


@pytest.mark.parametrize("words", INT4_REFUSED)
def test_what_four_bits_cannot_hold_is_refused_in_a_sentence(words):
    with pytest.raises(ValueError, match=words):
        INT4_REFUSED[words]()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_two_weights_cost_one_lop3(arch):
    """The operand of a product on tensor cores, four registers of two weights each, is made by four LOP3."""
    binary = four_bits.GEMV_INT4.binary(arch=arch)
    assert not binary.kernels["gemv_int4"].spill_bytes and not binary.kernels["gemv_int4"].stack_bytes
    sass = binary.sass("gemv_int4")
    found = re.findall(r"LOP3\.LUT .*, 0xf0?000f0?, .*, 0x(?:ea|f8)", sass)
    assert len(found) == 4 * sum(n for op, n in reveal.instructions(sass).items() if op.startswith("HMMA")) > 0
    assert four_bits.GEMV_INT4.why_not("sm_75")


# --- RMSNorm -----------------------------------------------------------------------------------------------------

RMSNORM, rmsnorm = (source.load("10_kernels", name) for name in ("RMSNORM", "rmsnorm"))


def rows_and_weight(rows, cols):
    g = torch.Generator().manual_seed(rows + cols)
    return (torch.randn(shape, generator=g).to(DEVICE, torch.float16) for shape in ((rows, cols), (cols,)))


def normalised(x, w, eps=1e-6):
    return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * w.double()


@pytest.mark.parametrize("cols", [8, 64, 256, 1000, 2048, 4104, 16384, 65536])
def test_rmsnorm_equals_float64(cols):
    x, w = rows_and_weight(5, cols)
    want = normalised(x, w)
    assert ((rmsnorm(x, w, 1e-6) - want).abs() <= want.abs() * 2**-10 + 2**-24).all()


def test_rmsnorm_of_zeros_and_of_no_rows():
    x = torch.zeros(3, 64, **HALF)
    assert torch.equal(rmsnorm(x, torch.ones(64, **HALF), 1e-6), x)
    assert rmsnorm(x[:0], torch.ones(64, **HALF), 1e-6).shape == (0, 64)
    assert torch.equal(rmsnorm(x + 1, torch.ones(64, **HALF), 0.0, out=x), torch.ones_like(x)) and x.all()


@on_cpu
@pytest.mark.parametrize("sizes", RMSNORM.sizes, ids=str)
def test_rmsnorm_neither_races_nor_leaves_its_arrays(sizes):
    cols = 8 * sizes["LANES"] * sizes["PIECES"] - 8
    x, w = rows_and_weight(5, cols)
    y = torch.full_like(x, float("nan"))
    kernel, block = RMSNORM.kernel(sizes), sizes["LANES"] * sizes["ROWS"]
    asked = (-(-5 // sizes["ROWS"]),), (block,), (x, w, y, 5, cols, 1e-6)
    kernel(*asked, order="shuffle", seed=1)
    assert ((y - normalised(x, w)).abs() <= normalised(x, w).abs() * 2**-10 + 2**-24).all()
    assert not kernel.check_races(*asked, blocks=1)
    kernel.check_bounds(*asked)


@pytest.mark.parametrize(
    ("words", "shapes"),
    {
        "multiple of 8 up to 65,536, not 12": ((2, 12), (12,)),
        "not 65544": ((1, 65544), (65544,)),
        r"w of shape \(16,\) here, not \(8,\)": ((2, 16), (8,)),
        "x as a matrix": ((16,), (16,)),
    }.items(),
)
def test_rmsnorm_refuses_in_a_sentence(words, shapes):
    with pytest.raises(ValueError, match=words):
        rmsnorm(*(torch.ones(shape, **HALF) for shape in shapes), 1e-6)


@pytest.mark.parametrize("sizes", RMSNORM.sizes, ids=str)
def test_rmsnorm_holds_its_row_in_registers(sizes):
    made = RMSNORM.binary(sizes, "sm_90").kernels["rmsnorm"]
    assert not made.spill_bytes and not made.stack_bytes
