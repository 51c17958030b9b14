"""Writes and reads the files of a checkpoint: those of `torch.distributed.checkpoint`.

Tensors have global names, and every rank writes its boxes of the global tensors. Sizes and hashes of all files are written
beside them (`stored.py`), so damage is detected before training continues from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from foldray.runtime import Shard
from trainers.checkpoints.boxes import Plan, SaveBoxes, WriteBoxes, fill, planned
from trainers.checkpoints.reading import time_for
from trainers.checkpoints.staging import Staged
from trainers.checkpoints.stored import PROGRESS, DamagedCheckpoint, Stored, look, seal
from trainers.folders import DamagedFile, Folder


def write(folder: Path, staged: Staged, progress: dict[str, Any], group: dist.ProcessGroup | None) -> list[str]:
    """Write this rank's share of a checkpoint into a folder, and return the names of its files.

    Every rank of the group must call this. The folder may be one for all of them.

    Raises:
        OSError: (on all ranks) some rank cannot write its files.
    """
    writer, planner = WriteBoxes(folder), SaveBoxes(staged)
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
    return seal(folder, rank, writer.boxes)


@contextmanager
def opened(checkpoint: Checkpoint, group: dist.ProcessGroup | None) -> Iterator[Stored]:
    """Open a checkpoint for `load`, which reads what a rank needs from where the checkpoint is. Every rank must call this.

    Raises:
        DamagedCheckpoint: on some rank, here or in `load`, a file is missing or differs from what was written.
    """
    try:
        yield _look(Folder(checkpoint.path, checkpoint.filesystem), group)
    except DamagedFile as error:
        raise DamagedCheckpoint(checkpoint.path, error.name, error.what) from None


def load(
    stored: Stored,
    shards: Sequence[Shard],
    group: dist.ProcessGroup | None,
    during: Callable[[float], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> None:
    """Fill the tensors of shards from a checkpoint of any fold. Every rank of the group must call this.

    Args:
        during: opens a context for the reading, given the seconds that it may take.

    Raises:
        DamagedFile: (on all ranks) a tensor is missing, has another shape, or lies in a damaged file.
        RuntimeError: (on all ranks) a file cannot be read.
    """
    plan: Plan = {}

    def look() -> None:
        plan.update(planned(stored, shards))

    _together(look, stored, group)
    limit = time_for(max(_of_all(sum(length for _, _, length in plan), group)))
    with during(limit.total_seconds()):
        _together(lambda: fill(stored, plan), stored, group, limit)


def _together(do: Callable[[], None], stored: Stored, group: dist.ProcessGroup | None, limit: timedelta | None = None) -> None:
    """Call a function on every rank. If it fails on one, raise an error on all.

    Args:
        limit: how long the ranks wait for each other; None is the group's own timeout.
    """
    failure: DamagedFile | str | None = None
    try:
        do()
    except DamagedFile as error:
        failure = error
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if group is not None and limit is not None:
        dist.monitored_barrier(group, limit)  # the only wait whose timeout is not that of the group
    failures = [each for each in _of_all(failure, group) if each is not None]
    if damage := [each for each in failures if isinstance(each, DamagedFile)]:
        raise damage[0]
    if failures:
        raise RuntimeError(f"checkpoint {stored.folder.path} cannot be read: {'; '.join(map(str, failures))[:300]}")


def _of_all(own: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return what all ranks have."""
    if group is None:
        return [own]
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def _failures(error: CheckpointException) -> dict[int, BaseException]:
    """Return what failed, by rank."""
    return {rank: failure[0] if isinstance(failure, tuple) else failure for rank, failure in sorted(error.failures.items())}


def _look(folder: Folder, group: dist.ProcessGroup | None) -> Stored:
    """Check a checkpoint on the first rank alone, and tell all ranks what it found.

    On a shared disk, many ranks would otherwise open all manifests of many ranks at once, and ask for all sizes. Each rank
    checks the files that it reads, so it also finds damage that only its own machine has.
    """
    if group is None:
        return look(folder)
    found: list[Stored | DamagedFile | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            found = [look(folder)]
        except DamagedFile as error:
            found = [error]
    dist.broadcast_object_list(found, group=group, group_src=0)
    if isinstance(found[0], DamagedFile):
        raise found[0]
    assert found[0] is not None, "the first rank found a checkpoint or damage"
    return replace(found[0], folder=folder)
