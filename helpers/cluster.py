"""Have answers judged on a Dask cluster, where each worker owns one GPU and judges one answer at a time.

An answer goes there as text and comes back as a verdict's data: what judges it is `helpers.worker`, in a process of its
own beside the Dask worker, as it would be here. No answer is judged twice unless a worker was lost over it: before a
task judges, it leaves a note with the scheduler, and a task that finds the note of an earlier start judges nothing.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from . import desk, machine, room

PATIENCE = 10.0
"""Seconds to wait for a scheduler's answer."""

GRACE = 600.0
"""Seconds in which the nanny of a lost worker, as long as it answers, may bring it back."""

DESERTED = 120.0
"""Seconds without any worker after which waiting is given up."""

KINDS = ("GPU", "CPU")
"""What workers offer, one each (`--resources GPU=1`): to judge on a GPU of their own, or in CPU mode."""

Told = Callable[[str], None]


class Lost(Exception):
    """A task's answer was begun before, by a worker that is gone. args: where that was (its nanny's address)."""


class Unfit(Exception):
    """A worker is not what it says. args: why."""


class GivenUp(Exception):
    """Nobody does a job any more: workers were lost over it, or whoever wanted it left. The message says which."""


def versions() -> dict[str, str]:
    """What must be the same on both sides for a verdict to be the same: the helpers' own code, Python, torch, Triton,
    Dask."""
    found = machine.installed("distributed", "torch", "triton")
    python = ".".join(platform.python_version_tuple()[:2])
    return {"helpers": code(), "python": python} | {name: version.partition("+")[0] for name, version in found.items()}


@lru_cache(maxsize=1)
def code() -> str:
    """8 hex digits over the text of all of helpers."""
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


# ---- on a worker --------------------------------------------------------------------------------------------------


def attend(key: str, function: str, args: tuple, options: dict) -> bytes:
    """The task: what the worker's desk says to a job, unless this key was begun before. Raises `Lost` and `Unfit`."""
    from distributed import get_worker
    from distributed.utils import sync

    worker = get_worker()
    if begun := sync(worker.loop, worker.scheduler.events, topic=key):
        raise Lost(begun[0][1]["home"])
    note = {"home": worker.nanny or worker.address, "worker": worker.address}
    sync(worker.loop, worker.scheduler.log_event, topic=key, msg=note)
    if not hasattr(worker, "desk"):
        raise Unfit("it was started without --preload helpers.worker")
    if worker.card:
        _look_at(worker.card)
    return worker.desk.ask(function, *args, **options)


def described(dask_worker) -> dict | None:
    """What a worker is, by `helpers.worker`; None where it was started without that.

    It travels by name, as all that is sent there: code from another version of Python could end whoever runs it.
    """
    return getattr(dask_worker, "about", None)


async def reached(nanny: str) -> bool:
    """Whether a nanny answers the scheduler, where this runs: that can reach it where a client may not."""
    try:
        await greeted(nanny, "scheduler")
    except OSError:
        return False
    return True


async def greeted(address: str, role: str = "client") -> None:
    """Raises where nobody who speaks Dask's language answers at an address. Where something else listens there and says
    nothing, Dask itself would wait without end. role: by which Dask's TLS knows this side."""
    from distributed.comm import connect
    from distributed.security import Security

    ours = Security().get_connection_args(role)
    comm = await asyncio.wait_for(connect(address, timeout=PATIENCE / 2, **ours), PATIENCE)
    await comm.close()


def _look_at(card: str) -> None:
    """Raises `Unfit` where a GPU no longer answers."""
    import pynvml

    try:
        pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(card.encode()))
    except pynvml.NVMLError as error:
        raise Unfit(f"its GPU no longer answers: {error}") from None


def dask():
    """The package `distributed`. Raises `machine.NotReady` where it is not installed."""
    try:
        import distributed
    except ImportError:
        raise machine.NotReady("Dask is not installed here.", "make install EXTRAS=all,cluster") from None
    return distributed


# ---- here ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def joined(address: str) -> Iterator["Cluster"]:
    """The cluster whose scheduler is at `address` (such as tcp://host:8786).

    Raises `machine.NotReady` where there is none, or none of its workers can judge as this machine would.
    """
    distributed = dask()
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what it would say is said here, in one sentence
    import warnings

    from distributed.utils import LoopRunner, sync

    with contextlib.ExitStack() as stack:
        runner = LoopRunner()
        runner.start()
        stack.callback(runner.stop)
        try:
            sync(runner.loop, greeted, address)
            with warnings.catch_warnings(action="ignore"):  # of other versions: what counts is compared below
                client = distributed.Client(address, timeout=PATIENCE, set_as_default=False, loop=runner.loop)
        except Exception as error:  # whatever listens there may say anything
            why = str(error).partition("\n")[0] or type(error).__name__
            said = f"No Dask scheduler answers at {address!r} ({why})."
            room.log(said)
            raise machine.NotReady(said, "ask your instructor for the address; without it, check here") from None

        def close():
            with contextlib.suppress(Exception):  # a scheduler that is gone is no reason to raise at the end
                client.close(timeout=2)

        stack.callback(close)
        yield Cluster(client, address)


