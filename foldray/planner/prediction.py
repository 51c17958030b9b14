"""How long a step takes: the lists that training runs, on the clock, put together from their parts.

A pipeline's list treats stages as wholes, so the inside of a stage is simulated once for each kind of stage and direction, and
where blocks drain, once for each kind of block. Then the pipeline's list runs with these. Where nothing of one stage overlaps
another, that is the same as to simulate everything (`simulate` of the whole graph); a test holds it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from foldray.blueprint import step_flops
from foldray.kinds import EMBED, HEAD
from foldray.planner.candidate import Candidate
from foldray.planner.costs import Hiding, OpWork
from foldray.planner.device import Device
from foldray.planner.hardware import Hardware
from foldray.planner.pipeline_clock import pipeline_ends
from foldray.planner.stage_clock import Alone, piece_alone, stage_alone
from foldray.schedule import COMPUTE, Ordering, PipelineGraph
from foldray.timeline.usage import length, merged

_PERIODS = 2  # of a pipeline after which each takes as long as the one before
_BLOCKS = 4  # of a stage that streams, after which each takes as long as the one before
_WAITING = ("exposed_ep", "idle")


class Part(NamedTuple):
    """A stretch of one rank's time.

    Args:
        seconds: from its first op's start to its last one's end.
        shares: what the seconds went into; they sum to them.
        traffic: seconds that each group family's collectives took, hidden or not.
    """

    seconds: float
    shares: Counter[str]
    traffic: Counter[str]

    def __add__(self, other: object) -> Part:
        assert isinstance(other, Part)
        return Part(self.seconds + other.seconds, self.shares + other.shares, self.traffic + other.traffic)

    def times(self, count: float) -> Part:
        def each(counts: Counter[str]) -> Counter[str]:
            return Counter({key: value * count for key, value in counts.items()})  # type: ignore[misc]

        return Part(self.seconds * count, each(self.shares), each(self.traffic))


NOTHING = Part(0.0, Counter(), Counter())


def _continued(less: Part, more: Part, blocks: int) -> Part:
    """A stage with so many blocks more than one that itself has one more than another."""

    def each(some: Counter[str], one_more: Counter[str]) -> Counter[str]:
        return Counter({key: one_more[key] + (one_more[key] - some[key]) * blocks for key in one_more if key not in _WAITING})

    shares = each(less.shares, more.shares)
    seconds = max(more.seconds + (more.seconds - less.seconds) * blocks, math.fsum(shares.values()))
    shares["exposed_ep"] = seconds - math.fsum(shares.values())  # type: ignore[assignment]
    return Part(seconds, shares, each(less.traffic, more.traffic))


class StageForm(NamedTuple):
    """All that stages differ in: their blocks, and whether they have the embedding, the head."""

    kinds: tuple[str, ...]
    first: bool
    last: bool


class _Behind(NamedTuple):
    """Seconds of a stage's parameters of one family behind backward: gradients', updated weights', the optimizer's."""

    family: str
    reduce: float
    back: float
    update: float


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


def hiding(ordering: Ordering) -> Hiding:
    """What of all-to-alls a schedule may hide."""
    if (ordering.slicing.degree if ordering.slicing else 1) * ordering.batch_degree == 1:
        return "nothing"
    drains = ordering.forward.row.drains and ordering.backward.row.drains
    return "within" if drains and ordering.batch_degree == 1 else "all"


def predict(candidate: Candidate, hardware: Hardware, changed: Mapping[str, float] | None = None) -> Prediction:
    """Predict one candidate's step on this hardware.

    Args:
        changed: constants that are other than the file's.
    """
    return Step(candidate, OpWork(candidate, Device.of(candidate.job, hardware, changed))).prediction()


class Step:
    """One candidate's step, from its parts; those are shared with all candidates whose ranks share what they know."""

    def __init__(self, candidate: Candidate, work: OpWork):
        self.candidate, self.work, self.rank, self.graph = candidate, work, work.rank, candidate.graph
        self._known: dict[object, Part] = self.rank.known.setdefault(("parts", self.rank.alike, candidate.ordering), {})
        last = len(self.graph.stages) - 1
        numbers: dict[StageForm, int] = {}
        self.forms = numbers.keys()  # all that differ
        self.form_of = [numbers.setdefault(StageForm(kinds, number == 0, number == last), len(numbers))
                        for number, kinds in enumerate(self.graph.stages)]  # fmt: skip

        pipeline = self.graph.pipeline
        self.forms_at = [[self.form_of[stage] for stage in pipeline.stages_at(place)] for place in range(pipeline.pp)]

    def prediction(self) -> Prediction:
        """The whole step: of the position that ends last."""
        job, device = self.candidate.job, self.rank.device
        found = self._position(max(range(self.graph.pp), key=self._ends))
        nodes = max(1.0, self.candidate.fold.world_size / device.hardware.gpus_per_node)
        waiting = found.seconds * device.share["straggling"] * math.log2(nodes)
        step = found + Part(waiting, Counter({"straggling": waiting}), Counter())  # type: ignore[dict-item]
        rate = step.seconds * self.candidate.fold.world_size * device.peak
        flops = [step_flops(job.model, job.seq_len, job.global_batch, causal) for causal in (True, False)]
        return Prediction(step.seconds, dict(step.shares), dict(step.traffic), flops[0] / rate, flops[1] / rate)

    def passes(self) -> float:
        """Seconds until every position has gone forward and backward; nothing is reduced yet."""
        return max(ended for ended, _ in self.pipeline)

    @cached_property
    def behind(self) -> list[float]:
        """Seconds of every position behind its gradients: its weights are updated, and where they are shared out, gathered
        again.
        """
        each = [sum(part.back + part.update for part in after) for after in self._after]
        return [sum(each[form] for form in forms) for forms in self.forms_at]

    def floor(self, seconds: Callable[[StageForm], float]) -> float:
        """Seconds that the step takes at least: a position computes its stages for every micro-batch, then updates its weights.
        Or: before that a stage of every position ahead of it goes forward, and behind it backward, until the first one updates.

        Args:
            seconds: of a stage forward and backward, at least.
        """
        found, before, first, rounds = 0.0, 0.0, 0.0, self.graph.pipeline.micro_batches
        own = [seconds(form) for form in self.forms]
        for place, (after, forms) in enumerate(zip(self.behind, self.forms_at, strict=True)):
            computed = rounds * sum(own[form] for form in forms)
            first = after if place == 0 else first
            found = max(found, computed + max(before + first, after))
            before += own[forms[0]] + 2 * self._handover
        return found

    def least(self, form: StageForm) -> float:
        """Seconds of a stage, at least: all that it computes, or all that travels, if that is more."""
        ordering = self.candidate.ordering
        return ordering.batch_degree * sum(
            count * sum(self.rank.block_floor(kind, ordering.recompute, self.graph.slicing, hiding(ordering)))
            for kind, count in Counter(form.kinds).items()
        )

    def simulated(self, form: StageForm) -> float:
        """Seconds of a stage."""
        return self.stage(form, "F").seconds + self.stage(form, "B").seconds

    # Stages.

    def stage(self, form: StageForm, direction: str) -> Part:
        """A stage's whole list, for one micro-batch of the pipeline's."""
        if (form, direction) not in self._known:
            overlap = getattr(self.candidate.ordering, "forward" if direction == "F" else "backward")
            make = self._drained if overlap.row.drains else self._stream
            self._known[form, direction] = make(form, direction)
        return self._known[form, direction]

    def _drained(self, form: StageForm, direction: str) -> Part:
        """A stage of blocks one after another."""
        found = sum((self._block(kind, direction).times(count) for kind, count in Counter(form.kinds).items()), NOTHING)
        ends = [(EMBED, form.first, 0), (HEAD, form.last, len(self.graph.blocks) - 1)]
        return sum((self._piece(kind, direction, layer) for kind, there, layer in ends if there), found)

    def _stream(self, form: StageForm, direction: str) -> Part:
        """A stage that does not drain between its blocks: beyond some, each takes as long as the one before."""
        kinds, first, last = form
        if len(kinds) > _BLOCKS and len(set(kinds)) == 1:
            less, more = (self.stage(form._replace(kinds=kinds[:count]), direction) for count in (_BLOCKS - 1, _BLOCKS))
            return _continued(less, more, len(kinds) - _BLOCKS)
        # In the middle of three, or at the end where it has one.
        others = ((kinds[0],),)
        stages = (*(() if first else others), kinds, *(() if last else others))
        return self._simulated(stages, 0 if first else 1, direction)

    def _piece(self, kind: str, direction: str, layer: int) -> Part:
        """Embedding or head."""
        graph = self.graph
        key = (
            "piece",
            kind,
            direction,
            self.rank.traits[kind],
            graph.slicing,
            graph.recompute,
            graph.batch_degree,
            graph.output(layer),
        )
        if key not in self.rank.known:
            self.rank.known[key] = self._accounted(piece_alone(graph, kind, direction, layer))
        return self.rank.known[key]

    def _block(self, kind: str, direction: str) -> Part:
        """One block that drains, by itself."""
        key = kind, direction
        if key not in self._known:
            # In the middle of three: no embedding, no head.
            self._known[key] = self._simulated(((kind,),) * 3, 1, direction)
        return self._known[key]

    def _simulated(self, stages: tuple[tuple[str, ...], ...], number: int, direction: str) -> Part:
        """A stage's list by itself."""
        graph, ordering = self.graph, self.candidate.ordering
        overlap = ordering.forward if direction == "F" else ordering.backward
        how = graph.slicing, graph.recompute, graph.batch_degree
        return self._accounted(stage_alone(stages, number, direction, overlap, *how))

    def _accounted(self, alone: Alone) -> Part:
        """Where a list's time goes: into what ops compute, and for the rest into what is waited for."""
        work = [self.rank.of(*piece) for piece in alone.pieces]
        spans = alone.spans([[(lane, seconds) for lane, _, seconds in each] or [(COMPUTE, 0.0)] for each in work])
        shares: Counter[str] = Counter()
        traffic: Counter[str] = Counter()
        computing = []
        for works, span, travels in zip(work, spans, alone.travels, strict=True):
            for lane, what, seconds in works:
                if lane != COMPUTE:
                    traffic[what] += seconds  # type: ignore[assignment]
                if not travels:
                    shares[what if lane == COMPUTE else f"exposed_{what}"] += seconds  # type: ignore[assignment]
            if not travels:
                computing.append(span)
                shares["exposed_ep"] += span.end - span.start - sum(each.seconds for each in works)  # type: ignore[assignment]
        busy, total = length(merged(computing)), length(merged(spans))
        travelled = length(merged(span for span, travels in zip(spans, alone.travels, strict=True) if travels))
        lost = self._crowded(busy + travelled - total)
        shares["exposed_ep"] += total - busy  # type: ignore[assignment]
        shares["crowding"] += lost  # type: ignore[assignment]
        seconds = max((span.end for span in spans), default=0.0)
        shares["idle"] += seconds - total  # type: ignore[assignment]
        return Part(seconds + lost, +shares, +traffic)

    def _crowded(self, hidden: float) -> float:
        """Seconds that computation loses to so many of what travels beside it."""
        return self.rank.device.share["crowding"] * hidden

    # The pipeline.

    def _ends(self, place: int) -> float:
        """When a position is done."""
        ended, backwards = self.pipeline[place]
        reductions = self._reductions(place, ended, backwards)
        return ended + sum(exposed + self._crowded(each.reduce - exposed) for each, exposed in reductions) + self.behind[place]

    def _position(self, place: int) -> Part:
        """All of one position: its stages, what it waits for, its gradients, its optimizer."""
        own, (ended, backwards), forms = NOTHING, self.pipeline[place], list(self.forms)
        for number, count in Counter(self.forms_at[place]).items():
            both = self.stage(forms[number], "F") + self.stage(forms[number], "B")
            own += both.times(count * self.graph.pipeline.micro_batches)
        waited: Counter[str] = Counter({"bubble": ended - own.seconds})  # type: ignore[dict-item]
        shares, traffic = own.shares + waited, Counter(own.traffic)
        for each, exposed in self._reductions(place, ended, backwards):
            shares[f"exposed_{each.family}"] += exposed + each.back  # type: ignore[assignment]
            shares["crowding"] += self._crowded(each.reduce - exposed)  # type: ignore[assignment]
            shares["optimizer"] += each.update  # type: ignore[assignment]
            traffic[each.family] += each.reduce + each.back  # type: ignore[assignment]
        return Part(math.fsum(shares.values()), +shares, +traffic)

    @cached_property
    def pipeline(self) -> list[tuple[float, list[float]]]:
        """Of every position when it ends, and when the last backward of each of its stages does."""
        whole = self.graph.pipeline
        if whole.pp == 1:
            end = whole.micro_batches * sum(map(self.simulated, self.forms))
            return [(end, [end])]
        each = [[self.stage(form, direction).seconds for form in self.forms] for direction in "FB"]
        seconds = tuple(tuple(way[form] for form in self.form_of) for way in each)
        some = _PERIODS * whole.pp
        if whole.micro_batches <= some + whole.pp or not whole.full_rounds:
            return pipeline_ends(whole, seconds, self._handover)
        # In steady state a round of micro-batches takes as long as the one before.
        before, after = (
            pipeline_ends(PipelineGraph(whole.pp, m, whole.virtual_stages), seconds, self._handover)
            for m in (some, some + whole.pp)
        )
        left = (whole.micro_batches - some - whole.pp) / whole.pp
        return [
            (a + left * (a - b), [y + left * (y - x) for x, y in zip(xs, ys, strict=True)])
            for (b, xs), (a, ys) in zip(before, after, strict=True)
        ]

    # Behind it.

    def _reductions(self, place: int, ended: float, backwards: Sequence[float]) -> Iterator[tuple[_Behind, float]]:
        """Gradients' travel, stage by stage and in each block by block as backward has them; and how much of it is beyond the
        end.
        """
        at_end, free, forms = self.candidate.ordering.reduction.kind == "end", 0.0, list(self.forms)
        for ready, number in sorted(zip(backwards, self.forms_at[place], strict=True)):
            form = forms[number]
            blocks = max(1, len(form.kinds))
            last = ended if at_end else ready
            first = last if at_end else ready - self.stage(form, "B").seconds * (blocks - 1) / blocks
            before, whole = free, sum(each.reduce for each in self._after[number])
            free = max(max(free, first) + whole, last + whole / blocks)
            exposed = max(0.0, free - max(ended, before))
            yield from ((each, exposed * each.reduce / whole if whole else 0.0) for each in self._after[number])

    @cached_property
    def _after(self) -> list[list[_Behind]]:
        """What the parameters of a stage take behind its backward, by its form.

        ZeRO-3 has summed gradients up before; the optimizer reads and writes float32 weights and two moments, reads a gradient,
        writes a weight.
        """
        fold, network, zero, device = self.candidate.fold, self.rank.network, self.rank.zero, self.rank.device
        reduction = self.candidate.ordering.reduction
        bandwidth = device.hardware.memory_gb_s * 1e9 * device.share["optimizer"]
        found: list[list[_Behind]] = []
        for form in self.forms:
            found.append([])
            for family, count in self.rank.elements(Counter(form.kinds), form.first, form.last).items():
                shared = {"dp_cp": fold.dp * fold.cp, "edp": fold.edp}[family] if zero else 1
                pieces = max(1.0, 4 * count / size) if (size := reduction.most) else 1.0
                travel = network.gather(family, 4 * count).seconds + (pieces - 1) * network.gather(family, 0).seconds
                reduce = 0.0 if zero == 3 else travel * (1 if zero else 2)
                back = network.gather(family, device.bytes * count).seconds if zero in (1, 2) else 0.0
                found[-1].append(_Behind(family, reduce, back, count / shared * (6 * 4 + 4 + device.bytes) / bandwidth))
        return found

    @cached_property
    def _handover(self) -> float:
        return self.rank.handover.seconds
