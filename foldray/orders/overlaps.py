"""The table of overlap kinds: how the pieces of a step overlap.

`schedule.kind` takes the name of a row, or `module:NAME` for a row in a user's module. Short names (`named_ordering`) take
names of this table only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from foldray.graph.op import Op
from foldray.orders.generators import Run, all_attention_first, experts_one_behind, experts_some_behind
from foldray.tables import find_row


class OverlapKind(NamedTuple):
    """A way in which the pieces of a stage's blocks overlap, or the pieces of a whole step.

    Args:
        hides: the communication that it hides, in one line.
        order: (run, lag) → the forward order of the run's computation. None is for experts with ranks of their own: a stage
            is no run of one position then, and the lists of a whole step are made at once.
        cuts_attention: whether attention is cut, too. Otherwise only the MoE layers are cut.
        drains: whether a block finishes before the next block begins. Otherwise all blocks of a stage are one run.
        has_lag: whether `order` uses the lag.
        weaves: whether the forward of one micro-batch and the backward of another one run at once (`weave`). Both directions
            then have this kind.
        found: whether the lists of whole steps are found once the times of the ops are known (`finding.find`). Until then, and
            in evaluation, `order` orders them. Both directions then have this kind.
        weights_apart, batch_degree, reduction: defaults for recipes with this kind.
        searched: whether the tuner tries this kind by default. The planner tries the kinds that are `of_stages`.
    """

    name: str
    source: str
    hides: str
    order: Callable[[Run, int], Iterator[Op]] | None
    cuts: bool = True
    cuts_attention: bool = True
    drains: bool = True
    has_lag: bool = False
    weaves: bool = False
    found: bool = False
    weights_apart: bool = False
    batch_degree: int = 1
    reduction: str = "end"
    searched: bool = False

    @property
    def for_placement(self) -> bool:
        """Whether the kind orders steps whose experts have ranks of their own."""
        return self.order is None or self.found

    @property
    def of_stages(self) -> bool:
        """Whether the kind orders one pass of a stage at a time. It then hides something only if a micro-batch is cut."""
        return self.order is not None and not (self.weaves or self.found)


SEQUENTIAL = OverlapKind(
    "sequential", "Megatron-LM", "nothing", all_attention_first, cuts=False, cuts_attention=False, searched=True
)
MOE_ONLY = OverlapKind(
    "moe_only", "Tutel", "all-to-alls behind experts", all_attention_first, cuts_attention=False, searched=True
)
AAAM = OverlapKind("aaam", "FoldMoE, figure 2b", "all-to-alls behind attention, then behind experts", all_attention_first)
ONE_A_ONE_M = OverlapKind(
    "one_a_one_m",
    "FoldMoE, figures 2c and 7",
    "all-to-alls behind attention and experts in turn",
    experts_one_behind,
    searched=True,
)
STREAM = OverlapKind(
    "stream", "this project", "as one_a_one_m, without a pause between blocks", experts_some_behind,
    drains=False, has_lag=True, searched=True,
)  # fmt: skip
WEAVE = OverlapKind(
    "weave", "DualPipe, Megatron-Core", "all-to-alls of one micro-batch's forward behind another one's backward",
    experts_some_behind, drains=False, weaves=True,
)  # fmt: skip
LIST = OverlapKind(
    "list", "this project", "what can be hidden, by the measured times of the ops", experts_some_behind, drains=False, found=True,
    weights_apart=True, searched=True,
)  # fmt: skip
FLOW = OverlapKind(
    "flow", "FlowMoE, section 3.2", "as aaam, over parts of a micro-batch, with gradients in the gaps", all_attention_first,
    batch_degree=2, reduction="chunks",
)  # fmt: skip

OVERLAPS: Mapping[str, OverlapKind] = {
    row.name: row for row in (SEQUENTIAL, MOE_ONLY, AAAM, ONE_A_ONE_M, STREAM, WEAVE, LIST, FLOW)
}
"""Kinds for attention and experts on the same ranks."""
AF_PIPE = OverlapKind(
    "af_pipe", "DisagMoE, section 4.2", "rows between attention's ranks and the experts'", None, weights_apart=True
)
KINDS: Mapping[str, OverlapKind] = {**OVERLAPS, AF_PIPE.name: AF_PIPE}
AUTO = SEQUENTIAL._replace(name="auto", source="this project", hides="what measured orders hide; nothing until then")
"""The kind of recipes that leave the order to training. Until it has chosen, the order is that of `sequential`."""

USUAL_LAG = 2

SEARCHED = tuple(name for name, row in OVERLAPS.items() if row.searched)
"""Kinds that the tuner tries by default."""


def overlap_kind(name: str) -> OverlapKind:
    """Return a row by its name, or by `module:NAME`."""
    return find_row("schedule.kind", {AUTO.name: AUTO, **KINDS}, OverlapKind, name)


def order_kind(name: str) -> OverlapKind:
    """Return the row of an order that steps may have."""
    return find_row("schedule.kind", KINDS, OverlapKind, name)


class Overlap(NamedTuple):
    """How a stage's pieces are ordered in one direction.

    Args:
        lag: number of attention slices between a piece's router and its experts; ignored if the kind has no lag. None is
            chosen when the times of the ops are known (`finding.settle`); until then, the lag is `USUAL_LAG`.
    """

    kind: str
    lag: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.lag}" if self.lag and self.row.has_lag else self.kind

    @property
    def open(self) -> bool:
        """Whether the lag is not chosen yet."""
        return self.lag is None and self.row.has_lag

    @property
    def row(self) -> OverlapKind:
        return overlap_kind(self.kind)
