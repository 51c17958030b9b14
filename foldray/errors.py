"""Errors that report a user's mistake in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from foldray.urls import HIDDEN, told_without, without_secrets

_LONGEST = 1000  # characters of a rule, or of all legal values


class UserError(Exception):
    """A mistake that the user can correct. The message is one line with field, value, rule and legal values.

    The command line prints the message on stderr and exits with code 2, before it writes anything.

    Args:
        field: dotted name of the recipe key, or the command-line option.
        value: the value that the user gave.
        rule: the rule that the value breaks, as a statement about the value.
        legal: the legal values, if they can be listed.
    """

    def __init__(self, field: str, value: Any, rule: str, legal: Iterable[Any] | None = None):
        # Without this, a password would end up in every log that keeps the message.
        self.field, self.value, self.rule = field, without_secrets(value) if isinstance(value, str) else value, told_without(rule)
        self.legal = None if legal is None else list(legal)
        super().__init__(field, self.value, self.rule, self.legal)

    def __str__(self) -> str:
        text = f"{_cut(self.field)}={_short(self.value)}: {_cut(self.rule, _LONGEST)}"
        if self.legal is not None:
            text += f"; legal: {_cut(', '.join(map(str, self.legal)), _LONGEST)}"
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in " ".join(text.split()))

    def __reduce__(self):
        return type(self), (self.field, self.value, self.rule, self.legal)


class MissingPackage(UserError):
    """A recipe or an option needs an optional package that is not installed."""

    def __init__(self, field: str, value: Any, package: str, install: str):
        super().__init__(field, value, f"needs the package {package!r}, which is not installed; install it with: {install}")
        self._arguments = (field, self.value, package, install)

    def __reduce__(self):
        return type(self), self._arguments


def refuse_hidden(field: str, url: str) -> None:
    """Raise a UserError if a URL has lost its secret, because it comes from a file that foldray wrote."""
    if HIDDEN in url:
        raise UserError(field, url, f"lacks its secret, because foldray writes secrets to no file; give the whole {field} again")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` with the most similar known word, or an empty text if no word is similar."""
    match = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def multiples_near(value: int, unit: int) -> list[int]:
    """Return the positive multiples of a unit that are next to a value, below and above it."""
    below = value - value % unit
    return [below, below + unit] if below > 0 else [unit]


def _short(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else told_without(str(_hidden(value)))
    except (ValueError, RecursionError):  # Python refuses to print integers of thousands of digits, and very deep lists
        return f"a {type(value).__name__} that is too large to print"
    return _cut(repr(text) if text == "" or text != text.strip() else text)


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        return {key: _hidden(item) for key, item in value.items()}
    return type(value)(map(_hidden, value)) if type(value) in (list, tuple) else value


def _cut(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
