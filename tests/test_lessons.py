"""What every lesson, lab and solution keeps to: canonical form, readable ids, no measured number, sound links."""

import re
from pathlib import Path

import nbformat
import pytest

from helpers import ROOT, exercises, notebooks

LESSONS = [*notebooks.lessons(), *sorted((ROOT / "labs").glob("*.ipynb"))]
each_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: f"{path.parent.name}-{path.stem}")
PAGES = [p for p in [*LESSONS, *ROOT.glob("*.md"), *(ROOT / "notebooks").glob("*.md")] if p.exists()]


def read(path: Path):
    return nbformat.read(path, as_version=4)


def prose(path: Path) -> str:
    """The Markdown of a page, without its code blocks."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@each_lesson
def test_saved_in_canonical_form(path):
    """Mended by `python -m helpers tidy NOTEBOOK`."""
    assert path.read_text() == notebooks.dumps(notebooks.normalise(read(path))), f"python -m helpers tidy {path}"


@each_lesson
def test_cell_ids_name_the_lesson_and_the_place(path):
    """l for a lesson, x for a lab."""
    number, letter = path.name[:2], "l" if path.parent.name == "notebooks" else "x"
    ids = [cell.id for cell in read(path).cells]
    assert len(set(ids)) == len(ids)
    odd = [i for i in ids if not re.fullmatch(rf"{letter}{number}-[a-z0-9]+(-[a-z0-9]+)*", i)]
    assert not odd, f"such as {letter}{number}-softmax-3, not {odd}"


@each_lesson
def test_the_first_code_cell_starts_helpers_before_triton(path):
    first = next(cell.source for cell in read(path).cells if cell.cell_type == "code")
    lines = [line for line in first.splitlines() if line.strip()]
    assert lines[:2] == ["import helpers", "helpers.start()"]


@each_lesson
def test_no_output_is_an_error_a_warning_or_noise(path):
    for cell in read(path).cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error" or "raises-exception" in cell.metadata.get("tags", []), cell.id
            assert output.get("name") != "stderr", f"{cell.id}: {output.text}"


NUMBER = r"(?<![\w.])\d[\d.,]*\s*"
MEASURED = re.compile(
    rf"{NUMBER}(?:[TG]FLOP/s|[TG]FLOPS\b|[TGM]i?B/s|µs\b|us\b|ms\b)"
    rf"|{NUMBER}(?:×|x|times)\s*(?:faster|slower|the speed|speedup)"
    rf"|{NUMBER}(?:%|percent)\s+(?:of|faster|slower)\s+(?:the\s+)?(?:peak|cuBLAS|cuDNN|torch|copy|floor|roof|datasheet)"
)
SOURCED = re.compile(r"datasheet|article|threshold|\bsuppose\b|predict", re.IGNORECASE)
"""A paragraph that has one of these words quotes a specification or a claim, states a rule, or asks for a guess."""


def measured_numbers(text: str) -> list[str]:
    """Numbers in prose that look like results of a measurement: with a unit of rate or time, or a ratio of speeds."""
    paragraphs = (p for p in text.split("\n\n") if not SOURCED.search(p))
    return [found.group() for p in paragraphs for found in MEASURED.finditer(p)]


@each_lesson
def test_prose_holds_no_measured_number(path):
    assert not measured_numbers(prose(path)), "a number that was measured is a cell's output (records.figures)"


def test_what_counts_as_a_measured_number():
    assert measured_numbers("It ran in 34.2 µs, at 4.1 TB/s.") == ["34.2 µs", "4.1 TB/s"]
    assert measured_numbers("This is 2.3x faster, 91 % of cuBLAS.") == ["2.3x faster", "91 % of cuBLAS"]
    assert not measured_numbers("The datasheet says 4.8 TB/s.")
    assert not measured_numbers("A warp has 32 threads, a tile 128 × 64 elements, a row 8192 bytes: 1.5 GB.")


LINK = re.compile(r"\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_links_lead_somewhere(path):
    broken = []
    for target in filter(None, (a or b for a, b in LINK.findall(prose(path)))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name) if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def anchors(path: Path) -> set[str]:
    """The anchors that a page's headings make: words in lower case, joined by hyphens."""
    headings = re.findall(r"^#+\s+(.+?)\s*$", prose(path), flags=re.MULTILINE)
    found = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
    return found | {h.replace(" ", "-") for h in headings} | set(re.findall(r"id=\"([^\"]+)\"", prose(path)))


