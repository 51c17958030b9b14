"""With equal weights, the MoE layers of `benchmarks/peers.py` compute what foldray's does."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from foldray.blueprint import ModelSpec, Ownership
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model.initial import parameters_as
from foldray.moe import MoeBackend, MoELayer
from tests.optional import tutel_or_skip
from tests.pool import RankPools, repository

NAMES = ["transformers", "deepspeed", "tutel:1", "tutel:2", "tutel:4"]
_SPEC = {
    "layers": 1, "hidden": 16, "heads": 1, "kv_heads": 1, "head_dim": 16, "ffn_hidden": 24, "experts": 4, "topk": 1,
    "expert_hidden": 24, "vocab": 8, "router": {"softmax": "before_topk", "logit_bias": True},
}  # fmt: skip


@pytest.mark.gate(1)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_layers_compute_the_same(name: str, world: int, ranks: RankPools) -> None:
    project = name.partition(":")[0]
    if project == "tutel":
        tutel_or_skip()
    else:
        pytest.importorskip(project)
    for apart in ranks(world).run(case, world, name):
        assert max(apart) < 1e-5, apart


def case(rank: int, world: int, name: str) -> list[float]:
    """Return how far output, gradient of tokens and norm of all weights' gradients are apart, over their size."""
    sys.path.insert(0, str(repository() / "benchmarks"))
    from peers import PEERS, Weights

    fold, generator = Fold(world, ep=world), torch.Generator().manual_seed(rank)
    with parameters_as("cpu", torch.float32):
        layer = MoELayer(Ownership(ModelSpec.model_validate(_SPEC), fold), 0, Groups.create(fold, rank), MoeBackend())
    for parameter in layer.experts.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    for parameter in layer.router.parameters():  # equal on all ranks; the bias makes the load uneven
        nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(9))
    x_BLH, grad_BLH = (torch.randn(2, 15, 16, generator=generator) for _ in range(2))
    expected = _step(layer, lambda x: layer(x)[0], x_BLH, grad_BLH)
    peer = PEERS[name]()(Weights.of(layer))
    results = _step(peer, peer, x_BLH, grad_BLH)
    return [float((result - other).norm() / other.norm()) for result, other in zip(results, expected, strict=True)]


def _step(layer: nn.Module, run: Callable[[Tensor], Tensor], x_BLH: Tensor, grad_BLH: Tensor) -> tuple[Tensor, ...]:
    x_BLH = x_BLH.clone().requires_grad_()
    out_BLH = run(x_BLH)
    out_BLH.backward(grad_BLH)
    gradients = [each.grad for each in layer.parameters() if each.grad is not None]
    local = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    assert x_BLH.grad is not None
    return out_BLH.detach(), x_BLH.grad, torch.stack([gradient.norm() for gradient in local]).norm()
