"""Labs are built from solutions, and nothing else: what is taken out, what is kept, what is refused."""

import re

import nbformat
import pytest

from helpers import ROOT, __main__, checks, exercises, labs, notebooks

PYTHON = """\
@triton.jit
def kernel(x):
    if x:
        ### BEGIN SOLUTION
        y = x + 1
        return y
        ### END SOLUTION


def wrapper(x):
    ### BEGIN SOLUTION
    return 2
    ### END SOLUTION
    return 1"""

CUDA = '''\
SOURCE = r"""
__global__ void f(float *x) {
    // ### BEGIN SOLUTION
    x[threadIdx.x] = 1;  // }
    // ### END SOLUTION
}
"""
OTHER = f"""
  ### BEGIN SOLUTION
  int a;
  ### END SOLUTION
"""
def g():
    return SOURCE  # a comment'''


def test_an_answer_gives_way_to_nbgraders_stub_at_its_indentation():
    assert labs.without_answers(PYTHON) == (
        """\
@triton.jit
def kernel(x):
    if x:
        # YOUR CODE HERE
        raise NotImplementedError()


def wrapper(x):
    # YOUR CODE HERE
    raise NotImplementedError()
    return 1""",
        2,
    )


def test_in_a_string_the_stub_is_for_a_c_compiler():
    text, regions = labs.without_answers(CUDA)
    assert regions == 2
    assert '{\n    // YOUR CODE HERE\n    #error "not implemented yet"\n}\n' in text
    assert 'f"""\n  // YOUR CODE HERE\n  #error "not implemented yet"\n"""' in text


def test_in_a_text_of_mojo_the_stub_is_for_its_compiler():
    text, regions = labs.without_answers(
        'M = r"""\ndef f():\n    # ### BEGIN SOLUTION\n    x\n    # ### END SOLUTION\n"""'
    )
    assert regions == 1
    assert text == 'M = r"""\ndef f():\n    # YOUR CODE HERE\n    comptime assert False, "not written yet"\n"""'


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f():\n    ### BEGIN SOLUTION\n    return 1", "do not come in pairs"),
        ("def f():\n    ### END SOLUTION\n    return 1\n    ### BEGIN SOLUTION", "do not come in pairs"),
        ("def f():\n    ### BEGIN SOLUTION\n    ### BEGIN SOLUTION\n    return 1", "do not come in pairs"),
        ("### BEGIN SOLUTION\nx = 1\n### END SOLUTION", "outside every function"),
        ("for i in range(3):\n    ### BEGIN SOLUTION\n    i\n    ### END SOLUTION", "outside every function"),
        ("class A:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION\n    def f(self): pass", "every function"),
        ("def f():\n    return 1  ### BEGIN SOLUTION\n    ### END SOLUTION", "stands alone on its line"),
        ("def f():\n    # BEGIN SOLUTION\n    return 1\n    # END SOLUTION", "stands alone on its line"),
        ("def f(:\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION", "it is not Python"),
        ("def f():\n### BEGIN SOLUTION\n    return 1\n### END SOLUTION", "with its answer taken out"),
        ('def f():\n    ### BEGIN SOLUTION\n    x = """\n    ### END SOLUTION\n    """', "begins in a string"),
    ],
)
def test_what_no_lab_can_be_made_of(source, why):
    with pytest.raises(labs.Unbuildable, match=why):
        labs.without_answers(source)


# ---- whole notebooks ----------------------------------------------------------------------------------------------


def meta(grade_id, **changed):
    nbgrader = {"grade": False, "grade_id": grade_id, "locked": False, "schema_version": 3, "solution": True}
    return {"nbgrader": {**nbgrader, "task": False, **changed}}


def solution():
    code, text = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    check = meta("double-check", grade=True, locked=True, points=1, solution=False)
    cells = [
        text("# Lab", id="x07-lab-1"),
        code("import helpers", id="x07-lab-2", metadata={"tags": ["hide"], "collapsed": True}),
        code(PYTHON, id="x07-double-1", metadata=meta("double")),
        code('check("double", double)', id="x07-double-2", metadata=check),
    ]
    for number, cell in enumerate(cells[1:], 1):
        cell.execution_count, cell.outputs = number, [nbformat.v4.new_output("stream", text="out\n")]
    made = {"helpers": {"code_hash": "0" * 16}}
    return nbformat.v4.new_notebook(cells=cells, metadata=made)


@pytest.fixture
def course(tmp_path):
    (tmp_path / "solutions").mkdir()
    notebooks.save(notebooks.normalise(solution()), tmp_path / "solutions" / "07_topic.ipynb")
    assert labs.main(check=False, root=tmp_path) == 0
    return tmp_path


def test_a_lab_keeps_ids_tags_and_nbgraders_metadata_and_no_outputs(course):
    lab, source = (nbformat.read(course / where / "07_topic.ipynb", as_version=4) for where in ("labs", "solutions"))
    assert [cell.id for cell in lab.cells] == [cell.id for cell in source.cells]
    assert [cell.metadata for cell in lab.cells] == [cell.metadata for cell in source.cells]
    assert lab.cells[1].metadata == {"tags": ["hide"]}
    assert [c.outputs for c in lab.cells[1:]] == [[]] * 3
    assert [c.execution_count for c in lab.cells[1:]] == [None] * 3
    assert "helpers" not in lab.metadata
    assert (course / "labs" / "07_topic.ipynb").read_text() == notebooks.dumps(notebooks.normalise(lab))


