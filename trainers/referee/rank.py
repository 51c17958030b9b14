"""What a project's model on one rank must offer, and how it is laid out over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from trainers.referee.cases import Batches, Case, Inputs

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """How a project spreads a model over ranks.

    Args:
        tp: ranks that cut attention and train on the same data. They are neighbours.
        dp: ranks that train on data of their own.
        ep: ranks that hold different experts; neighbours, of any dp and tp. With 1, experts are no axis of their own.
        settings: what else the project is told.
        cases: the cases to try; empty for all of the project.
    """

    tp: int = 1
    dp: int = 4
    ep: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.tp * self.dp


class Peer(Protocol):
    """A project's model on this rank, made of a case, a layout, a type of numbers and a folder that all ranks share."""

    def evaluate(self, batches: Batches, dp_rank: int, targets: float | None) -> Tensor:
        """Return the loss of this rank's first micro-batch. `targets`: see `loss`."""
        ...

    def train(self, batches: Batches, dp_rank: int, targets: float | None) -> tuple[Tensor, Gradients, float | None]:
        """Return the mean loss of this rank's micro-batches, its gradients, and the norm that the project tells, if any."""
        ...

    def pieces(self, gradients: Gradients, expected: Gradients) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name every gradient as the model does, with the part of the expected one that this rank holds."""
        ...

    @staticmethod
    def alone(case: Case, dtype: torch.dtype) -> Any:
        """Make the same model for one process. All calls return equal weights."""
        ...

    @staticmethod
    def loss(case: Case, model: Any, inputs: Inputs, targets: float | None = None) -> Tensor:
        """Return the loss of this model; `targets` is what the sum over targets is divided by, None for their number."""
        ...


def whole_gradients(model: Any) -> Gradients:
    """Return the gradients of a model whose parameters are DTensors or whole. All ranks must call this."""
    named = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in named.items()}
