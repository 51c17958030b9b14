"""The atom of a schedule: what is done, which way, for which layer, part and micro-batch."""

from __future__ import annotations

from typing import Literal, NamedTuple

from foldray.kinds import HANDOVER, STAGE

Direction = Literal["F", "R", "B"]
"""Forward, recomputation of a forward, backward."""


class Op(NamedTuple):
    """One step in the list of a pipeline position. What it needs and where it runs are questions to the graph.

    Args:
        kind: what is done. A pipeline has two kinds. `stage` computes all blocks of a virtual stage for one micro-batch.
            `handover` sends the stage's output (F) to the next virtual stage, or the gradient of its input (B) to the one
            before; it stands once in the sender's list and once in the receiver's.
        direction: forward, recomputation or backward.
        layer: for a pipeline the virtual stage, 0 … pp·virtual_stages − 1; of a handover, the stage that sends.
        part: chunk of the micro-batch's sequence; a pipeline has one.
        micro_batch: number of the micro-batch within the optimizer step.
    """

    kind: str
    direction: Direction
    layer: int
    part: int = 0
    micro_batch: int = 0

    def __str__(self) -> str:
        """`F3.1`: forward of stage 3, micro-batch 1; other kinds in front (`handover B3.1`), parts after the first behind."""
        name = f"{self.direction}{self.layer}.{self.micro_batch}" + (f"/{self.part}" if self.part else "")
        return name if self.kind == STAGE else f"{self.kind} {name}"


Schedule = tuple[tuple[Op, ...], ...]
"""For every pipeline position the ops that it takes part in, in its order."""


def stage(direction: Direction, layer: int, micro_batch: int) -> Op:
    return Op(STAGE, direction, layer, micro_batch=micro_batch)


def handover(direction: Direction, layer: int, micro_batch: int) -> Op:
    return Op(HANDOVER, direction, layer, micro_batch=micro_batch)
