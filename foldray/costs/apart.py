"""The costs of a step whose experts have ranks of their own (DisagMoE): ops of two kinds of ranks, and the rows between them.

A rank of attention has the ops of attention, and a rank of the experts the ops of experts; their GPUs may differ. A rank of
attention sends the row of a token once to each rank that holds one of the token's experts (`moe/once.py`), or with
`Fold.ep_inside` once to each node of such ranks, which pass it on inside the op of the experts. A message takes as
long as its slower end: the adapters of a sender, or those of a receiver. If the ranks that send rows to each other fit on a node,
rows do not leave it (`ranks_of_a_node`).

`whole.py` simulates such a step op by op. A stage is on two kinds of ranks, so no pass of a stage can be simulated alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from foldray.blueprint import BlockSpec, Stage, count_by_cut, ranks_of_a_token, visits_of_a_token
from foldray.costs.activations import (
    block_activations,
    combined_rows,
    expert_activations,
    expert_operands,
    operands,
    passed_on,
    slices_of,
    summed_rows,
)
from foldray.costs.bounds import cut_of
from foldray.costs.candidate import Candidate, Content, StageForm
from foldray.costs.device import FLOAT32, INT64, Device
from foldray.costs.memo import Memo
from foldray.costs.memory import GIB, Held, Memory, kept_by_list, parameters
from foldray.costs.ops import OpWork
from foldray.costs.rank import RankCosts
from foldray.costs.shares import Price, Work
from foldray.costs.updates import WHOLE, elements, matrices, round_bytes, stage_updates
from foldray.costs.working import head_logits
from foldray.fold import Fold
from foldray.graph import Op, StepGraph
from foldray.kinds import ATTENTION, COMBINE, DISPATCH, EXPERT
from foldray.orders.af_pipe import orders_of_halves

ROWS_UP, ROWS_DOWN = "rows up", "rows down"
"""Lanes of rows to the experts and of rows back. Adapters are duplex, so a rank has one of each."""


class Sides(NamedTuple):
    """The GPUs of both sides, and network adapters of a GPU, where 1 is the hardware file's link between nodes."""

    attention: Device
    experts: Device
    nics: tuple[float, float] = (1.0, 1.0)

    @property
    def of_one_kind(self) -> bool:
        return self.attention.hardware == self.experts.hardware


