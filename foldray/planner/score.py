"""The planner held against published measurements, and its constants fitted to them.

What the publication leaves open is assumed as MoE Parallel Folding's setting says or suggests: blocks run one after another,
interleaved 1F1B with one block per virtual stage, bf16, capacity factor 1 and balance, no recomputation, micro-batches of one
sequence, gradients reduced in buckets during backward.
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
from foldray.errors import UserError
from foldray.files import read_text
from foldray.fold import Fold, divisors
from foldray.planner.candidate import Candidate, Job
from foldray.planner.costs import RankCosts
from foldray.planner.device import Device
from foldray.planner.hardware import Hardware, constants
from foldray.planner.memory import GIB, Memory, ledger
from foldray.planner.prediction import Prediction, predict
from foldray.schedule import Ordering, PipelineGraph, Reduction

METHODS: dict[str, dict[str, int]] = {
    "FSDP": {"zero": 3, "ep": 1},
    "FSDP + EP": {"zero": 3},
    "TP + EP + DP": {"zero": 1},
    "MCore": {"zero": 1},
    "MCore w/ Folding": {"zero": 1},
}
"""What a method's name settles besides its row's numbers."""

_PULL, _LENIENT = 0.1, 0.03  # of constants over their whole bounds; the error beyond which a row counts less

COLUMNS = ("row_id", "model", "method", "gpus", "seq_len", "gbs", "cp", "tp", "ep", "pp", "etp_effective", "mfu_pct")


class Row(NamedTuple):
    """A published measurement: a candidate, and its model FLOPs over peak (0…1), if the file tells."""

    name: str
    method: str
    candidate: Candidate
    mfu: float | None


def read_rows(path: Path) -> list[Row]:
    """Published measurements from a CSV file with the columns `COLUMNS`; `mfu_pct` may be empty.

    Raises:
        UserError: no such file, a column that is missing, a row that makes no sense.
    """
    reader = csv.DictReader(io.StringIO(read_text("score", path), newline=""))
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise UserError("score", str(path), f"has no column {missing[0]}", COLUMNS)
    return [_told_row(fields) for fields in reader]


def _told_row(fields: dict[str, str]) -> Row:
    """A row; whose mistake it is stands before it."""
    try:
        return _row(fields)
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
    if not text.strip().isdecimal() or int(text) < 1:
        raise UserError(key, text, "must be a whole number, at least 1")
    return int(text)


def _share(text: str) -> float | None:
    if not text.strip():
        return None
    try:
        found = float(text) / 100
    except ValueError:
        found = -1.0
    if not 0 < found <= 1:
        raise UserError("mfu_pct", text, "must be a percentage above 0, at most 100")
    return found


class Scored(NamedTuple):
    """A row, what is predicted for it, and the error of its MFU relative to what was measured."""

    row: Row
    prediction: Prediction
    memory: Memory
    fits: bool
    error: float | None


def score(rows: Sequence[Row], hardware: Hardware, changed: Mapping[str, float] | None = None) -> list[Scored]:
    """Predict every row."""
    found = []
    for row in rows:
        prediction = predict(row.candidate, hardware, changed)
        job, device = row.candidate.job, Device.of(row.candidate.job, hardware, changed)
        held = ledger(row.candidate, RankCosts(job, row.candidate.fold, device, row.candidate.micro_batch, row.candidate.zero))
        error = prediction.mfu_causal / row.mfu - 1 if row.mfu else None
        found.append(Scored(row, prediction, held, held.total <= hardware.memory_gib * GIB, error))
    return found


def mape(scored: Sequence[Scored]) -> dict[str, float]:
    """Mean absolute error of all rows, and of each method, as fractions."""
    errors: dict[str, list[float]] = {"overall": []}
    for each in scored:
        if each.error is not None:
            errors["overall"].append(abs(each.error))
            errors.setdefault(each.row.method, []).append(abs(each.error))
    return {name: fmean(each) for name, each in errors.items() if each}


def fit(rows: Sequence[Row], hardware: Hardware, near: Mapping[str, float] | None = None) -> dict[str, float]:
    """The constants marked as fitted, within their bounds, that make these rows' errors smallest.

    Least squares of the logarithms of predicted over measured, lenient with rows that are far off (soft L1), and a weak pull to
    where the constants stand: so few rows would else buy accuracy with numbers that mean nothing.

    Args:
        near: constants to start from, which saves time; they do not pull.

    Raises:
        UserError: no row has a measurement.
    """
    import numpy as np
    from scipy.optimize import least_squares

    told = [row for row in rows if row.mfu]
    if not told:
        raise UserError("fit", "no row", "needs rows with mfu_pct")
    known = {name: each for name, each in constants().items() if each.fitted}
    low, high, start = (np.array([getattr(each, key) for each in known.values()]) for key in ("low", "high", "value"))
    stands = (start - low) / (high - low)

    def changed(x: np.ndarray) -> dict[str, float]:
        return dict(zip(known, (low + x * (high - low)).tolist(), strict=True))

    def residuals(x: np.ndarray) -> list[float]:
        found = [predict(row.candidate, hardware, changed(x)).mfu_causal / (row.mfu or 1.0) for row in told]
        return [*map(math.log, found), *(_PULL * (x - stands))]

    begin = stands if near is None else (np.array([near[name] for name in known]) - low) / (high - low)
    how = {"bounds": (0.0, 1.0), "diff_step": 1e-3, "loss": "soft_l1", "f_scale": _LENIENT, "ftol": 1e-4, "xtol": 1e-4}
    return changed(least_squares(residuals, begin.clip(0.01, 0.99), **how).x)


def left_out(rows: Sequence[Row], hardware: Hardware) -> Iterator[Scored]:
    """Every row as predicted with the constants that the others give."""
    near = fit(rows, hardware)
    for row in rows:
        yield from score([row], hardware, fit([other for other in rows if other is not row], hardware, near))