@each_lesson
def test_lessons_link_only_to_what_is_copied_into_work(path):
    """In work/notebooks a link such as ../helpers/x.py would lead nowhere."""
    targets = {(a or b).partition("#")[0] for a, b in LINK.findall(prose(path))}
    local = {t for t in targets if t and not re.match(r"[a-z]+:", t)}
    outside = {
        t for t in local if t.startswith("../") and not t.startswith(("../labs/", "../notebooks/", "../README.md"))
    }
    assert not outside


# ---- README's tables say what the notebooks' first cells say ------------------------------------------------------

README = (ROOT / "README.md").read_text()
SHOWN = [path for path in LESSONS if path.parent.name != "solutions"]


def number(path: Path) -> str:
    """Of "12_2_dispatcher.ipynb" 12_2."""
    return re.match(r"\d\d(_\d)?", path.name)[0]


def opening(path: Path) -> str:
    return read(path).cells[0].source


def minutes(path: Path, core: bool = False) -> int:
    """What the first cell says that a lesson or lab takes; 0 where it says nothing of a lab's core exercises."""
    text = opening(path).replace("about two hours", "about 120 minutes")
    found = re.search(r"core exercises (?:take )?about (\d+)" if core else r"about (\d+)\s+minutes", text)
    return int(found[1]) if found else 0


def hardware(path: Path) -> str:
    """The part of the first cell that follows the word."""
    return re.search(r"\*\*Hardware[:.]?\*\*(.*?)(?=\*\*|\Z)", opening(path), re.DOTALL)[1]


def machines(lesson: Path) -> str:
    """One row of README's table: a lesson and its lab by their rung, exercises, minutes, and what they need."""
    lab = ROOT / "labs" / lesson.name
    asked = [e for e in exercises.every().values() if e.lab == lesson.stem]
    said = [hardware(path) for path in (lesson, lab) if path.exists()]
    assert all(re.search(r"CPU mode|\bnone\b|^\W*None", one) for one in said), f"{lesson}: does it run without a GPU?"
    needs = [f"in part {word}" for word, sign in (("Hopper", r"Hopper|sm_90"), ("8.9", r"8\.9"))
             if any(re.search(sign, one) for one in said)]  # fmt: skip
    rungs = ", ".join(dict.fromkeys(e.rung for e in asked))
    gpu = "none" if all(re.match(r"\W*None\.", one) for one in said) else "; ".join(["T4 or later", *needs])
    left = ", ".join(f"`{e.name}`" for e in asked if e.needs)
    cells = [number(lesson), rungs or "all", gpu, f"all but {left}" if left else "all"]
    if asked:
        core, whole = minutes(lab, core=True), str(minutes(lab))
        first = ", ".join(f"`{e.name}`" for e in asked if e.core)
        cells += [
            f"[{len(asked)}](labs/{lab.name})" + f": {first}" * bool(first),
            f"{whole}, core {core}" if core else whole,
        ]
    else:
        cells += ["", ""]
    return " | ".join(["", *cells, ""]).strip()


def test_the_readme_lists_every_lesson_and_lab():
    readme = prose(ROOT / "README.md")
    names = {f"{path.parent.name}/{path.name}" for path in SHOWN}
    assert not {name for name in names if f"]({name})" not in readme}


@pytest.mark.parametrize("path", notebooks.lessons(), ids=lambda path: path.stem)
def test_the_readme_has_a_lesson_s_minutes(path):
    if path.parent.name == "notebooks":
        [row] = [line for line in README.splitlines() if line.startswith("| [") and f"](notebooks/{path.name})" in line]
        assert row.split("|")[-2].strip() == str(minutes(path)), row


def test_the_readme_s_table_of_labs_and_machines_is_what_the_notebooks_say():
    """Mended by pasting the rows that are expected."""
    rows = [line for line in README.splitlines() if re.match(r"\| \d\d(_\d)? \|", line)]
    expected = [machines(path) for path in SHOWN if path.parent.name == "notebooks"]
    assert rows == expected, "\n".join(["README's table should be:", *expected])


def test_a_syllabus_fits_into_its_hours():
    """Whole lessons, labs, and core exercises of labs, as `01`, `lab 05`, `lab 05 (core)`."""
    rows = re.findall(r"^\| (\d) hours \| ([^|]+) \| (\d+) \|", README, re.MULTILINE)
    assert [int(hours) for hours, *_ in rows] == [2, 4, 8]
    for hours, plan, said in rows:
        total = 0
        for lab, which, core in re.findall(r"(lab )?\b(\d\d)\b( \(core\))?", plan):
            [path] = (ROOT / ("labs" if lab else "notebooks")).glob(f"{which}_[a-z]*.ipynb")
            total += minutes(path, core=bool(core))
        assert total == int(said) <= 60 * int(hours), (hours, total)
