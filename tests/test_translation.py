"""README.zh.md keeps step with README.md, and a step out of it is named."""

import pytest

from helpers import ROOT
from tests import translation

ENGLISH, CHINESE = (ROOT / "README.md").read_text(), (ROOT / "README.zh.md").read_text()


def test_the_chinese_readme_is_in_step():
    """Mended by translating the sections that are named, and then `python -m tests.translation`."""
    assert translation.differences(ENGLISH, CHINESE) == []


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("You should know Python", "You must know Python", '"What you need" has changed'),
        ("| 2 hours | 00, 01 | 120 |\n", "", "rows of tables"),
        ("compute capability 7.5", "compute capability 8.0", "numbers: only in README.md: 8.0"),
        ("make lab TORCH=cpu", "make lab TORCH=gpu", "code in a line"),
        ("conda activate gpu-kernel-ladder\n", "", "code: "),
        ("](LICENSE)", "](COPYING)", "links"),
        ("\n## Labs\n", "\n### Labs\n", "rank of its heading"),
        ("Tell us what you find.\n\n", "", "paragraphs"),
        ("- the conformance kernels;\n", "", "list items"),
        ("## Labs\n", "", "sections"),
    ],
)
def test_a_change_of_the_english_page_is_named(before, after, words):
    assert ENGLISH.count(before) == 1
    found = translation.differences(ENGLISH.replace(before, after), CHINESE)
    assert any(words in sentence for sentence in found), found


def test_one_command_marks_what_was_translated_again(tmp_path, capsys):
    changed = ENGLISH.replace("You should know Python", "You must know Python")
    (tmp_path / "README.md").write_text(changed)
    (tmp_path / "README.zh.md").write_text(CHINESE)
    assert translation.main(tmp_path) == 0 and "in step" in capsys.readouterr().out
    assert translation.differences(changed, (tmp_path / "README.zh.md").read_text()) == []
    (tmp_path / "README.md").write_text(changed.replace("| 2 hours | 00, 01 | 120 |\n", ""))
    assert translation.main(tmp_path) == 1 and "rows of tables" in capsys.readouterr().out
