"""How results look: tables and code as text, and signs of life for whatever takes longer than two seconds."""

import time

import nbformat
import pytest
from nbclient import NotebookClient

from helpers import notebooks, show
from helpers.checks.verdict import Finding, Verdict


def updates(cell: str) -> list[str]:
    """The HTML of each display and update that one cell of a real kernel sends."""
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"import time\nfrom helpers import show\n{cell}")])
    seen = []
    client = NotebookClient(nb, km=None, timeout=60)
    plain = client.process_message

    def watch(msg, *rest):
        if msg["msg_type"] in ("display_data", "update_display_data"):
            seen.append(msg["content"]["data"].get("text/html", ""))
        return plain(msg, *rest)

    client.process_message = watch
    client.execute(env=notebooks.kernel_environment({}))
    return seen


def test_headings_and_long_names_may_be_folded():
    made = show.table([{"gemm_fusion_dot, first": 1, "a_b": "x_y; triton_red_fused_softmax_copy_view_0"}])
    assert "gemm_<wbr>fusion_<wbr>dot, first</th>" in made.html
    assert "x_y; triton_<wbr>red_<wbr>fused_<wbr>softmax_<wbr>copy_<wbr>view_<wbr>0</td>" in made.html
    assert str(made).splitlines()[0].split("  ") == ["gemm_fusion_dot, first", "a_b"]


@pytest.mark.parametrize(
    "work",
    ["with show.working('slow work'): time.sleep({})", "for _ in show.progress(3, 'slow work'): time.sleep({} / 2)"],
)
def test_what_takes_longer_than_two_seconds_shows_a_bar_that_vanishes(work):
    quick, slow = updates(work.format(0.1)), updates(work.format(2.6))
    assert not any("progress" in html for html in quick)
    assert any("slow work" in html and "<progress" in html for html in slow)
    assert slow[-1] == ""


def test_a_bar_vanishes_where_its_loop_is_left_early():
    cell = """
for i in show.progress(3, 'slow work'):
    time.sleep(2.2)
    if i == 1: break"""
    seen = updates(cell)
    assert any("<progress" in html for html in seen) and seen[-1] == ""


def test_working_ends_with_the_work_and_passes_its_error_on():
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError), show.working("x"):
        raise ZeroDivisionError
    assert time.monotonic() - began < 1


def test_tables_align_numbers_and_keep_the_caption():
    text = str(show.table([{"a": 1, "b": "x"}, {"a": 12345, "b": "yy"}], caption="what"))
    assert text.splitlines() == ["what", "     a  b", "     1  x", "12,345  yy"]
    assert str(show.table([], ["a"])) == "a"


def test_code_marks_lines_and_numbers_them_from_the_whole_text():
    text = str(show.code("one\ntwo\nthree", "ptx", slice(1, None), mark="^two"))
    assert text.splitlines() == ["ptx · 2 of 3 lines", "> 2 two", "  3 three"]


def test_a_verdict_shows_code_as_code_and_what_was_not_attempted_not_as_wrong():
    def looks(kind, said):
        return Verdict("x", False, (Finding(kind, said),), "cpu", 0.1)._repr_mimebundle_()["text/html"]

    wrong = looks("race", "In `a < b`:\n    3: part[t] = `s`;\n(Case: one.)")
    assert "In <code>a &lt; b</code>:\n    <code>3: part[t] = `s`;</code>\n(Case" in wrong and "✘" in wrong
    assert "○" in looks("not-attempted", "Your code is missing.")
