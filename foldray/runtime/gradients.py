"""Gradient buffers, the sum of gradients over ranks, and their norm.

Ops differentiate the step's objective, a mean over all tokens that count (`weights.py`). So gradients are summed without a
scale, over the ranks that hold the same weights and have seen other data:

| class | held | summed over |
|---|---|---|
| dense | cut over TP | DP×CP |
| replicated | whole on every TP rank, which sees only its piece of the sequence | TP×DP×CP |
| expert | cut over EP and ETP; the all-to-alls bring the tokens of the whole EP×ETP group | EDP |

The slices of an expert (ETP) have parts of the gradients of some matrices of adapters, which are summed over ETP after that, at
once. At last, the gradient of a tied embedding is summed over the first and the last stage. The norm counts every element of
the model once. The first rank that holds an element counts it; if sums are sharded, the owner counts it.

Each class has one flat buffer, in the order in which backward completes the gradients. It is reduced in chunks, which the
step's list starts (`orders/position.py`). After an all-reduce, every rank has all sums. After a reduce-scatter, a rank
has the sums that it owns (ZeRO-1, Rajbhandari et al. 2020). With `release`, the memory of a gradient is freed once the
gradient has left (ZeRO-2).

Sums that have one owner may be made of rounded parts (`wire`): an all-to-all brings the parts of all ranks to the owner, which
adds them up in the type of the buffer, in the order of ranks. So sums do not depend on how a backend would add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from foldray.blueprint import GradientPart, Maker, made_at
from foldray.blueprint.parameters import CLASSES, GradientClass
from foldray.comm import Communicator, Groups, Pending
from foldray.graph import Chunk, cut_buffer
from foldray.model import Transformer
from foldray.runtime.sharding import Cut, Sharding


class Section(NamedTuple):
    """Parameters whose gradients backward completes at the same moment."""

    makers: tuple[Maker, ...]
    parameters: list[nn.Parameter]

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


class GradientBuffer:
    """The gradients of one class, flat, in at least float32.

    Args:
        sections: at least one section, in the order in which backward completes them.
        sharded: whether a rank gets only the sums that it owns.
        release: whether the memory of a gradient is freed once the gradient has left; only with `sharded`.
        granule: as in `Sharding`.
        wire: the type of gradients on their way to their owner; None is that of the buffer. Only with `sharded`.

    Attributes:
        sums: this rank's sums: the whole buffer, or the elements that it owns.
    """

    def __init__(
        self,
        name: GradientClass,
        sections: Sequence[Section],
        communicator: Communicator,
        sharded: bool = False,
        release: bool = False,
        granule: int = 1,
        wire: torch.dtype | None = None,
    ):
        self.name, self.sections, self.communicator, self._wire = name, sections, communicator, wire
        self.parameters = [parameter for section in sections for parameter in section.parameters]
        example = self.parameters[0]
        self.dtype, self.device = torch.promote_types(example.dtype, torch.float32), example.device
        ranks, index = (communicator.size, communicator.index) if sharded else (1, 0)
        self.sharding = Sharding(tuple(section.elements for section in sections), ranks, index, granule)
        self.sharded = ranks > 1
        self.places: dict[nn.Parameter, range] = {}  # elements of the buffer
        for end, section in zip(self.sharding.starts, sections, strict=False):
            for parameter in section.parameters:
                self.places[parameter] = range(end, end := end + parameter.numel())
        self.flat = None if release and self.sharded else self._zeros(self.sharding.padded)
        self.sums = self._zeros(self.sharding.owned) if self.flat is None or self.sharded else self.flat
        self._held: dict[nn.Parameter, torch.Tensor] = {}  # without a flat buffer: gradients that have not left
        # Without a flat buffer: sections of which some columns have left, and how many have not.
        self._leaving: dict[range, tuple[torch.Tensor, int]] = {}

    def sum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return this rank's sum of a parameter's gradients, in its shape, to add more. It must not have left yet."""
        if self.flat is not None:
            place = self.places[parameter]
            return self.flat[place.start : place.stop].view_as(parameter)
        if parameter not in self._held:
            self._held[parameter] = torch.zeros_like(parameter, dtype=self.dtype)
        return self._held[parameter]

    def own(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return this rank's sums of a parameter, in its shape; if sharded, a flat tensor of those that it owns."""
        return self.part(self.sums, parameter)

    def part(self, whole: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """Return what a tensor in the layout of `sums` has of a parameter, in the same shape as `own`."""
        place = self.places[parameter]
        if self.sharded:
            return whole[self.sharding.own(place.start, place.stop)]
        return whole[place.start : place.stop].view_as(parameter)

    def chunks(self, most: int | None) -> tuple[Chunk, ...]:
        """Cut the buffer into chunks of at most `most` bytes, or into one chunk for None. A single rank has no chunks."""
        if self.communicator.size == 1:
            return ()
        sizes = [stop - start for start, stop in pairwise(self.sharding.starts)]
        parts = [GradientPart(size, section.makers) for size, section in zip(sizes, self.sections, strict=True)]
        return cut_buffer(self.name, parts, self.dtype.itemsize, most, self.sharding.deal)

    def start(self, start: int, stop: int) -> Pending:
        """Start to sum a chunk over the ranks. Its gradients must be complete.

        If sums are sharded, `start` and `stop` count in the order of chunks (`sharding.py`).
        """
        if not self.sharded:
            assert self.flat is not None
            return self.communicator.start_all_reduce(self.flat[start:stop])
        rows = [self.sharding.by_owner(self._section(cut))[:, cut.columns] for cut in self.sharding.cuts(start, stop)]
        mine = self.sums[self.sharding.share(start, stop)]
        if self._wire is not None:
            return self._start_rounded([row.to(self._wire) for row in rows], mine)
        return self.communicator.start_reduce_scatter(torch.cat(rows, dim=1).flatten(), mine)

    def _start_rounded(self, rows: Sequence[torch.Tensor], mine: torch.Tensor) -> Pending:
        """Start to send every owner its part of these rows, and to bring the sum of what comes here into `mine`."""

        def add_up(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
            mine.zero_()
            for part in parts[0]:
                mine.add_(part)
            return (mine,)

        each = [1] * self.communicator.size
        return self.communicator.start_all_to_all(torch.cat(list(rows), dim=1), each, each).then(add_up)

    def zero(self) -> None:
        for tensor in (self.flat, self.sums):
            if tensor is not None:
                tensor.zero_()
        self._held.clear()
        self._leaving.clear()

    def gather(self, values: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield every parameter with its values. All ranks of the buffer must call this.

        Args:
            values: this rank's values, in the layout of `sums`.
        """
        whole = self.sharding.in_order(self.communicator.all_gather(values)) if self.sharded else values
        for parameter, place in self.places.items():
            yield parameter, whole[place.start : place.stop].view_as(parameter)

    def _section(self, cut: Cut) -> torch.Tensor:
        """Return the gradients of a section. Without a flat buffer, the cut that leaves last frees them."""
        section = cut.section
        if self.flat is not None:
            return self.flat[section.start : section.stop]
        if section not in self._leaving:
            self._leaving[section] = self._collected(section), len(section) // self.sharding.ranks
        whole, left = self._leaving.pop(section)
        if left := left - (cut.columns.stop - cut.columns.start):
            self._leaving[section] = whole, left
        return whole

    def _collected(self, section: range) -> torch.Tensor:
        """Take the gradients of a section, and return them as one tensor."""
        whole = self._zeros(len(section))
        for parameter in self.sections[self.sharding.starts.index(section.start)].parameters:
            if (gradient := self._held.pop(parameter, None)) is not None:
                place = self.places[parameter]
                whole[place.start - section.start : place.stop - section.start] = gradient.flatten()
        return whole

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.device)


class Owners(NamedTuple):
    """The rules of an optimizer that shards, for `Gradients`.

    Args:
        granule: as in `Sharding`.
        apart: parameter → a number. Parameters with different numbers are in different sections.
        by_tensor: whether TP ranks share the elements of replicated parameters. If not, all of them own the same elements.
    """

    granule: int = 1
    apart: Callable[[nn.Parameter], int] = lambda parameter: 0
    by_tensor: bool = True


class Gradients:
    """The gradient buffers of a rank, their reduction and their norm.

    Args:
        zero: 0 gives every rank all sums, 1 only the sums that it owns, 2 also frees gradients as they leave.
        wire: as in `GradientBuffer`.
    """

    def __init__(
        self, model: Transformer, groups: Groups, zero: int = 0, owners: Owners | None = None, wire: torch.dtype | None = None
    ):
        self.groups, owners = groups, owners or Owners()
        copied = zero > 0 and not owners.by_tensor and groups.tensor.size > 1
        communicators: dict[GradientClass, Communicator] = {
            "dense": groups.dense_gradients,
            "replicated": groups.dense_gradients if copied else groups.replicated_gradients,
            "expert": groups.expert_gradients,
        }
        # A rank may hold no parameter of a class: a stage of dense blocks has no experts. Then its group has none either.
        held = {name: _sections(model, name, owners.apart) for name in communicators}
        self.buffers = tuple(
            GradientBuffer(name, held[name], over, zero > 0, zero > 1, owners.granule, wire)
            for name, over in communicators.items()
            if held[name]
        )
        self.buffer_of = {parameter: buffer for buffer in self.buffers for parameter in buffer.parameters}
        self._tied, self._counted = model.tied(), set(model.counted())
        self._in_slices = model.in_slices() if groups.expert_slices.size > 1 else []
        self._device = next(model.parameters()).device
        self._by_name = {buffer.name: buffer for buffer in self.buffers}
        self._copied = [self._by_name["replicated"]] if copied and held["replicated"] else []
        place = groups.coordinate.get("attention", {"pp": 0, "tp": 0})
        # Other ranks own the same elements of these parameters, and count them.
        self._copies = {*(self._tied if place["pp"] else ()), *(model.by_class("replicated") if copied and place["tp"] else ())}
        self._copies.update(self._in_slices if groups.coordinate.get("moe", {"etp": 0})["etp"] else ())
        self._travelling: list[Pending] = []

    @property
    def views(self) -> dict[nn.Parameter, torch.Tensor]:
        """This rank's sums by parameter (`GradientBuffer.own`)."""
        return {parameter: buffer.own(parameter) for parameter, buffer in self.buffer_of.items()}

    def sum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return this rank's sum of a parameter's gradients (`GradientBuffer.sum_of`)."""
        return self.buffer_of[parameter].sum_of(parameter)

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.zero()

    def chunks(self, most: int | None) -> tuple[Chunk, ...]:
        """Cut all buffers into chunks of at most `most` bytes, or into one chunk each for None (`GradientBuffer.chunks`)."""
        return tuple(chunk for buffer in self.buffers for chunk in buffer.chunks(most))

    def start(self, chunk: Chunk) -> Pending:
        """Start to reduce a chunk. All of its gradients must have been added."""
        pending = self._by_name[chunk.name].start(chunk.start, chunk.stop)  # type: ignore[index]
        self._travelling.append(pending)
        return pending

    def finish(self) -> None:
        """Wait for all chunks. Then the buffers hold the gradient of the step's objective."""
        while self._travelling:
            self._travelling.pop().wait()
        for buffer in self._copied:
            self.groups.tensor.all_reduce(buffer.sums)
        self.sum_slices()
        for parameter in self._tied:
            # A last sum of two numbers has the same bits on both stages, so the two copies of the weight stay equal.
            self.groups.tied_gradients.all_reduce(self.buffer_of[parameter].own(parameter))

    def sum_slices(self) -> None:
        """Sum the gradients of which the slices of an expert have parts, over these slices."""
        if self._in_slices:
            own = [self.buffer_of[parameter].own(parameter) for parameter in self._in_slices]
            together = self.groups.expert_slices.all_reduce(torch.cat([part.flatten() for part in own]))
            for part, whole in zip(own, together.split([part.numel() for part in own]), strict=True):
                part.copy_(whole.view_as(part))

    def reduce(self) -> None:
        """Reduce all buffers, each as one chunk, and wait for them."""
        for chunk in self.chunks(None):
            self.start(chunk)
        self.finish()

    def norms(self) -> Norms:
        """Return the Euclidean norms of the reduced gradients over the whole model. All ranks must call this."""
        counted = (
            (buffer.name, buffer.own(parameter))
            for parameter, buffer in self.buffer_of.items()
            if (parameter not in self._copies if buffer.sharded else parameter in self._counted)
        )
        return gradient_norms(counted, self._device, self.groups)

    def clip(self, limit: float | None) -> Norms:
        """Scale all gradients so that their norm is at most `limit`, and return the norms before. None does not scale.

        All ranks must call this.
        """
        norms = self.norms()
        if limit is not None and norms.total > limit:
            for buffer in self.buffers:
                buffer.sums.mul_(limit / (norms.total + 1e-6))
        return norms


def _sections(model: Transformer, name: GradientClass, apart: Callable[[nn.Parameter], int]) -> list[Section]:
    """Return the sections of a gradient class, in the order in which backward completes them."""
    # The first and the last stage must own the same elements of a tied embedding, so it has a section of its own.
    sections, tied = dict[tuple[tuple[Maker, ...], bool, int], list[nn.Parameter]](), set(model.tied())
    for parameter in model.by_class(name):
        sections.setdefault((model.makers(parameter), parameter in tied, apart(parameter)), []).append(parameter)
    return [Section(key[0], sections[key]) for key in sorted(sections, key=lambda key: (made_at(key[0]), *key[1:]))]


class Norms(dict[GradientClass, float]):
    """Euclidean norms over the whole model by gradient class, the same on every rank."""

    @property
    def total(self) -> float:
        """Norm of all classes together."""
        return math.hypot(*self.values())


def gradient_norms(counted: Iterable[tuple[GradientClass, torch.Tensor]], device: torch.device, groups: Groups) -> Norms:
    """Return the norms over the whole model. All ranks must call this.

    Args:
        counted: the reduced gradients that this rank counts (`Transformer.counted`), each with its class.
    """
    squares = torch.zeros(len(CLASSES), dtype=torch.float64, device=device)
    for name, tensor in counted:
        squares[CLASSES.index(name)] += torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
    return Norms(zip(CLASSES, groups.control.all_reduce(squares).sqrt().tolist(), strict=True))
