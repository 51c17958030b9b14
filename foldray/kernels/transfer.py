"""Copies between host and device. Only the end of a reading makes the host wait for the device.

A copy from ordinary memory of the host holds the host up until the device has done everything before it. A copy from pinned
memory does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def start_reading(tensor: Tensor) -> Callable[[], list[int]]:
    """Start to copy a tensor of integers to the host, on the current stream of its device.

    The returned function waits for the copy, and returns the numbers in a flat list.
    """
    if not tensor.is_cuda:
        return lambda: tensor.flatten().tolist()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    copied = torch.cuda.current_stream(tensor.device).record_event()

    def finish() -> list[int]:
        copied.synchronize()
        return host.flatten().tolist()

    return finish


def read_later(tensor: Tensor) -> Callable[[], list[int]]:
    """Return what copies a tensor of integers to the host once it is called, and returns the numbers in a flat list.

    The host then waits for what the current stream has to do by now, and for nothing behind it.
    """
    if not tensor.is_cuda:
        return lambda: tensor.flatten().tolist()
    known = torch.cuda.current_stream(tensor.device).record_event()

    def read() -> list[int]:
        with torch.cuda.stream(stream := torch.cuda.Stream(tensor.device)):
            stream.wait_event(known)
            return start_reading(tensor)()

    return read


class Lane:
    """Copies in one direction between a device and its host. On a GPU they have a stream of their own, and follow one another."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Copying]:
        """Start to copy (to, from) for each pair, once the current stream has done what it has been given so far.

        Return what waits for the copies; nothing on a CPU, where they are over. The host does not wait: its memory is pinned.
        """
        if self._device.type != "cuda":
            for to, source in pairs:
                to.copy_(source)
            return []
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            return [Copying(self._stream.record_event())]


class Copying:
    """A copy of a lane that may be running. `comm.Pending` treats it as it treats an operation of torch.distributed."""

    def __init__(self, over: torch.cuda.Event):
        self._over = over

    def wait(self) -> None:
        """Have the current stream wait."""
        torch.cuda.current_stream().wait_event(self._over)

    def is_completed(self) -> bool:
        return self._over.query()
