"""Moves rows within a rank: from tokens to rows sorted by expert, and back as a weighted sum.

Legend: T tokens, K experts per token, N rows (kept assignments, and padding), M assignments listed token by
token, H hidden, E experts.

Every function is deterministic: the rows of a token are summed in the order of its choices, without atomic additions. The
sums use `embedding_bag`, which makes one pass over memory with fused weights. On one CPU core it is 20 times as fast as
gather, multiply and sum. On a GPU, kernels of our own (`fused.py`) do without copies in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from foldray.kernels import fused, routing
from foldray.kernels.autograd import ByHand, by_hand


def sort_by_expert(
    expert_TK: Tensor, keep_TK: Tensor | None, num_experts: int, kept: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the kept assignments by expert. Assignments of one expert stay in the order of tokens.

    Returns:
        token_N, the token of each row; position_TK, the row of each assignment or -1 if dropped; counts_E, rows per expert.
    """
    if routing.sorts(expert_TK):
        token_M, position_TK, count_E = routing.sort(expert_TK, keep_TK, num_experts)
        if keep_TK is not None:
            token_M = token_M[: int(count_E.sum()) if kept is None else kept]
        return token_M, position_TK, count_E
    num_tokens, topk = expert_TK.shape
    order_M, _, start_E = _sorted(expert_TK, keep_TK, num_experts)
    # Without drops the host knows the number of rows. With drops it has to wait for the device, unless the caller knows it.
    order_N = order_M if keep_TK is None else order_M[: int(start_E[-1]) if kept is None else kept]
    rows_N = torch.arange(order_N.numel(), device=order_N.device)
    position_M = torch.full_like(order_M, -1).scatter_(0, order_N, rows_N)
    return order_N // topk, position_M.view(num_tokens, topk), start_E.diff()


