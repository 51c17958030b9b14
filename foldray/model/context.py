"""Exact causal attention of sequences that are cut over several ranks (context parallelism).

Ranks hold zigzag shards (`Layout`; Llama 3, section 3.3.2): rank i the chunks i and 2·cp − 1 − i of 2·cp. A query chunk sees all
keys of earlier chunks and, causally, of itself; later chunks are never computed. Keys and values come in one of two ways:

| mode | source | forward sends | backward sends | keys and values held |
|---|---|---|---|---|
| "ring" | Ring Attention, Liu et al. 2023 | (cp − 1) · KV | (cp − 1) · (KV + dKV) | three ranks' |
| "all_gather" | Llama 3, section 3.3.2 | (cp − 1) · KV | (cp − 1) · (KV + dKV) | all, while in use |

per rank, where KV = 2·B·G·S·D numbers of the inputs' type and dKV as many, in at least float32. The ring sends each block while
the one before is in use; the all-gather sends all ahead of the computation, in fewer and larger messages.

B sequences, N query heads, G key/value heads, S positions held by this rank, L = S · cp positions of the whole sequence, D head
size. A block is keys and values together, [2, B, G, …, D].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foldray.blueprint import Layout
from foldray.comm import Communicator, Pending
from foldray.kernels.attention import Mask, attend, attend_backward, merge

Mode = Literal["ring", "all_gather"]


def context_attention(
    q_BNSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    communicator: Communicator,
    mode: Mode,
    segment_BL: Tensor | None = None,
) -> Tensor:
    """Causal attention over the whole sequence, for this rank's queries: [B, N, S, D]. Every member calls this.

    Neither mode keeps other ranks' keys and values for the backward pass, which fetches them again: what a layer remembers does
    not grow with cp. Parts are merged in an order that depends on ranks only, so results repeat.

    Args:
        communicator: the ranks that share the sequences, in the order of their shards.
        mode: how keys and values come to the queries.
        segment_BL: document numbers of the whole sequences, the same on every member. A query sees the keys with its own number.
            Parts in which no number occurs on both sides are skipped, which is cheap to tell while documents are contiguous.

    Raises:
        ValueError: the mode is unknown, or the document numbers are not those of the whole sequences.
        UserError: the sequence cannot be cut into 2·cp chunks.
    """
    if mode not in ("ring", "all_gather"):
        raise ValueError(f"mode is {mode!r}; legal are 'ring', 'all_gather'")
    shape = (q_BNSD.shape[0], q_BNSD.shape[2] * communicator.size)
    if segment_BL is not None and segment_BL.shape != shape:
        raise ValueError(f"segment_BL has shape {tuple(segment_BL.shape)}; whole sequences have {shape}")
    return _ContextAttention.apply(q_BNSD, k_BGSD, v_BGSD, communicator, mode, _Sight.of(communicator, shape[1], segment_BL))


@dataclass(frozen=True)
class _Part:
    """One of this rank's query chunks against neighbouring keys of a block.

    Args:
        place: which of this rank's chunks.
        keys: positions within the block.
    """

    place: int
    keys: slice
    mask: Mask


@dataclass(frozen=True)
class _Sight:
    """Which keys this rank's queries see.

    Args:
        shards: the chunks of every member, as positions of the sequence.
        index: this rank's place among the members.
        segment_BL: document numbers.
        span: lowest and highest document number in each chunk, one pair for every sequence, by the chunk's first position.
    """

    shards: tuple[tuple[range, ...], ...]
    index: int
    segment_BL: Tensor | None
    span: dict[int, list[tuple[int, int]]]

    @classmethod
    def of(cls, communicator: Communicator, length: int, segment_BL: Tensor | None) -> _Sight:
        size = communicator.size
        sight = cls(
            tuple(Layout(cp=size, cp_rank=i).chunks(range(length)) for i in range(size)), communicator.index, segment_BL, {}
        )
        if segment_BL is not None:
            chunk = len(sight.shards[0][0])
            low_BC, high_BC = segment_BL.unflatten(1, (-1, chunk)).aminmax(dim=-1)
            ends = torch.stack((low_BC.T, high_BC.T), dim=-1).tolist()  # the host waits here, once
            sight.span.update((i * chunk, [(low, high) for low, high in pairs]) for i, pairs in enumerate(ends))
        return sight

    @property
    def own(self) -> tuple[range, ...]:
        return self.shards[self.index]

    @property
    def chunk(self) -> int:
        return len(self.own[0])

    @property
    def sequence(self) -> list[range]:
        """All chunks in their order."""
        return sorted((chunk for shard in self.shards for chunk in shard), key=lambda chunk: chunk.start)

    def parts(self, block: Sequence[range]) -> Iterator[_Part]:
        """What is to be computed once a block with these chunks, in ascending order, is here."""
        for place, queries in enumerate(self.own):
            seen = [i for i, keys in enumerate(block) if keys.start < queries.start and self._meet(queries, keys)]
            if seen:
                first, last = seen[0], seen[-1] + 1
                yield self._part(place, first, last, self._mask(queries, block[first:last]))
            if queries in block:
                here = block.index(queries)
                yield self._part(place, here, here + 1, self._causal_mask(queries))

    def _part(self, place: int, first: int, last: int, mask: Mask) -> _Part:
        return _Part(place, slice(first * self.chunk, last * self.chunk), mask)

    def _meet(self, queries: range, keys: range) -> bool:
        """Whether a document may have positions in both chunks; never a wrong no."""
        if self.segment_BL is None:
            return True
        pairs = zip(self.span[queries.start], self.span[keys.start], strict=True)
        return any(q_low <= k_high and k_low <= q_high for (q_low, q_high), (k_low, k_high) in pairs)

    def _mask(self, queries: range, keys: Sequence[range]) -> Tensor | None:
        if self.segment_BL is None or self._lie_in_one_document([queries, *keys]):
            return None
        keys_BT = torch.cat([self._segments(self.segment_BL, chunk) for chunk in keys], dim=1)
        return _same(self._segments(self.segment_BL, queries), keys_BT)

    def _causal_mask(self, chunk: range) -> Mask:
        if self.segment_BL is None or self._lie_in_one_document([chunk]):
            return "causal"  # kernels have this mask built in
        segment_BS = self._segments(self.segment_BL, chunk)
        return _same(segment_BS, segment_BS).tril()

    def _lie_in_one_document(self, chunks: Sequence[range]) -> bool:
        """Whether each sequence has one document number in all of these chunks."""
        spans = [self.span[chunk.start] for chunk in chunks]
        return all(low == high for low, high in spans[0]) and all(span == spans[0] for span in spans)

    @staticmethod
    def _segments(segment_BL: Tensor, chunk: range) -> Tensor:
        return segment_BL[:, chunk.start : chunk.stop]


def _same(queries_BS: Tensor, keys_BT: Tensor) -> Tensor:
    return (queries_BS.unsqueeze(2) == keys_BT.unsqueeze(1)).unsqueeze(1)


class _ContextAttention(torch.autograd.Function):
    """One function for all parts: merging them by log-sum-exp has no gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any, q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, communicator: Communicator, mode: Mode, sight: _Sight
    ) -> Tensor:
        queries = q_BNSD.split(sight.chunk, dim=2)
        merged: dict[int, tuple[Tensor, Tensor]] = {}
        for chunks, block in _blocks(torch.stack((k_BGSD, v_BGSD)), communicator, mode, sight):
            for part in sight.parts(chunks):
                k, v = block[..., part.keys, :]
                result = attend(queries[part.place], k, v, part.mask)
                merged[part.place] = merge(*merged[part.place], *result) if part.place in merged else result
        out_BNSD, lse_BNS = (torch.cat([merged[place][i] for place in sorted(merged)], dim=2) for i in range(2))
        out_BNSD = out_BNSD.to(q_BNSD.dtype)
        ctx.save_for_backward(q_BNSD, k_BGSD, v_BGSD, out_BNSD, lse_BNS)
        ctx.communicator, ctx.mode, ctx.sight = communicator, mode, sight
        return out_BNSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSD, k_BGSD, v_BGSD, out_BNSD, lse_BNS = ctx.saved_tensors
        whole = _Whole(ctx.sight, q_BNSD, out_BNSD, lse_BNS, grads[0])
        block = torch.stack((k_BGSD, v_BGSD))
        backward = _ring_backward if ctx.mode == "ring" else _all_gather_backward
        dk_BGSD, dv_BGSD = backward(block, ctx.communicator, whole).to(k_BGSD.dtype)
        return whole.dq_BNSD.to(q_BNSD.dtype), dk_BGSD, dv_BGSD, None, None, None


