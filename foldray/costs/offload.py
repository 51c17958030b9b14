"""The optimizer on the host (`engine.offload`): what a rank keeps there, what travels for it in a step, and its seconds.

A rank's sums go to the host in float32, and its weights come back in the dtype of computation. The update passes over the host's
memory once. Copies and update follow one another (`runtime/offload.py`), and nothing computes meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

from foldray.costs.candidate import Candidate, Content
from foldray.costs.device import FLOAT32
from foldray.costs.rank import RankCosts


class HostHeld(NamedTuple):
    """Bytes that a rank keeps on the host.

    Args:
        weights: float32 weights, and those in the dtype of computation on their way back, if that is smaller.
        gradients: float32 sums that the rank owns.
        optimizer: the optimizer's moments.
    """

    weights: float
    gradients: float
    optimizer: float


class Offloaded(NamedTuple):
    """What the optimizer on the host takes of the rank that keeps most there.

    Args:
        held: bytes on the host.
        travels: bytes between host and device in a step, both ways together.
        seconds: seconds of these copies and of the update, which are part of the step; None if the hardware does not say how fast
            the host is, so that the step has none of them.
    """

    held: HostHeld
    travels: float
    seconds: float | None


def offloaded(candidate: Candidate, rank: RankCosts) -> Offloaded | None:
    """Return what a candidate's optimizer takes on the host; None if it is on the device."""
    if not rank.job.offload:
        return None
    counts = [_owned(rank, content) for content in candidate.layout.positions.different]
    most = max(counts)
    known = rank.device.hardware.host is not None
    return Offloaded(host_held(rank, most), most * _travelling(rank), host_seconds(rank, most) if known else None)


def host_held(rank: RankCosts, owned: float) -> HostHeld:
    """Return the bytes on the host for the parameters that a rank's optimizer updates."""
    rounded = rank.device.bytes if rank.device.bytes < FLOAT32 else 0
    return HostHeld(owned * (FLOAT32 + rounded), owned * FLOAT32, owned * 2 * rank.job.software.moments)


def host_seconds(rank: RankCosts, owned: float) -> float:
    """Return the seconds to copy, to update and to copy back; 0 if the hardware does not say how fast the host is."""
    host, rounded = rank.device.hardware.host, rank.device.bytes if rank.device.bytes < FLOAT32 else 0
    if host is None:
        return 0.0
    # The update reads and writes weights and moments, and reads gradients. Rounding reads weights, and writes them.
    passes = 2 * FLOAT32 + 4 * rank.job.software.moments + FLOAT32 + (FLOAT32 + rounded if rounded else 0)
    share = rank.device.share["memory"] * 1e9  # nobody has measured the host's, so it is that of the GPU's memory
    return owned * (_travelling(rank) / (host.gb_s * share) + passes / (host.memory_gb_s * share))


def _travelling(rank: RankCosts) -> int:
    """Return the bytes of a parameter that travel in a step."""
    return FLOAT32 + rank.device.bytes


def _owned(rank: RankCosts, content: Content) -> float:
    """Return the number of parameters of a position that a rank's optimizer updates."""
    owners = {family: rank.fold.group_size(family) if rank.zero else 1 for family in rank.elements(content)}
    return sum(count / owners[family] for family, count in rank.elements(content).items())
