"""Reductions in chunks, and ZeRO: the weights after steps equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foldray.comm import Groups
from foldray.fold import Fold
from foldray.recipe import Recipe
from foldray.runtime import Gradients
from tests.foldray.parity import BATCH, check_equal, engine_on, make_recipe, model_of, one_process, own_batches, train, worst
from tests.foldray.strict import StrictPools
from tests.gate import examples

FOLDS: list[tuple[int, dict[str, int]]] = [
    (2, {}), (2, {"ep": 2}), (4, {"ep": 2}), (4, {"tp": 2, "ep": 4}), (4, {"cp": 2, "ep": 2}), (4, {"tp": 2, "etp": 2}),
    (4, {"pp": 2}), (8, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}), (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
    (8, {"pp": 2, "ep": 4}),
]  # fmt: skip
CHUNKS: list[dict[str, Any]] = [
    {"reduction": "buckets", "sp_bytes": 3000},
    {"reduction": "chunks", "sp_bytes": 1024},
    {"reduction": "chunks", "sp_bytes": 10_000, "kind": "one_a_one_m", "degree": 4},
    {"reduction": "chunks", "sp_bytes": 1 << 30, "kind": "stream", "degree": 4},
    {"kind": "flow", "sp_bytes": 4096},
    {"kind": "flow", "degree": 2, "sp_bytes": 20_000},
    {"kind": "stream", "batch_degree": 2, "degree": 2, "reduction": "end"},
]
OPTIMIZERS = [{"clip": 0.5}, {"kind": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "clip": 1.0}]


def recipe_of(world: int, fold: dict[str, int], schedule: dict[str, Any], zero: int, optimizer: dict[str, Any]) -> Recipe:
    parts = 2 if schedule.get("kind") in ("flow", "stream") else 1
    parts = max(parts, BATCH // (2 * Fold(world, **fold).dp))
    return make_recipe(
        world, fold, schedule=schedule, engine={"kind": "torch", "zero": zero}, training={"micro_batch": parts},
        optimizer={"weight_decay": 0.0, **optimizer},
    )  # fmt: skip


@pytest.mark.gate(1)
@pytest.mark.parametrize("other", [False, True], ids=["one", "other"])
@pytest.mark.parametrize("schedule", CHUNKS, ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("world", "fold"), FOLDS, ids=str)
def test_every_reduction_equals_one_process(ranks, world: int, fold: dict, zero: int, schedule: dict, other: bool) -> None:
    """Two steps of AdamW or of SGD with lr 1, clipped; weights, losses and norms, in float64."""
    optimizer = OPTIMIZERS[(FOLDS.index((world, fold)) + zero + other) % 2]
    recipe = recipe_of(world, fold, schedule, zero, optimizer)
    reference = one_process(recipe, steps=2)
    assert min(reference["norms"]) > optimizer["clip"], "the test needs norms above the limit"
    found = ranks(world).run(train, recipe, 2)
    check_equal(found, reference)


_WITHOUT: list[tuple[int, dict[str, int], dict[str, Any]]] = [
    (2, {}, {"dense_first": 2}), (2, {"tp": 2}, {"dense_first": 2}), (2, {"pp": 2}, {"dense_first": 1}),
    (4, {"pp": 2, "ep": 2}, {"dense_first": 1}), (8, {"pp": 2, "tp": 2, "ep": 2}, {"layers": 4, "dense_first": 2}),
]  # fmt: skip


@pytest.mark.gate(2)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("world", "fold", "model"), _WITHOUT, ids=str)
def test_ranks_without_parameters_of_a_class_equal_one_process(ranks, world: int, fold: dict, model: dict, zero: int) -> None:
    """A position with only dense blocks has no expert gradients. A model with only dense blocks has none at all."""
    recipe = make_recipe(world, fold, model=model, engine={"kind": "torch", "zero": zero}, optimizer=OPTIMIZERS[zero % 2])
    check_equal(ranks(world).run(train, recipe, 2), one_process(recipe, steps=2))


SIZES = st.one_of(st.integers(1, 5000), st.just(1 << 30))


@given(st.integers(1, 3), st.sampled_from([8, 12, 20]), SIZES, st.sampled_from([0, 1, 2]), st.booleans())
@settings(examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_size_of_parameters_and_of_chunks(ranks, layers: int, width: int, size: int, zero: int, tied: bool) -> None:
    """Gradients reduced in chunks or to shares have the same bits as at once, as the order of two terms does not matter."""
    model = {"layers": layers, "ffn_hidden": width, "expert_hidden": width + 4, "tied_embeddings": tied, "moe_every": 2}
    for chunked, whole in ranks(2).run(_sums, model, size, zero):
        assert chunked.keys() == whole.keys()
        assert all(torch.equal(chunked[key], whole[key]) for key in whole)


def _sums(rank: int, model: dict[str, Any], size: int, zero: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a rank's reduced gradients by name: reduced in chunks and gathered again, and reduced at once."""
    groups = Groups.create(make_recipe(2, {}).placed_fold, rank)
    transformer = model_of(groups.fold, groups, torch.float64, **model)
    found = []
    for stage, most in ((zero, size), (0, None)):
        gradients = Gradients(transformer, groups, stage)
        for _ in range(2):
            for number, parameter in enumerate(transformer.parameters()):
                generator = torch.Generator().manual_seed(1000 * rank + number)
                gradients.sum_of(parameter).add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for chunk in gradients.chunks(most):
            gradients.start(chunk)
        gradients.finish()
        names = {parameter: name for name, parameter in transformer.named_parameters()}
        found.append({
            names[parameter]: values.clone() for buffer in gradients.buffers for parameter, values in buffer.gather(buffer.sums)
        })  # fmt: skip
    groups.close()
    return found[0], found[1]


