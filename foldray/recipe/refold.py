"""The fold for fewer workers than a recipe asks for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from foldray.errors import UserError
from foldray.fold import divisors
from foldray.planner.candidate import DTYPES, Candidate, Job
from foldray.planner.costs import OpWork
from foldray.planner.device import Device
from foldray.planner.hardware import Hardware, load_hardware
from foldray.planner.memory import ledger
from foldray.planner.prediction import Step
from foldray.recipe.recipe import Recipe

_AXES = ("tp", "cp", "pp", "ep", "etp")
_DEFAULT = "h200"  # without a hardware file, only the order of folds counts
_FULLER = 1.5
"""How much more than its share of the lost workers' memory a rank may need, before folds that need less are preferred."""


def as_candidate(recipe: Recipe) -> Candidate:
    """Convert a recipe to a candidate, whose step the planner can predict. Uneven shares take as long as the largest one."""
    training, schedule = recipe.training, recipe.schedule
    batch = recipe.accumulation * recipe.placed_fold.dp * training.micro_batch
    dtype, iterations = DTYPES[recipe.precision], recipe.optimizer.iterations
    job = Job(recipe.model, recipe.data.seq_len, batch, dtype, iterations, recipe.moe.dispatch, recipe.moe.wire)
    return Candidate(job, recipe.placed_fold, recipe.ordering, training.micro_batch, schedule.virtual_stages, recipe.engine.zero)


def worlds(recipe: Recipe) -> dict[int, Recipe]:
    """Return the recipe for every number of workers with which training may go on, by that number, in ascending order.

    For fewer workers it is the legal fold with the shortest predicted step, among those whose fullest rank needs not much
    more memory. Everything but the section `fold` and the number of workers stays, so the batch and the order of the text do,
    too. Numbers of workers without a legal fold are left out.

    Raises:
        UserError: the hardware that the recipe names is unknown.
    """
    least = recipe.cluster.min_workers or recipe.cluster.workers
    if least == recipe.cluster.workers:
        return {least: recipe}
    hardware = load_hardware(recipe.tune.hardware or _DEFAULT, "tune.hardware")
    own = _needs(recipe)
    found: dict[int, Recipe] = {}
    for workers in range(least, recipe.cluster.workers):
        if best := _best(list(_legal(recipe, workers)), own * recipe.cluster.workers / workers, hardware):
            found[workers] = best
    return found | {recipe.cluster.workers: recipe}


def _best(recipes: list[Recipe], share: float, hardware: Hardware) -> Recipe | None:
    """Return the recipe with the shortest predicted step.

    Args:
        share: bytes that a rank would need if the lost workers' memory were spread evenly.
    """
    needs = {number: _needs(recipe) for number, recipe in enumerate(recipes)}
    least = min(needs.values(), default=math.inf)
    fit = [number for number, need in needs.items() if need <= max(_FULLER * share, least)]
    return min((recipes[number] for number in fit), key=lambda recipe: _seconds(recipe, hardware), default=None)


def _legal(recipe: Recipe, workers: int) -> Iterator[Recipe]:
    """Yield the recipe with every legal fold of so many workers. What fits one pipeline only is left to the defaults."""
    values = recipe.model_dump()
    values["cluster"] |= {"workers": workers, "min_workers": min(workers, values["cluster"]["min_workers"])}
    for sizes in itertools.product(divisors(workers), repeat=len(_AXES)):
        fold: dict[str, Any] = dict(zip(_AXES, sizes, strict=True))
        if workers % (fold["tp"] * fold["cp"] * fold["pp"]) or workers % (fold["ep"] * fold["etp"] * fold["pp"]):
            continue
        fold["ep_inside"] = math.gcd(recipe.fold.ep_inside, fold["ep"])
        schedule = dict(values["schedule"])
        if fold["pp"] != recipe.fold.pp:
            schedule |= {"stage_layers": None, "virtual_stages": 1}
        try:
            yield Recipe.parse({**values, "fold": {**values["fold"], **fold}, "schedule": schedule})
        except UserError:
            continue


def _needs(recipe: Recipe) -> float:
    """Return the bytes that the fullest rank of a recipe needs."""
    candidate = as_candidate(recipe)
    return ledger(candidate, OpWork(candidate, Device.of(candidate.job, load_hardware(_DEFAULT))).rank).total


def _seconds(recipe: Recipe, hardware: Hardware) -> float:
    """Return the predicted seconds of a step."""
    candidate = as_candidate(recipe)
    candidate = replace(candidate, job=replace(candidate.job, dtype="bf16"))  # hardware files may lack the others
    return Step(candidate, OpWork(candidate, Device.of(candidate.job, hardware))).prediction().seconds
