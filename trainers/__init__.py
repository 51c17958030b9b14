"""Training on Ray: the trainer, the worker's loop, engines, data, checkpoints, tracking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.driver.trainer import DisagTrainer, FoldTrainer

__all__ = ["DisagTrainer", "FoldTrainer"]


def __getattr__(name: str) -> Any:
    # Importing Ray takes seconds. A program that uses another part of this package does not wait for it.
    if name in __all__:
        from trainers.driver import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
