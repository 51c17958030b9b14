"""Exact causal attention of sequences that are cut over several ranks (context parallelism).

Ranks hold zigzag shards (`Layout`; Llama 3, section 3.3.2): rank i holds the chunks i and 2·cp − 1 − i of 2·cp. The queries
of a chunk see all keys of earlier chunks and, causally, those of their own chunk. Later chunks are not computed. Keys and
values travel in one of two ways:

| mode | source | forward sends | backward sends | keys and values held |
|---|---|---|---|---|
| "ring" | Ring Attention, Liu et al. 2023 | (cp − 1) · KV | (cp − 1) · (KV + dKV) | three ranks' |
| "all_gather" | Llama 3, section 3.3.2 | (cp − 1) · KV | (cp − 1) · (KV + dKV) | all, while in use |

The amounts are per rank. KV is B·G·S·(Dk + Dv) numbers of the inputs' type. dKV is as many numbers, in at least float32. The
ring sends the next block while a block is in use. The all-gather sends everything before the computation, in fewer and
larger messages.

Legend: B sequences, N query heads, G key/value heads, S positions held by this rank, L = S · cp positions of the whole
sequence, D head size (Dk of queries and keys, Dv of values and outputs). In this module, a block is a tensor [B, G, …, Dk +
Dv] of keys and values side by side, and a part is a run of keys that a chunk of queries is computed with (`attention_mask.Part`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foldray.comm import Communicator, Pending
from foldray.kernels.attention import attend, attend_backward, finished, merge, sinks_backward
from foldray.kernels.autograd import at_least_float32
from foldray.model.attention_mask import AttentionMask, Part, QueryRun

ContextMode = Literal["ring", "all_gather"]


def context_attention(
    q_BNSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    communicator: Communicator,
    mode: ContextMode,
    mask: AttentionMask,
    sink_N: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of this rank's queries to the whole sequence: [B, N, S, Dv]. Every member must call this.

    Neither mode keeps other ranks' keys and values for backward. Backward fetches them again, so the saved memory does not
    grow with cp. The order in which parts are merged depends on ranks only, so results repeat.

    Args:
        communicator: the ranks that share the sequences, in the order of their shards.
        mask: the mask of whole sequences. Members differ in its `index` only.
        sink_N: scores of heads that take a share of the softmax (`with_sinks`); None without them.
    """
    if mode not in ("ring", "all_gather"):
        raise ValueError(f"mode is {mode!r}; legal are 'ring', 'all_gather'")
    shape, segment_BL = (q_BNSD.shape[0], q_BNSD.shape[2] * communicator.size), mask.segment_BL
    if segment_BL is not None and segment_BL.shape != shape:
        raise ValueError(f"segment_BL has shape {tuple(segment_BL.shape)}; whole sequences have {shape}")
    if mask.alone:
        return _WholeAttention.apply(q_BNSD, k_BGSD, v_BGSD, mask.query_runs, sink_N)
    return _ContextAttention.apply(q_BNSD, k_BGSD, v_BGSD, communicator, mode, mask, sink_N)


