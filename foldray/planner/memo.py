"""Tables of results that the ranks of one job on one device share.

The key of a table has everything that its numbers depend on: a kind of op with the sizes of its groups, all ops of a block,
or a fold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """A kind of op on one rank. The price of an op depends on these fields and on its tokens.

    Args:
        kind: the kind.
        block: the block of the op; None for embedding and head.
        sequences: number of sequences in a part of a micro-batch.
        traits: sizes and shapes of the groups in which the op communicates.
    """

    kind: str
    block: BlockSpec | None
    sequences: float
    traits: tuple


class BlockKey(NamedTuple):
    """All ops on one rank: like `OpKey`, with the traits of every kind."""

    sequences: float
    traits: tuple[tuple, ...]


PieceKey = tuple[bool, int, int]
"""An op of a kind: whether it is a backward op, its first token (0 except for attention), and its number of tokens."""


PassKey = tuple[StageForm, str, bool]
"""A pass of a stage: the form, the direction, and whether a block that is simulated alone hands pieces over."""


class Moment(NamedTuple):
    """The moment at which a pass takes over or hands over a piece.

    Args:
        part: number of the part of the micro-batch (`StepGraph.batch_degree`).
        tokens: the tokens of the piece.
        seconds: from the start of the pass until it takes the piece over, or from when it hands the piece over until its end.
    """

    part: int
    tokens: range
    seconds: float


class Pass(NamedTuple):
    """One pass of a stage.

    Args:
        stretch: the time of the whole pass.
        taken: the pieces that it takes over.
        given: the pieces that it hands over, in their order.
    """

    stretch: Stretch
    taken: Sequence[Moment] = ()
    given: Sequence[Moment] = ()


class Totals(NamedTuple):
    """Seconds of all pieces of a kind together, of the first piece, and of the shortest piece."""

    total: float
    first: float
    least: float


class PassWork(NamedTuple):
    """Seconds of one pass.

    Args:
        computed: all computation.
        travels: all all-to-alls.
        least: a lower bound of the whole pass if blocks drain.
        piece: a lower bound of the seconds until the first piece is through.
    """

    computed: float
    travels: float
    least: float
    piece: float


class StageBound(NamedTuple):
    """Lower bounds of the seconds of a stage, forward and backward together: of all of it, and of its first piece."""

    seconds: float
    piece: float


class ActivationKey(NamedTuple):
    """The fields that the activations of a block depend on. `imbalance` is rows of the fullest rank over the mean."""

    block: BlockSpec
    recompute: tuple[str, ...]
    sliced: bool
    imbalance: float


class Update(NamedTuple):
    """The update of those parameters of a stage whose gradients are summed over one group family.

    Args:
        family: the name under which its seconds are told: `edp` for experts, `dp_cp` for all others.
        lane: the lane on which these travel.
        chunks: number of their chunks.
        reduce, gather, optimizer: seconds of the reduction, of the gather of weights, and of the optimizer.
    """

    family: str
    lane: str
    chunks: float
    reduce: float
    gather: float
    optimizer: float


class Held(NamedTuple):
    """Bytes for the parameters of a rank: weights (with float32 copies), float32 sums of gradients, the optimizer's state."""

    weights: float
    gradients: float
    optimizer: float


class Shared(NamedTuple):
    """Number of parameters whose optimizer several ranks share: all, those of the largest class, and a rank's own of these."""

    whole: float
    largest: float
    own: float


@dataclass(slots=True)
class OpTables:
    """The tables of one kind of op (`OpKey`).

    Args:
        prices: op → its price.
        totals: tokens of each piece → seconds of all ops in a pass of a block, forward and backward.
    """

    prices: dict[PieceKey, Price] = field(default_factory=dict)
    totals: dict[tuple[int, ...], tuple[Totals, Totals]] = field(default_factory=dict)


@dataclass(slots=True)
class PieceTables:
    """The tables of ranks whose ops cost the same, and that cut their micro-batches in the same way.

    Args:
        blocks: block → the work of its forward and backward.
        ends: (embedding, head, number of heads) → seconds of embedding and head, forward and backward.
        bounds: content of a stage → lower bounds of its seconds.
    """

    blocks: dict[BlockSpec, tuple[PassWork, PassWork]] = field(default_factory=dict)
    ends: dict[tuple[bool, BlockSpec | None, int], tuple[float, float]] = field(default_factory=dict)
    bounds: dict[Content, StageBound] = field(default_factory=dict)


@dataclass(slots=True)
class BlockTables:
    """The tables of ranks whose ops of all kinds cost the same (`BlockKey`)."""

    pieces: dict[Pieces, PieceTables] = field(default_factory=dict)
    activations: dict[ActivationKey, float] = field(default_factory=dict)
    stages: dict[Ordering, dict[PassKey, Pass]] = field(default_factory=dict)


@dataclass(slots=True)
class FoldTables:
    """The tables of a fold with a stage of ZeRO.

    Args:
        network: the links of the cluster under the fold.
        traits: for every kind of op, the properties of the fold that its price depends on.
        updates: seconds after backward, by reduction and content.
        parameters: bytes for parameters, by content.
        shared: parameters that ZeRO shares, by content.
    """

    network: Network
    traits: Mapping[str, tuple]
    updates: dict[Reduction, dict[Content, tuple[Update, ...]]] = field(default_factory=dict)
    parameters: dict[Content, Held] = field(default_factory=dict)
    shared: dict[Content, Shared] = field(default_factory=dict)


@dataclass
class Memo:
    """All tables of one job on one device.

    Args:
        ops, blocks, folds: the tables by their keys; a fold has its stage of ZeRO in the key.
    """

    ops: dict[OpKey, OpTables] = field(default_factory=dict)
    blocks: dict[BlockKey, BlockTables] = field(default_factory=dict)
    folds: dict[tuple[Fold, int], FoldTables] = field(default_factory=dict)
