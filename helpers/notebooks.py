"""Run notebooks, save them in one canonical form, and say which saved ones are stale.

A saved notebook says in `metadata.helpers` what its outputs came from: `code_hash` (of its code cells and of kernels
in a folder beside it), `mode`, `gpu`, `date`, `versions`. Canonical form means that running unchanged code on an
unchanged machine changes as few bytes as it can: sorted keys, one order of fields, no execution times, no widget
state, no paths of a machine.
"""

import datetime
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from . import ROOT, copies, machine, records, source

WIDGET = "application/vnd.jupyter.widget-view+json"
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "pygments_lexer": "ipython3",
    },
}
CELL_KEYS = ("tags", "nbgrader", "jupyter", "slideshow")
"""Metadata of a cell that is kept; the rest is what editors leave behind."""


# ---- running ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """The first cell of a notebook that failed: its id, its error in one line, and the traceback as text."""

    cell: str
    error: str
    traceback: str = ""


@dataclass(frozen=True)
class Ran:
    """An executed notebook, in canonical form. After a failure, the cells below it have no outputs."""

    path: Path
    notebook: nbformat.NotebookNode
    seconds: float
    failure: Failure | None


def read(path: Path) -> nbformat.NotebookNode:
    """A notebook from its file. Raises `machine.NotReady`, one sentence and a mend, where the file holds none."""
    if not path.is_file():
        raise machine.NotReady(f"{path}: there is no such notebook.", "ls notebooks labs solutions")
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:  # nbformat fails in many ways on what is no notebook
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise machine.NotReady(f"{path} is no notebook that can be read: {why}.", f"git checkout {path}") from error
    return notebook


class _ThisPython(KernelSpecManager):
    """Kernels run in the interpreter that asks for them, whatever kernels are installed on the machine."""

    def get_kernel_spec(self, kernel_name):
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def run(
    path: Path,
    *,
    env: dict[str, str] | None = None,
    cell_seconds: float = 600,
    on_cell: Callable[[str], None] | None = None,
) -> Ran:
    """Run a notebook from top to bottom in its own folder, and stop at the first cell that fails.

    env: variables set for the kernel; on_cell: called with the id of each code cell as it starts.
    A cell tagged `raises-exception` fails when it raises nothing.
    """
    began = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    strip(notebook)
    current = ""

    def started(cell, cell_index):
        nonlocal current
        current = cell.get("id", f"cell {cell_index}")
        if on_cell and cell.cell_type == "code":
            on_cell(current)

    client = NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_spec_manager=_ThisPython()),
        timeout=cell_seconds,
        resources={"metadata": {"path": str(path.parent)}},
        coalesce_streams=True,
        shutdown_kernel="immediate",  # taking torch and CUDA down in order takes seconds, and nothing is left to do
        on_cell_start=started,
    )
    failure = None
    with tempfile.TemporaryFile() as said:  # by the kernel's process itself, beside what its cells output
        try:
            client.execute(env=kernel_environment(env or {}, path.parent), cleanup_kc=True, stderr=said)
        except BaseException as error:
            if getattr(client, "_async_cleanup_kernel_future", None):
                raise KeyboardInterrupt from None  # nbclient ends the kernel on Ctrl-C, and then trips over that
            failure = _failure(error, current, cell_seconds, said)
    failure = failure or next(map(_silent, filter(_should_have_raised, notebook.cells)), None)
    notebook.metadata["helpers"] = {"code_hash": code_hash(notebook), **provenance()}
    return Ran(path, normalise(notebook), time.monotonic() - began, failure)