class _WholeAttention(torch.autograd.Function):
    """Attention of whole sequences that one rank holds. Each query has one part, so nothing is merged."""

    @staticmethod
    def forward(
        ctx: Any, q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, runs: Sequence[QueryRun], sink_N: Tensor | None
    ) -> Tensor:
        results = [attend(_rows(q_BNSD, queries), _rows(k_BGSD, keys), _rows(v_BGSD, keys), mask) for queries, keys, mask in runs]
        out_BNSD, lse_BNS = results[0] if len(results) == 1 else [torch.cat(x, dim=2) for x in zip(*results, strict=True)]
        out_BNSD, lse_BNS = finished(out_BNSD, lse_BNS, sink_N, q_BNSD.dtype)
        ctx.save_for_backward(q_BNSD, k_BGSD, v_BGSD, out_BNSD, lse_BNS, sink_N)
        ctx.runs = runs
        return out_BNSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSD, k_BGSD, v_BGSD, out_BNSD, lse_BNS, sink_N = ctx.saved_tensors
        dsink_N = None if sink_N is None else sinks_backward(grads[0], out_BNSD, lse_BNS, sink_N)
        shares = []
        for queries, keys, mask in ctx.runs:
            dout, q, out, lse = (_rows(x, queries) for x in (grads[0], q_BNSD, out_BNSD, lse_BNS))
            shares.append(attend_backward(dout, q, _rows(k_BGSD, keys), _rows(v_BGSD, keys), out, lse, mask))
        if len(shares) == 1:
            return *(share.to(x.dtype) for share, x in zip(shares[0], (q_BNSD, k_BGSD, v_BGSD), strict=True)), None, dsink_N
        sums = [torch.zeros_like(x, dtype=at_least_float32(x)) for x in (k_BGSD, v_BGSD)]
        for (_, keys, _), (_, *parts) in zip(ctx.runs, shares, strict=True):
            for whole, part in zip(sums, parts, strict=True):
                _rows(whole, keys).add_(part)
        dq_BNSD = torch.cat([share[0] for share in shares], dim=2).to(q_BNSD.dtype)
        return dq_BNSD, sums[0].to(k_BGSD.dtype), sums[1].to(v_BGSD.dtype), None, dsink_N


def _rows(x_BNS: Tensor, positions: range) -> Tensor:
    """Return these positions of a tensor [B, heads, S] or [B, heads, S, D]."""
    return x_BNS[:, :, positions.start : positions.stop]


class _ContextAttention(torch.autograd.Function):
    """One autograd function for all parts, because the merge by log-sum-exp cannot be differentiated part by part."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BNSD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        communicator: Communicator,
        mode: ContextMode,
        mask: AttentionMask,
        sink_N: Tensor | None,
    ) -> Tensor:
        queries, widths = q_BNSD.chunk(len(mask.held), dim=2), (k_BGSD.shape[-1], v_BGSD.shape[-1])
        merged: dict[int, tuple[Tensor, Tensor]] = {}
        for chunks, block in _blocks((k_BGSD, v_BGSD), communicator, mode, mask):
            for number, part in _parts(mask, chunks):
                k, v = block[..., part.keys, :].split(widths, dim=-1)
                result = attend(queries[number], k, v, part.mask)
                merged[number] = merge(*merged[number], *result) if number in merged else result
        outs, lses = zip(*(merged[number] for number in sorted(merged)), strict=True)
        out_BNSD, lse_BNS = (chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2) for chunks in (outs, lses))
        out_BNSD, lse_BNS = finished(out_BNSD, lse_BNS, sink_N, q_BNSD.dtype)
        ctx.save_for_backward(q_BNSD, k_BGSD, v_BGSD, out_BNSD, lse_BNS, sink_N)
        ctx.communicator, ctx.mode, ctx.mask = communicator, mode, mask
        return out_BNSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSD, k_BGSD, v_BGSD, out_BNSD, lse_BNS, sink_N = ctx.saved_tensors
        dsink_N = None if sink_N is None else sinks_backward(grads[0], out_BNSD, lse_BNS, sink_N)
        widths = (k_BGSD.shape[-1], v_BGSD.shape[-1])
        whole = _Whole(ctx.mask, widths, q_BNSD, out_BNSD, lse_BNS, grads[0])
        backward = _ring_backward if ctx.mode == "ring" else _all_gather_backward
        gradient = backward((k_BGSD, v_BGSD), ctx.communicator, whole).to(k_BGSD.dtype)
        dk_BGSD, dv_BGSD = gradient.split(widths, dim=-1)
        return whole.dq_BNSD.to(q_BNSD.dtype), dk_BGSD, dv_BGSD, None, None, None, dsink_N


class _Whole:
    """This rank's queries, their output and log-sum-exp over all keys, and the gradient of the queries so far."""

    def __init__(
        self, mask: AttentionMask, widths: tuple[int, int], q_BNSD: Tensor, out_BNSD: Tensor, lse_BNS: Tensor, dout_BNSD: Tensor
    ):
        self.mask, self.widths = mask, widths
        self.dq_BNSD = torch.zeros_like(q_BNSD, dtype=at_least_float32(q_BNSD))
        chunked = (x.chunk(len(mask.held), dim=2) for x in (dout_BNSD, q_BNSD, out_BNSD, lse_BNS, self.dq_BNSD))
        self._dout, self._q, self._out, self._lse, self._dq = chunked

    def block_gradient(self, chunks: Sequence[range], block: Tensor) -> Tensor:
        """Return these queries' share of a block's gradient, in at least float32, and add to the gradient of the queries."""
        dblock = torch.zeros_like(block, dtype=at_least_float32(block))
        for number, part in _parts(self.mask, chunks):
            (k, v), (dk, dv) = (x[..., part.keys, :].split(self.widths, dim=-1) for x in (block, dblock))
            # The *merged* output and log-sum-exp: with a part's own, the weights would be normalised over that part's keys.
            dout, q, out, lse, dq = (x[number] for x in (self._dout, self._q, self._out, self._lse, self._dq))
            shares = attend_backward(dout, q, k, v, out, lse, part.mask)
            for total, share in zip((dq, dk, dv), shares, strict=True):
                total.add_(share)
        return dblock


