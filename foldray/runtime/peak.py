"""The name of a device, and the speed of its matrix products, which is below the peak of its data sheet."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
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

    On a CPU, torch's float32 product is MKL's, and experts may use oneDNN's instead. The faster one of the two is the peak.

    Args:
        size: rows of the square matrices; None is 8192 on a GPU, 1024 elsewhere.
    """
    size = size or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    products: list[Callable[[], torch.Tensor]] = [lambda: torch.mm(a, b)]
    if device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available():
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], ""))
    return 2 * size**3 / min(_seconds(product, rounds, device) for product in products)


def _seconds(product: Callable[[], torch.Tensor], rounds: int, device: torch.device) -> float:
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        product()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
