"""torch.compile stage by stage: what Dynamo, AOTAutograd and Inductor each hand on, and why two nodes did not fuse.

`captured` shows the first two stages, which know no device; `fused` shows the third, for a card that is here or on
paper (`helpers.paper`); `candidates` and `tuned` show what max-autotune chooses from, and what choosing costs.
"""

import io
import math
import re
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from unittest import mock

from . import ledger, machine, paper, refusals, reveal


@dataclass(frozen=True)
class Captured:
    """What the first two stages make of a function.

    dynamo: a row for each node of Dynamo's graph: its name, operator, whom it reads, the reader's line of source.
    guards: a row for each argument, what it was assumed to be; `checks` is how many conditions there are in all.
    forward, backward: names of the ATen operators of AOTAutograd's graphs, in order; backward is empty without
    gradients. saved: (name, bytes) of each intermediate that the forward keeps for the backward.
    """

    dynamo: list[dict]
    guards: list[dict]
    checks: int
    forward: list[str]
    backward: list[str] = field(default_factory=list)
    saved: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Node:
    """A buffer that Inductor would compute, before it fuses. kind: "pointwise", "reduction", "library" or "other".

    operators: the ATen operators inside. reads: buffers and arguments. size: elements it runs over, as text.
    """

    name: str
    kind: str
    operators: tuple[str, ...]
    reads: tuple[str, ...]
    size: str


@dataclass(frozen=True)
class Refusal:
    """Two nodes, by the names of their buffers, that Inductor did not fuse, and its reason."""

    one: str
    other: str
    reason: str


@dataclass(frozen=True)
class Fused:
    """What Inductor makes of a function: nodes before fusion, the groups that they end in, the refusals, the code."""

    nodes: tuple[Node, ...]
    groups: tuple[tuple[str, ...], ...]
    refusals: tuple[Refusal, ...]
    made: reveal.Generated

    @property
    def launches(self) -> list[ledger.Launch]:
        return ledger.compiled(self.made.code)

    @property
    def apart(self) -> list[str]:
        """Which launches Inductor tried to join and did not, and why, in sentences."""
        place = {name: i for i, group in enumerate(self.groups, 1) for name in group}
        said = {}
        for refusal in self.refusals:
            one, other = ({place.get(name) for name in side.split(" + ")} for side in (refusal.one, refusal.other))
            if len(one) == len(other) == 1 and one != other:
                said[f"{one.pop()} and {other.pop()} stay apart: {refusal.reason}"] = None
        return list(said)

    def rows(self) -> list[dict]:
        """A line for each node: what it computes, over how much, and in which group it ended."""
        place = {name: i for i, group in enumerate(self.groups, 1) for name in group}
        return [
            {
                "buffer": node.name,
                "kind": node.kind,
                "operators": ", ".join(node.operators),
                "reads": ", ".join(node.reads),
                "over": node.size,
                "group": place.get(node.name, ""),
            }
            for node in self.nodes
        ]


@dataclass(frozen=True)
class Candidate:
    """One way to compute a product that max-autotune has on its list. source: "library", "template" or "other".
    settings: of a template, {"BLOCK_M": 128, …, "num_warps": 8}. us: its time, NaN where it was not timed.
    """

    name: str
    source: str
    settings: dict[str, int]
    us: float = math.nan


@dataclass(frozen=True)
class Tuned:
    """A compiled function and what compiling it took: `call`, wall seconds up to its first result with an empty cache,
    the code, and the candidates of its product, the fastest first (none without max-autotune).
    """

    call: Callable
    seconds: float
    code: str
    candidates: tuple[Candidate, ...]


def warm() -> None:
    """On a GPU, do now what a process does once, at its first torch.compile: imports and patterns, which take seconds.
    In CPU mode, where lessons compile nothing, it does nothing."""
    if machine.gpu():
        import torch

        reveal.inductor(lambda x: torch.softmax(x @ x, -1), torch.ones(16, 16, device="cuda"), run=False)


