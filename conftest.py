"""Settings for every test of the course: the lessons in notebooks/ as well as the tests in tests/."""

import os

pytest_plugins = ["tests.nbval_fixes"]
os.environ.pop("HELPERS_ENDPOINT", None)  # no test asks a model that somebody pays for


def pytest_terminal_summary(terminalreporter):
    """Say which broken answers were caught by what, and which saved outputs and figures belong to other code."""
    from helpers import notebooks
    from tests import answers

    reports = terminalreporter.stats.get("passed", [])
    caught = [value for r in reports if r.when == "call" for name, value in r.user_properties if name == "caught"]
    if caught:
        terminalreporter.section("answers, and what caught the broken ones")
        for line in answers.table(caught):
            terminalreporter.line(line)

    # said once, though make test has two processes
    ran = any(r.nodeid.startswith("notebooks/") for r in reports)
    stale = notebooks.stale(notebooks.lessons()) if ran else []
    if stale:
        terminalreporter.section("stale outputs")
        for sentence in stale:
            terminalreporter.line(sentence)
        terminalreporter.line("On a GPU, python -m helpers measure makes them anew. This fails no test.")
