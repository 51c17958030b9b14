"""Rows of tables, by name: those that foldray has, and those that stand in a module of the user's."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from pydantic import PlainValidator

from foldray.errors import UserError

Row = TypeVar("Row")
OWN = "module:NAME"
"""How a row of the user's is named."""
_IMPORTABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def find_row(field: str, table: Mapping[str, Row], kind: type[Row], name: str) -> Row:
    """A row of the table, or one of the same kind by `module:NAME`.

    Args:
        field: the recipe key that names it.

    Raises:
        UserError: there is none.
    """
    if name in table:
        return table[name]
    legal = [*table, OWN]
    if not _IMPORTABLE.fullmatch(name):
        raise UserError(field, name, "is none of the legal values", legal)
    found = imported(field, name, legal)
    if not isinstance(found, kind):
        whole = f"{kind.__module__.rpartition('.')[0]}.{kind.__name__}"
        raise UserError(field, name, f"is a {type(found).__name__}, not a {whole}", legal)
    return found


def imported(field: str, name: str, legal: Iterable[str] | None = None) -> Any:
    """What `module:NAME` names.

    Raises:
        UserError: it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module that is imported may raise anything
        raise UserError(field, name, f"cannot be imported ({type(error).__name__}: {error})", legal) from None


class Refused(ValueError):
    """What pydantic is told of a UserError."""

    def __init__(self, error: UserError):
        super().__init__(error.rule)
        self.rule, self.legal = error.rule, error.legal or []


class Among(NamedTuple):
    """Checks a text that is one of some words, which help texts list.

    Args:
        words: what is listed.
        find: raises a UserError for what is not legal; None takes the words alone.
    """

    words: tuple[str, ...]
    find: Callable[[str], object] | None = None

    def __call__(self, given: Any) -> str:
        try:
            if self.find is not None and isinstance(given, str):
                self.find(given)
            elif given not in self.words:
                raise UserError("", given, "is none of the legal values", self.words)
        except UserError as error:
            raise Refused(error) from None
        return given


def among(words: Iterable[str], find: Callable[[str], object] | None = None) -> PlainValidator:
    """For a type: a text that is one of these words, or that `find` does not refuse."""
    return PlainValidator(Among(tuple(words), find))  # type: ignore[arg-type] # mypy does not see that it can be called
