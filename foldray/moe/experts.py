"""What experts compute: rows sorted by expert → up, activation, down; forward and backward.

Legend: N rows, n rows of one expert, H hidden, F inner, W width of up (2F for gated_silu: gate columns first; F for gelu), E experts.
Weights are [in, out], so y = x @ W, and there are no biases.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Ffn = Literal["gated_silu", "gelu"]
Kind = Literal["loop", "grouped"]

aten, mkldnn = torch.ops.aten, torch.ops.mkldnn


def reference_ffn(x_NH: Tensor, up_HW: Tensor, down_FH: Tensor, ffn: Ffn) -> Tensor:
    """One expert in ordinary autograd: y_NH."""
    up_NW = x_NH @ up_HW
    if ffn == "gelu":
        return F.gelu(up_NW) @ down_FH
    gate_NF, value_NF = up_NW.chunk(2, -1)
    return (F.silu(gate_NF) * value_NF) @ down_FH


def expert_ffn(x_NH: Tensor, counts: list[int], up_EHW: Tensor, down_EFH: Tensor, ffn: Ffn, kind: Kind) -> Tensor:
    """Every expert on its rows.

    Args:
        x_NH: rows sorted by expert.
        counts: rows of each expert; they sum to N, zeros are allowed.
        up_EHW: weights into the activation.
        down_EFH: weights out of it.
        ffn: what happens between.
        kind: "loop" is the plain reference, "grouped" the fast one; the same result but for rounding.

    Returns:
        y_NH, in the order of `x_NH`.
    """
    if len(counts) != up_EHW.shape[0] or sum(counts) != x_NH.shape[0]:
        raise ValueError(f"counts {counts} must be {up_EHW.shape[0]} numbers (one per expert) that sum to {x_NH.shape[0]} rows")
    if kind == "grouped":
        return _choose(x_NH, counts, up_EHW, down_EFH).apply(x_NH, up_EHW, down_EFH, counts, ffn)
    rows = x_NH.split(counts)
    return torch.cat([reference_ffn(x_nH, up_EHW[e], down_EFH[e], ffn) for e, x_nH in enumerate(rows)])


class _PerExpert(torch.autograd.Function):
    """One expert after another, each as whole matrices: what a CPU does best, and what any device can do."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, up_EHW: Tensor, down_EFH: Tensor, counts: list[int], ffn: Ffn) -> Tensor:
        y_NH, saved = torch.empty_like(x_NH), []
        for e, rows, padded in _spans(x_NH, counts, down_EFH.shape[1]):
            up_nW = _mm(_pad(x_NH[rows], padded), up_EHW[e])
            _mm(_activate(up_nW, ffn), down_EFH[e], out=y_NH[rows])
            saved.append(up_nW)
        ctx.counts, ctx.ffn = counts, ffn
        ctx.save_for_backward(x_NH, up_EHW, down_EFH, *saved)
        return y_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NH: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x_NH, up_EHW, down_EFH, *saved = ctx.saved_tensors
        dx_NH, dup_EHW, ddown_EFH = torch.empty_like(x_NH), torch.empty_like(up_EHW), torch.empty_like(down_EFH)
        for e in (e for e, n in enumerate(ctx.counts) if n == 0):
            dup_EHW[e].zero_()
            ddown_EFH[e].zero_()
        dy_NH = dy_NH.contiguous()
        for (e, rows, padded), up_nW in zip(_spans(x_NH, ctx.counts, down_EFH.shape[1]), saved, strict=True):
            dy_nH = _pad(dy_NH[rows], padded)
            h_nF, dup_nW = _activate_backward(_mm(dy_nH, down_EFH[e].t()), up_nW, ctx.ffn)
            _mm(h_nF.t(), dy_nH, out=ddown_EFH[e])
            _mm(dup_nW, up_EHW[e].t(), out=dx_NH[rows])
            _mm(_pad(x_NH[rows], padded).t(), dup_nW, out=dup_EHW[e])
        return dx_NH, dup_EHW, ddown_EFH, None, None


def _activate(up_NW: Tensor, ffn: Ffn) -> Tensor:
    if ffn == "gelu":
        return F.gelu(up_NW)
    gate_NF, value_NF = up_NW.chunk(2, -1)
    return F.silu(gate_NF).mul_(value_NF)


def _activate_backward(dh_NF: Tensor, up_NW: Tensor, ffn: Ffn) -> tuple[Tensor, Tensor]:
    """The activation again (two cheap passes, cheaper than keeping it) and the gradient of `up_NW`. Overwrites `dh_NF`."""
    if ffn == "gelu":
        return F.gelu(up_NW), aten.gelu_backward(dh_NF, up_NW)
    gate_NF, value_NF = up_NW.chunk(2, -1)
    dup_NW, h_NF = torch.empty_like(up_NW), F.silu(gate_NF)
    dgate_NF, dvalue_NF = dup_NW.chunk(2, -1)
    torch.mul(dh_NF, h_NF, out=dvalue_NF)
    aten.silu_backward.grad_input(dh_NF.mul_(value_NF), gate_NF, grad_input=dgate_NF)
    return h_NF.mul_(value_NF), dup_NW


def _spans(x_NH: Tensor, counts: list[int], inner: int) -> list[tuple[int, slice, int]]:
    """(expert, its rows, how many rows to multiply) for every expert that has rows."""
    spans, start = [], 0
    for e, n in enumerate(counts):
        if n:
            spans.append((e, slice(start, start + n), _padded(n) if _onednn_is_faster() and x_NH.dtype == torch.float32 else n))
        start += n
    return spans


def _padded(n: int) -> int:
    step = max(16, 1 << max(0, n.bit_length() - 6))
    return -(-n // step) * step


def _pad(rows_nH: Tensor, padded: int) -> Tensor:
    n = rows_nH.shape[0]
    if n == padded:
        return rows_nH
    out = rows_nH.new_empty(padded, rows_nH.shape[1])
    out[:n] = rows_nH
    out[n:].zero_()
    return out


def _mm(a_MK: Tensor, b_KN: Tensor, out: Tensor | None = None) -> Tensor:
    if a_MK.dtype == torch.float32 and _onednn_is_faster():
        full = mkldnn._linear_pointwise(a_MK, b_KN.t(), None, "none", [], "")
        return full if out is None else out.copy_(full[: out.shape[0]])
    return torch.mm(a_MK, b_KN) if out is None else torch.mm(a_MK, b_KN, out=out)


@cache
def _cpu_prefers_onednn() -> bool:
    name = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", "")
    return "AMD" in name and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _onednn_is_faster() -> bool:
    return _cpu_prefers_onednn() and torch.backends.mkldnn.enabled


def _choose(x, counts, up, down):
    return _PerExpert
