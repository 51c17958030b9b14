"""What the costs of ops are made of: products, passes over memory, starts of kernels, and traffic.

Counts are those of one rank. An op works on n tokens of the rank's share of the sequences, and on wide = n · tp tokens
between TP's gather and scatter. A backward op has two matrix products for each product of its forward op (for the gradients
of inputs and of weights), passes over twice the memory, and adds the gradients of weights to float32 sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from foldray.blueprint import BlockSpec, FeedForwardSpec, ModelSpec
from foldray.fold import Fold
from foldray.kinds import EMBED, EXPERT
from foldray.planner.candidate import Job
from foldray.planner.device import Device
from foldray.planner.hardware import counts
from foldray.planner.network import Network, Travel
from foldray.planner.shares import Work
from foldray.schedule import COMPUTE


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
        """Yield the work of a feed-forward network that is cut over TP."""
        wide, inner, width = n * self.fold.tp, spec.inner / self.fold.tp, spec.width / self.fold.tp
        yield from self._tensor(wide, back)
        yield from self._products("gemm", wide, self.model.hidden, width, back)
        yield self._memory((2 if back else 1) * wide * (width + inner) * self.device.bytes)
        yield from self._products("gemm", wide, inner, self.model.hidden, back)

    def _tensor(self, wide: float, back: bool, ways: int = 2) -> Iterator[Work]:
        """Yield TP's gather before and scatter after a computation. Backward gathers again, for the gradient of the weights.

        Args:
            ways: 2 for gather and scatter, 1 for the gather alone.
        """
        for _ in range(ways + back):
            yield self._travel("tp", self.network.gather("tp", wide * self._width))

    def _products(self, what: str, rows: float, inside: float, outside: float, back: bool, wide: bool = False) -> Iterator[Work]:
        """Yield the work of a product [rows, inside] × [inside, outside], or of the two products for its gradients.

        Args:
            wide: whether the product is never in fp8.
        """
        if not wide:
            yield Work(COMPUTE, "memory", self.device.casts(rows * (outside if back else inside)))
        for weights, (m, k, n) in enumerate(self._three(rows, inside, outside, back)):
            yield Work(COMPUTE, what, self.device.product(m, k, n, wide), bool(weights))
        if back:
            yield self._memory(counts().sums * inside * outside)._replace(weights=True)

    @staticmethod
    def _three(rows: float, inside: float, outside: float, back: bool) -> tuple[tuple[float, float, float], ...]:
        """Return the shape of the forward product, or those of the products for the gradients of input and, second, weights."""
        return ((rows, outside, inside), (inside, rows, outside)) if back else ((rows, inside, outside),)

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

    def _launch(self, kind: str, back: bool, times: int = 1) -> Work:
        kernels = counts().kernels[kind]
        calls = counts().calls.get(kind, (kernels, 2 * kernels))[back]
        seconds = self.device.launches(times * kernels * (2 if back else 1))
        return Work(COMPUTE, "launch", seconds, calls=times * calls)

    @staticmethod
    def _travel(what: str, travel: Travel) -> Work:
        return Work(travel.lane, what, travel.seconds)
