"""`foldray bench --skew`, `--routes`: what a step costs when ranks get unevenly many rows, measured and predicted.

Patterns choose the experts (`model.router.skew`, `shares`) and take turns on one engine. The first pattern is even. The
prediction takes its recorded step, and lengthens the experts' ops of each rank by the rank's rows, and what travels by the rows
of the fullest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from foldray.blueprint import ModelSpec, pattern_shares, rank_shares, visits_of_a_token
from foldray.blueprint.copying import Copies
from foldray.clock import Recording, replay
from foldray.comm import Groups
from foldray.errors import UserError
from foldray.files import check_picture, write_picture
from foldray.graph import Op, StepGraph
from foldray.kinds import EXCHANGES, EXPERT, OP_KINDS
from foldray.moe import Pattern
from foldray.recipe import Recipe
from foldray.runtime import Engine, Trace
from trainers.cluster.actors import on_workers
from trainers.measure.bench import WARM_UP, recorded, slowest, timed_step
from trainers.telemetry.expert_health import max_over_mean, on_ranks
from trainers.telemetry.records import as_json as to_json
from trainers.worker.engines import make_engine


def bench_uneven(
    recipe: Recipe,
    skews: Sequence[float],
    shares: Sequence[float] | None,
    rounds: int,
    picture: Path | None = None,
    as_json: bool = False,
) -> int:
    """Measure a recipe's step under routing patterns, which take turns within a round, and print a report.

    Args:
        skews: the exponents of patterns; 0 is measured in any case.
        shares: the shares of one more pattern, such as recorded ones.
    """
    if rounds < 1:
        raise UserError("rounds", rounds, "must be at least 1")
    if picture is not None:
        check_picture(picture)
    chosen: list[float | None] = [*sorted({0.0, *skews}), *([] if shares is None else [None])]
    models = [_routed(recipe, {"shares": shares} if skew is None else {"skew": skew}) for skew in chosen]
    message = f"{len(chosen)} routing patterns, {rounds} rounds, on {recipe.cluster.workers} workers …"
    measured = on_workers(recipe, _measure, message, models=models, rounds=rounds)["measured"]
    results = [_result(skew, turns) for skew, turns in zip(chosen, measured, strict=True)]
    if picture is not None:
        write_picture(picture, lambda path: _draw(recipe, results, path))
    print(to_json({"results": results}) if as_json else _table(results, rounds))
    return 0


def _routed(recipe: Recipe, pattern: Mapping[str, Any]) -> ModelSpec:
    document = recipe.model_dump(mode="json")
    document["model"]["router"] |= pattern
    return Recipe.parse(document).model


def _measure(
    recipe: Recipe, groups: Groups, device: torch.device, models: Sequence[ModelSpec], rounds: int
) -> dict[str, Any] | None:
    """Measure models with other patterns in turns on a rank, and return their times on the fold's first one."""
    engine = make_engine(recipe, groups, device)
    measured: list[list[dict[str, float]]] = [[] for _ in models]
    trace = Trace(device)
    for number in range(WARM_UP + rounds):
        even: tuple[StepGraph, list[Recording]] | None = None
        for model, turns in zip(models, measured, strict=True):
            _route_by(recipe, engine, model)
            if even is None:
                engine.execution.trace = trace
                graph, *_ = timed_step(recipe, engine, groups, device)
                if engine.execution.lacks_costs:
                    engine.execution.learn_costs()
                even = recorded(engine, trace, groups, graph)
                engine.execution.trace = None
            timed = timed_step(recipe, engine, groups, device)
            count_ME = groups.control.all_reduce(torch.stack([loss.count_ME for loss in timed.losses]).sum(0))
            turn = slowest(groups, {"step_ms": timed.seconds * 1e3}, device)
            by_rank, table = on_ranks(count_ME.cpu().numpy(), groups.fold.ep), _copies(engine)
            turn["overload"] = max(table.rank_shares(_loads(recipe, model))) if table else float(max_over_mean(by_rank).mean())
            turn["predicted"] = predicted(recipe, (models[0], model), table, groups, *even)
            if number >= WARM_UP:
                turns.append(turn)
    return {"measured": measured} if groups.rank == groups.fold.offset else None


