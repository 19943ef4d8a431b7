"""Static rules: what an answer's text may import, name, call and change, read with `ast`; nothing is executed.

An answer runs beside the harness in one process, so the rules are lists of what is allowed where that is possible:
modules and the names taken from them, where a module may stand (before a dot, or alone to the right of `=`), and what
stands in a Triton kernel. Values whose type the text does not tell (tensors, numbers) are held to lists of attributes
that are refused. Which operators ran, and what is stale, shows at run time and is watched there.
"""

import ast
import dataclasses
import importlib.util
import re
import string
import sys
from collections import defaultdict
from collections.abc import Iterator

from ..exercises import Exercise
from ..slicing import parse
from . import names
from .names import KERNELS
from .scopes import Scope, Text

_GIVEN = {"helpers", "tl", "torch", "triton"}
_CLASSES = {"torch.Tensor", "torch.nn.Module", "triton.Config", "helpers.cuda.RawModule", "helpers.cuda.Kernel"}
_TOO_DEEP = (1, "The answer is nested too deeply to be read: write its expressions out in several statements.")
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_HOOKS = names.OUT_OF_TORCH | {"data_ptr", "item"}
"""Names by which Triton, torch or the check would call an object that looks like a tensor."""
_DEFINITION = _FUNCTION | ast.ClassDef


def broken(text: str, exercise: Exercise) -> list[tuple[int, str]]:
    """The rules that an answer's module text breaks, each (line of `text`, one sentence); empty where there are none.

    Text that is no Python breaks none: it cannot run, and whoever compiles it says so.
    """
    try:
        tree = parse(text)
    except (SyntaxError, ValueError):  # ValueError: it holds a null byte, or half of a surrogate pair
        return []
    except (RecursionError, MemoryError):
        return [_TOO_DEEP]
    if exercise.mojo:
        return list(_mojo_rules(text, tree, exercise))
    try:
        return _Rules(text, tree, exercise).findings()
    except RecursionError:
        return [_TOO_DEEP]