def test_a_cell_for_the_solution_only_is_in_no_lab():
    source = solution()
    source.cells[1].metadata["tags"] = ["solution-only"]
    assert [cell.id for cell in labs.built(source).cells] == ["x07-lab-1", "x07-double-1", "x07-double-2"]


def test_what_is_up_to_date_is_not_written_again(course, capsys):
    capsys.readouterr()
    before = (course / "labs" / "07_topic.ipynb").stat().st_mtime_ns
    assert labs.main(check=False, root=course) == labs.main(check=True, root=course) == 0
    assert (course / "labs" / "07_topic.ipynb").stat().st_mtime_ns == before
    assert capsys.readouterr().out == ""


def test_a_difference_is_named_by_file_and_cell(course, capsys):
    path = course / "labs" / "07_topic.ipynb"
    lab = nbformat.read(path, as_version=4)
    lab.cells[0].source = "# My lab"
    lab.cells[3].metadata.nbgrader.points = 2
    del lab.cells[1]
    nbformat.write(lab, path)
    capsys.readouterr()
    assert labs.main(check=True, root=course) == 1
    said = capsys.readouterr()
    assert said.out == (
        "labs/07_topic.ipynb is not what solutions/07_topic.ipynb makes: "
        "cells changed x07-lab-1, x07-double-2; added x07-lab-2.\n"
    )
    assert said.err == "Mend: python -m helpers labs\n"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda text: text + "\n", "its form, not its cells"),
        (lambda text: "{broken", "it is no notebook"),
        (None, "it is missing"),
    ],
)
def test_other_differences(course, capsys, edit, said):
    path = course / "labs" / "07_topic.ipynb"
    path.write_text(edit(path.read_text())) if edit else path.unlink()
    assert labs.main(check=True, root=course) == 1
    assert f"makes: {said}.\n" in capsys.readouterr().out
    assert labs.main(check=False, root=course) == labs.main(check=True, root=course) == 0


def test_a_file_without_a_solution_is_named_and_stays(course, capsys):
    extra = course / "labs" / "08_mine.ipynb"
    extra.write_text("{}")
    (course / "labs" / ".ipynb_checkpoints").mkdir()
    for check in (True, False):
        assert labs.main(check=check, root=course) == 1
        assert "labs/08_mine.ipynb has no source in solutions/" in capsys.readouterr().out
    assert extra.exists()


@pytest.mark.parametrize(
    ("cell", "changed", "why"),
    [
        (2, {"source": "x = 1"}, "cell x07-double-1: nbgrader's metadata make it a solution"),
        (2, {"metadata": {}}, "cell x07-double-1: it has a solution, but nbgrader's metadata do not say so"),
    ],
)
def test_a_solution_that_cannot_be_built_is_named_and_no_lab_written(course, capsys, cell, changed, why):
    broken = solution()
    broken.cells[cell].update(nbformat.from_dict(changed))
    notebooks.save(notebooks.normalise(broken), course / "solutions" / "07_topic.ipynb")
    before = (course / "labs" / "07_topic.ipynb").read_text()
    assert labs.main(check=False, root=course) == 1
    assert f"solutions/07_topic.ipynb: {why}" in capsys.readouterr().err
    assert (course / "labs" / "07_topic.ipynb").read_text() == before


def test_labs_are_not_what_is_saved_with_outputs():
    assert {path.parent.name for path in notebooks.lessons()} <= {"notebooks", "solutions"}


def test_the_course_holds_the_labs_that_its_solutions_make(capsys):
    assert __main__.main(["labs", "--check"]) == 0, capsys.readouterr()


# ---- the labs of the course ---------------------------------------------------------------------------------------

each_exercise = pytest.mark.parametrize("exercise", exercises.every().values(), ids=lambda exercise: exercise.name)
HINT = re.compile(r"<details><summary>Hint \d: [^<]+</summary>\n\n(.*?)\s*</details>", re.DOTALL)


def test_every_solution_has_exercises_three_of_them_core():
    """But for the last lab: that is one exercise, after all others."""
    core = {path.stem: 0 for path in labs.sources()}
    assert {exercise.lab for exercise in exercises.every().values()} == set(core)
    for exercise in exercises.every().values():
        core[exercise.lab] += exercise.core
    assert core.pop("12_choosing") == 0
    assert set(core.values()) == {3}


@each_exercise
def test_an_exercise_has_its_cells(exercise):
    """The answer and the check as nbgrader knows them, and beneath them the hints that a repeated finding offers."""
    cells = notebooks.read(ROOT / "solutions" / f"{exercise.lab}.ipynb").cells
    ids = [cell.metadata.get("nbgrader", {}).get("grade_id", "") for cell in cells]
    answer, check = (ids.index(name) for name in (exercise.name, f"{exercise.name}-check"))
    assert cells[answer].metadata["nbgrader"] == meta(exercise.name)["nbgrader"]
    graded = meta(f"{exercise.name}-check", grade=True, locked=True, points=exercise.points, solution=False)
    assert cells[check].metadata["nbgrader"] == graded["nbgrader"]
    assert cells[check].source == f'check("{exercise.name}", {exercise.entry})'
    beneath = next(cell for cell in cells[check:] if "<details>" in cell.source)
    assert tuple(HINT.findall(beneath.source)) == exercise.hints


@each_exercise
def test_an_unsolved_exercise_is_not_attempted(exercise):
    verdict = checks.check_file(exercise, ROOT / "labs" / f"{exercise.lab}.ipynb")
    assert (verdict.passed, verdict.kind) == (False, "not-attempted"), verdict
