"""The cost of every op of a step on one rank: a sequence of (lane, what the seconds are spent on, seconds).

`parts.py` says what the costs are made of. The traffic of a fold follows section 3 of MoE Parallel Folding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from foldray.blueprint import BlockSpec, count_by_op
from foldray.costs.candidate import FAMILY, Content, Job
from foldray.costs.device import Device
from foldray.costs.memo import Memo, Table, shared
from foldray.costs.mixture_parts import MixtureParts
from foldray.costs.network import Network, Travel
from foldray.costs.parts import AttentionParts
from foldray.costs.shares import Price, Work
from foldray.fold import Fold
from foldray.graph import Chunk
from foldray.kinds import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    EMBED,
    EXPERT,
    FFN,
    GATHER,
    HEAD,
    INTRA_COMBINE,
    INTRA_DISPATCH,
    MERGE,
    PROJECT,
    ROUTE,
    SHARED,
)

_MOE = (ROUTE, DISPATCH, INTRA_DISPATCH, SHARED, EXPERT, INTRA_COMBINE, COMBINE, MERGE)


class Totals(NamedTuple):
    """Seconds of all pieces of a kind together, of the first piece, and of the shortest piece."""

    total: float
    first: float
    least: float


shared_by_fold = shared(attrgetter("fold_table"))
"""Decorator for results that ranks share if their fold and stage of ZeRO are the same."""
shared_by_ops = shared(attrgetter("ops_table"))
"""Decorator for results that ranks share if all their ops cost the same."""


class RankCosts(AttentionParts, MixtureParts):
    """The costs of one rank's ops, reductions and handovers under a fold.

    Args:
        sequences: number of sequences that an op works on: those of a micro-batch, or of one of its parts.
        zero: stage of ZeRO; 3 gathers weights in every op.
        memo: tables of known results, shared by all ranks of one job on one device.
    """

    def __init__(self, job: Job, fold: Fold, device: Device, sequences: float, zero: int = 1, memo: Memo | None = None):
        self.job, self.model, self.fold, self.device = job, job.model_under(fold), fold, device
        self.sequences, self.zero = sequences, zero
        self.memo = Memo() if memo is None else memo
        self.fold_table = self.memo[fold, zero]
        self.network, self._traits = self._network_and_traits()
        self._op_tables: dict[tuple[str, BlockSpec | None], Table] = {}

    def price(self, kind: str, back: bool, tokens: range, block: BlockSpec | None) -> Price:
        """Return the price of an op.

        Args:
            tokens: the tokens that it works on, as positions in the rank's share of a sequence.
            block: its block; None for embedding and head.
        """
        table, key = self._table_of(kind, block), (back, tokens.start if kind == ATTENTION else 0, len(tokens))
        price: Price | None = table.get(key)
        if price is None:
            again = back and kind in _MOE and "moe" in self.job.again
            ways = (False, True) if again else (back,)
            price = table[key] = Price.of(work for way in ways for work in PRICES[kind](self, block, tokens, way))
        return price

    @cached_property
    def mixture(self) -> tuple[str, ...]:
        """The kinds of ops that rows of a MoE layer go through. Inside a node there are some if tokens travel once to a node."""
        beside = (SHARED,) if self.travelling.inside else (SHARED, INTRA_DISPATCH, INTRA_COMBINE)
        return tuple(kind for kind in _MOE if kind not in beside)

    def issue(self, price: Price) -> float:
        """Return how many seconds the host needs to issue an op."""
        return price.calls * self.device.share["issue"]

    def waits(self, kind: str, back: bool) -> bool:
        """Whether the host must know how many rows a dispatch has before it can issue it."""
        leaves = self.fold.ep * self.fold.etp > 1 or self.job.dispatch == "rank"
        return leaves and kind == DISPATCH and not back and not self.model.router.pad

    def lacking(self, price: Price) -> float:
        """Return how many seconds longer the host takes to issue an op than the GPU takes to run it."""
        return max(0.0, self.issue(price) - price.seconds)

    def totals(self, kind: str, cut: tuple[int, ...], block: BlockSpec | None) -> tuple[Totals, Totals]:
        """Return the seconds of a kind's pieces of these lengths in the forward and in the backward of a block."""
        table, key = self._table_of(kind, block), ("totals", cut)
        totals: tuple[Totals, Totals] | None = table.get(key)
        if totals is None:
            totals = table[key] = self._totals(kind, cut, False, block), self._totals(kind, cut, True, block)
        return totals

    def _totals(self, kind: str, cut: tuple[int, ...], back: bool, block: BlockSpec | None) -> Totals:
        seconds = [self.price(kind, back, tokens, block).seconds for tokens in pieces_of(cut)]
        return Totals(sum(seconds), seconds[0], min(seconds))

    @cached_property
    def ops_table(self) -> Table:
        """The table that ranks share if all their ops cost the same."""
        return self.memo[self.sequences, *self._traits.values()]

    def _table_of(self, kind: str, block: BlockSpec | None) -> Table:
        """Return the table that ranks share if this kind of op in this block costs the same for them."""
        table = self._op_tables.get((kind, block))
        if table is None:
            table = self._op_tables[kind, block] = self.memo[kind, block, self.sequences, self._traits[kind]]
        return table

    @shared_by_fold
    def _network_and_traits(self) -> tuple[Network, dict[str, tuple]]:
        """Return the links under the fold and, for each kind of op, sizes and shapes of groups that its price depends on."""
        network, fold = Network(self.fold, self.device), self.fold
        shape = network.shape
        tensor = fold.tp, shape("tp")
        spread = (shape("dp_cp"), shape("edp")) if self.zero == 3 else ()
        copied = (self.overload,) if self.job.copies else ()  # which copies are worth their way depends on edp, too
        inside = (fold.ep, shape("ep_inside"), *copied)
        rows = (fold.ep, fold.ep_inside) if self.job.dispatch == "rank" or self.job.wire is not None else ()
        traits: dict[str, tuple] = {
            EMBED: tensor,
            PROJECT: tensor,
            GATHER: (*tensor, fold.cp, shape("cp")),
            ATTENTION: (*tensor, fold.cp, shape("cp")),
            FFN: tensor,
            ROUTE: rows,
            SHARED: tensor,
            DISPATCH: (shape("ep_across"), fold.ep_inside, *copied),
            INTRA_DISPATCH: inside,
            EXPERT: (fold.etp, shape("etp"), *inside),
            INTRA_COMBINE: inside,
            COMBINE: (shape("ep_across"), fold.ep_inside, *copied),
            MERGE: rows,
            HEAD: tensor,
        }
        return network, {kind: (*sizes, *spread) for kind, sizes in traits.items()}

    @cached_property
    def weights(self) -> dict[tuple[str, BlockSpec | None], float]:
        """Number of parameters that a rank computes with, by (kind of op, block)."""
        frozen = self._weights(False)
        return {key: count + sum(frozen[key]) for key, count in self.trained.items()}

    @cached_property
    def trained(self) -> dict[tuple[str, BlockSpec | None], float]:
        """The number of those that training changes."""
        return {key: cut + whole for key, (cut, whole) in self._weights(True).items()}

    @shared_by_fold
    def _weights(self, trained: bool) -> dict[tuple[str, BlockSpec | None], tuple[float, float]]:
        """Return (parameters of matrices that TP, or EP and ETP, cut; parameters that every rank, or slice, holds whole)."""
        fold = self.fold
        parts = defaultdict(lambda: (fold.tp, 1), {EXPERT: (fold.ep * fold.etp, fold.ep)})
        counts = count_by_op(self.model, self.model.copies_keys(fold.tp), trained)
        return {key: (cut / parts[key[0]][0], whole / parts[key[0]][1]) for key, (cut, whole) in counts.items()}

    def elements(self, content: Content, trained: bool = True) -> dict[str, float]:
        """Return the number of parameters of stages, by the group family over which their gradients are summed.

        An embedding that two stages share counts with the embedding, and again with the head if `content` has only the head.

        Args:
            trained: whether to count parameters that training changes, or those that it leaves as they are.
        """
        keys = Counter[tuple[str, BlockSpec | None]]()
        for layer, count in content.blocks:
            for kind in kinds_with_weights(layer):
                keys[kind, layer] += count
        keys.update([(EMBED, None)] * content.embedding + [(HEAD, None)] * bool(content.head))
        elements, weights = dict.fromkeys(FAMILY.values(), 0.0), self._weights(trained)
        for (kind, block), count in keys.items():
            cut, whole = weights[kind, block]
            elements["edp" if kind == EXPERT else "dp_cp"] += count * cut
            elements["edp" if kind == EXPERT else "tp_dp_cp"] += count * whole
        shared = self.model.shares_embedding and trained == (self.model.adapter is None)
        if content.head and shared and not content.embedding:
            elements["dp_cp"] += self.model.vocab * self.model.hidden / self.fold.tp
        return elements

    # The kinds of ops.

    def _embed(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        yield from self._embedded(self._rows(tokens) * self.fold.tp, back)

    def _ffn(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        assert block
        assert block.dense
        n = self._rows(tokens)
        yield from self._zero3(FFN, block, back)
        yield from self._normed(n, back)
        yield self._memory((2 if back else 1) * 5 * n * self._width)
        yield from self._changed(tokens, back, block.after + (self.model.residual_scale != 1))
        yield from self._dense(n, block.dense, back)
        yield self._launch(FFN, back)

    def _head(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        n, vocab = self._rows(tokens), self.model.vocab / self.fold.tp
        wide = n * self.fold.tp
        yield from self._tensor(wide, back, ways=1)
        yield from self._products("gemm", wide, self.model.hidden, vocab, back, wide=True)
        yield self._memory((2 if back else 1) * (2 * n * self._width + wide * vocab * (4 + self.device.bytes)))
        yield self._launch(HEAD, back)

    def reduce(self, chunk: Chunk) -> Work:
        """Return the work to reduce a chunk of gradients: an all-reduce, or with ZeRO a reduce-scatter."""
        family = FAMILY[chunk.name]
        return self._travel(family, self.scatter(family, chunk.bytes) if self.zero else self.network.reduce(family, chunk.bytes))

    def scatter(self, family: str, bytes_: float) -> Travel:
        """Return the cost to bring gradients to their owners: a reduce-scatter, or an all-to-all of numbers half as wide."""
        if self.job.gradients:
            return self.network.exchange(family, bytes_ / 2)
        return self.network.gather(family, bytes_)

    @cached_property
    def handover(self) -> Work:
        """The work of a whole handover: activations, or their gradient, from one stage to the next."""
        return self.handover_of(self.job.seq_len // (self.fold.cp * self.fold.tp))

    def handover_of(self, tokens: int) -> Work:
        """Return the work of a piece of a handover."""
        return self._travel("pp", self.network.hand_over(tokens * self.sequences * self._width))


def kinds_with_weights(block: BlockSpec) -> tuple[str, ...]:
    """Return the kinds of ops of a block to which its parameters belong."""
    if not block.moe:
        return ATTENTION, FFN
    return (ATTENTION, ROUTE, *((SHARED,) if block.moe.shared else ()), EXPERT, *((MERGE,) if block.after else ()))


def pieces_of(cut: tuple[int, ...]) -> list[range]:
    """Return the tokens of every piece of a sequence that is cut into these lengths."""
    return [range(end - size, end) for end, size in zip(accumulate(cut), cut, strict=True)]


PRICES: Mapping[str, Callable[[RankCosts, BlockSpec | None, range, bool], Iterator[Work]]] = {
    EMBED: RankCosts._embed, PROJECT: RankCosts._project, GATHER: RankCosts._gather,
    ATTENTION: RankCosts._attention, FFN: RankCosts._ffn, ROUTE: RankCosts._route, DISPATCH: RankCosts._dispatch,
    SHARED: RankCosts._shared, EXPERT: RankCosts._expert, COMBINE: RankCosts._combine, MERGE: RankCosts._merge,
    HEAD: RankCosts._head, INTRA_DISPATCH: RankCosts._intra_dispatch, INTRA_COMBINE: RankCosts._intra_combine,
}  # fmt: skip
"""Kind of op → its cost. COUNTS is left out: planned experts have room for a fixed number of rows, so no counts travel."""
