"""Training continues from a checkpoint under another fold, with the optimizer's state, as without an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from ray.train import Checkpoint

from foldray.fold import Fold
from foldray.recipe import Recipe
from tests.foldray.parity import engine_on, go_on, make_recipe, train
from trainers.checkpoints import tensors
from trainers.checkpoints.tensors import Staged

_SAVED, _THEN = 3, 5
_ROUTER = {"score": "sigmoid", "normalize": True, "bias_rate": 0.01, "balance_scope": "global_batch"}
_MODEL = {"layers": 4, "tied_embeddings": True, "router": _ROUTER}
_ADAMW = {"kind": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "clip": 0.5}
_MUON = {"kind": "muon", "lr": 0.02, "eps": 1e-3, "weight_decay": 0.1, "clip": 0.5}

# Pairs of (workers, sizes): the first one writes the checkpoint, and the second one reads it.
_PAIRS = [
    ((1, {}), (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4})),
    ((8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}), (1, {})),
    ((8, {"tp": 2, "cp": 2, "ep": 8}), (4, {"pp": 4})),
    ((4, {"pp": 4}), (8, {"tp": 4, "etp": 2, "ep": 4})),
    ((8, {"tp": 4, "etp": 2, "ep": 4}), (2, {"etp": 2})),
    ((2, {"etp": 2}), (4, {"tp": 2, "pp": 2, "ep": 2})),
    ((4, {"tp": 2, "pp": 2, "ep": 2}), (4, {"cp": 4, "etp": 2, "ep": 2})),
    ((4, {"cp": 4, "etp": 2, "ep": 2}), (2, {"tp": 2})),
    ((2, {"tp": 2}), (2, {"pp": 2, "virtual_stages": 2})),
    ((2, {"pp": 2, "virtual_stages": 2}), (4, {"ep": 4})),
    ((4, {"ep": 4}), (8, {"etp": 4, "ep": 2, "cp": 2, "tp": 2})),
    ((8, {"etp": 4, "ep": 2, "cp": 2, "tp": 2}), (4, {"tp": 4, "ep": 2})),
    ((4, {"tp": 2, "ep": 2, "zero": 1}), (2, {"ep": 2, "zero": 2})),  # from here on, ZeRO on one side or both
    ((2, {"ep": 2, "zero": 2}), (4, {"cp": 2, "ep": 2})),
    ((1, {}), (4, {"tp": 2, "ep": 4, "zero": 1})),
]


def _save(rank: int, recipe: Recipe, folder: Path) -> None:
    with engine_on(recipe, rank) as (engine, groups):
        go_on(engine, groups, recipe, range(_SAVED))
        progress = {"step": _SAVED, "data": "", "fold": {}, "validation": {}}
        tensors.write(folder, Staged(engine.shards()), progress, dist.group.WORLD)


def _resume(rank: int, recipe: Recipe, folder: Path) -> dict[str, Any]:
    with engine_on(recipe, rank) as (engine, groups):
        with tensors.opened(Checkpoint.from_directory(str(folder)), dist.group.WORLD) as stored:
            tensors.load(stored, engine.shards(), dist.group.WORLD)
        engine.load_shards()
        return go_on(engine, groups, recipe, range(_SAVED, _SAVED + _THEN))


def _recipe(workers: int, fold: dict[str, int], seed: int = 0, optimizer: dict[str, Any] = _ADAMW) -> Recipe:
    fold = dict(fold)
    engine = {"kind": "torch", "zero": fold.pop("zero", 0)}
    schedule = {"virtual_stages": fold.pop("virtual_stages", 1)}
    few = max(1, 4 // Fold(workers, **fold).dp)  # few passes make few collectives, which saves time
    training = {"seed": seed, "micro_batch": few}
    return make_recipe(workers, fold, model=_MODEL, optimizer=optimizer, schedule=schedule, training=training, engine=engine)


def _name(given: tuple[int, dict[str, int]]) -> str:
    return f"{given[0]}:{given[1]}".replace("'", "")


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    return train(0, _recipe(1, {}), _SAVED + _THEN)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize(("writer", "reader"), _PAIRS, ids=_name)
def test_a_checkpoint_goes_on_under_another_fold(ranks, undisturbed, tmp_path: Path, writer: tuple, reader: tuple) -> None:
    _check(ranks, undisturbed, tmp_path, _recipe(*writer), _recipe(*reader, seed=1))


@pytest.mark.gate(1 / 3)
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ((4, {"tp": 2, "ep": 2, "etp": 2, "zero": 1}), (2, {"ep": 2, "zero": 2})),
        ((2, {"ep": 2, "zero": 2}), (4, {"pp": 2, "tp": 2})),
        ((4, {"pp": 2, "tp": 2}), (4, {"tp": 2, "ep": 2, "etp": 2, "zero": 1})),
    ],
    ids=_name,
)
def test_a_checkpoint_of_muon_goes_on_under_another_fold(ranks, tmp_path: Path, writer: tuple, reader: tuple) -> None:
    """Matrices have momentum, and what AdamW updates has its moments."""
    undisturbed = train(0, _recipe(1, {}, optimizer=_MUON), _SAVED + _THEN)
    _check(ranks, undisturbed, tmp_path, _recipe(*writer, optimizer=_MUON), _recipe(*reader, seed=1, optimizer=_MUON))


def test_a_checkpoint_of_another_scope_begins_with_even_frequencies(tmp_path: Path) -> None:
    progress = {"step": 1, "data": "", "fold": {}, "validation": {}}
    with engine_on(make_recipe(1, model={"router": _ROUTER | {"balance_scope": "sequence"}})) as (engine, groups):
        go_on(engine, groups, make_recipe(1), range(1))
        tensors.write(tmp_path, Staged(engine.shards()), progress, None)
        before = engine.state()
    with engine_on(make_recipe(1, model={"router": _ROUTER}, training={"seed": 1})) as (engine, groups):
        with tensors.opened(Checkpoint.from_directory(str(tmp_path)), None) as stored:
            tensors.load(stored, engine.shards(), None)
        after = engine.state()
    assert [key for key in after if key not in before] == [f"model/blocks.{block}.moe.router.frequency" for block in (0, 1)]
    assert all(bool((after[key] == before.get(key, 1 / 8)).all()) for key in after)


def _check(ranks, undisturbed: dict[str, Any], folder: Path, writer: Recipe, reader: Recipe) -> None:
    """Save with one recipe and go on with another. With another seed, a tensor that is not loaded would change the result."""
    ranks(writer.cluster.workers).run(_save, writer, folder)
    found = ranks(reader.cluster.workers).run(_resume, reader, folder)
    for part in found:
        assert np.array(part["losses"]) == pytest.approx(np.array(undisturbed["losses"][_SAVED:]), abs=1e-10)
        assert part["norms"] == pytest.approx(undisturbed["norms"][_SAVED:], abs=1e-10)
