"""The fold for fewer workers than a recipe asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

from foldray.costs.candidate import DTYPES, Candidate, Job, Software
from foldray.costs.copying import CopyRoom
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware, load_hardware
from foldray.costs.memo import Memo
from foldray.costs.memory import ledger
from foldray.costs.ops import OpWork
from foldray.costs.prediction import Step
from foldray.costs.updates import stage_updates
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.plan.space import legal_folds
from foldray.recipe.recipe import Recipe

_AXES = ("tp", "cp", "pp", "ep", "etp")
_DEFAULT = "h200"  # without a hardware file, only the order of folds counts
MOST_WORLDS = 64
"""Most numbers of workers for which folds are planned, beside the recipe's own."""
_NEAREST = 64
"""Folds of each number of workers that are compared: those with the least change of the recipe's sizes, counted in doublings."""
_FULLER = 1.5
"""Memory that a rank may need, over its share of all memory, before folds that need less are preferred."""


def as_candidate(recipe: Recipe) -> Candidate:
    """Convert a recipe to a candidate, whose step the planner can predict. Uneven shares take as long as the largest one."""
    training, schedule = recipe.training, recipe.schedule
    batch = recipe.accumulation * recipe.placed_fold.dp * training.micro_batch
    dtype, iterations = DTYPES[recipe.precision], recipe.optimizer.iterations
    travel = recipe.moe.dispatch, recipe.moe.wire, schedule.context
    copies = CopyRoom(recipe.moe.copies, batch * recipe.data.seq_len) if recipe.moe.copies else None
    job = Job(
        recipe.model,
        recipe.data.seq_len,
        batch,
        dtype,
        iterations,
        *travel,
        **of_optimizer(recipe),
        copies=copies,
        places=bool(recipe.moe.place_every),
    )
    stages = schedule.virtual_stages, recipe.engine.zero, schedule.stage_layers
    return Candidate(job, recipe.placed_fold, recipe.ordering, training.micro_batch, *stages)


def of_optimizer(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a job that say how gradients travel, what moments take, and where the optimizer is."""
    engine, software = recipe.engine, Software(moments=recipe.optimizer.moment_bytes)
    return {"software": software, "gradients": engine.wire, "offload": engine.offload is not None}


def worlds(recipe: Recipe) -> dict[int, Recipe]:
    """Return the recipe for every number of workers with which training may go on, by that number, in ascending order.

    For fewer workers it is the legal fold with the shortest step, among the folds that are nearest to the recipe's and whose
    fullest rank needs at most `_FULLER` times its share of the recipe's memory. If all need more, it is the legal fold that
    needs least. Everything but the section `fold` and the number of workers stays, also the batch and the order of the text.
    Numbers of workers without a legal fold are left out, and of more than `MOST_WORLDS` numbers all but every n-th.
    """
    least = recipe.cluster.min_workers or recipe.cluster.workers
    if least == recipe.cluster.workers:
        return {least: recipe}
    prices = _Prices(load_hardware(recipe.tune.hardware or _DEFAULT, "tune.hardware"))
    whole = prices.needs(as_candidate(recipe)) * recipe.cluster.workers
    by_workers: dict[int, Recipe] = {}
    apart = -(-(recipe.cluster.workers - least) // MOST_WORLDS)
    for workers in [least, *sorted(range(recipe.cluster.workers - apart, least, -apart))]:
        if best := _best(recipe, workers, whole / workers, prices):
            by_workers[workers] = best
    return by_workers | {recipe.cluster.workers: recipe}


class _Folded(NamedTuple):
    """A recipe under another fold, whose rules are not checked yet, and its candidate."""

    recipe: Recipe
    candidate: Candidate

    def checked(self) -> Recipe | None:
        """Return the recipe; None if it breaks a rule."""
        with suppress(UserError):
            return Recipe.parse(self.recipe.model_dump())
        return None


class _Prices:
    """Memory and steps of the folds of one recipe, which share tables of costs."""

    def __init__(self, hardware: Hardware):
        self._hardware, self._default, self._memos = hardware, load_hardware(_DEFAULT), (Memo(), Memo())

    def needs(self, candidate: Candidate) -> float:
        """Return the bytes that the fullest rank needs."""
        device = Device.of(candidate.job, self._default)
        return ledger(candidate, OpWork(candidate, device, memo=self._memos[0]).rank).total

    def seconds(self, candidate: Candidate) -> float:
        """Return the seconds of a step without a simulation of its pipeline, which takes long if there are many positions.

        It is the bound that a pipeline of equal stages reaches, and the time of gradients that are reduced at the end.
        """
        candidate = replace(candidate, job=replace(candidate.job, dtype="bf16"))  # hardware files may lack the others
        work = OpWork(candidate, Device.of(candidate.job, self._hardware), memo=self._memos[1])
        reduction, contents = candidate.ordering.reduction, candidate.layout.positions.different
        reduced = [sum(update.reduce for update in stage_updates(work.rank, content, reduction)) for content in contents]
        return Step(candidate, work).simulated_bound() + max(reduced) * (reduction.kind == "end")


def _best(recipe: Recipe, workers: int, share: float, prices: _Prices) -> Recipe | None:
    """Return the best legal recipe of so many workers. `share` has the lost workers' memory, spread evenly, in bytes."""
    asked = [getattr(recipe.placed_fold, axis) for axis in _AXES]

    def change(fold: Fold) -> float:
        return sum(abs(math.log2(getattr(fold, axis) / size)) for axis, size in zip(_AXES, asked, strict=True))

    folds = sorted(legal_folds(recipe.model, recipe.data.seq_len, workers), key=change)
    near = [(prices.needs(folded.candidate), folded) for folded in _folded(recipe, folds[:_NEAREST])]
    small = [folded for need, folded in near if need <= _FULLER * share]
    if len(small) > 1:
        small.sort(key=lambda folded: prices.seconds(folded.candidate))
    if best := next(filter(None, (folded.checked() for folded in small)), None):
        return best
    large = [(need, folded) for need, folded in near if need > _FULLER * share]
    large += [(prices.needs(folded.candidate), folded) for folded in _folded(recipe, folds[_NEAREST:])]
    large.sort(key=itemgetter(0))
    return next(filter(None, (folded.checked() for _, folded in large)), None)


def _folded(recipe: Recipe, folds: Iterable[Fold]) -> Iterator[_Folded]:
    """Yield the recipe with every fold that divides its model and batch. Stages of another pipeline have their defaults."""
    for fold in folds:
        least = min(fold.world_size, recipe.cluster.min_workers or fold.world_size)
        cluster = recipe.cluster.model_copy(update={"workers": fold.world_size, "min_workers": least})
        sizes = {axis: getattr(fold, axis) for axis in _AXES} | {"ep_inside": math.gcd(recipe.fold.ep_inside, fold.ep)}
        schedule = recipe.schedule
        if fold.pp != recipe.fold.pp:
            schedule = schedule.model_copy(update={"stage_layers": None, "virtual_stages": 1})
        changed = {"cluster": cluster, "fold": recipe.fold.model_copy(update=sizes), "schedule": schedule}
        folded = recipe.model_copy(update=changed)
        with suppress(UserError):
            yield _Folded(folded, as_candidate(folded))
