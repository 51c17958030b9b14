"""What a user did wrong, in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(Exception):
    """A mistake that the user can mend: field, value, rule, legal values, in one line.

    The command line prints it on stderr and exits with code 2; nothing has been written by then.

    Args:
        field: dotted name of the recipe key, or the command-line option.
        value: what was given.
        rule: the rule it breaks, as a statement.
        legal: the values that would have been accepted, where they can be listed.
    """

    def __init__(self, field: str, value: Any, rule: str, legal: Iterable[Any] | None = None):
        self.field, self.value, self.rule = field, value, rule
        self.legal = None if legal is None else list(legal)
        super().__init__(field, value, rule, self.legal)

    def __str__(self) -> str:
        text = f"{self.field}={_short(self.value)}: {self.rule}"
        if self.legal is not None:
            text += f"; legal: {', '.join(str(item) for item in self.legal)}"
        return " ".join(text.split())

    def __reduce__(self):
        return type(self), (self.field, self.value, self.rule, self.legal)


class MissingPackage(UserError):
    """An optional package was asked for and is not installed."""

    def __init__(self, field: str, value: Any, package: str, install: str):
        super().__init__(field, value, f"needs the package {package!r}, which is not installed; install it with: {install}")
        self._given = (field, value, package, install)

    def __reduce__(self):
        return type(self), self._given


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest of the known words, or nothing."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def multiples_near(value: int, unit: int) -> list[int]:
    """The positive multiples of a unit next to a value, below and above it."""
    below = value - value % unit
    return [below, below + unit] if below > 0 else [unit]


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value) if value == "" or (isinstance(value, str) and value != value.strip()) else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
