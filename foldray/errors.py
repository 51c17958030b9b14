"""What a user did wrong, in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from foldray.urls import HIDDEN, told_without, without_secrets

_LONGEST = 1000  # characters of a rule, or of all legal values


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
        # A password would otherwise be in every log that keeps the line.
        self.field, self.value, self.rule = field, without_secrets(value) if isinstance(value, str) else value, told_without(rule)
        self.legal = None if legal is None else list(legal)
        super().__init__(field, self.value, self.rule, self.legal)

    def __str__(self) -> str:
        text = f"{_cut(self.field)}={_short(self.value)}: {_cut(self.rule, _LONGEST)}"
        if self.legal is not None:
            text += f"; legal: {_cut(', '.join(map(str, self.legal)), _LONGEST)}"
        return "".join(each if each.isprintable() else repr(each)[1:-1] for each in " ".join(text.split()))

    def __reduce__(self):
        return type(self), (self.field, self.value, self.rule, self.legal)


class MissingPackage(UserError):
    """An optional package was asked for and is not installed."""

    def __init__(self, field: str, value: Any, package: str, install: str):
        super().__init__(field, value, f"needs the package {package!r}, which is not installed; install it with: {install}")
        self._given = (field, self.value, package, install)

    def __reduce__(self):
        return type(self), self._given


def refuse_hidden(field: str, url: str) -> None:
    """Raise a UserError if a URL comes from a file that foldray wrote, without its secret."""
    if HIDDEN in url:
        raise UserError(
            field, url, f"stands here without its secret, which is written to no file; give {field} once more in full"
        )


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest of the known words, or nothing."""
    match = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def multiples_near(value: int, unit: int) -> list[int]:
    """The positive multiples of a unit next to a value, below and above it."""
    below = value - value % unit
    return [below, below + unit] if below > 0 else [unit]


def _short(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else without_secrets(str(value))
    except (ValueError, RecursionError):  # Python writes out no number of thousands of digits, and no list of such a depth
        return f"a {type(value).__name__} beyond all bounds"
    return _cut(repr(text) if text == "" or text != text.strip() else text)


def _cut(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
