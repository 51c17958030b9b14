"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): momentum whose matrices are made orthogonal.

The update of a matrix needs all of it. But TP and ETP cut matrices, ZeRO shares the elements of a rank's tensors out, and a
tensor may hold several of the model's matrices, such as queries, keys and values, or the experts of a rank. So a step goes
like this, for each gradient class:

1. Every rank updates the momentum of its own elements. It has the layout of the weights, so checkpoints treat both alike.
2. The elements of each slab (`assignment.py`) come together on one rank: first those that ZeRO has shared out, then those
   that TP or ETP has cut. This rank makes each matrix orthogonal. It has the whole matrix, so the bits do not depend on the
   fold. No other rank repeats its work.
3. The results go back the same way, and every rank updates its own weights.

Without ZeRO, ranks that hold the same weights have the same momentum. Each of them works on some slabs, and sends the results
to the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foldray.comm import Communicator, Groups
from foldray.model import Transformer
from foldray.recipe import OptimizerSpec
from foldray.runtime.assignment import Assignment, Slab, slabs_of
from foldray.runtime.gradients import GradientBuffer, Gradients

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration in Jordan's post, which `torch.optim.Muon` has as well."""
EPS = 1e-7
"""The smallest norm by which a matrix is divided, as in `torch.optim.Muon`."""
ROUND = 2**24
"""About as many elements come together on a rank at once."""


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return a matrix with the singular vectors of `matrix`, and singular values near 1, in the same dtype: [m, n] → [m, n].

    It runs `steps` iterations of Newton-Schulz. `torch.optim.Muon` runs the same ones in bfloat16.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    wide = wide / wide.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide


