"""Tutel's gate and fast dispatcher as a backend. Every expert gets equally many rows, which Tutel's kernels copy and sum.

Tutel's other parts do not apply here. Its all-to-alls send equal shares. The two-level one (2DH) runs on all workers of a job
and on no other group, and it makes the caller wait, so that no schedule could hide it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from foldray.blueprint import ModelSpec
from foldray.errors import MissingPackage
from foldray.kernels.permutation import sort_by_expert
from foldray.moe.contracts import Sent
from foldray.moe.router import Gate, Routing

INSTALL = (
    "NO_CUDA=1 pip install --no-build-isolation git+https://github.com/microsoft/tutel@82af7aad9fc3ec981395ba97e7242a480984a55e "
    "(leave NO_CUDA out on a GPU; needs a C++ compiler)"
)
"""Tutel is on no package index, and a package on one may not require an address. So it is no extra of foldray's."""


class TutelPermutation:
    """Every expert gets `Routing.capacity` rows, or as many as the busiest expert if that is None. Empty rows are zero.

    Tutel's kernels compute in float32. So bfloat16 tokens are copied exactly, and their sums are rounded once.
    """

    def __init__(self) -> None:
        self._fast_dispatcher = _import_tutel().fast_dispatcher

    def encode(self, x_TH: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Sent]:
        """Copy tokens to rows. The tokens must be float32 or bfloat16; Tutel would round float64."""
        experts = routing.targets
        _, position_TK, count_E = sort_by_expert(routing.expert_TK, routing.keep_TK, experts)
        rows = max(1, int(count_E.max())) if routing.capacity is None else routing.capacity
        place_TK = position_TK - (count_E.cumsum(0) - count_E)[routing.expert_TK]
        place_TK = place_TK.masked_fill(position_TK < 0, rows)  # beyond the expert's last row: the kernels skip it
        dispatcher = self._fast_dispatcher(experts, rows, x_TH.shape[1], x_TH.dtype)
        slots = _columns(routing.expert_TK), _columns(place_TK)
        dispatcher.update(*slots, _columns(routing.weight_TK.detach()), capacity=rows)
        sent = Sent(torch.full_like(count_E, rows), (dispatcher, slots, rows), [rows] * experts)
        return dispatcher.encode(x_TH.contiguous()), sent

    def decode(self, y_NH: torch.Tensor, sent: Sent, weight_TK: torch.Tensor) -> torch.Tensor:
        dispatcher, slots, rows = sent.memory
        dispatcher.update(*slots, _columns(weight_TK), capacity=rows)
        return dispatcher.decode(y_NH.contiguous())


def tutel_gate(model: ModelSpec) -> Gate | None:
    """Return a gate that lets Tutel's `extract_critical` choose experts, or None if Tutel has no such gate.

    Tutel chooses by a score and uses the same score as the weight, so it knows no selection bias. For one expert per token
    it does not rescale the weight. It drops no token here: foldray's model decides which tokens are dropped.
    """
    spec, rescaled = model.router, model.router.normalize or model.router.softmax == "after_topk"
    extract_critical = _import_tutel().extract_critical
    if spec.score != "softmax" or spec.selection_bias or spec.groups > 1 or (rescaled and model.topk == 1):
        return None

    def gate(logits_TE: torch.Tensor, bias_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {"loss_fn": None, "capacity_factor": float(model.experts), "normalize_gate": rescaled}
        with _without_logs():  # Tutel logs the capacity of every call
            (_, expert_KT, _, weight_KT, *_), _ = extract_critical(logits_TE.softmax(-1), model.topk, **options)
        return torch.stack(expert_KT, 1).long(), torch.stack(weight_KT, 1) * spec.scale

    return gate


def _import_tutel() -> Any:
    with _without_logs():
        try:
            from tutel import moe
        except Exception:  # an incomplete installation fails in more ways than ImportError
            raise MissingPackage("moe.backend", "tutel", "tutel", INSTALL) from None
    return moe


@contextmanager
def _without_logs() -> Iterator[None]:
    level, handlers = logging.root.manager.disable, list(logging.root.handlers)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)
        logging.root.handlers[:] = handlers  # the first `logging.info` of a process adds one


def _columns(table_TK: torch.Tensor) -> list[torch.Tensor]:
    return [column.contiguous() for column in table_TK.unbind(1)]
