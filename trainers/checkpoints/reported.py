"""Ray's list of a run's checkpoints: read without trust, and written anew.

Ray Train keeps a list of a run's checkpoints in the run's storage, and gives the newest of them to the workers. It fails at a
list that it cannot read, and at a listed checkpoint that is missing. It deletes the oldest ones by the list. So foldray
chooses the checkpoints itself, and writes the list before every attempt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import ray
from pydantic import Field, TypeAdapter

from trainers.folders import Checked, DamagedFile, Folder, read_json

LIST = "checkpoint_manager_snapshot.json"
STEP = re.compile(r"step_[0-9]{8,12}")


class _Listed(Checked):
    checkpoint_dir_name: Annotated[str, Field(pattern=rf"^{STEP.pattern}$")]  # Ray would delete a folder of any name
    metrics: dict[str, Any]


class _List(Checked):
    """The parts of the list that foldray keeps."""

    checkpoint_results: list[_Listed]


_TYPE = TypeAdapter(_List)


def step_of(name: str) -> int:
    """Return the number of finished steps in the name of a checkpoint's folder; -1 for any other name."""
    return int(name.removeprefix("step_")) if STEP.fullmatch(name) else -1


def steps(run: Folder) -> list[str]:
    """Return the names of the checkpoints' folders of a run, the newest first, whether Ray lists them or not."""
    return sorted(filter(STEP.fullmatch, run.names() or ()), key=step_of, reverse=True)


def listed(run: Folder) -> set[str]:
    """Return the names of the checkpoints that Ray knows. They have been complete. A damaged list raises DamagedFile."""
    return {entry.checkpoint_dir_name for entry in _entries(run)}


def write_list(run: Folder, names: Sequence[str]) -> None:
    """Make these checkpoints the ones that Ray knows. The one with the most steps is the newest.

    The metrics and the order of checkpoints that are already in the list stay.
    """
    before = dict[str, dict[str, Any]]()
    with suppress(DamagedFile):
        before = {entry.checkpoint_dir_name: entry.metrics for entry in _entries(run)}
    order = [name for name in before if name in names] + sorted(set(names) - before.keys(), key=step_of)
    by_step = sorted(order, key=step_of)
    metrics = {name: before.get(name, {"step": step_of(name)}) for name in order}
    results = {name: {"version": 0, "checkpoint_dir_name": name, "metrics": metrics[name]} for name in order}
    document = {
        "ray_version": ray.__version__,
        "checkpoint_results": list(results.values()),
        "checkpoint_report_indices": [by_step.index(name) for name in order],
        "latest_checkpoint_result": results[by_step[-1]] if by_step else None,
        "pending_training_results": [],
        "pending_validation_specs": [],
        "current_report_index": len(results),
        "validated_checkpoint_dir_names": [],
        "timed_out_validation_checkpoint_dir_names": [],
        "failed_validation_checkpoint_dir_names": [],
    }
    run.write(LIST, json.dumps(document).encode())


def _entries(run: Folder) -> list[_Listed]:
    return read_json(run, LIST, _TYPE).checkpoint_results if LIST in (run.names() or ()) else []
