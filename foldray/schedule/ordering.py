"""How a rank works through a step: how sequences are cut, in which order pieces go, when gradients travel."""

from __future__ import annotations

from typing import NamedTuple

from foldray.errors import UserError
from foldray.schedule.chunks import REDUCTIONS, Reduction
from foldray.schedule.overlaps import OVERLAPS, Overlap, overlap_kind
from foldray.schedule.slicing import SliceCost, Slicing, slice_sequence
from foldray.schedule.traffic import OpCosts


class Ordering(NamedTuple):
    """The orders of a step's pieces.

    Args:
        slicing: None is whole sequences, of any length.
        recompute: kinds of ops whose forward is computed again before their backward.
        batch_degree: parts into which a micro-batch is cut along the batch (FlowMoE's R), whose pieces go side by side.
        reduction: when gradients travel.
        costs: what ops take. `chunks` give way to all-to-alls by them; until they are known, chunks leave as soon as they are
            ready.
    """

    forward: Overlap = Overlap("sequential")
    backward: Overlap = Overlap("sequential")
    slicing: Slicing | None = None
    recompute: tuple[str, ...] = ()
    batch_degree: int = 1
    reduction: Reduction = Reduction()
    costs: OpCosts | None = None

    @property
    def goes_by_costs(self) -> bool:
        """Whether knowing what ops take would change anything."""
        return self.reduction.gives_way or self.open

    @property
    def open(self) -> bool:
        """Whether a lag is still to be chosen."""
        return self.forward.open or self.backward.open


class Sequences(NamedTuple):
    """What is cut.

    Args:
        length: tokens of a sequence.
        cost: of a slice of attention.
        multiple_of: what every slice's length is a multiple of.
    """

    length: int
    cost: SliceCost
    multiple_of: int = 1

    def cut(self, slicing: str, degree: int) -> Slicing:
        """In so many pieces (`slice_sequence`)."""
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
) -> Ordering:
    """The one way from settings to an ordering.

    Args:
        kind: name of the overlap going forward.
        degree: pieces of a sequence.
        lag, backward_lag: of overlaps that have one; None is chosen once it is known what ops take.
        backward: name of the overlap going backward; None is as forward.
        slicing: how attention is cut.
        slices: lengths of attention's slices; None is as `slicing` finds them.
        reduction: None is at the end.
    """
    cut = None if degree == 1 else sequences.cut(slicing, degree)
    if cut is not None:
        whole = not overlap_kind(kind).cuts_attention
        cut = cut._replace(attention=(sequences.length,) if whole else slices or cut.attention)
    ways = Overlap(kind, lag), Overlap(backward or kind, backward_lag)
    return Ordering(*ways, cut, recompute, batch_degree, reduction or Reduction())


def named_ordering(name: str, length: int, cost: SliceCost, multiple_of: int = 1) -> Ordering:
    """The ordering that a short name stands for: KIND[:DEGREE[:LAG[:BACKWARD_LAG]]][@PARTS][+REDUCTION[=BYTES]].

    As in `stream:4:2`, `flow@4+chunks=1000000` or `moe_only:4+buckets`. Slices are time-uniform; `-even` behind the kind, as in
    `one_a_one_m-even:4`, makes them equal. `flow` is cut along the batch, in two unless told, with its gradients in chunks.

    Raises:
        UserError: no such kind, or numbers that do not fit.
    """
    order, plus, how = name.partition("+")
    order, at, parts = order.partition("@")
    given, *numbers = order.split(":")
    kind = given.removesuffix("-even")
    if kind not in OVERLAPS:
        raise UserError("schedule", name, "names no kind of schedule", OVERLAPS)
    row = OVERLAPS[kind]
    if len(numbers) > 3 or not all(number.isdecimal() for number in numbers) or (at and not parts.isdecimal()):
        form = "KIND:DEGREE:LAG:BACKWARD_LAG@PARTS+REDUCTION=BYTES"
        raise UserError("schedule", name, f"must read {form}, all but KIND optional")
    reduction = _named_reduction(name, how) if plus else Reduction(row.reduction)
    batch_degree = int(parts) if at else row.batch_degree
    degree = int(numbers[0]) if numbers else 1
    lags = [int(number) for number in numbers[1:]]
    lag, backward_lag = (lags[0], lags[-1]) if lags else (None, None)
    if 0 in (degree, batch_degree, *lags):
        raise UserError("schedule", name, "has a 0; degrees, lags and parts are at least 1")
    if not row.cuts and (degree > 1 or batch_degree > 1):
        raise UserError("schedule", name, f"{kind} cuts nothing", [kind])
    if degree == 1 and batch_degree == 1:
        return Ordering(reduction=reduction)
    slicing = "token_uniform" if given != kind else "time_uniform"
    sequences = Sequences(length, cost, multiple_of)
    return make_ordering(
        sequences, kind, degree, lag, backward_lag=backward_lag, slicing=slicing, batch_degree=batch_degree, reduction=reduction
    )


def _named_reduction(name: str, how: str) -> Reduction:
    kind, equals, size = how.partition("=")
    if kind not in REDUCTIONS or (equals and not size.isdecimal()) or (size and int(size) < 1):
        raise UserError("schedule", name, "names no way of reducing gradients behind its +", [*REDUCTIONS, "chunks=BYTES"])
    return Reduction(kind, int(size)) if size else Reduction(kind)
