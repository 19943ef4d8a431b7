"""A real JupyterHub, started from workshop/jupyterhub_config.py on a copy of the checkout, with accounts made for it.

It needs root, since each learner's server is a process of the learner's own account.
"""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import requests
from tornado import gen, httpclient, ioloop, websocket

from tests import lab_server

PORTS = """
load_subconfig({config!r})
c.JupyterHub.bind_url = "http://127.0.0.1:{public}"
c.JupyterHub.hub_port = {hub}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api}"
c.ConfigurableHTTPProxy.command = {proxy!r}
"""
"""What the test's own configuration adds: free ports, and the proxy that was found."""

STUB = """
import http.server, os, time, urllib.parse
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("X-JupyterHub-Version", {version!r})
        self.end_headers()
        self.wfile.write(os.environ["JUPYTERHUB_USER"].encode())
time.sleep(2)
port = urllib.parse.urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"]).port
http.server.ThreadingHTTPServer(("127.0.0.1", port), Page).serve_forever()
"""
"""In place of a learner's server, where there are to be many: it takes two seconds to start, and says whose it is."""

OPEN = """
set -eu
stage=$(mktemp -d)
mount -t tmpfs -o mode=755 tmpfs "$stage"
number=0
for closed in {closed}; do
  number=$((number + 1))
  mkdir -p -m 755 "$stage/$number/upper" "$stage/$number/work"
  mount -t overlay -o "lowerdir=$closed,upperdir=$stage/$number/upper,workdir=$stage/$number/work" overlay "$closed"
done
exec "$@"
"""
"""In a mount namespace of the hub's own: folders of root above this Python get a copy of their entry that others may
pass, since a learner's account must be able to start it. Nothing outside the namespace changes."""


PROXY = "5.3.0"
"""The version of configurable-http-proxy that npm brings where there is none on the PATH."""


