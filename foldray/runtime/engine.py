"""What trains: the engine contract, and the torch engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from foldray.comm import Groups
from foldray.model import Batch, Losses, Transformer
from foldray.recipe import OptimizerSpec
from foldray.runtime.execution import Execution
from foldray.runtime.gradients import Gradients
from foldray.runtime.optimizer import decay_groups, make_optimizer, state_keys
from foldray.schedule import Ordering
from foldray.spec import Piece

State = dict[str, torch.Tensor]


class Engine(Protocol):
    """Holds the model and the optimizer; an optimizer step is one call of `train` and one of `update`."""

    model: Transformer
    execution: Execution

    def train(self, batches: Sequence[Batch]) -> list[Losses]:
        """Forward and backward of a step's micro-batches; what this rank adds to the losses of each."""

    def update(self, lr: float) -> float:
        """Reduce, clip and step; the gradient norm before clipping."""

    def state(self) -> State:
        """This rank's weights and optimizer state by global name, in the optimizer's precision; what `load_state` takes.

        A tensor is this rank's box of the whole (`state_pieces`).
        """

    def load_state(self, state: State) -> None:
        """Go on from a saved state."""


class TorchEngine:
    """Plain torch: our gradient buffers, our norm, an unsharded optimizer on weights in at least float32."""

    def __init__(self, model: Transformer, groups: Groups, optimizer: OptimizerSpec, ordering: Ordering | None = None):
        self.model, self.spec = model, optimizer
        self.gradients = Gradients(model, groups)
        self.execution = Execution(model, groups, self.gradients.add, ordering)
        self.masters: dict[nn.Parameter, torch.Tensor] = {}
        for parameter, gradient in self.gradients.views.items():
            wide = parameter.dtype == gradient.dtype
            master = parameter if wide else nn.Parameter(parameter.detach().to(gradient.dtype))
            master.grad = gradient
            self.masters[parameter] = master
        self.optimizer = make_optimizer(optimizer, decay_groups(optimizer, ((m, p) for p, m in self.masters.items())))

    def train(self, batches: Sequence[Batch]) -> list[Losses]:
        return self.execution.train(batches)

    def update(self, lr: float) -> float:
        self.gradients.reduce()
        norm = self.gradients.clip(self.spec.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._narrow()
        self.gradients.zero()
        return norm

    def state(self) -> State:
        return engine_state(self.model, self.spec, lambda p: self.masters[p].detach(), self._remembered)

    def load_state(self, state: State) -> None:
        with torch.no_grad():
            for key, tensor in self.state().items():
                tensor.copy_(state[key])
        self._narrow()

    def _remembered(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """The optimizer's memory of a parameter, made (zero) if no step has been taken yet."""
        master = self.masters[parameter]
        memory = self.optimizer.state[master]
        if key == "step":
            return memory.setdefault("step", torch.zeros((), dtype=torch.float32))
        return memory.setdefault(key, torch.zeros_like(master))

    @torch.no_grad()
    def _narrow(self) -> None:
        for parameter, master in self.masters.items():
            if parameter is not master:
                parameter.copy_(master)


def state_pieces(model: Transformer, state: State) -> dict[str, Piece]:
    """Which box of the whole model each tensor of a state is; scalars and what is no parameter are left out: they are whole."""
    names = {key: key.split("/")[1] for key, tensor in state.items() if tensor.dim() > 0}
    return {key: model.pieces[name] for key, name in names.items() if name in model.pieces}


def engine_state(
    model: Transformer,
    optimizer: OptimizerSpec,
    weight: Callable[[nn.Parameter], torch.Tensor],
    remembered: Callable[[nn.Parameter, str], torch.Tensor],
) -> State:
    """The state of an engine by global name.

    Args:
        weight: parameter → its weights in the optimizer's precision.
        remembered: (parameter, key) → what the optimizer remembers of it; key "step" is a scalar.

    Keys: `model/NAME`, `optimizer/NAME/KEY`; experts by their global id, router biases among the weights.
    """
    parameters, state = dict(model.named_parameters()), {}
    memory = (*state_keys(optimizer), "step") if optimizer.kind == "adamw" else state_keys(optimizer)
    for local, parts in model.global_parts.items():
        parameter = parameters[local]
        tensors = {"model/{}": weight(parameter)} | {f"optimizer/{{}}/{key}": remembered(parameter, key) for key in memory}
        for name, index in parts:
            for pattern, tensor in tensors.items():
                state[pattern.format(name)] = tensor if tensor.dim() == 0 else tensor[index]
    return state | {f"model/{name}": bias for name, bias in model.biases().items()}
