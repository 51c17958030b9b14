"""The simulated passes of stages: how long a pass takes, and when it hands over and takes over its pieces.

The lists of a stage's pass, and of a pipeline of whole stages, are compiled once.

If a stage works on several pieces, its handover travels piece by piece (`StepGraph.handovers`). The next stage can then begin
before this one has ended. In a pipeline of whole stages, this is a handover with a negative time (`delay`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from foldray.blueprint import BlockSpec
from foldray.clock import CompiledSchedule, Host, Span, length, merged
from foldray.costs.bounds import ends_of, stage_works
from foldray.costs.candidate import Candidate, Content, StageForm
from foldray.costs.rank import RankCosts, pieces_of
from foldray.costs.shares import Price, Stretch
from foldray.graph import Direction, Op, PipelineGraph, Reduction, StepGraph
from foldray.kinds import HANDOVER, HEAD
from foldray.orders import Ordering, Overlap, passes, place_handovers, stage_order

BOTH: tuple[Direction, ...] = ("F", "B")
LAGS = (1, 2, 3)
_FEW, _SMALL = 4, 0.02  # pieces; share of a pass
_BLOCKS = 4  # simulated blocks of a stage that does not drain; every further block takes as long as the one before


class Piece(NamedTuple):
    """The properties of an op that its cost depends on: the arguments of `RankCosts.price`."""

    kind: str
    back: bool
    tokens: range
    block: BlockSpec | None


class StageList(NamedTuple):
    """The compiled list of one pass of one stage.

    Args:
        compiled: the list. Its cost classes are `Piece`s.
        taken, given: the ops that take over pieces of another stage, and the ops that make the pieces that this stage hands
            over, as (number of the op, part of the micro-batch, tokens).
        before_head: number of ops before the head, if the head comes after all other ops.
    """

    compiled: CompiledSchedule[Piece]
    taken: tuple[tuple[int, int, range], ...]
    given: tuple[tuple[int, int, range], ...]
    before_head: int


@lru_cache(maxsize=2048)
def stage_list(graph: StepGraph, number: int, direction: Direction, overlap: Overlap) -> StageList:
    """Return the compiled list of one pass of one stage, for all parts of a micro-batch.

    Args:
        graph: the stage between its neighbours (`StepGraph.alone`).
    """

    def piece(op: Op) -> Piece:
        return Piece(op.kind, op.direction == "B", graph.tokens(op), graph.block(op))

    lists: list[tuple[Op, ...]] = [()] * graph.positions
    lists[number] = tuple(op for op in stage_order(graph, number, direction, overlap) if op.kind != HANDOVER)
    compiled = CompiledSchedule(graph, lists, piece, partial=True)

    def ends_at(kind: str, layer: int) -> tuple[tuple[int, int, range], ...]:
        wanted = kind, layer, direction
        ops = [(i, op) for i, op in enumerate(compiled.ops) if (op.kind, op.layer, op.direction) == wanted]
        return tuple((i, op.micro_batch, graph.tokens(op)) for i, op in ops)

    first, last = graph.layers[number][0], graph.layers[number][-1]
    ends = ends_at(graph.entry, first), ends_at(graph.output(last), last)
    taken, given = ends if direction == "F" else ends[::-1]
    return StageList(compiled, taken, given, sum(op.kind != HEAD for op in compiled.ops))


class Moment(NamedTuple):
    """The moment at which a pass takes over or hands over a piece.

    Args:
        part: number of the part of the micro-batch (`StepGraph.batch_degree`).
        tokens: the tokens of the piece.
        seconds: from the start of the pass until it takes the piece over, or from when it hands the piece over until its end.
    """

    part: int
    tokens: range
    seconds: float


class Pass(NamedTuple):
    """The time of one pass of a stage, and the pieces that it takes over and hands over, in their order."""

    stretch: Stretch
    taken: Sequence[Moment] = ()
    given: Sequence[Moment] = ()


def overlap_of(ordering: Ordering, direction: Direction) -> Overlap:
    """Return how pieces overlap in one direction."""
    return ordering.forward if direction == "F" else ordering.backward


def _orders(ordering: Ordering, direction: Direction) -> Ordering:
    """Return the ordering with defaults in all fields that do not change a pass of this direction."""
    overlap = overlap_of(ordering, direction)
    return ordering._replace(forward=overlap, backward=overlap, reduction=Reduction(), costs=None)


def with_best_lags(candidate: Candidate, rank: RankCosts) -> Candidate:
    """Return the candidate with the lags for which its passes are shortest, as training chooses them (`lag: auto`).

    Other lags than 1 are tried if there are more than `_FEW` pieces and the link makes a pass longer by more than `_SMALL`. For
    the models in `presets.py` over links of 0.25 to 4 times the speed of InfiniBand, other lags gain up to 4 % there, and
    nothing elsewhere.
    """
    for direction in BOTH:
        overlap = overlap_of(candidate.ordering, direction)
        if overlap.row.has_lag and candidate.pieces.slicing.degree > _FEW:
            lagged = [_with_overlap(candidate, direction, overlap._replace(lag=lag)) for lag in LAGS]
            candidate, passes = lagged[0], Passes(lagged[0], rank)
            least = sum([passes.computed(form, direction) for form in candidate.layout.forms])
            if passes.seconds(direction) > (1 + _SMALL) * least:
                candidate = min(lagged, key=lambda each: Passes(each, rank).seconds(direction))
    return candidate


def _with_overlap(candidate: Candidate, direction: Direction, overlap: Overlap) -> Candidate:
    ordering = candidate.ordering
    ordering = ordering._replace(forward=overlap) if direction == "F" else ordering._replace(backward=overlap)
    return replace(candidate, ordering=ordering)


class Passes:
    """The passes of a candidate's stages. Candidates with the same memo share them."""

    def __init__(self, candidate: Candidate, rank: RankCosts):
        self.candidate, self.rank, self.pieces = candidate, rank, candidate.pieces
        self._crowding = rank.device.share["crowding"]
        self._passes: dict[Direction, dict[tuple[StageForm, bool], Pass]] = {
            direction: rank.ops_table.setdefault((direction, _orders(candidate.ordering, direction)), {}) for direction in BOTH
        }

    def of(self, form: StageForm, direction: Direction) -> Pass:
        """Return one pass of a stage, for one micro-batch."""
        key, known = (form, True), self._passes[direction]
        if key not in known:
            drains = overlap_of(self.candidate.ordering, direction).row.drains
            known[key] = (self._drained if drains else self._streamed)(form, direction)
        return known[key]

    def seconds(self, direction: Direction) -> float:
        """Return the seconds of the passes of all forms of stages together."""
        return sum([self.of(form, direction).stretch.seconds for form in self.candidate.layout.forms])

    def computed(self, form: StageForm, direction: Direction) -> float:
        """Return the seconds of a pass's ops that compute, with the communication inside these ops (such as TP's)."""
        return self.pieces.batch_degree * stage_works(self.rank, Content.of([form]), self.pieces)[direction == "B"].computed

    def _drained(self, form: StageForm, direction: Direction) -> Pass:
        """Return a pass of a stage whose blocks run one after another. Embedding and head overlap with no all-to-all."""
        content, forward = Content.of([form]), direction == "F"
        stretch = self._ends(content, not forward)
        first, last = form.blocks[0], form.blocks[-1]
        for block, count in content.blocks:
            hands_over = forward and block == last and not form.last
            stretch += self._alone(block, direction, False).stretch.times(count - hands_over)
            if hands_over:
                stretch += self._alone(block, direction, True).stretch
        entry = self._alone(first, direction, forward and len(form.blocks) == 1 and not form.last)
        exit_ = self._alone(last, direction, forward and not form.last)
        return Pass(stretch, *((entry.taken, exit_.given) if forward else (exit_.taken, entry.given)))

    def _ends(self, content: Content, back: bool) -> Stretch:
        ends = ends_of(content, self.pieces.slicing)
        computed = sum(self.rank.totals(kind, cut, None)[back].total for kind, cut in ends)
        prices = [self.rank.price(kind, back, tokens, None) for kind, cut in ends for tokens in pieces_of(cut)]
        waiting = sum(map(self.rank.lacking, prices))
        return Stretch(computed + waiting, 0.0, waiting).times(self.pieces.batch_degree)

    def _alone(self, block: BlockSpec, direction: Direction, hands_over: bool) -> Pass:
        """Return a pass of one block, in a stage that has no embedding and no head.

        The block may be the last one of its stage, so that its output is handed over.
        """
        inside = direction == "F" and not hands_over and self.pieces.several
        key, known = (StageForm((block,), False, False), not inside), self._passes[direction]
        if key not in known:
            # The last of three stages hands nothing over, so its block is like a block inside a stage. The head is left out.
            known[key] = self._simulated(((block,),) * 3, 2 if inside else 1, direction, head=False)
        return known[key]

    def _streamed(self, form: StageForm, direction: Direction) -> Pass:
        """Return a pass of a stage whose blocks overlap. After `_BLOCKS` equal blocks, every block takes the same time."""
        blocks, first, last = form
        if len(blocks) > _BLOCKS and len(set(blocks)) == 1:
            fewer, most = (self.of(form._replace(blocks=blocks[:count]), direction) for count in (_BLOCKS - 1, _BLOCKS))
            stretch = most.stretch + (most.stretch + fewer.stretch.times(-1)).times(len(blocks) - _BLOCKS)
            # A stage never takes less than its computation and the time that this loses to crowding.
            seconds = max(stretch.seconds, self.computed(form, direction) + stretch.crowding)
            return most._replace(stretch=stretch._replace(seconds=seconds))
        # The stage is simulated between two others. There is no stage before the first, and no stage after the last.
        neighbour = ((blocks[0],),)
        stages = (*(() if first else neighbour), blocks, *(() if last else neighbour))
        return self._simulated(stages, 0 if first else 1, direction)

    def _simulated(self, stages: tuple[tuple[BlockSpec, ...], ...], number: int, direction: Direction, head: bool = True) -> Pass:
        """Return a pass of a stage, simulated alone; without `head`, up to the head, which must come after all other ops."""
        overlap = overlap_of(self.candidate.ordering, direction)
        order = stage_list(self.candidate.graph.alone(stages), number, direction, overlap)
        prices = [self.rank.price(*piece) for piece in order.compiled.classes]
        count = len(order.compiled.ops) if head else order.before_head
        starts, ends = (times[:count] for times in order.compiled.run([price.lanes for price in prices])[:2])
        seconds = max(ends)
        # At least one op runs at any time. If two run, one of them travels while the other computes, or both travel.
        lost, waiting = 0.0, 0.0
        if self._crowding:
            lost = self._crowding * (sum(ends) - sum(starts) - seconds - self._both_links(order, starts, ends))
        if self.rank.device.share["issue"]:
            starts, ends = self._issued(order, prices, count)
            waiting = max(0.0, max(ends) - seconds)
            seconds += waiting
        stretch = Stretch(seconds + lost, lost, waiting)
        if not self.pieces.several:
            return Pass(stretch)
        taken = [Moment(part, tokens, starts[i]) for i, part, tokens in order.taken]
        given = sorted([(ends[i], part, tokens) for i, part, tokens in order.given], key=itemgetter(0))
        return Pass(stretch, taken, [Moment(part, tokens, seconds - end) for end, part, tokens in given])

    def _both_links(self, order: StageList, starts: Sequence[float], ends: Sequence[float]) -> float:
        """Return the seconds in which rows travel between nodes and inside them."""
        if not self.rank.travelling.inside:
            return 0.0
        spans = [Span(starts[i], ends[i]) for i in range(len(ends)) if order.compiled.channel_of[i] >= 0]
        return sum(span.end - span.start for span in spans) - length(merged(spans))

    def _issued(self, order: StageList, prices: Sequence[Price], count: int) -> tuple[list[float], list[float]]:
        """Return starts and ends of a pass that follows one like it, with the host and the GPU on clocks of their own."""
        costs, seconds = [price.lanes for price in prices], [*map(self.rank.issue, prices)]
        host = Host(seconds, [self.rank.waits(piece.kind, piece.back) for piece in order.compiled.classes])
        times = order.compiled.run(costs, host)
        if (ahead := max(times.hosts) - max(times.ends[:count])) < 0:
            times = order.compiled.run(costs, host._replace(begin=ahead))
        return times.starts[:count], times.ends[:count]


