"""NVRTC itself: a text and flags in, PTX and machine code out.

`nvrtc` calls `made` in its own process. Run as a script, this file reads pickled jobs from stdin, each the arguments
of one call, and writes what they gave to stdout: it imports nothing of the project, so that it starts in no time.
"""

import pickle
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Made:
    """What NVRTC gave: its status by name; its log; PTX, also where ptxas refused it; names: expression -> symbol."""

    status: str
    log: str
    ptx: str = ""
    cubin: bytes = b""
    names: tuple[tuple[str, str], ...] = ()


def made(code: str, file: str, flags: list[str], headers: dict[str, str], expressions: tuple[str, ...]) -> Made:
    """Compile a text, known to the compiler as `file`, with headers by name and C++ names to instantiate."""
    from cuda.bindings import nvrtc

    texts, names = [t.encode() for t in headers.values()], [h.encode() for h in headers]
    program = value(nvrtc.nvrtcCreateProgram(code.encode(), file.encode(), len(headers), texts, names))
    try:
        for expression in expressions:
            value(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        status = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])[0]
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            in_ptx = "ptx input, line" in log
            return Made(status.name, log, _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program) if in_ptx else "")
        return Made(
            "",
            log,
            _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program),
            _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program),
            tuple((e, value(nvrtc.nvrtcGetLoweredName(program, e.encode())).decode()) for e in expressions),
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def value(result: tuple, last: bool = False):
    """The value of a binding's (status, value, ...) answer; an unexpected status is an error."""
    if result[0].value != 0:
        raise RuntimeError(f"NVRTC answered {result[0].name}.")
    return result[-1] if len(result) > 1 or last else None


def _bytes(size, get, program) -> bytes:
    buffer = b" " * value(size(program))
    value(get(program, buffer))
    return buffer


def _text(size, get, program) -> str:
    return _bytes(size, get, program).rstrip(b"\0").replace(b"\0", b"\n").decode(errors="replace")


if __name__ == "__main__":
    answers = [vars(made(*job)) for job in pickle.load(sys.stdin.buffer)]
    pickle.dump(answers, sys.stdout.buffer)
