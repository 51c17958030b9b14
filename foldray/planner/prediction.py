"""How long a step takes: the lists that training runs, on the clock, put together from their parts.

A pipeline's list treats stages as wholes, so the inside of a stage is simulated once for each kind of stage and direction, and
where blocks drain, once for each kind of block. Then the pipeline's list runs with these. Where nothing of one stage overlaps
another, that is the same as to simulate everything (`simulate` of the whole graph); a test holds it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from foldray.blueprint import BlockSpec, step_flops
from foldray.kinds import EXCHANGES
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
from foldray.schedule import PipelineGraph, StepGraph

_PERIODS = 2  # of a pipeline after which each takes as long as the one before
_BLOCKS = 4  # of a stage that streams, after which each takes as long as the one before


class Prediction(NamedTuple):
    """A step's time.

    Args:
        seconds: of an optimizer step.
        breakdown: of the rank that ends last; sums to `seconds`.
        traffic: total seconds by group family, of that rank.
        mfu_causal, mfu_full: model FLOPs over peak, attention counted causally, or as full squares.
    """

    seconds: float
    breakdown: dict[str, float]
    traffic: dict[str, float]
    mfu_causal: float
    mfu_full: float


class _Position(NamedTuple):
    """When a pipeline position ends its last backward, and when each of its stages does."""

    end: float
    stage_ends: Sequence[float]


def predict(candidate: Candidate, hardware: Hardware, changed: Mapping[str, float] | None = None) -> Prediction:
    """Predict one candidate's step on this hardware.

    Args:
        changed: constants that are other than the file's.
    """
    return Step(candidate, OpWork(candidate, Device.of(candidate.job, hardware, changed))).prediction()


def straggling(world_size: int, device: Device) -> float:
    """Share of a step's time that is spent on waiting for the slowest node."""
    nodes = max(1.0, world_size / device.hardware.gpus_per_node)
    return device.share["straggling"] * math.log2(nodes)


