"""The costs of a step whose experts have ranks of their own (DisagMoE): ops of two kinds of ranks, and the rows between them.

A rank of attention has the ops of attention, and a rank of the experts the ops of experts; their GPUs may differ. A rank of
attention sends the row of a token once to each rank that holds one of the token's experts (`moe/once.py`). A message takes as
long as its slower end: the adapters of a sender, or those of a receiver.

`whole.py` simulates such a step op by op. A stage is on two kinds of ranks, so no pass of a stage can be simulated alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from foldray.blueprint import BlockSpec, Stage, ranks_of_a_token, visits_of_a_token
from foldray.costs.bounds import cut_of
from foldray.costs.candidate import Candidate, Content, StageForm
from foldray.costs.device import FLOAT32, INT64, Device
from foldray.costs.memo import Memo
from foldray.costs.memory import (
    GIB,
    Held,
    Memory,
    block_activations,
    combined_rows,
    expert_activations,
    expert_operands,
    kept_by_list,
    operands,
    parameters,
    slices_of,
    summed_rows,
)
from foldray.costs.rank import OpWork, RankCosts
from foldray.costs.shares import Price, Work
from foldray.costs.updates import WHOLE, elements, matrices, round_bytes, stage_updates
from foldray.costs.working import head_logits
from foldray.graph import Op
from foldray.kinds import ATTENTION, COMBINE, DISPATCH, EXPERT
from foldray.orders import position_list

ROWS_UP, ROWS_DOWN = "rows up", "rows down"
"""Lanes of rows to the experts and of rows back. Adapters are duplex, so a rank has one of each."""


class Sides(NamedTuple):
    """The GPUs of both sides, and network adapters of a GPU, where 1 is the hardware file's link between nodes."""

    attention: Device
    experts: Device
    nics: tuple[float, float] = (1.0, 1.0)


