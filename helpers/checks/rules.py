"""Static rules: what an answer's text may import, name, call and change, read with `ast`; nothing is executed.

An answer runs beside the harness in one process, so the rules are lists of what is allowed where that is possible:
modules, the names taken from them, and where a module may stand (before a dot, or alone to the right of `=`).
Values whose type the text does not tell (tensors, numbers) are held to lists of attributes that are refused. What
only shows at run time (which operators ran, stale results) is watched there.
"""

import ast
import importlib
import re
import string
import sys
import types
from collections.abc import Callable, Iterator

from ..exercises import Exercise

KERNELS = ("triton", "cuda")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# ---- names taken from modules ---------------------------------------------------------------------------------------

_DTYPES = _words("""
    float16 float32 float64 bfloat16 half float double int8 int16 int32 int64 uint8 uint16 uint32 uint64 short int long
    bool complex64 complex128 float8_e4m3fn float8_e5m2
""")
_TORCH_CLASSES = _words("Tensor Size dtype device layout memory_format Generator finfo iinfo")
_TORCH = (  # types, facts, allocation, fill, views: what a wrapper around a kernel needs
    _DTYPES
    | _TORCH_CLASSES
    | _words("""
    __version__ strided contiguous_format channels_last preserve_format inf nan pi e newaxis
    is_tensor is_floating_point is_complex is_signed numel promote_types result_type can_cast broadcast_shapes typename
    is_grad_enabled get_default_dtype manual_seed initial_seed no_grad inference_mode enable_grad set_grad_enabled
    empty empty_like empty_strided empty_permuted zeros zeros_like ones ones_like full full_like arange linspace eye
    tensor as_tensor scalar_tensor rand rand_like randn randn_like randint randint_like randperm fill
    as_strided atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to chunk detach diagonal flatten moveaxis
    movedim narrow permute ravel reshape select split split_with_sizes squeeze swapaxes swapdims t tensor_split
    transpose unbind unflatten unsqueeze view_as_complex view_as_real
""")
)
_TORCH_CUDA = _words("""
    OutOfMemoryError current_device device device_count device_of get_device_capability get_device_name
    get_device_properties is_available is_bf16_supported mem_get_info synchronize
""")
_NOT_OPERATORS = _words("""
    asarray classproperty compile compiled_with_cxx11_abi default_generator fork from_dlpack from_file from_numpy
    frombuffer get_device_module get_file_path get_rng_state load merge_type_from_type_comment
    prepare_multiprocessing_environment save seed thread_safe_generator to_dlpack unify_type_list wait while_loop
    accelerator amp ao autograd backends builtins classes compiler cpp cpu ctypes cuda distributed distributions export
    fft func functional functools futures fx glob hub importlib inspect jit library linalg masked math monitor mps mtia
    multiprocessing nested nn ops optim os overrides package platform profiler quantization quasirandom random
    return_types serialization signal sparse special storage sys testing textwrap threading torch torch_version types
    utils version warnings windows xpu
""")
_NOT_FUNCTIONS = _words("""
    assert_int_or_pair boolean_dispatch dataclasses grad handle_torch_function has_torch_function
    has_torch_function_unary has_torch_function_variadic importlib math np reproducibility_notes sparse_support_notes
    tf32_notes torch warnings common_notes core
""")


def _is_operator(name: str) -> bool:
    made = re.fullmatch(r"(set|import|parse|init|is_anomaly|autocast|clear|profiler)_\w+|use_deterministic\w+", name)
    return name in _TORCH or (name == name.lower() and name not in _NOT_OPERATORS and not made)


def _is_function(name: str) -> bool:
    return name == name.lower() and name not in _NOT_FUNCTIONS


def _is_layer(name: str) -> bool:
    return name[:1].isupper()


def _any(name: str) -> bool:
    return True  # attributes that begin with an underscore, and those in _NEVER, are refused everywhere


