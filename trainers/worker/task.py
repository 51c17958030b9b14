"""The function that Ray runs on every worker.

Its module imports nothing else, because Ray's controller imports it as well, and training waits for the controller.
"""

from __future__ import annotations

from typing import Any


def train_on_worker(config: dict[str, Any]) -> dict[str, Any]:
    """Run `train_loop`, and make its exceptions fit to travel.

    A damaged checkpoint becomes a result with the name of the file, because it is no fault of the workers.
    """
    from trainers.checkpoints.stored import DamagedCheckpoint
    from trainers.faults.causes import sendable
    from trainers.worker.loop import train_loop

    try:
        return train_loop(config)
    except DamagedCheckpoint as error:
        return {"damaged": (error.path, error.file, error.what)}
    except Exception as error:
        raise sendable(error) from None
