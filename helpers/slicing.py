"""A backward slice: the top-level statements of some cells that a name needs, as the text of one module.

A slice holds imports, definitions, assignments, and the `if`/`for`/`with`/`try` statements that bind a name, each
as it was written, in the order it ran. Where a name is bound several times, the last binding before its use counts;
a function's body reads its globals when it is called, so for those it is the last binding before the call.

Expression statements (`helpers.start()`, `print(x)`) are left out, save for those that change a kept object:
`x[0] = 3`, `x.scale = 2`, `x.add_(1)`, `names.append("a")`, `torch.manual_seed(0)`, `torch.set_…(…)`, bare or
in a loop, and `operator.register_…(…)`; a function that `@operator.register_…` decorates is kept with it. What a slice
cannot see: a change made inside a function or kernel (`fill(x)`, `kernel[grid](x)`) or through a second name
(`y = x.view(-1); y[0] = 3`), a global bound by a called function, `exec`, names in strings, and magics (`%time f()` is
dropped, `%%time` and `%%capture` are looked through, other cell magics are skipped).
"""

import ast
import builtins
import contextlib
import importlib
import re
import symtable
import sys
import threading
from dataclasses import dataclass
from functools import cached_property

_MODULE_NAMES = {"__name__", "__file__", "__doc__", "__builtins__", "__annotations__"}
_COMPREHENSIONS = {"listcomp", "setcomp", "dictcomp", "genexpr"}
_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Delete)
_UNCERTAIN = (ast.If, ast.For, ast.While, ast.Try, ast.TryStar, ast.Match, ast.AugAssign)
_PYTHON_MAGICS = {"time", "timeit", "capture", "prun"}
_STARRED = {"cupy", "jax", "math", "numpy", "torch", "triton", "tvm"}
_MAGIC = re.compile(r"(?m)^[ \t]*[%!?,;/]|\?[ \t]*$|=[ \t]*[%!]")
MOST_MAGICS = 40
"""In a cell; IPython reads it anew for each, which with thousands takes minutes."""
_parsing = threading.Lock()
_CHANGES = re.compile(
    r"([a-z]\w*_|append|extend|insert|update|add|setdefault|pop|remove|clear|sort|reverse|seed|manual_seed|set_\w+"
    r"|register_\w+)$"
)


class Missing(NameError):
    """Names that no statement of the source binds: `names`; the message says where they were looked for.

    text: what the source does hold of the slice. unreadable: the first SyntaxError that one of its cells has.
    """

    def __init__(self, names, where: str, hint: str = "", text: str = "", unreadable: SyntaxError | None = None):
        self.names, self.text, self.unreadable = tuple(sorted(names)), text, unreadable
        said = ", ".join(f"`{n}`" for n in self.names)
        verb = "is" if len(self.names) == 1 else "are"
        super().__init__(f"{said} {verb} bound nowhere: looked in {where}.{' ' + hint if hint else ''}")


def module_text(cells: list[str], names, where: str) -> str:
    """The module text that `names` need, from the texts of `cells` in the order they ran.

    Cells that are not Python are passed over, as a kernel that refused them did. Raises `Missing`, which says
    `where` in words.
    """
    top, unreadable = [], {}
    for number, cell in enumerate(cells, 1):
        try:
            top += statements(plain(cell))
        except SyntaxError as error:
            unreadable[number] = error
    keep, missing = _needed(top, names)
    future = dict.fromkeys(s.text for s in top if s.is_future)
    text = _joined([*future, *(top[i].text for i in sorted(keep) if not top[i].is_future)])
    if missing:
        hint = f"Cell {', '.join(map(str, unreadable))} could not be read as Python." if unreadable else ""
        raise Missing(missing, where, hint, text, next(iter(unreadable.values()), None))
    return text


