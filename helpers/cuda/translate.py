"""CUDA C text to C++ text that g++ compiles: the same lines, with what C++ cannot say rewritten in place."""

import re
from collections.abc import Sequence

from .arguments import closing, without_comments
from .nvrtc import FILE, CompileError

NOT_ON_A_CPU = "This CUDA C compiles for a GPU, but the CPU runner cannot run it."

# Headers that the runner answers itself; the lines stay, empty.
_ANSWERED = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*[<\"](?:cuda_runtime(?:_api)?\.h|"
    r"device_launch_parameters\.h|cuda_device_runtime_api\.h|cuda\.h|cassert|assert\.h|"
    r"vector_types\.h|vector_functions\.h|mma\.h|cuda_fp16\.h|cuda_bf16\.h|cuda_fp16\.hpp|cuda_bf16\.hpp)[>\"]",
    re.M,
)
_GPU_ONLY = {
    r"\basm\b": "inline PTX (asm)",
    r"\b(?:tex[123]D\w*|surf[123]D\w*|cudaTextureObject_t)\b": "a texture or surface",
    r"\b(?:__pipeline_\w+|__cvta_generic_to_shared|__cluster_\w+)\b": "an asynchronous copy or a cluster",
    r"<<<": "a launch from a kernel",
}
_GPU_ONLY_HEADERS = {
    r"^[ \t]*#[ \t]*include[ \t]*[<\"]cooperative_groups": "cooperative_groups.h",
    r"^[ \t]*#[ \t]*include[ \t]*[<\"](?:cuda|cub|thrust|cute|cutlass)/": "a header of CUDA's C++ libraries",
}


_ATTRIBUTES = "no_sanitize no_sanitize_thread no_instrument_function constructor destructor ifunc"
_UNSEEN = [f"{around}{name}{around}" for name in _ATTRIBUTES.split() for around in ("", "__")]
"""Attributes of g++ by which code would run where nobody looks: without its accesses being seen, or at no launch."""


def to_cpp(code: str, entries: Sequence[str], variables: Sequence[str]) -> str:
    """C++ for the runner. entries: kernels in the order of their `cc_entry_N`; variables: names to give addresses of.

    Raises `CompileError` with the line of what has no counterpart on a CPU.
    """
    bare = without_comments(code)
    for text, patterns in ((bare, _GPU_ONLY), (code, _GPU_ONLY_HEADERS)):
        for pattern, words in patterns.items():
            if m := re.search(pattern, text, re.M):
                line = text.count("\n", 0, m.start()) + 1
                raise CompileError(code, [(line, f"{words} has no counterpart on a CPU")], "", NOT_ON_A_CPU)
    uses = {"CC_HALF": r"cuda_fp16", "CC_BFLOAT16": r"cuda_bf16", "CC_WMMA": r"[<\"]mma\.h"}
    head = "".join(f"#define {macro}\n" for macro, pattern in uses.items() if re.search(pattern, code))
    head += '#include "runner.h"\n'
    head += f"#pragma GCC poison {' '.join(_UNSEEN)}\n"
    text = _ANSWERED.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), code)
    text = re.sub(r"(__shared__\s+)alignas\s*\(", r"\1__align__(", text)
    text = _dynamic_shared(_barriers_in_branches(text))
    # kernels may bear names that C's library uses (div, index), so the compiler sees them under others
    head += "".join(f"#define {name} cc_kernel_{name}\n" for name in entries if name.isidentifier())
    tail = [f"CC_ENTRY({i}, {name})" for i, name in enumerate(entries)] + [f"CC_VARIABLE({v})" for v in variables]
    anchor = (
        'static thread_local char cc_anchor_byte;\nextern "C" CC_EXPORT void* cc_anchor() { return &cc_anchor_byte; }\n'
    )
    return f'{head}#line 1 "{FILE}"\n{text}\n#line 1 "exports"\n' + "\n".join(tail) + "\n" + anchor


def variables(code: str) -> list[str]:
    """Names of `__constant__` and `__device__` variables at the top level of `code`."""
    bare, out, depth = without_comments(code), [], 0
    for m in re.finditer(r"[{}]|\b__(?:constant|device)__\b(?P<rest>[^;{}()=]*)(?P<end>[;={(\[])", bare):
        if m[0] in "{}":
            depth += 1 if m[0] == "{" else -1
            continue
        if depth == 0 and m["end"] != "(":
            name = re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", m["rest"])
            if name and not re.search(r"__global__|\boperator\b", m["rest"]):
                out.append(name[1])
        depth += m["end"] == "{"
    return list(dict.fromkeys(out))


def _barriers_in_branches(text: str) -> str:
    """`__syncthreads()` in the branch of an `if` gets a name of its own: all threads of a block must come to it, where
    one that stands in no branch may be reached by those only that have not returned."""
    bare, out, last = without_comments(text), [], 0
    branches, branch, depth, skip = [False], False, 0, 0  # of open braces; of the statement that is read; parentheses
    for m in re.finditer(r"(?<![#\w])(?<!# )if\s*\(|\belse\b|\b__syncthreads(?=\s*\()|[{};()]", bare):
        if m.start() < skip:
            continue
        if m[0] == "{":
            branches.append(branch or branches[-1])
        elif m[0] == "}":
            branches = branches[:-1] or [False]
        elif m[0] in "()":
            depth += 1 if m[0] == "(" else -1
        elif m[0] == "__syncthreads" and (branch or branches[-1]):
            out += [text[last : m.start()], "cc_syncthreads_in_if"]
            last = m.end()
        elif m[0] != "__syncthreads" and m[0] != ";":
            branch, skip = True, closing(bare, m.end() - 1) + 1 if m[0] != "else" else 0
        if m[0] in "{}" or (m[0] == ";" and depth == 0):
            branch = False
    return "".join([*out, text[last:]])


def _dynamic_shared(text: str) -> str:
    """`extern __shared__ T name[];` becomes a pointer to the launch's dynamic shared memory."""
    pattern = re.compile(
        r"extern\s+(?:__align__\s*\([^)]*\)\s*|alignas\s*\([^)]*\)\s*|volatile\s+)*__shared__\s+"
        r"(?P<align>(?:__align__\s*\([^)]*\)\s*|alignas\s*\([^)]*\)\s*)*)(?P<type>[^;=\[\]]+?)\s*\b(?P<name>\w+)\s*\[\s*\]\s*;"
    )

    def pointer(m: re.Match) -> str:
        lines = "\n" * m[0].count("\n")
        kind = " ".join(m["type"].split())
        return f"auto* const {m['name']} = ({kind}*)cc_dynamic_shared();{lines}"

    bare = without_comments(text)
    out, last = [], 0
    for m in pattern.finditer(bare):
        if bare.count("{", 0, m.start()) == bare.count("}", 0, m.start()):  # not in a function: known only at run time
            replacement = f"static const cc::DynamicShared<{' '.join(m['type'].split())}> {m['name']};" + "\n" * m[
                0
            ].count("\n")
        else:
            replacement = pointer(m)
        out += [text[last : m.start()], replacement]
        last = m.end()
    return "".join([*out, text[last:]])
