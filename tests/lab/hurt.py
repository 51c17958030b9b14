"""Trainings that are hurt on purpose: what is told, how long it takes, and what is lost.

`hurt` runs a training, lets a fault happen at a moment, and returns what came of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import psutil
import yaml

from tests.trainers.driver.runs import write_texts

Moment = Literal["begin", "start", "step", "saving"]
MOMENTS: tuple[Moment, ...] = ("start", "step", "saving")
STEPS, EVERY, TIMEOUT = 120, 10, 20
RECIPE: dict[str, Any] = {
    "name": "hurt",
    "model": {
        "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn_hidden": 256, "experts": 8, "topk": 2,
        "expert_hidden": 768, "vocab": 264, "ffn": "hurting:ACTIVATION",
    },
    "data": {"source": "text", "seq_len": 64, "validation": {"fraction": 0.3}},
    "fold": {"ep": 2},
    "training": {"steps": STEPS, "global_batch": 8, "micro_batch": 2, "eval_sequences": 8, "eval_every": STEPS},
    "checkpoint": {"every": EVERY},
    "cluster": {"workers": 2, "timeout": TIMEOUT},
}  # fmt: skip

# An activation that computes silu, or hurts rank 1 if the file "nan", "zero" or "raise" exists.
HURTING = """
import os
from pathlib import Path
import torch
from foldray.activations import Activation

def act(x):
    y = torch.nn.functional.silu(x)
    place = Path(os.environ["HURT"])
    if (place / "nan").exists():
        return y * float("nan")
    if (place / "zero").exists():
        return y * 0
    if (place / "spike").exists():
        return y * -20
    if (place / "raise").exists() and torch.distributed.get_rank() == 1:
        raise ValueError("a fault of the user's own")
    return y