ROUNDED: list[tuple[int, dict[str, int], dict[str, Any], dict[str, Any]]] = [
    (2, {}, {"reduction": "end"}, {}),
    (4, {"ep": 2}, {"reduction": "chunks", "sp_bytes": 3000}, {}),
    (4, {"cp": 2, "etp": 2}, {"kind": "stream", "degree": 2, "reduction": "buckets", "sp_bytes": 1024}, {}),
    (8, {"tp": 2, "pp": 2, "ep": 2}, {"kind": "moe_only", "degree": 2, "reduction": "chunks", "sp_bytes": 4096}, {}),
    (4, {}, {"reduction": "chunks"}, {"placement": {"attention": 2, "experts": 2}}),
]


def rounded(world: int, fold: dict[str, int], schedule: dict[str, Any], sections: dict[str, Any], **engine: Any) -> Recipe:
    size = {"training": {"micro_batch": 1}}
    engine = {"kind": "torch", "zero": 1, "wire": "bfloat16", **engine}
    return make_recipe(world, fold, schedule=schedule, engine=engine, precision="float32", **size, **sections)


def sums_of_parts(rank: int, recipe: Recipe) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Return, for every class, the sums of a step, the sums of all ranks' rounded parts, and the bytes that have left."""
    with engine_on(recipe, rank) as (engine, groups):
        engine.train(own_batches(recipe, groups, 0))
        found = []
        for buffer in engine.gradients.buffers:
            if not buffer.sharded:
                continue
            over = buffer.communicator
            left = sum(count.inside_bytes for (name, _), count in groups.traffic.counts.items() if name == over.name)
            ours = buffer.sharding.in_order(over.all_gather(buffer.sums))
            theirs = torch.zeros_like(ours)
            for part in over.all_gather(buffer.flat).view(over.size, -1):
                theirs += part.bfloat16().float()
            found.append((ours, theirs, left * over.size // (over.size - 1) // buffer.sharding.padded))
        return found


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize(("world", "fold", "schedule", "sections"), ROUNDED, ids=str)
def test_sums_are_those_of_rounded_parts(ranks, world: int, fold: dict, schedule: dict, sections: dict) -> None:
    """To the bit, for the owner adds up in float32, in the order of ranks. A number has two bytes on the wire."""
    for classes in ranks(world).run(sums_of_parts, rounded(world, fold, schedule, sections)):
        assert classes
        for ours, theirs, number in classes:
            assert ours.abs().max() > 0
            assert torch.equal(ours, theirs)
            assert number == 2


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("zero", [1, 2])
def test_rounded_gradients_are_read_when_they_are_there(ranks, zero: int) -> None:
    """Weights are those of the usual communicator and of ZeRO-1, to the bit, and near those of one process."""
    case = ROUNDED[1]
    usual = ranks(4).run(train, rounded(*case), 2)
    strict = StrictPools(ranks)(4).run(train, rounded(*case, zero=zero), 2)
    for ours, theirs in zip(strict, usual, strict=True):
        assert all(torch.equal(held.tensor, theirs["weights"][name].tensor) for name, held in ours["weights"].items())
    off, _ = worst(usual, one_process(rounded(*case), steps=2), relative=True)
    assert 1e-5 < off < 1e-1
