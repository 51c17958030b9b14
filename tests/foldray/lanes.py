"""Lanes between device and host that forgive as little as those of a GPU do, for tests on CPUs.

What a copy writes is poison until somebody has waited for it, and what it reads must not change until then. A step must wait for
every copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

from foldray.runtime import Execution, kept
from tests.foldray.live import storage

POISON = 0xFF  # bytes of NaN


class StrictCopies:
    """Copies that are running. `comm.Pending` treats them as it treats an operation of torch.distributed."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], running: set[StrictCopies]):
        self._copies = [(to, source, source.clone()) for to, source in pairs]
        for to, _ in pairs:
            to.fill_(POISON)
        self._running = running
        running.add(self)

    def get_future(self) -> Future:
        done: Future = Future()
        done.set_result(None)
        return done

    @staticmethod
    def is_completed() -> bool:
        """Nobody knows before somebody has waited."""
        return False

    def wait(self) -> None:
        for to, source, before in self._copies:
            assert torch.equal(source, before), "a copy's source has changed before anybody waited for the copy"
            assert bool((to == POISON).all()), "a copy's result was written before anybody waited for it"
            to.copy_(before)
        self._copies = []
        self._running.discard(self)


@contextmanager
def strict_lanes() -> Iterator[None]:
    """All new lanes are strict, and every step must have waited for all copies."""
    running: set[StrictCopies] = set()
    train = Execution.train

    class StrictLane:
        def __init__(self, device: torch.device):
            pass

        def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
            return [StrictCopies(pairs, running)] if pairs else []

    def checked(execution: Execution, *arguments: Any) -> Any:
        found = train(execution, *arguments)
        assert not running, "a step has ended, and nobody has waited for some copies"
        return found

    with patch.object(kept, "Lane", StrictLane), patch.object(Execution, "train", checked):
        yield


@contextmanager
def host_apart() -> Iterator[set[int]]:
    """Yield the numbers of the storages that are on the host (`live.storage`), where device and host are the same memory."""
    there, allocate = set[int](), kept._host_memory

    def noted(size: int, device: torch.device) -> Tensor:
        with _disable_current_modes():  # those that follow storages know it too late
            memory = allocate(size, device)
        number = storage(memory)[0]
        there.add(number)
        weakref.finalize(memory.untyped_storage(), there.discard, number)
        return memory

    with patch.object(kept, "_host_memory", noted):
        yield there
