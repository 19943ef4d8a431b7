"""An instructor's view of a class: who is stuck at what, from what learners' own checks leave there, and no more."""

import datetime
import json
import os
import stat
import types

import pytest

import helpers
from helpers import __main__, checks, doctor, exercises, progress, room, show

NAMES = list(exercises.every())[:3]


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """A room, a learner in it, and a clock that the test can set."""
    monkeypatch.setenv("HELPERS_ROOM", str(tmp_path / "room"))
    monkeypatch.setenv("HELPERS_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setenv("JUPYTERHUB_USER", "ada")
    for name in ("HELPERS_STRICT", "NBGRADER_EXECUTION"):
        monkeypatch.delenv(name, raising=False)
    room.make(tmp_path / "room")
    return tmp_path / "room"


def attempt(name=NAMES[0], kind="race", message="Two threads write it."):
    findings = (checks.Finding(kind, message),) if kind else ()
    progress.record(checks.Verdict(name, not kind, findings, "cpu", 0.1))


def later(monkeypatch, minutes: int) -> None:
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=minutes, seconds=5)
    monkeypatch.setattr(room, "_now", lambda: now)


def test_the_room_shows_who_is_stuck_at_what_and_for_how_long(apart, monkeypatch, tmp_path):
    attempt()
    attempt()
    attempt(NAMES[1], kind="")
    monkeypatch.setenv("JUPYTERHUB_USER", "grace")
    monkeypatch.setenv("HELPERS_PROGRESS", str(tmp_path / "another.json"))
    attempt(NAMES[1], "timeout", "It never ended.")
    later(monkeypatch, 12)
    seen = {(p.learner, p.exercise): (p.attempts, p.passed, p.finding, p.stuck, p.quiet) for p in room.places(apart)}
    assert seen == {
        ("ada", NAMES[0]): (2, False, "race: Two threads write it.", 12, 12),
        ("ada", NAMES[1]): (1, True, "", 0, 12),
        ("grace", NAMES[1]): (1, False, "timeout: It never ended.", 12, 12),
    }
    lines = room.table(apart).splitlines()
    assert lines[0].startswith("2 learners, 2 exercises open, 1 passed")
    [line] = [line for line in lines if line.startswith("grace")]
    assert NAMES[1] in line and "timeout: It never ended." in line


def test_a_pass_ends_being_stuck_and_the_minutes_count_from_the_first_attempt(apart, monkeypatch):
    attempt()
    later(monkeypatch, 7)
    assert [(p.passed, p.stuck) for p in room.places(apart)] == [(False, 7)]
    attempt(kind="")
    assert [(p.passed, p.stuck, p.attempts) for p in room.places(apart)] == [(True, 0, 2)]


def test_nobody_takes_part_who_was_not_told(apart, monkeypatch):
    said = []
    monkeypatch.setattr(show, "note", lambda text, kind="note": said.append(text))
    monkeypatch.setattr(doctor, "blocking", lambda: None)
    monkeypatch.setattr(doctor, "warnings", lambda: [])
    helpers.start()
    assert any("Your instructor sees" in text and "unset HELPERS_ROOM" in text for text in said)
    for off in ("", None):
        monkeypatch.setenv("HELPERS_ROOM", off) if off is not None else monkeypatch.delenv("HELPERS_ROOM")
        said.clear()
        helpers.start()
        attempt()
        room.log("A fault.")
        assert not any("instructor" in text for text in said)
    assert not list(apart.iterdir())


@pytest.mark.parametrize("variable", ["HELPERS_STRICT", "NBGRADER_EXECUTION"])
def test_a_grader_is_no_learner(apart, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    attempt()
    assert not list(apart.iterdir())


def test_learners_cannot_list_the_room_nor_read_each_others_files(apart):
    attempt()
    room.log("A fault.")
    assert stat.S_IMODE(apart.stat().st_mode) == 0o3733
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in apart.iterdir()}
    assert modes == {"ada.json": 0o640, "ada.log": 0o640}


