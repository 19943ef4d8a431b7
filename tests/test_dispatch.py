"""The dispatcher: the fastest implementation that was measured here, and the definition wherever there is doubt."""

import json
import multiprocessing
import re
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import ROOT, dispatch, machine, records, source, timing
from helpers.dispatch import Dispatcher, Implementation, Operator, Times
from helpers.records import Measurement

ABOUT = {"gpu": "A card", "date": "2026-01-01", "torch": "2.13"}
RAN: list[str] = []


def way(name, rung="Triton", by=lambda x, w: x * w, **more):
    """An implementation that says when it runs."""

    def run(x, w):
        RAN.append(name)
        return by(x, w)

    return Implementation(name, ("library",) if rung == "library" else (rung,), lambda: run, **more)


def scale(*ways, name="scale"):
    """x * w, w a row; what counts for the choice is how many rows x has, and how long they are."""
    return Operator(
        f"{name}(Tensor x, Tensor w) -> Tensor",
        lambda x, w: torch.empty_like(x),
        lambda x, w: (x.shape[0], (x.shape[1], str(x.dtype))),
        (way("definition", "library"), *ways),
    )


def given(rows=4, columns=3):
    return torch.randn(rows, columns), torch.randn(columns)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes dispatchers that keep their times in a folder of the test's."""
    monkeypatch.setattr(records, "this_machine", lambda: ABOUT)
    RAN.clear()

    def made(*operators, name="test_dispatch", **more):
        return Dispatcher(name, operators, folder=tmp_path, **more)

    return made


@pytest.fixture
def measured(monkeypatch):
    """Lets `measure` take the times that a test states, in µs by name."""

    def state(**us):
        found = {name: Measurement.exact(float(t), "us") for name, t in us.items()}
        monkeypatch.setattr(timing, "compare", lambda rivals, *_: {name: found[name] for name in rivals})

    return state


def called(dispatcher, *args):
    """The implementation that a call ran; its result is that of the definition."""
    RAN.clear()
    assert torch.equal(dispatcher.scale(*args), args[0] * args[1])
    return RAN[-1]


def test_the_fastest_that_was_measured_runs(make, measured):
    one = make(scale(way("a"), way("b", "CUDA")))
    assert called(one, *given()) == "definition" and one.choice("scale", *given())[1] == "the definition: not measured"
    measured(definition=9, a=5, b=2)
    rows = one.measure("scale", given)
    assert [(row.implementation.name, row.us) for row in rows] == [("definition", 9), ("a", 5), ("b", 2)]
    assert called(one, *given()) == "b" and one.choice("scale", *given())[1] == "measured"
    assert called(make(scale(way("a"), way("b", "CUDA"))), *given()) == "b", "another process reads it from disk"


def test_the_definition_runs_where_it_is_the_fastest(make, measured):
    one = make(scale(way("a")))
    measured(definition=1, a=5)
    one.measure("scale", given)
    assert called(one, *given()) == "definition" and one.choice("scale", *given())[1] == "measured"


def test_a_shape_that_was_never_measured(make, measured):
    one = make(scale(way("a"), way("single", takes=lambda x, w: x.shape[0] == 1)))
    measured(definition=9, a=5, single=1)
    one.measure("scale", lambda: given(1))
    one.measure("scale", lambda: given(64))
    said = {rows: (called(one, *given(rows)), one.choice("scale", *given(rows))[1]) for rows in (1, 2, 4, 16, 256, 300)}
    assert said == {
        1: ("single", "measured"),
        2: ("a", "measured for 1 rows"),  # the next best: the best takes one row alone
        4: ("a", "measured for 1 rows"),
        16: ("a", "measured for 64 rows"),
        256: ("a", "measured for 64 rows"),
        300: ("definition", "the definition: not measured"),
    }
    assert called(one, *given(64, 5)) == "definition", "rows of another length"
    assert called(one, *[t.double() for t in given(64)]) == "definition", "another dtype"
    assert called(one, torch.empty(0, 3), torch.ones(3)) in ("a", "definition")


def refusing(why):
    def raises(*_):
        raise why

    return raises


