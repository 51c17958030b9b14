"""argparse whose mistakes are one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from foldray.errors import UserError, nearest


class Parser(argparse.ArgumentParser):
    """Tells mistakes as UserErrors, with the legal values."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._given = args or ()
        given, rest = super().parse_known_args(args, namespace)
        if hasattr(given, "overrides"):
            # argparse fills a "*" argument from one place only; what stands behind an option is left over.
            given.overrides = given.overrides + [text for text in rest if not text.startswith("-")]
            rest = [text for text in rest if text.startswith("-")]
        if rest:
            options = [option for option in self._option_string_actions if option.startswith("--")]
            raise UserError("argument", rest[0], f"is not known to {self.prog}{nearest(rest[0], options)}", options)
        return given, rest

    def error(self, message: str) -> NoReturn:
        raise UserError("arguments", " ".join(self._given) or "nothing", f"{message}; see {self.prog} --help")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            raise UserError(action.option_strings[0], arg_string, "must be a whole number") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise UserError(action.dest, value, f"is not known{nearest(str(value), map(str, action.choices))}", action.choices)
