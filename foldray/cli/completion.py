"""What a shell offers when somebody presses TAB: commands, options and their values, files, and the keys of a recipe.

argcomplete asks the parser. `foldray completion SHELL` prints a script, with which the shell starts foldray for each TAB.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from foldray.blueprint import PRESETS
from foldray.costs.hardware import known_hardware
from foldray.errors import MissingPackage
from foldray.recipe.reading import describe
from foldray.recipe.recipe import Recipe
from foldray.tables import OWN

_TYPES = ("int", "float", "str", OWN, "KEY=VALUE")  # in the list of a key's values, these stand for values that nobody can list
ASKED = "_ARGCOMPLETE"
"""The variable of the environment with which argcomplete's script asks."""


def script(shell: str) -> str:
    """Return the script that a shell reads, such as in `~/.bashrc`."""
    return _argcomplete(shell).shellcode(["foldray"], shell=shell)


def answer(parser: argparse.ArgumentParser) -> None:
    """Write the completions that a shell asks for, and end the process."""
    argcomplete = _argcomplete(os.environ.get("_ARGCOMPLETE_SHELL", "bash"))
    yaml, any_file = argcomplete.FilesCompleter(("yaml", "yml")), argcomplete.FilesCompleter()
    completers: dict[str, Callable[..., Iterable[str]]] = {
        "recipe": yaml,
        "overrides": lambda prefix, **_: overrides(prefix),
        "model": lambda **_: PRESETS,
        "cluster": lambda prefix, **given: [*known_hardware(), *yaml(prefix, **given)],
    }
    for action in _actions(parser):
        action.completer = completers.get(action.dest, any_file)  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, default_completer=None)


def overrides(prefix: str) -> list[str]:
    """Return the changes to a recipe that begin with a text: keys with `=`, or one key with each value that can be listed."""
    key, equals, _ = prefix.partition("=")
    legal = {row[0]: _words(row[1]) for row in describe(Recipe)} | {"model.preset": [*PRESETS]}
    changes = [f"{key}={word}" for word in legal.get(key, ())] if equals else [f"{name}=" for name in legal]
    return [change for change in changes if change.startswith(prefix)]


def _words(legal: str) -> list[str]:
    return [word for word in legal.split("|") if word and " " not in word and word not in _TYPES]


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        elif action.choices is None and action.nargs != 0:
            yield action


def _argcomplete(shell: str) -> Any:
    try:
        import argcomplete
        import argcomplete.completers
    except ModuleNotFoundError:
        raise MissingPackage("completion", shell, "argcomplete", "pip install argcomplete") from None
    return argcomplete
