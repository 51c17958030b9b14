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
from typing import Literal, NamedTuple

from foldray.blueprint import count_by_op
from foldray.fold import Fold
from foldray.kinds import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    EMBED,
    EXCHANGES,
    EXPERT,
    FFN,
    HANDOVER,
    HEAD,
    MERGE,
    OP_KINDS,
    REDUCE,
    ROUTE,
)
from foldray.planner.candidate import FAMILY, Candidate, Job
from foldray.planner.device import Device
from foldray.planner.network import Network, Travel
from foldray.schedule import COMPUTE, Chunk, Op, Slicing

_KERNELS = {EMBED: 4, ATTENTION: 12, "part": 6, FFN: 8, ROUTE: 26, EXPERT: 10, MERGE: 6, HEAD: 12}
"""Launches of a forward op: what torch starts for our modules."""

Hiding = Literal["nothing", "within", "all"]
"""What a schedule may hide of all-to-alls: none of them, those inside of blocks that drain, or any."""

_CHAIN = (ROUTE, DISPATCH, EXPERT, COMBINE, MERGE)
_SUMS = 8  # bytes that move to add a gradient to its float32 sum, besides the gradient itself


class Work(NamedTuple):
    """Seconds on a lane, and what for: "gemm", "experts", "attention", "memory", "launch", or a group family."""

    lane: str
    what: str
    seconds: float


class _Took(NamedTuple):
    """Seconds of pieces of one kind: of all, of the first, of the shortest."""

    total: float
    first: float
    least: float


class OpWork:
    """The costs of a candidate's ops.

    Args:
        rank: the costs of its rank, where other candidates have them in common.
    """

    def __init__(self, candidate: Candidate, device: Device, rank: RankCosts | None = None):
        self.candidate, self.graph = candidate, candidate.graph
        sequences = candidate.micro_batch / candidate.ordering.batch_degree
        self.rank = rank or RankCosts(candidate.job, candidate.fold, device, sequences, candidate.zero)

    def cost(self, op: Op) -> tuple[tuple[str, float], ...]:
        """As the clock takes it."""
        return tuple((lane, seconds) for lane, _, seconds in self.work(op)) or ((COMPUTE, 0.0),)

    def work(self, op: Op) -> tuple[Work, ...]:
        if op.kind == HANDOVER:
            # Links are duplex, and a position sends while it receives: handovers meet those of their own channel alone.
            return (self.rank.handover._replace(lane=str(self.graph.channel(op))),)
        if op.kind == REDUCE:
            return self.rank.reduce(self.candidate.reducing.chunk(op))
        return self.rank.of(op.kind, op.direction == "B", self.graph.tokens(op))


