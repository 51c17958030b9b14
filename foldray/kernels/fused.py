"""Functions for GPUs that make one pass over memory where torch's own make several. `fused_kernels.py` has their kernels.

Sums and products are in float32, and results are rounded once, to the type of the rows. The last axis of every tensor must be
contiguous, or it is copied; other axes may have any strides. Every function is deterministic.

Legend: T tokens, K experts per token, N rows (N heads in `rotate` and `merge`), H hidden, F inner, W = 2F, gate columns first,
B sequences, S positions, D width of a head.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MOST_NORMED = 8192  # columns of a row that one program norms
_PROGRAMS = 512  # of the backward of a norm: about four for each multiprocessor of an H100

BLOCK = 1024  # columns that one program of four warps computes: 16 bytes per thread and tensor in bfloat16


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels of this module can compute with these tensors. If not, torch's must."""
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    return all(tensor.is_cuda and tensor.dtype in narrow for tensor in tensors) and has_triton()


def gated_silu(up_NW: Tensor) -> Tensor:
    """Return h_NF = silu(gate_NF) · value_NF."""
    up_NW = _rows(up_NW)
    rows, inner = up_NW.shape[0], up_NW.shape[1] // 2
    h_NF = up_NW.new_empty(rows, inner)
    block = _block(inner)
    launch("gated_silu", (rows, blocks(inner, block)), up_NW, h_NF, up_NW.stride(0), inner, block)
    return h_NF


def gated_silu_backward(dh_NF: Tensor, up_NW: Tensor) -> tuple[Tensor, Tensor]:
    """Return h_NF again, and the gradient of up_NW. h_NF overwrites dh_NF, if that has no gaps."""
    up_NW, dh_NF = _rows(up_NW), _rows(dh_NF)
    rows, inner = dh_NF.shape
    h_NF = dh_NF if dh_NF.is_contiguous() and dh_NF.dtype == up_NW.dtype else up_NW.new_empty(rows, inner)
    dup_NW = torch.empty_like(up_NW, memory_format=torch.contiguous_format)
    block = _block(inner)
    grid = (rows, blocks(inner, block))
    launch("gated_silu_backward", grid, dh_NF, up_NW, h_NF, dup_NW, dh_NF.stride(0), up_NW.stride(0), inner, block)
    return h_NF, dup_NW


def sum_rows(rows_NH: Tensor, position_TK: Tensor, weight_TK: Tensor | None = None) -> Tensor:
    """Sum the rows of each token in the order of k: out_TH[t] = Σ_k weight_TK[t, k] · rows_NH[position_TK[t, k]].

    A position of -1 adds nothing, whatever the weight is. Weights are 1 if None.
    """
    rows_NH, position_TK = _rows(rows_NH), position_TK.contiguous()
    (tokens, topk), hidden = position_TK.shape, rows_NH.shape[1]
    out_TH = rows_NH.new_empty(tokens, hidden)
    weight = None if weight_TK is None else weight_TK.contiguous()
    block = _block(hidden)
    grid = (tokens, blocks(hidden, block))
    launch("sum_rows", grid, rows_NH, position_TK, weight, out_TH, rows_NH.stride(0), hidden, topk, block)
    return out_TH


