"""Corrects a hardware file with the measurements of a study."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from foldray.costs.candidate import Candidate
from foldray.costs.hardware import Hardware, constants
from foldray.errors import UserError
from foldray.orders import AUTO
from foldray.plan.placing import predicted_seconds
from foldray.refold import as_candidate
from trainers.measure.calibrate import write_hardware
from tuners.outcome import Outcome
from tuners.space import apply_setting

_KNOBS = ("gemm", "attention", "exchange", "inter", "intra", "memory")
_MOST_WRONG = 4.0  # a constant is corrected by at most this factor
_PULL = 0.05  # weight of the old constants, because a few settings say little about most constants


def write_corrected_hardware(hardware: Hardware, outcome: Outcome, path: Path) -> Path:
    """Write a hardware file with constants that predict the measured steps better. Return its path."""
    measured = [
        (as_candidate(apply_setting(outcome.table.recipe, outcome.table.rows[trial.row])), trial.record.seconds)
        for trial in outcome.counted
        if trial.row is not None and trial.record.seconds is not None and outcome.table.rows[trial.row].kind != AUTO.name
    ]
    if not measured:
        raise UserError("tune.learn", path, "needs a trial that was measured")
    about = f"{hardware.about}; corrected by {len(measured)} measured settings".lstrip("; ")
    write_hardware("tune.learn", path, _fitted(hardware, measured).model_copy(update={"about": about}))
    return path


def _fitted(hardware: Hardware, measured: list[tuple[Candidate, float]]) -> Hardware:
    """Fit some constants of a hardware, so that the logarithms of predicted and measured seconds are close.

    `measured` has pairs of a candidate and the measured seconds of its step.
    """
    from scipy.optimize import least_squares

    start = {name: hardware.constants.get(name, constants()[name].value) for name in _KNOBS}

    def corrected(log_factors: np.ndarray) -> Hardware:
        factors = zip(start.items(), log_factors, strict=True)
        values: dict[str, Any] = {name: value * math.exp(log_factor) for (name, value), log_factor in factors}
        return hardware.model_copy(update={"constants": {**hardware.constants, **values}})

    def residuals(log_factors: np.ndarray) -> list[float]:
        machines = corrected(log_factors)
        errors = [math.log(predicted_seconds(candidate, machines) / seconds) for candidate, seconds in measured]
        return [*errors, *(_PULL * log_factors)]

    bound = math.log(_MOST_WRONG)
    fit = least_squares(residuals, np.zeros(len(start)), bounds=(-bound, bound), diff_step=1e-3, loss="soft_l1", f_scale=0.05)
    return corrected(fit.x)
