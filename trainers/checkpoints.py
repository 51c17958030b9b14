"""Checkpoints: `torch.distributed.checkpoint` files under Ray's `Checkpoint`, keyed by global names, in boxes of whole tensors.

A rank copies its state to host memory, and a background thread writes it and hands it to Ray's storage while training goes
on. Ray registers a checkpoint only when every rank's files have arrived, so a half-written one is never resumed from; sizes
of all files are written beside them, so a damaged one is found before it is read.
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

import ray.train
import torch
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint
from ray.train.v2.api.report_config import CheckpointUploadMode
from torch.distributed.checkpoint.api import CheckpointException

from foldray.comm import host_group
from foldray.runtime import State
from trainers.boxes import LoadBoxes, Pieces, SaveBoxes

PROGRESS = "progress.json"
_TIMEOUT = timedelta(minutes=30)


class DamagedCheckpoint(RuntimeError):
    """A checkpoint that cannot be read, with the file and what is wrong with it."""


class Saver:
    """Saves this rank's share of a checkpoint; every rank calls `save` at the same steps.

    Args:
        asynchronous: write in the background; a save waits for the one before it.
    """

    def __init__(self, rank: int, asynchronous: bool):
        self.rank, self.asynchronous = rank, asynchronous
        self.group = host_group(_TIMEOUT)
        self._written = threading.Event()
        self._written.set()

    def save(self, state: State, pieces: Pieces, progress: dict[str, Any], metrics: dict[str, float], last: bool = False) -> str:
        """Report a checkpoint to Ray; the path where it will be.

        Args:
            state: tensors by global name; copied before this returns.
            pieces: the box of the whole that each tensor is.
            progress: what else is needed to go on; `progress["step"]` names the checkpoint.
            last: wait until it is written.
        """
        copy = {key: tensor.detach().to("cpu", copy=True) for key, tensor in state.items()}
        self._written.wait()
        self._written.clear()
        storage = ray.train.get_context().get_storage()
        folder = Path(tempfile.mkdtemp(prefix="foldray-checkpoint-"))

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            try:
                self._write(folder, copy, pieces, progress)
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

    def _write(self, folder: Path, state: State, pieces: Pieces, progress: dict[str, Any]) -> None:
        write(folder, state, pieces, self.group)
        if self.rank == 0:
            (folder / PROGRESS).write_text(json.dumps(progress))
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        (folder / f"sizes.{self.rank}.json").write_text(json.dumps(sizes))


@contextmanager
def opened(checkpoint: Checkpoint) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A checkpoint's folder on this machine and its progress, after a look at every file's size.

    Raises:
        DamagedCheckpoint: a file is missing or has another size than when it was written.
    """
    with checkpoint.as_directory() as folder:
        path = Path(folder)
        lists = sorted(path.glob("sizes.*.json"))
        if not lists:
            raise DamagedCheckpoint(f"checkpoint {checkpoint.path}: no list of file sizes; it was never completed")
        for name, size in (item for file in lists for item in _read(checkpoint, file).items()):
            found = (path / name).stat().st_size if (path / name).exists() else None
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise DamagedCheckpoint(f"checkpoint {checkpoint.path}: {name} {what}; go on from an earlier one")
        yield path, _read(checkpoint, path / PROGRESS)


def write(folder: Path, state: State, pieces: Pieces, group: torch.distributed.ProcessGroup | None) -> None:
    """Write this rank's share of a checkpoint; every rank of the group calls this."""
    writer, planner = dcp.FileSystemWriter(folder), SaveBoxes(pieces)
    dcp.save(state, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


def load(folder: Path, state: State, pieces: Pieces, group: torch.distributed.ProcessGroup | None) -> None:
    """Fill the tensors of `state`, each a box of the whole, from a checkpoint that any fold wrote.

    Raises:
        DamagedCheckpoint: a tensor is missing or has another shape.
    """
    try:
        reader, planner = dcp.FileSystemReader(folder), LoadBoxes(pieces)
        dcp.load(state, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # derives from BaseException: nothing above would catch it
        reasons = "; ".join(str(failure[0] if isinstance(failure, tuple) else failure) for failure in error.failures.values())
        raise DamagedCheckpoint(f"checkpoint {folder} does not fit this model: {' '.join(reasons.split())[:300]}") from None


def _read(checkpoint: Checkpoint, file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"checkpoint {checkpoint.path}: {file.name} cannot be read ({error})") from None
