"""The copies of other ranks' experts in a layer: their weights, the tokens that they get, and the way of both.

A copy is a place for tokens as an expert's home is one, so all-to-alls need no more than the number of places. The router chooses
experts; then tokens find their places (`spread`). Weights travel once in a step, before the experts of the first micro-batch.
Their gradients come home once, after the last one, and are added in the order of ranks, so the sums of every run have the same
bits.

Legend: T tokens, K experts per token, P places (`blueprint/copying.py`), X copies that travel, W numbers of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from foldray.blueprint.copying import Copies
from foldray.comm import Communicator, Pending
from foldray.kernels.autograd import at_least_float32
from foldray.kernels.transfer import to_device
from foldray.moe.router import Routing

_GOLDEN = (5**0.5 - 1) / 2  # the parts of its multiples behind the point are spread evenly, whatever run of them one takes


class CopiedExperts:
    """The copies on this rank, and what this rank's experts have on other ranks.

    Args:
        home: this rank's experts, stacked: each parameter has as many numbers for each of them.
        copies: the copies on this rank, stacked in the same way.
        over: the expert-parallel group.
    """

    def __init__(self, home: nn.Module, experts: int, copies: nn.Module, room: int, over: Communicator):
        self._home, self._copies = list(home.parameters()), list(copies.parameters())
        self._experts, self._room, self._over = experts, room, over
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._coming: Pending | None = None
        self._places, self._device = experts * over.size + room * over.size, self._home[0].device
        self._leaving = self._arriving = _Rows.of([[]] * over.size, self._device)  # experts here, and copies here
        self._bound_P = torch.zeros(self._places, dtype=torch.float64, device=self._device)
        self._place_P = torch.zeros(self._places, dtype=torch.int64, device=self._device)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the copies here. They are no part of the model's state."""
        return self._copies

    def put(self, table: Copies | None) -> None:
        """Have these copies from the next step on; None has tokens stay with their experts' homes."""
        table = table or Copies.none(self._experts * self._over.size, self._over.size, self._room)
        here, own = self._over.index, self._experts
        leaving = [[expert - here * own for expert in of if expert // own == here] for of in table.of_rank]
        mine = list(enumerate(table.of_rank[here]))
        arriving = [[number for number, expert in mine if expert // own == rank] for rank in range(self._over.size)]
        self._leaving, self._arriving = _Rows.of(leaving, self._device), _Rows.of(arriving, self._device)
        bounds, places = table.ways(here)
        # In place, because captured ops read them where they are.
        self._bound_P.copy_(to_device(bounds, self._device, torch.float64))
        self._place_P.copy_(to_device(places, self._device, torch.int64))

    def spread(self, routing: Routing) -> Routing:
        """Return the routing with places instead of experts. The tokens of an expert go to its places by their shares."""
        token_T = torch.arange(1, len(routing.expert_TK) + 1, dtype=torch.float64, device=routing.expert_TK.device)
        number_TK = routing.expert_TK + (token_T * _GOLDEN).frac_()[:, None]
        place_TK = self._place_P[torch.searchsorted(self._bound_P, number_TK, right=True)]
        return replace(routing, expert_TK=place_TK, places=self._places)

    def start_out(self) -> Pending:
        """Start to send weights to the copies of the experts here, and to receive those of the copies here."""

        def store(arrived: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
            for copies_RW, part_XW in zip(*self._parts(self._copies, self._room, arrived[0]), strict=True):
                copies_RW[self._arriving.on_device] = part_XW
            return []

        self._coming = self._start(self._home, self._experts, self._leaving, self._arriving).then(store)
        return self._coming

    def wait(self) -> None:
        """Wait until the weights of the copies here have come."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None

    def sum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the sum of a copy's gradients, to which ops add."""
        if parameter not in self._sums:
            self._sums[parameter] = torch.zeros_like(parameter, dtype=at_least_float32(parameter))
        return self._sums[parameter]

    def start_home(self, sum_of: Callable[[nn.Parameter], torch.Tensor]) -> Pending:
        """Start to send the gradients of the copies here to their experts, and to receive those of the experts here.

        Args:
            sum_of: parameter of the experts here → the sum of its gradients. `wait` adds to it.
        """
        sums = [self.sum_of(parameter) for parameter in self._copies]
        self._sums.clear()

        def add(arrived: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
            into = [sum_of(parameter) for parameter in self._home]
            for home_EW, part_XW in zip(*self._parts(into, self._experts, arrived[0]), strict=True):
                for expert, row_W in zip(self._leaving.numbers, part_XW, strict=True):  # one may have several copies
                    home_EW[expert] += row_W
            return []

        return self._start(sums, self._room, self._arriving, self._leaving).then(add)

    def _start(self, tensors: Sequence[torch.Tensor], count: int, leaving: _Rows, arriving: _Rows) -> Pending:
        """Start to send rows of stacked tensors to the ranks, all numbers of an expert together: [X, W]."""
        leaving_XW = torch.cat([tensor.detach().view(count, -1)[leaving.on_device] for tensor in tensors], 1)
        return self._over.start_all_to_all(leaving_XW, arriving.by_rank, leaving.by_rank)

    @staticmethod
    def _parts(
        tensors: Sequence[torch.Tensor], count: int, arrived_XW: torch.Tensor
    ) -> tuple[list[torch.Tensor], Sequence[torch.Tensor]]:
        """Return stacked tensors by expert, and what has come for each of them."""
        stacked = [tensor.detach().view(count, -1) for tensor in tensors]
        return stacked, arrived_XW.split([tensor.shape[1] for tensor in stacked], 1)


class _Rows(NamedTuple):
    """Rows of stacked tensors, rank by rank: their numbers, the same on the device, and how many each rank gets or sends."""

    numbers: list[int]
    on_device: torch.Tensor
    by_rank: list[int]

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]], device: torch.device) -> _Rows:
        numbers = [number for of_rank in lists for number in of_rank]
        return cls(numbers, to_device(numbers, device, torch.int64), list(map(len, lists)))
