"""Every figure is declared in exactly one cell, and recorded once a GPU has been."""

from collections import defaultdict

import pytest

from helpers import ROOT, machine, notebooks, records

DECLARED = {path: records.declared(path) for path in notebooks.lessons()}


def test_each_figure_is_declared_in_exactly_one_cell():
    places = defaultdict(list)
    for path, ids in DECLARED.items():
        for key, cells in ids.items():
            places[key] += [f"{path.name}, cell {index}" for index in cells]
    assert not {key: cells for key, cells in places.items() if len(cells) > 1}


AWAITED: set[str] = set()
"""Lessons whose measuring was cut short or has yet to come: `make test` names the figures that are missing."""


def test_every_declared_figure_is_recorded_and_no_other():
    declared = {key for ids in DECLARED.values() for key in ids}
    record = records.load()
    recorded = {*record["figures"], *record["texts"]}
    awaiting = {path.name for path, ids in DECLARED.items() if set(ids) - recorded}
    assert not awaiting - AWAITED, "python -m helpers measure --only ID …, on the GPU of that record"
    assert not AWAITED - awaiting, "its figures are recorded now: take it out of AWAITED"
    assert not recorded - declared, "no notebook declares these any more: remove them from the record"


def test_a_gpu_that_lacks_a_tool_shows_what_was_recorded_but_never_records_it(monkeypatch, capsys):
    def refused():
        raise machine.NotReady("This account may not read the GPU's hardware counters.")

    monkeypatch.setattr(machine, "gpu", lambda: True)
    monkeypatch.delenv("HELPERS_RECORDS", raising=False)
    shown = records.figures(refused, "no.such.figure")
    assert not shown.live and shown["no.such.figure"].note == shown.where == records.NOT_YET
    assert "nan" not in str(shown) and "Recorded" not in str(shown)  # no GPU's name above what it never measured
    assert "may not read" in capsys.readouterr().out
    assert "not recorded yet" in records.text("no.such.text", refused)
    assert "may not read" in capsys.readouterr().out
    monkeypatch.setenv("HELPERS_RECORD", "a-file.json")
    with pytest.raises(machine.NotReady):
        records.figures(refused, "no.such.figure")
    with pytest.raises(machine.NotReady):
        records.text("no.such.text", refused)


def test_a_text_that_takes_minutes_is_kept_until_it_is_asked_for(tmp_path, monkeypatch):
    path, made = tmp_path / "a-card.json", tmp_path / "made.json"
    monkeypatch.setattr(records, "REFERENCE", path)
    monkeypatch.setattr(machine, "gpu", lambda: True)
    monkeypatch.setattr(machine, "here", lambda: type("Here", (), {"name": "A card"}))
    about = {"gpu": "A card", "date": "2026-01-01"}
    monkeypatch.setattr(records, "this_machine", lambda: about)
    records.merge(path, "texts", {"slow.text": ["old"]}, about)

    def shown():
        return records.text("slow.text", lambda: "new", rarely=True).splitlines()[-1]

    assert shown() == "old"
    monkeypatch.setenv("HELPERS_RECORD", str(made))
    assert shown() == "old" and records.load(made)["texts"] == {"slow.text": ["old"]}
    monkeypatch.setenv("HELPERS_ONLY", "another slow.text")
    assert shown() == "new" and records.load(made)["texts"] == {"slow.text": ["new"]}


def test_a_text_of_other_versions_says_so(tmp_path, monkeypatch):
    path = tmp_path / "a-card.json"
    monkeypatch.setattr(records, "REFERENCE", path)
    monkeypatch.setattr(machine, "gpu", lambda: False)
    old, new = ({"gpu": "A card", "date": "2026-01-01", "torch": version} for version in ("2.11", "2.13"))
    figure = {"value": 1.0, "unit": "us", "low": 1.0, "high": 1.0, "n": 1, "note": ""}
    records.merge(path, "texts", {"kept": ["a"]}, old)
    records.merge(path, "figures", {"a": figure}, new)  # the record is of these versions now, the text is not
    records.merge(path, "texts", {"made": ["b"]}, new)
    assert "torch 2.11" in records.text("kept", str) and "torch 2.13" in records.text("made", str)
    records.merge(path, "texts", {"kept": ["a"]}, new)
    assert "torch 2.13" in records.text("kept", str) and not records.load(path)["texts_made_with"]


def test_a_figure_of_other_versions_says_so_until_all_are_of_these(tmp_path, monkeypatch):
    path = tmp_path / "a-card.json"
    monkeypatch.setattr(records, "REFERENCE", path)
    figure = {"value": 1.0, "unit": "us", "low": 1.0, "high": 1.0, "n": 1, "note": ""}
    old, new = (
        {"gpu": "A card", "date": f"2026-01-0{i}", "torch": version} for i, version in ((1, "2.13"), (2, "2.11"))
    )
    records.merge(path, "figures", {"a": figure, "b": figure}, old)
    records.merge(path, "figures", {"b": figure}, new)
    assert records.recorded("a").where == "A card, 2026-01-01, torch 2.13"
    assert records.recorded("b").where == "A card, 2026-01-02, torch 2.11"
    assert records.recorded("a", "b").where == "A card, 2026-01-01, torch 2.13; A card, 2026-01-02, torch 2.11"
    records.merge(path, "figures", {"a": figure}, new)
    assert records.recorded("a", "b").where == "A card, 2026-01-02, torch 2.11"
    assert "made_with" not in path.read_text()


def test_an_output_is_made_here_where_it_can_be_and_recorded_elsewhere(tmp_path, monkeypatch, capsys):
    path = tmp_path / "outputs.json"
    monkeypatch.setattr(records, "OUTPUTS", path)
    monkeypatch.setenv("HELPERS_OUTPUTS", str(path))

    def missing():
        raise machine.NotReady("TVM is not installed.", "make lab EXTRAS=all")

    with pytest.raises(machine.NotReady):
        records.output("a.b", missing)
    made = records.output("a.b", lambda: {"x": (1, 2), "text": "é\n"})
    assert made.live and made.value == {"x": [1, 2], "text": "é\n"} and made.caption == "made here"
    shown = records.output("a.b", missing)
    assert not shown.live and shown.value == made.value and "recorded: made on" in shown.caption
    assert "TVM is not installed." in (said := capsys.readouterr().out) and "make lab EXTRAS=all" in said


def test_every_output_of_the_lessons_and_the_labs_is_recorded_and_no_other():
    """Mended by running the notebook with HELPERS_OUTPUTS=helpers/records/outputs.json."""
    paths = [*notebooks.lessons(), *(ROOT / "helpers" / "exercises").glob("l*.py")]
    declared = {key for path in paths for key in records.declared(path, ("records.output",))}
    assert declared == set(records.load(records.OUTPUTS)["texts"])
