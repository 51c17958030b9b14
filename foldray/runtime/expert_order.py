"""Experts change places between two steps, with their optimizer state, and routers number them anew.

The experts of a block are numbered by their places. If experts change places, and the router's columns with them, every token
goes to the same experts as before, on other ranks. So the model computes the same, and its checkpoints need no map.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from foldray.comm import Communicator, Groups
from foldray.runtime.engine import Engine
from foldray.runtime.shards import Shard

Orders = Mapping[int, Sequence[int]]
"""Block → for each place of an expert the expert that it gets, by its place before."""

_EXPERT = re.compile(r"(.*\bblocks\.(\d+)\.moe\.experts\.)(\d+)(\..*)")
_ROUTER = re.compile(r".*\bblocks\.(\d+)\.moe\.router\..*")


class _Box(NamedTuple):
    """A box of a tensor of the state, and the type of its numbers."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, shard: Shard) -> _Box:
        return cls(shard.key, shard.offset, tuple(shard.tensor.shape), shard.tensor.dtype)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.offset, self.shape, strict=True)))

    def common(self, other: _Box) -> tuple[slice, ...] | None:
        """Return what both boxes have in common, as slices of the whole tensor."""
        starts = tuple(map(max, zip(self.offset, other.offset, strict=True)))
        ends = tuple(map(min, zip(self.ends, other.ends, strict=True)))
        return tuple(map(slice, starts, ends)) if all(a < b for a, b in zip(starts, ends, strict=True)) else None

    def inside(self, part: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return slices of the whole tensor as slices of the box."""
        return tuple(slice(cut.start - first, cut.stop - first) for cut, first in zip(part, self.offset, strict=True))


class _Move(NamedTuple):
    """A part of a tensor that a rank sends to another, or to itself: numbers of the boxes there and here, and the part."""

    sender: int
    receiver: int
    target: int
    source: int
    part: tuple[slice, ...]

    @property
    def shape(self) -> list[int]:
        return [cut.stop - cut.start for cut in self.part]


Boxes = Sequence[Sequence[_Box]]
"""The boxes of every rank."""


@torch.no_grad()
def reorder_experts(engine: Engine, groups: Groups, orders: Orders) -> None:
    """Give every place of an expert the expert that `orders` says. All ranks must call this with the same orders."""
    shards = [shard for shard in engine.shards() if shard.tensor.dim()]
    device = next(engine.model.parameters()).device
    _move_experts(shards, groups.control, device, orders)
    _turn_routers(shards, groups.control, device, orders)
    engine.load_shards()
    if (copying := engine.execution.copying) is not None:
        copying.renumber(orders)
    for layer, router in engine.model.routers():
        if layer in orders and router.pattern is not None:
            router.pattern.renumber(orders[layer])


def _move_experts(shards: Sequence[Shard], control: Communicator, device: torch.device, orders: Orders) -> None:
    held = [shard for shard in shards if _expert(shard.key, orders) is not None]
    own = [_Box.of(shard) for shard in held]
    boxes: Boxes = control.all_gather_object(own)
    moves = sorted(_moves(boxes, orders), key=lambda move: move[:4])
    for dtype in sorted({box.dtype for of_rank in boxes for box in of_rank}, key=str):
        of_type = [move for move in moves if boxes[move.receiver][move.target].dtype == dtype]
        leaving = [move for move in of_type if move.sender == control.index]
        arriving = [move for move in of_type if move.receiver == control.index]
        sent, received = [0] * control.size, [0] * control.size
        for move in leaving:
            sent[move.receiver] += prod(move.shape)
        for move in arriving:
            received[move.sender] += prod(move.shape)
        parts = [held[move.source].tensor[own[move.source].inside(move.part)].flatten() for move in leaving]
        flat = torch.cat([torch.empty(0, dtype=dtype, device=device), *(part.to(device) for part in parts)])
        came = control.all_to_all(flat, received, sent).split([prod(move.shape) for move in arriving])
        for move, part in zip(arriving, came, strict=True):
            held[move.target].tensor[own[move.target].inside(move.part)] = part.view(move.shape).to(
                held[move.target].tensor.device
            )


def _moves(boxes: Boxes, orders: Orders) -> Iterator[_Move]:
    """Yield the parts that travel. Of ranks with equal boxes, one sends: the receiver itself, or each in its turn."""
    holders: dict[str, dict[_Box, list[tuple[int, int]]]] = {}
    for rank, of_rank in enumerate(boxes):
        for number, box in enumerate(of_rank):
            holders.setdefault(box.key, {}).setdefault(box, []).append((rank, number))
    for receiver, of_rank in enumerate(boxes):
        for target, wanted in enumerate(of_rank):
            if (key := _expert(wanted.key, orders)) is None or key == wanted.key:
                continue
            for box, having in holders[key].items():
                if (part := wanted.common(box)) is not None:
                    here = [number for rank, number in having if rank == receiver]
                    sender, source = (receiver, here[0]) if here else having[receiver % len(having)]
                    yield _Move(sender, receiver, target, source, part)


def _turn_routers(shards: Sequence[Shard], control: Communicator, device: torch.device, orders: Orders) -> None:
    """Give the columns of routers, of their biases and of what the optimizer keeps of them the order of the experts."""
    held = [shard for shard in shards if (found := _ROUTER.fullmatch(shard.key)) and int(found[1]) in orders]
    boxes: Boxes = control.all_gather_object([_Box.of(shard) for shard in held])
    first: dict[_Box, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, of_rank in enumerate(boxes):
        for box in of_rank:
            first.setdefault(box, rank)
            shapes[box.key] = tuple(map(max, zip(shapes.get(box.key, box.ends), box.ends, strict=True)))
    wholes = {key: torch.zeros(shapes[key], dtype=torch.float64, device=device) for key in sorted(shapes)}
    for shard in held:
        if first[_Box.of(shard)] == control.index:
            wholes[shard.key][shard.box] = shard.tensor.to(wholes[shard.key])
    if not wholes:
        return
    flat = control.all_reduce(torch.cat([whole.flatten() for whole in wholes.values()]))
    for key, part in zip(wholes, flat.split([whole.numel() for whole in wholes.values()]), strict=True):
        order = orders[int(_ROUTER.fullmatch(key)[1])]  # type: ignore[index]
        wholes[key] = part.view(shapes[key])[..., list(order)]
    for shard in held:
        shard.tensor.copy_(wholes[shard.key][shard.box])


def _expert(key: str, orders: Orders) -> str | None:
    """Return the key of what comes to the place of an expert's tensor; None for other tensors, and other blocks."""
    found = _EXPERT.fullmatch(key)
    if found is None or int(found[2]) not in orders:
        return None
    return f"{found[1]}{orders[int(found[2])][int(found[3])]}{found[4]}"
