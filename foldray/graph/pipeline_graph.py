"""Graphs of a step: what its ops need, at which positions they run, and which channels they use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from foldray.blueprint import stage_positions
from foldray.errors import UserError
from foldray.graph.op import Op, handover, route, stage
from foldray.kinds import HANDOVER, STAGE

Channel = tuple[str, int, int]
"""Class of traffic, and two pipeline positions. A channel is one queue."""


class Graph(Protocol):
    """All ops of one optimizer step, and the dependencies that restrict their order."""

    @property
    def positions(self) -> int:
        """Number of pipeline positions. Each position has a list."""

    def ops(self) -> Iterator[Op]:
        """Return every op once, after all ops that it needs."""

    def needs(self, op: Op) -> tuple[Op, ...]:
        """Return the ops that must be complete before this op starts. Ops that use handed-over data need the handover."""

    def where(self, op: Op) -> tuple[int, ...]:
        """Return the positions that take part: one for an op that computes, sender and receiver for a handover."""

    def channel(self, op: Op) -> Channel | None:
        """Return the channel that the op uses; None if the op computes."""

    def frees(self, op: Op) -> tuple[Op, ...]:
        """Return the ops whose saved state this op frees. No later op may use this state."""


@dataclass(frozen=True)
class PipelineGraph:
    """A pipeline whose smallest pieces are stages. `stage_positions` assigns the stages to positions.

    Args:
        backward: False for evaluation: no op goes backward and no state is kept.

    Raises:
        ValueError: pp or micro_batches < 1.
    """

    pp: int
    micro_batches: int
    virtual_stages: int = 1
    backward: bool = True

    def __post_init__(self) -> None:
        for name in ("pp", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a pipeline has at least one")
        if self.virtual_stages < 1:
            raise UserError("schedule.virtual_stages", self.virtual_stages, "a position holds at least one stage")
        if self.pp == 1 and self.virtual_stages > 1:
            raise UserError("schedule.virtual_stages", self.virtual_stages, "interleaving needs a pipeline, fold.pp above 1", [1])

    @property
    def positions(self) -> int:
        return self.pp

    @property
    def stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.pp * self.virtual_stages

    @cached_property
    def at(self) -> tuple[int, ...]:
        """Position of every stage."""
        return stage_positions(self.stages, self.pp)

    def stages_at(self, position: int) -> tuple[int, ...]:
        """Return the stages of a position, in order."""
        return tuple(stage for stage, where in enumerate(self.at) if where == position)

    @property
    def full_rounds(self) -> bool:
        """Whether the number of micro-batches is a multiple of pp, so that every round has pp micro-batches."""
        return divmod(self.micro_batches, self.pp)[1] == 0

    def ops(self) -> Iterator[Op]:
        for micro_batch in range(self.micro_batches):
            for layer in range(self.stages):
                yield stage("F", layer, micro_batch)
                if layer < self.stages - 1:
                    yield handover("F", layer, micro_batch)
            for layer in reversed(range(self.stages if self.backward else 0)):
                yield stage("B", layer, micro_batch)
                if layer > 0:
                    yield handover("B", layer, micro_batch)

    def needs(self, op: Op) -> tuple[Op, ...]:
        if op.kind == HANDOVER:
            return (op._replace(kind=STAGE),)
        if op.direction == "F":
            return (handover("F", op.layer - 1, op.micro_batch),) if op.layer > 0 else ()
        forward = stage("F", op.layer, op.micro_batch)
        return (forward, handover("B", op.layer + 1, op.micro_batch)) if op.layer < self.stages - 1 else (forward,)

    def where(self, op: Op) -> tuple[int, ...]:
        if op.kind == STAGE:
            return (self.at[op.layer],)
        return self.at[op.layer], self.at[op.layer + (1 if op.direction == "F" else -1)]

    def channel(self, op: Op) -> Channel | None:
        if op.kind == STAGE:
            return None
        sender, receiver = self.where(op)
        return route("handovers", sender, receiver)

    def frees(self, op: Op) -> tuple[Op, ...]:
        return (op._replace(direction="F"),) if (op.kind, op.direction) == (STAGE, "B") else ()