def captured(fn: Callable, *args, keep: str = "min-cut") -> Captured:
    """Dynamo's and AOTAutograd's graphs of `fn(*args)`; nothing is generated or run.

    args: tensors, of which only the shapes count; with `requires_grad` on one of them there is a backward too. keep:
    how the forward's leavings are chosen, "min-cut", as torch.compile does by itself (what is cheap to compute is
    computed again), or "all", what the backward asks for. Raises `refusals.CannotCompile`.
    """
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._functorch import partitioners
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    graphs, made = [], {}

    def keeping(which):
        def compiler(graph, inputs):
            made[which] = graph.graph
            return make_boxed_func(graph.forward)

        return compiler

    split = {"min-cut": partitioners.min_cut_rematerialization_partition, "all": partitioners.default_partition}[keep]
    lower = aot_autograd(
        fw_compiler=keeping("forward"),
        bw_compiler=keeping("backward"),
        decompositions=select_decomp_table(),
        partition_fn=split,
    )

    def backend(graph, inputs):
        graphs.append(graph)
        return lower(graph, inputs)

    torch._dynamo.reset()  # sizes seen before would make these ones symbols
    args = paper.like(args, device="cpu")
    with refusals.strictly(getattr(fn, "__name__", type(fn).__name__)):
        out = torch.compile(fn, backend=backend, fullgraph=True)(*args)
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.backward(*paper.like((torch.empty(out.shape, dtype=out.dtype, device="meta"),), device="cpu"))
    code = getattr(fn, "__code__", None) or type(fn).forward.__code__
    tree = str(_debug_get_cache_entry_list(code)[0].guard_manager)
    torch._dynamo.reset()
    values = next(n for n in made["forward"].nodes if n.op == "output").args[0]
    own = 1 if isinstance(out, torch.Tensor) else len(out)
    saved = [
        (n.name, n.meta["val"].numel() * n.meta["val"].element_size())
        for n in values[own:]
        if "val" in n.meta and n.op != "placeholder" and not _is_view(n)
    ]
    return Captured(
        _dynamo_rows(graphs[0]),
        _guard_rows(tree),
        len(re.findall(r"\+- (?!GuardManager|RootGuardManager|DictGuardManager)[A-Z_]+:", tree)),
        _operators(made["forward"]),
        _operators(made["backward"]) if "backward" in made else [],
        saved if "backward" in made else [],
    )


def fused(fn: Callable, *args, arch: str | None = None) -> Fused:
    """Inductor's part: `fn(*args)` as nodes, before and after fusion, and its code; nothing is run.

    arch: of `paper.ARCHS`, for a card on paper; by default for the device that the tensors are on. Raises as
    `reveal.inductor` does.
    """
    import torch
    from torch._inductor import scheduler

    seen, groups, why = [], [], []

    def before(nodes):
        seen.extend(map(_node, nodes))
        return nodes

    def after(nodes):
        groups.extend(tuple(part.get_first_name() for part in node.get_nodes()) for node in nodes)
        return nodes

    def refuse(self, reason, *details):
        plain(self, reason, *details)
        why.append((self.name1, self.name2, reason % details if details else reason))

    plain = scheduler.WhyNoFuse.__call__
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(scheduler.WhyNoFuse, "__call__", refuse))
        hooks = {"_pre_fusion_custom_pass": before, "_post_fusion_custom_pass": after, "fx_graph_cache": False}
        stack.enter_context(torch._inductor.config.patch(hooks))
        made = reveal.inductor(fn, *args, run=False, arch=arch)
    buffers = {op: node.name for op, node in seen}
    named = [tuple(buffers.get(op, op) for op in group) for group in groups]
    refused = [Refusal(*(_buffers(name, buffers) for name in pair), reason) for *pair, reason in dict.fromkeys(why)]
    return Fused(tuple(node for _, node in seen), tuple(named), tuple(refused), made)


def candidates(fn: Callable, *args, take: Callable[[Candidate], bool], arch: str | None = None):
    """The candidates that max-autotune has for the first product in `fn`, and the code with the first that `take` says
    yes to: (tuple of `Candidate`, `reveal.Generated`). Nothing is timed or run; `arch` as in `fused`.
    Raises `refusals.CannotCompile`, also where none is taken.
    """
    import torch

    found = []

    def choose(choices):
        every = [_candidate(choice) for choice in choices]
        found.append(tuple(every))
        chosen = next((choice for choice, one in zip(choices, every, strict=True) if take(one)), None)
        if chosen is None:
            raise LookupError(f"none of the {len(every)} candidates was taken")
        return [chosen]

    options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs") | {"fx_graph_cache": False}
    with _choosing(choose), torch._inductor.config.patch(options):
        made = reveal.inductor(fn, *args, run=False, arch=arch)
    return found[0], made


