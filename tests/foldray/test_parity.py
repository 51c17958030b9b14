"""Every fold gives the results of one process: weights after SGD with lr 1, in float64. (Adam would hide wrong scales.)"""

from __future__ import annotations

from typing import Any

import pytest

from foldray.recipe import Recipe
from tests.foldray.folds import legal_folds, name
from tests.foldray.parity import MODEL, check_equal, make_recipe, one_process, train

_STEPS = 2
# The folds take turns with these variants of the plain training. Each variant has its own reference.
_VARIANTS: list[dict[str, Any]] = [
    {},
    {"documents": True, "schedule": {"context": "all_gather"}},
    {"model": {"tied_embeddings": True, "moe_every": 2, "shared_hidden": 0}},
    {
        "model": {"norm": "layernorm", "ffn": "gelu", "positions": "learned", "dense_first": 1},
        "schedule": {"context": "all_gather"},
    },
    {"documents": True, "model": {"tied_embeddings": True}},
]  # fmt: skip
_A_DAY = {1: (), 2: (), 4: pytest.mark.gate(6), 8: pytest.mark.gate(2)}  # folds in the gate, by ranks


@pytest.mark.parametrize(("world", "fold", "variant"), [
    pytest.param(world, fold, number % len(_VARIANTS), marks=_A_DAY[world], id=f"{world}:{name(fold)}")
    for number, (world, fold) in enumerate((world, fold) for world in _A_DAY for fold in legal_folds(world))
])  # fmt: skip
def test_a_fold_equals_one_process(ranks, world: int, fold: dict[str, int], variant: int) -> None:
    options = dict(_VARIANTS[variant])
    documents = options.pop("documents", False)
    model = {**options.pop("model", {}), **({"kv_heads": 8} if fold.get("tp", 1) == 8 else {})}
    _check(ranks, make_recipe(world, fold, model=_layers(fold, model), **options), documents)


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("world", "fold", "schedule", "layers"),
    [
        (2, {"pp": 2}, {"stage_layers": [2, 1]}, 3),
        (2, {"pp": 2}, {"stage_layers": [1, 2]}, 3),
        (4, {"pp": 2, "tp": 2, "ep": 2}, {"stage_layers": [3, 1]}, 4),
        (4, {"pp": 4}, {"stage_layers": [1, 2, 1, 1]}, 5),
        (2, {"pp": 2}, {"virtual_stages": 2}, 4),
        (2, {"pp": 2}, {"virtual_stages": 3, "stage_layers": [1, 1, 2, 1, 1, 1]}, 7),
        (4, {"pp": 2, "cp": 2, "etp": 2}, {"virtual_stages": 2}, 4),
        (4, {"pp": 4}, {"virtual_stages": 2}, 8),
        (8, {"pp": 2, "cp": 2, "ep": 2, "etp": 2}, {"stage_layers": [1, 2]}, 3),
        (8, {"pp": 4, "tp": 2, "ep": 2}, {"virtual_stages": 2, "stage_layers": [1, 1, 1, 1, 1, 1, 1, 2]}, 9),
    ],
    ids=lambda value: name(value) if isinstance(value, dict) and "pp" in value else None,
)  # fmt: skip
def test_stages_of_any_length_equal_one_process(ranks, world: int, fold: dict, schedule: dict, layers: int) -> None:
    _check(ranks, make_recipe(world, fold, model={"layers": layers, "tied_embeddings": True}, schedule=schedule), False)


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("order", "moe_order"),
    [("cp-tp-dp-pp", "ep-etp-edp-pp"), ("dp-cp-tp-pp", "edp-etp-ep-pp"), ("pp-tp-cp-dp", "pp-etp-ep-edp")],
)
def test_any_legal_order_of_axes_equals_one_process(ranks, order: str, moe_order: str) -> None:
    fold = {"tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2, "order": order, "moe_order": moe_order}
    _check(ranks, make_recipe(8, fold), False)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_the_micro_batch_does_not_matter(ranks, world: int, micro_batch: int) -> None:
    _check(ranks, make_recipe(world, {"ep": world}, training={"micro_batch": micro_batch}), False)


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "model",
    [
        {"router": {"score": "sigmoid", "normalize": True, "bias_rate": 0.01, "scale": 2.5}},
        {"router": {"softmax": "before_topk"}, "topk": 1},
        {"router": {"softmax": "before_topk", "normalize": True}, "moe_every": 2},
        {"router": {"capacity_factor": 1.0, "drop": "probability"}},
        {"router": {"capacity_factor": 1.0, "drop": "position"}},
        {"router": {"capacity_factor": 1.25, "pad": True}},
        {"experts": 8, "topk": 8, "dense_first": 1},
    ],
)
def test_every_kind_of_router_equals_one_process(ranks, model: dict) -> None:
    recipe = make_recipe(4, {"ep": 2, "etp": 2}, model=model, training={"micro_batch": 2}, optimizer={"clip": 0.5})
    _check(ranks, recipe, False)


