"""Right, broken and cheating answers to the exercises: tests/mutants/NN.toml, as texts that can be judged.

`python -m tests.answers [NAME…]` judges them all on this machine, in its mode, and prints a table; with `--share 2/5`
every fifth of them, from the second on.
"""

import argparse
import sys
import tomllib
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from helpers import source
from helpers.exercises import every

FOLDER = Path(__file__).parent / "mutants"
GROUPS = ("right", "broken", "cheat")


@dataclass(frozen=True)
class Answer:
    """group: "right", "broken" or "cheat". kinds: of the first finding, any of which will do; none for a right one.

    on_gpu: only a GPU that has what the exercise `needs` can judge it; elsewhere `needs-hardware` is the verdict on it.
    For right answers of such an exercise that follows; of the others `gpu = true` names those that are found nowhere
    else.
    """

    exercise: str
    group: str
    about: str
    text: str
    kinds: tuple[str, ...]
    on_gpu: bool = False

    @property
    def seed(self) -> int:
        """One seed for each answer, so that a test gives the same result each time; `main` draws new ones."""
        return zlib.crc32(self.title.encode()) >> 1

    @property
    def title(self) -> str:
        return f"{self.exercise}: {self.group}: {self.about}"


@lru_cache
def solved(name: str, of: str = "") -> str:
    """The slice of the course's own answer, or of another that its notebook holds beside it, as the entry point."""
    exercise = every()[name]
    text = source.notebook(source.find(exercise.lab)[-1], of or exercise.entry)
    return f"{text}\n{exercise.entry} = {of}\n" if of else text


def edited(text: str, edits: list[dict]) -> str:
    """`text` after edits that must each apply exactly once."""
    for edit in edits:
        count = text.count(edit["find"])
        if count != 1:
            raise ValueError(f"{edit['find']!r} occurs {count} times")
        text = text.replace(edit["find"], edit["replace"])
    return text


def written() -> list[Answer]:
    """All answers, in the order of the files."""
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        for name, groups in tomllib.loads(path.read_text()).items():
            found += [_answer(name, group, entry) for group in GROUPS for entry in groups.get(group, [])]
    return found


def _answer(name: str, group: str, entry: dict) -> Answer:
    kinds = entry.get("kind", [])
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    edits = entry.get("edits") or [entry] * ("find" in entry)
    try:
        text = entry.get("text") or edited(solved(name, entry.get("of", "")), edits)
    except ValueError as problem:
        raise ValueError(f"{name}: {entry['about']}: {problem}") from None
    on_gpu = entry.get("gpu", group == "right" and every()[name].needs is not None)
    return Answer(name, group, entry["about"], text, kinds, on_gpu)


def as_judged(answer: Answer, verdict) -> str:
    """What is wrong with a verdict; empty where it is as it should be."""
    lacks_package = every()[answer.exercise].package and verdict.kind == "environment"
    if lacks_package or (answer.on_gpu and verdict.kind == "needs-hardware"):
        return ""
    if answer.group == "right":
        return "" if verdict.passed else f"a right answer did not pass\n{verdict}"
    if verdict.passed is not False:
        return f"it {'passed' if verdict.passed else 'could not be judged'}\n{verdict}"
    if answer.kinds and verdict.kind not in answer.kinds:
        return f"found {verdict.kind}, not {' or '.join(answer.kinds)}\n{verdict}"
    return ""


def table(caught: list[tuple[str, str, str, str]]) -> list[str]:
    """Lines of a table from (exercise, group, kind, caught by) of each answer that was judged as it should be."""
    lines = []
    for name in dict.fromkeys(row[0] for row in caught):
        rows = [row for row in caught if row[0] == name]
        groups = Counter(group for _, group, _, _ in rows)
        kinds = Counter((kind, by) for _, group, kind, by in rows if group != "right")
        counted = ", ".join(f"{kind} {n} ({by})" for (kind, by), n in sorted(kinds.items()))
        lines.append(
            f"{name:18} right {groups['right']}, broken {groups['broken']}, cheats {groups['cheat']}: {counted}"
        )
    return lines


def main(arguments: list[str]) -> int:
    from helpers.checks import judge

    parser = argparse.ArgumentParser(prog="python -m tests.answers")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--share", default="1/1", metavar="I/N")
    options = parser.parse_args(arguments)
    first, step = map(int, options.share.split("/"))
    chosen = [answer for answer in written() if not options.names or answer.exercise in options.names]
    caught, wrong, unjudged = [], 0, 0
    for answer in chosen[first - 1 :: step]:
        verdict = judge(every()[answer.exercise], answer.text)
        problem = as_judged(answer, verdict)
        wrong += bool(problem)
        print(
            f"{'WRONG' if problem else 'ok':5} {verdict.seconds:5.1f} s  {answer.title}  [{verdict.kind}]", flush=True
        )
        unjudged += verdict.passed is None
        if problem:
            print(f"      {problem}")
        elif verdict.passed is not None:
            caught.append((answer.exercise, answer.group, verdict.kind, verdict.caught_by))
    print("\n".join(table(caught)))
    print(f"{len(caught)} answers judged as they should be, {wrong} not; {unjudged} only other hardware can judge")
    return 1 if wrong else 0


if __name__ == "__main__":
    import helpers  # noqa: F401

    sys.exit(main(sys.argv[1:]))
