"""The rules of what an engine keeps where and in which type, and of the keys that it hands on to DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from foldray.errors import UserError, nearest
from foldray.recipe.description import Description

LARGEST_DECAY = 1 - 2**-8
"""Largest decay rate of a moment in bfloat16. Its numbers are up to 1/128 of themselves apart, so a moment that loses less than
1/256 of itself in a step may be rounded back to where it was, and then never falls."""


class _Given(NamedTuple):
    """The values of a key of DeepSpeed: what is said of others, and a number that divides them; None for true and false."""

    rule: str
    unit: int | None

    def takes(self, value: Any) -> bool:
        if self.unit is None:
            return isinstance(value, bool)
        return type(value) is int and 0 < value < 2**40 and value % self.unit == 0


_FLAG, _COUNT = _Given("must be true or false", None), _Given("must be a whole number of at least 1", 1)
_HANDED_ON: Mapping[str, _Given] = {
    "comms_logger.enabled": _FLAG, "comms_logger.prof_all": _FLAG, "comms_logger.verbose": _FLAG,
    "dump_state": _FLAG, "memory_breakdown": _FLAG, "steps_per_print": _COUNT, "wall_clock_breakdown": _FLAG,
    "zero_optimization.allgather_bucket_size": _Given("must be an even number of elements", 2),
    "zero_optimization.reduce_bucket_size": _COUNT, "zero_optimization.use_multi_rank_bucket_allreduce": _FLAG,
}  # fmt: skip
_OWN: Mapping[str, str] = {
    "train_batch_size": "training.global_batch", "train_micro_batch_size_per_gpu": "training.micro_batch",
    "gradient_accumulation_steps": "training.micro_batch", "gradient_clipping": "optimizer.clip", "optimizer": "optimizer.kind",
    "scheduler": "optimizer.decay", "bf16": "precision", "fp16": "precision", "amp": "precision", "torch_autocast": "precision",
    "data_types": "precision", "communication_data_type": "precision", "activation_checkpointing": "schedule.recompute",
    "tensor_parallel": "fold.tp", "sequence_parallel_size": "fold.cp", "pipeline": "fold.pp", "expert_parallel": "fold.ep",
    "checkpoint": "checkpoint", "elasticity": "cluster.min_workers", "autotuning": "tune", "tensorboard": "tracking",
    "wandb": "tracking", "csv_monitor": "tracking", "comet": "tracking", "zero_allow_untested_optimizer": "optimizer.kind",
    "zero_force_ds_cpu_optimizer": "engine.offload", "zero_optimization.stage": "engine.zero",
    "zero_optimization.overlap_comm": "schedule.reduction", "zero_optimization.offload_optimizer": "engine.offload",
    "zero_optimization.cpu_offload": "engine.offload", "zero_optimization.offload_param": "engine.zero",
}  # fmt: skip
"""Key of DeepSpeed → the key, or the section, of a recipe that has its effect."""


def check_engine(recipe: Description) -> None:
    """Check what is on the host, what the optimizer's state is kept in, and what DeepSpeed gets beside foldray's own keys."""
    _check_offload(recipe)
    _check_activations(recipe)
    _check_moments(recipe)
    _check_deepspeed(recipe)


def _check_offload(recipe: Description) -> None:
    engine = recipe.engine
    if engine.offload is None:
        return
    if engine.kind == "deepspeed" and engine.zero == 0:
        rule = (
            "needs a stage of ZeRO that shards, because DeepSpeed's stage 0 updates where the weights are (engine.zero: 1 or 2)"
        )
        raise UserError("engine.offload", engine.offload, rule, ["null"])
    if recipe.optimizer.kind == "muon":
        rule = "moves the update to the host, and optimizer.kind=muon multiplies whole matrices, which is work for a GPU"
        raise UserError("engine.offload", engine.offload, rule, ["null"])


def _check_activations(recipe: Description) -> None:
    """Check that operations may keep on the host what their backward needs."""
    schedule, kinds, rule = recipe.schedule, recipe.schedule.offload, None
    both = [kind for kind in kinds if kind in schedule.recompute]
    if not kinds:
        return
    if len(set(kinds)) < len(kinds):
        rule = "names an operation twice"
    elif both:
        rule = f"keeps what recompute would compute again: {both[0]} may be in one of both lists"
    elif recipe.placement is not None:
        rule = "is for workers that have both attention and experts, and placement parts them"
    elif schedule.graphs != "off":
        rule = "moves what operations keep, and a CUDA graph finds it where it was (schedule.graphs)"
    elif recipe.moe.backend == "tutel":
        rule = "has never run with Tutel's kernels (moe.backend)"
    if rule is not None:
        raise UserError("schedule.offload", list(kinds), rule, ["[]"])


def _check_moments(recipe: Description) -> None:
    optimizer, moments = recipe.optimizer, recipe.optimizer.moments
    if moments is None:
        return
    if optimizer.kind != "adamw":
        raise UserError("optimizer.moments", moments, f"has no meaning with kind={optimizer.kind}, only with adamw", ["null"])
    if recipe.engine.kind == "deepspeed":
        rule = "is for engine.kind=torch; DeepSpeed keeps moments in the type of its weights"
        raise UserError("optimizer.moments", moments, rule, ["null"])
    if recipe.precision == "float64":
        rule = "rounds moments, and precision: float64 is for exact comparisons"
        raise UserError("optimizer.moments", moments, rule, ["null"])
    if max(optimizer.betas) > LARGEST_DECAY:
        rule = (
            "decays by less than bfloat16 can tell in a step, so rounding would keep moments where they are (optimizer.moments)"
        )
        raise UserError("optimizer.betas", list(optimizer.betas), rule, [f"each at most {LARGEST_DECAY}"])


def _check_deepspeed(recipe: Description) -> None:
    given = recipe.engine.deepspeed
    if given and recipe.engine.kind != "deepspeed":
        rule = "has keys for DeepSpeed, so it needs engine.kind=deepspeed"
        raise UserError("engine.deepspeed", given, rule, ["{}"])
    for key, value in _leaves(given):
        if key in _OWN:
            raise UserError(f"engine.deepspeed.{key}", value, f"is foldray's to set; use {_OWN[key]}")
        if key not in _HANDED_ON:
            rule = f"is no key that foldray hands on to DeepSpeed{nearest(key, _HANDED_ON)}"
            raise UserError("engine.deepspeed", key, rule, _HANDED_ON)
        if not _HANDED_ON[key].takes(value):
            raise UserError(f"engine.deepspeed.{key}", value, _HANDED_ON[key].rule)


def _leaves(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value). A key of a section that is handed on in parts is `section.key`."""
    sections = {key.split(".")[0] for key in (*_HANDED_ON, *_OWN) if "." in key}
    for key, value in given.items():
        if key in sections and isinstance(value, dict):
            yield from ((f"{key}.{name}", each) for name, each in value.items())
        else:
            yield key, value