def combine_backward(
    dout_TH: Tensor, y_NH: Tensor, position_TK: Tensor, weight_TK: Tensor, drops: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and the weights of `sum_rows`: dy_NH and dweight_TK.

    Each row belongs to at most one assignment. A row without one has a gradient of zero, and so has the weight of -1, which only
    occurs with `drops`.
    """
    dout_TH, y_NH = _rows(dout_TH), _rows(y_NH)
    position_TK, weight_TK = position_TK.contiguous(), weight_TK.contiguous()
    (tokens, topk), hidden = position_TK.shape, y_NH.shape[1]
    # Only the device knows which rows have no assignment. Zeros for all cost less than asking it.
    new = torch.zeros_like if drops or len(y_NH) > position_TK.numel() else torch.empty_like
    dy_NH = new(y_NH, memory_format=torch.contiguous_format)
    dweight_TK = torch.empty_like(weight_TK)
    slots = power_of_two(topk)
    block = min(_block(hidden), max(16, 2 * BLOCK // slots))
    tensors = (dout_TH, y_NH, position_TK, weight_TK, dy_NH, dweight_TK)
    launch("combine_backward", (tokens,), *tensors, dout_TH.stride(0), y_NH.stride(0), hidden, topk, slots, block)
    return dy_NH, dweight_TK


def merge(out_a_BNSD: Tensor, lse_a_BNS: Tensor, out_b_BNSD: Tensor, lse_b_BNS: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts of attention (`kernels.attention.merge`) into float32. The heads of a token lie beside each other."""
    a, b = _rows(out_a_BNSD), _rows(out_b_BNSD)
    batch, heads, queries, width = a.shape
    out_BSND = a.new_empty((batch, queries, heads, width), dtype=torch.float32)
    lse_a_BNS, lse_b_BNS = (lse.float().contiguous() for lse in (lse_a_BNS, lse_b_BNS))
    lse_BNS = torch.empty_like(lse_a_BNS)
    columns = power_of_two(width)
    together = min(power_of_two(heads), max(1, 2 * BLOCK // columns))
    tensors = (a, lse_a_BNS, b, lse_b_BNS, out_BSND, lse_BNS)
    grid = (queries, blocks(heads, together), batch)
    launch("merge", grid, *tensors, *a.stride()[:3], *b.stride()[:3], heads, width, together, columns)
    return out_BSND.transpose(1, 2), lse_BNS


def add_groups(total_EIO: Tensor, gradient_EIO: Tensor, ends_E: Tensor) -> None:
    """Add gradients to sums, both contiguous, but not those of experts without rows. These may be any numbers.

    Args:
        ends_E: the row behind the last one of each expert, int32.
    """
    numbers = total_EIO[0].numel()
    grid = (blocks(numbers, 4 * BLOCK), len(total_EIO))
    launch("add_groups", grid, total_EIO, gradient_EIO, ends_E, numbers, 4 * BLOCK)


def halves(x_TE: Tensor) -> Tensor:
    """Split float32 numbers into sums of two bfloat16 numbers, side by side: [T, E] → [T, 2 · E]."""
    x_TE = x_TE.contiguous()
    (tokens, columns), block = x_TE.shape, _block(x_TE.shape[1])
    out_TE = x_TE.new_empty(tokens, 2 * columns, dtype=torch.bfloat16)
    launch("halves", (tokens, blocks(columns, block)), x_TE, out_TE, columns, block)
    return out_TE


def rotate(x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of every head: [B, S, N, D]. Backward keeps only the tables, which are [S, D/2]."""
    return _Rotate.apply(x_BSND, cos_SD, sin_SD)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SD, sin_SD)
        return _rotated(x_BSND, cos_SD, sin_SD, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BSND: Tensor) -> tuple[Tensor, None, None]:
        cos_SD, sin_SD = ctx.saved_tensors
        return _rotated(dout_BSND, cos_SD, sin_SD, back=True), None, None


def _rotated(x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor, back: bool) -> Tensor:
    x_BSND, cos_SD, sin_SD = _rows(x_BSND), cos_SD.contiguous(), sin_SD.contiguous()
    batch, positions, heads, width = x_BSND.shape
    out_BSND = x_BSND.new_empty(x_BSND.shape)
    columns = power_of_two(width // 2)
    together = min(power_of_two(heads), max(1, 2 * BLOCK // columns))
    grid = (positions, blocks(heads, together), batch)
    tensors, strides = (x_BSND, cos_SD, sin_SD, out_BSND), x_BSND.stride()[:3]
    launch("rotate", grid, *tensors, *strides, heads, width // 2, back, together, columns)
    return out_BSND


class Heads(NamedTuple):
    """The heads of a product, side by side in this order: N of queries, G of keys, G of values, all D wide."""

    queries: int
    keys: int
    width: int

    @property
    def total(self) -> int:
        return self.queries + 2 * self.keys


def split_rotate(
    x_BSW: Tensor, bias_W: Tensor | None, cos_SR: Tensor, sin_SR: Tensor, heads: Heads, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a bias to a product, and split it into heads: [B, S, N, D], and twice [B, S, G, D], none of which is a view of it.

    The pairs (i, i + R/2) of queries and keys are rotated by tables [S, R/2]. Columns from R on stay as they are. Queries are
    scaled.
    """
    return _SplitRotate.apply(x_BSW, bias_W, cos_SR, sin_SR, heads, scale)


class _SplitRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSW: Tensor, bias_W: Tensor | None, cos_SR: Tensor, sin_SR: Tensor, heads: Heads, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_BSW, cos_SR, sin_SR = _rows(x_BSW), cos_SR.contiguous(), sin_SR.contiguous()
        batch, positions = x_BSW.shape[:2]
        q, k, v = (x_BSW.new_empty(batch, positions, n, heads.width) for n in (heads.queries, heads.keys, heads.keys))
        grid, constants = _over_heads(batch, positions, heads, cos_SR)
        tensors = (x_BSW, bias_W, cos_SR, sin_SR, q, k, v)
        launch("split_rotate", grid, *tensors, *x_BSW.stride()[:2], scale, *constants)
        ctx.save_for_backward(cos_SR, sin_SR)
        ctx.heads, ctx.scale, ctx.bias = heads, scale, None if bias_W is None else bias_W.dtype
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos_SR, sin_SR = ctx.saved_tensors
        parts, heads = [_rows(gradient) for gradient in gradients], ctx.heads
        batch, positions = parts[0].shape[:2]
        dx_BSW = parts[0].new_empty(batch, positions, heads.total * heads.width)
        grid, constants = _over_heads(batch, positions, heads, cos_SR)
        strides = [stride for part in parts for stride in part.stride()[:3]]
        launch("split_rotate_backward", grid, *parts, cos_SR, sin_SR, dx_BSW, *strides, ctx.scale, *constants)
        dbias_W = None if ctx.bias is None else dx_BSW.sum((0, 1), dtype=torch.float32).to(ctx.bias)
        return dx_BSW, dbias_W, None, None, None, None


def _over_heads(batch: int, positions: int, heads: Heads, cos_SR: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the grid over positions, runs of heads and sequences, and the constants of kernels for them."""
    columns = power_of_two(heads.width)
    together = min(power_of_two(heads.total), max(1, 2 * BLOCK // columns))
    constants = (*heads, cos_SR.shape[1], together, columns)
    return (positions, blocks(heads.total, together), batch), constants


def norm_beside(x: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm over the last axis, of at most `MOST_NORMED` columns, and x itself.

    Backward gets the gradients of both, and adds them up in the kernel that differentiates the norm.
    """
    return _NormBeside.apply(x, weight_H, eps)


class _NormBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, rstd = torch.ops.aten._fused_rms_norm(x, weight_H.shape, weight_H, eps)
        ctx.save_for_backward(x, weight_H, rstd)
        return normed, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, beside: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_H, rstd = ctx.saved_tensors
        dy, x, beside, rstd = (each.contiguous() for each in (dy, x, beside, rstd))
        rows, hidden, columns = rstd.numel(), weight_H.numel(), power_of_two(weight_H.numel())
        dx, dweight_H, programs = torch.empty_like(x), torch.empty_like(weight_H), min(rows, _PROGRAMS)
        partial_PH = torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
        tensors = (dy, x, weight_H, rstd, beside, dx, partial_PH)
        launch("rms_norm_backward", (programs,), *tensors, rows, hidden, columns, warps=8 if columns > 2 * BLOCK else 4)
        launch("sum_columns", (blocks(hidden, 32),), partial_PH, dweight_H, programs, hidden, 64, 32)
        return dx, dweight_H, None


@cache
def has_triton() -> bool:
    """Whether Triton is there, and what it compiles the starters of its kernels with: a C compiler and Python's headers."""
    compiler = any(shutil.which(name) for name in (os.environ.get("CC", "gcc"), "clang"))
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists()
    return compiler and headers and find_spec("triton") is not None


def launch(
    kernel: str, grid: tuple[int, ...], first: Tensor, *others: Any, module: str = "fused_kernels", warps: int = 4
) -> None:
    """Run a kernel on the device of its first tensor, once for each point of the grid, which may have none.

    No kernel takes a number of rows that Triton would compile it anew for.
    """
    kernels = import_module(f"foldray.kernels.{module}")  # imports Triton, which not every machine has
    if all(grid):
        with torch.cuda.device_of(first):
            getattr(kernels, kernel)[grid](first, *others, num_warps=warps)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _block(width: int) -> int:
    return min(BLOCK, max(16, power_of_two(width)))


def blocks(width: int, block: int) -> int:
    return -(-width // block)


def power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
