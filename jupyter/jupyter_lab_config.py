# JupyterLab as `make lab` starts it. Found through JUPYTER_CONFIG_PATH, so your own Jupyter configuration still
# applies and comes first. Token and localhost are Jupyter's own defaults and stay.
import os
from pathlib import Path

here = Path(__file__).resolve().parent
work = Path(os.environ.get("HELPERS_WORK") or here.parent / "work")  # as helpers.WORK, which takes seconds to import
c = get_config()  # noqa: F821

c.ServerApp.root_dir = str(work.parent)
c.LabApp.default_url = f"/lab/tree/{work.name}/README.md"
c.LabApp.app_settings_dir = str(here)  # overrides.json
c.LabApp.workspaces_dir = str(work / ".jupyter" / "workspaces")
c.LabApp.news_url = None
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
c.ServerApp.allow_root = True  # GPU containers run as root; the server still listens on localhost only, with a token
c.KernelManager.transport_encryption = "auto"
