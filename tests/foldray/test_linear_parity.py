"""Linear attention under folds and schedules gives what a plain model gives that shares no code with foldray's.

The plain model goes token by token, and foldray in chunks, slices and maps of states. The weights after SGD with lr 1 have every
gradient, in float64.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.foldray.parity import Held, check_equal, make_recipe, train
from tests.foldray.random_recipes import Case
from tests.foldray.test_random_recipes import reference

_STEPS = 2
_SIZES = {"linear_heads": 8, "linear_key_heads": 4, "linear_key_dim": 5, "linear_value_dim": 3}
_MODELS: dict[str, dict[str, Any]] = {
    "all": {"windows": ["linear"], "linear_heads": 4},
    "mixed": {
        "windows": ["linear", "full"], **_SIZES, "qk_norm": "head", "norm": "zero_rmsnorm", "attention_gate": "element",
        "rope_dim": 2, "shared_gate": True,
    },
    "further": {
        "windows": ["full", "linear"], **_SIZES, "linear_taps": 2, "mtp_depth": 1, "qk_norm": "all", "norm": "zero_rmsnorm",
    },
    "latent": {
        "windows": ["linear", "full"], **_SIZES, "linear_taps": 1, "latent_rank": 10, "kv_heads": 8, "rope_dim": 2,
        "norms": "both", "residual_scale": 0.5, "moe_every": 2,
    },
    "kimi": {
        "windows": ["linear", "full"], "linear_kind": "kimi_delta", "linear_heads": 4, "linear_key_dim": 5, "latent_rank": 10,
        "kv_heads": 8, "rope_dim": 2, "full_positions": "none", "dense_first": 1, "shared_hidden": 16,
        "router": {"score": "sigmoid", "normalize": True, "scale": 2.5, "bias_rate": 0.01},
    },
    "kimi-shared": {
        "windows": ["linear"], "linear_kind": "kimi_delta", **_SIZES, "linear_taps": 2, "mtp_depth": 1, "norm": "zero_rmsnorm",
    },
}  # fmt: skip
_SCHEDULES: dict[str, dict[str, Any]] = {
    "whole": {},
    "whole-apart": {"weight_gradients": "apart", "recompute": ["attention", "expert", "ffn", "shared"]},
    "two": {"kind": "moe_only", "degree": 2, "reduction": "chunks", "sp_bytes": 512},
    "two-again": {"kind": "one_a_one_m", "degree": 2, "recompute": ["attention"]},
    "four": {"kind": "stream", "degree": 4, "lag": 1, "weight_gradients": "apart", "reduction": "chunks", "sp_bytes": 512},
    "four-again": {"kind": "stream", "degree": 4, "lag": 2, "weight_gradients": "apart", "recompute": ["attention"]},
    "uneven": {"kind": "stream", "degree": 2, "slices": [12, 4]},
    "flow": {"kind": "flow", "degree": 2, "batch_degree": 2, "weight_gradients": "apart"},
    "weave": {"kind": "weave", "degree": 2, "weight_gradients": "apart"},
    "list": {"kind": "list", "degree": 4, "attention_degree": 2, "weight_gradients": "whole", "recompute": ["expert"]},
}  # fmt: skip
_FOLDS: list[tuple[int, dict[str, int]]] = [
    (1, {}),
    (2, {"tp": 2}),
    (2, {"ep": 2}),
    (2, {"cp": 2}),
    (2, {"pp": 2}),
    (4, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}),
    (4, {"pp": 2, "tp": 2, "ep": 2}),
    (4, {"pp": 2, "cp": 2, "etp": 2}),
]


@pytest.mark.gate(3)
@pytest.mark.parametrize("schedule", _SCHEDULES)
@pytest.mark.parametrize("model", _MODELS)
@pytest.mark.parametrize(("world", "fold"), _FOLDS, ids=str)
def test_linear_attention_equals_plain_torch(ranks, world: int, fold: dict, model: str, schedule: str) -> None:
    _check(ranks, make_recipe(world, fold, model=_MODELS[model], schedule=_SCHEDULES[schedule]))


@pytest.mark.gate(1)
@pytest.mark.parametrize("again", [[], ["attention"]], ids=["kept", "again"])
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("model", _MODELS)
def test_chunks_shorter_than_what_the_convolution_sees(ranks, model: str, documents: bool, again: list[str]) -> None:
    """Eight chunks of two tokens on four ranks, and a convolution over four tokens."""
    _check(ranks, make_recipe(4, {"cp": 4}, model=_MODELS[model], schedule={"recompute": again}), documents)


@pytest.mark.gate(4)
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("model", ["mixed", "kimi"])
def test_any_number_of_slices_equals_plain_torch(ranks, model: str, degree: int) -> None:
    schedule = {"kind": "stream", "degree": degree} if degree > 1 else {}
    _check(ranks, make_recipe(1, {}, model=_MODELS[model], schedule=schedule))


@pytest.mark.gate(2)
@pytest.mark.parametrize("model", ["all", "mixed", "further", "kimi"])
@pytest.mark.parametrize("schedule", ["whole", "two-again", "four", "uneven"])
@pytest.mark.parametrize(("world", "fold"), [(1, {}), (2, {"cp": 2}), (4, {"tp": 2, "cp": 2, "ep": 2}), (2, {"pp": 2})], ids=str)
def test_documents_begin_with_nothing(ranks, world: int, fold: dict, schedule: str, model: str) -> None:
    """Documents begin anywhere: inside slices, chunks of ranks, and what the convolution sees."""
    _check(ranks, make_recipe(world, fold, model=_MODELS[model], schedule=_SCHEDULES[schedule]), documents=True)


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(("world", "fold"), [(4, {"tp": 2, "ep": 2}), (4, {"cp": 2, "etp": 2})])
def test_sharded_optimizers_equal_plain_torch(ranks, world: int, fold: dict, zero: int) -> None:
    engine = {"kind": "torch", "zero": zero}
    _check(ranks, make_recipe(world, fold, model=_MODELS["mixed"], schedule=_SCHEDULES["four"], engine=engine))


@pytest.mark.parametrize(("model", "key"), [
    ({"windows": ["full"], "linear_heads": 4}, "linear_heads"),
    ({"windows": ["full"], "linear_kind": "kimi_delta"}, "linear_kind"),
    ({"windows": ["linear"], "linear_heads": 4, "linear_key_heads": 3}, "linear_key_heads"),
    ({"windows": ["linear"], "norm": "zero_rmsnorm", "latent_rank": 10, "kv_heads": 8, "rope_dim": 2}, "norm"),
])  # fmt: skip
def test_models_that_mean_nothing_are_refused(model: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=rf"model\.{key}\b"):
        make_recipe(1, model=model)


@pytest.mark.parametrize(("sizes", "key"), [
    ({"linear_heads": 6, "linear_key_heads": 6}, "linear_heads"),
    ({"linear_heads": 8, "linear_key_heads": 2}, "linear_key_heads"),
])  # fmt: skip
def test_tensor_parallelism_cuts_heads_evenly(sizes: dict[str, int], key: str) -> None:
    with pytest.raises(UserError, match=rf"fold\.tp.*{key}"):
        make_recipe(4, {"tp": 4}, model={"windows": ["linear"], **sizes})


def _check(ranks, recipe: Recipe, documents: bool = False) -> None:
    found = ranks(recipe.cluster.workers).run(train, recipe, _STEPS, documents)
    for part in found:
        part["weights"] = {key: held for key, held in part["weights"].items() if not key.endswith(".router.bias")}
    check_equal(found, _reference(recipe.model_dump_json(include={"model"}), documents))


@cache
def _reference(sections: str, documents: bool) -> dict[str, Any]:
    plain = reference(Case(make_recipe(1, **json.loads(sections)), documents, False), _STEPS)
    return {**plain, "weights": {f"model/{key}": Held(weight.detach(), ()) for key, weight in plain["weights"].items()}}