def test_a_name_leads_nowhere_else(apart, monkeypatch):
    monkeypatch.setenv("JUPYTERHUB_USER", "../../etc/ada")
    attempt()
    assert [path.parent for path in apart.iterdir()] == [apart] and len(room.places(apart)) == 1


def test_what_a_learner_left_may_be_anything(apart, capsys):
    attempt()
    left = json.loads((apart / "ada.json").read_text())["exercises"][NAMES[0]]
    bad = [
        "{",
        "[]",
        '{"exercises": 3}',
        json.dumps(
            {"exercises": {NAMES[0]: 3, NAMES[1]: {**left, "attempts": "many"}, NAMES[2]: {**left, "since": ""}}}
        ),
        json.dumps({"exercises": {"\x1b[2Jnone": left}}),
        json.dumps({"exercises": {NAMES[0]: {**left, "attempts": float("inf")}}}),
        "[" * 100_000,
        "\udcff",
    ]
    for number, text in enumerate(bad):
        (apart / f"bad{number}.json").write_text(text, errors="surrogateescape")
    os.mkfifo(apart / "pipe.json")
    os.mkfifo(apart / "pipe.log")
    with (apart / "large.log").open("w") as large:
        large.truncate(1 << 40)
    (apart / "link.json").symlink_to(apart / "ada.json")
    (apart / "loud.log").write_text("\x1b[2J\x1b]0;title\x07said\n")
    assert __main__.main(["room", str(apart), "--once"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1 learner, 1 exercise open") and "said" in said and "\x1b" not in said
    assert __main__.main(["room", str(apart), "--json"]) == 0
    assert [place["learner"] for place in json.loads(capsys.readouterr().out)] == ["ada"]


def test_who_leaves_a_file_follows_no_link_that_waits_there(apart, tmp_path):
    """Everybody may write in a room: a link under the name of a learner's next file would lead to a file of theirs."""
    mine = tmp_path / "lab.ipynb"
    mine.write_text("my answers")
    for name in ("ada.json", "ada.log", ".ada.json.partial"):
        (apart / name).symlink_to(mine)
    attempt()
    room.log("A fault.")
    assert mine.read_text() == "my answers"
    assert [(p.learner, p.attempts) for p in room.places(apart)] == [("ada", 1)]


def test_names_may_hold_anything_and_stay_apart(apart, monkeypatch):
    names = ["a/b", "a_b", "..", "Zoë Müller", "two\nlines", "\u202eback", "x" * 80 + "@example.org"]
    for name in names:
        monkeypatch.setenv("JUPYTERHUB_USER", name)
        attempt()
    assert {path.parent for path in apart.iterdir()} == {apart}
    seen = {place.learner for place in room.places(apart)}
    assert seen == {"a/b", "a_b", "..", "Zoë Müller", "two lines", "back", "x" * 80 + "@example.org"}
    assert room.table(apart).startswith(f"{len(names)} learners")
    assert "\u202e" not in room.table(apart)


def test_a_file_under_anothers_name_is_named_as_such(apart, monkeypatch):
    attempt()
    account = types.SimpleNamespace(pw_uid=os.getuid() + 1)
    monkeypatch.setattr(room.pwd, "getpwnam", lambda name: account)
    assert [place.learner for place in room.places(apart)] == [f"ada (left by user {os.getuid()})"]


def test_it_is_refreshed_while_the_class_works(apart, monkeypatch, capsys):
    def works(seconds):
        assert seconds == 2
        if "race" in capsys.readouterr().out:
            raise KeyboardInterrupt
        attempt()

    monkeypatch.setattr(__main__.time, "sleep", works)
    assert __main__.main(["room", str(apart), "--every", "2"]) == 130


def test_a_room_that_cannot_be_written_costs_no_verdict(apart, monkeypatch):
    said = []
    monkeypatch.setattr(show, "note", lambda text, kind="note": said.append(text))
    monkeypatch.setenv("HELPERS_ROOM", str(apart / "no" / "such"))
    attempt()
    room.log("A fault.")
    assert progress.of(NAMES[0]).attempts == 1
    assert "could not be brought up to date" in said[0]
