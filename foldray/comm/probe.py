"""Tries every collective before training starts, so a missing operation of a backend is reported before the first step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from foldray.comm.communicator import Communicator
from foldray.comm.groups import Groups

Operation = Callable[[Communicator, torch.Tensor], object]


class UnsupportedBackend(RuntimeError):
    """The backend lacks an operation that a fold needs. The message names backend, operation, type and class of traffic."""


def probe(groups: Groups, device: torch.device, dtype: torch.dtype) -> None:
    """Run each operation that this fold uses, on a few numbers of the type that the operation sends.

    Every rank of the fold must call this.
    """
    wide = torch.promote_types(dtype, torch.float32)
    sums: dict[str, Operation] = {"all-reduce": Communicator.all_reduce, "reduce-scatter": _reduce_scatter}
    maximum: Operation = partial(Communicator.all_reduce, reduction="max")
    plan: list[tuple[Communicator, torch.dtype, dict[str, Operation]]] = [
        (groups.tokens, dtype, {"uneven all-to-all": _all_to_all}),
        (groups.tokens_inside, dtype, {"uneven all-to-all": _all_to_all}),
        (groups.expert_slices, dtype, {"uneven all-to-all": _all_to_all}),
        (groups.counts, torch.int64, {"all-gather": Communicator.all_gather}),
        (groups.tensor, dtype, {"all-gather": Communicator.all_gather, "reduce-scatter": _reduce_scatter}),
        (groups.tensor, wide, {"all-reduce": Communicator.all_reduce, "maximum": maximum}),
        (groups.context, dtype, {"send and receive": _shift, "all-gather": Communicator.all_gather}),
        (groups.context, wide, {"send and receive": _shift, "reduce-scatter": _reduce_scatter}),
        (groups.sequence, torch.int64, {"all-reduce": Communicator.all_reduce, "all-gather": Communicator.all_gather}),
        (groups.handovers_up, dtype, {"send and receive": partial(_messages, up=True)}),
        (groups.handovers_down, dtype, {"send and receive": partial(_messages, up=False)}),
        (groups.dense_gradients, wide, sums),
        (groups.replicated_gradients, wide, sums),
        (groups.expert_gradients, wide, sums),
        (groups.tied_gradients, wide, {"all-reduce": Communicator.all_reduce}),
        (groups.rows_up, dtype, {"send and receive": _shift}),
        (groups.rows_down, dtype, {"send and receive": _shift}),
        (groups.row_counts, torch.int64, {"send and receive": _shift}),
        (groups.control, torch.float64, {"all-reduce": Communicator.all_reduce}),
    ]
    for communicator, kind, operations in plan:
        for name, operation in operations.items() if communicator.group is not None else ():
            try:
                operation(communicator, torch.ones(2, device=device).to(kind))
            except Exception as error:  # backends raise exceptions of many types
                backend, reason = dist.get_backend(communicator.group), " ".join(str(error).split())[:160]
                what = f"the {backend} backend cannot do the {name} of {kind}"
                raise UnsupportedBackend(f"{what} that {communicator.name} needs under {groups.fold}: {reason}") from error
    groups.traffic.clear()


def _all_to_all(communicator: Communicator, x: torch.Tensor) -> torch.Tensor:
    """Send i rows to member i, so that the numbers of rows differ and one of them is zero."""
    return communicator.all_to_all(
        x[:1].repeat(sum(range(communicator.size))), [communicator.index] * communicator.size, range(communicator.size)
    )


def _reduce_scatter(communicator: Communicator, x: torch.Tensor) -> torch.Tensor:
    return communicator.reduce_scatter(x.repeat(communicator.size))


def _shift(communicator: Communicator, x: torch.Tensor) -> object:
    return communicator.shift([x]).wait()


def _messages(communicator: Communicator, x: torch.Tensor, up: bool) -> None:
    """Send from each member to the next one of a ring, up or down. NCCL makes a connection for each pair at its first message."""
    members = communicator.size
    for low, high in sorted({tuple(sorted((i, (i + 1) % members))) for i in range(members)}):
        sender, receiver = (low, high) if up else (high, low)
        if communicator.index == sender:
            communicator.send(x, receiver).wait()
        elif communicator.index == receiver:
            communicator.receive(torch.empty_like(x), sender).wait()
