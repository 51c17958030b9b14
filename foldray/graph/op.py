"""The op, the smallest thing that a schedule orders: its kind, direction, layer, part and micro-batch."""

from __future__ import annotations

from typing import Literal, NamedTuple

from foldray.kinds import HANDOVER, STAGE

Direction = Literal["F", "R", "B", "W"]
"""Forward, recomputation of a forward, backward, and gradients of weights that a backward has left."""


class Op(NamedTuple):
    """One entry of the list of a pipeline position. The graph knows what an op needs and where it runs.

    Args:
        kind: a name of `kinds.OP_KINDS`. In a `PipelineGraph` there are two kinds. `stage` computes all blocks of a virtual
            stage for one micro-batch. `handover` sends the stage's output (F) to the next virtual stage, or the gradient of
            its input (B) to the previous one; the sender and the receiver each have it once in their lists.
        direction: forward (F), recomputation (R), backward (B) or gradients of weights (W).
        layer: number of the block. In a `PipelineGraph` and for a `handover`, number of the virtual stage, from 0 to
            pp·virtual_stages − 1; a `handover` has the number of the stage that sends. For a `reduce`, pipeline position.
        part: number of the piece within the micro-batch, 0 in a `PipelineGraph`. For a `reduce`, number of the chunk.
            Forward and backward may cut a handover into different pieces.
        micro_batch: number of the micro-batch within the optimizer step.
    """

    kind: str
    direction: Direction
    layer: int
    part: int = 0
    micro_batch: int = 0

    def __str__(self) -> str:
        """Return a name such as `F3.1`: forward of stage 3 for micro-batch 1.

        Other kinds than `stage` precede it (`handover B3.1`), and a part other than 0 follows it (`attention F3.1/2`).
        """
        name = f"{self.direction}{self.layer}.{self.micro_batch}" + (f"/{self.part}" if self.part else "")
        return name if self.kind == STAGE else f"{self.kind} {name}"


Schedule = tuple[tuple[Op, ...], ...]
"""The list of every pipeline position."""


def stage(direction: Direction, layer: int, micro_batch: int) -> Op:
    return Op(STAGE, direction, layer, micro_batch=micro_batch)


def handover(direction: Direction, layer: int, micro_batch: int, part: int = 0) -> Op:
    return Op(HANDOVER, direction, layer, part, micro_batch)


def route(name: str, sender: int, receiver: int) -> tuple[str, int, int]:
    """Return the channel of a class of traffic from a pipeline position to another one. Each direction is a queue of its own."""
    return f"{name}_up" if sender < receiver else f"{name}_down", sender, receiver
