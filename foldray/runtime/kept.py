"""What ops keep for their backward, on the host until then (`schedule.offload`).

PyTorch has hooks for what an autograd graph saves (`torch.autograd.graph.saved_tensors_hooks`). Here they put views in the place
of tensors, so that the memory behind the views can leave the device, and come back elsewhere. Memory travels whole, as bytes: a
tensor that is saved twice, or in several views, travels once, and comes back with the same strides. Weights stay, and so do the
tables of positions, which all blocks share. What slices of a sequence share (`model.Memory`) is not saved in graphs, and stays.

The list of a step says when memory leaves and when it is fetched (`offload` ops). Its needs bound the memory that is on its way,
and this module keeps to them: what has left is freed on the stream that computes, before that computes more, so the same step
always has its memory at the same places.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from foldray.comm import Pending
from foldray.kernels.transfer import Lane
from foldray.model import Transformer

TINY = 512
"""Bytes that are not worth a copy: the allocator of a GPU has no smaller pieces."""


class HostMemory:
    """The way of a rank's activations to its host and back. Each direction has a lane of its own.

    Attributes:
        sent, fetched: bytes that have begun to travel, since the start.
    """

    def __init__(self, model: Transformer):
        self.sent = self.fetched = 0
        self._model, self._device = model, next(model.parameters()).device
        self._out, self._back = Lane(self._device), Lane(self._device)
        self._leaving: dict[int, deque[Kept]] = defaultdict(deque)  # by number of the kind: what may not have left
        self._weights = frozenset[int]()

    def begin(self, weights: Iterable[Tensor] = ()) -> None:
        """Begin a step: learn where weights are, those of the model and these. They stay there."""
        self._weights = _addresses((*self._model.parameters(), *weights))

    def keep(self, kind: int) -> Kept:
        """Return a place for what the ops of a kind keep at a block, for one micro-batch."""
        return Kept(self, self._leaving[kind])

    def send(self, pieces: dict[int, _Piece]) -> tuple[list[_Piece], Pending]:
        """Start to send pieces to the host, by the addresses of their memory. Return those that travel."""
        tables, began = _addresses(self._model.tables()), perf_counter()
        going = [piece for address, piece in pieces.items() if address not in self._weights and address not in tables]
        for piece in going:
            piece.on_host = _host_memory(piece.size, self._device)
        self.sent += sum(piece.size for piece in going)
        works = self._out.start([(piece.on_host, piece.on_device) for piece in going])  # type: ignore[misc]
        return going, Pending(works, (), began=began)  # type: ignore[arg-type]

    def fetch(self, pieces: Iterable[_Piece]) -> Pending:
        """Start to bring pieces back from the host."""
        pairs, began = list[tuple[Tensor, Tensor]](), perf_counter()
        for piece in pieces:
            assert piece.on_host is not None
            piece.on_device = torch.empty(piece.size, dtype=torch.uint8, device=self._device)
            pairs.append((piece.on_device, piece.on_host))
            self.fetched += piece.size
        return Pending(self._back.start(pairs), (), began=began)  # type: ignore[arg-type]


class Kept:
    """What the ops of one kind keep for their backward at a block, for one micro-batch.

    Args:
        leaving: what else of this kind may not have left, in the order of its sending.
    """

    def __init__(self, host: HostMemory, leaving: deque[Kept]):
        self._host, self._leaving = host, leaving
        self._pieces: dict[int, _Piece] = {}  # by address, until they leave
        self._away: list[_Piece] = []
        self._sending: Pending | None = None
        self._coming: Pending | None = None

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which an op is computed that keeps its tensors here."""
        return saved_tensors_hooks(self._pack, _unpack)

    def send(self) -> Pending:
        """Start to send everything to the host."""
        self._away, self._sending = self._host.send(self._pieces)
        self._pieces, sending = {}, self._sending
        self._leaving.append(self)
        if not sending.is_running:
            self.let_go()
        self._let_others_go(2)
        return sending

    def let_go(self) -> None:
        """Free the memory of the device once everything is on the host. What is computed next waits for that."""
        if self._sending is not None:
            self._sending.wait()
            self._sending = None
            self._leaving.remove(self)
            for piece in self._away:
                piece.on_device = None

    def fetch(self) -> Pending:
        """Start to bring everything back. From now on only the graphs of the ops keep it."""
        self._let_others_go(1)
        self.let_go()
        self._coming = self._host.fetch(self._away)
        for piece in self._away:
            piece.on_host = None  # pinned memory is used again only after the copy
        self._away = []
        return self._coming

    def wait(self) -> None:
        """Have what is computed next wait until everything is back."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None

    def _let_others_go(self, most: int) -> None:
        while len(self._leaving) > most:
            self._leaving[0].let_go()

    def _pack(self, x: Tensor) -> _View | Tensor:
        storage = x.untyped_storage()
        if storage.nbytes() <= TINY:
            return x.detach()
        address = storage.data_ptr()
        if address not in self._pieces:
            self._pieces[address] = _Piece(storage)
        return _View(self._pieces[address], x.dtype, x.shape, x.stride(), int(x.storage_offset()))


class _Piece:
    """A piece of memory, as bytes: on the device, on the host, or on its way."""

    def __init__(self, storage: torch.UntypedStorage):
        self.size = storage.nbytes()
        self.on_device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=storage.device)
        self.on_device.set_(storage, 0, (self.size,), (1,))
        self.on_host: Tensor | None = None


class _View(NamedTuple):
    """A tensor, as a view of its memory, wherever that is."""

    piece: _Piece
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(kept: _View | Tensor) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    memory = kept.piece.on_device
    if memory is None:
        raise RuntimeError(f"a tensor {tuple(kept.shape)} that a backward needs is on the host; nothing has fetched it")
    x = torch.empty(0, dtype=kept.dtype, device=memory.device)
    return x.set_(memory.untyped_storage(), kept.offset, kept.shape, kept.stride)


def _host_memory(size: int, device: torch.device) -> Tensor:
    """Return so many bytes on the host, in pinned memory if a GPU reads and writes them."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)
