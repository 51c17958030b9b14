"""Training on Ray: the trainer, the worker's loop, engines, data, checkpoints, tracking; and a trained model in one process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainers.quiet import turn_off

if TYPE_CHECKING:
    from trainers.driver.disaggregated import DisagTrainer
    from trainers.driver.trainer import FoldTrainer
    from trainers.faults.attempts import FailureKind
    from trainers.inference.folded import FoldedModel
    from trainers.inference.model import Model
    from trainers.telemetry.metrics import Metric

turn_off()  # before Ray, MLflow or transformers are imported

__all__ = ["DisagTrainer", "FailureKind", "FoldTrainer", "FoldedModel", "Metric", "Model"]


def __getattr__(name: str) -> Any:
    # Importing Ray takes seconds. A program that uses another part of this package does not wait for it.
    if name in __all__:
        rooms = {
            "Model": "inference.model",
            "FoldedModel": "inference.folded",
            "Metric": "telemetry.metrics",
            "FailureKind": "faults.attempts",
            "FoldTrainer": "driver.trainer",
            "DisagTrainer": "driver.disaggregated",
        }
        return getattr(importlib.import_module(f"trainers.{rooms[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
