"""Saves and loads checkpoints: files of `torch.distributed.checkpoint` in a Ray `Checkpoint`.

Tensors have global names, and every rank writes its boxes of the global tensors. A background thread copies one tensor after
another to host memory and writes it, while training continues (`staging.py`). On a disk, the files are written where they
stay; for other storages, they are copied from a temporary folder. Ray registers a checkpoint only after the files of all
ranks have arrived, so training never resumes from an incomplete one. Sizes and hashes of all files are written beside them
(`stored.py`), so damage is detected before training continues from it.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pyarrow.fs import LocalFileSystem
from ray.train import Checkpoint
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2.api.report_config import CheckpointUploadMode
from torch.distributed.checkpoint.api import CheckpointException

from foldray.comm import host_group
from foldray.runtime import Shard
from trainers.checkpoints.boxes import LoadBoxes, ReadBoxes, SaveBoxes
from trainers.checkpoints.staging import Staged
from trainers.checkpoints.stored import PROGRESS, Stored, look, seal
from trainers.folders import DamagedFile, Folder

TIMEOUT = timedelta(minutes=30)  # to write or to read a checkpoint


class DamagedCheckpoint(Exception):
    """Training cannot continue from a checkpoint. All ranks raise this error, and another attempt would fail in the same
    way.

    Args:
        path: path of the checkpoint in its storage.
        file: name of the damaged file.
        what: the damage.
    """

    def __init__(self, path: str, file: str, what: str):
        super().__init__(path, file, what)
        self.path, self.file, self.what = path, file, what

    def __str__(self) -> str:
        return f"checkpoint {self.path} is damaged: {self.file} {self.what}"


class Saver:
    """Saves this rank's share of checkpoints. Every rank must call `save` at the same steps.

    Args:
        asynchronous: write in the background; a save waits until the previous one is written.
    """

    def __init__(self, asynchronous: bool):
        self.asynchronous = asynchronous
        self.group = host_group(TIMEOUT)
        self._staged: Staged | None = None
        self._written = threading.Event()
        self._written.set()

    def settle(self) -> None:
        """Copy what the checkpoint under way has not written yet. The engine must not change a tensor before."""
        if self._staged is not None:
            self._staged.settle()
            self._staged = None

    def save(self, shards: Sequence[Shard], progress: dict[str, Any], metrics: dict[str, Any], last: bool = False) -> str:
        """Report a checkpoint to Ray, and return the path that it will have.

        Args:
            shards: this rank's share of the state. Call `settle` before their tensors change.
            progress: the other state (`stored.Progress`); `progress["step"]` names the checkpoint.
            metrics: metrics that Ray stores with the checkpoint.
            last: wait until the checkpoint is written.
        """
        if not self._written.wait(TIMEOUT.total_seconds()):
            raise TimeoutError(f"the checkpoint before step {progress['step']} has not been written for {TIMEOUT}")
        self._written.clear()
        name, storage = f"step_{progress['step']:08d}", ray.train.get_context().get_storage()
        place = Folder(storage.build_checkpoint_path_from_name(name), storage.storage_filesystem)
        staged = self._staged = Staged(shards)

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            try:
                self._clear(place)
                with _written_to(storage, place) as folder:
                    names = write(folder, staged, progress, self.group)
                place.flush(*names)
                return place.checkpoint
            finally:
                staged.drop()
                self._written.set()

        ray.train.report(
            metrics,
            checkpoint=place.checkpoint,
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC if self.asynchronous and not last else CheckpointUploadMode.SYNC,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=upload,
        )
        return place.path

    def _clear(self, place: Folder) -> None:
        """Delete what an earlier attempt has left of a checkpoint with this name. It may have had other ranks."""
        if self.group is None or dist.get_rank(self.group) == 0:
            place.delete()
        if self.group is not None:
            dist.barrier(group=self.group)


@contextmanager
def _written_to(storage: StorageContext, place: Folder) -> Iterator[Path]:
    """Open a folder whose files will be in a storage at the end of the context: on a disk, the place itself."""
    if isinstance(place.filesystem, LocalFileSystem):
        yield Path(place.path)
        return
    with tempfile.TemporaryDirectory(prefix="foldray-checkpoint-") as folder:
        yield Path(folder)
        storage.persist_current_checkpoint(Checkpoint.from_directory(folder), place.last)


def write(folder: Path, staged: Staged, progress: dict[str, Any], group: dist.ProcessGroup | None) -> list[str]:
    """Write this rank's share of a checkpoint into a folder, and return the names of its files.

    Every rank of the group must call this. The folder may be one for all of them.

    Raises:
        OSError: (on all ranks) some rank cannot write its files.
    """
    writer, planner = dcp.FileSystemWriter(folder), SaveBoxes(staged)
    try:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # a BaseException: Ray would neither tell of it nor end the training
        failures = _failures(error)
        ranks = "ranks" if len(failures) > 1 else "rank"
        what = next(iter(failures.values()))
        raise OSError(
            f"{ranks} {', '.join(map(str, failures))} cannot write the checkpoint of step {progress['step']}: {what}"
        ) from None
    rank = 0 if group is None else dist.get_rank(group)
    if rank == 0:
        (folder / PROGRESS).write_text(json.dumps(progress))
    return seal(folder, rank)


@contextmanager
def opened(checkpoint: Checkpoint, group: dist.ProcessGroup | None) -> Iterator[Stored]:
    """Open a checkpoint on this machine, for `load`. Every rank of the group must call this.

    Raises:
        DamagedCheckpoint: on some rank, here or in `load`, a file is missing or differs from what was written.
    """
    with checkpoint.as_directory() as folder:
        try:
            yield _look(Folder(folder), group)
        except DamagedFile as error:
            raise DamagedCheckpoint(checkpoint.path, error.name, error.what) from None


def load(stored: Stored, shards: Sequence[Shard], group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of shards from a checkpoint of any fold.

    Raises:
        DamagedFile: (on all ranks) a tensor is missing, has another shape, or lies in a damaged file.
    """
    reader, planner = ReadBoxes(stored), LoadBoxes(shards)
    try:
        dcp.load({}, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # it derives from BaseException, so `except Exception` would not catch it
        failures = _failures(error).values()
        damage = next((failure for failure in failures if isinstance(failure, DamagedFile)), None)
        reasons = "; ".join(map(str, failures))[:300]
        raise damage or RuntimeError(f"checkpoint {stored.folder.path} cannot be read: {reasons}") from None


def _failures(error: CheckpointException) -> dict[int, BaseException]:
    """Return what failed, by rank."""
    return {rank: failure[0] if isinstance(failure, tuple) else failure for rank, failure in sorted(error.failures.items())}


def _look(folder: Folder, group: dist.ProcessGroup | None) -> Stored:
    """Call `look` on all ranks, and raise on all ranks if one of them fails. Otherwise the others would wait for it."""
    result: Stored | DamagedFile
    try:
        result = look(folder)
    except DamagedFile as error:
        result = error
    damages = [result if isinstance(result, DamagedFile) else None]
    if group is not None:
        damages *= dist.get_world_size(group)
        dist.all_gather_object(damages, damages[0], group=group)
    for damage in filter(None, damages):
        raise damage
    assert isinstance(result, Stored), "no rank reported damage, so this rank has no error"
    return result
