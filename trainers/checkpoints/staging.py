"""What a thread writes while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from foldray.runtime import Shard

Index = tuple[str, tuple[int, ...]]
"""Key and offset of a shard."""


class Staged:
    """The shards of a checkpoint, whose tensors do not change before `settle`.

    A thread takes one after another, and training copies those that are left before it changes them. So the thread holds one copy
    at a time, and training waits for a copy only if it comes first.
    """

    def __init__(self, shards: Sequence[Shard]):
        self.shards = shards
        self._live = {(shard.key, shard.offset): shard.tensor for shard in shards}
        self._copies: dict[Index, torch.Tensor] = {}
        self._lock = threading.Lock()

    def keep(self, wanted: Iterable[Index]) -> None:
        """Forget all shards but these, because other ranks write the rest."""
        with self._lock:
            indices = set(wanted)
            self._live = {index: tensor for index, tensor in self._live.items() if index in indices}
            self._copies = {index: tensor for index, tensor in self._copies.items() if index in indices}

    def take(self, index: Index) -> torch.Tensor:
        """Return the values of a shard, on the CPU, and forget them."""
        with self._lock:
            return self._copies.pop(index) if index in self._copies else _copy(self._live.pop(index))

    def settle(self) -> None:
        """Copy all shards that were not taken yet. Afterwards, training may change their tensors."""
        with self._lock:
            while self._live:
                index, tensor = self._live.popitem()
                self._copies[index] = _copy(tensor)

    def drop(self) -> None:
        self.keep(())


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
