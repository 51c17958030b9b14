"""`foldray verify`: this recipe's fold, engine and backend against one process, on the same data.

The field's most common fault is a gradient whose scale changes with the parallel sizes. Here a user can see that it does not. One
optimizer step is taken on the workers and one in a single process, twice over: in the widest precision that the engine has, where
every gradient must agree to rounding, and in the recipe's own precision, where what the update does to every weight must.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from foldray.blueprint import smallest_slice
from foldray.comm import Groups
from foldray.recipe import Recipe
from trainers.cluster import workers
from trainers.measure.comparison import compare_gradients, compare_updates
from trainers.records import as_json as to_json

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
"""Largest difference, relative to each gradient's largest value and absolute for the loss, that counts as rounding."""
UPDATE_TOLERANCE = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 0.2}
"""Largest `Verification.update_rel_diff` that counts as rounding, by the recipe's precision."""


@dataclass(frozen=True)
class Verification:
    """What a comparison found.

    Args:
        dtype: the widest precision of the engine, in which gradients are compared.
        loss_abs_diff: of the mean cross-entropy and of the balance and z-losses, the largest absolute difference.
        grad_max_rel_diff: the largest of all parameters' max|Δ| / max|reference|.
        worst_parameter: global name of the parameter where it is.
        worst: the parameters that differ most, with their differences.
        precision: the recipe's own, in which updates are compared.
        update_rel_diff: the largest of all parameters' (`compare_updates`).
        update_worst_parameter: global name of the parameter where it is, or of a block's experts together.
        changed: keys of the recipe that the comparison of gradients cannot leave as they are, and what it takes instead.
    """

    dtype: str
    engine: str
    backend: str
    loss_abs_diff: float
    grad_max_rel_diff: float
    worst_parameter: str
    worst: dict[str, float]
    precision: str
    update_rel_diff: float
    update_worst_parameter: str
    changed: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether all differences are rounding; what is no number is none."""
        exact = max(self.loss_abs_diff, self.grad_max_rel_diff) <= TOLERANCE[self.dtype]
        return exact and self.update_rel_diff <= UPDATE_TOLERANCE[self.precision]

    def as_dict(self) -> dict[str, Any]:
        """The document of `foldray verify --json`."""
        found = {key: value for key, value in asdict(self).items() if key != "worst"}
        return {**found, "passed": self.passed}


def verify(recipe: Recipe, shrink: bool = False, as_json: bool = False) -> int:
    """Compare and report; 0 if all differences are rounding, 1 if not.

    Args:
        shrink: keep the fold and the kind of model, but make it as small as the fold allows.

    Raises:
        UserError: the recipe cannot run here.
    """
    recipe = small(recipe) if shrink else recipe
    print(f"{recipe.placed_fold} on {recipe.cluster.workers} workers against one process …", file=sys.stderr)
    found = compared(recipe, workers.on_workers(recipe, _loop, "verify"))
    print(to_json(found.as_dict()) if as_json else _report(found))
    return 0 if found.passed else 1


def compared(recipe: Recipe, differences: Mapping[str, Any]) -> Verification:
    """What the workers found, beside what was compared."""
    wide = as_checked(recipe)
    kinds: dict[str, Any] = {"engine": recipe.engine.kind, "backend": recipe.moe.backend}
    return Verification(dtype=wide.precision, precision=recipe.precision, changed=_changed(recipe, wide), **kinds, **differences)


def as_checked(recipe: Recipe) -> Recipe:
    """The recipe in its widest precision, with an optimizer that keeps its gradient, and drops that do not follow the fold."""
    wide = recipe.engine.kind == "torch" and recipe.moe.backend != "tutel"
    optimizer = {"kind": "sgd", "momentum": 0.9, "lr": 1e-3, "weight_decay": 0.0, "clip": None}
    return _with(recipe, "float64" if wide else "float32", optimizer)


def as_updated(recipe: Recipe) -> Recipe:
    """The recipe with an optimizer whose update is the gradient, and drops that do not follow the fold."""
    return _with(recipe, recipe.precision, {"kind": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip": recipe.optimizer.clip})


def _with(recipe: Recipe, precision: str, optimizer: dict[str, Any]) -> Recipe:
    given = recipe.model_dump() | {"precision": precision, "optimizer": optimizer}
    given["cluster"]["max_failures"] = 0
    if recipe.model.router.capacity_factor is not None:
        given["model"]["router"]["drop_scope"] = "sequence"
        if recipe.slicing is not None:  # by probability, pieces drop each for itself
            given["model"]["router"]["drop"] = "position"
            given["schedule"].update(slicing="token_uniform", slices=None)
    return Recipe.parse(given)


def _changed(recipe: Recipe, checked: Recipe) -> dict[str, Any]:
    """Keys by their dotted names."""

    def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            yield from flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]

    before = dict(flat(recipe.model_dump(exclude={"optimizer", "cluster"})))
    return {key: value for key, value in flat(checked.model_dump(exclude={"optimizer", "cluster"})) if before.get(key) != value}


def small(recipe: Recipe) -> Recipe:
    """The same fold, schedule and kinds of layers, in sizes that take seconds."""
    fold, schedule, model, training = recipe.placed_fold, recipe.schedule, recipe.model, recipe.training
    stages = fold.pp * schedule.virtual_stages
    dense, every = min(model.dense_first, 1), min(model.moe_every, 2)
    layers = max(stages, dense + every)
    sizes = schedule.stage_layers and [1 if size == min(schedule.stage_layers) else 2 for size in schedule.stage_layers]
    topk = min(model.topk, 4)
    unit = smallest_slice(fold.cp, fold.tp)
    length, micro_batch = unit * max(math.ceil(32 / unit), schedule.degree), schedule.batch_degree
    micro_batch *= min(training.micro_batch // micro_batch, 2)
    given = recipe.model_dump()
    given["schedule"].update(stage_layers=sizes, slices=None)
    given["data"]["seq_len"] = length
    given["training"].update(micro_batch=micro_batch, global_batch=fold.dp * micro_batch * 2 * fold.pp)
    given["model"].update(
        preset=None, layers=sum(sizes) if sizes else layers, dense_first=dense, moe_every=every, hidden=64,
        heads=fold.tp * min(model.heads // model.kv_heads, 2), kv_heads=fold.tp, head_dim=8, topk=topk,
        experts=fold.ep * max(math.ceil(topk / fold.ep), min(model.experts // fold.ep, 4)),
        expert_hidden=fold.etp * 16, ffn_hidden=fold.tp * 32, shared_hidden=fold.tp * 16 if model.shared_hidden else 0,
        vocab=fold.tp * 64, max_positions=length, init_std=0.1,
    )  # fmt: skip
    return Recipe.parse(given)


def _loop(config: dict[str, Any]) -> dict[str, Any] | None:
    return on_rank(*workers.worker(config))


def on_rank(recipe: Recipe, groups: Groups, device: torch.device) -> dict[str, Any] | None:
    """Both comparisons; what differs, on the fold's first rank."""
    gradients = compare_gradients(as_checked(recipe), groups, device)
    updates = compare_updates(as_updated(recipe), groups, device)
    return None if gradients is None or updates is None else gradients | updates


def _report(found: Verification) -> str:
    lines = [
        f"{found.engine} engine, {found.backend} backend",
        f"in {found.dtype}, differences up to {TOLERANCE[found.dtype]:.0e} being rounding:",
        f"  loss            {found.loss_abs_diff:.1e} (absolute)",
        f"  worst gradient  {found.grad_max_rel_diff:.1e} (of the tensor's largest value)  {found.worst_parameter}",
        f"in {found.precision}, the recipe's own, up to {UPDATE_TOLERANCE[found.precision]:.0e}:",
        f"  worst update    {found.update_rel_diff:.1e} (of the change of the tensor)  {found.update_worst_parameter}",
    ]
    if changes := {key: value for key, value in found.changed.items() if key != "precision"}:
        taken = ", ".join(f"{key}={value}" for key, value in changes.items())
        lines.append(f"compared with {taken}: otherwise who is dropped depends on how sequences are cut")
    if not found.passed:
        lines += ["gradients that differ most:"] + [f"  {value:.1e}  {name}" for name, value in found.worst.items()]
    return "\n".join([*lines, "passed" if found.passed else "FAILED: this fold does not give what one process gives"])
