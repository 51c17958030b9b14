"""What ranks of one job on one device have in common, found once.

Each table belongs to what its numbers depend on: one kind of op under some sizes of groups, all ops of a block, or a whole fold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from foldray.blueprint import BlockSpec
from foldray.fold import Fold
from foldray.planner.candidate import Pieces
from foldray.planner.layout import Content, StageForm
from foldray.planner.network import Network
from foldray.planner.shares import Price, Stretch
from foldray.schedule import Ordering, Reduction


class OpKey(NamedTuple):
    """A kind of op at one rank: its price depends on these and on its tokens.

    Args:
        block: that it belongs to; None for embedding and head.
        sequences: of a micro-batch's part.
        traits: sizes and shapes of the groups that it talks in.
    """

    kind: str
    block: BlockSpec | None
    sequences: float
    traits: tuple


class BlockKey(NamedTuple):
    """All ops at one rank: as `OpKey`, with the traits of every kind."""

    sequences: float
    traits: tuple[tuple, ...]


class PieceKey(NamedTuple):
    """One op of a kind; where it starts in the sequence matters to attention alone."""

    back: bool
    start: int
    tokens: int


class CutKey(NamedTuple):
    """All ops of a kind in one pass of a block, by the lengths of their pieces in tokens."""

    back: bool
    cut: tuple[int, ...]


class Totals(NamedTuple):
    """Seconds of all pieces of one kind, of the first one, and of the shortest."""

    total: float
    first: float
    least: float


class PassWork(NamedTuple):
    """Seconds of one pass: of what computes, of what travels, and of all at least, if blocks drain."""

    computed: float
    travels: float
    least: float


class ActivationKey(NamedTuple):
    """What a block keeps depends on these, and on the imbalance of its experts."""

    block: BlockSpec
    recompute: tuple[str, ...]
    sliced: bool
    imbalance: float


class Update(NamedTuple):
    """Seconds behind backward of a stage's parameters of one family: to reduce gradients, gather weights, run the optimizer."""

    family: str
    reduce: float
    gather: float
    optimizer: float


class Held(NamedTuple):
    """Bytes that parameters cost a rank: weights (and float32 copies), float32 sums of gradients, two moments."""

    weights: float
    gradients: float
    optimizer: float


@dataclass(slots=True)
class OpTables:
    """Of one kind of op (`OpKey`)."""

    prices: dict[PieceKey, Price] = field(default_factory=dict)
    totals: dict[CutKey, Totals] = field(default_factory=dict)


@dataclass(slots=True)
class BlockTables:
    """Of ranks whose ops cost the same, whatever their kind."""

    passes: dict[Pieces, dict[tuple[BlockSpec, bool], PassWork]] = field(default_factory=dict)
    bounds: dict[Pieces, dict[Content, float]] = field(default_factory=dict)
    activations: dict[ActivationKey, float] = field(default_factory=dict)
    stages: dict[Ordering, dict[tuple[StageForm, str], Stretch]] = field(default_factory=dict)


@dataclass(slots=True)
class FoldTables:
    """Of a fold under a stage of ZeRO.

    Args:
        traits: by kind of op, all of the fold that its price depends on.
    """

    network: Network
    traits: Mapping[str, tuple]
    updates: dict[Reduction, dict[Content, tuple[Update, ...]]] = field(default_factory=dict)
    parameters: dict[Content, Held] = field(default_factory=dict)


@dataclass
class Memo:
    """All tables of one job on one device, to be handed to whoever prices its ranks.

    Args:
        counts: elements that an op of each kind computes with: those that are cut among ranks, and those that each has whole.
    """

    ops: dict[OpKey, OpTables] = field(default_factory=dict)
    blocks: dict[BlockKey, BlockTables] = field(default_factory=dict)
    folds: dict[tuple[Fold, int], FoldTables] = field(default_factory=dict)
    counts: Mapping[tuple[str, BlockSpec | None], tuple[int, int]] = field(default_factory=dict)
