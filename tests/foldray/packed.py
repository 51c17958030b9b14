"""CUDA's kernel of packed sequences (`aten::_flash_attention_forward` and `…_backward`), in plain torch, on a CPU.

It does what torch's documentation and the source of FlashAttention 2 say, also where that is not obvious:

- the last query of a run is aligned to the run's last key, for the causal flag and for the window;
- a negative window is none, and a window of the longest run of keys is none;
- the causal flag without a window on the right hides the keys behind the aligned one;
- a query without keys gets an output of 0 and a log-sum-exp of +∞;
- a grid covers the longest run that the caller names, so longer runs would be left as they were in memory;
- if the longest run of queries is 1 and heads share keys, the kernel takes every run to have one query.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from foldray.kernels import attention
from foldray.kernels.key_ranges import KeyRanges
from foldray.model.attention_mask import AttentionMask


class Aten:
    """torch's ops, with the kernel of packed sequences on a CPU. It counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.aten, name)

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float,
        is_causal: bool, return_debug_mask: bool, *, scale: float, window_size_left: int = -1, window_size_right: int = -1,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls += 1
        assert dropout_p == 0
        assert not return_debug_mask
        out_QND, lse_NQ = torch.full_like(q, math.nan), q.new_full((q.shape[1], len(q)), math.nan)
        for rows, keys, seen in _runs(q, k, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right):
            score_NST = _scores(q[rows], k[keys], seen, scale)
            weight_NST = score_NST.softmax(-1).nan_to_num(nan=0.0)
            out_QND[rows] = torch.einsum("nst,tnd->snd", weight_NST, _shared(v[keys], q))
            lse_NQ[:, rows] = score_NST.logsumexp(-1).masked_fill(~seen.any(-1), math.inf)
        return out_QND, lse_NQ

    def _flash_attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor,
        max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float,
        window_size_left: int = -1, window_size_right: int = -1,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self.calls += 1
        assert dout.shape == out.shape == q.shape
        assert lse.shape == (q.shape[1], len(q))
        assert lse.is_contiguous()
        dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
        for rows, keys, seen in _runs(q, k, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right):
            p_NST = (_scores(q[rows], k[keys], seen, scale) - lse[:, rows, None]).exp().masked_fill(~seen, 0.0)
            delta_NS1 = (dout[rows] * out[rows]).sum(-1).T.unsqueeze(2)
            dp_NST = torch.einsum("snd,tnd->nst", dout[rows], _shared(v[keys], q))
            dscore_NST = p_NST * (dp_NST - delta_NS1) * scale
            dq[rows] = torch.einsum("nst,tnd->snd", dscore_NST, _shared(k[keys], q))
            for total, weight_NST, x_SND in ((dk, dscore_NST, q[rows]), (dv, p_NST, dout[rows])):
                heads = torch.einsum("nst,snd->tnd", weight_NST, x_SND)
                total[keys] = heads.unflatten(1, (k.shape[1], q.shape[1] // k.shape[1])).sum(2)
        return dq, dk, dv


def _runs(
    q: Tensor, k: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, causal: bool, left: int, right: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield each run's queries and keys, and which keys each query sees."""
    assert cum_q.dtype == cum_k.dtype == torch.int32
    assert cum_q.shape == cum_k.shape
    ends = cum_q.tolist(), cum_k.tolist()
    assert (ends[0][0], ends[1][0], ends[0][-1], ends[1][-1]) == (0, 0, len(q), len(k)), "runs have to cover all tokens"
    right = 0 if causal else right
    left, right = (-1 if size >= max_k else size for size in (left, right))
    swapped = max_q == 1 and q.shape[1] > k.shape[1] and left < 0
    for (start, stop), (first, last) in zip(pairwise(ends[0]), pairwise(ends[1]), strict=True):
        queries, keys = stop - start, last - first
        assert 0 <= queries <= max_q
        assert 0 <= keys <= max_k
        assert not swapped or queries == 1
        behind_ST = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if right >= 0:
            seen &= behind_ST <= right
        if left >= 0:
            seen &= behind_ST >= -left
        yield slice(start, stop), slice(first, last), seen


def _shared(x_TGD: Tensor, q_QND: Tensor) -> Tensor:
    return x_TGD.repeat_interleave(q_QND.shape[1] // x_TGD.shape[1], dim=1)


def _scores(q_SND: Tensor, k_TGD: Tensor, seen: Tensor, scale: float) -> Tensor:
    return (torch.einsum("snd,tnd->nst", q_SND, _shared(k_TGD, q_SND)) * scale).masked_fill(~seen, -math.inf)


@contextmanager
def packed(plain: bool = False, scores: int = attention._MOST_SCORES) -> Iterator[Aten]:
    """Let attention on a CPU go the ways of a GPU. The parts that need no mask keep the CPU's kernels.

    Args:
        plain: whether no fused kernel takes the tensors, as in float32.
        scores: the most that plain products hold at once.
    """
    aten = Aten()
    with (
        mock.patch.object(AttentionMask, "ranged", True),
        mock.patch.object(attention, "_packs", lambda q, v: not plain and len(q) > 0),
        mock.patch.object(attention, "_takes_fused", lambda q, v, mask: not (plain or isinstance(mask, KeyRanges))),
        mock.patch.object(attention, "_aten", aten),
        mock.patch.object(attention, "_MOST_SCORES", scores),
    ):
        yield aten


WAYS: dict[str, Callable[[], Any]] = {"bools": nullcontext, "packed": packed, "plain": lambda: packed(plain=True, scores=300)}
"""How masks reach the kernels: as on a CPU, as on a GPU, and as on a GPU in a type that no kernel takes."""