_TRITON = _words("""
    __version__ Config autotune cdiv constexpr_function heuristics jit next_power_of_2 reinterpret set_allocator
""")
_TL = _words("""
    PropagateNan TRITON_MAX_TENSOR_NUMEL abs add advance arange argmax argmin associative_scan assume atomic_add
    atomic_and atomic_cas atomic_max atomic_min atomic_or atomic_xchg atomic_xor bfloat16 block_type broadcast
    broadcast_to cast cat cdiv ceil clamp const constexpr constexpr_type cos cumprod cumsum debug_barrier
    device_assert device_print div_rn dot dot_scaled dtype erf exp exp2 expand_dims fdiv flip float16 float32 float64
    float8e4b15 float8e4b8 float8e4nv float8e5 float8e5b16 floor fma full gather histogram inline_asm_elementwise int1
    int16 int32 int64 int8 interleave join load load_tensor_descriptor log log2 make_block_ptr make_tensor_descriptor
    map_elementwise max max_constancy max_contiguous maximum min minimum mul multiple_of num_programs
    pair_uniform_to_normal permute philox pi32_t pointer_type program_id rand rand4x randint randint4x randn randn4x
    range ravel reduce reduce_or reshape rsqrt sigmoid sin softmax sort split sqrt sqrt_rn squeeze static_assert
    static_print static_range store store_tensor_descriptor sub sum swizzle2d tensor tensor_descriptor
    tensor_descriptor_type topk trans tuple uint16 uint32 uint64 uint8 uint_to_uniform_float umulhi unsqueeze view void
    where xor_sum zeros zeros_like
""")
_TL_MATH = _words("abs ceil cos div_rn erf exp exp2 fdiv floor fma log log2 rsqrt sin sqrt sqrt_rn umulhi")
_CUDA_HELPERS = _words("""
    AssertFailed BadArgument CompileError Deadlock Kernel KernelError LaunchError OutOfBounds RawModule
""")
_NUMPY_SCALARS = _words("""
    bool_ float16 float32 float64 int8 int16 int32 int64 intc uint8 uint16 uint32 uint64 uintc
""")
_TYPING = _words("""
    Annotated Any Callable ClassVar Dict Final Generic Iterable Iterator List Literal Mapping NamedTuple Optional
    Protocol Self Sequence Set Tuple Type TypeAlias TypeVar TypedDict Union cast
""")
_DATACLASSES = _words("KW_ONLY FrozenInstanceError InitVar asdict astuple dataclass field replace")
_FUNCTOOLS = _words("cache cached_property cmp_to_key lru_cache partial reduce wraps")


def _public(module: str) -> frozenset[str]:
    """The names that a module of the standard library offers, without the modules that it imports itself."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", [n for n in vars(found) if not n.startswith("_")])
    return frozenset(n for n in names if not isinstance(vars(found).get(n), types.ModuleType))


Rule = frozenset[str] | Callable[[str], bool]


def _namespaces(exercise: Exercise) -> dict[str, Rule]:
    """The modules that an answer may use, by dotted path, each with what it may take from them."""
    made_of, named, is_open = exercise.made_of, exercise.allow - {"*"}, "*" in exercise.allow
    spaces: dict[str, Rule] = {
        "__future__": _words("annotations"),
        "collections": frozenset(),
        "collections.abc": _public("collections.abc"),
        "dataclasses": _DATACLASSES,
        "functools": _FUNCTOOLS,
        "helpers": _words("start"),
        "helpers.machine": _words("device gpu here pick"),
        "itertools": _public("itertools"),
        "math": _public("math"),
        "typing": _TYPING,
    }
    if made_of == "python":
        spaces["statistics"] = _public("statistics")
    if made_of == "cuda":
        spaces |= {"helpers.cuda": _CUDA_HELPERS, "numpy": _NUMPY_SCALARS}
    if made_of in KERNELS:
        spaces |= {
            "triton": _TRITON,
            "triton.language": _TL,
            "triton.language.math": _TL_MATH,
            "triton.language.extra": frozenset(),
            "triton.language.extra.cuda": _words("globaltimer num_threads num_warps smid"),
            "triton.language.extra.cuda.libdevice": _is_function,
            "triton.language.extra.libdevice": _is_function,
        }
    if made_of != "python" or "torch" in exercise.modules:
        spaces |= {
            "torch": _is_operator if is_open else _TORCH | named,
            "torch.cuda": _TORCH_CUDA,
            "torch.nn": _is_layer if made_of == "torch" else _words("Module Parameter"),
            "torch.nn.functional": _is_function if is_open else named,
            "torch.ops": frozenset(),
            "torch.ops.aten": _is_function if is_open else named,
        }
        if is_open:
            spaces |= dict.fromkeys(("torch.linalg", "torch.fft", "torch.special", "torch.nn.init"), _is_function)
            spaces |= {"torch.amp": _words("autocast"), "torch.nn.attention": _words("SDPBackend sdpa_kernel")}
    for module in exercise.modules - {"torch", "compile"}:
        parts = module.split(".")
        spaces = dict.fromkeys([".".join(parts[:i]) for i in range(1, len(parts))], frozenset()) | spaces
        spaces[module] = _public(module) if parts[0] in sys.stdlib_module_names else _any
    return spaces


# ---- builtins and attributes ----------------------------------------------------------------------------------------

_BUILTINS = _words("""
    BaseException KeyboardInterrupt SystemExit breakpoint compile copyright credits delattr eval exec exit getattr
    globals help input license locals memoryview open quit setattr vars
