"""Finds the folder or the remote storage of runs, and tries to write to it before anything starts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.fs

from foldray.errors import UserError
from foldray.recipe import Recipe
from foldray.urls import holds_secret
from trainers.cluster import storage_probe
from trainers.cluster.jobs import in_job

_ANSWER_S = 10.0  # seconds for a storage to take a small file and delete it
_SECRET = (
    "holds a password, a key or a token, and Ray keeps this address in its own files; put the secret into the environment, "
    "such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or into the configuration of the storage's client"
)


def storage_folder(recipe: Recipe) -> str:
    """Return the place of runs: an absolute folder, or a URI that Ray's storage understands."""
    return checked_storage("cluster.storage", recipe.cluster.storage)


def checked_storage(field: str, storage: str | None) -> str:
    """Return a storage as an absolute folder or as a URI, after a small file has been written to it.

    It is a folder, which may be relative or begin with `~`, or a URI; None is the default folder.
    """
    if storage is not None and "://" in storage:
        refuse_secret(field, storage)
        return _written(field, _local(field, storage)) if storage.startswith("file:") else _reachable(field, storage)
    try:
        folder = Path(storage).expanduser() if storage else (Path.home() / "foldray" / "runs" if in_job() else Path("runs"))
    except RuntimeError:
        raise UserError(field, storage, "names the home of an unknown user") from None
    if in_job() and storage is not None and not folder.is_absolute():
        raise UserError(field, storage, "a Ray job's working folder is deleted with the job; give an absolute folder or a URI")
    return _written(field, folder.absolute())


def refuse_secret(field: str, uri: str) -> None:
    """Refuse a URI with a password, which files of the run would show."""
    if holds_secret(uri):
        raise UserError(field, uri, _SECRET)


def check_filesystem(field: str, files: pyarrow.fs.FileSystem, folder: str) -> None:
    """Write a small file to a folder of a filesystem, and delete it."""
    try:
        files.create_dir(folder, recursive=True)
        storage_probe.write(files, folder)
    except Exception as error:  # the filesystem may be of the user's own make
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(field, folder, f"cannot be written to in the storage_filesystem ({reason})") from None


def _written(field: str, folder: Path) -> str:
    try:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        # Permissions alone do not show whether a write works, for example for root, in /proc or on a full disk.
        with tempfile.TemporaryFile(dir=existing):
            return str(folder)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(field, folder, f"is not a writable folder ({reason})") from None


def _local(field: str, uri: str) -> Path:
    try:
        return Path(pyarrow.fs.FileSystem.from_uri(uri)[1])
    except (ValueError, pyarrow.ArrowException) as error:
        raise UserError(field, uri, f"is not a folder on this machine ({error})") from None


def _reachable(field: str, uri: str) -> str:
    """Try to write in another process, which can be stopped. Clients of a storage may wait for minutes."""
    script = Path(__file__).with_name("storage_probe.py")
    try:
        done = subprocess.run([sys.executable, "-P", script, uri], capture_output=True, text=True, timeout=_ANSWER_S)
        reason = done.stdout.strip()[:200] or f"its client ended with {done.returncode}"
        if done.returncode == 0:
            return uri
    except subprocess.TimeoutExpired:
        reason = f"no answer in {_ANSWER_S:.0f} s"
    raise UserError(field, uri, f"is not a storage that can be reached and written to ({reason})")
