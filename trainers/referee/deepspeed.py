"""A rank of DeepSpeed's AutoEP, alone or with its AutoTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import safe_get_full_grad
from torch import Tensor
from transformers.utils import output_capturing

from trainers.referee.cases import Batches, Case, loss_of, make_model
from trainers.referee.rank import Gradients, Layout

_RENAMED = {"router.gate.": "gate.", "shared_experts.": "shared_expert.", "shared_experts_gate.": "shared_expert_gate."}


class DeepSpeed:
    """A model of transformers in DeepSpeed's engine (`rank.Peer`)."""

    alone, loss = staticmethod(make_model), staticmethod(loss_of)

    def __init__(self, case: Case, layout: Layout, dtype: torch.dtype, folder: Path) -> None:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise DeepSpeed compiles code meanwhile
        deepspeed.init_distributed("gloo", verbose=False)
        if layout.settings.get("repaired", True):
            _take_default()
        self.case, self.layout, self.stage = case, layout, layout.settings.get("stage", 2)
        model = make_model(case, dtype)
        if case.recompute:
            model.gradient_checkpointing_enable()
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": case.micro_batches,
            "zero_optimization": {"stage": self.stage}, "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_allow_untested_optimizer": True, "expert_parallel": {"enabled": True, "autoep_size": layout.ep},
        }  # fmt: skip
        if layout.tp > 1:
            settings["tensor_parallel"] = {"autotp_size": layout.tp, **({} if layout.settings.get("plan") else _cut(case.model))}
        self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]

    def evaluate(self, batches: Batches, dp_rank: int, targets: float | None) -> Tensor:
        self.engine.eval()
        with torch.no_grad():
            loss = loss_of(self.case, self.engine, batches.inputs[0][dp_rank], targets)
        self.engine.train()
        return loss

    def train(self, batches: Batches, dp_rank: int, targets: float | None) -> tuple[Tensor, Gradients, float | None]:
        losses, gradients, norm = [], Gradients(), None
        for m, parts in enumerate(batches.inputs):
            loss = loss_of(self.case, self.engine, parts[dp_rank], targets)
            losses.append(loss.detach())
            self.engine.backward(loss)
            if m + 1 == len(batches.inputs):
                for name, parameter in self.engine.module.named_parameters():
                    gradient = safe_get_full_grad(parameter) if self.stage else parameter.grad
                    if gradient is not None:
                        gradients[name] = gradient.detach().clone()
                if not self.stage:  # what clipping computes; without ZeRO the engine tells no norm
                    norm = clip_grad_norm_(self.engine.module.parameters(), 1e9, mpu=self.engine.mpu)
            self.engine.step()
        if self.stage:
            norm = self.engine.get_global_grad_norm()
        return torch.stack(losses).mean(), gradients, None if norm is None else float(norm)

    def pieces(self, gradients: Gradients, expected: Gradients) -> Iterator[tuple[str, Tensor, Tensor]]:
        ep, tp = dist.get_rank() % self.layout.ep, dist.get_rank() % self.layout.tp
        for name, gradient in gradients.items():
            block, _, weight = name.rpartition(".experts.w")
            if block:
                whole = expected[f"{block}.experts.{'down_proj' if weight == '2' else 'gate_up_proj'}"]
                if weight != "2":
                    whole = whole.chunk(2, 1)[0 if weight == "1" else 1]
                yield f"{block}.experts.w{weight}", gradient, whole.chunk(self.layout.ep)[ep]
                continue
            for own, other in _RENAMED.items():
                if name not in expected:
                    name = name.replace(own, other)
            whole = expected[name]
            for axis, size in enumerate(gradient.shape):
                if size != whole.shape[axis]:
                    whole = whole.chunk(self.layout.tp, axis)[tp]
            yield name, gradient, whole


def _cut(model: str) -> dict[str, Any]:
    """Say what AutoTP cuts, since it takes no plan of transformers that also names experts."""
    if model.startswith("deepseek"):
        return {"preset_model": "deepseek_v2"}  # DeepSpeed's own, for this kind of attention
    kinds = {"column": r"[qkv]_proj", "row": r"o_proj", "skip": r"[qk]_norm"}
    specs: list[dict[str, Any]] = [
        {"patterns": [rf".*self_attn\.{name}\.weight$"], "partition_type": kind} for kind, name in kinds.items()
    ]
    specs[-1]["grad_allreduce"] = True  # each rank has these norms for its own heads alone
    return {"partition_config": {"use_default_specs": False, "layer_specs": specs}}


def _take_default() -> None:
    """Let the registry of transformers be asked with a key and a default, as AutoEP asks it."""
    registry: Any = output_capturing._CanRecordRegistry
    plain = registry.get

    def get(self: dict, model: Any, *default: Any) -> Any:
        return dict.get(self, model, *default) if default else plain(self, model)

    registry.get = get
