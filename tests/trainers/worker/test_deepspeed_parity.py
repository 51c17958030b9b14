"""DeepSpeed with foldray's groups, against one process with the torch engine. DeepSpeed's master weights are float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ray.train import Checkpoint

from foldray.blueprint import parameter_table
from foldray.comm import Groups
from foldray.model import Losses
from foldray.recipe import Recipe
from foldray.runtime.weights import Weights
from tests.foldray.parity import batches, drifted, engine_on, go_on, make_recipe, one_process, train, worst
from tests.pool import RankPools
from trainers.checkpoints import tensors
from trainers.checkpoints.tensors import Staged
from trainers.measure.comparison import compare_updates
from trainers.measure.verify import UPDATE_TOLERANCE

_SECONDS = 240  # it takes long until many ranks have imported DeepSpeed
_SGD = {"kind": "sgd", "lr": 1.0}
_ADAMW = {"kind": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
_FOLDS: list[tuple[int, dict[str, int]]] = [
    (1, {}),
    (2, {}),
    (2, {"ep": 2}),
    (2, {"tp": 2}),
    (2, {"cp": 2}),
    (2, {"pp": 2}),
    (2, {"etp": 2}),
    (4, {"ep": 2}),
    (4, {"tp": 2, "cp": 2, "ep": 4}),
    (4, {"tp": 2, "pp": 2, "etp": 2}),
    (4, {"pp": 4}),
    (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
    (8, {"tp": 2, "cp": 2, "ep": 8}),
    (8, {"tp": 4, "ep": 4, "etp": 2}),
]


@pytest.fixture(scope="module", autouse=True)
def ranks_end_here(ranks: RankPools) -> Iterator[None]:
    """End the ranks after this module, because the following tests run on Ray and need the memory."""
    yield
    ranks.close()


def _name(value: Any) -> str:
    if isinstance(value, dict) and "kind" in value:
        return f"{value['kind']}-{value.get('degree', 1)}"
    return "-".join(f"{axis}{size}" for axis, size in value.items()) or "dp" if isinstance(value, dict) else str(value)


def _recipe(
    workers: int, fold: dict[str, int], zero: int, optimizer: dict, precision: str = "float32", **sections: Any
) -> Recipe:
    sections = {"engine": {"kind": "deepspeed", "zero": zero}, "training": {"micro_batch": 2}} | sections
    return make_recipe(workers, fold, precision=precision, optimizer=optimizer, **sections)


def _equals_one_process(ranks, recipe: Recipe) -> None:
    """Compare two steps of several micro-batches. A gradient that the first step did not clear would change the second.

    Weights must be as near to those in float64 as one process in float32 is, to 1e-6: a bias that starts at zero has no other
    scale than its gradients, which cancel.
    """
    found = ranks(recipe.cluster.workers).run(train, recipe, 2, timeout=_SECONDS)
    reference = one_process(recipe.model_copy(update={"precision": "float64"}), steps=2)
    rounding, _ = worst([one_process(recipe, steps=2)], reference, relative=True)
    if recipe.optimizer.clip is not None:
        assert min(reference["norms"]) > recipe.optimizer.clip, "the test needs norms above the limit"
    difference, where = worst(found, reference, relative=True)
    assert difference <= 1e-6 + rounding, where
    assert drifted(found) == [], "copies of the same weights part"
    for part in found:
        assert part["norms"] == pytest.approx(reference["norms"], rel=1e-5)
        assert np.array(part["losses"]) == pytest.approx(np.array(reference["losses"]), rel=1e-5)


@pytest.mark.gate(1)
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(("workers", "fold"), _FOLDS, ids=_name)
def test_every_fold_equals_one_process(ranks, workers: int, fold: dict[str, int], zero: int) -> None:
    _equals_one_process(ranks, _recipe(workers, fold, zero, {**_SGD, "clip": 0.5}))


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    ("workers", "fold"), [(2, {"ep": 2}), (4, {"tp": 2, "cp": 2, "ep": 4}), (4, {"tp": 2, "pp": 2})], ids=_name
)
def test_stage_0_equals_one_process(ranks, workers: int, fold: dict[str, int], clip: float | None) -> None:
    _equals_one_process(ranks, _recipe(workers, fold, 0, {**_SGD, "clip": clip}))


_KINDS: list[tuple[int, dict[str, int], dict[str, Any]]] = [
    (4, {"pp": 2, "cp": 2, "ep": 2}, {"model": {"tied_embeddings": True}}),
    (8, {"tp": 2, "pp": 2, "ep": 4}, {"model": {"tied_embeddings": True, "positions": "learned", "norm": "layernorm"}}),
    (2, {"pp": 2}, {"model": {"dense_first": 1}}),  # the first stage has no experts, so one parameter group fewer
    (4, {"pp": 2, "ep": 2}, {"schedule": {"virtual_stages": 2}}),
    (4, {"tp": 2, "ep": 2}, {"moe": {"experts": "grouped"}, "model": {"experts": 16, "topk": 1}}),  # some experts idle
]


@pytest.mark.gate(1)
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(("workers", "fold", "sections"), _KINDS, ids=_name)
def test_kinds_of_models_and_schedules_equal_one_process(
    ranks, workers: int, fold: dict[str, int], sections: dict[str, Any], zero: int
) -> None:
    _equals_one_process(ranks, _recipe(workers, fold, zero, {**_SGD, "clip": 0.5}, **sections))


_SCHEDULES: list[dict[str, Any]] = [
    {"kind": "moe_only", "degree": 4},
    {"kind": "aaam", "degree": 4, "slices": [6, 4, 4, 2]},
    {"kind": "one_a_one_m", "degree": 4, "slices": [6, 4, 4, 2], "recompute": ["attention", "expert"]},
    {"kind": "stream", "degree": 4, "slices": [6, 4, 4, 2], "backward": "one_a_one_m"},
    {"kind": "stream", "degree": 2, "lag": 1, "backward_lag": 3},
]


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("schedule", _SCHEDULES, ids=_name)
@pytest.mark.parametrize(("workers", "fold"), [(2, {"ep": 2}), (4, {"tp": 2, "pp": 2, "ep": 2})], ids=_name)
def test_every_schedule_equals_one_process(ranks, workers: int, fold: dict[str, int], schedule: dict, zero: int) -> None:
    _equals_one_process(ranks, _recipe(workers, fold, zero, {**_SGD, "clip": 0.5}, schedule=schedule))


_CHUNKS: list[dict[str, Any]] = [
    {"reduction": "buckets", "sp_bytes": 3000},
    {"reduction": "chunks", "sp_bytes": 1024, "kind": "one_a_one_m", "degree": 4},
    {"kind": "flow", "sp_bytes": 10_000},
    {"reduction": "chunks", "kind": "stream", "degree": 2},
]


_CHUNKED = [(2, {"ep": 2}), (4, {"ep": 2}), (4, {"tp": 2, "cp": 2, "ep": 4}), (4, {"tp": 2, "pp": 2, "ep": 2})]


@pytest.mark.gate(1)
@pytest.mark.parametrize("schedule", _CHUNKS, ids=_name)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("workers", "fold"), _CHUNKED, ids=_name)
def test_gradients_that_come_reduced_equal_one_process(ranks, workers: int, fold: dict, zero: int, schedule: dict) -> None:
    _equals_one_process(ranks, _recipe(workers, fold, zero, {**_SGD, "clip": 0.5}, schedule=schedule))


@pytest.mark.gate(1)
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_tied_embedding_comes_reduced_too(ranks, positions: str) -> None:
    model = {"tied_embeddings": True, "positions": positions, "max_positions": 16}
    _equals_one_process(ranks, _recipe(4, {"pp": 2, "ep": 2}, 1, {**_SGD, "clip": 0.5}, schedule=_CHUNKS[1], model=model))


def _sent(rank: int, recipe: Recipe) -> tuple[dict[str, int], list[int]]:
    """Return the bytes that a step's gradients sent, by operation, and the bytes of each gradient buffer that a rank keeps."""
    with engine_on(recipe, rank) as (engine, groups):
        engine.train(batches(recipe, groups.dp_rank, 0))
        sent: dict[str, int] = {}
        for (name, operation), count in groups.traffic.counts.items():
            if name in ("dense_gradients", "expert_gradients"):
                sent[operation] = sent.get(operation, 0) + count.inside_bytes + count.across_bytes
        gradients = engine.step.gradients  # type: ignore[attr-defined]
        kept = []
        for buffer in gradients.buffers:
            tensors = {each.data_ptr(): 4 * len(each) for each in (buffer.flat, buffer.sums) if each is not None}
            kept.append(sum(tensors.values()))
    return sent, kept


