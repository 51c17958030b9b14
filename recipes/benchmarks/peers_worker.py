"""A rank of peers.py: runs a case on another project, and compares it with one process of the same model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peers_cases import Batches, Case, experts, loss_of, make_batches, make_model
from torch import Tensor

Gradients = dict[str, Tensor]


class Layout(NamedTuple):
    """How a project spreads a model over ranks.

    Args:
        tp: ranks that cut attention and train on the same data.
        dp: ranks that train on data of their own.
        ep: ranks that hold different experts; neighbours, of any dp and tp.
        stage: DeepSpeed's stage of ZeRO.
        flag: whether transformers is asked by its flag `enable_expert_parallel` alone.
    """

    tp: int = 1
    dp: int = 4
    ep: int = 2
    stage: int = 2
    flag: bool = False


LAYOUTS: Mapping[str, Mapping[str, Layout]] = {
    "deepspeed": {
        "dp4 ep2, ZeRO-2": Layout(), "dp4 ep2, no ZeRO": Layout(stage=0), "tp2 dp2 ep4, ZeRO-2": Layout(tp=2, dp=2, ep=4),
    },
    "transformers": {
        "dp4 ep2": Layout(), "tp2 dp2 ep4": Layout(tp=2, dp=2, ep=4), "tp2 ep2": Layout(tp=2, dp=1),
        "tp2 ep2, flag": Layout(tp=2, dp=1, flag=True),
    },
}  # fmt: skip
"""Layouts by project."""


class DeepSpeed:
    """A model with DeepSpeed's AutoEP.

    Args:
        case: the case.
        layout: how the model is spread over the ranks.
        dtype: type of weights and gradients.
        repair: whether the registry of transformers takes a default, which AutoEP gives it.
        folder: a folder of the run.
    """

    def __init__(self, case: Case, layout: Layout, dtype: torch.dtype, repair: bool, folder: Path) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise DeepSpeed compiles code meanwhile
        deepspeed.init_distributed("gloo", verbose=False)
        if repair:
            _take_default()
        self.case, self.layout = case, layout
        model = make_model(case, dtype)
        if case.recompute:
            model.gradient_checkpointing_enable()
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": case.micro_batches,
            "zero_optimization": {"stage": layout.stage}, "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_allow_untested_optimizer": True, "expert_parallel": {"enabled": True, "autoep_size": layout.ep},
        }  # fmt: skip
        if layout.tp > 1:
            settings["tensor_parallel"] = {"autotp_size": layout.tp, **_cut(case.model)}
        self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]

    def evaluate(self, batches: Batches, dp_rank: int, targets: float | None) -> Tensor:
        self.engine.eval()
        with torch.no_grad():
            loss = loss_of(self.case, self.engine, batches.inputs[0][dp_rank], targets)
        self.engine.train()
        return loss

    def train(self, batches: Batches, dp_rank: int, targets: float | None) -> tuple[Tensor, Gradients, float]:
        """Train a step. Return the mean of this rank's losses, its gradients, and the norm that DeepSpeed reports."""
        from deepspeed.runtime.utils import clip_grad_norm_
        from deepspeed.utils import safe_get_full_grad

        losses, gradients = [], {}
        for m, parts in enumerate(batches.inputs):
            loss = loss_of(self.case, self.engine, parts[dp_rank], targets)
            losses.append(loss.detach())
            self.engine.backward(loss)
            if m + 1 == len(batches.inputs):
                for name, parameter in self.engine.module.named_parameters():
                    gradient = safe_get_full_grad(parameter) if self.layout.stage else parameter.grad
                    if gradient is not None:
                        gradients[name] = gradient.detach().clone()
                if not self.layout.stage:  # what clipping computes; without ZeRO the engine tells no norm
                    norm = clip_grad_norm_(self.engine.module.parameters(), 1e9, mpu=self.engine.mpu)
            self.engine.step()
        if self.layout.stage:
            norm = self.engine.get_global_grad_norm()
        return torch.stack(losses).mean(), gradients, float(norm)

    def pieces(self, gradients: Gradients, expected: Gradients) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name every gradient as the model does, with the part of the expected one that this rank holds."""
        ep, tp = dist.get_rank() % self.layout.ep, dist.get_rank() % self.layout.tp
        renamed = {"router.gate.": "gate.", "shared_experts.": "shared_expert.", "shared_experts_gate.": "shared_expert_gate."}
        for name, gradient in gradients.items():
            block, _, weight = name.rpartition(".experts.w")
            if block:
                whole = expected[f"{block}.experts.{'down_proj' if weight == '2' else 'gate_up_proj'}"]
                if weight != "2":
                    whole = whole.chunk(2, 1)[0 if weight == "1" else 1]
                yield f"{block}.experts.w{weight}", gradient, whole.chunk(self.layout.ep)[ep]
                continue
            for own, other in renamed.items():
                if name not in expected:
                    name = name.replace(own, other)
            whole = expected[name]
            for axis, size in enumerate(gradient.shape):
                if size != whole.shape[axis]:
                    whole = whole.chunk(self.layout.tp, axis)[tp]
            yield name, gradient, whole


def _cut(model: str) -> dict[str, Any]:
    """Say what DeepSpeed's AutoTP cuts. It takes no plan of transformers that also names experts."""
    if model.startswith("deepseek"):
        return {"preset_model": "deepseek_v2"}  # DeepSpeed's own, for this kind of attention
    kinds = {"column": r"[qkv]_proj", "row": r"o_proj", "skip": r"[qk]_norm"}
    specs = [{"patterns": [rf".*self_attn\.{name}\.weight$"], "partition_type": kind} for kind, name in kinds.items()]
    specs[-1]["grad_allreduce"] = True  # each rank has these norms for its own heads alone
    return {"partition_config": {"use_default_specs": False, "layer_specs": specs}}


