"""Exact causal attention of one slice of the sequence to everything up to it, one slice after another.

One tensor keeps the keys and values of all slices so far, in the order of positions. The backward of a slice adds to the
gradient of earlier keys and values in place. So slices go forward in their order, and backward in the opposite order: when a
slice goes backward, all later slices have added their shares to the gradient of its keys and values. TeraPipe (Li et al.
2021) cuts sequences in this way. Each chunk of queries attends to two parts, the keys before it and its own, which are
merged as in FlashAttention.

Under context parallelism, every member holds two chunks of each slice. The keys and values of a slice are gathered once,
before attention of the slice, and their gradient is summed over the members after its backward. Both are ops of their own
(`StepGraph.gathers`), so other slices can be computed meanwhile. Every member keeps the keys and values of the whole
sequence, so this memory does not shrink with cp.

Legend: B sequences, N query heads, G key/value heads, S positions of this rank's shard of the slice, L positions of the
sequence, D head size (Dk of queries and keys, Dv of values and outputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foldray.kernels.attention import attend, attend_backward, finished, merge, sinks_backward
from foldray.model.attention_mask import AttentionMask, Part
from foldray.model.states import Memory


class KVCache(Memory):
    """The keys and values of one block and micro-batch, side by side, and their gradient.

    Attributes:
        made: keys and values, [B, G, L, Dk + Dv]; None before the first slice and after `free`.
        widths: Dk and Dv.
        gradient: their gradient, of the same shape, in at least float32; None before the first backward and after `free`.
    """

    def __init__(self) -> None:
        self.made: Tensor | None = None
        self.widths = (0, 0)
        self.gradient: Tensor | None = None
        self._seen = 0  # number of tokens in `made`
        self._reached = 0  # first token from which on the gradient has been written

    def put(self, k_BGTD: Tensor, v_BGTD: Tensor, mask: AttentionMask) -> None:
        """Store the keys and values of all T tokens of a slice. A forward that runs again uses the stored ones."""
        if self.made is None:
            self.widths = k_BGTD.shape[-1], v_BGTD.shape[-1]
            self.made = k_BGTD.new_empty((*k_BGTD.shape[:2], mask.length, sum(self.widths)))
        slot = self.made[..., mask.tokens.start : mask.tokens.stop, :]
        for place, block in zip(slot.split(self.widths, dim=-1), (k_BGTD, v_BGTD), strict=True):
            place.copy_(block)
        self._seen = mask.tokens.stop

    def has(self, mask: AttentionMask) -> bool:
        return self._seen >= mask.tokens.stop

    def lengthen(self, length: int) -> None:
        if self.made is not None:
            made = self.made.new_empty((*self.made.shape[:2], length, sum(self.widths)))
            made[..., : self._seen, :] = self.made[..., : self._seen, :]
            self.made = made

    def collect(self, mask: AttentionMask) -> Tensor:
        """Return the gradient so far. The first call makes it."""
        assert self.made is not None
        if self.gradient is None:
            # A single rank writes the gradient from the end to the start without gaps, so `add` can copy first shares.
            # With several members, the shares of a member have gaps between its chunks, and are added to zeros.
            dtype = torch.promote_types(self.made.dtype, torch.float32)
            self.gradient = (torch.empty_like if mask.alone else torch.zeros_like)(self.made, dtype=dtype)
            self._reached = mask.tokens.stop if mask.alone else 0
        return self.gradient

    def add(self, part: Part, share: tuple[Tensor, Tensor], mask: AttentionMask) -> None:
        """Add a share to the gradient of a part's keys and values. The first share of a key is copied instead of added."""
        start, stop = part.keys.start, part.keys.stop
        middle = min(max(start, self._reached), stop)
        totals = self.collect(mask).split([x.shape[-1] for x in share], dim=-1)
        for total, x in zip(totals, share, strict=True):
            total[..., middle:stop, :] += x[..., middle - start :, :]
            total[..., start:middle, :] = x[..., : middle - start, :]
        self._reached = min(self._reached, start)

    def take_gradient(self, mask: AttentionMask) -> Tensor:
        """Return the gradient of a slice's keys and values, as a view. The first slice goes backward last, and frees the rest."""
        gradient = self.collect(mask)[..., mask.tokens.start : mask.tokens.stop, :]
        if mask.tokens.start == 0:
            self.free()
        return gradient

    def free(self) -> None:
        self.made = self.gradient = None
        self._seen = self._reached = 0


