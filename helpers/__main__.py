"""The command line, `python -m helpers COMMAND`. Each command explains itself with -h."""

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

from . import ROOT, WORK, machine


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; argparse exits with 2 on misuse."""
    parser = argparse.ArgumentParser(prog="python -m helpers", description="The course's commands.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this machine can run, and what mends each gap")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(do=_doctor)

    lab = commands.add_parser("lab", help="copy lessons into work/ where untouched, and start JupyterLab there")
    lab.add_argument("extra", nargs=argparse.REMAINDER, metavar="-- ARGUMENTS", help="passed on to JupyterLab")
    lab.set_defaults(do=_lab)

    exercises = commands.add_parser("exercises", help="list the exercises")
    exercises.add_argument("--json", action="store_true", help="print one JSON list")
    exercises.set_defaults(do=_exercises)

    check = commands.add_parser(
        "check", help="judge an answer; exit 0 passed, 1 not, 2 misuse, 3 not to be judged here"
    )
    check.add_argument("name", metavar="NAME", help="the exercise, as in the list of exercises")
    check.add_argument("file", type=Path, metavar="FILE", help="a .py that defines the entry point, or a notebook")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.add_argument("--seed", type=int, metavar="N", help="draw the inputs of an earlier verdict again")
    check.add_argument("--sanitize", action="store_true", help="on a GPU, ask compute-sanitizer too (a minute)")
    _with_cluster(check)
    check.set_defaults(do=_check)

    grade = commands.add_parser("grade", help="judge every answer in notebooks, one row an exercise")
    grade.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK", help="a notebook, or a folder of them")
    grade.add_argument("--json", action="store_true", help="print one JSON list")
    grade.add_argument("--csv", type=Path, metavar="FILE", help="write the rows to FILE as well; while it goes on they "
                       "stand in FILE.part, from which a run that was broken off goes on")  # fmt: skip
    _with_cluster(grade)
    grade.set_defaults(do=_grade)

    progress = commands.add_parser("progress", help="what is passed, the last findings, and the next exercise")
    progress.set_defaults(do=_progress)

    room = commands.add_parser("room", help="who in a class is at which exercise, with which finding, for how long")
    room.add_argument("folder", type=Path, metavar="DIR", help="made if missing; learners name it in HELPERS_ROOM")
    room.add_argument("--every", type=float, default=5, metavar="S", help="seconds between two looks (default 5)")
    room.add_argument("--once", action="store_true", help="look once")
    room.add_argument("--json", action="store_true", help="look once, and print one JSON list")
    room.set_defaults(do=_room)

    run = commands.add_parser("run", help="run notebooks and save them with outputs, in canonical form")
    run.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK")
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the executed notebooks")
    run.add_argument("--cell-seconds", type=float, default=600, help="longest time for one cell (default 600)")
    run.set_defaults(do=_run)

    measure = commands.add_parser("measure", help="measure the recorded figures on this GPU")
    measure.add_argument("--only", nargs="+", metavar="ID", help="run only the notebooks that declare these figures")
    measure.add_argument("--ladder", action="store_true", help="the figures of lesson 12's ladder on your card, into "
                         "work/ladder.json; run again, it goes on where it was broken off")  # fmt: skip
    measure.add_argument("--out", type=Path, metavar="FILE", help="merge figures into FILE, and save no notebook")
    _with_cluster(measure)
    measure.set_defaults(do=_measure)

    labs = commands.add_parser("labs", help="write labs/ from solutions/")
    labs.add_argument("--check", action="store_true", help="write nothing, and say what differs")
    labs.set_defaults(do=_labs)

    tidy = commands.add_parser("tidy", help="rewrite notebooks in canonical form, with the outputs they have")
    tidy.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK")
    tidy.set_defaults(do=_tidy)

    options = parser.parse_args(argv)
    try:
        status = options.do(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who read the output had enough of it, as head has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is flushed into it at exit either
        return 128 + signal.SIGPIPE
    except machine.NotReady as problem:
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(str(stop) or "Interrupted.", file=sys.stderr)
        return 130


def _with_cluster(command: argparse.ArgumentParser) -> None:
    """The option of what may be done by the workers of a cluster."""
    command.add_argument("--cluster", metavar="ADDRESS", default=os.environ.get("HELPERS_CLUSTER", ""),
                         help="of a Dask scheduler whose workers do it (default: HELPERS_CLUSTER)")  # fmt: skip


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    return doctor.main(options.json)


def _lab(options: argparse.Namespace) -> int:
    """Replace this process by JupyterLab, so that Ctrl-C and signals reach it and nothing else.

    Where JupyterHub starts it, JupyterLab is that hub's server for one learner. The sentences are then in the hub's
    log, and in the learner's NEWS.md, which JupyterLab opens on.
    """
    from . import copies

    hub = "JUPYTERHUB_API_TOKEN" in os.environ
    try:
        told = copies.copy_to_work(ROOT, WORK)
        copies.first_layout()
        if hub and told:
            copies.tell(told)
            os.environ["JUPYTERHUB_DEFAULT_URL"] = f"/lab/tree/{WORK.name}/{copies.NEWS}"
    except OSError as error:  # a full disk, mostly: JupyterLab is what the learner makes room with
        told = [f"What is in {WORK} stays as it is, and is not brought up to date: {error.strerror}."]
    for line in told:
        print(f"{os.environ['JUPYTERHUB_USER']}: {line}" if hub else line)
    extra = options.extra[1:] if options.extra[:1] == ["--"] else options.extra
    config = os.pathsep.join(filter(None, [str(ROOT / "jupyter"), os.environ.get("JUPYTER_CONFIG_PATH", "")]))
    os.environ["JUPYTER_CONFIG_PATH"] = config
    ours = ["jupyterhub.singleuser", f"--config={ROOT}/jupyter/jupyter_lab_config.py"]
    os.chdir(WORK.parent if hub else ROOT)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", *(ours if hub else ["jupyterlab"]), *extra])


def _exercises(options: argparse.Namespace) -> int:
    from . import exercises, show

    rows = [
        {"name": e.name, "lab": e.lab, "rung": e.rung, "entry_point": e.entry, "form": e.form, "title": e.title}
        for e in exercises.every().values()
    ]
    print(json.dumps(rows, indent=1, ensure_ascii=False) if options.json else show.table(rows))
    return 0


def _check(options: argparse.Namespace) -> int:
    from . import checks, exercises, room

    every = exercises.every()
    if options.name not in every:
        print(checks.no_such(options.name), file=sys.stderr)
        return 2
    if not options.file.is_file():
        print(f"{options.file}: there is no such file", file=sys.stderr)
        return 2
    if said := room.announced():
        print(said, file=sys.stderr)
    given = {"seed": options.seed, "sanitize": options.sanitize, "address": options.cluster}
    with redirect_stdout(sys.stderr):  # what is said while it goes on is no part of the verdict
        verdict = checks.check_file(every[options.name], options.file, **given)
        verdict = checks.remembered(every[options.name], verdict)
    print(json.dumps(verdict.data(), ensure_ascii=False) if options.json else verdict)
    return {True: 0, False: 1, None: 3}[verdict.passed]


def _grade(options: argparse.Namespace) -> int:
    from . import grading, show

    paths = grading.found(options.notebooks)
    if not paths:
        print("There is no notebook in what was named.", file=sys.stderr)
        return 2

    def shown(rows):
        if options.json:
            return json.dumps([dataclasses.asdict(row) for row in rows], indent=1, ensure_ascii=False)
        return show.table(grading.shown(rows))

    with _line() as show_line:
        show_line(f"grading {len(paths)} notebooks")
        judged = []

        def told(done, total, row):
            judged.append(row)
            show_line(f"{done} of {total} answers: {row.exercise}")

        journal = options.csv and options.csv.with_name(f"{options.csv.name}.part")
        try:
            rows = grading.grade(paths, told, journal, options.cluster)
        except machine.NotReady:
            if not journal:  # else what is judged is kept there
                print(shown(judged))
            raise
    unsaved = grading.save(rows, options.csv, journal) if options.csv else ""
    print(shown(rows))
    if not options.json:
        passed, unjudged = (sum(row.passed is how for row in rows) for how in (True, None))
        print(f"{passed} of {len(rows)} passed" + (f", {unjudged} could not be judged here" if unjudged else ""))
    if unsaved:
        print(unsaved, file=sys.stderr)
    return 1 if unsaved or any(row.passed is False for row in rows) else 0


def _room(options: argparse.Namespace) -> int:
    from . import room

    room.make(options.folder)
    if options.json:
        print(json.dumps([dataclasses.asdict(place) for place in room.places(options.folder)], ensure_ascii=False))
        return 0
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not options.once else ""
    while True:
        print(f"{clear}{room.table(options.folder)}", flush=True)
        if options.once:
            return 0
        time.sleep(options.every)


def _progress(options: argparse.Namespace) -> int:
    from . import progress

    print(progress.summary())
    return 0


def _run(options: argparse.Namespace) -> int:
    from . import notebooks

    failed = 0
    for path in options.notebooks:
        if not path.is_file():
            print(f"{path}: there is no such notebook", file=sys.stderr)
            failed += 1
            continue
        try:
            notebooks.read(path)
        except machine.NotReady as problem:
            print(problem, file=sys.stderr)
            failed += 1
            continue
        ran = _execute(path, cell_seconds=options.cell_seconds)
        notebooks.save(ran.notebook, options.out / path.name)
        failed += ran.failure is not None
    return 1 if failed else 0


def _measure(options: argparse.Namespace) -> int:
    """Run the notebooks that declare figures; of each that ran whole, save outputs and figures of that same run.

    With --ladder no notebook is saved, and one whose wanted figures are there already, of this GPU and these versions,
    is not run again.
    """
    from . import cluster, ladder, notebooks, records

    if not (options.cluster or machine.gpu()):
        print(f"Figures are measured on a GPU, and this is CPU mode: {machine.here().why}.", file=sys.stderr)
        return 1
    declared = {path: records.declared(path) for path in notebooks.lessons()}
    wanted = set(options.only or (ladder.ids() if options.ladder else []))
    options.out = options.out or (ladder.OWN if options.ladder else None)
    unknown = wanted - {key for ids in declared.values() for key in ids}
    for key in sorted(unknown):
        print(f"{key}: no notebook declares this figure", file=sys.stderr)
    to_run = {path: ids for path, ids in declared.items() if not wanted or wanted & set(ids)}
    with cluster.joined(options.cluster) if options.cluster else nullcontext() as there:
        card = there.card if there else machine.here().name
        target = options.out or records.FOLDER / f"{card.lower().replace(' ', '-')}.json"
        held = records.load(target)["machine"].get("gpu", card)
        if held != card or (there and there.kind != "GPU"):
            print(f"{target} is of another GPU, {held}: move it away, or name another file by --out.", file=sys.stderr)
            return 1
        target.parent.mkdir(parents=True, exist_ok=True)
        failed = bool(unknown)
        for number, (path, ids) in enumerate(to_run.items(), 1):
            if options.ladder:
                kept = not there and records.made_here(target, wanted & set(ids))
                print(f"{number} of {len(to_run)}: {path.name}{': its figures are there already' * kept}", flush=True)
                if kept:
                    continue
            failed |= not _measured(path, ids, wanted, target, bool(options.out), there)
    return 1 if failed else 0


def _measured(path: Path, ids: dict, wanted: set[str], target: Path, figures_only: bool, there) -> bool:
    """Run one notebook, here or on a cluster, and save what came of it; whether all of it came."""
    from . import cluster, desk, notebooks, records

    with _line() as show:
        if there:
            try:
                ran, made = there.do(
                    "notebooks.measured", path.relative_to(ROOT), " ".join(wanted), label=path.stem, told=show
                )
            except (cluster.GivenUp, desk.Ended) as why:
                print(f"{path.name}: {why or 'it ended the process that ran it, twice'}", file=sys.stderr)
                return False
        else:
            ran, made = notebooks.measured(path, " ".join(wanted), lambda cell: show(f"{path.name}: {cell}"))
    _report(path, ran)
    kept = set(records.load(target)["figures"]) - wanted  # some are measured only when they are asked for
    missing = set(ids) - set(made["figures"]) - set(made["texts"]) - kept
    if missing and not ran.failure:
        print(f"{path.name}: not measured: {', '.join(sorted(missing))}", file=sys.stderr)
    if ran.failure or missing:
        return False
    code = ran.notebook.metadata.helpers["code_hash"]
    if code != notebooks.code_hash(notebooks.read(path)):
        print(f"{path.name}: the worker ran another version of it; git pull there, or here", file=sys.stderr)
        return False
    if made["figures"]:
        records.merge(target, "figures", made["figures"], made["machine"], code)
    for key, lines in made["texts"].items():  # one that was kept may be of other versions
        records.merge(target, "texts", {key: lines}, made["texts_made_with"].get(key, made["machine"]))
    if not figures_only:
        notebooks.save(ran.notebook, path)
    print(f"{path.name}: {len(ids)} figures and texts into {target}")
    return True


def _labs(options: argparse.Namespace) -> int:
    from . import labs

    return labs.main(options.check)


def _tidy(options: argparse.Namespace) -> int:
    from . import notebooks

    for path in options.notebooks:
        notebooks.save(notebooks.normalise(notebooks.read(path)), path)
    return 0


def _execute(path: Path, **options):
    """Run a notebook, with a line on the terminal that moves, then one that stays."""
    from . import notebooks

    with _line() as show:
        ran = notebooks.run(path, on_cell=lambda cell: show(f"{path.name}: {cell}"), **options)
    _report(path, ran)
    return ran


def _report(path: Path, ran) -> None:
    """Say how a notebook ended."""
    if ran.failure:
        print(f"{path.name}: cell {ran.failure.cell} failed after {ran.seconds:.1f} s: {ran.failure.error}")
        if ran.failure.traceback:
            print(ran.failure.traceback, file=sys.stderr)
    else:
        print(f"{path.name}: {len(ran.notebook.cells)} cells in {ran.seconds:.1f} s")


@contextmanager
def _line() -> Iterator[Callable[[str], None]]:
    """A line on the terminal that what goes on can change, and that is gone at the end; nothing in a log."""
    moving = sys.stderr.isatty()

    def show(text: str) -> None:
        if moving:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be any bytes, and rows must not be lost to it
    sys.exit(main())