def proxy(folder: Path) -> str:
    """configurable-http-proxy, the hub's way to the servers: from the PATH, or installed by npm in `folder`."""
    if found := shutil.which("configurable-http-proxy"):
        return found
    quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--no-save"]
    command = ["npm", "install", *quiet, f"configurable-http-proxy@{PROXY}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(folder / "node_modules/.bin/configurable-http-proxy")


@contextmanager
def passable(*needed: Path) -> Iterator[list[str]]:
    """The beginning of a command whose process, and all below it, finds `needed` open to every account."""
    closed = closed_folders(*needed)
    inside = ["unshare", "--mount", "sh", "-c", OPEN.format(closed=" ".join(map(str, closed))), "sh"]
    if not closed:
        yield []
    elif subprocess.run([*inside, "true"], capture_output=True).returncode == 0:
        yield inside
    elif os.environ.get("HELPERS_HUB") == "required":  # a machine made for the tests, and one that may not mount
        before = {folder: folder.stat().st_mode for folder in closed}
        try:
            for folder, mode in before.items():
                folder.chmod(mode | 0o001)
            yield []
        finally:
            for folder, mode in before.items():
                folder.chmod(mode)
    else:
        pytest.skip(f"other accounts cannot get to this Python, since {closed[0]} is closed to them")


def closed_folders(*needed: Path) -> list[Path]:
    """The folders that keep other accounts from getting to `needed`, outer ones first."""
    above = {folder for path in needed for folder in (path, *path.parents)}
    return sorted(folder for folder in above if not folder.stat().st_mode & 0o001)


@dataclass
class Hub:
    """A running hub. `folder` holds the checkout, the homes and the log; `full` is who has a full disk."""

    folder: Path
    address: str
    passwords: dict[str, str]
    process: subprocess.Popen
    full: str
    homes: Path = field(init=False)

    def __post_init__(self):
        self.homes = self.folder / "homes"

    def log(self) -> str:
        return (self.folder / "hub.log").read_text()

    def learner(self, name: str) -> "Learner":
        return Learner(self, name)


class Learner:
    """A learner with a browser: cookies, the pages of the hub, and the API of a server."""

    def __init__(self, hub: Hub, name: str):
        self.hub, self.name, self.browser = hub, name, requests.Session()

    def log_in(self, password: str = "") -> requests.Response:
        """Fill in the form of the hub. Returns the page that comes then, after all that it leads on to."""
        self.browser.get(f"{self.hub.address}/hub/login", timeout=60).raise_for_status()
        password = password or self.hub.passwords[self.name]
        form = {"username": self.name, "password": password, "_xsrf": self._token("/hub/")}
        return self.browser.post(f"{self.hub.address}/hub/login", data=form, timeout=120)

    def start(self, seconds: float = 600) -> float:
        """Log in, and wait for the server as the page in the browser does. Returns the seconds that it took."""
        began = time.monotonic()
        self.page = self.log_in()
        while time.monotonic() - began < seconds:
            self.page = self.browser.get(f"{self.hub.address}/hub/spawn", timeout=60)
            self.page.raise_for_status()
            if urllib.parse.urlsplit(self.page.url).path.startswith(f"/user/{self.name}/"):
                return time.monotonic() - began
            time.sleep(1)
        raise TimeoutError(f"{self.name} has no server after {seconds:g} s:\n{self.hub.log()[-8000:]}")

    def _token(self, path: str) -> str:
        [token] = [cookie.value for cookie in self.browser.cookies if cookie.name == "_xsrf" and cookie.path == path]
        return token

    def call(self, method: str, path: str, of: str = "", **options) -> requests.Response:
        """The API of one's own server, or of another learner's: call("GET", "api/contents/work", of="ada")."""
        headers = {"X-XSRFToken": self._token(f"/user/{self.name}/")}
        address = f"{self.hub.address}/user/{of or self.name}/{path}"
        return self.browser.request(method, address, headers=headers, timeout=120, allow_redirects=not of, **options)

    def run(self, notebook: str, *cells: str, seconds: float = 240) -> list[str]:
        """Run code in the kernel of one's copy of a notebook, as JupyterLab does: what each of the cells showed."""
        session = {"path": notebook, "name": "", "type": "notebook", "kernel": {"name": "python3"}}
        reply = self.call("POST", "api/sessions", json=session)
        reply.raise_for_status()
        kernel = reply.json()["kernel"]["id"]

        async def talk():
            cookies = "; ".join(f"{c.name}={c.value}" for c in self.browser.cookies if f"/user/{self.name}/" == c.path)
            request = httpclient.HTTPRequest(
                f"{self.hub.address.replace('http', 'ws', 1)}/user/{self.name}/api/kernels/{kernel}/channels",
                headers={"Cookie": cookies},
                connect_timeout=60,
            )
            socket = await websocket.websocket_connect(request)
            try:
                return [await _execute(socket, cell) for cell in cells]
            finally:
                socket.close()

        return ioloop.IOLoop(make_current=False).run_sync(
            lambda: gen.with_timeout(ioloop.IOLoop.current().time() + seconds, talk())
        )

    def line(self) -> str:
        """What the page that waits for the server is told."""
        address = f"{self.hub.address}/hub/api/users/{self.name}/server/progress?_xsrf={self._token('/hub/')}"
        return self.browser.get(address, timeout=300).text

    def stop(self) -> None:
        """Stop one's server, as the page of the hub does."""
        self.browser.get(f"{self.hub.address}/hub/home", timeout=60)
        headers = {"X-XSRFToken": self._token("/hub/"), "Referer": f"{self.hub.address}/hub/home"}
        address = f"{self.hub.address}/hub/api/users/{self.name}/server"
        while self.browser.delete(address, headers=headers, timeout=60).status_code == 202:
            time.sleep(0.5)


async def _execute(socket, code: str) -> str:
    """Run one cell over a kernel's websocket: all that it showed, as text."""
    header = {"msg_id": secrets.token_hex(8), "msg_type": "execute_request", "session": secrets.token_hex(8)}
    header |= {"username": "", "version": "5.3"}
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    await socket.write_message(json.dumps(message))
    shown = []
    while True:
        reply = await socket.read_message()
        assert reply is not None, "the kernel's connection was closed"
        reply = json.loads(reply)
        if reply["parent_header"].get("msg_id") != header["msg_id"]:
            continue
        content = reply["content"]
        match reply["msg_type"]:
            case "stream":
                shown.append(content["text"])
            case "display_data" | "execute_result":
                shown.append(content["data"].get("text/plain", ""))
            case "error":
                shown.append(re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"])))
            case "status" if content["execution_state"] == "idle":
                return "\n".join(shown)


@contextmanager
def serving(names: list[str], full: str = "", stub: bool = False, environment: dict | None = None) -> Iterator[Hub]:
    """Run a hub for these learners until the block ends. Their accounts, made as the runbook says, go with it.

    full: one of the names, whose disk is full. stub: servers are `STUB`, and what comes before them is real.
    """
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="hub"))  # not below pytest's, which is closed to other accounts
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        checkout = lab_server.copy_of_checkout(folder / "checkout")
        shutil.rmtree(checkout / "solutions")
        ports = dict(zip(("public", "hub", "api"), free_ports(3), strict=True))
        text = PORTS.format(config=str(checkout / "workshop" / "jupyterhub_config.py"), proxy=[proxy(folder)], **ports)
        if stub:
            text += f"c.Spawner.cmd = {[sys.executable, '-c', STUB.format(version=metadata.version('jupyterhub'))]!r}\n"
        (folder / "config.py").write_text(text)

        env = os.environ | {"HUB_LEARNERS": f"learners{secrets.token_hex(3)}", "HUB_STATE": str(folder / "state")}
        env |= {"HUB_HOMES": str(folder / "homes"), "PYTHONPATH": str(checkout), **(environment or {})}
        begin = stack.enter_context(passable(Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()))
        passwords = stack.enter_context(accounts(names, checkout, env))
        if full:
            full = full if stack.enter_context(small_disk(folder / "homes" / full)) else ""
        command = [*begin, sys.executable, "-m", "jupyterhub", "-f", str(folder / "config.py")]
        log = stack.enter_context((folder / "hub.log").open("w"))
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
        stack.callback(_end, process)
        hub = Hub(folder, f"http://127.0.0.1:{ports['public']}", passwords, process, full)
        _wait(hub)
        yield hub


