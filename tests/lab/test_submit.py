"""A recipe sent to a Ray cluster of two nodes: it runs over both, from what was uploaded, and changes no bit of the losses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.hosts import Host, hosts, why_not
from tests.lab.ray_cluster import PACKAGES, Cluster, ray_cluster
from tests.pool import repository

_WHY_NOT = why_not()
pytestmark = [pytest.mark.lab, pytest.mark.timeout(600), pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))]

_RECIPE = {
    "name": "lab",
    "model": {
        "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_hidden": 64, "experts": 4, "topk": 2,
        "expert_hidden": 48, "vocab": 264, "moe_every": 1,
    },
    "data": {"source": "text", "seq_len": 32, "validation": {"fraction": 0.3}},
    "fold": {"ep": 2},
    "optimizer": {"lr": 3e-3},
    "training": {"steps": 8, "global_batch": 8, "micro_batch": 2, "eval_sequences": 24},
    "checkpoint": {"every": 4},
    "cluster": {"workers": 2},
}  # fmt: skip
_LIMIT = 200.0  # seconds for a command that takes twenty where nothing else runs
_FOLDRAY = [sys.executable, "-m", "foldray"]
Command = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="module")
def lab() -> Iterator[list[Host]]:
    """Two hosts for a cluster, and one to sit at."""
    with hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    for i in range(4):
        (folder / f"{i}.txt").write_text("".join(f"{i} times {j} is {i * j}. " for j in range(2000)))
    data = _RECIPE["data"] | {"path": str(folder / "*.txt")}
    (folder / "small.yaml").write_text(yaml.safe_dump(_RECIPE | {"data": data}))
    return folder / "small.yaml"


@pytest.fixture(scope="module")
def alone(lab: list[Host], recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same recipe on one node, with a Ray of its own."""
    storage = tmp_path_factory.mktemp("alone")
    done = lab[2].run([*_FOLDRAY, "train", recipe, f"cluster.storage={storage}"], timeout=_LIMIT, cwd=repository())
    assert done.returncode == 0, done.stdout + done.stderr
    return _run_folder(storage)


@pytest.fixture(scope="module")
def cluster(lab: list[Host], alone: Path) -> Iterator[Cluster]:
    with ray_cluster(lab[:2]) as made:
        yield made


@pytest.fixture
def submit(lab: list[Host], cluster: Cluster, recipe: Path, tmp_path: Path) -> Command:
    """`foldray submit` from the third host, with some overrides and changes to the environment."""

    def command(*overrides: str, **env: str) -> subprocess.CompletedProcess[str]:
        given = [*_FOLDRAY, "submit", recipe, f"cluster.storage={tmp_path / 'runs'}", *overrides, "--address", cluster.address]
        return lab[2].run(given, timeout=_LIMIT, env=cluster.env | env, cwd=tmp_path)

    return command


def test_foldray_submit_trains_over_both_nodes(submit: Command, lab: list[Host], alone: Path, tmp_path: Path) -> None:
    done = submit()
    assert done.returncode == 0, done.stdout + done.stderr
    _assert_one_expert_half_per_node(_run_folder(tmp_path / "runs"), lab)
    assert _losses(_run_folder(tmp_path / "runs")) == _losses(alone)


def test_plain_ray_job_submit_trains_what_it_uploads(
    lab: list[Host], cluster: Cluster, recipe: Path, alone: Path, tmp_path: Path
) -> None:
    checkout = _checkout(tmp_path / "checkout", recipe)
    ray = [Path(sys.executable).parent / "ray", "job", "submit", "--address", cluster.address, "--working-dir", "."]
    train = ["python", "-m", "foldray", "train", "recipes/small.yaml", f"cluster.storage={tmp_path / 'runs'}"]
    done = lab[2].run([*ray, "--", *train], timeout=_LIMIT, env=cluster.env, cwd=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "/working_dir_files/_ray_pkg_" in done.stdout.partition("foldray is ")[2].partition("\n")[0], done.stdout
    _assert_one_expert_half_per_node(_run_folder(tmp_path / "runs"), lab)
    assert _losses(_run_folder(tmp_path / "runs")) == _losses(alone)


@pytest.mark.parametrize("token", [None, "0" * 64])
def test_without_the_clusters_token_it_is_refused_in_one_line(submit: Command, token: str | None, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(token or "")
    env = {"RAY_AUTH_TOKEN_PATH": "" if token is None else str(tmp_path / "token"), "HOME": str(tmp_path)}
    done = submit(**env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("foldray: address=")
    assert done.stderr.count("\n") == 1, done.stderr
    assert "token" in done.stderr


def test_more_workers_than_the_cluster_has_room_for_are_refused_at_once(submit: Command, tmp_path: Path) -> None:
    started = time.monotonic()
    done = submit("cluster.workers=3", "fold.ep=1", "training.global_batch=6")
    assert time.monotonic() - started < 45, "Ray alone would try to place them for a minute, and again"
    assert done.returncode != 0
    line = "foldray: cluster.workers=3: the cluster has room for 2 workers of 1 CPU each on 2 node(s), placed PACK"
    assert [text.startswith(line) for text in done.stdout.splitlines()].count(True) == 1, done.stdout
    assert not list(tmp_path.glob("runs/*"))


def _checkout(folder: Path, recipe: Path) -> Path:
    """A copy of what the repository would upload, whose foldray says where it is imported from."""
    for package in PACKAGES:
        shutil.copytree(repository() / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (".gitignore", ".rayignore"):
        shutil.copy(repository() / file, folder)
    (folder / "recipes").mkdir()
    shutil.copy(recipe, folder / "recipes")
    with (folder / "foldray" / "__init__.py").open("a") as source:
        source.write('\nprint("foldray is", __file__)\n')
    return folder


def _run_folder(storage: Path) -> Path:
    (record,) = storage.glob("*/run.json")
    return record.parent


def _assert_one_expert_half_per_node(run: Path, lab: list[Host]) -> None:
    workers: list[dict[str, Any]] = json.loads((run / "run.json").read_text())["workers"]
    assert [worker["rank"] for worker in workers] == [0, 1]
    assert [worker["moe"]["ep"] for worker in workers] == [0, 1]
    assert len({worker["node"] for worker in workers}) == 2
    assert {worker["node_ip"] for worker in workers} == {lab[0].address, lab[1].address}


def _losses(run: Path) -> list[float]:
    """Of every step, and of the validation at the end."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] in ("step", "validation")]
    assert len(losses) == _RECIPE["training"]["steps"] + 1
    return losses
