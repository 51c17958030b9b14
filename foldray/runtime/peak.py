"""The name of a device, and its peak speed, which is the denominator of model FLOP utilisation."""

from __future__ import annotations

import platform
import statistics
import time
from pathlib import Path

import torch


def processor(device: torch.device | None = None) -> str:
    """Return the name of a GPU, or of this machine's processor."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


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
