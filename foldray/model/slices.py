"""Exact causal attention of one slice of the sequence to everything up to it, slices one after another.

The keys and values of all slices so far are kept once, in the order of the sequence; what a slice's backward finds out about
earlier keys and values is added up in place. So slices go forward in their order, and backward in the opposite one: by the time a
slice goes backward, all that saw its keys and values have. (TeraPipe, Li et al. 2021, slices sequences this way; the parts of a
slice's attention, keys before it and its own, are merged as in FlashAttention.)

Under context parallelism every member holds two chunks of each slice, and the keys and values of a slice are gathered once: what
a layer remembers grows with cp.

B sequences, N query heads, G key/value heads, S positions of this rank's shard of the slice, L of the sequence, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foldray.comm import Communicator
from foldray.kernels.attention import Mask, attend, attend_backward, merge


class Part(NamedTuple):
    """Keys that a run of queries meets at once: positions of the sequence, and who of them sees whom."""

    keys: range
    mask: Mask


class Sight(NamedTuple):
    """A slice, and what this rank's queries of it see.

    Args:
        tokens: the slice's positions.
        length: of the whole sequence.
        shards: chunks of the slice that every context-parallel member holds.
        parts: of each chunk of this rank, in the order in which it holds them.
    """

    tokens: range
    length: int
    shards: Sequence[Sequence[range]]
    parts: Sequence[Sequence[Part]]

    @classmethod
    def of(cls, tokens: range, length: int, shards: Sequence[Sequence[range]], index: int, segment_BL: Tensor | None) -> Sight:
        """What member `index` sees.

        Args:
            segment_BL: document numbers, which attention does not cross.
        """
        return cls(tokens, length, shards, [_parts(chunk, segment_BL) for chunk in shards[index]])


class KeysAndValues:
    """Those of one layer and micro-batch, [2, B, G, L, D], and their gradient, which is in at least float32."""

    def __init__(self) -> None:
        self.made: Tensor | None = None
        self.gradient: Tensor | None = None
        self._seen = 0  # how many tokens are there
        self._reached = 0  # from which token on the gradient has been written

    def put(self, keys: Tensor, values: Tensor, sight: Sight) -> None:
        """Keys and values of a slice, once: a forward that is computed again finds them."""
        if self.made is None:
            self.made = keys.new_empty((2, *keys.shape[:2], sight.length, keys.shape[-1]))
        for all_BGLD, own in zip(self.made, (keys, values), strict=True):
            all_BGLD[..., sight.tokens.start : sight.tokens.stop, :] = own
        self._seen = sight.tokens.stop

    def has(self, sight: Sight) -> bool:
        return self._seen >= sight.tokens.stop

    def collect(self, sight: Sight) -> Tensor:
        """The gradient so far."""
        assert self.made is not None
        if self.gradient is None:
            # A member that is not alone meets its chunks with gaps between them; else the first share to come is what is there.
            alone, dtype = len(sight.shards) == 1, torch.promote_types(self.made.dtype, torch.float32)
            self.gradient = (torch.empty_like if alone else torch.zeros_like)(self.made, dtype=dtype)
            self._reached = sight.tokens.stop if alone else 0
        return self.gradient

    def add(self, part: Part, share: tuple[Tensor, Tensor], sight: Sight) -> None:
        """A share of the gradient of a part's keys and values; where that is the first, it is what is there from now on."""
        start, stop = part.keys.start, part.keys.stop
        middle = min(max(start, self._reached), stop)
        for total, more in zip(self.collect(sight), share, strict=True):
            total[..., middle:stop, :] += more[..., middle - start :, :]
            total[..., start:middle, :] = more[..., : middle - start, :]
        self._reached = min(self._reached, start)

    def free(self) -> None:
        self.made = self.gradient = None
        self._seen = self._reached = 0


