"""Trainings whose storage is a server of S3: they go on under another fold, and end with one line if the server is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pool import repository
from tests.s3 import ENVIRONMENT, NO_MOTO, S3, moto_server, s3_server
from tests.trainers.driver.runs import MODEL, write_texts
from trainers.telemetry.history import History

pytestmark = [
    pytest.mark.nightly("trainings that write to a store"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(moto_server() is None, reason=NO_MOTO),
]

RECIPE: dict[str, Any] = {
    "name": "s3",
    "model": MODEL,
    "data": {"source": "text", "path": "texts/*.txt", "seq_len": 32, "validation": {"fraction": 0.3}},
    "fold": {"ep": 2},
    "engine": {"kind": "torch"},
    "training": {"steps": 12, "global_batch": 8, "micro_batch": 4, "eval_sequences": 8, "eval_every": 12},
    "checkpoint": {"every": 4},
    "cluster": {"workers": 2},
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_texts(tmp_path / "texts")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    with s3_server() as server:
        server.files().create_dir("bucket")
        yield server


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a training in the folder, with a Ray of its own."""
    command = [sys.executable, "-m", "foldray", "train", "recipe.yaml", *arguments]
    env = {**os.environ, "PYTHONPATH": str(repository())}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=place, env=env, **streams)


def losses(folder: Path) -> dict[int, float | None]:
    return {step: record["loss"] for step, record in History.read(folder / "metrics.jsonl").steps.items()}


def test_a_training_in_s3_goes_on_under_another_fold(place: Path, s3: S3) -> None:
    storage = f"cluster.storage=s3://bucket/runs{s3.options}"
    told, said = start(place, storage, "training.stop_after=6", "--json").communicate(timeout=200)
    run = json.loads(told)
    assert run["checkpoint"] == f"s3://bucket/runs/{run['run_id']}/step_00000006{s3.options}", said
    names = [info.base_name for info in s3.files().get_file_info(_all(f"bucket/runs/{run['run_id']}"))]
    assert {"step_00000004", "step_00000006", "recipe.yaml"} <= set(names)
    again = start(place, storage, "--resume", run["run_id"], "fold.ep=1", "fold.tp=2", "--json")
    told, said = again.communicate(timeout=200)
    assert again.returncode == 0, said
    whole = json.loads(start(place, f"cluster.storage={place / 'alone'}", "--json").communicate(timeout=200)[0])
    found, expected = losses(place / "runs" / run["run_id"]), losses(Path(whole["run_dir"]))
    assert found.keys() == expected.keys() == set(range(1, 13))
    assert [found[step] for step in expected] == pytest.approx(list(expected.values()), abs=1e-4)
    damaged = f"bucket/runs/{run['run_id']}/step_00000012/.metadata"
    with s3.files().open_output_stream(damaged) as file:
        file.write(b"cut")
    refused = start(place, storage, "--resume", run["run_id"], "training.steps=14")
    said = refused.communicate(timeout=200)[1]
    assert "checkpoint step_00000012 is damaged" in said
    assert refused.returncode == 0, said


def test_a_server_that_is_gone_ends_a_training_with_one_line(place: Path, s3: S3) -> None:
    process = start(place, f"cluster.storage=s3://bucket/runs{s3.options}", "training.steps=100000")
    deadline = time.monotonic() + 200
    while not any("step_" in info.path for info in s3.files().get_file_info(_all("bucket"))):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.5)
    s3.process.kill()
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 1
    (line,) = [line for line in said.splitlines() if line.startswith("foldray: training failed")]
    assert "s3" in line.lower() or "storage" in line, line


def test_a_server_that_is_not_there_is_refused_at_once(place: Path, s3: S3) -> None:
    s3.process.kill()
    process = start(place, f"cluster.storage=s3://bucket/runs{s3.options}")
    said = process.communicate(timeout=600)[1]
    assert process.returncode == 2
    assert said.startswith("foldray: cluster.storage=s3://bucket/runs"), said
    assert said.count("\n") == 1


def _all(path: str) -> Any:
    from pyarrow.fs import FileSelector

    return FileSelector(path, recursive=True, allow_not_found=True)