""")
_BUILTINS_OF_KERNELS = _words("hash id")
_NEVER = _words("""
    ag_await ag_code ag_frame co_code co_consts co_names cr_await cr_code cr_frame cr_origin f_back f_builtins f_code
    f_globals f_lasti f_lineno f_locals f_trace func_globals gi_code gi_frame gi_yieldfrom mro tb_frame tb_lasti
    tb_lineno tb_next
    atexit builtins ctypes faulthandler gc importlib inspect linecache marshal multiprocessing os pickle pkgutil pty
    resource runpy shutil signal_module socket subprocess sys sysconfig tempfile threading traceback tracemalloc
    weakref zipimport
""")
"""Attributes that lead to frames, to code, or from one module into another."""

_LEAVES_TORCH = _words("""
    apply_ map2_ map_ numpy pin_memory register_hook set_ share_memory_ storage tolist typed_storage untyped_storage
""")
_LEAVES_KERNELS = _words("cpu item register_post_accumulate_grad_hook record_stream")
_OF_A_KERNEL = _words("add_pre_run_hook cache_hook device_caches fn parse preload raw_src run src warmup")
_DUNDERS = _words("""
    __call__ __getitem__ __init__ __iter__ __len__ __name__ __post_init__ __repr__
""")
_GIVEN = _words("helpers torch triton tl")

_HEADERS = re.compile(
    r"<(?:cuda_(?:fp16|fp8|bf16|pipeline|pipeline_primitives|runtime|awbarrier)\.h|cuda_(?:fp16|fp8|bf16)\.hpp|mma\.h|"
    r"cuda\.h|cooperative_groups\.h|cooperative_groups/\w+\.h|cuda/(?:std/)?[a-z_]+|c?(?:math|stdint|float|limits|"
    r"assert|stddef)(?:\.h)?|(?:vector_types|vector_functions|math_constants|device_launch_parameters)\.h)>"
)
_HOST = re.compile(
    r"\b(?:system|popen|v?fork|execv?[lpe]*|posix_spawnp?|dlopen|dlsym|syscall|getenv|mmap|mprotect|ptrace|fopen|"
    r"pthread_create|process_vm_\w+|__has_include|__has_embed)\s*\(|#\s*embed\b|%:|\.incbin"
)


_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|/\*.*?\*/|//[^\n]*', re.S)


def _cuda_rules(code: str) -> Iterator[tuple[int, str, str]]:
    """(line of the CUDA C text, what was found, what to do instead)."""
    spliced = code.replace("\\\n", "\0")  # a line that ends in a backslash goes on in the next one
    blank = re.sub(_COMMENT, lambda m: m[0] if m[0][0] in "\"'" else re.sub(r"[^\n\0]", " ", m[0]), spliced)
    number = 1
    for part in blank.split("\n"):
        line = part.replace("\0", "")
        if m := re.match(r"\s*#\s*include\b\s*(.*)", line):
            if not _HEADERS.match(m[1].strip()):
                yield number, f"The header {m[1].strip()} is included", "a kernel here may include CUDA's own headers"
        elif m := re.match(r"\s*#\s*(?:if|ifdef|ifndef|elif)\b(.*)", line):
            for name in re.findall(r"[A-Za-z_]\w*", m[1]):
                if (name.startswith("_") and name != "__CUDA_ARCH__") or name in ("linux", "unix", "CC_HALF"):
                    yield (
                        number,
                        f"The compiler's macro `{name}` is asked for",
                        "write the same code for every compiler",
                    )
        if m := _HOST.search(line):
            yield number, f"`{m[0].strip('( ')}` stands", "a kernel has no business with the host: compute on the GPU"
        if re.search(r"\basm\b.*\.(?:include|file)\b", line):
            yield number, "A file is included from assembly", "write the instructions out"
        number += 1 + part.count("\0")


# ---- scopes ---------------------------------------------------------------------------------------------------------


class _Scope:
    """Names that the module, or one function, lambda, comprehension or class binds."""

    def __init__(self, kind: str, parent: "_Scope | None" = None):
        self.kind, self.parent = kind, parent
        self.bound: set[str] = set()
        self.globals: set[str] = set()
        self.module: _Scope = parent.module if parent else self

    def home(self, name: str, is_walrus: bool = False) -> "_Scope":
        """The scope in which this one binds a name: a walrus in a comprehension binds outside of it."""
        scope = self
        while is_walrus and scope.kind == "comprehension":
            scope = scope.parent
        return scope.module if name in scope.globals else scope

    def holders(self, name: str) -> Iterator["_Scope"]:
        """The scopes from which a name that is read here may come, the nearest first."""
        scope = self
        while scope:
            if name in scope.globals and scope is not scope.module:
                scope = scope.module
                continue
            if name in scope.bound and (scope.kind != "class" or scope is self):
                yield scope
                if scope.kind in ("function", "comprehension"):
                    return  # in a class or the module, a name that is not bound yet comes from further out
            scope = scope.parent


class _Text:
    """The tree of an answer, with each node's parent and scope, and all bindings."""

    def __init__(self, tree: ast.Module):
        self.tree = tree
        self.scope_of: dict[ast.AST, _Scope] = {}
        self.parent: dict[ast.AST, ast.AST] = {}
        self.bindings: list[tuple[_Scope, str, ast.AST]] = []
        self._visit(tree, _Scope("module"))

    def _visit(self, node: ast.AST, scope: _Scope) -> None:
        self.scope_of[node] = scope
        inner, outside = scope, []
        match node:
            case ast.Global():
                scope.globals |= set(node.names)
            case ast.Name(ctx=ast.Store() | ast.Del()):
                self._bind(scope.home(node.id, isinstance(self.parent[node], ast.NamedExpr)), node.id, node)
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self._bind(scope.home(name), name, node)
            case ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar() if node.name:
                self._bind(scope.home(node.name), node.name, node)
            case ast.MatchMapping() if node.rest:
                self._bind(scope.home(node.rest), node.rest, node)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._bind(scope.home(node.name), node.name, node)
                inner = _Scope("class" if isinstance(node, ast.ClassDef) else "function", scope)
                outside = [*node.decorator_list, getattr(node, "returns", None)]
                outside += [*getattr(node, "bases", []), *getattr(node, "keywords", [])]
            case ast.Lambda():
                inner = _Scope("function", scope)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                inner, outside = _Scope("comprehension", scope), [node.generators[0].iter]
        if isinstance(arguments := getattr(node, "args", None), ast.arguments):
            of = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
            outside += [*arguments.defaults, *arguments.kw_defaults, *(a.annotation for a in of if a)]
            for a in of:
                if a:
                    self._bind(inner, a.arg, a)
        self._children(node, scope, inner, outside)

    def _children(self, node, scope: _Scope, inner: _Scope, outside: list) -> None:
        for child in ast.iter_child_nodes(node):
            self.parent[child] = node
            if isinstance(child, ast.arguments | ast.arg | ast.comprehension):
                self.scope_of[child] = inner
                self._children(child, scope, inner, outside)
            else:
                self._visit(child, scope if child in outside else inner)

    def _bind(self, scope: _Scope, name: str, node: ast.AST) -> None:
        scope.bound.add(name)
        self.bindings.append((scope, name, node))


