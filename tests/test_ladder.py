"""The ladder at large: every figure that it names is one that a lesson declares, and its chart tells what it draws."""

import math
import os
import subprocess

import pytest

from helpers import ladder, machine, notebooks, plots, records

WAYS = [(workload, way) for workload in ladder.WORKLOADS for way in workload.ways]


def test_each_figure_is_one_that_a_lesson_declares_and_records():
    declared = {key for path in notebooks.lessons() for key in records.declared(path)}
    ids = {key for _, way in WAYS for key in (way.time, way.moved, way.build) if key}
    assert ids <= declared
    assert ids <= set(records.load()["figures"])
    times = [way.time for _, way in WAYS]
    assert len(set(times)) == len(times)


def test_units_are_those_that_the_table_reckons_with():
    for _, way in WAYS:
        found = records.recorded(*filter(None, (way.time, way.moved, way.build)))
        assert found[way.time].unit == "us"
        assert not way.moved or found[way.moved].unit in ("MB", "x DRAM bytes over the least", "x least", "x")
        assert not way.build or found[way.build].unit == "s"


def test_every_rung_and_tool_is_used_and_ordered_from_the_top():
    assert {way.tool for _, way in WAYS} == set(ladder.TOOLS)
    assert {tool.rung for tool in ladder.TOOLS.values()} == set(ladder.RUNGS)
    for workload in ladder.WORKLOADS:
        at = [ladder.RUNGS.index(ladder.TOOLS[way.tool].rung) for way in workload.ways]
        assert at == sorted(at), workload.name


@pytest.mark.parametrize("workload", ladder.WORKLOADS, ids=lambda workload: workload.name)
def test_no_way_is_far_beyond_its_floor(workload):
    """A measured bandwidth is good for a few percent: more would be a wrong shape or a wrong count of bytes."""
    for way, row in zip(workload.ways, ladder.rows(workload), strict=True):
        over = ladder.over_floor(workload, way)
        assert over.value > 0.9, way
        counted = row["bytes over the least"]
        assert counted == "–" or counted > 0.9, way


def test_floors_by_hand():
    on = ladder.timing.Ceilings(4e12, 5e12, 800e12, 50e12, 2.0, "")
    floors = {workload.name: workload.floor(on) for workload in ladder.WORKLOADS}
    assert floors["softmax, 16384 × 4096, fp32"] == pytest.approx(2 * 4 * 16384 * 4096 / 4e12 * 1e6)
    assert floors["GEMV, 1 × 8192 × 4096, fp16"] == pytest.approx(2 * (8192 * 4096 + 8192 + 4096) / 5e12 * 1e6)
    assert floors["linear + GELU, 16384 × 4096 × 1024"] == pytest.approx(2 * 16384 * 4096 * 1024 / 800e12 * 1e6)


def test_lines_are_counted_without_comments_and_docstrings():
    text = '# a comment\n\ndef f():\n    """Words\n    and words."""\n    return 1  # code\n'
    assert ladder.code_lines(text, "#") == 2
    assert ladder.code_lines("// one\nint x;\n", "//") == 1
    program = 'CODE = r"""\n#include <mma.h>\n// what it does\nint x;\n"""\n# a comment\n'
    assert ladder.code_lines(program, ("# ", "//")) == 4
    lines = {way.tool: way.lines for way in ladder.WORKLOADS[0].ways}
    assert lines["torch.compile"] < lines["Triton"] < lines["Gluon"] < lines["CUDA with wgmma and TMA"]


def test_what_kernels_by_hand_took_is_counted_from_the_history(tmp_path, monkeypatch):
    def git(*arguments, at=0):
        line = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        date = {"GIT_AUTHOR_DATE": f"@{at} +0000", "GIT_COMMITTER_DATE": f"@{at} +0000"}
        subprocess.run(line, cwd=tmp_path, env={**os.environ, **date}, check=True, capture_output=True)

    monkeypatch.setattr(ladder, "ROOT", tmp_path)
    monkeypatch.setattr(ladder, "BY_HAND", {"a kernel": ("k", "k.py")})
    (tmp_path / "notebooks" / "k").mkdir(parents=True)
    with pytest.raises(machine.NotReady, match="history is not here"):
        ladder.cost()
    git("init")
    for name, text, at in (
        ("k/1.cu", "// a word\nint x;\n", 0),
        ("k/1.cu", "int x;\nint y;\n", 1800),
        ("other.py", "1\n", 90000),
        ("k.py", "# a word\nx = 1\n", 90000 + 86400),
    ):
        (tmp_path / "notebooks" / name).write_text(text)
        git("add", ".")
        git("commit", "-m", name, at=1_700_000_000 // 3600 * 3600 + at)
    row = {"kernels by hand": "a kernel", "lines": 3, "commits": 3, "days": 3, "hours with a commit": 2}
    assert ladder.cost() == [row]
    git("clone", "--depth", "1", f"file://{tmp_path}", "shallow")
    monkeypatch.setattr(ladder, "ROOT", tmp_path / "shallow")
    with pytest.raises(machine.NotReady, match="not all of it"):
        ladder.cost()


def test_the_chart_tells_each_mark_and_what_is_missing():
    picture = plots.climb(ladder.points(), ladder.RUNGS, "All rungs")
    assert picture.text.startswith("All rungs: time over the floor, lower is better.")
    for workload, way in WAYS:
        said = next(part for part in picture.text.split(". ") if workload.name in part)
        assert way.tool in said
    assert "not recorded yet" not in picture.text
    (axes,) = picture.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [w.name for w in ladder.WORKLOADS]
    marks = [line for line in axes.lines if line.get_marker() != "None"]
    assert len(marks) == len(WAYS)


def test_another_card_s_ladder_stands_over_its_own_floor(tmp_path):
    workload = next(w for w in ladder.WORKLOADS if w.name.startswith("softmax"))
    way, record = workload.ways[0], tmp_path / "a-card.json"
    rates = dict(zip(ladder.timing.CEILINGS, (1.0, 1.1, 100.0, 10.0, 2.0), strict=True))  # TB/s, TFLOP/s, µs
    entry = {"unit": "us", "n": 9, "note": ""}
    figures = {key: entry | {"value": v, "low": v, "high": v} for key, v in rates.items()}
    figures[way.time] = entry | {"value": 1000.0, "low": 990.0, "high": 1010.0}
    records.merge(record, "figures", figures, {"gpu": "A card", "date": "2026-01-01"})
    over = ladder.over_floor(workload, way, record)
    assert over.value == pytest.approx(1000 / (8 * 16384 * 4096 / 1e12 * 1e6))
    assert [row["µs"] for row in ladder.rows(workload, record)] == [1000.0, "–", "–", "–"]
    assert "A card" in ladder.ceilings(record).where
    assert ladder.over_floor(workload, way).value != over.value
    points = ladder.points(record)
    assert sum(not math.isnan(m.value) for ways in points.values() for *_, m in ways) == 1
    assert "not recorded yet: torch.compile, Triton, CUDA" in plots.climb(points, ladder.RUNGS, "One figure").text


def test_what_a_reader_s_card_is_asked_for_is_declared():
    declared = {key for path in notebooks.lessons() for key in records.declared(path)}
    assert set(ladder.timing.CEILINGS) < ladder.ids() <= declared
