"""Training with tokens that travel once to each rank gives the results of one process, which has a row for each assignment.

The weights after SGD with lr 1 have every gradient, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from foldray.orders import LIST, WEAVE
from foldray.recipe import Recipe
from tests.foldray.parity import check_equal, make_recipe, one_process, train
from tests.foldray.strict import StrictPools

_STEPS = 2
AGAIN = {"recompute": ["attention", "expert", "ffn", "shared"]}


class Case(NamedTuple):
    """A fold, the keys of the model and of the schedule that differ from those of `make_recipe`, and further sections."""

    world: int
    fold: dict[str, int]
    model: dict[str, Any]
    schedule: dict[str, Any]
    sections: Mapping[str, Any] = MappingProxyType({})

    @property
    def recipe(self) -> Recipe:
        sections = {**self.sections, "moe": {"dispatch": "rank", **self.sections.get("moe", {})}}
        return make_recipe(self.world, self.fold, model={"topk": 4, **self.model}, schedule=self.schedule, **sections)


GROUPED = {"moe": {"experts": "grouped"}}
CASES = {
    # Every run has these.
    "TP2 CP2 EP2 ETP2, stream": Case(8, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}, {}, {"kind": "stream", "degree": 2}),
    "PP2 EP2, weave, weights apart": Case(
        4, {"pp": 2, "ep": 2}, {}, {"kind": WEAVE.name, "degree": 2, "weight_gradients": "apart"}, GROUPED
    ),
    "EP4, dropping, experts again": Case(
        4, {"ep": 4}, {"router": {"capacity_factor": 0.75, "drop": "position"}}, {"kind": "one_a_one_m", "degree": 4, **AGAIN}
    ),
    "EP2, list, two parts": Case(
        2, {"ep": 2}, {"shared_hidden": 0}, {"kind": LIST.name, "degree": 2, "batch_degree": 2}, {"training": {"micro_batch": 2}}
    ),
    "EP8, few choices": Case(8, {"ep": 8}, {"topk": 2}, {}, GROUPED),
    "PP2 ETP2, further tokens, stages by turns": Case(
        4, {"pp": 2, "etp": 2}, {"layers": 4, "mtp_depth": 2}, {"virtual_stages": 2, "kind": "stream", "degree": 2}
    ),
    "EP4 on two nodes, stream": Case(4, {"ep": 4, "ep_inside": 2}, {}, {"kind": "stream", "degree": 2}, GROUPED),
    "ETP2 EP4 on two nodes, experts again": Case(
        8, {"ep": 4, "etp": 2, "ep_inside": 2}, {"router": {"capacity_factor": 0.75, "drop": "position"}},
        {"kind": "one_a_one_m", "degree": 2, **AGAIN},
    ),
    "TP2 EP8 on two nodes, flow, ZeRO": Case(
        8, {"tp": 2, "ep": 8, "ep_inside": 4}, {},
        {"kind": "flow", "degree": 2, "reduction": "chunks", "sp_bytes": 4096},
        {"engine": {"zero": 1}, "training": {"micro_batch": 2}},
    ),
    "EP2, a pattern": Case(2, {"ep": 2}, {"router": {"skew": 1.0}}, {}),
    # Nightly runs have these, too.
    "one rank": Case(1, {}, {}, {}),
    "one rank, dropping": Case(
        1, {}, {"router": {"capacity_factor": 0.75, "drop": "position"}}, {"kind": "aaam", "degree": 4}
    ),
    "EP4 ETP2, all experts": Case(8, {"ep": 4, "etp": 2}, {"topk": 8}, {"kind": "aaam", "degree": 2}, GROUPED),
    "TP2 EP4, one expert": Case(4, {"tp": 2, "ep": 4}, {"topk": 1}, {"kind": "moe_only", "degree": 2}),
    "CP2 EP2 EDP2, flow, weights apart": Case(
        4, {"cp": 2, "ep": 2}, {}, {"kind": "flow", "degree": 2, "weight_gradients": "apart"}
    ),
    "TP2 CP2 PP2 EP4, ZeRO, chunks": Case(
        8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}, {},
        {"kind": "stream", "degree": 2, "reduction": "chunks", "sp_bytes": 4096}, {"engine": {"zero": 2}},
    ),
    "ETP4, sigmoid": Case(
        4, {"etp": 4}, {"router": {"score": "sigmoid", "normalize": True, "bias_rate": 0.01, "scale": 2.5}},
        {"kind": "stream", "degree": 4, **AGAIN},
    ),
    "TP2 CP2 EP4, sequences compete": Case(
        4, {"tp": 2, "cp": 2, "ep": 4}, {"router": {"capacity_factor": 1.0, "drop_scope": "sequence"}}, {"context": "all_gather"}
    ),
    "PP4 EP2, list": Case(8, {"pp": 4, "ep": 2}, {"moe_every": 2, "layers": 4}, {"kind": LIST.name, "degree": 2}),
    "PP2 EP2, list again": Case(4, {"pp": 2, "ep": 2}, {}, {"kind": LIST.name, "degree": 2, "virtual_stages": 2, **AGAIN}),
    "EP2 EDP2, weave": Case(4, {"ep": 2}, {"mtp_depth": 1}, {"kind": WEAVE.name}, GROUPED),
    "PP2 EP4 on two nodes, weave, weights apart, ZeRO": Case(
        8, {"pp": 2, "ep": 4, "ep_inside": 2}, {}, {"kind": WEAVE.name, "degree": 2, "weight_gradients": "apart"},
        {"engine": {"zero": 2}},
    ),
    "TP2 EP8 on two nodes, few choices": Case(8, {"tp": 2, "ep": 8, "ep_inside": 4}, {"topk": 2}, {"kind": "aaam", "degree": 2}),
    "EP4 on two nodes, list, weights apart, ZeRO": Case(
        4, {"ep": 4, "ep_inside": 2}, {}, {"kind": LIST.name, "degree": 4, "recompute": ["expert"]}, {"engine": {"zero": 2}}
    ),
    "EP8 on four nodes, further tokens, weights apart": Case(
        8, {"ep": 8, "ep_inside": 2}, {"mtp_depth": 1}, {"kind": "one_a_one_m", "degree": 4, "weight_gradients": "whole"}, GROUPED
    ),
    "CP2 EP4 on two nodes, slices": Case(
        8, {"cp": 2, "ep": 4, "ep_inside": 2}, {}, {"kind": "stream", "degree": 4, "reduction": "buckets", **AGAIN},
        {"engine": {"zero": 1}},
    ),
    "EP4 on one node, list": Case(4, {"ep": 4, "ep_inside": 4}, {}, {"kind": LIST.name, "degree": 2}, GROUPED),
    "EP4 on two nodes, an order of axes, one expert": Case(
        8, {"ep": 4, "ep_inside": 2, "moe_order": "edp-ep-etp-pp"}, {"topk": 1}, {},  # type: ignore[dict-item]
    ),
    "EP8 on four nodes, a pattern": Case(8, {"ep": 8, "ep_inside": 2}, {"router": {"skew": 1.5}}, {}),
    "EP4, other order of axes": Case(
        8, {"tp": 2, "ep": 4, "etp": 2, "order": "cp-tp-dp-pp", "moe_order": "ep-edp-etp-pp"}, {},  # type: ignore[dict-item]
        {"kind": "one_a_one_m", "degree": 2},
    ),
}  # fmt: skip


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", CASES)
def test_tokens_that_travel_once_equal_one_process(ranks: Any, name: str) -> None:
    check(ranks, CASES[name].recipe)


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize("name", [
    "TP2 CP2 EP2 ETP2, stream", "EP4, dropping, experts again", "EP4 on two nodes, stream",
    *(name for name in CASES if "nodes" in name and "stream" not in name), "EP4 on one node, list",
])  # fmt: skip
def test_nothing_is_read_early_or_started_out_of_order(ranks: Any, name: str) -> None:
    check(StrictPools(ranks), CASES[name].recipe)


@pytest.mark.gate(1)
@pytest.mark.parametrize("sections", [
    {"engine": {"kind": "deepspeed", "zero": 1}},
    {"engine": {"kind": "deepspeed", "zero": 2}, "schedule": {"kind": "stream", "degree": 2, "reduction": "chunks"}},
    {"moe": {"backend": "deepspeed", "experts": "grouped", "dispatch": "rank"}},
], ids=["ZeRO-1", "ZeRO-2", "gates"])  # fmt: skip
def test_tokens_travel_once_with_deepspeed(ranks: Any, sections: dict[str, Any]) -> None:
    model = {"topk": 4, "router": {"softmax": "before_topk", "normalize": True}}
    recipe = make_recipe(2, 2, precision="float32", model=model, **{"moe": {"dispatch": "rank"}, **sections})
    check_equal(ranks(2).run(train, recipe, _STEPS), one_process(recipe, steps=_STEPS), 1e-5, relative=True)


def check(ranks: Any, recipe: Recipe) -> None:
    assert recipe.moe.dispatch == "rank"
    check_equal(ranks(recipe.cluster.workers).run(train, recipe, _STEPS), one_process(recipe, steps=_STEPS))
