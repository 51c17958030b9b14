"""What the costs of the ops of MoE layers are made of (`parts.py`): routers, rows that travel, experts, sums.

A row is a token at one of its experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from foldray.blueprint import BlockSpec, MixtureSpec, ModelSpec, overload, pattern_shares, visits_of_a_token
from foldray.costs.candidate import Job
from foldray.costs.copying import Copied
from foldray.costs.parts import Parts
from foldray.costs.shares import Work
from foldray.fold import Fold
from foldray.kinds import EXPERT, MERGE, ROUTE, SHARED

_NUMBER = 4  # bytes of the number of an expert
_GROUP, _SCALE = 128, 4  # numbers of a row in float8 that share a scale, and its bytes (`moe/exchange.py`)


class MixtureParts(Parts):
    """What `Parts` has, and MoE layers."""

    @cached_property
    def overload(self) -> float:
        """Rows of the fullest rank over the mean, by the model's routing pattern. The costs are those of the fullest rank."""
        if self.copied is None or self.copied.copies is None:
            return overload(self.model, self.fold.ep)
        return round(max(self.copied.copies.rank_shares(pattern_shares(self.model) or ())), 9)

    @cached_property
    def copied(self) -> Copied | None:
        """The room for copies of experts; None without any."""
        return self.job.copied(self.fold)

    def copy(self, back: bool) -> Work:
        """Return the work of a block's `copy` on the busiest rank: weights to their copies, or gradients home (`back`)."""
        assert self.copied
        bytes_ = self.copied.moved * (self.copied.sums if back else self.copied.expert)
        # An exchange counts what a rank sends to itself, too.
        return self._travel("ep", self.network.exchange("ep", bytes_ * self.fold.ep / (self.fold.ep - 1)))

    @cached_property
    def travelling(self) -> Travelling:
        """The rows of a token that travel."""
        return travelling(self.job, self.model, self.fold, self.device.bytes, self.overload)

    def _route(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        n, moe = self._rows(tokens), _mixture(block)
        yield from self._normed(n, back)
        yield self._permuted((2 if back else 1) * (2 + 2 * self.travelling.room) * n * self._width)
        yield from self._products("gemm", n, self.model.hidden, moe.experts, back, wide=True)
        yield self._launch(ROUTE, back)
        yield from self._once(ROUTE, back)
        yield from self._written(n * self.travelling.room, out=not back)

    def _shared(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        n, shared = self._rows(tokens), _mixture(block).shared
        assert shared
        yield from self._zero3(SHARED, block, back)
        yield self._memory((2 if back else 1) * 3 * n * self._width)  # its output is added to the residual stream
        yield from self._changed(tokens, back, self.model.residual_scale != 1)
        yield from self._dense(n, shared, back)
        yield self._launch(SHARED, back)

    def _dispatch(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        # All ranks send alike, and the fullest one receives most, or sends most on the way back.
        yield from self._exchanged(tokens, self.travelling.messages(not back, True, back))

    def _combine(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        yield from self._exchanged(tokens, self.travelling.messages(back, False, back))

    def _exchanged(self, tokens: range, messages: list[float]) -> Iterator[Work]:
        """Yield all-to-alls of messages with so many bytes for a row: one of all, if one kernel passes rows on inside a node."""
        across, inside = (self._rows(tokens) * rows for rows in (self.travelling.fullest, self.travelling.inside))
        if self._relayed:
            links = (("ep_across", across), ("ep_inside", inside))
            both = [self.network.exchange(family, rows * sum(messages)) for family, rows in links]
            yield self._travel("ep", max(both, key=attrgetter("seconds")))
            return
        for row_bytes in messages:
            yield self._travel("ep", self.network.exchange("ep_across", across * row_bytes))

    @property
    def _relayed(self) -> bool:
        """Whether one kernel brings rows to their ranks, and passes them on inside a node while others arrive."""
        return bool(self.travelling.beside and self.job.software.relay_kernels)

    def _once(self, kind: str, back: bool) -> Iterator[Work]:
        """Yield the launches that `moe.dispatch: rank` adds to an op. Those around a kernel come with the route."""
        if self._relayed and kind == ROUTE:
            yield self._started(self.job.software.relay_kernels, back)
        elif self.travelling.beside and not self._relayed:
            yield self._launch(f"once_{kind}", back)

    def _intra_dispatch(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        yield from self._passed_on(tokens, sum(self.travelling.beside[: 1 if back else 2]))

    def _intra_combine(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        yield from self._passed_on(tokens)

    def _passed_on(self, tokens: range, beside: float = 0.0) -> Iterator[Work]:
        """Yield all-to-alls inside a node: of rows, and of what is beside them. Nothing rounds these rows."""
        if self._relayed:
            return
        for row_bytes in (self._width, *([beside] if beside else [])):
            sent = self._rows(tokens) * self.travelling.inside * row_bytes
            yield self._travel("ep_inside", self.network.exchange("ep_inside", sent))

    def _expert(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        moe, fold, hidden = _mixture(block), self.fold, self.model.hidden
        rows, local = self._rows(tokens) * moe.topk * fold.etp * self.overload, moe.experts / fold.ep
        arrived, beside = self._rows(tokens) * self.travelling.arrived * fold.etp, self.travelling.beside
        inner, width = moe.expert.inner / fold.etp, moe.expert.width / fold.etp
        yield from self._zero3(EXPERT, block, back)
        # ETP gathers rows before the experts and scatters results after them; in backward the reverse. Numbers of experts have no
        # gradients.
        times, given = 2 if back else 1, beside[:1] if back else beside
        for row_bytes in (self._width, self._width, *given):
            yield self._travel("etp", self.network.gather("etp", arrived * row_bytes))
        if self.travelling.inside and not self._relayed:
            # Copies and sums of rows that are passed on take the device from the experts, whichever stream they are on.
            yield self._permuted(times * 3 * self._rows(tokens) * self.travelling.inside * self._width)
            yield self._launch("once_inside", back)
            if fold.disjoint:  # a rank of the experts waits for rows in this op
                yield from self._intra_combine(block, tokens, back)
                yield from self._intra_dispatch(block, tokens, back)
        # Rows are sorted by expert and back, or copied to their experts and summed. The activation is between the products.
        if beside:
            yield self._permuted(times * (3 * rows + arrived) * self._width)
            yield from self._once(EXPERT, back)
        elif local > 1:
            yield self._permuted(times * 4 * rows * self._width)
        yield self._memory(times * rows * (width + inner + moe.expert.bias * (width + hidden)) * self.device.bytes)
        for inside, outside in ((hidden, width), (inner, hidden)):
            yield from self._products("experts", rows, inside, outside, back, groups=local)
        if adapter := self.model.adapter:
            for has, inside, outside in ((adapter.inwards, hidden, width), (adapter.outwards, inner, hidden)):
                if has:
                    yield from self._adapted("experts", rows, inside, outside, back, groups=local)
        yield self._launch(EXPERT, back)
        if moe.expert.bias:
            yield self._launch("expert_bias", back)
        for out in (True, False):
            yield from self._written(self._rows(tokens) * self.travelling.fullest, out)

    def _merge(self, block: BlockSpec | None, tokens: range, back: bool) -> Iterator[Work]:
        yield self._memory((2 if back else 1) * (self.travelling.mean + 3) * self._rows(tokens) * self._width)
        yield self._launch(MERGE, back)
        assert block
        yield from self._changed(tokens, back, block.after * (2 if block.moe and block.moe.shared else 1))
        yield from self._once(MERGE, back)
        yield from self._written(self._rows(tokens) * self.travelling.mean, out=back)

    def _written(self, rows: float, out: bool) -> Iterator[Work]:
        """Yield the work to write rows for the wire, or to read them. `out`: they are on their way to experts."""
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


class Travelling(NamedTuple):
    """The rows of a token that travel to the experts, and back.

    Args:
        mean: number of rows that a token has.
        fullest: rows of the fullest rank of an expert-parallel group, over the tokens of a rank.
        room: rows that are made of a token, some of which may have nowhere to go.
        beside: bytes of the tensors that travel beside a row: of its weights, and of the numbers of its experts. Empty if
            weights do not travel.
        out, back: bytes of a row on its way to the experts, and on its way back.
        scales: bytes of the scales of a row on its way to the experts, beyond `out`.
        inside: rows that ranks of a node pass on to the fullest one, over the tokens of a rank; 0 if tokens do not travel once
            to each node.
    """

    mean: float
    fullest: float
    room: float
    out: float
    back: float
    beside: tuple[int, ...] = ()
    scales: float = 0.0
    inside: float = 0.0

    def messages(self, out: bool, weights: bool, back: bool) -> list[float]:
        """Return the bytes for a row in each message: to the experts (`out`) or from them, with its weights or without.

        A gradient (`back`) has no numbers of experts.
        """
        beside = sum(self.beside[: 1 if back else 2]) * weights + self.scales * out
        return [self.out if out else self.back, *([beside] if beside else [])]

    @property
    def arrived(self) -> float:
        """Rows that arrive at the fullest rank with their experts, over the tokens of a rank."""
        return self.inside or self.fullest


def travelling(job: Job, model: ModelSpec, fold: Fold, itemsize: int, fuller: float) -> Travelling:
    """Return the rows of a job's tokens. A number of an activation has `itemsize` bytes, and one of a weight at least four.

    Args:
        model: the job's, with its experts where the fold has them (`Job.model_under`).
        fuller: assignments of the fullest rank over the mean.
    """
    topk, ep, places, hidden = model.topk, fold.ep, fold.ep_across, model.hidden
    back = (itemsize if job.wire is None else 2) * hidden
    out, scales = (hidden, _SCALE * math.ceil(hidden / _GROUP)) if job.wire == "float8" else (back, 0)
    if job.dispatch == "assignment":
        return Travelling(topk, topk * fuller, topk, out, back, scales=scales)
    visits, beside = visits_of_a_token(model, places), (max(4, itemsize) * topk, _NUMBER * topk)
    inside = ep * max(visits_of_a_token(model, ep)) if places < ep else 0.0
    return Travelling(sum(visits), places * max(visits), min(topk, places), out, back, beside, scales, inside)
