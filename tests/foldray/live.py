"""Follows the storages of tensors, as long as anybody holds them, autograd included. Fake tensors count like real ones."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Calls that ask or allocate, and start no kernel.
_NO_KERNELS = ("prim.", "aten.promote_types", "aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.detach", "c10d.")


def storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a number of a tensor's storage, which no other living storage has, and its bytes."""
    found = tensor.untyped_storage()
    return found._cdata, found.nbytes()


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive.

    Args:
        before: numbers of storages that do not count.

    Attributes:
        now: bytes that are alive.
        peak: most bytes that were alive after a call. Set it to `now` to start afresh.
        kernels: number of calls that compute or copy.
    """

    def __init__(self, before: Container[int] = ()) -> None:
        super().__init__()
        self.now = self.peak = self.kernels = 0
        self._before = before
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.follow(each for each in tree_leaves(result) if isinstance(each, torch.Tensor))
        self.kernels += not function.is_view and not str(function).startswith(_NO_KERNELS)
        return result

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that another thread has made, whose calls are not seen here."""
        for tensor in tensors:
            self._follow(tensor)
        self.peak = max(self.peak, self.now)

    def _follow(self, tensor: torch.Tensor) -> None:
        number, size = storage(tensor)
        if number in self._known or number in self._before:
            return

        def gone(_: weakref.ref) -> None:
            self.now -= size
            del self._known[number]

        self.now += size
        self._known[number] = weakref.ref(tensor.untyped_storage(), gone)
