"""Exact causal attention of one slice of the sequence to everything up to it, one slice after another.

One tensor keeps the keys and values of all slices so far, in the order of positions. The backward of a slice adds to the
gradient of earlier keys and values in place. So slices go forward in their order, and backward in the opposite order: when a
slice goes backward, all later slices have added their shares to the gradient of its keys and values. TeraPipe (Li et al.
2021) cuts sequences in this way. Each chunk of queries attends to two parts, the keys before it and its own, which are
merged as in FlashAttention.

Under context parallelism, every member holds two chunks of each slice, and the keys and values of a slice are gathered once.
Every member then keeps the keys and values of the whole sequence, so this memory does not shrink with cp.

Legend: B sequences, N query heads, G key/value heads, S positions of this rank's shard of the slice, L positions of the
sequence, D head size (Dk of queries and keys, Dv of values and outputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foldray.comm import Communicator
from foldray.kernels.attention import attend, attend_backward, merge
from foldray.model.shards import gather_chunks, scatter_chunks
from foldray.model.sight import Part, Sight


class KeysAndValues:
    """The keys and values of one block and micro-batch, side by side, and their gradient.

    Attributes:
        made: keys and values, [B, G, L, Dk + Dv]; None before the first slice and after `free`.
        gradient: their gradient, of the same shape, in at least float32; None before the first backward and after `free`.
    """

    def __init__(self) -> None:
        self.made: Tensor | None = None
        self.gradient: Tensor | None = None
        self._seen = 0  # number of tokens in `made`
        self._reached = 0  # first token from which on the gradient has been written

    def put(self, blocks: Sequence[Tensor], sight: Sight) -> None:
        """Store the keys and values of a slice. A forward that runs again uses the stored ones.

        Args:
            blocks: tensors [B, G, tokens of the slice, …] that lie side by side in `made`.
        """
        if self.made is None:
            width = sum(block.shape[-1] for block in blocks)
            self.made = blocks[0].new_empty((*blocks[0].shape[:2], sight.length, width))
        own = self.made[..., sight.tokens.start : sight.tokens.stop, :]
        for place, block in zip(own.split([block.shape[-1] for block in blocks], dim=-1), blocks, strict=True):
            place.copy_(block)
        self._seen = sight.tokens.stop

    def has(self, sight: Sight) -> bool:
        return self._seen >= sight.tokens.stop

    def collect(self, sight: Sight) -> Tensor:
        """Return the gradient so far. The first call makes it."""
        assert self.made is not None
        if self.gradient is None:
            # A single rank writes the gradient from the end to the start without gaps, so `add` can copy first shares.
            # With several members, the shares of a member have gaps between its chunks, and are added to zeros.
            dtype = torch.promote_types(self.made.dtype, torch.float32)
            self.gradient = (torch.empty_like if sight.alone else torch.zeros_like)(self.made, dtype=dtype)
            self._reached = sight.tokens.stop if sight.alone else 0
        return self.gradient

    def add(self, part: Part, share: tuple[Tensor, Tensor], sight: Sight) -> None:
        """Add a share to the gradient of a part's keys and values. The first share of a key is copied instead of added."""
        start, stop = part.keys.start, part.keys.stop
        middle = min(max(start, self._reached), stop)
        totals = self.collect(sight).split([more.shape[-1] for more in share], dim=-1)
        for total, more in zip(totals, share, strict=True):
            total[..., middle:stop, :] += more[..., middle - start :, :]
            total[..., start:middle, :] = more[..., : middle - start, :]
        self._reached = min(self._reached, start)

    def free(self) -> None:
        self.made = self.gradient = None
        self._seen = self._reached = 0


def slice_attention(
    q_BNSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, memory: KeysAndValues, sight: Sight, communicator: Communicator
) -> Tensor:
    """Compute causal attention of this rank's queries of a slice: [B, N, S, Dv].

    Every member must call this, slice after slice. The backward of the first slice frees `memory`.
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
            alone = communicator.size == 1
            memory.put((k_BGSD, v_BGSD) if alone else (gather_chunks((k_BGSD, v_BGSD), communicator, sight),), sight)
        assert memory.made is not None
        outs, lses, widths = [], [], (k_BGSD.shape[-1], v_BGSD.shape[-1])
        for q, parts in zip(_chunked(q_BNSD, sight), sight.parts, strict=True):
            met = [(*memory.made[..., part.keys, :].split(widths, dim=-1), part.mask) for part in parts]
            found = [attend(q, k, v, mask) for k, v, mask in met]
            out, lse = found[0]
            for other in found[1:]:
                out, lse = merge(out, lse, *other)
            outs.append(out)
            lses.append(lse)
        out_BNSD = (outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)).to(q_BNSD.dtype)
        ctx.save_for_backward(q_BNSD, out_BNSD, lses[0] if len(lses) == 1 else torch.cat(lses, dim=2))
        ctx.memory, ctx.sight, ctx.communicator, ctx.dtype, ctx.widths = memory, sight, communicator, k_BGSD.dtype, widths
        return out_BNSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        memory, sight, communicator = ctx.memory, ctx.sight, ctx.communicator
        gradient, made, dqs = memory.collect(sight), memory.made, []
        each = zip(*(_chunked(x, sight) for x in (grads[0], *ctx.saved_tensors)), sight.parts, strict=True)
        for dout, q, out, lse, parts in each:
            shares = []  # of one part or two
            for part in reversed(parts):  # later keys first, so that the written gradient has no gaps
                # The *merged* output and log-sum-exp: with a part's own, its weights would be normalised over its keys only.
                k, v = made[..., part.keys, :].split(ctx.widths, dim=-1)
                share, dk, dv = attend_backward(dout, q, k, v, out, lse, part.mask)
                memory.add(part, (dk, dv), sight)
                shares.append(share.to(gradient.dtype))
            dqs.append(shares[0] if len(shares) == 1 else shares[0].add_(shares[1]))
        own = gradient[..., sight.tokens.start : sight.tokens.stop, :]
        dk_BGSD, dv_BGSD = scatter_chunks(own, communicator, sight).to(ctx.dtype).split(ctx.widths, dim=-1)
        if sight.tokens.start == 0:
            memory.free()
        dq_BNSD = dqs[0] if len(dqs) == 1 else torch.cat(dqs, dim=2)
        return dq_BNSD.to(ctx.saved_tensors[0].dtype), dk_BGSD, dv_BGSD, None, None, None


def _chunked(x: Tensor, sight: Sight) -> Sequence[Tensor]:
    """Split a tensor of this rank's shard into chunks."""
    return x.chunk(len(sight.parts), dim=2)
