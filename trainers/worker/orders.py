"""The search among orders in a training's first steps (`schedule.kind: auto`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from foldray.choosing import orders
from foldray.finding.choice import Choice, PieceTimes
from foldray.orders import AUTO, Ordering
from foldray.recipe import Recipe
from foldray.runtime import Execution
from trainers.worker.online import Knobs, MakeSearch, Online

WORTH = 200  # steps within which a search pays for itself, or it is not made


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
