"""Every fold gives the numbers of one process: SGD with lr 1 and post-step weights, for Adam hides scale errors."""

from __future__ import annotations

import numpy as np
import pytest

from tests.foldray.parity import make_recipe, one_process, train, worst

_FOLDS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]


@pytest.mark.parametrize(("workers", "ep"), _FOLDS)
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_float64_equals_one_process(ranks, workers: int, ep: int, micro_batch: int) -> None:
    recipe = make_recipe(workers, ep, training={"micro_batch": micro_batch})
    found, reference = ranks(workers).run(train, recipe, 3), one_process(recipe, steps=3)
    difference, where = worst(found, reference, relative=False)
    assert difference <= 1e-10, where
    for part in found:
        assert np.array(part["losses"]) == pytest.approx(np.array(reference["losses"]), abs=1e-10)
        assert part["norms"] == pytest.approx(reference["norms"], abs=1e-10)


@pytest.mark.parametrize(
    "model",
    [
        {"router": {"score": "sigmoid", "normalize": True, "bias_rate": 0.01, "scale": 2.5}},
        {"router": {"softmax": "before_topk"}, "topk": 1, "ffn": "gelu", "norm": "layernorm", "positions": "learned"},
        {"router": {"softmax": "before_topk", "normalize": True}, "moe_every": 2, "tied_embeddings": True, "shared_hidden": 0},
        {"router": {"capacity_factor": 1.0, "drop": "probability"}},
        {"router": {"capacity_factor": 1.0, "drop": "position"}},
        {"router": {"capacity_factor": 1.25, "pad": True}},
        {"experts": 8, "topk": 1, "dense_first": 1},
    ],
)
def test_every_kind_of_model_equals_one_process(ranks, model: dict) -> None:
    recipe = make_recipe(4, 2, model=model, training={"micro_batch": 2}, optimizer={"clip": 0.5})
    found, reference = ranks(4).run(train, recipe, 2), one_process(recipe, steps=2)
    difference, where = worst(found, reference, relative=False)
    assert difference <= 1e-10, where


@pytest.mark.parametrize(("workers", "ep"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_grouped_experts_equal_one_process_with_idle_experts(ranks, workers: int, ep: int) -> None:
    # 16 experts and 64 tokens: some experts have no token in some passes.
    recipe = make_recipe(workers, ep, precision="float32", model={"experts": 16, "topk": 1}, moe={"experts": "grouped"})
    found, reference = ranks(workers).run(train, recipe, 2), one_process(recipe, steps=2)
    difference, where = worst(found, reference, relative=True)
    assert difference <= 1e-5, where


def test_gradient_clipping_and_accumulation_do_not_depend_on_the_fold(ranks) -> None:
    recipe = make_recipe(2, 2, training={"micro_batch": 1}, optimizer={"clip": 0.05, "weight_decay": 0.1, "momentum": 0.9})
    found, reference = ranks(2).run(train, recipe, 3), one_process(recipe, steps=3)
    assert reference["norms"][0] > 0.05, "the test needs a norm above the limit"
    difference, where = worst(found, reference, relative=False)
    assert difference <= 1e-10, where
