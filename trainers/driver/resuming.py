"""Finds the checkpoint that a training continues from, and refuses a damaged or unsuitable one before any worker starts."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pyarrow.fs import FileSystem, LocalFileSystem

from foldray.blueprint import parameter_table
from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.checkpoints import reported
from trainers.checkpoints.stored import METADATA, Stored, look
from trainers.cluster.run_storage import storage_folder
from trainers.folders import UNREACHED, DamagedFile, Folder

_OURS = (METADATA, "manifest.", "sizes.")  # even a damaged checkpoint has at least one of these files
_MOST_HASHED = 1 << 30
"""Largest checkpoint, in bytes, that the driver hashes itself, which takes a second. The workers hash larger ones."""
_RUN = r"-\d{8}-\d{6}-[0-9a-f]{4}"  # what follows a recipe's name in the id of a run: day, time and a random number
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beginning:
    """The checkpoint that a training starts from.

    Args:
        field, value: the command-line option or argument that names it: resume names its run, all others the checkpoint.
        stored: what is in the folder, if it has passed the checks of `look`.
        anew: whether only weights and optimizer are taken from it. Steps and data then begin at their start.
    """

    field: str
    value: str
    folder: Folder
    stored: Stored | None = None
    anew: bool = False

    @classmethod
    def at(cls, path: str, filesystem: FileSystem | None = None) -> Beginning:
        """Return the checkpoint in a folder, by the folder's path or URI, or by its path in a filesystem."""
        try:
            named = path if filesystem or "://" in path else str(Path(path).expanduser().absolute())
            return cls("from", path, Folder(named, filesystem))
        except (*UNREACHED, RuntimeError) as error:
            raise UserError("from", path, f"is not a storage that can be reached ({error})") from None

    @classmethod
    def newest(cls, run: Folder, without: Collection[str] = ()) -> Beginning | None:
        """Return the newest undamaged checkpoint of a run; None if no checkpoint of the run was ever complete.

        Those in `without` are known to be damaged. A checkpoint that is skipped is told of in a warning.
        """
        skipped, listed = list[str](), set[str]()
        try:
            try:
                listed = reported.listed(run)
            except DamagedFile as error:
                skipped.append(str(error))
            was_complete = bool(listed or skipped)  # a damaged list had entries
            for name in sorted({*listed, *reported.steps(run)} - {*without}, key=reported.step_of, reverse=True):
                try:
                    stored, _ = _check(run / name)
                except DamagedFile as error:
                    skipped.append(f"checkpoint {name} is damaged: {error}")
                    continue
                for text in skipped:
                    _log.warning("run %s: its %s; foldray takes %s", run.last, text, name)
                return cls("resume", run.last, run / name, stored)
        except UNREACHED as error:
            raise UserError("resume", run.last, f"{run.name} cannot be reached ({error})") from None
        if was_complete:
            damage = f"its {skipped[0]}; " if skipped else ""
            raise UserError("resume", run.last, f"{damage}the run has no undamaged checkpoint")
        return None

    def look(self) -> Stored:
        """Return the checkpoint after all checks that take at most a second."""
        if self.stored:
            return self.stored
        try:
            names = self.folder.names()
            if self.field != "resume" and not any(name.startswith(_OURS) for name in names or ()):
                steps = [(self.folder / name).name for name in names or () if reported.STEP.fullmatch(name)]
                rule = "holds no checkpoint" if names is not None else "is not a checkpoint's folder, or does not exist"
                raise UserError(self.field, self.value, rule, steps or None)
            stored, _ = _check(self.folder)
        except DamagedFile as error:
            raise self.refused(error.name, error.what) from None
        except UNREACHED as error:
            raise UserError(self.field, self.value, f"checkpoint {self.folder.name} cannot be reached ({error})") from None
        return stored

    @property
    def step(self) -> int:
        """Number of steps that the training has finished when it begins."""
        return 0 if self.anew else self.look().progress.step

    @property
    def named(self) -> str:
        """What messages call it."""
        return f"run {self.value}" if self.field == "resume" else f"checkpoint {self.value}"

    def refused(self, file: str, what: str) -> UserError:
        """Return an error that names the damage of this checkpoint, and an earlier undamaged checkpoint of the run."""
        subject = f"its checkpoint {self.folder.last} " if self.field == "resume" else ""
        rule = f"{subject}is damaged: {file} {what}; {_earlier(self.folder.parent, self.folder.last)}"
        return UserError(self.field, self.value, rule)


def list_checkpoints(run: Folder, begin: Beginning | None) -> None:
    """Make Ray's list of a run's checkpoints end with the one that the next attempt begins with."""
    try:
        names = [name for name in reported.steps(run) if begin and reported.step_of(name) <= reported.step_of(begin.folder.last)]
        if names or reported.LIST in (run.names() or ()):
            reported.write_list(run, names)
    except UNREACHED as error:
        raise UserError("cluster.storage", run.name, f"does not take the list of checkpoints ({error})") from None


def _earlier(run: Folder, damaged: str) -> str:
    """Name the newest undamaged checkpoint of a run before a damaged one, with the command that continues from it."""
    try:
        names = [name for name in reported.steps(run) if reported.step_of(name) < reported.step_of(damaged)]
    except UNREACHED:
        names = []
    for name in names:
        try:
            _, hashes_match = _check(run / name)
        except (DamagedFile, *UNREACHED):
            continue
        which = "the newest undamaged one before it" if hashes_match else "the newest one before it with all its files"
        return f"{which}: foldray train RECIPE --from {shlex.quote((run / name).name)}"
    return "the run has no earlier undamaged checkpoint"


def check_model(begin: Beginning, stored: Stored, recipe: Recipe) -> None:
    """Refuse a checkpoint of another model than the recipe's. No tensor is made, which might take all memory."""
    tensors = stored.contents.tensors
    theirs = {name.removeprefix("model/"): tuple(tensor.size) for name, tensor in tensors.items() if name.startswith("model/")}
    ours = {row.name: row.shape for row in parameter_table(recipe.model) if row.trained}
    for name in [*ours, *sorted(name for name in theirs if not name.endswith((".router.bias", ".router.frequency")))]:
        if theirs.get(name) != ours.get(name):
            sizes = f"{_size(theirs.get(name))}, but this recipe's is {_size(ours.get(name))}"
            raise UserError(begin.field, begin.value, f"has another model: its {name} is {sizes}")


def _check(folder: Folder) -> tuple[Stored, bool]:
    """Check a checkpoint, with the hashes of all files if it is local and small. Return whether all hashes match."""
    stored = look(folder)
    if not stored.hashed:
        _log.warning("checkpoint %s has no hashes, so damaged bits in it are not detected", folder.name)
    is_small = isinstance(folder.filesystem, LocalFileSystem) and stored.size <= _MOST_HASHED
    if is_small:
        stored.check()
    return stored, is_small and stored.hashed


def _size(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape))


def newest_run(recipe: Recipe) -> str | None:
    """Return the id of the recipe's newest run in its storage; None if it has none."""
    storage = storage_folder(recipe)
    try:
        place = Folder(storage)
        runs = [name for name in place.names() or [] if re.fullmatch(re.escape(recipe.name) + _RUN, name)]
        return next((name for name in reversed(runs) if "recipe.yaml" in ((place / name).names() or [])), None)
    except UNREACHED as error:
        raise UserError("cluster.storage", storage, f"cannot be read ({error})") from None