# ---- the rules ------------------------------------------------------------------------------------------------------


def broken(text: str, exercise: Exercise) -> list[tuple[int, str]]:
    """The rules that an answer's module text breaks, each (line of `text`, one sentence); empty where there are none.

    Text that is no Python breaks none: it cannot run, and whoever compiles it says so.
    """
    try:
        return _Rules(text, exercise).findings()
    except SyntaxError:
        return []
    except RecursionError:
        return [(1, "The answer is nested too deeply to be read: write its expressions out in several statements.")]


def broken_cuda(code: str) -> list[tuple[int, str]]:
    """The rules that CUDA C text breaks, as it is given to RawModule: (line of `code`, one sentence)."""
    lines = code.split("\n")
    return [(n, _sentence(lines, n, what, instead)) for n, what, instead in _cuda_rules(code)]


def _sentence(lines: list[str], number: int, what: str, instead: str) -> str:
    quoted = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    quoted = quoted if len(quoted) <= 120 else quoted[:117] + "..."
    return f"{what} in `{quoted}`: {instead}."


class _Rules:
    def __init__(self, text: str, exercise: Exercise):
        self.lines, self.exercise = re.split(r"\r\n?|\n", text), exercise
        self.text = _Text(ast.parse(text))
        self.is_kernel = exercise.made_of in KERNELS
        self.spaces = _namespaces(exercise)
        self.extra = {f"torch.{n}" for n in exercise.allow} | {"torch.compile"} & {
            f"torch.{n}" for n in exercise.modules
        }
        self.aliases: dict[tuple[_Scope, str], set[str]] = {}
        self.found: dict[tuple[int, str], None] = {}

    def findings(self) -> list[tuple[int, str]]:
        self._learn_names()
        for node in self.text.scope_of:
            if check := getattr(self, f"_{type(node).__name__}", None):
                check(node)
        for scope, name, node in self.text.bindings:
            self._binding(scope, name, node)
        if self.is_kernel and self.exercise.form not in ("prediction", "choice"):
            self._made_of()
        return sorted(self.found)

    def say(self, node: ast.AST, what: str, instead: str) -> None:
        self.found[node.lineno, _sentence(self.lines, node.lineno, what, instead)] = None

    # -- what a name stands for

    def _learn_names(self) -> None:
        """Which names stand for modules, or for what is taken from them: by import, or by `F = torch.nn.functional`."""
        for node in self.text.scope_of:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._learn(node, alias.asname or alias.name.partition(".")[0],
                                alias.name if alias.asname else alias.name.partition(".")[0])  # fmt: skip
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    self._learn(node, alias.asname or alias.name, f"{node.module}.{alias.name}")
        size = -1
        while size != (size := sum(map(len, self.aliases.values()))):
            for node in self.text.scope_of:
                if isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign) and node.value:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for path in self._paths(node.value):
                        for target in targets:
                            if isinstance(target, ast.Name):
                                self._learn(target, target.id, path)

    def _learn(self, node: ast.AST, name: str, path: str) -> None:
        scope = self.text.scope_of[node].home(name, isinstance(self.text.parent[node], ast.NamedExpr))
        self.aliases.setdefault((scope, name), set()).add(path)

    def _paths(self, node: ast.AST) -> set[str]:
        """The dotted paths into modules that an expression may stand for."""
        tail = []
        while isinstance(node, ast.Attribute):
            tail.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return set()
        holders = self.text.scope_of[node].holders(node.id)
        roots = set().union(*(self.aliases.get((scope, node.id), ()) for scope in holders))
        return {".".join([root, *reversed(tail)]) for root in roots}

    def _admits(self, path: str) -> bool:
        home, _, name = path.rpartition(".")
        if path in self.spaces or path in self.extra:
            return True
        rule = self.spaces.get(home, frozenset())
        if name.startswith("_"):
            return name == "__version__" or (name in self.exercise.allow and home == "torch.ops.aten")
        return name not in _NEVER and (rule(name) if callable(rule) else name in rule)

    def _refused(self, path: str) -> str:
        """The shortest beginning of a path that is not allowed; empty where all is."""
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            so_far = ".".join(parts[:i])
            if so_far in self.spaces:
                continue
            if not self._admits(so_far):
                return so_far
            name = parts[i - 1]
            is_closed = callable(self.spaces.get(".".join(parts[: i - 1]))) and name.islower()
            if is_closed and i < len(parts) and name not in _TORCH and not so_far.startswith("torch.ops.aten"):
                return ".".join(parts[: i + 1])  # what an unknown small name holds may be a module
            return ""
        return ""

    def _instead(self, path: str) -> str:
        """What to do in place of taking `path` from a module."""
        root, _, rest = path.partition(".")
        if root == "torch" and self.is_kernel and not self.extra & {path} and _is_operator(path.rpartition(".")[2]):
            more = "".join(f", {n}" for n in sorted(self.exercise.allow))
            return f"PyTorch may allocate, fill and reshape here{more}, and your own kernel computes the rest"
        if root == "torch":
            return "a check cannot follow what happens there, so use tensors and torch's operators directly"
        if root == "triton":
            return "write the kernel with triton.jit and the operations of tl"
        if root == "helpers":
            names = "machine.device(), machine.pick(…)" + " and cuda.RawModule" * (self.exercise.made_of == "cuda")
            return f"of helpers an answer needs {names} only"
        if root == "numpy":
            return "use torch for tensors, np.float32(…) and its like for a kernel's scalar arguments"
        return "leave it out, or write it with what the exercise gives"

    # -- nodes

    def _Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._imported(node, alias.name, alias.asname or alias.name.partition(".")[0], is_module=True)

    def _ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name == "*":
                self.say(node, "Names are imported with a star", "import the names that you use, one by one")
            elif node.level:
                self.say(node, "A relative import stands", "an answer is one text: define what it needs in its cells")
            else:
                self._imported(node, f"{node.module}.{alias.name}", alias.asname or alias.name)

    def _imported(self, node, path: str, name: str, is_module: bool = False) -> None:
        is_idle = getattr(node, "module", "") == "helpers" and not self._is_read(name)
        if is_idle and path != "helpers.exercises":
            return  # one import line serves a whole lab
        if is_module and path not in self.spaces or (refused := self._refused(path)):
            path = path if is_module else refused
            self.say(node, f"`{path}` is imported", self._import_instead(path))

    def _import_instead(self, path: str) -> str:
        root = path.partition(".")[0]
        if root in ("torch", "triton", "helpers", "numpy") and root in self.spaces:
            return self._instead(path)
        may = sorted({s.partition(".")[0] for s in self.spaces} - {"__future__", "collections", "numpy"})
        return f"an answer may import {', '.join(may)}, so keep what needs more, such as a test, in a cell of its own"

    def _is_read(self, name: str) -> bool:
        return any(isinstance(n, ast.Name) and n.id == name for n in self.text.scope_of)

    def _Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            return
        name, kinds = node.id, [s.kind for s in self.text.scope_of[node].holders(node.id)]
        is_local = kinds[-1:] in (["function"], ["comprehension"])
        refused = _BUILTINS | (_BUILTINS_OF_KERNELS if self.is_kernel else frozenset())
        if name in refused and not is_local:
            self.say(
                node, f"`{name}` is used", _BUILTIN_ADVICE.get(name, "an answer needs neither it nor what it opens")
            )
        elif _is_dunder(name) and name not in ("__name__", "__debug__"):
            self.say(node, f"`{name}` is used", "an answer needs nothing of Python's own workings: leave it out")
        elif name == "type" and not is_local:
            self._type(node)
        self._module_as_value(node)

    def _type(self, node: ast.Name) -> None:
        """`type(x)` may be compared, shown and looked up; a class that is kept could be changed."""
        call = self.text.parent[node]
        if isinstance(call, ast.Call) and call.func is node and len(call.args) == 1:
            user = self.text.parent[call]
            if isinstance(user, ast.Compare | ast.FormattedValue | ast.Subscript):
                return
            if isinstance(user, ast.Attribute) and user.attr == "__name__":
                return
        self.say(node, "`type` is used", "compare with type(x) is …, or ask isinstance(x, …)")

    def _Attribute(self, node: ast.Attribute) -> None:
        self._attribute_name(node, node.attr, node.value)
        if not isinstance(node.ctx, ast.Load):
            self._changed(node)
        for path in self._paths(node):
            refused = self._refused(path)
            if refused == path or (refused and refused.rpartition(".")[0] == path.rpartition(".")[0]):
                self.say(node, f"`{_spoken(path)}` is used", self._instead(path))
            elif path.startswith("torch.") and node.attr in self.exercise.forbid:
                self.say(node, f"`{path}` is used", "the exercise asks for another way")
        self._module_as_value(node)

    def _attribute_name(self, node: ast.AST, name: str, base: ast.AST | None) -> None:
        """What an attribute's name alone tells, whatever it is taken from."""
        torch_free = self.exercise.made_of == "python" and "torch" not in self.exercise.modules
        is_own = isinstance(base, ast.Name) and base.id in self._selves(node)
        if name.startswith("_"):
            is_super = isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "super"
            if not (
                name in ("__name__", "__version__")
                or (name == "__init__" and is_super)
                or (is_own and not _is_dunder(name))
                or (
                    name in self.exercise.allow
                    and "torch.ops.aten" in {p.rpartition(".")[0] for p in self._paths(node)}
                )
            ):
                self.say(node, f"The private attribute `{name}` is used", "use what is public of it, or leave it out")
        elif name in _NEVER:
            self.say(node, f"The attribute `{name}` is used", "an answer needs its inputs only: leave it out")
        elif name in ("format", "format_map"):
            if not self._is_plain_format(base):
                self.say(
                    node, f"`{name}` with fields that look into objects is used", 'write an f-string, f"{x.shape}"'
                )
        elif torch_free or is_own or name in self.exercise.allow:
            return
        elif name in _LEAVES_TORCH or (self.is_kernel and name in _LEAVES_KERNELS):
            self.say(node, f"`{name}` is used", "it takes values out of torch, where your kernel should compute them")
        elif self.is_kernel and name in _OF_A_KERNEL:
            self.say(
                node, f"`{name}` of a kernel is used", "launch the kernel as kernel[grid](…), and leave it at that"
            )
        elif self.is_kernel and name == "data_ptr" and not self._is_alignment(node):
            self.say(node, "`data_ptr` is used", "pass the tensor itself; for its alignment, x.data_ptr() % 16 is fine")

    def _selves(self, node: ast.AST) -> set[str]:
        """The first parameters of the methods around a node."""
        out = set()
        while node in self.text.parent:
            parent = self.text.parent[node]
            if isinstance(node, ast.FunctionDef) and isinstance(parent, ast.ClassDef) and node.args.args:
                out.add(node.args.args[0].arg)
            node = parent
        return out

    def _is_alignment(self, node: ast.Attribute) -> bool:
        call = self.text.parent[node]
        user = self.text.parent.get(call)
        return isinstance(call, ast.Call) and isinstance(user, ast.BinOp) and user.left is call \
            and isinstance(user.op, ast.Mod | ast.BitAnd) and isinstance(user.right, ast.Constant)  # fmt: skip

    def _is_plain_format(self, base: ast.AST | None) -> bool:
        if not (isinstance(base, ast.Constant) and isinstance(base.value, str)):
            return False
        try:
            fields = list(string.Formatter().parse(base.value))
        except ValueError:
            return True  # it raises before it looks at anything
        return not any(re.search(r"[.\[]", name or "") or "{" in (spec or "") for _, name, spec, _ in fields)

    def _changed(self, node: ast.Attribute | ast.Subscript) -> None:
        """An attribute may be set on what the text itself makes: `self`, and instances of its own classes."""
        root = node
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name):
            scopes = list(self.text.scope_of[root].holders(root.id))
            if any((scope, root.id) in self.aliases for scope in scopes):
                said = f"`{ast.unparse(node)}` is changed"
                self.say(node, said, "other code relies on it: work with names of your own")
            elif isinstance(node, ast.Attribute) and self.is_kernel and root.id not in self._selves(node):
                self.say(node, f"`{ast.unparse(node)}` is set", "keep the value in a variable of the function")
            elif isinstance(node, ast.Attribute) and any(self._is_definition(s, root.id) for s in scopes):
                self.say(
                    node, f"`{ast.unparse(node)}` is set", "keep the value in a variable or in an object of your own"
                )

    def _is_definition(self, scope: _Scope, name: str) -> bool:
        kinds = ast.FunctionDef | ast.ClassDef
        return any(s is scope and n == name and isinstance(node, kinds) for s, n, node in self.text.bindings)

    def _Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            root = node
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if self._paths(root):
                self._changed(node)

    def _module_as_value(self, node: ast.Name | ast.Attribute) -> None:
        """A module stands before a dot, or alone to the right of `=`: elsewhere its further way cannot be followed."""
        if not isinstance(node.ctx, ast.Load):
            return
        parent = self.text.parent[node]
        if isinstance(parent, ast.Attribute):
            return
        paths = self._paths(node)
        if paths & self.spaces.keys():
            is_alias = isinstance(parent, ast.Assign) and all(isinstance(t, ast.Name) for t in parent.targets)
            if not (is_alias and self.text.scope_of[parent].kind != "class"):
                self.say(node, f"The module `{ast.unparse(node)}` is passed on as a value",
                         f"write {ast.unparse(node)}.NAME where you use it")  # fmt: skip
        elif paths & {"torch.Tensor", "torch.nn.Module", "triton.Config"} and not self._is_type_place(node):
            self.say(node, f"The class `{ast.unparse(node)}` is passed on as a value",
                     "name it in annotations and in isinstance only")  # fmt: skip

    def _is_type_place(self, node: ast.AST) -> bool:
        parent = self.text.parent[node]
        while isinstance(parent, ast.Tuple | ast.Subscript | ast.BinOp):
            node, parent = parent, self.text.parent[parent]
        if isinstance(parent, ast.Call):
            is_asked = isinstance(parent.func, ast.Name) and parent.func.id in ("isinstance", "issubclass")
            return node is parent.func or (is_asked and node in parent.args[1:])
        is_annotation = isinstance(parent, ast.arg | ast.AnnAssign) and node is parent.annotation
        is_returns = isinstance(parent, ast.FunctionDef) and node is parent.returns
        is_base = isinstance(parent, ast.ClassDef) and "torch.Tensor" not in self._paths(node)
        is_alias = isinstance(parent, ast.Assign) and self.text.scope_of[parent].kind != "class"
        return is_annotation or is_returns or is_base or is_alias or isinstance(parent, ast.MatchClass | ast.Compare)

    def _Call(self, node: ast.Call) -> None:
        if self._paths(node.func) & {"functools.wraps"} and (len(node.args) != 1 or node.keywords):
            self.say(node, "`functools.wraps` is used with more than the function", "write @functools.wraps(function)")
        if self.exercise.made_of == "cuda" and any(k.arg == "order" for k in node.keywords):
            self.say(node, "The order of threads is chosen", "leave order= out: the check runs several orders")

    def _MatchClass(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            self._attribute_name(node, name, None)

    def _ClassDef(self, node: ast.ClassDef) -> None:
        for keyword in node.keywords:
            self.say(keyword.value, f"A class is made with `{keyword.arg or '**'}`", "write a plain class")

    def _Try(self, node: ast.Try) -> None:
        if self.is_kernel:
            self.say(
                node,
                "`try` stands",
                "let errors through, since the check reads them, and test for what you foresee with if",
            )

    _TryStar = _Try

    def _Constant(self, node: ast.Constant) -> None:
        if self.exercise.made_of == "cuda" and isinstance(node.value, str):
            lines = node.value.split("\n")
            for number, what, instead in _cuda_rules(node.value):
                line = min(node.lineno + number - 1, node.end_lineno)
                self.found[line, _sentence(lines, number, what, instead)] = None
            if re.match(r"-+(?:I|include|isystem|L|B|fplugin|imacros)", node.value):
                self.say(node, f"The compiler option {node.value} is given", "give options such as -DTILE=16 only")

    def _binding(self, scope: _Scope, name: str, node: ast.AST) -> None:
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        paths = self.aliases.get((scope, name), set())
        modules = paths & self.spaces.keys()
        user = self.text.parent.get(node)
        is_alias = isinstance(user, ast.Assign) and bool(self._paths(user.value) & self.spaces.keys())
        if _is_dunder(name) and not (scope.kind == "class" and name in _DUNDERS):
            self.say(node, f"`{name}` is defined", "give it a name of your own, without the underscores")
        elif name in ("print", *_BUILTINS) and scope.kind == "module":
            self.say(node, f"`{name}` gets another meaning", "choose a name that Python does not use")
        elif len(modules) > 1 or (not is_import and not is_alias and (modules or self._is_given(scope, name))):
            self.say(node, f"`{name}` gets another meaning", "choose a name that stands for nothing else here")

    def _is_given(self, scope: _Scope, name: str) -> bool:
        return name in _GIVEN and (self.is_kernel or scope.kind == "module")

    # -- what it must hold

    def _made_of(self) -> None:
        """The kernel that is asked for, somewhere in what the entry point uses."""
        entry, wanted = self.exercise.entry, {"triton": "triton.jit", "cuda": "helpers.cuda.RawModule"}
        homes: dict[str, list[ast.AST]] = {}
        for scope, name, node in self.text.bindings:
            if scope is scope.module:
                homes.setdefault(name, []).append(self._statement(node))
        seen, todo = set(), [entry]
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            for node in (n for statement in homes.get(name, ()) for n in ast.walk(statement)):
                if isinstance(node, ast.Name | ast.Attribute) and wanted[self.exercise.made_of] in self._paths(node):
                    return
                if isinstance(node, ast.Name):
                    todo.append(node.id)
        for node in homes.get(entry, ()):
            what = {"triton": "No Triton kernel", "cuda": "No CUDA kernel"}[self.exercise.made_of]
            how = {
                "triton": "decorate a function with @triton.jit and launch it from here",
                "cuda": "compile CUDA C with cuda.RawModule(code=…) and launch its kernel from here",
            }[self.exercise.made_of]
            self.say(node, f"{what} is reached from `{entry}`", how)
            return

    def _statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(self.text.parent.get(node, self.text.tree), ast.Module):
            node = self.text.parent[node]
        return node


_BUILTIN_ADVICE = {
    "getattr": "write the attribute out, as in x.shape",
    "setattr": "write the assignment out, or keep the value in a variable",
    "delattr": "leave the attribute as it is",
    "id": "key a table by shape and dtype: another tensor may have the same id later",
    "hash": "key a table by shape and dtype",
    "exit": "return the result, or raise ValueError",
    "quit": "return the result, or raise ValueError",
    "SystemExit": "return the result, or raise ValueError",
    "open": "an answer computes from its inputs alone, without files",
    "input": "an answer computes from its arguments alone",
    "BaseException": "name the exception that you expect",
}


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _spoken(path: str) -> str:
    return path.replace("triton.language", "tl").replace("helpers.", "")
