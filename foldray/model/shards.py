"""Gathers keys and values that are cut over context-parallel ranks, and scatters their gradients.

Legend: B sequences, G key/value heads, S positions of this rank's shard, D head size (Dk of keys, Dv of values).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foldray.comm import Communicator
from foldray.model.sight import Sight


def gather_chunks(keys_and_values: Sequence[Tensor], communicator: Communicator, sight: Sight) -> Tensor:
    """Gather keys and values of a slice in the order of positions: [B, G, S, D] each → [B, G, cp · S, Dk + Dv].

    Every member must call this.
    """
    return in_order(communicator.all_gather(torch.cat(list(keys_and_values), dim=-1)), sight)


def in_order(gathered: Tensor, sight: Sight) -> Tensor:
    """Sort the blocks of all members by position: [cp · B, G, S, D] → [B, G, cp · S, D]."""
    held = {
        chunk.start: part
        for shard, block in zip(sight.shards, gathered.chunk(len(sight.shards)), strict=True)
        for chunk, part in zip(shard, block.chunk(len(shard), dim=-2), strict=True)
    }
    return torch.cat([held[chunk.start] for chunk in sight.sequence], dim=-2)


def scatter_chunks(share: Tensor, communicator: Communicator, sight: Sight) -> Tensor:
    """Sum a gradient of a slice over the members, and return this member's chunks: [B, G, cp · S, D] → [B, G, S, D].

    Every member must call this.
    """
    return share if sight.alone else communicator.reduce_scatter(by_member(share, sight))


def by_member(share: Tensor, sight: Sight) -> Tensor:
    """Sort a tensor of a slice by the members that hold its positions: [B, G, cp · S, D] → [cp · B, G, S, D]."""
    first = sight.tokens.start
    shards = [
        torch.cat([share[..., chunk.start - first : chunk.stop - first, :] for chunk in shard], dim=-2) for shard in sight.shards
    ]
    return torch.cat(shards)
