"""What an answer may take from modules, and the names that it may not use: the lists behind `rules`.

A namespace (`torch.nn.functional`) comes with a rule: the set of names that may be taken from it, or a predicate.
"""

import importlib
import re
import sys
import types
from collections.abc import Callable

from ..exercises import Exercise

KERNELS = ("triton", "cuda")
Rule = frozenset[str] | Callable[[str], bool]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# ---- torch ----------------------------------------------------------------------------------------------------------

TORCH = _words("""
    float16 float32 float64 bfloat16 half float double int8 int16 int32 int64 uint8 uint16 uint32 uint64 short int long
    bool complex64 complex128 float8_e4m3fn float8_e5m2
    Tensor Size dtype device layout memory_format Generator finfo iinfo
    strided contiguous_format channels_last preserve_format inf nan pi e
    is_tensor is_floating_point is_complex is_signed numel promote_types result_type can_cast broadcast_shapes typename
    get_default_dtype initial_seed manual_seed inference_mode no_grad
    arange as_tensor empty empty_like empty_permuted empty_strided eye fill full full_like linspace ones ones_like rand
    rand_like randint randint_like randn randn_like randperm scalar_tensor tensor zeros zeros_like
    as_strided atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to chunk detach diagonal flatten moveaxis
    movedim narrow permute ravel reshape select split split_with_sizes squeeze swapaxes swapdims t tensor_split
    transpose unbind unflatten unsqueeze view_as_complex view_as_real
""")
"""What a wrapper around a kernel needs of torch: types, facts, allocation, fill, views."""

PRIVATE_OPERATORS = _words("_addmm_activation _scaled_mm")
"""Operators that PyTorch gives no public name; where any operator may be called, these may."""

_NOT_OPERATORS = _words("""
    asarray classproperty compile compiled_with_cxx11_abi cond default_generator fork from_dlpack from_file from_numpy
    frombuffer get_device_module get_file_path get_rng_state load merge_type_from_type_comment
    prepare_multiprocessing_environment save seed thread_safe_generator to_dlpack unify_type_list
    use_deterministic_algorithms wait while_loop
    accelerator amp ao autograd backends builtins classes compiler cpp cpu ctypes cuda distributed distributions export
    fft func functional functools futures fx glob hub importlib inspect jit library linalg masked math monitor mps mtia
    multiprocessing nested nn ops optim os overrides package platform profiler quantization quasirandom random
    return_types serialization signal sparse special storage sys testing textwrap threading torch torch_version types
    utils version warnings windows xpu
""")
_NOT_FUNCTIONS = _words("""
    assert_int_or_pair boolean_dispatch common_notes core dataclasses grad handle_torch_function has_torch_function
    has_torch_function_unary has_torch_function_variadic importlib math np reproducibility_notes sparse_support_notes
    tf32_notes torch warnings
""")
_CHANGES_TORCH = ("set_", "import_", "parse_", "init_", "autocast_", "clear_", "profiler_", "is_anomaly_")


def is_operator(name: str) -> bool:
    """Whether torch.NAME is an operator, a type or a fact: neither a module nor a switch."""
    plain = name == name.lower() and name not in _NOT_OPERATORS and not name.startswith(_CHANGES_TORCH)
    return plain or name in TORCH or name in PRIVATE_OPERATORS or name == "set_grad_enabled"


def is_function(name: str) -> bool:
    """Whether NAME of torch.nn.functional, torch.linalg, libdevice, … is a function."""
    return (name == name.lower() and name not in _NOT_FUNCTIONS) or name in PRIVATE_OPERATORS


# ---- the others -----------------------------------------------------------------------------------------------------

_NOT_TL = _words("condition core extra math philox_impl random slice standard str_to_ty target_info to_tensor")


def _is_of_tl(name: str) -> bool:
    """Whether tl.NAME may be an operation or a type; one that does not exist is for Triton to say."""
    return name not in _NOT_TL


