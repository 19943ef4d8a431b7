"""Preloaded into a Dask worker by tests: the worker dies of an answer that says so, or has no GPU any more at it, and
counts what it is given."""

import os
import signal
from pathlib import Path

from helpers import cluster


def dask_setup(worker) -> None:
    ask = worker.desk.ask

    def faulty(function, *args, **options):
        with Path(os.environ["TESTS_GIVEN"]).open("a") as file:
            file.write(f"{os.getpid()} {args[0]}\n")
        if "end this worker" in args[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        if "this worker is unfit" in args[1]:
            raise cluster.Unfit("its GPU no longer answers")
        return ask(function, *args, **options)

    worker.desk.ask = faulty
