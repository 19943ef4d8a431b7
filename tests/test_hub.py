"""A room of learners on a real JupyterHub: own copies, checks, and nobody in anybody else's files or server."""

import importlib.util
import json
import os
import re
import secrets
import shutil
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers import ROOT, notebooks
from tests import hub_server

pytestmark = pytest.mark.slow
LAB = "work/labs/01_measuring.ipynb"


@pytest.fixture(scope="module", autouse=True)
def possible():
    """Skip where a hub cannot keep learners apart or has no proxy; fail there where HELPERS_HUB=required."""
    missing = ""
    if os.geteuid() != 0:
        missing = "learners are kept apart by accounts of this machine, and only root may make those"
    elif not importlib.util.find_spec("jupyterhub"):
        missing = "JupyterHub is not installed (make install add='--add hub')"
    elif not (shutil.which("configurable-http-proxy") or shutil.which("npm")):
        missing = "there is no npm to bring configurable-http-proxy, and none on the PATH"
    if missing and os.environ.get("HELPERS_HUB") == "required":
        pytest.fail(f"HELPERS_HUB=required, but {missing}")
    if missing:
        pytest.skip(missing)


def names(number: int) -> list[str]:
    tag = secrets.token_hex(2)
    return [f"l{tag}n{i}" for i in range(number)]


def cells(*ids: str) -> list[str]:
    """Cells of the solved lab, by id."""
    by_id = {cell.id: cell.source for cell in notebooks.read(ROOT / "solutions" / "01_measuring.ipynb").cells}
    return [by_id[key] for key in ids]


RIGHT = cells("x01-setup", "x01-count-bytes-answer", "x01-count-bytes-check")
WRONG = [RIGHT[0], "def least_bytes(m, n, k, size):\n    return {}", RIGHT[2]]


# ---- eight learners ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def room():
    """Eight learners at work, and a ninth whose disk is full."""
    everyone = names(9)
    secret = {"CONFIGPROXY_AUTH_TOKEN": secrets.token_hex(32), "JPY_COOKIE_SECRET": secrets.token_hex(32)}
    given = {**secret, "HUB_MEMORY": "6G", "HELPERS_MODE": "cpu"}
    with hub_server.serving(everyone, full=everyone[8], environment=given) as hub:
        hub.learners = [hub.learner(name) for name in everyone]
        with ThreadPoolExecutor(8) as many:
            list(many.map(lambda learner: learner.start(), hub.learners[:8]))
        yield hub


def test_each_gets_copies_of_their_own_and_runs_a_check(room):
    def work(learner):
        return learner.run(LAB, *(WRONG if learner is room.learners[1] else RIGHT))[-1]

    with ThreadPoolExecutor(3) as some:
        said = list(some.map(work, room.learners[:8]))
    passed = ["passed in CPU mode" in text or "passed" in text.splitlines()[0] for text in said]
    assert passed == [True, False, *[True] * 6], said
    for learner, right in zip(room.learners[:8], passed, strict=True):
        home = room.homes / learner.name
        assert home.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_uid for path in home.rglob("work/**/*")} == {home.stat().st_uid}
        assert (home / LAB).exists() and (home / "work/notebooks/00_start_here.ipynb").exists()
        known = json.loads((home / "work/.progress.json").read_text())["count-bytes"]
        assert known["attempts"] == 1 and bool(known["passed"]) == right


def test_solutions_are_left_out_and_solution_says_so(room):
    [said] = room.learners[2].run(LAB, "import helpers; from helpers.checks import solution; solution('count-bytes')")
    assert "not on this machine" in said and "Traceback" not in said


