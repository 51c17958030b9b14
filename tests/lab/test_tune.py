"""A study on a Ray cluster of two nodes, with two trials at once, each on its own node. No setting is measured twice."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import optuna
import pytest

from tests.lab.hosts import LAB, hosts
from tests.lab.ray_cluster import ray_cluster
from tests.pool import repository
from tuners.record import TrialRecord

pytestmark = pytest.mark.nightly(LAB)

_TRIALS = 6
_SPACE = (
    "{tp: [1], cp: [1], pp: [1], ep: [1, 2], etp: [1], kind: [sequential, one_a_one_m], degree: [1, 2], sp_bytes: [null, 65536]}"
)


def test_two_trials_run_at_once_each_on_nodes_of_its_own(tmp_path: Path) -> None:
    overrides = [
        "model.layers=2", "engine.kind=torch", "data.seq_len=64", "cluster.workers=2", f"cluster.storage={tmp_path}",
        "tune.parallel=2", f"tune.trials={_TRIALS}", "tune.turns=2", "tune.steps=1", "tune.pairs=2", "tune.prune=null",
        "tune.sampler=random", f"tune.space={_SPACE}",
    ]  # fmt: skip
    with hosts(2) as lab, ray_cluster(lab, cpus=2) as cluster:
        ray = [Path(sys.executable).parent / "ray", "job", "submit", "--address", cluster.address, "--working-dir", "."]
        tune = ["python", "-m", "foldray", "tune", "recipes/quickstart.yaml", "--json", *overrides]
        done: subprocess.CompletedProcess[str] = lab[0].run([*ray, "--", *tune], timeout=400, env=cluster.env, cwd=repository())
        assert done.returncode == 0, done.stdout + done.stderr
        addresses = {host.address for host in lab}
    (folder,) = (tmp_path / "tune").iterdir()
    study = optuna.load_study(study_name=folder.name, storage=f"sqlite:///{folder}/tune.db")
    trials = study.get_trials()
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * _TRIALS
    assert len({json.dumps(trial.params, sort_keys=True) for trial in trials}) == _TRIALS, "a setting was measured twice"
    ran_on = {trial.number: TrialRecord.of_attributes(trial.user_attrs).hosts for trial in trials}
    assert all(len(hosts) == 1 for hosts in ran_on.values()), "a trial ran on two nodes"
    assert {hosts[0] for hosts in ran_on.values()} == addresses
    together = [
        (ran_on[one.number], ran_on[other.number])
        for one, other in combinations(trials, 2)
        if one.datetime_start < other.datetime_complete and other.datetime_start < one.datetime_complete
    ]
    assert together, "no two trials ran at the same time"
    assert all(one != other for one, other in together), "two trials shared a node"
    assert (folder / "best.yaml").exists()
