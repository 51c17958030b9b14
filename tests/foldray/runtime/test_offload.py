"""The torch engine with its optimizer on the host. Without a GPU both sides are a CPU, so copies show as tensors apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foldray.runtime import optimizer
from tests.foldray.live import storage
from tests.foldray.parity import engine_on, go_on, make_recipe, own_batches

ADAMW: dict[str, Any] = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip": 0.5}
HOST: dict[str, Any] = {"kind": "torch", "offload": "optimizer"}


@pytest.mark.parametrize("precision", ["bfloat16", "float32", "float64"])
def test_gradients_travel_to_the_host_and_weights_back(precision: str) -> None:
    """Before the update the host knows nothing of the gradients. Afterwards it has clipped ones, and the model its weights."""
    recipe = make_recipe(1, engine=HOST, optimizer=ADAMW, precision=precision, moe={"experts": "grouped"})
    with engine_on(recipe) as (engine, groups):
        engine.train(own_batches(recipe, groups, 0))
        model = {storage(parameter)[0] for parameter in engine.model.parameters()}
        sums = {storage(view)[0] for view in engine.gradients.views.values()}
        for parameter, master in engine.masters.items():
            assert storage(master)[0] not in model
            assert storage(master.grad)[0] not in sums
            assert master.device.type == master.grad.device.type == "cpu"
            assert master.dtype == torch.promote_types(parameter.dtype, torch.float32)
            assert not master.grad.any()
        seen = {}
        engine.gradients.zero = lambda: seen.update({p: view.clone() for p, view in engine.gradients.views.items()})
        before = {parameter: parameter.detach().clone() for parameter in engine.masters}
        norms = engine.update(0.01)
        assert norms.total > 0.5, "the test needs gradients that are clipped"
        for parameter, master in engine.masters.items():
            assert torch.equal(master.grad, seen[parameter])
            assert torch.equal(parameter, master.to(parameter.dtype))
        assert any(not torch.equal(parameter, before[parameter]) for parameter in engine.masters)


def test_a_skipped_step_leaves_the_host_as_it_is() -> None:
    recipe = make_recipe(1, engine=HOST, optimizer=ADAMW)
    with engine_on(recipe) as (engine, groups):
        go_on(engine, groups, recipe, range(1))
        before = [each.clone() for each in (*engine.host.tensors(), *engine.masters)]
        engine.train(own_batches(recipe, groups, 1))
        next(iter(engine.gradients.views.values())).fill_(float("nan"))
        engine.update(0.01, skips=True)
        assert all(map(torch.equal, before, (*engine.host.tensors(), *engine.masters)))


def test_one_pass_on_the_host_equals_tensor_by_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host of a GPU the update is the kernel that passes over memory once."""
    recipe, plain = make_recipe(1, engine=HOST, optimizer=ADAMW), optimizer.make_optimizer
    found = []
    for fused in (False, True):
        monkeypatch.setattr("foldray.runtime.engine.make_optimizer", lambda spec, groups, _, way=fused: plain(spec, groups, way))
        with engine_on(recipe) as (engine, groups):
            found.append(go_on(engine, groups, recipe, range(3))["weights"])
    for name, (tensor, _) in found[0].items():
        torch.testing.assert_close(found[1][name].tensor, tensor, rtol=1e-10, atol=1e-12)
