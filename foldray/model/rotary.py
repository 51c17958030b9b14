"""Rotary positions: the angles by which heads turn, and the turn of queries and keys.

Legend: B sequences, S positions, N heads, D width of a head, R columns of a head that turn.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from foldray.blueprint import RopeSpec, ScalingSpec
from foldray.kernels import fused


class Rotation(NamedTuple):
    """Cosines and sines [S, R/2] of the angles by which rotary positions turn pairs of columns: 2i and 2i + 1 if interleaved,
    else i and i + R/2.
    """

    cos_SR: torch.Tensor
    sin_SR: torch.Tensor
    interleaved: bool = False


def rotation(position_S: torch.Tensor, rope: RopeSpec, dtype: torch.dtype) -> Rotation:
    """Return the rotations of rotary position embedding (RoFormer, section 3.2.2) for heads of a type.

    Angles are float64, because large positions lose digits in float32. Cosines and sines have at least float32.
    """
    rate_R = rope.theta ** (-torch.arange(0, rope.dim, 2, device=position_S.device, dtype=torch.float64) / rope.dim)
    if rope.scaling is not None:
        kept_R = _kept(rate_R, rope, rope.scaling)
        rate_R = rate_R * kept_R + rate_R / rope.scaling.factor * (1 - kept_R)
    angle_SR, wide = position_S.to(torch.float64).unsqueeze(1) * rate_R, torch.promote_types(dtype, torch.float32)
    magnitude = 1.0 if rope.scaling is None else rope.scaling.magnitude
    return Rotation((angle_SR.cos() * magnitude).to(wide), (angle_SR.sin() * magnitude).to(wide), rope.interleaved)


def _kept(rate_R: torch.Tensor, rope: RopeSpec, scaling: ScalingSpec) -> torch.Tensor:
    """Return the share of its own rate that each pair keeps: 1 if it turns often, 0 if it turns seldom (`ScalingSpec`)."""
    if scaling.kind == "linear":
        return torch.zeros_like(rate_R)
    if scaling.kind == "llama3":
        turns_R = rate_R * (scaling.original / (2 * math.pi))
        return ((turns_R - scaling.slow) / (scaling.fast - scaling.slow)).clamp(0, 1)

    def pair(turns: float) -> float:
        """Return the pair, a number that need not be whole, that turns as often as this within the original sequences."""
        return rope.dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(scaling.fast), pair(scaling.slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    width = last - first or 1e-3
    return 1 - ((torch.arange(len(rate_R), device=rate_R.device, dtype=torch.float64) - first) / width).clamp(0, 1)


def rotate(x_BSND: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """Rotate the pairs of every head by the angles of its position, in at least float32: [B, S, N, D].

    Columns from R on stay as they are.
    """
    turning = 2 * turn.cos_SR.shape[-1]
    if turning < x_BSND.shape[-1]:
        return torch.cat((rotate(x_BSND[..., :turning], turn), x_BSND[..., turning:]), dim=-1)
    if not turn.interleaved and fused.fits(x_BSND):
        return fused.rotate(x_BSND, turn.cos_SR, turn.sin_SR)
    cos_S1R, sin_S1R = turn.cos_SR.unsqueeze(1), turn.sin_SR.unsqueeze(1)
    wide_BSND = x_BSND.to(cos_S1R.dtype)
    a, b = wide_BSND.unflatten(-1, (wide_BSND.shape[-1] // 2, 2)).unbind(-1) if turn.interleaved else wide_BSND.chunk(2, dim=-1)
    turned = a * cos_S1R - b * sin_S1R, b * cos_S1R + a * sin_S1R
    return (torch.stack(turned, dim=-1).flatten(-2) if turn.interleaved else torch.cat(turned, dim=-1)).to(x_BSND.dtype)