class _Whole:
    """This rank's queries with what they came to over all keys, and their gradient so far."""

    def __init__(self, sight: _Sight, q_BNSD: Tensor, out_BNSD: Tensor, lse_BNS: Tensor, dout_BNSD: Tensor):
        self.sight = sight
        self.dq_BNSD = torch.zeros_like(q_BNSD, dtype=_at_least_float32(q_BNSD))
        chunked = (x.split(sight.chunk, dim=2) for x in (dout_BNSD, q_BNSD, out_BNSD, lse_BNS, self.dq_BNSD))
        self._dout, self._q, self._out, self._lse, self._dq = chunked

    def block_gradient(self, chunks: Sequence[range], block: Tensor) -> Tensor:
        """These queries' share of a block's gradient, in at least float32; adds the block's share to that of the queries."""
        dblock = torch.zeros_like(block, dtype=_at_least_float32(block))
        for part in self.sight.parts(chunks):
            place, (k, v), (dk, dv) = part.place, block[..., part.keys, :], dblock[..., part.keys, :]
            # The *merged* output and log-sum-exp: a part's own would normalise its weights over its own keys.
            shares = attend_backward(self._dout[place], self._q[place], k, v, self._out[place], self._lse[place], part.mask)
            for total, share in zip((self._dq[place], dk, dv), shares, strict=True):
                total.add_(share)
        return dblock


