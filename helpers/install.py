"""Make .venv, the course's environment, and keep it up to date: what `make lab` and `make test` run first.

Standard library only, and in words that Python 3.6 can parse, so that a Python that is too old can say so. The
`*_problem` functions return None, or one sentence and the command that mends it; `helpers.doctor` asks them too.

.venv/asked remembers what was chosen (EXTRAS, TORCH), so that `make test` uses what `make lab` installed.
A bundle is a folder of wheels (`make bundle`), from which `WHEELS=DIR` installs without a network.
.venv/installed, the stamp, holds the checksum of everything the environment depends on. It is deleted before pip
runs and written last: where it is missing, an installation was cut short, and .venv is made anew.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST, NEWEST = (3, 11), (3, 13)
"""The Python versions of pyproject's requires-python, both included."""

GB = 10**9
DISK = {("all", False): 14, ("all", True): 8, ("core", False): 11, ("core", True): 4}
"""GB that an installation takes, pip's downloads included: (EXTRAS, is torch a CPU or the image's build)."""

RUNGS = ["library", "tvm", "xla", "mojo", "cutlass"]
"""The extras that EXTRAS=all adds to EXTRAS=core."""

BESIDE = ["cluster", "hub", "site"]
"""The extras that `all` leaves out, for those who teach: a command that needs one adds it, and it stays."""

WSL = (
    "wsl --install -d Ubuntu-24.04; in its window: sudo apt-get update && sudo apt-get install -y git make g++ "
    "python3-venv; git clone the course there, then make lab"
)
CONTAINER = (
    'docker run -it --rm -p 8888:8888 -v "$PWD":/course -w /course python:3.12 '
    'make lab LAB_ARGS="--ip=0.0.0.0 --allow-root"'
)


class Problem(Exception):
    """What keeps the course from being installed: one sentence, and the command that mends it."""

    def __init__(self, sentence, mend):
        super().__init__(sentence, mend)
        self.sentence, self.mend = sentence, mend


# ---- what can be wrong before anything is downloaded -------------------------------------------------------------


def system_problem():
    """The operating system: triton and the CUDA libraries are built for Linux alone."""
    system = platform.system()
    if system == "Linux":
        return None
    if system == "Windows":
        return "The course runs on Linux, and this is native Windows; WSL2 is a Linux inside it that sees its GPU.", WSL
    name = "macOS" if system == "Darwin" else system
    return f"The course runs on Linux, and this is {name}: triton and CUDA are not built for it.", CONTAINER


def python_problem():
    """The version of this Python."""
    version = tuple(sys.version_info[:2])
    if OLDEST <= version <= NEWEST:
        return None
    fault = "too old" if version < OLDEST else "newer than the packages the course was tested with"
    sentence = (
        f"This Python is {dotted(version)}, which is {fault}: the course needs {dotted(OLDEST)} to {dotted(NEWEST)}."
    )
    other = another_python()
    if other:
        return sentence, "make lab PYTHON=" + other
    return sentence, 'pip install uv && uv python install 3.12 && make lab PYTHON="$(uv python find 3.12)"'


