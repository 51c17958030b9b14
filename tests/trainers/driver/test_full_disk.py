"""A disk that is full when a training ends must not hide why it ended."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainers.driver import entry
from trainers.driver.run import Run


def full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.fixture
def run() -> Any:
    folder = SimpleNamespace(close=full, summary=lambda status: status, path=Path("/runs/r-1"))
    return SimpleNamespace(folder=folder, summary=None)


def test_the_error_of_a_training_stays(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Run._close(run, "failed", ValueError("the cause"))
    assert run.summary == "failed"
    assert caplog.messages == ["run r-1: its folder cannot be written ([Errno 28] No space left on device)"]


def test_a_training_that_has_no_other_error_fails(run: Any) -> None:
    with pytest.raises(OSError, match="No space left"):
        Run._close(run, "finished", None)
    assert run.summary == "finished"


def test_a_driver_whose_run_another_one_has_writes_nothing() -> None:
    """The fields that `Run` would write with are not there."""
    Run._end(SimpleNamespace(_abandoned=True), ValueError("the cause"))  # type: ignore[arg-type]


def test_the_traceback_goes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = entry._write_traceback(ValueError("the cause"), tmp_path / "gone")
    assert file.parent.parent == tmp_path
    assert "the cause" in file.read_text()


def test_no_temporary_folder_is_left_if_the_traceback_is_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (run := tmp_path / "run").mkdir()
    assert entry._write_traceback(ValueError("the cause"), run) == run / "error.txt"
    assert list(tmp_path.iterdir()) == [run]


def test_a_training_ends_even_if_no_disk_takes_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", full)
    assert entry._write_traceback(ValueError("the cause"), tmp_path / "gone") == Path("/dev/null")
