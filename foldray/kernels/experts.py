"""The feed-forward networks of experts, forward and backward: up-projection, activation, down-projection.

The input rows are sorted by expert. Weights are [in, out], so y = x @ W. The networks have no biases.

Legend: N rows, n rows of one expert, H hidden, F inner, W width of up (2F with a gate, gate columns first), E experts.

`expert_ffn` has three implementations: `reference_ffn` in a loop (ordinary autograd), `_PerExpert` (one expert after
another, with its own backward), and `_Grouped` (all experts at once through `grouped_mm`). `_implementation` chooses between
the last two.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from foldray.kernels.activations import kernel_of
from foldray.kernels.later import Compute, Leave
from foldray.kernels.transfer import to_device

Kind = Literal["loop", "grouped"]

Gradients = tuple[Tensor, Tensor | None, Tensor | None, None, None, None]

# Up to this many multiply-adds per expert, starting a product takes longer than the product itself.
SMALL_PRODUCT = 1 << 21


def reference_ffn(x_NH: Tensor, up_HW: Tensor, down_FH: Tensor, ffn: str) -> Tensor:
    """Compute one expert in ordinary autograd: y_NH."""
    return kernel_of(ffn).plain(x_NH @ up_HW) @ down_FH


def expert_ffn(
    x_NH: Tensor, counts: list[int], up_EHW: Tensor, down_EFH: Tensor, ffn: str, kind: Kind, leave: Leave | None = None
) -> Tensor:
    """Compute every expert on its rows.

    Args:
        x_NH: rows sorted by expert.
        counts: number of rows of each expert, which may be zero; the numbers sum to N.
        up_EHW: weights of the up-projections.
        down_EFH: weights of the down-projections.
        ffn: name of the activation.
        kind: "loop" is the plain reference, "grouped" is fast. The results differ by rounding only.
        leave: leaves the gradients of both weights for later (`Later.leaver`). None, or the kind "loop", computes them with
            those of the rows.

    Returns:
        y_NH in the order of `x_NH`. Weights of experts without rows get a gradient of zero.

    Raises:
        ValueError: `counts` do not fit the rows or the experts.
    """
    if len(counts) != up_EHW.shape[0] or sum(counts) != x_NH.shape[0]:
        raise ValueError(f"counts {counts} must be {up_EHW.shape[0]} numbers, one per expert, and sum to {x_NH.shape[0]} rows")
    if kind == "grouped":
        function = _implementation(x_NH, up_EHW.shape[0], down_EFH.shape[1])
        return function.apply(x_NH.contiguous(), up_EHW, down_EFH, counts, ffn, leave)
    # unbind instead of [e], because the gradient of E selections would be E tensors of the size of all experts.
    experts = zip(x_NH.split(counts), up_EHW.unbind(), down_EFH.unbind(), strict=True)
    return torch.cat([reference_ffn(x_nH, up_HW, down_FH, ffn) for x_nH, up_HW, down_FH in experts])


def _implementation(x_NH: Tensor, experts: int, inner: int) -> type[torch.autograd.Function]:
    """Choose the implementation that is fastest for these rows.

    On one core (Zen 5), one expert after another is fastest if the products are large. For small products, starting them
    from Python takes longer than computing them (64 experts of 64 × 128 with 4 rows each: 2.7 ms grouped, 4.8 ms one by
    one).
    """
    rows, hidden = x_NH.shape
    if x_NH.device.type == "cuda":
        # The CUDA kernel takes only bfloat16, and rows of a multiple of 16 bytes.
        fits = rows > 0 and x_NH.dtype == torch.bfloat16 and hidden % 8 == 0 and inner % 8 == 0
        return _Grouped if fits else _PerExpert
    small = 0 < rows * hidden * inner < SMALL_PRODUCT * experts
    aligned = hidden * x_NH.element_size() % 16 == 0 and inner * x_NH.element_size() % 16 == 0
    return _Grouped if small and aligned and x_NH.dtype in (torch.float32, torch.bfloat16) else _PerExpert


class _Grouped(torch.autograd.Function):
    """Computes all experts in one grouped product for each matrix."""

    @staticmethod
    def forward(
        ctx: Any, x_NH: Tensor, up_EHW: Tensor, down_EFH: Tensor, counts: list[int], ffn: str, leave: Leave | None
    ) -> Tensor:
        ends_E = to_device(list(accumulate(counts)), x_NH.device, torch.int32)
        up_NW = F.grouped_mm(x_NH, up_EHW, offs=ends_E)
        ctx.counts, ctx.ffn, ctx.leave = counts, ffn, leave
        ctx.save_for_backward(x_NH, up_EHW, down_EFH, up_NW, ends_E)
        return F.grouped_mm(kernel_of(ffn).forward(up_NW), down_EFH, offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NH: Tensor) -> Gradients:
        x_NH, up_EHW, down_EFH, up_NW, ends_E = ctx.saved_tensors
        x_NH = x_NH.detach()  # what is left for later must not keep the graph behind it
        dy_NH = dy_NH.contiguous()  # grouped_mm refuses expanded gradients
        dh_NF = F.grouped_mm(dy_NH, down_EFH.transpose(1, 2), offs=ends_E)
        h_NF, dup_NW = kernel_of(ctx.ffn).backward(dh_NF, up_NW)
        dx_NH, counts = F.grouped_mm(dup_NW, up_EHW.transpose(1, 2), offs=ends_E), ctx.counts

        def of_weights() -> tuple[Tensor, Tensor]:
            dup_EHW = F.grouped_mm(x_NH.t(), dup_NW, offs=ends_E)
            ddown_EFH = F.grouped_mm(h_NF.t(), dy_NH, offs=ends_E)
            _zero_idle(counts, dup_EHW, ddown_EFH)
            return dup_EHW, ddown_EFH

        return _gradients(dx_NH, of_weights, ctx.leave)


class _PerExpert(torch.autograd.Function):
    """Computes one expert after another. This runs on every device, and is the fastest way on a CPU if products are large.

    Only the results of the up-projections are kept for backward. Backward computes the activation again, in two passes over
    data that stay in the cache.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NH: Tensor, up_EHW: Tensor, down_EFH: Tensor, counts: list[int], ffn: str, leave: Leave | None
    ) -> Tensor:
        y_NH, saved, activate = torch.empty_like(x_NH), [], kernel_of(ffn).forward
        for e, rows, padded in _spans(x_NH, counts):
            up_nW = _mm(_pad(x_NH[rows], padded), up_EHW[e])
            _mm(activate(up_nW), down_EFH[e], out=y_NH[rows])
            saved.append(up_nW)
        ctx.counts, ctx.ffn, ctx.leave = counts, ffn, leave
        ctx.save_for_backward(x_NH, up_EHW, down_EFH, *saved)
        return y_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NH: Tensor) -> Gradients:
        x_NH, up_EHW, down_EFH, *saved = ctx.saved_tensors
        x_NH = x_NH.detach()  # what is left for later must not keep the graph behind it
        dx_NH, counts, leave = torch.empty_like(x_NH), ctx.counts, ctx.leave
        dy_NH, backward = dy_NH.contiguous(), kernel_of(ctx.ffn).backward

        def empty() -> tuple[Tensor, Tensor]:
            found = torch.empty_like(up_EHW), torch.empty_like(down_EFH)
            _zero_idle(counts, *found)
            return found

        def fill(found: tuple[Tensor, Tensor], e: int, rows: slice, dy_nH: Tensor, h_nF: Tensor, dup_nW: Tensor) -> None:
            _mm(h_nF.t(), dy_nH, out=found[1][e])
            _mm(_pad(x_NH[rows], len(dup_nW)).t(), dup_nW, out=found[0][e])

        def later() -> tuple[Tensor, Tensor]:
            found = empty()
            for each in left:
                fill(found, *each)
            return found

        now, left = empty() if leave is None else None, list[tuple[int, slice, Tensor, Tensor, Tensor]]()
        for (e, rows, padded), up_nW in zip(_spans(x_NH, counts), saved, strict=True):
            dy_nH = _pad(dy_NH[rows], padded)
            h_nF, dup_nW = backward(_mm(dy_nH, down_EFH[e].t()), up_nW)
            if now is not None:  # while the expert's data are in the cache
                fill(now, e, rows, dy_nH, h_nF, dup_nW)
            _mm(dup_nW, up_EHW[e].t(), out=dx_NH[rows])
            if now is None:
                left.append((e, rows, dy_nH, h_nF, dup_nW))
        return _gradients(dx_NH, later if now is None else lambda: now, leave)


