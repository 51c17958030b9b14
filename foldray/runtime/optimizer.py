"""The optimizer that both engines share: update rule, weight decay, learning rate. Muon's own rule is in `muon.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from foldray.blueprint import ParameterSpec
from foldray.recipe import OptimizerSpec
from foldray.runtime.adamw import RoundedAdamW


def make_optimizer(spec: OptimizerSpec, groups: Iterable[dict], fused: bool = False) -> torch.optim.Optimizer:
    """Return a torch optimizer; for `muon`, that of the parameters that it leaves to AdamW.

    Its results do not depend on how tensors are grouped. So it loops over tensors, instead of using kernels for many tensors
    that compute in several passes.

    Args:
        groups: parameter groups with their weight decay (`decay_groups`).
        fused: whether AdamW computes in one pass over memory, with one kernel for many tensors. The numbers of steps must
            then be where the parameters are.
    """
    if spec.kind == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, foreach=False)
    ways = {"fused": True} if fused else {"foreach": False}
    rule = RoundedAdamW if spec.moments else torch.optim.AdamW
    return rule(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, **ways)


def decay_groups(spec: OptimizerSpec, parameters: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[dict]:
    """Return the parameter groups of matrices, which decay, and of vectors, which do not. Empty groups are left out.

    Args:
        parameters: pairs of the tensor that the optimizer updates and the model's parameter.
    """
    groups: tuple[dict, dict] = ({"params": [], "weight_decay": spec.weight_decay}, {"params": [], "weight_decay": 0.0})
    for updated, parameter in parameters:
        groups[0 if parameter.dim() > 1 else 1]["params"].append(updated)
    return [group for group in groups if group["params"]]


def state_keys(spec: OptimizerSpec, parameter: ParameterSpec) -> tuple[str, ...]:
    """Return the names of the optimizer's state of a parameter. "step" is a number of steps; all others have its shape."""
    if spec.kind == "adamw" or (spec.kind == "muon" and not parameter.is_hidden_matrix):
        return ("exp_avg", "exp_avg_sq", "step")
    return ("momentum_buffer",) if spec.momentum or spec.kind == "muon" else ()


def moment_type(spec: OptimizerSpec) -> torch.dtype | None:
    """Return the type of the optimizer's state; None is that of the weights that it updates."""
    return torch.bfloat16 if spec.moments else None


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Return the rate of step `step` (from 0): linear warm-up, then the chosen decay down to min_lr · lr after `steps`."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.decay == "constant":
        return spec.lr
    done = min(1.0, (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps))
    falling = 0.5 * (1 + math.cos(math.pi * done)) if spec.decay == "cosine" else 1 - done
    return spec.lr * (spec.min_lr + (1 - spec.min_lr) * falling)
