"""Uneven shares of a step: data-parallel places with fewer sequences in the last micro-batch, or none, equal one process.

Training goes on with them after it has lost workers, because the global batch stays as it is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.foldray.parity import BATCH, batches, check_equal, engine_on, make_recipe, one_process, train, weights

STREAM: dict[str, Any] = {"kind": "stream", "degree": 2}
CHUNKS: dict[str, Any] = {"kind": "one_a_one_m", "degree": 2, "reduction": "chunks", "sp_bytes": 4096}
CASES: list[tuple[int, dict[str, int], int, dict[str, Any]]] = [
    # world, fold, micro-batch, schedule
    (3, {"ep": 3}, 1, {}),
    (3, {}, 2, STREAM),
    (5, {}, 1, {}),
    (6, {"tp": 2, "ep": 3, "etp": 2}, 1, {}),
    (6, {"cp": 2, "ep": 6}, 2, STREAM),
    (6, {"pp": 2, "ep": 3}, 1, {}),
    (6, {"pp": 2}, 2, CHUNKS),
    (6, {"cp": 2, "pp": 3}, 1, STREAM),
    (3, {"ep": 3}, 1, STREAM),
    (3, {"ep": 3}, 1, CHUNKS),
    (3, {"ep": 3}, 1, {"kind": "weave", "degree": 1}),
    (3, {"ep": 3}, 1, {"kind": "list", "degree": 2}),
    (3, {"ep": 3}, 2, {"kind": "flow", "batch_degree": 2, "sp_bytes": 4096}),
    (6, {"tp": 2, "ep": 6}, 1, {"kind": "list", "degree": 1, "weight_gradients": "apart"}),
]


def uneven(world: int, fold: dict[str, int], size: int, **sections: Any) -> Recipe:
    """A recipe whose data-parallel places do not share the global batch evenly."""
    sizes = {"experts": 12, "heads": 12, "kv_heads": 6, "layers": max(2, fold.get("pp", 1)), **sections.pop("model", {})}
    training = {"micro_batch": size, "global_batch": BATCH}
    return make_recipe(world, fold, model=sizes, training=training, cluster={"workers": world, "min_workers": 1}, **sections)


def check(ranks: Any, recipe: Recipe, tolerance: float = 1e-10, relative: bool = False, **options: bool) -> None:
    found = ranks(recipe.cluster.workers).run(train, recipe, 2, *options.values(), timeout=240)
    check_equal(found, one_process(recipe, steps=2, **options), tolerance, relative)


@pytest.mark.gate(1)
@pytest.mark.parametrize(("world", "fold", "size", "schedule"), CASES, ids=str)
def test_uneven_shares_equal_one_process(ranks, world: int, fold: dict, size: int, schedule: dict) -> None:
    check(ranks, uneven(world, fold, size, schedule=schedule))


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "model",
    [
        {"router": {"score": "sigmoid", "bias_rate": 0.01, "balance_loss": 0.1}},
        {"router": {"capacity_factor": 1.0, "drop": "position"}},
        {"router": {"capacity_factor": 1.0, "drop": "probability", "drop_scope": "sequence"}},
        {"mtp_depth": 1},
        {"latent_rank": 8, "rope_dim": 2, "kv_heads": 12},
        {"router": {"groups": 3, "topk_groups": 2, "softmax": "before_topk"}, "windows": ["sliding:5"]},
        {"tied_embeddings": True, "moe_every": 2},
        {"router": {"balance_loss": 0.5, "balance_scope": "batch"}},
        {"router": {"balance_loss": 0.5, "balance_scope": "global_batch"}},
    ],
)
def test_kinds_of_models(ranks, model: dict) -> None:
    check(ranks, uneven(3, {"ep": 3}, 1, model=model), documents=True, masked=True)


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("world", "fold", "schedule", "model"),
    [
        (3, {}, STREAM, {}),
        (6, {"cp": 2}, {}, {"windows": ["sliding:5"]}),
        (6, {"cp": 2}, {"context": "all_gather"}, {}),
        (6, {"cp": 2}, STREAM, {"windows": ["sliding:5", "chunked:4"]}),
    ],
    ids=str,
)
def test_documents_and_windows_in_parts(ranks, world: int, fold: dict, schedule: dict, model: dict) -> None:
    check(ranks, uneven(world, fold, 1, schedule=schedule, model=model), documents=True)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("windows", [["full"], ["sliding:5", "chunked:4"]])
@pytest.mark.parametrize("schedule", [{}, STREAM, {"kind": "one_a_one_m", "degree": 2, "slices": [10, 6]}], ids=str)
def test_a_micro_batch_without_sequences_changes_nothing(schedule: dict, windows: list[str], documents: bool) -> None:
    recipe = make_recipe(1, schedule=schedule, model={"windows": windows})
    given, found = batches(recipe, 0, 0, documents=documents), []
    nothing = given[0].cut(BATCH)[-1]
    assert len(nothing.token_BL) == 0
    for step in (given, [*given, nothing]):
        with engine_on(recipe) as (engine, _):
            engine.train(step)
            engine.update(1.0)
            found.append(weights(engine))
            assert float(engine.execution.evaluate([nothing])[0].language) == 0
    for name, (tensor, _) in found[0].items():
        torch.testing.assert_close(found[1][name].tensor, tensor, rtol=0, atol=1e-12)


@pytest.mark.gate(1)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_deepspeed(ranks, zero: int) -> None:
    engine, optimizer = {"kind": "deepspeed", "zero": zero}, {"kind": "sgd", "lr": 1.0, "clip": 0.1}
    check(ranks, uneven(3, {"ep": 3}, 1, engine=engine, precision="float32", optimizer=optimizer), 1e-6, relative=True)


def test_grouped_experts(ranks) -> None:
    check(ranks, uneven(3, {"ep": 3}, 1, precision="float32", moe={"experts": "grouped"}), 1e-5, relative=True)


def test_some_places_have_nothing() -> None:
    sizes = [[len(batch.token_BL) for batch in batches(uneven(3, {"ep": 3}, 2), rank, 0)] for rank in range(3)]
    assert sizes == [[2, 2], [2, 0], [2, 0]]


def test_a_recipe_of_fixed_workers_has_even_shares() -> None:
    with pytest.raises(UserError, match=r"^training\.global_batch=8: must be a multiple of dp × micro_batch = 3 × 1"):
        make_recipe(3, {"ep": 3}, model={"experts": 12}, training={"micro_batch": 1, "global_batch": 8})
    with pytest.raises(UserError, match=r"^training\.global_batch=8: must be a multiple"):  # padding needs equal shapes
        uneven(3, {"ep": 3}, 1, model={"router": {"capacity_factor": 1.0, "pad": True}})