class RankCosts:
    """The costs of whatever one rank does under a fold.

    Args:
        sequences: of a micro-batch's piece.
        zero: 3 gathers weights in every op.
        known: what was found already, for all ranks of one job on one device to share.
    """

    def __init__(
        self,
        job: Job,
        fold: Fold,
        device: Device,
        sequences: float,
        zero: int = 1,
        known: dict | None = None,
    ):
        self.job, self.model, self.fold, self.device = job, job.model, fold, device
        self.sequences, self.zero = sequences, zero
        self.known: dict = {} if known is None else known
        self.network = self.known.setdefault(("network", fold), Network(fold, device))

    def of(self, kind: str, back: bool, tokens: range) -> tuple[Work, ...]:
        """An op on these tokens of the local sequence."""
        key = kind, back, tokens if kind == ATTENTION else len(tokens), self.traits[kind]
        found = self.known.get(key)
        if found is None:
            found = tuple(each for each in PRICES[kind](self, tokens, back) if each.seconds)
            self.known[key] = found
        return found

    @cached_property
    def traits(self) -> dict[str, tuple]:
        """By kind of op, all of the fold that its costs depend on."""
        fold, shape = self.fold, self.network.shape
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
        return {kind: (self.sequences, *each, *spread) for kind, each in own.items()}

    @cached_property
    def weights(self) -> dict[str, float]:
        """Parameters that a rank computes with, by kind of op, of one block."""
        if "counts" not in self.known:
            self.known["counts"] = count_by_op(self.model)
        parts = defaultdict(lambda: self.fold.tp, expert=self.fold.ep * self.fold.etp)
        return {kind: cut / parts[kind] + whole for kind, (cut, whole) in self.known["counts"].items()}

    def elements(self, kinds: Mapping[str, int], first: bool, last: bool) -> dict[str, float]:
        """Parameters of a stage's blocks, by the family over which their gradients are summed.

        Args:
            kinds: of its blocks, and how many there are of each.
            first, last: whether it has the embedding, the head; a tied embedding stands on both.
        """
        weights, found = self.weights, {"dp_cp": 0.0, "edp": 0.0}
        for kind, count in kinds.items():
            found["dp_cp"] += count * (weights[ATTENTION] + weights[FFN if kind == "dense" else ROUTE])
            found["edp"] += count * weights[EXPERT] if kind == "moe" else 0.0
        found["dp_cp"] += first * weights[EMBED] + last * weights[HEAD]
        if last and not first and self.model.tied_embeddings:
            found["dp_cp"] += self.model.vocab * self.model.hidden / self.fold.tp
        return found

    def block_floor(self, kind: str, again: tuple[str, ...], slicing: Slicing, how: Hiding) -> tuple[float, float]:
        """Seconds of a block forward and backward, at least.

        Args:
            kind: dense or moe.
            again: kinds of ops that are computed again.
            slicing: of the local sequences.
            how: much of what travels can be hidden.
        """
        key = "floor", kind, again, slicing, how, self.alike
        if key not in self.known:
            self.known[key] = self._way(kind, (), slicing, how, False), self._way(kind, again, slicing, how, True)
        return self.known[key]

    def _way(self, kind: str, again: tuple[str, ...], slicing: Slicing, how: Hiding, back: bool) -> float:
        """One direction. What computes goes one after another, and so does what travels.

        A block that drains begins with attention and routing (backward, ends with them) of a piece, which nothing travels beside,
        and ends with a sum; and it ends no sooner than a piece comes back from the last expert.
        """
        kinds = (ATTENTION, FFN) if kind == "dense" else (ATTENTION, *_CHAIN)
        took = {each: self._took(each, slicing, back) for each in kinds}
        computed = sum(took[each].total for each in kinds if each not in EXCHANGES)
        repeated = sum(self._took(each, slicing, False).total for each in kinds if each in again)
        if kind == "dense":
            return computed + repeated
        travels, merge = took[DISPATCH].total + took[COMBINE].total, took[MERGE]
        if how == "nothing":
            return computed + repeated + travels
        if how == "all":
            return max(computed + repeated, travels)
        bound_by_link = took[ATTENTION].first + took[ROUTE].least + travels + merge.least
        last_one_back = computed - merge.total + merge.least + took[COMBINE].least
        return max(computed + repeated, bound_by_link, last_one_back)

    def _took(self, kind: str, slicing: Slicing, back: bool) -> _Took:
        """Of all pieces of a kind."""
        cut = slicing.attention if OP_KINDS[kind].cut == "slices" else slicing.moe
        key = "took", kind, cut, back, self.traits[kind]
        if key not in self.known:
            pieces = [range(end - size, end) for end, size in zip(accumulate(cut), cut, strict=True)]
            seconds = [sum(work.seconds for work in self.of(kind, back, tokens)) for tokens in pieces]
            self.known[key] = _Took(sum(seconds), seconds[0], min(seconds))
        return self.known[key]

    @cached_property
    def alike(self) -> int:
        """A number that those ranks have in common whose blocks cost the same."""
        return self.known.setdefault(("alike", *self.traits.values()), len(self.known))

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

    def reduce(self, chunk: Chunk) -> tuple[Work, ...]:
        """A chunk of gradients: an all-reduce, or with ZeRO a reduce-scatter."""
        family = FAMILY[chunk.name]
        travel = self.network.gather if self.zero else self.network.reduce
        return (self._travel(family, travel(family, chunk.bytes)),)

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


PRICES: Mapping[str, Callable[[RankCosts, range, bool], Iterator[Work]]] = {
    EMBED: RankCosts._embed, ATTENTION: RankCosts._attention, FFN: RankCosts._ffn, ROUTE: RankCosts._route,
    DISPATCH: RankCosts._dispatch, EXPERT: RankCosts._expert, COMBINE: RankCosts._combine, MERGE: RankCosts._merge,
    HEAD: RankCosts._head,
}  # fmt: skip
"""What an op of each kind costs. Counts are not predicted: planned experts have room for a fixed number of rows."""
