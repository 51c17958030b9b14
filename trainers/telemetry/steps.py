"""The numbers of all steps of a run, in columns."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from trainers.telemetry.metrics import METRICS, Metric
from trainers.telemetry.records import Step

ALWAYS = tuple(metric.name for metric in METRICS if metric.always)  # always numbers, even if they are not finite
_WHOLE = {"step", *(metric.name for metric in METRICS if metric.whole)}


class Steps(Mapping[int, Step]):
    """Step → its record without load, measures by layer and traffic, which `metrics.jsonl` has.

    It has the given metrics, and ignores other numbers of records.

    Every number takes 8 bytes. A week may have a million steps, and a million dicts would fill the memory of the driver.
    """

    def __init__(self, metrics: Sequence[Metric] = METRICS) -> None:
        self._columns = {name: array("d") for name in ("step", "time", *(metric.name for metric in metrics))}

    def take(self, record: Step) -> None:
        """Add a step that comes after all others."""
        for name, column in self._columns.items():
            value = record.get(name)
            column.append(math.nan if value is None else cast(float, value))

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`."""
        keep = bisect_left(self._columns["step"], step + 1)
        for column in self._columns.values():
            del column[keep:]

    def column(self, name: str) -> np.ndarray:
        """Return a number of all steps, in their order. It is NaN where a step has none."""
        return np.array(self._columns[name])

    @property
    def last(self) -> int:
        """The newest step; 0 without steps."""
        column = self._columns["step"]
        return int(column[-1]) if column else 0

    def __getitem__(self, step: int) -> Step:
        column = self._columns["step"]
        at = bisect_left(column, step)
        if at == len(column) or column[at] != step:
            raise KeyError(step)
        numbers = {name: self._number(name, column[at]) for name, column in self._columns.items()}
        return cast(Step, {"kind": "step", **numbers, "load": None})

    def __iter__(self) -> Iterator[int]:
        return map(int, self._columns["step"])

    def __len__(self) -> int:
        return len(self._columns["step"])

    def _number(self, name: str, value: float) -> Any:
        if math.isnan(value) and name not in ALWAYS:
            return None
        return int(value) if name in _WHOLE else value
