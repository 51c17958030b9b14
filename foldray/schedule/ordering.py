"""The ordering of a step: how sequences are cut, in which order pieces run, and when gradients are reduced."""

from __future__ import annotations

import re
from typing import NamedTuple

from foldray.errors import UserError
from foldray.schedule.chunks import REDUCTIONS, Reduction
from foldray.schedule.op import Op
from foldray.schedule.overlaps import KINDS, Overlap, overlap_kind
from foldray.schedule.slicing import SliceCost, Slicing, slice_sequence
from foldray.schedule.step_graph import StepGraph
from foldray.schedule.traffic import OpCosts

_TIMED = 2  # steps that a found list goes by: the second one already runs by a found list


class FoundList(NamedTuple):
    """A list that was found for a step (`finding.find`).

    Args:
        graph: the graph of the step. Steps with another graph have lists by name.
        order: the list of this rank's position.
        timed: number of steps whose times have led to it. Each of them but the first one had the list that was found before.
    """

    graph: StepGraph
    order: tuple[Op, ...]
    timed: int = 1


class Ordering(NamedTuple):
    """All choices that decide the lists of a step.

    Args:
        forward, backward: how pieces overlap in each direction.
        slicing: how sequences are cut, in tokens of the whole sequence. None is whole sequences of any length.
        recompute: kinds of ops whose forward runs again before their backward.
        batch_degree: number of parts that a micro-batch is cut into along the batch (FlowMoE's R). Their pieces overlap.
        reduction: when gradients are reduced.
        weights_apart: whether gradients of weights are ops of their own, while others travel (`StepGraph.later`).
        ahead: how much more a position may keep than in the pipeline's own order, in micro-batches, for a kind that is found.
        alive: most micro-batches that have started and not ended, if the experts have ranks of their own (`af_pipe`). None is as
            many as make the step fast.
        costs: the times of the ops. `chunks` uses them to let all-to-alls go first. With None, chunks leave as soon as they
            are ready.
        found: the list that was found, for a kind that is found.
    """

    forward: Overlap = Overlap("sequential")
    backward: Overlap = Overlap("sequential")
    slicing: Slicing | None = None
    recompute: tuple[str, ...] = ()
    batch_degree: int = 1
    reduction: Reduction = Reduction()
    weights_apart: bool = False
    ahead: float = 1
    alive: int | None = None
    costs: OpCosts | None = None
    found: FoundList | None = None

    @property
    def degree(self) -> int:
        """Number of pieces of a sequence."""
        return self.slicing.degree if self.slicing else 1

    @property
    def goes_by_costs(self) -> bool:
        """Whether the lists depend on `costs`, or lags or lists are still to be chosen by them."""
        return self.reduction.gives_way or self.open

    @property
    def of_stages(self) -> bool:
        """Whether a step consists of passes of stages, one after another, without gradients of weights apart."""
        return self.forward.row.of_stages and self.backward.row.of_stages and not self.weights_apart

    @property
    def open(self) -> bool:
        """Whether a lag is not chosen yet, or the list is not found yet."""
        return self.forward.open or self.backward.open or self.finds

    @property
    def finds(self) -> bool:
        """Whether the list is still to be found, or found once more: ops take other times beside those of its own order."""
        return self.forward.row.found and (self.found is None or self.found.timed < _TIMED)


class Sequences(NamedTuple):
    """The sequences to cut.

    Args:
        length: tokens of a sequence.
        cost: cost of a slice of attention.
        multiple_of: the length of every slice is a multiple of this number of tokens.
    """

    length: int
    cost: SliceCost
    multiple_of: int = 1

    def cut(self, slicing: str, degree: int) -> Slicing:
        """Cut a sequence into `degree` pieces (`slice_sequence`).

        Raises:
            UserError: the sequence cannot be cut in this way.
        """
        return slice_sequence(slicing, self.length, degree, self.cost, self.multiple_of)


