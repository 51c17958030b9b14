"""Layers that are cut over tensor-parallel ranks, against torch's whole layers, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foldray.blueprint import FeedForwardSpec, ModelSpec
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.model import IGNORED
from foldray.model.layers import FeedForward, Norm, Vocabulary, vocabulary_cross_entropy
from tests.foldray.parity import MODEL

B, S, H, V = 3, 8, MODEL["hidden"], MODEL["vocab"]
FOLDS = [Fold(4, tp=2), Fold(4, tp=4), Fold(4, tp=2, cp=2, order="cp-tp-dp-pp")]
SPEC = ModelSpec(**MODEL)


def data(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens() -> Tensor:
    """Return tokens [B, S] with several rows of the vocabulary from every rank. Token 17 occurs in every sequence."""
    text_BS = torch.randperm(V, generator=torch.Generator().manual_seed(0))[: B * S].view(B, S)
    text_BS[:, 0] = 17
    assert all(len(set(range(V // 4 * i, V // 4 * (i + 1))) & set(text_BS.flatten().tolist())) > 1 for i in range(4))
    return text_BS


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def with_grad(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def held(groups: Groups, weight_VH: Tensor) -> tuple[Vocabulary, slice, slice]:
    """Return a vocabulary with this rank's rows of a weight, these rows, and this rank's piece of the sequence."""
    tp, index = groups.tensor.size, groups.tensor.index
    rows, piece = (slice(index * n // tp, (index + 1) * n // tp) for n in (V, S))
    made = Vocabulary(range(V)[rows], H, groups.tensor).double()
    with torch.no_grad():
        made.weight.copy_(weight_VH[rows])
    return made, rows, piece


def _embedding(rank: int, fold: Fold) -> None:
    groups, text_BS, weight_VH, grad_BSH = Groups.create(fold, rank), tokens(), with_grad(data(1, V, H)), data(2, B, S, H)
    made, rows, piece = held(groups, weight_VH)
    whole_BSH = F.embedding(text_BS, weight_VH)
    (gradient_VH,) = torch.autograd.grad(whole_BSH, weight_VH, grad_BSH)
    own_BsH = made.embed(text_BS)
    assert torch.equal(own_BsH, whole_BSH[:, piece]), "a row is added to zeros, which is exact"
    (gradient,) = torch.autograd.grad(own_BsH, made.weight, grad_BSH[:, piece])
    check(gradient, gradient_VH[rows])
    groups.close()


def _loss(rank: int, fold: Fold) -> None:
    groups, target_BS = Groups.create(fold, rank), tokens()
    target_BS[:, ::3] = IGNORED
    x_BSH, weight_VH = with_grad(data(3, B, S, H)), with_grad(data(4, V, H))
    made, rows, piece = held(groups, weight_VH)
    logits_BSV = x_BSH @ weight_VH.T
    loss = F.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten(), reduction="sum")
    gradients = torch.autograd.grad(loss, (x_BSH, weight_VH))
    own_BsH = with_grad(x_BSH.detach()[:, piece])
    check(made.logits(own_BsH), logits_BSV[..., rows])
    ours = made.loss(own_BsH, target_BS)
    check(ours, loss)
    found = torch.autograd.grad(ours, (own_BsH, made.weight))
    check(found[0], gradients[0][:, piece])
    check(found[1], gradients[1][rows])
    groups.close()


def _cross_entropy(rank: int, fold: Fold) -> None:
    """Use a different gradient for each token, and logits that overflow unless their maximum over ranks is subtracted."""
    groups, target_T = Groups.create(fold, rank), tokens().flatten()
    tp, index = groups.tensor.size, groups.tensor.index
    rows = slice(index * V // tp, (index + 1) * V // tp)
    for scale in (1.0, 3000.0):
        logits_TV, grad_T = with_grad(data(5, B * S, V) * scale), data(6, B * S)
        loss_T = F.cross_entropy(logits_TV, target_T, reduction="none")
        (gradient_TV,) = torch.autograd.grad(loss_T, logits_TV, grad_T)
        own_TV = with_grad(logits_TV.detach()[:, rows])
        kept_TV = own_TV.detach().clone()
        ours_T = vocabulary_cross_entropy(own_TV, target_T, rows.start, groups.tensor)
        check(ours_T, loss_T)
        (gradient,) = torch.autograd.grad(ours_T, own_TV, grad_T)
        check(gradient, gradient_TV[:, rows])
        assert torch.equal(own_TV, kept_TV), "the logits are the caller's"
    groups.close()


def _feed_forward(rank: int, fold: Fold) -> None:
    groups = Groups.create(fold, rank)
    tp, index = groups.tensor.size, groups.tensor.index
    piece = slice(index * S // tp, (index + 1) * S // tp)
    x_BSH, gate_HF, up_HF, down_FH = map(with_grad, (data(7, B, S, H), data(8, H, 24), data(9, H, 24), data(10, 24, H)))
    y_BSH = (F.silu(x_BSH @ gate_HF) * (x_BSH @ up_HF)) @ down_FH
    gradients = torch.autograd.grad(y_BSH, (x_BSH, gate_HF, up_HF, down_FH), data(11, B, S, H))
    made = FeedForward(FeedForwardSpec(24 // tp, SPEC.ffn), H, groups.tensor).double()
    own = slice(index * 24 // tp, (index + 1) * 24 // tp)
    with torch.no_grad():
        made.up.copy_(torch.cat((gate_HF[:, own], up_HF[:, own]), 1))
        made.down.copy_(down_FH[own])
    own_BsH = with_grad(x_BSH.detach()[:, piece])
    ours = made(own_BsH)
    check(ours, y_BSH[:, piece])
    found = torch.autograd.grad(ours, (own_BsH, made.up, made.down), data(11, B, S, H)[:, piece])
    check(found[0], gradients[0][:, piece])
    check(found[1], torch.cat((gradients[1][:, own], gradients[2][:, own]), 1))
    check(found[2], gradients[3][own])
    groups.close()


@pytest.mark.parametrize("fold", FOLDS, ids=lambda fold: f"{fold} {fold.order}")
@pytest.mark.parametrize("case", [_embedding, _loss, _cross_entropy, _feed_forward], ids=lambda case: case.__name__.strip("_"))
def test_a_cut_layer_is_torchs_whole_one(ranks, case: Any, fold: Fold) -> None:
    ranks(4).run(case, fold)


@pytest.mark.parametrize("case", [_embedding, _loss, _feed_forward], ids=lambda case: case.__name__.strip("_"))
def test_an_uncut_layer_is_torchs(case: Any) -> None:
    case(0, Fold(1))


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_norms_are_their_definitions_in_float32_at_least(norm: str) -> None:
    made = Norm(ModelSpec(**{**MODEL, "norm": norm, "norm_eps": 0.1}))
    x_BSH = data(12, B, S, H)
    with torch.no_grad():
        made.weight.copy_(data(13, H))
        if made.bias is not None:
            made.bias.copy_(data(14, H))
    centred = x_BSH - x_BSH.mean(-1, keepdim=True) if norm == "layernorm" else x_BSH
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt() * made.weight.double()
    expected = expected if made.bias is None else expected + made.bias.double()
    assert (made.bias is None) == (norm == "rmsnorm")
    torch.testing.assert_close(made.double()(x_BSH), expected)
    narrow = made.bfloat16()(x_BSH.bfloat16())
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.double(), expected, rtol=2e-2, atol=5e-2)