class ApartWork(OpWork):
    """The costs of the ops of a candidate whose experts have ranks of their own. Candidates of one job may share `memos`."""

    def __init__(self, candidate: Candidate, sides: Sides, memos: tuple[Memo, Memo] | None = None):
        self.memos = memos or (Memo(), Memo())
        # Rows go once to each rank, whatever `dispatch` is. `_rows` prices them, and other ops cost the same with any `dispatch`.
        candidate = replace(candidate, job=replace(candidate.job, dispatch="assignment"))
        super().__init__(candidate, sides.attention, memo=self.memos[0])
        fold = candidate.fold
        self.sides, self.senders, self.receivers = sides, fold.attention_ranks // fold.pp, fold.moe_ranks // fold.moe_pp
        # Sequences whose rows a rank of the experts gets, if all its rows came from one rank of attention.
        sequences = self.rank.sequences * self.senders / self.receivers
        self.expert_rank = RankCosts(candidate.job, fold, sides.experts, sequences, candidate.zero, self.memos[1])

    def _price(self, op: Op) -> Price:
        graph = self.candidate.graph
        if op.kind == EXPERT:
            return self._computed(self.expert_rank, op)
        if op.kind in (DISPATCH, COMBINE):
            sender, receiver = graph.where(op)
            out, rows = (op.kind == DISPATCH) == (op.direction == "F"), self.rank.travelling
            row = rows.out + rows.scales if out else rows.back
            if op.kind == DISPATCH:  # weights, and numbers of experts, which have no gradients
                row += (8 if out else 4) * self.rank.model.topk
            seconds = self._rows(len(graph.tokens(op)) * self.rank.sequences, row)
            return Price.of([Work(ROWS_UP if sender < receiver else ROWS_DOWN, "ep", seconds)])
        return super()._price(op)

    def _rows(self, tokens: float, row: float) -> float:
        """Return the seconds of the rows of `tokens` tokens of every rank of attention, with the bytes of a row."""
        model, fold, device = self.rank.model, self.candidate.fold, self.sides.attention
        sent = tokens * ranks_of_a_token(model, fold.ep) * row
        ranks, together = self.senders + self.receivers, device.hardware.gpus_per_node
        nodes = -(-ranks // together)
        inside = fold.world_size <= together
        speed, start = device.hardware.intra.of(ranks) if inside else device.hardware.inter.of(max(2, nodes))
        speed *= device.share["exchange"] / (1 + device.share["contention"] * math.log2(nodes))
        visits = visits_of_a_token(model, fold.ep)
        fullest = max(visits) * fold.ep / sum(visits)
        slower = max(1 / self.sides.nics[0], self.senders / self.receivers * fullest / self.sides.nics[1])
        return start * fold.ep + sent * slower / speed

    # After the last backward.

    def behind(self) -> list[float]:
        """Return, for every position, the seconds of its optimizer and of its gather of weights."""
        return [
            sum(update.gather + update.optimizer for update in stage_updates(rank, content, WHOLE) if update.family == family)
            for rank, content, family in self._contents()
        ]

    def _contents(self) -> Iterable[tuple[RankCosts, Content, str]]:
        """Yield costs, content and the group family of the gradients of every position."""
        ownership, fold = self.candidate.ownership, self.candidate.fold
        for rank, stages, count, family in (
            (self.rank, ownership.stages, fold.pp, "dp_cp"), (self.expert_rank, ownership.expert_stages, fold.moe_pp, "edp"),
        ):  # fmt: skip
            for place in range(count):
                yield rank, self._content(stages, place, family == "dp_cp"), family

    def _content(self, stages: Sequence[Stage], place: int, ends: bool) -> Content:
        blocks = self.candidate.job.blocks
        return Content.of([
            StageForm(tuple(blocks[layer] for layer in stage.layers), ends and stage.first, ends and stage.last)
            for stage in stages
            if stage.position == place
        ])  # fmt: skip

    # Memory.

    def memory(self) -> tuple[Memory, Memory]:
        """Return the memory of the fullest rank of attention, and of the fullest rank of the experts."""
        memories = [self._memory(place, *position) for place, position in enumerate(self._contents())]
        pp = self.candidate.fold.pp
        attention, experts = (max(side, key=attrgetter("total")) for side in (memories[:pp], memories[pp:]))
        return attention, experts

    def held(self) -> float:
        """Return the bytes of parameters, gradients and optimizer's state of the fullest rank. No schedule needs less memory."""
        return max(sum(self._parameters(*position)) for position in self._contents())

    def _parameters(self, rank: RankCosts, content: Content, family: str) -> Held:
        sides = rank.elements(content).items()
        held = {name: count if (name == "edp") == (family == "edp") else 0.0 for name, count in sides}
        hidden = {name: count for name, count in elements(rank, content).items() if held[name]}
        return parameters(self.candidate.fold, rank.zero, rank.device.bytes, held, hidden)

    def _memory(self, place: int, rank: RankCosts, content: Content, family: str) -> Memory:
        candidate, graph = self.candidate, self.candidate.graph
        held = self._parameters(rank, content, family)
        ordering = candidate.ordering
        # The order of halves is the same whatever runs again, so candidates that differ in it share one list.
        order = position_list(replace(graph, recompute=()), place, ordering)
        kind = ATTENTION if family == "dp_cp" else EXPERT
        counts, pieces = most_kept(order, kind), len(cut_of(kind, graph.slicing))
        size = {block: self._kept(rank, block, family) for block, _ in content.blocks}
        left = {block: self._operands(rank, block, family) for block in size}
        kept, logits = sum(count * size[graph.blocks[layer]] for layer, count in counts.items()) / pieces, 0.0
        if ordering.forward.row.found:
            in_order, again = math.ceil(counts.total() / pieces), bool(ordering.recompute)
            kept = kept_by_list(content.blocks, size, left, in_order, candidate.micro_batches, ordering.ahead, again)
        rows = 4 * max(graph.slicing.moe) * rank.sequences * rank.model.topk * rank.model.hidden * rank.device.bytes
        if content.head:
            logits = head_logits(rank, max(graph.slicing.moe))
        if graph.later:
            rows += max(left.values())
        hidden = [of_class for of_class in matrices(rank, content) if (of_class.family == "edp") == (family == "edp")]
        updating = max((round_bytes(rank, of_class) for of_class in hidden), default=0.0) - kept - rows - logits
        return Memory(*held, kept, rows, logits, max(0.0, updating), rank.device.share["workspace"] * GIB)

    def _kept(self, rank: RankCosts, block: BlockSpec, family: str) -> float:
        """Return the bytes that a half of a block keeps from forward to backward."""
        again, sliced = self.candidate.ordering.recompute, slices_of(self.candidate.graph.slicing)
        moe, model, fold = block.moe, rank.model, self.candidate.fold
        if not moe:
            return block_activations(rank, block, again, sliced) if family == "dp_cp" else 0.0
        tokens = rank.job.seq_len / (fold.cp * fold.tp) * rank.sequences
        rows = tokens * ranks_of_a_token(model, fold.ep)
        if family == "dp_cp":
            # A sum without weights keeps only which ranks have a row. The router keeps the token of each row, and of each token
            # at most a row per rank instead of a row per expert.
            indices = tokens * (fold.ep - INT64 * model.topk + INT64 * min(model.topk, fold.ep)) + rows * INT64
            elsewhere = expert_activations(rank, block, again) + combined_rows(rank, block)
            return block_activations(rank, block, again, sliced) - elsewhere + indices
        if EXPERT in again:
            return rows * (model.hidden * rank.device.bytes + model.topk * (FLOAT32 + INT64))  # with their weights and experts
        summed = summed_rows(rank, block, tokens * model.topk * rank.overload, rows * rank.overload)
        return expert_activations(rank, block) + fold.etp * summed

    def _operands(self, rank: RankCosts, block: BlockSpec, family: str) -> float:
        """Return the bytes that the gradients of a half's weights are computed from."""
        experts = expert_operands(rank, block) if block.moe else 0.0
        return operands(rank, block) - experts if family == "dp_cp" else experts


def most_kept(order: Iterable[Op], kind: str) -> Counter[int]:
    """Return, by block, how many ops of a kind have run forward and not backward, at the moment when most have."""
    now, most, peak = Counter[int](), Counter[int](), 0
    for op in order:
        if op.kind == kind and op.direction != "R":
            now[op.layer] += 1 if op.direction == "F" else -1
            if (total := now.total()) > peak:
                most, peak = Counter(now), total
    return most
