"""Training on Ray: the trainer, the worker's loop, engines, data, checkpoints, tracking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.driver.trainer import FoldTrainer

__all__ = ["FoldTrainer"]


def __getattr__(name: str) -> Any:
    # Importing Ray takes seconds. A program that uses another part of this package does not wait for it.
    if name == "FoldTrainer":
        from trainers.driver.trainer import FoldTrainer

        return FoldTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
