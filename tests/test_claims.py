"""Verdicts on the articles' claims follow from figures and thresholds; each claim is judged in one place."""

import html
import math
import re
from collections import defaultdict

import nbformat
import pytest

from helpers import ROOT, claims, notebooks
from helpers.claims import DEPENDS, FAILS, HOLDS, NOT_TESTABLE, UNRECORDED, UNRESOLVED, Test
from helpers.records import Measurement


def spread(low, high):
    return Measurement((low + high) / 2, "x", low, high, 9)


@pytest.mark.parametrize(
    ("value", "threshold", "result"),
    [
        (3, {"at_least": 3}, HOLDS),
        (2.99, {"at_least": 3}, FAILS),
        (0.001, {"at_most": 0.001}, HOLDS),
        (0.0011, {"at_most": 0.001}, FAILS),
        (0, {"at_most": 0}, HOLDS),
        (-1, {"at_least": 0}, FAILS),
        (math.inf, {"at_most": 1}, FAILS),
        (40, {"equals": 40}, HOLDS),
        ("mma.sync", {"equals": "wgmma"}, FAILS),
        (True, {"equals": True}, HOLDS),
        (False, {"equals": True}, FAILS),
        (False, {"equals": False}, HOLDS),
        (0, {"equals": 0}, HOLDS),
        (spread(3.1, 3.3), {"at_least": 3}, HOLDS),
        (spread(3.0, 3.3), {"at_least": 3}, HOLDS),
        (spread(2.9, 3.3), {"at_least": 3}, UNRESOLVED),
        (spread(2.5, 2.9), {"at_least": 3}, FAILS),
        (spread(2.5, 2.9), {"at_most": 3}, HOLDS),
        (spread(2.9, 3.3), {"at_most": 3}, UNRESOLVED),
        (spread(3.1, 3.3), {"at_most": 3}, FAILS),
        (spread(2.9, 3.3), {"equals": 3}, UNRESOLVED),
        (spread(3.1, 3.3), {"equals": 3}, FAILS),
        (Measurement.exact(36, "trials"), {"equals": 36}, HOLDS),
        (math.nan, {"at_least": 3}, UNRECORDED),
        (spread(math.nan, math.nan), {"at_least": 3}, UNRECORDED),
        (spread(math.nan, math.nan), {"equals": 3}, UNRECORDED),
    ],
)
def test_a_test_compares_one_figure_with_its_threshold(value, threshold, result):
    assert Test("here", value, **threshold).result == result


YES, NO = Test("small", 1, at_least=0), Test("large", 1, at_least=2)
OPEN, NONE = Test("middle", spread(1, 3), at_least=2), Test("huge", math.nan, at_least=2)


@pytest.mark.parametrize(
    ("tests", "verdict"),
    [
        ([YES], HOLDS),
        ([NO], FAILS),
        ([YES, YES], HOLDS),
        ([NO, NO], FAILS),
        ([YES, NO], DEPENDS),
        ([OPEN], UNRESOLVED),
        ([YES, OPEN], UNRESOLVED),
        ([NO, OPEN], UNRESOLVED),
        ([YES, NO, OPEN], DEPENDS),
        ([NONE], UNRECORDED),
        ([YES, OPEN, NONE], UNRECORDED),
        ([NO, YES, NONE], DEPENDS),
    ],
)
def test_the_verdict_follows_from_the_tests(tests, verdict):
    assert claims.verdict("gelu-tanh", *tests).verdict == verdict


def test_a_verdict_reads_as_text_and_as_html():
    ratio = Measurement(1.114, "x", 1.1, 1.13, 30)
    ruling = claims.verdict(
        "gelu-tanh",
        Test("alone, fp16", ratio, at_least=3, note="erf's time over tanh's"),
        Test("same kernel", True, equals=True),
    )
    text = str(ruling).splitlines()
    assert text[0].startswith("Claim gelu-tanh (the trend article, on ") and "3 times" in text[0]
    assert re.split("  +", text[2]) == ["alone, fp16", "1.114 (1.1 – 1.13) x", "≥ 3 x", "no", "erf's time over tanh's"]
    assert text[3].split() == ["same", "kernel", "yes", "=", "yes", "yes"]
    assert text[-1] == "Verdict: depends. It holds for: same kernel. It fails for: alone, fp16."
    bundle = ruling._repr_mimebundle_()
    assert bundle["text/plain"] == str(ruling)
    assert "<table" in bundle["text/html"] and "It fails for: alone, fp16." in bundle["text/html"]


