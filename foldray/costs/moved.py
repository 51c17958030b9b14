"""Activations on the host (`schedule.offload`): what a rank's ops keep there, and what travels in a step."""

from __future__ import annotations

from typing import NamedTuple

from foldray.blueprint import BlockSpec
from foldray.costs.activations import moved_bytes, slices_of
from foldray.costs.candidate import Candidate
from foldray.costs.memory import blocks_in_flight
from foldray.costs.rank import RankCosts


class Moved(NamedTuple):
    """What a rank's ops keep on the host for their backward, at the pipeline position that keeps most there.

    Args:
        held: bytes on the host, of all micro-batches in flight.
        travels: bytes between host and device in a step, both ways together.
    """

    held: float
    travels: float


def moved(candidate: Candidate, rank: RankCosts) -> Moved | None:
    """Return what a candidate's ops keep on the host; None if they keep nothing there."""
    ordering, layout, pipeline = candidate.ordering, candidate.layout, candidate.pipeline
    if not ordering.offload:
        return None
    sliced, parts = slices_of(candidate.pieces.slicing), ordering.batch_degree

    def bytes_(block: BlockSpec) -> float:
        return parts * sum(moved_bytes(rank, block, kind, sliced) for kind in ordering.offload)

    found = list[Moved]()
    for place in range(layout.pp):
        flying, forms = blocks_in_flight(layout, pipeline, place), [layout.forms[number] for number in layout.forms_at[place]]
        held = sum(count * bytes_(block) for block, count in flying)
        passes = sum(bytes_(block) for form in forms for block in form.blocks[: len(form.blocks) - form.last])
        found.append(Moved(held, 2 * candidate.micro_batches * passes))
    return max(found)
