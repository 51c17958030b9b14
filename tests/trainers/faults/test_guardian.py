"""The parent of a training, with a stand-in for `python -m foldray`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainers.faults import guardian

# Tells its run, writes what it knows into a file, and ends as told in the file "ends": "kill", or an exit code.
STAND_IN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from trainers.faults import guardian
guardian.watch_parent()
at = Path("log").open("a")
print(json.dumps([sys.argv[1:], guardian.run_to_resume()]), file=at, flush=True)
print(guardian.holder(), file=Path("holders").open("a"), flush=True)
ends = Path("ends").read_text().split()
Path("ends").write_text(" ".join(ends[1:]))
if ends[0] != "early":
    guardian.tell(run="r-1", folder=os.getcwd())
if ends[0] == "leaves":
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(0, flush=True); time.sleep(600)"
    left = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True)
    left.stdout.read(1)
    Path("left").write_text(str(left.pid))
    ends[0] = "kill"
if ends[0] in ("kill", "early"):
    os.kill(os.getpid(), signal.SIGKILL)
if ends[0] == "deaf":
    print("waits", file=at, flush=True)
    time.sleep(60)
if ends[0] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: (print("TERM", file=at, flush=True), guardian.tell(ended=143), os._exit(143)))
    print("waits", file=at, flush=True)
    time.sleep(60)
if ends[0] == "exits":
    os._exit(1)
guardian.tell(ended=int(ends[0]))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "foldray").mkdir()
    (tmp_path / "foldray" / "__main__.py").write_text(STAND_IN)
    root = Path(__file__).parents[3]
    (tmp_path / "foldray" / "__init__.py").write_text(f"__path__.append({str(root / 'foldray')!r})")
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def guard(place: Path, ends: str, *run: str) -> tuple[int, list[str]]:
    (place / "ends").write_text(ends)
    (place / "run.json").write_text(run[0] if run else "{}")
    (place / "recipe.yaml").touch()
    code = guardian.guard(["train", "x.yaml"])
    return code, (place / "log").read_text().splitlines()


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_its_exit_code_is_passed_on(place: Path, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert guard(place, str(code)) == (code, ['[["train", "x.yaml"], null]'])
    assert capfd.readouterr().err == ""


def test_a_lost_process_goes_on(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, log = guard(place, "kill exits 0", '{"steps": 7, "checkpoint": "/x/r-1/step_00000005"}')
    assert (code, log) == (0, ['[["train", "x.yaml"], null]', *['[["train", "x.yaml"], "r-1"]'] * 2])
    holders = (place / "holders").read_text().splitlines()
    assert (len(holders), len(set(holders))) == (3, 1), "so none of them waits for the lease of another"
    first, second = capfd.readouterr().err.splitlines()
    assert first == (
        "foldray: after step 7, the process of the training was lost (SIGKILL): Ray's head or node ended it, or memory ran out; "
        "run r-1 goes on from its last checkpoint"
    )
    assert "lost (exit code 1)" in second


def test_what_a_lost_process_has_left_is_ended(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's agents may wait for a lost head for ever. A child that this process had before stays."""
    monkeypatch.setattr(guardian, "_LEFT_S", 0.5)
    own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert guard(place, "leaves 0")[0] == 0
        left = int((place / "left").read_text())
        assert not Path(f"/proc/{left}").exists() or os.kill(left, signal.SIGKILL)
        assert own.poll() is None
    finally:
        own.kill()
        own.wait()


def test_it_gives_up_without_progress(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert guard(place, "kill kill kill kill 0")[0] == 1
    assert capfd.readouterr().err.splitlines()[-1].endswith("4 times; after the cause is gone: foldray train RECIPE --resume r-1")


def test_before_the_run_there_is_nothing_to_resume(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert guard(place, "early 0")[0] == 1
    assert capfd.readouterr().err.rstrip().endswith("memory ran out, before the run began")


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_signals_and_the_end_of_the_parent_reach_it(place: Path, sign: signal.Signals) -> None:
    (place / "ends").write_text("wait")
    code = "import sys; from trainers.faults import guardian; sys.exit(guardian.guard(['train']))"
    parent = subprocess.Popen([sys.executable, "-P", "-c", code])
    wait_for(place / "log", "waits")
    os.kill(parent.pid, sign)
    wait_for(place / "log", "TERM")
    assert parent.wait(120) == (143 if sign == signal.SIGTERM else -9)


def test_a_process_that_was_told_to_stop_does_not_begin_again(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is lost before it has stopped in order."""
    (place / "ends").write_text("deaf 0")
    (place / "recipe.yaml").touch()
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", "import sys; from trainers.faults import guardian; sys.exit(guardian.guard(['train']))"]
    )
    wait_for(place / "log", "waits")
    os.kill(parent.pid, signal.SIGTERM)
    assert parent.wait(120) == 143
    assert capfd.readouterr().err == (
        "foldray: the process of the training ended before it had stopped in order; to go on: foldray train RECIPE --resume r-1\n"
    )


def test_a_run_without_a_folder_begins_again(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The process was lost while it prepared data."""
    (place / "ends").write_text("kill 0")
    assert guardian.guard(["train"]) == 0
    assert (place / "log").read_text().splitlines() == ['[["train"], null]'] * 2
    assert capfd.readouterr().err.endswith("memory ran out; the command begins again\n")


def test_a_checkpoint_of_a_uri_with_a_query_is_progress(place: Path) -> None:
    (place / "run.json").write_text('{"steps": 7, "checkpoint": "s3://step_9/r-1/step_00000005?region=x"}')
    assert guardian._progress(place) == (7, 5)


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 120
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"no {text}"
        time.sleep(0.05)