class Cluster:
    """A scheduler and its workers. kind: what is asked of a worker, "GPU" where any offers one, else "CPU"."""

    def __init__(self, client, address: str):
        self.client, self.address = client, address
        self.about: dict[str, dict] = {}
        self.left = False
        self.fit: set[str] = set()
        self._ask_scheduler()
        self._look()
        if not self.fit:
            raise self._nobody()
        self.kind = next(kind for kind in KINDS if any(self.about[w]["kind"] == kind for w in self.fit))
        self.fit = {w for w in self.fit if self.about[w]["kind"] == self.kind}

    @property
    def card(self) -> str:
        """The name of a worker's GPU, or CPU."""
        return next(self.about[w]["name"] for w in sorted(self.fit))

    def do(self, function: str, *args, label: str, told: Told = lambda text: None, **options):
        """Have one worker's desk call a function of this package, by name, and return what it gives.

        label: what the job is about. told: called with the place in the queue, as it changes. A worker lost before it
        began is no matter. Of one that is lost over the job, the same worker gets it once more when its nanny has
        brought it back, so that a job that ends its worker cannot end another one too; where the nanny is gone too, its
        machine is, and another gets it. Raises `GivenUp` where two were lost, or it was left; `machine.NotReady`
        where the scheduler is gone, or all workers; what the function raises, and `desk.Ended`.
        """
        name, home = f"{label}-{uuid.uuid4().hex[:12]}", ""
        for attempt in itertools.count():
            key = f"{name}-{attempt}"
            reply, lost = self._tried(key, self._chosen(home, told), told, (function, args, options))
            if reply is not None:
                try:
                    return desk.result(reply)
                except Unfit as error:
                    self._leave_out(self._begun(key)["worker"], *error.args)
            elif lost:
                self._note("lost", f"{label}: the worker of {lost} was lost while it was at it", key)
                if home:
                    said = "Two workers of the cluster were lost while they judged it, so no third one tries."
                    self._note("given up", f"{label}: {said}", key)
                    raise GivenUp(said)
                home = lost

    def _tried(self, key: str, chosen: set[str], told: Told, job: tuple) -> tuple[bytes | None, str]:
        """One try, by one of `chosen` (none: by anybody): the reply, or None and where a worker was lost over it (empty
        where nobody had begun)."""
        from distributed import CancelledError
        from distributed.scheduler import KilledWorker

        ahead, deserted = self._waiting(), time.monotonic()
        how = {"resources": {self.kind: 1}, "retries": 0, "workers": sorted(chosen) or None}
        future = self._asked(self.client.submit, attend, key, *job, key=key, **how)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    return future.result(timeout=1), ""
                if self.left:
                    raise GivenUp("It left the queue.")
                there = self._present()
                if there:
                    deserted = time.monotonic()
                elif time.monotonic() - deserted > DESERTED:
                    raise self._nobody()
                if chosen and not chosen & there:  # all whom it may go to are gone
                    break
                ahead &= self._waiting()
                told(self._place(key, ahead, there))
        except Lost as error:
            return None, error.args[0]
        except KilledWorker:
            pass
        except Unfit as error:
            self._leave_out(self._begun(key)["worker"], *error.args)
            return None, ""
        except (CancelledError, OSError):
            raise self._gone() from None
        finally:
            with contextlib.suppress(Exception):  # where the scheduler is gone
                future.cancel()
        return None, self._begun(key).get("home", "")

    def leave(self) -> None:
        """Give up what is being waited for: `do`, in another thread, returns None."""
        self.left = True

    # ---- workers ----

    def _asked(self, call, *args, **named):
        """A call of the client. Raises `machine.NotReady` where the scheduler does not answer."""
        try:
            return call(*args, **named)
        except (OSError, RuntimeError, TimeoutError) as error:
            if isinstance(error, machine.NotReady):
                raise
            raise self._gone() from error

    def _present(self) -> set[str]:
        """The addresses of fit workers that are there now."""
        there = self._asked(self.client.scheduler_info, n_workers=-1)["workers"]
        if set(there) - set(self.about):
            self._look()
        return set(there) & self.fit

    def _ask_scheduler(self) -> None:
        """Raises `machine.NotReady` where the scheduler has not the course, or another Python or Dask."""
        mine, mend = versions(), "start it with the course's own environment: workshop/cluster.md"
        try:
            theirs = self._asked(self.client.run_on_scheduler, versions)
        except (ImportError, AttributeError):
            theirs = {}
        differ = [k for k in ("python", "distributed") if theirs.get(k) != mine[k]]
        if differ:
            other = "; ".join(f"{k} {theirs.get(k, 'unknown')}, here {mine[k]}" for k in differ)
            said = f"The Dask scheduler at {self.address} is not one of the course's: {other}."
            room.log(said)
            raise machine.NotReady(said, mend)

    def _look(self) -> None:
        """Ask all workers what they are; those that cannot judge as this machine would are left out, and named."""
        found = self._asked(self.client.run, described, on_error="return")
        mine = versions()
        for worker, about in found.items():
            if worker in self.about:
                continue
            if not isinstance(about, dict):
                about = {"problem": "it was started without --preload helpers.worker"}
            other = {k: (v, about["versions"].get(k)) for k, v in mine.items() if "versions" in about}
            other = [f"{k} {theirs or 'missing'}, here {v}" for k, (v, theirs) in other.items() if v != theirs]
            if not about["problem"] and other:
                about = {**about, "problem": f"its versions are not these: {'; '.join(other)}"}
            self.about[worker] = about
            if about["problem"]:
                self._leave_out(worker, about["problem"])
            elif about["kind"] == getattr(self, "kind", about["kind"]):
                self.fit.add(worker)

    def _chosen(self, home: str, told: Told) -> set[str]:
        """Whom a job may go to; none means anybody. home: the nanny of the worker that was lost over it, if one was."""
        end = time.monotonic() + GRACE
        while home:
            back = {w for w in self._present() if self.about[w]["home"] == home}
            if back:
                return back
            if time.monotonic() > end or not self._asked(self.client.run_on_scheduler, reached, home):
                break
            told("the worker that had it was lost; waiting for it to come back")
            time.sleep(0.5)
        end = time.monotonic() + DESERTED
        while True:
            there = self._present()
            left_out = any(about["problem"] for about in self.about.values())
            if there or not left_out:
                return there if left_out else set()
            if self.left:
                raise GivenUp("It left the queue.")
            if time.monotonic() > end:  # to send it to anybody is to send it to one that was left out
                raise self._nobody()
            told("no worker is there; waiting for one")
            time.sleep(0.5)

    def _leave_out(self, worker: str, why: str) -> None:
        """Give a worker nothing more."""
        self.fit.discard(worker)
        self.about[worker] = {"problem": why}
        self._note("unfit", f"{worker} is left out: {why}", worker)

    # ---- the queue ----

    def _waiting(self) -> set[str]:
        """The keys of all jobs, of every client, that are at a worker or wait for one."""
        every = self._asked(self.client.processing)
        return {key for keys in every.values() for key in keys}

    def _begun(self, key: str) -> dict:
        """Who began a job: its "home" and its "worker"; empty where nobody did."""
        noted = self._asked(self.client.get_events, key)
        return noted[0][1] if noted else {}

    def _place(self, key: str, ahead: set[str], there: set[str]) -> str:
        workers = f"{len(there)} worker{'s' * (len(there) != 1)}"
        if not there:
            return "no worker is there; waiting for one"
        if self._begun(key):
            return f"being judged on {self.card}"
        return f"number {len(ahead) + 1} in the queue of {workers}"

    # ---- what goes wrong ----

    def _note(self, what: str, said: str, about: str) -> None:
        """For the instructor: in the scheduler's events of the topic "helpers", and in the room's log."""
        with contextlib.suppress(Exception):  # where the scheduler is gone, the room's log has it
            self.client.log_event("helpers", {"what": what, "said": said, "about": about})
        room.log(said)

    def _gone(self) -> machine.NotReady:
        said = f"The Dask scheduler at {self.address} no longer answers."
        room.log(said)
        return machine.NotReady(said, "start it again, then give the same command: what has been judged is kept")

    def _nobody(self) -> machine.NotReady:
        reasons = sorted({about["problem"] for about in self.about.values() if about["problem"]})
        why = f": {'; '.join(reasons)}" if reasons else ": no worker is there"
        said = f"No worker of the cluster at {self.address} can judge an answer{why}."
        room.log(said)
        mend = "git pull and make install on both sides, then start the workers again" if reasons else (
            f"dask worker {self.address} --nthreads 1 --resources GPU=1 --preload helpers.worker"
        )  # fmt: skip
        return machine.NotReady(said, mend)


def digest(*parts) -> str:
    """16 hex digits over plain data and this code: equal where a verdict would be of the same answer."""
    return hashlib.sha256(json.dumps([code(), *parts]).encode()).hexdigest()[:16]
