"""What a learner has tried and passed, in work/.progress.json: it survives restarts, and says what comes next.

HELPERS_PROGRESS names another file; set but empty it means none. Nothing is recorded where HELPERS_STRICT=1 or
nbgrader runs a notebook, since then no learner is at work.
"""

import datetime
import json
import os
import textwrap
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from filelock import FileLock

from . import WORK, exercises, room, show

PATH = ("00", "01", "02", "03", "05", "08", "12", "06", "09", "07", "10", "04", "11")
"""The order in which README recommends the lessons."""


@dataclass(frozen=True)
class Entry:
    """What is known of one exercise. passed: the date of the first pass (ISO), or "". kind, message: of the last
    verdict's first finding, "" after a pass; repeats: how often in a row that kind was found, which is what chooses
    the hint. revealed: the learner has seen the solution. since, last: when the first and the last attempt was made
    (ISO, UTC)."""

    attempts: int = 0
    passed: str = ""
    kind: str = ""
    message: str = ""
    repeats: int = 0
    revealed: bool = False
    since: str = ""
    last: str = ""


def record(verdict) -> Entry:
    """Remember a verdict (its `exercise`, `passed` and `findings` count); returns what is then known of the exercise.

    An unsolved exercise was not attempted, and what could not be judged here says nothing: neither changes anything.
    """
    first = verdict.findings[0] if verdict.findings else None
    if verdict.passed is None or (first and first.kind == "not-attempted"):
        return of(verdict.exercise)

    def tried(entry: Entry) -> Entry:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entry = replace(entry, attempts=entry.attempts + 1, since=entry.since or now, last=now)
        if verdict.passed:
            today = datetime.date.today().isoformat()
            return replace(entry, passed=entry.passed or today, kind="", message="", repeats=0)
        again = entry.repeats + 1 if first.kind == entry.kind else 1
        return replace(entry, kind=first.kind, message=first.message, repeats=again)

    known = _change(verdict.exercise, tried)
    if at_work():
        room.tell(verdict.exercise, known)
    return known


def at_work() -> bool:
    """Whether a learner is: HELPERS_STRICT=1 and nbgrader run notebooks for other reasons."""
    return os.environ.get("HELPERS_STRICT") != "1" and not os.environ.get("NBGRADER_EXECUTION")


def reveal(name: str) -> Entry:
    """Remember that the learner has seen the solution."""
    return _change(name, lambda entry: replace(entry, revealed=True))


def of(name: str) -> Entry:
    """What is known of an exercise."""
    return _read(_file()).get(name, Entry())


def following() -> exercises.Exercise | None:
    """The exercise to do next: of those not passed the first in the path's order, core ones before all others."""
    known = _read(_file())
    left = [e for e in exercises.every().values() if not known.get(e.name, Entry()).passed]
    return min(left, key=lambda e: (not e.core, _place(e.lab)), default=None)


def summary():
    """A table of all exercises by lab, with the last finding of each and the next exercise; also as text (`str`)."""
    known, rows, lab = _read(_file()), [], ""
    every = sorted(exercises.every().values(), key=lambda e: _place(e.lab))
    for exercise in every:
        entry = known.get(exercise.name, Entry())
        rows.append(
            {
                "lab": "" if exercise.lab == lab else exercise.lab,
                "exercise": exercise.name,
                "core": "core" if exercise.core else "",
                "state": _state(entry),
                "last finding": _last(entry),
            }
        )
        lab = exercise.lab
    passed = sum(bool(known.get(e.name, Entry()).passed) for e in every)
    coming = following()
    then = f"Next: {coming.name} in {coming.lab}." if coming else "There is nothing left to do."
    said = f"{passed} of {len(every)} exercises passed. {then} The labs stand in the order that README recommends."
    return show.table(rows, caption=said)


def _state(entry: Entry) -> str:
    tried = f"tried {entry.attempts} time{'s' if entry.attempts > 1 else ''}" if entry.attempts else ""
    parts = [f"passed {entry.passed}" if entry.passed else tried, "solution seen" if entry.revealed else ""]
    return ", ".join(filter(None, parts))


def _last(entry: Entry) -> str:
    """The last finding on one line, as text without marks of code."""
    said = f"{entry.kind}: {entry.message}" if entry.kind else ""
    return textwrap.shorten(said.replace("`", ""), 80, placeholder=" …")


def _place(lab: str) -> int:
    return PATH.index(lab[:2]) if lab[:2] in PATH else len(PATH)


# ---- the file -----------------------------------------------------------------------------------------------------


def _file() -> Path | None:
    named = os.environ.get("HELPERS_PROGRESS", str(WORK / ".progress.json"))
    return Path(named) if named else None


def _change(name: str, change) -> Entry:
    """Apply `change` to an exercise's entry and save it, where a learner is at work. Returns the new entry."""
    file = _file()
    if file is None or not at_work():
        return change(of(name))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=10):  # two notebooks may be open
            known = _read(file)
            known[name] = change(known.get(name, Entry()))
            partial = file.with_name(f"{file.name}.partial")
            partial.write_text(
                json.dumps({key: asdict(entry) for key, entry in sorted(known.items())}, indent=1) + "\n"
            )
            partial.replace(file)
            return known[name]
    except OSError as error:  # a full disk or a read-only folder is no reason to withhold a verdict
        show.note(f"Your progress could not be saved in {file}: {error}", kind="warning")
        return change(Entry())


def _read(file: Path | None) -> dict[str, Entry]:
    """The entries in `file`. One that is damaged is set aside, and said so."""
    if file is None or not file.exists():
        return {}
    known = {field.name for field in fields(Entry)}
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        return {name: Entry(**{k: v for k, v in entry.items() if k in known}) for name, entry in saved.items()}
    except (ValueError, AttributeError):
        aside = file.with_name(f"{file.name}.damaged")
        file.replace(aside)
        show.note(f"{file} was damaged: it is now {aside.name}, and progress begins anew.", kind="warning")
        return {}
