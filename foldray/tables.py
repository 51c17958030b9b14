"""Lookup of table rows by name: foldray's own rows, and rows in a user's module."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from pydantic import PlainValidator

from foldray.errors import UserError

Row = TypeVar("Row")
OWN = "module:NAME"
"""The form in which a recipe names a row in a user's module."""
IMPORTABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Texts of this form."""


def find_row(field: str, table: Mapping[str, Row], kind: type[Row], name: str) -> Row:
    """Return a row of the table, or a row of the same kind that `module:NAME` names. The recipe's key `field` names the row."""
    if name in table:
        return table[name]
    legal = [*table, OWN]
    if not IMPORTABLE.fullmatch(name):
        raise UserError(field, name, "is not a legal value", legal)
    row = imported(field, name, legal)
    if not isinstance(row, kind):
        expected = f"{kind.__module__.rpartition('.')[0]}.{kind.__name__}"
        raise UserError(field, name, f"is a {type(row).__name__}, not a {expected}", legal)
    return row


def imported(field: str, name: str, legal: Iterable[str] | None = None) -> Any:
    """Import the object that `module:NAME` names."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise any exception while it is imported
        raise UserError(field, name, f"cannot be imported ({type(error).__name__}: {error})", legal) from None


class Refused(ValueError):
    """A UserError as a ValueError, because pydantic accepts only ValueErrors from a validator."""

    def __init__(self, error: UserError):
        super().__init__(error.rule)
        self.rule, self.legal = error.rule, error.legal or []


class Among(NamedTuple):
    """A validator for a text, which `find` refuses with a UserError. Without it, only the words are legal. Help lists them."""

    words: tuple[str, ...]
    find: Callable[[str], object] | None = None

    def __call__(self, value: Any) -> str:
        try:
            if self.find is not None and isinstance(value, str):
                self.find(value)
            elif value not in self.words:
                raise UserError("", value, "is not a legal value", self.words)
        except UserError as error:
            raise Refused(error) from None
        return value


def among(words: Iterable[str], find: Callable[[str], object] | None = None) -> PlainValidator:
    """Return an annotation for a pydantic field: a text that is one of these words, or a text that `find` accepts."""
    return PlainValidator(Among(tuple(words), find))  # type: ignore[arg-type] # mypy does not see that Among is callable
