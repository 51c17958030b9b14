"""Moves rows within a rank: from tokens to rows sorted by expert, and back as a weighted sum.

Legend: T tokens, K experts per token, N rows (kept assignments), M assignments listed token by token, H hidden, E experts.

Every function is deterministic: the rows of a token are summed in the order of its choices, without atomic additions. The
sums use `embedding_bag`, which makes one pass over memory with fused weights. On one CPU core it is 20 times as fast as
gather, multiply and sum. On a GPU, kernels of our own (`fused.py`) do without copies in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from foldray.kernels import fused


def sort_by_expert(expert_TK: Tensor, keep_TK: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the kept assignments by expert. Assignments of one expert stay in the order of tokens.

    Args:
        expert_TK: the chosen experts, int64.
        keep_TK: false for a dropped assignment; None keeps all.
        num_experts: number of experts.

    Returns:
        token_N, the token of each row; position_TK, the row of each assignment or -1 if dropped; counts_E, rows per expert.
    """
    num_tokens, topk = expert_TK.shape
    # Dropped assignments get the number of an expert that does not exist, so they are sorted behind all others.
    key_M = expert_TK.reshape(-1) if keep_TK is None else expert_TK.masked_fill(~keep_TK, num_experts).reshape(-1)
    order_M = torch.sort(key_M, stable=True).indices
    counts_E = torch.bincount(key_M, minlength=num_experts + 1)[:num_experts]
    # Without drops the host knows the number of rows. With drops it has to wait for the device.
    order_N = order_M if keep_TK is None else order_M[: int(counts_E.sum())]
    rows_N = torch.arange(order_N.numel(), device=order_N.device)
    position_M = torch.full_like(order_M, -1).scatter_(0, order_N, rows_N)
    return order_N // topk, position_M.view(num_tokens, topk), counts_E


def permute(x_TH: Tensor, token_N: Tensor, position_TK: Tensor | None = None) -> Tensor:
    """Copy tokens to their rows: x_NH[n] = x_TH[token_N[n]].

    Args:
        x_TH: the tokens.
        token_N: the token of each row, int64.
        position_TK: the row of each assignment, -1 if dropped. It is the inverse of `token_N`; with None, backward sorts
            `token_N` instead.

    Returns:
        x_NH.
    """
    return _Permute.apply(x_TH, token_N, position_TK)


