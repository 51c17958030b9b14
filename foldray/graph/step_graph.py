"""The dependencies of all ops of one optimizer step.

Attention and MoE layers cut a sequence differently (`step_ops.py`). So an op of one cut needs those ops of the other cut that
share tokens with it. This is FoldMoE's token buffer (section 4.2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from foldray.graph.op import Direction, Op, route
from foldray.graph.pipeline_graph import Channel
from foldray.graph.step_ops import StepOps
from foldray.kinds import (
    ATTENTION,
    COMBINE,
    COPY,
    COUNTS,
    DISPATCH,
    EMBED,
    EXPERT,
    FFN,
    GATHER,
    HANDOVER,
    HEAD,
    INTRA_COMBINE,
    INTRA_DISPATCH,
    MERGE,
    OFFLOAD,
    OP_KINDS,
    PROJECT,
    REDUCE,
    ROUTE,
    SHARED,
)

_BEFORE = {
    FFN: (ATTENTION,), COUNTS: (ROUTE,), DISPATCH: (ROUTE, COUNTS), SHARED: (ROUTE,), EXPERT: (DISPATCH,), COMBINE: (EXPERT,),
    MERGE: (ROUTE, SHARED, COMBINE), GATHER: (PROJECT,),
}  # fmt: skip
"""For ops on the same piece: the kinds whose results a forward op uses."""
_BEFORE_INSIDE = _BEFORE | {
    INTRA_DISPATCH: (DISPATCH,), EXPERT: (INTRA_DISPATCH,), INTRA_COMBINE: (EXPERT,), COMBINE: (INTRA_COMBINE,),
}  # fmt: skip
"""The same if ranks of a node pass rows on to each other (`StepOps.passes_on`)."""


@dataclass(frozen=True)
class StepGraph(StepOps):
    """The graph of a step: its ops (`StepOps`), and what each of them needs."""

    def needs(self, op: Op) -> tuple[Op, ...]:
        if op.kind == REDUCE:
            return tuple(piece for maker in self.makers(op) for piece in self.adding(*maker))
        if op.kind == COPY:
            return () if op.direction == "F" else self.adding(EXPERT, op.layer)
        if op.kind == OFFLOAD:
            return self.moved_by(op) if op.direction == "F" else (op._replace(direction="F"), *self._fetched_before(op))
        if op.direction == "W":
            return (*self.left_by(op), *self._added_before(op))
        # All others need the same in every micro-batch: ops of their own, and weights that have come to copies once in a step.
        known, first = self._needs_in_first, op[:-1]
        if first not in known:
            known[first] = self._needs_of_its_own(Op(*first))
        return tuple([need if need.kind == COPY else Op(*need[:-1], op.micro_batch) for need in known[first]])

    def _needs_of_its_own(self, op: Op) -> tuple[Op, ...]:
        """Return what an op needs of its own micro-batch."""
        if op.direction == "R":
            return self._before_again(op)
        if op.direction == "F":
            return (*self._inputs(op), *self.left_before(op))
        gradients = self._gradients(op)
        return gradients if OP_KINDS[op.kind].travels else (*gradients, self._state(op))

    @cached_property
    def _needs_in_first(self) -> dict[tuple[str, Direction, int, int], tuple[Op, ...]]:
        """By op of the first micro-batch, what `needs` has found."""
        return {}

    def where(self, op: Op) -> tuple[int, ...]:
        known, of_all = self._places_of, op[:3]  # the same for all pieces and micro-batches
        if of_all not in known:
            known[of_all] = self._place(op)
        return known[of_all]

    @cached_property
    def _places_of(self) -> dict[tuple[str, Direction, int], tuple[int, ...]]:
        """By op of the first piece and micro-batch, what `where` has found."""
        return {}

    def _place(self, op: Op) -> tuple[int, ...]:
        if op.kind == REDUCE:
            return (op.layer,)
        if op.kind == HANDOVER:
            # Forward sends the output of the stage's last block to the first block of the next stage; backward, the reverse.
            sender, receiver = (-1, op.layer + 1) if op.direction == "F" else (0, op.layer - 1)
            ends = self.layers[op.layer][sender], self.layers[receiver][-1 - sender]
            return self.at[ends[0]].attention, self.at[ends[1]].attention
        place, half = self.at[op.layer], OP_KINDS[op.kind].half
        back_at = self.at[op.layer + 1].attention if self.merges_onwards(op.layer) else place.attention
        if half == "attention" or place.attention == place.experts:
            return (back_at if op.kind == MERGE else place.attention,)
        if half == "experts":
            return (place.experts,)
        outside = back_at if op.kind == COMBINE else place.attention
        outwards = (op.kind == COMBINE) == (op.direction == "B")  # dispatched rows, or gradients of combined rows
        return (outside, place.experts) if outwards else (place.experts, outside)

    def channel(self, op: Op) -> Channel | None:
        if op.kind == REDUCE:
            return f"{self.chunk(op).name}_gradients", op.layer, op.layer
        name = OP_KINDS[op.kind].travels
        if name is None:
            return None
        known, of_all = self._channel_of, op[:3]
        if of_all not in known:
            if op.kind == OFFLOAD:
                name = f"{name}_out" if op.direction == "F" else f"{name}_back"
            ends = self.where(op)
            known[of_all] = (name, *ends, *ends) if len(ends) == 1 else route(name, *ends)
        return known[of_all]

    @cached_property
    def _channel_of(self) -> dict[tuple[str, Direction, int], Channel]:
        """By op of the first piece and micro-batch, what `channel` has found."""
        return {}

    def frees(self, op: Op) -> tuple[Op, ...]:
        if op.direction != "B" or OP_KINDS[op.kind].travels:
            return ()
        forward = op._replace(direction="F")
        return (forward, self._state(op)) if op.kind in self.again else (forward,)

    def _before_again(self, op: Op) -> tuple[Op, ...]:
        """Return what comes before an op that runs again.

        The state of an op is large, so the op runs late: after the backward of the next part, or of the first part of the next
        block at the position, has freed its state. The first op of a micro-batch runs again when its gradient has arrived.
        """
        forward = op._replace(direction="F")
        if op.kind == ATTENTION and self.gathers:
            return forward, op._replace(kind=PROJECT)  # which has waited for the rest
        kind = ATTENTION if op.kind == self.entry else op.kind
        # Projections and attention of a slice use one place for its queries.
        done = (forward,) if op.kind == kind else (forward, forward._replace(kind=kind))
        backward = op._replace(kind=kind, direction="B")
        if following := self._next_part(backward):
            return (*done, *following)
        where = self.where(forward)
        layers = (layer for layer in range(op.layer + 1, len(self.blocks)) if self.has(kind, layer))
        later = (backward._replace(layer=layer, part=0) for layer in layers)
        free = next((candidate for candidate in later if self.where(candidate) == where), None)
        return (*done, free) if free else (*done, *self._gradients(backward))

    def _fetched_before(self, op: Op) -> tuple[Op, ...]:
        """Return what comes before a block is fetched (`offload` B): the fetch before it, and the ends of two blocks.

        So of what a stage has fetched, there are two blocks at a time: the one that goes backward, and the next one. The backward
        of a stage's first block is followed by that of its last block for the micro-batch after it.
        """
        layers, kind = self.layers[self.stage_of[op.layer]], self.offloaded[op.part]

        def before(count: int) -> tuple[int, int]:
            """Return the block and the micro-batch that the stage takes backward so much earlier."""
            passes, place = divmod(layers[-1] - op.layer - count, len(layers))
            return layers[-1] - place, op.micro_batch + passes * self.together

        earlier = [(layer, m) for layer, m in map(before, range(1, 2 * len(layers) + 1)) if m >= 0]
        fetched = [(layer, m) for layer, m in earlier if layer < len(self.blocks) - 1 and self.has(kind, layer)]
        ends = dict.fromkeys((*earlier[1:2], *fetched[1:2]))
        return (
            *(op._replace(layer=layer, micro_batch=m) for layer, m in fetched[:1]),
            *(Op(self.entry, "B", layer, 0, m) for layer, m in ends),
        )

    def _next_part(self, op: Op) -> tuple[Op, ...]:
        """Return the same op for the next part of the micro-batch; nothing for the last part."""
        return (op._replace(part=op.part + 1),) if op.part + 2 < len(self._cuts(op.kind, op.layer)) else ()

    def _last_part(self, op: Op) -> Op:
        """Return the same op for the last part of its micro-batch."""
        return op._replace(part=len(self._cuts(op.kind, op.layer)) - 2)

    def _added_before(self, op: Op) -> tuple[Op, ...]:
        """Return the op that adds to the same gradients of weights right before. It keeps the order of the backward, so sums
        have the same bits as without ops of their own."""
        if op.kind == HEAD:
            return self._head_before(op)
        if not self.whole and (following := self._next_part(op)):
            return following
        # Backward reaches the last part of a micro-batch first.
        group, place = divmod(op.micro_batch, self.together)
        before = op.micro_batch + 1 if place + 1 < self.together else (group - 1) * self.together
        return (op._replace(part=0, micro_batch=before),) if before >= 0 else ()

    def _head_before(self, op: Op) -> tuple[Op, ...]:
        """Return the same op for the piece of a head right before. Each goes backward right after its forward; further tokens
        follow for all parts of a group. If the experts have positions of their own, other micro-batches come between the heads of
        one, so each head has an order of its own."""
        number, (group, place) = self.heads.index(op.layer), divmod(op.micro_batch, self.together)
        if op.part:
            return (op._replace(part=op.part - 1),)
        if self.apart:
            return (self._last_part(op._replace(micro_batch=op.micro_batch - 1)),) if op.micro_batch else ()
        if place:
            return (self._last_part(op._replace(micro_batch=op.micro_batch - 1)),)
        if number:
            before = op._replace(layer=self.heads[number - 1], micro_batch=(group + 1) * self.together - 1)
            return (self._last_part(before),)
        return (self._last_part(op._replace(layer=self.heads[-1], micro_batch=op.micro_batch - 1)),) if op.micro_batch else ()

    def _inputs(self, op: Op) -> tuple[Op, ...]:
        """Return the forward ops whose results a forward op uses."""
        kind, layer, part = op.kind, op.layer, op.part
        if kind == EMBED:
            return ()
        if kind == ATTENTION:
            made = (op._replace(kind=PROJECT), op._replace(kind=GATHER)) if self.gathers else self._entering(op)
            return (*made, *((op._replace(part=part - 1),) if part else ()))
        if kind == PROJECT:
            return self._entering(op)
        if kind == ROUTE:
            # Routers run in order, because counters and statistics pass from piece to piece of a sequence.
            return (*self._sharing(op, ATTENTION, layer), *((op._replace(part=part - 1),) if part else ()))
        if kind == HEAD:
            return tuple(self._sharing(op, self.output(layer), layer))
        if kind == HANDOVER:
            last = self.layers[layer][-1]
            goes_past = SHARED if self.has(SHARED, last) else ROUTE
            return tuple(self._sharing(op, goes_past if self.merges_onwards(last) else self.output(last), last))
        if kind in (COMBINE, MERGE) and self.merges_onwards(layer):  # the rows' receiver learns from the handover how many come
            past = self._overlapping(op, self.handovers("F", self.stage_of[layer], op.micro_batch))
            return (op._replace(kind=EXPERT if kind == COMBINE else COMBINE), *past)
        copies = (Op(COPY, "F", layer),) if kind == EXPERT and layer in self.copied else ()
        before = (_BEFORE_INSIDE if self.passes_on else _BEFORE)[kind]
        return (*(op._replace(kind=name) for name in before if self.has(name, layer)), *copies)

    def _entering(self, op: Op) -> tuple[Op, ...]:
        """Return the ops that produce the input of a slice of attention."""
        stage = self.stage_of[op.layer]
        if op.layer > self.layers[stage][0] or (stage and self.merges_onwards(op.layer - 1)):
            return tuple(self._sharing(op, self.output(op.layer - 1), op.layer - 1))
        if stage == 0:
            return (op._replace(kind=EMBED),)
        return tuple(self._overlapping(op, self.handovers("F", stage - 1, op.micro_batch)))

    def _gradients(self, op: Op) -> tuple[Op, ...]:
        """Return the ops that make the gradient of the results of an op's forward, or the data of a backward handover."""
        if op.kind == HANDOVER:  # the gradient of the stage's input, or of the residual stream that went past the experts
            first = self.layers[op.layer][0]
            makers = self._sharing(op, *((MERGE, first - 1) if self.merges_onwards(first - 1) else (self.entry, first)))
            return tuple(maker._replace(direction="B") for maker in makers)
        stage, gradients = self.stage_of[op.layer], list[Op]()
        for user in self._users(op._replace(direction="F", micro_batch=0)):
            if user.kind == HANDOVER:  # backward, handovers have other cuts
                gradients += self._overlapping(op, self.handovers("B", stage + 1, op.micro_batch))
            else:
                gradients.append(user._replace(direction="B", micro_batch=op.micro_batch))
        if op.kind in (ATTENTION, GATHER):  # the first slice goes backward last, and frees the keys and values of all
            gradients += self._next_part(op)
        if op.kind == ROUTE:
            # The gradient of the balance loss has the statistics of the whole sequence, which the last router completes. Its own
            # backward may free it before, so what follows it stands for it.
            gradients.append(self._last_part(op._replace(kind=DISPATCH, direction="F")))
        return tuple(gradients)

    def _users(self, op: Op) -> Sequence[Op]:
        """Return the ops of other kinds that use the results of a forward op of the first micro-batch.

        Row counts are left out: they have no backward.
        """
        stage = self.stage_of[op.layer]
        if stage not in self._users_in:
            users = self._users_in[stage] = defaultdict[Op, list[Op]](list)
            following = self._stage(stage + 1, 0) if self.merges_onwards(self.layers[stage][-1]) else ()
            for user in (*self._stage(stage, 0), *following):
                for need in self._inputs(user) if user.kind != OFFLOAD else ():
                    if user.kind not in (need.kind, COUNTS):
                        users[need].append(user)
        return self._users_in[stage][op]

    @cached_property
    def _users_in(self) -> dict[int, dict[Op, list[Op]]]:
        """By stage, what `_users` has found. A search asks for few stages of a graph."""
        return {}

    def _sharing(self, op: Op, kind: str, layer: int) -> Iterator[Op]:
        """Return the forward ops of a kind at a block that share tokens with an op."""
        return self._overlapping(op, self.pieces(kind, layer, op.micro_batch))

    def _overlapping(self, op: Op, candidates: Iterator[Op]) -> Iterator[Op]:
        """Return those of some ops that share tokens with an op."""
        mine = self.tokens(op)
        for candidate in candidates:
            theirs = self.tokens(candidate)
            if theirs.start < mine.stop and mine.start < theirs.stop:
                yield candidate

    def _state(self, op: Op) -> Op:
        """Return the op whose saved state a backward op uses. What was on the host is there once it has been fetched."""
        if (moved := self.offload_of(op)) is not None:
            return moved._replace(direction="B")
        return op._replace(direction="R" if op.kind in self.again else "F")
