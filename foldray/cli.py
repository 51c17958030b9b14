"""The command line: it parses, and imports an upper floor inside the command that needs it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from foldray.errors import UserError, nearest
from foldray.fold import Fold, nearest_folds
from foldray.recipe import Recipe, describe

Command = Callable[[argparse.Namespace], int]

_MOST_RANKS = 2**17  # that `explain` shows: beyond, its tables take minutes and gigabytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 on success, 1 on a failure, 2 on a user's mistake (one line on stderr)."""
    try:
        given = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
        return given.run(given)
    except UserError as error:
        print(f"foldray: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("foldray: interrupted", file=sys.stderr)
        return 130


def train(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    from trainers.entry import train as run

    return run(recipe, resume=given.resume, as_json=given.json)


def submit(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    from trainers.jobs import submit as run

    return run(recipe, given.address, as_json=given.json, wait=not given.no_wait)


def explain(given: argparse.Namespace) -> int:
    sizes = {axis: getattr(given, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
    shown = given.world_size <= _MOST_RANKS
    try:
        if not shown:
            raise UserError("world_size", given.world_size, f"at most {_MOST_RANKS} ranks are shown")
        fold = Fold(given.world_size, **sizes, order=given.order, moe_order=given.moe_order)
    except UserError as error:
        near = nearest_folds(given.world_size, sizes) if shown else []
        if given.json:
            _print({"legal": False, "rule": error.rule, "nearest": near})
        if not near or error.field in ("order", "moe_order"):
            raise
        listed = "; ".join(" ".join(f"{axis}={size}" for axis, size in option.items()) for option in near)
        raise UserError(error.field, error.value, f"{error.rule}; nearest legal folds: {listed}") from None
    if given.json:
        _print(fold.as_dict())
        return 0
    print(f"{fold.world_size} ranks: {fold}")
    for view in ("attention", "moe"):
        print(f"\n{view}")
        for family, groups in fold.as_dict()[view]["groups"].items():
            print(f"  {family:7}" + " ".join("[" + " ".join(map(str, group)) + "]" for group in groups))
    return 0


class _Parser(argparse.ArgumentParser):
    """argparse whose mistakes are UserErrors: one line, with the legal values."""

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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="foldray", description="Trains Mixture-of-Experts models on Ray clusters, and hides their communication."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    command = _add(commands, "train", train, "train a recipe", epilog=_recipe_keys())
    _add_recipe(command)
    command.add_argument("--address", help="Ray cluster to join (cluster.address); else one is started on this machine")
    command.add_argument("--resume", metavar="RUN_ID", help="go on from the last checkpoint of a run in the same storage")

    command = _add(commands, "submit", submit, "send a recipe to a Ray cluster as a job, and follow its log")
    _add_recipe(command)
    command.add_argument("--address", required=True, help="the cluster's dashboard, as http://HOST:8265")
    command.add_argument("--no-wait", action="store_true", help="return once the job is accepted")

    command = _add(commands, "explain", explain, "show the groups of a fold, or why it is illegal and what is near")
    command.add_argument("--world-size", type=int, required=True, metavar="W", help="ranks")
    for axis, meaning in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert tensor")):
        command.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"{meaning} parallel size (default 1)")
    command.add_argument("--order", default="tp-cp-dp-pp", help="attention axes, fastest first (default %(default)s)")
    command.add_argument("--moe-order", default="etp-ep-edp-pp", help="expert axes, fastest first (default %(default)s)")
    return parser


def _add(commands: Any, name: str, run: Command, meaning: str, epilog: str | None = None) -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser(name, help=meaning, description=meaning, epilog=epilog, formatter_class=shape)
    command.add_argument("--json", action="store_true", help="print one JSON document on stdout; everything else goes to stderr")
    command.set_defaults(run=run)
    return command


def _add_recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", help="YAML file")
    command.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="changes to the recipe, such as fold.ep=4")


def _recipe_keys() -> str:
    rows = [(key, legal, default, meaning) for key, legal, default, meaning in describe()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 2)]
    lines = [
        f"  {key:{widths[0]}}  {default:{widths[1]}}  {meaning + ' ' if meaning else ''}({legal})"
        for key, legal, default, meaning in rows
    ]
    return "recipe keys, their defaults and their meaning:\n" + "\n".join(lines)


def _recipe(given: argparse.Namespace) -> Recipe:
    address = [f"cluster.address={given.address}"] if given.command == "train" and given.address else []
    return Recipe.load(given.recipe, [*given.overrides, *address])


def _print(document: Any) -> None:
    print(json.dumps(document))


if __name__ == "__main__":
    raise SystemExit(main())
