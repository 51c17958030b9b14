"""An activation of the user's own, made of one row and a function: it trains, and mistakes in it are refused."""

from __future__ import annotations

import pytest
import torch

from foldray.blueprint import count_parameters
from foldray.errors import UserError
from foldray.kernels.activations import kernel_of
from foldray.kernels.experts import expert_ffn
from tests.foldray.kernels.squares import gated_squares
from tests.foldray.parity import check_equal, make_recipe, one_process, train

NAME = "tests.foldray.kernels.squares:SQUARES"


@pytest.mark.parametrize("name", ["gated_silu", "gated_clamped", "gelu", NAME])
def test_kernels_equal_their_plain_function(name: str) -> None:
    kernel, up_NW = kernel_of(name), torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    h_NF = kernel.plain(up_NW)
    dh_NF = torch.randn_like(h_NF)
    (gradient,) = torch.autograd.grad(h_NF, up_NW, dh_NF)
    torch.testing.assert_close(kernel.forward(up_NW.detach().clone()), h_NF.detach())
    again, found = kernel.backward(dh_NF.clone(), up_NW.detach())
    torch.testing.assert_close(again, h_NF.detach())
    torch.testing.assert_close(found, gradient)


def test_experts_compute_with_it() -> None:
    x, up, down = torch.randn(6, 4), torch.randn(2, 4, 6), torch.randn(2, 3, 4)
    for kind in ("loop", "grouped"):
        found = expert_ffn(x, [4, 2], up, down, NAME, kind)  # type: ignore[arg-type]
        torch.testing.assert_close(found[:4], gated_squares(x[:4] @ up[0]) @ down[0], rtol=1e-5, atol=1e-5)


def test_it_trains(ranks) -> None:
    recipe = make_recipe(4, {"tp": 2, "ep": 2, "etp": 2}, model={"ffn": NAME, "dense_first": 1}, moe={"experts": "grouped"})
    check_equal(ranks(4).run(train, recipe, 2), one_process(recipe, steps=2))
    gated = make_recipe(4, {"tp": 2, "ep": 2, "etp": 2}, model={"dense_first": 1})
    assert count_parameters(recipe.model) == count_parameters(gated.model)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("relu", "is not a legal value"),
        ("tests.foldray.kernels.squares:gated_squares", "is a function, not a"),
        ("tests.foldray.moe.nowhere:X", "cannot be imported"),
    ],
)
def test_what_is_no_activation_is_refused(name: str, rule: str) -> None:
    with pytest.raises(UserError, match=rule) as caught:
        make_recipe(2, 2, model={"ffn": name})
    assert caught.value.field == "model.ffn"
    assert caught.value.legal == ["gated_silu", "gated_clamped", "gelu", "module:NAME"]
