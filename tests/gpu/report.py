"""Collects what the checks on a GPU find, and shows it."""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


class Report:
    """The findings, by part and name.

    Args:
        folder: where `findings.json` goes; None writes no file.
    """

    def __init__(self, folder: Path | None):
        self.folder, self.failed = folder, 0
        self.found: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
        self._begin = time.perf_counter()

    def check(self, part: str, name: str, call: Callable[[], Any]) -> Any:
        """Call a check, and keep what it returns. If it raises, keep the error, and go on."""
        try:
            value = call()
        except Exception as error:  # the other checks run even if one fails
            value, self.failed = f"FAILED: {type(error).__name__}: {error}", self.failed + 1
            traceback.print_exc()
        self.found.setdefault(part, {})[name] = value
        self.say(f"{name}: {_shown(value)}")
        self.write()
        return value

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    def write(self) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "findings.json").write_text(json.dumps(self.found, indent=1, default=str) + "\n")


def milliseconds(call: Callable[[], Any], rounds: int = 10) -> float:
    """Return the median time of a call on the GPU, after three calls to warm up."""
    return statistics.median(in_turns([call], rounds)[0])


def in_turns(calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Return the milliseconds of each call on the GPU, round by round. The calls take turns."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: list[list[float]] = [[] for _ in calls]
    for number in range(3 + rounds):
        for call, took in zip(calls, found, strict=True):
            torch.cuda.synchronize()
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if number >= 3:
                took.append(begin.elapsed_time(end))
    return found


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        if any(isinstance(each, dict) for each in value.values()):
            return f"{len(value)} rows"
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
    return str(value)
