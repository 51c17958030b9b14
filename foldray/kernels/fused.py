# mypy: disallow-incomplete-defs=False
# (Triton evaluates every annotation of a kernel, so only the constants have one.)
"""Kernels for GPUs that make one pass over memory where torch's own make several. They are written in Triton.

Sums and products are in float32, and results are rounded once, to the type of the rows. The last axis of every tensor must be
contiguous, or it is copied; other axes may have any strides. Every function is deterministic.

Legend: T tokens, K experts per token, N rows (N heads in `rotate`), H hidden, F inner, W = 2F, gate columns first, B sequences,
S positions, D width of a head.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1024  # columns that one program of four warps computes: 16 bytes per thread and tensor in bfloat16

if TYPE_CHECKING:
    from triton import language as tl  # at run time, the first launch imports it


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels of this module can compute with these tensors. If not, torch's must."""
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    return all(tensor.is_cuda and tensor.dtype in narrow for tensor in tensors) and _has_triton()


def gated_silu(up_NW: Tensor) -> Tensor:
    """Return h_NF = silu(gate_NF) · value_NF."""
    up_NW = _rows(up_NW)
    rows, inner = up_NW.shape[0], up_NW.shape[1] // 2
    h_NF = up_NW.new_empty(rows, inner)
    block = _block(inner)
    _launch(_gated_silu_kernel, (rows, _blocks(inner, block)), up_NW, h_NF, up_NW.stride(0), inner, block)
    return h_NF


def gated_silu_backward(dh_NF: Tensor, up_NW: Tensor) -> tuple[Tensor, Tensor]:
    """Return h_NF again, and the gradient of up_NW. h_NF overwrites dh_NF, if that has no gaps."""
    up_NW, dh_NF = _rows(up_NW), _rows(dh_NF)
    rows, inner = dh_NF.shape
    h_NF = dh_NF if dh_NF.is_contiguous() and dh_NF.dtype == up_NW.dtype else up_NW.new_empty(rows, inner)
    dup_NW = torch.empty_like(up_NW, memory_format=torch.contiguous_format)
    block = _block(inner)
    grid = (rows, _blocks(inner, block))
    _launch(_gated_silu_backward_kernel, grid, dh_NF, up_NW, h_NF, dup_NW, dh_NF.stride(0), up_NW.stride(0), inner, block)
    return h_NF, dup_NW


def sum_rows(rows_NH: Tensor, position_TK: Tensor, weight_TK: Tensor | None = None) -> Tensor:
    """Sum the rows of each token in the order of k: out_TH[t] = Σ_k weight_TK[t, k] · rows_NH[position_TK[t, k]].

    Args:
        position_TK: -1 adds nothing, whatever the weight is.
        weight_TK: the weights; None is 1.
    """
    rows_NH, position_TK = _rows(rows_NH), position_TK.contiguous()
    (tokens, topk), hidden = position_TK.shape, rows_NH.shape[1]
    out_TH = rows_NH.new_empty(tokens, hidden)
    weight = None if weight_TK is None else weight_TK.contiguous()
    block = _block(hidden)
    grid = (tokens, _blocks(hidden, block))
    _launch(_sum_rows_kernel, grid, rows_NH, position_TK, weight, out_TH, rows_NH.stride(0), hidden, topk, block)
    return out_TH


