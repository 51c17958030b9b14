"""The planner's errors on published measurements (`rows.py`), and a fit of its constants to these measurements.

Ratios say more than single errors: what two rows of one software share and the planner does not know cancels out (`pairs`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from foldray.costs.candidate import Candidate
from foldray.costs.device import Device
from foldray.costs.hardware import constants
from foldray.costs.memory import GIB, Memory, ledger
from foldray.costs.ops import OpWork
from foldray.costs.prediction import Prediction, predict, straggling
from foldray.costs.rank import RankCosts
from foldray.costs.whole import long_step
from foldray.errors import UserError
from foldray.plan.rows import Row, thing_between

# The weight of a constant's distance from its default (a fraction of its range); the error above which a row counts less.
_PULL, _LENIENT = 0.1, 0.03
_ROUNDS = (3, 4)  # of a pipeline, which are simulated of a step that has no passes of its own; every further one takes as long


class Scored(NamedTuple):
    """A row with its predicted time and memory.

    Args:
        fits: whether the memory is enough.
        error: predicted over measured MFU, minus 1; None if the row has no measurement.
        memory_error: the same for the bytes that the allocator holds.
    """

    row: Row
    prediction: Prediction
    memory: Memory
    fits: bool
    error: float | None
    memory_error: float | None = None


def score(rows: Sequence[Row], changed: Mapping[str, float] | None = None) -> list[Scored]:
    """Predict every row. Equal candidates are predicted once."""
    known = dict[tuple[Candidate, str, tuple[tuple[str, float], ...]], Prediction]()
    scored = []
    for row in rows:
        job, hardware, device = row.candidate.job, row.hardware, Device.of(row.candidate.job, row.hardware, changed)
        key = row.candidate, hardware.name, tuple(row.constants.items())
        prediction = known.get(key) or known.setdefault(key, _predicted(row, changed))
        held = ledger(row.candidate, RankCosts(job, row.candidate.fold, device, row.candidate.micro_batch, row.candidate.zero))
        error = prediction.mfu_causal / row.mfu - 1 if row.mfu else None
        memory_error = (held.total - held.workspace) / row.memory - 1 if row.memory else None
        scored.append(Scored(row, prediction, held, held.total <= hardware.memory_gib * GIB, error, memory_error))
    return scored


def _predicted(row: Row, changed: Mapping[str, float] | None) -> Prediction:
    """Return the prediction of a row. A step that does not consist of passes of stages is simulated op by op, without shares."""
    candidate, job, world = row.candidate, row.candidate.job, row.candidate.fold.world_size
    changed = {**row.constants, **(changed or {})}
    if candidate.ordering.of_stages:
        return predict(candidate, row.hardware, changed)
    device = Device.of(job, row.hardware, changed)

    def work_of(count: int) -> OpWork:
        return OpWork(candidate.with_passes(count), device)

    step = long_step(work_of, candidate.micro_batches, candidate.fold.pp, _ROUNDS)
    seconds = step.seconds * (1 + straggling(world, device))
    rate = seconds * world * device.peak
    return Prediction(seconds, {}, {}, job.flops[0] / rate, job.flops[1] / rate)


class Pair(NamedTuple):
    """Two measured rows of one stack that differ in one thing (`rows.THINGS`).

    Args:
        published, predicted: speed of the second over that of the first, in tokens.
        priced: whether the planner has a price for what differs.
    """

    first: Scored
    second: Scored
    thing: str
    published: float
    predicted: float
    priced: bool

    @property
    def error(self) -> float:
        """Predicted over published ratio, minus 1."""
        return self.predicted / self.published - 1


def pairs(scored: Sequence[Scored]) -> list[Pair]:
    """Return all pairs of measured rows that differ in one thing, in their order."""
    found = []
    for first, second in itertools.combinations([result for result in scored if result.row.mfu], 2):
        if (thing := thing_between(first.row, second.row)) is None:
            continue
        published, predicted = (_speed(second, way) / _speed(first, way) for way in (True, False))
        priced = thing not in {*first.row.unpriced, *second.row.unpriced}
        found.append(Pair(first, second, thing, published, predicted, priced))
    return found


def _speed(result: Scored, published: bool) -> float:
    """Return the tokens per second of a GPU."""
    row = result.row
    job, peak = row.candidate.job, row.hardware.peak(row.candidate.job.dtype)
    share = (row.mfu or 0.0) if published else result.prediction.mfu_causal
    return share * peak * job.global_batch * job.seq_len / job.flops[0]


def median_errors(found: Sequence[Pair]) -> dict[str, float]:
    """Return the median of the absolute errors of priced pairs, over all of them ("overall") and by thing."""
    errors: dict[str, list[float]] = {"overall": []}
    for pair in found:
        if pair.priced:
            errors["overall"].append(abs(pair.error))
            errors.setdefault(pair.thing, []).append(abs(pair.error))
    return {name: median(of_thing) for name, of_thing in errors.items() if of_thing}


def mape(scored: Sequence[Scored]) -> dict[str, float]:
    """Return the mean absolute error of MFU, as a fraction, over all rows ("overall") and by method."""
    errors: dict[str, list[float]] = {"overall": []}
    for result in scored:
        if result.error is not None:
            errors["overall"].append(abs(result.error))
            errors.setdefault(result.row.method, []).append(abs(result.error))
    return {name: fmean(of_method) for name, of_method in errors.items() if of_method}


def fit(rows: Sequence[Row], near: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the values of the constants marked as fitted, within their bounds, with the smallest errors on these rows.

    The fit minimizes the squares of log(predicted MFU / measured MFU). Rows with large errors count less (soft L1). A weak
    pull keeps the constants close to their default values: so few rows would otherwise fit with meaningless constants.

    Args:
        rows: published measurements; those without MFU are ignored.
        near: constants to start from, to save time. The pull is still towards the default values.
    """
    import numpy as np
    from scipy.optimize import least_squares

    measured = [row for row in rows if row.mfu]
    if not measured:
        raise UserError("fit", "no row", "needs rows with mfu_pct")
    known = {name: constant for name, constant in constants().items() if constant.fitted}
    low, high, start = (np.array([getattr(constant, key) for constant in known.values()]) for key in ("low", "high", "value"))
    stands = (start - low) / (high - low)

    def changed(x: np.ndarray) -> dict[str, float]:
        return dict(zip(known, (low + x * (high - low)).tolist(), strict=True))

    def residuals(x: np.ndarray) -> list[float]:
        ratios = [_predicted(row, changed(x)).mfu_causal / (row.mfu or 1.0) for row in measured]
        return [*map(math.log, ratios), *(_PULL * (x - stands))]

    begin = stands if near is None else (np.array([near[name] for name in known]) - low) / (high - low)
    how = {"bounds": (0.0, 1.0), "diff_step": 1e-3, "loss": "soft_l1", "f_scale": _LENIENT, "ftol": 1e-4, "xtol": 1e-4}
    return changed(least_squares(residuals, begin.clip(0.01, 0.99), **how).x)


def left_out(rows: Sequence[Row]) -> Iterator[Scored]:
    """Predict every row with constants that are fitted to all other rows."""
    near = fit(rows)
    for row in rows:
        yield from score([row], fit([each for each in rows if each is not row], near))
