"""The predicted time of a step: the lists that training would run, simulated in parts.

The lists of a pipeline have stages as their smallest pieces. So the prediction first simulates the inside of a stage, once
for each form of stage and direction (if blocks drain, once for each kind of block and direction). Then it runs the
pipeline's lists with these times. If ops of different stages do not overlap, the result is the same as a simulation of the
whole graph; a test checks this.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from foldray.blueprint import BlockSpec
from foldray.kinds import HANDOVER, OP_KINDS, STAGE
from foldray.planner.bounds import cut_of, ends_of, hop_bounds, ops_of_pass, stage_bounds, step_bound
from foldray.planner.candidate import Candidate
from foldray.planner.costs import OpWork, pieces_of
from foldray.planner.device import Device
from foldray.planner.hardware import Hardware
from foldray.planner.layout import Content, StageForm
from foldray.planner.lists import StagePass, pipeline_list
from foldray.planner.memo import Update
from foldray.planner.passes import Passes, delay
from foldray.planner.shares import Shares, Stretch
from foldray.planner.updates import least_behind, seconds_behind, stage_updates
from foldray.schedule import Direction, StepGraph, gathers

_PERIODS = 2  # simulated rounds of a pipeline; every further round takes as long as the one before
BOTH: tuple[Direction, ...] = ("F", "B")


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


def predict(candidate: Candidate, hardware: Hardware, changed: Mapping[str, float] | None = None) -> Prediction:
    """Predict the step time of one candidate.

    Args:
        candidate: the candidate.
        hardware: the cluster.
        changed: constants that replace those of the files.

    Raises:
        UserError: the hardware has no peak for the job's dtype.
    """
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
        self._reduction, self._crowding = candidate.ordering.reduction, self.rank.device.share["crowding"]
        self._passes = Passes(candidate, self.rank)

    @property
    def graph(self) -> StepGraph:
        """The graph of the step that training would run, without reductions."""
        return self.candidate.graph

    def prediction(self) -> Prediction:
        """Return the prediction, from the position that ends last."""
        job, device, world = self.candidate.job, self.rank.device, self.candidate.fold.world_size
        shares = self._shares(max(range(self.layout.pp), key=self._end))
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
        return seconds_behind(self.rank, self.layout, self._reduction)

    # Bounds.

    def bound(self) -> float:
        """Return a lower bound of the seconds of the step, from the bounds of its stages."""
        return self._bound(stage_bounds(self.rank, self.layout.contents, self.pieces))

    def simulated_bound(self) -> float:
        """Return a lower bound of the seconds of the step, from the simulated stages."""
        return self._bound([sum(self._stretch(form, direction).seconds for direction in BOTH) for form in self.layout.forms])

    def _bound(self, stages: Sequence[float]) -> float:
        rank, candidate = self.rank, self.candidate
        behind = least_behind(rank, self.layout.positions, self._reduction)
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
        found = [pipeline_list(replace(graph, micro_batches=count)).backward_ends(seconds) for count in counts]
        # In steady state, every round of micro-batches takes the same time.
        rounds = (graph.micro_batches - counts[-1]) / graph.pp
        ends = [
            [late + rounds * (late - early) for early, late in zip(*own, strict=True)]
            for own in zip(found[0], found[-1], strict=True)
        ]
        return [_Position(max(own), own) for own in ends]

    @cached_property
    def _seconds(self) -> dict[StagePass, float]:
        """Seconds of every stage's pass for one micro-batch, and of the handover after it."""
        form_of, found, hops = self.layout.form_of, dict[StagePass, float](), dict[tuple[int, int], float]()
        for direction, onwards in zip(BOTH, (1, -1), strict=True):
            passes = [self._stretch(form, direction).seconds for form in self.layout.forms]
            hops.clear()
            for number, form in enumerate(form_of):
                found[StagePass(STAGE, direction, number)] = passes[form]
                if 0 <= number + onwards < len(form_of):
                    ends = form, form_of[number + onwards]
                    if ends not in hops:
                        hops[ends] = self._hop(direction, *(self.layout.forms[end] for end in ends))
                    found[StagePass(HANDOVER, direction, number)] = hops[ends]
        return found

    def _hop(self, direction: Direction, sender: StageForm, receiver: StageForm) -> float:
        """Return the seconds from the end of a pass to the start of the same pass of the neighbour."""
        if not self.pieces.several:
            return self.rank.handover.seconds
        given, taken = self._passes.of(sender, direction).given, self._passes.of(receiver, direction).taken
        return delay(given, taken, lambda tokens: self.rank.handover_of(tokens).seconds)

    def _stretch(self, form: StageForm, direction: Direction) -> Stretch:
        return self._passes.of(form, direction).stretch

    def _end(self, place: int) -> float:
        """Return the seconds until a position has updated its weights."""
        reduced = sum(exposed + self._crowding * (each.reduce - exposed) for each, exposed in self.reductions(place))
        return self.pipeline[place].end + reduced + self.behind[place]

    def reductions(self, place: int) -> Iterator[tuple[Update, float]]:
        """Yield every update of a position's stages, with the exposed seconds of its reduction.

        Gradients are reduced stage by stage, and within a stage block by block, as soon as backward has them (`end`: after
        the last backward). Seconds after the end of the last backward are exposed.
        """
        end, stage_ends = self.pipeline[place]
        at_end, free = self._reduction.kind == "end", 0.0
        for ready, number in sorted(zip(stage_ends, self.layout.forms_at[place], strict=True)):
            form = self.layout.forms[number]
            updates, blocks = stage_updates(self.rank, self.layout.contents[number], self._reduction), max(1, len(form.blocks))
            last = end if at_end else ready
            first = last if at_end else ready - self._stretch(form, "B").seconds * (blocks - 1) / blocks
            before, whole = free, sum(each.reduce for each in updates)
            free = max(max(free, first) + whole, last + whole / blocks)
            exposed = max(0.0, free - max(end, before))
            yield from ((each, exposed * each.reduce / whole if whole else 0.0) for each in updates)

    # The breakdown of the time.

    def _shares(self, place: int) -> Shares:
        """Return all seconds of one position: its stages, waiting (bubble), reductions and optimizer."""
        found, own = Shares(), Stretch(0.0, 0.0)
        for number, count in Counter(self.layout.forms_at[place]).items():
            for direction in BOTH:
                form, rounds = self.layout.forms[number], count * self.candidate.micro_batches
                work, stretch = self._work_shares(form, direction), self._stretch(form, direction)
                exposed = stretch.seconds - stretch.crowding - self._passes.computed(form, direction)
                found += (work + self._exposed(work, exposed)) * rounds
                own += stretch.times(rounds)
        forms = [self.layout.forms[number] for number in self.layout.forms_at[place]]
        sent = sum((not form.last) + (not form.first) for form in forms) * self.candidate.micro_batches
        named = [("bubble", self.pipeline[place].end - own.seconds), ("crowding", own.crowding)]
        named.append(("pp", sent * self.rank.handover.seconds))  # handovers that nothing hides are part of the bubble
        for each, exposed in self.reductions(place):
            named += [
                (f"exposed_{each.family}", exposed + each.gather),
                ("crowding", self._crowding * (each.reduce - exposed)),
                ("optimizer", each.optimizer),
                (each.family, each.reduce + each.gather),
            ]
        return found + Shares.of(named)

    def _exposed(self, work: Shares, seconds: float) -> Shares:
        """Return the exposed seconds of a pass by what travels: rows, and keys and values if they are gathered by slices.

        The seconds are divided in proportion to all travel of the pass.
        """
        families = ("ep", "cp") if gathers(self.pieces.slicing, self.candidate.fold.cp) else ("ep",)
        travels = work.of_groups()
        whole = sum(travels.get(family, 0.0) for family in families)
        parts = [(family, travels.get(family, 0.0) / whole if whole else float(family == "ep")) for family in families]
        return Shares.of([(f"exposed_{family}", seconds * part) for family, part in parts])

    def _work_shares(self, form: StageForm, direction: str) -> Shares:
        """Return the seconds of one pass of a stage, by what its ops are busy with."""
        slicing, back, found = self.pieces.slicing, direction == "B", Shares()
        content = Content.of([form])
        ops: list[tuple[str, tuple[int, ...], bool, int, BlockSpec | None]] = []
        ops += [(kind, cut, back, 1, None) for kind, cut in ends_of(content, slicing)]
        for block, count in content.blocks:
            kinds = ops_of_pass(self.rank, block, back, self.pieces)
            ops += [(kind, cut_of(kind, slicing), way, count, block) for kind, way in kinds]
        for kind, cut, way, count, of in ops:
            for tokens in pieces_of(cut):
                found += self.rank.price(kind, way, tokens, of).shares(OP_KINDS[kind].travels is not None) * count
        return found * self.pieces.batch_degree