def _parts(mask: AttentionMask, chunks: Sequence[range]) -> Iterator[tuple[int, Part]]:
    """Yield the parts to compute with a block: (number of this rank's query chunk, part). The block has the keys of `chunks`."""
    return ((number, part) for number, queries in enumerate(mask.held) for part in mask.visible_parts(queries, chunks))


def _blocks(
    keys_and_values: tuple[Tensor, Tensor], communicator: Communicator, mode: ContextMode, mask: AttentionMask
) -> Iterator[tuple[Sequence[range], Tensor]]:
    """Yield the blocks of all members as (chunks, block): one by one around the ring, or all of them as one block."""
    if mode == "all_gather":
        yield mask.sequence, _gathered(keys_and_values, communicator, mask)
        return
    for member, passing in _ring(torch.cat(keys_and_values, dim=-1), communicator):
        yield mask.shards[member], passing


def _ring(block: Tensor, communicator: Communicator) -> Iterator[tuple[int, Tensor]]:
    """Yield (member, block) for every member, this rank first. While a block is in use, the next one travels."""
    for step in range(communicator.size):
        following = communicator.shift([block]) if step + 1 < communicator.size else None
        yield (communicator.index - step) % communicator.size, block
        if following is not None:
            (block,) = following.wait()


def _ring_backward(keys_and_values: tuple[Tensor, Tensor], communicator: Communicator, whole: _Whole) -> Tensor:
    """Return the gradient of this rank's block.

    The gradient of a block follows the block around the ring, and each rank adds its share. The gradient starts at the first
    rank after the block's owner. The owner adds the share of its own queries at the end, which saves one message.
    """
    home: Tensor | None = None
    following: Pending | None = None
    for member, passing in _ring(torch.cat(keys_and_values, dim=-1), communicator):
        share = whole.block_gradient(whole.mask.shards[member], passing)
        if home is None:
            home = share
            continue
        if following is not None:
            share += following.wait()[0]
        following = communicator.shift([share])
    assert home is not None
    return home if following is None else home + following.wait()[0]


def _all_gather_backward(keys_and_values: tuple[Tensor, Tensor], communicator: Communicator, whole: _Whole) -> Tensor:
    share = whole.block_gradient(whole.mask.sequence, _gathered(keys_and_values, communicator, whole.mask))
    return share if whole.mask.alone else communicator.reduce_scatter(whole.mask.by_member(share))


def _gathered(keys_and_values: tuple[Tensor, Tensor], communicator: Communicator, mask: AttentionMask) -> Tensor:
    """Gather keys and values in the order of positions: [B, G, S, D] each → [B, G, cp · S, Dk + Dv]."""
    return mask.in_order(communicator.all_gather(torch.cat(keys_and_values, dim=-1)))
