"""One gradient rule and one norm rule.

Ops differentiate the step's objective, a mean over all tokens that count (`weights.py`). So gradients are summed, and scaled by
nothing, over the ranks that have seen other data with the same weights:

| class | who holds it | summed over |
|---|---|---|
| dense | cut over TP | DP×CP |
| replicated | whole on every TP rank, which sees only its piece of the sequence | TP×DP×CP |
| expert | its EP×ETP place; the all-to-all has brought it that whole group's tokens | EDP |

An embedding that the first and the last stage share is then summed over the two. The norm counts every element of the model once:
each is counted by the first rank that holds it, or by its owner where sums are shared out, and summed over all ranks.

Each class has one flat buffer, in the order in which backward has its gradients. It is reduced in chunks, which the step's list
starts (`schedule/reduction.py`): by all-reduces, after which every rank has all sums, or by reduce-scatters, after which each has
those that it owns (ZeRO-1). With `release`, a gradient's memory is given back once it has left (ZeRO-2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from foldray.blueprint import GradientPart, made_at
from foldray.blueprint.parameters import CLASSES, GradientClass
from foldray.comm import Communicator, Groups, Pending
from foldray.model import Transformer
from foldray.runtime.sharding import Sharding
from foldray.schedule import Chunk, cut_buffer


class GradientBuffer:
    """The gradients of one class, flat, in at least float32.

    Args:
        name: the class.
        parameters: in the order in which backward has their gradients; one at least.
        parts: the same for the schedule: which ops make which elements.
        communicator: over whom they are summed.
        sharded: whether each rank gets only those sums that it owns.
        release: whether a gradient's memory is given back once it has left; only with `sharded`.

    Attributes:
        sums: what this rank has of the sums: the whole buffer, or its part.
    """

    def __init__(
        self,
        name: GradientClass,
        parameters: Sequence[nn.Parameter],
        parts: Sequence[GradientPart],
        communicator: Communicator,
        sharded: bool = False,
        release: bool = False,
    ):
        self.name, self.parameters, self.parts, self.communicator = name, list(parameters), parts, communicator
        example = self.parameters[0]
        self.dtype, self.device = torch.promote_types(example.dtype, torch.float32), example.device
        ranks = communicator.size if sharded else 1
        self.sharding = Sharding(sum(p.numel() for p in self.parameters), ranks, communicator.index if ranks > 1 else 0)
        assert self.sharding.elements == sum(part.elements for part in parts), f"parameters and parts of {name} differ"
        self.sharded = ranks > 1
        self.places: dict[nn.Parameter, range] = {}  # elements of the buffer
        end = 0
        for parameter in self.parameters:
            self.places[parameter] = range(end, end := end + parameter.numel())
        self.flat = None if release and self.sharded else self._zeros(self.sharding.padded)
        self.sums = self._zeros(self.sharding.owned) if self.flat is None or self.sharded else self.flat
        self._held: dict[nn.Parameter, torch.Tensor] = {}  # without a flat buffer: gradients until they leave

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if self.flat is not None:
            place = self.places[parameter]
            self.flat[place.start : place.stop].view_as(parameter).add_(gradient)
        elif parameter in self._held:
            self._held[parameter].add_(gradient)
        else:
            self._held[parameter] = gradient.to(self.dtype, copy=True)

    def own(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's sums of a parameter: in its shape, or flat those that it owns."""
        place = self.places[parameter]
        if self.sharded:
            return self.sums[self.sharding.own(place.start, place.stop)]
        return self.sums[place.start : place.stop].view_as(parameter)

    def chunks(self, most: int | None) -> tuple[Chunk, ...]:
        """Runs of at most so many bytes; one for None. None at all where there is nobody to sum with."""
        if self.communicator.size == 1:
            return ()
        return cut_buffer(self.name, self.parts, self.dtype.itemsize, most, self.sharding.deal)

    def start(self, start: int, stop: int) -> Pending:
        """Start to sum a run of the buffer over the ranks."""
        if not self.sharded:
            assert self.flat is not None
            return self.communicator.start_all_reduce(self.flat[start:stop])
        run = self.flat[start:stop] if self.flat is not None else self._take(start, stop)
        mine = self.sums[self.sharding.own(start, stop)]
        return self.communicator.start_reduce_scatter(self.sharding.by_owner(run), mine)

    def zero(self) -> None:
        for tensor in (self.flat, self.sums):
            if tensor is not None:
                tensor.zero_()
        self._held.clear()

    def gather(self, values: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Every parameter and its values, from what each rank has of them (`sums` tells where); a collective call."""
        whole = self.sharding.in_order(self.communicator.all_gather(values)) if self.sharded else values
        for parameter, place in self.places.items():
            yield parameter, whole[place.start : place.stop].view_as(parameter)

    def _take(self, start: int, stop: int) -> torch.Tensor:
        """A run of the buffer from the gradients that are held; each is let go with its last element. Runs go in order."""
        found = []
        for parameter, place in self.places.items():
            first, last = max(start, place.start), min(stop, place.stop)
            if first < last:
                held = self._held.get(parameter)
                values = self._zeros(last - first) if held is None else held.flatten()[first - place.start : last - place.start]
                found.append(values)
                if last == place.stop:
                    self._held.pop(parameter, None)
        short = stop - start - sum(map(len, found))
        return torch.cat([*found, self._zeros(short)] if short else found)

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.device)


class Gradients:
    """The gradient buffers of a rank, their reduction and their norm.

    Args:
        zero: 0 gives every rank all sums, 1 those that it owns, 2 also gives gradients' memory back as they leave.
    """

    def __init__(self, model: Transformer, groups: Groups, zero: int = 0):
        self.groups = groups
        communicators: dict[GradientClass, Communicator] = {
            "dense": groups.dense_gradients, "replicated": groups.replicated_gradients, "expert": groups.expert_gradients,
        }  # fmt: skip
        parts = model.ownership.gradient_parts(groups.rank)
        made = {parameter: made_at(model.makers(parameter)) for parameter in model.parameters()}
        # A rank may hold nothing of a class: a stage of dense blocks has no experts. Its whole group then holds nothing of it.
        held = {name: sorted(model.by_class(name), key=made.__getitem__) for name in communicators}
        self.buffers = tuple(
            GradientBuffer(name, held[name], parts[name], over, zero > 0, zero > 1)
            for name, over in communicators.items()
            if held[name]
        )
        self.buffer_of = {parameter: buffer for buffer in self.buffers for parameter in buffer.parameters}
        self._tied, self._counted = model.tied(), set(model.counted())
        self._copies = set(self._tied) if groups.coordinate["attention"]["pp"] else set()
        self._by_name = {buffer.name: buffer for buffer in self.buffers}
        self._travelling: list[Pending] = []

    @property
    def views(self) -> dict[nn.Parameter, torch.Tensor]:
        """By parameter, this rank's sums (`GradientBuffer.own`)."""
        return {parameter: buffer.own(parameter) for parameter, buffer in self.buffer_of.items()}

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        self.buffer_of[parameter].add(parameter, gradient)

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.zero()

    def chunks(self, most: int | None) -> tuple[Chunk, ...]:
        """All buffers in chunks of at most so many bytes; whole ones for None. What has one holder only is none."""
        return tuple(chunk for buffer in self.buffers for chunk in buffer.chunks(most))

    def start(self, chunk: Chunk) -> Pending:
        """Start to reduce a chunk, all of which has been made."""
        pending = self._by_name[chunk.name].start(chunk.start, chunk.stop)  # type: ignore[index]
        self._travelling.append(pending)
        return pending

    def finish(self) -> None:
        """Wait for all chunks: the buffers then hold the gradient of the step's objective."""
        while self._travelling:
            self._travelling.pop().wait()
        for parameter in self._tied:
            # Last of all, as a sum of two numbers: it has the same bits on both stages, which therefore never drift apart.
            self.groups.tied_gradients.all_reduce(self.buffer_of[parameter].own(parameter))

    def reduce(self) -> None:
        """Reduce everything at once."""
        for chunk in self.chunks(None):
            self.start(chunk)
        self.finish()

    def norms(self) -> Norms:
        """Euclidean norms of the reduced gradients over the whole model."""
        counted = (
            (buffer.name, buffer.own(parameter))
            for parameter, buffer in self.buffer_of.items()
            if (parameter not in self._copies if buffer.sharded else parameter in self._counted)
        )
        return gradient_norms(counted, self.buffers[0].device, self.groups)

    def clip(self, limit: float | None) -> Norms:
        """Scale all gradients so that their norm is at most `limit`; the norms before."""
        norms = self.norms()
        if limit is not None and norms.total > limit:
            for buffer in self.buffers:
                buffer.sums.mul_(limit / (norms.total + 1e-6))
        return norms


class Norms(dict[GradientClass, float]):
    """Euclidean norms over the whole model by gradient class, the same on every rank."""

    @property
    def total(self) -> float:
        """Of all classes together."""
        return math.hypot(*self.values())


def gradient_norms(counted: Iterable[tuple[GradientClass, torch.Tensor]], device: torch.device, groups: Groups) -> Norms:
    """Norms over the whole model; a collective call.

    Args:
        counted: the reduced gradients that this rank counts (`Transformer.counted`), each with its class.
    """
    squares = torch.zeros(len(CLASSES), dtype=torch.float64, device=device)
    for name, tensor in counted:
        squares[CLASSES.index(name)] += torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
    return Norms(zip(CLASSES, groups.control.all_reduce(squares).sqrt().tolist(), strict=True))