class Transformers:
    """A model with the `DistributedConfig` of transformers. The arguments are those of `DeepSpeed`."""

    def __init__(self, case: Case, layout: Layout, dtype: torch.dtype, repair: bool, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        if dist.get_rank() == 0:
            make_model(case, dtype).save_pretrained(folder / "model")
        dist.barrier()
        if layout.flag:
            config = DistributedConfig(tp_size=layout.tp, enable_expert_parallel=True)
        else:
            config = DistributedConfig(tp_size=layout.tp, fsdp_size=layout.dp, ep_size=layout.ep)
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

    def train(self, batches: Batches, dp_rank: int, targets: float | None) -> tuple[Tensor, Gradients, float]:
        """Train a step. Return the mean of this rank's losses, whole gradients, and the norm of transformers' trainer."""
        from transformers import Trainer

        losses = []
        for parts in batches.inputs:
            loss = loss_of(self.case, self.model, parts[dp_rank], targets)
            losses.append(loss.detach())
            (loss / len(batches.inputs)).backward()
        norm = Trainer._mixed_mesh_grad_norm(None, self.model, math.inf)
        named = {name: each.grad for name, each in self.model.named_parameters() if each.grad is not None}
        gradients = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in named.items()}
        return torch.stack(losses).mean(), gradients, float(norm)

    def pieces(self, gradients: Gradients, expected: Gradients) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, gradient in gradients.items():
            yield name, gradient, expected[name]


def compare(project: str, layout: Layout, case: Case, dtype: torch.dtype, repair: bool, folder: Path) -> dict[str, Any]:
    """Run a case on this rank. Return the largest differences over all ranks, against both references.

    The reference `tokens` trains on all batches at once. The reference `means` is the mean over ranks and micro-batches of
    the loss of each.
    """
    dp, dp_rank = layout.dp, dist.get_rank() // layout.tp
    batches = make_batches(case, dp)
    peer = (DeepSpeed if project == "deepspeed" else Transformers)(case, layout, dtype, repair, folder)
    targets = batches.targets / dp / case.micro_batches if case.counted else None
    evaluated = peer.evaluate(batches, dp_rank, targets)
    loss, gradients, norm = peer.train(batches, dp_rank, targets)
    means = torch.stack([loss.double(), evaluated.double()])
    dist.all_reduce(means)
    means /= dist.get_world_size()
    return {
        name: _differences(peer, means, gradients, norm, *_alone(case, batches, dtype, together))
        for name, together in {"tokens": True, "means": False}.items()
    }


def _differences(
    peer: DeepSpeed | Transformers, means: Tensor, gradients: Gradients, norm: float, figures: Tensor, expected: Gradients
) -> dict[str, Any]:
    """Compare with one process: the figures are its loss, its evaluation and the norm of its gradient."""
    names, apart, seen = [], [], set[str]()
    for name, gradient, whole in peer.pieces(gradients, expected):
        difference = (gradient.double() - whole.double()).abs().max() / expected.get(name, whole).double().abs().max()
        names.append(name)
        apart.append(difference.nan_to_num(nan=math.inf, posinf=math.inf))
        seen.add(name.rpartition(".experts.")[0] + ".experts" if ".experts." in name else name)
    missing = {name for name in expected if name not in seen and not any(name.startswith(f"{each}.") for each in seen)}
    largest = torch.stack(apart)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    ranked = sorted(zip(names, largest.tolist(), strict=True), key=lambda item: item[1], reverse=True)
    norms = torch.tensor([abs(norm / float(figures[2]) - 1)], dtype=torch.float64)
    dist.all_reduce(norms, dist.ReduceOp.MAX)
    return {
        "loss": abs(float(means[0] - figures[0])), "gradient": ranked[0][1], "worst": dict(ranked[:5]), "norm": float(norms),
        "evaluation": abs(float(means[1] - figures[1])), "missing": sorted(missing),
    }  # fmt: skip


def _alone(case: Case, batches: Batches, dtype: torch.dtype, together: bool) -> tuple[Tensor, Gradients]:
    """Train and evaluate one process of the same model. Return three figures and the gradients."""
    model = make_model(case, dtype)
    first = Batches(batches.inputs[:1], batches.targets)
    figures = []
    for data in (first, batches):
        parts = [data.whole()] if together else [part for parts in data.inputs for part in parts]
        share = batches.targets / len(parts) * (len(data.inputs) / len(batches.inputs)) if case.counted else None
        losses = [loss_of(case, model, part, share) for part in parts]
        figures.append(torch.stack(losses).mean())
    figures[1].backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    norm = torch.stack([each.double().norm() for each in gradients.values()]).norm()
    return torch.stack([figures[1].detach().double(), figures[0].detach().double(), norm]), gradients


def _take_default() -> None:
    """Let the registry of transformers be asked with a key and a default, as AutoEP asks it."""
    from transformers.utils import output_capturing

    registry = output_capturing._CanRecordRegistry
    plain = registry.get

    def get(self: dict, model: Any, *default: Any) -> Any:
        return dict.get(self, model, *default) if default else plain(self, model)

    registry.get = get
