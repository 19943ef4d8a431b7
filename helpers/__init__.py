"""The package that the course's notebooks import: measuring, reading generated code, running kernels.

`import helpers` decides the mode (see `helpers.machine`) and must come before `import triton`;
`helpers.start()` says what it found, or in one sentence why the course cannot run here.
"""

import atexit
import gc
import os
import sys
from pathlib import Path

from . import install

if sys.version_info < install.OLDEST:  # nothing below can be imported then, so it is said here, without a traceback
    sys.exit("{}\nMend: {}".format(*install.python_problem()))

atexit.register(gc.freeze)
"""What is there at the end stays as it is: Python's last collections would walk through all of torch and its compiler,
for seconds, until Jupyter loses patience with the process and kills it."""

ROOT = Path(__file__).resolve().parent.parent
"""The checkout: notebooks, labs and records are found from here, whatever folder a notebook runs in."""
WORK = Path(os.environ.get("HELPERS_WORK") or ROOT / "work")
"""The learner's own folder. Where many learners share one checkout, HELPERS_WORK names another for each."""

from . import machine  # noqa: E402  (machine reads ROOT)

machine.prepare()


def start() -> None:
    """Say which machine and mode this notebook runs on.

    Raises `machine.NotReady`, shown as one sentence with the command that mends it, when it cannot run here.
    """
    from . import doctor

    _import_in_peace()
    problem = doctor.blocking()
    if problem:
        raise problem
    from . import room, show  # they need IPython, which may have been the problem

    show.note(machine.banner())
    if said := room.announced():
        show.note(said)
    for warning in doctor.warnings():
        show.note(warning, kind="warning")


def _import_in_peace() -> None:
    """In a notebook's first cell: no collection of garbage until it is over. What packages make stays, and to look
    through it again and again takes a fifth of the time that their import takes."""
    if not (shell := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()):
        return

    def over(*_) -> None:
        gc.freeze()  # nor need what comes later look through it
        gc.enable()
        shell.events.unregister("post_run_cell", over)

    gc.disable()
    shell.events.register("post_run_cell", over)
