"""DeepSpeed with its optimizer on the host (ZeRO-Offload), and with keys of its own configuration.

Without a GPU both sides are a CPU, so a training with it has the bits of the same training without, which
`test_deepspeed_parity.py` compares with one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray.train import Checkpoint

from foldray.recipe import Recipe
from tests.foldray.live import storage
from tests.foldray.parity import engine_on, go_on, make_recipe, own_batches, train
from tests.trainers.worker.test_deepspeed_parity import _equals_one_process
from trainers.checkpoints import tensors
from trainers.checkpoints.tensors import Staged

_SECONDS = 240  # it takes long until many ranks have imported DeepSpeed
_ADAMW: dict[str, Any] = {"kind": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "clip": 0.5}
_SGD: dict[str, Any] = {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "clip": 0.5}
_REDUCTIONS: list[dict[str, Any]] = [{}, {"reduction": "buckets"}, {"reduction": "chunks", "sp_bytes": 1024}]
_FOLDS: list[tuple[int, dict[str, int]]] = [
    (2, {"ep": 2}), (4, {"tp": 2, "ep": 2}), (4, {"pp": 2, "cp": 2, "ep": 2}), (4, {"tp": 2, "etp": 2}),
]  # fmt: skip
_LORA = {"adapter": {"rank": 4, "alpha": 8.0}}


@pytest.fixture(scope="module", autouse=True)
def ranks_end_here(ranks: Any) -> Any:
    """End the ranks after this module, because the following tests run on Ray and need the memory."""
    yield
    ranks.close()


def _recipe(workers: int, fold: dict[str, int], zero: int, offload: bool = True, **sections: Any) -> Recipe:
    engine = {"kind": "deepspeed", "zero": zero, "offload": "optimizer" if offload else None, **sections.pop("engine", {})}
    base: dict[str, Any] = {"precision": "float32", "optimizer": _ADAMW, "training": {"micro_batch": 2}}
    return make_recipe(workers, fold, engine=engine, **{**base, **sections})


def _equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    same = all(torch.equal(ours["weights"][key].tensor, held.tensor) for key, held in theirs["weights"].items())
    return same and (ours["norms"], ours["losses"]) == (theirs["norms"], theirs["losses"])


@pytest.mark.gate(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", _REDUCTIONS, ids=str)
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(("workers", "fold"), _FOLDS, ids=str)
def test_the_host_computes_the_bits_of_the_device(
    ranks: Any, workers: int, fold: dict[str, int], zero: int, schedule: dict[str, Any], precision: str
) -> None:
    sections = {"schedule": schedule, "precision": precision, "moe": {"experts": "grouped"}}
    sections["optimizer"] = _SGD if fold.get("pp") else _ADAMW
    sections["model"] = _LORA if fold.get("etp") else {}
    found, without = (
        ranks(workers).run(train, _recipe(workers, fold, zero, offload, **sections), 3, timeout=_SECONDS)
        for offload in (True, False)
    )
    assert all(map(_equal, found, without))


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(
    ("workers", "fold", "schedule"),
    [
        (2, {"ep": 2}, {"kind": "stream", "degree": 2}),
        (4, {"tp": 2, "ep": 2}, {"kind": "one_a_one_m", "degree": 4, "reduction": "chunks", "sp_bytes": 1024}),
        (4, {"pp": 2, "ep": 2}, {"reduction": "buckets", "sp_bytes": 3000}),
        (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}, {}),
    ],
    ids=str,
)
def test_folds_and_schedules_equal_one_process(
    ranks: Any, workers: int, fold: dict[str, int], schedule: dict[str, Any], zero: int
) -> None:
    optimizer = {"kind": "sgd", "lr": 1.0, "clip": 0.5}
    _equals_one_process(ranks, _recipe(workers, fold, zero, schedule=schedule, optimizer=optimizer))


def _sides(rank: int, recipe: Recipe) -> tuple[int, bool]:
    """Return how many partitions the optimizer updates, and whether gradients reach each of them on the host by a copy."""
    with engine_on(recipe, rank) as (engine, groups):
        updated = engine.optimizer.single_partition_of_fp32_groups
        model = {storage(each)[0] for each in (*engine.model.parameters(), *engine.step.gradients.views.values())}
        before = [bool(flat.grad.any()) for flat in updated]
        engine.train(own_batches(recipe, groups, 0))
        apart = all(storage(each)[0] not in model for flat in updated for each in (flat, flat.grad))
        on_host = all(each.device.type == "cpu" for flat in updated for each in (flat, flat.grad))
        return len(updated), apart and on_host and not any(before) and all(bool(flat.grad.any()) for flat in updated)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("schedule", [_REDUCTIONS[0], _REDUCTIONS[2]], ids=str)
def test_gradients_are_copied_to_the_host(ranks: Any, schedule: dict[str, Any]) -> None:
    for count, copied in ranks(2).run(_sides, _recipe(2, {"ep": 2}, 1, schedule=schedule), timeout=_SECONDS):
        assert count >= 3
        assert copied


def _interrupted(rank: int, recipe: Recipe, there: Recipe, folder: Path) -> list[dict[str, Any]]:
    """Train two steps, and two more in two ways: without a break, and from a checkpoint with another engine."""
    with engine_on(recipe, rank) as (engine, groups):
        go_on(engine, groups, recipe, range(2))
        progress = {"step": 2, "data": "", "fold": {}, "validation": {}}
        tensors.write(folder, Staged(engine.shards()), progress, dist.group.WORLD)
        straight = go_on(engine, groups, recipe, range(2, 4))
    with engine_on(there, rank) as (fresh, groups):
        with tensors.opened(Checkpoint.from_directory(str(folder)), dist.group.WORLD) as stored:
            tensors.load(stored, fresh.shards(), dist.group.WORLD)
        fresh.load_shards()
        return [straight, go_on(fresh, groups, there, range(2, 4))]


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("offload", [True, False], ids=["to the device", "to the host"])
@pytest.mark.parametrize("schedule", [_REDUCTIONS[0], _REDUCTIONS[2]], ids=str)
@pytest.mark.parametrize("zero", [1, 2])
def test_training_goes_on_on_the_other_side(
    ranks: Any, tmp_path: Path, zero: int, schedule: dict[str, Any], offload: bool
) -> None:
    recipes = [_recipe(4, {"tp": 2, "ep": 2}, zero, side, schedule=schedule) for side in (offload, not offload)]
    for straight, resumed in ranks(4).run(_interrupted, *recipes, tmp_path, timeout=_SECONDS):
        assert _equal(resumed, straight)


@pytest.mark.nightly("trains with two engines on four ranks")
@pytest.mark.parametrize("offload", [True, False], ids=["to the device", "to the host"])
def test_a_checkpoint_of_deepspeed_goes_on_with_the_torch_engine(ranks: Any, tmp_path: Path, offload: bool) -> None:
    here = _recipe(4, {"tp": 2, "ep": 2}, 1, offload)
    there = _recipe(4, {"tp": 2, "ep": 2}, 2, not offload, engine={"kind": "torch"})
    for straight, resumed in ranks(4).run(_interrupted, here, there, tmp_path, timeout=_SECONDS):
        for name, (tensor, _) in straight["weights"].items():
            near = 1e-5 * float(tensor.abs().max())
            torch.testing.assert_close(resumed["weights"][name].tensor, tensor, rtol=0, atol=near, msg=name)


def _skipped(rank: int, recipe: Recipe) -> bool:
    """Return whether a step with a gradient that is no number leaves everything as it is, and the next one trains."""
    with engine_on(recipe, rank) as (engine, groups):
        go_on(engine, groups, recipe, range(1))
        before = [shard.tensor.clone() for shard in engine.shards()]
        sum_of = engine.execution.gradients.sum_of
        engine.execution.gradients.sum_of = lambda parameter: sum_of(parameter).fill_(float("nan"))
        engine.train(own_batches(recipe, groups, 1))
        engine.update(0.01, skips=True)
        kept = all(map(torch.equal, before, (shard.tensor for shard in engine.shards())))
        engine.execution.gradients.sum_of = sum_of
        engine.train(own_batches(recipe, groups, 2))
        total = engine.update(0.01, skips=True).total
        moved = not all(map(torch.equal, before, (shard.tensor for shard in engine.shards())))
    return kept and moved and total == total


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("schedule", [_REDUCTIONS[0], _REDUCTIONS[2]], ids=str)
@pytest.mark.parametrize("zero", [1, 2])
def test_a_skipped_step_leaves_the_host_as_it_is(ranks: Any, zero: int, schedule: dict[str, Any]) -> None:
    assert ranks(2).run(_skipped, _recipe(2, {"ep": 2}, zero, schedule=schedule), timeout=_SECONDS) == [True, True]


_KEYS: dict[str, Any] = {
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": True}, "dump_state": False, "memory_breakdown": True,
    "steps_per_print": 1000, "wall_clock_breakdown": True,
    "zero_optimization": {
        "allgather_bucket_size": 1000, "reduce_bucket_size": 1000, "use_multi_rank_bucket_allreduce": False,
    },
}  # fmt: skip


def _handed_on(rank: int, recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    with engine_on(recipe, rank) as (engine, groups):
        found = go_on(engine, groups, recipe, range(2))
        config, zero = engine.engine.config, engine.engine._config.zero_config
        return found, {"config": config, "stage": int(zero.stage), "reduce_bucket_size": engine.optimizer.reduce_bucket_size}


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("schedule", [_REDUCTIONS[0], _REDUCTIONS[2]], ids=str)
@pytest.mark.parametrize("zero", [1, 2])
def test_keys_of_deepspeed_reach_it_and_change_no_results(ranks: Any, zero: int, schedule: dict[str, Any], offload: bool) -> None:
    usual = ranks(2).run(train, _recipe(2, {"ep": 2}, zero, offload, schedule=schedule), 2, timeout=_SECONDS)
    recipe = _recipe(2, {"ep": 2}, zero, offload, schedule=schedule, engine={"deepspeed": _KEYS})
    for (found, config), plain in zip(ranks(2).run(_handed_on, recipe, timeout=_SECONDS), usual, strict=True):
        assert (config["stage"], config["reduce_bucket_size"]) == (zero, 1000)
        assert config["config"]["zero_optimization"]["overlap_comm"] is False
        assert config["config"]["wall_clock_breakdown"] is True
        for name, (tensor, _) in plain["weights"].items():
            torch.testing.assert_close(found["weights"][name].tensor, tensor, rtol=0, atol=1e-6, msg=name)
