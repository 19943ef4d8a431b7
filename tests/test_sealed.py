"""A sealed process has no network and sees no other; what compilers do in it goes on as before."""

import os
import socket
import sys

import pytest

from helpers import child, exercises, sealed
from helpers.checks import judge
from tests.answers import solved

SECRET = "4711-not-for-children"
LOOK = """
import os, socket, subprocess, sys
from helpers import sealed

def can(act):
    try:
        act()
    except OSError:
        return False
    return True

def read(path):
    with open(path, "rb") as f:
        return f.read()

def look(pid, secret):
    from_below = "import socket; socket.socket()"
    return {
        "sealed": sealed.seal(),
        "inet": [can(lambda: socket.socket(f, k)) for f in (socket.AF_INET, socket.AF_INET6) for k in (1, 2)],
        "pair": can(socket.socketpair),
        "below": subprocess.run([sys.executable, "-c", from_below], stderr=subprocess.DEVNULL).returncode == 0,
        "others": [can(lambda: read(f"/proc/{p}/{what}")) for p in (pid, os.getppid()) for what in ("environ", "mem")],
        "signal": can(lambda: os.kill(pid, 0)),
        "own": secret in str(os.environ) or secret.encode() in read("/proc/self/environ"),
        "rename": can(moved),
    }

def moved():
    for folder in ("a", "b"):
        os.mkdir(folder)
    open("a/x", "w").close()
    os.rename("a/x", "b/x")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a sealed process and a plain one could reach, with a key in the environment of this one."""
    look, here = f"look({os.getpid()}, {SECRET!r})", os.getcwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_API_KEY", SECRET)
        child.close()  # else they would be forked from a process that began before there was a key
        done = []
        for is_sealed in (True, False):
            os.chdir(tmp_path_factory.mktemp("there"))
            done.append(child.run(LOOK, look, sealed=is_sealed))
        os.chdir(here)
        print_it = "import os; print(os.environ.get('SOME_API_KEY'), os.environ.get('GIVEN_KEY'), 'PATH' in os.environ)"
        done.append(child.python(["-c", print_it], env={"GIVEN_KEY": "given"}))
    assert all(one.ok for one in done), [one.stderr for one in done]
    return done


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the means")
def test_what_a_sealed_process_can_reach(found):
    sealed_one = found[0].value
    if any(sealed_one["sealed"].values()):
        pytest.skip(f"this system does not permit it: {sealed_one['sealed']}")
    assert sealed_one["inet"] == [False] * 4 and sealed_one["others"] == [False] * 4
    assert not sealed_one["below"] and not sealed_one["signal"]
    assert sealed_one["pair"] and sealed_one["rename"]  # a compiler's pool and its cache


def test_no_child_has_the_keys_of_its_parent(found):
    assert not found[0].value["own"] and not found[1].value["own"]
    assert found[2].stdout == "None given True\n"


@pytest.mark.parametrize(
    ("name", "value", "goes"),
    [
        *(("GITHUB_PAT", "x", 1), ("DB_PASS", "x", 1), ("MYSQL_PWD", "x", 1), ("OPENAI_API_KEY_2", "x", 1)),
        *(("API_TOKENS", "x", 1), ("SSH_AUTH_SOCK", "/tmp/agent", 1), ("AWS_ACCESS_KEY_ID", "x", 1)),
        *(("HTTPS_PROXY", "http://me:4711@proxy:8080", 1), ("DATABASE", "postgres://me:4711@host/x?y", 1)),
        *(("HTTP_PROXY", "http://proxy:8080", 0), ("PWD", "/here", 0), ("OLDPWD", "/there", 0), ("KEYBOARD", "de", 0)),
        *(("TOKENIZERS_PARALLELISM", "0", 0), ("SOME_PATH", "/a@b", 0), ("MAIL", "me@host", 0)),
    ],
)
def test_which_variables_stay_behind(monkeypatch, name, value, goes):
    monkeypatch.setenv(name, value)
    assert (name not in child._environment(None, "interpreted")) == bool(goes)


def test_only_what_asks_for_it_is_sealed():
    text = "import socket\nsocket.socket().close()"
    assert child.run(text).ok
    refused = child.run("from helpers import sealed", "sealed.seal()['network']").value
    assert child.run(text, sealed=True).ok == bool(refused)
    assert child.run(text).ok
    socket.socket().close()


@pytest.mark.parametrize("name", ["rmsnorm", "block-sum"])
def test_kernels_are_compiled_and_judged_in_it(name):
    verdict = judge(exercises.every()[name], solved(name), sealed=True)
    assert verdict.passed, verdict


class Refusing:
    """A C library whose system refuses `what`, and does nothing else."""

    def __init__(self, what):
        self.what = what

    def _answer(self, name):
        return -1 if self.what == name else 0

    def prctl(self, option, *_):
        return self._answer({sealed.PR_SET_NO_NEW_PRIVS: "no_new_privs", sealed.PR_SET_SECCOMP: "seccomp"}[option])

    def syscall(self, number, *_):
        return -1 if self.what == "Landlock" else {sealed.LANDLOCK_CREATE: os.dup(0)}.get(number, 0)

    def capget(self, *_):
        return self._answer("capget")

    def capset(self, *_):
        return self._answer("capset")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it says so at once")
@pytest.mark.parametrize(
    ("what", "network", "processes"),
    [
        ("nothing", "", ""),
        ("no_new_privs", "no_new_privs is not permitted", "no_new_privs is not permitted"),
        ("seccomp", "a seccomp filter is not permitted", ""),
        ("Landlock", "", "Landlock is not permitted"),
        ("capget", "", "asking for capabilities is not permitted"),
        ("capset", "", "giving up capabilities is not permitted"),
    ],
)
def test_where_a_system_refuses_it_says_which_and_goes_on(monkeypatch, what, network, processes):
    monkeypatch.setattr(sealed.ctypes, "CDLL", lambda *_, **__: Refusing(what))
    said = sealed.seal()
    for found, begins in ((said["network"], network), (said["processes"], processes)):
        assert found.startswith(begins) and bool(found) == bool(begins)


def test_elsewhere_it_says_so(monkeypatch):
    monkeypatch.setattr(sealed.sys, "platform", "darwin")
    assert set(sealed.seal().values()) == {"darwin has no such means"}
