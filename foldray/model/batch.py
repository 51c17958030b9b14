"""The model's input, and its losses.

Legend: B sequences, L positions of a whole sequence, M MoE blocks, E experts, K experts per token, D further tokens (multi-token
prediction).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from foldray.blueprint import ModelSpec
from foldray.comm import Communicator
from foldray.moe import Balance

IGNORED = -100
"""A target that does not count, such as padding or a user's words in a conversation (PyTorch's default `ignore_index`)."""


class Batch(NamedTuple):
    """The whole sequences of one micro-batch. All ranks of a data-parallel place get the same batch; each takes its piece.

    Tokens and targets are int64. `IGNORED` is a target that does not count. Segments are the document number of each token: each
    document is as if it stood alone. Attention does not cross documents, and positions, windows and further tokens begin and end
    with them. None is one document.

    Experts, whole numbers of any type, stand for the choice of the routers: such as those of a sampler in reinforcement learning.
    The routers weigh them, and these weights have gradients. −1 leaves the choice to the router, for all of a token's assignments
    in a block. None leaves all choices.

    Weights are factors on the losses of tokens, in any floating type, such as advantages in reinforcement learning. A further
    token has the weight that it has as the next one. The step's objective still divides by the number of tokens that count. None
    is 1.
    """

    token_BL: torch.Tensor
    target_BL: torch.Tensor
    segment_BL: torch.Tensor | None = None
    expert_MBLK: torch.Tensor | None = None
    weight_BL: torch.Tensor | None = None

    def counted(self, depth: int = 0) -> torch.Tensor:
        """Return how many targets count for the token `depth` tokens after the next one, int64 scalar."""
        return (self.target(depth) != IGNORED).sum()

    def target(self, depth: int = 0) -> torch.Tensor:
        """Return the targets `depth` tokens after the next one, int64 [B, L]; `IGNORED` where the document has none."""
        if depth == 0:
            return self.target_BL
        later_BL = F.pad(self.target_BL[:, depth:], (0, depth), value=IGNORED)
        if self.segment_BL is None:
            return later_BL
        same_BL = F.pad(self.segment_BL[:, depth:] == self.segment_BL[:, :-depth], (0, depth))
        return later_BL.where(same_BL, IGNORED)

    def weight(self, depth: int = 0) -> torch.Tensor | None:
        """Return the weights of the targets `depth` tokens after the next one: [B, L]."""
        if depth == 0 or self.weight_BL is None:
            return self.weight_BL
        return F.pad(self.weight_BL[:, depth:], (0, depth))

    @property
    def position_BL(self) -> torch.Tensor:
        """The position of each token in its document, int64 [B, L]; [1, L] without documents."""
        position_L = torch.arange(self.token_BL.shape[1], device=self.token_BL.device)
        return position_L[None] if self.segment_BL is None else position_L - document_starts(self.segment_BL)

    @classmethod
    def empty(cls, length: int, device: torch.device | None = None) -> Batch:
        """Return a micro-batch of no sequences, for a rank that owns only experts."""
        none_BL = torch.empty((0, length), dtype=torch.int64, device=device)
        return cls(none_BL, none_BL)

    def cut(self, parts: int) -> list[Batch]:
        """Cut the sequences into `parts` parts. Their sizes differ by at most one, and may be 0."""
        size, rest = divmod(len(self.token_BL), parts)
        starts = [part * size + min(part, rest) for part in range(parts + 1)]
        ranges = [slice(*pair) for pair in pairwise(starts)]
        documents, experts, weights = self.segment_BL, self.expert_MBLK, self.weight_BL
        return [
            Batch(
                self.token_BL[at],
                self.target_BL[at],
                None if documents is None else documents[at],
                None if experts is None else experts[:, at],
                None if weights is None else weights[at],
            )
            for at in ranges
        ]


def document_starts(segment_BL: torch.Tensor) -> torch.Tensor:
    """Return the position at which each token's document begins, int64 [B, L]."""
    position_BL = torch.arange(segment_BL.shape[1], device=segment_BL.device).expand(segment_BL.shape)
    follows_BL = F.pad(segment_BL[:, 1:] == segment_BL[:, :-1], (1, 0))
    return position_BL.masked_fill(follows_BL, 0).cummax(dim=1).values


