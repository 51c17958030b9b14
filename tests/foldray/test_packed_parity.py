"""Training in which attention goes the ways of a GPU against one process, which has bool masks."""

from __future__ import annotations

from typing import Any

import pytest

from foldray.recipe import Recipe
from tests.foldray.packed import WAYS
from tests.foldray.parity import make_recipe, one_process, train, worst

MODELS: dict[str, dict[str, Any]] = {
    "sinks and windows": {"attention_sinks": True, "windows": ["sliding:3", "full"]},
    "latent": {"latent_rank": 8, "latent_query_rank": 6, "rope_dim": 2, "value_dim": 4, "kv_heads": 8},
    "chunks": {"windows": ["chunked:6", "tests.foldray.model.striding:STRIDES"], "value_dim": 4},
    "further tokens": {"mtp_depth": 1},
    "norms of turned heads": {"qk_norm": "turned_head", "query_growth": 0.3, "query_growth_positions": 2, "attention_scale": 0.2},
    "a gate, positions by window": {
        "attention_gate": "element", "windows": ["sliding:3", "full"], "full_positions": "none", "query_growth": 0.3,
        "query_growth_positions": 2, "norms": "both", "residual_scale": 0.4,
    },
}  # fmt: skip
FOLDS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "whole": ({"ep": 2}, {}),
    "slices, computed again": ({"ep": 2}, {"kind": "one_a_one_m", "degree": 4, "recompute": ["attention"]}),
    "ring": ({"cp": 2, "ep": 2}, {"recompute": ["attention"]}),
    "all-gather": ({"cp": 2, "tp": 2, "ep": 2}, {"context": "all_gather"}),
    "slices over ranks": ({"cp": 2, "ep": 2}, {"kind": "stream", "degree": 2}),
}


def _train(rank: int, recipe: Recipe, way: str, documents: bool) -> dict[str, Any]:
    with WAYS[way]() as aten:
        found = train(rank, recipe, 2, documents)
    assert way == "plain" or aten.calls
    return found


@pytest.mark.gate(2)
@pytest.mark.parametrize("way", ["packed", "plain"])
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("model", MODELS)
def test_training_is_that_of_one_process(ranks, model: str, fold: str, way: str) -> None:
    sizes, schedule = FOLDS[fold]
    recipe = make_recipe(4, sizes, model=MODELS[model], schedule=schedule)
    found, reference = ranks(4).run(_train, recipe, way, True), one_process(recipe, steps=2, documents=True)
    difference, where = worst(found, reference, relative=False)
    assert difference <= 1e-10, where