@pytest.mark.gate(1)
@pytest.mark.parametrize("zero", [1, 2])
def test_sums_go_only_to_their_owners(ranks, zero: int) -> None:
    """A reduce-scatter sends half the bytes of an all-reduce. At stage 2, a rank keeps only the sums that it owns."""
    schedule = {"reduction": "chunks", "sp_bytes": 1024}
    (everyone, whole), *_ = ranks(4).run(_sent, _recipe(4, {"ep": 2}, 0, _SGD, schedule=schedule))
    (owners, kept), *_ = ranks(4).run(_sent, _recipe(4, {"ep": 2}, zero, _SGD, schedule=schedule))
    assert list(everyone) == ["all_reduce"]
    assert list(owners) == ["reduce_scatter"]
    assert owners["reduce_scatter"] == pytest.approx(everyone["all_reduce"] / 2, rel=0.01)
    dense, expert = kept[0] / whole[0], kept[-1] / whole[-1]  # four and two ranks share these
    assert [dense, expert] == pytest.approx([1 / 4 + (zero < 2), 1 / 2 + (zero < 2)], rel=0.01)


def _norm_of_ones(rank: int, recipe: Recipe) -> float:
    """Return the norm that the engine reports if every reduced gradient consists of ones."""
    fold = recipe.placed_fold
    with engine_on(recipe, rank) as (engine, groups):
        gradients = engine.step.gradients

        def fill(given: list) -> list:
            places = fold.dp * fold.cp
            ones = {"dense": 1 / places, "replicated": 1 / places / fold.tp, "expert": 1 / fold.edp}
            for buffer in gradients.buffers:
                buffer.sums.fill_(ones[buffer.name])
            for parameter in engine.model.tied():
                gradients.views[parameter].fill_(0.5 / places)
            engine.execution.weights = Weights(given, groups, torch.float32, engine.model.spec)
            return [Losses.zero(recipe.model, torch.device("cpu")) for _ in given]

        engine.execution.train = fill
        engine.train(batches(recipe, groups.dp_rank, 0))
        return engine.update(0.0).total


