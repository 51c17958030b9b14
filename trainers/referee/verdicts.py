"""What the differences of a case mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FIGURES = ("loss", "gradient", "norm", "evaluation")
AGREES = {"float64": 1e-6, "float32": 2e-5, "float16": 2e-2}
"""Largest difference that counts as rounding, by type. Routers and losses of the projects compute in float32 at most."""
_PLACE = re.compile(r'site-packages/((?:deepspeed|transformers|torchtitan|megatron)/\S+)", line (\d+)')


def judged(found: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the verdict on a case, with its differences to one process that trains on all tokens.

    The verdict is `agrees`, `mean of ranks` (it agrees with the mean over ranks and micro-batches of the loss of each, not
    with the loss over all tokens), `differs`, or `does not run`. `remark` says in what it differs, or why it does not run.

    Args:
        found: what `comparing.compare` found, or the text of an `error`.
    """
    if "error" in found:
        return {"verdict": "does not run", "remark": told(found["error"])}
    apart = {name: _apart(found[name], AGREES[dtype]) for name in ("tokens", "means")}
    figures = {figure: found["tokens"][figure] for figure in FIGURES} | {"worst": found["tokens"]["worst"]}
    if not apart["tokens"]:
        return {"verdict": "agrees", "remark": "", **figures}
    if not apart["means"]:
        return {"verdict": "mean of ranks", "remark": "", **figures}
    closer = "means" if len(apart["means"]) < len(apart["tokens"]) else "tokens"
    remark = ", ".join(apart[closer]) + (" (to the mean of ranks)" if closer == "means" else "")
    return {"verdict": "differs", "remark": remark, **figures}


def _apart(differences: Mapping[str, Any], most: float) -> list[str]:
    """Name what differs by more than rounding. NaN differs."""
    given = {figure: differences[figure] for figure in FIGURES if differences[figure] is not None}
    large = [f"{figure} {short(value)}" for figure, value in given.items() if not value <= most]
    return large + [f"no gradient of {name}" for name in differences["missing"]]


def told(error: str) -> str:
    """Return the first line of an error's message, and the last line of the project's code before it."""
    places = _PLACE.findall(error)
    lines = [line for line in error.splitlines() if line.strip()]
    message = next((line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)), lines[-1] if lines else "no word")
    return f"{message} ({places[-1][0]}:{places[-1][1]})" if places else message


def short(value: float | None) -> str:
    """Write a difference with one digit."""
    return "" if value is None else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("0e0", "0")
