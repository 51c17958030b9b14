"""The ordering of a step: how sequences are cut, in which order pieces run, and when gradients are reduced."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from foldray.blueprint import BlockSpec, Ownership
from foldray.clock.times import OpCosts
from foldray.errors import UserError
from foldray.graph.chunks import REDUCTIONS, Chunk, Reduction
from foldray.graph.op import Op
from foldray.graph.slicing import SliceCost, Slicing, slice_sequence
from foldray.graph.step_graph import StepGraph
from foldray.graph.step_ops import Place, gathers, leaves_weights
from foldray.orders.overlaps import KINDS, Overlap, overlap_kind

WeightGradients = Literal["together", "apart", "whole"]
_OPS_OF_THEIR_OWN: tuple[WeightGradients, ...] = ("apart", "whole")

_TIMED = 2  # steps that a found list goes by: the second one already runs by a found list


class FoundList(NamedTuple):
    """A list that was found for a step (`finding.find`).

    Args:
        graph: the graph of the step. Steps with another graph have lists by name.
        timed: number of steps whose times have led to it. Each of them but the first one had the list that was found before.
    """

    graph: StepGraph
    order: tuple[Op, ...]
    timed: int = 1


class Ordering(NamedTuple):
    """All choices that decide the lists of a step.

    Args:
        slicing: how sequences are cut, in tokens of the whole sequence. None is whole sequences of any length.
        recompute: kinds of ops whose forward runs again before their backward.
        batch_degree: number of parts that a micro-batch is cut into along the batch (FlowMoE's R). Their pieces overlap.
        weight_gradients: when gradients of weights are computed: `together` with those of activations; `apart`, as ops of their
            own, while others travel (`StepGraph.later`); or `whole`, one such op for all pieces of a block (`StepGraph.whole`).
        ahead: how much more a position may keep than in the pipeline's own order, in micro-batches, for a kind that is found.
        alive: most micro-batches that have started and not ended, if the experts have ranks of their own (`af_pipe`). None is as
            many as make the step fast.
        offload: kinds of ops that keep on the host what their backward needs (`StepGraph.offloaded`).
        costs: the times of the ops. `chunks` uses them to let all-to-alls go first. With None, chunks leave as soon as they
            are ready.
    """

    forward: Overlap = Overlap("sequential")
    backward: Overlap = Overlap("sequential")
    slicing: Slicing | None = None
    recompute: tuple[str, ...] = ()
    batch_degree: int = 1
    reduction: Reduction = Reduction()
    weight_gradients: WeightGradients = "together"
    ahead: float = 1
    alive: int | None = None
    costs: OpCosts | None = None
    found: FoundList | None = None
    offload: tuple[str, ...] = ()

    @property
    def degree(self) -> int:
        """Number of pieces of a sequence."""
        return self.slicing.degree if self.slicing else 1

    @property
    def fewer_slices(self) -> int | None:
        """Number of attention's slices if its kind cuts attention, but into fewer slices than pieces."""
        count = len(self.slicing.attention) if self.slicing else 1
        return count if self.forward.row.cuts_attention and count < self.degree else None

    @property
    def goes_by_costs(self) -> bool:
        """Whether the lists depend on `costs`, or lags or lists are still to be chosen by them."""
        return self.reduction.gives_way or self.open

    @property
    def of_stages(self) -> bool:
        """Whether a step consists of passes of stages, one after another, without gradients of weights apart."""
        return self.forward.row.of_stages and self.backward.row.of_stages and self.weight_gradients == "together"

    @property
    def open(self) -> bool:
        """Whether a lag is not chosen yet, or the list is not found yet."""
        return self.forward.open or self.backward.open or self.finds

    @property
    def finds(self) -> bool:
        """Whether the list is still to be found, or to be found once more, since the times of ops depend on the list's order."""
        return self.forward.row.found and (self.found is None or self.found.timed < _TIMED)

    def graph(
        self,
        ownership: Ownership,
        stages: tuple[tuple[BlockSpec, ...], ...],
        length: int,
        micro_batches: int,
        ragged: bool,
        backward: bool = True,
        chunks: tuple[tuple[Chunk, ...], ...] = (),
    ) -> StepGraph:
        """Return the graph of a step in this ordering.

        Args:
            stages, ragged, backward, chunks: as in `StepGraph`.
            micro_batches: number of micro-batches, or of their parts.
        """
        model, fold = ownership.model, ownership.fold
        slicing = self.slicing or Slicing((length,), (length,))
        return StepGraph(
            stages,
            slicing.shared(fold.cp * fold.tp),
            fold.pp,
            micro_batches,
            ragged,
            self.recompute,
            backward,
            self.batch_degree if backward else 1,
            chunks,
            tuple(Place(*places) for places in ownership.places),
            gathers(slicing, fold.cp),
            leaves_weights(model) if self.weight_gradients != "together" and backward else (),
            model.tied_embeddings,
            self.weight_gradients == "whole",
            offloaded=self.offload if backward else (),
            passes_on=fold.ep_inside > 1 and not fold.disjoint,
        )


class Sequences(NamedTuple):
    """The sequences to cut.

    Args:
        multiple_of: the length of every slice is a multiple of this number of tokens.
    """

    length: int
    cost: SliceCost
    multiple_of: int = 1

    def cut(self, slicing: str, degree: int, attention_degree: int | None = None) -> Slicing:
        """Cut a sequence into `degree` pieces (`slice_sequence`)."""
        return slice_sequence(slicing, self.length, degree, self.cost, self.multiple_of, attention_degree)

    def cut_for(
        self,
        kind: str,
        degree: int,
        slicing: str = "time_uniform",
        slices: tuple[int, ...] | None = None,
        attention_degree: int | None = None,
    ) -> Slicing | None:
        """Cut a sequence as a kind of overlap needs it; None for a degree of 1, which cuts nothing.

        Args:
            slicing: how attention is cut, one of `SLICINGS`.
            slices: lengths of attention's slices in tokens; None lets `slicing` choose them.
            attention_degree: number of attention's slices; None is `degree`.
        """
        if degree == 1:
            return None
        cuts = overlap_kind(kind).cuts_attention
        cut = self.cut(slicing, degree, attention_degree if cuts else 1)
        return cut._replace(attention=slices) if cuts and slices else cut


def named_ordering(name: str, length: int, cost: SliceCost, multiple_of: int = 1) -> Ordering:
    """Return the ordering for a short name: KIND[:DEGREE[/SLICES][:LAG[:BACKWARD_LAG]]][@PARTS][+REDUCTION[=BYTES]].

    Examples are `stream:4:2`, `stream:4/2`, `flow@4+chunks=1000000` and `moe_only:4+buckets`. KIND is a row of `KINDS`. Slices
    are time-uniform; `-even` after the kind, as in `one_a_one_m-even:4`, makes them equal. After that, `-apart` makes gradients
    of weights ops of their own, as in `sequential-apart`, and `-whole` makes one op for all pieces of a block; those of `list`
    always are apart at least. In `list-ahead=0.5:2`, 0.5 says how much more a found list may keep. DEGREE is 1 by default. There
    are as many SLICES of attention as DEGREE says, and BACKWARD_LAG is the same as LAG. PARTS (along the batch) and REDUCTION
    have the defaults of the kind; `flow` has two parts, and `chunks`. A name that cuts nothing gives the `sequential` ordering,
    except for `weave` and `list`.
    """
    order, plus, how = name.partition("+")
    order, at, parts = order.partition("@")
    given, *numbers = order.split(":")
    given, ahead_given, ahead = given.partition("-ahead=")
    named: list[WeightGradients] = [way for way in _OPS_OF_THEIR_OWN if given.endswith(f"-{way}")]
    together = given.removesuffix(f"-{named[0]}") if named else given
    kind = together.removesuffix("-even")
    if kind not in KINDS:
        raise UserError("schedule", name, "names no kind of schedule", KINDS)
    row = KINDS[kind]
    pieces, slash, slices = numbers[0].partition("/") if numbers else ("1", "", "")
    given_numbers = [pieces, *numbers[1:], *([slices] if slash else []), *([parts] if at else [])]
    if len(numbers) > 3 or not all(number.isdecimal() for number in given_numbers):
        form = "KIND:DEGREE/SLICES:LAG:BACKWARD_LAG@PARTS+REDUCTION=BYTES"
        raise UserError("schedule", name, f"must read {form}, all but KIND optional")
    if ahead_given and not (row.found and re.fullmatch(r"\d{1,3}(\.\d{1,3})?", ahead)):
        raise UserError("schedule", name, "must have a number behind ahead=, which only found kinds have", ["list-ahead=0.5"])
    reduction = _named_reduction(name, how) if plus else Reduction(row.reduction)
    batch_degree = int(parts) if at else row.batch_degree
    degree, attention_degree = int(pieces), int(slices) if slash else None
    lags = [int(number) for number in numbers[1:]]
    lag, backward_lag = (lags[0], lags[-1]) if lags else (None, None)
    if 0 in (degree, attention_degree, batch_degree, *lags):
        raise UserError("schedule", name, "has a 0; degrees, slices, lags and parts are at least 1")
    if not row.cuts and (degree > 1 or batch_degree > 1):
        raise UserError("schedule", name, f"{kind} cuts nothing", [kind])
    weights: WeightGradients = named[0] if named else "apart" if row.weights_apart else "together"
    if degree == 1 and batch_degree == 1 and row.of_stages:
        return Ordering(reduction=reduction, weight_gradients=weights)
    slicing = "token_uniform" if together != kind else "time_uniform"
    cut = Sequences(length, cost, multiple_of).cut_for(kind, degree, slicing, attention_degree=attention_degree)
    ways = Overlap(kind, lag), Overlap(kind, backward_lag)
    return Ordering(*ways, cut, batch_degree=batch_degree, reduction=reduction, weight_gradients=weights, ahead=float(ahead or 1))


def _named_reduction(name: str, how: str) -> Reduction:
    kind, equals, size = how.partition("=")
    if kind not in REDUCTIONS or (equals and not size.isdecimal()) or (size and int(size) < 1):
        raise UserError("schedule", name, "names no way of reducing gradients behind its +", [*REDUCTIONS, "chunks=BYTES"])
    return Reduction(kind, int(size)) if size else Reduction(kind)
