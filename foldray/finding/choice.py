"""The choice among orders of a step (`schedule.kind: auto`), by the times of ops that steps in some of these orders took.

Nobody knows before how long a piece of an op takes: it starts as many kernels as the whole op, and computes less well. So the
choice begins with the order that cuts nothing, takes pieces for as fast as their share of tokens, and goes on to what then seems
fastest. Each step in another order says more about pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean

from foldray.clock import COMPUTE, Cost, OpCosts, simulate
from foldray.clock.recorded import fitted_line
from foldray.finding.found import first_list
from foldray.graph import Op, SliceCost, StepGraph
from foldray.kinds import ATTENTION, EMBED, HEAD
from foldray.orders import Ordering, step_schedule

_BLOCKS = 4  # simulated blocks of a stage; every further block takes as long as the one before
_PASSES = 2  # simulated micro-batches, of which one may compute while another one's rows travel
_MORE = 1.01  # slices are not all equally long
MOST_TRIED = 6  # before ways to sum gradients
FOUND = 0.98  # what a list that is searched takes, at most, of the fastest named order of the same pieces
LEAST_GAIN = 0.005  # of a step; what is expected to gain less is not tried
LEAST_HOPE = 0.02  # the same while pieces count as fast as their share of tokens, which nothing can beat
DOUBT = 0.1  # of a step; pieces of a length that no step has had may be so much faster than expected

Key = tuple[str, str, bool]
"""Kind and direction of ops, and whether their gradients of weights are ops of their own."""


class PieceTimes:
    """The seconds of ops by their tokens, from steps in which they had some numbers of tokens.

    An op takes a time to start, and the same time for every token, or, in attention, for every unit of `slice_cost`.
    """

    def __init__(self, slice_cost: SliceCost, ranks: int = 1):
        self._slice_cost, self._ranks = slice_cost, ranks  # that share a sequence
        self._timings: dict[Key, list[tuple[float, float]]] = {}  # (work, seconds)
        self._lines: dict[Key, tuple[float, float]] = {}
        self._most: dict[Key, float] = {}

    def learn(self, graph: StepGraph, costs: OpCosts) -> None:
        """Take the times of the ops of a step."""
        ops: dict[tuple[str, str, int], Op] = {(op.kind, op.direction, op.part): op for op in graph.ops()}
        for key, seconds in costs.seconds:
            op = ops[key]
            self._timings.setdefault(_key(graph, op), []).append((self._work(graph, op), seconds))
        self._lines = {key: fitted_line(timings) for key, timings in self._timings.items()}
        self._most = {key: max(work for work, _ in timings) for key, timings in self._timings.items()}

    def cost(self, graph: StepGraph) -> Cost:
        """Return the costs of a graph's ops. Embedding and head count nothing, for other stages may have them."""

        def cost(op: Op) -> tuple[tuple[str, float], ...]:
            channel = graph.channel(op)
            seconds = 0.0 if op.kind in (EMBED, HEAD) else self._seconds(graph, op)
            return ((channel[0] if channel else COMPUTE, seconds),)

        return cost

    def _seconds(self, graph: StepGraph, op: Op) -> float:
        key, work = _key(graph, op), self._work(graph, op)
        together = (op.kind, "B", False)
        if key[2] and together in self._lines and work > _MORE * self._most.get(key, 0.0):
            # Only shorter ones ran, which compute less well. Both ops have the products of the op that has run.
            return self._share(key, work) * self._on_line(together, work)
        return self._on_line(key, work)

    def _share(self, key: Key, work: float) -> float:
        """Return the share of one op in the time of a backward whose gradients of weights are an op of their own.

        Until both have run, it is a half: the products for the gradients of weights are as large as those for the inputs'.
        """
        kind, direction, _ = key
        ways = {way: self._on_line((kind, way, True), work) for way in "BW" if (kind, way, True) in self._lines}
        total = sum(ways.values(), 0.0)
        return ways[direction] / total if len(ways) == 2 and total else 1 / 2

    def _on_line(self, key: Key, work: float) -> float:
        startup, per_unit = self._lines.get(key, (0.0, 0.0))
        return startup + per_unit * work

    def _work(self, graph: StepGraph, op: Op) -> float:
        tokens = graph.tokens(op)
        if op.kind != ATTENTION:
            return len(tokens) / graph.batch_degree
        end, begin = (self._slice_cost.before(place * self._ranks) for place in (tokens.stop, tokens.start))
        return (end - begin) / graph.batch_degree


def _key(graph: StepGraph, op: Op) -> Key:
    return op.kind, op.direction, op.direction in "BW" and op.kind in graph.later