def make_ordering(
    sequences: Sequences,
    kind: str,
    degree: int,
    lag: int | None = None,
    backward: str | None = None,
    backward_lag: int | None = None,
    slicing: str = "time_uniform",
    slices: tuple[int, ...] | None = None,
    batch_degree: int = 1,
    reduction: Reduction | None = None,
    recompute: tuple[str, ...] = (),
    weights_apart: bool = False,
    ahead: float = 1,
    alive: int | None = None,
) -> Ordering:
    """Return the ordering for the settings of a recipe.

    Args:
        sequences: the sequences to cut.
        kind: overlap kind of the forward.
        degree: number of pieces of a sequence. 1 does not cut sequences.
        lag, backward_lag: lags for kinds that have one. None is chosen later, when the times of the ops are known.
        backward: overlap kind of the backward; None is the same as `kind`.
        slicing: how attention is cut, one of `SLICINGS`.
        slices: lengths of attention's slices in tokens; None lets `slicing` choose them.
        batch_degree: number of parts of a micro-batch.
        reduction: when gradients are reduced; None is at the end.
        recompute: kinds of ops whose forward runs again.
        weights_apart: whether gradients of weights are ops of their own.
        ahead: how much more a position may keep than in the pipeline's own order, in micro-batches.
        alive: most micro-batches that have started and not ended, if the experts have ranks of their own.

    Raises:
        UserError: no kind has this name, or sequences cannot be cut in this way.
    """
    cut = None if degree == 1 else sequences.cut(slicing, degree)
    if cut is not None:
        whole = not overlap_kind(kind).cuts_attention
        cut = cut._replace(attention=(sequences.length,) if whole else slices or cut.attention)
    ways = Overlap(kind, lag), Overlap(backward or kind, backward_lag)
    return Ordering(*ways, cut, recompute, batch_degree, reduction or Reduction(), weights_apart, ahead, alive)


def named_ordering(name: str, length: int, cost: SliceCost, multiple_of: int = 1) -> Ordering:
    """Return the ordering for a short name: KIND[:DEGREE[:LAG[:BACKWARD_LAG]]][@PARTS][+REDUCTION[=BYTES]].

    Examples are `stream:4:2`, `flow@4+chunks=1000000` and `moe_only:4+buckets`. KIND is a row of `KINDS`. Slices are
    time-uniform; `-even` after the kind, as in `one_a_one_m-even:4`, makes them equal. After that, `-apart` makes gradients of
    weights ops of their own, as in `sequential-apart`; those of `list` always are. In `list-ahead=0.5:2`, 0.5 says how much more
    a found list may keep. DEGREE is 1 by default, and BACKWARD_LAG is the same as LAG. PARTS (along the batch) and REDUCTION have
    the defaults of the kind; `flow` has two parts, and `chunks`. A name that cuts nothing gives the `sequential` ordering, except
    for `weave` and `list`.

    Args:
        length, cost, multiple_of: the sequences to cut (`Sequences`).

    Raises:
        UserError: the name has no known kind or another form, or the sequence cannot be cut in this way.
    """
    order, plus, how = name.partition("+")
    order, at, parts = order.partition("@")
    given, *numbers = order.split(":")
    given, more, ahead = given.partition("-ahead=")
    cut = given.removesuffix("-apart")
    kind = cut.removesuffix("-even")
    if kind not in KINDS:
        raise UserError("schedule", name, "names no kind of schedule", KINDS)
    row = KINDS[kind]
    if len(numbers) > 3 or not all(number.isdecimal() for number in numbers) or (at and not parts.isdecimal()):
        form = "KIND:DEGREE:LAG:BACKWARD_LAG@PARTS+REDUCTION=BYTES"
        raise UserError("schedule", name, f"must read {form}, all but KIND optional")
    if more and not (row.found and re.fullmatch(r"\d{1,3}(\.\d{1,3})?", ahead)):
        raise UserError("schedule", name, "must have a number behind ahead=, which only found kinds have", ["list-ahead=0.5"])
    reduction = _named_reduction(name, how) if plus else Reduction(row.reduction)
    batch_degree = int(parts) if at else row.batch_degree
    degree = int(numbers[0]) if numbers else 1
    lags = [int(number) for number in numbers[1:]]
    lag, backward_lag = (lags[0], lags[-1]) if lags else (None, None)
    if 0 in (degree, batch_degree, *lags):
        raise UserError("schedule", name, "has a 0; degrees, lags and parts are at least 1")
    if not row.cuts and (degree > 1 or batch_degree > 1):
        raise UserError("schedule", name, f"{kind} cuts nothing", [kind])
    apart = cut != given or row.weights_apart
    if degree == 1 and batch_degree == 1 and row.of_stages:
        return Ordering(reduction=reduction, weights_apart=apart)
    slicing = "token_uniform" if cut != kind else "time_uniform"
    sequences = Sequences(length, cost, multiple_of)
    return make_ordering(
        sequences, kind, degree, lag, backward_lag=backward_lag, slicing=slicing, batch_degree=batch_degree,
        reduction=reduction, weights_apart=apart, ahead=float(ahead or 1),
    )  # fmt: skip


def _named_reduction(name: str, how: str) -> Reduction:
    kind, equals, size = how.partition("=")
    if kind not in REDUCTIONS or (equals and not size.isdecimal()) or (size and int(size) < 1):
        raise UserError("schedule", name, "names no way of reducing gradients behind its +", [*REDUCTIONS, "chunks=BYTES"])
    return Reduction(kind, int(size)) if size else Reduction(kind)
