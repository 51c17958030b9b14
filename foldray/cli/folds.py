"""The commands `foldray explain` and `foldray slice`: what a fold and a cut look like."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from foldray.cli.arguments import AXES, ORDERS
from foldray.cli.output import MOST_RANKS, check_range, recipe_of, say, say_either, say_json
from foldray.errors import UserError
from foldray.files import write_picture
from foldray.fold import Fold, nearest_folds
from foldray.graph import SliceCost, Slicing, slice_sequence
from foldray.nodes import Edges, Placement, best_order
from foldray.nodes.drawing import explanation
from foldray.recipe import Recipe


def explain(given: argparse.Namespace) -> int:
    recipe = _explained_recipe(given)
    fold = recipe.placed_fold if recipe else _legal_fold(given)
    if given.best_order and given.ranks_per_node is None:
        raise UserError("best_order", "asked for", "needs --ranks-per-node, which decides which groups fit into a node")
    from foldray.cli.explaining import expected_steps, steps_table

    seats = _seats(given, fold, recipe) if given.cluster else None
    steps = expected_steps(given.cluster, recipe) if recipe and given.cluster and not _is_running(given.cluster) else {}
    nodes = Placement(fold, given.ranks_per_node) if given.ranks_per_node is not None else seats and seats.after
    best = Placement(best_order(fold, given.ranks_per_node), given.ranks_per_node) if given.best_order else None
    if given.picture:
        write_picture(given.picture, lambda path: _fold_picture(fold, nodes, path))
    if given.json:
        document = fold.as_dict() | ({"placement": nodes.as_dict()} if nodes else {})
        if best:
            document["best"] = {"order": best.fold.order, "moe_order": best.fold.moe_order, "score": best.score()}
        say_json(document | ({"seats": seats.document()} if seats else {}) | ({"step_time_s": steps} if steps else {}))
    else:
        parts = [explanation(fold, nodes, best), *([seats.text()] if seats else [])]
        say("\n\n".join([*parts, *([steps_table(steps, given.cluster)] if steps else [])]))
    return 0


def _explained_recipe(given: argparse.Namespace) -> Recipe | None:
    if given.recipe is None:
        if given.world_size is None:
            raise UserError("arguments", "nothing", "the following arguments are required: --world-size, or a RECIPE")
        return None
    unset = {"world_size": None, **dict.fromkeys(AXES, 1), "expert_ranks": 0, "expert_pp": None}
    for name, value in {**unset, "order": ORDERS[0], "moe_order": ORDERS[1]}.items():
        if getattr(given, name) != value:
            raise UserError(name, getattr(given, name), f"is for a fold without a recipe; {given.recipe} has a fold of its own")
    return recipe_of(given)


def _seats(given: argparse.Namespace, fold: Fold, recipe: Recipe | None) -> Any:
    """Put the ranks on the nodes of a cluster: one that is described, or a Ray cluster that runs."""
    from foldray.cli.explaining import Node, Seats, named_nodes
    from foldray.costs import traffic
    from foldray.refold import as_candidate

    if given.ranks_per_node is not None:
        raise UserError("cluster", given.cluster, "says how many ranks a node has; leave out --ranks-per-node")
    edges = traffic.edges(as_candidate(recipe)) if recipe else Edges.by_heat(fold)
    if _is_running(given.cluster):
        from trainers.cluster.seating import joined_hosts

        nodes = [Node(host.address, host.seats) for host in joined_hosts(given.cluster, recipe)]
    else:
        nodes = named_nodes(given.cluster, fold.world_size)
    if not nodes:
        raise UserError("cluster", given.cluster, "has no node")
    return Seats.of(edges, nodes, recipe is not None)


def _is_running(cluster: str) -> bool:
    """Whether a cluster is the address of a Ray cluster."""
    return cluster == "auto" or (":" in cluster and not Path(cluster).exists())


def _legal_fold(given: argparse.Namespace) -> Fold:
    sizes = {axis: getattr(given, axis) for axis in AXES}
    apart = {"expert_ranks": given.expert_ranks, "expert_pp": given.expert_pp}
    shown = given.world_size <= MOST_RANKS
    try:
        if not shown:
            raise UserError("world_size", given.world_size, f"at most {MOST_RANKS} ranks are shown")
        return Fold(given.world_size, **sizes, order=given.order, moe_order=given.moe_order, **apart)
    except UserError as error:
        wanted = {**sizes, "expert_pp": given.expert_pp or given.pp}
        near = nearest_folds(given.world_size, wanted, given.expert_ranks) if shown else []
        ordered = error.field in ("order", "moe_order")
        if given.json:
            orders = {"order": ORDERS[0], "moe_order": ORDERS[1]} if ordered else {}
            say_json({"legal": False, "rule": error.rule, "nearest": [{**option, **orders} for option in near]})
        if not near or ordered:
            raise
        legal = "; ".join(" ".join(f"{axis}={size}" for axis, size in option.items()) for option in near)
        raise UserError(error.field, error.value, f"{error.rule}; nearest legal folds: {legal}") from None


def _fold_picture(fold: Fold, nodes: Placement | None, path: Path) -> None:
    from trainers.pictures.fold import draw_fold

    draw_fold(fold, path, nodes)


def slice_(given: argparse.Namespace) -> int:
    check_range(given, seq_len=2**24, degree=2**8, multiple_of=2**24, hidden=2**20, heads=2**14)
    cost = SliceCost.of_model(given.hidden, given.heads)
    cut = slice_sequence(given.kind, given.seq_len, given.degree, cost, given.multiple_of)
    document = {"attention_slices": cut.attention, "moe_micro_batches": cut.moe}
    return say_either(given, lambda: document, lambda: _slices(cut, cost))


def _slices(slicing: Slicing, cost: SliceCost) -> str:
    costs = cost.slices(slicing.attention)
    lines = [f"{slicing.length} tokens, degree {slicing.degree}", "", f"{'':>6}{'slice':>10}{'cost':>9}   {'micro-batch':>11}"]
    for number, (tokens, seconds, rows) in enumerate(zip(slicing.attention, costs, slicing.moe, strict=True)):
        share = seconds / sum(costs)
        lines.append(f"{number:>6}{tokens:>10}{share:>9.1%}   {rows:>11}  {'█' * round(40 * share)}")
    even = cost.slices(slicing.moe)
    return "\n".join([*lines, "", f"slowest slice: {max(costs) / max(even):.3f} of the slowest of equal slices"])
