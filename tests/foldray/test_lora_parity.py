"""Adapters trained under folds and schedules equal those of one process, which adds each adapter to its weight first.

The adapters after three steps of SGD with lr 1 have every gradient, in float64: those of the first matrices are zero in the first
step, because the second matrices begin with zeros.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foldray.errors import UserError
from foldray.orders import LIST, WEAVE
from foldray.recipe import Recipe
from tests.foldray.parity import check_equal, engine_on, go_by_times, make_recipe, one_process
from tests.foldray.strict import StrictPools

_STEPS = 3
_AGAIN = {"recompute": ["attention", "expert", "ffn", "shared"]}
_ADAPTER = {"rank": 4, "alpha": 8.0}
_GPT_OSS = {"expert_bias": True, "attention_bias": "all", "attention_sinks": True, "ffn": "gated_clamped", "shared_hidden": 0}
_CASES: dict[str, tuple[int, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    # Workers, fold, keys of the model, further sections. Every run has these.
    "TP2 CP2 EP2 ETP2, stream": (8, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}, {}, {"schedule": {"kind": "stream", "degree": 2}}),
    "TP2 EP4, grouped, ZeRO-2": (
        4, {"tp": 2, "ep": 4}, {}, {
            "moe": {"experts": "grouped"}, "engine": {"zero": 2},
            "schedule": {"kind": "stream", "degree": 2, "reduction": "chunks", "sp_bytes": 512},
        },
    ),
    "PP2 EP2, weave, weights apart": (
        4, {"pp": 2, "ep": 2}, {},
        {"moe": {"experts": "grouped"}, "schedule": {"kind": WEAVE.name, "degree": 2, "weight_gradients": "apart"}},
    ),
    "ETP2 EDP2, ZeRO-1, out of experts": (
        4, {"etp": 2}, {"adapter": {**_ADAPTER, "targets": ["down_proj"]}}, {"engine": {"zero": 1}},
    ),
    # Nightly runs have these, too.
    "one rank, grouped": (1, {}, {}, {"moe": {"experts": "grouped"}}),
    "EP2, as GPT-OSS": (2, {"ep": 2}, _GPT_OSS, {"moe": {"experts": "grouped"}}),
    "EP2, once to each rank": (2, {"ep": 2}, {}, {"moe": {"experts": "grouped", "dispatch": "rank"}}),
    "EP2 ETP2, into experts": (4, {"ep": 2, "etp": 2}, {"adapter": {**_ADAPTER, "targets": ["gate_up_proj"]}}, {}),
    "EP4, queries and values": (
        4, {"ep": 4}, {"adapter": {**_ADAPTER, "targets": ["q_proj", "v_proj"]}},
        {"moe": {"experts": "grouped"}, "schedule": {"weight_gradients": "apart"}},
    ),
    "CP2, list": (2, {"cp": 2}, {}, {"schedule": {"kind": LIST.name, "degree": 2, "weight_gradients": "apart"}}),
    "PP2 CP2, experts again": (4, {"pp": 2, "cp": 2}, {}, {"schedule": {"kind": "one_a_one_m", "degree": 2, **_AGAIN}}),
    "PP2, list, whole, again": (
        2, {"pp": 2}, {"tied_embeddings": True},
        {"schedule": {"kind": LIST.name, "degree": 4, "weight_gradients": "whole", **_AGAIN}},
    ),
    "TP2 ETP2, gelu": (2, {"tp": 2, "etp": 2}, {"ffn": "gelu", "norm": "layernorm"}, {"moe": {"experts": "grouped"}}),
    "EP2 EDP2, ZeRO-1": (4, {"ep": 2}, {}, {"engine": {"zero": 1}}),
    "ETP2 EP2 EDP2, ZeRO-2": (
        8, {"ep": 2, "etp": 2}, {}, {"engine": {"zero": 2}, "schedule": {"reduction": "buckets", "sp_bytes": 3000}},
    ),
    "TP2 PP2, dense blocks, ranks without adapters": (
        4, {"tp": 2, "pp": 2}, {"moe_every": 2, "adapter": {**_ADAPTER, "targets": ["gate_up_proj", "down_proj"]}}, {},
    ),
    "EP2, AdamW that clips": (2, {"ep": 2}, {}, {"optimizer": {"kind": "adamw", "lr": 0.1, "clip": 0.1, "weight_decay": 0.1}}),
    "TP2 ETP2, AdamW that clips": (
        2, {"tp": 2, "etp": 2}, {}, {"optimizer": {"kind": "adamw", "lr": 0.1, "clip": 0.1, "weight_decay": 0.1}},
    ),
}  # fmt: skip
_QUICK = list(_CASES)[:4]


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", _CASES)
def test_adapters_equal_those_of_one_process(ranks: Any, name: str) -> None:
    recipe = _recipe(name)
    check_equal(ranks(recipe.cluster.workers).run(trained, recipe), one_process(recipe, steps=_STEPS))


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize("name", _QUICK)
def test_nothing_is_read_early_or_started_out_of_order(ranks: Any, name: str) -> None:
    recipe = _recipe(name)
    check_equal(StrictPools(ranks)(recipe.cluster.workers).run(trained, recipe), one_process(recipe, steps=_STEPS))


_IN_LIST = {"kind": "stream", "degree": 2, "reduction": "chunks", "sp_bytes": 512}


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize(
    ("zero", "schedule"), [(0, {}), (1, {}), (1, _IN_LIST), (2, _IN_LIST)], ids=["0", "1", "1-list", "2-list"]
)
@pytest.mark.parametrize(
    ("world", "fold"), [(2, {"ep": 2}), (4, {"tp": 2, "etp": 2}), (4, {"pp": 2, "ep": 2}), (4, {"etp": 2})], ids=str
)
def test_adapters_with_deepspeed(ranks: Any, world: int, fold: dict[str, int], zero: int, schedule: dict[str, Any]) -> None:
    """DeepSpeed's weights are float32. It copies weights to all data-parallel ranks, but not those of experts."""
    recipe = make_recipe(
        world, fold, model={"adapter": _ADAPTER}, schedule=schedule, engine={"kind": "deepspeed", "zero": zero},
        precision="float32", optimizer={"clip": 0.5},
    )  # fmt: skip
    found = ranks(world).run(trained, recipe, timeout=240)
    check_equal(found, one_process(recipe, steps=_STEPS), 1e-4, relative=True)


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["gate_up_proj"]], ids=str)
def test_some_adapters_with_deepspeed(ranks: Any, targets: list[str]) -> None:
    recipe = make_recipe(
        2, 2, model={"adapter": {**_ADAPTER, "targets": targets}}, engine={"kind": "deepspeed", "zero": 1}, precision="float32",
    )  # fmt: skip
    check_equal(ranks(2).run(trained, recipe, timeout=240), one_process(recipe, steps=_STEPS), 1e-4, relative=True)