def test_a_rung_that_does_not_build_is_dropped_with_its_reason(make, measured):
    broken = Implementation("broken", ("CUDA",), refusing(machine.NotReady("no nvcc here", "install it")))
    one = make(scale(broken, way("a"), way("late", by=refusing(RuntimeError("ptxas: bad\nand more")))))
    rows = {row.implementation.name: row for row in one.check("scale", given)}
    assert rows["broken"].why_not == "NotReady: no nvcc here" == one.dropped["scale", "broken"]
    assert rows["late"].why_not == "RuntimeError: ptxas: bad" and not rows["a"].why_not
    assert rows["broken"].row()["error"] == "–"
    measured(definition=9, a=5)
    one.measure("scale", given)
    assert called(one, *given()) == "a"


def test_what_was_measured_once_but_fails_now_is_dropped_at_its_first_call(make, measured):
    measured(definition=9, a=5, b=2)
    make(scale(way("a"), way("b"))).measure("scale", given)
    one = make(scale(way("a"), way("b", by=refusing(RuntimeError("out of resources")))))
    assert called(one, *given()) == "a" and one.dropped == {("scale", "b"): "RuntimeError: out of resources"}
    RAN.clear()
    assert called(one, *given()) == "a" and RAN == ["a"], "it is not tried again"


def test_memory_that_is_short_drops_nothing(make, measured):
    measured(definition=9, a=5, b=2)
    make(scale(way("a"), way("b"))).measure("scale", given)
    one = make(scale(way("a"), way("b", by=refusing(torch.OutOfMemoryError("full")))))
    assert called(one, *given()) == "a" and not one.dropped


@pytest.mark.parametrize(
    ("by", "says"),
    [(lambda x, w: (x * w).double(), "torch.float64"), (lambda x, w: (x * w).T.contiguous().T, "strides (1, 4)")],
    ids=["dtype", "strides"],
)
def test_a_result_of_another_form_is_dropped(by, says, make):
    """The compiler is told the form and does not look."""
    one = make(scale(way("other", by=by)))
    row = one.check("scale", given)[1]
    assert row.why_not.startswith("a result that is (4, 3) ") and says in row.why_not and one.dropped


def test_nothing_is_measured_of_no_rows(make, measured):
    one = make(scale(way("a")))
    with pytest.raises(ValueError, match="no rows"):
        one.measure("scale", lambda: given(0))


def test_times_that_cannot_be_kept_hold_for_the_process(make, measured, monkeypatch, capsys):
    one = make(scale(way("a")))
    measured(definition=9, a=5)
    monkeypatch.setattr(Times, "add", refusing(PermissionError("read-only")))
    one.measure("scale", given)
    assert "for this process alone" in capsys.readouterr().out and called(one, *given()) == "a"
    assert called(make(scale(way("a"))), *given()) == "definition"


@pytest.mark.parametrize(
    "by",
    [
        lambda x, w: x * w * 1.01,
        lambda x, w: x * w * torch.nan,
        lambda x, w: (x * w)[:1],
        lambda x, w: x.mul_(2) / 2 * w,
    ],
    ids=["off", "NaN", "another shape", "writes its input"],
)  # fmt: skip
def test_wrong_values_are_dropped(by, make):
    one = make(scale(way("wrong", by=by)))
    row = one.check("scale", given)[1]
    assert row.why_not.startswith("wrong values: off by ") and ("scale", "wrong") in one.dropped


def test_what_refuses_some_arguments_keeps_the_others(make, measured):
    def contiguous(x, w):
        if not x.is_contiguous():
            raise ValueError("contiguous rows only")
        return x * w

    one = make(scale(way("a"), way("choosy", by=contiguous)))
    measured(definition=9, a=5, choosy=2)
    one.measure("scale", given)
    turned = torch.randn(3, 4).T
    assert called(one, turned, torch.ones(3)) == "a" and called(one, *given()) == "choosy"
    assert called(one, turned, torch.ones(3)) == "a" and not one.dropped
    fresh = make(scale(way("a"), way("choosy", by=contiguous)))
    assert called(fresh, turned, torch.ones(3)) == "a" and called(fresh, *given()) == "choosy"


def test_arguments_that_nothing_takes_are_the_caller_s_fault(make, measured):
    one = make(scale(way("a")))
    measured(definition=9, a=5)
    one.measure("scale", given)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size of tensor"):
            one.scale(torch.ones(4, 3), torch.ones(2))
    fresh = make(scale(way("a")))
    with pytest.raises(RuntimeError, match="size of tensor"):
        fresh.scale(torch.ones(4, 3), torch.ones(2))
    assert not one.dropped and not fresh.dropped and called(one, *given()) == "a"


