"""Norms, dense feed-forward networks, the embedding, the head with its loss, and what multi-token prediction adds to blocks.

Norms compute in at least float32, and keep only their inputs for backward. The weight of a norm is its factor on a column, or
this factor less one (`zero`), so that weights near zero keep their digits.

Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2) has blocks that predict further tokens while training.
Module k is a block behind the last one. At position i it takes the state of depth k − 1, and the embedding of token i + k:

    state k at i = final norm k ( block k ( projection [norm(embedding of token i + k) ; norm(state k − 1 at i)] ) )
    loss k       = mean of −log p(token i + k + 1 | state k at i), by the model's own head

State 0 is the model's own, also after its final norm. The report leaves open on which side of the final norm a state is taken.
The code that DeepSeek's and GLM's weights run with takes it behind the norm (Megatron-LM, vLLM).

Positions see only earlier ones, and token i + k is an input, so slices and context parallelism work as in other blocks. The
last k positions have no target. They take the last token of the sequence.

Legend: B sequences, s positions of this rank's piece, S positions of its context-parallel shard (s · tp), T = B·S tokens, H
hidden, V rows of the vocabulary that this rank holds, N query heads and G key/value heads of this rank, D width of a head's
queries and keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foldray.blueprint import AttentionSpec, FeedForwardSpec, ModelSpec
from foldray.blueprint.parts import Parts, ffn_columns
from foldray.blueprint.sections import AdapterSpec
from foldray.comm import Communicator, gather_sequence, scatter_sequence, sum_over_members
from foldray.kernels import fused
from foldray.kernels.autograd import Later, at_least_float32, keeping_inputs, product
from foldray.kernels.experts import expert_ffn
from foldray.model.batch import IGNORED


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis."""

    def __init__(self, model: ModelSpec):
        super().__init__()
        self.eps, self.zero = model.norm_eps, model.norm == "zero_rmsnorm"
        self.weight = nn.Parameter(torch.empty(model.hidden))
        self.bias = nn.Parameter(torch.empty_like(self.weight)) if model.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps, self.zero)
        if x.is_cuda:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return keeping_inputs(self._centred, x, self.weight, self.bias)

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x, and x, for a residual stream. On a GPU, backward adds up the gradients of both as it computes."""
        narrow = self.bias is None and not self.zero and x.dtype == self.weight.dtype and x.shape[-1] <= fused.MOST_NORMED
        return fused.norm_beside(x, self.weight, self.eps) if narrow and fused.fits(x) else (self(x), x)

    def _centred(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        dtype = at_least_float32(x)
        return F.layer_norm(x.to(dtype), weight.shape, weight.to(dtype), bias.to(dtype), self.eps).to(x.dtype)


class HeadNorms(nn.Module):
    """RMSNorm of queries and keys: of each head by itself, or of all heads of a token, which TP cuts."""

    def __init__(self, share: AttentionSpec, model: ModelSpec, tensor: Communicator):
        super().__init__()
        self.share, self.eps, self.tensor, self.zero = share, model.norm_eps, tensor, model.norm == "zero_rmsnorm"
        widths = (share.queries, share.keys) if share.norm == "all" else (share.key_dim, share.key_dim)
        self.query, self.key = (nn.Parameter(torch.empty(width)) for width in widths)

    def forward(self, q_BSND: Tensor, k_BSGD: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize queries [B, S, N, D] and keys [B, S, G, D]."""
        if self.share.norm != "all":
            return self._normed(q_BSND, self.query), self._normed(k_BSGD, self.key)
        wide = q_BSND.flatten(2), k_BSGD.flatten(2)
        if self.tensor.size == 1:
            q_BSW, k_BSW = (self._normed(x, weight) for x, weight in zip(wide, (self.query, self.key), strict=True))
        else:
            squares_BS2 = sum_over_members(keeping_inputs(_squares, *wide), self.tensor)
            q_BSW, k_BSW = (
                keeping_inputs(
                    partial(_scaled, width=self.tensor.size * x.shape[-1], eps=self.eps, zero=self.zero), x, square, weight
                )
                for x, square, weight in zip(wide, squares_BS2.split(1, dim=-1), (self.query, self.key), strict=True)
            )
        return q_BSW.view_as(q_BSND), k_BSW.view_as(k_BSGD)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.eps, self.zero)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero: bool = False) -> Tensor:
    """Return RMSNorm over the last axis, in at least float32. It keeps only its inputs for backward.

    Args:
        zero: columns are multiplied by one plus the weight.
    """
    if x.is_cuda and not zero:  # one kernel, which computes in float32 and keeps only its input and a number per row
        return F.rms_norm(x, weight.shape, weight, eps)
    return keeping_inputs(partial(_normed, eps=eps, zero=zero), x, weight)