def _blocks(block: Tensor, communicator: Communicator, mode: Mode, sight: _Sight) -> Iterator[tuple[Sequence[range], Tensor]]:
    """Chunks and contents of the blocks that this rank's queries are to meet."""
    if mode == "all_gather":
        yield sight.sequence, _gather(block, communicator, sight)
        return
    for member, passing in _ring(block, communicator):
        yield sight.shards[member], passing


def _ring(block: Tensor, communicator: Communicator) -> Iterator[tuple[int, Tensor]]:
    """Every member's block in turn, this rank's first; the next one travels while one is in use."""
    for step in range(communicator.size):
        following = communicator.shift([block]) if step + 1 < communicator.size else None
        yield (communicator.index - step) % communicator.size, block
        if following is not None:
            (block,) = following.wait()


def _ring_backward(block: Tensor, communicator: Communicator, whole: _Whole) -> Tensor:
    """Gradient of this rank's block.

    A block's gradient follows it around, one step behind, and each rank adds its share. It starts at the first rank that is not
    its home, which adds the share of its own queries at the end: one message less than if it started at home.
    """
    home: Tensor | None = None
    following: Pending | None = None
    for member, passing in _ring(block, communicator):
        share = whole.block_gradient(whole.sight.shards[member], passing)
        if home is None:
            home = share
            continue
        if following is not None:
            share += following.wait()[0]
        following = communicator.shift([share])
    assert home is not None
    return home if following is None else home + following.wait()[0]


def _all_gather_backward(block: Tensor, communicator: Communicator, whole: _Whole) -> Tensor:
    """Gradient of this rank's block: shares for all positions are summed over the members and come home by reduce-scatter."""
    sight = whole.sight
    share = whole.block_gradient(sight.sequence, _gather(block, communicator, sight))
    shards = [torch.cat([share[..., chunk.start : chunk.stop, :] for chunk in shard], dim=-2) for shard in sight.shards]
    return communicator.reduce_scatter(torch.cat(shards))


def _gather(block: Tensor, communicator: Communicator, sight: _Sight) -> Tensor:
    """Keys and values of the whole sequence in its order: [2, B, G, S, D] → [2, B, G, L, D]."""
    shards = communicator.all_gather(block).chunk(communicator.size)
    held = {chunk.start: part for shard, x in zip(sight.shards, shards, strict=True) for chunk, part in _cut(shard, x)}
    return torch.cat([held[chunk.start] for chunk in sight.sequence], dim=-2)


def _cut(shard: Sequence[range], x: Tensor) -> Iterator[tuple[range, Tensor]]:
    """A shard's chunks, with the part of x [2, B, G, S, D] that belongs to each."""
    return zip(shard, x.chunk(len(shard), dim=-2), strict=True)


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