def _public(module: str) -> frozenset[str]:
    """The names that a module of the standard library offers, without the modules that it imports itself."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", [n for n in vars(found) if not n.startswith("_")])
    return frozenset(n for n in names if not isinstance(vars(found).get(n), types.ModuleType))


def namespaces(exercise: Exercise) -> dict[str, Rule]:
    """The modules that an answer may use, by dotted path, each with its rule."""
    made_of, named, is_open = exercise.made_of, exercise.allow - {"*"}, "*" in exercise.allow
    spaces: dict[str, Rule] = {
        "__future__": _words("annotations"),
        "collections": _words("Counter OrderedDict defaultdict deque namedtuple"),
        "collections.abc": _public("collections.abc"),
        "dataclasses": _words("KW_ONLY FrozenInstanceError InitVar asdict astuple dataclass field replace"),
        "functools": _words("cache cached_property cmp_to_key lru_cache partial reduce wraps"),
        "helpers": frozenset(),
        "helpers.machine": _words("device gpu here pick"),
        "itertools": _public("itertools"),
        "math": _public("math"),
        "typing": _words("""
            Annotated Any Callable ClassVar Dict Final Generic Iterable Iterator List Literal Mapping NamedTuple
            Optional Protocol Self Sequence Set Tuple Type TypeAlias TypeVar TypedDict Union cast
        """),
    }
    if made_of == "python":
        spaces["statistics"] = _public("statistics")
    if made_of == "cuda":
        spaces["numpy"] = NUMPY_SCALARS
        spaces["helpers.cuda"] = _words("""
            AssertFailed BadArgument CompileError Deadlock Kernel KernelError LaunchError OutOfBounds RawModule
        """) | _words("TensorMap tensor_map" if exercise.needs else "")
        spaces["triton"] = _words("cdiv next_power_of_2")
    if made_of == "triton" or "triton" in exercise.modules:
        spaces |= {
            "triton": _words("Config autotune cdiv constexpr_function heuristics jit next_power_of_2 reinterpret"),
            "triton.language": _is_of_tl,
            "triton.language.math": _words("""
                abs ceil cos div_rn erf exp exp2 fdiv floor fma log log2 rsqrt sin sqrt sqrt_rn umulhi
            """),
            "triton.language.extra": frozenset(),
            "triton.tools": frozenset(),
            "triton.tools.tensor_descriptor": _words("TensorDescriptor"),
            "triton.language.extra.cuda": _words("globaltimer num_threads num_warps smid"),
            "triton.language.extra.cuda.libdevice": is_function,
            "triton.language.extra.libdevice": is_function,
        }
    if made_of != "python" or "torch" in exercise.modules:
        spaces |= {
            "torch": is_operator if is_open else TORCH | named,
            "torch.cuda": _words("""
                OutOfMemoryError current_device device device_count device_of get_device_capability get_device_name
                get_device_properties is_available is_bf16_supported mem_get_info synchronize
            """),
            "torch.nn": (lambda name: name[0].isupper()) if made_of == "torch" else _words("Module Parameter"),
            "torch.nn.functional": is_function if is_open else named,
            "torch.ops": frozenset(),
            "torch.ops.aten": is_function if is_open else named,
        }
        if is_open:
            spaces |= dict.fromkeys(("torch.linalg", "torch.fft", "torch.special", "torch.nn.init"), is_function)
            spaces |= {"torch.amp": _words("autocast"), "torch.nn.attention": _words("SDPBackend sdpa_kernel")}
    for module in exercise.modules - {"torch", "compile", "triton"}:
        parts = module.split(".")
        spaces = dict.fromkeys([".".join(parts[:i]) for i in range(1, len(parts))], frozenset()) | spaces
        spaces[module] = _public(module) if parts[0] in sys.stdlib_module_names else lambda name: True
    return spaces


NUMPY_SCALARS = _words("bool_ float16 float32 float64 int8 int16 int32 int64 intc uint8 uint16 uint32 uint64 uintc")

# ---- builtins and attributes ----------------------------------------------------------------------------------------

BUILTINS = {
    **dict.fromkeys(
        _words("breakpoint compile copyright credits eval exec globals help license locals memoryview open vars"),
        "an answer computes from its arguments alone",
    ),
    **dict.fromkeys(_words("KeyboardInterrupt SystemExit exit quit"), "return the result, or raise ValueError"),
    "BaseException": "name the exception that you expect",
    "delattr": "leave the attribute as it is",
    "getattr": "write the attribute out, as in x.shape",
    "input": "an answer computes from its arguments alone",
    "setattr": "write the assignment out, or keep the value in a variable",
}
"""Builtins that are refused, and what to do instead."""

BUILTINS_OF_KERNELS = dict.fromkeys(("hash", "id"), "key a table by shape and dtype, if you need one")

NEVER = _words("""
    ag_await ag_code ag_frame co_code co_consts co_names cr_await cr_code cr_frame cr_origin f_back f_builtins f_code
    f_globals f_lasti f_lineno f_locals f_trace func_globals gi_code gi_frame gi_yieldfrom mro tb_frame tb_lasti
    tb_lineno tb_next
    atexit builtins ctypes dump dumps faulthandler gc importlib inspect linecache marshal multiprocessing os pickle
    pkgutil resource runpy shutil socket subprocess sys sysconfig tempfile threading tofile traceback tracemalloc
    weakref
