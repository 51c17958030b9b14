"""The planner's errors on published measurements, and a fit of its constants to these measurements.

A row leaves some settings open. They are assumed as the experiments of MoE Parallel Folding state or suggest: blocks run one
after another, interleaved 1F1B with one block per virtual stage, bf16, capacity factor 1 and balanced experts, no
recomputation, micro-batches of one sequence, gradients reduced in buckets during backward.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from foldray.blueprint import ModelSpec
from foldray.costs.candidate import Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware, constants
from foldray.costs.memory import GIB, Memory, ledger
from foldray.costs.prediction import Prediction, predict
from foldray.costs.rank import RankCosts
from foldray.errors import UserError
from foldray.files import read_text
from foldray.fold import Fold, divisors
from foldray.graph import PipelineGraph, Reduction
from foldray.orders import Ordering

METHODS: dict[str, dict[str, int]] = {
    "FSDP": {"zero": 3, "ep": 1},
    "FSDP + EP": {"zero": 3},
    "TP + EP + DP": {"zero": 1},
    "MCore": {"zero": 1},
    "MCore w/ Folding": {"zero": 1},
}
"""Method → the values that its name implies: the stage of ZeRO, and ep if it does not come from the row."""

# The weight of a constant's distance from its default (a fraction of its range); the error above which a row counts less.
_PULL, _LENIENT = 0.1, 0.03

_MOST = {"seq_len": 2**24, "gbs": 2**20}  # larger sizes would exhaust the machine

COLUMNS = ("row_id", "model", "method", "gpus", "seq_len", "gbs", "cp", "tp", "ep", "pp", "etp_effective", "mfu_pct")


class Row(NamedTuple):
    """A published measurement.

    Args:
        name: the row's `row_id`.
        method: a name of `METHODS`.
        mfu: model FLOPs over peak, from 0 to 1; None if the file has no measurement.
    """

    name: str
    method: str
    candidate: Candidate
    mfu: float | None


def read_rows(path: Path) -> list[Row]:
    """Read published measurements from a CSV file with the columns `COLUMNS`. `mfu_pct` may be empty."""
    reader = csv.DictReader(io.StringIO(read_text("score", path), newline=""))
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise UserError("score", str(path), f"has no column {missing[0]}", COLUMNS)
    try:
        return [_checked_row(fields) for fields in reader]
    except csv.Error as error:
        raise UserError("score", str(path), f"is not a table in CSV (line {reader.line_num}: {error})") from None


def _checked_row(fields: dict[str, str | None]) -> Row:
    """Return a row. A UserError names the row."""
    try:
        return _row({key: value or "" for key, value in fields.items()})
    except UserError as error:
        raise UserError(f"{fields['row_id']}: {error.field}", error.value, error.rule, error.legal) from None


def _row(fields: dict[str, str]) -> Row:
    name, method = fields["row_id"], fields["method"]
    if method not in METHODS:
        raise UserError("method", method, "is no known method", METHODS)
    numbers = {key: _whole(key, fields[key]) for key in ("gpus", "seq_len", "gbs", "cp", "tp", "ep", "pp", "etp_effective")}
    how = METHODS[method]
    model = ModelSpec.model_validate({"preset": fields["model"]})
    tp, cp, pp, etp = (numbers[key] for key in ("tp", "cp", "pp", "etp_effective"))
    fold = Fold(numbers["gpus"], tp, cp, pp, how.get("ep", numbers["ep"]), etp)
    job = Job(model, numbers["seq_len"], numbers["gbs"])
    # One block per stage, where Megatron's interleaved schedule can run at all.
    interleaved = pp > 1 and pp in divisors(model.layers) and PipelineGraph(pp, max(1, job.global_batch // fold.dp)).full_rounds
    virtual = model.layers // pp if interleaved else 1
    candidate = Candidate(job, fold, Ordering(reduction=Reduction("buckets")), 1, virtual, how["zero"])
    return Row(name, method, candidate, _share(fields["mfu_pct"]))


def _whole(key: str, text: str) -> int:
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > 9 or not 1 <= int(digits) <= _MOST.get(key, 2**17):
        raise UserError(key, text, f"must be a whole number, at least 1 and at most {_MOST.get(key, 2**17)}")
    return int(digits)


def _share(text: str) -> float | None:
    if not text.strip():
        return None
    try:
        share = float(text) / 100
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise UserError("mfu_pct", text, "must be a percentage above 0, at most 100")
    return share


class Scored(NamedTuple):
    """A row with its predicted time and memory, whether it fits into memory, and the relative error of the predicted MFU.

    The error is predicted MFU over measured MFU, minus 1; None if the row has no measurement.
    """

    row: Row
    prediction: Prediction
    memory: Memory
    fits: bool
    error: float | None


def score(rows: Sequence[Row], hardware: Hardware, changed: Mapping[str, float] | None = None) -> list[Scored]:
    """Predict every row."""
    scored = []
    for row in rows:
        prediction = predict(row.candidate, hardware, changed)
        job, device = row.candidate.job, Device.of(row.candidate.job, hardware, changed)
        held = ledger(row.candidate, RankCosts(job, row.candidate.fold, device, row.candidate.micro_batch, row.candidate.zero))
        error = prediction.mfu_causal / row.mfu - 1 if row.mfu else None
        scored.append(Scored(row, prediction, held, held.total <= hardware.memory_gib * GIB, error))
    return scored


def mape(scored: Sequence[Scored]) -> dict[str, float]:
    """Return the mean absolute error of MFU, as a fraction, over all rows ("overall") and by method."""
    errors: dict[str, list[float]] = {"overall": []}
    for result in scored:
        if result.error is not None:
            errors["overall"].append(abs(result.error))
            errors.setdefault(result.row.method, []).append(abs(result.error))
    return {name: fmean(of_method) for name, of_method in errors.items() if of_method}


def fit(rows: Sequence[Row], hardware: Hardware, near: Mapping[str, float] | None = None) -> dict[str, float]:
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
        ratios = [predict(row.candidate, hardware, changed(x)).mfu_causal / (row.mfu or 1.0) for row in measured]
        return [*map(math.log, ratios), *(_PULL * (x - stands))]

    begin = stands if near is None else (np.array([near[name] for name in known]) - low) / (high - low)
    how = {"bounds": (0.0, 1.0), "diff_step": 1e-3, "loss": "soft_l1", "f_scale": _LENIENT, "ftol": 1e-4, "xtol": 1e-4}
    return changed(least_squares(residuals, begin.clip(0.01, 0.99), **how).x)


def left_out(rows: Sequence[Row], hardware: Hardware) -> Iterator[Scored]:
    """Predict every row with constants that are fitted to all other rows."""
    near = fit(rows, hardware)
    for row in rows:
        yield from score([row], hardware, fit([each for each in rows if each is not row], hardware, near))
