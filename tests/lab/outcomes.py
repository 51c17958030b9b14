"""What trainings in the lab leave in their storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def run_folder(storage: Path) -> Path:
    """Return the folder of the only run in a storage."""
    (record,) = storage.glob("*/run.json")
    return record.parent


def outcome(run: Path) -> list[tuple[Any, ...]]:
    """Return the results of every step and validation, to compare them bit by bit."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [
        (record["kind"], record["step"], record["loss"], record.get("grad_norm"), record.get("load"))
        for record in records
        if record["kind"] in ("step", "validation")
    ]
    assert len(found) == 8 + 2
    return found
