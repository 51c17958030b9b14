"""The parts of the costs of attention's ops (`RankCosts`).

The cost of attention over slices follows FoldMoE's formula (5), but counts keys causally.
"""

from __future__ import annotations

from collections.abc import Iterator

from foldray.blueprint import AttentionSpec, BlockSpec
from foldray.kinds import ATTENTION, PROJECT
from foldray.planner.hardware import counts
from foldray.planner.network import Travel
from foldray.planner.parts import Parts
from foldray.planner.shares import Work
from foldray.schedule import COMPUTE


class AttentionParts(Parts):
    """What `Parts` has, and attention."""

    def _attention(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        assert block
        spec, fold, shared = block.attention, self.fold, self.fold.cp * self.fold.tp
        wide, own = self._rows(tokens) * fold.tp, spec.cut(fold.tp)
        whole = len(tokens) * shared == self.job.seq_len
        if whole or fold.cp == 1:
            yield from self._projected(block, tokens, back)
        yield self._travel("tp", self.network.gather("tp", wide * self._width))
        seen = spec.sees.pairs(range(tokens.start * shared, tokens.stop * shared)) / (len(tokens) * shared)  # keys per query
        queries = len(tokens) * fold.tp / (1 if fold.cp == 1 else 2)  # per kernel: a slice, or one of CP's 2 chunks
        core = self.device.attention((2.5 if back else 1) * 2 * wide * seen * (own.queries + own.outputs), queries)
        yield Work(COMPUTE, "attention", core)
        if own.sinks:
            yield self._memory(2 * wide * own.outputs * self.device.bytes)
        if fold.cp > 1 and whole:
            # A ring passes keys and values on while it attends to those that have arrived, and an all-gather brings all of them
            # first. Backward brings them again, and their float32 gradients back.
            travel = self._keys(spec, wide, self.device.bytes + 4 * back)
            hidden = core * (fold.cp - 1) / fold.cp if self.job.context == "ring" else 0.0
            yield Work(travel.lane, "cp", max(0.0, travel.seconds - hidden))
        if fold.cp > 1 or not whole:
            yield from self._parts(own, tokens, whole, wide, back)
        yield from self._products("gemm", wide, own.outputs, self.model.hidden, back)
        yield self._launch(ATTENTION, back)
        if not whole and fold.cp > 1:
            yield self._launch(PROJECT, back, times=-1)

    def _project(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        assert block
        yield from self._projected(block, tokens, back)
        yield self._launch(PROJECT, back)

    def _projected(self, block: BlockSpec, tokens: range, back: bool) -> Iterator[Work]:
        """Yield the work for queries, keys and values, with norm, residual and TP's gather."""
        n, own = self._rows(tokens), block.attention.cut(self.fold.tp)
        wide = n * self.fold.tp
        yield from self._zero3(ATTENTION, block, back)
        if block.mtp:
            yield from self._joined(n, back)
        heads = wide * (own.queries + own.keys) * self.device.bytes  # bytes of the queries and keys, which turn
        yield self._memory((2 if back else 1) * (5 * n * self._width + 2 * heads))
        if own.norm != "none":
            yield self._memory((2 if back else 1) * 2 * heads)
            yield self._launch("head_norm", back)
        if own.norm == "all":  # the sums of squares, or their gradients
            yield self._travel("tp", self.network.reduce("tp", 8 * wide))
        if own.bias != "none":
            yield self._memory((2 if back else 1) * wide * (own.queries + own.keys + own.values) * self.device.bytes)
        if own.latent:
            yield from self._latent(own, n, back)
            return
        yield from self._tensor(wide, back, ways=1)
        yield from self._products("gemm", wide, self.model.hidden, own.queries + own.keys + own.values, back)

    def _latent(self, own: AttentionSpec, n: float, back: bool) -> Iterator[Work]:
        """Yield the work of latent attention for queries, keys and values."""
        hidden, wide, narrow = self.model.hidden, n * self.fold.tp, sum(own.downs.values())
        yield from self._products("gemm", n, hidden, narrow, back)
        yield self._memory((2 if back else 1) * 4 * n * narrow * self.device.bytes)
        yield self._travel("tp", self.network.gather("tp", wide * narrow * self.device.bytes))
        if own.latent and not own.latent.query_rank:
            yield from self._tensor(wide, back, ways=1)
        for inside, width in own.inputs.values():
            yield from self._products("gemm", wide, inside or hidden, width, back)

    def _gather(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        """Yield the travel of a slice's keys and values; in backward, of their float32 gradients."""
        assert block
        wide = self._rows(tokens) * self.fold.tp
        yield self._travel("cp", self._keys(block.attention, wide, 4 if back else self.device.bytes))

    def _keys(self, spec: AttentionSpec, wide: float, each: float) -> Travel:
        """Return the travel of keys and values of `wide` tokens per rank, with `each` bytes per number."""
        own = spec.cut(self.fold.tp)
        return self.network.gather("cp", wide * self.fold.cp * (own.keys + own.values) * each)

    def _parts(self, own: AttentionSpec, tokens: range, whole: bool, wide: float, back: bool) -> Iterator[Work]:
        """Yield the work to merge the parts of attention: float32 results in forward, float32 gradients in backward.

        Each part attends to some of the keys. In a ring, the fullest rank has two parts for the keys of every member, and a
        third part for its own keys. A slice (with CP, each of its two chunks on a rank) has one part for all tokens before
        it, if there are any, and one part for itself. So have the chunks of a whole sequence whose keys are gathered; those of
        the fullest rank all have tokens before them.
        """
        fold = self.fold
        chunks = 1 if fold.cp == 1 else 2
        ring = whole and self.job.context == "ring"
        parts = 2 * fold.cp + 1 if ring else 2 * chunks - (tokens.start == 0 and not whole)
        shared = fold.cp * fold.tp
        begin = own.sees.begin(tokens.start * shared)
        queries, keys = parts * wide / chunks, wide * fold.cp if whole else (tokens.stop * shared - begin) * self.sequences
        moved = (queries * own.queries + keys * (own.keys + own.values)) if back else (queries - wide) * own.outputs
        yield self._memory(moved * (8 + self.device.bytes))
        starts = self.device.launches(counts().kernels["part"] * (parts if back else parts - chunks))
        yield Work(COMPUTE, "launch", starts, calls=counts().calls["part"][back] * (parts - chunks))