def measured(path: Path, only: str = "", on_cell: Callable[[str], None] | None = None) -> tuple[Ran, dict]:
    """Run a lesson on a GPU for its figures: what ran, and the record that this very run made (as `records.load`).

    path: relative to the checkout, or not. only: ids with spaces between, where not all are wanted.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        ran = run(ROOT / path, env={"HELPERS_RECORD": str(record), "HELPERS_ONLY": only}, on_cell=on_cell)
        return ran, records.load(record)


def _failure(error: BaseException, cell: str, seconds: float, said) -> Failure:
    """What `error` says of a cell; raises it where it is none of a cell's."""
    if isinstance(error, CellExecutionError):
        return Failure(cell, _line(f"{error.ename}: {error.evalue}"), _plain(str(error)))
    if isinstance(error, CellTimeoutError):
        return Failure(cell, f"TimeoutError: still running after {seconds:g} s")
    if isinstance(error, DeadKernelError):
        said.seek(0)
        reason = "DeadKernelError: the process died (a crash, os._exit, or out of memory)"
        return Failure(cell, reason, said.read().decode(errors="replace")[-4000:])
    raise error


def kernel_environment(extra: dict[str, str], folder: Path | None = None) -> dict[str, str]:
    """The environment of a kernel for a notebook in `folder`: this one's, with the checkout first on PYTHONPATH, so
    that `helpers` is its own. In solutions/ a check that fails raises; a lab that is run leaves no trace in progress.
    """
    path = {"PYTHONPATH": machine.python_path(), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    name = folder.resolve().name if folder else ""
    checks = {"solutions": {"HELPERS_STRICT": "1"}, "labs": {"HELPERS_PROGRESS": ""}}.get(name, {})
    return {**os.environ, **path, **checks, **extra}


def provenance() -> dict:
    """What outputs made now come from: mode, GPU (None in CPU mode), date, versions."""
    here = machine.here()
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": here.name if here.mode == "gpu" else None,
        "mode": here.mode,
        "versions": machine.versions(),
    }


def _should_have_raised(cell) -> bool:
    tagged = "raises-exception" in cell.metadata.get("tags", [])
    return tagged and not any(output.output_type == "error" for output in cell.outputs)


def _silent(cell) -> Failure:
    return Failure(cell.get("id", "?"), "is tagged raises-exception, but nothing was raised")


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _line(text: str) -> str:
    return _plain(text).strip().partition("\n")[0]


# ---- canonical form -----------------------------------------------------------------------------------------------


