"""DeepSpeed as the engine: it owns reduction, clipping and the sharded optimizer; the groups are ours.

DeepSpeed learns of expert parallelism from its own MoE layer class and from module-level tables. Here the tables are filled
from the fold before `deepspeed.initialize`, expert parameters carry the table's key, and an empty layer of DeepSpeed's class
stands beside the model as the marker that it looks for. These are private names: the dependency's range is narrow.
"""

from __future__ import annotations

import logging
import os

import torch
from torch import nn

from foldray.comm import Groups
from foldray.model import Losses, Transformer
from foldray.recipe import Recipe
from foldray.runtime import State, decay_groups, engine_state, gradient_norm, make_optimizer, state_keys

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

import deepspeed  # noqa: E402 - DeepSpeed picks its accelerator, and logs, when it is imported
from deepspeed.moe.layer import MoE  # noqa: E402
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer  # noqa: E402
from deepspeed.utils import groups as deepspeed_groups  # noqa: E402
from deepspeed.utils import (  # noqa: E402
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)


class DeepSpeedEngine:
    """`deepspeed.initialize` around a foldray model, ZeRO stage 0, 1 or 2.

    Stage 0 keeps float32 parameters without clipping only (the recipe refuses the rest): there DeepSpeed is wrong for experts.
    """

    def __init__(self, model: Transformer, groups: Groups, recipe: Recipe):
        self.model, self.groups, self.spec, self.zero = model, groups, recipe.optimizer, recipe.engine.zero
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else a C++ build of half a minute starts
        deepspeed.init_distributed(dist_backend="nccl" if recipe.cluster.gpu else "gloo", verbose=False)
        name = _register(groups)
        for parameter in model.expert_parameters():
            parameter.allreduce, parameter.group_name = False, name  # type: ignore[attr-defined]
        wanted = [{**group, "name": f"decay_{group['weight_decay']}"} for group in decay_groups(self.spec, _pairs(model))]
        parted = [group for group in split_params_into_different_moe_groups_for_optimizer(wanted) if group["params"]]
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=_Marked(model, recipe.model.experts), optimizer=make_optimizer(self.spec, parted), config=_config(recipe)
        )
        for _, router in model.routers():
            router.bias = router.bias.to(torch.promote_types(router.bias.dtype, torch.float32))  # DeepSpeed narrows buffers too
        if self.zero:
            self._make_optimizer_state()

    def train_pass(self, token_BS: torch.Tensor, target_BS: torch.Tensor, segment_BS: torch.Tensor | None = None) -> Losses:
        losses = self.engine(token_BS, target_BS, segment_BS)
        self.engine.backward(losses.total)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()  # counts the pass; `update` takes the one at the boundary
        return losses

    def update(self, lr: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        norm = None if self.zero else self._stage_0_norm()
        self.engine.step()
        return float(self.engine.get_global_grad_norm() if norm is None else norm)

    def state(self) -> State:
        """Every rank gathers whole tensors; a collective call."""
        return engine_state(self.model, self.spec, self._weight, self._remembered)

    def load_state(self, state: State) -> None:
        parameters = dict(self.model.named_parameters())
        keys = state_keys(self.spec)
        for local, parts in self.model.global_names().items():
            parameter = parameters[local]
            self._set_weight(parameter, _whole(state, "model/{}", parts))
            for key in keys:
                self._set_remembered(parameter, _whole(state, f"optimizer/{{}}/{key}", parts), key)
        for name, router in self.model.routers():
            router.bias.copy_(state[f"model/{name}.bias"])
        if self.spec.kind == "adamw":
            step = next(tensor for key, tensor in state.items() if key.endswith("/step"))
            for memory in self._memories():
                memory["step"].copy_(step)

    def _make_optimizer_state(self) -> None:
        """Make (zero) what the optimizer makes at its first step, and link it, so that state can be read and set before."""
        for flat in self.optimizer.single_partition_of_fp32_groups:
            memory = self.optimizer.optimizer.state[flat]
            memory.update({key: torch.zeros_like(flat) for key in state_keys(self.spec)})
            if self.spec.kind == "adamw":
                memory["step"] = torch.zeros((), dtype=torch.float32)
        self.optimizer._lazy_init_hp_params_optimizer_state()

    def _memories(self) -> list[dict[str, torch.Tensor]]:
        flats = self.optimizer.single_partition_of_fp32_groups if self.zero else list(self.model.parameters())
        holder = self.optimizer.optimizer if self.zero else self.optimizer
        return [holder.state[flat] for flat in flats]

    def _weight(self, parameter: nn.Parameter) -> torch.Tensor:
        return safe_get_full_fp32_param(parameter) if self.zero else parameter.detach()

    def _remembered(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        if key == "step":
            return self._memories()[0].get("step", torch.zeros(()))
        if self.zero:
            return safe_get_full_optimizer_state(parameter, key)
        return self.optimizer.state[parameter].setdefault(key, torch.zeros_like(parameter))

    @torch.no_grad()
    def _set_weight(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        parameter.copy_(value)
        if self.zero:
            safe_set_full_fp32_param(parameter, value)

    @torch.no_grad()
    def _set_remembered(self, parameter: nn.Parameter, value: torch.Tensor, key: str) -> None:
        if self.zero:
            safe_set_full_optimizer_state(parameter, value, key)
        else:
            self._remembered(parameter, key).copy_(value)

    def _stage_0_norm(self) -> torch.Tensor:
        expert = set(self.model.expert_parameters())
        parts: tuple[list, list] = ([], [])
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parts[parameter in expert].append(parameter.grad)
        return gradient_norm(*parts, self.groups)


class _ExpertMarker(MoE):
    """DeepSpeed treats a model as sparse if it holds a module of its MoE class; this one has no parameters and no work."""

    def __init__(self, experts: int):
        nn.Module.__init__(self)
        self.num_experts = experts

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """DeepSpeed would make its own groups here; ours are registered already."""


class _Marked(nn.Module):
    def __init__(self, model: Transformer, experts: int):
        super().__init__()
        self.model = model
        self.marker = _ExpertMarker(experts)

    def forward(self, *inputs: torch.Tensor | None) -> Losses:
        return self.model(*inputs)


def _register(groups: Groups) -> str:
    """Put the fold's EP and EDP groups into DeepSpeed's tables; the key they stand under."""
    name = f"ep_size_{groups.fold.ep}"  # DeepSpeed parses the number behind the last underscore
    for table, family in (("_EXPERT_PARALLEL_GROUP", "ep"), ("_EXPERT_DATA_PARALLEL_GROUP", "edp")):
        group, ranks = groups.process_group(family)
        getattr(deepspeed_groups, table)[name] = group
        getattr(deepspeed_groups, f"{table}_RANKS")[name] = list(ranks)
    return name


def _config(recipe: Recipe) -> dict:
    return {
        "train_micro_batch_size_per_gpu": recipe.training.micro_batch,
        "gradient_accumulation_steps": recipe.accumulation,
        "gradient_clipping": recipe.optimizer.clip or 0.0,  # unset, DeepSpeed clips at 1.0
        "bf16": {"enabled": recipe.precision == "bfloat16"},
        # At stage 1 this would select an optimizer of another kind, without the links to whole tensors that `state` needs.
        **({"data_types": {"grad_accum_dtype": "fp32"}} if recipe.engine.zero == 2 else {}),
        "zero_optimization": {"stage": recipe.engine.zero, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }


def _pairs(model: Transformer) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return [(parameter, parameter) for parameter in model.parameters()]


def _whole(state: State, pattern: str, parts: list[tuple[str, int | None]]) -> torch.Tensor:
    """A parameter's tensor from its parts by global name."""
    tensors = [state[pattern.format(name)] for name, _ in parts]
    return tensors[0] if parts[0][1] is None else torch.stack(tensors)
