"""What a training goes on from, looked at by the driver before any worker starts; what cannot be gone on from is refused."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow
from pyarrow.fs import LocalFileSystem
from pydantic import Field, TypeAdapter

from foldray.blueprint import parameter_table
from foldray.errors import UserError
from foldray.recipe import Recipe
from foldray.runtime import state_keys
from trainers.checkpoints.stored import METADATA, Progress, Stored, look
from trainers.data.packed import PackedData
from trainers.folders import Checked, Count, DamagedFile, Folder, read_json

_OURS = (METADATA, "manifest.", "sizes.")  # one of these at least is in what is left of a checkpoint
_SNAPSHOT = "checkpoint_manager_snapshot.json"
_STEP = re.compile(r"step_[0-9]{8,12}")
_MOST_HASHED = 1 << 30
"""Bytes of a checkpoint on a disk that the driver hashes as a whole: a second's work. A larger one is left to the workers."""
_UNREACHED = (OSError, ValueError, pyarrow.ArrowException)
_log = logging.getLogger(__name__)


class _Reported(Checked):
    checkpoint_dir_name: Annotated[str, Field(pattern=rf"^{_STEP.pattern}$")]  # Ray deletes old ones, whatever they are called
    metrics: dict[str, Any]


class _Snapshot(Checked):
    """Ray's own file of a run, as far as Ray trusts in it."""

    ray_version: str
    checkpoint_results: list[_Reported]
    checkpoint_report_indices: list[Count]
    latest_checkpoint_result: _Reported | None
    pending_training_results: Annotated[list[Any], Field(max_length=0)]  # validations of Ray's, which a run of ours has none of
    pending_validation_specs: Annotated[list[Any], Field(max_length=0)]
    current_report_index: Count
    validated_checkpoint_dir_names: list[str]
    timed_out_validation_checkpoint_dir_names: list[str]
    failed_validation_checkpoint_dir_names: list[str]


@dataclass(frozen=True)
class Beginning:
    """The checkpoint that a training begins at.

    Args:
        field: of the command line, which named it: resume or from.
        value: as given there.
        folder: of the checkpoint.
    """

    field: str
    value: str
    folder: Folder

    @classmethod
    def at(cls, path: str) -> Beginning:
        """A checkpoint's own folder, by its path or URI.

        Raises:
            UserError: the URI names no storage.
        """
        try:
            named = path if "://" in path else str(Path(path).expanduser().absolute())
            return cls("from", path, Folder(named))
        except (*_UNREACHED, RuntimeError) as error:
            raise UserError("from", path, f"is no storage that can be reached ({error})") from None

    @classmethod
    def newest(cls, run: Folder) -> Beginning | None:
        """The last checkpoint of a run, which Ray will hand to the workers; None where it has none.

        Raises:
            UserError: Ray's list of the run's checkpoints is damaged, or cannot be reached.
        """
        try:
            if _SNAPSHOT not in (run.names() or ()):
                return None
            snapshot = read_json(run, _SNAPSHOT, TypeAdapter(_Snapshot))
            _check_snapshot(run, snapshot)
        except DamagedFile as error:
            raise UserError("resume", run.last, f"its {error}; {offer(run)}") from None
        except _UNREACHED as error:
            raise UserError("resume", run.last, f"{run.name} cannot be reached ({error})") from None
        latest = snapshot.latest_checkpoint_result
        return cls("resume", run.last, run / latest.checkpoint_dir_name) if latest else None

    def look(self) -> Stored:
        """The checkpoint, after the looks that take a second at most.

        Raises:
            UserError: it is none, or it is damaged; an earlier one of its run is offered.
        """
        try:
            names = self.folder.names()
            if self.field == "from" and not any(name.startswith(_OURS) for name in names or ()):
                steps = [(self.folder / name).name for name in names or () if _STEP.fullmatch(name)]
                rule = "holds no checkpoint" if names is not None else "is no checkpoint's folder, or is not there"
                raise UserError("from", self.value, rule, steps or None)
            stored, _ = _thorough(self.folder)
        except DamagedFile as error:
            raise self.refused(error.name, error.what) from None
        except _UNREACHED as error:
            raise UserError(self.field, self.value, f"checkpoint {self.folder.name} cannot be reached ({error})") from None
        if not stored.hashed:
            _log.warning("checkpoint %s is from before hashes were kept: damaged bits in it would not be seen", self.folder.name)
        return stored

    def refused(self, file: str, what: str) -> UserError:
        """What is wrong with the checkpoint, and which earlier one of its run is whole."""
        which = "" if self.field == "from" else f"its checkpoint {self.folder.last} "
        rule = f"{which}is damaged: {file} {what}; {offer(self.folder.parent, self.folder.last)}"
        return UserError(self.field, self.value, rule)


