"""The command line: python -m helpers doctor | lab | run | measure | labs | tidy. Each explains itself with -h."""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import ROOT, machine


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

    run = commands.add_parser("run", help="run notebooks and save them with outputs, in canonical form")
    run.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK")
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the executed notebooks")
    run.add_argument("--cell-seconds", type=float, default=600, help="longest time for one cell (default 600)")
    run.set_defaults(do=_run)

    measure = commands.add_parser("measure", help="measure the recorded figures on this GPU")
    measure.add_argument("--only", nargs="+", metavar="ID", help="run only the notebooks that declare these figures")
    measure.add_argument("--out", type=Path, metavar="FILE", help="merge figures into FILE, and save no notebook")
    measure.set_defaults(do=_measure)

    labs = commands.add_parser("labs", help="write labs/ from solutions/")
    labs.add_argument("--check", action="store_true", help="write nothing, and say what differs")
    labs.set_defaults(do=_labs)

    tidy = commands.add_parser("tidy", help="rewrite notebooks in canonical form, with the outputs they have")
    tidy.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK")
    tidy.set_defaults(do=_tidy)

    options = parser.parse_args(argv)
    try:
        return options.do(options)
    except machine.NotReady as problem:
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    return doctor.main(options.json)


def _lab(options: argparse.Namespace) -> int:
    """Replace this process by JupyterLab, so that Ctrl-C and signals reach it and nothing else."""
    from . import copies

    for line in copies.copy_to_work():
        print(line)
    copies.first_layout()
    extra = options.extra[1:] if options.extra[:1] == ["--"] else options.extra
    config = os.pathsep.join(filter(None, [str(ROOT / "jupyter"), os.environ.get("JUPYTER_CONFIG_PATH", "")]))
    os.environ["JUPYTER_CONFIG_PATH"] = config
    os.chdir(ROOT)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *extra])


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
    """Run the notebooks that declare figures; of each that ran whole, save outputs and figures of that same run."""
    from . import notebooks, records

    if not machine.gpu():
        print(f"Figures are measured on a GPU, and this is CPU mode: {machine.here().why}.", file=sys.stderr)
        return 1
    declared = {path: records.declared(path) for path in notebooks.lessons()}
    wanted = set(options.only or [])
    unknown = wanted - {key for ids in declared.values() for key in ids}
    for key in sorted(unknown):
        print(f"{key}: no notebook declares this figure", file=sys.stderr)
    target = options.out or records.FOLDER / f"{machine.here().name.lower().replace(' ', '-')}.json"
    failed = bool(unknown)
    for path, ids in declared.items():
        if options.only and not wanted & set(ids):
            continue
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "record.json"
            ran = _execute(path, env={"HELPERS_RECORD": str(record)})
            made = records.load(record)
        missing = set(ids) - set(made["figures"]) - set(made["texts"])
        if ran.failure or missing:
            failed = True
            if missing:
                print(f"{path.name}: not measured: {', '.join(sorted(missing))}", file=sys.stderr)
            continue
        code = ran.notebook.metadata.helpers["code_hash"]
        for kind in ("figures", "texts"):
            if made[kind]:
                records.merge(target, kind, made[kind], made["machine"], code)
        if not options.out:
            notebooks.save(ran.notebook, path)
        print(f"{path.name}: {len(ids)} figures and texts into {target}")
    return 1 if failed else 0


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

    moving = sys.stderr.isatty()

    def show(cell: str) -> None:
        if moving:
            print(f"\r\x1b[K{path.name}: {cell}", end="", file=sys.stderr, flush=True)

    ran = notebooks.run(path, on_cell=show, **options)
    if moving:
        print("\r\x1b[K", end="", file=sys.stderr)
    if ran.failure:
        print(f"{path.name}: cell {ran.failure.cell} failed after {ran.seconds:.1f} s: {ran.failure.error}")
        if ran.failure.traceback:
            print(ran.failure.traceback, file=sys.stderr)
    else:
        print(f"{path.name}: {len(ran.notebook.cells)} cells in {ran.seconds:.1f} s")
    return ran


if __name__ == "__main__":
    sys.exit(main())