def test_nobody_reads_the_files_of_another(room):
    mine, other = room.learners[:2]
    theirs = room.homes / other.name
    code = f"""
import os, pathlib
for look in [lambda: os.listdir({str(theirs)!r}), lambda: open({str(theirs / LAB)!r}),
             lambda: open({str(theirs / "mine")!r}, "w"), lambda: open({str(room.folder / "state/cookie_secret")!r})]:
    try:
        print("got", look())
    except PermissionError:
        print("refused")
servers = [p for p in pathlib.Path("/proc").iterdir() if p.name.isdigit() and p.stat().st_uid == {theirs.stat().st_uid}]
print(len(servers) > 0, [p.name for p in servers if os.access(p / "environ", os.R_OK)])
course = pathlib.Path(os.environ["PYTHONPATH"])
print([str(p) for p in (course, course / "helpers", course / "labs") if os.access(p, os.W_OK)])
print([name for name in os.environ if "SECRET" in name or name.startswith(("HUB_", "CONFIGPROXY"))])
print(os.environ["HELPERS_MODE"])
"""
    [said] = mine.run(LAB, code)
    assert said.split("\n")[:8] == [*["refused"] * 4, "True []", "[]", "[]", "cpu"]


def test_nobody_reaches_the_server_of_another(room):
    mine, other = room.learners[:2]
    for path in ("lab", "api/contents/work", "api/kernels", "api/terminals"):
        assert mine.call("GET", path).status_code == 200
        page = mine.call("GET", path, of=other.name)
        while page.is_redirect:  # to the hub, which asks who one is, and back
            page = mine.browser.get(f"{room.address}{page.headers['Location'].removeprefix(room.address)}",
                                    allow_redirects=False, timeout=60)  # fmt: skip
        assert page.status_code == 403, path
    stranger = room.learner(other.name)
    assert stranger.browser.get(f"{room.address}/user/{other.name}/api/contents/work", timeout=60).status_code == 403
    assert "Invalid username or password" in stranger.log_in(password="guessed").text

    # past the proxy, from one learner's kernel to the port of the other's server; and to the ports of its kernel
    port = re.search(rf"Adding user {other.name} to proxy .* => http://127.0.0.1:(\d+)", room.log())[1]
    code = f"""
import os, urllib.request, urllib.error
for token in [os.environ["JUPYTERHUB_API_TOKEN"], ""]:
    request = urllib.request.Request("http://127.0.0.1:{port}/user/{other.name}/api/contents/work")
    request.add_header("Authorization", "token " + token)
    try:
        print(urllib.request.urlopen(request).status)
    except urllib.error.HTTPError as refused:
        print(refused.code)
"""
    [said] = mine.run(LAB, code)
    assert said.split() == ["403", "403"]
    [said] = other.run(LAB, "import ipykernel, json; print([k for k in json.load(open(ipykernel.get_connection_file()))"
                            " if 'curve' in k])")  # fmt: skip
    assert "curve_publickey" in said  # messages between server and kernel are encrypted


def test_limits_hold(room):
    code = """
import os, resource
print(len(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_NPROC)[1])
try:
    bytearray(7 * 2**30)
except MemoryError:
    print("no more")
"""
    [said] = room.learners[3].run(LAB, code)
    assert said.split() == [str(min(2, len(os.sched_getaffinity(0)))), "4096", "no", "more"]


def test_a_released_lab_that_changed_reaches_an_edited_copy_beside_it(room):
    learner = room.learners[4]
    mine = learner.call("GET", f"api/contents/{LAB}").json()
    mine["content"]["cells"][3]["source"] = "def least_bytes(m, n, k, size):\n    return 'my answer'"
    learner.call("PUT", f"api/contents/{LAB}", json=mine).raise_for_status()
    released = room.folder / "checkout" / "labs" / "01_measuring.ipynb"
    text = released.read_text()
    try:
        released.write_text(text.replace("Five exercises", "The five exercises"))
        learner.stop()
        learner.start()
    finally:
        released.write_text(text)
    assert "my answer" in (room.homes / learner.name / LAB).read_text()
    assert "The five exercises" in (room.homes / learner.name / "work/labs/01_measuring.new.ipynb").read_text()
    assert learner.page.url.endswith("/lab/tree/work/NEWS.md")
    said = f"{LAB} has your edits and stays as it is. The update is beside it, 01_measuring.new.ipynb: cells changed"
    assert said in learner.call("GET", "api/contents/work/NEWS.md").json()["content"]
    assert f"{learner.name}: {said}" in room.log()