def offer(run: Folder, damaged: str | None = None) -> str:
    """Words for the newest checkpoint of a run that is whole, with the command that goes on from it.

    Args:
        damaged: the checkpoint to look before; if not given, all are looked at.
    """
    for folder in _earlier(run, damaged):
        try:
            _, whole = _thorough(folder)
        except (DamagedFile, *_UNREACHED):
            continue
        which = "the newest one" + (" before it" if damaged else "") + (" that is whole" if whole else " with all its files")
        return f"{which}: foldray train RECIPE --from {shlex.quote(folder.name)}"
    return f"{'no earlier' if damaged else 'no'} one of the run is whole"


def check_resumable(begin: Beginning, stored: Stored, recipe: Recipe, data: PackedData) -> None:
    """Refuse what no worker could go on from under this recipe.

    Raises:
        UserError: it has other data, another order of them, another model, or no state for this optimizer.
    """
    progress = stored.progress
    if progress.data != data.folder.name:
        rule = "was trained on other data, or in other lengths, than this recipe's section data"
        raise UserError(begin.field, begin.value, rule)
    for key, was in _order(begin, progress).items():  # with another one, some text would be trained on twice and some never
        if was != (now := getattr(recipe.training, key)):
            raise UserError(f"training.{key}", now, f"{_run(begin)} takes its text in another order; keep its own", [was])
    _check_tensors(begin, stored, recipe)
    last = recipe.training.stop_after or recipe.training.steps
    if begin.field == "from" and progress.step >= last:
        field = "stop_after" if recipe.training.stop_after else "steps"
        raise UserError(f"training.{field}", last, f"the checkpoint to begin at has {progress.step} steps behind it already")


def _check_tensors(begin: Beginning, stored: Stored, recipe: Recipe) -> None:
    tensors = stored.contents.tensors
    theirs = {name.removeprefix("model/"): tuple(tensor.size) for name, tensor in tensors.items() if name.startswith("model/")}
    ours = {row.name: row.shape for row in parameter_table(recipe.model)}
    for name in [*ours, *sorted(name for name in theirs if not name.endswith(".router.bias"))]:
        if theirs.get(name) != ours.get(name):
            rule = f"has another model: its {name} is {_size(theirs.get(name))}, this recipe's is {_size(ours.get(name))}"
            raise UserError(begin.field, begin.value, rule)
    keys = (*state_keys(recipe.optimizer), "step") if recipe.optimizer.kind == "adamw" else state_keys(recipe.optimizer)
    wanted = {f"optimizer/{name}/{key}" for name in ours for key in keys}
    if not wanted <= tensors.keys():
        kept = "adamw" if any(name.endswith("/exp_avg") for name in tensors) else "sgd"
        rule = f"{_run(begin)} has no optimizer state for it; keep its own"
        raise UserError("optimizer.kind", recipe.optimizer.kind, rule, [kept])


def _order(begin: Beginning, progress: Progress) -> Mapping[str, int]:
    """What the order of the text depends on; older checkpoints leave it to the recipe beside them."""
    keys = ("seed", "global_batch")
    known = {key: value for key in keys if (value := getattr(progress, key)) is not None}
    recipe = Path(begin.folder.parent.path, "recipe.yaml")
    if known or not (isinstance(begin.folder.filesystem, LocalFileSystem) and recipe.is_file()):
        return known
    training = Recipe.load(recipe).training
    return {key: getattr(training, key) for key in keys}


def _check_snapshot(run: Folder, snapshot: _Snapshot) -> None:
    """What Ray would fail on in its own words."""
    names = [reported.checkpoint_dir_name for reported in snapshot.checkpoint_results]
    latest = snapshot.latest_checkpoint_result
    if len(names) != len(snapshot.checkpoint_report_indices) or (latest and latest.checkpoint_dir_name not in names):
        raise DamagedFile(_SNAPSHOT, "contradicts itself")
    for name in names:
        if (run / name).names() is None:
            raise DamagedFile(name, "is missing")


def _thorough(folder: Folder) -> tuple[Stored, bool]:
    """Look at a checkpoint, and at all its bytes if they are few and near; whether these are surely what was written."""
    stored = look(folder)
    near = isinstance(folder.filesystem, LocalFileSystem) and stored.size <= _MOST_HASHED
    for name in stored.entries if near else ():
        stored.check(name)
    return stored, near and stored.hashed


def _earlier(run: Folder, damaged: str | None) -> Iterator[Folder]:
    """A run's checkpoints, newest first."""
    try:
        steps = {int(name.removeprefix("step_")): name for name in run.names() or () if _STEP.fullmatch(name)}
    except _UNREACHED:
        return
    last = max(steps, default=0) + 1
    if damaged:
        last = int(damaged.removeprefix("step_")) if _STEP.fullmatch(damaged) else 0
    for step in sorted(steps, reverse=True):
        if step < last:
            yield run / steps[step]


def _run(begin: Beginning) -> str:
    return f"run {begin.value}" if begin.field == "resume" else f"checkpoint {begin.value}"


def _size(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else "×".join(map(str, shape))
