"""What copies of hot experts (`moe.copies`) would bring to planned candidates, if ranks get unevenly many rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from foldray.blueprint import overload
from foldray.costs.copying import CopyRoom
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware
from foldray.costs.memory import GIB, ledger
from foldray.costs.ops import OpWork
from foldray.costs.prediction import Step
from foldray.plan.search import Planned

ROOMS = (1, 2, 4, 8)
"""Copies that a rank may have room for in a block."""
_LEAST = 0.99  # of the step without copies; less is no reason to take more memory


class WithCopies(NamedTuple):
    """A candidate with copies of hot experts.

    Args:
        room: copies that a rank has room for in a block.
        overload: rows of the fullest rank over the mean that are left.
        seconds: predicted seconds of a step.
    """

    room: int
    overload: float
    seconds: float
    memory_gib: float


def with_copies(planned: Planned, hardware: Hardware, imbalance: float = 1.0) -> WithCopies | None:
    """Return the candidate with the room for copies that makes its step shortest, among `ROOMS` that fit into memory.

    None is for candidates that have copies, for even ranks, and where no room makes the step shorter by more than 1 %.
    """
    candidate, job = planned.candidate, planned.candidate.job
    others = job.model.experts // candidate.fold.ep * (candidate.fold.ep - 1)
    if job.copies is not None or others == 0 or overload(job.model_under(candidate.fold), candidate.fold.ep) == 1:
        return None
    found = list[WithCopies]()
    for room in ROOMS:
        if room <= others:
            job = replace(job, copies=CopyRoom(room, job.global_batch * job.seq_len))
            copied = replace(candidate, job=job)
            work = OpWork(copied, Device.of(job, hardware))
            held = ledger(copied, work.rank, imbalance).total / GIB
            seconds = Step(copied, work).prediction().seconds
            if held <= hardware.memory_gib:
                found.append(WithCopies(room, work.rank.overload, seconds, held))
    best = min(found, key=lambda each: each.seconds, default=None)
    return best if best is not None and best.seconds < _LEAST * planned.prediction.seconds else None


def document(found: WithCopies) -> dict[str, Any]:
    """Return it for programs."""
    return {"copies": found.room, "overload": found.overload, "step_time_s": found.seconds, "memory_gib": found.memory_gib}


def lines(planned: Sequence[Planned], found: Mapping[int, WithCopies]) -> list[str]:
    """Return it as text. `found` has those candidates that copies make faster, by their numbers from 0."""
    if not found:
        return []
    text = ["", "the same with copies of hot experts (moe.copies), which even out the rows of ranks:"]
    for number, each in found.items():
        faster = planned[number].prediction.seconds / each.seconds
        left = f"the fullest rank has {each.overload:.2f} × the mean"
        text.append(
            f"{number + 1:>3} copies={each.room}{each.seconds:>9.2f} s, {faster:.2f} × as fast, {left}, {each.memory_gib:.0f} GiB"
        )
    return text