def test_without_a_rung(make, measured):
    mixed = Implementation("mixed", ("library", "Triton"), way("mixed").make)
    one = make(scale(way("a", "Triton"), way("b", "CUDA"), mixed))
    measured(definition=1, mixed=2, a=5, b=9)
    one.measure("scale", given)
    ran = {}
    for out in ((), ("library",), ("library", "Triton"), ("library", "Triton", "CUDA"), ("Triton",)):
        with one.without(*out):
            ran[out] = called(one, *given())
    assert list(ran.values()) == ["definition", "a", "b", "definition", "definition"]
    with pytest.raises(ValueError, match="the rungs are library, .*, not Cuda"), one.without("Cuda"):
        pass
    assert called(one, *given()) == "definition"


def test_an_operator_is_one_of_torch_s_and_breaks_no_graph(make, measured):
    one = make(scale(way("a")))
    measured(definition=9, a=5)
    one.measure("scale", given)
    with torch.no_grad():
        torch.library.opcheck(torch.ops.test_dispatch.scale.default, given())
        whole = torch.compile(
            lambda x, w: torch.ops.test_dispatch.scale(x + 1, w) * 2, fullgraph=True, backend="aot_eager"
        )
        for rows in (4, 5, 6):
            x, w = given(rows)
            RAN.clear()
            torch.testing.assert_close(whole(x, w), (x + 1) * w * 2)
            assert RAN[-1] == "a", "the choice is made when it runs, by the shape it has then"


def test_an_operator_that_writes_is_compiled_as_one(make):
    def keep(cache, x):
        cache[:2] = x
        return x + 1

    operator = Operator(
        "keep(Tensor(a!) cache, Tensor x) -> Tensor",
        lambda cache, x: torch.empty_like(x),
        lambda cache, x: (x.shape[0], ()),
        (Implementation("definition", ("library",), lambda: keep),),
    )
    one, cache, x = make(operator), torch.zeros(4, 3), torch.randn(2, 3)
    with torch.no_grad():
        torch.library.opcheck(torch.ops.test_dispatch.keep.default, (cache, x))
        y = torch.compile(lambda cache, x: one.keep(cache, x) * 2, fullgraph=True, backend="aot_eager")(cache, x)
    assert torch.equal(y, (x + 1) * 2) and torch.equal(cache[:2], x) and not cache[2:].any()


def test_a_call_without_torch_s_dispatcher_gives_way_where_it_would_be_missed(make, measured):
    """What traces, fakes, transforms or stands for a tensor must see the operator, not what is inside."""
    one = make(scale(way("a")))
    measured(definition=9, a=5)
    one.measure("scale", given)
    x, w = given()
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(str(op))
            return op(*args, **(kwargs or {}))

    with torch.no_grad():
        assert called(one, x, w) == "a", "the choice is known from here on"
        assert called(one, x, torch.nn.Parameter(w)) == "a"
        with Mode():
            one.scale(x, w)
        assert seen[0] == "test_dispatch.scale.default"
        nodes = [str(node.target) for node in make_fx(one.scale)(x, w).graph.nodes]
        assert "test_dispatch.scale.default" in nodes
        with FakeTensorMode() as fake:
            faked = fake.from_tensor(x), fake.from_tensor(w)
        RAN.clear()
        assert isinstance(one.scale(*faked), FakeTensor), "outside its mode, too"
        assert one.scale(x.to("meta"), w.to("meta")).device.type == "meta" or RAN
        for wrong in ((x,), (x, "w"), (x.numpy(), w)):
            with pytest.raises(RuntimeError, match="missing value for argument 'w'|Expected a value of type 'Tensor'"):
                one.scale(*wrong)
        assert torch.equal(one.scale(x, w=w), x * w)
        assert torch.equal(one.scale(x[0], w), x[0] * w), "fewer dimensions than the key asks for"


def test_gradients_are_refused_in_a_sentence(make):
    one = make(scale())
    x, w = given()
    w.requires_grad_()
    for call in (one.scale, torch.compile(lambda x, w: one.scale(x, w), fullgraph=True, backend="aot_eager")):
        with pytest.raises(Exception, match=r"test_dispatch::scale has no backward.*torch.no_grad\(\)"):
            call(x, w)
    with torch.no_grad():
        assert called(one, x, w) == "definition"
    assert called(one, x, w.detach()) == "definition"


