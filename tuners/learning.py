"""What a study's measurements say about the planner's picture of a cluster."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from foldray.errors import UserError
from foldray.planner.candidate import Candidate
from foldray.planner.hardware import Hardware, constants
from foldray.planner.prediction import predict
from tuners.space import candidate, changed
from tuners.study import Outcome

_KNOBS = ("gemm", "attention", "exchange", "inter", "intra", "memory")
_MOST = 4.0  # times a constant may be wrong
_PULL = 0.05  # towards what the file says: a few settings tell little about most knobs


def learnt(hardware: Hardware, outcome: Outcome, path: Path) -> Path:
    """Write the hardware file anew, with the constants that make the measured steps' errors smallest.

    Raises:
        UserError: nothing was measured, or the file cannot be written.
    """
    told = [(candidate(changed(outcome.table.recipe, outcome.table.row(each.params))), float(each.user_attrs["seconds"]))
            for each in outcome.trials if each.user_attrs.get("seconds")]  # fmt: skip
    if not told:
        raise UserError("tune.learn", path, "needs a trial that was measured")
    better = fitted(hardware, told)
    about = f"{hardware.about}; corrected by {len(told)} measured settings".lstrip("; ")
    given = better.model_copy(update={"about": about}).model_dump(mode="json")
    try:
        path.write_text(yaml.safe_dump(given, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise UserError("tune.learn", path, f"cannot be written ({error.strerror or error})") from None
    return path


def fitted(hardware: Hardware, told: list[tuple[Candidate, float]]) -> Hardware:
    """The hardware whose predictions are nearest to measured seconds, by their logarithms."""
    from scipy.optimize import least_squares

    start = {name: hardware.constants.get(name, constants()[name].value) for name in _KNOBS}

    def changed_by(x: np.ndarray) -> Hardware:
        values: dict[str, Any] = {name: value * math.exp(each) for (name, value), each in zip(start.items(), x, strict=True)}
        return hardware.model_copy(update={"constants": {**hardware.constants, **values}})

    def residuals(x: np.ndarray) -> list[float]:
        machines = changed_by(x)
        errors = [math.log(predict(each, machines).seconds / seconds) for each, seconds in told]
        return [*errors, *(_PULL * x)]

    bound = math.log(_MOST)
    found = least_squares(residuals, np.zeros(len(start)), bounds=(-bound, bound), diff_step=1e-3, loss="soft_l1", f_scale=0.05)
    return changed_by(found.x)
