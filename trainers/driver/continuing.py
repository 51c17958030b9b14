"""Which recipe may continue from a checkpoint: its data, their order, its model and optimizer, and what may change meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow

from foldray.blueprint import ModelSpec, parameter_table
from foldray.errors import UserError
from foldray.files import parse_yaml
from foldray.recipe import Recipe
from foldray.runtime import state_keys
from trainers.checkpoints.stored import Progress, Stored
from trainers.data.mixture import Mixture, opened
from trainers.data.packed import PackedData
from trainers.driver.resuming import Beginning, check_model
from trainers.folders import DamagedFile
from trainers.sinks.run_folder import MOST_RECIPE, RECIPE

_RULES: dict[str, Literal["kept", "told", "free"]] = {
    "model": "kept", "model.preset": "free", "model.init_std": "free", "model.mtp_weight": "told",
    "model.router.balance_loss": "told", "model.router.balance_scope": "told", "model.router.z_loss": "told",
    "model.router.bias_rate": "told", "model.router.bias_update": "told",
    "model.router.capacity_factor": "told", "model.router.drop": "told", "model.router.drop_scope": "told",
    "model.router.pad": "told",
    "data.mask_documents": "kept",
    "optimizer": "told", "optimizer.kind": "kept", "training.steps": "told", "precision": "told", "moe.wire": "told",
    "engine.wire": "told",
}  # fmt: skip
"""What becomes of a key or a section with other values. The longest name decides, and other keys are free.

A run keeps what decides the meaning of weights and moments; a new run may change it, and tells it. What people change while a
model trains is told. What the start alone needs is free, and so is what changes no results.
"""
_LONGEST = 60  # characters of a value that is told
_log = logging.getLogger(__name__)


class Change(NamedTuple):
    """A key of the recipe whose value is not the one that a checkpoint was trained with."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        before, now = (str("null" if value is None else value)[:_LONGEST] for value in (self.before, self.now))
        return f"{self.key}={now} (before: {before})"


def check_resumable(begin: Beginning, stored: Stored, recipe: Recipe, data: PackedData | Mixture) -> Beginning:
    """Refuse a checkpoint that workers cannot continue from with this recipe, and tell what has changed.

    A new run may have other data (`Beginning.anew`).
    """
    before, anew = _recipe_before(begin), not _has_data(begin, stored.progress, data)
    if anew and begin.field == "resume":
        what = "other data, other weights of sources, or other sequence lengths"
        rule = f"was trained on {what} than this recipe's section data; a new run may have others: --from {begin.folder.name}"
        raise UserError(begin.field, begin.value, rule)
    if not anew:
        _check_order(begin, stored, recipe, before)
    check_model(begin, stored, recipe)
    check_optimizer(begin, stored, recipe)
    last = recipe.training.stop_after or recipe.training.steps
    if begin.field == "from" and not anew and stored.progress.step >= last:
        field = "stop_after" if recipe.training.stop_after else "steps"
        raise UserError(f"training.{field}", last, f"the checkpoint has {stored.progress.step} finished steps already")
    changed = list(changes(recipe, before)) if before else []
    for change in changed if begin.field == "resume" else ():
        if _rule(change.key) == "kept":
            rule = f"{begin.named} was trained with another value; keep it, or start a new run: --from {begin.folder.name}"
            raise UserError(change.key, change.now, rule, ["null" if change.before is None else change.before])
    if anew:
        what = f"the weights and the optimizer's state of step {stored.progress.step}"
        _log.warning("%s: this run has other data, so it takes %s, and begins at step 0", begin.named, what)
    if changed:
        _log.warning("%s: training goes on with other values: %s", begin.named, ", ".join(map(str, changed)))
    return replace(begin, anew=anew)


