"""The way of a checkpoint's files to a storage that is not a disk: through a temporary folder, and again if the storage fails.

All ranks take part in writing a checkpoint, so no rank may begin anew alone. Only a rank's own copies can be made again.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyarrow.fs import LocalFileSystem
from ray.train import Checkpoint
from ray.train.v2._internal.constants import AWS_RETRYABLE_TOKENS
from ray.train.v2._internal.execution.storage import StorageContext

from trainers.folders import Folder

PAUSES_S = (1.0, 4.0, 16.0)  # after an error of a storage, which may be busy


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
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)  # of another user, perhaps
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
