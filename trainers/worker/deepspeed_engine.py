"""DeepSpeed as the engine: it reduces over data parallel ranks and holds the sharded optimizer; the groups are ours.

A step's list runs in our executor, inside one module's forward (`StepModule`), whose backward returns what the list has added up:
to DeepSpeed a step is one node with one gradient per parameter, and micro-batches, pipeline, tensor and context parallelism are
none of its business. It learns of our groups from an `mpu` object and, of the experts', from its module-level
tables, filled before `deepspeed.initialize`; expert parameters carry the table's key, and an empty layer of DeepSpeed's MoE
class stands beside the model as the marker that it looks for. These are private names: the dependency's range is narrow.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import nn

from foldray.blueprint.parameters import CLASSES, GradientClass
from foldray.comm import Groups
from foldray.model import Batch, Losses, Transformer
from foldray.recipe import Recipe
from foldray.runtime import (
    Norms,
    State,
    StepModule,
    decay_groups,
    engine_state,
    gradient_norms,
    make_optimizer,
    state_keys,
    whole_tensors,
)
from foldray.schedule import Ordering

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
    """`deepspeed.initialize` around a foldray model, ZeRO stage 0 (of float32 parameters), 1 or 2."""

    def __init__(self, model: Transformer, groups: Groups, recipe: Recipe):
        self.model, self.groups, self.spec, self.zero = model, groups, recipe.optimizer, recipe.engine.zero
        self._classes: dict[nn.Parameter, GradientClass] = {p: name for name in CLASSES for p in model.by_class(name)}
        self._norms = Norms()
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else a C++ build of half a minute starts
        deepspeed.init_distributed(dist_backend="nccl" if recipe.cluster.gpu else "gloo", verbose=False)
        name = _register(groups)
        for parameter in model.by_class("expert"):
            parameter.allreduce, parameter.group_name = False, name  # type: ignore[attr-defined]
        # Where the list says when gradients travel, DeepSpeed gets them reduced, and reduces nothing.
        reduced = recipe.schedule.reduction != "end"
        self.step = _Step(model, groups, recipe.ordering, reduced)
        self.execution = self.step.execution
        decays = decay_groups(self.spec, ((parameter, parameter) for parameter in model.parameters()))
        wanted = [{**group, "name": f"decay_{group['weight_decay']}"} for group in decays]
        parted = [group for group in split_params_into_different_moe_groups_for_optimizer(wanted) if group["params"]]
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.step, optimizer=make_optimizer(self.spec, parted), config=_config(recipe), mpu=_mpu(groups)
        )
        if reduced and self.zero:
            # It reduces nothing, but takes what a rank owns out of the sums: gradients of another precision than the parameters'
            # reach its optimizer by this way alone.
            self.optimizer.average_tensor = self.optimizer._add_full_reduction_to_compact_grad_partition
        elif reduced:
            self.engine.enable_backward_allreduce = False
        if self.zero:
            # DeepSpeed's own norm takes for granted that experts lie inside a data parallel group, and that every stage has some.
            self.optimizer.scaled_global_norm = self._partitioned_norm
            self._make_optimizer_state()

    def train(self, batches: Sequence[Batch]) -> list[Losses]:
        self.engine.backward(self.engine(batches))
        return self.step.losses

    def update(self, lr: float) -> Norms:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        if not self.zero:
            self._norms = self._clip()
        self.engine.step()
        return self._norms

    def weights(self) -> Iterator[tuple[GradientClass, torch.Tensor]]:
        if not self.zero:
            yield from ((self._classes[parameter], parameter.detach()) for parameter in self.model.parameters())
            return
        for parameters, flat in zip(self.optimizer.bit16_groups, self.optimizer.single_partition_of_fp32_groups, strict=True):
            yield self._classes[parameters[0]], flat.detach()  # DeepSpeed keeps experts apart from all others

    def state(self) -> State:
        """Ranks of the same data parallel place put their tensors together; a collective call."""
        return engine_state(self.model, self.spec, self._weight, self._remembered)

    def load_state(self, state: State) -> None:
        for parameter, key, whole in whole_tensors(self.model, self.spec, state):
            if key != "step":
                self._set(parameter, whole, key)
        for name, bias in self.model.biases().items():
            bias.copy_(state[f"model/{name}"])
        if self.spec.kind == "adamw":
            step = next(tensor for key, tensor in state.items() if key.endswith("/step"))
            for memory in self._memories():
                memory["step"] = step.clone()

    def close(self) -> None:
        """DeepSpeed's hooks sit in autograd's nodes, where garbage collection does not see that they hold the whole engine."""
        self.engine.destroy()

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
        """What the optimizer remembers of a parameter, made (zero) if no step has been taken yet."""
        if self.zero:
            return self._memories()[0]["step"] if key == "step" else safe_get_full_optimizer_state(parameter, key)
        nothing = torch.zeros((), dtype=torch.float32) if key == "step" else torch.zeros_like(parameter)
        return self.optimizer.state[parameter].setdefault(key, nothing)

    @torch.no_grad()
    def _set(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None) -> None:
        """Set what the optimizer remembers of a parameter, or without a key the parameter itself."""
        if key is None:
            parameter.copy_(value)
            if self.zero:
                safe_set_full_fp32_param(parameter, value)
        elif self.zero:
            safe_set_full_optimizer_state(parameter, value, key)
        else:
            self._remembered(parameter, key).copy_(value)

    def _partitioned_norm(self, norm_type: float = 2) -> torch.Tensor:
        """What DeepSpeed clips by: the norm of the reduced gradients, of which this rank has its partition."""
        place, counted = self.groups.coordinate["attention"], []
        # What other ranks of the same data parallel place hold too, and count.
        copies = {*(self.model.by_class("replicated") if place["tp"] else ()), *(self.model.tied() if place["pp"] else ())}
        for index, parameters in enumerate(self.optimizer.params_in_partition):
            # Behind the gradients of a partition's parameters there may be padding, which zip leaves out.
            for gradient, parameter in zip(self.optimizer.averaged_gradients[index], parameters, strict=False):
                if parameter not in copies:
                    counted.append((self._classes[parameter], gradient))
        self._norms = gradient_norms(counted, self.engine.device, self.groups)
        return torch.tensor(self._norms.total, dtype=torch.float64, device=self.engine.device)

    def _clip(self) -> Norms:
        """Clip at stage 0, where every rank has whole gradients; the norms before."""
        gradients = {parameter: parameter.grad for parameter in self.model.parameters() if parameter.grad is not None}
        counted = ((self._classes[parameter], gradients[parameter]) for parameter in self.model.counted())
        norms = gradient_norms(counted, self.engine.device, self.groups)
        if self.spec.clip is not None and norms.total > self.spec.clip:
            for gradient in gradients.values():
                gradient.mul_(self.spec.clip / (norms.total + 1e-6))
        return norms


class _Step(StepModule):
    """What DeepSpeed takes for the model: gradients come to it summed over the ranks that it knows not, or over all."""

    def __init__(self, model: Transformer, groups: Groups, ordering: Ordering, reduced: bool):
        super().__init__(model, groups, ordering, reduced)
        self.reduced = reduced
        if model.by_class("expert"):
            self.marker = _ExpertMarker(model.spec.experts)

    def hand_over(self, scale: torch.Tensor) -> list[torch.Tensor]:
        if self.reduced:
            return super().hand_over(scale)
        data_parallel, views = self.groups.dense_gradients, self.gradients.views
        for buffer in self.gradients.buffers:
            buffer.sums.mul_(data_parallel.size)  # DeepSpeed takes means
            if buffer.name == "replicated":
                self.groups.tensor.all_reduce(buffer.sums)
        for parameter in self.model.tied():
            # Reduced here, for DeepSpeed's mean of equal values has the same bits on both stages: they never drift apart.
            data_parallel.all_reduce(views[parameter].div_(data_parallel.size))
            self.groups.tied_gradients.all_reduce(views[parameter])
        return super().hand_over(scale)


class _ExpertMarker(MoE):
    """DeepSpeed treats a model as sparse if it holds a module of its MoE class; this one has no parameters and no work."""

    def __init__(self, experts: int):
        nn.Module.__init__(self)
        self.num_experts = experts

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """DeepSpeed would make its own groups here; ours are registered already."""


def _register(groups: Groups) -> str:
    """Put the fold's EP and EDP groups into DeepSpeed's tables, alone; the key they stand under."""
    name = f"ep_size_{groups.fold.ep}"  # DeepSpeed parses the number behind the last underscore
    for table, family in (("_EXPERT_PARALLEL_GROUP", "ep"), ("_EXPERT_DATA_PARALLEL_GROUP", "edp")):
        group, ranks = groups.process_group(family)
        for key, value in ((table, group), (f"{table}_RANKS", list(ranks))):
            getattr(deepspeed_groups, key).clear()
            getattr(deepspeed_groups, key)[name] = value
    return name


def _mpu(groups: Groups) -> SimpleNamespace:
    """The fold as DeepSpeed asks for it.

    Data parallel are the ranks that hold the same dense weights: it shards over them, and divides every gradient by their number.
    Of the model parallel group it asks whether any member has met a gradient that is no number, which concerns all ranks.
    """
    (data, ranks), everybody = groups.process_group("dp_cp"), groups.control
    return SimpleNamespace(
        get_data_parallel_group=lambda: data,
        get_data_parallel_group_ranks=lambda: list(ranks),
        get_data_parallel_world_size=lambda: len(ranks),
        get_data_parallel_rank=data.rank,
        get_model_parallel_group=lambda: everybody.group,
        get_model_parallel_world_size=lambda: everybody.size,
        get_model_parallel_rank=lambda: everybody.index,
    )


def _config(recipe: Recipe) -> dict:
    return {
        # Micro-batches are ours: to DeepSpeed, a step is one pass.
        "train_micro_batch_size_per_gpu": recipe.training.micro_batch * recipe.accumulation,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": (recipe.optimizer.clip if recipe.engine.zero else None) or 0.0,  # unset, DeepSpeed clips at 1.0
        "bf16": {"enabled": recipe.precision == "bfloat16"},
        "communication_data_type": "fp32",
        # At stage 1 this would select an optimizer of another kind, without the links to whole tensors that `state` needs.
        **({"data_types": {"grad_accum_dtype": "fp32"}} if recipe.engine.zero == 2 else {}),
        "zero_optimization": {"stage": recipe.engine.zero, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
