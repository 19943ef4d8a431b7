"""Judge an answer as a skeptic would: `check("row-softmax", row_softmax)` in a notebook, `judge` for everything else.

The answer's text runs in a child process (`helpers.stage`), which sends back what it left and never a verdict; that
is compared here, with references the child cannot see, after the child is dead.
"""

from .judge import check_file, judge
from .notebook import NoSuchExercise, NotPassed, check, no_such, progress, remembered, solution
from .verdict import Finding, Verdict

__all__ = [
    "Finding",
    "NoSuchExercise",
    "NotPassed",
    "Verdict",
    "check",
    "check_file",
    "judge",
    "no_such",
    "progress",
    "remembered",
    "solution",
]