def _needed(top, names) -> tuple[set[int], set[str]]:
    """(positions of the statements to keep, names bound nowhere). A want is (name, before which position, whether
    its absence is no error: a loop's own variable, say, is read by the statement that binds it)."""
    keep, missing, seen = set(), set(), set()
    want = [(name, len(top), False) for name in names]
    while want or (want := _changing(top, keep)):
        request = want.pop()
        if request in seen:
            continue
        seen.add(request)
        name, end, optional = request
        hit = next((i for i in reversed(range(end)) if name in top[i].binds), None)
        if hit is None or isinstance(top[hit].node, ast.Delete):
            known = hit is None and (hasattr(builtins, name) or name in _MODULE_NAMES)
            if not (optional or known):
                missing.add(name)
            continue
        keep.add(hit)
        if isinstance(top[hit].node, _UNCERTAIN):  # it may not bind the name: then an older binding counts
            want.append((name, hit, True))
        want += top[hit].wants(hit, end)
    return keep, missing


def _changing(top, keep) -> list:
    """Keep the statements that change a kept object after it was bound; returns what they want in turn."""
    bound, want = {}, []
    for i in sorted(keep):
        for name in top[i].binds:
            bound.setdefault(name, i)
    for i, statement in enumerate(top):
        if i not in keep and any(bound.get(name, i) < i for name in statement.changes):
            keep.add(i)
            want += statement.wants(i, i)
    return want


def _joined(texts: list[str]) -> str:
    out, last = "", ""
    for text in texts:
        blank = "\n\n" if "\n" in text or "\n" in last else ""
        out, last = out + (blank if out else "") + text + "\n", text
    return out


@dataclass(frozen=True)
class Statement:
    """One top-level statement: its text, and the global names that it binds, reads and changes."""

    text: str
    node: ast.stmt

    @cached_property
    def binds(self) -> set[str]:
        visitor = _Binds()
        visitor.visit(self.node)
        return visitor.names

    @cached_property
    def changes(self) -> set[str]:
        """Names whose objects it changes without binding them, outside function bodies."""
        visitor = _Changes()
        visitor.visit(self.node)
        return visitor.names

    @cached_property
    def reads(self) -> tuple[set[str], set[str]]:
        """(names read while it runs, names read later, by the body of a function that it defines)."""
        now, later = set(), set()
        tables = [(symtable.symtable(self.text, "cell", "exec"), False)]
        top = tables[0][0]
        while tables:
            table, is_later = tables.pop()
            into = later if is_later else now
            for symbol in table.get_symbols():
                name = symbol.get_name()
                if table is top:
                    # Python 3.12 lists a comprehension's own variable here too, as assigned
                    if symbol.is_referenced() and (name in self.binds or not symbol.is_assigned()):
                        into.add(name)
                elif symbol.is_global() and (symbol.is_referenced() or symbol.is_declared_global()):
                    into.add(name)
            for child in table.get_children():
                is_body = "function" in str(child.get_type()).lower() and child.get_name() not in _COMPREHENSIONS
                tables.append((child, is_later or is_body))
        if isinstance(self.node, ast.AugAssign) and isinstance(self.node.target, ast.Name):
            now.add(self.node.target.id)
        return now, later

    @property
    def is_future(self) -> bool:
        return isinstance(self.node, ast.ImportFrom) and self.node.module == "__future__"

    def wants(self, position: int, end: int) -> list[tuple[str, int, bool]]:
        """What it needs: names read while it runs before its `position`, those read later before `end`."""
        own = set() if isinstance(self.node, _SIMPLE) else self.binds
        now, later = self.reads
        return [(n, position, n in own) for n in now] + [(n, end, n in own) for n in later]


class _Binds(ast.NodeVisitor):
    def __init__(self):
        self.names = set()

    def visit_Name(self, node):
        if not isinstance(node.ctx, ast.Load):
            self.names.add(node.id)

    def visit_FunctionDef(self, node):
        self.names.add(node.name)

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_TypeAlias(self, node):
        self.names.add(node.name.id)

    def visit_Lambda(self, node):
        pass

    def visit_comprehension(self, node):  # its targets are its own; a walrus in it binds outside
        for part in (node.iter, *node.ifs):
            self.visit(part)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.generic_visit(node)

    def visit_Import(self, node):
        for alias in node.names:
            self.names |= _star(node) if alias.name == "*" else {alias.asname or alias.name.partition(".")[0]}

    visit_ImportFrom = visit_Import

    def visit_MatchAs(self, node):
        self.names |= {node.name} - {None}
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs

    def visit_MatchMapping(self, node):
        self.names |= {node.rest} - {None}
        self.generic_visit(node)