class Losses(NamedTuple):
    """A rank's contribution to the losses of one micro-batch or several. All fields are sums.

    Args:
        language: cross-entropy, summed over tokens that count, float64 scalar.
        balance, z: balance loss and z-loss, summed over sequences, mean over MoE blocks, float64 scalars.
        tokens, sequences: number of tokens that count, and of sequences, int64 scalars.
        count_ME: number of assignments per MoE block and expert, before dropping, int64.
        dropped: number of dropped assignments, int64 scalar.
        replaced: number of assignments of the batch (`Batch.expert_MBLK`) that routers would not have chosen, int64 scalar.
        further_D: cross-entropy of each further token, summed over those that count, float64.
        further_tokens_D: number of further tokens that count, int64.
    """

    language: torch.Tensor
    balance: torch.Tensor
    z: torch.Tensor
    tokens: torch.Tensor
    sequences: torch.Tensor
    count_ME: torch.Tensor
    dropped: torch.Tensor
    replaced: torch.Tensor
    further_D: torch.Tensor
    further_tokens_D: torch.Tensor

    @classmethod
    def zero(cls, model: ModelSpec, device: torch.device) -> Losses:
        """Return the losses of no micro-batch."""
        zero, none = (torch.zeros((), dtype=dtype, device=device) for dtype in (torch.float64, torch.int64))
        blocks, further = len(model.moe_layers), (model.mtp_depth,)
        count_ME = none.new_zeros(blocks, model.experts if blocks else 0)
        return cls(zero, zero, zero, none, none, count_ME, none, none, zero.new_zeros(further), none.new_zeros(further))

    def plus(self, **values: torch.Tensor) -> Losses:
        """Return these losses with values added to some fields."""
        return self._replace(**{name: getattr(self, name) + value for name, value in values.items()})

    def with_language(self, depth: int, loss: torch.Tensor) -> Losses:
        """Return these losses with a sum of the tokens `depth` after the next one added."""
        if depth == 0:
            return self.plus(language=loss)
        further_D = self.further_D.clone()
        further_D[depth - 1] += loss
        return self._replace(further_D=further_D)

    def with_router(self, block: int, balance: Balance) -> Losses:
        """Return these losses with those of a router added.

        Args:
            block: number of the MoE block among those of the model.
        """
        balance_loss, z = (value.detach().double() / len(self.count_ME) for value in balance.losses())
        count_ME = self.count_ME.clone()
        count_ME[block] += balance.tally.count_BE.sum(0)
        return self.plus(balance=balance_loss, z=z, dropped=balance.tally.dropped)._replace(count_ME=count_ME)

    def means(self) -> torch.Tensor:
        """Return language per token, balance per sequence and z per sequence: float64 [3]."""
        sums = torch.stack([self.language, self.balance, self.z])
        return sums / torch.stack([self.tokens, self.sequences, self.sequences]).clamp_min(1)

    def further(self) -> torch.Tensor:
        """Return the mean over depths of the cross-entropy per further token: float64 scalar, NaN without further tokens."""
        return (self.further_D / self.further_tokens_D.clamp_min(1)).mean()


def all_losses(losses: Sequence[Losses], control: Communicator, beside: torch.Tensor | None = None) -> Losses:
    """Return the sum over micro-batches and ranks, and replace other float64 numbers (`beside`) by their sums over the ranks.

    All ranks of `control` must call this. One all-reduce carries all fields in float64, which holds counts exactly.
    """
    local = Losses(*(torch.stack(values).sum(0) for values in zip(*losses, strict=True)))
    sent = [*local, *(() if beside is None else (beside,))]
    flat = control.all_reduce(torch.cat([tensor.double().flatten() for tensor in sent]))
    sums = flat.split([tensor.numel() for tensor in sent])
    if beside is not None:
        beside.copy_(sums[-1].view_as(beside))
    return Losses(*(total.view_as(like).to(like.dtype) for total, like in zip(sums, local, strict=False)))