def test_clipping_decay_and_momentum_do_not_depend_on_the_fold(ranks) -> None:
    optimizer = {"clip": 0.05, "weight_decay": 0.1, "momentum": 0.9}
    recipe = make_recipe(8, {"tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2}, optimizer=optimizer)
    assert one_process(recipe, steps=1)["norms"][0] > 0.05, "the test needs a norm above the limit"
    _check(ranks, recipe, False)


@pytest.mark.gate(2)
@pytest.mark.parametrize("options", [
    {}, {"schedule": {"kind": "stream", "degree": 2, "weight_gradients": "apart", "recompute": ["attention"]}},
    {"optimizer": {"clip": 0.05}, "engine": {"kind": "torch", "zero": 2}},
], ids=["whole", "slices", "clipped"])  # fmt: skip
@pytest.mark.parametrize("model", [
    {}, {"qk_norm": "head", "attention_bias": "all", "attention_gate": "element", "value_dim": 6},
], ids=["plain", "biases"])  # fmt: skip
@pytest.mark.parametrize(("world", "fold", "heads"), [
    (2, {"tp": 2}, 1), (4, {"tp": 4}, 1), (4, {"tp": 4, "ep": 2, "etp": 2}, 2), (4, {"tp": 2, "cp": 2, "ep": 2}, 1),
    (4, {"tp": 2, "pp": 2}, 1),
], ids=str)  # fmt: skip
def test_ranks_with_the_same_key_head_equal_one_process(
    ranks, world: int, fold: dict[str, int], heads: int, model: dict[str, Any], options: dict[str, Any]
) -> None:
    """There are fewer key/value heads than TP ranks, so ranks have copies of their weights, and parts of their gradients."""
    _check(ranks, make_recipe(world, fold, model={"kv_heads": heads, **model}, **options), False)


_GROUPED = [
    (1, {}), (2, {"ep": 2}), (2, {"tp": 2, "etp": 2}), (2, {"cp": 2, "ep": 2}), (2, {"pp": 2}), (4, {"ep": 4}), (4, {"etp": 4}),
    (4, {"tp": 2, "cp": 2, "ep": 4}), (4, {"tp": 4, "ep": 2, "etp": 2}), (4, {"pp": 2, "cp": 2, "etp": 2}),
    (4, {"cp": 4, "ep": 2}),
    (8, {"tp": 2, "cp": 2, "ep": 8}), (8, {"tp": 4, "etp": 2, "ep": 4}), (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}),
]  # fmt: skip


@pytest.mark.gate(1)
@pytest.mark.parametrize(("world", "fold"), _GROUPED, ids=[f"{world}:{name(fold)}" for world, fold in _GROUPED])
def test_grouped_experts_equal_one_process_with_idle_experts(ranks, world: int, fold: dict[str, int]) -> None:
    # With 16 experts and topk 1, some experts get no token in some passes.
    model = _layers(fold, {"experts": 16, "topk": 1})
    recipe = make_recipe(world, fold, precision="float32", model=model, moe={"experts": "grouped"})
    check_equal(ranks(world).run(train, recipe, _STEPS), one_process(recipe, steps=_STEPS), 1e-5, relative=True)


def _layers(fold: dict[str, int], model: dict[str, Any]) -> dict[str, Any]:
    return {"layers": max(MODEL["layers"], fold.get("pp", 1)), **model}


def _check(ranks, recipe: Recipe, documents: bool) -> None:
    found = ranks(recipe.cluster.workers).run(train, recipe, _STEPS, documents)
    check_equal(found, one_process(recipe, steps=_STEPS, documents=documents))
