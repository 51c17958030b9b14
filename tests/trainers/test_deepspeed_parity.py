"""DeepSpeed with our groups against one process of the torch engine; its master weights are float32."""

from __future__ import annotations

import numpy as np
import pytest

from tests.foldray.parity import make_recipe, one_process, train, worst

_SGD = {"kind": "sgd", "lr": 1.0}
_ADAMW = {"kind": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}


def _recipe(workers: int, ep: int, zero: int, optimizer: dict, **sections):
    return make_recipe(
        workers, ep, engine={"kind": "deepspeed", "zero": zero}, precision="float32", optimizer=optimizer, **sections
    )


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(("workers", "ep"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
def test_zero_equals_one_process(ranks, workers: int, ep: int, zero: int) -> None:
    recipe = _recipe(workers, ep, zero, {**_SGD, "clip": 0.5}, training={"micro_batch": 1})
    found, reference = ranks(workers).run(train, recipe, 2), one_process(recipe, steps=2)
    difference, where = worst(found, reference, relative=True)
    assert difference <= 1e-6, where
    for part in found:
        assert part["norms"] == pytest.approx(reference["norms"], rel=1e-5)


@pytest.mark.parametrize(("workers", "ep"), [(2, 2), (4, 2)])
def test_stage_0_without_clipping_equals_one_process(ranks, workers: int, ep: int) -> None:
    recipe = _recipe(workers, ep, 0, _SGD)
    found, reference = ranks(workers).run(train, recipe, 2), one_process(recipe, steps=2)
    difference, where = worst(found, reference, relative=True)
    assert difference <= 1e-6, where
    assert found[0]["norms"] == pytest.approx(reference["norms"], rel=1e-5)


@pytest.mark.parametrize("zero", [1, 2])
def test_engines_agree_after_20_steps(ranks, zero: int) -> None:
    deepspeed = _recipe(4, 2, zero, {**_ADAMW, "clip": 1.0}, training={"steps": 20})
    torch = make_recipe(4, 2, precision="float32", optimizer={**_ADAMW, "clip": 1.0}, training={"steps": 20})
    ours, theirs = ranks(4).run(train, torch, 20), ranks(4).run(train, deepspeed, 20)
    difference, where = worst(theirs, {"weights": {k: v for part in ours for k, v in part["weights"].items()}}, relative=True)
    assert difference <= 1e-4, where
    assert np.array(theirs[0]["losses"]) == pytest.approx(np.array(ours[0]["losses"]), rel=1e-5)


@pytest.mark.parametrize(("zero", "micro_batch"), [(1, 4), (2, 1)])
def test_bfloat16_stays_near_float32(ranks, zero: int, micro_batch: int) -> None:
    recipe = make_recipe(
        2, 2, engine={"kind": "deepspeed", "zero": zero}, precision="bfloat16", optimizer=_ADAMW,
        moe={"experts": "grouped"}, training={"micro_batch": micro_batch},
    )  # fmt: skip
    reference = one_process(make_recipe(2, 2, precision="float32", optimizer=_ADAMW), steps=4)
    found = ranks(2).run(train, recipe, 4)
    assert np.array(found[0]["losses"]) == pytest.approx(np.array(reference["losses"]), rel=0.01)
    assert found[0]["norms"] == pytest.approx(reference["norms"], rel=0.05)
