"""A learner's own copies in work/: lessons, labs and README, brought up to date without touching an edited file.

`work/.copied.json` remembers what was copied. A notebook counts as edited when a cell's kind or source differs from
what was copied: running it, which changes outputs only, is no edit. An update of an edited file arrives beside it
as `NN_topic.new.ipynb`, once, and a message names the cells that changed.
"""

import datetime
import hashlib
import json
import platform
import re
from pathlib import Path

from . import ROOT, WORK

FOLDERS = ("notebooks", "labs")
MEMORY = ".copied.json"
NEWS = "NEWS.md"
"""What there was to tell a learner who sees no terminal, newest first."""
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
    "version": platform.python_version(),
}


def copy_to_work(root: Path = ROOT, work: Path | None = None) -> list[str]:
    """Bring `work` (root/work) up to date with root's lessons, labs and README. Returns what to tell the learner."""
    work = work or root / "work"
    memory = work / MEMORY
    known, told = _remembered(memory), []
    for source in sources(root):
        told += _bring(source, work / source.relative_to(root), known.setdefault(_name(source, root), {}), root)
    write(memory, (json.dumps(known, indent=1, sort_keys=True) + "\n").encode())
    return told


def _remembered(memory: Path) -> dict[str, dict]:
    """What was copied, by name. Where that is damaged nothing is known, so that every copy that differs is kept."""
    try:
        known = json.loads(memory.read_bytes())
        return {name: entry for name, entry in known.items() if isinstance(entry, dict)}
    except (FileNotFoundError, ValueError, AttributeError, RecursionError):
        return {}


def sources(root: Path) -> list[Path]:
    """The files that are copied, README first."""
    found = [root / "README.md"]
    for folder in FOLDERS:
        found += sorted((root / folder).rglob("*"))
    return [p for p in found if p.is_file() and not any(part.startswith((".", "__")) for part in p.parts[-2:])]


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _bring(source: Path, copy: Path, known: dict, root: Path) -> list[str]:
    """Copy, update, or lay an update beside one file. `known` is what is remembered of it, and is changed."""
    content = _content(source, copy, root)
    new = fingerprint(source.name, content)
    if not copy.exists():
        write(copy, content)
        known.clear()
        known |= {"copied": new, "bytes": _hash(content)}
        return []
    mine = fingerprint(copy.name, copy.read_bytes())
    if mine == new:
        if known.get("bytes") == _hash(copy.read_bytes()) and copy.read_bytes() != content:
            write(copy, content)  # neither edited nor run: it gets newly saved outputs too
        known |= {"copied": new, "bytes": _hash(content)}
        return []
    if mine == known.get("copied"):
        write(copy, content)
        known |= {"copied": new, "bytes": _hash(content)}
        return [f"work/{_name(source, root)} was updated (you had not edited it)."]
    if new in (known.get("copied"), known.get("offered")):
        return []
    beside = _free_name(copy, known.get("offered"))
    changed = changes(known.get("copied") or mine, new)
    write(beside, content)
    known["offered"] = new
    stays = f"work/{_name(source, root)} has your edits and stays as it is."
    return [f"{stays} The update is beside it, {beside.name}: {changed}."]


def _free_name(copy: Path, offered) -> Path:
    """Where an update may be written: a name that is free, or holds an earlier update that nobody edited."""
    number = 0
    while True:
        number += 1
        path = copy.with_name(f"{copy.stem}.new{number if number > 1 else ''}{copy.suffix}")
        if not path.exists() or fingerprint(path.name, path.read_bytes()) == offered:
            return path


def _content(source: Path, copy: Path, root: Path) -> bytes:
    """What is written into work/. README's links to files that are not copied lead one folder up, where work/ lies in
    the checkout; elsewhere they are plain text."""
    if source == root / "README.md":
        copied = "|".join([*(f"{folder}/" for folder in FOLDERS), r"README\.md", "#", r"[a-z]+:"])
        changed = r"[\1](../\2)" if copy.parent.parent == root else r"\1"
        return re.sub(rf"\[([^\]]*)\]\((?!{copied})([^)]*)\)", changed, source.read_text()).encode()
    if source.suffix == ".ipynb":
        # what JupyterLab would write on opening it: else each lesson would count as changed before it is touched
        notebook = json.loads(source.read_text())
        notebook["metadata"] |= {"kernelspec": KERNEL, "language_info": LANGUAGE}
        return (json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
    return source.read_bytes()


def fingerprint(name: str, content: bytes) -> list:
    """What counts as a file's text: of a notebook [[cell id, hash of kind and source], …], of another file one hash.

    Empty cells are left out, since JupyterLab adds one when the last cell is run.
    """
    whole = [["", _hash(content)]]
    if not name.endswith(".ipynb"):
        return whole
    try:
        cells = enumerate(json.loads(content)["cells"])
        text = [(c.get("id", str(i)), c["cell_type"], "".join(c["source"])) for i, c in cells]
        return [[key, _hash(f"{kind}\0{source.rstrip()}".encode())] for key, kind, source in text if source.strip()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return whole  # a notebook that a learner broke is an edited file like any other


def changes(old: list, new: list) -> str:
    """The cells in which two fingerprints differ, in words."""
    before, after = dict(old), dict(new)
    groups = {
        "changed": [k for k in after if k in before and after[k] != before[k]],
        "added": [k for k in after if k not in before],
        "removed": [k for k in before if k not in after],
    }
    if groups["changed"] == [""]:
        return "its text changed"
    named = [f"{what} {', '.join(keys)}" for what, keys in groups.items() if keys]
    return "cells " + "; ".join(named) if named else "the order of its cells changed"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
    except OSError:  # a full disk: half a file would keep it full
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


def tell(told: list[str], work: Path = WORK) -> None:
    """Write sentences at the top of the learner's NEWS.md, under today's date."""
    news = work / NEWS
    before = news.read_text(errors="replace") if news.exists() else ""
    lines = "".join(f"- {line}\n" for line in told)
    write(news, f"## {datetime.date.today().isoformat()}\n\n{lines}\n{before}".encode())


def first_layout(work: Path = WORK) -> None:
    """Arrange what JupyterLab opens the first time: README and lesson 00. Later it finds the learner's own tabs."""
    from jupyterlab_server.workspaces_handler import WorkspacesManager

    folder = work / ".jupyter" / "workspaces"
    if folder.exists():
        return
    folder.mkdir(parents=True)
    readme, first = f"{work.name}/README.md", f"{work.name}/notebooks/00_start_here.ipynb"
    tabs = {
        f"markdownviewer-widget:{readme}": {"path": readme, "factory": "Markdown Preview"},
        f"notebook:{first}": {"path": first, "factory": "Notebook"},
    }
    area = {"type": "tab-area", "currentIndex": 0, "widgets": list(tabs)}
    files = {"collapsed": False, "visible": True, "current": "filebrowser", "widgets": ["filebrowser"]}
    layout = {"main": {"dock": area, "current": next(iter(tabs))}, "left": files}
    data = {"layout-restorer:data": layout} | {key: {"data": value} for key, value in tabs.items()}
    workspace = {"data": data, "metadata": {"id": "default"}}
    WorkspacesManager(str(folder)).save("default", json.dumps(workspace))
