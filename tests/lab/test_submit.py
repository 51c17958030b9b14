"""The quickstart recipe on a Ray cluster of two nodes: it runs on both, from uploaded files, with bitwise equal results."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.hosts import LAB, Host
from tests.lab.outcomes import outcome, run_folder
from tests.lab.ray_cluster import PACKAGES, Cluster
from tests.pool import repository

pytestmark = pytest.mark.nightly(LAB)

NODES = 2
_FOLDRAY = [sys.executable, "-m", "foldray"]
_RECIPE = repository() / "recipes" / "quickstart.yaml"
# Two trainings may choose their orders by times otherwise (`schedule.kind: auto`), and other orders round otherwise.
_ORDER = "schedule.kind=sequential"
_SHORT = [_ORDER, "training.stop_after=8", "training.eval_every=4", "training.eval_sequences=32", "checkpoint.every=4"]
_LIMIT = 400  # seconds for one training on a busy machine

Command = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="module")
def alone(lab: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same training on one node, with its own Ray."""
    storage = tmp_path_factory.mktemp("alone")
    done = lab[2].run([*_FOLDRAY, "train", _RECIPE, *_SHORT, f"cluster.storage={storage}"], timeout=_LIMIT, cwd=repository())
    assert done.returncode == 0, done.stdout + done.stderr
    return run_folder(storage)


@pytest.fixture(scope="module")
def cluster(alone: Path, cluster: Cluster) -> Cluster:
    """The cluster, which begins when the training without it has ended."""
    return cluster


@pytest.fixture
def submit(lab: list[Host], cluster: Cluster, tmp_path: Path) -> Command:
    """A function that runs `foldray submit` on the third host, with more arguments and changes to the environment."""

    def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        overrides = [*_SHORT, f"cluster.storage={tmp_path / 'runs'}", *arguments]
        program = [*_FOLDRAY, "submit", _RECIPE, "--address", cluster.address, *overrides]
        return lab[2].run(program, timeout=_LIMIT, env={**cluster.env, **env}, cwd=repository())

    return command


def test_foldray_submit_trains_over_both_nodes(submit: Command, lab: list[Host], alone: Path, tmp_path: Path) -> None:
    done = submit("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    run = run_folder(tmp_path / "runs")
    assert json.loads(done.stdout)["run_dir"] == str(run), "standard output is one JSON document"
    _assert_one_expert_half_per_node(run, lab)
    assert outcome(run) == outcome(alone)


def test_plain_ray_job_submit_trains_what_it_uploads(lab: list[Host], cluster: Cluster, alone: Path, tmp_path: Path) -> None:
    checkout = _checkout(tmp_path / "checkout")
    ray = [Path(sys.executable).parent / "ray", "job", "submit", "--address", cluster.address, "--working-dir", "."]
    train = ["python", "-m", "foldray", "train", "recipes/quickstart.yaml", *_SHORT, f"cluster.storage={tmp_path / 'runs'}"]
    done = lab[2].run([*ray, "--", *train], timeout=_LIMIT, env=cluster.env, cwd=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    used = done.stdout.partition("foldray is ")[2].partition("\n")[0]
    assert "/working_dir_files/_ray_pkg_" in used, done.stdout
    _assert_one_expert_half_per_node(run_folder(tmp_path / "runs"), lab)
    assert outcome(run_folder(tmp_path / "runs")) == outcome(alone)


def test_more_workers_than_the_cluster_has_room_for_are_refused_at_once(submit: Command, tmp_path: Path) -> None:
    done = submit("cluster.workers=4", "training.micro_batch=4")
    line = "foldray: cluster.workers=4: the cluster has room for 2 workers of 1 CPU each on 2 node(s), placed PACK"
    assert [text.startswith(line) for text in done.stdout.splitlines()].count(True) == 1, done.stdout
    assert done.returncode == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("env", [{"RAY_AUTH_MODE": ""}, {"RAY_AUTH_TOKEN": "0" * 64}], ids=["none", "another"])
def test_a_job_without_the_clusters_token_is_refused_in_one_line(submit: Command, env: dict[str, str], tmp_path: Path) -> None:
    done = submit(**env, RAY_AUTH_TOKEN_PATH="", HOME=str(tmp_path))
    _assert_refused(done, "foldray: address=", "the cluster requires its token")


def test_joining_without_the_clusters_token_is_refused_in_one_line(lab: list[Host], cluster: Cluster, tmp_path: Path) -> None:
    train = [*_FOLDRAY, "train", _RECIPE, f"cluster.storage={tmp_path / 'runs'}", "--address", f"{lab[0].address}:6379"]
    env = {**cluster.env, "RAY_AUTH_TOKEN_PATH": "", "HOME": str(tmp_path)}
    done = lab[2].run(train, timeout=600, env=env, cwd=repository())
    _assert_refused(done, "foldray: cluster.address=", "the cluster requires its token")


def _assert_refused(done: subprocess.CompletedProcess[str], start: str, rule: str) -> None:
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(start)
    assert rule in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def _checkout(folder: Path) -> Path:
    """Copy the files that the repository uploads. The copy's foldray prints the path that it is imported from."""
    for name in (*PACKAGES, "recipes"):
        shutil.copytree(repository() / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", ".rayignore"):
        shutil.copy(repository() / name, folder)
    with (folder / "foldray" / "__init__.py").open("a") as source:
        source.write('\nprint("foldray is", __file__)\n')
    return folder


def _assert_one_expert_half_per_node(run: Path, lab: list[Host]) -> None:
    workers: list[dict[str, Any]] = json.loads((run / "run.json").read_text())["workers"]
    assert [(worker["rank"], worker["moe"]["ep"]) for worker in workers] == [(0, 0), (1, 1)]
    assert len({worker["node"] for worker in workers}) == 2
    assert {worker["node_ip"] for worker in workers} == {lab[0].address, lab[1].address}
