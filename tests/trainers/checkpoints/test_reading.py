"""What reading a checkpoint asks of a storage: how often files are opened, what is read at once, and how long it may take."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train import Checkpoint

from foldray.runtime import Shard
from tests.trainers.checkpoints.damage import FILE, flipped, shards_of
from trainers.checkpoints import reading, tensors
from trainers.checkpoints.reading import READERS, runs_of, time_for
from trainers.checkpoints.stored import DamagedCheckpoint, look
from trainers.checkpoints.tensors import Staged
from trainers.folders import Folder

COUNT = 300
PROGRESS = {"step": 3, "data": "d", "fold": {}, "validation": {}, "seed": 0, "global_batch": 8}


class File:
    """A file that keeps what is read of it."""

    def __init__(self, file: Any, reads: list[range]):
        self._file, self._reads = file, reads

    def read(self, size: int) -> bytes:
        start = self._file.tell()
        self._reads.append(range(start, start + size))
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Counting(LocalFileSystem):
    """A storage that counts what is opened and read of files of tensors."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.reads = list[str](), list[range]()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if not path.endswith(".distcp"):
            return file
        self.opened.append(Path(path).name)
        return File(file, self.reads)


@pytest.fixture
def made(tmp_path: Path) -> dict[str, torch.Tensor]:
    state = {f"model/{number:03d}": torch.full((4, 6), float(number)) for number in range(COUNT)}
    tensors.write(tmp_path, Staged(shards_of(state)), PROGRESS, None)
    return state


def load(folder: Path, names: list[str]) -> tuple[Counting, dict[str, torch.Tensor]]:
    storage, found = Counting(), {name: torch.zeros(4, 6) for name in names}
    with tensors.opened(Checkpoint(str(folder), PyFileSystem(FSSpecHandler(storage))), None) as stored:
        tensors.load(stored, shards_of(found), None)
    return storage, found


def test_a_file_is_opened_once_and_neighbours_are_read_at_once(tmp_path: Path, made: dict[str, torch.Tensor]) -> None:
    storage, found = load(tmp_path, list(made))
    assert all(torch.equal(found[name], tensor) for name, tensor in made.items())
    assert storage.opened == [FILE]
    assert len(storage.reads) == 1


def test_what_lies_between_is_not_read(tmp_path: Path, made: dict[str, torch.Tensor]) -> None:
    """Half of the boxes, every second one: the file is still opened once."""
    storage, found = load(tmp_path, list(made)[::2])
    assert all(torch.equal(tensor, made[name]) for name, tensor in found.items())
    assert storage.opened == [FILE]
    assert len(storage.reads) == COUNT // 2
    assert sum(map(len, storage.reads)) < (tmp_path / FILE).stat().st_size * 0.51


def test_large_runs_are_cut_and_every_box_comes_once(
    tmp_path: Path, made: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_TOGETHER", 10_000)
    monkeypatch.setattr(reading, "_AHEAD", 20_000)
    storage, found = load(tmp_path, list(made))
    assert all(torch.equal(found[name], tensor) for name, tensor in made.items())
    assert storage.opened == [FILE]
    assert len(storage.reads) > 10
    assert all(len(each) <= 10_000 for each in storage.reads)
    assert sum(map(len, storage.reads)) == (tmp_path / FILE).stat().st_size


def test_a_damaged_box_inside_a_run_is_named(tmp_path: Path, made: dict[str, torch.Tensor]) -> None:
    flipped(FILE)(tmp_path)
    with pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp has other bytes than were written"):
        load(tmp_path, list(made))
    load(tmp_path, list(made)[:10])  # a rank that needs none of it goes on


def test_manifests_are_read_several_at_once(
    tmp_path: Path, made: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(1, READERS):
        (tmp_path / f"__{rank}_0.distcp").touch()
        tensors.seal(tmp_path, rank, {f"__{rank}_0.distcp": {}})
    together, read = threading.Barrier(READERS), Folder.read

    def waiting(folder: Folder, name: str, limit: int) -> bytes:
        if name.startswith("manifest."):
            together.wait(60)
        return read(folder, name, limit)

    monkeypatch.setattr(Folder, "read", waiting)
    assert len(look(Folder(str(tmp_path))).entries) == READERS + 2


def test_runs_are_of_one_file_and_without_gaps() -> None:
    places = [("b", 0, 5), ("a", 5, 5), ("a", 0, 5), ("a", 11, 5), ("a", 5, 5)]
    assert list(runs_of(places)) == [[("a", 0, 5), ("a", 5, 5)], [("a", 11, 5)], [("b", 0, 5)]]


def test_the_limit_follows_the_bytes(tmp_path: Path, made: dict[str, torch.Tensor]) -> None:
    limits: list[float] = []

    @contextmanager
    def during(seconds: float) -> Any:
        limits.append(seconds)
        yield

    with tensors.opened(Checkpoint.from_directory(str(tmp_path)), None) as stored:
        for rows in (1, 4):  # a rank that needs one row of each box still reads the box, because the hash is that of the box
            shards = [Shard(name, torch.zeros(rows, 6), (4, 6), (0, 0)) for name in made]
            tensors.load(stored, shards, None, during)
    assert limits == [time_for((tmp_path / FILE).stat().st_size).total_seconds()] * 2
    assert time_for(0) == timedelta(minutes=30)
    assert time_for(9e12) > timedelta(days=10)
