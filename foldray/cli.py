"""The command line. Each command imports the upper floor that it needs inside its function."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foldray import __version__, completion
from foldray.arguments import AXES, ORDERS, make_parser
from foldray.drawing import explanation
from foldray.errors import MissingPackage, UserError
from foldray.fold import Edges, Fold, Placement, best_order, nearest_disjoint, nearest_folds
from foldray.recipe import Recipe
from foldray.schedule import SliceCost, Slicing, slice_sequence

_MOST_RANKS = 2**17  # limit of `explain` and `plan`: tables of more ranks take minutes and gigabytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    The code is 0 on success, 1 on a failure, 2 on a user's mistake (reported in one line on stderr) and 130 on Ctrl-C.
    """
    try:
        parser = make_parser(__version__)
        if completion.ASKED in os.environ:
            completion.answer(parser)
        given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
        return _COMMANDS[given.command](given)
    except UserError as error:
        print(f"foldray: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("foldray: interrupted", file=sys.stderr)
        return 130


def run() -> int:
    """Run the command of this process, and return its exit code. A training runs in a process that a parent guards."""
    if sys.argv[1:2] != ["train"]:
        return main()
    from trainers.driver import guardian

    if not guardian.is_guarded():
        return guardian.guard(sys.argv[1:])
    guardian.watch_parent()
    code = 1
    try:
        code = main()
    except SystemExit as end:  # of --help
        code = int(end.code or 0)
    finally:
        guardian.tell(ended=code)
    return code


def train(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    from trainers.driver.entry import train as run

    return run(recipe, resume=given.resume, start=given.start, as_json=given.json, search=_search(recipe))


def _search(recipe: Recipe) -> Any:
    """Return the search for the values that a recipe leaves open, or None if the recipe leaves none open."""
    if not recipe.schedule.opened:
        return None
    from tuners import OnlineSearch

    return OnlineSearch


def submit(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    from trainers.cluster.jobs import submit as run

    return run(recipe, given.address, as_json=given.json, wait=not given.no_wait, stops=given.stop)


def verify(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    from trainers.measure.verify import verify as run
    from trainers.measure.verify import verify_all

    return verify_all(recipe, as_json=given.json) if given.all else run(recipe, shrink=given.shrink, as_json=given.json)


def bench(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    if given.picture and not given.skews:
        raise UserError("picture", given.picture, "needs --skew")
    if not given.skews:
        from trainers.measure.bench import bench as run

        return run(recipe, given.schedules, given.rounds, as_json=given.json)
    if given.schedules:
        raise UserError("skew", given.skews[0], "is measured with the recipe's own schedule; leave out --schedule")
    from trainers.measure.uneven import bench_skews

    return bench_skews(recipe, given.skews, given.rounds, given.picture, as_json=given.json)


def timeline(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    from trainers.measure.bench import timeline as run

    return run(recipe, given.picture, given.trace, as_json=given.json)


def tune(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    return _tuners(given).tune(recipe, as_json=given.json)


def dashboard(given: argparse.Namespace) -> int:
    recipe = _recipe(given)
    return _tuners(given).dashboard(recipe, given.host, given.port, as_json=given.json)


def _tuners(given: argparse.Namespace) -> Any:
    try:
        from tuners import entry
    except ModuleNotFoundError as error:
        name = error.name or "optuna"
        raise MissingPackage("command", given.command, name, f"pip install {name.replace('_', '-')}") from None
    return entry


def explain(given: argparse.Namespace) -> int:
    recipe = _explained_recipe(given)
    fold = recipe.placed_fold if recipe else _legal_fold(given)
    if given.best_order and given.ranks_per_node is None:
        raise UserError("best_order", "asked for", "needs --ranks-per-node, which decides which groups fit into a node")
    seats = _seats(given, fold, recipe) if given.cluster else None
    nodes = Placement(fold, given.ranks_per_node) if given.ranks_per_node is not None else seats and seats.after
    best = Placement(best_order(fold, given.ranks_per_node), given.ranks_per_node) if given.best_order else None
    if given.picture:
        _draw_into(given.picture, lambda path: _fold_picture(fold, nodes, path))
    if given.json:
        document = fold.as_dict() | ({"placement": nodes.as_dict()} if nodes else {})
        if best:
            document["best"] = {"order": best.fold.order, "moe_order": best.fold.moe_order, "score": best.score()}
        _print(document | ({"seats": seats.document()} if seats else {}))
    else:
        _say(explanation(fold, nodes, best) + (f"\n\n{seats.text()}" if seats else ""))
    return 0


def _explained_recipe(given: argparse.Namespace) -> Recipe | None:
    """Return the recipe whose fold is explained; None if options say the fold.

    Raises:
        UserError: both or neither say the fold.
    """
    if given.recipe is None:
        if given.world_size is None:
            raise UserError("arguments", "nothing", "the following arguments are required: --world-size, or a RECIPE")
        return None
    unset = {"world_size": None, **dict.fromkeys(AXES, 1), "expert_ranks": 0, "expert_pp": None}
    for name, value in {**unset, "order": ORDERS[0], "moe_order": ORDERS[1]}.items():
        if getattr(given, name) != value:
            raise UserError(name, getattr(given, name), f"is for a fold without a recipe; {given.recipe} has a fold of its own")
    return _recipe(given)


def _seats(given: argparse.Namespace, fold: Fold, recipe: Recipe | None) -> Any:
    """Put the ranks on the nodes of a cluster: one that is described, or a Ray cluster that runs."""
    from foldray.explaining import Node, Seats, named_nodes
    from foldray.planner import traffic
    from foldray.recipe.refold import as_candidate

    if given.ranks_per_node is not None:
        raise UserError("cluster", given.cluster, "says how many ranks a node has; leave out --ranks-per-node")
    edges = traffic.edges(as_candidate(recipe)) if recipe else Edges.by_heat(fold)
    if given.cluster == "auto" or (":" in given.cluster and not Path(given.cluster).exists()):
        from trainers.cluster.seating import joined_hosts

        nodes = [Node(host.address, host.seats) for host in joined_hosts(given.cluster, recipe)]
    else:
        nodes = named_nodes(given.cluster, fold.world_size)
    return Seats.of(edges, nodes, recipe is not None)


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
    if given.disaggregate:
        return _plan_placements(given, machines)
    from foldray.planner import listed, search

    found = search.search(_space(given, machines), given.top)
    lists = [listed.with_list(each, machines, imbalance=given.imbalance) for each in found.best[: given.list]]
    if given.picture:
        _draw_into(given.picture, lambda path: _plan_picture(found, machines, path))
    _say(json.dumps(report.document(found.best, lists)) if given.json else report.table(found, machines, given.imbalance, lists))
    return 0


def _plan_placements(given: argparse.Namespace, machines: Any) -> int:
    """Find workers of their own for the experts, and compare them with the best plan whose workers have both halves."""
    from foldray.planner import placed_report, placing, search
    from foldray.planner.apart import ApartWork

    space = _space(given, machines)
    print(f"trying placements on {space.gpus} GPUs; this takes minutes …", file=sys.stderr)
    demand, allocation = placing.roofline(space)
    placed = placing.search_placements(space, given.top)
    best = placed[0]
    work = ApartWork(best.candidate, placing.sides(space, placing.adapters(allocation)))
    shared = search.search(space, 1).best[0]
    found = placed_report.Comparison(placed, shared, demand, allocation, placing.apart_seconds(work))
    if given.picture:
        _draw_into(given.picture, lambda path: _roofline_picture(found, space, path))
    _say(json.dumps(placed_report.placements_document(found)) if given.json else placed_report.placements_table(found, machines))
    return 0


def _roofline_picture(found: Any, space: Any, path: Path) -> None:
    from trainers.pictures.roofline import draw_roofline

    draw_roofline(found, space, path)


def _fit(given: argparse.Namespace, machines: Any) -> int:
    """Fit the constants to published rows. Print the errors, and the error of each row by constants fitted to the others."""
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
    """Return the space that `foldray plan` searches.

    Raises:
        UserError: a required option is missing, or an option has an illegal value.
    """
    from foldray.blueprint import ModelSpec
    from foldray.planner.candidate import DTYPES, Job
    from foldray.planner.space import KINDS, Space

    recipe = _recipe(given) if given.recipe else None
    if recipe and recipe.placement and not given.disaggregate:
        rule = "gives the experts workers of their own, which only foldray plan --disaggregate plans"
        raise UserError("placement", str(recipe.placed_fold), rule, ["null"])
    if recipe:
        for name, value in (("gpus", recipe.cluster.workers), ("seq_len", recipe.data.seq_len),
                            ("global_batch", recipe.training.global_batch), ("dtype", DTYPES[recipe.precision])):  # fmt: skip
            setattr(given, name, value if getattr(given, name) is None else getattr(given, name))
    for name in (*(() if recipe else ("model",)), "gpus", "seq_len", "global_batch"):
        if getattr(given, name) is None:
            raise UserError(name, "nothing", "is required, except with a recipe, --score or --fit")
    if not 0 <= given.list <= 1000:
        raise UserError("list", given.list, "must be a number of results", ["0…1000"])
    _check_range(given, gpus=_MOST_RANKS, seq_len=2**24, global_batch=2**20, top=1000, **dict.fromkeys(AXES, _MOST_RANKS))
    if not 1 <= given.imbalance <= 1000:
        raise UserError("imbalance", given.imbalance, "must be at least 1", ["1…1000"])
    named = {"preset": given.model, **({} if given.skew is None else {"router": {"skew": given.skew}})}
    model = recipe.model if recipe and given.model is None else ModelSpec.model_validate(named)
    own = (recipe.optimizer.iterations, recipe.moe.dispatch) if recipe else ()
    job = Job(model, given.seq_len, given.global_batch, given.dtype or "bf16", *own)
    machines.peak(job.dtype)
    pins = {axis: getattr(given, axis) for axis in AXES if getattr(given, axis) is not None}
    named_kinds = [recipe.schedule.kind] if recipe and recipe.ordering.of_stages else []
    kinds = dict.fromkeys([*KINDS, *named_kinds])
    zero = {"zero1": 1, "zero3": 3}[given.sharding]
    return Space(job, machines, given.gpus, pins, zero, kinds=tuple(kinds), imbalance=given.imbalance)


def _check_range(given: argparse.Namespace, **most: int) -> None:
    """Raise a UserError for a size outside 1 … limit. Larger sizes would exhaust the machine before another check."""
    for name, limit in most.items():
        value = getattr(given, name)
        if value is not None and not 1 <= value <= limit:
            raise UserError(name, value, f"must be at least 1, and at most {limit}")


def _plan_picture(found: Any, machines: Any, path: Path) -> None:
    from trainers.pictures.plan import draw_plan

    draw_plan(found, machines, path)


def generate(given: argparse.Namespace) -> int:
    from trainers.inference.entry import generate as run

    sampling = {name: getattr(given, name) for name in ("temperature", "top_p", "top_k", "seed")}
    try:
        return run(given.run, given.prompt, given.tokens, sampling, given.json, given.chat, given.system, given.trust)
    except BrokenPipeError:
        _say_nothing_more()
        return 0


def eval_(given: argparse.Namespace) -> int:
    from trainers.inference.entry import evaluate

    return evaluate(given.run, given.files, given.seq_len, as_json=given.json, trust=given.trust)


def status(given: argparse.Namespace) -> int:
    from trainers.driver.status import RunStatus

    found = RunStatus.at(given.run, given.trust)
    if given.json:
        _print(found.document())
    else:
        _say(found.text())
    return 0


def health(given: argparse.Namespace) -> int:
    from trainers.driver.health import RunHealth

    found = RunHealth.at(given.run, given.trust)
    if given.picture:
        _draw_into(given.picture, found.draw)
    if given.json:
        _print(found.document())
    else:
        _say(found.text())
    return 0


def export_hf(given: argparse.Namespace) -> int:
    from trainers.driver.export import export

    return export(given.run, given.folder, given.dtype, as_json=given.json, trust=given.trust)


def import_hf(given: argparse.Namespace) -> int:
    from trainers.hugging_face.importing import Upcycling
    from trainers.hugging_face.importing import import_hf as run

    for field in ("topk", "granularity"):
        if getattr(given, field) is not None and given.upcycle is None:
            raise UserError(field, getattr(given, field), "needs --upcycle")
    topk, parts = (default if value is None else value for value, default in ((given.topk, 2), (given.granularity, 1)))
    upcycling = None if given.upcycle is None else Upcycling(given.upcycle, topk, parts)
    return run(given.folder, given.path, as_json=given.json, upcycling=upcycling)


def complete(given: argparse.Namespace) -> int:
    script = completion.script(given.shell)
    if given.json:
        _print({"shell": given.shell, "script": script})
    else:
        _say(script)
    return 0


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
    """Return a table with the length of each slice and its share of attention's cost."""
    costs = cost.slices(slicing.attention)
    lines = [f"{slicing.length} tokens, degree {slicing.degree}", "", f"{'':>6}{'slice':>10}{'cost':>9}   {'micro-batch':>11}"]
    for number, (tokens, seconds, rows) in enumerate(zip(slicing.attention, costs, slicing.moe, strict=True)):
        share = seconds / sum(costs)
        lines.append(f"{number:>6}{tokens:>10}{share:>9.1%}   {rows:>11}  {'█' * round(40 * share)}")
    even = cost.slices(slicing.moe)
    return "\n".join([*lines, "", f"slowest slice: {max(costs) / max(even):.3f} of the slowest of equal slices"])


def _legal_fold(given: argparse.Namespace) -> Fold:
    """Return the fold that the user asked for.

    Raises:
        UserError: the fold is illegal; the message names the nearest legal folds.
    """
    sizes = {axis: getattr(given, axis) for axis in AXES}
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
            orders = {"order": ORDERS[0], "moe_order": ORDERS[1]} if ordered else {}
            _print({"legal": False, "rule": error.rule, "nearest": [{**option, **orders} for option in near]})
        if not near or ordered:
            raise
        legal = "; ".join(" ".join(f"{axis}={size}" for axis, size in option.items()) for option in near)
        raise UserError(error.field, error.value, f"{error.rule}; nearest legal folds: {legal}") from None


def _fold_picture(fold: Fold, nodes: Placement | None, path: Path) -> None:
    from trainers.pictures.fold import draw_fold

    draw_fold(fold, path, nodes)


def _draw_into(path: str, draw: Callable[[Path], None]) -> None:
    """Write a PNG with `draw`.

    Raises:
        UserError: the name does not end in .png, or the file cannot be written.
        MissingPackage: matplotlib is not installed.
    """
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


def _recipe(given: argparse.Namespace) -> Recipe:
    changes = {"cluster.address": getattr(given, "joined", None), "model.router.skew": getattr(given, "skew", None)}
    changed = [f"{key}={value}" for key, value in changes.items() if value is not None]
    return Recipe.load(given.recipe, [*given.overrides, *changed])


def _print(document: Any) -> None:
    _say(json.dumps(document))


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _say_nothing_more()


def _say_nothing_more() -> None:
    """Turn off standard output, because its reader stopped, as `| head` does. Otherwise Python reports the error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "train": train, "submit": submit, "verify": verify, "bench": bench, "timeline": timeline, "tune": tune,
    "dashboard": dashboard, "plan": plan, "calibrate": calibrate, "generate": generate,
    "eval": eval_, "status": status, "health": health, "export-hf": export_hf, "import-hf": import_hf, "slice": slice_,
    "explain": explain, "completion": complete,
}  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main())