def changes(recipe: Recipe, before: Mapping[str, Any]) -> Iterator[Change]:
    """Return the keys that matter to a training that goes on, and whose values differ.

    The recipe of before is as it was written. No module that it names is imported. A key that it lacks, because an earlier
    version wrote it, has its default.
    """
    defaults = {**_defaults(Recipe), "model": _defaults(ModelSpec)}
    differing = _differing(recipe.model_dump(mode="json"), before, defaults, "")
    return (change for change in differing if _rule(change.key) != "free")


def _defaults(section: Any) -> dict[str, Any]:
    """Return the keys of a section that have defaults, with these."""
    return section.model_construct().model_dump(mode="json")


def _has_data(begin: Beginning, progress: Progress, data: PackedData | Mixture) -> bool:
    """Whether a checkpoint was trained on these data. Equal sequences are the same data, whichever files they come from.

    Earlier versions knew data by paths and times of files. If their folder is still beside that of the data, it is read.
    """
    if progress.content and data.content:
        return progress.content == data.content
    if progress.data == data.folder.name:
        return True
    try:
        earlier = None if progress.content else opened(data.folder.parent / Path(progress.data).name, list(data.parts))
    except (UserError, ValueError):  # the folder is not there any more, or has another number of sources
        return False
    if earlier and len(earlier.train) != len(data.train):
        return False
    _log.warning("%s: an earlier version wrote no hash of the data, so all their tokens are read", begin.named)
    return (earlier.hashed() if earlier else progress.content) == data.hashed()


def _differing(now: Any, before: Any, default: Any, key: str) -> Iterator[Change]:
    if not (isinstance(now, dict) and isinstance(before, dict)):
        if now != before:
            yield Change(key, before, now)
        return
    for name, value in now.items():
        usual = default.get(name) if isinstance(default, dict) else None
        yield from _differing(value, before.get(name, usual), usual, f"{key}.{name}" if key else name)


def _rule(key: str) -> str:
    parts = key.split(".")
    return next((_RULES[name] for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in _RULES), "free")


def _recipe_before(begin: Beginning) -> dict[str, Any] | None:
    """Return the recipe beside a checkpoint, as it was written; None, with a warning, if it cannot be read."""
    try:
        text = begin.folder.parent.read(RECIPE, MOST_RECIPE).decode()
        if isinstance(recipe := parse_yaml("recipe", RECIPE, text), dict):
            return recipe
        what = "it is no mapping of sections"
    except (DamagedFile, UserError, OSError, ValueError, pyarrow.ArrowException) as error:
        what = str(error)
    _log.warning("%s: its settings are not compared, because its recipe cannot be read (%s)", begin.named, what)
    return None


def _check_order(begin: Beginning, stored: Stored, recipe: Recipe, before: Mapping[str, Any] | None) -> None:
    """Refuse another order of the text. Training would see some text twice and some text never.

    An old checkpoint does not know what decides the order. The recipe beside it does.
    """
    training = (before or {}).get("training")
    for key in ("seed", "global_batch"):
        earlier = getattr(stored.progress, key)
        if earlier is None and isinstance(training, dict):
            earlier = training.get(key)
        if earlier is not None and earlier != (now := getattr(recipe.training, key)):
            raise UserError(f"training.{key}", now, f"{begin.named} takes its text in another order; keep its value", [earlier])


def check_optimizer(begin: Beginning, stored: Stored, recipe: Recipe) -> None:
    """Raise a UserError if a checkpoint lacks the state of a recipe's optimizer."""
    tensors, rows = stored.contents.tensors, parameter_table(recipe.model)
    wanted = {f"optimizer/{row.name}/{key}" for row in rows if row.trained for key in state_keys(recipe.optimizer, row)}
    if not wanted <= tensors.keys():
        moments, momentum = (any(name.endswith(key) for name in tensors) for key in ("/exp_avg", "/momentum_buffer"))
        before = ("muon" if momentum else "adamw") if moments else "sgd"
        rule = f"{begin.named} has no optimizer state for it; keep its kind"
        raise UserError("optimizer.kind", recipe.optimizer.kind, rule, [before])
