"""Experts whose products have low-rank adapters (LoRA, arXiv:2106.09685, section 4.1): x @ W + scale · (x @ A) @ B.

The experts' own weights are frozen: they get no gradients. The products of adapters are as those of the experts: grouped, or one
expert after another.

Legend: as in `experts.py`; R rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foldray.kernels.activations import kernel_of
from foldray.kernels.autograd import ByHand, Leave, by_hand
from foldray.kernels.expert_rows import ExpertRows
from foldray.kernels.experts import (
    Biases,
    Kind,
    check_rows,
    computes_grouped,
    experts_of,
    reference_ffn,
    runs,
    with_bias,
    without_idle,
)

_ALIGNED = 8  # columns of a grouped product's factor: rows of bfloat16 must have a multiple of 16 bytes


class ExpertAdapters(NamedTuple):
    """The adapters of the products into experts and out of them. A product without an adapter has two None."""

    scale: float
    up_a_EHR: nn.Parameter | None
    up_b_ERW: nn.Parameter | None
    down_a_EFR: nn.Parameter | None
    down_b_ERH: nn.Parameter | None

    @property
    def factors(self) -> tuple[nn.Parameter | None, ...]:
        return self[1:]


def adapted_ffn(
    x_NH: Tensor,
    rows: ExpertRows,
    up_EHW: Tensor,
    down_EFH: Tensor,
    adapters: ExpertAdapters,
    ffn: str,
    kind: Kind,
    leave: Leave | None = None,
    biases: Biases = (None, None),
) -> Tensor:
    """Compute every expert with its adapters on its rows (`expert_ffn`): [N, H] → [N, H].

    Args:
        kind: "loop" is the plain reference, which adds each adapter to its weight first.
        leave: leaves the gradients of the adapters that there are, in the order of `ExpertAdapters`.
    """
    check_rows(rows, up_EHW.shape[0], x_NH.shape[0])
    if kind == "grouped":
        return _Adapted.apply(x_NH.contiguous(), up_EHW, down_EFH, rows, ffn, leave, *biases, *adapters)
    scale, up_a, up_b, down_a, down_b = adapters
    up_EHW = up_EHW if up_a is None or up_b is None else up_EHW + scale * (up_a @ up_b)
    down_EFH = down_EFH if down_a is None or down_b is None else down_EFH + scale * (down_a @ down_b)
    each = ([None] * len(rows.counts) if bias is None else bias.unbind() for bias in biases)
    experts = zip(x_NH.split(rows.counts), up_EHW.unbind(), down_EFH.unbind(), *each, strict=True)
    return torch.cat([reference_ffn(x_nH, up_HW, down_FH, ffn, *bias) for x_nH, up_HW, down_FH, *bias in experts])


def adapted_ffn_by_hand(
    x_NH: Tensor,
    rows: ExpertRows,
    up_EHW: Tensor,
    down_EFH: Tensor,
    adapters: ExpertAdapters,
    ffn: str,
    leave: Leave | None = None,
    flat_biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> ByHand:
    """Do as `adapted_ffn` of the kind "grouped", but without autograd. Biases are those of all experts, one behind the other."""
    check_rows(rows, up_EHW.shape[0], x_NH.shape[0])
    biases = (None if bias is None else bias.view(len(up_EHW), -1) for bias in flat_biases)
    y_NH, backward = by_hand(_Adapted, x_NH.contiguous(), up_EHW, down_EFH, rows, ffn, leave, *biases, *adapters)

    def differentiate(dy_NH: Tensor) -> tuple[list[Tensor], dict[Any, Tensor]]:
        dx_NH, *others = backward(dy_NH)
        found = zip(adapters.factors, others[-len(adapters.factors) :], strict=True)
        return [dx_NH], {factor: part for factor, part in found if factor is not None and part is not None}

    return ByHand(y_NH, differentiate)


class _Products(NamedTuple):
    """The products of rows with the matrices of their experts: grouped, or one expert after another."""

    rows: ExpertRows
    ends_E: Tensor | None
    """Where the rows of each expert end, for grouped products; None computes one expert after another."""

    @classmethod
    def of(cls, x_NH: Tensor, rows: ExpertRows, experts: int, inner: int) -> _Products:
        return cls(rows, rows.ends(x_NH.device) if computes_grouped(x_NH, experts, inner) else None)

    def times(self, a_NI: Tensor, w_EIO: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Return a @ w of each row's expert: [N, I] → [N, O]. It is added to a tensor if one is given."""
        if self.ends_E is not None:
            y_NO = _grouped(a_NI, w_EIO, self.ends_E)
            return y_NO if add_to is None else add_to.add_(y_NO)
        y_NO = a_NI.new_zeros(len(a_NI), w_EIO.shape[-1]) if add_to is None else add_to
        for e, start, stop in runs(self.rows.counts):
            y_NO[start:stop].addmm_(a_NI[start:stop], w_EIO[e])
        return y_NO

    def back(self, dy_NO: Tensor, w_EIO: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Return the gradient of `times` for its rows: [N, O] → [N, I]."""
        return self.times(dy_NO, w_EIO.transpose(1, 2), add_to)

    def slope(self, a_NI: Tensor, dy_NO: Tensor) -> Tensor:
        """Return the gradient of `times` for its matrices: [E, I, O]."""
        if self.ends_E is not None:
            inside, outside = a_NI.shape[1], dy_NO.shape[1]
            product = F.grouped_mm(_aligned(a_NI).t(), _aligned(dy_NO), offs=self.ends_E)
            return without_idle(product, self.ends_E)[:, :inside, :outside]
        slope_EIO = a_NI.new_zeros(len(self.rows.counts), a_NI.shape[1], dy_NO.shape[1])
        for e, start, stop in runs(self.rows.counts):
            torch.mm(a_NI[start:stop].t(), dy_NO[start:stop], out=slope_EIO[e])
        return slope_EIO


def _grouped(a_NI: Tensor, w_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Return a grouped product, whose narrow sides are padded with zeros for it."""
    inside, outside = w_EIO.shape[1:]
    if inside % _ALIGNED == 0 and outside % _ALIGNED == 0:
        return F.grouped_mm(a_NI, w_EIO, offs=ends_E)
    wide_EIO = F.pad(w_EIO, (0, -outside % _ALIGNED, 0, -inside % _ALIGNED))
    return F.grouped_mm(_aligned(a_NI), wide_EIO, offs=ends_E)[:, :outside]


def _aligned(x_NI: Tensor) -> Tensor:
    return F.pad(x_NI, (0, -x_NI.shape[1] % _ALIGNED)) if x_NI.shape[1] % _ALIGNED else x_NI


class _Adapted(torch.autograd.Function):
    """Keeps the results of the products into experts, and the narrow rows of the adapters. Backward computes the activation
    again."""

    @staticmethod
    def forward(
        ctx: Any, x_NH: Tensor, up_EHW: Tensor, down_EFH: Tensor, rows: ExpertRows, ffn: str, leave: Leave | None,
        up_EW: Tensor | None, down_EH: Tensor | None, scale: float, up_a: Tensor | None, up_b: Tensor | None,
        down_a: Tensor | None, down_b: Tensor | None,
    ) -> Tensor:  # fmt: skip
        products = _Products.of(x_NH, rows, up_EHW.shape[0], down_EFH.shape[1])
        expert_N = None if up_EW is None and down_EH is None else experts_of(rows.ends(x_NH.device), len(x_NH))
        up_NW, in_NR, out_NR = with_bias(products.times(x_NH, up_EHW), up_EW, expert_N), None, None
        if up_a is not None and up_b is not None:
            in_NR = products.times(x_NH, up_a).mul_(scale)
            products.times(in_NR, up_b, up_NW)
        h_NF = kernel_of(ffn).forward(up_NW)
        y_NH = with_bias(products.times(h_NF, down_EFH), down_EH, expert_N)
        if down_a is not None and down_b is not None:
            out_NR = products.times(h_NF, down_a).mul_(scale)
            products.times(out_NR, down_b, y_NH)
        ctx.products, ctx.ffn, ctx.leave, ctx.scale = products, ffn, leave, scale
        ctx.save_for_backward(
            x_NH if up_a is not None else None, up_EHW, down_EFH, up_NW, in_NR, out_NR, up_a, up_b, down_a, down_b
        )
        return y_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NH: Tensor) -> tuple[Tensor | None, ...]:
        x_NH, up_EHW, down_EFH, up_NW, in_NR, out_NR, up_a, up_b, down_a, down_b = ctx.saved_tensors
        products, scale = ctx.products, ctx.scale
        dy_NH = dy_NH.contiguous()
        ups: list[tuple[Tensor, Tensor] | None] = [None, None]  # the factors of the gradients of adapters
        downs: list[tuple[Tensor, Tensor] | None] = [None, None]
        dh_NF = products.back(dy_NH, down_EFH)
        if out_NR is not None:
            dout_NR = products.back(dy_NH, down_b).mul_(scale)
            products.back(dout_NR, down_a, dh_NF)
        h_NF, dup_NW = kernel_of(ctx.ffn).backward(dh_NF, up_NW)
        dx_NH = products.back(dup_NW, up_EHW)
        if in_NR is not None:
            din_NR = products.back(dup_NW, up_b).mul_(scale)
            products.back(din_NR, up_a, dx_NH)
            # What is left for later must not keep the graph behind the rows.
            ups = [(x_NH.detach(), din_NR), (in_NR, dup_NW)]
        if out_NR is not None:
            downs = [(h_NF, dout_NR), (out_NR, dy_NH)]
        if ctx.leave is None:
            return dx_NH, *[None] * 8, *(pair and products.slope(*pair) for pair in (*ups, *downs))

        def adds(a_NI: Tensor, dy_NO: Tensor) -> Callable[[Tensor], None]:
            def add(total: Tensor) -> None:
                total += products.slope(a_NI, dy_NO)

            return add

        ctx.leave(*(adds(*pair) for pair in (*ups, *downs) if pair is not None))
        return dx_NH, *[None] * 12
