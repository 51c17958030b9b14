"""The planner's predictions for all rows of a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from foldray.costs.apart import ApartWork, Sides
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware
from foldray.costs.memo import Memo
from foldray.costs.memory import ledger
from foldray.costs.ops import OpWork
from foldray.orders import AUTO
from foldray.plan.listed import step_seconds
from foldray.plan.placing import apart_seconds
from foldray.refold import as_candidate
from tuners.space import Setting, Settings, apply_setting

_MOST_SIMULATED = 500  # rows; for a larger table the planner simulates parts of steps, which is faster and less exact


class Predictions(NamedTuple):
    """The seconds of a step and the bytes of the fullest rank, by the index of the row."""

    seconds: list[float]
    peak_bytes: list[float]

    def fastest(self, count: int, among: Iterable[int]) -> list[int]:
        """Return the indices of the rows with the shortest predicted steps among some, the fastest first."""
        return sorted(among, key=self.seconds.__getitem__)[:count]


def predict_rows(table: Settings, hardware: Hardware, on_row: Callable[[int], None] = lambda done: None) -> Predictions:
    """Predict the step time and the memory of every row.

    `on_row` is called before every row and at the end, with the number of predicted rows.
    """
    seconds, peak_bytes = [], []
    shared_by_dispatch = defaultdict[str, Memo](Memo)  # the costs of a job; what its tokens travel for belongs to the job
    for number, row in enumerate(table.rows):
        on_row(number)
        candidate = as_candidate(apply_setting(table.recipe, row))
        device = Device.of(candidate.job, hardware)
        if candidate.fold.disjoint:
            apart = ApartWork(candidate, Sides(device, device))
            seconds.append(apart_seconds(apart))
            peak_bytes.append(max(side.total for side in apart.memory()))
            continue
        shared = shared_by_dispatch[candidate.job.dispatch]
        peak_bytes.append(ledger(candidate, OpWork(candidate, device, memo=shared).rank).total)
        seconds.append(step_seconds(candidate, device, shared, whole=len(table.rows) <= _MOST_SIMULATED))
    on_row(len(table.rows))
    return Predictions(_with_choice(table, seconds), peak_bytes)


def _with_choice(table: Settings, seconds: list[float]) -> list[float]:
    """Return the seconds with those of `auto`: the least of all rows that differ from it in their order alone."""

    def but_order(row: Setting) -> Setting:
        return row._replace(kind="", degree=1, slicing="", batch_degree=1, attention_degree=1)

    least: dict[Setting, float] = {}
    for row, of_row in zip(table.rows, seconds, strict=True):
        least[but_order(row)] = min(of_row, least.get(but_order(row), of_row))
    return [least[but_order(row)] if row.kind == AUTO.name else of_row for row, of_row in zip(table.rows, seconds, strict=True)]