class _Changes(ast.NodeVisitor):
    def __init__(self):
        self.names = set()

    def visit_FunctionDef(self, node):
        for decorator in node.decorator_list:  # @softmax.register_fake
            made = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(made, ast.Attribute) and _CHANGES.match(made.attr):
                self.names |= _root(made)

    def visit_Lambda(self, node):
        pass

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Subscript(self, node):
        if not isinstance(node.ctx, ast.Load):
            self.names |= _root(node)
        self.generic_visit(node)

    visit_Attribute = visit_Subscript

    def visit_Call(self, node):
        if isinstance(node.func, ast.Attribute) and _CHANGES.match(node.func.attr):
            self.names |= _root(node.func)
        self.generic_visit(node)


def _root(node) -> set[str]:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def _star(node) -> set[str]:
    """The names that `from module import *` binds; none of a module that must not run here.

    A notebook may be anybody's, and to import is to run: so besides what is loaded already only modules of `_STARRED`
    are, and of those no program.
    """
    name = node.module or ""
    module, (first, *rest) = sys.modules.get(name), name.split(".")
    if not module and first in _STARRED and "__main__" not in rest:
        with contextlib.suppress(Exception, SystemExit):  # it fails when the answer runs too, and that says why
            module = importlib.import_module(name)
    return set(getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])) if module else set()


def parse(text: str, name: str = "<unknown>") -> ast.Module:
    """`ast.parse`, one thread at a time: Python 3.11 loses count of a tree's depth where two threads build theirs, and
    raises SystemError. Raises what `ast.parse` raises."""
    with _parsing:
        return ast.parse(text, name)


def statements(text: str) -> list[Statement]:
    """The top-level statements of Python text, without `if __name__ == "__main__":` blocks. Raises SyntaxError."""
    body, lines = parse(text).body, re.split(r"\r\n?|\n", text)  # other ends of lines are none to Python
    starts = [min([n.lineno, *(d.lineno for d in getattr(n, "decorator_list", []))]) for n in body]
    found = []
    for i, node in enumerate(body):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            continue
        shares_line = (i > 0 and body[i - 1].end_lineno == starts[i]) or (
            i + 1 < len(body) and starts[i + 1] == node.end_lineno
        )
        whole = "\n".join(lines[starts[i] - 1 : node.end_lineno])
        found.append(Statement(_segment(lines, node) if shares_line else whole, node))
    return found


def _segment(lines: list[str], node: ast.stmt) -> str:
    """The text of a statement that shares a line; `ast.get_source_segment` takes the whole text apart for each."""
    cut = [line.encode() for line in lines[node.lineno - 1 : node.end_lineno]]
    cut[-1] = cut[-1][: node.end_col_offset]
    cut[0] = cut[0][node.col_offset :]
    return b"\n".join(cut).decode()


def plain(cell: str) -> str:
    """A cell as Python: magics become the calls they stand for, and so are dropped as bare expressions."""
    head, _, rest = cell.lstrip("\n").partition("\n")
    if head.startswith("%%"):
        return plain(rest) if head[2:].partition(" ")[0] in _PYTHON_MAGICS else ""
    try:
        parse(cell)
        return cell
    except SyntaxError:
        pass  # magics, a leading indent, or a true error, which the caller's own parse reports
    try:
        from IPython.core.inputtransformer2 import TransformerManager
    except ImportError:
        TransformerManager = None
    if not TransformerManager or len(_MAGIC.findall(cell)) > MOST_MAGICS:
        return re.sub(r"(?m)^[ \t]*[%!?].*$|^.*\?$", "", cell)
    return TransformerManager().transform_cell(cell)
