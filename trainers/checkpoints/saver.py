"""Saves checkpoints while training goes on, as Ray's.

A background thread copies one tensor after another to host memory and writes it (`Staged`). On a disk, the files are
written where they stay; for other storages, they are copied from a temporary folder, and again if the storage fails. All ranks
take part in writing a checkpoint, so no rank may begin anew alone. Only a rank's own copies can be made again. Ray registers a
checkpoint only after the files of all ranks have arrived, so training never resumes from an incomplete one.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train
import torch.distributed as dist
from pyarrow.fs import LocalFileSystem
from ray.train import Checkpoint
from ray.train.v2._internal.constants import AWS_RETRYABLE_TOKENS
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2.api.report_config import CheckpointUploadMode

from foldray.comm import host_group
from foldray.runtime import Shard
from trainers.folders import Folder

if TYPE_CHECKING:
    from trainers.checkpoints.tensors import Staged

PAUSES_S = (1.0, 4.0, 16.0)  # after an error of a storage, which may be busy


class Saver:
    """Saves this rank's share of checkpoints. Every rank must call `save` at the same steps.

    Args:
        asynchronous: write in the background; a save waits until the previous one is written.
        limit: how long ranks wait for each other, and for a checkpoint to be written.
        check: called on rank 0 before anything is written; it raises an exception if the run belongs to another training now.

    Attributes:
        written: the step and the path of every checkpoint that this rank has written, until somebody takes it out.
    """

    def __init__(self, asynchronous: bool, limit: timedelta, check: Callable[[], None] = lambda: None):
        # PyTorch's checkpoints take most of a second to import. So only a process that saves does so, and before its first step.
        import trainers.checkpoints.tensors  # noqa: F401

        self.asynchronous, self.limit, self.check = asynchronous, limit, check
        self.group = host_group(limit)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self._staged: Staged | None = None
        self.written: deque[tuple[int, str]] = deque()
        self._idle = threading.Event()
        self._idle.set()

    def meet(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def settle(self) -> None:
        """Copy the tensors that the running save has not written yet. The engine must not change a tensor before this."""
        if self._staged is not None:
            self._staged.settle()
            self._staged = None

    def save(self, shards: Sequence[Shard], progress: dict[str, Any], metrics: dict[str, Any], last: bool = False) -> None:
        """Report a checkpoint to Ray, which stores metrics with it. Once it is written, `written` has it.

        Args:
            shards: this rank's share of the state. Call `settle` before their tensors change.
            progress: the other state (`stored.Progress`); `progress["step"]` names the checkpoint.
            last: wait until the checkpoint is written.
        """
        from trainers.checkpoints.tensors import Staged

        if not self._idle.wait(self.limit.total_seconds()):
            raise TimeoutError(f"the checkpoint before step {progress['step']} has not been written for {self.limit}")
        self._idle.clear()
        name, storage = f"step_{progress['step']:08d}", ray.train.get_context().get_storage()
        place = Folder(storage.build_checkpoint_path_from_name(name), storage.storage_filesystem)
        staged = self._staged = Staged(shards)

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            try:
                with called_once():
                    self._write(storage, place, staged, progress)
                self.written.append((progress["step"], place.path))
                return place.checkpoint
            finally:
                staged.drop()
                self._idle.set()

        ray.train.report(
            metrics,
            checkpoint=place.checkpoint,
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC if self.asynchronous and not last else CheckpointUploadMode.SYNC,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=upload,
        )

    def _write(self, storage: StorageContext, place: Folder, staged: Staged, progress: dict[str, Any]) -> None:
        from trainers.checkpoints.tensors import write

        self._clear(place)
        with written_to(storage, place, self.rank) as folder:
            names = write(folder, staged, progress, self.group)
        place.flush(*names)

    def _clear(self, place: Folder) -> None:
        """Delete what an earlier attempt has left of a checkpoint with this name. It may have had other ranks."""
        if self.rank == 0:
            self.check()
            place.delete()
        self.meet()


@contextmanager
def written_to(storage: StorageContext, place: Folder, rank: int) -> Iterator[Path]:
    """Open a folder for a rank's files, which will be in `place`, the checkpoint's folder in Ray's storage, at the end.

    On a disk, it is the place itself. The end raises OSError if a storage has not taken the files, however often it was tried.
    """
    if isinstance(place.filesystem, LocalFileSystem):
        yield Path(place.path)
        return
    with _temporary(storage.experiment_fs_path, rank) as folder:
        yield folder
        _copy(storage, folder, place.last)


@contextmanager
def called_once() -> Iterator[None]:
    """Change errors of which Ray thinks that another call may succeed. Ray would call again on the rank that has failed.

    That rank alone would then wait for the others, or meet them in the next checkpoint, and delete what they have written. Ray
    looks for words in capitals. An OSError in place of such an error has them in small letters.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        for token in AWS_RETRYABLE_TOKENS:
            text = text.replace(token, token.lower())
        if text == str(error):
            raise
        raise OSError(text) from error


@contextmanager
def _temporary(run: str, rank: int) -> Iterator[Path]:
    """Make a temporary folder, and delete those that killed workers of this run and rank have left on this machine."""
    prefix = f"foldray-checkpoint-{hashlib.sha256(run.encode()).hexdigest()[:16]}-{rank}-"
    for leftover in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of another user, perhaps
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)


def _copy(storage: StorageContext, folder: Path, name: str) -> None:
    for pause in (*PAUSES_S, None):
        try:
            storage.persist_current_checkpoint(Checkpoint.from_directory(folder), name)
            return
        except OSError:
            if pause is None:
                raise
            time.sleep(pause)
