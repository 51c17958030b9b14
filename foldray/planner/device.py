"""Seconds of what one GPU computes: products of matrices, attention, passes over memory.

A product takes its FLOPs at the share of peak that its shape reaches, or as long as its operands take to stream (roofline). The
shape counts by waves: a product is cut into tiles, of which the GPU runs as many at once as it has multiprocessors, and the last
wave is seldom full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from foldray.planner.candidate import Job
from foldray.planner.hardware import Hardware, constants

_TILE = 128  # rows and columns of a product that a multiprocessor has at a time: cuBLAS's usual


_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4}  # of what else than two-byte numbers (those that are multiplied as fp8 among them)


@dataclass(frozen=True)
class Device:
    """One GPU of a cluster, computing in one dtype.

    Args:
        bytes: of an element of activations and weights.
        changed: constants that are other than the file's.
    """

    hardware: Hardware
    dtype: str = "bf16"
    bytes: int = 2
    changed: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, hardware: Hardware, changed: Mapping[str, float] | None = None) -> Device:
        """For a job's dtype."""
        return cls(hardware, job.dtype, _BYTES.get(job.dtype, 2), changed or {})

    @cached_property
    def share(self) -> Mapping[str, float]:
        """All constants: the file's, the hardware's, the changed."""
        return {name: each.value for name, each in constants().items()} | self.hardware.constants | dict(self.changed)

    @cached_property
    def peak(self) -> float:
        return self.hardware.peak(self.dtype)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second that element-wise kernels reach."""
        return self.hardware.memory_gb_s * 1e9 * self.share["memory"]

    def product(self, rows: float, inner: float, columns: float) -> float:
        """Seconds of [rows, inner] × [inner, columns]."""
        if not rows:
            return 0.0
        flops = 2 * rows * inner * columns
        streamed = self.bytes * (rows * inner + inner * columns + rows * columns)
        return max(flops / (self.peak * self._gemm(flops) * self._waves(rows, columns)), streamed / self.bandwidth)

    def grouped(self, groups: float, rows: float, inner: float, columns: float) -> float:
        """Seconds of `groups` such products in one kernel, each of `rows` rows."""
        if not rows:
            return 0.0
        flops = 2 * groups * rows * inner * columns
        streamed = groups * self.bytes * (rows * inner + inner * columns + rows * columns)
        share = self._gemm(flops) * (self.share["grouped"] if groups > 1 else 1.0)
        return max(flops / (self.peak * share * self._waves(rows, columns, groups)), streamed / self.bandwidth)

    def attention(self, flops: float, tokens: float) -> float:
        """Seconds of attention's scores and sums, counted causally, of so many tokens' queries at a time."""
        return flops / (self.peak * self.share["attention"] * _between(self.hardware.attention, tokens))

    def passes(self, moved: float) -> float:
        """Seconds to read and write so many bytes."""
        return moved / self.bandwidth

    def launches(self, kernels: int) -> float:
        """Seconds that the host needs to start so many kernels."""
        return kernels * self.share["launch"]

    def _gemm(self, flops: float) -> float:
        """Share of peak of a product that fills its waves."""
        return self.share["gemm"] * _between(self.hardware.gemm, flops)

    def _waves(self, rows: float, columns: float, groups: float = 1) -> float:
        """How full the waves of a product are: its size over that of the tiles that whole waves have room for."""
        processors = self.hardware.processors
        if processors == 1:
            return 1.0
        tiles = groups * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
        waves = math.ceil(tiles / processors)
        edges = groups * rows * columns / (tiles * _TILE**2)
        return edges * tiles / (waves * processors)


def _between(table: Sequence[tuple[float, float]], size: float) -> float:
    """A measured share at a size, by the logarithms of its neighbours'; 1 where nothing was measured."""
    if not table:
        return 1.0
    at = math.log(max(size, 1.0))
    points = [(math.log(each), share) for each, share in table]
    if at <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return points[-1][1]
