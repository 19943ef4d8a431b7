# JupyterLab as `make lab` starts it. Found through JUPYTER_CONFIG_PATH, so your own Jupyter configuration still
# applies and comes first. Token and localhost are Jupyter's own defaults and stay.
import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path

here = Path(__file__).resolve().parent
work = Path(os.environ.get("HELPERS_WORK") or here.parent / "work")  # as helpers.WORK, which takes seconds to import
c = get_config()  # noqa: F821

saved: dict[str, dict[str, list[str]]] = {}
"""Of each notebook and each of its cells: what the text has been, as hashes."""


def texts(notebook: dict) -> dict[str, str]:
    """The cells that hold something, by id, each as a hash of its text."""
    found = {}
    for number, cell in enumerate(notebook["cells"]):
        if text := "".join(cell["source"]).strip():
            found[cell.get("id", str(number))] = hashlib.sha256(text.encode()).hexdigest()
    return found


def keep_what_another_window_wrote(path, model, contents_manager):
    """Before a save: where a notebook is open twice, the window that saves may not know of the other's last save.

    JupyterLab asks before it does so. It gives itself away by a cell with a text that the cell had before; what is on
    the disk is then kept beside it. An edit that is undone looks the same, and costs a file that nobody needs.
    """
    file = Path(contents_manager.root_dir) / path.strip("/")
    if model["type"] != "notebook" or not file.exists():
        return
    try:
        there, new = texts(json.loads(file.read_text())), texts(model["content"])
    except (ValueError, KeyError, TypeError):  # no notebook any more, or not yet
        return
    history = saved.setdefault(path, {})
    back = [key for key, text in new.items() if text != there.get(key) and text in history.get(key, ())]
    for key, text in [*there.items(), *new.items()]:
        if text not in history.setdefault(key, []):
            history[key].append(text)
    if not back:
        return
    number, before = 1, file.with_suffix(".before.ipynb")
    while before.exists():
        number += 1
        before = file.with_suffix(f".before{number}.ipynb")
    shutil.copy(file, before)
    who = os.environ.get("JUPYTERHUB_USER", "")
    contents_manager.log.warning(
        "%s%s is open twice, it seems: cells %s were saved by a window that did not know their last text. That is kept "
        "in %s beside it.", f"{who}: " if who else "", path, ", ".join(back), before.name
    )  # fmt: skip


# this file is read twice, for the server and for JupyterLab, and the second hook takes the place of the first
warnings.filterwarnings("ignore", "Overriding existing pre_save_hook")
c.FileContentsManager.pre_save_hook = keep_what_another_window_wrote

c.ServerApp.root_dir = str(work.parent)
c.LabApp.default_url = f"/lab/tree/{work.name}/README.md"
c.LabApp.app_settings_dir = str(here)  # overrides.json
c.LabApp.workspaces_dir = str(work / ".jupyter" / "workspaces")
c.LabApp.news_url = None
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
c.ServerApp.allow_root = True  # GPU containers run as root; the server still listens on localhost only, with a token
c.KernelManager.transport_encryption = "auto"