def settled(exercise: Exercise, text: str) -> Exercise:
    """The exercise as this answer takes it: where any rung will do, made of what its kernels are, else of "torch"."""
    if exercise.made_of != "any":
        return exercise
    try:
        nodes = list(ast.walk(parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        nodes = []
    used = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    used |= {alias.name for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
    made_of = next((made for name, made in (("jit", "triton"), ("RawModule", "cuda")) if name in used), "torch")
    return dataclasses.replace(exercise, made_of=made_of)


def _sentence(lines: list[str], number: int, what: str, instead: str) -> str:
    quoted = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    quoted = quoted if len(quoted) <= 120 else quoted[:117] + "..."
    return f"{what} in `{quoted}`: {instead}."


class _Rules:
    def __init__(self, text: str, tree: ast.Module, exercise: Exercise):
        self.lines, self.exercise = re.split(r"\r\n?|\n", text), exercise
        self.text = Text(tree)
        self.nodes = list(self.text.scope_of)
        self.is_kernel = exercise.made_of in KERNELS
        self.has_torch = exercise.made_of != "python" or "torch" in exercise.modules
        self.spaces = names.namespaces(exercise)
        self.extra = {f"torch.{n}" for n in exercise.allow | ({"compile"} & exercise.modules)}
        self.builtins = names.BUILTINS | (names.BUILTINS_OF_KERNELS if self.is_kernel else {})
        self.aliases: dict[tuple[Scope, str], set[str]] = {}
        self.bound: dict[str, list[tuple[Scope, ast.AST]]] = defaultdict(list)
        for scope, name, node in self.text.bindings:
            self.bound[name].append((scope, node))
        self.jitted: set[ast.FunctionDef] = set()
        self.found: set[tuple[int, str]] = set()

    def findings(self) -> list[tuple[int, str]]:
        self._learn_names()
        self._learn_kernels()
        for node in self.nodes:
            if check := getattr(self, f"_{type(node).__name__}", None):
                check(node)
        for scope, name, node in self.text.bindings:
            self._binding(scope, name, node)
        if self.exercise.made_of == "triton" or "triton" in self.exercise.modules:
            for function in self.jitted:
                self._triton_kernel(function)
        if self.is_kernel and self.exercise.form not in ("prediction", "choice"):
            self._made_of()
        return sorted(self.found)

    def say(self, node: ast.AST, what: str, instead: str) -> None:
        self.found.add((node.lineno, _sentence(self.lines, node.lineno, what, instead)))

    # ---- what a name stands for ----

    def _learn_names(self) -> None:
        """Which names stand for modules, or for what is taken from them: by import, or by `F = torch.nn.functional`."""
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    path = alias.name if alias.asname else first
                    if isinstance(node, ast.ImportFrom):
                        first, path = alias.name, f"{node.module}.{alias.name}"
                    self._learn(node, alias.asname or first, path)
        size = -1
        while size != (size := sum(map(len, self.aliases.values()))):  # an alias may have an alias
            for node in self.nodes:
                if isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign) and node.value:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for target in targets:
                        if isinstance(target, ast.Name):
                            for path in self._paths(node.value):
                                if {path, path.rpartition(".")[0]} & self.spaces.keys():  # not ever deeper: a = a.b
                                    self._learn(target, target.id, path)

    def _learn(self, node: ast.AST, name: str, path: str) -> None:
        scope = self.text.scope_of[node].home(name, isinstance(self.text.parent[node], ast.NamedExpr))
        self.aliases.setdefault((scope, name), set()).add(path)

    def _paths(self, node: ast.AST) -> set[str]:
        """The dotted paths into modules that an expression may stand for."""
        tail = []
        while isinstance(node, ast.Attribute):
            tail.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return set()
        roots = set()
        for scope in self.text.scope_of[node].holders(node.id):
            roots |= self.aliases.get((scope, node.id), set())
        return {".".join([root, *tail]) for root in roots}

    def _refused(self, path: str) -> str:
        """The shortest beginning of a path that is not allowed; empty where all is."""
        parts = path.split(".")
        for i, name in enumerate(parts, 1):
            so_far, home = ".".join(parts[:i]), ".".join(parts[: i - 1])
            if so_far in self.spaces or any(path.startswith(f"{so_far}.") for path in self.extra):
                continue
            rule = self.spaces.get(home, frozenset())
            is_named = rule(name) if callable(rule) else name in rule
            is_private = name.startswith("_") and name not in names.PRIVATE_OPERATORS | {"__version__"}
            if so_far not in self.extra and (not is_named or is_private or name in names.NEVER):
                return "" if home in self.spaces and _is_missing(home, name) else so_far
            # what a small name of an open namespace holds may be a module
            is_unknown = callable(rule) and name.islower() and name not in names.TORCH
            if home == "torch.ops.aten":
                return path if parts[i:] not in ([], ["default"], ["out"], ["Tensor"], ["Scalar"], ["dim"]) else ""
            return ".".join(parts[: i + 1]) if is_unknown and i < len(parts) else ""
        return ""

    def _instead(self, path: str) -> str:
        """What to do in place of taking `path` from a module."""
        root, _, name = path.partition(".")[0], *path.rpartition(".")[1:]
        if root == "torch" and self.is_kernel and names.is_operator(name):
            more = "".join(f", {n}" for n in sorted(self.exercise.allow))
            return f"PyTorch may allocate, fill and reshape here{more}, and your own kernel computes the rest"
        if root == "numpy":
            return "use torch for tensors, and np.float32(…) and its like for a kernel's scalar arguments only"
        advice = {
            "torch": "a check cannot follow what happens there, so use tensors and torch's operators directly",
            "triton": "write the kernel with triton.jit and the operations of tl",
            "helpers": "of helpers an answer needs machine.device() and machine.pick(…)"
            + " and cuda.RawModule" * ("helpers.cuda" in self.spaces),
        }
        return advice.get(root, "leave it out, or write it with what the exercise gives")

    # ---- imports ----

    def _Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name not in self.spaces:
                self._refuse_import(node, alias.name)

    def _ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            path = f"{node.module}.{alias.name}"
            is_idle = node.module == "helpers" and path != "helpers.exercises"  # one import line serves a whole lab
            if alias.name == "*":
                self.say(node, "Names are imported with a star", "import the names that you use, one by one")
            elif node.level:
                self.say(node, "A relative import stands", "an answer is one text: define what it needs in its cells")
            elif (refused := self._refused(path)) and not (is_idle and not self._is_read(alias.asname or alias.name)):
                self._refuse_import(node, refused)

    def _refuse_import(self, node: ast.AST, path: str) -> None:
        root = path.partition(".")[0]
        if root not in self.spaces or root in ("collections", "dataclasses", "functools", "typing"):
            may = sorted({s.partition(".")[0] for s in self.spaces} - {"__future__", "collections", "numpy"})
            instead = (
                f"an answer may import {', '.join(may)}; keep what needs more, such as a test, in a cell of its own"
            )
        else:
            instead = self._instead(path)
        self.say(node, f"`{path}` is imported", instead)

    def _is_read(self, name: str) -> bool:
        return any(isinstance(n, ast.Name) and n.id == name for n in self.nodes)

    # ---- names ----

    def _Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            return
        if node.id in self.builtins and not self._is_local(node):
            self.say(node, f"`{node.id}` is used", self.builtins[node.id])
        elif _is_dunder(node.id) and node.id not in ("__name__", "__debug__"):
            self.say(node, f"`{node.id}` is used", "an answer needs nothing of Python's own workings: leave it out")
        elif node.id == "type" and not self._is_local(node) and not self._is_question(node):
            self.say(node, "`type` is used", "compare with type(x) is …, or ask isinstance(x, …)")
        self._module_as_value(node)

    def _is_local(self, node: ast.Name) -> bool:
        """Whether a name surely is a function's own: one of a module or class may not be bound yet."""
        return any(s.kind in ("function", "comprehension") for s in self.text.scope_of[node].holders(node.id))

    def _is_question(self, node: ast.Name) -> bool:
        """Whether `type(x)` is compared, shown or looked up; a class that is kept could be changed."""
        call = self.text.parent[node]
        if not (isinstance(call, ast.Call) and call.func is node and len(call.args) == 1):
            return False
        user = self.text.parent[call]
        is_name = isinstance(user, ast.Attribute) and user.attr == "__name__"
        return is_name or isinstance(user, ast.Compare | ast.FormattedValue | ast.Subscript)

    def _binding(self, scope: Scope, name: str, node: ast.AST) -> None:
        """A name gets a value: is it one that stands for something else?"""
        modules = self.aliases.get((scope, name), set()) & self.spaces.keys()
        is_import, user = isinstance(node, ast.Import | ast.ImportFrom), self.text.parent.get(node)
        is_alias = isinstance(user, ast.Assign) and bool(self._paths(user.value) & self.spaces.keys())
        is_given = name in _GIVEN and (self.is_kernel or scope.kind == "module")
        is_method = scope.kind == "class" and isinstance(node, _FUNCTION)
        if _is_dunder(name) and not (is_method and name in names.DUNDERS[self.exercise.made_of]):
            self.say(node, f"`{name}` is defined", "give it a name of your own, without the underscores")
        elif name in ("print", *self.builtins) and scope.kind == "module":
            self.say(node, f"`{name}` gets another meaning", "choose a name that Python does not use")
        elif len(modules) > 1 or (not is_import and not is_alias and (modules or is_given)):
            self.say(node, f"`{name}` gets another meaning", "choose a name that stands for nothing else here")
        elif scope.kind == "class" and self.has_torch and name in _HOOKS:
            self.say(node, f"`{name}` is defined in a class", "choose a name that tensors do not have")

    # ---- attributes ----

    def _Attribute(self, node: ast.Attribute) -> None:
        self._attribute_name(node, node.attr, node.value)
        if not isinstance(node.ctx, ast.Load):
            self._changed(node)
        for path in self._paths(node):
            refused = self._refused(path)
            if refused == path:
                self.say(node, f"`{_spoken(path)}` is used", self._instead(path))
            elif path.startswith("torch.") and node.attr in self.exercise.forbid:
                self.say(node, f"`{path}` is used", "the exercise asks for another way")
        self._module_as_value(node)

    def _attribute_name(self, node: ast.AST, name: str, base: ast.AST | None) -> None:
        """What an attribute's name alone tells, whatever it is taken from."""
        if name.startswith("_"):
            if not self._may_be_private(node, name, base):
                self.say(node, f"The private attribute `{name}` is used", "use what is public of it, or leave it out")
        elif name in names.NEVER:
            self.say(node, f"The attribute `{name}` is used", "an answer needs its inputs only: leave it out")
        elif name in ("format", "format_map") and not _is_plain_format(base):
            self.say(node, f"`{name}` is used on a text that is not plain", 'write an f-string, such as f"{x.shape}"')
        elif not self.has_torch or name in self.exercise.allow:
            return
        elif name in names.OUT_OF_TORCH or (self.is_kernel and name in names.OUT_OF_TORCH_KERNELS):
            self.say(node, f"`{name}` is used", "it takes work out of sight of the check: stay with tensors")
        elif self.is_kernel and (name in names.OF_A_KERNEL or self._is_kernels_name(base)):
            self.say(
                node, f"`{name}` of a kernel is used", "launch the kernel as kernel[grid](…), and leave it at that"
            )
        elif self.is_kernel and name == "data_ptr" and not self._is_alignment(node):
            self.say(node, "`data_ptr` is used", "pass the tensor itself; for its alignment, x.data_ptr() % 16 is fine")

    def _is_kernels_name(self, base: ast.AST | None) -> bool:
        if not isinstance(base, ast.Name):
            return False
        holders = list(self.text.scope_of[base].holders(base.id))
        return any(made in self.jitted for scope, made in self.bound[base.id] if scope in holders)

    def _may_be_private(self, node: ast.AST, name: str, base: ast.AST | None) -> bool:
        is_super = isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "super"
        if name in names.PUBLIC_DESPITE_UNDERSCORES or (name == "__init__" and is_super):
            return True
        named = {f"torch.{name}", f"torch.ops.aten.{name}"} & self._paths(node)
        if any(not self._refused(path) for path in named):
            return True
        is_own = isinstance(base, ast.Name) and base.id in self._selves(node)
        return is_own and not name.startswith("__") and name not in names.OF_A_TENSOR and name in self._set_on_self()

    def _set_on_self(self) -> set[str]:
        """Attributes that methods set on their object, and methods."""
        stored = {n.attr for n in self.nodes if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)}
        return stored | {name for scope, name, _ in self.text.bindings if scope.kind == "class"}

    def _selves(self, node: ast.AST) -> set[str]:
        """The first parameters of the methods around a node."""
        out = set()
        while node in self.text.parent:
            parent = self.text.parent[node]
            if isinstance(node, _FUNCTION) and isinstance(parent, ast.ClassDef) and node.args.args:
                out.add(node.args.args[0].arg)
            node = parent
        return out

    def _is_alignment(self, node: ast.AST) -> bool:
        call = self.text.parent[node]
        user = self.text.parent.get(call)
        is_left = isinstance(user, ast.BinOp) and user.left is call and isinstance(user.op, ast.Mod | ast.BitAnd)
        return isinstance(call, ast.Call) and is_left and isinstance(user.right, ast.Constant)

    def _changed(self, node: ast.Attribute | ast.Subscript) -> None:
        """An attribute may be set on what the text itself makes: `self`, and objects of its own."""
        root = node
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if not isinstance(root, ast.Name):
            return
        said, scopes = f"`{ast.unparse(node)}` is set", list(self.text.scope_of[root].holders(root.id))
        if any((scope, root.id) in self.aliases for scope in scopes):
            self.say(node, said, "other code relies on it: work with names of your own")
        elif isinstance(node, ast.Attribute) and self.is_kernel and root.id not in self._selves(node):
            self.say(node, said, "keep the value in a variable of the function")
        elif isinstance(node, ast.Attribute) and self._is_a(_DEFINITION, root):
            self.say(node, said, "keep the value in a variable or in an object of your own")

    def _Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            root = node
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if self._paths(root):
                self._changed(node)

    def _MatchClass(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            self._attribute_name(node, name, None)

    # ---- modules and classes as values ----

    def _module_as_value(self, node: ast.Name | ast.Attribute) -> None:
        """A module stands before a dot, or alone to the right of `=`: elsewhere its further way cannot be followed."""
        parent, paths = self.text.parent[node], self._paths(node)
        if isinstance(parent, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            return
        said = ast.unparse(node)
        if paths & self.spaces.keys():
            is_alias = isinstance(parent, ast.Assign) and all(isinstance(t, ast.Name) for t in parent.targets)
            if not is_alias or self.text.scope_of[parent].kind == "class":
                self.say(node, f"The module `{said}` is passed on as a value", f"write {said}.NAME where you use it")
        elif paths & _CLASSES and not self._is_type_place(node):
            self.say(node, f"The class `{said}` is passed on as a value", "name it in annotations and isinstance only")
        elif "triton.jit" in paths and not self._is_jit_place(node):
            self.say(node, f"`{said}` is passed on as a value", "write @triton.jit above the kernel")
        elif {p.rpartition(".")[0] for p in paths} == {"numpy"} and not self._is_scalar_place(node):
            self.say(node, f"`{said}` is used outside of a kernel's arguments", self._instead("numpy"))

    def _is_type_place(self, node: ast.AST) -> bool:
        """Whether a class stands where its type counts: called, asked for, in an annotation, as a base."""
        parent = self.text.parent[node]
        while isinstance(parent, ast.Tuple | ast.Subscript | ast.BinOp):
            node, parent = parent, self.text.parent[parent]
        match parent:
            case ast.Call():
                is_asked = isinstance(parent.func, ast.Name) and parent.func.id in ("isinstance", "issubclass")
                return node is parent.func or (is_asked and node in parent.args[1:])
            case ast.arg() | ast.AnnAssign():
                return node is parent.annotation
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return node is parent.returns
            case ast.ClassDef():
                return node in parent.bases and "torch.Tensor" not in self._paths(node)
            case ast.Assign():
                return self.text.scope_of[parent].kind != "class"
        return isinstance(parent, ast.MatchClass | ast.Compare)

    def _is_jit_place(self, node: ast.AST) -> bool:
        """Whether triton.jit decorates a function, gets one that stands in the text, or gets another name."""
        parent = self.text.parent[node]
        if isinstance(parent, ast.Call) and parent.func is node:
            given = [*parent.args, *(k.value for k in parent.keywords if k.arg == "fn")]
            if given:
                return isinstance(given[0], ast.Name) and self._is_a(ast.FunctionDef, given[0])
            node, parent = parent, self.text.parent[parent]
        is_decorator = isinstance(parent, ast.FunctionDef) and node in parent.decorator_list
        return is_decorator or (isinstance(parent, ast.Assign) and isinstance(node, ast.Name | ast.Attribute))

    def _is_a(self, kinds, name: ast.Name) -> bool:
        """Whether a name that is read may stand for a definition of these kinds in the text."""
        holders = list(self.text.scope_of[name].holders(name.id))
        return any(isinstance(made, kinds) for scope, made in self.bound[name.id] if scope in holders)

    def _is_scalar_place(self, node: ast.AST) -> bool:
        """Whether `np.int32(n)` stands among a kernel's arguments, or gets a name."""
        call = self.text.parent[node]
        user = self.text.parent[call]
        return isinstance(call, ast.Call) and call.func is node and isinstance(user, ast.Tuple | ast.List | ast.Assign)

    def _ClassDef(self, node: ast.ClassDef) -> None:
        for keyword in node.keywords:
            self.say(keyword.value, f"A class is made with `{keyword.arg or '**'}`", "write a plain class")
        for base in node.bases:
            is_container = isinstance(base, ast.Name) and base.id in names.CONTAINERS
            if is_container or any(p.startswith("triton.language") for p in self._paths(base)):
                self.say(base, f"A class is made of `{ast.unparse(base)}`", "keep such a value in a plain class")

    # ---- calls and statements ----

    def _Call(self, node: ast.Call) -> None:
        named = {keyword.arg for keyword in node.keywords}
        if "functools.wraps" in self._paths(node.func) and (len(node.args) != 1 or named):
            self.say(node, "`functools.wraps` is used with more than a function", "write @functools.wraps(function)")
        if isinstance(node.func, ast.Name) and node.func.id == "print" and "file" in named:
            self.say(node, "`print` writes to a file", "leave file= out")
        backend = next((k.value for k in node.keywords if k.arg in ("backend", None)), ast.Constant(""))
        if "torch.compile" in self._paths(node.func) and not isinstance(backend, ast.Constant):
            self.say(node, "A backend of its own is given to the compiler", "name one of torch's, or none")
        if self.exercise.made_of == "cuda" and "order" in named:
            self.say(node, "The order of threads is chosen", "leave order= out: the check runs several orders")

    def _Try(self, node: ast.Try) -> None:
        if self.is_kernel:
            self.say(node, "`try` stands", "let errors through, since the check reads them; an if can ask before")

    _TryStar = _Try

    def _Constant(self, node: ast.Constant) -> None:
        if self.exercise.made_of != "cuda" or not isinstance(node.value, str):
            return
        lines = node.value.split("\n")
        for number, what, instead in _cuda_rules(node.value):
            line = min(node.lineno + number - 1, node.end_lineno)
            self.found.add((line, _sentence(lines, number, what, instead)))
        if re.match(r"\s*-+(?:I|include|isystem|L|B|fplugin|imacros|D\s*_|U)", node.value):
            self.say(node, f"The compiler option `{node.value}` is given", "give options such as -DTILE=16 only")

    # ---- kernels ----

    def _learn_kernels(self) -> None:
        """The functions that triton.jit gets, as a decorator or by a call."""

        def is_jit(made: ast.AST) -> bool:
            return "triton.jit" in self._paths(made.func if isinstance(made, ast.Call) else made)

        calls = [n for n in self.nodes if isinstance(n, ast.Call) and is_jit(n)]
        to = [a for call in calls for a in (*call.args, *(k.value for k in call.keywords))]
        given = {a.id for a in to if isinstance(a, ast.Name)}
        functions = [n for n in self.nodes if isinstance(n, ast.FunctionDef)]
        self.jitted = {n for n in functions if n.name in given or any(map(is_jit, n.decorator_list))}

    def _triton_kernel(self, function: ast.FunctionDef) -> None:
        """The body of a Triton kernel: interpreted it is Python, which a GPU has not."""
        body = [n for statement in function.body for n in ast.walk(statement)]
        inside = {*body, *ast.walk(function.args)}
        for node in body:
            match node:
                case ast.Subscript(ctx=ast.Store() | ast.Del()):
                    self._refuse_in_kernel(node, f"`{ast.unparse(node)}` is set", "write memory with tl.store")
                case ast.Global() | ast.Nonlocal() | ast.Lambda() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
                    self._refuse_in_kernel(node, "Python that a GPU has not stands", "use Triton's language only")
                case ast.Yield() | ast.YieldFrom() | ast.Await() | ast.FunctionDef() | ast.With():
                    self._refuse_in_kernel(node, "Python that a GPU has not stands", "use Triton's language only")
                case ast.Name(ctx=ast.Load()):
                    self._name_in_kernel(node, inside)

    def _refuse_in_kernel(self, node: ast.AST, what: str, instead: str) -> None:
        self.say(node, f"In a kernel, {what[0].lower()}{what[1:]}", instead)

    def _name_in_kernel(self, node: ast.Name, inside: set[ast.AST]) -> None:
        call = self.text.parent[node]
        is_called = isinstance(call, ast.Call) and call.func is node
        holders = list(self.text.scope_of[node].holders(node.id))
        bound = [made for scope, made in self.bound[node.id] if scope in holders]
        if paths := self._paths(node):
            if any(path.partition(".")[0] == "torch" for path in paths):
                self._refuse_in_kernel(node, f"`{node.id}` is used", "use the operations and types of tl")
            return
        for made in bound:
            if isinstance(made, ast.FunctionDef):
                if made not in self.jitted and not self._is_constexpr_function(made):
                    self._refuse_in_kernel(node, f"`{node.id}` is used", "decorate that function with @triton.jit")
            elif made in inside:
                if is_called:
                    self._refuse_in_kernel(
                        node, f"`{node.id}` is called", "call a @triton.jit function by its own name"
                    )
            elif not self._is_constant(made):
                self._refuse_in_kernel(node, f"`{node.id}` from outside is used", "pass it as an argument")

    def _is_constexpr_function(self, node: ast.FunctionDef) -> bool:
        return any("triton.constexpr_function" in self._paths(made) for made in node.decorator_list)

    def _is_constant(self, made: ast.AST) -> bool:
        """Whether a name is bound to a number, a text, a tl.constexpr or a type: what a kernel may see from outside."""
        user = self.text.parent.get(made)
        while isinstance(user, ast.Tuple):
            user = self.text.parent[user]
        if not isinstance(user, ast.Assign | ast.AnnAssign) or user.value is None:
            return False
        for part in ast.walk(user.value):
            is_made = isinstance(part, ast.Call) and self._paths(part.func) & {
                "triton.language.constexpr",
                "triton.cdiv",
                "triton.next_power_of_2",
                "triton.jit",
            }
            if isinstance(part, ast.Call) and not is_made and not _is_pure(part, self):
                return False
            if isinstance(part, ast.Lambda | ast.List | ast.Dict | ast.Set | ast.GeneratorExp | ast.ListComp):
                return False
        return True

    def _made_of(self) -> None:
        """The kernel that is asked for must stand somewhere in what the entry point uses."""
        entry, made_of = self.exercise.entry, self.exercise.made_of
        wanted = {"triton": "triton.jit", "cuda": "helpers.cuda.RawModule"}[made_of]
        homes: dict[str, list[ast.AST]] = {}
        for scope, name, node in self.text.bindings:
            if scope is scope.module:
                homes.setdefault(name, []).append(self._statement(node))
        seen, todo = set(), [entry]
        while todo:
            if (name := todo.pop()) in seen:
                continue
            seen.add(name)
            for node in (n for statement in homes.get(name, ()) for n in ast.walk(statement)):
                if isinstance(node, ast.Name | ast.Attribute) and wanted in self._paths(node):
                    return
                if isinstance(node, ast.Name):
                    todo.append(node.id)
        what, how = {
            "triton": ("No Triton kernel", "decorate a function with @triton.jit and launch it from here"),
            "cuda": ("No CUDA kernel", "compile CUDA C with cuda.RawModule(code=…) and launch its kernel from here"),
        }[made_of]
        for node in homes.get(entry, ())[:1]:
            self.say(node, f"{what} is reached from `{entry}`, defined", how)

    def _statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(self.text.parent.get(node, self.text.tree), ast.Module):
            node = self.text.parent[node]
        return node


def _is_missing(home: str, name: str) -> bool:
    """Whether a module is known not to hold a name, as where it is misspelt: then Python says so when it runs."""
    module = sys.modules.get(home)
    if module is None or hasattr(module, name):
        return False
    return not (hasattr(module, "__path__") and importlib.util.find_spec(f"{home}.{name}"))


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _spoken(path: str) -> str:
    return path.replace("triton.language", "tl").replace("helpers.", "")


def _is_pure(call: ast.Call, rules: _Rules) -> bool:
    """Whether a call only computes numbers: min(4, 8), math.log(2)."""
    if isinstance(call.func, ast.Name):
        return call.func.id in ("min", "max", "int", "float", "abs", "round", "len")
    return any(path.startswith(("math.", "helpers.machine.pick")) for path in rules._paths(call.func))


def _is_plain_format(base: ast.AST | None) -> bool:
    """Whether the text before .format is written there and its fields, {name:.2f}, look into no object."""
    if not (isinstance(base, ast.Constant) and isinstance(base.value, str)):
        return False
    try:
        fields = list(string.Formatter().parse(base.value))
    except ValueError:
        return True  # it raises before it looks at anything
    return not any(re.search(r"[.\[]", name or "") or "{" in (spec or "") for _, name, spec, _ in fields)


# ---- CUDA C ---------------------------------------------------------------------------------------------------------

_HEADERS = re.compile(
    r"<(?:cuda_(?:fp16|fp8|bf16|pipeline|pipeline_primitives|runtime|awbarrier)\.h|cuda_(?:fp16|fp8|bf16)\.hpp|mma\.h|"
    r"cuda\.h|cooperative_groups\.h|cooperative_groups/\w+\.h|cuda/(?:std/)?[a-z_]+|c?(?:math|stdint|float|limits|"
    r"assert|stddef)(?:\.h)?|(?:vector_types|vector_functions|math_constants|device_launch_parameters)\.h)>"
)
_HOST = re.compile(
    r"\b(?:system|popen|v?fork|execv?[lpe]*|posix_spawnp?|dlopen|dlsym|syscall|getenv|mmap|mprotect|ptrace|fopen|"
    r"pthread_create|process_vm_\w+|__has_include|__has_embed)\s*\(|#\s*embed\b|^\s*%:|\.incbin"
)
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|/\*.*?\*/|//[^\n]*', re.S)


def _cuda_rules(code: str) -> Iterator[tuple[int, str, str]]:
    """(line of the CUDA C text, what was found, what to do instead)."""
    spliced = code.replace("\\\n", "\0")  # a line that ends in a backslash goes on in the next one
    bare = _COMMENT.sub(lambda m: m[0] if m[0][0] in "\"'" else re.sub(r"[^\n\0]", " ", m[0]), spliced)
    defined = set(re.findall(r"#\s*define\s+(\w+)", bare))
    number = 1
    for part in bare.split("\n"):
        line = part.replace("\0", "")
        if m := re.match(r"\s*#\s*include\b\s*(.*)", line):
            if not _HEADERS.match(m[1].strip()):
                yield number, f"The header `{m[1].strip()}` is included", "a kernel here needs CUDA's own headers only"
        elif m := re.match(r"\s*#\s*(?:if|ifdef|ifndef|elif)\b(.*)", line):
            asked = set(re.findall(r"[A-Za-z_]\w*", m[1])) - {"__CUDA_ARCH__", "__cplusplus"}
            given = {n for n in asked if n.startswith(("__", "CC_")) or (n.startswith("_") and n not in defined)}
            for name in sorted(given | asked & {"linux", "unix"}):
                yield number, f"The compiler's macro `{name}` is asked for", "write the same code for every compiler"
        if m := _HOST.search(line):
            yield number, f"`{m[0].strip('( ')}` stands", "a kernel has no business with the host"
        if re.search(r"\basm\b.*\.(?:include|file)\b", line):
            yield number, "A file is included from assembly", "write the instructions out"
        number += 1 + part.count("\0")


# ---- Mojo -----------------------------------------------------------------------------------------------------------

_QUOTED = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*', re.S
)
_TAKEN = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([\w\s,]+\)|[\w \t,]+)$", re.M)


def mojo_text(text: str, entry: str) -> str:
    """The text of Mojo that an answer's module text gives the name `entry`; empty where it is not written out."""
    found = [node.value for node in parse(text).body if _is_text_of(node, entry)]
    return found[0].value if len(found) == 1 else ""


def _is_text_of(node: ast.stmt, entry: str) -> bool:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str())):
            return name == entry
    return False


