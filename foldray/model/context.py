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
size. A block is keys and values side by side, [B, G, …, Dk + Dv].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foldray.comm import Communicator, Pending
from foldray.kernels.attention import attend, attend_backward, merge
from foldray.model.shards import gather_chunks, scatter_chunks
from foldray.model.sight import Part, Sight

Mode = Literal["ring", "all_gather"]


def context_attention(
    q_BNSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    communicator: Communicator,
    mode: Mode,
    sight: Sight,
) -> Tensor:
    """Causal attention over the whole sequence, for this rank's queries: [B, N, S, D]. Every member calls this.

    Neither mode keeps other ranks' keys and values for the backward pass, which fetches them again: what a layer remembers does
    not grow with cp. Parts are merged in an order that depends on ranks only, so results repeat.

    Args:
        communicator: the ranks that share the sequences, in the order of their shards.
        mode: how keys and values come to the queries.
        sight: of the whole sequences, the same on every member but for its index.

    Raises:
        ValueError: the mode is unknown, or document numbers are not those of the whole sequences.
    """
    if mode not in ("ring", "all_gather"):
        raise ValueError(f"mode is {mode!r}; legal are 'ring', 'all_gather'")
    shape, segment_BL = (q_BNSD.shape[0], q_BNSD.shape[2] * communicator.size), sight.segment_BL
    if segment_BL is not None and segment_BL.shape != shape:
        raise ValueError(f"segment_BL has shape {tuple(segment_BL.shape)}; whole sequences have {shape}")
    return _ContextAttention.apply(q_BNSD, k_BGSD, v_BGSD, communicator, mode, sight)


class _ContextAttention(torch.autograd.Function):
    """One function for all parts: merging them by log-sum-exp has no gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any, q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, communicator: Communicator, mode: Mode, sight: Sight
    ) -> Tensor:
        queries, widths = q_BNSD.chunk(len(sight.own), dim=2), (k_BGSD.shape[-1], v_BGSD.shape[-1])
        merged: dict[int, tuple[Tensor, Tensor]] = {}
        for chunks, block in _blocks((k_BGSD, v_BGSD), communicator, mode, sight):
            for place, part in _parts(sight, chunks):
                k, v = block[..., part.keys, :].split(widths, dim=-1)
                result = attend(queries[place], k, v, part.mask)
                merged[place] = merge(*merged[place], *result) if place in merged else result
        out_BNSD, lse_BNS = (torch.cat([merged[place][i] for place in sorted(merged)], dim=2) for i in range(2))
        out_BNSD = out_BNSD.to(q_BNSD.dtype)
        ctx.save_for_backward(q_BNSD, k_BGSD, v_BGSD, out_BNSD, lse_BNS)
        ctx.communicator, ctx.mode, ctx.sight = communicator, mode, sight
        return out_BNSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSD, k_BGSD, v_BGSD, out_BNSD, lse_BNS = ctx.saved_tensors
        widths = (k_BGSD.shape[-1], v_BGSD.shape[-1])
        whole = _Whole(ctx.sight, widths, q_BNSD, out_BNSD, lse_BNS, grads[0])
        backward = _ring_backward if ctx.mode == "ring" else _all_gather_backward
        gradient = backward((k_BGSD, v_BGSD), ctx.communicator, whole).to(k_BGSD.dtype)
        dk_BGSD, dv_BGSD = gradient.split(widths, dim=-1)
        return whole.dq_BNSD.to(q_BNSD.dtype), dk_BGSD, dv_BGSD, None, None, None


class _Whole:
    """This rank's queries with what they came to over all keys, and their gradient so far."""

    def __init__(
        self, sight: Sight, widths: tuple[int, int], q_BNSD: Tensor, out_BNSD: Tensor, lse_BNS: Tensor, dout_BNSD: Tensor
    ):
        self.sight, self.widths = sight, widths
        self.dq_BNSD = torch.zeros_like(q_BNSD, dtype=_at_least_float32(q_BNSD))
        chunked = (x.chunk(len(sight.own), dim=2) for x in (dout_BNSD, q_BNSD, out_BNSD, lse_BNS, self.dq_BNSD))
        self._dout, self._q, self._out, self._lse, self._dq = chunked

    def block_gradient(self, chunks: Sequence[range], block: Tensor) -> Tensor:
        """These queries' share of a block's gradient, in at least float32; adds the block's share to that of the queries."""
        dblock = torch.zeros_like(block, dtype=_at_least_float32(block))
        for place, part in _parts(self.sight, chunks):
            (k, v), (dk, dv) = (x[..., part.keys, :].split(self.widths, dim=-1) for x in (block, dblock))
            # The *merged* output and log-sum-exp: a part's own would normalise its weights over its own keys.
            shares = attend_backward(self._dout[place], self._q[place], k, v, self._out[place], self._lse[place], part.mask)
            for total, share in zip((self._dq[place], dk, dv), shares, strict=True):
                total.add_(share)
        return dblock


def _parts(sight: Sight, chunks: Sequence[range]) -> Iterator[tuple[int, Part]]:
    """What is to be computed once a block with these chunks, in ascending order, is here; by number of this rank's chunk."""
    return ((place, part) for place, queries in enumerate(sight.own) for part in sight.meet(queries, chunks))


def _blocks(
    keys_and_values: tuple[Tensor, Tensor], communicator: Communicator, mode: Mode, sight: Sight
) -> Iterator[tuple[Sequence[range], Tensor]]:
    """Chunks and contents of the blocks that this rank's queries are to meet."""
    if mode == "all_gather":
        yield sight.sequence, gather_chunks(keys_and_values, communicator, sight)
        return
    for member, passing in _ring(torch.cat(keys_and_values, dim=-1), communicator):
        yield sight.shards[member], passing


def _ring(block: Tensor, communicator: Communicator) -> Iterator[tuple[int, Tensor]]:
    """Every member's block in turn, this rank's first; the next one travels while one is in use."""
    for step in range(communicator.size):
        following = communicator.shift([block]) if step + 1 < communicator.size else None
        yield (communicator.index - step) % communicator.size, block
        if following is not None:
            (block,) = following.wait()


def _ring_backward(keys_and_values: tuple[Tensor, Tensor], communicator: Communicator, whole: _Whole) -> Tensor:
    """Gradient of this rank's block.

    A block's gradient follows it around, one step behind, and each rank adds its share. It starts at the first rank that is not
    its home, which adds the share of its own queries at the end: one message less than if it started at home.
    """
    home: Tensor | None = None
    following: Pending | None = None
    for member, passing in _ring(torch.cat(keys_and_values, dim=-1), communicator):
        share = whole.block_gradient(whole.sight.shards[member], passing)
        if home is None:
            home = share
            continue
        if following is not None:
            share += following.wait()[0]
        following = communicator.shift([share])
    assert home is not None
    return home if following is None else home + following.wait()[0]


def _all_gather_backward(keys_and_values: tuple[Tensor, Tensor], communicator: Communicator, whole: _Whole) -> Tensor:
    """Gradient of this rank's block: shares for all positions are summed over the members and come home by reduce-scatter."""
    share = whole.block_gradient(whole.sight.sequence, gather_chunks(keys_and_values, communicator, whole.sight))
    return scatter_chunks(share, communicator, whole.sight)


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
