"""How evenly the experts of a MoE layer are used: its balance loss and z-loss, and the change of its selection bias.

The balance loss is E · Σ_e f_e · P_e (Switch Transformer, Fedus et al. 2021, equation 4). f_e is expert e's share of some
assignments, before dropping, and P_e its mean score over a sequence. The f sum to 1, so the loss is 1 if all experts are used
evenly. (Some papers and systems have f that sum to K, and a loss that is K times as large.) The f have no gradient. They are
those of a scope (`RouterSpec.balance_scope`):

- `sequence`: f of each whole sequence by itself. So the loss depends neither on the fold, nor on the micro-batch, nor on pieces.
  With sigmoids, it is the sequence-wise loss of DeepSeek-V3 (section 2.1.2, equations 17 to 20), but for the selection bias,
  which has a part in these counts and none in that paper's.
- `batch`: f over all sequences of the micro-batches with the same number at all data-parallel places. All ranks that hold a
  piece of them sum their counts, as *Demons in the Detail* does without its buffer (Qiu et al. 2025, arXiv:2501.11873). The loss
  depends on dp · `micro_batch`, and on nothing else of a fold or a schedule. If a step has one micro-batch, it is that of the
  global batch.
- `global_batch`: f over all sequences of the optimizer step before. At first, all f are 1/E, with which the loss has no gradient.
  So each micro-batch has the f of a whole global batch, and the loss depends neither on the fold, nor on the micro-batch, nor on
  pieces. The paper, and Megatron-Core's `global_aux_loss`, take f over the micro-batches of the same step so far, because those
  of the whole step are known only after the first ones have gone backward. Both approximate one loss. Theirs begins each step
  with few sequences, and depends on their order and on the size of micro-batches. This one is a step late.

P is the mean over each sequence, and the loss of a step the mean over its sequences. Where sequences have the same f, that is
the loss with P over all of them.

The selection bias balances without a loss (Wang et al. 2024, arXiv:2408.15664, algorithm 1).

Legend: B sequences, s positions of a rank's piece, L positions of a whole sequence, R ranks that share it (TP×CP), E experts, K
experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from foldray.blueprint import BalanceScope, BiasUpdate, Layout, RouterSpec
from foldray.comm import Groups
from foldray.kernels.transfer import to_device


class Sequences:
    """The ranks that share this rank's sequences, and the positions that each of them holds."""

    def __init__(self, groups: Groups):
        fold = groups.fold
        self.communicator, self._batch = groups.sequence, groups.replicated_gradients
        places = (fold.attention.coordinate(rank) for rank in self.communicator.ranks)
        self._layouts = [Layout(fold.cp, fold.tp, place["cp"], place["tp"]) for place in places]
        self._made: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}  # by length of whole sequences

    @property
    def ranks(self) -> int:
        return self.communicator.size

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x over the ranks."""
        return self.communicator.all_reduce(x.clone()) if self.ranks > 1 else x

    def sum_of_batch(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x over the ranks of all data-parallel places that have a piece of the same micro-batch."""
        return self._batch.all_reduce(x.clone()) if self._batch.size > 1 else x

    def whole(self, x_BsK: torch.Tensor) -> torch.Tensor:
        """Gather the pieces of all ranks to whole sequences, in the order of positions: [B, s, K] → [B, L, K]."""
        if self.ranks == 1:
            return x_BsK
        pieces_RBsK = self.communicator.all_gather(x_BsK).view(self.ranks, *x_BsK.shape)
        held_BLK = pieces_RBsK.movedim(0, 1).flatten(1, 2)
        _, order_L = self._positions(held_BLK)
        return held_BLK[:, order_L]

    def own(self, x_BLK: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of whole sequences: [B, L, K] → [B, s, K]."""
        return x_BLK if self.ranks == 1 else x_BLK[:, self._positions(x_BLK)[0]]

    def _positions(self, x_BLK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions that this rank holds, and of each position the index among those of all ranks in turn."""
        length, device = x_BLK.shape[1], x_BLK.device
        if (length, device) not in self._made:
            held_RL = to_device([layout.piece(length) for layout in self._layouts], device, torch.int64)
            self._made[length, device] = held_RL[self.communicator.index], torch.argsort(held_RL.flatten())
        return self._made[length, device]


@dataclass(frozen=True)
class Tally:
    """Sums over pieces of one micro-batch in one MoE layer. `+` joins the sums of different pieces.

    Args:
        count_BE: this rank's assignments per sequence and expert before dropping, int64.
        score_BE: this rank's scores (`router.scores`) per sequence and expert, summed over tokens.
        z: squared log-sum-exp of the logits, summed over this rank's tokens, scalar.
        dropped: number of this rank's dropped assignments, int64 scalar.
        competed_BE: assignments that competed for capacity, kept or dropped, int64. They are those of the whole sequences
            with `drop_scope: sequence`, else this rank's. None if pieces do not compete with each other.
    """

    count_BE: torch.Tensor
    score_BE: torch.Tensor
    z: torch.Tensor
    dropped: torch.Tensor
    competed_BE: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The arguments of `Tally`."""
        sums = (self.count_BE, self.score_BE, self.z, self.dropped)
        return sums if self.competed_BE is None else (*sums, self.competed_BE)

    def __add__(self, other: Tally) -> Tally:
        competed_BE = None
        if self.competed_BE is not None and other.competed_BE is not None:
            competed_BE = self.competed_BE + other.competed_BE
        return Tally(
            self.count_BE + other.count_BE,
            self.score_BE + other.score_BE,
            self.z + other.z,
            self.dropped + other.dropped,
            competed_BE,
        )

    def detach(self) -> Tally:
        return replace(self, score_BE=self.score_BE.detach(), z=self.z.detach())


@dataclass(frozen=True)
class Balance:
    """How evenly a layer uses its experts, for whole sequences of `length` tokens.

    Args:
        tally: the sums over this rank's pieces.
        share_BE: the f of each sequence, which sum to 1.
    """

    tally: Tally
    share_BE: torch.Tensor
    length: int

    def slopes(self) -> tuple[torch.Tensor, float]:
        """Return the derivatives of the balance loss by score_BE [B, E], and of the z-loss by z.

        The balance loss of a sequence is E · Σ_e f_e · P_e. The z-loss of a sequence is the mean of the squared log-sum-exp over
        its tokens (ST-MoE, Zoph et al. 2022, equation 5). Both losses are summed over sequences.
        """
        return self.share_BE * (self.share_BE.shape[1] / self.length), 1 / self.length

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's contributions to the balance loss and to the z-loss, summed over sequences: two scalars."""
        slope_BE, slope = self.slopes()
        return (slope_BE * self.tally.score_BE).sum(), self.tally.z * slope

    def objective(self, spec: RouterSpec) -> torch.Tensor:
        """Return the weighted sum of both losses, scalar."""
        balance, z = self.losses()
        return spec.balance_loss * balance + spec.z_loss * z


def frequencies(tally: Tally, sequences: Sequences, scope: BalanceScope, earlier_E: torch.Tensor) -> torch.Tensor:
    """Return the f of each sequence of a micro-batch whose tally has all pieces [B, E], in the type of scores.

    All ranks that hold a piece of the sequences must call this; with the scope `batch`, those of all data-parallel places.

    Args:
        earlier_E: the f of the optimizer step before.
    """
    if scope == "global_batch":
        return earlier_E.to(tally.score_BE.dtype).expand_as(tally.score_BE)
    counts = sequences.sum_of_batch(tally.count_BE.sum(0)) if scope == "batch" else sequences.sum(tally.count_BE)
    counts = counts.to(tally.score_BE.dtype)
    return (counts / counts.sum(-1, keepdim=True)).expand_as(tally.score_BE)


def bias_change(count_E: torch.Tensor, rule: BiasUpdate) -> torch.Tensor:
    """Return the change of a selection bias for a rate of 1, from the assignments of a step: [E] → [E].

    With the violation e_i = c̄ − c_i of an expert with c_i assignments, and their mean c̄, it is for the rule

    - `sign`: sign(e_i) (Wang et al. 2024, algorithm 1; DeepSeek-V3, section 2.1.2);
    - `centered`: sign(e_i) less its mean over the experts, as in torchtitan, so that biases keep their mean;
    - `proportional`: e_i / c̄. That is the paper's other rule, b_i + u · e_i, over the mean, as in its MaxVio and in Trinity
      (arXiv:2602.17004), so that a rate means the same for any number of tokens.
    """
    mean = count_E.mean()
    if rule == "proportional":
        return (mean - count_E) / mean.clamp_min(1e-20)
    sign_E = (mean - count_E).sign()
    return sign_E - sign_E.mean() if rule == "centered" else sign_E
