"""The parts of the costs of a MoE layer's ops (`RankCosts`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from foldray.blueprint import BlockSpec, MixtureSpec, overload
from foldray.kinds import EXPERT, MERGE, ROUTE
from foldray.planner.hardware import counts
from foldray.planner.parts import Parts
from foldray.planner.rows import Travelling, travelling
from foldray.planner.shares import Work
from foldray.schedule import COMPUTE


class MixtureParts(Parts):
    """What `Parts` has, and MoE layers."""

    @cached_property
    def overload(self) -> float:
        """Rows of the fullest rank over the mean, by the model's routing pattern. The costs are those of the fullest rank."""
        return overload(self.model, self.fold.ep)

    @cached_property
    def travelling(self) -> Travelling:
        """The rows of a token that travel."""
        return travelling(self.job, self.fold, self.device.bytes)

    def _route(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        n, moe = self._rows(tokens), _mixture(block)
        yield self._permuted((2 if back else 1) * (2 + 2 * self.travelling.room) * n * self._width)
        yield from self._products("gemm", n, self.model.hidden, moe.experts, back, wide=True)
        if moe.shared:
            yield from self._zero3(ROUTE, block, back)
            yield from self._dense(n, moe.shared, back)
        yield self._launch(ROUTE, back)
        if self.travelling.beside:
            yield self._launch("once_route", back)
        yield from self._written(n * self.travelling.room, out=not back)

    def _dispatch(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        # All ranks send alike, and the fullest one receives most, or sends most on the way back. Numbers have no gradients.
        yield from self._exchanged(tokens, self.travelling.messages(not back, True, back))

    def _combine(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        yield from self._exchanged(tokens, self.travelling.messages(back, False, back))

    def _exchanged(self, tokens: range, messages: list[float]) -> Iterator[Work]:
        """Yield all-to-alls of messages with so many bytes for a row."""
        for each in messages:
            yield self._travel("ep", self.network.exchange("ep_across", self._rows(tokens) * self.travelling.fullest * each))

    def _expert(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        moe, fold, device, hidden = _mixture(block), self.fold, self.device, self.model.hidden
        rows, local = self._rows(tokens) * moe.topk * fold.etp * self.overload, moe.experts / fold.ep
        arrived, beside = self._rows(tokens) * self.travelling.arrived * fold.etp, self.travelling.beside
        inner, width = moe.expert.inner / fold.etp, moe.expert.width / fold.etp
        yield from self._zero3(EXPERT, block, back)
        # Gather before the experts, scatter after them; in backward the reverse. So it is with what a node passes on.
        times, given = 2 if back else 1, beside[:1] if back else beside
        for each in (self._width, self._width, *given):
            yield self._travel("etp", self.network.gather("etp", arrived * each))
        if self.travelling.inside:
            passed = self._rows(tokens) * self.travelling.inside
            for each in (self._width, self._width, sum(given)):
                yield self._travel("ep_inside", self.network.exchange("ep_inside", passed * each))
            yield self._permuted(times * 3 * passed * self._width)
            yield self._launch("once_inside", back)
        # Rows are sorted by expert and back, or copied to their experts and summed. The activation is between the products.
        if beside:
            yield self._permuted(times * (3 * rows + arrived) * self._width)
            yield self._launch("once_expert", back)
        elif local > 1:
            yield self._permuted(times * 4 * rows * self._width)
        yield self._memory(times * rows * (width + inner + moe.expert.bias * (width + hidden)) * device.bytes)
        for inside, outside in ((hidden, width), (inner, hidden)):
            yield Work(COMPUTE, "memory", device.casts(rows * (outside if back else inside)))
            for weights, (m, k, n) in enumerate(self._three(rows / local, inside, outside, back)):
                yield Work(COMPUTE, "experts", device.grouped(local, m, k, n), bool(weights))
            if back:
                yield self._memory(counts().sums * local * inside * outside)._replace(weights=True)
        yield self._launch(EXPERT, back)
        if moe.expert.bias:
            yield self._launch("expert_bias", back)
        for out in (True, False):
            yield from self._written(self._rows(tokens) * self.travelling.fullest, out)

    def _merge(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        yield self._memory((2 if back else 1) * (self.travelling.mean + 3) * self._rows(tokens) * self._width)
        yield self._launch(MERGE, back)
        if self.travelling.beside:
            yield self._launch("once_merge", back)
        yield from self._written(self._rows(tokens) * self.travelling.mean, out=back)

    def _written(self, rows: float, out: bool) -> Iterator[Work]:
        """Yield the work to write rows for the wire, or to read them.

        Args:
            rows: number of rows.
            out: whether they are on their way to experts.
        """
        if self.job.wire is None or (self.fold.ep_across == 1 and not self.fold.disjoint):
            return
        scaled = out and self.job.wire == "float8"
        # The largest number of each group is found first, in a pass of its own.
        written = self.travelling.out + self.travelling.scales if out else self.travelling.back
        yield self._memory(rows * ((2 if scaled else 1) * self._width + written))
        yield self._launch("scaled" if scaled else "narrow", back=False)


def _mixture(block: BlockSpec | None) -> MixtureSpec:
    assert block
    assert block.moe
    return block.moe
