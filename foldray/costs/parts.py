"""What the costs of ops are made of: products, passes over memory, starts of kernels, and traffic.

Counts are those of one rank. An op works on n tokens of the rank's share of the sequences, and on wide = n · tp tokens
between TP's gather and scatter. A backward op has two matrix products for each product of its forward op (for the gradients
of inputs and of weights), passes over twice the memory, and adds the gradients of weights to float32 sums.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from foldray.blueprint import AttentionSpec, BlockSpec, FeedForwardSpec, ModelSpec
from foldray.clock import COMPUTE
from foldray.costs.candidate import Job
from foldray.costs.device import FLOAT32, Device
from foldray.costs.hardware import counts
from foldray.costs.network import Network, Travel
from foldray.costs.shares import Work
from foldray.fold import Fold
from foldray.kinds import ATTENTION, EMBED, EXPERT, PROJECT

LINEAR_CHUNK = 64  # tokens of a chunk of linear attention (`kernels/delta.py`)


class Parts(ABC):
    """The parts of the costs of a rank's ops (`RankCosts`)."""

    job: Job
    model: ModelSpec
    fold: Fold
    device: Device
    network: Network
    sequences: float
    zero: int

    @property
    @abstractmethod
    def weights(self) -> Mapping[tuple[str, BlockSpec | None], float]:
        """Number of parameters that a rank computes with, by (kind of op, block)."""

    def _dense(self, n: float, spec: FeedForwardSpec, back: bool) -> Iterator[Work]:
        """Yield the work of a feed-forward network that TP cuts."""
        wide, inner, width = n * self.fold.tp, spec.inner / self.fold.tp, spec.width / self.fold.tp
        yield from self._tensor(wide, back)
        yield from self._products("gemm", wide, self.model.hidden, width, back)
        yield self._memory((2 if back else 1) * wide * (width + inner) * self.device.bytes)
        yield from self._products("gemm", wide, inner, self.model.hidden, back)

    def _tensor(self, wide: float, back: bool, ways: int = 2) -> Iterator[Work]:
        """Yield TP's gather before a computation and, with two `ways`, its scatter after it.

        Backward gathers again, for the gradient of the weights.
        """
        for _ in range(ways + back):
            yield self._travel("tp", self.network.gather("tp", wide * self._width))

    def _products(
        self,
        what: str,
        rows: float,
        inside: float,
        outside: float,
        back: bool,
        wide: bool = False,
        groups: float = 1,
        trained: bool = False,
    ) -> Iterator[Work]:
        """Yield the work of a product [rows, inside] × [inside, outside], or of the two products for its gradients.

        Args:
            wide: whether the product is never in fp8.
            groups: number of matrices of weights, among which the rows are spread evenly.
            trained: whether the weights are those of adapters. All others are frozen if there are adapters.
        """
        if not wide:
            yield Work(COMPUTE, "memory", self.device.casts(rows * (outside if back else inside)))
        m, frozen = rows / groups, self.model.adapter is not None and not trained
        # The gradient of the input, then that of the weights.
        shapes = ((m, outside, inside), (inside, m, outside)) if back else ((m, inside, outside),)
        for weights, shape in enumerate(shapes[:1] if frozen else shapes):
            yield Work(COMPUTE, what, self.device.product(*shape, wide, groups), bool(weights))
        if back and not frozen:
            sums = counts().sums * self.job.software.gradients / FLOAT32
            yield self._memory(sums * groups * inside * outside)._replace(weights=True)

    def _adapted(self, what: str, rows: float, inside: float, outside: float, back: bool, groups: float = 1) -> Iterator[Work]:
        """Yield the work of an adapter: two narrow products, and a sum with the product beside it."""
        assert self.model.adapter
        rank = self.model.adapter.rank
        for narrow in ((inside, rank), (rank, outside)):
            yield from self._products(what, rows, narrow[0], narrow[1], back, groups=groups, trained=True)
        yield self._memory(3 * rows * (inside if back else outside) * self.device.bytes)
        yield self._launch("adapter", back)

    def _embedded(self, wide: float, back: bool) -> Iterator[Work]:
        """Yield the work for rows of the embedding."""
        yield self._memory((3 if back else 2) * wide * self._width)
        yield self._travel("tp", self.network.gather("tp", wide * self._width))
        yield self._launch(EMBED, back)

    def _joined(self, n: float, back: bool) -> Iterator[Work]:
        """Yield the work with which a block of multi-token prediction begins: an embedding, three norms, and a product."""
        yield from self._embedded(n * self.fold.tp, back)
        yield self._memory((2 if back else 1) * 10 * n * self._width)
        yield self._launch("head_norm", back)
        yield from self._products("gemm", n, 2 * self.model.hidden, self.model.hidden, back)

    def _normed(self, n: float, back: bool) -> Iterator[Work]:
        """Yield the work of a norm that runs again in backward (`Job.again`)."""
        if back and "layernorm" in self.job.again:
            yield self._memory(2 * n * self._width)
            yield self._started(1, back=False)

    def _zero3(self, part: str, block: BlockSpec | None, back: bool) -> Iterator[Work]:
        """Yield ZeRO-3's gather of weights over the ranks that share them. Backward also scatters their gradients."""
        if self.zero < 3:
            return
        family = "edp" if part == EXPERT else "dp_cp"
        whole = self.weights[part, block] * self.device.bytes
        for _ in range(2 if back else 1):
            yield self._travel(family, self.network.gather(family, whole))

    @property
    def _width(self) -> float:
        """Bytes of one token's activation."""
        return self.model.hidden * self.device.bytes

    def _rows(self, tokens: range) -> float:
        return len(tokens) * self.sequences

    def _memory(self, moved: float) -> Work:
        return Work(COMPUTE, "memory", self.device.passes(moved))

    def _permuted(self, moved: float) -> Work:
        return Work(COMPUTE, "memory", self.device.passes(moved) / self.device.share["permute"])

    def _changed(self, tokens: range, back: bool, times: int) -> Iterator[Work]:
        """Yield the work to normalize or multiply what is added to the residual stream."""
        if times:
            yield self._memory((2 if back else 1) * times * 2 * self._rows(tokens) * self._width)

    def _launch(self, kind: str, back: bool, times: int = 1) -> Work:
        kernels = counts().kernels[kind]
        calls = counts().calls.get(kind, (kernels, 2 * kernels))[back]
        return self._started(times * kernels, back, times * calls)

    def _started(self, kernels: int, back: bool, calls: float | None = None) -> Work:
        """Return the work to start kernels, twice as many in backward. The host's calls are as many, unless they are given."""
        started = kernels * (2 if back else 1)
        return Work(COMPUTE, "launch", self.device.launches(started), calls=started if calls is None else calls)

    @staticmethod
    def _travel(what: str, travel: Travel) -> Work:
        return Work(travel.lane, what, travel.seconds)


