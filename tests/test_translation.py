"""README.zh.md keeps step with README.md, and a step out of it is named."""

import pytest

from helpers import ROOT
from tests import translation


def test_the_chinese_readme_is_in_step():
    """Mended by translating the sections that are named, and then `python -m tests.translation`."""
    pages = [(ROOT / name).read_text() for name in ("README.md", "README.zh.md")]
    assert translation.differences(*pages) == []


ENGLISH = """# Bread

[中文](README.zh.md)

Flour and water, at 220 degrees.

## Tools

| tool | for |
|---|---|
| `oven` | [baking](#tools) |

- a bowl

```
buy <flour>
```
"""
CHINESE = translation.stamp(
    ENGLISH,
    """# 面包

[English](README.md)

面粉和水，220 度。

## 工具

| 工具 | 用途 |
|---|---|
| `oven` | [烘烤](#工具) |

- 一个碗

```
buy <面粉>
```
""",
)


def test_a_translation_in_step_is_not_complained_of():
    assert translation.differences(ENGLISH, CHINESE) == []


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("and water", "and milk", '"Bread" has changed in README.md'),
        ("220", "250", '"Bread", numbers: only in README.md: 250.'),
        ("| `oven` | [baking](#tools) |\n", "", "rows of tables: only in README.zh.md: one of 2 columns."),
        ("`oven`", "`stove`", "code in a line: only in README.zh.md: oven."),
        ("buy <", "sell <", "code: only in README.md"),
        ("](#tools)", "](LICENSE)", "links: only in README.md: LICENSE."),
        ("## Tools", "### Tools", "rank of its heading"),
        ("Flour and", "Flour\n\nand", "paragraphs: only in README.md: one."),
        ("- a bowl\n", "- a bowl\n- a board\n", "list items: only in README.md: one."),
        ("## Tools\n", "", "README.md has 1 sections and README.zh.md 2."),
    ],
)
def test_a_change_of_the_english_page_is_named(before, after, words):
    found = translation.differences(ENGLISH.replace(before, after), CHINESE)
    assert any(words in sentence for sentence in found), found


def test_one_command_marks_what_was_translated_again_and_nothing_else(tmp_path, capsys):
    english, chinese = tmp_path / "README.md", tmp_path / "README.zh.md"
    english.write_text(ENGLISH.replace("and water", "and milk").replace("- a bowl\n", ""))
    chinese.write_text(CHINESE.replace("和水", "和牛奶"))
    assert translation.main(tmp_path) == 1
    said = capsys.readouterr().out
    assert '"Tools" has changed' in said and "list items" in said and "Bread" not in said
    chinese.write_text(chinese.read_text().replace("- 一个碗\n", ""))
    assert translation.main(tmp_path) == 0 and "in step" in capsys.readouterr().out
    assert translation.differences(english.read_text(), chinese.read_text()) == []