def _gradients(dx_NH: Tensor, of_weights: Compute, leave: Leave | None) -> Gradients:
    """Return the gradients of rows and weights, or leave those of the weights for later."""
    if leave is None:
        dup_EHW, ddown_EFH = of_weights()
        return dx_NH, dup_EHW, ddown_EFH, None, None, None
    leave(of_weights)
    return dx_NH, None, None, None, None, None


def _zero_idle(counts: list[int], *grads: Tensor) -> None:
    """Set the gradients of experts without rows to zero."""
    for e in (e for e, n in enumerate(counts) if n == 0):
        for grad in grads:
            grad[e].zero_()


def _spans(x_NH: Tensor, counts: list[int]) -> Iterator[tuple[int, slice, int]]:
    """Yield (expert, its rows, number of rows after padding) for every expert that has rows."""
    pad, start = _onednn_multiplies(x_NH), 0
    for e, n in enumerate(counts):
        if n:
            yield e, slice(start, start + n), _bucket(n) if pad else n
        start += n


def _bucket(n: int) -> int:
    """Round a number of rows up to one of 32 sizes per factor of two, in steps of at least 16.

    oneDNN makes a kernel for every new shape, which takes 0.3 ms and 0.6 MB, and keeps up to a thousand kernels. Without
    rounding, every step brings new shapes. With rounding, shapes repeat (8 experts of 512 × 1024, 45 steps of random counts:
    +0.4 GB and 52 µs per row instead of +1.5 GB and 60 µs).
    """
    step = max(16, 1 << max(0, n.bit_length() - 6))
    return -(-n // step) * step


def _pad(rows_nH: Tensor, padded: int) -> Tensor:
    """Append rows of zeros up to `padded` rows."""
    n = rows_nH.shape[0]
    if n == padded:
        return rows_nH
    out = rows_nH.new_empty(padded, rows_nH.shape[1])
    out[:n] = rows_nH
    out[n:].zero_()
    return out


def _mm(a_MK: Tensor, b_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute a @ b, into `out` if it is not None. A shorter `out` leaves out the last (padding) rows."""
    if a_MK.dtype == torch.float32 and _onednn_multiplies(a_MK):
        full_MN = torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.t(), None, "none", [], "")
    elif out is not None and out.shape[0] == a_MK.shape[0]:
        return torch.mm(a_MK, b_KN, out=out)
    else:
        full_MN = torch.mm(a_MK, b_KN)
    return full_MN if out is None else out.copy_(full_MN[: out.shape[0]])


def _onednn_multiplies(x: Tensor) -> bool:
    """Whether products of this type go through oneDNN. torch chooses it for bfloat16, and this module may for float32."""
    if x.device.type != "cpu" or not torch.backends.mkldnn.enabled:
        return False
    return x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and _onednn_beats_mkl())


@cache
def _onednn_beats_mkl() -> bool:
    """Whether oneDNN is faster than MKL, which torch.mm uses in float32.

    On AMD processors MKL uses AVX2 only, while oneDNN uses AVX-512 if the processor has it. One Zen 5 core reaches 105
    GFLOP/s with MKL and 230 GFLOP/s with oneDNN, both in full float32.
    """
    cpu: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.backends.mkldnn.is_available() and "AMD" in cpu.get("cpu_name", "") and cpu.get("avx512_f", False)