def strip(notebook: nbformat.NotebookNode) -> None:
    """Remove all outputs and execution counts, in place."""
    notebook.metadata.pop("helpers", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


def normalise(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The canonical form of a notebook: a new one. Cell ids, sources, tags and execution counts are kept."""
    cells = []
    for index, cell in enumerate(notebook.cells):
        kept = {k: v for k, v in cell.metadata.items() if k in CELL_KEYS and v}
        new = {
            "cell_type": cell.cell_type,
            "id": cell.get("id", f"cell-{index}"),
            "metadata": kept,
            "source": cell.source.rstrip("\n"),
        }
        if cell.cell_type == "code":
            new |= {"execution_count": cell.execution_count, "outputs": _outputs(cell)}
        elif cell.get("attachments"):
            new["attachments"] = cell.attachments
        cells.append(new)
    made = {k: v for k, v in notebook.metadata.items() if k == "helpers"}
    return nbformat.from_dict({"cells": cells, "metadata": {**KERNEL, **made}, "nbformat": 4, "nbformat_minor": 5})


def _outputs(cell) -> list[dict]:
    kept: list[dict] = []
    for output in cell.outputs:
        new = _clean(dict(output))
        if new["output_type"] == "stream":
            if kept and kept[-1]["output_type"] == "stream" and kept[-1]["name"] == new["name"]:
                kept[-1]["text"] += new["text"]
                continue
        elif "data" in new:
            if WIDGET in new["data"]:  # its state is not saved: a reader without a kernel gets a sentence instead
                del new["data"][WIDGET]
                drawn = any("image/png" in before.get("data", ()) for before in kept)
                still = "; the picture above is the same, standing still" if drawn else ""
                new["data"]["text/plain"] = f"(interactive: run this cell{still})"
            if not any(new["data"].values()):  # a progress bar that has vanished
                continue
            if new["output_type"] == "execute_result":
                new["execution_count"] = cell.execution_count
            new.pop("transient", None)
        kept.append(new)
    return kept


def _clean(value):
    """`value` without what differs between machines and runs: paths and addresses of objects."""
    if isinstance(value, dict):
        return {k: v if k.startswith("image/") and k != "image/svg+xml" else _clean(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_clean(v) for v in value]
    if not isinstance(value, str):
        return value
    for pattern, plain in _MACHINE:
        value = pattern.sub(plain, value)
    return value


_MACHINE = [
    (re.compile(r"[^\s\"'(<>=]*/site-packages/"), "site-packages/"),
    (re.compile(re.escape(f"{ROOT}/")), ""),
    (re.compile(re.escape(str(ROOT)) + r"\b"), "."),
    (re.compile(r"/tmp/ipykernel_\d+/\d+\.py"), "<cell>"),
    (
        re.compile(re.escape(tempfile.gettempdir()) + r"/[^\s\"':)]*?([^/\s\"':)]+)(?=[\s\"':)]|$)"),
        r"<tmp>/\1",
    ),
    (re.compile(re.escape(str(Path.home())) + r"(?=/)"), "~"),
    (re.compile(r"(<[\w.]+[^<>\n]* at) 0x[0-9a-f]{6,}>"), r"\1 …>"),
]


def dumps(notebook: nbformat.NotebookNode) -> str:
    """The text of a notebook's file, ending in one newline."""
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def save(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write the canonical form to `path`, whole or not at all."""
    nbformat.validate(notebook)
    copies.write(path, dumps(notebook).encode())


# ---- what is stale ------------------------------------------------------------------------------------------------


def code_hash(notebook: nbformat.NotebookNode) -> str:
    """16 hex digits over the sources of the code cells, in order, and over the kernels in a folder that they load."""
    sources = [cell.source.rstrip() for cell in notebook.cells if cell.cell_type == "code"]
    for name in dict.fromkeys(re.findall(r"source\.(?:load|find)\(\s*[\"'](\w+)", "\n".join(sources))):
        if kernels := sorted((ROOT / "notebooks" / name).glob("*.cu*")):
            sources += [path.read_text(encoding="utf-8") for path in (*source.find(name), *kernels)]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]


def lessons() -> list[Path]:
    """The notebooks that are saved with outputs: lessons, then solutions, each by their numbers (12 before 12_2)."""

    def numbers(path: Path) -> tuple:
        return [int(number) for number in re.findall(r"\d+(?=_)", path.stem)], path.stem

    folders = (ROOT / "notebooks", ROOT / "solutions")
    return [path for folder in folders for path in sorted(folder.glob("*.ipynb"), key=numbers)]


def stale(paths: Iterable[Path]) -> list[str]:
    """One sentence for each notebook or recorded figure that came from other code than the one that stands there, and
    for each figure that no GPU has measured yet."""
    found, codes, recorded = [], {}, set()
    for path in map(Path, paths):
        notebook = nbformat.read(path, as_version=4)
        code, made = code_hash(notebook), notebook.metadata.get("helpers")
        codes |= {key: (path.name, code) for key in records.declared(path)}
        if not made:
            found.append(f"{path.name} has no saved outputs")
        elif made["code_hash"] != code:
            found.append(f"{path.name}: its code changed after its outputs were saved on {made['date']}")
        elif made["mode"] != "gpu":
            found.append(f"{path.name}: its outputs were saved in CPU mode")
    for file in sorted(records.FOLDER.glob("*.json")):
        record = records.load(file)
        recorded |= {*record["figures"], *record["texts"]}
        for key, entry in record["figures"].items():
            name, code = codes.get(key, ("", ""))
            if not name:
                found.append(f"{file.name}: {key} is declared by no notebook")
            elif entry.get("code", "") != code:
                found.append(f"{file.name}: {key} was measured on {entry.get('date', '?')} by other code of {name}")
    found += [f"{name}: {key} is not recorded yet" for key, (name, _) in codes.items() if key not in recorded]
    return found