ACTIVATION = Activation("hurting", False, "hurting:act")
"""


@dataclass
class Hurt:
    """A training in a process of its own.

    Args:
        folder: holds the recipe, the text, the storage and the folder of temporary files.
        changes: changes of the recipe, KEY=VALUE.
        env: changes of the environment.
    """

    folder: Path
    changes: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def __enter__(self) -> Self:
        prepare(self.folder)
        self.family: set[int] = set()
        self.kept: list[Any] = []
        with (self.folder / "out").open("w") as out, (self.folder / "err").open("w") as err:
            self.process = self.start(stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        return self

    def start(self, **streams: Any) -> subprocess.Popen:
        """Start the training."""
        command = [sys.executable, "-m", "foldray", "train", "recipe.yaml", "--json", *self.changes]
        place = {"TMPDIR": str(self.temporary), "PYTHONPATH": f"{os.getcwd()}{os.pathsep}{self.folder}", "HURT": str(self.folder)}
        env = {**os.environ, **place, **self.env}
        return subprocess.Popen(command, cwd=self.folder, env=env, start_new_session=True, **streams)

    @property
    def temporary(self) -> Path:
        """The folder of temporary files."""
        return self.folder / "tmp"

    def __exit__(self, *_: object) -> None:
        self.look()
        for pid in (self.process.pid, *self.family):
            with suppress(ProcessLookupError, psutil.Error):
                if pid == self.process.pid or _is_rays(psutil.Process(pid)):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def look(self) -> dict[str, psutil.Process]:
        """Return the processes of the training by name, and remember them."""
        found: dict[str, psutil.Process] = {}
        with suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.family.add(process.pid)
                with suppress(psutil.Error):
                    found[_name(process)] = process
        return found

    @property
    def run(self) -> Path | None:
        return next((path.parent for path in (self.folder / "storage").glob("*/run.json")), None)

    @property
    def document(self) -> dict[str, Any]:
        return json.loads((self.run / "run.json").read_text()) if self.run else {}

    def records(self, kind: str, start: int = 0) -> list[dict[str, Any]]:
        """Return the records of a kind that begin after `start` bytes."""
        if not self.run or not (self.run / "metrics.jsonl").exists():
            return []
        with (self.run / "metrics.jsonl").open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
        return [record for record in map(json.loads, filter(_is_whole, lines)) if record["kind"] == kind]

    @property
    def written(self) -> int:
        """Bytes of records."""
        return (self.run / "metrics.jsonl").stat().st_size if self.run and (self.run / "metrics.jsonl").exists() else 0

    def wait_for(self, moment: str, patience: float = 400.0) -> None:
        """Wait until a moment of the training: "begin" (before workers exist), "start" (they do), "step" (in mid-run), or
        "saving"."""
        deadline = time.monotonic() + patience
        while not self._is(moment):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"the training did not come to {moment}: {self.errors[-2000:]}")
            time.sleep(0.002 if moment == "saving" and self.records_seen else 0.05)

    records_seen = False

    def _is(self, moment: str) -> bool:
        if moment == "begin":
            return self.run is not None
        if moment == "start":
            return len(self.document.get("workers", ())) == RECIPE["cluster"]["workers"]
        if not self.records_seen:
            self.records_seen = self.last_step > EVERY + 2  # the first checkpoint is written by then
            return self.records_seen and moment == "step"
        checkpoints = self.run.glob("step_*") if self.run else ()
        return any(len(list(folder.glob("manifest.*"))) < RECIPE["cluster"]["workers"] for folder in checkpoints)

    @property
    def last_step(self) -> int:
        return max((record["step"] for record in self.records("step", max(self.written - 2**16, 0))), default=0)

    def kill_rank(self, *ranks: int, sign: signal.Signals = signal.SIGKILL) -> None:
        for rank in ranks:
            os.kill(self.document["workers"][rank]["pid"], sign)

    def kill(self, name: str, sign: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the processes whose name has this part."""
        found = [process for each, process in self.look().items() if name in each]
        if not found:
            raise LookupError(f"no {name} among {sorted(self.look())}")
        for process in found:
            os.kill(process.pid, sign)

    @property
    def newest(self) -> Path:
        """The folder of the newest checkpoint that Ray lists."""
        return max(self.checkpoints)

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the checkpoints that Ray lists."""
        if self.run is None or not (file := self.run / "checkpoint_manager_snapshot.json").exists():
            return []
        return [self.run / each["checkpoint_dir_name"] for each in json.loads(file.read_text())["checkpoint_results"]]

    @property
    def driver(self) -> int:
        """The process that has joined Ray, below the one that was started."""
        return next(child.pid for child in psutil.Process(self.process.pid).children() if "foldray" in " ".join(child.cmdline()))

    def finish(self, patience: float = 240.0) -> int | None:
        """Wait for the end, and return the exit code; None if the training hangs."""
        self.look()
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return None

    @property
    def errors(self) -> str:
        return (self.folder / "err").read_text()

    def left(self, patience: float = 60.0) -> list[str]:
        """Return the names of processes of the training that still run after its end. Agents of a lost Ray need a while."""
        deadline = time.monotonic() + patience
        while True:
            alive = []
            for pid in self.family:
                with suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE and _is_rays(process):
                        alive.append(_name(process))
            if not alive or time.monotonic() > deadline:
                return sorted(alive)
            time.sleep(0.5)


def prepare(folder: Path) -> None:
    """Write the recipe and the text of a training."""
    write_texts(folder / "texts", 4000)
    for name in ("storage", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "hurting.py").write_text(HURTING)
    recipe = {**RECIPE, "data": {**RECIPE["data"], "path": str(folder / "texts" / "*.txt")}}
    recipe["cluster"] = {**RECIPE["cluster"], "storage": str(folder / "storage")}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def _name(process: psutil.Process) -> str:
    """Return a name for a process of Ray: that of its actor, or of its program."""
    words = process.cmdline() or [process.name()]
    if words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").split(".")[0].split("(")[0]
    return Path(words[0]).name if "python" not in Path(words[0]).name else " ".join(map(os.path.basename, words[1:4]))


def _is_rays(process: psutil.Process) -> bool:
    return any(word in " ".join(process.cmdline()) for word in ("ray", "foldray"))


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Args:
        name: for people.
        happen: makes it happen.
        told: pattern of what foldray has to tell, in `run.json` or on standard error; None if it needs not be told.
        goes_on: whether training has to reach its end, with the loss of an undisturbed one.
        code: the exit code, if it does not.
        mend: what happens after foldray has told of it; None for nothing.
        moments: the moments at which it can happen.
        small: whether temporary files, or the storage, are on a small disk.
        same: whether the final loss has to be the undisturbed one.
    """

    name: str
    happen: Callable[[Hurt], object]
    told: str | None
    goes_on: bool = True
    code: int = 1
    mend: Callable[[Hurt], object] | None = None
    moments: Sequence[Moment] = MOMENTS
    small: Literal["tmp", "storage"] | None = None
    same: bool = True


