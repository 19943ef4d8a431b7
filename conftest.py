"""Settings for every test of the course: the lessons in notebooks/ as well as the tests in tests/."""

pytest_plugins = ["tests.nbval_fixes"]


def pytest_terminal_summary(terminalreporter):
    """Name saved outputs and recorded figures that no longer belong to the code that stands there."""
    from helpers import notebooks

    stale = notebooks.stale(notebooks.lessons())
    if stale:
        terminalreporter.section("stale outputs")
        for sentence in stale:
            terminalreporter.line(sentence)
        terminalreporter.line("On a GPU, python -m helpers measure makes them anew. This fails no test.")