def combine(y_NH: Tensor, position_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Sum the rows of each token: out_TH[t] = Σ_k weight_TK[t, k] · y_NH[position_TK[t, k]].

    Args:
        y_NH: the rows; each belongs to at most one assignment.
        position_TK: the row of each assignment; -1 means dropped and adds nothing, whatever the weight is.
        weight_TK: the weights, in any floating type; products and sums have at least float32.

    Returns:
        out_TH in the type of `y_NH`.
    """
    return _Combine.apply(y_NH, position_TK, weight_TK)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_N: Tensor, position_TK: Tensor | None) -> Tensor:
        ctx.num_tokens = x_TH.shape[0]
        ctx.save_for_backward(token_N, position_TK)
        return x_TH.index_select(0, token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_NH: Tensor) -> tuple[Tensor, None, None]:
        token_N, position_TK = ctx.saved_tensors
        if position_TK is not None and fused.fits(dx_NH):
            return fused.sum_rows(dx_NH, position_TK), None, None
        if position_TK is not None:
            row_M, offset, _ = _bags(position_TK)
        else:
            row_M = torch.sort(token_N, stable=True).indices
            offset = _offsets(torch.bincount(token_N, minlength=ctx.num_tokens))
        return _sum_rows(dx_NH, row_M, offset, None), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, position_TK: Tensor, weight_TK: Tensor) -> Tensor:
        ctx.fused = fused.fits(y_NH, weight_TK)
        if ctx.fused:
            ctx.save_for_backward(y_NH, position_TK, weight_TK)
            return fused.sum_rows(y_NH, position_TK, weight_TK)
        row_M, offset, kept_TK = _bags(position_TK)
        ctx.save_for_backward(y_NH, weight_TK, row_M, offset, kept_TK)
        return _sum_rows(y_NH, row_M, offset, _select(weight_TK, kept_TK))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        if ctx.fused:
            gradients = fused.combine_backward(dout_TH, *ctx.saved_tensors)
            return gradients[0], None, gradients[1]
        y_NH, weight_TK, row_M, offset, kept_TK = ctx.saved_tensors
        token_TK = torch.arange(weight_TK.shape[0], device=y_NH.device)[:, None].expand_as(weight_TK)
        token_M = _select(token_TK, kept_TK).contiguous()  # for a single token, `_select` returns a view of one number
        dy_NH = dweight_TK = None
        if ctx.needs_input_grad[0]:
            # The gradient of a row is the gradient of its token times its weight. Rows without an assignment get weight 0.
            token_N = token_M.new_zeros(y_NH.shape[0]).scatter_(0, row_M, token_M)
            weight_N = weight_TK.new_zeros(y_NH.shape[0]).scatter_(0, row_M, _select(weight_TK, kept_TK))
            ones = torch.arange(token_N.numel() + 1, device=token_N.device)
            dy_NH = _sum_rows(dout_TH, token_N, ones, weight_N).to(y_NH.dtype)
        if ctx.needs_input_grad[2]:
            dweight_M = _dot_rows(dout_TH, y_NH, row_M, offset, token_M).to(weight_TK.dtype)
            dweight_TK = dweight_M.view_as(weight_TK) if kept_TK is None else weight_TK.new_zeros(weight_TK.shape)
            if kept_TK is not None:
                dweight_TK[kept_TK] = dweight_M
        return dy_NH, None, dweight_TK


def _bags(position_TK: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return one bag of rows per token: row_M, offset (T + 1), and which assignments are kept (None for all)."""
    kept_TK = position_TK >= 0
    if bool(kept_TK.all()):
        offset = torch.arange(0, position_TK.numel() + 1, position_TK.shape[1], device=position_TK.device)
        return position_TK.reshape(-1), offset, None
    return position_TK[kept_TK], _offsets(kept_TK.sum(1)), kept_TK


def _offsets(counts: Tensor) -> Tensor:
    return F.pad(counts.cumsum(0), (1, 0))


def _select(value_TK: Tensor, kept_TK: Tensor | None) -> Tensor:
    return value_TK.reshape(-1) if kept_TK is None else value_TK[kept_TK]


def _sum_rows(rows_NH: Tensor, row_M: Tensor, offset: Tensor, weight_M: Tensor | None) -> Tensor:
    """Sum weight · row over each bag. The sum has at least float32, the result has the type of the rows."""
    wide = _wider(rows_NH, weight_M)
    weight_M = None if weight_M is None else weight_M.to(wide)
    table_NH = rows_NH.contiguous().to(wide)
    sum_TH = F.embedding_bag(row_M, table_NH, offset, mode="sum", per_sample_weights=weight_M, include_last_offset=True)
    return sum_TH.to(rows_NH.dtype)


def _dot_rows(dout_TH: Tensor, y_NH: Tensor, row_M: Tensor, offset: Tensor, token_M: Tensor) -> Tensor:
    """Return the dot product of dout of the token and y of the row for each assignment, in at least float32."""
    wide = _wider(y_NH, None)
    # embedding_bag computes the gradient of its weights with this kernel. It reads both operands once; mode 0 is "sum".
    dot = torch.ops.aten._embedding_bag_per_sample_weights_backward
    return dot(dout_TH.contiguous().to(wide), y_NH.contiguous().to(wide), row_M, offset, token_M, 0)


def _wider(rows_NH: Tensor, weight_M: Tensor | None) -> torch.dtype:
    wide = torch.promote_types(rows_NH.dtype, torch.float32)
    return wide if weight_M is None else torch.promote_types(wide, weight_M.dtype)