def _route_by(recipe: Recipe, engine: Engine, model: ModelSpec) -> None:
    for _, router in engine.model.routers():
        shares = pattern_shares(model)
        assert shares is not None
        router.pattern = Pattern(shares)
    if (copying := engine.execution.copying) is not None:
        copying.choose([_loads(recipe, model)] * len(model.moe_layers))


def _loads(recipe: Recipe, model: ModelSpec) -> list[float]:
    """Return the rows of each expert in a step, of one expert-parallel group."""
    tokens = recipe.training.global_batch * recipe.data.seq_len / recipe.placed_fold.edp
    return [share * tokens for share in pattern_shares(model) or ()]


def _copies(engine: Engine) -> Copies | None:
    """Return the copies of each block; None without copies."""
    copying = engine.execution.copying
    return next(iter(copying.tables.values()), None) if copying is not None else None


def predicted(
    recipe: Recipe,
    models: tuple[ModelSpec, ModelSpec],
    copies: Copies | None,
    groups: Groups,
    graph: StepGraph,
    recordings: Sequence[Recording],
) -> float:
    """Return the step under a model's pattern over a recorded step with an even one.

    Args:
        models: the model with the even pattern, and with the uneven one.
        copies: those of each block under the uneven one. Their own way is left out.
    """
    fold = groups.fold
    shares = copies.rank_shares(_loads(recipe, models[1])) if copies else rank_shares(models[1], fold.ep)

    def fullest(places: int) -> float:
        """Return how many times as many rows go to the fullest rank or node: of assignments, or of tokens."""
        if copies is not None or not (recipe.moe.dispatch == "rank" or fold.disjoint):
            return max(shares)
        even, most = (max(visits_of_a_token(model, places)) for model in models)
        return most / even

    longer = {"tokens": fullest(fold.ep_across), "tokens_inside": fullest(fold.ep)}

    def scale(op: Op, rank: int) -> float:
        if op.kind in EXCHANGES:
            return longer[OP_KINDS[op.kind].travels or ""]
        return shares[fold.moe.coordinate(fold.offset + rank)["ep"]] if op.kind == EXPERT else 1.0

    return replay(graph, recordings, scale=scale).seconds / replay(graph, recordings).seconds


def _result(skew: float | None, turns: Sequence[dict[str, float]]) -> dict[str, Any]:
    step = [turn["step_ms"] for turn in turns]
    return {
        "pattern": "recorded" if skew is None else f"{skew:g}", "skew": skew,
        "overload": median(turn["overload"] for turn in turns),
        "step_ms": {"min": min(step), "median": median(step), "max": max(step)},
        "predicted_ratio": median(turn["predicted"] for turn in turns),
    }  # fmt: skip


def _table(results: Sequence[dict[str, Any]], rounds: int) -> str:
    even = results[0]["step_ms"]["median"]
    lines = [
        f"milliseconds per step, medians of {rounds} rounds in turns; overload: rows of the fullest rank over the mean",
        "× even: the step over that of an even routing, measured, and predicted from the ops of the even step",
        f"{'skew':<10}" + "".join(f"{name:>10}" for name in ("overload", "step", "min", "max", "× even", "predicted")),
    ]
    for result in results:
        step = result["step_ms"]
        times = "".join(f"{figure:>10.1f}" for figure in (step["median"], step["min"], step["max"]))
        ratios = f"{step['median'] / even:>10.2f}{result['predicted_ratio']:>10.2f}"
        lines.append(f"{result['pattern']:<10}{result['overload']:>10.2f}{times}{ratios}")
    return "\n".join(lines)


def _draw(recipe: Recipe, results: Sequence[dict[str, Any]], path: Path) -> None:
    from trainers.pictures.uneven import draw_uneven

    draw_uneven(results, path, f"{recipe.name}: {recipe.placed_fold}, {recipe.schedule.kind}")
