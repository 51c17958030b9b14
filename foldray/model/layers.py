"""Dense feed-forward networks, the embedding, and the head with its loss.

Legend: B sequences, s positions of this rank's piece, S positions of its context-parallel shard (s · tp), T = B·S tokens, H
hidden, V rows of the vocabulary that this rank holds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foldray.blueprint import FeedForwardSpec
from foldray.blueprint.parts import Parts, ffn_columns
from foldray.comm import Communicator, gather_sequence, scatter_sequence
from foldray.kernels.experts import expert_ffn
from foldray.kernels.later import Later, product
from foldray.kernels.wide import at_least_float32
from foldray.model.batch import IGNORED


class FeedForward(nn.Module):
    """A dense feed-forward network: [B, s, H] → [B, s, H]. TP cuts its inner width."""

    def __init__(self, share: FeedForwardSpec, hidden: int, tensor: Communicator, later: Later | None = None):
        super().__init__()
        self.share, self.tensor, self.later = share, tensor, later or Later()
        self.up = nn.Parameter(torch.empty(hidden, share.width))
        self.down = nn.Parameter(torch.empty(share.inner, hidden))

    def forward(self, x_BsH: Tensor) -> Tensor:
        x_BSH = gather_sequence(x_BsH, self.tensor)
        rows_TH = x_BSH.flatten(0, 1)
        # One expert with all rows: `expert_ffn` keeps less for backward than autograd does.
        weights, leave = (self.up.unsqueeze(0), self.down.unsqueeze(0)), self.later.leaver(self.up, self.down)
        y_TH = expert_ffn(rows_TH, [len(rows_TH)], *weights, self.share.ffn, "grouped", leave)
        return scatter_sequence(y_TH.view_as(x_BSH), self.tensor)

    def parts(self) -> Parts:
        return {"up": ffn_columns(self.share.activation.inwards, self.share.inner), "down": [("down", ())]}


class WeighedFeedForward(FeedForward):
    """A feed-forward network whose output each token weighs with the sigmoid of a product (Qwen2-MoE's shared expert)."""

    def __init__(self, share: FeedForwardSpec, hidden: int, tensor: Communicator, later: Later | None = None):
        super().__init__(share, hidden, tensor, later)
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
        logits_BSV = self.logits(x_BsH)
        logits_TV = logits_BSV.to(at_least_float32(logits_BSV)).flatten(0, 1)
        if self.tensor.size == 1:
            return F.cross_entropy(logits_TV, target_BS.flatten(), reduction="sum", ignore_index=IGNORED)
        loss_T = vocabulary_cross_entropy(logits_TV, target_BS.flatten(), self.first, self.tensor)
        return (loss_T * (target_BS.flatten() != IGNORED)).sum()


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
