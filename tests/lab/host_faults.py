"""`HOST_FAULTS`: the table of what goes wrong with trainings on a cluster of several hosts.

The hosts are network namespaces. Two of three workers' hosts have a worker, the third one is spare.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.hosts import Host, hosts
from tests.lab.hurt import Fault, Hurt, place
from tests.lab.ray_cluster import Cluster, ray_cluster
from tests.pool import repository


@dataclass(kw_only=True)
class HurtJob(Hurt):
    """A training that was submitted to a cluster.

    Args:
        cluster: the cluster.
        nodes: its hosts. The first one has Ray's head, and the driver.
        user: the host that submits the training.
    """

    cluster: Cluster
    nodes: list[Host]
    user: Host

    def start(self, **streams: Any) -> subprocess.Popen:
        recipe = self.folder / "recipe.yaml"
        command = [sys.executable, "-m", "foldray", "submit", recipe, "--address", self.cluster.address, *self.changes]
        streams["stdout"] = streams["stderr"]  # the log of the job
        return self.user.popen(command, cwd=repository(), env={**self.cluster.env, **self.env}, **streams)

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def victim(self) -> Host:
        """The host of a worker, other than the one of the head."""
        addresses = [worker["node_ip"] for worker in self.document["workers"]]
        return next(host for host in self.nodes[1:] if host.address in addresses)

    @property
    def victims_worker(self) -> dict[str, Any]:
        return next(worker for worker in self.document["workers"] if worker["node_ip"] == self.victim.address)

    def left(self, patience: float = 90.0) -> list[str]:
        """Return the names of workers that still run after the end. Nobody can end those on a host before its link is back."""
        for host in self.nodes:
            _link(host, "up")
        deadline = time.monotonic() + patience
        while left := [name for name in map(_command, self._pids()) if "RayTrainWorker" in name]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        return left

    def _pids(self) -> list[int]:
        return [pid for host in self.nodes for pid in host.processes()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""


@contextmanager
def on_hosts(small: str | None = None) -> Iterator[HurtJob]:
    """Train on the first two or three of three hosts."""
    with hosts(4) as lab, ray_cluster(lab[:3]) as cluster, place(None) as folder:
        changes = ["model.ffn=gated_silu", "model.expert_hidden=512"]
        with HurtJob(folder, changes, cluster=cluster, nodes=lab[:3], user=lab[3]) as job:
            yield job


def _cut(job: Hurt, seconds: float | None = None) -> None:
    assert isinstance(job, HurtJob)
    victim = job.victim
    _link(victim, "down")
    if seconds is not None:
        time.sleep(seconds)
        _link(victim, "up")


def _link(host: Host, state: str) -> None:
    subprocess.run(["ip", "-n", host.switch, "link", "set", host.interface, state], check=True)


def _slow(job: Hurt) -> None:
    """Stop the worker for four fifths of its time, for half a minute."""
    assert isinstance(job, HurtJob)
    pid = job.victims_worker["pid"]

    def stutter() -> None:
        end = time.monotonic() + 40.0
        while time.monotonic() < end and os.path.exists(f"/proc/{pid}"):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.16)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.04)

    threading.Thread(target=stutter, daemon=True).start()


def _notice(job: Hurt) -> None:
    """Tell Ray that the host goes away, as a cloud's autoscaler does, and take it away later."""
    assert isinstance(job, HurtJob)
    victim, node = job.victim, job.victims_worker["node"]
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", "30"]
    address = f"{job.nodes[0].address}:6379"
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address, "--node-id", node, *why]
    done = job.nodes[0].run(command, env=job.cluster.env, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)

    def take() -> None:
        time.sleep(30)
        victim.stop(patience=0.5)

    threading.Thread(target=take, daemon=True).start()


def _kill(job: Hurt) -> None:
    assert isinstance(job, HurtJob)
    for pid in job.victim.processes():
        os.kill(pid, signal.SIGKILL)


_NODE = r"node \S+ was lost, with rank|connections .* broke|process of rank \d on \S+ ended"
HOST_FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("a host is killed", _kill, _NODE),
        Fault("a host's link is cut", _cut, _NODE + r"|showed no sign of life"),
        Fault("a host's link is cut for 8 seconds", lambda job: _cut(job, 8.0), None),
        Fault("a host is taken back, with a notice", _notice, r"takes back (a|the) node"),
        Fault("a worker is slow", _slow, r"the others wait for rank"),
    )
}
