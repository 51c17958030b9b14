"""The optimizer both engines share: update rule, weight decay, the learning rate's course."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from foldray.recipe import OptimizerSpec


def make_optimizer(spec: OptimizerSpec, groups: Iterable[dict]) -> torch.optim.Optimizer:
    """A torch optimizer over parameter groups that carry their own weight decay.

    The loop over tensors is taken instead of the fused kernels: its results do not depend on how tensors are grouped.
    """
    if spec.kind == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, foreach=False)
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, foreach=False)


def decay_groups(spec: OptimizerSpec, parameters: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[dict]:
    """Two parameter groups from pairs (what the optimizer updates, the model's parameter): matrices decay, vectors do not."""
    groups: tuple[dict, dict] = ({"params": [], "weight_decay": spec.weight_decay}, {"params": [], "weight_decay": 0.0})
    for updated, parameter in parameters:
        groups[0 if parameter.dim() > 1 else 1]["params"].append(updated)
    return [group for group in groups if group["params"]]


def state_keys(spec: OptimizerSpec) -> tuple[str, ...]:
    """What the optimizer remembers of each parameter, beside the number of steps."""
    if spec.kind == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if spec.momentum else ()


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Rate of step number `step` (from 0) of `steps`: linear warm-up, then the chosen decay down to min_lr · lr."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.decay == "constant":
        return spec.lr
    done = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    falling = 0.5 * (1 + math.cos(math.pi * done)) if spec.decay == "cosine" else 1 - done
    return spec.lr * (spec.min_lr + (1 - spec.min_lr) * falling)
