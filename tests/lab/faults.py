"""Trainings on this machine that are hurt on purpose: what is told, how long it takes, and what is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

STEPS, EVERY = 60, 10
RECIPE: dict[str, Any] = {
    "name": "hurt",
    "model": {
        "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn_hidden": 256, "experts": 8, "topk": 2,
        "expert_hidden": 768, "vocab": 264,
    },
    "data": {"source": "text", "seq_len": 64, "validation": {"fraction": 0.3}},
    "fold": {"ep": 2},
    "training": {"steps": STEPS, "global_batch": 8, "micro_batch": 2, "eval_sequences": 8, "eval_every": 30},
    "checkpoint": {"every": EVERY},
    "cluster": {"workers": 2, "timeout": 20},
}  # fmt: skip


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

    def __enter__(self) -> Hurt:
        prepare(self.folder)
        command = [sys.executable, "-m", "foldray", "train", "recipe.yaml", "--json", *self.changes]
        quick = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "TMPDIR": str(self.folder / "tmp"), "PYTHONPATH": os.getcwd()}
        self._out, self._err = (self.folder / "out").open("w+"), (self.folder / "err").open("w+")
        self.process = subprocess.Popen(
            command, cwd=self.folder, env={**os.environ, **quick, **self.env}, stdout=self._out, stderr=self._err,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.began = time.monotonic()
        self.family: set[int] = set()
        return self

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

    def records(self, kind: str) -> list[dict[str, Any]]:
        if not self.run or not (self.run / "metrics.jsonl").exists():
            return []
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, filter(_is_whole, lines)) if record["kind"] == kind]

    def wait_for(self, moment: str, patience: float = 180.0) -> None:
        """Wait until a moment of the training: "start" (workers exist), "step" (in mid-run), or "saving"."""
        deadline = time.monotonic() + patience
        while not self._is(moment):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"the training did not come to {moment}: {self.errors[-2000:]}")
            time.sleep(0.002 if moment == "saving" and self.records_seen else 0.05)

    records_seen = False

    def _is(self, moment: str) -> bool:
        if moment == "start":
            return len(self.document.get("workers", ())) == RECIPE["cluster"]["workers"]
        if not self.records_seen:
            self.records_seen = self.last_step > EVERY + 2
            return self.records_seen and moment == "step"
        return any((self.folder / "tmp").glob("foldray-checkpoint-*/*.distcp"))

    @property
    def last_step(self) -> int:
        return max((record["step"] for record in self.records("step")), default=0)

    def pid_of_rank(self, rank: int) -> int:
        return self.document["workers"][rank]["pid"]

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

    def left(self, patience: float = 20.0) -> list[str]:
        """Return the names of processes of the training that still run after its end."""
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
    for name in ("texts", "storage", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for i in range(4):
        (folder / "texts" / f"{i}.txt").write_text("".join(f"{i} times {j} is {i * j}. " for j in range(4000)))
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
