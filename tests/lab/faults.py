"""`FAULTS`: the table of what goes wrong with trainings on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.lab.hurt import Fault, Hurt


def _flag(name: str) -> Callable[[Hurt], object]:
    return lambda hurt: (hurt.folder / name).touch()


def _unflag(name: str) -> Callable[[Hurt], object]:
    return lambda hurt: (hurt.folder / name).unlink()


def _spike(hurt: Hurt) -> None:
    """Let the loss spike when it falls slowly. As long as it falls fast, no loss stands out."""
    while hurt.last_step < 90:
        time.sleep(0.05)
    (hurt.folder / "spike").touch()


def _damaged(damage: Callable[[Hurt], object]) -> Callable[[Hurt], object]:
    """Damage the newest of at least two checkpoints, then kill a worker, so that training needs one."""

    def happen(hurt: Hurt) -> None:
        while len(hurt.checkpoints) < 2:
            time.sleep(0.05)
        damage(hurt)
        hurt.kill_rank(1)

    return happen


def _truncate(hurt: Hurt) -> None:
    _halve(hurt.newest)


def _truncate_all(hurt: Hurt) -> None:
    for folder in hurt.checkpoints:
        _halve(folder)


def _halve(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)


def _flip(hurt: Hurt) -> None:
    file = next(hurt.newest.glob("*.distcp"))
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))


def _fill(name: str) -> Callable[[Hurt], object]:
    def happen(hurt: Hurt) -> None:
        with suppress(OSError), (hurt.folder / name / "filled").open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()

    return happen


def _lock(hurt: Hurt) -> None:
    database = sqlite3.connect(hurt.folder / "storage" / "mlflow.db", timeout=60)
    database.execute("BEGIN EXCLUSIVE")
    hurt.kept.append(database)


_LOST = r"the process of rank 1 on \S+ ended|connections .* broke"
_FULL = r"No space left on device|disk of Ray's files is full"
_SILENT = r"MLflow at .* fails"
_GONE = r"the process of the training was lost"
FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("a worker is killed", lambda hurt: hurt.kill_rank(1), _LOST),
        Fault("rank 0 is killed", lambda hurt: hurt.kill_rank(0), r"rank 0 on \S+ ended|connections .* broke"),
        Fault("both workers are killed", lambda hurt: hurt.kill_rank(0, 1), r"ranks? [01].* ended|connections"),
        Fault("a worker stands still", lambda hurt: hurt.kill_rank(1, sign=signal.SIGSTOP), r"rank 1 showed no sign of life"),
        Fault("Ray Train's controller is killed", lambda hurt: hurt.kill("TrainController"), r"process of Ray Train .* was lost"),
        Fault("the queue of records is killed", lambda hurt: hurt.kill("Mail"), None),
        Fault("the driver is killed", lambda hurt: os.kill(hurt.driver, signal.SIGKILL), _GONE),
        Fault("Ray's node process is killed", lambda hurt: hurt.kill("raylet"), _GONE),
        Fault("Ray's head process is killed", lambda hurt: hurt.kill("gcs_server"), _GONE),
        Fault("Ctrl-C", lambda hurt: hurt.process.send_signal(signal.SIGINT), r"stopped after step|interrupted", False, 130),
        Fault("SIGTERM", lambda hurt: hurt.process.send_signal(signal.SIGTERM), r"stopped after step|interrupted", False, 143),
        Fault("the checkpoint is truncated", _damaged(_truncate), r"is damaged: \S+ has \d+ bytes", moments=("step", "saving")),
        Fault("all checkpoints are truncated", _damaged(_truncate_all), r"has no undamaged checkpoint", False, moments=("step",)),
        Fault("a bit of the checkpoint flips", _damaged(_flip), r"is damaged: .* other bytes", moments=("step", "saving")),
        Fault(
            "the checkpoint is deleted",
            _damaged(lambda hurt: shutil.rmtree(hurt.newest)),
            r"is damaged: its folder does not exist|its checkpoint_manager_snapshot",
            moments=("step", "saving"),
        ),
        Fault(
            "Ray's list of checkpoints is cut off",
            _damaged(lambda hurt: (hurt.newest.parent / "checkpoint_manager_snapshot.json").write_text("{")),
            r"checkpoint_manager_snapshot\.json cannot be read|" + _LOST,
            moments=("step", "saving"),
        ),
        Fault("the temporary disk is full before workers start", _fill("tmp"), _FULL, False, moments=("begin",), small="tmp"),
        Fault("the temporary disk is full", _fill("tmp"), None, small="tmp"),
        Fault("the disk of checkpoints is full", _fill("storage"), r"No space left on device", False, small="storage"),
        Fault("a gradient is no number", _flag("nan"), r"gradient norm of \S+ weights is nan", False),
        Fault("a gradient is no number once", _flag("nan"), r"gradient norm of \S+ weights is nan", mend=_unflag("nan")),
        Fault("a gradient is zero", _flag("zero"), r"gradient norm of \S+ weights is 0", False),
        Fault(
            "the loss spikes",
            _spike,
            r"the loss is \S+, after a median",
            moments=("step",),
            mend=_unflag("spike"),
            same=False,
        ),
        Fault("an error of the user's code", _flag("raise"), r"ValueError: a fault of the user's own", False),
        Fault("MLflow's database is locked", _lock, _SILENT),
        Fault(
            "MLflow's database is deleted", lambda hurt: (hurt.folder / "storage" / "mlflow.db").unlink(missing_ok=True), _SILENT
        ),
    )
}
