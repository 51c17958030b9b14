"""The command line: it parses, and imports an upper floor inside the command that needs it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foldray.arguments import Parser
from foldray.drawing import explanation
from foldray.errors import MissingPackage, UserError
from foldray.fold import Fold, Placement, best_order, nearest_disjoint, nearest_folds
from foldray.recipe import Recipe, describe
from foldray.schedule import SLICINGS, SliceCost, Slicing, slice_sequence

Command = Callable[[argparse.Namespace], int]

_AXES = ("tp", "cp", "pp", "ep", "etp")
_MOST_RANKS = 2**17  # that `explain` shows: beyond, its tables take minutes and gigabytes
_ORDERS = ("tp-cp-dp-pp", "etp-ep-edp-pp")  # legal whatever the sizes


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
    from trainers.driver.entry import train as run

    return run(recipe, resume=given.resume, start=given.start, as_json=given.json, search=_search(recipe))


def _search(recipe: Recipe) -> Any:
    """What finds what a recipe leaves open."""
    if not recipe.schedule.opened:
        return None
    from tuners import OnlineSearch

    return OnlineSearch


def submit(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    from trainers.cluster.jobs import submit as run

    return run(recipe, given.address, as_json=given.json, wait=not given.no_wait)


def verify(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    from trainers.measure.verify import verify as run

    return run(recipe, shrink=given.shrink, as_json=given.json)


def bench(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    from trainers.measure.bench import bench as run

    return run(recipe, given.schedules, given.rounds, as_json=given.json)


def timeline(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    from trainers.measure.bench import timeline as run

    return run(recipe, given.picture, given.trace, as_json=given.json)


def tune(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    return _tuners(given).tune(recipe, as_json=given.json)


def dashboard(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    return _tuners(given).dashboard(recipe, given.host, given.port)


def _tuners(given: argparse.Namespace) -> Any:
    try:
        from tuners import entry
    except ModuleNotFoundError as error:
        name = error.name or "optuna"
        raise MissingPackage("command", given.command, name, f"pip install {name.replace('_', '-')}") from None
    return entry


def explain(given: argparse.Namespace) -> int:
    fold = _legal_fold(given)
    if given.best_order and given.ranks_per_node is None:
        raise UserError("best_order", "asked for", "needs --ranks-per-node: which groups fit into a node depends on it")
    nodes = None if given.ranks_per_node is None else Placement(fold, given.ranks_per_node)
    best = Placement(best_order(fold, nodes.ranks_per_node), nodes.ranks_per_node) if nodes and given.best_order else None
    if given.picture:
        _draw_into(given.picture, lambda path: _fold_picture(fold, given.ranks_per_node, path))
    if given.json:
        document = fold.as_dict() | ({"placement": nodes.as_dict()} if nodes else {})
        if best:
            document["best"] = {"order": best.fold.order, "moe_order": best.fold.moe_order, "score": best.score()}
        _print(document)
    else:
        _say(explanation(fold, nodes, best))
    return 0


def calibrate(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    from trainers.measure.calibrate import calibrate as run

    return run(recipe, given.out, as_json=given.json)


def plan(given: argparse.Namespace) -> int:
    from foldray.planner import hardware, report, score

    machines = hardware.load_hardware(given.cluster)
    if given.fit:
        return _fit(given, machines)
    if given.score:
        scored = score.score(score.read_rows(given.score), machines)
        _say(json.dumps(report.scores(scored)) if given.json else report.score_table(scored))
        return 0
    from foldray.planner import search

    found = search.search(_space(given, machines), given.top)
    if given.picture:
        _draw_into(given.picture, lambda path: _plan_picture(found, machines, path))
    _say(json.dumps(report.document(found.best)) if given.json else report.table(found, machines))
    return 0


def _fit(given: argparse.Namespace, machines: Any) -> int:
    """Constants from published rows, and the errors that they leave, on these rows and on each by the others'."""
    from foldray.planner import report, score

    rows = score.read_rows(given.fit)
    found = score.fit(rows, machines)
    scored, apart = score.score(rows, machines, found), list(score.left_out(rows, machines))
    if given.json:
        _print({"constants": found, "mape": score.mape(scored), "mape_left_out": score.mape(apart)})
    else:
        _say("\n\n".join([report.constants_table(found), report.score_table(scored), "each row by the others' constants:",
                          report.score_table(apart)]))  # fmt: skip
    return 0


