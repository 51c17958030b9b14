"""What is on its way between the workers and the driver. Ray runs it in a process of its own, which imports nothing else."""

from __future__ import annotations

from typing import Any

MOST = 10_000  # records that wait for a driver that takes none


class Mail:
    """Records that workers have sent, until the driver takes them, and the driver's answer to the workers.

    If the driver stands still, only the newest sign of life of each rank waits, and of the steps the newest. All other records
    are few.
    """

    def __init__(self) -> None:
        self._records: list[Any] = []
        self._beats: dict[int, Any] = {}
        self._stops = False

    def put(self, records: list[Any]) -> bool:
        """Keep records of a worker. Return whether the workers are asked to stop."""
        for record in records:
            if record["kind"] == "beat":
                self._beats[record["rank"]] = record
            else:
                self._records.append(record)
        if len(self._records) > 2 * MOST:
            steps = [number for number, record in enumerate(self._records) if record["kind"] == "step"]
            old = set(steps[: len(self._records) - MOST])
            self._records = [record for number, record in enumerate(self._records) if number not in old]
        return self._stops

    def take(self, stops: bool) -> list[Any]:
        """Return all records, and forget them. `stops` says from now on whether the workers are asked to stop."""
        self._stops = stops
        taken, self._records, self._beats = [*self._records, *self._beats.values()], [], {}
        return taken
