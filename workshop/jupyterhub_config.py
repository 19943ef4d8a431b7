"""JupyterHub on one machine: every learner an account of this machine, every server a process of that account.

Run as root in a checkout that the learners can read and not write: `jupyterhub -f workshop/jupyterhub_config.py`.
README.md beside this file is the instructor's runbook. What differs from room to room comes from the environment:

HUB_ADDRESS     where browsers connect (default http://:8000; https with the two below)
HUB_TLS_KEY, HUB_TLS_CERT   files of the certificate
HUB_HOST        https://hub.example.org, where each learner is to have a subdomain of their own
HUB_STATE       folder of the database and the cookie secret (default /var/lib/gpu-kernel-ladder)
HUB_LEARNERS, HUB_INSTRUCTORS   groups of this machine (defaults learners, instructors)
HUB_STARTING    servers that start at the same time; the others wait in line (default: one for two processors)
HUB_MEMORY, HUB_CPUS   what one learner may take: memory of one process (default 8G; without limit where there is a GPU,
                since what CUDA maps may count), processors (default 2)
HUB_GPUS        GPUs to spread learners over, such as 0,1 (default: everyone sees all)
HUB_IDLE_MINUTES   a kernel that did nothing for so long is stopped, and gives its GPU memory back (default 60)

Secrets are JupyterHub's own variables: JPY_COOKIE_SECRET and CONFIGPROXY_AUTH_TOKEN, 32 random bytes in hex each.
Without them the hub makes them itself. No variable reaches a learner's server unless `env_keep` names it, as it does
HELPERS_CLUSTER, HELPERS_ROOM (cluster.md) and HELPERS_MODE.
"""

import asyncio
import grp
import itertools
import os
import pwd
import resource
import shutil
import sys
import time
from pathlib import Path

from jupyterhub.spawner import LocalProcessSpawner, SpawnException
from jupyterhub.utils import can_connect

COURSE = Path(__file__).resolve().parent.parent
STATE = Path(os.environ.get("HUB_STATE", "/var/lib/gpu-kernel-ladder"))
CPUS = sorted(os.sched_getaffinity(0))
GPUS = [gpu.strip() for gpu in os.environ.get("HUB_GPUS", "").split(",") if gpu.strip()]
IDLE = 60 * int(os.environ.get("HUB_IDLE_MINUTES", "60"))
MEMORY = os.environ.get("HUB_MEMORY", "" if Path("/dev/nvidiactl").exists() else "8G")
PROCESSES = 4096  # of one account, threads among them: PyTorch starts as many as there are processors
FULL = 50 * 2**20  # bytes: with less, the lessons do not fit, and soon a notebook cannot be saved
START_SECONDS = 1800  # the time in line counts

