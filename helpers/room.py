"""What an instructor sees of a room: who is at which exercise, with which finding, for how long.

A learner takes part where HELPERS_ROOM names a folder that the instructor made (`python -m helpers room DIR`), and
every notebook says so at its start. Then each check also leaves there, in a file of the learner's own, the exercise,
the attempts, the last finding and when that was; no code.
"""

import datetime
import getpass
import json
import os
import pwd
import stat
import tempfile
import textwrap
import unicodedata
import urllib.parse
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from . import exercises, show

LINES = 5
"""Of what went wrong in the room: as many as `table` shows."""

MOST_BYTES = 1 << 20
"""Of a file that was left: more than all exercises take, and no burden to read every five seconds."""


def announced() -> str:
    """What a learner is told who takes part; empty for all others."""
    if not os.environ.get("HELPERS_ROOM"):
        return ""
    return (
        "Your instructor sees which exercises you have checked, how often, the last finding and since when, and no "
        "code. To leave: unset HELPERS_ROOM, in a notebook %env HELPERS_ROOM="
    )


def tell(exercise: str, entry) -> None:
    """Leave word of an exercise's `progress.Entry` in the room, where the learner takes part."""
    if (file := _file(".json")) is None:
        return
    try:
        seen = _read(file) | {exercise: asdict(entry)}
        # under a name that nobody knows before: a link that waited there would lead to one of the learner's own files
        handle, partial = tempfile.mkstemp(prefix=".", suffix=".partial", dir=file.parent)
        try:
            with open(handle, "w", encoding="utf-8") as out:
                json.dump({"exercises": seen}, out)
            os.chmod(partial, 0o640)
            os.replace(partial, file)
        except OSError:
            os.unlink(partial)
            raise
    except OSError as error:  # no reason to withhold a verdict
        show.note(f"Your instructor's view could not be brought up to date: {error}", kind="warning")


def log(said: str) -> None:
    """Leave word of what went wrong, for the instructor, where there is a room."""
    if (file := _file(".log")) is None:
        return
    try:
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(file, how, 0o640), "a", encoding="utf-8", errors="backslashreplace") as out:
            os.fchmod(out.fileno(), 0o640)
            out.write(f"{_now().isoformat(timespec='seconds')} {_learner()}: {said}\n")
    except OSError:  # a full disk has its own sentence where it matters; this is the copy
        return


def make(folder: Path) -> None:
    """The folder for a class: everybody may leave a file, and only its group reads what is left."""
    if not folder.exists():
        folder.mkdir(parents=True)
        folder.chmod(0o3733)


@dataclass(frozen=True)
class Place:
    """A learner at an exercise. stuck: minutes from the first attempt until now, or 0 once it is passed; quiet: minutes
    since the last attempt."""

    learner: str
    exercise: str
    attempts: int
    passed: bool
    finding: str
    stuck: int
    quiet: int


def places(folder: Path) -> list[Place]:
    """All that was left in a room, those stuck longest first."""
    found, now = [], _now()
    for file, learner in _left(folder, ".json"):
        for name, entry in _read(file).items():
            if name not in exercises.every():
                continue
            try:
                since, last = (datetime.datetime.fromisoformat(entry[key]) for key in ("since", "last"))
                stuck, quiet = (int((now - then).total_seconds() // 60) for then in (since, last))
                passed, said = bool(entry["passed"]), ": ".join(filter(None, (entry["kind"], entry["message"])))
                tried = int(entry["attempts"])
                found.append(Place(learner, name, tried, passed, said, 0 if passed else stuck, quiet))
            except (KeyError, TypeError, ValueError, OverflowError):  # a learner's file may hold anything
                continue
    return sorted(found, key=lambda p: (p.passed, -p.stuck, p.learner, p.exercise))


def table(folder: Path) -> str:
    """The room as text: who has yet to pass what, exercise by exercise what is passed, and what went wrong."""
    every = places(folder)
    open_ = [
        {
            "learner": p.learner,
            "exercise": p.exercise,
            "attempts": p.attempts,
            "minutes stuck": p.stuck,
            "last try, minutes ago": p.quiet,
            "last finding": textwrap.shorten(p.finding, 80, placeholder=" …"),
        }
        for p in every
        if not p.passed
    ]
    rows = [
        {
            "exercise": name,
            "passed": sum(p.passed for p in every if p.exercise == name),
            "tried": sum(p.exercise == name for p in every),
            "attempts": sum(p.attempts for p in every if p.exercise == name),
        }
        for name in dict.fromkeys(sorted(p.exercise for p in every))
    ]
    learners = len({p.learner for p in every})
    said = f"{learners} learner{'s' * (learners != 1)}, {len(open_)} exercise{'s' * (len(open_) != 1)} open, "
    said += f"{len(every) - len(open_)} passed, {_now():%H:%M:%S} UTC"
    parts = [show.table(open_, caption=said), show.table(rows), "\n".join(logged(folder))]
    return _plain("\n\n".join(filter(None, map(str, parts))))


def logged(folder: Path) -> Iterable[str]:
    """The last lines of what went wrong."""
    lines = []
    for file, _ in _left(folder, ".log"):
        lines += _bytes(file).decode(errors="replace").splitlines()[-LINES:]
    return sorted(lines)[-LINES:]


def _plain(text: str) -> str:
    """A learner's text without what a terminal would obey, or turn around."""
    return "".join(c if c == "\n" or unicodedata.category(c)[0] not in "CZ" else " " for c in text)


def _left(folder: Path, suffix: str) -> Iterable[tuple[Path, str]]:
    """The files in a room, and whose they are. Where the name is an account of this machine and the file is another's,
    that one is named too: everybody may leave a file under any name."""
    for file in sorted(folder.glob(f"*{suffix}")):
        learner = urllib.parse.unquote(file.name.removesuffix(suffix))
        try:
            owner = file.lstat().st_uid
            if pwd.getpwnam(learner).pw_uid != owner:
                learner += f" (left by user {owner})"
        except (KeyError, ValueError, OSError):  # a name that only JupyterHub knows; a file that is gone
            pass
        yield file, " ".join(_plain(learner).split())


def _bytes(file: Path) -> bytes:
    """The end of a plain file; empty where it is none: a learner may leave anything in a room, and change it at any
    moment. Waits for no pipe, and follows no link."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as left:
            here = os.fstat(left.fileno())
            if not stat.S_ISREG(here.st_mode):
                return b""
            left.seek(max(0, here.st_size - MOST_BYTES))
            return left.read(MOST_BYTES)
    except OSError:  # closed to us, or gone
        return b""


def _file(suffix: str) -> Path | None:
    """The learner's own file in the room; None where the learner does not take part."""
    name = urllib.parse.quote(_learner(), safe="@ ", errors="surrogateescape")  # no two names become one
    return Path(os.environ["HELPERS_ROOM"], name + suffix) if os.environ.get("HELPERS_ROOM") else None


def _learner() -> str:
    """The account: JupyterHub's, where it is one's, else the system's."""
    if name := os.environ.get("JUPYTERHUB_USER"):
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"user {os.getuid()}"


def _read(file: Path) -> dict:
    try:
        found = json.loads(_bytes(file))["exercises"]
        return found if isinstance(found, dict) else {}
    except (ValueError, KeyError, TypeError, RecursionError):  # not there yet, or damaged: then it is written anew
        return {}


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
