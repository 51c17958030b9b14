"""What commands share: the recipe of a command, ranges of numbers, and standard output."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from foldray.errors import UserError
from foldray.kinds import RECOMPUTABLE
from foldray.recipe import Recipe

MOST_RANKS = 2**17  # limit of `explain` and `plan`: tables of more ranks take minutes and gigabytes


def recipe_of(given: argparse.Namespace) -> Recipe:
    """Return the recipe that the arguments name, with its changes."""
    changes = {
        "cluster.address": getattr(given, "joined", None), "model.router.skew": getattr(given, "skew", None),
        "model.router.shares": shares_of(given), "engine.offload": "optimizer" if getattr(given, "offload", False) else None,
        "moe.copies": getattr(given, "copies", None), "schedule.offload": list(offloaded(given)) or None,
    }  # fmt: skip
    changed = [f"{key}={value}" for key, value in changes.items() if value is not None]
    return Recipe.load(given.recipe, [*given.overrides, *changed])


def offloaded(given: argparse.Namespace) -> tuple[str, ...]:
    """Return the kinds of operations that a command has keep on the host what they need (`--offload-activations`)."""
    kinds = tuple(filter(None, (getattr(given, "offload_activations", None) or "").split(",")))
    for kind in kinds:
        if kind not in RECOMPUTABLE or kinds.count(kind) > 1:
            raise UserError("offload_activations", kind, "must be operations, each of them once, with commas", RECOMPUTABLE)
    return kinds


def shares_of(given: argparse.Namespace) -> list[float] | None:
    """Return the shares of experts by the routes that a command names (`--routes`); None without."""
    if getattr(given, "routes", None) is None:
        return None
    from trainers.routes.recorded import Recorded

    return list(Recorded(given.routes, "routes").typical_shares())


def check_range(given: argparse.Namespace, **most: int) -> None:
    """Raise a UserError for a size outside 1 … limit. Larger sizes would exhaust the machine before another check."""
    for name, limit in most.items():
        value = getattr(given, name)
        if value is not None and not 1 <= value <= limit:
            raise UserError(name, value, f"must be at least 1, and at most {limit}")


def say_json(document: Any) -> None:
    """Print a document for programs."""
    say(json.dumps(document))


def say_either(given: argparse.Namespace, document: Callable[[], Any], text: Callable[[], str]) -> int:
    """Print a document with `--json`, else a text. Return the exit code of a success."""
    if given.json:
        say_json(document())
    else:
        say(text())
    return 0


def say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        say_nothing_more()


def say_nothing_more() -> None:
    """Turn off standard output, because its reader stopped, as `| head` does. Otherwise Python reports the error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
