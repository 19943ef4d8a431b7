"""README.zh.md says in Chinese what README.md says: each of its sections names the English text it was made from.

`python -m tests.translation` writes those marks anew, once the sections that had changed are translated again.
"""

import hashlib
import re
import sys
from collections import Counter
from pathlib import Path

from helpers import ROOT

MARK = re.compile(r"^<!-- README\.md [0-9a-f]{12} -->\n", flags=re.MULTILINE)
"""Stands beneath each heading of README.zh.md, with the hash of the English section."""


def sections(text: str) -> list[str]:
    """A page's sections, each from its heading on."""
    found, in_code = [], False
    for line in text.splitlines(keepends=True):
        in_code ^= line.startswith("```")
        if line.startswith("#") and not in_code:
            found.append("")
        found[-1] += line
    return found


def mark(english: str) -> str:
    """The mark of what is made from an English section."""
    return f"<!-- README.md {hashlib.sha256(english.strip().encode()).hexdigest()[:12]} -->\n"


def kept(section: str) -> dict[str, Counter]:
    """What a section keeps in every language: its rank, its shape, its code and what it links to, each counted."""
    section = MARK.sub("", section)
    blocks, prose = re.findall(r"^```.*?^```", section, flags=re.MULTILINE | re.DOTALL), section
    for block in blocks:
        prose = prose.replace(block, "(code)")
    lines = prose.splitlines()
    links = re.findall(r"\]\(([^)]+)\)", prose)
    counted = {
        "rank of its heading": re.findall(r"^#+", prose),
        "paragraphs": ["one"] * len(re.findall(r"\n\n+(?=.)", prose)),
        "rows of tables": [f"one of {line.count('|') - 1} columns" for line in lines if line.startswith("|")],
        "list items": ["one" for line in lines if line.startswith("- ")],
        "numbers": re.findall(r"\d+(?:\.\d+)*", re.sub(r"`[^`\n]+`|\]\([^)]+\)", "", prose)),
        "code": [re.sub(r"<[^>\n]+>", "<…>", block) for block in blocks],  # a placeholder is translated
        "code in a line": set(re.findall(r"`([^`\n]+)`", prose)),
        # a heading's anchor is in the page's own language, and either page links to the other
        "links": ["#" if link[0] == "#" else re.sub(r"^README(\.zh)?\.md", "README", link) for link in links],
    }
    return {what: Counter(found) for what, found in counted.items()}


def differences(english: str, chinese: str) -> list[str]:
    """Where the translation is not in step, as sentences; empty where it is."""
    left, right = sections(english), sections(chinese)
    if len(left) != len(right):
        return [f"README.md has {len(left)} sections and README.zh.md {len(right)}."]
    found = []
    for ours, theirs in zip(left, right, strict=True):
        name = ours.splitlines()[0].strip("# ")
        if mark(ours) not in theirs:
            found.append(f'"{name}" has changed in README.md since it was translated.')
        one, other = kept(ours), kept(theirs)
        for what in one:
            for page, rest in (("README.md", one[what] - other[what]), ("README.zh.md", other[what] - one[what])):
                if rest:
                    found.append(f'"{name}", {what}: only in {page}: {", ".join(rest.elements())}.')
    return found


def stamp(english: str, chinese: str) -> str:
    """The Chinese page, each section that keeps what it should marked as made from the English one in its place."""
    left, right = sections(english), sections(chinese)
    if len(left) != len(right):
        return chinese
    return "".join(
        MARK.sub("", theirs).replace("\n", f"\n{mark(ours)}", 1) if kept(ours) == kept(theirs) else theirs
        for ours, theirs in zip(left, right, strict=True)
    )


def main(folder: Path = ROOT) -> int:
    """Stamp README.zh.md; 1 where it differs from README.md still, with sentences that say how."""
    english, path = (folder / "README.md").read_text(), folder / "README.zh.md"
    path.write_text(stamp(english, path.read_text()))
    left = differences(english, path.read_text())
    print("\n".join(left or ["README.zh.md is in step with README.md."]))
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