def _normed(x: Tensor, weight: Tensor, eps: float, zero: bool) -> Tensor:
    dtype = at_least_float32(x)
    return F.rms_norm(x.to(dtype), weight.shape, _factor(weight, dtype, zero), eps).to(x.dtype)


def _factor(weight: Tensor, dtype: torch.dtype, zero: bool) -> Tensor:
    """Return the factors on columns that a norm's weight stands for."""
    return weight.to(dtype) + 1 if zero else weight.to(dtype)


def _squares(q_BSW: Tensor, k_BSW: Tensor) -> Tensor:
    return torch.stack([x.to(at_least_float32(x)).square().sum(-1) for x in (q_BSW, k_BSW)], dim=-1)


def _scaled(x_BSW: Tensor, square_BS1: Tensor, weight_W: Tensor, width: int, eps: float, zero: bool) -> Tensor:
    """Return this rank's part of RMSNorm, from the sum of squares and the width of all ranks' parts."""
    dtype = square_BS1.dtype
    scale_BS1 = (square_BS1 / width + eps).rsqrt()
    return (x_BSW.to(dtype) * scale_BS1 * _factor(weight_W, dtype, zero)).to(x_BSW.dtype)


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return a multiple of x; x itself if it is the same."""
    return x if factor == 1 else x * factor


class LowRank(nn.Module):
    """An adapter of a product (LoRA, arXiv:2106.09685, section 4.1): scale · (x @ a) @ b, [..., in] → [..., out].

    TP cuts the side of the product that it cuts, so this rank's `a` is [in, R] and its `b` [R, out].
    """

    def __init__(self, inside: int, outside: int, adapter: AdapterSpec, later: Later):
        super().__init__()
        self.scale, self.later = adapter.scale, later
        self.a, self.b = nn.Parameter(torch.empty(inside, adapter.rank)), nn.Parameter(torch.empty(adapter.rank, outside))

    def forward(self, x: Tensor) -> Tensor:
        return product(scaled(product(x, self.a, self.later), self.scale), self.b, self.later)


class FeedForward(nn.Module):
    """A dense feed-forward network: [B, s, H] → [B, s, H]. TP cuts its inner width. `scale` is a factor on its output."""

    def __init__(self, share: FeedForwardSpec, hidden: int, tensor: Communicator, later: Later | None = None, scale: float = 1.0):
        super().__init__()
        self.share, self.tensor, self.later, self.scale = share, tensor, later or Later(), scale
        self.up = nn.Parameter(torch.empty(hidden, share.width))
        self.down = nn.Parameter(torch.empty(share.inner, hidden))

    def forward(self, x_BsH: Tensor) -> Tensor:
        x_BSH = gather_sequence(x_BsH, self.tensor)
        rows_TH = x_BSH.flatten(0, 1)
        # One expert with all rows: `expert_ffn` keeps less for backward than autograd does.
        weights, leave = (self.up.unsqueeze(0), self.down.unsqueeze(0)), self.later.leaver(self.up, self.down)
        y_TH = expert_ffn(rows_TH, [len(rows_TH)], *weights, self.share.ffn, "grouped", leave)
        return scaled(scatter_sequence(y_TH.view_as(x_BSH), self.tensor), self.scale)

    def parts(self) -> Parts:
        return {"up": ffn_columns(self.share.activation.inwards, self.share.inner), "down": [("down", ())]}


class WeighedFeedForward(FeedForward):
    """A feed-forward network whose output each token weighs with the sigmoid of a product (Qwen2-MoE's shared expert)."""

    def __init__(self, share: FeedForwardSpec, hidden: int, tensor: Communicator, later: Later | None = None, scale: float = 1.0):
        super().__init__(share, hidden, tensor, later, scale)
        self.output_gate = nn.Parameter(self.up.new_empty(hidden, 1))

    def forward(self, x_BsH: Tensor) -> Tensor:
        return super().forward(x_BsH) * torch.sigmoid(x_BsH @ self.output_gate)

    def parts(self) -> Parts:
        return super().parts() | {"output_gate": [("output_gate", ())]}


class Vocabulary(nn.Module):
    """The rows of an embedding or head that this rank holds. Each TP rank has an equal share of the vocabulary."""

    def __init__(self, rows: range, hidden: int, tensor: Communicator, later: Later | None = None):
        super().__init__()
        self.tensor, self.first, self.later = tensor, rows.start, later or Later()
        self.weight = nn.Parameter(torch.empty(len(rows), hidden))

    def embed(self, token_BS: Tensor) -> Tensor:
        """Return embeddings of this rank's piece, from the tokens of the shard: [B, S] → [B, s, H]."""
        if self.tensor.size == 1:
            return F.embedding(token_BS, self.weight)
        row_BS = token_BS - self.first
        held_BS = (row_BS >= 0) & (row_BS < self.weight.shape[0])
        # The row of a token is on one rank, and the other ranks add zero. So the sum is exact.
        rows_BSH = F.embedding(row_BS.where(held_BS, 0), self.weight) * held_BS.unsqueeze(-1)
        return scatter_sequence(rows_BSH, self.tensor)

    def logits(self, x_BsH: Tensor) -> Tensor:
        """Return logits of this rank's rows for every position of the shard: [B, s, H] → [B, S, V]."""
        return product(gather_sequence(x_BsH, self.tensor), self.weight, self.later, transposed=True)

    def loss(self, x_BsH: Tensor, target_BS: Tensor) -> Tensor:
        """Return the cross-entropy, summed over the shard's targets that count: at least float32, the same on all TP ranks."""
        if self.tensor.size == 1:
            return F.cross_entropy(self._wide_logits(x_BsH), target_BS.flatten(), reduction="sum", ignore_index=IGNORED)
        return self.losses(x_BsH, target_BS).sum()

    def losses(self, x_BsH: Tensor, target_BS: Tensor) -> Tensor:
        """Return the cross-entropy of each target of the shard, zero where it does not count: [B, S], as `loss`."""
        logits_TV, target_T = self._wide_logits(x_BsH), target_BS.flatten()
        if self.tensor.size == 1:
            loss_T = F.cross_entropy(logits_TV, target_T, reduction="none", ignore_index=IGNORED)
        else:
            loss_T = vocabulary_cross_entropy(logits_TV, target_T, self.first, self.tensor) * (target_T != IGNORED)
        return loss_T.view(target_BS.shape)

    def _wide_logits(self, x_BsH: Tensor) -> Tensor:
        logits_BSV = self.logits(x_BsH)
        return logits_BSV.to(at_least_float32(logits_BSV)).flatten(0, 1)


def vocabulary_cross_entropy(logits_TV: Tensor, target_T: Tensor, first: int, tensor: Communicator) -> Tensor:
    """Return the cross-entropy of each token [T], if every rank holds the logits of its own rows only.

    Logits do not leave their rank. Only each token's maximum, sum and target logit travel (Megatron-LM, section 3). The first
    row of this rank has the number `first` in the vocabulary.
    """
    return _VocabularyCrossEntropy.apply(logits_TV, target_T, first, tensor)


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, target_T: Tensor, first: int, tensor: Communicator) -> Tensor:
        largest_T = tensor.all_reduce(logits_TV.amax(-1), "max")
        shifted_TV = logits_TV - largest_T.unsqueeze(-1)
        row_T = target_T - first
        held_T = (row_T >= 0) & (row_T < logits_TV.shape[1])
        row_T = row_T.where(held_T, 0)
        target_logit_T = shifted_TV.gather(-1, row_T.unsqueeze(-1)).squeeze(-1) * held_T
        exp_TV = shifted_TV.exp_()
        total_T, target_logit_T = tensor.all_reduce(torch.stack((exp_TV.sum(-1), target_logit_T)))
        ctx.save_for_backward(exp_TV.div_(total_T.unsqueeze(-1)), row_T, held_T)
        return total_T.log() - target_logit_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_TV, row_T, held_T = ctx.saved_tensors
        grad_TV = softmax_TV.clone()
        grad_TV.scatter_add_(-1, row_T.unsqueeze(-1), -held_T.to(grad_TV.dtype).unsqueeze(-1))
        return grad_TV.mul_(grads[0].unsqueeze(-1)), None, None, None


class MTPModule(nn.Module):
    """What a block of multi-token prediction has beside the block itself."""

    def __init__(self, model: ModelSpec, later: Later):
        super().__init__()
        self.later = later
        self.embedding_norm, self.hidden_norm = Norm(model), Norm(model)
        self.projection = nn.Parameter(torch.empty(2 * model.hidden, model.hidden))
        self.final_norm = Norm(model)

    def forward(self, x_BsH: torch.Tensor, e_BsH: torch.Tensor) -> torch.Tensor:
        """Return the block's input from the state of the depth before and the embeddings of the later tokens: [B, s, H]."""
        both_BsI = torch.cat((self.embedding_norm(e_BsH), self.hidden_norm(x_BsH)), dim=-1)
        return product(both_BsI, self.projection, self.later)
