"""What every op of a step costs one rank: a sequence of lanes and seconds, each with a name for what it is spent on.

Counts are of one rank: n tokens of its piece of the sequences, wide = n · tp of them between TP's gather and scatter. A backward
op multiplies twice what its forward op does (inputs and weights), passes over twice the memory, and adds gradients of weights to
float32 sums. The terms are those of MoE Parallel Folding's section 3 (which traffic a mapping has), those of attention under
slices of FoldMoE's formula (5).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate

from foldray.blueprint import count_by_op
from foldray.fold import Fold
from foldray.kinds import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    EMBED,
    EXPERT,
    FFN,
    HANDOVER,
    HEAD,
    MERGE,
    REDUCE,
    ROUTE,
)
from foldray.planner.candidate import FAMILY, Candidate, Job
from foldray.planner.device import Device
from foldray.planner.layout import Content
from foldray.planner.memo import BlockKey, BlockTables, CutKey, FoldTables, Memo, OpKey, OpTables, PieceKey, Totals
from foldray.planner.network import Network, Travel
from foldray.planner.shares import Price, Work
from foldray.schedule import COMPUTE, Chunk, LaneSeconds, Op

_KERNELS = {EMBED: 4, ATTENTION: 12, "part": 6, FFN: 8, ROUTE: 26, EXPERT: 10, MERGE: 6, HEAD: 12}
"""Launches of a forward op: what torch starts for our modules."""

_SUMS = 8  # bytes that move to add a gradient to its float32 sum, besides the gradient itself


class OpWork:
    """The costs of a candidate's ops.

    Args:
        rank: the costs of its rank, where other candidates have them in common.
    """

    def __init__(self, candidate: Candidate, device: Device, rank: RankCosts | None = None, memo: Memo | None = None):
        self.candidate = candidate
        sequences = candidate.micro_batch / candidate.ordering.batch_degree
        self.rank = rank or RankCosts(candidate.job, candidate.fold, device, sequences, candidate.zero, memo)

    def cost(self, op: Op) -> LaneSeconds:
        """As the clock takes it."""
        return self._price(op).lanes

    def work(self, op: Op) -> tuple[Work, ...]:
        return self._price(op).works

    def _price(self, op: Op) -> Price:
        if op.kind == HANDOVER:
            # Links are duplex, and a position sends while it receives: handovers meet those of their own channel alone.
            return Price.of([self.rank.handover._replace(lane=str(self.candidate.graph.channel(op)))])
        if op.kind == REDUCE:
            return Price.of([self.rank.reduce(self.candidate.reducing.chunk(op))])
        return self.rank.price(op.kind, op.direction == "B", self.candidate.graph.tokens(op))


class RankCosts:
    """The costs of whatever one rank does under a fold.

    Args:
        sequences: of a micro-batch's piece.
        zero: 3 gathers weights in every op.
        memo: what was found already, for all ranks of one job on one device to share.
    """

    def __init__(
        self,
        job: Job,
        fold: Fold,
        device: Device,
        sequences: float,
        zero: int = 1,
        memo: Memo | None = None,
    ):
        self.job, self.model, self.fold, self.device = job, job.model, fold, device
        self.sequences, self.zero = sequences, zero
        self.memo = Memo() if memo is None else memo
        if (fold, zero) not in self.memo.folds:
            network = Network(fold, device)
            self.memo.folds[fold, zero] = FoldTables(network, self._traits(network))
        self.tables = self.memo.folds[fold, zero]
        self.network = self.tables.network

    def price(self, kind: str, back: bool, tokens: range) -> Price:
        """Of an op on these tokens of the local sequence."""
        prices = self._ops[kind].prices
        key = PieceKey(back, tokens.start if kind == ATTENTION else 0, len(tokens))
        found = prices.get(key)
        if found is None:
            found = prices[key] = Price.of(PRICES[kind](self, tokens, back))
        return found

    def totals(self, kind: str, cut: tuple[int, ...], back: bool) -> Totals:
        """Of all pieces of a kind.

        Args:
            cut: their tokens.
        """
        totals, key = self._ops[kind].totals, CutKey(back, cut)
        found = totals.get(key)
        if found is None:
            seconds = [self.price(kind, back, tokens).seconds for tokens in pieces_of(cut)]
            found = totals[key] = Totals(sum(seconds), seconds[0], min(seconds))
        return found

    @cached_property
    def blocks(self) -> BlockTables:
        """Shared by those ranks whose blocks cost the same."""
        key = BlockKey(self.sequences, tuple(self.tables.traits.values()))
        if key not in self.memo.blocks:
            self.memo.blocks[key] = BlockTables()
        return self.memo.blocks[key]

    @cached_property
    def _ops(self) -> dict[str, OpTables]:
        """By kind of op, shared by those ranks for which it costs the same."""
        tables, found = self.memo.ops, {}
        for kind, traits in self.tables.traits.items():
            key = OpKey(kind, self.sequences, traits)
            if key not in tables:
                tables[key] = OpTables()
            found[kind] = tables[key]
        return found

    def _traits(self, network: Network) -> dict[str, tuple]:
        fold, shape = self.fold, network.shape
        tensor = fold.tp, shape("tp")
        spread = (shape("dp_cp"), shape("edp")) if self.zero == 3 else ()
        own: dict[str, tuple] = {
            EMBED: tensor,
            ATTENTION: (*tensor, fold.cp, shape("cp")),
            FFN: tensor,
            ROUTE: tensor if self.model.shared_hidden else (),
            DISPATCH: (shape("ep"),),
            EXPERT: (fold.ep, fold.etp, shape("etp")),
            COMBINE: (shape("ep"),),
            MERGE: (),
            HEAD: tensor,
        }
        return {kind: (*each, *spread) for kind, each in own.items()}

    @cached_property
    def weights(self) -> dict[str, float]:
        """Parameters that a rank computes with, by kind of op, of one block."""
        self.memo.counts = self.memo.counts or count_by_op(self.model)
        parts = defaultdict(lambda: self.fold.tp, expert=self.fold.ep * self.fold.etp)
        return {kind: cut / parts[kind] + whole for kind, (cut, whole) in self.memo.counts.items()}

    def elements(self, content: Content) -> dict[str, float]:
        """Parameters of stages, by the family over which their gradients are summed; a tied embedding stands on both ends."""
        weights, found = self.weights, {"dp_cp": 0.0, "edp": 0.0}
        for kind, count in content.blocks:
            found["dp_cp"] += count * (weights[ATTENTION] + weights[FFN if kind == "dense" else ROUTE])
            found["edp"] += count * weights[EXPERT] if kind == "moe" else 0.0
        if content.embedding:
            found["dp_cp"] += weights[EMBED]
        if content.head:
            found["dp_cp"] += weights[HEAD]
            if self.model.tied_embeddings and not content.embedding:
                found["dp_cp"] += self.model.vocab * self.model.hidden / self.fold.tp
        return found

    # The ops.

    def _embed(self, tokens: range, back: bool) -> Iterator[Work]:
        n = self._rows(tokens)
        yield self._memory((3 if back else 2) * n * self.fold.tp * self._width)
        yield self._travel("tp", self.network.gather("tp", n * self.fold.tp * self._width))
        yield self._launch(EMBED, back)

    def _attention(self, tokens: range, back: bool) -> Iterator[Work]:
        model, fold = self.model, self.fold
        n = self._rows(tokens)
        wide, heads, kv = n * fold.tp, model.heads * model.head_dim / fold.tp, model.kv_heads * model.head_dim / fold.tp
        yield from self._zero3(ATTENTION, back)
        yield self._memory((2 if back else 1) * (5 * n * self._width + 2 * wide * (heads + kv) * self.device.bytes))
        yield from self._tensor(wide, back)
        yield from self._products("gemm", wide, model.hidden, heads + 2 * kv, back)
        keys = tokens.stop * fold.cp * fold.tp - (len(tokens) * fold.cp * fold.tp - 1) / 2
        queries = len(tokens) * fold.tp / (1 if fold.cp == 1 else 2)  # at a time: a slice, or a chunk of the ring's
        core = self.device.attention((2.5 if back else 1) * 4 * wide * keys * heads, queries)
        yield Work(COMPUTE, "attention", core)
        whole = len(tokens) * fold.cp * fold.tp == self.job.seq_len
        if fold.cp > 1:
            # A ring passes keys and values on while it attends to those that have come. Backward it does so again, with their
            # float32 gradients behind them; of slices, those alone are scattered.
            each = (4 + self.device.bytes * whole) if back else self.device.bytes
            travel = self.network.gather("cp", 2 * wide * fold.cp * kv * each)
            hidden = core * (fold.cp - 1) / fold.cp if whole else 0.0
            yield Work(travel.lane, "cp", max(0.0, travel.seconds - hidden))
        if fold.cp > 1 or not whole:
            yield from self._parts(tokens, whole, wide, back)
        yield from self._products("gemm", wide, heads, model.hidden, back)
        yield self._launch(ATTENTION, back)

    def _parts(self, tokens: range, whole: bool, wide: float, back: bool) -> Iterator[Work]:
        """Attention to some keys after others: results weighed against each other, gradients added up, in float32.

        A ring's fullest rank has two of its chunk's parts from every member, and a third one from itself. A slice sees what lies
        before it, and itself.
        """
        model, fold = self.model, self.fold
        chunks = 1 if fold.cp == 1 else 2
        parts = 2 * fold.cp + 1 if whole else 2 * chunks - (tokens.start == 0)
        heads, kv = model.heads * model.head_dim / fold.tp, model.kv_heads * model.head_dim / fold.tp
        queries, keys = parts * wide / chunks, wide * fold.cp if whole else tokens.stop * fold.cp * fold.tp * self.sequences
        moved = (queries * heads + 2 * keys * kv) if back else (queries - wide) * heads
        yield self._memory(moved * (8 + self.device.bytes))
        yield Work(COMPUTE, "launch", self.device.launches(_KERNELS["part"] * (parts if back else parts - chunks)))

    def _ffn(self, tokens: range, back: bool) -> Iterator[Work]:
        n = self._rows(tokens)
        yield from self._zero3(FFN, back)
        yield self._memory((2 if back else 1) * 5 * n * self._width)
        yield from self._dense(n, self.model.ffn_hidden, back)
        yield self._launch(FFN, back)

    def _route(self, tokens: range, back: bool) -> Iterator[Work]:
        n, model = self._rows(tokens), self.model
        yield self._permuted((2 if back else 1) * (2 + 2 * model.topk) * n * self._width)
        yield from self._products("gemm", n, model.hidden, model.experts, back)
        if model.shared_hidden:
            yield from self._zero3(ROUTE, back)
            yield from self._dense(n, model.shared_hidden, back)
        yield self._launch(ROUTE, back)

    def _dispatch(self, tokens: range, back: bool) -> Iterator[Work]:
        yield self._travel("ep", self.network.exchange("ep", self._rows(tokens) * self.model.topk * self._width))

    def _combine(self, tokens: range, back: bool) -> Iterator[Work]:
        yield from self._dispatch(tokens, back)

    def _expert(self, tokens: range, back: bool) -> Iterator[Work]:
        model, fold, device = self.model, self.fold, self.device
        rows, local, inner = self._rows(tokens) * model.topk * fold.etp, model.experts / fold.ep, model.expert_hidden / fold.etp
        yield from self._zero3(EXPERT, back)
        for _ in range(2):  # in, and out; backward the other way round
            yield self._travel("etp", self.network.gather("etp", rows * self._width))
        times = 2 if back else 1
        # Rows into the order of experts and back, and the activation between the two products.
        if local > 1:
            yield self._permuted(times * 4 * rows * self._width)
        yield self._memory(times * (self._inwards + 1) * rows * inner * device.bytes)
        for inside, outside in ((model.hidden, self._inwards * inner), (inner, model.hidden)):
            for m, k, n in self._three(rows / local, inside, outside, back):
                yield Work(COMPUTE, "experts", device.grouped(local, m, k, n))
            if back:
                yield self._memory(_SUMS * local * inside * outside)
        yield self._launch(EXPERT, back)

    def _merge(self, tokens: range, back: bool) -> Iterator[Work]:
        yield self._memory((2 if back else 1) * (self.model.topk + 3) * self._rows(tokens) * self._width)
        yield self._launch(MERGE, back)

    def _head(self, tokens: range, back: bool) -> Iterator[Work]:
        n, vocab = self._rows(tokens), self.model.vocab / self.fold.tp
        wide = n * self.fold.tp
        yield from self._tensor(wide, back, ways=1)
        yield from self._products("gemm", wide, self.model.hidden, vocab, back)
        yield self._memory((2 if back else 1) * (2 * n * self._width + wide * vocab * (4 + self.device.bytes)))
        yield self._launch(HEAD, back)

    def reduce(self, chunk: Chunk) -> Work:
        """A chunk of gradients: an all-reduce, or with ZeRO a reduce-scatter."""
        family = FAMILY[chunk.name]
        travel = self.network.gather if self.zero else self.network.reduce
        return self._travel(family, travel(family, chunk.bytes))

    @cached_property
    def handover(self) -> Work:
        """A micro-batch's activations, or their gradient, from one stage to the next."""
        tokens = self.job.seq_len / (self.fold.cp * self.fold.tp)
        return self._travel("pp", self.network.hand_over(tokens * self.sequences * self._width))

    # Their parts.

    def _dense(self, n: float, inner: float, back: bool) -> Iterator[Work]:
        """A feed-forward network cut over TP."""
        wide, inner = n * self.fold.tp, inner / self.fold.tp
        yield from self._tensor(wide, back)
        yield from self._products("gemm", wide, self.model.hidden, self._inwards * inner, back)
        yield self._memory((2 if back else 1) * (self._inwards + 1) * wide * inner * self.device.bytes)
        yield from self._products("gemm", wide, inner, self.model.hidden, back)

    def _tensor(self, wide: float, back: bool, ways: int = 2) -> Iterator[Work]:
        """Gathered before and scattered behind; backward also gathered again, for the weights' gradient."""
        for _ in range(ways + back):
            yield self._travel("tp", self.network.gather("tp", wide * self._width))

    def _products(self, what: str, rows: float, inside: float, outside: float, back: bool) -> Iterator[Work]:
        for m, k, n in self._three(rows, inside, outside, back):
            yield Work(COMPUTE, what, self.device.product(m, k, n))
        if back:
            yield self._memory(_SUMS * inside * outside)

    @staticmethod
    def _three(rows: float, inside: float, outside: float, back: bool) -> tuple[tuple[float, float, float], ...]:
        """The product forward; backward those for the input's and the weights' gradients."""
        return ((rows, outside, inside), (inside, rows, outside)) if back else ((rows, inside, outside),)

    def _zero3(self, part: str, back: bool) -> Iterator[Work]:
        """Weights gathered over those that share them out; backward their gradients are scattered too."""
        if self.zero < 3:
            return
        family = "edp" if part == EXPERT else "dp_cp"
        whole = self.weights[part] * self.device.bytes
        for _ in range(2 if back else 1):
            yield self._travel(family, self.network.gather(family, whole))

    @property
    def _inwards(self) -> int:
        return len(self.model.activation.inwards)

    @property
    def _width(self) -> float:
        """Bytes of a token."""
        return self.model.hidden * self.device.bytes

    def _rows(self, tokens: range) -> float:
        return len(tokens) * self.sequences

    def _memory(self, moved: float) -> Work:
        return Work(COMPUTE, "memory", self.device.passes(moved))

    def _permuted(self, moved: float) -> Work:
        return Work(COMPUTE, "memory", self.device.passes(moved) / self.device.share["permute"])

    def _launch(self, kind: str, back: bool) -> Work:
        return Work(COMPUTE, "launch", self.device.launches(_KERNELS[kind] * (2 if back else 1)))

    @staticmethod
    def _travel(what: str, travel: Travel) -> Work:
        return Work(travel.lane, what, travel.seconds)


def pieces_of(cut: tuple[int, ...]) -> list[range]:
    """The tokens of every piece of a sequence that is cut into these lengths."""
    return [range(end - size, end) for end, size in zip(accumulate(cut), cut, strict=True)]


PRICES: Mapping[str, Callable[[RankCosts, range, bool], Iterator[Work]]] = {
    EMBED: RankCosts._embed, ATTENTION: RankCosts._attention, FFN: RankCosts._ffn, ROUTE: RankCosts._route,
    DISPATCH: RankCosts._dispatch, EXPERT: RankCosts._expert, COMBINE: RankCosts._combine, MERGE: RankCosts._merge,
    HEAD: RankCosts._head,
}  # fmt: skip
"""What an op of each kind costs. Counts are not predicted: planned experts have room for a fixed number of rows."""
