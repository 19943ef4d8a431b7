"""What torch.compile refuses, in a sentence with what mends it; and calls in which it may not give up silently.

By itself torch.compile is forgiving: where it cannot go on it runs the function as it was, with a line in a log at
most. Whoever reads generated code or takes a time wants to hear of it.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from . import install, machine


class CannotCompile(machine.Plain, RuntimeError):
    """torch.compile refused: a sentence that says what and why, and what mends it."""

    def __init__(self, sentence: str, mend: str):
        super().__init__(f"{sentence}\nMend: {mend}")
        self.sentence, self.mend = sentence, mend


@contextmanager
def explained(name: str = "This function") -> Iterator[None]:
    """While it is entered, what torch.compile raises for the function `name` becomes a sentence and a mend.

    Raises `CannotCompile` for what lies in the function: it cannot be captured in one graph, its guards fail without
    end, a backend failed on it. Raises `machine.NotReady` where there is no C++ compiler, which lies in the machine.
    """
    from torch._dynamo import exc

    try:
        yield
    except exc.FailOnRecompileLimitHit as refused:
        raise _recompiled(name) from refused
    except exc.BackendCompilerFailed as refused:
        raise _failed(name, refused) from refused
    except exc.TorchDynamoException as refused:
        raise _not_captured(name, refused) from refused


@contextmanager
def strictly(name: str = "This function") -> Iterator[None]:
    """While it is entered, a compiled function whose compilation fails, or that is compiled again and again, raises as
    under `explained` and never runs as it was. Raises `machine.NotReady` where torch.compile is switched off.
    """
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and loading it takes seconds
        yield
        return
    import torch

    for switch in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(switch) == "1":
            raise machine.NotReady(
                f"{switch}=1 switches torch.compile off: what is called compiled would be eager.", f"unset {switch}"
            )
    settings = {"suppress_errors": False, "fail_on_recompile_limit_hit": True}
    with explained(name), torch._dynamo.config.patch(settings):
        yield


def _not_captured(name: str, refused: Exception) -> CannotCompile:
    """A line that Dynamo does not follow; its message names it, explains, and hints at remedies."""
    text = str(refused)
    lines = re.findall(r'^ *File "[^"]*", line \d+, in .*\n +(.*)', text.partition("from user code")[2], re.MULTILINE)
    at = f" at the line `{lines[-1].split('  #')[0].strip()}`" if lines else ""
    hints = re.findall(r"^  Hint: (.+)$", text, re.MULTILINE)
    mend = next((hint for hint in hints if "torch.cond" in hint), next(iter(hints), ""))
    rest = "or leave that line outside the compiled function"
    what = text.splitlines()[0].rstrip(".")
    if raised := re.search(r"got (\w+\(.*\))$", text, re.MULTILINE):  # by an operator, on these shapes
        what += f", {raised[1]}"
    return CannotCompile(
        f"{name} cannot be captured in one graph{at}: {what}.", f"{mend.rstrip('.')}; {rest}" if mend else rest[3:]
    )


def _recompiled(name: str) -> CannotCompile:
    """More compilations than the limit allows: some guard fails at each call."""
    import torch

    limit = torch._dynamo.config.recompile_limit
    return CannotCompile(
        f"{name} was compiled {limit} times, each time for what the call brought (a size, a number, strides), and asks "
        "for it again: it would run uncompiled from here on.",
        'torch.compile(fn, dynamic=True) for sizes that change, tensors in place of numbers; TORCH_LOGS="recompiles" '
        "names the guard that fails",
    )


def _failed(name: str, refused: Exception) -> Exception:
    """Something broke behind Dynamo: the C++ compiler is missing, or Inductor (or another backend) raised."""
    text = str(refused)
    if "InvalidCxxCompiler" in text:
        mend = f"{install.package('g++', dnf='gcc-c++')}; or a GPU, whose code Triton compiles"
        return machine.NotReady(f"There is no C++ compiler, and torch.compile on a CPU needs one for {name}.", mend)
    inner = getattr(refused, "inner_exception", None)
    first = next(iter(str(inner or text).splitlines()), "")
    kind = f"{type(inner).__name__}: " if inner else ""
    return CannotCompile(
        f"The backend of torch.compile failed on {name}. {kind}{first}",
        'torch.compile(fn, backend="aot_eager") tells whether the code generator is to blame; if that runs, take out '
        "the operator that the message names",
    )
