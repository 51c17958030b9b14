"""The command `foldray plan`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foldray.cli.arguments import AXES
from foldray.cli.output import MOST_RANKS, check_range, offloaded, recipe_of, say_either, shares_of
from foldray.errors import UserError
from foldray.files import check_picture, write_picture


def plan(given: argparse.Namespace) -> int:
    from foldray.costs import hardware
    from foldray.plan import report, rows, score

    if given.picture:
        check_picture(Path(given.picture))  # before a search of minutes
    if given.fit:
        return _fit(given)
    if given.score:
        scored = score.score(rows.read_rows(given.score, given.cluster))
        return say_either(given, partial(report.scores, scored), partial(report.score_table, scored))
    if given.cluster is None:
        raise UserError("cluster", "nothing", "is required, except with --score or --fit of rows that name their GPU")
    machines = hardware.load_hardware(given.cluster)
    if given.disaggregate:
        return _plan_placements(given, machines)
    for name in ("expert_cluster", "expert_gpus"):
        if getattr(given, name) is not None:
            raise UserError(name, getattr(given, name), "needs --disaggregate")
    from foldray.plan import copies, listed, search

    plans = search.search(_space(given, machines), given.top, with_front=bool(given.picture))
    lists = [listed.with_list(step, machines, imbalance=given.imbalance) for step in plans.best[: given.list]]
    found = ((number, copies.with_copies(step, machines, given.imbalance)) for number, step in enumerate(plans.best))
    copied = {number: each for number, each in found if each is not None}
    if given.picture:
        write_picture(given.picture, lambda path: _plan_picture(plans, machines, path))
    table = partial(report.table, plans, machines, given.imbalance, lists, copied)
    return say_either(given, lambda: report.document(plans.best, lists, copied), table)


def _plan_placements(given: argparse.Namespace, machines: Any) -> int:
    """Find workers of their own for the experts, and compare them with the best plan whose workers have both halves."""
    from foldray.costs.apart import ApartWork
    from foldray.plan import placing, report_placements, search

    space = _space(given, machines)
    print(f"trying placements on {space.gpus} GPUs; this takes minutes …", file=sys.stderr)
    demand, allocation = placing.roofline(space)
    placed = placing.search_placements(space, given.top)
    best = placed[0]
    adapters = placing.adapters(allocation)
    more = None if space.experts else placing.apart_seconds(ApartWork(best.candidate, placing.sides(space, adapters)))
    pace = placing.slower_kind(space)
    shared = search.search(replace(space, hardware=pace), 1).best[0]
    even = placing.even_split(space, best)
    ways = {"own": placing.busy_placement(best, space), "shared": placing.busy_shared(shared.candidate, pace)}
    comparison = report_placements.Comparison(placed, shared, demand, allocation, more, even, ways)
    if given.picture:
        write_picture(given.picture, lambda path: _roofline_picture(comparison, space, path))
    document = partial(report_placements.placements_document, comparison)
    return say_either(given, document, partial(report_placements.placements_table, comparison, space))


def _roofline_picture(comparison: Any, space: Any, path: Path) -> None:
    from trainers.pictures.plan import draw_roofline

    draw_roofline(comparison, space, path)


def _fit(given: argparse.Namespace) -> int:
    """Fit the constants to published rows. Print the errors, and the error of each row by constants fitted to the others."""
    from foldray.plan import report, score
    from foldray.plan.rows import read_rows

    rows = read_rows(given.fit, given.cluster)
    constants = score.fit(rows)
    scored, apart = score.score(rows, constants), list(score.left_out(rows))
    document = {"constants": constants, "mape": score.mape(scored), "mape_left_out": score.mape(apart)}
    tables = [report.constants_table(constants), report.score_table(scored), "each row by the others' constants:"]
    return say_either(given, lambda: document, lambda: "\n\n".join([*tables, report.score_table(apart)]))


def _space(given: argparse.Namespace, machines: Any) -> Any:
    from foldray.blueprint import ModelSpec
    from foldray.costs.candidate import DTYPES, Job
    from foldray.costs.copying import CopyRoom
    from foldray.costs.hardware import load_hardware
    from foldray.plan.space import KINDS, RECOMPUTE, Space
    from foldray.refold import of_optimizer

    recipe = recipe_of(given) if given.recipe else None
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
    check_range(given, gpus=MOST_RANKS, seq_len=2**24, global_batch=2**20, top=1000, **dict.fromkeys(AXES, MOST_RANKS))
    if given.expert_gpus is not None and not 1 <= given.expert_gpus < given.gpus:
        rule = f"must leave at least one of {given.gpus} GPUs to attention"
        raise UserError("expert_gpus", given.expert_gpus, rule, [f"1…{given.gpus - 1}"])
    if not 1 <= given.imbalance <= 1000:
        raise UserError("imbalance", given.imbalance, "must be at least 1", ["1…1000"])
    if given.copies is not None and not 0 <= given.copies <= 4096:
        raise UserError("copies", given.copies, "must be a number of copies", ["0…4096"])
    if given.skew is not None and not 0 <= given.skew <= 16:  # also for NaN
        raise UserError("skew", given.skew, "must be a number from 0 to 16")
    router = {"skew": given.skew, "shares": shares_of(given)}
    named = {"preset": given.model, "router": {key: value for key, value in router.items() if value is not None}}
    model = recipe.model if recipe and given.model is None else ModelSpec.model_validate(named)
    settings = (recipe.optimizer.iterations, recipe.moe.dispatch, recipe.moe.wire, recipe.schedule.context) if recipe else ()
    job = Job(model, given.seq_len, given.global_batch, given.dtype or "bf16", *settings)
    job = replace(job, **of_optimizer(recipe)) if recipe else replace(job, offload=given.offload)
    room = recipe.moe.copies if recipe else given.copies or 0
    job = replace(job, places=given.place_experts or bool(recipe and recipe.moe.place_every))
    job = replace(job, copies=CopyRoom(room, given.global_batch * given.seq_len)) if room else job
    machines.peak(job.dtype)
    pins = {axis: getattr(given, axis) for axis in AXES if getattr(given, axis) is not None}
    named_kinds = [recipe.schedule.kind] if recipe and recipe.ordering.of_stages else []
    kinds = dict.fromkeys([*KINDS, *named_kinds])
    zero = {"zero1": 1, "zero3": 3}[given.sharding]
    experts = load_hardware(given.expert_cluster, "expert_cluster") if given.expert_cluster else None
    if experts:
        experts.peak(job.dtype)
    moved = recipe.schedule.offload if recipe else offloaded(given)
    if moved and given.disaggregate:
        rule = "is for workers that have both attention and experts, and --disaggregate parts them"
        raise UserError("offload_activations", ",".join(moved), rule)
    again = dict.fromkeys(tuple(kind for kind in kinds if kind not in moved) for kinds in RECOMPUTE)
    return Space(
        job, machines, given.gpus, pins, zero, kinds=tuple(kinds), imbalance=given.imbalance, experts=experts,
        expert_gpus=given.expert_gpus, recompute=tuple(again), offload=moved,
    )  # fmt: skip


def _plan_picture(plans: Any, machines: Any, path: Path) -> None:
    from trainers.pictures.plan import draw_plan

    draw_plan(plans, machines, path)