def _space(given: argparse.Namespace, machines: Any) -> Any:
    """What `foldray plan` is to search."""
    from foldray.blueprint import ModelSpec
    from foldray.planner.candidate import Job
    from foldray.planner.space import Space

    for name in ("model", "gpus", "seq_len", "global_batch"):
        if getattr(given, name) is None:
            raise UserError(name, "nothing", "is needed unless published rows are scored (--score, --fit)")
    _check_range(given, gpus=_MOST_RANKS, seq_len=2**24, global_batch=2**20, top=1000, **dict.fromkeys(_AXES, _MOST_RANKS))
    job = Job(ModelSpec.model_validate({"preset": given.model}), given.seq_len, given.global_batch, given.dtype)
    machines.peak(given.dtype)
    pins = {axis: getattr(given, axis) for axis in _AXES if getattr(given, axis) is not None}
    return Space(job, machines, given.gpus, pins, {"zero1": 1, "zero3": 3}[given.sharding])


def _check_range(given: argparse.Namespace, **most: int) -> None:
    """Sizes beyond these would take the machine along before anybody could say that they cannot be."""
    for name, limit in most.items():
        value = getattr(given, name)
        if value is not None and not 1 <= value <= limit:
            raise UserError(name, value, f"must be at least 1, and at most {limit}")


def _plan_picture(found: Any, machines: Any, path: Path) -> None:
    from trainers.pictures.plan import draw_plan

    draw_plan(found, machines, path)


def slice_(given: argparse.Namespace) -> int:
    _check_range(given, seq_len=2**24, degree=2**8, multiple_of=2**24, hidden=2**20, heads=2**14)
    cost = SliceCost.of_model(given.hidden, given.heads)
    found = slice_sequence(given.kind, given.seq_len, given.degree, cost, given.multiple_of)
    if given.json:
        _print({"attention_slices": found.attention, "moe_micro_batches": found.moe})
    else:
        _say(_slices(found, cost))
    return 0


def _slices(slicing: Slicing, cost: SliceCost) -> str:
    """A table: what each slice has of the sequence, and of attention's cost."""
    costs = cost.slices(slicing.attention)
    lines = [f"{slicing.length} tokens, degree {slicing.degree}", "", f"{'':>6}{'slice':>10}{'cost':>9}   {'micro-batch':>11}"]
    for number, (tokens, seconds, rows) in enumerate(zip(slicing.attention, costs, slicing.moe, strict=True)):
        share = seconds / sum(costs)
        lines.append(f"{number:>6}{tokens:>10}{share:>9.1%}   {rows:>11}  {'█' * round(40 * share)}")
    even = cost.slices(slicing.moe)
    return "\n".join([*lines, "", f"slowest slice: {max(costs) / max(even):.3f} of the slowest of equal slices"])