def test_a_rungs_verdict_names_the_rung():
    text = str(claims.verdict("registers", YES, rung="CUDA")).splitlines()
    assert (
        text[0].startswith("Claim registers, for CUDA (the trend article")
        and text[-1] == "Verdict: holds in every test."
    )


def test_what_has_no_verdict_yet_says_why():
    assert "not resolved, the spread reaches across the threshold: middle" in str(
        claims.verdict("registers", YES, OPEN)
    )
    text = str(claims.verdict("registers", NONE))
    assert "no GPU's figures are recorded for: huge" in text and "nan" not in text


def test_what_is_not_testable_has_a_reason():
    ruling = claims.verdict("cost-months")
    assert ruling.verdict == NOT_TESTABLE
    assert str(ruling).splitlines()[-1].startswith("Verdict: not testable: it would take many engineers")
    assert "not testable" in ruling._repr_mimebundle_()["text/html"]
    with pytest.raises(ValueError, match="takes no tests"):
        claims.verdict("cost-months", YES)


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="'here' needs one threshold"):
        Test("here", 3)
    with pytest.raises(ValueError, match="needs one threshold"):
        Test("here", 3, at_least=1, at_most=4)
    with pytest.raises(ValueError, match="no number"):
        Test("here", "mma", at_least=1)
    with pytest.raises(ValueError, match="no number"):
        Test("here", True, at_least=1)
    with pytest.raises(ValueError, match="not a number"):
        Test("here", 3, at_least=math.nan)
    with pytest.raises(ValueError, match="needs a test"):
        claims.verdict("gelu-tanh")
    with pytest.raises(LookupError, match=r"no claim 'gelu-than'; near it: gelu-tanh"):
        claims.verdict("gelu-than", YES)


def test_every_claim_says_where_it_was_made():
    for key, claim in claims.CLAIMS.items():
        assert claim.statement.endswith(".") and claim.heading, key
        assert claim.article in (*claims.ARTICLES, "both"), key
    assert len({claim.statement for claim in claims.CLAIMS.values()}) == len(claims.CLAIMS) == 26


def test_each_verdict_is_shown_in_one_cell_of_the_course():
    places = defaultdict(list)
    for path in notebooks.lessons():
        for key, cells in claims.declared(path).items():
            places[key] += cells
    assert not {key: cells for key, cells in places.items() if len(cells) > 1}


def test_a_claim_is_named_literally(tmp_path):
    def notebook(source):
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source, id="l98-a")])
        nbformat.write(nb, tmp_path / "98_a.ipynb")
        return tmp_path / "98_a.ipynb"

    assert claims.declared(notebook("%time 1\nclaims.verdict('registers', t)")) == {"registers": ["l98-a"]}
    part = notebook("claims.verdict('registers', t, rung='CUDA')")
    assert claims.declared(part) == {"registers, CUDA": ["l98-a"]}
    for odd in ("claims.verdict(key, t)", "claims.verdict('regsters', t)", "claims.verdict()"):
        with pytest.raises(ValueError, match="98_a.ipynb, cell l98-a"):
            claims.declared(notebook(odd))


COURSE = [path for path in notebooks.lessons() if claims.declared(path)]
AWAITED: set[str] = set()
"""Claims that no lesson judges yet."""


def test_the_ledger_has_every_claim_and_names_those_that_no_lesson_judges():
    ledger = claims.ledger(mine=None)
    assert [each.key for each in ledger.claims] == list(claims.CLAIMS)
    assert set(ledger.missing) == AWAITED
    assert {row["claim"]: row["judged in"] for row in ledger.rows()}["eighty-twenty"] == "12_2"
    declared = {path: claims.declared(path) for path in COURSE}
    for each in ledger.claims:
        wanted = {(path.name, cell) for path in COURSE for key, cells in declared[path].items()
                  for cell in cells if key.partition(",")[0] == each.key and not each.claim.untestable}  # fmt: skip
        assert {(entry.notebook, entry.cell) for entry in each.course} == wanted, each.key
        assert each.verdict_here == "–"


