"""One of four hosts is lost, and comes back: training goes on with three workers under another fold, then with four again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.hosts import LAB, Host
from tests.lab.ray_cluster import Cluster
from tests.pool import repository
from tests.trainers.driver.runs import write_texts

pytestmark = [pytest.mark.nightly(LAB), pytest.mark.timeout(1500)]

NODES = 4
STEPS = 400
RECIPE: dict[str, Any] = {
    "name": "refold",
    "precision": "float64",
    "model": {
        "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_hidden": 128, "experts": 8, "topk": 2,
        "expert_hidden": 96, "vocab": 264,
    },
    "data": {"source": "text", "seq_len": 64, "validation": {"fraction": 0.3}},
    "fold": {"ep": 4},
    "training": {"steps": STEPS, "global_batch": 16, "micro_batch": 2, "eval_sequences": 8, "eval_every": STEPS},
    "engine": {"kind": "torch", "zero": 1},
    "checkpoint": {"every": 10},
    "cluster": {"workers": 4, "min_workers": 2, "timeout": 30},
}  # fmt: skip


@pytest.fixture
def submit(lab: list[Host], cluster: Cluster, tmp_path: Path) -> Callable[..., tuple[subprocess.Popen, Path]]:
    """A function that submits the recipe, and returns the process and the folder of its runs."""
    write_texts(tmp_path / "texts", 4000)

    def start(name: str) -> tuple[subprocess.Popen, Path]:
        storage = tmp_path / name
        recipe = {**RECIPE, "data": {**RECIPE["data"], "path": str(tmp_path / "texts" / "*.txt")}}
        recipe["cluster"] = {**RECIPE["cluster"], "storage": str(storage)}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
        command = [sys.executable, "-m", "foldray", "submit", tmp_path / f"{name}.yaml", "--address", cluster.address]
        log = (tmp_path / f"{name}.log").open("w")
        options: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": repository(), "env": cluster.env}
        return lab[4].popen(command, **options), storage

    return start


def test_training_goes_on_with_the_hosts_that_are_left(
    submit: Callable, lab: list[Host], cluster: Cluster, tmp_path: Path
) -> None:
    process, storage = submit("undisturbed")
    assert process.wait(400) == 0, (tmp_path / "undisturbed.log").read_text()
    expected = _losses(storage)
    process, storage = submit("hurt")
    _wait_for(storage, process, lambda found: found["step"] >= 25, "step 25")
    lab[3].stop(patience=0.5)
    _wait_for(storage, process, lambda found: found["worlds"][-1] == 3, "three workers")
    there = _state(storage)["step"]
    _wait_for(storage, process, lambda found: found["step"] >= there + 3, "steps of three workers")
    node = cluster.start(lab[3])
    try:
        _wait_for(storage, process, lambda found: found["worlds"][-1] == 4, "four workers again")
        assert process.wait(400) == 0, (tmp_path / "hurt.log").read_text()
    finally:
        node.terminate()
    found = _losses(storage)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-9, "the same sequences in the same order"
    state = _state(storage)
    assert state["worlds"] == [4, 3, 4]
    (failure,) = state["failures"]
    assert failure["failure"] == "lost"
    assert lab[3].address in failure["what"]
    assert failure["step"] - failure["saved"] <= RECIPE["checkpoint"]["every"] + 1


def _records(storage: Path) -> list[dict[str, Any]]:
    files = list(storage.glob("*/metrics.jsonl"))
    lines = files[0].read_text().splitlines() if files else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _losses(storage: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in _records(storage) if record["kind"] == "step"}


def _state(storage: Path) -> dict[str, Any]:
    """Return the last step, the failures, and how many workers each attempt had."""
    records, worlds = _records(storage), [0]
    for record in records:
        if record["kind"] == "place":
            worlds[-1] += 1
        elif record["kind"] in ("failed", "grows"):
            worlds.append(0)
    steps = [record["step"] for record in records if record["kind"] == "step"]
    failures = [record for record in records if record["kind"] == "failed"]
    return {"step": steps[-1] if steps else 0, "failures": failures, "worlds": [world for world in worlds if world]}


def _wait_for(storage: Path, process: subprocess.Popen, is_so: Callable[[dict[str, Any]], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while True:
        state = _state(storage)
        if state["worlds"] and is_so(state):
            return
        assert process.poll() is None, f"the job ended before {what}"
        assert time.monotonic() < deadline, f"no {what}: {state}"
        time.sleep(0.3)