class LinearFlops(NamedTuple):
    """FLOPs of linear attention's forward over the tokens of a sequence: of all outputs, and of the map of states."""

    outputs: float
    maps: float


def linear_flops(local: AttentionSpec, tokens: int) -> LinearFlops:
    """Return the FLOPs of the products of chunks (`kernels/delta.py`) of this rank's heads."""
    chunk, keys, values = min(LINEAR_CHUNK, tokens), local.key_dim, local.value_dim
    # With a decay of each column, each head of values has scores of its own, of earlier tokens only.
    scores = 2 * chunk * keys * local.kv_heads if local.decays == local.heads else (chunk - 1) * keys * local.heads
    # The triangular system has half of a product's FLOPs. Then W · S, and K · U.
    solved = chunk * (keys + values) + 4 * keys * values
    read = 2 * keys * values + 2 * chunk * values
    wider = chunk * (2 * keys + values) + 4 * keys * (keys + values)
    return LinearFlops(tokens * (2 * scores + local.heads * (solved + read)), tokens * (scores + local.heads * wider))


class AttentionParts(Parts):
    """What `Parts` has, and attention. Its cost over slices follows FoldMoE's formula (5), but counts keys causally."""

    def _attention(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        assert block
        spec, fold, shared = block.attention, self.fold, self.fold.cp * self.fold.tp
        wide, local = self._rows(tokens) * fold.tp, spec.cut(fold.tp)
        whole = len(tokens) * shared == self.job.seq_len
        if whole or fold.cp == 1:
            yield from self._projected(block, tokens, back)
        yield self._travel("tp", self.network.gather("tp", wide * self._width))
        if spec.linear:
            yield from self._linear(block, tokens, whole, back)
            return
        seen = spec.sees.pairs(range(tokens.start * shared, tokens.stop * shared)) / (len(tokens) * shared)  # keys per query
        queries = len(tokens) * fold.tp / (1 if fold.cp == 1 else 2)  # per kernel: a slice, or one of CP's 2 chunks
        core = self.device.attention((2.5 if back else 1) * 2 * wide * seen * (local.queries + local.outputs), queries)
        yield Work(COMPUTE, "attention", core)
        if back and "core_attn" in self.job.again:
            yield Work(COMPUTE, "attention", core / 2.5)
            yield self._started(1, back=False)
        factors = self.model.residual_scale != 1
        yield from self._changed(tokens, back, block.after + factors)
        if local.gates:
            yield self._memory((2 if back else 1) * wide * (2 * local.outputs + local.gates) * self.device.bytes)
        if local.sinks:
            yield self._memory(2 * wide * local.outputs * self.device.bytes)
        if fold.cp > 1 and whole:
            # A ring passes keys and values on while it attends to those that have arrived, and an all-gather brings all of them
            # first. Backward brings them again, and their float32 gradients back.
            travel = self._keys(spec, wide, self.device.bytes + 4 * back)
            hidden = core * (fold.cp - 1) / fold.cp if self.job.context == "ring" else 0.0
            yield Work(travel.lane, "cp", max(0.0, travel.seconds - hidden))
        if fold.cp > 1 or not whole:
            yield from self._parts(local, tokens, whole, wide, back)
        yield from self._products("gemm", wide, local.outputs, self.model.hidden, back)
        if self.model.adapter and "out" in self.model.adapter.attention:
            yield from self._adapted("gemm", wide, local.outputs, self.model.hidden, back)
        yield self._launch(ATTENTION, back)
        if not whole and fold.cp > 1:
            yield self._launch(PROJECT, back, times=-1)

    def _linear(self, block: BlockSpec, tokens: range, whole: bool, back: bool) -> Iterator[Work]:
        """Yield the work of linear attention behind its first product (`model/linear.py`).

        Backward computes all again first, and then has two products for each. With CP, the map of states comes first, and is
        gathered; the maps of all chunks then lead to a rank's own.
        """
        fold, local = self.fold, block.attention.cut(self.fold.tp)
        wide, times, maps = self._rows(tokens) * fold.tp, 3 if back else 1, 0 if fold.cp == 1 else 2
        yield self._changed_linear(local, wide, times * (1 + (maps > 0)))
        flops, chunks = linear_flops(local, len(tokens) * fold.tp), math.ceil(len(tokens) * fold.tp / max(1, maps) / LINEAR_CHUNK)
        yield Work(COMPUTE, "attention", self.device.small_products(times * flops.outputs * self.sequences))
        runs = [("linear", max(1, maps))]
        if maps:
            yield Work(COMPUTE, "attention", self.device.small_products(times * flops.maps * self.sequences))
            runs.append(("map", maps))
            if whole:
                yield self._travel("cp", self._keys(block.attention, wide, self.device.bytes))
            width = local.key_dim + local.value_dim
            every = maps * fold.cp * self.sequences * local.heads * local.key_dim * width * max(FLOAT32, self.device.bytes)
            yield self._travel("cp", self.network.gather("cp", every))
        for kind, count in runs:
            kernels = count * (counts().kernels[kind] + chunks * counts().kernels[f"{kind}_chunk"])
            kernels += count * counts().kernels["columns"] * (local.decays > local.heads)
            # Backward has twice as many kernels as forward, behind those that run again.
            yield Work(COMPUTE, "launch", self.device.launches(times * kernels), calls=times * kernels)
        factors = self.model.residual_scale != 1
        yield from self._changed(tokens, back, block.after + factors)
        yield from self._products("gemm", wide, local.outputs, self.model.hidden, back)
        yield self._launch(ATTENTION, back)
        if not whole and fold.cp > 1:
            yield self._launch(PROJECT, back, times=-1)

    def _changed_linear(self, local: AttentionSpec, wide: float, times: float) -> Work:
        """Return the passes over memory of linear attention, in float32: the convolution reads and writes what it mixes for each
        tap, and each head makes some matrices of a chunk and some vectors of keys and values."""
        assert local.linear
        mixed = sum(local.mixed.values())
        numbers = mixed * (4 + 3 * local.linear.taps) + 3 * local.outputs
        numbers += local.heads * (8 * LINEAR_CHUNK + 6 * (local.key_dim + local.value_dim))
        if local.decays > local.heads:  # each halving of a chunk multiplies queries and keys by their decays
            numbers += 10 * (LINEAR_CHUNK.bit_length() - 1) * local.decays
        return self._memory(times * wide * numbers * max(FLOAT32, self.device.bytes))

    def _project(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        assert block
        yield from self._projected(block, tokens, back)
        yield self._launch(PROJECT, back)

    def _projected(self, block: BlockSpec, tokens: range, back: bool) -> Iterator[Work]:
        """Yield the work for queries, keys and values, with norm, residual and TP's gather."""
        n, local = self._rows(tokens), block.attention.cut(self.fold.tp)
        wide = n * self.fold.tp
        yield from self._zero3(ATTENTION, block, back)
        if block.mtp:
            yield from self._joined(n, back)
        yield from self._normed(n, back)
        turning = 0 if local.linear else local.queries + local.keys
        heads = wide * turning * self.device.bytes  # bytes of queries and keys, which rope rotates
        yield self._memory((2 if back else 1) * (5 * n * self._width + 2 * heads))
        if local.norm != "none":
            yield self._memory((2 if back else 1) * 2 * heads)
            yield self._launch("head_norm", back)
        if local.norm == "all":  # the sums of squares, or their gradients
            yield self._travel("tp", self.network.reduce("tp", 8 * wide))
        made = local.queries + local.keys + local.values
        if local.linear:
            made = sum(width for inside, width in local.inputs.values() if not inside)
        if local.bias != "none":
            yield self._memory((2 if back else 1) * wide * made * self.device.bytes)
        if local.latent:
            yield from self._latent(local, n, back)
            return
        yield from self._tensor(wide, back, ways=1)
        yield from self._products("gemm", wide, self.model.hidden, made, back)
        for part in self.model.adapter.attention if self.model.adapter else ():
            if part in local.inputs:
                yield from self._adapted("gemm", wide, self.model.hidden, local.inputs[part][1], back)
        if local.downs:
            yield from self._narrowed(local, n, back)

    def _narrowed(self, local: AttentionSpec, n: float, back: bool) -> Iterator[Work]:
        """Yield the work for what Kimi Delta Attention makes from narrow vectors, and to put it beside the rest."""
        wide, narrow, every = n * self.fold.tp, sum(local.downs.values()), sum(width for _, width in local.inputs.values())
        yield from self._products("gemm", n, self.model.hidden, narrow, back)
        yield self._travel("tp", self.network.gather("tp", wide * narrow * self.device.bytes))
        for inside, width in local.inputs.values():
            if inside:
                yield from self._products("gemm", wide, inside, width, back)
        yield self._memory((2 if back else 1) * 2 * wide * every * self.device.bytes)

    def _latent(self, local: AttentionSpec, n: float, back: bool) -> Iterator[Work]:
        """Yield the work of latent attention for queries, keys and values."""
        hidden, wide, narrow = self.model.hidden, n * self.fold.tp, sum(local.downs.values())
        yield from self._products("gemm", n, hidden, narrow, back)
        yield self._memory((2 if back else 1) * 4 * n * narrow * self.device.bytes)
        yield self._travel("tp", self.network.gather("tp", wide * narrow * self.device.bytes))
        if local.latent and not local.latent.query_rank:
            yield from self._tensor(wide, back, ways=1)
        for inside, width in local.inputs.values():
            yield from self._products("gemm", wide, inside or hidden, width, back)
            if back and "mla_up_proj" in self.job.again:
                yield from self._products("gemm", wide, inside or hidden, width, False)
                yield self._started(1, back=False)

    def _gather(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        """Yield the travel of a slice's keys and values; in backward, of float32 gradients. Those of tails are not wider."""
        assert block
        wide = self._rows(tokens) * self.fold.tp
        wider = back and not block.attention.linear
        yield self._travel("cp", self._keys(block.attention, wide, 4 if wider else self.device.bytes))

    def _keys(self, spec: AttentionSpec, wide: float, itemsize: float) -> Travel:
        """Return the travel of keys and values of `wide` tokens per rank, with `itemsize` bytes per number; of linear attention,
        that of the last tokens of each rank's two chunks."""
        local = spec.cut(self.fold.tp)
        if spec.linear:
            return self.network.gather("cp", 2 * self.fold.cp * self.sequences * local.tail * itemsize)
        return self.network.gather("cp", wide * self.fold.cp * (local.keys + local.values) * itemsize)

    def _parts(self, local: AttentionSpec, tokens: range, whole: bool, wide: float, back: bool) -> Iterator[Work]:
        """Yield the work to merge the parts of attention: float32 results in forward, float32 gradients in backward.

        Each part attends to some of the keys. In a ring, the fullest rank has two parts for the keys of every member, and a
        third part for its own keys. A slice (with CP, each of its two chunks on a rank) has one part for all tokens before
        it, if there are any, and one part for itself. The chunks of a whole sequence whose keys are gathered have the same
        parts, and on the fullest rank every chunk has tokens before it.
        """
        fold = self.fold
        chunks = 1 if fold.cp == 1 else 2
        ring = whole and self.job.context == "ring"
        parts = 2 * fold.cp + 1 if ring else 2 * chunks - (tokens.start == 0 and not whole)
        shared = fold.cp * fold.tp
        begin = local.sees.begin(tokens.start * shared)
        queries, keys = parts * wide / chunks, wide * fold.cp if whole else (tokens.stop * shared - begin) * self.sequences
        moved = (queries * local.queries + keys * (local.keys + local.values)) if back else (queries - wide) * local.outputs
        yield self._memory(moved * (8 + self.device.bytes))
        starts = self.device.launches(counts().kernels["part"] * (parts if back else parts - chunks))
        yield Work(COMPUTE, "launch", starts, calls=counts().calls["part"][back] * (parts - chunks))
