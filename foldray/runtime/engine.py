"""The contract of an engine, and the torch engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from foldray.blueprint.parameters import GradientClass
from foldray.blueprint.parts import Index
from foldray.comm import Groups
from foldray.model import Batch, Losses, Transformer
from foldray.orders import Ordering
from foldray.recipe import OptimizerSpec
from foldray.runtime.execution import Execution
from foldray.runtime.gradients import GradientBuffer, Gradients, Norms
from foldray.runtime.muon import Muon
from foldray.runtime.offload import OnHost
from foldray.runtime.optimizer import decay_groups, make_optimizer, moment_type, state_keys
from foldray.runtime.shards import Shard, cut

State = dict[str, torch.Tensor]


class Engine(Protocol):
    """An engine holds the model and the optimizer. A step is one call of `train` and one call of `update`.

    All ranks must call the same methods in the same order.
    """

    model: Transformer
    execution: Execution

    def train(self, batches: Sequence[Batch]) -> list[Losses]:
        """Run forward and backward of a step's micro-batches.

        Returns:
            This rank's contributions to the losses, one for each part of a micro-batch (`schedule.batch_degree`).
        """

    def update(self, lr: float, skips: bool = False) -> Norms:
        """Clip the gradients, update the weights with learning rate `lr`, and return the norms before clipping.

        Args:
            skips: whether to leave weights and optimizer as they are if the norm is not finite. All ranks have the same norm.
        """

    def weights(self) -> Iterator[tuple[GradientClass, torch.Tensor]]:
        """Yield the tensors that this rank's optimizer updates, in the optimizer's precision, with the gradient class."""

    def state(self) -> State:
        """Return this rank's weights and optimizer state by global name, in the optimizer's precision.

        A tensor is this rank's box of a parameter of the whole model (`Transformer.pieces`). It may be gathered for this call, so
        only comparisons need it.
        """

    def shards(self) -> list[Shard]:
        """Return views of this rank's share of the state. Together, the shards of all ranks are the state."""

    def load_shards(self) -> None:
        """Train with the values that were copied into the tensors of `shards`. All ranks must call this."""

    def close(self) -> None:
        """Free everything that would keep the engine in memory. The engine cannot be used afterwards."""