def test_the_ledger_that_lesson_12_was_saved_with_is_today_s():
    """Mended by running lesson 12 after the lessons that changed: python -m helpers run, or measure."""
    saved = nbformat.read(ROOT / "notebooks" / "12_choosing.ipynb", as_version=4)
    (cell,) = (cell for cell in saved.cells if cell.id == "l12-ledger-show")
    assert cell.outputs[0].data["text/plain"] == str(claims.ledger(mine=None))


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_what_a_saved_lesson_shows_is_read_back_to_the_same_verdict(path):
    cells = nbformat.read(path, as_version=4).cells
    texts = ["".join(o.get("data", {}).get("text/plain", "")) for c in cells for o in c.get("outputs", [])]
    shown = [text for text in texts if text.startswith("Claim ")]
    read = claims.entries(path)
    assert len(shown) == len(read) > 0
    for text, entry in zip(shown, read, strict=True):
        assert all(row["test"] and row["threshold"] and row["value"] for row in entry.rows)
        said = text.rpartition("\nVerdict: ")[2]
        verdict = claims.judged(claims.CLAIMS[entry.key], entry.results)
        opening = {UNRESOLVED: "not resolved", UNRECORDED: "none yet"}.get(verdict, verdict)
        assert said.startswith(opening), (entry, said)


def test_a_ruling_is_read_back_row_for_row():
    tests = (
        Test("| at least  2 |", spread(2.5, 2.9), at_least=3, note="threshold of  the article"),
        Test("none", math.nan, at_least=2, unit="x"),
        Test("value", True, equals=True),
    )
    ruling = claims.verdict("registers", *tests, rung="three K, one M")
    key, rung, rows = claims.parsed(str(ruling))
    assert (key, rung, list(rows)) == ("registers", "three K, one M", [test.row() for test in tests])
    assert claims.parsed("test  value") is None and claims.parsed("Claim nobody (both articles, on x): y") is None


def saved(folder, ratio, mode):
    """A lesson in `folder` that gave a verdict in `mode`."""
    start = nbformat.v4.new_output("display_data", {"text/plain": f"{mode}: a card"})
    ruling = claims.verdict("gelu-tanh", Test("alone", ratio, at_least=3))
    cells = [
        nbformat.v4.new_code_cell("1", outputs=[start], id="l98-a"),
        nbformat.v4.new_code_cell("1", outputs=[nbformat.v4.new_output("display_data", {"text/plain": str(ruling)})],
                                  id="l98-b"),
    ]  # fmt: skip
    folder.mkdir()
    nb = nbformat.v4.new_notebook(cells=cells)
    nb.metadata["helpers"] = {"gpu": "A card", "date": "2026-01-01", "mode": "gpu", "versions": {"torch": "2.13"}}
    nbformat.write(nb, folder / "98_a.ipynb")
    return folder / "98_a.ipynb"


@pytest.mark.parametrize(
    ("ratio", "mode", "verdict"),
    [(3.5, "GPU mode", HOLDS), (1.5, "GPU mode", "–"), (3.5, "CPU mode", "–")],
    ids=["run on a GPU", "as it was copied", "in CPU mode"],
)
def test_a_reader_s_copy_counts_once_it_ran_on_a_gpu(tmp_path, ratio, mode, verdict):
    course = saved(tmp_path / "course", 1.5, "GPU mode")
    saved(tmp_path / "mine", ratio, mode)
    ledger = claims.ledger(course.parent, tmp_path / "mine")
    gelu = next(each for each in ledger.claims if each.key == "gelu-tanh")
    assert (gelu.verdict, gelu.verdict_here) == (FAILS, verdict)
    (row,) = gelu.rows()
    assert (row["recorded"], row["here"]) == ("1.5", "3.5" if verdict == HOLDS else "–")
    page, text = (ledger.save(tmp_path / name).read_text() for name in ("ledger.html", "ledger.md"))
    for each in (page, text):
        assert "98_a.ipynb#cell-id=l98-b" in each and "A card, 2026-01-01, torch 2.13" in each and "≥ 3" in each
        assert all(html.escape(claim.statement) in each or claim.statement in each for claim in claims.CLAIMS.values())
        assert all(html.escape(what) in each or what in each for what in claims.ARTICLES.values())
    with pytest.raises(ValueError, match="not as ledger.txt"):
        ledger.save(tmp_path / "ledger.txt")
