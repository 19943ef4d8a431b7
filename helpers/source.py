"""The module text that a name needs, from the running notebook, a saved notebook or a `.py` file; and `load`.

`@triton.jit` reads its kernel's source, and neither a kernel nor a notebook's globals can be pickled, so between
processes text travels and not objects. What a slice keeps, and what it cannot see, is said in `helpers.slicing`.
"""

import hashlib
import json
import linecache
import re
import sys
import types
from pathlib import Path

from . import ROOT
from .slicing import Missing, module_text, parse, plain, statements

__all__ = ["Missing", "file", "find", "live", "load", "notebook", "of", "ran", "run", "saved"]


def live(*names: str) -> str:
    """Module text for `names` from this kernel's cells as last run (the running one included).

    Outside IPython the running script is read instead. Raises `Missing`.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        path = getattr(sys.modules.get("__main__"), "__file__", None)
        if path is None:
            raise Missing(names, "this process, which runs neither notebook cells nor a script file")
        return file(path, *names)
    where = "the cells run since this kernel started"
    if unbound := [n for n in names if n not in shell.user_ns]:
        raise Missing(unbound, where, "Run the cell that defines it first.")
    return module_text(list(shell.history_manager.input_hist_raw), names, where)


def ran(name: str) -> str:
    """Which run of which cell `live` takes `name` from, in words; what a learner has edited since does not count."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cells = list(shell.history_manager.input_hist_raw) if shell else []
    said = ""
    for number, cell in enumerate(cells):
        try:
            if any(name in statement.binds for statement in statements(plain(cell))):
                said = f"your `{name}` as last run, in cell [{number}]"
        except SyntaxError:
            if said and re.search(rf"(?m)^\s*(def|class)\s+{re.escape(name)}\b", cell):
                said = f"{said.partition('; ')[0]}; cell [{number}] defines it anew, but Python could not read that"
    return said


def notebook(path, *names: str) -> str:
    """Module text for `names` from the code cells of a saved notebook, top to bottom. Raises `Missing`, and ValueError
    where it is none."""
    try:
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
        texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    except (KeyError, TypeError, RecursionError):
        raise ValueError(f"{_shown(path)} is JSON, but no notebook.") from None
    return module_text(texts, names, f"the code cells of {_shown(path)}")


def file(path, *names: str) -> str:
    """Module text for `names` from a `.py` file. Raises `Missing`, and SyntaxError where the file has one."""
    text = Path(path).read_text(encoding="utf-8")
    parse(text, str(path))
    return module_text([text], names, _shown(path))


def of(thing) -> str:
    """Module text for a top-level function, class or Triton kernel, by its name, from where it was defined:
    the live cells, the slice that `load` ran, or its module's file. Raises `Missing`."""
    while not isinstance(thing, types.FunctionType | type) and hasattr(thing, "fn"):
        thing = thing.fn  # a kernel inside its @triton.jit, @triton.autotune, @triton.heuristics
    name, home = thing.__name__, thing.__module__
    if "<locals>" in thing.__qualname__:
        hint = "It was defined inside a function: move it to the top level of a cell."
        raise Missing([name], f"the top level of {home}", hint)
    if home == "__main__":
        return live(name)
    module = sys.modules[home]
    text = getattr(module, "__slice__", None)
    return module_text([text], [name], f"module {home}") if text else file(module.__file__, name)


def find(prefix: str) -> list[Path]:
    """The notebooks and then `.py` files in notebooks/, then in solutions/, whose names start with `prefix`."""
    hits = [
        path
        for folder in ("notebooks", "solutions")
        for kind in (".ipynb", ".py")
        for path in sorted((ROOT / folder).glob(f"{prefix}*{kind}"))
    ]
    return [p for p in hits if p.stem == prefix] or hits


def load(prefix: str, name: str):
    """Run only the slice that `name` needs of the lesson, solution or file that `prefix` names; returns the object.

    `load("05_triton_first_kernels", "softmax")`. A text runs once a process. Errors as in `saved`.
    """
    path, text = saved(prefix, name)
    return getattr(run(text, f"{path.stem}.{name}"), name)


def saved(prefix: str, name: str) -> tuple[Path, str]:
    """The module text that `name` needs of the lesson, solution or file that `prefix` names, and where it stands.

    Where a lesson and a solution share the prefix, the first that binds `name` counts. Raises FileNotFoundError for a
    prefix without a file, and `Missing`.
    """
    paths = find(prefix)
    if not paths:
        raise FileNotFoundError(f"No notebook or .py file in notebooks/ or solutions/ starts with {prefix!r}.")
    for path in paths:
        try:
            return path, (notebook if path.suffix == ".ipynb" else file)(path, name)
        except Missing as missing:
            if name not in missing.names:
                raise
    raise Missing([name], " and ".join(_shown(p) for p in paths))


def run(text: str, title: str = "slice") -> types.ModuleType:
    """Execute a module text as a module of its own; `inspect`, and so `triton.jit`, can read its source.

    The same text runs once a process.
    """
    name = re.sub(r"\W", "_", f"{title}_{hashlib.sha256(text.encode()).hexdigest()[:12]}")
    if name in sys.modules:
        return sys.modules[name]
    module = types.ModuleType(name)
    module.__file__, module.__slice__ = str(ROOT / f"{name}.py"), text
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    sys.modules[name] = module
    try:
        exec(compile(text, module.__file__, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _shown(path) -> str:
    path = Path(path).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
