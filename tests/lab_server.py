"""A real JupyterLab, started as `make lab` starts it, on a copy of the checkout: work/ of this one stays untouched."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from helpers import ROOT

LEFT = ("work", "build", "shared", "tests")
"""What a copy of the checkout leaves out, besides hidden files: what is not the stranger's or not needed."""


@dataclass(frozen=True)
class Lab:
    """A running server. `get` returns a page's text, or an API's JSON."""

    root: Path
    address: str
    token: str
    log_file: Path

    def get(self, path: str):
        request = urllib.request.Request(self.address + path, headers={"Authorization": f"token {self.token}"})
        with urllib.request.urlopen(request, timeout=10) as reply:
            text = reply.read().decode()
            return json.loads(text) if "json" in reply.headers["Content-Type"] else text

    def put(self, path: str, model: dict) -> None:
        """Save what an API gave and was then edited."""
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, json.dumps(model).encode(), headers, method="PUT")
        with urllib.request.urlopen(request, timeout=10):
            pass

    def landing(self) -> str:
        """Where the bare address leads."""
        with urllib.request.urlopen(self.page("/"), timeout=10) as reply:
            return reply.url.partition("?")[0]

    def status(self, path: str) -> int:
        """The HTTP status that someone without a token gets."""
        try:
            return urllib.request.urlopen(self.address + path, timeout=10).status
        except urllib.error.HTTPError as refused:
            return refused.code

    def log(self) -> str:
        return self.log_file.read_text()

    def page(self, path: str) -> str:
        """An address for a browser."""
        return f"{self.address}{path}?token={self.token}"


def copy_of_checkout(to: Path) -> Path:
    """A checkout as a stranger has it: no work/."""
    to.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "*.egg-info")
    for path in ROOT.iterdir():
        if path.name.startswith(".") or path.name in LEFT:
            continue
        if path.is_dir():
            shutil.copytree(path, to / path.name, ignore=ignore)
        else:
            shutil.copy(path, to / path.name)
    return to


@contextmanager
def serving(root: Path, home: Path, settings: dict | None = None) -> Iterator[Lab]:
    """Run `python -m helpers lab` in `root` until the block ends. `home`: where Jupyter keeps what is a user's.

    settings: JupyterLab settings of that user, by plugin.
    """
    for plugin, values in (settings or {}).items():
        package, _, name = plugin.partition(":")
        file = home / "config" / "lab" / "user-settings" / package / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(8)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        "HOME": str(home),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
    }
    options = ["--no-browser", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command = [sys.executable, "-m", "helpers", "lab", "--", *options, f"--IdentityProvider.token={token}"]
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=root, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            lab = Lab(root, f"http://127.0.0.1:{port}", token, home / "server.log")
            _wait(lab, server)
            yield lab
        finally:
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait(lab: Lab, server: subprocess.Popen, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab exited with status {server.returncode}:\n{lab.log()}")
        try:
            lab.get("/api/status")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not answer within {seconds:g} s:\n{lab.log()}")
