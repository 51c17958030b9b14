"""Copies between host and device. Only `read` makes the host wait for the device.

A copy from ordinary memory of the host holds the host up until the device has done everything before it. A copy from pinned
memory does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(numbers: Sequence[float] | Sequence[Sequence[float]], device: torch.device | None, dtype: torch.dtype) -> Tensor:
    """Return a tensor of numbers that the host knows. The host does not wait."""
    return move(torch.tensor(numbers, dtype=dtype), device)


def move(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Return a tensor of the host on a device; None is the CPU. The host does not wait."""
    if device is None or device.type != "cuda":
        return tensor.to(device)
    # The allocator of pinned memory uses the memory again only after the copy.
    return tensor.pin_memory().to(device, non_blocking=True)


def read(tensor: Tensor) -> list[int]:
    """Return the numbers of a tensor of integers, in a flat list. On a GPU, the host waits until the device has made them."""
    if tensor.is_cuda:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        tensor = host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        copied.synchronize()
    return tensor.flatten().tolist()
