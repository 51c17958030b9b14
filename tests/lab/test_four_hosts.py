"""Four hosts with a node each: the losses are those of one host, bit by bit, and a job ends when its user says so."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.hosts import LAB, Host
from tests.lab.outcomes import outcome, run_folder
from tests.lab.ray_cluster import Cluster, ray_cluster
from tests.pool import repository

pytestmark = [pytest.mark.nightly(LAB), pytest.mark.timeout(900)]

NODES = 4
_SIZES = ["cluster.workers=4", "fold.ep=4", "training.micro_batch=4"]
# Two trainings may choose their orders by times otherwise (`schedule.kind: auto`), and other orders round otherwise.
_ORDER = "schedule.kind=sequential"
_SHORT = [_ORDER, "training.stop_after=8", "training.eval_every=4", "training.eval_sequences=32", "checkpoint.every=4"]
_LIMIT = 400  # seconds for one training on a busy machine

# Where the queues of several inboxes are, and where the driver is. The nodes do not see the packages, so it brings them.
_QUEUES = """
import foldray, ray, sys, trainers
from contextlib import ExitStack
from trainers.telemetry.mailbox import Inbox
ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={"py_modules": [foldray, trainers]})
where = lambda actor: ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
with ExitStack() as stack:
    inboxes = [stack.enter_context(Inbox([])) for _ in range(4)]
    nodes = {where(inbox.queue) for inbox in inboxes}
assert nodes == {ray.get_runtime_context().get_node_id()}, nodes
"""


@pytest.fixture(scope="module")
def alone(lab: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same training on a cluster of one host."""
    storage = tmp_path_factory.mktemp("alone")
    with ray_cluster(lab[:1], cpus=4) as cluster:
        process = submit(lab, cluster, storage, *_SHORT)
        said, _ = process.communicate(timeout=_LIMIT)
    assert process.returncode == 0, said
    return run_folder(storage)


@pytest.fixture(scope="module")
def cluster(alone: Path, cluster: Cluster) -> Cluster:
    """The cluster of all hosts, which begins when that of one host has ended."""
    return cluster


def submit(lab: list[Host], cluster: Cluster, storage: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `foldray submit` of the quickstart recipe on the user's host."""
    recipe = repository() / "recipes" / "quickstart.yaml"
    command = [sys.executable, "-m", "foldray", "submit", recipe, "--address", cluster.address]
    changes = [*_SIZES, f"cluster.storage={storage}", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return lab[4].popen([*command, *changes], env=cluster.env, cwd=repository(), **streams)


def test_four_hosts_train_as_one_does(lab: list[Host], cluster: Cluster, alone: Path, tmp_path: Path) -> None:
    process = submit(lab, cluster, tmp_path, *_SHORT)
    said, _ = process.communicate(timeout=_LIMIT)
    assert process.returncode == 0, said
    workers = json.loads((run_folder(tmp_path) / "run.json").read_text())["workers"]
    assert {worker["node_ip"] for worker in workers} == {host.address for host in lab[:4]}
    assert outcome(run_folder(tmp_path)) == outcome(alone)


def test_a_job_that_is_stopped_saves_a_checkpoint(lab: list[Host], cluster: Cluster, tmp_path: Path) -> None:
    process = submit(lab, cluster, tmp_path, "--stop")
    deadline = time.monotonic() + _LIMIT
    while not list(tmp_path.glob("*/metrics.jsonl")) or '"step"' not in next(tmp_path.glob("*/metrics.jsonl")).read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=_LIMIT)
    assert process.returncode == 130, said
    run = run_folder(tmp_path)
    while json.loads((run / "run.json").read_text())["status"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.5)
    document = json.loads((run / "run.json").read_text())
    assert document["status"] == "stopped"
    assert (run / f"step_{document['steps']:08d}").is_dir()


def test_records_go_to_the_drivers_node(lab: list[Host], cluster: Cluster) -> None:
    """On another node they would be lost with that node."""
    program = [sys.executable, "-c", _QUEUES, f"{lab[0].address}:6379"]
    done = lab[0].run(program, timeout=_LIMIT, env=cluster.env, cwd=repository())
    assert done.returncode == 0, done.stderr
