"""Compares attention with documents and windows on a GPU, in bfloat16, with bool masks in float64."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from foldray.blueprint import Layout
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.kernels.attention import attend, attend_backward, merge
from foldray.model.attention_mask import AttentionMask
from foldray.model.context import context_attention
from foldray.model.slices import KVCache, slice_attention
from foldray.windows import find_window

DEVICE = "cuda"
GROUPS = Groups.create(Fold(1))


class Masked(NamedTuple):
    """Attention with a mask: how often documents begin (0 is never), its window, and how sequences are cut.

    Args:
        cut: a number of slices, or of ranks in a ring.
    """

    often: float = 1 / 100
    window: str = "full"
    value_dim: int = 64
    sinks: bool = False
    cut: tuple[Literal["slices", "ring"], int] = ("slices", 1)
    head_dim: int = 64


SLICED, RING = ("slices", 4), ("ring", 4)
MASKED = {
    "documents": Masked(), "documents, slices": Masked(cut=SLICED), "documents, ring": Masked(cut=RING),
    "documents of few tokens": Masked(1 / 2), "every token a document": Masked(1.0),
    "a window": Masked(0, "sliding:100"), "a window, ring": Masked(0, "sliding:100", cut=RING),
    "both, sinks": Masked(window="sliding:30", sinks=True),
    "both, sinks, slices": Masked(window="sliding:30", sinks=True, cut=SLICED),
    "both, ring": Masked(window="sliding:200", cut=RING), "chunks": Masked(window="chunked:96", cut=SLICED),
    "narrow values": Masked(head_dim=192, value_dim=128), "narrow values, ring": Masked(head_dim=192, value_dim=128, cut=RING),
    "heads of 256": Masked(head_dim=256, value_dim=256), "heads of 100": Masked(head_dim=100, value_dim=100, cut=SLICED),
    "a window of the user's own": Masked(window="tests.foldray.model.striding:STRIDES"),
}  # fmt: skip


def equal_float64(masked: Masked) -> dict[str, float]:
    """Compare attention of documents and windows with bool masks in float64. Return relative differences of norms."""
    length, heads, groups = 1024, 8, 2
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, masked.head_dim), (groups, masked.head_dim), (groups, masked.value_dim), (heads, masked.value_dim)]
    q, k, v, dout = (torch.randn(2, n, length, d, generator=generator).to(DEVICE).bfloat16() for n, d in shapes)
    starts_BL = torch.rand(2, length, generator=generator) < masked.often
    segment_BL, window = starts_BL.cumsum(1), find_window(masked.window)
    sink_N = torch.randn(heads, device=DEVICE) if masked.sinks else None
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    seen = AttentionMask(range(length), length, [[range(length)]], 0, segment_BL, window).mask(range(length), [range(length)])
    expected = _with_bools(*wide, seen, None if sink_N is None else sink_N.double())
    expected.backward(dout.double())
    found = (_ringed if masked.cut[0] == "ring" else _sliced)(q, k, v, dout, segment_BL, window, sink_N, masked.cut[1])
    pairs = zip(("out", "dq", "dk", "dv"), found, (expected.detach(), *(x.grad for x in wide)), strict=True)
    # Where every token is a document, the gradients of queries and keys are 0, up to rounding.
    off = {name: float((one.double() - other).norm() / other.norm()) for name, one, other in pairs if other.norm() > 0}
    assert max(off.values()) < 2e-2, off
    return off


def _with_bools(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Any, sink_N: torch.Tensor | None) -> torch.Tensor:
    repeats, (length, width) = q.shape[1] // k.shape[1], q.shape[2:]
    score = q @ k.repeat_interleave(repeats, 1).mT * width**-0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1) if isinstance(seen, str) else ~seen
    score = score.masked_fill(hidden.to(DEVICE), -torch.inf)
    if sink_N is not None:
        score = torch.cat((score, sink_N[:, None, None].expand(*score.shape[:3], 1)), -1)
    return score.softmax(-1)[..., :length] @ v.repeat_interleave(repeats, 1)


def _sliced(q: Any, k: Any, v: Any, dout: Any, segment_BL: Any, window: Any, sink_N: Any, slices: int) -> list[torch.Tensor]:
    """Return the output and the gradients of attention in slices; of whole sequences, if there is one."""
    length, memory, graphs = q.shape[2], KVCache(), []
    for start in range(0, length, length // slices):
        part = range(start, start + length // slices)
        mask = AttentionMask(part, length, [[part]], 0, segment_BL, window, q.device)
        leaves = [x[:, :, part.start : part.stop].detach().requires_grad_() for x in (q, k, v)]
        if slices == 1:
            out = context_attention(*leaves, GROUPS.context, "ring", mask, sink_N)
        else:
            out = slice_attention(leaves[0], memory, mask, *leaves[1:], sink_N)
        graphs.append((out, leaves, dout[:, :, part.start : part.stop]))
    gradients = [torch.autograd.grad(*graph) for graph in reversed(graphs)][::-1]
    return [torch.cat([out.detach() for out, *_ in graphs], 2), *(torch.cat(each, 2) for each in zip(*gradients, strict=True))]


def _ringed(q: Any, k: Any, v: Any, dout: Any, segment_BL: Any, window: Any, sink_N: Any, cp: int) -> list[torch.Tensor]:
    """Return the same of all ranks of a ring, one after another. There are no sinks."""
    length = q.shape[2]
    shards = [Layout(cp, cp_rank=member).chunks(range(length)) for member in range(cp)]
    out, dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (dout, q, k, v))
    for index in range(cp):
        mask = AttentionMask(range(length), length, shards, index, segment_BL, window, q.device)
        for queries in mask.held:
            own, results, parts = slice(queries.start, queries.stop), [], []
            for chunks in shards:
                at = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
                for part in mask.visible_parts(queries, chunks):
                    keys = at[part.keys].to(DEVICE)
                    parts.append((keys, part.mask))
                    results.append(attend(q[:, :, own], k[:, :, keys], v[:, :, keys], part.mask))
            merged, lse = results[0]
            for result in results[1:]:
                merged, lse = merge(merged, lse, *result)
            out[:, :, own] = merged
            for keys, seen in parts:
                given = (dout[:, :, own], q[:, :, own], k[:, :, keys], v[:, :, keys], merged.bfloat16(), lse)
                for total, at_keys, share in zip((dq, dk, dv), (own, keys, keys), attend_backward(*given, seen), strict=True):
                    total[:, :, at_keys] += share
    return [out, dq, dk, dv]


def take_no_memory() -> dict[str, float]:
    """Return the peak of attention with a window and documents, in MiB, and that of causal attention of the same shapes."""
    length = 32768
    q = torch.randn(1, length, 64, 64, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(1, length, 8, 64, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(2))
    segment_BL = (torch.rand(1, length, generator=torch.Generator().manual_seed(0)) < 1 / 1000).cumsum(1)
    peaks = {}
    for name, documents, window in (("causal", None, "full"), ("masked", segment_BL, "sliding:128")):
        mask = AttentionMask(range(length), length, [[range(length)]], 0, documents, find_window(window), q.device)
        for _ in range(2):  # the second run finds all that is kept
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = context_attention(q, k, v, GROUPS.context, "ring", mask)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(q))
            del out
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    assert peaks["masked"] <= 1.2 * peaks["causal"], peaks
    return peaks
