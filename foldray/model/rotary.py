"""Rotary positions.

Legend: B sequences, S positions, N heads, D width of a head, R columns of a head that turn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from foldray.blueprint import RopeSpec
from foldray.kernels import fused


class Rotation(NamedTuple):
    """Cosines and sines [S, R/2] of the angles by which rotary positions turn pairs of columns.

    Args:
        interleaved: whether columns 2i and 2i + 1 are a pair. Otherwise columns i and i + R/2 are.
    """

    cos_SR: torch.Tensor
    sin_SR: torch.Tensor
    interleaved: bool = False


def rotation(position_S: torch.Tensor, rope: RopeSpec, dtype: torch.dtype) -> Rotation:
    """Return the rotations of rotary position embedding (RoFormer, section 3.2.2) for heads of a type.

    Angles are float64, because large positions lose digits in float32. Cosines and sines have at least float32.
    """
    rate_R = rope.theta ** (-torch.arange(0, rope.dim, 2, device=position_S.device, dtype=torch.float64) / rope.dim)
    angle_SR, wide = position_S.to(torch.float64).unsqueeze(1) * rate_R, torch.promote_types(dtype, torch.float32)
    return Rotation(angle_SR.cos().to(wide), angle_SR.sin().to(wide), rope.interleaved)


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
    a, b = wide_BSND.unflatten(-1, (-1, 2)).unbind(-1) if turn.interleaved else wide_BSND.chunk(2, dim=-1)
    turned = a * cos_S1R - b * sin_S1R, b * cos_S1R + a * sin_S1R
    return (torch.stack(turned, dim=-1).flatten(-2) if turn.interleaved else torch.cat(turned, dim=-1)).to(x_BSND.dtype)
