"""Gradients of weights that are left for later: the same bits as autograd's, and nothing before they are asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from foldray.blueprint import grouping
from foldray.kernels.autograd import Later, product
from foldray.kernels.experts import expert_ffn

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def gradients(compute: Callable[[Tensor, Later], Tensor], x: Tensor, weights: list[nn.Parameter], apart: bool) -> list[Tensor]:
    """Return the gradients of x and of the weights."""
    later, x = Later(), x.clone().requires_grad_()
    if not apart:
        y = compute(x, later)
        return list(torch.autograd.grad(y, [x, *weights], torch.ones_like(y).cumsum(0)))
    with later.collect() as tasks:
        y = compute(x, later)
    assert not tasks
    dx, *none = torch.autograd.grad(y, [x, *weights], torch.ones_like(y).cumsum(0), allow_unused=True)
    assert none == [None] * len(weights)
    sums = {weight: torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) for weight in weights}
    for task in tasks:
        task.add(sums[task.weight])
    return [dx, *(total.to(weight.dtype) for weight, total in sums.items())]


def same(compute: Callable[[Tensor, Later], Tensor], x: Tensor, weights: list[nn.Parameter]) -> None:
    for one, other in zip(*(gradients(compute, x, weights, apart) for apart in (False, True)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product(dtype: torch.dtype, transposed: bool) -> None:
    weight = nn.Parameter(torch.randn((24, 16) if transposed else (16, 24), dtype=dtype))
    same(lambda x, later: product(x, weight, later, transposed), torch.randn(3, 5, 16, dtype=dtype), [weight])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["one by one", "grouped"])
def test_experts(dtype: torch.dtype, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "SMALL_PRODUCT", limit)
    up, down = nn.Parameter(torch.randn(4, 16, 48, dtype=dtype)), nn.Parameter(torch.randn(4, 24, 16, dtype=dtype))

    def compute(x: Tensor, later: Later) -> Tensor:
        return expert_ffn(x, [7, 0, 20, 5], up, down, "gated_silu", "grouped", later.leaver(up, down))

    same(compute, torch.randn(32, 16, dtype=dtype), [up, down])


def test_nothing_is_left_outside_of_the_context() -> None:
    later = Later()
    with later.collect() as outer:
        with later.collect() as inner:
            leave = later.leaver(nn.Parameter(torch.zeros(1)))
        assert leave is not None
        leave(lambda total: None)
        assert (len(outer), len(inner)) == (0, 1)
    assert later.leaver() is None
