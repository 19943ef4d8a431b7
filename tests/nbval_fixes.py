"""A pytest plugin that closes gaps of nbval 0.11, so that a notebook passes only where a reader would call it fine.

As nbval comes: a dead kernel is noticed after the whole cell timeout; an unknown magic passes; a cell tagged
`raises-exception` passes without raising; the cells below a failure still run and fail in turn; warnings go by
unseen; and cells leave no history, which `helpers.source` reads.
"""

import queue
import time
from pathlib import Path

import pytest
from nbval import kernel, plugin

from helpers import machine, notebooks

CELL_SECONDS = 300
QUICK = {"HELPERS_TARGETS": "sm_90 sm_90a gfx942"}
"""In CPU mode lessons compile Mojo, which takes ten seconds of a core each time, for these GPUs alone: what lesson 11
makes of it for others is then its recorded output, which tests/test_mojo.py makes anew."""


def pytest_configure(config):
    """Kernels run in the Python that runs pytest; a cell has minutes, where nbval's own limit is half an hour."""
    config.option.nbval_current_env = True
    if config.option.nbval_cell_timeout == 2000:
        config.option.nbval_cell_timeout = CELL_SECONDS


def await_reply(self, msg_id, timeout=None):
    """Wait for the reply to `msg_id` and keep its status; look every second whether the kernel still lives."""
    end = time.monotonic() + (timeout or CELL_SECONDS)
    while (left := end - time.monotonic()) > 0:
        try:
            message = self.get_message(stream="shell", timeout=min(1.0, left))
        except queue.Empty:
            if not self.is_alive():
                raise RuntimeError("the kernel died (a crash, os._exit, or out of memory)") from None
            continue
        if message["parent_header"].get("msg_id") == msg_id:
            self.last_status = message["content"]["status"]
            return
    raise queue.Empty


def execute_cell_input(self, cell_input, allow_stdin=None):
    """Run a cell as JupyterLab does: it enters the history."""
    return self.kc.execute(cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False)


def start_new_kernel(startup_timeout=60, kernel_name="python", cwd=".", **options):
    """Start a kernel that imports this checkout's `helpers` and shows what C code prints, as JupyterLab's do.

    In solutions/ a check that fails raises there, in labs/ it leaves no trace (`notebooks.kernel_environment`).
    """
    env = notebooks.kernel_environment({} if machine.gpu() else QUICK, Path(cwd))
    env.pop("PYTEST_CURRENT_TEST", None)  # ipykernel leaves file descriptors alone where it sees this
    return _start_new_kernel(startup_timeout, kernel_name, cwd=cwd, env=env, **options)


def runtest(self):
    """Run one cell, unless one above it failed; then judge what nbval does not look at."""
    notebook = self.parent
    if broken := getattr(notebook, "broken", None):
        pytest.skip(f"{broken} failed, further up in this notebook")
    try:
        _runtest(self)
        if not self.options["skip"]:
            judge(self, notebook.kernel.last_status)
    except pytest.skip.Exception:
        raise
    except BaseException:
        notebook.broken = f"{self.name} ({self.cell.get('id', 'no id')})"
        raise


def judge(cell, status: str) -> None:
    """Fail a cell that ran without an error output but not as it should."""
    if cell.options["check_exception"] and status == "ok":
        cell.raise_cell_error("tagged raises-exception, but nothing was raised")
    if not cell.options["check_exception"] and status != "ok":
        cell.raise_cell_error(f"the kernel replied {status!r} without an error output (an unknown magic?)")
    noise = "".join(o.text for o in cell.test_outputs if o.output_type == "stream" and o.name == "stderr")
    if noise:
        cell.raise_cell_error(f"wrote to stderr, which a reader sees as a red box:\n{noise}")


_runtest, _start_new_kernel = plugin.IPyNbCell.runtest, kernel.start_new_kernel
kernel.RunningKernel.await_reply = await_reply
kernel.RunningKernel.execute_cell_input = execute_cell_input
kernel.start_new_kernel = start_new_kernel
plugin.IPyNbCell.runtest = runtest