def slice_attention(
    q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, memory: KeysAndValues, sight: Sight, communicator: Communicator
) -> Tensor:
    """Causal attention of this rank's queries of a slice: [B, N, S, D]. Every member calls this, slice after slice.

    Its backward frees the memory behind the first slice.
    """
    return _SliceAttention.apply(q_BNSD, k_BGSD, v_BGSD, memory, sight, communicator)


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BNSD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        memory: KeysAndValues,
        sight: Sight,
        communicator: Communicator,
    ) -> Tensor:
        if not memory.has(sight):
            if communicator.size > 1:
                k_BGSD, v_BGSD = _in_order(communicator.all_gather(torch.stack((k_BGSD, v_BGSD))), sight).unbind()
            memory.put(k_BGSD, v_BGSD, sight)
        assert memory.made is not None
        outs, lses = [], []
        for q, parts in zip(_chunked(q_BNSD, sight), sight.parts, strict=True):
            found = [attend(q, *_at(memory.made, part.keys), part.mask) for part in parts]
            out, lse = found[0]
            for other in found[1:]:
                out, lse = merge(out, lse, *other)
            outs.append(out)
            lses.append(lse)
        out_BNSD = (outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)).to(q_BNSD.dtype)
        ctx.save_for_backward(q_BNSD, out_BNSD, lses[0] if len(lses) == 1 else torch.cat(lses, dim=2))
        ctx.memory, ctx.sight, ctx.communicator, ctx.dtype = memory, sight, communicator, k_BGSD.dtype
        return out_BNSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        memory, sight, communicator = ctx.memory, ctx.sight, ctx.communicator
        gradient, made, dqs = memory.collect(sight), memory.made, []
        each = zip(*(_chunked(x, sight) for x in (grads[0], *ctx.saved_tensors)), sight.parts, strict=True)
        for dout, q, out, lse, parts in each:
            shares = []  # of one part or two
            for part in reversed(parts):  # later keys first: then what is there already has no gaps
                # The *merged* output and log-sum-exp: a part's own would normalise its weights over its own keys.
                share, dk, dv = attend_backward(dout, q, *_at(made, part.keys), out, lse, part.mask)
                memory.add(part, (dk, dv), sight)
                shares.append(share.to(gradient.dtype))
            dqs.append(shares[0] if len(shares) == 1 else shares[0].add_(shares[1]))
        own = gradient[..., sight.tokens.start : sight.tokens.stop, :]
        dk_BGSD, dv_BGSD = communicator.reduce_scatter(_by_member(own, sight)).to(ctx.dtype)
        if sight.tokens.start == 0:
            memory.free()
        dq_BNSD = dqs[0] if len(dqs) == 1 else torch.cat(dqs, dim=2)
        return dq_BNSD.to(ctx.saved_tensors[0].dtype), dk_BGSD, dv_BGSD, None, None, None


def _parts(queries: range, segment_BL: Tensor | None) -> list[Part]:
    if segment_BL is None:
        own = Part(queries, "causal")
        return [Part(range(queries.start), None), own] if queries.start else [own]
    mine_BS = segment_BL[:, queries.start : queries.stop]
    one = bool((mine_BS == mine_BS[:, :1]).all())
    own = Part(queries, "causal" if one else _same(mine_BS, mine_BS).tril())
    seen_B1ST = _same(mine_BS, segment_BL[:, : queries.start])
    met = seen_B1ST.any(0).flatten(0, 1).any(0).nonzero()
    if len(met) == 0:
        return [own]
    first = int(met[0])
    seen_B1ST = seen_B1ST[..., first:]
    return [Part(range(first, queries.start), None if bool(seen_B1ST.all()) else seen_B1ST), own]


def _same(queries_BS: Tensor, keys_BT: Tensor) -> Tensor:
    return (queries_BS.unsqueeze(2) == keys_BT.unsqueeze(1)).unsqueeze(1)


def _at(block: Tensor, keys: range) -> tuple[Tensor, Tensor]:
    """Keys and values at these positions, each [B, G, T, D]."""
    return block[0, ..., keys.start : keys.stop, :], block[1, ..., keys.start : keys.stop, :]


def _chunked(x: Tensor, sight: Sight) -> Sequence[Tensor]:
    """A tensor of this rank's shard, chunk by chunk."""
    return x.chunk(len(sight.parts), dim=2)


def _in_order(gathered: Tensor, sight: Sight) -> Tensor:
    """A slice's keys and values in the sequence's order, from every member's: [cp · 2, B, G, S, D] → [2, B, G, cp · S, D]."""
    if len(sight.shards) == 1:
        return gathered
    held = {
        chunk.start: part
        for shard, block in zip(sight.shards, gathered.chunk(len(sight.shards)), strict=True)
        for chunk, part in zip(shard, block.chunk(len(shard), dim=-2), strict=True)
    }
    return torch.cat([held[start] for start in sorted(held)], dim=-2)


def _by_member(gradient: Tensor, sight: Sight) -> Tensor:
    """The way back: what every member is to get, one after another along the first axis."""
    if len(sight.shards) == 1:
        return gradient
    first = sight.tokens.start
    shards = [
        torch.cat([gradient[..., chunk.start - first : chunk.stop - first, :] for chunk in shard], dim=-2)
        for shard in sight.shards
    ]
    return torch.cat(shards)
