"""What writing a checkpoint costs, and what becomes of one that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from tests.trainers.checkpoints.damage import shards_of, state
from trainers.checkpoints import tensors
from trainers.checkpoints.tensors import Staged

PROGRESS = {"step": 3, "data": "d", "fold": {}, "validation": {}, "seed": 0, "global_batch": 8}


def test_a_rank_that_cannot_write_is_named_on_all_ranks(ranks, tmp_path: Path) -> None:
    """torch raises a BaseException, which Ray's thread would swallow: every later checkpoint would wait for this one."""
    (tmp_path / "blocked").touch()
    found = ranks(2).run(_write, [tmp_path / "free", tmp_path / "blocked" / "folder"])
    assert found[0].startswith("rank 1 cannot write the checkpoint of step 3: [Errno 20] Not a directory")
    assert found[1] == found[0]


def _write(rank: int, folders: list[Path]) -> str:
    try:
        tensors.write(folders[rank], Staged(shards_of(state(3))), PROGRESS, dist.group.WORLD)
    except Exception as error:
        return str(error)
    return "written"


def test_one_copy_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DCP's own writer keeps all copies until the file is closed: a rank would hold its whole share once more."""
    copies: list[StorageWeakRef] = []
    alive: list[int] = []
    copy = tensors._on_host

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        made = copy(tensor)
        copies.append(StorageWeakRef(made.untyped_storage()))
        alive.append(sum(not each.expired() for each in copies))
        return made

    monkeypatch.setattr(tensors, "_on_host", counted)
    tensors.write(tmp_path, Staged(shards_of(state(3))), PROGRESS, None)
    assert alive == [1] * len(state(3))
