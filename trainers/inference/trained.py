"""A trained model in its storage: the newest checkpoint of a run, or one of them, and the recipe of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ray.train import Checkpoint

from foldray.recipe import Recipe
from foldray.runtime import Shard, State
from trainers.checkpoints.stored import DamagedCheckpoint, Stored
from trainers.checkpoints.tensors import load, opened
from trainers.driver.resuming import Beginning, check_model
from trainers.folders import Folder
from trainers.sinks.run_folder import recipe_of

_FIELD = "RUN"


@dataclass(frozen=True)
class Trained:
    """A checkpoint that has passed all checks of `Beginning.look`, as the user named it, and its recipe."""

    name: str
    begin: Beginning
    step: int
    recipe: Recipe

    @classmethod
    def at(cls, run: str | Path | Checkpoint, recipe: Recipe | None = None, trust: bool = False) -> Trained:
        """Find a trained model, as `Model.load`."""
        begin = _beginning(run)
        stored = begin.look()
        recipe = recipe or recipe_of(begin.folder.parent, _FIELD, begin.value, trust)
        check_model(begin, stored, recipe)
        return cls(begin.value, begin, stored.progress.step, recipe)

    @contextmanager
    def opened(self) -> Iterator[Stored]:
        """Open the checkpoint, for `fill`. If it is damaged, a UserError names an earlier one."""
        try:
            with opened(self.begin.folder.checkpoint, None) as stored:
                yield stored
        except DamagedCheckpoint as error:
            raise self.begin.refused(error.file, error.what) from None


def fill(stored: Stored, state: State) -> None:
    """Fill whole tensors by their global names, in this process alone."""
    load(stored, [Shard.whole(key, tensor) for key, tensor in state.items()], None)


def _beginning(run: str | Path | Checkpoint) -> Beginning:
    """Return the newest checkpoint of a run, or the checkpoint in this folder."""
    if isinstance(run, Checkpoint):
        return Beginning(_FIELD, run.path, Folder(run.path, run.filesystem))
    begin = replace(Beginning.at(str(run)), field=_FIELD)
    if newest := Beginning.newest(begin.folder):
        return replace(newest, field=_FIELD, value=begin.value)
    return begin
