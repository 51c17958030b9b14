"""Drafts of folders in the cache. A folder has its name only when it is whole; a draft that was left goes on."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from foldray import files
from foldray.errors import UserError

_LOCK, _DRAFT = "lock", re.compile(r"\.[0-9a-f]{16}(\.[0-9a-f]{8})?")
_FORGOTTEN_S = 7 * 86400.0
_LOOKS, _LOOK_S = 11, 1.0


@contextmanager
def draft(folder: Path, is_done: Callable[[], bool]) -> Iterator[Path]:
    """Make a hidden folder beside `folder`. It becomes `folder` at the end, or is deleted after a UserError.

    If this process is killed, the draft stays, and the next process that prepares the same data goes on with it. A process locks
    the draft that it works on. Another process meanwhile has a draft of its own.

    Args:
        is_done: whether `folder` is whole already.
    """
    hidden, lock = folder.with_name(f".{folder.name}"), None
    with writing(folder):
        hidden.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        if (lock := _locked(hidden)) is None:
            hidden = hidden.with_name(f"{hidden.name}.{uuid.uuid4().hex[:8]}")
            lock = _locked(hidden)
    try:
        yield hidden
        with writing(folder):
            publish(hidden, folder, is_done)
            (folder / _LOCK).unlink(missing_ok=True)
        shutil.rmtree(hidden, ignore_errors=True)  # if another process was first
    except UserError:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _locked(draft: Path) -> int | None:
    """Make a draft, if it is not there, and lock it. Return None if another process has locked it."""
    draft.mkdir(exist_ok=True)
    handle = os.open(draft / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _sweep(cache: Path) -> None:
    """Delete drafts that nobody has worked on for long."""
    for draft in cache.glob(".*"):
        with suppress(OSError):  # another process may sweep as well
            if not _DRAFT.fullmatch(draft.name) or time.time() - draft.stat().st_mtime < _FORGOTTEN_S:
                continue
            handle = _locked(draft)
            if handle is not None:
                shutil.rmtree(draft, ignore_errors=True)
                os.close(handle)


def publish(draft: Path, folder: Path, is_done: Callable[[], bool]) -> None:
    """Give a draft its name, unless another process has prepared the same data meanwhile."""
    if folder.exists() and not is_done():
        shutil.rmtree(folder)
    try:
        os.replace(draft, folder)
    except OSError:
        if not is_done():  # the folder of another process is as good as this one
            raise


def writing(folder: Path) -> AbstractContextManager[None]:
    """Turn errors of the disk into a UserError about the cache that holds `folder`."""
    return files.writing("data.cache", folder.parent)


def check_seen(is_seen: Callable[[], bool], cache: Path, node: str) -> None:
    """Check that this machine sees what a task on a node has written into the cache. Wait some seconds for it."""
    for _ in range(_LOOKS):  # the files of other nodes may come late
        if is_seen():
            return
        time.sleep(_LOOK_S)
    rule = f"is not the same folder everywhere: node {node} has written files there that the driver does not see"
    raise UserError("data.cache", cache, f"{rule}; every node must see it, such as on a shared disk")
