"""Judge an answer as a skeptic would: `check("row-softmax", row_softmax)` in a notebook, `judge` for everything else.

The answer's text runs in a child process (`helpers.stage`), which sends back what it left and never a verdict; that
is compared here, with references the child cannot see, after the child is dead.
"""

from .judge import Price, check_file, complete, crashed, judge, price, text_or_verdict, there, unread
from .notebook import NoSuchExercise, NotPassed, check, no_such, progress, remembered, requested, solution
from .verdict import Finding, Verdict

__all__ = [
    "Finding",
    "NoSuchExercise",
    "NotPassed",
    "Price",
    "Verdict",
    "check",
    "check_file",
    "complete",
    "crashed",
    "judge",
    "no_such",
    "price",
    "progress",
    "remembered",
    "requested",
    "solution",
    "text_or_verdict",
    "there",
    "unread",
]
