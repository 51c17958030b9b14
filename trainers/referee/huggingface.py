"""A rank of transformers' `DistributedConfig`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer
from transformers.distributed import DistributedConfig

from trainers.referee.cases import Batches, Case, experts, loss_of, make_model
from trainers.referee.rank import Gradients, Layout, whole_gradients


class Transformers:
    """A model of transformers, which it spreads itself (`rank.Peer`). The norm is that of its trainer."""

    alone, loss = staticmethod(make_model), staticmethod(loss_of)

    def __init__(self, case: Case, layout: Layout, dtype: torch.dtype, folder: Path) -> None:
        if dist.get_rank() == 0:
            make_model(case, dtype).save_pretrained(folder / "model")
        dist.barrier()
        sizes = {"tp_size": layout.tp, "fsdp_size": layout.dp, "ep_size": layout.ep}
        config = DistributedConfig(**{**sizes, **layout.settings})
        self.case = case
        self.model = AutoModelForCausalLM.from_pretrained(
            folder / "model", distributed_config=config, dtype=dtype, **experts(dtype)
        ).train()
        if case.recompute:
            self.model.gradient_checkpointing_enable()

    def evaluate(self, batches: Batches, dp_rank: int, targets: float | None) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            loss = loss_of(self.case, self.model, batches.inputs[0][dp_rank], targets)
        self.model.train()
        return loss

    def train(self, batches: Batches, dp_rank: int, targets: float | None) -> tuple[Tensor, Gradients, float | None]:
        losses = []
        for parts in batches.inputs:
            loss = loss_of(self.case, self.model, parts[dp_rank], targets)
            losses.append(loss.detach())
            (loss / len(batches.inputs)).backward()
        norm = Trainer._mixed_mesh_grad_norm(cast(Trainer, None), self.model, math.inf)  # it asks nothing of a trainer
        return torch.stack(losses).mean(), whole_gradients(self.model), float(norm)

    def pieces(self, gradients: Gradients, expected: Gradients) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, gradient in gradients.items():
            yield name, gradient, expected[name]