def delay(given: Sequence[Moment], taken: Sequence[Moment], seconds: Callable[[int], float]) -> float:
    """Return the least seconds from the end of a pass to the start of the same pass of its neighbour; mostly negative.

    The neighbour starts at the earliest moment from which it never waits for a piece. The handover of a number of tokens takes
    `seconds`.
    """
    arrived, latest = -float("inf"), -float("inf")
    for piece in given:
        arrived = max(arrived, -piece.seconds) + seconds(len(piece.tokens))
        for user in taken:
            shared = user.tokens.start < piece.tokens.stop and piece.tokens.start < user.tokens.stop
            if shared and user.part == piece.part:
                latest = max(latest, arrived - user.seconds)
    return latest


class StagePass(NamedTuple):
    """The cost class of a `stage` op, or of the handover after it."""

    kind: str
    direction: str
    stage: int


def backward_ends(graph: PipelineGraph, seconds: Mapping[StagePass, float]) -> list[list[float]]:
    """Return, for every position and each of its stages, the seconds until the stage's last backward ends.

    Args:
        graph: a pipeline whose smallest pieces are stages.
        seconds: seconds of every pass of a stage for one micro-batch, and of every handover, from the end of the pass to
            the earliest start of the next one. They may be negative. Each direction has its own link.
    """
    compiled, last_backward = _pipeline_lists(graph)
    ends = compiled.one_pass([seconds[cost_class] for cost_class in compiled.classes]).ends
    return [[ends[i] for i in last] for last in last_backward]


@lru_cache(maxsize=64)
def _pipeline_lists(graph: PipelineGraph) -> tuple[CompiledSchedule[StagePass], list[list[int]]]:
    """Return the compiled lists, and the number of the last backward op of every stage at each position."""
    schedule = place_handovers(graph, tuple(passes(graph, place).ops for place in range(graph.pp)))
    compiled = CompiledSchedule(graph, schedule, lambda op: StagePass(op.kind, op.direction, op.layer))
    last = {op.layer: i for i, op in enumerate(compiled.ops) if op.kind != HANDOVER and op.direction == "B"}
    return compiled, [[last[stage] for stage in graph.stages_at(place)] for place in range(graph.pp)]
