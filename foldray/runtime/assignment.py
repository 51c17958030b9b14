"""Matrices that ranks share or have in common, each of which comes together on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foldray.blueprint.parts import Index
from foldray.comm import Communicator
from foldray.model import Transformer


class Slab(NamedTuple):
    """A run of a tensor that is a matrix of its own, and holds some of the model's matrices side by side.

    Args:
        elements: the run, in the flat tensor.
        widths: columns of this rank's piece of each matrix. All pieces have the same number of rows.
        cut: the axis along which TP or ETP cuts the matrices; None leaves them whole.
    """

    parameter: nn.Parameter
    elements: range
    widths: tuple[int, ...]
    cut: int | None

    @property
    def rows(self) -> int:
        return len(self.elements) // sum(self.widths)

    @property
    def work(self) -> int:
        """A measure of the work on the slab: the multiplications of a product of each piece with its transpose."""
        return sum(self.rows * width * min(self.rows, width) for width in self.widths)

    def join(self, slabs: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole matrices from the flat slabs of all ranks that have a piece of them."""
        pieces = [slab.view(self.rows, -1).split(self.widths, dim=1) for slab in slabs]
        return [torch.cat(matrix, dim=self.cut or 0) for matrix in zip(*pieces, strict=True)]

    def cut_up(self, matrices: Sequence[Tensor], ranks: int) -> list[Tensor]:
        """Undo `join`, for `ranks` ranks."""
        pieces = [matrix.chunk(ranks, dim=self.cut or 0) for matrix in matrices]
        return [torch.cat(slab, dim=1).flatten() for slab in zip(*pieces, strict=True)]


def slabs_of(model: Transformer, name: str, parameter: nn.Parameter) -> Iterator[Slab]:
    """Yield the slabs of one of this rank's tensors: one for each expert in it, or the whole tensor."""
    by_expert: dict[Index, list[tuple[str, Index]]] = {}
    for part, index in model.global_parts[name]:
        expert = tuple(axis for axis in index if isinstance(axis, int))
        by_expert.setdefault(expert, []).append((part, index))
    size = parameter.numel() // len(by_expert)
    for number, parts in enumerate(by_expert.values()):
        widths = tuple(parameter[index].shape[-1] for _, index in parts)
        yield Slab(parameter, range(number * size, (number + 1) * size), widths, model.pieces[parts[0][0]].spec.cut)


class Assignment:
    """Items that the members of a communicator share or have in common. Each item is assigned to one member.

    All members must call the same methods in the same order.

    Args:
        work: the work on each item. All members are assigned about as much.
        sizes: for each item, the number of its elements that each member has.
    """

    def __init__(self, communicator: Communicator, work: Sequence[int], sizes: Sequence[Sequence[int]]):
        self.communicator, self.sizes = communicator, sizes
        loads, owner = [0] * communicator.size, [0] * len(work)
        for item in sorted(range(len(work)), key=lambda item: -work[item]):
            owner[item] = least = loads.index(min(loads))
            loads[least] += work[item]
        self._order = sorted(range(len(work)), key=owner.__getitem__)
        self.mine = [item for item in self._order if owner[item] == communicator.index]
        self._sent, index = [0] * communicator.size, communicator.index
        for item in self._order:
            self._sent[owner[item]] += sizes[item][index]
        self._received = [sum(sizes[item][member] for item in self.mine) for member in range(communicator.size)]

    def collect(self, parts: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return for each of `mine` the parts of all members.

        Args:
            parts: for each item this member's part, flat.
        """
        row = torch.cat([parts[item] for item in self._order])
        arrived = self.communicator.all_to_all(row, self._received, self._sent)
        members = range(self.communicator.size)
        split = iter(arrived.split([self.sizes[item][member] for member in members for item in self.mine]))
        by_member = [[next(split) for _ in self.mine] for _ in members]
        return [list(pieces) for pieces in zip(*by_member, strict=True)]

    def give_back(self, results: Sequence[Sequence[Tensor]], like: Tensor) -> list[Tensor]:
        """Return for each item this member's part of its result.

        Args:
            results: for each of `mine`, the parts of all members, flat.
            like: a tensor of the dtype and device of parts.
        """
        parts = [pieces[member] for member in range(self.communicator.size) for pieces in results]
        arrived = self.communicator.all_to_all(torch.cat([like.new_empty(0), *parts]), self._sent, self._received)
        index = self.communicator.index
        split = arrived.split([self.sizes[item][index] for item in self._order])
        by_item = dict(zip(self._order, split, strict=True))
        return [by_item[item] for item in range(len(by_item))]
