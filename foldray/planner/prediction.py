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
from functools import cached_property
from typing import NamedTuple

from foldray.blueprint import BlockSpec
from foldray.kinds import OP_KINDS
from foldray.planner.bounds import cut_of, ends_of, ops_of_pass, stage_bounds, stage_work, step_bound
from foldray.planner.candidate import Candidate
from foldray.planner.costs import OpWork, pieces_of
from foldray.planner.device import Device
from foldray.planner.hardware import Hardware
from foldray.planner.layout import Content, StageForm
from foldray.planner.lists import pipeline_list, stage_list
from foldray.planner.memo import Update
from foldray.planner.shares import Shares, Stretch
from foldray.planner.updates import least_behind, seconds_behind, stage_updates
from foldray.schedule import PipelineGraph, StepGraph, gathers

_PERIODS = 2  # simulated rounds of a pipeline; every further round takes as long as the one before
_BLOCKS = 4  # simulated blocks of a stage that does not drain; every further block takes as long as the one before


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
        self._stretches = self.rank.blocks.stages.setdefault(candidate.ordering, {})

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
        return self._bound([self.stage(form, "F").seconds + self.stage(form, "B").seconds for form in self.layout.forms])

    def _bound(self, stages: Sequence[float]) -> float:
        rank, candidate = self.rank, self.candidate
        behind = least_behind(rank, self.layout.positions, self._reduction)
        least = step_bound(self.layout, candidate.micro_batches, stages, behind, rank.handover.seconds)
        return least * (1 + straggling(candidate.fold.world_size, rank.device))

    # Stages.

    def stage(self, form: StageForm, direction: str) -> Stretch:
        """Return the simulated time of one pass of a stage, for one micro-batch."""
        key = form, direction
        if key not in self._stretches:
            ordering = self.candidate.ordering
            drains = (ordering.forward if direction == "F" else ordering.backward).row.drains
            self._stretches[key] = (self._drained_stage if drains else self._streamed_stage)(form, direction)
        return self._stretches[key]

    def _drained_stage(self, form: StageForm, direction: str) -> Stretch:
        """Return the time of a stage whose blocks run one after another. Embedding and head overlap with no all-to-all."""
        content = Content.of([form])
        ends = sum(
            self.rank.totals(kind, cut, None)[direction == "B"].total for kind, cut in ends_of(content, self.pieces.slicing)
        )
        found = Stretch(self.pieces.batch_degree * ends, 0.0)
        for block, count in content.blocks:
            # The middle one of three stages has no embedding and no head.
            alone = StageForm((block,), False, False)
            if (alone, direction) not in self._stretches:
                self._stretches[alone, direction] = self._simulated(((block,),) * 3, 1, direction)
            found += self._stretches[alone, direction].times(count)
        return found

    def _streamed_stage(self, form: StageForm, direction: str) -> Stretch:
        """Return the time of a stage whose blocks overlap. After `_BLOCKS` equal blocks, every block takes the same time."""
        blocks, first, last = form
        if len(blocks) > _BLOCKS and len(set(blocks)) == 1:
            less, more = (self.stage(form._replace(blocks=blocks[:count]), direction) for count in (_BLOCKS - 1, _BLOCKS))
            found = more + (more + less.times(-1)).times(len(blocks) - _BLOCKS)
            # A stage never takes less than its computation and what this loses to crowding.
            return found._replace(seconds=max(found.seconds, self._computed(form, direction) + found.crowding))
        # The stage is simulated between two others. There is no stage before the first, and no stage after the last.
        others = ((blocks[0],),)
        stages = (*(() if first else others), blocks, *(() if last else others))
        return self._simulated(stages, 0 if first else 1, direction)

    def _simulated(self, stages: tuple[tuple[BlockSpec, ...], ...], number: int, direction: str) -> Stretch:
        """Return the time of one pass of a stage, simulated alone."""
        ordering = self.candidate.ordering
        overlap = ordering.forward if direction == "F" else ordering.backward
        slicing = self.pieces.slicing
        order = stage_list(
            stages, number, direction, overlap, slicing, ordering.recompute, ordering.batch_degree,
            gathers(slicing, self.candidate.fold.cp),
        )  # fmt: skip
        times = order.run([self.rank.price(*piece).lanes for piece in order.classes])
        seconds = max(times.ends)
        if not self._crowding:
            return Stretch(seconds, 0.0)
        # At least one op runs at any time. If two run, one of them travels while the other computes.
        beside = sum(end - start for start, end in zip(*times, strict=True)) - seconds
        return Stretch(seconds + self._crowding * beside, self._crowding * beside)

    def _computed(self, form: StageForm, direction: str) -> float:
        """Return the seconds of a stage's ops that compute, with the communication inside these ops (such as TP's)."""
        return self.pieces.batch_degree * stage_work(self.rank, Content.of([form]), direction == "B", self.pieces).computed

    # The pipeline.

    @cached_property
    def pipeline(self) -> list[_Position]:
        """Every position of the pipeline, without reductions."""
        graph, forms = self.candidate.pipeline, self.layout.forms
        seconds = [[self.stage(form, direction).seconds for form in forms] for direction in "FB"]
        if graph.pp == 1:
            end = graph.micro_batches * sum(map(sum, seconds))
            return [_Position(end, [end])]
        forward, backward = (tuple([own[form] for form in self.layout.form_of]) for own in seconds)
        some = _PERIODS * graph.pp
        counts = [graph.micro_batches]
        if graph.micro_batches > some + graph.pp and graph.full_rounds:
            counts = [some, some + graph.pp]
        found = [
            pipeline_list(PipelineGraph(graph.pp, count, graph.virtual_stages)).backward_ends(forward, backward, handover)
            for count in counts
            for handover in [self.rank.handover.seconds]
        ]
        # In steady state, every round of micro-batches takes the same time.
        rounds = (graph.micro_batches - counts[-1]) / graph.pp
        ends = [
            [late + rounds * (late - early) for early, late in zip(*own, strict=True)]
            for own in zip(found[0], found[-1], strict=True)
        ]
        return [_Position(max(own), own) for own in ends]

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
            first = last if at_end else ready - self.stage(form, "B").seconds * (blocks - 1) / blocks
            before, whole = free, sum(each.reduce for each in updates)
            free = max(max(free, first) + whole, last + whole / blocks)
            exposed = max(0.0, free - max(end, before))
            yield from ((each, exposed * each.reduce / whole if whole else 0.0) for each in updates)

    # The breakdown of the time.

    def _shares(self, place: int) -> Shares:
        """Return all seconds of one position: its stages, waiting (bubble), reductions and optimizer."""
        found, own = Shares(), Stretch(0.0, 0.0)
        for number, count in Counter(self.layout.forms_at[place]).items():
            for direction in "FB":
                form, rounds = self.layout.forms[number], count * self.candidate.micro_batches
                work, stretch = self._work_shares(form, direction), self.stage(form, direction)
                exposed = stretch.seconds - stretch.crowding - self._computed(form, direction)
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
