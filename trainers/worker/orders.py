"""The orders that `schedule.kind: auto` chooses from, and the search among them in a training's first steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.memory import ledger
from foldray.costs.rank import OpWork
from foldray.errors import UserError
from foldray.finding.choice import Choice, PieceTimes
from foldray.orders import AUTO, OVERLAPS, SEQUENTIAL, Ordering
from foldray.recipe import Recipe
from foldray.refold import as_candidate
from foldray.runtime import Execution
from trainers.worker.online import Knobs, MakeSearch, Online

WORTH = 200  # steps within which a search pays for itself, or it is not made
_DEGREES = (1, 2, 4)
_FITS = 0.9  # share of a device's memory that an order may need
_DEVICE = "h200"  # bytes do not depend on the GPU


def orders(recipe: Recipe, memory: float | None = None) -> dict[str, Ordering]:
    """Return the orders that a recipe may have, by short name; the first one cuts nothing.

    There is only this one if no rows travel, if the order decides which tokens experts drop, or if experts have workers of
    their own.

    Args:
        memory: bytes of a worker's device, if orders must fit there.
    """
    found = {SEQUENTIAL.name: recipe.ordering}
    fold, router = recipe.placed_fold, recipe.model.router
    if recipe.placement is None and fold.ep * fold.etp > 1 and router.capacity_factor is None:
        for name in _names():
            with suppress(UserError):  # sequences or micro-batches cannot be cut like this
                ordering = recipe.named_ordering(name)._replace(reduction=recipe.ordering.reduction)
                if memory is None or _needed(recipe, ordering) <= _FITS * memory:
                    found[name] = ordering
    return found


def _names() -> Iterator[str]:
    for kind, row in OVERLAPS.items():
        for degree in _DEGREES if row.cuts else ():
            if degree > 1:
                yield f"{kind}:{degree}"
            elif not row.of_stages or row.batch_degree > 1:
                yield kind
            if degree > 2 and row.cuts_attention:
                yield f"{kind}:{degree}/2"


def _needed(recipe: Recipe, ordering: Ordering) -> float:
    """Return the bytes that the fullest worker needs, as the planner counts them."""
    candidate = replace(as_candidate(recipe), ordering=ordering)
    return ledger(candidate, OpWork(candidate, Device.of(candidate.job, load_hardware(_DEVICE))).rank).total


def online_search(
    recipe: Recipe, execution: Execution, device: torch.device, search: MakeSearch | None, done: Callable[[], int]
) -> tuple[MakeSearch | None, Online]:
    """Return the search of a training, and what it changes between steps.

    Args:
        search: the search for sizes and degrees that the recipe leaves open.
        done: returns the number of finished steps.
    """
    if recipe.schedule.kind != AUTO.name or recipe.schedule.opened:
        sizes = recipe.schedule.sp_bytes == "auto"
        return search, Online(execution, execution.groups, device, recipe.orderings, sizes)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    among = orders(recipe, memory)
    orderings = list(among.values())
    online = Online(
        execution, execution.groups, device, dict(enumerate(orderings)), False, list(among),
        lambda: recipe.training.steps - done() >= WORTH,
    )  # fmt: skip
    return (lambda *_: OrderSearch(execution, recipe, orderings)) if len(among) > 1 else None, online


class OrderSearch:
    """Tries what `finding.Choice` asks for. The order that cuts nothing is always in the run-off."""

    def __init__(self, execution: Execution, recipe: Recipe, orderings: Sequence[Ordering]):
        ranks = execution.groups.fold.cp * execution.groups.fold.tp
        length = recipe.data.seq_len // ranks
        times = PieceTimes(recipe.slice_cost, ranks)
        self._execution = execution
        self._choice = Choice(
            orderings, lambda ordering, passes: execution.graph_of(ordering, length, passes), times, recipe.accumulation
        )

    def ask(self) -> Knobs | None:
        number = self._choice.ask()
        return None if number is None else Knobs(number)

    def tell(self, knobs: Knobs, seconds: float) -> None:
        graph, costs = self._execution.last, self._execution.ordering.costs
        assert graph is not None
        assert costs is not None
        self._choice.tell(knobs.order, seconds, graph, costs)

    @property
    def finalists(self) -> list[Knobs]:
        return [Knobs(number) for number in dict.fromkeys([*self._choice.ranked[:2], 0])]