def another_python():
    """The name of a Python on this machine that the course can use; empty where there is none."""
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        name = f"python3.{minor}"
        if shutil.which(name):
            answer = subprocess.run([name, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if answer.returncode == 0:  # a version manager's shim may stand for a Python that is not installed
                return name
    return ""


def venv_problem():
    """Debian and Ubuntu ship Python without what makes a virtual environment."""
    if importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        return None
    version = dotted(sys.version_info[:2])
    return (
        f"This Python {version} cannot make a virtual environment: its ensurepip is missing.",
        package(f"python{version}-venv", dnf="python3-pip"),
    )


def disk_problem(extras="all", torch=""):
    """Free space in the checkout, where .venv will be."""
    small, core = torch in ("cpu", "system"), set(extras.split(",")) <= {"core", *BESIDE}
    need = DISK["core" if core else "all", small]
    free = shutil.disk_usage(ROOT).free / GB
    if free >= need:
        return None
    smaller = "make lab TORCH=cpu" if not small and free >= DISK["all", True] else "make lab EXTRAS=core TORCH=cpu"
    sentence = f"The disk of {ROOT} has {free:.1f} GB free, and the installation takes {need} GB."
    if free < DISK["core", True] or (core and small):
        return sentence, "rm -rf ~/.cache/pip, or free space otherwise (du -sh ~/* | sort -h shows what is large)"
    return sentence, "free space, or install less: " + smaller


def package(apt, dnf=""):
    """The command that installs a package of the system, in the words of this system's package manager."""
    become = "" if hasattr(os, "geteuid") and os.geteuid() == 0 else "sudo "
    for manager in ("dnf", "zypper"):
        if shutil.which(manager) and not shutil.which("apt-get"):
            return f"{become}{manager} install -y {dnf or apt}"
    return f"{become}apt-get update && {become}apt-get install -y {apt}"


def dotted(version):
    """(3, 11) as "3.11"."""
    return ".".join(str(number) for number in version)


# ---- what was asked for --------------------------------------------------------------------------------------------


def check_choice(extras, torch):
    """Raise `Problem` for values of EXTRAS and TORCH that mean nothing."""
    if torch and not re.match(r"(cpu|system|cu\d{3})$", torch):
        values = "cpu, cu126, cu130 (or another CUDA that torch is built for), system, or nothing"
        raise Problem(f"TORCH={torch} is no build of torch: it takes {values}.", "make lab TORCH=cpu")
    if torch.startswith("cu") and torch[2:].isdigit() and int(torch[2:]) < 126:
        raise Problem(f"TORCH={torch}: no torch that the course can use is built for it.", "make lab TORCH=cu126")
    unknown = [name for name in extras.split(",") if name not in ["all", "core"] + RUNGS + BESIDE]
    if unknown:
        known = "all, core, or some of {} with commas between".format(", ".join(RUNGS + BESIDE))
        raise Problem(f"EXTRAS={extras}: there is no {unknown[0]}; it takes {known}.", "make lab EXTRAS=core")


def requirement(extras, torch, cupy="cuda13"):
    """What pip is asked for, such as .[cuda13,dev]; and what is left out, in sentences. cupy: its extra, or empty."""
    names = extras.split(",")
    chosen = RUNGS if "all" in names else [name for name in names if name in RUNGS]
    told = []
    libc, version = platform.libc_ver()
    if "mojo" in chosen and libc == "glibc" and tuple(map(int, version.split(".")[:2])) < (2, 34):
        chosen = [name for name in chosen if name != "mojo"]
        told.append(f"Mojo and MAX are left out: they need glibc 2.34, and this system has {version}.")
    if torch.startswith("cu") and int(torch[2:]) < 130:
        cupy = "cuda12"
    return ".[{}]".format(
        ",".join([name for name in [cupy] if name] + ["dev"] + chosen + [name for name in names if name in BESIDE])
    ), told


def bundled(wheels):
    """What a bundle was made with. Raises `Problem` where the folder holds none, or one for another Python."""
    made, mine = read(os.path.join(wheels, "bundle.json")), dotted(sys.version_info[:2])
    if not made:
        sentence = f"WHEELS={wheels}: there is no whole bundle in that folder."
        raise Problem(sentence, f"make bundle WHEELS={wheels}, where there is a network; then bring the folder here")
    if made["python"] != mine:
        sentence = f"The bundle in {wheels} is for Python {made['python']}, and this is Python {mine}."
        raise Problem(sentence, f"make lab WHEELS={wheels} PYTHON=python{made['python']}")
    return made


def bundle(wheels):
    """Fill the folder `wheels` with all that this environment was asked for, so that others need no network."""
    import tomllib

    asked = read(venv("asked"))
    if asked["torch"]:
        sentence = f"A bundle holds torch as pip finds it, and this environment has TORCH={asked['torch']}."
        raise Problem(sentence, "make clean bundle")
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        pyproject = tomllib.load(file)
    names = requirement(asked["extras"], "")[0][2:-1].split(",")
    optional = pyproject["project"]["optional-dependencies"]
    needed = pyproject["build-system"]["requires"] + pyproject["project"].get("dependencies", [])
    needed += [line for name in names for line in optional[name]]
    with locked() as lock:
        stamp = os.path.join(wheels, "bundle.json")
        os.makedirs(wheels, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.remove(stamp)
        pip = [venv("bin", "python"), "-m", "pip", "--disable-pip-version-check", "wheel", "-c", "constraints.txt"]
        if needed:
            call([*pip, "--wheel-dir", wheels, *needed], lock, "fetch the wheels")
        write(stamp, {"extras": asked["extras"], "python": asked["python"]})
    held = [os.path.join(wheels, name) for name in os.listdir(wheels)]
    size = sum(map(os.path.getsize, held)) / GB
    say(f"{len(held) - 1} wheels in {wheels}, {size:.1f} GB. On a machine without a network: make lab WHEELS={wheels}")


def checksum(extras, torch):
    """16 hex digits over what the environment depends on."""
    digest = hashlib.sha256(f"{extras}\0{torch}\0".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()[:16]


# ---- the environment -----------------------------------------------------------------------------------------------


def venv(*parts):
    """A path in .venv."""
    return os.path.join(ROOT, ".venv", *parts)


def read(path):
    """The JSON object in a file of .venv; empty where it is missing or damaged."""
    try:
        with open(path) as file:
            found = json.load(file)
    except (OSError, ValueError):  # never installed, or cut short: both mean "make it anew"
        return {}
    return found if isinstance(found, dict) else {}


def write(path, content):
    """Write `content` as JSON, whole or not at all."""
    with open(path + ".partial", "w") as file:
        json.dump(content, file)
    os.replace(path + ".partial", path)


def state():
    """ "ready", "stale" (something it depends on has changed), "broken" (cut short) or "absent"."""
    if not os.path.isdir(venv()):
        return "absent"
    done, asked = read(venv("installed")), read(venv("asked"))
    if not done or not asked or not os.path.exists(venv("bin", "python")):
        return "broken"
    return "ready" if done.get("checksum") == checksum(asked["extras"], asked["torch"]) else "stale"


def install(extras, torch, this_python, add=(), wheels=""):
    """Bring .venv to what is asked for, and `add`, some of BESIDE; empty strings keep what was chosen last time.

    wheels: a bundle, which everything then comes from.
    """
    asked = read(venv("asked"))
    if wheels:
        extras = extras or bundled(wheels)["extras"]
    kept = [name for name in ("extras", "torch") if asked.get(name) and not {"extras": extras, "torch": torch}[name]]
    before = (asked.get("extras") or "").split(",")
    extras, torch = extras or asked.get("extras") or "all", torch or asked.get("torch") or ""
    extras = ",".join(dict.fromkeys([*extras.split(","), *add, *(name for name in before if name in BESIDE)]))
    check_choice(extras, torch)
    mine = dotted(sys.version_info[:2])
    other_python = this_python and asked.get("python", mine) != mine
    if not other_python and state() == "ready" and read(venv("installed"))["checksum"] == checksum(extras, torch):
        return
    for problem in (system_problem(), python_problem(), venv_problem()):
        if problem:
            raise Problem(*problem)
    with locked() as lock:
        before, asked = state(), read(venv("asked"))  # again: another make may have changed them meanwhile
        lost = set((asked.get("extras") or "").split(",")) - {"core", *extras.split(",")}
        grown = not lost and asked.get("torch") == torch and not other_python
        anew = before in ("absent", "broken") or not grown
        if before == "ready" and not anew and read(venv("installed"))["checksum"] == checksum(extras, torch):
            return  # another make did it while this one waited
        choices = {"extras": extras, "torch": torch, "python": mine if anew else asked.get("python", mine)}
        for name in kept:
            say(f"Keeping {name.upper()}={asked[name]} of last time (make clean forgets it).")
        with contextlib.suppress(FileNotFoundError):
            os.remove(venv("installed"))
        if before == "broken":
            say("The last installation was cut short: .venv is made anew.")
        if anew:
            make_anew(choices, lock)
        else:
            write(venv("asked"), choices)
        build = "torch as pip finds it" if not torch else "TORCH=" + torch
        say(f"Installing packages into .venv: EXTRAS={extras}, {build}. This takes minutes.")
        fill(extras, torch, lock, wheels)
        write(venv("installed"), {"checksum": checksum(extras, torch)})


def make_anew(choices, lock):
    """An empty .venv that remembers `choices`."""
    if os.path.isdir(venv()):
        shutil.rmtree(venv())
    problem = disk_problem(choices["extras"], choices["torch"])
    if problem:
        raise Problem(*problem)
    os.mkdir(venv())
    write(venv("asked"), choices)
    # where .venv was activated, its own python has just been removed: take the one that it was made from
    python = getattr(sys, "_base_executable", sys.executable) if sys.prefix == venv() else sys.executable
    options = ["--system-site-packages"] if choices["torch"] == "system" else []
    call([python, "-m", "venv", *options, venv()], lock, "make a virtual environment")


def fill(extras, torch, lock, wheels=""):
    """Install the course into .venv with pip; where a build of torch is asked for, uv has brought it before."""
    pip = [venv("bin", "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    pip += ["--no-index", "--find-links", wheels] if wheels else []
    constraints, cupy = "constraints.txt", "cuda13"
    if torch == "system":
        constraints, cupy = system_packages()
    elif torch and not wheels:
        call([*pip, "-c", constraints, "uv"], lock, "install uv")
        uv = [venv("bin", "uv"), "pip", "install", "--python", venv("bin", "python"), "-c", constraints]
        call([*uv, "--torch-backend", torch, "torch"], lock, "install torch for " + torch)
    wanted, told = requirement(extras, torch, cupy)
    for sentence in told:
        say(sentence)
    call([*pip, "-c", constraints, "-e", wanted], lock, "install the packages")


def system_packages():
    """TORCH=system: let .venv see this Python's packages, and leave every one of them as it is.

    Returns the path of constraints without them, and the extra that brings CuPy (empty where it is there).
    """
    from importlib import metadata

    there = {
        re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version
        for d in metadata.distributions()
        if d.metadata["Name"]
    }
    if "torch" not in there:
        raise Problem(f"TORCH=system keeps the torch of {sys.executable}, which has none.", "make lab TORCH=cpu")
    if tuple(int(n) for n in re.findall(r"\d+", there["torch"])[:2]) < (2, 11):
        sentence = "TORCH=system: the torch of {} is {}, and the course needs 2.11.".format(
            sys.executable, there["torch"]
        )
        raise Problem(sentence, "make lab TORCH=cu126")
    if sys.prefix != sys.base_prefix:  # a venv made from a venv does not see that one's packages unless told
        import site

        folder = venv("lib", "python" + dotted(sys.version_info[:2]), "site-packages")
        with open(os.path.join(folder, "image.pth"), "w") as file:
            file.write("\n".join(site.getsitepackages()) + "\n")
    with open(os.path.join(ROOT, "constraints.txt")) as file:
        lines = [line for line in file if re.split(r"[=#\s]", line)[0].lower().replace("_", "-") not in there]
    with open(venv("constraints.txt"), "w") as file:
        file.writelines(lines)
    if any(name == "cupy" or name.startswith("cupy-cuda") for name in there):
        return venv("constraints.txt"), ""
    cuda = re.search(r"\+cu(\d+)", there["torch"])
    return venv("constraints.txt"), "cuda12" if cuda and int(cuda.group(1)) < 130 else "cuda13"


def call(command, lock, purpose):
    """Run a command in the checkout. It holds the lock too: if this process is killed, the next make waits for it."""
    ended = subprocess.run(command, cwd=ROOT, pass_fds=[lock], stdin=subprocess.DEVNULL)
    if ended.returncode != 0:
        raise Problem(
            f"Could not {purpose}: the lines above say why (no network, no wheel, no space).",
            "put that right and call make again, which starts over; EXTRAS=core needs the fewest packages, "
            "and make clean forgets all options",
        )


@contextlib.contextmanager
def locked():
    """One installation at a time in a checkout."""
    import fcntl  # here, since native Windows has none, and must get as far as being told so

    fd = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another installation is going on in this checkout: waiting for it.")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def say(sentence):
    print(sentence, flush=True)


def main():
    """Run one installation; returns the exit status."""
    parser = argparse.ArgumentParser(description="Make .venv and keep it up to date.")
    parser.add_argument("--extras", default="", help="all (the default), core, or some of: " + ", ".join(RUNGS))
    parser.add_argument("--add", action="append", default=[], choices=BESIDE, help="an extra that all leaves out")
    parser.add_argument("--torch", default="", help="cpu, cu126, cu130, …, or system; default: pip's own choice")
    parser.add_argument("--wheels", default="", metavar="DIR", help="install from this bundle, without a network")
    parser.add_argument("--bundle", default="", metavar="DIR", help="then fill DIR with the wheels of .venv")
    parser.add_argument("--this-python", action="store_true", help="make .venv anew where another Python made it")
    options = parser.parse_args()
    try:
        install(options.extras.strip(), options.torch.strip(), options.this_python, options.add, options.wheels)
        if options.bundle:
            bundle(options.bundle)
    except Problem as problem:
        say(f"{problem.sentence}\nMend: {problem.mend}")
        return 1
    except KeyboardInterrupt:
        say("\nStopped. Nothing needs mending: the next make starts the installation over.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
