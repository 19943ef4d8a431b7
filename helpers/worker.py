"""What makes a Dask worker one of the course's: `dask worker ADDRESS --nthreads 1 --resources GPU=1 --preload
helpers.worker`.

The worker takes one of the machine's GPUs for itself, and hands jobs to a process of its own that judges (the desk):
that one may die over an answer, and the worker goes on. With `CPU=1` for `GPU=1` it judges in CPU mode.
"""

import logging
import os

from filelock import FileLock, Timeout

from . import cluster, desk, locks, machine

log = logging.getLogger("distributed.worker")


def dask_setup(worker) -> None:
    """Called by Dask before the worker joins its scheduler. A worker that cannot keep what it claims offers nothing."""
    offered = worker.state.total_resources
    kind = next((kind for kind in cluster.KINDS if offered.get(kind)), "")
    problem, name, card = "", "CPU", ""
    if not kind or offered[kind] != 1 or worker.state.nthreads != 1:
        problem = "it takes one answer at a time: start it with --nthreads 1 --resources GPU=1 (or CPU=1)"
    elif kind == "CPU":
        os.environ["HELPERS_MODE"] = "cpu"  # for the desk, which begins later
    elif machine.gpu():
        problem, name, card, worker.owned = _owned()
    else:
        problem = f"it claims a GPU, and this is CPU mode: {machine.here().why}"
    if problem:
        log.error("%s is left out: %s", worker.name, problem)
        for pool in (worker.state.total_resources, worker.state.available_resources):
            pool.update(dict.fromkeys(offered, 0))
    worker.card, worker.desk = card, desk.Desk()
    worker.about = {
        "problem": problem,
        "kind": kind,
        "name": name,
        "home": worker.nanny or worker.address_safe,
        "versions": cluster.versions(),
    }


def dask_teardown(worker) -> None:
    """Called by Dask when the worker ends in order."""
    worker.desk.close()


def _owned() -> tuple[str, str, str, FileLock | None]:
    """Take a GPU that no other worker of this machine has: (why there is none, its name, its UUID, the lock held)."""
    import pynvml

    pynvml.nvmlInit()
    every = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    cards = [pynvml.nvmlDeviceGetUUID(handle) for handle in every]
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):  # Slurm's and Kubernetes' choice
        cards = [cards[int(one)] if one.isdigit() else one for one in named.split(",") if one]
    for card in cards:
        lock = FileLock(locks.folder() / f"{card}.worker", mode=0o666, blocking=False)
        try:
            lock.acquire()
        except Timeout:
            continue
        os.environ["CUDA_VISIBLE_DEVICES"] = card
        return "", pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByUUID(card.encode())), card, lock
    return "every GPU that it may use belongs to another worker of this machine", "", "", None
