"""An activation that fails on the step that a file names, with errors as users make them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from foldray.activations import Activation
from tests.trainers.powercap import FOLDER, use


class Odd(Exception):
    """An error that cannot be unpickled, because its constructor takes other arguments than it passes on."""

    def __init__(self, left: int, right: int):
        super().__init__(f"{left} is not {right}")


def fail_at(up_NW: Tensor) -> Tensor:
    """Square the values. The file FAULTY has the kind of error, and the number of the training step that it comes in.

    Each rank uses a processor of its own: rank r takes r + 1 joules for a call.
    """
    if FOLDER:
        rank = torch.distributed.get_rank()
        use(Path(FOLDER), rank, rank + 1)
    gate_NF, value_NF = up_NW.chunk(2, -1)
    found = Path(os.environ.get("FAULTY", "/nowhere"))
    if found.exists() and torch.is_grad_enabled():
        kind, left = found.read_text().split()
        seen = getattr(fail_at, "seen", 0) + 1
        fail_at.seen = seen  # type: ignore[attr-defined]
        if seen > int(left):
            raise {"value": ValueError("squares are out"), "odd": Odd(1, 2)}[kind]
    return gate_NF.relu().square() * value_NF


FAULTY = Activation("faulty", True, "tests.trainers.driver.faulty:fail_at")
