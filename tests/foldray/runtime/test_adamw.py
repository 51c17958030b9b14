"""AdamW with moments in bfloat16 against a reference that rounds by itself, and the decay rates that rounding allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from foldray.recipe.engine import LARGEST_DECAY
from foldray.runtime import adamw
from foldray.runtime.adamw import RoundedAdamW
from tests.foldray.parity import drifted, engine_of, engine_on, go_on, make_recipe, one_process, train, worst

RULE: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6}
SPEC: dict[str, Any] = {"kind": "adamw", "moments": "bfloat16", "weight_decay": 0.1, "clip": 0.5}


def rounded(values: np.ndarray) -> np.ndarray:
    """Return the nearest numbers with the upper 16 bits of a float32; of two equally near ones, that with an even last bit."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def reference(weights: np.ndarray, gradients: Sequence[np.ndarray], decay: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weights and both moments after some steps of AdamW (algorithm 2 of its paper), computed in float64."""
    first, second, (b1, b2) = np.zeros_like(weights), np.zeros_like(weights), RULE["betas"]
    for step, gradient in enumerate(gradients, 1):
        m, v = b1 * first + (1 - b1) * gradient, b2 * second + (1 - b2) * gradient**2
        update = m / (1 - b1**step) / (np.sqrt(v / (1 - b2**step)) + RULE["eps"])
        weights = weights * (1 - RULE["lr"] * decay) - RULE["lr"] * update
        first, second = rounded(m).astype(np.float64), rounded(v).astype(np.float64)
    return weights, first, second


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_update_is_wide_and_the_moments_are_rounded(fused: bool, decay: float) -> None:
    weights, gradients = _drawn(12)
    parameter = torch.nn.Parameter(torch.tensor(weights))
    ways = {"fused": True} if fused else {"foreach": False}
    rule = RoundedAdamW([parameter], weight_decay=decay, **RULE, **ways)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        rule.step()
    expected, first, second = reference(weights, gradients, decay)
    assert parameter.detach().numpy() == pytest.approx(expected, rel=1e-12)
    state = rule.state[parameter]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype, float(state["step"])) == (torch.bfloat16, torch.bfloat16, 12)
    assert np.array_equal(state["exp_avg"].double().numpy(), first)
    assert np.array_equal(state["exp_avg_sq"].double().numpy(), second)


def test_slices_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (2**24, 7):
        monkeypatch.setattr(adamw, "SLICE", size)
        weights, gradients = _drawn(3)
        parameter = torch.nn.Parameter(torch.tensor(weights))
        rule = RoundedAdamW([parameter], foreach=False, **RULE)
        for gradient in gradients:
            parameter.grad = torch.tensor(gradient)
            rule.step()
        found.append((parameter.detach(), rule.state[parameter]["exp_avg_sq"]))
    assert all(map(torch.equal, *found))


def _drawn(steps: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return weights and gradients whose size differs from element to element and from step to step."""
    chance = np.random.default_rng(0)
    shape = 5, 8
    sizes = 10.0 ** chance.uniform(-6, 1, shape)
    return chance.normal(size=shape), [sizes * chance.normal(size=shape) for _ in range(steps)]


def test_every_moment_falls_at_the_largest_decay_rate() -> None:
    """All numbers of bfloat16 from 1 to 2: others are these times a power of two."""
    numbers = torch.arange(128, 256).bfloat16() / 128
    assert bool(((numbers.float() * LARGEST_DECAY).bfloat16() < numbers).all())
    assert not ((numbers.float() * (LARGEST_DECAY + 2**-9)).bfloat16() < numbers).all()
    assert math.log2(1 - LARGEST_DECAY) == -8


@pytest.mark.parametrize("offload", [None, "optimizer"])
def test_the_engine_goes_on_from_rounded_moments(offload: str | None) -> None:
    recipe = make_recipe(1, precision="float32", optimizer=SPEC, engine={"kind": "torch", "offload": offload})
    with engine_on(recipe) as (engine, groups):
        go_on(engine, groups, recipe, range(2))
        shards = engine.shards()
        kept = [shard.tensor.dtype for shard in shards if shard.key.endswith(("/exp_avg", "/exp_avg_sq"))]
        assert set(kept) == {torch.bfloat16}
        saved = [shard.tensor.clone() for shard in shards]
        expected = go_on(engine, groups, recipe, range(2, 4))["weights"]
        fresh = engine_of(recipe, groups)
        for shard, tensor in zip(fresh.shards(), saved, strict=True):
            shard.tensor.copy_(tensor)
        fresh.load_shards()
        found = go_on(fresh, groups, recipe, range(2, 4))["weights"]
    assert all(torch.equal(found[name].tensor, tensor) for name, (tensor, _) in expected.items())


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("world", "fold", "sections"),
    [
        (2, {"ep": 2}, {"engine": {"zero": 1}, "schedule": {"kind": "stream", "degree": 2}}),
        (4, {"tp": 2, "ep": 2}, {"engine": {"zero": 2}, "schedule": {"reduction": "chunks", "sp_bytes": 1024}}),
        (4, {"pp": 2, "etp": 2}, {"engine": {"zero": 0, "offload": "optimizer"}}),
    ],
    ids=str,
)
def test_folds_round_as_one_process(ranks: Any, world: int, fold: dict[str, int], sections: dict[str, Any]) -> None:
    """In float64, which recipes do not allow with such moments, nothing but their rounding is far from exact."""
    optimizer, wide = {**SPEC, "lr": 0.01, "eps": 1e-3}, {"precision": "float64"}
    sections = {**sections, "engine": {"kind": "torch", **sections["engine"]}}
    folded = make_recipe(world, fold, precision="float32", optimizer=optimizer, **sections).model_copy(update=wide)
    alone = make_recipe(
        1, precision="float32", optimizer=optimizer, training={"micro_batch": 8}, model={"layers": folded.model.layers}
    )
    expected = train(0, alone.model_copy(update=wide), 3)
    found = ranks(world).run(train, folded, 3)
    apart, where = worst(found, expected, relative=False)
    assert apart <= 1e-10, where
    assert drifted(found) == []
    exact = one_process(make_recipe(1, optimizer={**optimizer, "moments": None}, model={"layers": folded.model.layers}), steps=3)
    assert worst([expected], exact, relative=False)[0] > 1e-6, "nothing is rounded"