def test_on_a_full_disk_a_sentence_and_no_server(room):
    learner = room.learners[8]
    if room.full != learner.name:
        pytest.skip("this container may not mount a small disk")
    page = learner.log_in()
    end = time.monotonic() + 60
    while "disk that your files lie on is full" not in page.text and time.monotonic() < end:
        page = learner.browser.get(f"{room.address}/hub/spawn/{learner.name}", timeout=60)
    assert "Tell your instructor" in page.text
    assert f"{learner.name} has no server: the disk of {room.homes / learner.name} is full" in room.log()


# ---- packing up -----------------------------------------------------------------------------------------------------


def test_what_is_collected_is_what_each_learner_may_read(tmp_path):
    """A learner's links lead to another's lab, to root's files and into nothing; a pipe waits for whoever reads it."""
    mine, other, none = everyone = names(3)
    folder = Path(tempfile.mkdtemp(prefix="hub"))
    folder.chmod(0o755)
    secret = folder / "secret.ipynb"
    secret.write_text("root's")
    secret.chmod(0o600)
    env = os.environ | {"HUB_LEARNERS": f"learners{secrets.token_hex(3)}", "HUB_HOMES": str(folder / "homes")}
    try:
        with hub_server.accounts(everyone, ROOT, env):
            labs = {name: folder / "homes" / name / "work" / "labs" for name in (mine, other)}
            for name, lab in labs.items():
                lab.mkdir(parents=True)
                (lab / "01_measuring.ipynb").write_text(f"of {name}")
                shutil.chown(lab / "01_measuring.ipynb", name)
                for path in (lab, lab.parent):
                    shutil.chown(path, name)
            for name, target in [("02", labs[other] / "01_measuring.ipynb"), ("03", secret), ("04", "/no/such")]:
                (labs[mine] / f"{name}.ipynb").symlink_to(target)
            os.mkfifo(labs[mine] / "05.ipynb")
            (folder / "homes" / none / "work").symlink_to(labs[other].parent)
            to = folder / "submitted"
            line = [ROOT / "workshop" / "collect", to]
            done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)
    finally:
        shutil.rmtree(folder / "homes", ignore_errors=True)
    found = {str(path.relative_to(to)): path.read_text() for path in to.rglob("*") if not path.is_dir()}
    shutil.rmtree(folder)
    assert found == {f"{name}/01_measuring.ipynb": f"of {name}" for name in (mine, other)}, done.stderr
    assert done.returncode == 0 and done.stderr.count(f"{mine}: left out") == 4
    assert f"{none} has no work/labs" in done.stderr


# ---- forty at once -------------------------------------------------------------------------------------------------


def test_forty_logins_in_a_minute():
    """All get a server, none is turned away or given up, and who waits reads how many come before."""
    everyone = names(40)
    with (
        hub_server.serving(everyone, stub=True, environment={"HUB_STARTING": "1"}) as hub,
        ThreadPoolExecutor(40) as many,
    ):

        def come(number: int) -> float:
            time.sleep(1.5 * number)
            return hub.learner(everyone[number]).start(seconds=300)

        coming = [many.submit(come, number) for number in range(39)]
        time.sleep(45)
        last = hub.learner(everyone[39])
        last.log_in()
        told = last.line()
        seconds = sorted(one.result() for one in coming)
        pages = [last.browser.get(f"{hub.address}/user/{name}/", timeout=60).text for name in everyone]
        log = hub.log()
    assert re.search(r"starting at this moment: [1-9]\d* are before you in line", told), told[:2000]
    assert "Your server is starting" in told and '"ready": true' in told
    assert pages == everyone
    assert len(re.findall(r"has a server after \d+ s", log)) == 40
    assert len(re.findall(r"waited \d+ s in line, \d+ are behind", log)) > 10
    middle, longest = statistics.median(seconds), seconds[-1]
    print(f"forty logins in a minute: servers after {middle:.0f} s, at most {longest:.0f} s")
