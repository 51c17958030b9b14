"""What a checkpoint costs that cannot be written."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests.trainers.checkpoints.damage import shards_of, state
from trainers.checkpoints import tensors
from trainers.checkpoints.staging import Staged


def test_a_rank_that_cannot_write_is_named_on_all_ranks(ranks, tmp_path: Path) -> None:
    """torch raises a BaseException, which Ray's thread would swallow: every later checkpoint would wait for this one."""
    (tmp_path / "blocked").touch()
    found = ranks(2).run(_write, [tmp_path / "free", tmp_path / "blocked" / "folder"])
    assert found[0].startswith("rank 1 cannot write the checkpoint of step 3: [Errno 20] Not a directory")
    assert found[1] == found[0]


def _write(rank: int, folders: list[Path]) -> str:
    progress = {"step": 3, "data": "d", "fold": {}, "validation": {}, "seed": 0, "global_batch": 8}
    try:
        tensors.write(folders[rank], Staged(shards_of(state(3))), progress, dist.group.WORLD)
    except Exception as error:
        return str(error)
    return "written"