@pytest.mark.gate(1)
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("workers", "fold"), [*_FOLDS[3:6], *_FOLDS[8:]], ids=_name)
def test_the_norm_counts_every_parameter_once(ranks, workers: int, fold: dict[str, int], zero: int) -> None:
    recipe = _recipe(workers, fold, zero, _SGD, model={"tied_embeddings": True})
    expected = math.sqrt(sum(spec.count for spec in parameter_table(recipe.model)))
    assert ranks(workers).run(_norm_of_ones, recipe, timeout=_SECONDS) == pytest.approx([expected] * workers, rel=1e-12)


@pytest.mark.nightly("each case trains 40 steps on four ranks")
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("fold", [{"ep": 2}, {"tp": 2, "pp": 2, "ep": 2}], ids=_name)
def test_engines_agree_after_20_steps(ranks, fold: dict[str, int], zero: int) -> None:
    optimizer, training = {**_ADAMW, "clip": 1.0}, {"steps": 20, "micro_batch": 2}
    torch_engine = make_recipe(4, fold, precision="float32", optimizer=optimizer, training=training)
    ours = ranks(4).run(train, torch_engine, 20, timeout=_SECONDS)
    theirs = ranks(4).run(train, _recipe(4, fold, zero, optimizer, training=training), 20, timeout=_SECONDS)
    for mine, other in zip(ours, theirs, strict=True):
        for name, (tensor, _) in mine["weights"].items():
            scale = float(tensor.abs().max())
            torch.testing.assert_close(other["weights"][name].tensor, tensor, rtol=0, atol=1e-4 * scale, msg=name)
        assert np.array(other["losses"]) == pytest.approx(np.array(mine["losses"]), rel=1e-5)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize(("zero", "micro_batch"), [(1, 1), (1, 4), (2, 1)])
