"""Where runs go: a folder, or a storage elsewhere, tried before anything starts."""

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
from trainers.cluster.jobs import in_job

_ANSWER_S = 10.0  # seconds for a storage to take a small file and delete it
_SECRET = (
    "holds a password, a key or a token, and Ray keeps this address in its own files; put them into the environment, such as "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or where the storage's client looks for them"
)


def storage_folder(recipe: Recipe) -> str:
    """Where runs go: an absolute folder, or a URI that Ray's storage understands.

    Raises:
        UserError: a relative folder inside a Ray job, whose working folder is deleted; a folder that cannot be written; a URI
            with secrets, or one at which no storage takes a file.
    """
    given = recipe.cluster.storage
    if given is not None and "://" in given:
        if holds_secret(given):
            raise UserError("cluster.storage", given, _SECRET)
        return _written(_local(given)) if given.startswith("file:") else _reachable(given)
    try:
        folder = Path(given).expanduser() if given else (Path.home() / "foldray" / "runs" if in_job() else Path("runs"))
    except RuntimeError:
        raise UserError("cluster.storage", given, "names the home of a user who is not known here") from None
    if in_job() and given is not None and not folder.is_absolute():
        raise UserError(
            "cluster.storage", given, "a Ray job's working folder is deleted with the job; give an absolute folder or a URI"
        )
    return _written(folder.absolute())


def _written(folder: Path) -> str:
    try:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        with tempfile.TemporaryFile(dir=existing):  # tried, because permissions do not tell of root, /proc and full disks
            return str(folder)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError("cluster.storage", folder, f"is no folder that can be written to ({reason})") from None


def _local(uri: str) -> Path:
    try:
        return Path(pyarrow.fs.FileSystem.from_uri(uri)[1])
    except (ValueError, pyarrow.ArrowException) as error:
        raise UserError("cluster.storage", uri, f"is no folder on this machine ({error})") from None


def _reachable(uri: str) -> str:
    """Try it in a process of its own, which can be stopped: clients of a storage wait for minutes, and cannot be told not to."""
    script = Path(__file__).with_name("storage_probe.py")
    try:
        done = subprocess.run([sys.executable, "-P", script, uri], capture_output=True, text=True, timeout=_ANSWER_S)
        reason = done.stdout.strip()[:200] or f"its client ended with {done.returncode}"
        if done.returncode == 0:
            return uri
    except subprocess.TimeoutExpired:
        reason = f"none answers in {_ANSWER_S:.0f} s"
    raise UserError("cluster.storage", uri, f"is no storage that can be reached and written to ({reason})")
