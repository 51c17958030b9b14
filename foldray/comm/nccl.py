"""How NCCL is set. Nothing here matters to gloo."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

ENVIRONMENT: Mapping[str, str] = {
    # Streams that share one of the GPU's queues wait for each other. By default there are 8, and a fold has more streams.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Kernels of several communicators run in the order in which the host starts them, which lists make the same on all ranks.
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    # Pieces of uneven sizes would cut the allocator's memory into fragments.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Environment of a worker with a GPU."""

_URGENT = {"tokens", "tokens_inside", "counts", "handovers_up", "handovers_down", "rows_up", "rows_down", "row_counts"}
"""Classes of traffic for which a rank soon waits. Their kernels start before those of what is computed."""


def take_adapters(names: Sequence[str] | None) -> None:
    """Let this process take only these network adapters, by their exact names. None leaves the choice as it is.

    NCCL reads the names once, when it makes its first communicator.
    """
    if names is not None:
        os.environ["NCCL_IB_HCA"] = "=" + ",".join(names)


def is_used() -> bool:
    return dist.is_initialized() and dist.get_backend() == "nccl"


def options(traffic: str, timeout: timedelta | None) -> Any:
    """Return the options of a communicator for a class of traffic; None for the defaults, or another backend."""
    if traffic not in _URGENT or not is_used():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    return options