def test_bfloat16_stays_near_float32(ranks, zero: int, micro_batch: int) -> None:
    recipe = _recipe(2, {"ep": 2}, zero, _ADAMW, "bfloat16", moe={"experts": "grouped"}, training={"micro_batch": micro_batch})
    reference = one_process(make_recipe(2, 2, precision="float32", optimizer=_ADAMW), steps=4)
    found = ranks(2).run(train, recipe, 4, timeout=_SECONDS)
    losses, expected = np.array(found[0]["losses"]), np.array(reference["losses"])
    assert losses[:, 0] == pytest.approx(expected[:, 0], rel=0.01)
    assert losses == pytest.approx(expected, rel=0.03)  # the torch engine's balance loss in bfloat16 is as far off
    assert found[0]["norms"] == pytest.approx(reference["norms"], rel=0.05)


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize(
    ("workers", "fold", "sections"),
    [
        (2, {"pp": 2}, {"engine": {"kind": "torch", "zero": 1}, "schedule": {"virtual_stages": 2}}),
        (4, {"tp": 2, "ep": 2}, {"schedule": {"reduction": "chunks", "sp_bytes": 1024}}),
    ],
    ids=["torch", "deepspeed"],
)
def test_adamw_in_float32_is_as_near_the_truth_as_one_process_is(ranks, workers: int, fold: dict, sections: dict) -> None:
    """A fold's distance from a float64 run must not be much larger than that of one process in float32.

    AdamW divides a gradient by its own size, so the rounding of a small gradient appears at full size in the weights. A fold
    and one process therefore differ by 1e-4 of a parameter's change and more, as do two orders of summation in one process.
    """
    given = {"model": {"norm": "layernorm", "layers": 4}, **sections}
    recipe = _recipe(workers, fold, 2, {"kind": "adamw", "lr": 1e-3, "weight_decay": 0.1, "clip": 1.0}, **given)
    truth = one_process(Recipe.parse(recipe.model_dump() | {"precision": "float64", "engine": {"kind": "torch"}}), steps=4)
    folded, alone = ranks(workers).run(train, recipe, 4, timeout=_SECONDS), one_process(recipe, steps=4)
    assert _squares(folded, truth) <= 4 * _squares([alone], truth)


def _squares(found: list[dict[str, Any]], truth: dict[str, Any]) -> float:
    """Return the mean squared difference of all weights on all ranks."""
    apart = [
        (tensor.double() - truth["weights"][name].tensor[box]).flatten()
        for part in found
        for name, (tensor, box) in part["weights"].items()
    ]
    return float(torch.cat(apart).square().mean())


_REDUCTIONS: list[dict[str, Any]] = [{}, {"reduction": "buckets"}, {"reduction": "chunks", "sp_bytes": 1024}]


