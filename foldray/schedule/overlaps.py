"""The kinds of overlap inside a stage: one table. A kind of one's own is a row like these, and needs no place here.

`schedule.kind` and short names take a row's name, or `module:NAME` for a row that stands in a module of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from foldray.schedule.generators import Run, all_attention_first, experts_one_behind, experts_some_behind
from foldray.schedule.op import Op
from foldray.tables import find_row


class OverlapKind(NamedTuple):
    """How the pieces of a stage's blocks go past each other.

    Args:
        name: as recipes have it.
        source: where it comes from.
        hides: what it hides, in one line.
        order: makes the forward order of a run of blocks, from the run and the lag.
        cuts: whether sequences may be cut at all.
        cuts_attention: whether attention is cut as well, or the MoE layers alone.
        drains: whether each block ends before the next one begins; else a stage is one run.
        has_lag: whether a lag has a meaning for it.
        batch_degree, reduction: of recipes that do not say otherwise.
        searched: whether planner and tuner try it unless told otherwise.
    """

    name: str
    source: str
    hides: str
    order: Callable[[Run, int], Iterator[Op]]
    cuts: bool = True
    cuts_attention: bool = True
    drains: bool = True
    has_lag: bool = False
    batch_degree: int = 1
    reduction: str = "end"
    searched: bool = False


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
FLOW = OverlapKind(
    "flow", "FlowMoE, section 3.2", "as aaam, over parts of a micro-batch, with gradients in the gaps", all_attention_first,
    batch_degree=2, reduction="chunks",
)  # fmt: skip

OVERLAPS: Mapping[str, OverlapKind] = {row.name: row for row in (SEQUENTIAL, MOE_ONLY, AAAM, ONE_A_ONE_M, STREAM, FLOW)}

USUAL_LAG = 2

SEARCHED = tuple(name for name, row in OVERLAPS.items() if row.searched)
"""What planner and tuner try unless told otherwise."""


def overlap_kind(name: str) -> OverlapKind:
    """A row by its name, or by `module:NAME`.

    Raises:
        UserError: there is none.
    """
    return find_row("schedule.kind", OVERLAPS, OverlapKind, name)


class Overlap(NamedTuple):
    """How a stage's pieces are ordered in one direction.

    Args:
        kind: the name of a kind (`overlap_kind`).
        lag: steps of attention between a micro-batch's router and its experts, where the kind has a lag. None is chosen once it
            is known what ops take (`timeline.settle`); until then it is `USUAL_LAG`.
    """

    kind: str
    lag: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.lag}" if self.lag and self.row.has_lag else self.kind

    @property
    def open(self) -> bool:
        """Whether the lag is still to be chosen."""
        return self.lag is None and self.row.has_lag

    @property
    def row(self) -> OverlapKind:
        return overlap_kind(self.kind)