@contextmanager
def accounts(names: list[str], checkout: Path, env: dict[str, str]) -> Iterator[dict[str, str]]:
    """Accounts of this machine and their passwords, made by workshop/accounts; gone again at the end."""
    Path(env["HUB_HOMES"]).mkdir()
    try:
        made = subprocess.run(
            [checkout / "workshop" / "accounts"],
            input="".join(f"{name}\n" for name in names), env=env, text=True, check=True, capture_output=True,
        )  # fmt: skip
        yield dict(line.split(",") for line in made.stdout.splitlines())
    finally:
        for left in [p for p in psutil.process_iter(["username"]) if p.info["username"] in names]:
            with suppress(psutil.NoSuchProcess):
                left.kill()
                left.wait(timeout=30)
        for name in names:
            subprocess.run(["userdel", name])
        subprocess.run(["groupdel", env["HUB_LEARNERS"]])


@contextmanager
def small_disk(home: Path) -> Iterator[bool]:
    """A disk of 1 MB in place of a learner's folder; False where this machine may not mount one."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", home], capture_output=True)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", home], check=True)


def _end(process: subprocess.Popen) -> None:
    """Ask the hub to end, which stops the servers first."""
    process.terminate()
    try:
        process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _wait(hub: Hub, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if hub.process.poll() is not None:
            raise RuntimeError(f"JupyterHub exited with status {hub.process.returncode}:\n{hub.log()}")
        try:
            if requests.get(f"{hub.address}/hub/api/", timeout=5).ok:
                return
        except requests.ConnectionError:
            pass
        time.sleep(0.3)
    raise RuntimeError(f"JupyterHub did not answer within {seconds:g} s:\n{hub.log()}")