def slice_attention(
    q_BNSD: Tensor,
    memory: KVCache,
    mask: AttentionMask,
    k_BGSD: Tensor | None = None,
    v_BGSD: Tensor | None = None,
    sink_N: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of this rank's queries of a slice, slice after slice: [B, N, S, Dv].

    Args:
        k_BGSD, v_BGSD: keys and values of this slice, if this rank has all of them. They go to `memory`, and the backward
            of the first slice frees `memory`. None if `memory` has them already; the caller then takes their gradient.
        sink_N: scores of heads that take a share of the softmax (`with_sinks`); None without them.
    """
    return _SliceAttention.apply(q_BNSD, memory, mask, k_BGSD, v_BGSD, sink_N)


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BNSD: Tensor,
        memory: KVCache,
        mask: AttentionMask,
        k_BGSD: Tensor | None,
        v_BGSD: Tensor | None,
        sink_N: Tensor | None,
    ) -> Tensor:
        if k_BGSD is not None and v_BGSD is not None and not memory.has(mask):
            memory.put(k_BGSD, v_BGSD, mask)
        assert memory.made is not None
        outs, lses = [], []
        for q, parts in zip(_chunked(q_BNSD, mask), mask.parts, strict=True):
            results = []
            for part in parts:
                k, v = memory.made[..., part.keys, :].split(memory.widths, dim=-1)
                results.append(attend(q, k, v, part.mask))
            out, lse = results[0]
            for result in results[1:]:
                out, lse = merge(out, lse, *result)
            outs.append(out)
            lses.append(lse)
        out_BNSD, lse_BNS = (chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2) for chunks in (outs, lses))
        out_BNSD, lse_BNS = finished(out_BNSD, lse_BNS, sink_N, q_BNSD.dtype)
        ctx.save_for_backward(q_BNSD, out_BNSD, lse_BNS, sink_N)
        ctx.memory, ctx.mask, ctx.owns = memory, mask, k_BGSD is not None
        return out_BNSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        memory, mask = ctx.memory, ctx.mask
        gradient, made, dqs = memory.collect(mask), memory.made, []
        q_BNSD, out_BNSD, lse_BNS, sink_N = ctx.saved_tensors
        dsink_N = None if sink_N is None else sinks_backward(grads[0], out_BNSD, lse_BNS, sink_N)
        chunks = zip(*(_chunked(x, mask) for x in (grads[0], q_BNSD, out_BNSD, lse_BNS)), mask.parts, strict=True)
        for dout, q, out, lse, parts in chunks:
            shares = []  # of one part or two
            for part in reversed(parts):  # later keys first, so that the written gradient has no gaps
                # The *merged* output and log-sum-exp: with a part's own, its weights would be normalised over its keys only.
                k, v = made[..., part.keys, :].split(memory.widths, dim=-1)
                share, dk, dv = attend_backward(dout, q, k, v, out, lse, part.mask)
                memory.add(part, (dk, dv), mask)
                shares.append(share.to(gradient.dtype))
            dqs.append(shares[0] if len(shares) == 1 else shares[0].add_(shares[1]))
        dq_BNSD = (dqs[0] if len(dqs) == 1 else torch.cat(dqs, dim=2)).to(made.dtype)
        if not ctx.owns:
            return dq_BNSD, None, None, None, None, dsink_N
        dk_BGSD, dv_BGSD = memory.take_gradient(mask).to(made.dtype).split(memory.widths, dim=-1)
        return dq_BNSD, None, None, dk_BGSD, dv_BGSD, dsink_N


def _chunked(x: Tensor, mask: AttentionMask) -> Sequence[Tensor]:
    return x.chunk(len(mask.parts), dim=2)
