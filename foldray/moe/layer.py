"""A Mixture-of-Experts layer: router, dispatcher, experts, shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from foldray.activations import find_activation
from foldray.blueprint import ModelSpec
from foldray.blueprint.parts import Parts, ffn_columns
from foldray.comm import Groups
from foldray.kernels.experts import expert_ffn
from foldray.moe.dispatcher import Dispatcher, Permutation, Plan
from foldray.moe.router import Gate, Router
from foldray.moe.tally import Tally
from foldray.moe.torch_backend import TorchPermutation


@dataclass(frozen=True)
class MoeBackend:
    """Which kernels gate, permute and multiply; the defaults are torch's."""

    gate: Gate | None = None
    permutation: Permutation | None = None
    experts: Literal["grouped", "loop"] = "grouped"


class Experts(nn.Module):
    """This rank's slices of its experts, stacked: `up` [E_local, H, W] and `down` [E_local, F, H], F the width over ETP."""

    def __init__(self, model: ModelSpec, groups: Groups, device: torch.device | None, dtype: torch.dtype | None):
        super().__init__()
        count = model.experts // groups.tokens.size
        first = groups.tokens.index * count
        self.ids, self.ffn, self.inner = range(first, first + count), model.ffn, model.expert_hidden // groups.expert_slices.size
        width = self.inner * len(model.activation.inwards)
        self.up = nn.Parameter(torch.empty(count, model.hidden, width, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(count, self.inner, model.hidden, device=device, dtype=dtype))

    def forward(self, x_NH: torch.Tensor, counts: list[int], kind: Literal["grouped", "loop"]) -> torch.Tensor:
        return expert_ffn(x_NH, counts, self.up, self.down, self.ffn, kind)

    def parts(self) -> Parts:
        inwards = [
            (f"{expert}.{part}", index)
            for i, expert in enumerate(self.ids)
            for part, index in ffn_columns(find_activation(self.ffn).inwards, self.inner, (i, slice(None)))
        ]
        return {"up": inwards, "down": [(f"{expert}.down", (i,)) for i, expert in enumerate(self.ids)]}


class MoELayer(nn.Module):
    """[B, s, H] → [B, s, H] through the experts of an EP×ETP group; `forward` runs the stages one after another."""

    def __init__(
        self,
        model: ModelSpec,
        groups: Groups,
        backend: MoeBackend,
        shared: nn.Module | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.backend = backend
        self.router = Router(model, groups, backend.gate, device, dtype)
        self.experts = Experts(model, groups, device, dtype)
        self.shared = shared
        self.dispatcher = Dispatcher(groups, backend.permutation or TorchPermutation())

    def forward(self, x_BSH: torch.Tensor) -> tuple[torch.Tensor, Tally]:
        """All stages one after another in one autograd graph: what every schedule must equal."""
        x_TH, stages = x_BSH.reshape(-1, x_BSH.shape[-1]), self.dispatcher
        routing, tally = self.router.whole(x_TH, x_BSH.shape[0])
        rows_NH, plan = stages.dispatch_preprocess(x_TH, routing)
        plan = stages.exchange_counts(plan)
        y_NH = self.run_experts(stages.dispatch(rows_NH, plan), plan)
        y_TH = stages.combine_postprocess(stages.combine(y_NH, plan), plan)
        y_BSH = y_TH.to(x_BSH.dtype).view_as(x_BSH)
        return y_BSH if self.shared is None else y_BSH + self.shared(x_BSH), tally

    def run_experts(self, rows_NH: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Local: rows as dispatch brings them → results as combine takes them."""
        rows_NH = self.dispatcher.dispatch_postprocess(rows_NH, plan)
        y_NH = self.experts(rows_NH, plan.rows_per_expert, self.backend.experts)
        return self.dispatcher.combine_preprocess(y_NH, plan)
