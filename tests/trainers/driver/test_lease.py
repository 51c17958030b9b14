"""One driver at a time has a run, on a disk and in an object store. No test starts Ray."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from foldray.errors import UserError
from tests.s3 import ENVIRONMENT, NO_MOTO, moto_server, s3_server
from tests.trainers.driver.runs import recipe
from trainers import FoldTrainer
from trainers.faults import lease
from trainers.faults.lease import Lease
from trainers.folders import Folder
from trainers.sinks.run_folder import RunFolder

_STORE = pytest.mark.skipif(moto_server() is None, reason=NO_MOTO), pytest.mark.nightly("starts a server of S3")


@pytest.fixture(params=["disk", pytest.param("store", marks=_STORE)])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """The folder of a run that has begun."""
    monkeypatch.setattr(lease, "_PERIOD_S", 0.05)
    monkeypatch.setattr(lease, "_SURE_S", 0.2)
    if request.param == "disk":
        folder = Folder(str(tmp_path / "r-1"))
        folder.write("recipe.yaml", b"name: r")
        yield folder
        return
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    with s3_server() as server:
        server.files().create_dir("bucket")
        folder = Folder(f"s3://bucket/runs/r-1{server.options}")
        folder.write("recipe.yaml", b"name: r")
        yield folder


class Driver(Lease):
    """A driver's lease, with what it has told."""

    def __init__(self, run: Folder, holder: str):
        self.told, self.gone = list[str](), threading.Event()
        super().__init__(run, "resume", holder, self.told.append, self.gone.set)

    def dies(self) -> None:
        """Show no further sign of life, as if the process were killed."""
        self._leaves.set()
        assert self._thread is not None
        self._thread.join(60)

    def comes_back(self) -> None:
        self._leaves.clear()
        self._keep()


def test_a_second_driver_gets_one_line_while_the_first_one_lives(run: Folder) -> None:
    with Driver(run, "a") as first:
        first.take()
        first.take()
        with Driver(run, "b") as second, pytest.raises(UserError) as told:
            second.take()
        assert not first.gone.is_set()
    assert f"resume=r-1: is in the hands of another driver, process {os.getpid()} on" in str(told.value)
    assert run.names() == ["recipe.yaml"]


def test_the_lease_of_a_dead_driver_is_taken_over(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it was not dead after all, it learns so before it writes again, and ends."""
    monkeypatch.setattr(lease, "_GONE_S", 0.5)
    with Driver(run, "a") as first, Driver(run, "b") as second:
        first.take()
        first.dies()
        second.take()
        assert "to see if it lives" in second.told[0]
        first.comes_back()
        assert first.gone.is_set()
        with pytest.raises(UserError, match="was taken over by another driver"):
            first.check()
        second.check()
    assert run.names() == ["recipe.yaml"]


def test_a_run_that_is_given_back_is_free(run: Folder) -> None:
    with Driver(run, "a") as first:
        first.take()
    with Driver(run, "b") as second:
        second.take()
        assert not second.told


def test_a_driver_that_is_started_again_does_not_wait_for_itself(run: Folder) -> None:
    first, again = Driver(run, "a"), Driver(run, "a")
    first.take()
    first.dies()
    with again:
        again.take()
        assert not again.told


def test_of_two_that_start_together_one_goes_on(run: Folder) -> None:
    outcomes: list[object] = []

    def start(name: str) -> None:
        with Driver(run, name) as driver:
            try:
                driver.take()
                outcomes.append(driver.gone.wait(5.0))
            except UserError:
                outcomes.append("refused")

    threads = [threading.Thread(target=start, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(map(str, outcomes)) == ["False", "refused"]


def test_nothing_is_left_of_a_run_that_never_began(tmp_path: Path) -> None:
    with Driver(Folder(str(tmp_path / "runs" / "r-2")), "a") as first:
        first.take()
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"x" * 9999])
def test_a_file_that_is_no_lease_is_nobodys_sign_of_life(run: Folder, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_GONE_S", 0.2)
    run.write("driver.json", content)
    with Driver(run, "a") as first:
        first.take()
        time.sleep(0.2)
        first.check()


def test_a_run_that_another_driver_has_is_not_resumed(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the run stay as they are."""
    monkeypatch.setattr(lease, "_PERIOD_S", 0.05)
    RunFolder(storage / "busy", recipe(storage), {}).close("killed")
    files = {path: path.read_bytes() for path in (storage / "busy").iterdir()}
    with Driver(Folder(str(storage / "busy")), "a") as first:
        first.take()
        with pytest.raises(UserError, match="resume=busy: is in the hands of another driver"):
            FoldTrainer(recipe(storage), resume="busy").fit()
    assert {path: path.read_bytes() for path in (storage / "busy").iterdir()} == files


def test_two_that_write_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    """A draft that both shared would let one of them move what the other one has not written yet."""
    failures: list[Exception] = []

    def write(content: bytes) -> None:
        try:
            for _ in range(200):
                Folder(str(tmp_path)).write("driver.json", content)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(letter * 5000,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert len(set((tmp_path / "driver.json").read_bytes())) == 1