def _legal_fold(given: argparse.Namespace) -> Fold:
    """The fold that was asked for; a refused one is told together with its neighbours that are legal."""
    sizes = {axis: getattr(given, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
    apart = {"expert_ranks": given.expert_ranks, "expert_pp": given.expert_pp}
    shown = given.world_size <= _MOST_RANKS
    try:
        if not shown:
            raise UserError("world_size", given.world_size, f"at most {_MOST_RANKS} ranks are shown")
        return Fold(given.world_size, **sizes, order=given.order, moe_order=given.moe_order, **apart)
    except UserError as error:
        near = nearest_folds(given.world_size, sizes) if shown and not given.expert_ranks else []
        if shown and given.expert_ranks:
            wanted = {**sizes, "expert_pp": given.expert_pp or given.pp}
            near = nearest_disjoint(given.world_size, given.expert_ranks, wanted)
        ordered = error.field in ("order", "moe_order")
        if given.json:
            orders = {"order": _ORDERS[0], "moe_order": _ORDERS[1]} if ordered else {}
            _print({"legal": False, "rule": error.rule, "nearest": [{**option, **orders} for option in near]})
        if not near or ordered:
            raise
        legal = "; ".join(" ".join(f"{axis}={size}" for axis, size in option.items()) for option in near)
        raise UserError(error.field, error.value, f"{error.rule}; nearest legal folds: {legal}") from None


def _fold_picture(fold: Fold, ranks_per_node: int | None, path: Path) -> None:
    from trainers.pictures.fold import draw_fold

    draw_fold(fold, path, ranks_per_node)


def _draw_into(path: str, draw: Callable[[Path], None]) -> None:
    """Write a PNG."""
    if Path(path).suffix.lower() != ".png":
        raise UserError("picture", path, "is written as PNG: the name must end in .png")
    try:
        draw(Path(path))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise MissingPackage("picture", path, "matplotlib", "pip install matplotlib") from None
    except OSError as error:
        raise UserError("picture", path, f"cannot be written ({error.strerror or error})") from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="foldray", description="Trains Mixture-of-Experts models on Ray clusters, and hides their communication."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    command = _add(commands, "train", train, "train a recipe", epilog=_recipe_keys())
    _add_recipe(command, joins=True)
    begin = command.add_mutually_exclusive_group()
    begin.add_argument("--resume", metavar="RUN_ID", help="go on from the last checkpoint of a run in the same storage")
    begin.add_argument("--from", dest="start", metavar="PATH", help="begin a new run at a checkpoint: …/RUN_ID/step_XXXXXXXX")

    command = _add(commands, "submit", submit, "send a recipe to a Ray cluster as a job, and follow its log")
    _add_recipe(command)
    command.add_argument("--address", required=True, help="the cluster's dashboard, as http://HOST:8265")
    command.add_argument("--no-wait", action="store_true", help="return once the job is accepted")

    command = _add(commands, "verify", verify, "compare a recipe's fold with one process: loss, every gradient")
    _add_recipe(command, joins=True)
    command.add_argument("--shrink", action="store_true", help="make the model as small as the fold allows")

    command = _add(commands, "bench", bench, "measure schedules side by side on this machine or cluster")
    _add_recipe(command, joins=True)
    command.add_argument(
        "--schedule", dest="schedules", action="append", default=[], metavar="KIND:DEGREE[:LAG]", help="one to measure; repeat it"
    )
    command.add_argument("--rounds", type=int, default=7, metavar="N", help="in which all take turns (default %(default)s)")

    command = _add(commands, "timeline", timeline, "draw what computes and what travels in a step, measured and simulated")
    _add_recipe(command, joins=True)
    command.add_argument("--picture", type=Path, metavar="FILE.png", help="also draw it into a PNG")
    command.add_argument("--trace", type=Path, metavar="FILE.json", help="also write a trace for Perfetto (ui.perfetto.dev)")

    command = _add(commands, "tune", tune, "find the fastest way to train a recipe, by measuring on its workers",
                   epilog=_recipe_keys(tuning=True))  # fmt: skip
    _add_recipe(command, joins=True)

    command = _add(commands, "dashboard", dashboard, "serve the Optuna dashboard of a recipe's study")
    _add_recipe(command)
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    command.add_argument("--port", type=int, default=8080, metavar="N", help="(default %(default)s)")

    command = _add(commands, "plan", plan, "rank the folds and schedules for a model on a cluster by predicted step time")
    command.add_argument("--model", help="a named model, such as mixtral-8x22b")
    command.add_argument(
        "--cluster", required=True, metavar="NAME", help="a known cluster, or a YAML file of `foldray calibrate`"
    )
    for name, meaning in (("gpus", "GPUs"), ("seq-len", "tokens of a sequence"), ("global-batch", "sequences of a step")):
        command.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    for axis in _AXES:
        command.add_argument(f"--{axis}", type=int, metavar="N", help=f"settle {axis}; else all legal sizes are tried")
    command.add_argument("--dtype", default="bf16", help="of weights and activations (default %(default)s)")
    command.add_argument("--sharding", choices=("zero1", "zero3"), default="zero1", help="of optimizer, or of everything")
    command.add_argument("--top", type=int, default=10, metavar="K", help="how many to show (default %(default)s)")
    command.add_argument("--picture", metavar="FILE.png", help="also draw time against memory into a PNG")
    command.add_argument("--score", type=Path, metavar="FILE.csv", help="predict published rows instead, and print the errors")
    command.add_argument("--fit", type=Path, metavar="FILE.csv", help="find the planner's constants from published rows instead")

    command = _add(commands, "calibrate", calibrate, "measure a recipe's workers, and write the planner's hardware file")
    _add_recipe(command, joins=True)
    command.add_argument("--out", type=Path, required=True, metavar="FILE.yaml", help="the file to write")

    command = _add(commands, "slice", slice_, "show how a sequence is cut for attention and for the experts")
    for name, meaning in (
        ("seq-len", "tokens"),
        ("degree", "pieces"),
        ("hidden", "the model's width"),
        ("heads", "attention heads"),
    ):
        command.add_argument(f"--{name}", type=int, required=True, metavar="N", help=meaning)
    command.add_argument("--kind", choices=SLICINGS, default="time_uniform", help="how attention is cut (default %(default)s)")
    command.add_argument("--multiple-of", type=int, default=1, metavar="N", help="every length is a multiple of N (default 1)")

    command = _add(commands, "explain", explain, "show the groups of a fold, or why it is illegal and what is near")
    command.add_argument("--world-size", type=int, required=True, metavar="W", help="ranks")
    for axis, meaning in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert tensor")):
        command.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"{meaning} parallel size (default 1)")
    command.add_argument(
        "--expert-ranks",
        type=int,
        default=0,
        metavar="N",
        help="the experts have the last N ranks to themselves (default 0: none)",
    )
    command.add_argument("--expert-pp", type=int, metavar="N", help="their pipeline positions, if they do (default: pp)")
    command.add_argument("--order", default=_ORDERS[0], help="attention axes, fastest first (default %(default)s)")
    command.add_argument("--moe-order", default=_ORDERS[1], help="expert axes, fastest first (default %(default)s)")
    command.add_argument("--ranks-per-node", type=int, metavar="N", help="also tell which groups stay inside nodes of N ranks")
    command.add_argument(
        "--best-order", action="store_true", help="also find the axis orders that keep the busiest groups inside"
    )
    command.add_argument("--picture", metavar="FILE.png", help="also draw both grids into a PNG")
    return parser


def _add(commands: Any, name: str, run: Command, meaning: str, epilog: str | None = None) -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser(name, help=meaning, description=meaning, epilog=epilog, formatter_class=shape)
    command.add_argument("--json", action="store_true", help="print one JSON document on stdout; everything else goes to stderr")
    command.set_defaults(run=run)
    return command


def _add_recipe(command: argparse.ArgumentParser, joins: bool = False) -> None:
    """A recipe and changes to it; for a command that joins a cluster by itself also which."""
    command.add_argument("recipe", metavar="RECIPE", help="YAML file")
    command.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="changes to the recipe, such as fold.ep=4")
    if joins:
        meaning = "Ray cluster to join (cluster.address); else one is started on this machine"
        command.add_argument("--address", dest="joined", metavar="ADDRESS", help=meaning)


def _recipe_keys(tuning: bool = False) -> str:
    """All keys but those of tuning, or these alone."""
    rows = [row for row in describe(Recipe) if row[0].startswith("tune.") == tuning]
    widths = [max(len(row[column]) for row in rows) for column in (0, 2)]
    lines = [
        f"  {key:{widths[0]}}  {default:{widths[1]}}  {meaning + ' ' if meaning else ''}({legal})"
        for key, legal, default, meaning in rows
    ]
    return "recipe keys, their defaults and their meaning:\n" + "\n".join(lines)


def _recipe(given: argparse.Namespace) -> Recipe:
    joined = getattr(given, "joined", None)
    return Recipe.load(given.recipe, [*given.overrides, *([f"cluster.address={joined}"] if joined else [])])


def _print(document: Any) -> None:
    _say(json.dumps(document))


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has seen enough, as `| head` does; Python would complain once more as it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    raise SystemExit(main())
