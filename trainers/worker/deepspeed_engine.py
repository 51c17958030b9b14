"""The DeepSpeed engine. DeepSpeed reduces gradients over data-parallel ranks and holds the sharded optimizer.

foldray's executor runs a step's list inside the forward of one module (`StepModule`). Its backward returns the gradients
that the list has summed. So for DeepSpeed a step is one node of autograd with one gradient per parameter. DeepSpeed does not
see micro-batches, or pipeline, tensor and context parallelism.

If the list itself reduces gradients, and DeepSpeed shards its optimizer, the list reduces them to the ranks that own them
for DeepSpeed, and there is no backward of autograd. DeepSpeed divides each of its parameter groups evenly. So every section
of a gradient buffer (`Gradients`) is a parameter group.

DeepSpeed uses foldray's process groups. It gets them from an `mpu` object. It takes the experts' groups from its
module-level tables, which this module fills before `deepspeed.initialize`. Expert parameters have the key of these tables.
DeepSpeed also looks for a layer of its MoE class, so an empty one lies beside the model. These are private names of
DeepSpeed, so pyproject.toml allows only a narrow range of its versions.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from foldray.blueprint.parameters import CLASSES, GradientClass
from foldray.comm import Groups
from foldray.model import Batch, Losses, Transformer
from foldray.orders import Ordering
from foldray.recipe import Recipe
from foldray.runtime import (
    Gradients,
    Norms,
    Owners,
    Shard,
    State,
    StepModule,
    decay_groups,
    engine_state,
    gradient_norms,
    make_optimizer,
    shards_of,
    state_keys,
)

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

import deepspeed  # noqa: E402 - DeepSpeed chooses its accelerator, and writes logs, during its import
from deepspeed.moe.layer import MoE  # noqa: E402
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer  # noqa: E402
from deepspeed.utils import groups as deepspeed_groups  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # noqa: E402


def _is_vector(parameter: nn.Parameter) -> int:
    """Return 1 for vectors, which do not decay, and 0 for matrices."""
    return int(parameter.dim() < 2)


# DeepSpeed pads each rank's partition of a parameter group to two elements, and knows only data-parallel ranks.
_OWNERS = Owners(granule=2, apart=_is_vector, by_tensor=False)


class DeepSpeedEngine:
    """An engine that runs `deepspeed.initialize` on a foldray model, with ZeRO stage 0 (float32 parameters only), 1 or 2."""

    def __init__(self, model: Transformer, groups: Groups, recipe: Recipe):
        self.model, self.groups, self.spec, self.zero = model, groups, recipe.optimizer, recipe.engine.zero
        self._classes: dict[nn.Parameter, GradientClass] = {p: name for name in CLASSES for p in model.by_class(name)}
        self._norms, self._skips, self._offload = Norms(), False, recipe.engine.offload is not None
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # avoids a C++ build of half a minute
        deepspeed.init_distributed(dist_backend="nccl" if recipe.cluster.gpu else "gloo", verbose=False)
        name = _register(groups)
        for parameter in model.by_class("expert", frozen=True):  # DeepSpeed copies weights of others to all data-parallel ranks
            parameter.allreduce, parameter.group_name = False, name  # type: ignore[attr-defined]
        # If the list has ops that reduce gradients, DeepSpeed gets reduced gradients, and must not reduce them again.
        reduced = recipe.schedule.reduction != "end"
        self._sharded = reduced and self.zero > 0
        gradients = Gradients(model, groups, self.zero if reduced else 0, _OWNERS)
        self.step = _Step(model, groups, recipe.ordering, gradients, reduced)
        self.execution = self.step.execution
        parameter_groups = self._sections(name) if self._sharded else self._decay_groups()
        # On a GPU's host, one pass over memory is much faster than one for each term. On a CPU, it must give the bits of without.
        optimizer = make_optimizer(self.spec, parameter_groups, fused=self._offload and recipe.cluster.gpu)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.step, optimizer=optimizer, config=_config(recipe), mpu=_mpu(groups)
        )
        if reduced:
            self.engine.enable_backward_allreduce = False
        if self.zero:
            # DeepSpeed's norm assumes that expert groups lie inside a data-parallel group, and that every stage has experts. It
            # would skip steps without a word.
            self.optimizer.scaled_global_norm = self._known_norm
            self.optimizer.check_grad_overflow, self.optimizer.check_overflow = True, self._tell_skip
            self._make_optimizer_state()

    def train(self, batches: Sequence[Batch]) -> list[Losses]:
        if self._sharded:
            self.step.run(batches)
            self._give_sums()
        else:
            self.engine.backward(self.engine(batches))
        return self.step.losses

    def update(self, lr: float, skips: bool = False) -> Norms:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        if not self.zero:
            self._norms = self._clip()
        else:
            self._norms = self.step.gradients.norms() if self._sharded else self._partitioned_norms()
        self._skips = skips and not math.isfinite(self._norms.total)
        if self._skips and not self.zero:
            self.engine.zero_grad()
        else:
            self.engine.step()
        if self._sharded:
            self.step.gradients.zero()
        return self._norms

    def weights(self) -> Iterator[tuple[GradientClass, torch.Tensor]]:
        if not self.zero:
            yield from ((self._classes[parameter], parameter.detach()) for parameter in self.model.trained_parameters)
            return
        for parameters, flat in zip(self.optimizer.bit16_groups, self.optimizer.single_partition_of_fp32_groups, strict=True):
            yield self._classes[parameters[0]], flat.detach()  # no tensor holds both experts and other parameters

    def state(self) -> State:
        """Return the state. Data-parallel ranks gather their partitions, so all ranks must call this."""
        return engine_state(self.model, self.spec, self._weight, self._remembered)

    def shards(self) -> list[Shard]:
        """Return views of what this rank owns: boxes of parameters, or of runs of them if DeepSpeed shards its optimizer."""
        return shards_of(self.model, self.spec, self._held)

    @torch.no_grad()
    def load_shards(self) -> None:
        if not self.zero:
            return
        if self.spec.kind == "adamw":
            first, *others = self._memories()
            for memory in others:
                memory["step"].copy_(first["step"])
        self.optimizer.update_lp_params()

    def close(self) -> None:
        """Remove DeepSpeed's hooks. Autograd's nodes hold them, and so the engine, unseen by garbage collection."""
        self.engine.destroy()

    def _decay_groups(self) -> list[dict]:
        """Return DeepSpeed's parameter groups: experts and other parameters, with and without weight decay.

        A parameter that two stages share has a group of its own, so that the same ranks of both own the same elements of it.
        """
        tied = set(self.model.tied())
        parts = [[p for p in self.model.trained_parameters if (p in tied) == is_tied] for is_tied in (False, True)]
        decays = [group for part in parts for group in decay_groups(self.spec, zip(part, part, strict=True))]
        named = [{**group, "name": f"group_{number}"} for number, group in enumerate(decays)]
        return [group for group in split_params_into_different_moe_groups_for_optimizer(named) if group["params"]]

    def _sections(self, experts: str) -> list[dict]:
        """Return a parameter group of DeepSpeed for each section of the gradient buffers.

        `experts` is the key of the experts' groups in DeepSpeed's tables.
        """
        sections = []
        for buffer in self.step.gradients.buffers:
            moe = {"moe": True, "name": experts} if buffer.name == "expert" else {"name": buffer.name}
            for section in buffer.sections:
                (group,) = decay_groups(self.spec, ((parameter, parameter) for parameter in section.parameters))
                sections.append({**group, **moe})
        return sections

    def _give_sums(self) -> None:
        """Give DeepSpeed the sums that this rank owns, as the gradients of its partition of each parameter group.

        If the optimizer is on the host, they are copied there, into the gradient of the weights that DeepSpeed updates.
        """
        index = 0
        for buffer in self.step.gradients.buffers:
            for start, stop in pairwise(buffer.sharding.starts):
                sums = buffer.sums[start // buffer.sharding.ranks : stop // buffer.sharding.ranks]
                assert len(sums) == self.optimizer.partition_size[index], "DeepSpeed divides a parameter group in another way"
                if self._offload:
                    self.optimizer.single_partition_of_fp32_groups[index].grad.copy_(sums)
                else:
                    self.optimizer.averaged_gradients[index] = [sums]
                index += 1

    def _known_norm(self, norm_type: float = 2) -> torch.Tensor:
        """Return the norm by which DeepSpeed clips. It must be where the gradients are."""
        return torch.tensor(self._norms.total, dtype=torch.float64, device=self.optimizer.device)

    def _tell_skip(self, partition_gradients: bool = True) -> None:
        """Tell DeepSpeed whether to drop the gradients of this step."""
        self.optimizer.overflow = self._skips

    def _make_optimizer_state(self) -> None:
        """Make the optimizer's state as zeros and link it, so that it can be read and set before the first step."""
        keys = state_keys(self.spec, next(iter(self.model.pieces.values())).spec)  # the same for all parameters
        for flat in self.optimizer.single_partition_of_fp32_groups:
            memory = self.optimizer.optimizer.state[flat]
            memory.update({key: torch.zeros(()) if key == "step" else torch.zeros_like(flat) for key in keys})
        self.optimizer._lazy_init_hp_params_optimizer_state()

    def _memories(self) -> list[dict[str, torch.Tensor]]:
        flats = self.optimizer.single_partition_of_fp32_groups if self.zero else self.model.trained_parameters
        optimizer = self.optimizer.optimizer if self.zero else self.optimizer
        return [optimizer.state[flat] for flat in flats]

    def _weight(self, parameter: nn.Parameter) -> torch.Tensor:
        return safe_get_full_fp32_param(parameter) if self.zero else parameter.detach()

    def _remembered(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """Return the optimizer's state of a parameter. Before the first step, it is zero."""
        if self.zero:
            return self._memories()[0]["step"] if key == "step" else safe_get_full_optimizer_state(parameter, key)
        zeros = torch.zeros((), dtype=torch.float32) if key == "step" else torch.zeros_like(parameter)
        return self.optimizer.state[parameter].setdefault(key, zeros)

    def _held(self, parameter: nn.Parameter, key: str | None) -> tuple[torch.Tensor, int]:
        if not self.zero or key == "step":
            return parameter.detach() if key is None else self._remembered(parameter, key), 0
        link = parameter._hp_mapping  # type: ignore[attr-defined] # DeepSpeed's link to this rank's partition
        if link is None:
            return parameter.new_empty(0), 0
        return link.get_hp_fragment(key).detach(), link.lp_fragment_address.start

    def _partitioned_norms(self) -> Norms:
        """Return the norms of all reduced gradients. A rank holds a partition of the gradients."""
        place, counted = self.groups.coordinate.get("attention", {"tp": 0, "pp": 0}), []
        # Other ranks of the same data-parallel place hold these parameters, too, and count them.
        copies = {*(self.model.by_class("replicated") if place["tp"] else ()), *(self.model.tied() if place["pp"] else ())}
        copies.update(self.model.in_slices() if self.groups.coordinate.get("moe", {"etp": 0})["etp"] else ())
        held = self.optimizer.averaged_gradients
        if self._offload:
            self.optimizer._wait_for_offload_copies()
            held = self.optimizer.offload_gradient_dict
        for index, parameters in enumerate(self.optimizer.params_in_partition):
            # A partition may end with padding, which has no parameter, so zip leaves it out.
            for gradient, parameter in zip(held[index], parameters, strict=False):
                if parameter not in copies:
                    counted.append((self._classes[parameter], gradient))
        return gradient_norms(counted, self.engine.device, self.groups)

    def _clip(self) -> Norms:
        """Clip the gradients at stage 0, where every rank has complete gradients. Return the norms before clipping."""
        gradients = {parameter: parameter.grad for parameter in self.model.trained_parameters if parameter.grad is not None}
        counted = ((self._classes[parameter], gradients[parameter]) for parameter in self.model.counted())
        norms = gradient_norms(counted, self.engine.device, self.groups)
        if self.spec.clip is not None and norms.total > self.spec.clip:
            for gradient in gradients.values():
                gradient.mul_(self.spec.clip / (norms.total + 1e-6))
        return norms


class _Step(StepModule):
    """The module that DeepSpeed treats as the model.

    Its backward returns gradients that are summed over all ranks, or only over the ranks that DeepSpeed does not reduce
    over.
    """

    def __init__(self, model: Transformer, groups: Groups, ordering: Ordering, gradients: Gradients, reduced: bool):
        super().__init__(model, groups, ordering, gradients, reduced)
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
        self.gradients.sum_slices()
        for parameter in self.model.tied():
            # After this reduction, DeepSpeed takes a mean of equal values. The mean has the same bits on both stages, so the
            # two copies of the weight stay equal.
            data_parallel.all_reduce(views[parameter].div_(data_parallel.size))
            self.groups.tied_gradients.all_reduce(views[parameter])
        return super().hand_over(scale)


class _ExpertMarker(MoE):
    """An empty module of DeepSpeed's MoE class. DeepSpeed treats a model as sparse if it has such a module."""

    def __init__(self, experts: int):
        nn.Module.__init__(self)
        self.num_experts = experts

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing. DeepSpeed's method would make process groups, but the fold's groups are already registered."""


def _register(groups: Groups) -> str:
    """Replace the groups in DeepSpeed's tables by the fold's EP and EDP groups, and return their key."""
    name = f"ep_size_{groups.fold.ep}"  # DeepSpeed parses the number after the last underscore
    for table, family in (("_EXPERT_PARALLEL_GROUP", "ep"), ("_EXPERT_DATA_PARALLEL_GROUP", "edp")):
        group, ranks = groups.process_group(family)
        for key, value in ((table, group), (f"{table}_RANKS", list(ranks))):
            getattr(deepspeed_groups, key).clear()
            getattr(deepspeed_groups, key)[name] = value
    return name


def _mpu(groups: Groups) -> SimpleNamespace:
    """Return the fold in the form of DeepSpeed's `mpu` object.

    The data-parallel group has the ranks with the same dense weights. DeepSpeed shards over this group, and divides every
    gradient by its size. DeepSpeed uses the model-parallel group to ask whether any member has a gradient that is NaN, so
    this group has all ranks.
    """
    (data, ranks), control = groups.process_group("dp_cp"), groups.control
    return SimpleNamespace(
        get_data_parallel_group=lambda: data,
        get_data_parallel_group_ranks=lambda: list(ranks),
        get_data_parallel_world_size=lambda: len(ranks),
        get_data_parallel_rank=data.rank,
        get_model_parallel_group=lambda: control.group,
        get_model_parallel_world_size=lambda: control.size,
        get_model_parallel_rank=lambda: control.index,
    )


def _config(recipe: Recipe) -> dict:
    """Return DeepSpeed's configuration: what foldray needs, and the recipe's own keys (`engine.deepspeed`), which are others."""
    zero: dict[str, Any] = {"stage": recipe.engine.zero, "overlap_comm": False}
    if recipe.engine.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": recipe.cluster.gpu}
    ours = {
        # foldray runs the micro-batches. For DeepSpeed, a step is one pass.
        "train_micro_batch_size_per_gpu": recipe.training.micro_batch * recipe.accumulation,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": (recipe.optimizer.clip if recipe.engine.zero else None) or 0.0,  # DeepSpeed's default is 1.0
        "bf16": {"enabled": recipe.precision == "bfloat16"},
        "communication_data_type": "fp32",
        # At stage 1 this key would select another optimizer, which lacks the links to complete tensors that `state` needs.
        **({"data_types": {"grad_accum_dtype": "fp32"}} if recipe.engine.zero == 2 else {}),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own optimizer for hosts needs a compiler, and rounds otherwise than torch's
        "steps_per_print": 2**31,
    }
    given: dict[str, Any] = recipe.engine.deepspeed
    return {**ours, **given, "zero_optimization": {**zero, **given.get("zero_optimization", {})}}