def combine_backward(
    dout_TH: Tensor, y_NH: Tensor, position_TK: Tensor, weight_TK: Tensor, drops: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and the weights of `sum_rows`: dy_NH and dweight_TK.

    Each row belongs to at most one assignment. A row without one has a gradient of zero, and so has the weight of -1.

    Args:
        drops: whether any position may be -1.
    """
    dout_TH, y_NH = _rows(dout_TH), _rows(y_NH)
    position_TK, weight_TK = position_TK.contiguous(), weight_TK.contiguous()
    (tokens, topk), hidden = position_TK.shape, y_NH.shape[1]
    # Only the device knows which rows have no assignment. Zeros for all cost less than asking it.
    new = torch.zeros_like if drops or len(y_NH) > position_TK.numel() else torch.empty_like
    dy_NH = new(y_NH, memory_format=torch.contiguous_format)
    dweight_TK = torch.empty_like(weight_TK)
    slots = _power_of_two(topk)
    block = min(_block(hidden), max(16, 2 * BLOCK // slots))
    tensors = (dout_TH, y_NH, position_TK, weight_TK, dy_NH, dweight_TK)
    _launch(_combine_backward_kernel, (tokens,), *tensors, dout_TH.stride(0), y_NH.stride(0), hidden, topk, slots, block)
    return dy_NH, dweight_TK


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
    columns = _power_of_two(width // 2)
    together = min(_power_of_two(heads), max(1, 2 * BLOCK // columns))
    grid = (positions, _blocks(heads, together), batch)
    tensors, strides = (x_BSND, cos_SD, sin_SD, out_BSND), x_BSND.stride()[:3]
    _launch(_rotate_kernel, grid, *tensors, *strides, heads, width // 2, back, together, columns)
    return out_BSND


def _gated_silu_kernel(up, h, up_stride, F, COLUMNS: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)  # the product with a stride may need 64 bits
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = f < F
    gate = tl.load(up + n * up_stride + f, mask=here, other=0.0).to(tl.float32)
    value = tl.load(up + n * up_stride + F + f, mask=here, other=0.0).to(tl.float32)
    tl.store(h + n * F + f, gate * tl.sigmoid(gate) * value, mask=here)


def _gated_silu_backward_kernel(dh, up, h, dup, dh_stride, up_stride, F, COLUMNS: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = f < F
    gate = tl.load(up + n * up_stride + f, mask=here, other=0.0).to(tl.float32)
    value = tl.load(up + n * up_stride + F + f, mask=here, other=0.0).to(tl.float32)
    slope = tl.load(dh + n * dh_stride + f, mask=here, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(h + n * F + f, silu * value, mask=here)  # `h` may be `dh`: every thread has read what it overwrites
    tl.store(dup + n * 2 * F + f, slope * value * sigmoid * (1.0 + gate * (1.0 - sigmoid)), mask=here)
    tl.store(dup + n * 2 * F + F + f, slope * silu, mask=here)


def _sum_rows_kernel(rows, position, weight, out, rows_stride, H, K: tl.constexpr, COLUMNS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(K):
        n = tl.load(position + t * K + k).to(tl.int64)
        row = tl.load(rows + n * rows_stride + c, mask=(c < H) & (n >= 0), other=0.0).to(tl.float32)
        if weight is not None:
            row *= tl.load(weight + t * K + k, mask=n >= 0, other=0.0).to(tl.float32)
        total += row
    tl.store(out + t * H + c, total, mask=c < H)


def _combine_backward_kernel(
    dout, y, position, weight, dy, dweight, dout_stride, y_stride, H: tl.constexpr,
    K: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, SLOTS)
    n = tl.load(position + t * K + k, mask=k < K, other=-1).to(tl.int64)[:, None]
    w = tl.load(weight + t * K + k, mask=k < K, other=0.0).to(tl.float32)[:, None]
    dots = tl.zeros((SLOTS, COLUMNS), tl.float32)
    for start in range(0, H, COLUMNS):
        c = (start + tl.arange(0, COLUMNS))[None, :]
        here = (n >= 0) & (c < H)
        slope = tl.load(dout + t * dout_stride + c, mask=c < H, other=0.0).to(tl.float32)
        row = tl.load(y + n * y_stride + c, mask=here, other=0.0).to(tl.float32)
        dots += tl.where(here, slope * row, 0.0)  # an infinite slope times a row that is not there must stay out
        tl.store(dy + n * H + c, w * slope, mask=here)
    tl.store(dweight + t * K + k, tl.sum(dots, axis=1), mask=k < K)


def _rotate_kernel(
    x, cos, sin, out, b_stride, s_stride, n_stride, N, HALF,
    BACK: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    s, b = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    n = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    d = tl.arange(0, COLUMNS)[None, :]
    here = (n < N) & (d < HALF)
    x_at = x + b * b_stride + s * s_stride + n.to(tl.int64) * n_stride + d
    out_at = out + ((b * tl.num_programs(0) + s) * N + n) * 2 * HALF + d
    first = tl.load(x_at, mask=here, other=0.0).to(tl.float32)
    second = tl.load(x_at + HALF, mask=here, other=0.0).to(tl.float32)
    cosine = tl.load(cos + s * HALF + d, mask=d < HALF, other=0.0)
    sine = tl.load(sin + s * HALF + d, mask=d < HALF, other=0.0)
    if BACK:
        sine = -sine
    tl.store(out_at, first * cosine - second * sine, mask=here)
    tl.store(out_at + HALF, second * cosine + first * sine, mask=here)


@cache
def _has_triton() -> bool:
    """Whether Triton is there, and what it compiles the starters of its kernels with: a C compiler and Python's headers."""
    compiler = any(shutil.which(name) for name in (os.environ.get("CC", "gcc"), "clang"))
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists()
    return compiler and headers and find_spec("triton") is not None


@cache
def _compiled(kernel: Callable[..., None]) -> Any:
    """Return a kernel as Triton's function, which compiles it at its first launch."""
    global tl  # where kernels look for it
    import triton
    from triton import language as tl

    return triton.jit(kernel)


def _launch(kernel: Callable[..., None], grid: tuple[int, ...], first: Tensor, *others: Any) -> None:
    """Run a kernel on the device of its first tensor, once for each point of the grid, which may have none.

    No kernel takes a number of rows, because Triton would compile it anew for some of the numbers.
    """
    if all(grid):
        with torch.cuda.device_of(first):
            _compiled(kernel)[grid](first, *others, num_warps=4)


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor with a contiguous last axis."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _block(width: int) -> int:
    return min(BLOCK, max(16, _power_of_two(width)))


def _blocks(width: int, block: int) -> int:
    return -(-width // block)


def _power_of_two(number: int) -> int:
    """Return the least power of two that is no smaller."""
    return 1 << max(0, number - 1).bit_length()