def test_names_are_checked_and_taken_over(make):
    one = make(scale(), name="test_dispatch_twice")
    with pytest.raises(AttributeError, match="'scales' is no operator here: they are scale"):
        _ = one.scales
    two = make(scale(), scale(name="other"), name="test_dispatch_twice")
    assert called(two, *given()) == "definition" and torch.equal(
        two.other(*given(1, 1)).shape and torch.ones(1), torch.ones(1)
    )


# --- the file of times ---


def test_times_are_kept_by_card_and_versions(tmp_path, capsys):
    first = Times(ABOUT, tmp_path)
    assert first.read() == {}
    first.add("scale", "k", 4, {"a": 1.0})
    assert Times(ABOUT | {"date": "2027-01-01"}, tmp_path).read() == {"scale": {"k": {"4": {"a": 1.0}}}}
    for other in (ABOUT | {"gpu": "Another"}, ABOUT | {"torch": "2.14"}, ABOUT | {"kernels": "changed"}):
        assert Times(other, tmp_path).read() == {} and Times(other, tmp_path).path != first.path
    assert not capsys.readouterr().out


def test_a_file_from_another_machine_is_not_believed(tmp_path, capsys):
    theirs, mine = Times(ABOUT | {"gpu": "Another card", "torch": "2.11"}, tmp_path), Times(ABOUT, tmp_path)
    theirs.add("scale", "k", 4, {"a": 1.0})
    mine.path.write_text(theirs.path.read_text())
    assert mine.read() == {}
    said = capsys.readouterr().out
    assert "gpu Another card" in said and "torch 2.11" in said and "not used" in said
    assert mine.add("scale", "k", 1, {"b": 2.0}) == {"scale": {"k": {"1": {"b": 2.0}}}}
    assert mine.read() == {"scale": {"k": {"1": {"b": 2.0}}}}


BROKEN = {
    "empty": "",
    "cut short": '{"about": {"gpu": "A card"',
    "not text": b"\xff\xfe\x00",
    "a list": "[]",
    "no times": '{"about": {}}',
    "no number": json.dumps({"about": {}, "times": {"scale": {"k": {"4": {"a": "fast"}}}}}),
    "negative": json.dumps({"about": {}, "times": {"scale": {"k": {"4": {"a": -1.0}}}}}),
    "not a number": '{"about": {}, "times": {"scale": {"k": {"4": {"a": NaN}}}}}',
    "no rows": json.dumps({"about": {}, "times": {"scale": {"k": {"0": {"a": 1.0}}}}}),
    "rows in words": json.dumps({"about": {}, "times": {"scale": {"k": {"four": {"a": 1.0}}}}}),
    "flat": json.dumps({"about": {}, "times": {"scale": 3}}),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_told_and_replaced(text, tmp_path, capsys, make, measured):
    kept = Times(ABOUT | {"kernels": ""}, tmp_path)
    kept.path.write_bytes(text if isinstance(text, bytes) else text.encode())
    one = make(scale(way("a")))
    assert "cannot be read" in capsys.readouterr().out and called(one, *given()) == "definition"
    measured(definition=9, a=5)
    one.measure("scale", given)
    assert called(one, *given()) == "a" and "4" in kept.read()["scale"]["(3, 'torch.float32')"]


def test_a_stamp_is_of_the_code_alone(tmp_path, monkeypatch):
    def notebook(source, output):
        outputs = [{"output_type": "stream", "name": "stdout", "text": output}]
        cells = [
            {"cell_type": "code", "source": [source], "outputs": outputs},
            {"cell_type": "markdown", "source": output},
        ]
        (tmp_path / "notebooks" / "98.ipynb").write_text(json.dumps({"cells": cells}))
        return dispatch.stamp("98.ipynb", "98.py")

    monkeypatch.setattr(dispatch, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "98.py").write_text("a = 1")
    first = notebook("x = 1", "one")
    assert notebook("x = 1", "two") == first != notebook("x = 2", "two")
    (tmp_path / "notebooks" / "98.py").write_text("a = 2")
    assert notebook("x = 1", "one") != first


def _write(folder, operator):
    for rows in range(1, 21):
        Times(ABOUT, folder).add(operator, "k", rows, {"a": float(rows)})


def test_two_processes_write_at_once(tmp_path):
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write, args=(tmp_path, name)) for name in ("one", "two", "three")]
    for writer in writers:
        writer.start()
    reader, seen = Times(ABOUT, tmp_path), 0
    while any(writer.is_alive() for writer in writers):
        now = sum(len(kinds["k"]) for kinds in reader.read().values())
        assert now >= seen, "a reader saw half a file, or lost an entry"
        seen = now
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert {name: len(kinds["k"]) for name, kinds in reader.read().items()} == {"one": 20, "two": 20, "three": 20}
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".lock"}, "no half-written file is left"


