"""The ground that a found setting holds for: settings of the recipe, machines, and the speeds that a start measures."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from foldray.comm import Communicator, Groups
from foldray.recipe import Recipe
from foldray.runtime.peak import processor

_LIKE = 1.5  # speeds of a shared machine that differ by less than this factor count as equal
_MESSAGE = 1 << 20  # bytes to each other rank
_ROUNDS = 3


def settings(recipe: Recipe) -> dict[str, Any]:
    """Return the parts of a recipe that decide how long a step takes, without the model."""
    training, about = recipe.training, recipe.model_dump(mode="json")
    parts = {key: about[key] for key in ("fold", "placement", "schedule", "engine", "moe", "precision")}
    return {
        **parts,
        "workers": recipe.cluster.workers,
        "batch": [training.global_batch, training.micro_batch, recipe.data.seq_len],
    }


def machines(device: torch.device, control: Communicator) -> list[list[Any]]:
    """Return node, host name, processor and number of threads of every rank. All ranks must call this."""
    machine = [platform.node(), processor(device), torch.get_num_threads(), os.cpu_count()]
    return [[node, *of_rank] for node, of_rank in zip(control.nodes, control.all_gather_object(machine), strict=True)]


def link_rate(groups: Groups, device: torch.device) -> float:
    """Measure the bytes per second that the slowest rank sends to the ranks with which it shares experts or gradients.

    If the experts have ranks of their own, it sends to all ranks. All ranks must call this. The result is 0 if no rank
    communicates in this way.
    """
    communicators = (
        groups.rows_up, groups.tokens, groups.tokens_inside, groups.dense_gradients, groups.expert_gradients, groups.context,
        groups.tensor,
    )  # fmt: skip
    shared = next((communicator for communicator in communicators if communicator.group is not None), None)
    seconds = _exchange_seconds(shared, device) if shared else 0.0
    slowest = torch.tensor(seconds / max(1, (shared.size if shared else 1) - 1), dtype=torch.float64, device=device)
    seconds = float(groups.control.all_reduce(slowest, "max"))
    groups.traffic.clear()
    return _MESSAGE / seconds if seconds else 0.0


def _exchange_seconds(communicator: Communicator, device: torch.device) -> float:
    """Return the seconds of an all-to-all with `_MESSAGE` bytes to each member: the median, after one round of warm-up."""
    rows = [1] * communicator.size
    x, took = torch.zeros(communicator.size, _MESSAGE // 4, device=device), []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        communicator.all_to_all(x, rows, rows)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - began)
    return median(took[1:])


def alike(now: Mapping[str, float], before: Mapping[str, float]) -> bool:
    """Return whether speeds are as they were, as far as both were measured."""
    pairs = [(now[name], before[name]) for name in now.keys() & before.keys() if now[name] and before[name]]
    return all(1 / _LIKE < speed / earlier < _LIKE for speed, earlier in pairs)
