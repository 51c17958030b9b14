"""Seconds of computation on one GPU: matrix products, attention, passes over memory.

A matrix product takes its FLOPs divided by the speed that its shape reaches, or the time to stream its operands, whichever
is longer (roofline). The shape matters because of waves: a product is cut into tiles, the GPU computes as many tiles at once
as it has multiprocessors, and the last wave is seldom full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from foldray.costs.candidate import Job
from foldray.costs.hardware import Hardware, constants, counts

FLOAT32, INT64 = 4, 8
"""Bytes of an element."""
_NARROW: Mapping[str, float] = {"fp8": 4, "mxfp8": 4 + 2 / 32}
"""Dtypes of products alone → bytes per element to read 2 bytes and write two copies, one of them transposed. A copy in MXFP8 has
a scale of one byte for each block of 32 (Open Compute's microscaling formats)."""


@dataclass(frozen=True)
class Device:
    """One GPU of a cluster that computes in one dtype.

    Args:
        dtype: dtype of matrix products, as in hardware files.
        bytes: bytes of an element of activations and weights.
        changed: constants that replace those of the files.
    """

    hardware: Hardware
    dtype: str = "bf16"
    bytes: int = 2
    changed: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, hardware: Hardware, changed: Mapping[str, float] | None = None) -> Device:
        """Return the device for a job's dtype."""
        return cls(hardware, job.dtype, job.itemsize, changed or {})

    @cached_property
    def share(self) -> Mapping[str, float]:
        """All constants by name. Those of the hardware file replace defaults, and changed ones replace both."""
        return {name: row.value for name, row in constants().items()} | self.hardware.constants | dict(self.changed)

    @cached_property
    def peak(self) -> float:
        return self.hardware.peak(self.dtype)

    @property
    def fp8(self) -> bool:
        """Whether the products of feed-forward networks and of attention's projections are in fp8, or in MXFP8.

        As in Transformer Engine, attention itself, the router and the head stay in 16 bits, and so do activations and weights.
        """
        return self.dtype in _NARROW

    @cached_property
    def _wide_peak(self) -> float:
        """FLOP/s of the products that stay in 16 bits under fp8."""
        return self.hardware.peak("bf16") if self.fp8 else self.peak

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of element-wise kernels."""
        return self.hardware.memory_gb_s * 1e9 * self.share["memory"]

    def product(self, rows: float, inner: float, columns: float, wide: bool = False, groups: float = 1) -> float:
        """Return the seconds of products [rows, inner] × [inner, columns] in one kernel.

        Args:
            wide: whether the products are never in fp8.
            groups: number of products.
        """
        if not rows:
            return 0.0
        flops = 2 * groups * rows * inner * columns
        streamed = groups * self.bytes * (rows * inner + inner * columns + rows * columns)
        peak, waves = self._wide_peak if wide else self.peak, full_waves(self.hardware.processors, rows, columns, groups)
        share = self.share["gemm"] * _between(self.hardware.gemm, flops) * (self.share["grouped"] if groups > 1 else 1.0)
        return max(flops / (peak * share * waves), streamed / self.bandwidth)

    def attention(self, flops: float, tokens: float) -> float:
        """Return the seconds of attention's scores and weighted sums.

        Args:
            flops: FLOPs, counted causally.
            tokens: number of queries that one kernel computes. Small slices reach a smaller share of peak.
        """
        return flops / (self._wide_peak * self.share["attention"] * _between(self.hardware.attention, tokens))

    def small_products(self, flops: float) -> float:
        """Return the seconds of many small products in at least float32, at most as fast as those of the computation's dtype."""
        peak = min(self._wide_peak, self.hardware.peak_tflops.get("fp32", math.inf) * 1e12)
        return flops / (peak * self.share["gemm"] * self.share["grouped"])

    def passes(self, moved: float) -> float:
        """Return the seconds to read and write `moved` bytes in all."""
        return moved / self.bandwidth

    def casts(self, elements: float) -> float:
        """Return the seconds to cast an operand of products to fp8: an input in forward, a gradient in backward."""
        return self.passes(_NARROW[self.dtype] * elements) if self.fp8 else 0.0

    def host_copy(self, moved: float) -> float:
        """Return the seconds to copy bytes to the host, or from it; 0 if the hardware does not say how fast its link is."""
        host = self.hardware.host  # nobody has measured the link, so its share is that of the memory
        return 0.0 if host is None else moved / (host.gb_s * 1e9 * self.share["memory"])

    def launches(self, kernels: int) -> float:
        """Return the seconds that the host needs to start `kernels` kernels."""
        return kernels * self.share["launch"]


def full_waves(processors: int, rows: float, columns: float, groups: float = 1) -> float:
    """Return how full the waves of a product are: its size divided by the size of all tiles in its waves.

    A CPU counts as one processor, and has no waves.
    """
    if processors == 1:
        return 1.0
    tile = counts().tile
    tiles = groups * math.ceil(rows / tile) * math.ceil(columns / tile)
    waves = math.ceil(tiles / processors)
    edges = groups * rows * columns / (tiles * tile**2)
    return edges * tiles / (waves * processors)


def _between(table: Sequence[tuple[float, float]], size: float) -> float:
    """Return the measured share at a size; 1 for an empty table.

    Between two sizes of the table, the share is linear in the logarithm of the size. Outside the table, it is constant.
    """
    if not table:
        return 1.0
    at = math.log(max(size, 1.0))
    points = [(math.log(measured), share) for measured, share in table]
    if at <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return points[-1][1]
