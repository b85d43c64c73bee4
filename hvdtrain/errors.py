"""Errors that a user can mend.

Anything else that is raised is a defect of ours (or of the user's code) and keeps its traceback.
"""

from __future__ import annotations

from typing import Self


class HvdtrainError(Exception):
    """Something failed: what was found and where in ``message``, what to type in ``hint``."""

    exit_code = 1
    #: whether every rank raises this very error at the same point: then the primary speaks for all, and nobody need be aborted
    on_all_ranks = False

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)  # both: what pickle gives to a copy
        self.message = message
        self.hint = hint

    def everywhere(self) -> Self:
        """This error, marked as raised by every rank alike."""
        self.on_all_ranks = True
        return self

    def __str__(self) -> str:
        return f"{self.message}\nHint: {self.hint}" if self.hint else self.message


class UsageError(HvdtrainError):
    """The command line, a recipe or an input file asks for what cannot be (exit code 2)."""

    exit_code = 2


class JobError(HvdtrainError):
    """A launched job failed; ``exit_code`` is the job's own."""

    def __init__(self, message: str, hint: str = "", *, exit_code: int = 1) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


def shown(text: str, limit: int = 80) -> str:
    """Text of the user's as it may stand in a message: one line, printable, not endless."""
    text = text[: limit + 1]
    if not text.isprintable():
        text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