def _mojo_rules(text: str, tree: ast.Module, exercise: Exercise) -> Iterator[tuple[int, str]]:
    """As `broken`: nothing but one text stands there, and of Mojo's library it has what computes."""
    lines, entry = text.split("\n"), exercise.entry
    if len(tree.body) != 1 or not _is_text_of(tree.body[0], entry):
        number = next((node.lineno for node in tree.body if not _is_text_of(node, entry)), 1)
        what, instead = f"`{entry}` is not one text that is written out", f'write it as {entry} = r"""…"""'
        yield number, _sentence(lines, number, what, f"{instead}, and nothing else")
        return
    first, code = tree.body[0].value.lineno, mojo_text(text, entry)
    for number, what, instead in _in_mojo(code, bool(exercise.mojo.main)):
        yield first + number - 1, _sentence(code.split("\n"), number, what, instead)


def _in_mojo(code: str, has_main: bool) -> Iterator[tuple[int, str, str]]:
    """(line of the text, what was found, what to do instead)."""
    bare = _QUOTED.sub(lambda m: re.sub(r"[^\n]", " " if m[0][0] == "#" else "0", m[0]), code)

    def line(at: int) -> int:
        return bare.count("\n", 0, at) + 1

    modules = names.MOJO if has_main else names.MOJO | names.MOJO_OF_MAX
    may = "an answer may import of " + ", ".join(sorted(modules))
    for hit in re.finditer(r"[^\x00-\x7f]|`|\\", bare):
        yield line(hit.start()), f"The sign `{hit[0]}` stands", "write names with letters, digits and underscores"
    for hit in re.finditer(r"\b[A-Za-z]+0{2}", bare):
        if re.match(r"[\"']", code[hit.end() - 2]) and not hit[0].startswith(("r0", "R0")):
            yield line(hit.start()), "A text with a prefix stands", "write it without"
    taken = list(_TAKEN.finditer(bare))
    allowed = [hit.span() for hit in taken]
    for hit in taken:
        home, listed = hit[1], re.findall(r"\w+(?:\s+as\s+\w+)?", hit[2])
        for name in (one.split()[0] for one in listed):
            if home not in modules or (modules[home] and name not in modules[home]):
                yield line(hit.start()), f"`{home}.{name}` is imported", may
    if not has_main:
        allowed += [hit.span() for hit in re.finditer(r"^import extensibility[ \t]*$", bare, re.M)]
        allowed += [hit.span() for hit in re.finditer(r"^@extensibility\.register\(", bare, re.M)]
    rest = list(bare)
    for low, high in allowed:
        rest[low:high] = re.sub(r"[^\n]", " ", bare[low:high])
    rest = "".join(rest)
    for hit in re.finditer(r"\b(?:from|import)\b", rest):
        yield line(hit.start()), "An import stands", f"write from MODULE import NAMES; {may}"
    for hit in re.finditer(r"@\s*([\w.]*)", rest):
        if hit[1] not in names.MOJO_DECORATORS and rest[: hit.start()].rpartition("\n")[2].strip() == "":
            yield line(hit.start()), f"`@{hit[1]}` stands", "leave it out"
    for hit in re.finditer(r"(?<![\w.])(std|extensibility|max(?=\s*\.)|[a-z_]\w*(?=\s*\.\s*mojo\b))\b", rest):
        yield line(hit.start()), f"`{hit[1]}` stands as a module", "import the names that you use"
    for hit in re.finditer(r"\b[A-Za-z_]\w*", rest):
        word = hit[0]
        if (word.startswith("__") and word not in names.MOJO_DUNDERS) or names.MOJO_NEVER.fullmatch(word):
            yield line(hit.start()), f"`{word}` is used", "an answer computes from its arguments alone"