def ranks_of_a_node(candidate: Candidate, sides: Sides) -> tuple[int, int] | None:
    """Return how many ranks of attention and of the experts share a node, so that rows stay on nodes; None if they leave them.

    Rows never leave a cell: one of edp equal parts of the ranks of attention and of the experts, which has every expert once. If
    cells fill nodes, and rows are more bytes than gradients, training seats the ranks so (`nodes/arranging.py`).
    """
    fold, job, together = candidate.fold, candidate.job, sides.attention.hardware.gpus_per_node
    cell = fold.world_size // fold.edp
    if not sides.of_one_kind or fold.edp == 1 or fold.dp % fold.edp or together % cell or fold.world_size <= together:
        return None
    outside, inside = count_by_cut(job.model)
    tokens, row = job.global_batch * job.seq_len, job.model.hidden * sides.attention.bytes
    rows = 4 * tokens * ranks_of_a_token(job.model, fold.ep_across) * row * len(job.model.moe_layers)  # out and back, twice
    gradients = 2 * FLOAT32 * (fold.dp * fold.cp * outside + fold.edp * inside)
    if rows < gradients:
        return None
    attention, experts = (ranks // fold.edp * (together // cell) for ranks in (fold.attention_ranks, fold.moe_ranks))
    return attention, experts


class ApartWork(OpWork):
    """The costs of the ops of a candidate whose experts have ranks of their own. Candidates of one job may share `memos`.

    Args:
        short_of: the costs of the same candidate with all its micro-batches, whose ranks are on nodes in the same way.
    """

    def __init__(
        self, candidate: Candidate, sides: Sides, memos: tuple[Memo, Memo] | None = None, short_of: ApartWork | None = None
    ):
        self.memos = memos or (Memo(), Memo())
        # Rows go once to each rank, whatever `dispatch` is. `_rows` prices them, and other ops cost the same with any `dispatch`,
        # unless the experts' ranks pass rows on inside their nodes.
        passes_on = replace(candidate.job, dispatch="rank" if candidate.fold.ep_inside > 1 else "assignment")
        candidate = replace(candidate, job=replace(candidate.job, dispatch="assignment"))
        fold, job, zero = candidate.fold, candidate.job, candidate.zero
        self.sides, self.senders, self.receivers = sides, fold.attention_ranks // fold.pp, fold.moe_ranks // fold.moe_pp
        self.shared_nodes: tuple[int, int] | None = short_of.shared_nodes if short_of else ranks_of_a_node(candidate, sides)
        folds, devices = (fold, fold), (sides.attention, sides.experts)
        if self.shared_nodes:
            folds, (own, theirs) = _on_shared_nodes(fold, self.shared_nodes), self.shared_nodes
            devices = _with_ranks(sides.attention, own), _with_ranks(sides.experts, theirs)
        sequences = candidate.micro_batch / candidate.ordering.batch_degree
        super().__init__(
            candidate, devices[0], RankCosts(job, folds[0], devices[0], sequences, zero, self.memos[0]), self.memos[0]
        )
        # Sequences whose rows a rank of the experts gets, if all its rows came from one rank of attention.
        received = sequences * self.senders / self.receivers
        self.expert_rank = RankCosts(passes_on, folds[1], devices[1], received, zero, self.memos[1])

    def _priced(self, op: Op) -> Price:
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
        return super()._priced(op)

    def _rows(self, tokens: float, row: float) -> float:
        """Return the seconds of the rows of `tokens` tokens of every rank of attention, with the bytes of a row."""
        model, fold, sides = self.rank.model, self.candidate.fold, self.sides
        places = fold.ep_across  # ranks that a rank of attention sends rows to
        sent = tokens * ranks_of_a_token(model, places) * row
        visits = visits_of_a_token(model, places)
        copies = self.receivers // places  # of their inputs; the senders are spread over them (`nodes/routes.py`)
        received = sent * -(-self.senders // copies) * max(visits) / sum(visits)
        ranks, device = self.senders + self.receivers, sides.attention
        if self.shared_nodes or (sides.of_one_kind and fold.world_size <= device.hardware.gpus_per_node):
            speed, start = device.hardware.intra.of(min(ranks, device.hardware.gpus_per_node))
            return start * places + max(sent, received) / (speed * device.share["exchange"])
        nodes = self._nodes()
        ends = []
        for moved, side, nics in zip((sent, received), sides[:2], sides.nics, strict=True):
            speed, start = side.hardware.inter.of(max(2, nodes))
            speed *= nics * side.share["exchange"] / (1 + side.share["contention"] * math.log2(nodes))
            ends.append((start, moved / speed))
        return max(start for start, _ in ends) * places + max(seconds for _, seconds in ends)

    def _nodes(self) -> int:
        """Return the number of nodes of the ranks of two positions between which rows travel."""
        together = [side.hardware.gpus_per_node for side in self.sides[:2]]
        if self.sides.of_one_kind:
            return -(-(self.senders + self.receivers) // together[0])
        return -(-self.senders // together[0]) - (-self.receivers // together[1])

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
        graph = self.candidate.graph
        # The order of halves is the same whatever runs again, and however long sequences are, so many candidates share it.
        counts = _most_kept(replace(graph, recompute=(), later=(), slicing=graph.slicing.in_units), self.candidate.ordering.alive)
        memories = [self._memory(kept, *position) for kept, position in zip(counts, self._contents(), strict=True)]
        pp = self.candidate.fold.pp
        attention, experts = (max(side, key=attrgetter("total")) for side in (memories[:pp], memories[pp:]))
        return attention, experts

    def held(self) -> tuple[float, float]:
        """Return the bytes of parameters, gradients and optimizer's state of the fullest rank of attention, and of the experts.

        No schedule needs less memory.
        """
        held, pp = [sum(self._parameters(*position)) for position in self._contents()], self.candidate.fold.pp
        return max(held[:pp]), max(held[pp:])

    def _parameters(self, rank: RankCosts, content: Content, family: str) -> Held:
        sides = rank.elements(content).items()
        held = {name: count if (name == "edp") == (family == "edp") else 0.0 for name, count in sides}
        hidden = {name: count for name, count in elements(rank, content).items() if held[name]}
        job = self.candidate.job
        return parameters(self.candidate.fold, rank.zero, rank.device.bytes, held, hidden, job.software, job.offload)

    def _memory(self, counts: Counter[int], rank: RankCosts, content: Content, family: str) -> Memory:
        candidate, graph = self.candidate, self.candidate.graph
        held = self._parameters(rank, content, family)
        ordering = candidate.ordering
        pieces = len(cut_of(ATTENTION if family == "dp_cp" else EXPERT, graph.slicing))
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
        """Return the bytes that a half of a block keeps from forward to backward.

        While a further token's block is kept, so is the gradient from the head before it.
        """
        again, sliced = self.candidate.ordering.recompute, slices_of(self.candidate.graph.slicing)
        moe, model, fold = block.moe, rank.model, self.candidate.fold
        tokens = rank.job.seq_len / (fold.cp * fold.tp) * rank.sequences
        waiting = tokens * model.hidden * rank.device.bytes * block.mtp
        if not moe:
            return block_activations(rank, block, again, sliced) + waiting if family == "dp_cp" else 0.0
        places = fold.ep_across
        rows = tokens * ranks_of_a_token(model, places)
        if family == "dp_cp":
            # A sum without weights keeps only which ranks have a row. The router keeps the token of each row, and of each token
            # at most a row per rank instead of a row per expert.
            indices = tokens * (places - INT64 * model.topk + INT64 * min(model.topk, places)) + rows * INT64
            elsewhere = expert_activations(rank, block, again) + combined_rows(rank, block)
            return block_activations(rank, block, again, sliced) - elsewhere + indices + waiting
        if EXPERT in again:
            return rows * (model.hidden * rank.device.bytes + model.topk * (FLOAT32 + INT64))  # with their weights and experts
        if rank.travelling.inside:
            return expert_activations(rank, block) + passed_on(rank)
        summed = summed_rows(rank, block, tokens * model.topk * rank.overload, rows * rank.overload)
        return expert_activations(rank, block) + fold.etp * summed

    def _operands(self, rank: RankCosts, block: BlockSpec, family: str) -> float:
        """Return the bytes that the gradients of a half's weights are computed from."""
        experts = expert_operands(rank, block) if block.moe else 0.0
        return operands(rank, block) - experts if family == "dp_cp" else experts


def _on_shared_nodes(fold: Fold, ranks: tuple[int, int]) -> tuple[Fold, Fold]:
    """Return the fold as the links of attention and of the experts know it, if nodes have so many ranks of each side.

    All positions of a cell are on a node, so data-parallel places are the outermost axis. Ranks of each side count from the
    beginning of a node.
    """
    inside = replace(fold, order="tp-cp-pp-dp", moe_order="etp-ep-pp-edp")
    return inside, replace(inside, offset=-fold.attention_ranks % ranks[1])


def _with_ranks(device: Device, ranks: int) -> Device:
    """Return the device on nodes that have so many ranks."""
    return replace(device, hardware=device.hardware.model_copy(update={"gpus_per_node": ranks}))


@lru_cache(maxsize=64)
def _most_kept(graph: StepGraph, alive: int | None) -> list[Counter[int]]:
    """Return `most_kept` of every position's half."""
    (orders, _), attention = orders_of_halves(graph, alive), {place.attention for place in graph.at}
    return [most_kept(order, ATTENTION if position in attention else EXPERT) for position, order in enumerate(orders)]


def most_kept(order: Iterable[Op], kind: str) -> Counter[int]:
    """Return, by block, how many ops of a kind have run forward and not backward, at the moment when most have.

    Gradients of weights that a backward has left (W) keep their operands, which count apart.
    """
    now, most, peak = Counter[int](), Counter[int](), 0
    for op in order:
        if op.kind == kind and op.direction in ("F", "B"):
            now[op.layer] += 1 if op.direction == "F" else -1
            if (total := now.total()) > peak:
                most, peak = Counter(now), total
    return most