def update_scale(adjust: str, inputs: int, outputs: int) -> float:
    """Return the factor of the learning rate for a matrix with these numbers of inputs and outputs.

    Args:
        adjust: `original` is that of Jordan's post, `match_rms_adamw` that of Liu et al. 2025 (arXiv:2502.16982).
    """
    if adjust == "original":
        return math.sqrt(max(1.0, outputs / inputs))
    return 0.2 * math.sqrt(max(inputs, outputs))


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the hidden layers (`ParameterSpec.is_hidden_matrix`), in any fold and stage of ZeRO.

    It is the rule of `torch.optim.Muon`, whose matrices are [out, in]. The iteration runs in bfloat16, or in float64 for weights
    in float64.

    Args:
        model: this rank's model. It must have such a matrix.
        masters: by parameter, what this rank updates: all of it or, if the optimizer is sharded, its own elements, flat.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        model: Transformer,
        groups: Groups,
        gradients: Gradients,
        masters: Mapping[nn.Parameter, Tensor],
    ):
        hidden, names = model.hidden_matrices(), {parameter: name for name, parameter in model.named_parameters()}
        alone = Communicator("tensor", (groups.rank,), 0, None)
        cutters = {"dense": groups.tensor, "replicated": alone, "expert": groups.expert_slices}
        self._rounds, updated = [], list[Tensor]()
        for buffer in gradients.buffers:
            matrices = [parameter for parameter in buffer.parameters if parameter in hidden]
            slabs = [slab for parameter in matrices for slab in slabs_of(model, names[parameter], parameter)]
            for some in _rounds(slabs, buffer, cutters[buffer.name].size):
                self._rounds.append(_Round(spec, buffer, some, cutters[buffer.name], masters))
            updated += [masters[parameter] for parameter in matrices]
        super().__init__(updated, {"lr": spec.lr, "weight_decay": spec.weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights by the gradients of `masters`. All ranks must call this. A closure has no use here."""
        (group,) = self.param_groups
        for master in group["params"]:
            if "momentum_buffer" not in self.state[master]:
                self.state[master]["momentum_buffer"] = torch.zeros_like(master)
        for each in self._rounds:
            each.update(self.state, group["lr"], group["weight_decay"])


def _rounds(slabs: Sequence[Slab], buffer: GradientBuffer, cutters: int) -> Iterator[list[Slab]]:
    """Divide the slabs of a gradient class into rounds, so that a step needs little memory, and all ranks have work."""
    ranks = buffer.communicator.size
    least = ROUND * (ranks if buffer.sharded else 1)
    batch: list[Slab] = []
    for slab in slabs:
        batch.append(slab)
        if len(batch) >= ranks * cutters and sum(len(member.elements) for member in batch) >= least:
            yield batch
            batch = []
    if batch:
        yield batch


class _Round:
    """Some matrices of one gradient class, which are updated at once."""

    def __init__(
        self,
        spec: OptimizerSpec,
        buffer: GradientBuffer,
        slabs: Sequence[Slab],
        cutters: Communicator,
        masters: Mapping[nn.Parameter, Tensor],
    ):
        self.spec, self.slabs, self.sharded = spec, slabs, buffer.sharded
        self.masters = [masters[slab.parameter] for slab in slabs]
        over = buffer.communicator
        held = [[_held(buffer, slab.parameter, member) for member in range(over.size)] for slab in slabs]
        # What each member has of each slab, as elements of the whole tensor.
        self.runs = [[_common(slab.elements, run) for run in by_member] for slab, by_member in zip(slabs, held, strict=True)]
        # The same for this rank, as elements of its master.
        first = [by_member[over.index].start for by_member in held]
        mine = [by_member[over.index] for by_member in self.runs]
        self.own = [slice(run.start - start, run.stop - start) for run, start in zip(mine, first, strict=True)]
        self.sharing = Assignment(over, [slab.work for slab in slabs], [list(map(len, runs)) for runs in self.runs])
        self.assigned = [slabs[item] for item in self.sharing.mine]
        sizes = [[len(slab.elements)] * cutters.size for slab in self.assigned]
        self.cutting = Assignment(cutters, [slab.work for slab in self.assigned], sizes)

    def update(self, state: Mapping[Tensor, dict[str, Any]], lr: float, weight_decay: float) -> None:
        """Update weights and momentum. All ranks of the class must call this."""
        example, dealt = self.masters[0], []
        made = self._orthogonal(self._together(state), example)
        for item, slab, whole in zip(self.sharing.mine, self.assigned, made, strict=True):
            first = slab.elements.start
            dealt.append([whole[run.start - first : run.stop - first] for run in self.runs[item]])
        for item, update in enumerate(self.sharing.give_back(dealt, like=example)):
            self.masters[item].view(-1)[self.own[item]].mul_(1 - lr * weight_decay).add_(update, alpha=-lr)

    def _together(self, state: Mapping[Tensor, dict[str, Any]]) -> list[Tensor]:
        """Update the momentum. Return what is made orthogonal of the assigned slabs, flat, in the dtype of the iteration."""
        parts = [self._momentum(item, state[master]) for item, master in enumerate(self.masters)]
        if self.sharded:
            return [torch.cat(pieces) for pieces in self.sharing.collect(parts)]
        return [parts[item] for item in self.sharing.mine]

    def _momentum(self, item: int, memory: Mapping[str, Any]) -> Tensor:
        """Add the gradient of a slab to its momentum. Return what is made orthogonal, in the dtype of the iteration."""
        gradient, decay = self.masters[item].grad, self.spec.momentum
        assert gradient is not None
        gradient, momentum = (tensor.view(-1)[self.own[item]] for tensor in (gradient, memory["momentum_buffer"]))
        momentum.lerp_(gradient, 1 - decay)
        direction = gradient.lerp(momentum, decay) if self.spec.nesterov else momentum
        return direction.to(torch.float64 if direction.dtype == torch.float64 else torch.bfloat16)

    def _orthogonal(self, slabs: list[Tensor], like: Tensor) -> list[Tensor]:
        """Return the updates of the assigned slabs, flat → flat, in the dtype of `like`.

        The matrices of a slab may be cut, so this shares out the work once more.
        """
        if not slabs:
            return []
        collected, results = self.cutting.collect(slabs), []
        del slabs  # so that the memory of what has been sent is free
        for number in self.cutting.mine:
            slab, pieces = self.assigned[number], collected.pop(0)
            matrices = [self._update_of(matrix, like.dtype) for matrix in slab.join(pieces)]
            results.append(slab.cut_up(matrices, len(pieces)))
            del pieces, matrices
        return self.cutting.give_back(results, like)

    def _update_of(self, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the update of a whole matrix [in, out] for a learning rate of one."""
        # As in torch's layout: the bits for square matrices depend on which axis comes first.
        return orthogonalize(matrix.T, self.spec.ns_steps).T.to(dtype) * update_scale(self.spec.adjust_lr, *matrix.shape)


def _held(buffer: GradientBuffer, parameter: nn.Parameter, member: int) -> range:
    """Return the elements of a flat tensor that a member of the buffer's ranks updates."""
    if not buffer.sharded:
        return range(parameter.numel())
    place = buffer.places[parameter]
    elements = replace(buffer.sharding, index=member).within(place.start, place.stop)
    return range(elements.start, elements.stop)


def _common(first: range, second: range) -> range:
    """Return what two runs have in common. An empty run begins at an end of the second one."""
    start = min(max(first.start, second.start), second.stop)
    return range(start, max(start, min(first.stop, second.stop)))