gate = asyncio.Semaphore(int(os.environ.get("HUB_STARTING", "0")) or max(2, len(CPUS) // 2))
line: list["Seat"] = []  # who waits at the gate, first come first


class Seat(LocalProcessSpawner):
    """A learner's server, within limits, as their own account; where many come at once they start one after another.

    A start costs seconds of a processor, so forty at once would all be slow, and the slowest would be given up.
    """

    numbers = itertools.count()

    async def start(self):
        came, self.number = time.monotonic(), next(self.numbers)
        line.append(self)
        try:
            async with gate:
                line.remove(self)
                if (waited := time.monotonic() - came) > 1:
                    self.log.info("%s waited %.0f s in line, %d are behind", self.user.name, waited, len(line))
                ip, port = await super().start()
                while await self.poll() is None and not can_connect(ip, port):
                    await asyncio.sleep(0.2)
        finally:
            if self in line:
                line.remove(self)
        self.log.info("%s has a server after %.0f s", self.user.name, time.monotonic() - came)
        return ip, port

    async def progress(self):
        """What the learner reads on the page that waits."""
        while self in line:
            before = line.index(self)
            yield {"progress": 10, "message": f"Many are starting at this moment: {before} are before you in line."}
            await asyncio.sleep(2)
        yield {"progress": 50, "message": "Your server is starting. Your own copies of the lessons come first."}

    def get_env(self):
        env = super().get_env()
        if GPUS:
            env["CUDA_VISIBLE_DEVICES"] = GPUS[self.number % len(GPUS)]
        env["HELPERS_WORK"] = str(Path(env["HOME"]) / "work")
        return env

    def make_preexec_fn(self, name):
        """What the new process does before it becomes the learner's server: limits first, while it may set them."""
        become = super().make_preexec_fn(name)
        share = max(1, min(int(self.cpu_limit), len(CPUS)))
        mine = {CPUS[(self.number * share + i) % len(CPUS)] for i in range(share)}

        def prepare():
            os.sched_setaffinity(0, mine)
            for what, most in [
                (resource.RLIMIT_DATA, self.mem_limit or resource.RLIM_INFINITY),
                (resource.RLIMIT_NPROC, PROCESSES),
                (resource.RLIMIT_CORE, 0),
            ]:
                resource.setrlimit(what, (most, most))
            become()
            os.umask(0o077)
            os.chmod(pwd.getpwnam(name).pw_dir, 0o700)

        return prepare


DISK_FULL = (
    "The disk that your files lie on is full, so nothing that you write now could be saved. What you have saved is "
    "there. Tell your instructor, who makes room; then start your server again."
)


def before_start(seat: Seat) -> None:
    """Start no server on a full disk.

    The learner's copies are made after this, by their own process (`python -m helpers lab`): root would follow whatever
    links lie in a learner's folder.
    """
    home = pwd.getpwnam(seat.user.name).pw_dir
    free = shutil.disk_usage(home).free
    if free < FULL:
        seat.log.error("%s has no server: the disk of %s is full, %.0f MB are free", seat.user.name, home, free / 2**20)
        raise SpawnException(DISK_FULL, reason="disk-full")


c = get_config()  # noqa: F821

STATE.mkdir(parents=True, exist_ok=True)
STATE.chmod(0o700)
c.JupyterHub.db_url = f"sqlite:///{STATE}/jupyterhub.sqlite"
c.JupyterHub.cookie_secret_file = str(STATE / "cookie_secret")
c.ConfigurableHTTPProxy.pid_file = str(STATE / "proxy.pid")
c.JupyterHub.bind_url = os.environ.get("HUB_ADDRESS", "http://:8000")
c.JupyterHub.ssl_key = os.environ.get("HUB_TLS_KEY", "")
c.JupyterHub.ssl_cert = os.environ.get("HUB_TLS_CERT", "")
c.JupyterHub.subdomain_host = os.environ.get("HUB_HOST", "")
c.JupyterHub.concurrent_spawn_limit = 0  # who comes at a busy moment waits in line, rather than being turned away

c.JupyterHub.authenticator_class = "pam"
c.PAMAuthenticator.open_sessions = False  # servers outlive the login
c.PAMAuthenticator.allowed_groups = {os.environ.get("HUB_LEARNERS", "learners")}
instructors = os.environ.get("HUB_INSTRUCTORS", "instructors")
c.PAMAuthenticator.admin_groups = {g.gr_name for g in grp.getgrall() if g.gr_name == instructors}  # it may be missing

c.JupyterHub.spawner_class = Seat
c.Spawner.cmd = [sys.executable, "-m", "helpers", "lab", "--"]
c.Spawner.args = [
    f"--MappingKernelManager.cull_idle_timeout={IDLE}",
    "--MappingKernelManager.cull_connected=True",  # an open browser is no work
    f"--TerminalManager.cull_inactive_timeout={IDLE}",
    f"--ServerApp.shutdown_no_activity_timeout={2 * IDLE}",
]
c.Spawner.env_keep = ["PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "HELPERS_CLUSTER", "HELPERS_MODE", "HELPERS_ROOM"]
c.Spawner.environment = {"PYTHONPATH": str(COURSE)}
c.Spawner.pre_spawn_hook = before_start
c.Spawner.mem_limit = MEMORY or None
c.Spawner.cpu_limit = float(os.environ.get("HUB_CPUS", "2"))
c.Spawner.start_timeout = START_SECONDS
c.Spawner.http_timeout = 120