# --- the operators of lesson 12_2 ---

BLOCK = source.run(source.file(source.find("12_2_kernels")[0], "OPERATORS"), "12_2_kernels")
DEVICE = machine.device()


def half(*shape, scale=1.0):
    return (torch.randn(shape, device=DEVICE) * scale).half()


def norm_linear(rows, K, N):
    return half(rows, K), 1 + half(K, scale=0.1), half(N, K, scale=K**-0.5), 1e-5


def norm_swiglu(rows, K, N):
    return norm_linear(rows, K, 2 * N)


def linear_add(rows, K, N):
    return half(rows, K), half(N, K, scale=K**-0.5), half(rows, N)


def cache(heads, kv_heads, room, dim):
    at = torch.arange(room)[:, None] * 100.0 ** -(torch.arange(dim // 2) / (dim // 2))
    angles = torch.stack([at.cos(), at.sin()]).to(DEVICE).half()
    return half(kv_heads, room, dim), half(kv_heads, room, dim), angles


def prefill_attention(rows, heads, kv_heads, room, dim):
    return half(rows, (heads + 2 * kv_heads) * dim), *cache(heads, kv_heads, room, dim), heads


def decode_attention(position, heads, kv_heads, room, dim):
    at = torch.tensor([position], device=DEVICE)
    return half(1, (heads + 2 * kv_heads) * dim), *cache(heads, kv_heads, room, dim), at, heads


SHAPES = {
    norm_linear: [(1, 64, 80), (1, 300, 33), (1, 8, 1), (17, 96, 48), (5, 75, 33)],
    norm_swiglu: [(1, 64, 80), (1, 300, 33), (17, 96, 48)],
    linear_add: [(1, 64, 80), (1, 2048, 9), (2, 64, 32), (17, 96, 48), (5, 75, 33)],
    prefill_attention: [(1, 6, 2, 32, 16), (2, 4, 4, 32, 16), (31, 3, 1, 32, 32), (33, 12, 4, 64, 64)],
    decode_attention: [(position, *heads, 160, dim) for position in (0, 63, 64, 159)
                       for heads, dim in (((6, 2), 16), ((2, 2), 32), ((8, 1), 64))],
}  # fmt: skip
LEFT_OUT = {"PyTorch, cuDNN", "one kernel, cuDNN"}
"""What only a GPU has."""


@pytest.mark.parametrize(("inputs", "shape"), [(f, s) for f, shapes in SHAPES.items() for s in shapes],
                         ids=lambda x: x.__name__ if callable(x) else "x".join(map(str, x)))  # fmt: skip
def test_every_implementation_of_a_layer_s_operators_is_right(inputs, shape, tmp_path):
    torch.manual_seed(0)
    block = Dispatcher("test_block", BLOCK.OPERATORS, folder=tmp_path)
    for _ in range(2 if inputs is decode_attention else 1):  # what one call leaves behind must not disturb the next
        rows = block.check(inputs.__name__, lambda: inputs(*shape))
    wrong = {row.implementation.name: row.why_not for row in rows if row.why_not}
    refused = {name for name, why in wrong.items() if why.startswith("ValueError")}
    assert set(wrong) - refused <= (set() if machine.gpu() else LEFT_OUT), wrong
    assert not refused or shape[1] % 8 or shape[2] % 8, wrong
    ran = {row.implementation.name for row in rows} - set(wrong)
    assert "PyTorch" in ran and (len(ran) > 1 or shape[0] == 1 or refused)


def test_a_model_says_the_same_of_a_token_whether_it_was_in_the_prompt_or_came_after(tmp_path):
    """Prefill writes the cache that decode reads; once with PyTorch's operators, once with Triton's alone."""
    model = source.load("12_2_dispatch", "Decoder")
    size = source.load("12_2_dispatch", "Size")(2, 32, 6, 2, 16, 48, 64, 32, 9)
    definitions = {operator.name: operator.definition.make() for operator in BLOCK.OPERATORS}

    def by_hand(one, many):
        return lambda x, *rest: (one if x.shape[0] == 1 else many)(x, *rest)

    in_triton = {
        "norm_linear": by_hand(
            BLOCK.norm_linear_row, lambda x, n, w, eps: BLOCK.product(BLOCK.rms_norm_rows(x, n, eps), w)
        ),
        "norm_swiglu": by_hand(
            BLOCK.norm_swiglu_row, lambda x, n, w, eps: BLOCK.swiglu(BLOCK.product(BLOCK.rms_norm_rows(x, n, eps), w))
        ),
        "linear_add": by_hand(BLOCK.linear_add_row, BLOCK.linear_add_06),
        "prefill_attention": lambda *args: BLOCK.prefill_attention_rows(*args, BLOCK.SDPBackend.MATH),
        "decode_attention": BLOCK.decode_attention_row,
    }
    torch.manual_seed(0)
    with torch.no_grad():
        first = model(SimpleNamespace(**definitions), size, DEVICE)
        exact = model(SimpleNamespace(**definitions), size, DEVICE)
        exact.load_state_dict(first.state_dict())
        exact = exact.double()
        whole = exact.prefill()
        for ops in (definitions, in_triton):
            one = model(SimpleNamespace(**ops), size, DEVICE)
            one.load_state_dict(first.state_dict())
            together = one.prefill()
            one.token, one.position, one.prompt = one.prompt[-1:], one.position - 1, one.prompt[:-1]
            one.prefill()
            for logits in (together, one.decode()):
                assert (logits.double() - whole).abs().max() < 5e-3 * whole.abs().max()


def test_the_lesson_loads_every_kernel_that_it_names():
    """Cells that only a GPU runs, too: what is loaded is a slice of the file."""
    cells = json.loads((ROOT / "notebooks" / "12_2_dispatch.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    loaded = source.load("12_2_dispatch", "kernels")
    named = set(re.findall(r"\bkernels\.([A-Za-z]\w*)", code.replace("12_2_kernels.", "")))
    assert {"OPERATORS", "linear_add_apart"} <= named and not [name for name in named if not hasattr(loaded, name)]


MISREAD = {
    "strides of w": lambda x, n, w: (x, n, w.T.contiguous().T),
    "norm of one": lambda x, n, w: (x, n[:1], w),
    "w of another K": lambda x, n, w: (x, n, w[:, :56].contiguous()),
    "w in fp32": lambda x, n, w: (x, n, w.float()),
    "norm in fp32": lambda x, n, w: (x, n.float(), w),
    "two rows": lambda x, n, w: (x.repeat(2, 1), n, w),
    "another device": lambda x, n, w: (x, n, w.to("meta")),
    "begins between 16 bytes": lambda x, n, w: (half(65)[1:][None], n, w),
}


@pytest.mark.parametrize("kernel", [BLOCK.norm_linear_row, BLOCK.norm_linear_row_cuda, BLOCK.norm_swiglu_row_cuda])
@pytest.mark.parametrize("change", MISREAD.values(), ids=MISREAD)
def test_a_row_kernel_refuses_what_it_would_misread(kernel, change):
    x, norm, w, eps = norm_linear(1, 64, 32)
    with pytest.raises(ValueError, match=r"these kernels|where .* is due"):
        kernel(*change(x, norm, w), eps)


def test_kernels_refuse_what_they_would_misread():
    x, w = half(1, 64), half(64, 64)
    qkv, keys, values, angles, at, heads = decode_attention(3, 4, 2, 32, 16)
    prompt = half(5, qkv.shape[1])
    for call in (
        lambda: BLOCK.linear_add_row(half(1, 128)[:, ::2], w, half(1, 64)),
        lambda: BLOCK.linear_add_row(x, w, half(1, 128)),
        lambda: BLOCK.linear_add_row(x, w, x),
        lambda: BLOCK.linear_add_row_cuda(x, w, w[:1]),
        lambda: BLOCK.linear_add_06(half(2, 64), w, half(1, 64)),
        lambda: BLOCK.swiglu(half(4, 96)[:, :64]),
        lambda: BLOCK.rms_norm_rows(half(2, 64), half(1), 1e-5),
        lambda: BLOCK.product(half(2, 64), half(8, 56)),
        lambda: BLOCK.decode_attention_row(qkv, keys.mT.contiguous().mT, values, angles, at, heads),
        lambda: BLOCK.decode_attention_row(qkv, keys, values, angles[:, :16].contiguous(), at, heads),
        lambda: BLOCK.decode_attention_row(qkv, keys, values, angles, at.int(), heads),
        lambda: BLOCK.decode_attention_row(qkv, keys, values, angles, at, 5),
        lambda: BLOCK.decode_attention_row(qkv, keys, keys, angles, at, heads),
        lambda: BLOCK.decode_attention_row(half(1, 192), half(2, 32, 24), half(2, 32, 24), half(2, 32, 12), at, 4),
        lambda: BLOCK.rotate_and_keep(half(40, qkv.shape[1]), keys, values, angles, heads),
        lambda: BLOCK.rotate_and_keep(prompt, keys, values[:1], angles, heads),
    ):
        with pytest.raises(ValueError, match=r"these kernels|where .* is due|do not fit|this kernel takes"):
            call()


@pytest.mark.parametrize("position", [-1, 32, 2**40])
def test_a_position_outside_the_cache_touches_nothing(position):
    qkv, keys, values, angles, at, heads = decode_attention(0, 4, 2, 32, 16)
    before = keys.clone(), values.clone()
    out = BLOCK.decode_attention_row(qkv, keys, values, angles, at.fill_(position), heads)
    assert out.isnan().all() and torch.equal(keys, before[0]) and torch.equal(values, before[1])
    assert not BLOCK.decode_attention_row(qkv, keys, values, angles, at.fill_(3), heads).isnan().any()


def test_the_library_s_other_attention_is_the_compiler_s_to_trace():
    """FlashAttention and FlexAttention on the device of a token: one graph each, with one node for attention."""
    args = decode_attention(3, 6, 2, 32, 16)
    with torch.no_grad():
        exact = BLOCK.decode_attention(*[t.clone() if torch.is_tensor(t) else t for t in args])
        flex = torch.compile(BLOCK.decode_attention_flex, fullgraph=True, backend="eager")
        torch.testing.assert_close(flex(*args), exact, rtol=2e-2, atol=2e-3)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            faked = [fake.from_tensor(t) if torch.is_tensor(t) else t for t in args]
            assert BLOCK.decode_attention_flash(*faked).shape == exact.shape


@pytest.mark.skipif(not machine.gpu(), reason="CUDA graphs")
def test_a_graph_that_is_recorded_before_the_first_call_holds_the_definition(make, measured, capsys):
    one, (x, w) = make(scale(way("a"))), [t.cuda() for t in given()]
    measured(definition=9, a=5)
    one.measure("scale", lambda: (x, w))
    graph, wide = torch.cuda.CUDAGraph(), x.repeat(2, 1)
    x + w, wide * w
    RAN.clear()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = one.scale(wide, w)
    graph.replay()
    assert RAN == ["definition"] and torch.equal(y, wide * w) and "its definition" in capsys.readouterr().out


@pytest.mark.skipif(not machine.gpu(), reason="CUDA graphs")
def test_one_kernel_for_attention_is_warmed_up_inside_reduce_overhead():
    """What outlives its first call does not lie in a graph's memory: no call comes before torch.compile's own."""
    BLOCK._zeros.cache_clear()
    args = decode_attention(3, 6, 2, 64, 16)
    exact = BLOCK.decode_attention(*args)
    block = Dispatcher("test_warm", BLOCK.OPERATORS)
    block._measured = {"decode_attention": {str(block.operators["decode_attention"].key(*args)[1]): {
        "64": {"one kernel": 1.0}}}}  # fmt: skip
    with torch.no_grad():
        for t in args[:-1]:
            torch._dynamo.mark_static_address(t)  # as a module's buffers are: else a graph may not write them
        fn = torch.compile(lambda *a: block.decode_attention(*a) + 0, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            torch.testing.assert_close(fn(*args), exact, rtol=2e-2, atol=2e-3)
    assert not block.dropped