def _recipe(name: str) -> Recipe:
    world, fold, model, sections = _CASES[name]
    return make_recipe(world, fold, model={"adapter": _ADAPTER, **model}, **sections)


def trained(rank: int, recipe: Recipe) -> dict[str, Any]:
    """Train, and check that frozen weights keep their bits, and have neither gradients nor a state of the optimizer."""
    with engine_on(recipe, rank) as (engine, groups):
        adapters = dict(engine.model.trained())
        before = {name: weight.clone() for name, weight in engine.model.named_parameters() if name not in adapters}
        found = go_by_times(engine, groups, recipe, _STEPS)
        after = dict(engine.model.named_parameters())
        assert before
        assert all(torch.equal(weight, after[name]) for name, weight in before.items())
        assert all(weight.grad is None and not after[name].requires_grad for name, weight in before.items())
        assert set(engine.execution.gradients.buffer_of) == set(adapters.values())
        assert all("_lora." in shard.key or shard.key.endswith("router.bias") for shard in engine.shards())
        return found


@pytest.mark.parametrize(("model", "sections", "field"), [
    ({"mtp_depth": 1}, {}, r"model\.mtp_depth"),
    ({"windows": ["full", "linear"]}, {}, r"model\.adapter\.targets"),
    ({"latent_rank": 10, "kv_heads": 8, "rope_dim": 2}, {}, r"model\.adapter\.targets"),
    ({"router": {"score": "sigmoid", "bias_rate": 0.1}}, {}, r"model\.router\.bias_rate"),
    ({"moe_every": 3, "adapter": {"targets": ["down_proj"]}}, {}, r"model\.adapter\.targets"),
    ({}, {"placement": {"attention": 1, "experts": 1}, "schedule": {"kind": "af_pipe"}}, r"model\.adapter"),
    ({}, {"optimizer": {"kind": "muon"}}, r"optimizer\.kind"),
])  # fmt: skip
def test_what_has_no_adapters_is_refused(model: dict[str, Any], sections: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match=field):
        make_recipe(2, 1, model={"adapter": _ADAPTER, **model}, **sections)
