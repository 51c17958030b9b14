"""A rank's share of a training's state: boxes of the parameters of the whole model, and no copies of them.

An engine that shards its optimizer gives every rank runs of flat parameters (`sharding.py`). A run is cut into boxes: a part
of a row, whole rows, and a part of a row. So a checkpoint holds boxes alone, and needs no rank to have a parameter whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from foldray.blueprint import Piece
from foldray.blueprint.parts import Index


@dataclass(frozen=True)
class Shard:
    """A box of a tensor of the state.

    Args:
        key: the global name of the tensor (`Engine.state`).
        tensor: the values of the box. The engine trains with them, so they change at the next update.
        offset: first index of the box on each axis.
        optional: whether a training may go on without it, from the values that are there.
    """

    key: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    optional: bool = False

    @classmethod
    def whole(cls, key: str, tensor: torch.Tensor, optional: bool = False) -> Shard:
        """Return a shard that is the whole tensor."""
        return cls(key, tensor, tuple(tensor.shape), (0,) * tensor.dim(), optional)

    @property
    def box(self) -> tuple[slice, ...]:
        """Where the box is in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.tensor.shape, strict=True))


class Box(NamedTuple):
    """A box of a tensor: the first index and the length on each axis."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut a run of the elements of a tensor, counted in row-major order, into boxes. They come in the order of the run."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    inner = prod(shape[1:])
    up, down = -(-start // inner), stop // inner  # the whole rows
    if up > down:  # the run is inside one row
        yield from _in_row(shape, down, start, stop)
        return
    yield from _in_row(shape, up - 1, start, up * inner)
    if up < down:
        yield Box((up, *(0,) * (len(shape) - 1)), (down - up, *shape[1:]))
    yield from _in_row(shape, down, down * inner, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    before = row * prod(shape[1:])
    for box in boxes(shape[1:], start - before, stop - before):
        yield Box((row, *box.offset), (1, *box.shape))


def cut(run: torch.Tensor, shape: Sequence[int], start: int, index: Index, piece: Piece, key: str) -> Iterator[Shard]:
    """Yield what a run of a rank's parameter holds of one of the model's parameters in it.

    Args:
        run: the values of the run, flat.
        shape: shape of the rank's parameter.
        start: number of the run's first element in the parameter.
        index: where the model's parameter is in that of the rank.
        piece: the box of the model's parameter that is there.
    """
    done = 0
    for box in boxes(shape, start, start + run.numel()):
        view = run[done : done + box.elements].view(box.shape)
        done += box.elements
        common = _common(box, index, shape)
        if common is not None:
            inside, offset = common
            yield Shard(key, view[inside], piece.spec.shape, tuple(map(sum, zip(piece.offset, offset, strict=True))))


def _common(box: Box, index: Index, shape: Sequence[int]) -> tuple[Index, tuple[int, ...]] | None:
    """Return what a box and a part have in common: its index in the box, and its first index in the part; None for nothing."""
    inside: list[slice | int] = []
    offset: list[int] = []
    for axis, (first, length) in enumerate(zip(box.offset, box.shape, strict=True)):
        at = index[axis] if axis < len(index) else slice(None)
        low, high, _ = (at, at + 1, 1) if isinstance(at, int) else at.indices(shape[axis])
        begin, end = max(first, low), min(first + length, high)
        if begin >= end:
            return None
        if isinstance(at, int):
            inside.append(begin - first)
        else:
            inside.append(slice(begin - first, end - first))
            offset.append(begin - low)
    return tuple(inside), tuple(offset)