class TorchEngine:
    """The engine in plain torch: foldray's gradient buffers and norm, and an optimizer on weights in at least float32.

    Args:
        zero: 1 shards the optimizer and its weights over the ranks that hold the same parameters, 2 also frees gradients as
            they leave (ZeRO, Rajbhandari et al. 2020); 0 does neither.
        wire: the type of gradients on their way to their owner; None is that of the sums. Only with `zero`.
        offload: whether the optimizer's weights and moments are on the host, and its update runs there. Not with Muon.
    """

    def __init__(
        self,
        model: Transformer,
        groups: Groups,
        optimizer: OptimizerSpec,
        ordering: Ordering | None = None,
        zero: int = 0,
        wire: torch.dtype | None = None,
        offload: bool = False,
    ):
        self.model, self.spec = model, optimizer
        self.gradients = Gradients(model, groups, zero, wire=wire)
        self.host = OnHost(self.gradients.buffers) if offload else None
        self.execution = Execution(model, groups, self.gradients, ordering)
        self.masters: dict[nn.Parameter, torch.Tensor] = {}  # by parameter: what this rank's optimizer updates
        for parameter, gradient in self.gradients.views.items():
            self.masters[parameter] = self._master(parameter, gradient)
        self._fused = next(model.parameters()).is_cuda
        self._hidden = model.hidden_matrices() if optimizer.kind == "muon" else set()  # the parameters that Muon updates
        self.optimizers = self._make_optimizers(groups)

    def train(self, batches: Sequence[Batch]) -> list[Losses]:
        return self.execution.train(batches)

    def update(self, lr: float, skips: bool = False) -> Norms:
        norms = self.gradients.clip(self.spec.clip)
        if not skips or math.isfinite(norms.total):
            if self.host:
                self.host.fetch()
            for optimizer, share in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = share * lr
                optimizer.step()
            self._spread()
        self.gradients.zero()
        return norms

    def weights(self) -> Iterator[tuple[GradientClass, torch.Tensor]]:
        for parameter, master in self.masters.items():
            yield self.gradients.buffer_of[parameter].name, master.detach()

    def state(self) -> State:
        """Return the state. The ranks that shard a parameter's optimizer put its parts together."""
        return engine_state(
            self.model,
            self.spec,
            lambda parameter: self._whole(parameter, self.masters[parameter].detach()),
            lambda parameter, key: self._whole(parameter, self._remembered(parameter, key)),
        )

    def shards(self) -> list[Shard]:
        """Return views of what this rank owns: boxes of parameters, or of runs of them if the optimizer is sharded."""
        return shards_of(self.model, self.spec, self._held)

    def load_shards(self) -> None:
        self._spread()

    def close(self) -> None:
        """Do nothing: nothing keeps the engine in memory."""

    def _master(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Return what this rank's optimizer updates of a parameter, with its gradient."""
        if self.host:
            return self.host.master(parameter, self._own(parameter, parameter.detach()))
        itself = gradient.shape == parameter.shape and gradient.dtype == parameter.dtype
        master = parameter if itself else nn.Parameter(self._own(parameter, parameter.detach()).to(gradient.dtype))
        master.grad = gradient
        return master

    def _held(self, parameter: nn.Parameter, key: str | None) -> tuple[torch.Tensor, int]:
        buffer, place = self.gradients.buffer_of[parameter], self.gradients.buffer_of[parameter].places[parameter]
        values = self.masters[parameter].detach() if key is None else self._remembered(parameter, key)
        return values, buffer.sharding.within(place.start, place.stop).start

    def _make_optimizers(self, groups: Groups) -> list[tuple[torch.optim.Optimizer, float]]:
        """Return the optimizers that have something to update, each with its share of the learning rate."""
        optimizers: list[tuple[torch.optim.Optimizer, float]] = []
        if self._hidden:
            optimizers.append((Muon(self.spec, self.model, groups, self.gradients, self.masters), 1.0))
        rest = [(master, parameter) for parameter, master in self.masters.items() if parameter not in self._hidden]
        if rest:
            share = (self.spec.adamw_lr or self.spec.lr) / self.spec.lr
            optimizers.append((make_optimizer(self.spec, decay_groups(self.spec, rest), self._fused), share))
        return optimizers

    def _remembered(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """Return the optimizer's state of a parameter. Before the first step, it is made with zeros."""
        master = self.masters[parameter]
        updates = next(
            optimizer for optimizer, _ in self.optimizers if isinstance(optimizer, Muon) == (parameter in self._hidden)
        )
        memory = updates.state[master]
        if key == "step":
            return memory.setdefault("step", torch.zeros((), dtype=torch.float32, device=master.device if self._fused else None))
        return memory.setdefault(key, torch.zeros_like(master, dtype=moment_type(self.spec)))

    def _own(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements of a parameter, or of a tensor of its shape, that this rank's optimizer has.

        They are flat if the optimizer is sharded.
        """
        buffer = self.gradients.buffer_of[parameter]
        if not buffer.sharded:
            return whole
        place = buffer.places[parameter]
        return whole.flatten()[buffer.sharding.within(place.start, place.stop)]

    def _whole(self, parameter: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        """Undo `_own`. If the optimizer is sharded, all ranks that share the parameter must call this."""
        buffer = self.gradients.buffer_of[parameter]
        if values.dim() == 0:
            return values
        if not buffer.sharded:
            return values.to(buffer.device)
        place, whole = buffer.places[parameter], torch.zeros(parameter.numel(), dtype=values.dtype, device=buffer.device)
        whole[buffer.sharding.within(place.start, place.stop)] = values
        return buffer.communicator.all_reduce(whole).view_as(parameter)

    @torch.no_grad()
    def _spread(self) -> None:
        """Copy the updated weights into the model, from all ranks if the optimizer is sharded."""
        for buffer in self.gradients.buffers:
            if buffer.sharded:
                for parameter, values in buffer.gather(self._mine(buffer)):
                    parameter.copy_(values)
                continue
            updated = self.host.weights(buffer) if self.host else None
            for parameter in buffer.parameters:
                values = self.masters[parameter] if updated is None else buffer.part(updated, parameter)
                if parameter is not values:
                    parameter.copy_(values)

    def _mine(self, buffer: GradientBuffer) -> torch.Tensor:
        """Return the updated weights that this rank owns of a buffer, in the layout of its sums, in the type of the model."""
        if self.host:
            return self.host.weights(buffer).to(buffer.device)
        mine = torch.zeros(buffer.sharding.owned, dtype=buffer.parameters[0].dtype, device=buffer.device)
        for parameter, place in buffer.places.items():
            mine[buffer.sharding.own(place.start, place.stop)] = self.masters[parameter].to(mine.dtype)
        return mine


class StateTensor(NamedTuple):
    """A tensor of the state, of one parameter of a rank.

    Args:
        key: None for the weights, else a key of the optimizer's state.
        pattern: the global key, with a gap for the name of a part.
    """

    parameter: nn.Parameter
    key: str | None
    pattern: str
    parts: list[tuple[str, Index]]


def tensors_of(model: Transformer, optimizer: OptimizerSpec) -> Iterator[StateTensor]:
    """Yield the tensors of the state of a rank's model. Frozen weights are no part of it."""
    for local, parameter in model.trained():
        parts = model.global_parts[local]
        yield StateTensor(parameter, None, "model/{}", parts)
        for key in state_keys(optimizer, model.pieces[parts[0][0]].spec):
            yield StateTensor(parameter, key, f"optimizer/{{}}/{key}", parts)


def shards_of(
    model: Transformer, optimizer: OptimizerSpec, held: Callable[[nn.Parameter, str | None], tuple[torch.Tensor, int]]
) -> list[Shard]:
    """Return the shards of a rank.

    Args:
        held: (parameter, key of the optimizer's state, or None for the weights) → the run of the flat tensor that the rank owns,
            in any shape, and the number of its first element. "step" is a scalar.
    """
    shards = [Shard.whole(f"model/{name}", bias) for name, bias in model.biases().items()]
    shards += [Shard.whole(f"model/{name}", shares, optional=True) for name, shares in model.frequencies().items()]
    for parameter, key, pattern, parts in tensors_of(model, optimizer):
        values, start = held(parameter, key)
        for name, index in parts:
            if key == "step":
                shards.append(Shard.whole(pattern.format(name), values))
            else:
                shards += cut(values.view(-1), parameter.shape, start, index, model.pieces[name], pattern.format(name))
    return shards


def frozen_shards(model: Transformer) -> list[Shard]:
    """Return views of the weights that training does not change: boxes of parameters of the whole model."""
    trained, shards = {name for name, _ in model.trained()}, list[Shard]()
    for local, parameter in model.named_parameters():
        for name, index in model.global_parts[local] if local not in trained else ():
            shards += cut(parameter.detach().view(-1), parameter.shape, 0, index, model.pieces[name], f"model/{name}")
    return shards


def engine_state(
    model: Transformer,
    optimizer: OptimizerSpec,
    weight: Callable[[nn.Parameter], torch.Tensor],
    remembered: Callable[[nn.Parameter, str], torch.Tensor],
) -> State:
    """Return the state of an engine by global name.

    The keys are `model/NAME` for weights and for what routers keep from step to step, and `optimizer/NAME/KEY`. The name of an
    expert's parameter has the expert's global id.

    Args:
        weight: parameter → its weights in the optimizer's precision.
        remembered: (parameter, key) → the optimizer's state of the parameter; "step" is a scalar.
    """
    state: dict[str, torch.Tensor] = {}
    for parameter, key, pattern, parts in tensors_of(model, optimizer):
        tensor = weight(parameter) if key is None else remembered(parameter, key)
        for name, index in parts:
            state[pattern.format(name)] = tensor if tensor.dim() == 0 else tensor[index]
    return state | {f"model/{name}": tensor for name, tensor in (model.biases() | model.frequencies()).items()}
