"""Checkpoints: `torch.distributed.checkpoint` files under Ray's `Checkpoint`, keyed by global names, in boxes of whole tensors.

A rank copies its state to host memory, and a background thread writes it and hands it to Ray's storage while training goes
on. Ray registers a checkpoint only when every rank's files have arrived, so a half-written one is never resumed from. Sizes and
hashes of all files are written beside them (`stored.py`), so that damage is found before it is trained on.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint
from ray.train.v2.api.report_config import CheckpointUploadMode
from torch.distributed.checkpoint.api import CheckpointException

from foldray.comm import host_group
from foldray.runtime import State
from trainers.checkpoints.boxes import LoadBoxes, Pieces, ReadBoxes, SaveBoxes
from trainers.checkpoints.stored import PROGRESS, Stored, look, seal
from trainers.folders import DamagedFile, Folder

_TIMEOUT = timedelta(minutes=30)


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be gone on from; all ranks raise it, and another attempt would find the same.

    Args:
        path: the checkpoint's, in its storage.
        file: that is damaged.
        what: is wrong with it.
    """

    def __init__(self, path: str, file: str, what: str):
        super().__init__(path, file, what)
        self.path, self.file, self.what = path, file, what

    def __str__(self) -> str:
        return f"checkpoint {self.path} is damaged: {self.file} {self.what}"


class Saver:
    """Saves this rank's share of a checkpoint; every rank calls `save` at the same steps.

    Args:
        asynchronous: write in the background; a save waits for the one before it.
    """

    def __init__(self, asynchronous: bool):
        self.asynchronous = asynchronous
        self.group = host_group(_TIMEOUT)
        self._written = threading.Event()
        self._written.set()

    def save(self, state: State, pieces: Pieces, progress: dict[str, Any], metrics: dict[str, float], last: bool = False) -> str:
        """Report a checkpoint to Ray; the path where it will be.

        Args:
            state: tensors by global name; copied before this returns.
            pieces: the box of the whole that each tensor is.
            progress: what else is needed to go on (`stored.Progress`); `progress["step"]` names the checkpoint.
            last: wait until it is written.
        """
        copy = {key: tensor.detach().to("cpu", copy=True) for key, tensor in state.items()}
        self._written.wait()
        self._written.clear()
        storage = ray.train.get_context().get_storage()
        folder = Path(tempfile.mkdtemp(prefix="foldray-checkpoint-"))

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            try:
                write(folder, copy, pieces, progress, self.group)
                return storage.persist_current_checkpoint(checkpoint, name)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                self._written.set()

        name = f"step_{progress['step']:08d}"
        ray.train.report(
            metrics,
            checkpoint=Checkpoint.from_directory(str(folder)),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC if self.asynchronous and not last else CheckpointUploadMode.SYNC,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=upload,
        )
        return storage.build_checkpoint_path_from_name(name)


def write(folder: Path, state: State, pieces: Pieces, progress: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Write this rank's share of a checkpoint into a folder of its own; every rank of the group calls this."""
    writer, planner = dcp.FileSystemWriter(folder), SaveBoxes(pieces)
    dcp.save(state, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    rank = 0 if group is None else dist.get_rank(group)
    if rank == 0:
        (folder / PROGRESS).write_text(json.dumps(progress))
    seal(folder, rank)


@contextmanager
def opened(checkpoint: Checkpoint, group: dist.ProcessGroup | None) -> Iterator[Stored]:
    """What a checkpoint holds, on this machine, for `load`; every rank of the group calls this.

    Raises:
        DamagedCheckpoint: a rank finds here, or in `load`, that something is missing, or is not what was written.
    """
    with checkpoint.as_directory() as folder:
        try:
            yield _look(Folder(folder), group)
        except DamagedFile as error:
            raise DamagedCheckpoint(checkpoint.path, error.name, error.what) from None


def load(stored: Stored, state: State, pieces: Pieces, group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of `state`, each a box of the whole, from a checkpoint that any fold wrote.

    Raises:
        DamagedFile: (on all ranks) a tensor is missing, has another shape, or lies in a file that is damaged.
    """
    reader, planner = ReadBoxes(stored), LoadBoxes(pieces)
    try:
        dcp.load(state, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # derives from BaseException: nothing above would catch it
        failures = [failure[0] if isinstance(failure, tuple) else failure for failure in error.failures.values()]
        damage = next((failure for failure in failures if isinstance(failure, DamagedFile)), None)
        reasons = "; ".join(map(str, failures))[:300]
        raise damage or RuntimeError(f"checkpoint {stored.folder.path} cannot be read: {reasons}") from None


def _look(folder: Folder, group: dist.ProcessGroup | None) -> Stored:
    """Look, and raise on all ranks what one of them finds; else the others would wait for it."""
    found: Stored | DamagedFile
    try:
        found = look(folder)
    except DamagedFile as error:
        found = error
    damages = [found if isinstance(found, DamagedFile) else None]
    if group is not None:
        damages *= dist.get_world_size(group)
        dist.all_gather_object(damages, damages[0], group=group)
    for damage in filter(None, damages):
        raise damage
    assert isinstance(found, Stored), "a rank without damage has looked"
    return found