@dataclass(frozen=True)
class Outcome:
    """What came of a fault.

    Args:
        told: what foldray told first; empty for nothing.
        seconds: from the fault to the first new step, or to the end of a training that does not go on.
        lost: steps that ran again.
        code: the exit code; None for a training that hung.
        loss: the final loss.
        left: processes that were left over.
        wrong: what is not as it has to be, in words.
    """

    told: str
    seconds: float
    lost: int
    code: int | None
    loss: float | None
    left: Sequence[str]
    wrong: Sequence[str]


Trainings = Callable[[Literal["tmp", "storage"] | None], AbstractContextManager[Hurt]]
"""Starts a training, with a small disk for temporary files, or for the storage."""


def hurt(fault: Fault, moment: Moment, loss: float | None, trainings: Trainings) -> Outcome:
    """Run a training, and let a fault happen.

    Args:
        loss: the final loss of an undisturbed training; None if it is not known.
        trainings: starts the training.
    """
    with trainings(fault.small) as training:
        training.wait_for(moment)
        told, seconds = follow(training, fault)
        code = training.finish()
        training.kept.clear()
        steps = [record["step"] for record in training.records("step")]
        lost = len(steps) - len(set(steps))
        document, left = training.document, training.left()
        found = document.get("final_loss")
        if not told:
            told = _told(training, fault, 0, 0)
    wrong = []
    if code is None:
        wrong.append("it hung")
    if code != (0 if fault.goes_on else fault.code):
        wrong.append(f"exit code {code}")
    if fault.told and not told:
        wrong.append("it was not told")
    if fault.goes_on and fault.same and found != loss and loss is not None:
        wrong.append(f"final loss {found}")
    # A checkpoint that is under way at the fault does not count, and a damaged one costs those since the one before.
    if lost > (3 if "checkpoint" in fault.name else 2) * EVERY:
        wrong.append(f"{lost} steps lost")
    if left:
        wrong.append(f"left over: {', '.join(left)}")
    return Outcome(told, seconds, lost, code, found, left, wrong)


def follow(training: Hurt, fault: Fault, patience: float = 240.0) -> tuple[str, float]:
    """Let a fault happen. Wait until it is told and training has gone on, or has ended. Mend it when it is told.

    Returns:
        What foldray told, and the seconds that passed.
    """
    known = len(training.document.get("failures", ())), len(training.errors)
    began = time.monotonic()
    fault.happen(training)
    told, mended, written = "", fault.mend is None, training.written
    while time.monotonic() - began < patience and training.process.poll() is None:
        if not told and (told := _told(training, fault, *known)):
            written = training.written  # until then, other ranks may have ended a step that they had begun
        if told and not mended and fault.mend is not None:
            fault.mend(training)
            mended, written = True, training.written
        if (told or fault.told is None) and fault.goes_on and len(training.records("step", written)) > 1:
            break
        time.sleep(0.1)
    return told, time.monotonic() - began


def _told(training: Hurt, fault: Fault, failures: int, errors: int) -> str:
    """Return the line in which foldray has told of a fault, after so many failures and characters of standard error."""
    told = [str(failure["what"]) for failure in training.document.get("failures", ())[failures:]]
    ours = ("foldray:", "run hurt-", "hurt-", "checkpoint ", "MLflow at ")  # not those of Ray or of MLflow itself
    lines = [*told, *(line for line in training.errors[errors:].splitlines() if line.startswith(ours))]
    return next((line for line in lines if fault.told and re.search(fault.told, line)), "")


@contextmanager
def here(small: str | None = None) -> Iterator[Hurt]:
    """Train on this machine."""
    with place(small) as folder, Hurt(folder) as training:
        yield training


@contextmanager
def place(small: str | None) -> Iterator[Path]:
    """Make a folder for a training. A small disk holds three checkpoints of it."""
    folder = Path(tempfile.mkdtemp(prefix="hurt-", dir="/tmp"))
    try:
        if small:
            (folder / small).mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(folder / small)], check=True)
        yield folder
    finally:
        if small:
            subprocess.run(["umount", "-l", str(folder / small)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def undisturbed(trainings: Trainings) -> float:
    """Return the final loss of a training that nothing hurts."""
    with trainings(None) as training:
        if training.finish() != 0:
            raise RuntimeError(f"the undisturbed training failed: {training.errors[-2000:]}")
        return float(training.document["final_loss"])
