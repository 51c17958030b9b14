"""Attention and experts on nodes of their own: a Ray cluster of two nodes with different labels."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.hosts import LAB, Host
from tests.lab.ray_cluster import Cluster, ray_cluster
from tests.pool import repository

pytestmark = pytest.mark.nightly(LAB)

NODES = 2
_LABELS = ("role=experts", "role=attention")  # the head node has the experts, so Ray must go by the labels
_RECIPE = repository() / "recipes" / "disaggregated.yaml"
_SHORT = ["training.stop_after=3", "training.eval_sequences=16", "fold.ep=1", "cluster.workers=2"]
_PLACED = ["placement.attention=1", "placement.experts=1", "placement.attention_nodes=role=attention"]


@pytest.fixture(scope="module")
def cluster(lab: list[Host]) -> Iterator[Cluster]:
    with ray_cluster(lab[:2], labels=_LABELS) as running:
        yield running


def submit(lab: list[Host], cluster: Cluster, storage: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "foldray", "submit", _RECIPE, "--address", cluster.address, *_SHORT, *_PLACED, *arguments]
    return lab[2].run([*command, f"cluster.storage={storage}"], timeout=400, env=cluster.env, cwd=repository())


def test_each_half_runs_on_its_nodes(lab: list[Host], cluster: Cluster, tmp_path: Path) -> None:
    done = submit(lab, cluster, tmp_path / "runs", "placement.expert_nodes=role=experts")
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = (tmp_path / "runs").glob("*/run.json")
    workers = json.loads(record.read_text())["workers"]
    assert [worker["node_ip"] for worker in workers] == [lab[1].address, lab[0].address]
    assert [bool(worker["attention"]) for worker in workers] == [True, False]


def test_nodes_that_nobody_has_are_refused_at_once(lab: list[Host], cluster: Cluster, tmp_path: Path) -> None:
    done = submit(lab, cluster, tmp_path / "runs", "placement.expert_nodes=role=nobody")
    assert done.returncode == 2
    line = "foldray: placement.expert_nodes=role=nobody: needs room for 1 on nodes with this label, but they have room for 0"
    assert any(text.startswith(line) for text in done.stdout.splitlines()), done.stdout
