"""The predicted time of a step: the lists that training would run, simulated in parts.

The lists of a pipeline have stages as their smallest pieces. So the prediction first simulates the inside of a stage, once
for each form of stage and direction (if blocks drain, once for each kind of block and direction). Then it runs the
pipeline's lists with these times. If ops of different stages do not overlap, the result is the same as a simulation of the
whole graph; a test checks this.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import NamedTuple

from foldray.blueprint import BlockSpec
from foldray.costs.activations import moved_bytes, slices_of
from foldray.costs.bounds import cut_of, ends_of, hop_bounds, ops_of_pass, stage_works, step_bound
from foldray.costs.candidate import Candidate, Content, StageForm
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware
from foldray.costs.memo import Table, shared
from foldray.costs.ops import OpWork
from foldray.costs.passes import BOTH, Passes, StagePass, backward_ends, delay
from foldray.costs.rank import pieces_of
from foldray.costs.shares import Shares, Stretch
from foldray.costs.updates import WHOLE, Departure, least_behind, stage_updates
from foldray.graph import Direction, Reduction, gathers
from foldray.kinds import ATTENTION, HANDOVER, OP_KINDS, STAGE

_PERIODS = 2  # simulated rounds of a pipeline; every further round takes as long as the one before


class Prediction(NamedTuple):
    """The predicted time of a step.

    Args:
        seconds: seconds of an optimizer step.
        breakdown: seconds by name (`shares.STEP`) of the rank that ends last; they sum to `seconds`.
        traffic: seconds of that rank's communication by group family, hidden or not.
        mfu_causal, mfu_full: model FLOPs over peak, from 0 to 1. Attention is counted causally, or as full squares.
    """

    seconds: float
    breakdown: dict[str, float]
    traffic: dict[str, float]
    mfu_causal: float
    mfu_full: float


class _Position(NamedTuple):
    """Seconds until a pipeline position ends its last backward, and until each of its stages ends its last backward."""

    end: float
    stage_ends: Sequence[float]


class Reduced(NamedTuple):
    """The reductions of a pipeline position.

    Args:
        stages: (number of the form, exposed seconds) of every stage.
        exposed: exposed seconds of all stages.
        whole: seconds of all reductions.
        delayed: seconds by which reductions of later positions delay this one.
    """

    stages: list[tuple[int, float]]
    exposed: float
    whole: float
    delayed: float


def predict(candidate: Candidate, hardware: Hardware, changed: Mapping[str, float] | None = None) -> Prediction:
    """Predict the step time of one candidate."""
    return Step(candidate, OpWork(candidate, Device.of(candidate.job, hardware, changed))).prediction()


def straggling(world_size: int, device: Device) -> float:
    """Return the seconds of waiting for the slowest node, per second of a step without this wait."""
    nodes = max(1.0, world_size / device.hardware.gpus_per_node)
    return device.share["straggling"] * math.log2(nodes)


class Step:
    """The predicted step of one candidate. It shares the simulations of stages with candidates that have the same memo."""

    def __init__(self, candidate: Candidate, work: OpWork):
        self.candidate, self.work, self.rank = candidate, work, work.rank
        self.layout, self.pieces = candidate.layout, candidate.pieces
        self._crowding = self.rank.device.share["crowding"]
        self._passes = Passes(candidate, self.rank)
        self._known = Table()

    def fastest(self, reductions: Sequence[Reduction]) -> Reduction:
        """Return the reduction with which the step is shortest; of equal ones, the first."""
        return min(reductions, key=lambda reduction: max([self._end(place, reduction) for place in range(self.layout.pp)]))

    def prediction(self, reduction: Reduction | None = None) -> Prediction:
        """Return the prediction, from the position that ends last, for a reduction or, if None, for that of the candidate."""
        job, device, world = self.candidate.job, self.rank.device, self.candidate.fold.world_size
        reduction = reduction or self.candidate.ordering.reduction
        last = max(range(self.layout.pp), key=lambda place: self._end(place, reduction))
        shares = self._shares(last, reduction)
        waiting = math.fsum(shares.of_step().values()) * straggling(world, device)
        shares += Shares.of([("straggling", waiting)])
        seconds = math.fsum(shares.of_step().values())
        rate = seconds * world * device.peak
        return Prediction(seconds, shares.of_step(), shares.of_groups(), job.flops[0] / rate, job.flops[1] / rate)

    def passes(self) -> float:
        """Return the seconds until every position has ended its last backward, without reductions."""
        return max(position.end for position in self.pipeline)

    @cached_property
    def behind(self) -> list[float]:
        """For every position, seconds of its optimizer and of its gather of weights."""
        stages = [stage_updates(self.rank, content, WHOLE) for content in self.layout.contents]
        seconds = [sum([update.gather + update.optimizer for update in updates]) for updates in stages]
        return [sum([seconds[form] for form in forms]) for forms in self.layout.forms_at]

    @cached_property
    def copying(self) -> list[float]:
        """For every position, seconds of copies of experts that attention of their blocks does not hide."""
        exposed = [self._copied(content)[0] for content in self.layout.contents]
        return [sum(exposed[form] for form in forms) for forms in self.layout.forms_at]

    def _copied(self, content: Content) -> tuple[float, float]:
        """Return the exposed seconds and all seconds of copies of a stage's experts. They travel once in a step."""
        rank, exposed, whole = self.rank, 0.0, 0.0
        if rank.copied is None or rank.copied.copies is None:
            return exposed, whole
        for block, count in content.blocks:
            for back in (False, True) if block.moe else ():
                beside = sum(
                    rank.price(ATTENTION, back, tokens, block).seconds for tokens in pieces_of(self.pieces.slicing.attention)
                )
                seconds = rank.copy(back).seconds
                exposed += count * max(0.0, seconds - beside)
                whole += count * seconds
        return exposed, whole

    # Bounds.

    def simulated_bound(self) -> float:
        """Return a lower bound of the seconds of the step, from the simulated stages."""
        return self.bound([sum(self._stretch(form, direction).seconds for direction in BOTH) for form in self.layout.forms])

    def bound(self, stages: Sequence[float]) -> float:
        """Return a lower bound of the seconds of the step, from those of its stages."""
        rank, candidate = self.rank, self.candidate
        behind = least_behind(rank, self.layout.positions)
        hops = hop_bounds(rank, self.layout.contents, self.pieces, stages)
        least = step_bound(self.layout, candidate.micro_batches, stages, behind, hops)
        return least * (1 + straggling(candidate.fold.world_size, rank.device))

    # The pipeline.

    @cached_property
    def pipeline(self) -> list[_Position]:
        """Every position of the pipeline, without reductions."""
        graph, forms = self.candidate.pipeline, self.layout.forms
        if graph.pp == 1:
            end = graph.micro_batches * sum(self._stretch(form, direction).seconds for form in forms for direction in BOTH)
            return [_Position(end, [end])]
        seconds, some = self._seconds, _PERIODS * graph.pp
        counts = [graph.micro_batches]
        if graph.micro_batches > some + graph.pp and graph.full_rounds:
            counts = [some, some + graph.pp]
        simulated = [backward_ends(replace(graph, micro_batches=count), seconds) for count in counts]
        # In steady state, every round of micro-batches takes the same time.
        rounds = (graph.micro_batches - counts[-1]) / graph.pp
        ends = [
            [late + rounds * (late - early) for early, late in zip(*stages, strict=True)]
            for stages in zip(simulated[0], simulated[-1], strict=True)
        ]
        return [_Position(max(stage_ends), stage_ends) for stage_ends in ends]

    @cached_property
    def _seconds(self) -> dict[StagePass, float]:
        """Seconds of every stage's pass for one micro-batch, and of the handover after it."""
        form_of, forms, seconds = self.layout.form_of, self.layout.forms, dict[StagePass, float]()
        for direction, onwards in zip(BOTH, (1, -1), strict=True):
            passes = [self._stretch(form, direction).seconds for form in forms]
            hop = cache(partial(self._hop, direction))
            for number, form in enumerate(form_of):
                seconds[StagePass(STAGE, direction, number)] = passes[form]
                if 0 <= number + onwards < len(form_of):
                    seconds[StagePass(HANDOVER, direction, number)] = hop(form, form_of[number + onwards])
        return seconds

    def _hop(self, direction: Direction, sender: int, receiver: int) -> float:
        """Return the seconds from the end of a pass to the start of the same pass of the neighbour, by the numbers of forms."""
        if not self.pieces.several:
            return self.rank.handover.seconds
        forms = self.layout.forms
        given, taken = self._passes.of(forms[sender], direction).given, self._passes.of(forms[receiver], direction).taken
        return delay(given, taken, lambda tokens: self.rank.handover_of(tokens).seconds)

    def _stretch(self, form: StageForm, direction: Direction) -> Stretch:
        return self._passes.of(form, direction).stretch + Stretch(self._moved(form, direction)[0], 0.0, 0.0)

    def _moved(self, form: StageForm, direction: Direction) -> tuple[float, float]:
        """Return the exposed seconds and all seconds of what a pass of a stage brings to the host, or back.

        Beside each block travels what another one keeps. What the last two blocks keep leaves beside the next pass. The last
        block of all keeps it on the device.
        """
        if not self.pieces.offload:
            return 0.0, 0.0
        rank, sliced = self.rank, slices_of(self.pieces.slicing)
        beside = self._passes.of(form, direction).stretch.seconds / len(form.blocks)
        moved = [
            self.pieces.batch_degree * sum(moved_bytes(rank, block, kind, sliced) for kind in self.pieces.offload)
            for block in form.blocks[: len(form.blocks) - form.last]
        ]
        seconds = list(map(rank.device.host_copy, moved))
        waits = [max(0.0, each - beside) for each in seconds]
        return sum(waits[: len(form.blocks) - 2] if direction == "F" else waits), sum(seconds)

    def _exposed_rows(self, form: StageForm, direction: Direction) -> float:
        """Return the seconds of a pass in which rows travel, and nothing computes."""
        stretch = self._passes.of(form, direction).stretch
        return stretch.seconds - stretch.crowding - stretch.waiting - self._passes.computed(form, direction)

    def _end(self, place: int, reduction: Reduction) -> float:
        """Return the seconds until a position has updated its weights."""
        _, exposed, whole, delayed = self.reductions(reduction)[place]
        ends = self.pipeline[place].end + self.copying[place]
        return ends + delayed + exposed + self._crowding * (whole - exposed) + self.behind[place]

    @shared(attrgetter("_known"))
    def reductions(self, reduction: Reduction) -> list[Reduced]:
        """Return the reductions of every position.

        Gradients are reduced stage by stage, and within a stage block by block, as soon as backward has them (`end`: after
        the last backward). Seconds after the end of the last backward are exposed, and seconds that all-to-alls wait.
        """
        departures = [self._departure(number, reduction) for number in range(len(self.layout.forms))]
        positions, delayed = list[Reduced](), 0.0
        for place in reversed(range(self.layout.pp)):
            reduced, waited = self._reduced_at(place, departures, reduction.kind == "end", delayed)
            positions.append(reduced)
            delayed += waited
        return positions[::-1]

    def _reduced_at(self, place: int, departures: Sequence[Departure], at_end: bool, delayed: float) -> tuple[Reduced, float]:
        """Return the reductions of a position, and the seconds that its all-to-alls wait.

        The reductions of stages follow one another on the link. Those of a stage begin within its last backward, as far as the
        link is free (`Departure`), and the rest follows the backward.
        """
        end, stage_ends = self.pipeline[place]
        free, waited, whole, stages = 0.0, 0.0, 0.0, list[tuple[int, float]]()
        for last, number in sorted(zip(stage_ends, self.layout.forms_at[place], strict=True)):
            departure, before = departures[number], free
            within = min(departure.ready, departure.idle * min(departure.span, max(0.0, last - before)))
            free = max(before, end if at_end else last) + departure.whole - within
            wait = min(departure.waited * within, departure.most)
            stages.append((number, wait + max(0.0, free - max(end, before))))
            waited += wait
            whole += departure.whole
        return Reduced(stages, sum([exposed for _, exposed in stages]), whole, delayed), waited

    def _departure(self, number: int, reduction: Reduction) -> Departure:
        """Return how the gradients of a form of stage leave during its last backward. They are complete block by block."""
        form, content, rank = self.layout.forms[number], self.layout.contents[number], self.rank
        updates = stage_updates(rank, content, reduction)
        whole = sum([update.reduce for update in updates])
        if reduction.kind == "end" or not whole:
            return Departure(whole, 0.0, 0.0, 0.0, 0.0, 0.0)
        stretch, batch_degree, blocks = self._stretch(form, "B"), self.pieces.batch_degree, max(1, len(form.blocks))
        works = stage_works(rank, content, self.pieces)[True]
        exposed, whole_travel = self._exposed_rows(form, "B"), batch_degree * works.travels
        # Share of all-to-alls in which nothing computes.
        waits = min(1.0, max(0.0, exposed / whole_travel)) if whole_travel else 0.0
        travels = batch_degree * works.across
        share, lane = (blocks - 1) / blocks, rank.network.exchange("ep_across", 0).lane
        beside = sum([update.reduce for update in updates if update.lane == lane]) / whole
        idle = max(0.0, 1 - beside * travels / stretch.seconds)
        waited, most = beside, share * waits * travels
        if reduction.gives_way:
            messages = 2 * len(self.pieces.slicing.moe) * batch_degree * sum(block.moe is not None for block in form.blocks)
            waiting = max(waits * messages, blocks if self.candidate.ordering.backward.row.drains else 0)
            waited, most = beside / 2, waiting * max([update.reduce / update.chunks for update in updates]) / 2
        return Departure(whole, share * whole, share * stretch.seconds, idle, waited, most)

    # The breakdown of the time.

    def _shares(self, place: int, reduction: Reduction) -> Shares:
        """Return all seconds of one position: its stages, waiting (bubble), reductions and optimizer."""
        shares, passes = Shares(), Stretch(0.0, 0.0, 0.0)
        for number, count in Counter(self.layout.forms_at[place]).items():
            for direction in BOTH:
                form, rounds = self.layout.forms[number], count * self.candidate.micro_batches
                work, stretch = self._work_shares(form, direction), self._stretch(form, direction)
                exposed, (waited, moved) = self._exposed_rows(form, direction), self._moved(form, direction)
                to_host = Shares.of([("exposed_host", waited), ("host", moved)])
                shares += (work + self._exposed(work, exposed) + to_host) * rounds
                passes += stretch.times(rounds)
        forms = [self.layout.forms[number] for number in self.layout.forms_at[place]]
        sent = sum((not form.last) + (not form.first) for form in forms) * self.candidate.micro_batches
        reduced = self.reductions(reduction)[place]
        named = [
            ("bubble", self.pipeline[place].end + reduced.delayed - passes.seconds),
            ("crowding", passes.crowding),
            ("launch", passes.waiting),
            ("pp", sent * self.rank.handover.seconds),  # exposed handovers are part of the bubble
        ]
        for number in self.layout.forms_at[place]:
            exposed, whole = self._copied(self.layout.contents[number])
            named += [("exposed_ep", exposed), ("ep", whole)]
        for number, seconds in reduced.stages:
            updates = stage_updates(self.rank, self.layout.contents[number], reduction)
            share = seconds / (sum([update.reduce for update in updates]) or 1.0)
            for update in updates:
                exposed = share * update.reduce
                named += [
                    (f"exposed_{update.family}", exposed + update.gather),
                    ("crowding", self._crowding * (update.reduce - exposed)),
                    ("optimizer", update.optimizer),
                    (update.family, update.reduce + update.gather),
                ]
        return shares + Shares.of(named)

    def _exposed(self, work: Shares, seconds: float) -> Shares:
        """Return the exposed seconds of a pass by what travels: rows, and keys and values if they are gathered by slices.

        The seconds are divided in proportion to all travel of the pass.
        """
        inside = ("ep_inside",) if self.rank.travelling.inside else ()
        families = ("ep", *inside, *(("cp",) if gathers(self.pieces.slicing, self.candidate.fold.cp) else ()))
        travels = work.of_groups()
        whole = sum(travels.get(family, 0.0) for family in families)
        parts = [(family, travels.get(family, 0.0) / whole if whole else float(family == "ep")) for family in families]
        return Shares.of([(f"exposed_{family}", seconds * part) for family, part in parts])

    def _work_shares(self, form: StageForm, direction: str) -> Shares:
        """Return the seconds of one pass of a stage, by what its ops are busy with."""
        slicing, back, shares = self.pieces.slicing, direction == "B", Shares()
        content = Content.of([form])
        ops: list[tuple[str, tuple[int, ...], bool, int, BlockSpec | None]] = []
        ops += [(kind, cut, back, 1, None) for kind, cut in ends_of(content, slicing)]
        for block, count in content.blocks:
            kinds = ops_of_pass(self.rank, block, back, self.pieces)
            ops += [(kind, cut_of(kind, slicing), way, count, block) for kind, way in kinds]
        for kind, cut, way, count, of in ops:
            for tokens in pieces_of(cut):
                shares += self.rank.price(kind, way, tokens, of).shares(OP_KINDS[kind].travels is not None) * count
        return shares * self.pieces.batch_degree
