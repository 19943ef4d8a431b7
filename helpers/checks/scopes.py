"""The tree of a Python text, with each node's parent and the scope that its names are looked up in."""

import ast
from collections.abc import Iterator


class Scope:
    """Names that the module, or one function, lambda, comprehension or class binds."""

    def __init__(self, kind: str, parent: "Scope | None" = None):
        self.kind, self.parent = kind, parent
        self.bound: set[str] = set()
        self.globals: set[str] = set()
        self.module: Scope = parent.module if parent else self

    def home(self, name: str, is_walrus: bool = False) -> "Scope":
        """The scope in which this one binds a name: a walrus in a comprehension binds outside of it."""
        scope = self
        while is_walrus and scope.kind == "comprehension":
            scope = scope.parent
        return scope.module if name in scope.globals else scope

    def holders(self, name: str) -> Iterator["Scope"]:
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


class Text:
    """The tree of an answer, with each node's parent and scope, and all bindings."""

    def __init__(self, tree: ast.Module):
        self.tree = tree
        self.scope_of: dict[ast.AST, Scope] = {}
        self.parent: dict[ast.AST, ast.AST] = {}
        self.bindings: list[tuple[Scope, str, ast.AST]] = []
        self._visit(tree, Scope("module"))

    def _visit(self, node: ast.AST, scope: Scope) -> None:
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
                inner = Scope("class" if isinstance(node, ast.ClassDef) else "function", scope)
                outside = [*node.decorator_list, getattr(node, "returns", None)]
                outside += [*getattr(node, "bases", []), *getattr(node, "keywords", [])]
            case ast.Lambda():
                inner = Scope("function", scope)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                inner, outside = Scope("comprehension", scope), [node.generators[0].iter]
        if isinstance(arguments := getattr(node, "args", None), ast.arguments):
            of = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
            outside += [*arguments.defaults, *arguments.kw_defaults, *(a.annotation for a in of if a)]
            for a in of:
                if a:
                    self._bind(inner, a.arg, a)
        self._children(node, scope, inner, outside)

    def _children(self, node, scope: Scope, inner: Scope, outside: list) -> None:
        for child in ast.iter_child_nodes(node):
            self.parent[child] = node
            if isinstance(child, ast.arguments | ast.arg | ast.comprehension):
                self.scope_of[child] = inner
                self._children(child, scope, inner, outside)
            else:
                self._visit(child, scope if child in outside else inner)

    def _bind(self, scope: Scope, name: str, node: ast.AST) -> None:
        scope.bound.add(name)
        self.bindings.append((scope, name, node))
