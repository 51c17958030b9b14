"""What is on its way between the workers and the driver. Ray runs it in a process of its own, which imports nothing else."""

from __future__ import annotations

from typing import Any


class Mail:
    """Records that workers have sent, until the driver takes them, and the driver's answer to the workers."""

    def __init__(self) -> None:
        self._records: list[Any] = []
        self._stops = False

    def put(self, records: list[Any]) -> bool:
        """Keep records of a worker. Return whether the workers are asked to stop."""
        self._records += records
        return self._stops

    def take(self, stops: bool) -> list[Any]:
        """Return all records, and forget them. `stops` says from now on whether the workers are asked to stop."""
        self._stops = stops
        taken, self._records = self._records, []
        return taken