class Choice:
    """The choice of the fastest ordering. Numbers of orderings stand for them; that of the plain one, which cuts nothing, is 0.

    Orderings that sum gradients as the plain one does are simulated, and tried while there is hope. Then the fastest of them is
    tried with the other ways to sum gradients.

    Args:
        orderings: the orderings to choose from.
        graph_of: (ordering, number of micro-batches) → the graph of such a step at the stage of the first rank.
        passes: number of micro-batches of a step.
    """

    def __init__(
        self, orderings: Sequence[Ordering], graph_of: Callable[[Ordering, int], StepGraph], times: PieceTimes, passes: int
    ):
        self.orderings, self.times = orderings, times
        self._plain = [number for number, other in enumerate(orderings) if other.reduction == orderings[0].reduction]
        self._graph_of, self._passes = graph_of, min(passes, _PASSES)
        self.measured: dict[int, float] = {}
        self.predicted: dict[int, float] = {}

    def tell(self, number: int, seconds: float, graph: StepGraph, costs: OpCosts) -> None:
        """Take the seconds of a step in an ordering, with its graph and the times of its ops."""
        self.measured[number] = seconds
        self.times.learn(graph, costs)
        self.predicted = {}

    def ask(self) -> int | None:
        """Return the ordering to try next; None if no other one is expected to gain enough."""
        if not self.measured:
            return 0
        number = self._next_order()
        return self._next_reduction() if number is None else number

    def _next_order(self) -> int | None:
        """Return the ordering that is expected to gain most, if it gains enough; else the best one with as many pieces as no step
        has had, if it could gain."""
        untried = [number for number in self._plain if number not in self.measured]
        if not untried or len(self.measured) >= MOST_TRIED or not self.measured.keys() <= set(self._plain):
            return None
        expected, fastest = {number: self.expected(number) for number in untried}, min(self.measured.values())
        number = min(expected, key=expected.__getitem__)
        least = LEAST_GAIN if len(self.measured) > 1 else LEAST_HOPE
        if expected[number] < (1 - least) * fastest:
            return number
        known = set(map(self._pieces, self.measured))
        doubtful = [other for other in untried if len(known) > 1 and self._pieces(other) not in known]
        number = min(doubtful, key=expected.__getitem__, default=number)
        return number if doubtful and expected[number] < (1 + DOUBT) * fastest else None

    def _pieces(self, number: int) -> int:
        """Return the number of pieces that an ordering cuts a micro-batch into."""
        return self.orderings[number].degree * self.orderings[number].batch_degree

    def _next_reduction(self) -> int | None:
        """Return the fastest ordering with a way to sum gradients that is still to be tried."""
        plain = self.orderings[0].reduction
        fastest = self.orderings[next(number for number in self.ranked if number in self._plain)]
        same = [number for number, other in enumerate(self.orderings) if other._replace(reduction=plain) == fastest]
        return next((number for number in same if number not in self.measured), None)

    def expected(self, number: int) -> float:
        """Return the seconds of a step: those on the clock, times how much longer steps took than on the clock.

        Ops in pieces take longer beside each other than their times say, so steps with pieces go by such steps.
        """
        cut = self.orderings[number].slicing is not None
        alike = [other for other in self.measured if (self.orderings[other].slicing is not None) == cut] or list(self.measured)
        return self._simulated(number) * fmean(self.measured[other] / self._simulated(other) for other in alike)

    def _simulated(self, number: int) -> float:
        if number not in self.predicted:
            ordering = self.orderings[number]
            graph = self._graph_of(ordering, self._passes * ordering.batch_degree)
            alone = replace(graph.alone((graph.stages[0][:_BLOCKS],), graph.later), micro_batches=graph.micro_batches)
            cost = self.times.cost(alone)
            if ordering.forward.row.found:
                # The search begins with the fastest of these lists, and moves ops for as long as that makes it faster.
                named = min((self._simulated(other) for other in self._named_like(ordering)), default=inf)
                first = simulate(alone, first_list(alone, cost, ordering.ahead), cost).seconds
                seconds = min(first, FOUND * named)
            else:
                seconds = simulate(alone, step_schedule(alone, ordering.forward, ordering.backward), cost).seconds
            self.predicted[number] = seconds or inf
        return self.predicted[number]

    def _named_like(self, ordering: Ordering) -> list[int]:
        """Return the orderings of the same pieces that are not found."""
        pieces = ordering.slicing, ordering.batch_degree
        alike = [
            number for number in self._plain if pieces == (self.orderings[number].slicing, self.orderings[number].batch_degree)
        ]
        return [number for number in alike if not self.orderings[number].forward.row.found]

    @property
    def ranked(self) -> list[int]:
        """The measured orderings, the fastest first."""
        return sorted(self.measured, key=self.measured.__getitem__)