""")
"""Attributes that lead to frames and code, or from one module into another."""

PUBLIC_DESPITE_UNDERSCORES = _words("__name__ __version__ _asdict _fields _replace")

OUT_OF_TORCH = _words("""
    apply_ map2_ map_ numpy pin_memory register_hook set_ share_memory_ storage tolist typed_storage untyped_storage
""")
"""Methods that take values out of torch, to where operators are not seen."""

OUT_OF_TORCH_KERNELS = _words("""
    backward cpu item record_stream register_post_accumulate_grad_hook requires_grad_ retain_grad
""")
OF_A_KERNEL = _words("""
    add_pre_run_hook base_fn cache_hook check_disk_cache constexprs create_binder device_caches do_bench fn
    get_capture_scope launch_metadata parse perf_model post_hook pre_hook pre_run_hooks preload prune_configs raw_src
    rewrite rewriter rewritten_fn run src used_global_vals warmup
""")
OF_A_TENSOR = _words("_C _base _cdata _make_subclass _make_wrapper_subclass _storage _typed_storage")

DUNDERS = {
    "python": _words("__call__ __enter__ __exit__ __getitem__ __init__ __iter__ __len__ __post_init__ __repr__"),
    "torch": _words("__call__ __init__ __post_init__ __repr__"),
    "triton": _words("__call__ __init__ __post_init__"),
    "cuda": _words("__call__ __init__ __post_init__"),
}
"""Methods with a meaning for Python that an answer's classes may have, by what it is made of."""

CONTAINERS = _words("bool bytearray bytes complex dict float frozenset int list object set str tuple type")

# ---- Mojo -----------------------------------------------------------------------------------------------------------

MOJO: dict[str, frozenset[str]] = {
    "max.algorithm": _words("vectorize"),
    "max.gpu": _words("""
        WARP_SIZE barrier block_dim block_idx global_idx grid_dim lane_id syncwarp thread_idx warp_id
    """),
    "max.gpu.primitives": _words("warp"),
    "std.algorithm": _words("vectorize"),
    "std.bit": frozenset(),
    "std.collections": _words("Array InlineArray"),
    "std.math": frozenset(),
    "std.memory": _words("AddressSpace stack_allocation"),
    "std.sys": _words("align_of is_amd_gpu is_gpu is_nvidia_gpu simd_width_of size_of"),
    "std.utils": _words("Index IndexList StaticTuple"),
    "std.utils.index": _words("Index IndexList"),
    "std.utils.numerics": frozenset(),
}
"""The modules that an answer of Mojo's may import from, each with the names, none for all of them."""

MOJO_OF_MAX: dict[str, frozenset[str]] = {
    "extensibility": _words("InputTensor OutputTensor foreach"),
    "max.gpu.host": _words("DeviceContext"),
    "std.utils.coord": frozenset(),
}
"""What an operator of MAX's needs beyond."""

MOJO_DECORATORS = _words("always_inline fieldwise_init no_inline parameter staticmethod unroll")
MOJO_DUNDERS = _words("__init__ __getitem__ __setitem__ __call__ __add__ __mul__ __sub__ __len__")
MOJO_NEVER = re.compile(
    r"open|input|file|FileDescriptor|exit|abort|abi|external_call|inlined_assembly|llvm_intrinsic|Python\w*|FileHandle|\w*DLHandle|Path|"
    r"Process|Thread|unsafe_from_address|\w*get_as_pointer|os|ffi|subprocess|getenv|enqueue_\w+|compile_function\w*|"
    r"rebind\w*|create_\w*buffer|debug_assert|breakpoint|is_compile_time"
)
"""What reaches out of an answer: files, processes, foreign code, memory that it was not given."""
