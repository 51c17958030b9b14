"""Causal self-attention with grouped key/value heads and rotary positions, cut over heads (TP) and positions (CP).

Legend: B sequences, s positions of this rank's piece, S positions of its context-parallel shard (s · tp), H hidden, N query
heads and G key/value heads of this rank, D width of a head's queries and keys, V width of its values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from foldray.blueprint import AttentionSpec, ModelSpec, RopeSpec
from foldray.comm import Groups, Pending, scatter_sequence
from foldray.kernels.later import Later, product
from foldray.model.context import ContextMode, context_attention
from foldray.model.rotary import Rotation, rotation
from foldray.model.sight import Sight
from foldray.model.slices import KeysAndValues, slice_attention


@dataclass(frozen=True, eq=False)
class Place:
    """The positions of a slice that this rank holds (its shard), and the keys that queries see, by the name of the window.

    Slices with the same positions may share their rotations.
    """

    position_S: torch.Tensor
    sights: Mapping[str, Sight]
    rotations: dict[tuple[RopeSpec, torch.dtype], Rotation] = field(default_factory=dict, repr=False)

    def rotation(self, rope: RopeSpec, dtype: torch.dtype) -> Rotation:
        """Return `rotation` of the positions. It is computed once for all layers and micro-batches."""
        if (rope, dtype) not in self.rotations:
            self.rotations[rope, dtype] = rotation(self.position_S, rope, dtype)
        return self.rotations[rope, dtype]


class Attention(nn.Module, ABC):
    """Attention with this rank's heads: [B, s, H] → [B, s, H].

    If context-parallel ranks share slices, attention of a slice has three steps, so that other ops can run between them:
    `project` and `start_gather`, then `store` and `attend`. In backward, `start_scatter` and `summed` bring the gradient of
    keys and values back.

    Subclasses say how queries, keys and values are made (`HeadAttention`, `LatentAttention`). `out` is [N·V, H], `out_bias` [H]
    or None, and `sinks` [N] or None.

    Args:
        share: this rank's heads.
        context: how keys and values reach the other context-parallel ranks: around a ring, or in one all-gather.
    """

    def __init__(
        self, share: AttentionSpec, model: ModelSpec, groups: Groups, context: ContextMode = "ring", later: Later | None = None
    ):
        super().__init__()
        self.share, self.tensor, self.ring, self.context = share, groups.tensor, groups.context, context
        self.later = later or Later()
        self.out = nn.Parameter(torch.empty(share.outputs, model.hidden))
        self.out_bias = nn.Parameter(self.out.new_empty(model.hidden)) if share.bias == "all" else None
        self.sinks = nn.Parameter(self.out.new_empty(share.heads)) if share.sinks else None
        self._make(model)

    def forward(self, x_BsH: torch.Tensor, place: Place, memory: KeysAndValues | None = None) -> torch.Tensor:
        """Compute attention of whole sequences, or of one slice to everything up to it: [B, s, H] → [B, s, H].

        The call adds keys and values of this slice to the memory of earlier ones. Whole sequences do not use it.
        """
        q_BNSD, k_BGSD, v_BGSV = self._projected(x_BsH, place)
        return self._merged(self._attend(q_BNSD, k_BGSD, v_BGSV, place.sights[self.share.window], memory))

    def project(self, x_BsH: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries [B, N, S, D] of a slice, and its keys and values side by side [B, G, S, D + V]."""
        q_BNSD, *keys_and_values = self._projected(x_BsH, place)
        return q_BNSD, torch.cat(keys_and_values, dim=-1)

    def start_gather(self, block_BGSW: torch.Tensor) -> Pending:
        """Start to gather the keys and values of a slice. Every context-parallel rank must call this."""
        return self.ring.start_all_gather(block_BGSW)

    def store(self, gathered: torch.Tensor, place: Place, memory: KeysAndValues) -> None:
        """Store the gathered keys and values of a slice."""
        sight = place.sights[self.share.window]
        k_BGTD, v_BGTV = sight.in_order(gathered).split((self.share.key_dim, self.share.value_dim), dim=-1)
        memory.put(k_BGTD, v_BGTV, sight)

    def attend(self, q_BNSD: torch.Tensor, place: Place, memory: KeysAndValues) -> torch.Tensor:
        """Compute attention of a slice whose keys and values are stored: [B, N, S, D] → [B, s, H]."""
        return self._merged(slice_attention(q_BNSD, memory, place.sights[self.share.window], sink_N=self.sinks))

    def start_scatter(self, place: Place, memory: KeysAndValues) -> Pending:
        """Start to send the gradient of a slice's keys and values to the ranks that hold them.

        The parts of all ranks travel, and `summed` adds them up. That is as many bytes as a reduce-scatter, and gloo's
        reduce-scatter would hold up the host.
        """
        sight = place.sights[self.share.window]
        share = sight.by_member(memory.take_gradient(sight))
        rows = [len(share) // self.ring.size] * self.ring.size
        return self.ring.start_all_to_all(share, rows, rows)

    def summed(self, shares: torch.Tensor) -> torch.Tensor:
        """Return the gradient of this rank's keys and values: [cp · B, G, S, D + V] → [B, G, S, D + V]."""
        return shares.unflatten(0, (self.ring.size, len(shares) // self.ring.size)).sum(0)

    @abstractmethod
    def _make(self, model: ModelSpec) -> None:
        """Make the parameters of queries, keys and values, of the type and on the device of `out`."""

    @abstractmethod
    def _projected(self, x_BsH: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, each as [B, heads, S, width]."""

    def _merged(self, y_BNSV: torch.Tensor) -> torch.Tensor:
        """Return the sum over all heads: [B, N, S, V] → [B, s, H]."""
        y_BsH = scatter_sequence(product(y_BNSV.transpose(1, 2).flatten(2), self.out, self.later), self.tensor)
        return y_BsH if self.out_bias is None else y_BsH + self.out_bias

    def _attend(
        self, q_BNSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, sight: Sight, memory: KeysAndValues | None
    ) -> torch.Tensor:
        if memory is not None and not sight.whole:
            return slice_attention(q_BNSD, memory, sight, k_BGSD, v_BGSV, self.sinks)
        plain = self.sinks is None and self.share.key_dim == self.share.value_dim
        if self.ring.size > 1 or not plain:  # torch's fused attention has no sinks, and one width of heads
            return context_attention(q_BNSD, k_BGSD, v_BGSV, self.ring, self.context, sight, self.sinks)
        return whole_attention(q_BNSD, k_BGSD, v_BGSV, sight)


def whole_attention(q_BNSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, sight: Sight) -> torch.Tensor:
    """Compute attention of whole sequences that one rank holds: [B, N, S, V].

    Each run of queries is computed with the keys that it may see (`Sight.blocks`).
    """
    outs, grouped = [], q_BNSD.shape[1] != k_BGSD.shape[1]
    for queries, keys, mask in sight.blocks:
        given, causal = (mask, False) if isinstance(mask, torch.Tensor) else (None, mask == "causal")
        q, k, v = (x[:, :, run.start : run.stop] for x, run in ((q_BNSD, queries), (k_BGSD, keys), (v_BGSV, keys)))
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=given, is_causal=causal, enable_gqa=grouped))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
