"""Checkpoints in a storage that is not a disk: errors of the storage, and what killed workers have left."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
import torch
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from ray.train import Checkpoint
from ray.train.v2._internal.constants import AWS_RETRYABLE_TOKENS
from ray.train.v2._internal.execution.context import TrainContext
from ray.train.v2._internal.execution.storage import StorageContext

from foldray.runtime import Shard
from tests.trainers.checkpoints.damage import FILE, load, shards_of, state
from trainers.checkpoints import saver, tensors
from trainers.checkpoints.reading import time_for
from trainers.checkpoints.saver import Saver, written_to
from trainers.checkpoints.stored import Stored
from trainers.faults.lease import LeaseLost, check_holder
from trainers.folders import Folder

PROGRESS = {"step": 3, "data": "d", "fold": {}, "validation": {}, "seed": 0, "global_batch": 8}


class Storage:
    """A storage that is not a disk, and that refuses files with an error as often as is asked.

    Attributes:
        calls: how often the checkpoint was written, and how often it was copied.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        (folder / "away").mkdir()
        self.context = StorageContext("runs", "r", SubTreeFileSystem(str(folder / "away"), LocalFileSystem()))
        self.files, self.failures, self.message = folder / "away" / "runs" / "r", 0, ""
        self.calls = {"write": 0, "copy": 0}
        self._write, self._copy = tensors.write, self.context.persist_current_checkpoint
        monkeypatch.setattr(tensors, "write", self.write)
        monkeypatch.setattr(self.context, "persist_current_checkpoint", self.copy)

    def write(self, *arguments: Any) -> list[str]:
        self.calls["write"] += 1
        return self._write(*arguments)

    def copy(self, *arguments: Any) -> Checkpoint:
        self.calls["copy"] += 1
        if self.calls["copy"] <= self.failures:
            raise OSError(self.message)
        return self._copy(*arguments)


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr("time.sleep", lambda _: None)  # between attempts, of Ray's as well
    return Storage(tmp_path, monkeypatch)


@pytest.fixture
def save(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that saves a checkpoint of one rank as Ray does, with Ray's own attempts."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(get_storage=lambda: storage.context))
    monkeypatch.setattr(ray.train, "report", lambda _, **arguments: given.update(arguments))
    context: Any = SimpleNamespace(execution_context=SimpleNamespace(train_context_callbacks=[]))

    storage.saver = Saver(True, time_for(0))

    def save() -> None:
        storage.saver.save(shards_of(state(3)), PROGRESS, {})
        name, checkpoint, upload = given["checkpoint_dir_name"], given["checkpoint"], given["checkpoint_upload_fn"]
        TrainContext._upload_checkpoint(context, name, {}, checkpoint, False, upload)

    return save


def test_files_are_copied_again_after_an_error(storage: Storage, save: Callable[[], None]) -> None:
    storage.failures, storage.message = 2, "AWS Error SLOW_DOWN during PutObject operation"
    save()
    assert storage.calls == {"write": 1, "copy": 3}
    assert [step for step, _ in storage.saver.written] == [3]
    assert load(storage.files / "step_00000003").keys() == state(3).keys()


def test_a_driver_that_lost_its_lease_writes_nothing_more(storage: Storage, save: Callable[[], None]) -> None:
    """It may stand still, so that its workers have to look, and a checkpoint of this name may be the new driver's by now."""
    run = Folder(storage.context.experiment_fs_path, storage.context.storage_filesystem)
    storage.saver.check = partial(check_holder, run, "ours")
    save()
    run.write("driver.json", b'{"holder": "ours", "host": "h", "pid": 1, "beat": 3}')
    save()
    before = {file: file.stat().st_mtime_ns for file in storage.files.rglob("*") if file.is_file()}
    run.write("driver.json", b'{"holder": "theirs", "host": "another", "pid": 7, "beat": 1}')
    with pytest.raises(LeaseLost, match="r was taken over by another driver, process 7 on another"):
        save()
    assert all(file.stat().st_mtime_ns == time for file, time in before.items() if file.name != "driver.json")


def test_only_the_boxes_of_a_plan_are_read(storage: Storage, save: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A node need not have room for a whole checkpoint, nor read more of it than its ranks need."""
    save()
    asked: list[tuple[str, int, int]] = []
    read = Stored.read
    monkeypatch.setattr(Stored, "read", lambda stored, places: read(stored, asked.extend(places) or asked))
    monkeypatch.setattr(Checkpoint, "as_directory", None)
    place = Folder(storage.context.build_checkpoint_path_from_name("step_00000003"), storage.context.storage_filesystem)
    halves = torch.zeros(2, 4, 6)
    shards = [Shard("model/b", half, (8, 6), (4 * number, 0)) for number, half in enumerate(halves)]
    with tensors.opened(place.checkpoint, None) as stored:
        tensors.load(stored, shards, None)
        of_b = next(box for index, box in stored.contents.places.items() if index.fqn == "model/b")
    assert torch.equal(halves.reshape(8, 6), state(3)["model/b"])
    assert asked == [(FILE, of_b.offset, of_b.length)], "a box of two shards is read once"


@pytest.mark.parametrize("token", AWS_RETRYABLE_TOKENS)
def test_ray_does_not_upload_again(storage: Storage, save: Callable[[], None], token: str) -> None:
    """Ray would call on one rank alone, which would wait for the others, or delete what they have uploaded."""
    storage.failures, storage.message = 100, f"When uploading a file: {token} during PutObject operation: busy"
    with pytest.raises(OSError, match=f"a file: {token.lower()} during PutObject operation: busy"):
        save()
    assert storage.calls == {"write": 1, "copy": 1 + len(saver.PAUSES_S)}


def test_other_errors_stay_as_they_are(storage: Storage, save: Callable[[], None]) -> None:
    storage.failures, storage.message = 100, "AWS Error ACCESS_DENIED during PutObject operation"
    with pytest.raises(OSError, match=storage.message) as raised:
        save()
    assert raised.value.__cause__ is None
    assert not storage.saver.written, "nobody may be told of it"


def test_what_a_killed_worker_has_left_is_deleted(storage: Storage) -> None:
    def folder(run: str, rank: int) -> Path:
        """Write a checkpoint, and return its temporary folder, which is there again as if the worker had been killed."""
        context = StorageContext("runs", run, storage.context.storage_filesystem)
        place = Folder(context.build_checkpoint_path_from_name("step_00000003"), context.storage_filesystem)
        with written_to(context, place, rank) as made:
            (made / "file").touch()
        assert not made.exists()
        made.mkdir()
        (made / "file").touch()
        return made

    first, tenth, other = folder("r", 1), folder("r", 10), folder("s", 1)
    again = folder("r", 1)
    assert sorted(Path(tempfile.gettempdir()).iterdir()) == sorted([tenth, other, again])
    assert first != again
