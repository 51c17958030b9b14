"""What ranks measure for a tuner: an open order is chosen as training would choose it, once for each recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foldray.choosing import orders
from foldray.recipe import Recipe
from tests.pool import RankPools
from trainers.measure import trial
from trainers.worker.online import Knobs

STEPS = 200  # as many as a search needs to be worth it


def given(**schedule: Any) -> dict[str, Any]:
    return Recipe.parse(
        {
            "model": {"preset": "tiny", "layers": 2},
            "data": {"seq_len": 64},
            "engine": {"kind": "torch"},
            "fold": {"ep": 2},
            "training": {"global_batch": 4, "micro_batch": 2, "steps": STEPS},
            "schedule": schedule,
            "cluster": {"workers": 2},
        }
    ).model_dump(mode="json")


def measured(rank: int) -> tuple[list[str], int, list[int], list[str]]:
    """Return the orders that were tried, the number of searches, the chosen order of both engines, and their orders' names."""
    state: dict[str, Any] = {"rank": rank, "device": torch.device("cpu")}
    tried, chosen, searches = list[str](), list[int](), list[bool]()
    second = list(orders(Recipe.parse(given()))).index("moe_only:4")

    class Search:
        """Tries two orders, and prefers the second one."""

        def __init__(self) -> None:
            searches.append(True)
            self.left = [Knobs(0), Knobs(second)]

        def ask(self) -> Knobs | None:
            return self.left.pop(0) if self.left else None

        def tell(self, knobs: Knobs, seconds: float) -> None:
            tried.append("moe_only:4" if knobs.order == second else "sequential")

        @property
        def finalists(self) -> list[Knobs]:
            return [Knobs(second)]

    search = trial.online_search

    def made_up(*arguments: Any) -> Any:
        found, online = search(*arguments)
        return (None if found is None else lambda *_: Search()), online

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "online_search", made_up)
        kinds = []
        for recipe in (
            given(),
            given(kind="sequential"),
            given(),
            {**given(), "training": {**given()["training"], "steps": 199}},
        ):
            turn = trial.measure_turn(state, recipe, 1, 1, False)  # only one engine is kept, so each is built anew
            assert turn.seconds[0] > 0
            (ready,) = state["kept"].values()
            kinds.append(f"{ready.engine.execution.ordering.forward.kind}:{ready.engine.execution.ordering.degree}")
            chosen.append(len(state["chosen"]))
        for ready in state["kept"].values():
            ready.engine.close()
            ready.groups.close()
    return tried, len(searches), chosen, kinds


@pytest.mark.gate(1 / 3)
def test_an_open_order_is_measured_as_training_would_have_it(ranks: RankPools) -> None:
    first, other = ranks(2).run(measured)
    tried, searches, chosen, kinds = first
    assert (tried, searches, chosen) == (["sequential", "moe_only:4"], 1, [1, 1, 1, 1]), (
        "what was chosen is kept for an engine that is built again"
    )
    assert other[1] == 0, "only the first rank searches"
    assert kinds == other[3] == ["moe_only:4", "sequential:1", "moe_only:4", "sequential:1"], "199 steps are not worth a search"
