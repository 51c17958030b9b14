"""The costs of a candidate's ops, from those of its rank (`rank.py`)."""

from __future__ import annotations

from foldray.clock import COMPUTE, Issue, LaneSeconds
from foldray.costs.activations import moved_bytes, slices_of
from foldray.costs.candidate import Candidate
from foldray.costs.device import Device
from foldray.costs.memo import Memo
from foldray.costs.rank import RankCosts
from foldray.costs.shares import Price, Work
from foldray.graph import Op
from foldray.kinds import COPY, HANDOVER, OFFLOAD, REDUCE


class OpWork:
    """The costs of a candidate's ops. Candidates may share the costs of a rank (`rank`), or their tables (`memo`)."""

    def __init__(self, candidate: Candidate, device: Device, rank: RankCosts | None = None, memo: Memo | None = None):
        self.candidate, self._prices = candidate, dict[tuple[str, str, int, int], Price]()
        sequences = candidate.micro_batch / candidate.ordering.batch_degree
        self.rank = rank or RankCosts(candidate.job, candidate.fold, device, sequences, candidate.zero, memo)

    def cost(self, op: Op) -> LaneSeconds:
        """Return the lanes and seconds of an op, for the clock."""
        return self._price(op).lanes

    @property
    def issue(self) -> Issue | None:
        """What hosts need to issue ops, for the clock; None if they need no time."""
        if not self.rank.device.share["issue"]:
            return None
        return Issue(lambda op: self.rank.issue(self._price(op)), lambda op: self.rank.waits(op.kind, op.direction == "B"))

    def longest(self, op: Op) -> LaneSeconds:
        """Return the cost of an op that lasts at least as long as its host needs to issue it.

        A search for a list, whose order is not known yet, cannot know either where the host is ahead.
        """
        price = self._price(op)
        lacking = self.rank.lacking(price)
        return Price.of([*price.works, Work(COMPUTE, "launch", lacking)]).lanes if lacking else price.lanes

    def work(self, op: Op) -> tuple[Work, ...]:
        return self._price(op).works

    def _price(self, op: Op) -> Price:
        """Return the price of an op, which is the same in every micro-batch."""
        if (of_every := op[:-1]) not in self._prices:
            self._prices[of_every] = self._priced(op)
        return self._prices[of_every]

    def _priced(self, op: Op) -> Price:
        if op.kind == HANDOVER:
            # Links are duplex: a position sends and receives at once. So a handover waits only for handovers of its own channel.
            graph = self.candidate.graph
            return Price.of([self.rank.handover_of(len(graph.tokens(op)))._replace(lane=str(graph.channel(op)))])
        if op.kind == REDUCE:
            return Price.of([self.rank.reduce(self.candidate.reducing.chunk(op))])
        if op.kind == COPY:
            return Price.of([self.rank.copy(op.direction == "B")])
        if op.kind == OFFLOAD:
            return Price.of([self._moved(op)])
        return self._computed(self.rank, op)

    def _computed(self, rank: RankCosts, op: Op) -> Price:
        """Return the price of an op on a rank with these costs. Gradients of weights may be an op of their own (W).

        One such op of several pieces adds to the sums piece by piece, as the runtime does.
        """
        graph, block, weights = self.candidate.graph, self.candidate.graph.block(op), op.direction == "W"
        pieces = graph.left_by(op) if weights else (op,)
        prices = [rank.price(op.kind, piece.direction == "B", graph.tokens(piece), block) for piece in pieces]
        if weights or (op.direction == "B" and op.kind in graph.later):
            return Price.of(work for price in prices for work in price.works if work.weights == weights)
        return prices[0]

    def _moved(self, op: Op) -> Work:
        """Return the work to bring to the host what ops of a kind keep at a block, or back. Each direction has a lane."""
        graph, block = self.candidate.graph, self.candidate.graph.blocks[op.layer]
        sliced = slices_of(self.candidate.pieces.slicing)
        bytes_ = moved_bytes(self.rank, block, graph.offloaded[op.part], sliced)
        return Work(str(graph.channel(op)), "host", self.rank.device.host_copy(bytes_))
