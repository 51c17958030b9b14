"""The peak speed of a device, which is the denominator of model FLOP utilisation."""

from __future__ import annotations

import statistics
import time

import torch


def matmul_peak(device: torch.device, dtype: torch.dtype, size: int | None = None, rounds: int = 7) -> float:
    """Measure the FLOP/s of a square matrix product: the median of `rounds` after one round of warm-up.

    Args:
        size: rows of the square matrices; None is 8192 on a GPU, 1024 elsewhere.
    """
    size = size or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out, seconds = torch.empty_like(a), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds[1:])