def pad_by_expert(expert_TK: Tensor, keep_TK: Tensor | None, num_experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Sort the kept assignments by expert, and pad every expert to `capacity` rows. The host does not wait for the device.

    No expert may keep more assignments than `capacity`. Returns the token of each row (T for an empty one), and the row of each
    assignment (-1 if dropped).
    """
    if routing.sorts(expert_TK):
        return routing.pad(expert_TK, keep_TK, num_experts, capacity)
    num_tokens, topk = expert_TK.shape
    order_M, key_M, start_E = _sorted(expert_TK, keep_TK, num_experts)
    rows = num_experts * capacity
    place_M = key_M * capacity + torch.arange(key_M.numel(), device=key_M.device) - start_E[key_M]
    place_M = place_M.clamp_max(rows)  # dropped assignments, behind all others, share a row that is cut off
    token_N = torch.full((rows + 1,), num_tokens, device=key_M.device).scatter_(0, place_M, order_M // topk)[:rows]
    position_M = torch.empty_like(order_M).scatter_(0, order_M, torch.where(place_M < rows, place_M, -1))
    return token_N, position_M.view(num_tokens, topk)


def _sorted(expert_TK: Tensor, keep_TK: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the assignments sorted by expert, their experts, and the first of each expert (E + 1 numbers).

    Dropped assignments get the number of an expert that does not exist, so they are sorted behind all others.
    """
    key_M = expert_TK.reshape(-1) if keep_TK is None else expert_TK.masked_fill(~keep_TK, num_experts).reshape(-1)
    key_M, order_M = torch.sort(key_M, stable=True)
    # On a GPU, the host would wait for `bincount`.
    return order_M, key_M, torch.searchsorted(key_M, torch.arange(num_experts + 1, device=key_M.device))


def permute(x_TH: Tensor, token_N: Tensor, position_TK: Tensor, *, drops: bool = True, gaps: bool = False) -> Tensor:
    """Copy tokens to their rows: x_NH[n] = x_TH[token_N[n]].

    Args:
        position_TK: the row of each assignment, -1 if dropped. It is the inverse of `token_N`.
        drops: whether any position may be -1. Without drops, backward has less to do.
        gaps: whether a token may be T, for a row of zeros.
    """
    return _Permute.apply(x_TH, token_N, position_TK, drops, gaps)


def combine(y_NH: Tensor, position_TK: Tensor, weight_TK: Tensor, *, drops: bool = True) -> Tensor:
    """Sum the rows of each token: out_TH[t] = Σ_k weight_TK[t, k] · y_NH[position_TK[t, k]].

    Each row belongs to at most one assignment. A position of -1 means dropped and adds nothing, whatever the weight is; but then
    all numbers of rows must be finite. Without `drops`, there is less to do. Products and sums have at least float32.
    """
    return _Combine.apply(y_NH, position_TK, weight_TK, drops)


def combine_by_hand(y_NH: Tensor, position_TK: Tensor, weight_TK: Tensor, *, drops: bool = True) -> ByHand:
    """Do as `combine`, but without autograd. Rows and weights have gradients."""
    out_TH, backward = by_hand(_Combine, y_NH, position_TK, weight_TK, drops)

    def differentiate(dout_TH: Tensor) -> tuple[list[Tensor], dict[Any, Tensor]]:
        dy_NH, _, dweight_TK, _ = backward(dout_TH)
        return [dy_NH, dweight_TK], {}

    return ByHand(out_TH, differentiate)


def sum_rows(y_NH: Tensor, token_N: Tensor, position_TK: Tensor) -> Tensor:
    """Sum the rows of each token: out_TH[t] = Σ_k y_NH[position_TK[t, k]]. It is the transpose of `permute`.

    Backward copies the gradients of tokens to rows, and needs none of the rows. A position of -1 adds nothing.
    """
    return _SumRows.apply(y_NH, token_N, position_TK)


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, token_N: Tensor, position_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_N)
        return _unpermute(y_NH, position_TK, drops=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[Tensor | None, ...]:
        (token_N,) = ctx.saved_tensors
        return dout_TH.index_select(0, token_N), None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_N: Tensor, position_TK: Tensor, drops: bool, gaps: bool) -> Tensor:
        ctx.drops = drops
        ctx.save_for_backward(position_TK)
        if gaps:
            x_TH = torch.cat([x_TH, x_TH.new_zeros(1, x_TH.shape[1])])
        return x_TH.index_select(0, token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_NH: Tensor) -> tuple[Tensor | None, ...]:
        (position_TK,) = ctx.saved_tensors
        return _unpermute(dx_NH, position_TK, ctx.drops), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, position_TK: Tensor, weight_TK: Tensor, drops: bool) -> Tensor:
        ctx.fused, ctx.drops = fused.fits(y_NH, weight_TK), drops
        if ctx.fused:
            ctx.save_for_backward(y_NH, weight_TK, position_TK)
            return fused.sum_rows(y_NH, position_TK, weight_TK)
        bags = _bags(position_TK, drops, y_NH.shape[0])
        weight_M = _kept(weight_TK, bags).reshape(-1)
        ctx.save_for_backward(y_NH, weight_TK, *bags)
        return _sum_rows(y_NH, bags, weight_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[Tensor | None, ...]:
        y_NH, weight_TK, *rest = ctx.saved_tensors
        if ctx.fused:
            gradients = fused.combine_backward(dout_TH, y_NH, rest[0], weight_TK, ctx.drops)
            return gradients[0], None, gradients[1], None
        bags, (rows, (tokens, topk)) = _Bags(*rest), (y_NH.shape[0], weight_TK.shape)
        token_M = torch.arange(tokens, device=y_NH.device)[:, None].expand(tokens, topk).reshape(-1).contiguous()
        dy_NH = dweight_TK = None
        if ctx.needs_input_grad[0]:
            # The gradient of a row is the gradient of its token times its weight. Rows without an assignment get weight 0.
            # Dropped assignments share a row that is cut off.
            row_M = bags.row_M if bags.kept_TK is None else bags.row_M.masked_fill(~bags.kept_TK.reshape(-1), rows)
            token_N = token_M.new_zeros(rows + 1).scatter_(0, row_M, token_M)[:rows]
            weight_N = weight_TK.new_zeros(rows + 1).scatter_(0, row_M, weight_TK.reshape(-1))[:rows]
            bags_of_one = _Bags(token_N, torch.arange(rows + 1, device=token_N.device), None)
            dy_NH = _sum_rows(dout_TH, bags_of_one, weight_N).to(y_NH.dtype)
        if ctx.needs_input_grad[2]:
            dweight_TK = _kept(_dot_rows(dout_TH, y_NH, bags, token_M).to(weight_TK.dtype).view_as(weight_TK), bags)
        return dy_NH, None, dweight_TK, None


def _unpermute(rows_NH: Tensor, position_TK: Tensor, drops: bool) -> Tensor:
    if fused.fits(rows_NH):
        return fused.sum_rows(rows_NH, position_TK)
    bags = _bags(position_TK, drops, rows_NH.shape[0])
    return _sum_rows(rows_NH, bags, None if bags.kept_TK is None else bags.kept_TK.reshape(-1))


class _Bags(NamedTuple):
    """One bag of rows per token: rows, bag by bag; where each bag begins, and M; and which rows count (None if all do).

    Rows that do not count are numbers of any existing row.
    """

    row_M: Tensor
    offset: Tensor
    kept_TK: Tensor | None


def _bags(position_TK: Tensor, drops: bool, rows: int) -> _Bags:
    """Return bags of K rows. So their sizes are known without waiting for the device, whatever was dropped."""
    row_M = position_TK.reshape(-1)
    offset = torch.arange(0, row_M.numel() + 1, position_TK.shape[1], device=row_M.device)
    return _Bags(row_M.clamp_min(0), offset, position_TK >= 0) if drops else _Bags(row_M, offset, None)


def _kept(value_TK: Tensor, bags: _Bags) -> Tensor:
    return value_TK if bags.kept_TK is None else value_TK.masked_fill(~bags.kept_TK, 0)


def _sum_rows(rows_NH: Tensor, bags: _Bags, weight_M: Tensor | None) -> Tensor:
    """Sum weight · row over each bag. The sum has at least float32, the result has the type of the rows."""
    wide = _wider(rows_NH, weight_M)
    weight_M = None if weight_M is None else weight_M.to(wide)
    table_NH = _some(rows_NH).contiguous().to(wide)
    sum_TH = F.embedding_bag(bags.row_M, table_NH, bags.offset, mode="sum", per_sample_weights=weight_M, include_last_offset=True)
    return sum_TH.to(rows_NH.dtype)


def _dot_rows(dout_TH: Tensor, y_NH: Tensor, bags: _Bags, token_M: Tensor) -> Tensor:
    """Return the dot product of dout of the token and y of the row for each assignment, in at least float32."""
    wide = _wider(y_NH, None)
    # embedding_bag computes the gradient of its weights with this kernel. It reads both operands once; mode 0 is "sum".
    dot = torch.ops.aten._embedding_bag_per_sample_weights_backward
    return dot(dout_TH.contiguous().to(wide), _some(y_NH).contiguous().to(wide), bags.row_M, bags.offset, token_M, 0)


def _some(rows_NH: Tensor) -> Tensor:
    """Return the rows, or one row of zeros if there are none, so that the row of a dropped assignment exists."""
    return rows_NH if rows_NH.shape[0] else rows_NH.new_zeros(1, rows_NH.shape[1])


def _wider(rows_NH: Tensor, weight_M: Tensor | None) -> torch.dtype:
    wide = torch.promote_types(rows_NH.dtype, torch.float32)
    return wide if weight_M is None else torch.promote_types(wide, weight_M.dtype)