class Step:
    """One candidate's step, from its parts; those are shared with all candidates whose ranks have the same memo."""

    def __init__(self, candidate: Candidate, work: OpWork):
        self.candidate, self.work, self.rank = candidate, work, work.rank
        self.layout, self.pieces = candidate.layout, candidate.pieces
        self._reduction, self._crowding = candidate.ordering.reduction, self.rank.device.share["crowding"]
        self._stretches = self.rank.blocks.stages.setdefault(candidate.ordering, {})

    @property
    def graph(self) -> StepGraph:
        """The step that training would run."""
        return self.candidate.graph

    def prediction(self) -> Prediction:
        """The whole step: of the position that ends last."""
        job, device, world = self.candidate.job, self.rank.device, self.candidate.fold.world_size
        shares = self._shares(max(range(self.layout.pp), key=self._end))
        waiting = math.fsum(shares.of_step().values()) * straggling(world, device)
        shares += Shares.of([("straggling", waiting)])
        seconds = math.fsum(shares.of_step().values())
        rate = seconds * world * device.peak
        flops = [step_flops(job.model, job.seq_len, job.global_batch, causal) for causal in (True, False)]
        return Prediction(seconds, shares.of_step(), shares.of_groups(), flops[0] / rate, flops[1] / rate)

    def passes(self) -> float:
        """Seconds until every position has gone forward and backward; nothing is reduced yet."""
        return max(position.end for position in self.pipeline)

    @cached_property
    def behind(self) -> list[float]:
        """Seconds of every position behind its gradients."""
        return seconds_behind(self.rank, self.layout, self._reduction)

    # Bounds.

    def bound(self) -> float:
        """Seconds that the step takes at least, by what its stages compute and send."""
        return self._bound(stage_bounds(self.rank, self.layout.contents, self.pieces))

    def simulated_bound(self) -> float:
        """The same by stages that are simulated."""
        return self._bound([self.stage(form, "F").seconds + self.stage(form, "B").seconds for form in self.layout.forms])

    def _bound(self, stages: Sequence[float]) -> float:
        rank, candidate = self.rank, self.candidate
        behind = least_behind(rank, self.layout.contents_at, self._reduction)
        least = step_bound(self.layout, candidate.micro_batches, stages, behind, rank.handover.seconds)
        return least * (1 + straggling(candidate.fold.world_size, rank.device))

    # Stages.

    def stage(self, form: StageForm, direction: str) -> Stretch:
        """A stage's whole list, for one micro-batch of the pipeline's."""
        key = form, direction
        if key not in self._stretches:
            ordering = self.candidate.ordering
            drains = (ordering.forward if direction == "F" else ordering.backward).row.drains
            self._stretches[key] = (self._drained_stage if drains else self._streamed_stage)(form, direction)
        return self._stretches[key]

    def _drained_stage(self, form: StageForm, direction: str) -> Stretch:
        """Blocks one after another, beside them embedding and head, which nothing travels beside."""
        content = Content.of([form])
        ends = sum(
            self.rank.totals(kind, cut, direction == "B", None).total for kind, cut in ends_of(content, self.pieces.slicing)
        )
        found = Stretch(self.pieces.batch_degree * ends, 0.0)
        for block, count in content.blocks:
            # One block in the middle of three: no embedding, no head.
            alone = StageForm((block,), False, False)
            if (alone, direction) not in self._stretches:
                self._stretches[alone, direction] = self._simulated(((block,),) * 3, 1, direction)
            found += self._stretches[alone, direction].times(count)
        return found

    def _streamed_stage(self, form: StageForm, direction: str) -> Stretch:
        """Blocks that overlap: beyond some, each takes as long as the one before."""
        blocks, first, last = form
        if len(blocks) > _BLOCKS and len(set(blocks)) == 1:
            less, more = (self.stage(form._replace(blocks=blocks[:count]), direction) for count in (_BLOCKS - 1, _BLOCKS))
            found = more + (more + less.times(-1)).times(len(blocks) - _BLOCKS)
            # What computes, and what it loses, takes its time in any case.
            return found._replace(seconds=max(found.seconds, self._computed(form, direction) + found.crowding))
        # In the middle of three, or at the end where it has one.
        others = ((blocks[0],),)
        stages = (*(() if first else others), blocks, *(() if last else others))
        return self._simulated(stages, 0 if first else 1, direction)

    def _simulated(self, stages: tuple[tuple[BlockSpec, ...], ...], number: int, direction: str) -> Stretch:
        """A stage's list by itself, on the clock."""
        ordering = self.candidate.ordering
        overlap = ordering.forward if direction == "F" else ordering.backward
        order = stage_list(stages, number, direction, overlap, self.pieces.slicing, ordering.recompute, ordering.batch_degree)
        times = order.run([self.rank.price(*piece).lanes for piece in order.classes])
        seconds = max(times.ends)
        if not self._crowding:
            return Stretch(seconds, 0.0)
        # Something runs at any time; where two do, one travels beside what computes.
        beside = sum(end - start for start, end in zip(*times, strict=True)) - seconds
        return Stretch(seconds + self._crowding * beside, self._crowding * beside)

    def _computed(self, form: StageForm, direction: str) -> float:
        """Seconds of a stage's ops that compute, with the traffic inside of them."""
        return self.pieces.batch_degree * stage_work(self.rank, Content.of([form]), direction == "B", self.pieces).computed

    # The pipeline.

    @cached_property
    def pipeline(self) -> list[_Position]:
        """Every position of the pipeline, with nothing reduced yet."""
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
        # In steady state a round of micro-batches takes as long as the one before.
        rounds = (graph.micro_batches - counts[-1]) / graph.pp
        ends = [
            [late + rounds * (late - early) for early, late in zip(*own, strict=True)]
            for own in zip(found[0], found[-1], strict=True)
        ]
        return [_Position(max(own), own) for own in ends]

    def _end(self, place: int) -> float:
        """When a position is done."""
        reduced = sum(exposed + self._crowding * (each.reduce - exposed) for each, exposed in self.reductions(place))
        return self.pipeline[place].end + reduced + self.behind[place]

    def reductions(self, place: int) -> Iterator[tuple[Update, float]]:
        """Gradients' travel, stage by stage and in each block by block as backward has them, and how many seconds of it are
        exposed: behind the end of the last backward.
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

    # What the time goes into.

    def _shares(self, place: int) -> Shares:
        """All of one position: its stages, what it waits for, its gradients, its optimizer."""
        found, own = Shares(), Stretch(0.0, 0.0)
        for number, count in Counter(self.layout.forms_at[place]).items():
            for direction in "FB":
                form, rounds = self.layout.forms[number], count * self.candidate.micro_batches
                work, stretch = self._work_shares(form, direction), self.stage(form, direction)
                exposed = stretch.seconds - stretch.crowding - self._computed(form, direction)
                found += (work + Shares.of([("exposed_ep", exposed)])) * rounds
                own += stretch.times(rounds)
        named = [("bubble", self.pipeline[place].end - own.seconds), ("crowding", own.crowding)]
        for each, exposed in self.reductions(place):
            named += [
                (f"exposed_{each.family}", exposed + each.gather),
                ("crowding", self._crowding * (each.reduce - exposed)),
                ("optimizer", each.optimizer),
                (each.family, each.reduce + each.gather),
            ]
        return found + Shares.of(named)

    def _work_shares(self, form: StageForm, direction: str) -> Shares:
        """What the ops of a stage are busy with."""
        slicing, back, found = self.pieces.slicing, direction == "B", Shares()
        content = Content.of([form])
        ops: list[tuple[str, tuple[int, ...], bool, int, BlockSpec | None]] = []
        ops += [(kind, cut, back, 1, None) for kind, cut in ends_of(content, slicing)]
        for block, count in content.blocks:
            ops += [(kind, cut_of(kind, slicing), way, count, block) for kind, way in ops_of_pass(block, back, self.pieces)]
        for kind, cut, way, count, of in ops:
            for tokens in pieces_of(cut):
                found += self.rank.price(kind, way, tokens, of).shares(kind in EXCHANGES) * count
        return found * self.pieces.batch_degree
