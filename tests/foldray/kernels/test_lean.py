"""Functions that compute again in backward: they give the same gradients, and keep only their inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from foldray.blueprint import ModelSpec
from foldray.kernels.autograd import keeping_inputs
from foldray.model.layers import Norm

SMALL = ModelSpec(
    layers=1, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn_hidden=16, experts=2, topk=1, expert_hidden=8, vocab=10
)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x.exp() @ weight


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_gradients_are_those_of_autograd(needs: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    shapes = zip([(5, 3), (3, 4)], needs, strict=True)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=each) for shape, each in shapes]
    factor = torch.randn(5, 4, dtype=torch.float64)
    wanted = [each for each in inputs if each.requires_grad]
    kept = torch.autograd.grad((product(*inputs) * factor).sum(), wanted)
    again = torch.autograd.grad((keeping_inputs(product, *inputs) * factor).sum(), wanted)
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def test_what_needs_no_gradient_gets_none() -> None:
    result = keeping_inputs(product, torch.randn(5, 3), torch.randn(3, 4))
    assert not result.requires_grad


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_remembers_its_input_alone(norm: str, dtype: torch.dtype) -> None:
    layer = Norm(SMALL.model_copy(update={"norm": norm})).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.ones_(parameter)
    x = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    assert {each.data_ptr() for each in kept} == {each.data_ptr() for each in (x, *layer.parameters())}
