"""A balance loss over batches, or over the global batch, trains as plain torch does, under every fold and schedule, to 1e-10."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch

from foldray.choosing import orders
from foldray.model import Transformer
from foldray.moe import Router, router
from foldray.moe.balance import Balance, Sequences, Tally
from foldray.recipe import Recipe
from tests.foldray.parity import BATCH, make_recipe, train
from tests.foldray.random_recipes import Case
from tests.foldray.test_random_recipes import difference, reference
from tests.patches import patched

STEPS, LR, SCOPES = 3, 0.3, ("batch", "global_batch")
ALL = ["attention", "expert", "ffn", "shared"]
DROPS = {"capacity_factor": 0.75, "drop": "position", "drop_scope": "sequence"}
QUANTILE = {"score": "sigmoid", "bias_rate": 0.5, "bias_update": "quantile"}
BIASED_SOFTMAX = {"score": "softmax", "softmax": "before_topk", "selection_bias": True}
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "one process": (1, {}, {}),
    "one process, slices": (1, {}, {"schedule": {"kind": "one_a_one_m", "degree": 4}, "training": {"micro_batch": 2}}),
    "DP2": (2, {}, {}),
    "EP2": (2, {"ep": 2}, {"training": {"micro_batch": 1}}),
    "EP2, whole": (2, {"ep": 2}, {"training": {"micro_batch": 4}, "schedule": {"kind": "auto"}}),
    "TP2": (2, {"tp": 2}, {}),
    "CP2": (2, {"cp": 2}, {}),
    "ETP2": (2, {"etp": 2}, {}),
    "PP2": (2, {"pp": 2}, {"training": {"micro_batch": 2}}),
    "interleaved": (2, {"pp": 2}, {"training": {"micro_batch": 2}, "schedule": {"virtual_stages": 2}}),
    "slices, recomputed": (2, {"ep": 2}, {"schedule": {"kind": "stream", "degree": 4, "lag": 1, "recompute": ALL}}),
    "list, weights apart": (2, {"ep": 2}, {"schedule": {"kind": "list", "degree": 2, "weight_gradients": "apart"}}),
    "weights whole, chunks": (
        2, {"tp": 2},
        {"schedule": {"kind": "one_a_one_m", "degree": 2, "weight_gradients": "whole", "reduction": "chunks", "sp_bytes": 2048}},
    ),
    "woven": (2, {"ep": 2}, {"schedule": {"kind": "weave", "degree": 2}, "training": {"micro_batch": 1}}),
    "ZeRO, biased sigmoids": (
        2, {"ep": 2},
        {"engine": {"zero": 2}, "model": {"router": {"score": "sigmoid", "bias_rate": 0.05, "bias_update": "centered"}}},
    ),
    "quantiles, slices": (
        2, {"ep": 2}, {"schedule": {"kind": "stream", "degree": 4, "lag": 1}, "model": {"router": QUANTILE | {"bias_rate": 1.0}}},
    ),
    "quantiles, TP2, CP2": (4, {"tp": 2, "cp": 2, "ep": 4}, {"model": {"router": QUANTILE}}),
    "quantiles, PP2, ZeRO": (
        4, {"pp": 2}, {"engine": {"zero": 1}, "training": {"micro_batch": 1}, "model": {"router": QUANTILE}},
    ),
    "quantiles, ranks of experts": (
        3, {},
        {"placement": {"attention": 2, "experts": 1}, "model": {"router": QUANTILE | BIASED_SOFTMAX}},
    ),
    "ranks of experts, DP2": (3, {}, {"placement": {"attention": 2, "experts": 1}}),
    "ranks of experts, EP2": (3, {"ep": 2}, {"placement": {"attention": 1, "experts": 2}, "schedule": {"degree": 2}}),
    "TP2, EP4, stream": (4, {"tp": 2, "ep": 4}, {"schedule": {"kind": "stream", "degree": 2, "lag": 1}}),
    "TP2, CP2": (4, {"tp": 2, "cp": 2, "ep": 2}, {"schedule": {"kind": "moe_only", "degree": 2}, "training": {"micro_batch": 2}}),
    "PP2, EP2, further tokens": (4, {"pp": 2, "ep": 2}, {"model": {"mtp_depth": 1}, "training": {"micro_batch": 1}}),
    "PP2, CP2, ETP2, list": (4, {"pp": 2, "cp": 2, "etp": 2}, {"schedule": {"kind": "list", "degree": 2}}),
    "ranks of experts, TP2, PP2": (
        6, {"tp": 2, "pp": 2, "ep": 2},
        {"placement": {"attention": 4, "experts": 2, "expert_pp": 1}, "training": {"micro_batch": 2}},
    ),
    "dropping, once to each rank": (
        4, {"cp": 2, "ep": 2},
        {"moe": {"dispatch": "rank"}, "model": {"router": DROPS}},
    ),
}  # fmt: skip
WORLDS = sorted({workers for workers, _, _ in CASES.values()})


def recipe_of(name: str, scope: str) -> Recipe:
    workers, fold, sections = CASES[name]
    model = dict(sections.get("model", {}))
    model["router"] = {"balance_loss": 0.5, "z_loss": 0.01, "balance_scope": scope, **model.get("router", {})}
    return make_recipe(workers, fold, **{**sections, "model": model, "optimizer": {"lr": LR}})


def trainings(rank: int, recipes: list[Recipe], fault: str | None = None) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        if fault is not None:
            owner, attribute, wrap = FAULTS[fault][2:]
            stack.enter_context(patched(owner, attribute, wrap(getattr(owner, attribute))))
        return [train(rank, recipe, STEPS) for recipe in recipes]


@cache
def wanted(model: str, together: int) -> dict[str, Any]:
    """Train a model in plain torch, with as many sequences in a micro-batch as a balance loss over batches counts together."""
    recipe = make_recipe(1, model=json.loads(model), optimizer={"lr": LR}, training={"micro_batch": together})
    return reference(Case(recipe, documents=False, masked=False), STEPS)


def apart(found: Sequence[dict[str, Any]], name: str, scope: str) -> tuple[float, str]:
    recipe = recipe_of(name, scope)
    together = recipe.placed_fold.dp * recipe.training.micro_batch if scope == "batch" else BATCH
    return difference(list(found), wanted(recipe.model.model_dump_json(), together))


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("workers", WORLDS)
def test_training_equals_plain_torch(ranks, workers: int, scope: str) -> None:
    names = [name for name, (world, _, _) in CASES.items() if world == workers]
    results = ranks(workers).run(trainings, [recipe_of(name, scope) for name in names])
    for name, found in zip(names, zip(*results, strict=True), strict=True):
        off, where = apart(found, name, scope)
        assert off <= 1e-10, f"{where} with {name}"


def test_no_order_cuts_a_batch_that_is_counted_whole() -> None:
    sizes = {scope: {order.batch_degree for order in orders(recipe_of("EP2, whole", scope)).values()} for scope in SCOPES}
    assert sizes == {"batch": {1}, "global_batch": {1, 2, 4}}


def _own(_: Any) -> Any:
    return lambda self, x: x


def _twice_on_the_first(reduce: Any) -> Any:
    return lambda self, x: reduce(self, x * (2 if self.communicator.index == 0 else 1))


def _times_two(slopes: Any) -> Any:
    return lambda self: (slopes(self)[0] * 2, slopes(self)[1])


def _with_gradients_of_counts(slopes: Any) -> Any:
    """As if the frequencies were the mean scores themselves."""
    return lambda self: (slopes(self)[0] + self.tally.score_BE * (self.share_BE.shape[1] / self.length**2), slopes(self)[1])


def _by_sequence(find: Any) -> Any:
    return lambda tally, sequences, scope, earlier_E: find(tally, sequences, "sequence", earlier_E)


def _of_the_last_piece(_: Any) -> Any:
    def wrong(self: Tally, other: Tally) -> Tally:
        return Tally(other.count_BE, self.score_BE + other.score_BE, self.z + other.z, self.dropped + other.dropped)

    return wrong


def _bias_alone(_: Any) -> Any:
    @torch.no_grad()
    def wrong(self: Router, count_E: torch.Tensor) -> None:
        if self.spec.bias_rate:
            self.update_bias(count_E.to(self.bias))

    return wrong


def _of_nobody_else(update: Any) -> Any:
    """As if each rank moved its biases by the margins of its own tokens."""
    return lambda self, count_ME: [router.update(count_ME[self.spec.moe_layers.index(layer)]) for layer, router in self.routers()]


def _and_earlier_ones(update: Any) -> Any:
    """As if margins of earlier steps stayed."""

    def wrong(self: Router, count_E: torch.Tensor) -> None:
        kept_EQ = self.margin_EQ.clone()
        update(self, count_E)
        self.margin_EQ.copy_(kept_EQ)

    return wrong


FAULTS: dict[str, tuple[str, str, Any, str, Callable[[Any], Any]]] = {
    "counts of one rank": ("DP2", "batch", Sequences, "sum_of_batch", _own),
    "counts of one TP rank": ("TP2", "batch", Sequences, "sum_of_batch", _own),
    "counts twice under TP": ("TP2", "batch", Sequences, "sum_of_batch", _twice_on_the_first),
    "a factor of dp": ("DP2", "global_batch", Balance, "slopes", _times_two),
    "gradients through counts": ("EP2", "batch", Balance, "slopes", _with_gradients_of_counts),
    "a scope that slices ignore": ("slices, recomputed", "global_batch", router, "frequencies", _by_sequence),
    "counts of the last slice": ("slices, recomputed", "batch", Tally, "__add__", _of_the_last_piece),
    "margins of one rank": ("quantiles, TP2, CP2", "batch", Transformer, "update_biases", _of_nobody_else),
    "margins of earlier steps": ("quantiles, slices", "batch", Router, "update", _and_earlier_ones),
    "frequencies that stay even": ("EP2", "global_batch", Router, "update", _bias_alone),
}


@pytest.mark.nightly("shows that the comparison above finds these faults")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_finds_a_fault(ranks, fault: str) -> None:
    name, scope = FAULTS[fault][:2]
    workers = CASES[name][0]
    results = ranks(workers).run(trainings, [recipe_of(name, scope)], fault)
    assert apart([found for (found,) in results], name, scope)[0] > 1e-6
