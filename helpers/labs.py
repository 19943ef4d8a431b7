"""Build labs/ from solutions/: the answers taken out, everything else as it is.

An answer is a region of a cell between nbgrader's own lines, `### BEGIN SOLUTION` and `### END SOLUTION`. In Python
nbgrader's stub takes its place, so that nbgrader makes the same lab of a solution. In CUDA C, which stands in a Python
string and where the lines may begin with `//`, the stub is one that no C compiler passes over; in Mojo, which stands in
one too and where they begin with `# ###`, one that Mojo's does not. A cell with the tag `solution-only` has no place
in the lab: kernels that an answer launches, the course's other answers, what it says of them.
"""

import ast
import io
import json
import re
import sys
import tokenize
from pathlib import Path

import nbformat

from . import ROOT, copies, machine, notebooks

MARK = re.compile(r"\s*(// ?|# )?### (BEGIN|END) SOLUTION\s*")
ALMOST = re.compile(r"(BEGIN|END) SOLUTION")
"""What nbgrader takes for a mark, wherever in a line it stands."""
PYTHON_STUB = ("# YOUR CODE HERE", "raise NotImplementedError()")
C_STUB = ("// YOUR CODE HERE", '#error "not implemented yet"')
MOJO_STUB = ("# YOUR CODE HERE", 'comptime assert False, "not written yet"')


class Unbuildable(ValueError):
    """A cell of a solution that no lab can be made of; the message says which and why."""


def main(check: bool, root: Path = ROOT) -> int:
    """Write root/labs, or with `check` only say what differs. Returns the exit status: 1 where something is amiss."""
    amiss = 0
    for source in sources(root):
        target = root / "labs" / source.name
        try:
            text = notebooks.dumps(built(notebooks.read(source)))
        except (Unbuildable, machine.NotReady) as error:
            print(f"solutions/{source.name}: {error}", file=sys.stderr)
            amiss += 1
            continue
        if target.is_file() and target.read_text() == text:
            continue
        if check:
            print(f"labs/{source.name} is not what solutions/{source.name} makes: {difference(target, text)}.")
            amiss += 1
        else:
            copies.write(target, text.encode())
            print(f"labs/{source.name}: written")
    for path in stray(root):
        print(f"labs/{path.name} has no source in solutions/: remove it, or move what is yours to work/labs/.")
        amiss += 1
    if check and amiss:
        print("Mend: python -m helpers labs", file=sys.stderr)
    return 1 if amiss else 0


def sources(root: Path = ROOT) -> list[Path]:
    """The notebooks that labs are built from."""
    return sorted((root / "solutions").glob("*.ipynb"))


def stray(root: Path = ROOT) -> list[Path]:
    """What lies in root/labs and was built from nothing. Hidden files and folders do not count."""
    names = {source.name for source in sources(root)}
    return [path for path in sorted((root / "labs").glob("[!._]*")) if path.name not in names]


def difference(lab: Path, text: str) -> str:
    """In words, how a lab's file differs from the `text` that was built: by cells where it can be said so."""
    if not lab.is_file():
        return "it is missing"
    try:
        there = _cells(json.loads(lab.read_text()))
    except (ValueError, KeyError, TypeError):
        return "it is no notebook"
    made = _cells(json.loads(text))
    return "its form, not its cells" if there == made else copies.changes(there, made)


def _cells(notebook: dict) -> list[list]:
    return [[cell.get("id", f"cell {i}"), cell] for i, cell in enumerate(notebook["cells"])]


def built(solution: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The lab of a solution, a new notebook in canonical form. Raises `Unbuildable`."""
    lab = notebooks.normalise(solution)
    notebooks.strip(lab)
    lab.cells = [cell for cell in lab.cells if "solution-only" not in cell.metadata.get("tags", [])]
    for cell in lab.cells:
        is_solution = cell.metadata.get("nbgrader", {}).get("solution", False)
        try:
            cell.source, regions = without_answers(cell.source)
            if is_solution and not regions:
                raise Unbuildable("nbgrader's metadata make it a solution, but it has no ### BEGIN SOLUTION")
            if regions and not is_solution:
                raise Unbuildable("it has a solution, but nbgrader's metadata do not say so")
        except Unbuildable as error:
            raise Unbuildable(f"cell {cell.id}: {error}") from None
    return lab


def without_answers(source: str) -> tuple[str, int]:
    """A cell's text with a stub for each answer, and how many there were. Raises `Unbuildable`."""
    lines, marks = source.split("\n"), []
    for number, line in enumerate(lines):
        if mark := MARK.fullmatch(line):
            marks.append((number, mark[2], mark[1]))
        elif ALMOST.search(line):
            raise Unbuildable(f"nbgrader would take line {number + 1} for a mark, which stands alone on its line")
    if [kind for _, kind, _ in marks] != ["BEGIN", "END"] * (len(marks) // 2):
        raise Unbuildable("its ### BEGIN SOLUTION and ### END SOLUTION do not come in pairs")
    if not marks:
        return source, 0
    python = _comments(source)
    kept, stubs, last = [], [], 0
    for (begin, _, before), (end, _, _) in zip(marks[::2], marks[1::2], strict=True):
        if (begin in python) != (end in python):
            raise Unbuildable("an answer begins in a string and ends outside, or the other way round")
        kept += lines[last:begin]
        indent = re.match(r"\s*", lines[begin])[0]
        kept += [indent + line for line in _stub(begin in python, before)]
        if begin in python:
            stubs.append(len(kept))  # the line that raises, counted from 1
        last = end + 1
    text = "\n".join(kept + lines[last:])
    _runs_unsolved(text, stubs)
    return text, len(marks) // 2


def _stub(python: bool, before: str | None) -> tuple[str, str]:
    """The lines that stand for an answer. before: what stands before the mark's own `###`."""
    return PYTHON_STUB if python else MOJO_STUB if before == "# " else C_STUB


def _comments(source: str) -> set[int]:
    """The lines, counted from 0, that hold a comment of Python: a mark on any other line stands in a string."""
    try:
        ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError) as error:
        raise Unbuildable(f"it is not Python: {error}") from None
    return {token.start[0] - 1 for token in tokens if token.type == tokenize.COMMENT}


def _runs_unsolved(text: str, stubs: list[int]) -> None:
    """Raise `Unbuildable` unless each stub stands in the body of a function, so that the unsolved cell runs."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError as error:
        raise Unbuildable(f"with its answer taken out it is not Python: {error}") from None
    bodies = [(n.lineno, n.end_lineno) for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for line in stubs:
        if not any(first <= line <= last for first, last in bodies):
            raise Unbuildable("an answer stands outside every function, so the unsolved lab would raise there")
