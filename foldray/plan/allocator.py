"""How many GPUs and network adapters attention and the experts get, if they have workers of their own (DisagMoE, section 4.3).

A step goes at the pace of its slower side. A side takes the longer one of two times: to compute its part of a layer on its
GPUs, and to bring the rows of a layer through its adapters (equations 5 and 6; a roofline):

    T_A = max(F_A / C_A, V / B_A)      T_F = max(F_F / C_F, V / B_F)

F is the FLOPs of a side, C the FLOP/s of its GPUs together, V the bytes that travel each way, B the bytes per second of its
adapters together. The allocation first makes max(T_A, T_F) as small as possible. Among the allocations that do, it makes the
other side as fast as possible, too: the adapters that are left go to the side that waits for its rows (equation 7). If adapters
set the pace of both, the GPUs are shared out so that both sides compute for the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foldray.errors import UserError

_DIGITS = 9  # of the logarithms of seconds: times that differ by less than rounding are equal


class Demand(NamedTuple):
    """A layer's FLOPs of each side for one micro-batch, and bytes from attention to the experts; as many come back."""

    attention: float
    experts: float
    bytes: float


@dataclass(frozen=True)
class Allocation:
    """Numbers of GPUs and of adapters of both sides, and seconds of a layer of each side."""

    attention: int
    experts: int
    attention_nics: int
    expert_nics: int
    sides: tuple[float, float]


class Kind(NamedTuple):
    """A kind of GPU: the FLOP/s that it reaches, and bytes per second of an adapter in each direction."""

    flops: float
    nic_rate: float


def allocate(
    demand: Demand, gpus: int, flops: float, nics: int, nic_rate: float, experts: Kind | None = None, own: int | None = None
) -> Allocation:
    """Return the best of all allocations.

    Args:
        flops: FLOP/s that a GPU reaches.
        nics: number of adapters. Any of them may serve either side, if both sides have GPUs of one kind.
        nic_rate: bytes per second of an adapter, in each direction.
        experts: the kind of the experts' GPUs; each side then has the adapters of its own GPUs, in equal parts of all. None is
            the same kind.
        own: number of attention's GPUs; None leaves it open.
    """
    for name, count, what in (("gpus", gpus, "GPU"), ("nics", nics, "network adapter")):
        if count < 2:
            raise UserError(name, count, f"attention and the experts need one {what} each", ["2…"])
    own_GN, nics_GN = np.meshgrid(np.arange(1, gpus), np.arange(1, nics), indexing="ij")  # attention's
    theirs = experts or Kind(flops, nic_rate)
    computing = demand.attention / (own_GN * flops), demand.experts / ((gpus - own_GN) * theirs.flops)
    traveling = demand.bytes / (nics_GN * nic_rate), demand.bytes / ((nics - nics_GN) * theirs.nic_rate)
    sides = [np.maximum(*times) for times in zip(computing, traveling, strict=True)]
    illegal_GN = (own_GN != (own or own_GN)) | (own_GN * nics != nics_GN * gpus if experts else False)
    sides[0] = np.where(illegal_GN, np.inf, sides[0])
    wishes = np.maximum(*computing), np.minimum(*sides), np.maximum(*sides)  # the last one counts most
    best = np.lexsort([np.log(times).round(_DIGITS).ravel() for times in wishes])[0]
    attention, attention_nics = int(own_GN.ravel()[best]), int(nics_GN.ravel()[best])
    seconds = float(sides[0].ravel()[best]), float(sides[1].ravel()[best])
    return Allocation(attention, gpus - attention, attention_nics, nics - attention_nics, seconds)