@pytest.mark.gate(2)
@pytest.mark.parametrize("schedule", _REDUCTIONS, ids=str)
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(
    ("workers", "fold"), [(2, {"ep": 2}), (4, {"tp": 2, "ep": 2}), (4, {"pp": 2, "cp": 2, "ep": 2})], ids=str
)
def test_bfloat16_trains_every_parameter(ranks, workers: int, fold: dict[str, int], zero: int, schedule: dict) -> None:
    """Test precision, ZeRO stage and reduction together. At stage 2, reduced gradients once did not reach the optimizer."""
    recipe = _recipe(workers, fold, zero, {**_SGD, "clip": 0.5}, "bfloat16", schedule=schedule)
    found = ranks(workers).run(_updates, recipe, timeout=_SECONDS)[0]
    assert found["update_rel_diff"] <= UPDATE_TOLERANCE["bfloat16"], found


def _updates(rank: int, recipe: Recipe) -> dict[str, Any] | None:
    groups = Groups.create(recipe.placed_fold, rank)
    found = compare_updates(recipe, groups, torch.device("cpu"))
    groups.close()
    return found


def _interrupted(rank: int, recipe: Recipe, folder: Path) -> list[dict[str, Any]]:
    """Train two steps, and two more in three ways: without a break, with a new engine, and with a torch engine."""
    with engine_on(recipe, rank) as (engine, groups):
        engine.state()  # the state can be read before the first step
        go_on(engine, groups, recipe, range(2))
        progress = {"step": 2, "data": "", "fold": {}, "validation": {}}
        tensors.write(folder, Staged(engine.shards()), progress, dist.group.WORLD)
        found = [go_on(engine, groups, recipe, range(2, 4))]
    for other in ({}, {"engine": {"kind": "torch", "zero": 0}}):
        changed = Recipe.parse({**recipe.model_dump(), **other, "training": {**recipe.training.model_dump(), "seed": 1}})
        with engine_on(changed, rank) as (fresh, groups):
            with tensors.opened(Checkpoint.from_directory(str(folder)), dist.group.WORLD) as stored:
                tensors.load(stored, fresh.shards(), dist.group.WORLD)
            fresh.load_shards()
            found.append(go_on(fresh, groups, recipe, range(2, 4)))
    return found


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize(
    ("fold", "zero", "optimizer"),
    [
        ({"tp": 2, "cp": 2, "ep": 2, "etp": 2}, 0, _ADAMW),
        ({"tp": 2, "cp": 2, "ep": 2, "etp": 2}, 1, _ADAMW),
        ({"tp": 2, "pp": 2, "ep": 2}, 2, _ADAMW),
        ({"tp": 2, "pp": 2, "ep": 2}, 1, {**_SGD, "lr": 0.1, "momentum": 0.9}),
        ({"pp": 2, "ep": 2}, 1, _ADAMW),
    ],
    ids=["stage-0", "stage-1", "stage-2", "momentum", "tied, in parts"],
)
def test_training_goes_on_from_saved_state(ranks, tmp_path: Path, fold: dict[str, int], zero: int, optimizer: dict) -> None:
    model = {"tied_embeddings": True, "router": {"score": "sigmoid", "normalize": True, "bias_rate": 0.01}}
    recipe = _recipe(4, fold, zero, {**optimizer, "clip": 0.5}, model=model)
    for straight, resumed, torch_engine in ranks(4).run(_interrupted, recipe, tmp_path, timeout=_SECONDS):
        for name, (tensor, _) in straight["weights"].items():
            assert torch.equal(resumed["weights"][name].tensor, tensor), name
            near = 1e-5 * float(tensor.abs().max())
            torch.testing.assert_close(torch_engine["weights"][name].tensor, tensor, rtol=0, atol=near, msg=name)
        assert resumed["norms"] == straight["norms"]


def _dtypes(rank: int, recipe: Recipe) -> set[torch.dtype]:
    with engine_on(recipe, rank) as (engine, _):
        return {bias.dtype for bias in engine.model.biases().values()}


def test_selection_biases_of_a_bfloat16_model_stay_float32(ranks) -> None:
    assert ranks(2).run(_dtypes, _recipe(2, {"ep": 2}, 1, _ADAMW, "bfloat16"), timeout=_SECONDS) == [{torch.float32}] * 2