def tuned(fn: Callable, *args, mode: str = "max-autotune-no-cudagraphs") -> Tuned:
    """Compile `fn` for `args` in a mode of torch.compile, with an empty cache and no fall-back, and call it once.

    What the tuner prints is kept back: it is in `candidates`. Raises `refusals.CannotCompile`.
    """
    import torch
    from torch._inductor import select_algorithm
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import fresh_cache

    timings, codes = {}, []

    def keep(name, input_nodes, timed, *rest, **more):
        timings.update(timed)

    def wait():
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    selector = select_algorithm.AlgorithmSelectorCache
    with ExitStack() as stack:
        stack.enter_context(fresh_cache())
        stack.enter_context(refusals.strictly(getattr(fn, "__name__", type(fn).__name__)))
        stack.enter_context(redirect_stderr(io.StringIO()))  # the tuner prints its table there a second time
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # the tuner's own, for its inputs
        stack.enter_context(mock.patch.object(selector, "log_results", staticmethod(keep)))
        stack.enter_context(mock.patch.object(GraphLowering, "save_output_code", staticmethod(codes.append)))
        torch._dynamo.reset()
        wait()
        began = time.perf_counter()
        call = torch.compile(fn, mode=mode, fullgraph=True)
        call(*args)
        wait()
        seconds = time.perf_counter() - began
    every = sorted((_candidate(choice, 1e3 * ms) for choice, ms in timings.items()), key=lambda one: one.us)
    return Tuned(call, seconds, "\n\n".join(codes), tuple(every))


@contextmanager
def _choosing(choose: Callable):
    """Where Inductor lists the ways to compute a product, `choose` says which of them remain."""
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    plain = AlgorithmSelectorCache.__call__

    def call(self, name, choices, *rest, **more):
        return plain(self, name, choose([c for c in choices if c is not None]), *rest, **more)

    with mock.patch.object(AlgorithmSelectorCache, "__call__", call):
        yield


def _candidate(choice, us: float = math.nan) -> Candidate:
    told = getattr(choice, "description", "") or ""
    settings = {name: int(value) for name, value in re.findall(r"(BLOCK_\w|GROUP_M|num_\w+)=(\d+)", told)}
    made = type(choice).__name__
    source = "library" if made == "ExternKernelCaller" else "template" if "Template" in made else "other"
    return Candidate(choice.name, source, settings, us)


def _dynamo_rows(graph) -> list[dict]:
    def line(node):
        frames = re.findall(r'File "[^"]*", line \d+, in .*\n +(.*)', node.stack_trace or "")
        return frames[-1].split("  #")[0].strip() if frames else ""

    return [
        {
            "node": n.name,
            "operator": n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target)),
            "reads": ", ".join(m.name for m in n.all_input_nodes),
            "from the line": line(n),
        }
        for n in graph.graph.nodes
        if n.op not in ("placeholder", "output")
    ]


def _guard_rows(tree: str) -> list[dict]:
    """The conditions on tensors: name and what it was assumed to be."""
    found = re.findall(r"TENSOR_MATCH: check_tensor\(L\['(\w+)'\], .*?\), (torch\.\w+, .*?\])\)", tree)
    return [{"argument": name, "assumed": assumed.replace("torch.", "")} for name, assumed in sorted(found)]


def _operators(graph) -> list[str]:
    return [
        n.target.overloadpacket.__name__ if hasattr(n.target, "overloadpacket") else str(n.target)
        for n in graph.nodes
        if n.op == "call_function"
    ]


def _is_view(node) -> bool:
    """Whether a node is an input, or a view of one: it lies in memory anyway."""
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        node = node.args[0]
    return node.op == "placeholder"


def _node(node) -> tuple[str, Node]:
    """A scheduler's node: the scheduler's name for it, and what it is."""
    from torch._inductor import scheduler

    if isinstance(node, scheduler.ExternKernelSchedulerNode):
        kind, size = "library", ""
    elif isinstance(node, scheduler.SchedulerNode):
        ranges, over = node._sizes
        kind = "reduction" if node.is_reduction() else "pointwise"
        size = " × ".join(map(str, ranges)) + (f", along {' × '.join(map(str, over))}" if over else "")
    else:
        kind, size = "other", ""
    origins = getattr(node.node, "origins", None) or ()
    names = (getattr(o.target, "overloadpacket", o.target) for o in sorted(origins, key=lambda o: o.name))
    operators = tuple(dict.fromkeys(getattr(n, "__name__", str(n)).rpartition(".")[2] for n in names))
    reads = tuple(dict.fromkeys(d.name for d in sorted(node.read_writes.reads, key=lambda d: d.name)))
    buffer = next(iter(node.get_buffer_names()), node.get_name())
    return node.get_name(), Node(buffer, kind, operators, reads, size)


def _buffers(name: str, buffers: dict[str, str]) -> str:
    """ "op0_op1", a group of the scheduler's, as "buf0 + buf1"."""
    return " + ".join(buffers.get(part, part) for part in name.split("_"))
