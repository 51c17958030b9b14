"""How parameters are made: device and type of new ones, and their initial values."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from foldray.blueprint.parameters import DecayInit


@contextmanager
def parameters_as(device: torch.device | str | None, dtype: torch.dtype) -> Iterator[None]:
    """Make new parameters on a device and of a type, while the context is open. None is the CPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device or "cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def initial_values(shape: tuple[int, ...], init: float | DecayInit | None, seed: int, name: str) -> torch.Tensor:
    """Return the initial values of a parameter by its global name, for a seed."""
    if init is None or init == 0:
        return torch.full(shape, 1.0 if init is None else 0.0)
    # Every name has its own generator, so the weights depend neither on the rank that draws them nor on the order.
    # The hash has 32 bits, because torch's generator uses only 32 bits of its seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    if isinstance(init, str):
        return _decay_drawn(init, torch.rand(shape, generator=generator))
    return torch.empty(shape).normal_(0.0, init, generator=generator)


def _decay_drawn(init: DecayInit, share: torch.Tensor) -> torch.Tensor:
    """Return initial values from random shares of 1, as in Mamba 2 (arXiv:2405.21060): rates from 1 to 16, even in themselves,
    and time steps from 0.001 to 0.1, even in their logarithm. Parameters are the rate's logarithm, and what has softplus of this.
    """
    if init == "decay_rate":
        return (1 + 15 * share).log()
    step = torch.exp(math.log(0.001) + share * math.log(100))
    return step + torch.log(-torch.expm1(-step))
