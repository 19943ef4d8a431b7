"""Two processes of pytest tell what one would: every failure, and a status that is the worse of both."""

from helpers import ROOT
from tests import halves


def test_what_two_processes_say(tmp_path, capfd):
    texts = {
        "tests": "def test_unit(): pass\ndef test_other(): pass",
        "notebooks": "import pytest\ndef test_beside(): assert 0\n@pytest.mark.slow\ndef test_slow(): assert 0",
        "labs": "def test_lab(): pass",
        "solutions": "",
    }
    for folder, text in texts.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    assert halves.main(["-k", "unit or beside or lab"], tmp_path) == 1
    first, beside = (
        capfd.readouterr().out.split("1 failed, 1 passed, 1 deselected", 1)[0].split("1 passed, 1 deselected")
    )
    assert "test_beside" not in first and "test_beside - assert 0" in beside


def test_slow_tests_run_in_two_processes_too(tmp_path, capfd):
    (tmp_path / "tests").mkdir()
    text = "import pytest\n@pytest.mark.slow\ndef test_long(): assert {}\ndef test_quick(): assert 0"
    (tmp_path / "tests" / "test_mutants.py").write_text(text.format(0))
    (tmp_path / "tests" / "test_other.py").write_text(text.format(1))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    assert halves.main([], tmp_path, marks="slow") == 1
    first, beside = capfd.readouterr().out.split("1 passed, 1 deselected")
    assert "test_mutants" not in first and "1 failed, 1 deselected" in beside and "test_other" not in beside


def test_what_goes_beside_is_there():
    assert all((ROOT / name).exists() for names in halves.BESIDE.values() for name in names)


def test_no_test_chosen_of_one_half_is_no_failure():
    assert halves.worse(0, 5) == halves.worse(5, 0) == halves.worse(0, 0) == 0
    assert halves.worse(1, 5) == halves.worse(0, 1) == 1
    assert halves.worse(5, 5) == 5 and halves.worse(0, -9) == halves.worse(5, -9) == 1
