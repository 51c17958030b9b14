"""A Ray cluster on the hosts of a lab, separate from any other Ray on the machine."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.hosts import Host

PACKAGES = ("foldray", "trainers", "tuners")
_OBJECT_STORE = 100 * 2**20

# sh -ec _HIDE hide EMPTY FOLDER… -- COMMAND…: the folders look empty to the command. Every command has its own mounts.
_HIDE = 'empty=$1; shift; while [ "$1" != -- ]; do mount --bind "$empty" "$1"; shift; done; shift; exec "$@"'

# python -c _WAIT ADDRESS NODES SECONDS: waits until the dashboard answers and reports so many living nodes.
_WAIT = """
import json, os, sys, time, urllib.request
token = open(os.environ["RAY_AUTH_TOKEN_PATH"]).read()
request = urllib.request.Request(sys.argv[1] + "/nodes?view=summary", headers={"Authorization": "Bearer " + token})
end, seen = time.monotonic() + float(sys.argv[3]), None
while time.monotonic() < end:
    try:
        nodes = json.load(urllib.request.urlopen(request, timeout=60))["data"]["summary"]
        seen = sum(node["raylet"].get("state") == "ALIVE" for node in nodes)
    except (OSError, ValueError, KeyError) as error:
        seen = repr(error)
    if seen == int(sys.argv[2]):
        sys.exit()
    time.sleep(0.3)
sys.exit(f"nodes seen: {seen}")
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Args:
        address: the address for jobs.
        env: the environment that a process needs to submit them.
        head: the host of its head.
        folder: holds the files of its nodes.
        cpus: CPUs of each node.
    """

    address: str
    env: Mapping[str, str]
    head: Host
    folder: Path
    cpus: int

    def start(self, host: Host, label: str = "") -> subprocess.Popen:
        """Start the node of a host, for the first time or again."""
        return _start(host, self.head, self.folder, self.env, self.cpus, label)


@contextmanager
def ray_cluster(hosts: Sequence[Host], timeout: float = 90.0, cpus: int = 1, labels: Sequence[str] = ()) -> Iterator[Cluster]:
    """Start a cluster on hosts. Its head and dashboard run on the first host.

    The cluster uses token authentication with a new token. The nodes do not see this checkout's packages, so a job must
    bring its own. At the end of the context, all processes on the hosts are ended.

    Args:
        hosts: hosts of a lab.
        timeout: seconds to wait for all nodes.
        cpus: CPUs per host.
        labels: a label KEY=VALUE for the node of each host; none if empty.

    Raises:
        TimeoutError: not all nodes were alive after `timeout` seconds.
    """
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))  # a socket's path has at most 107 characters
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "empty").mkdir()
        (folder / "token").write_text(secrets.token_hex(32))  # only this user can read the folder
        cluster = Cluster(f"http://{hosts[0].address}:8265", _environment(folder / "token"), hosts[0], folder, cpus)
        for host, label in zip(hosts, labels or [""] * len(hosts), strict=True):
            node = cluster.start(host, label)
            stack.callback(node.wait, 10)
            stack.callback(host.stop, patience=2.0)
        wait = [sys.executable, "-c", _WAIT, cluster.address, len(hosts), timeout]
        waited = hosts[0].run(wait, timeout=timeout + 15, env=cluster.env)
        if waited.returncode != 0:
            logs = "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))
            raise TimeoutError(f"no cluster after {timeout:.0f} s: {waited.stderr}\n{logs}")
        yield cluster


def _environment(token: Path) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # otherwise Ray kills workers if other programs fill the memory
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # jobs run the command `python`
        "no_proxy": "*",
    }


def _start(host: Host, head: Host, folder: Path, env: Mapping[str, str], cpus: int, label: str) -> subprocess.Popen:
    """Start a Ray node in the foreground."""
    arguments = [
        f"--node-ip-address={host.address}", f"--temp-dir={folder / host.interface}", f"--num-cpus={cpus}",
        f"--object-store-memory={_OBJECT_STORE}",
    ]  # fmt: skip
    arguments += [f"--labels={label}"] if label else []
    if host is head:
        arguments += ["--head", "--port=6379", "--include-dashboard=true", f"--dashboard-host={host.address}"]
    else:
        arguments += [f"--address={head.address}:6379"]
    hide = ["sh", "-ec", _HIDE, "hide", folder / "empty", *_checkout(), "--"]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    with (folder / f"{host.interface}.log").open("w") as log:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        return host.popen([*hide, *ray, *arguments], env=env, cwd=folder, **streams)


def _checkout() -> list[str]:
    """Return the folders of the project's packages in this checkout."""
    specs = [importlib.util.find_spec(package) for package in PACKAGES]
    return [folder for spec in specs if spec is not None for folder in spec.submodule_search_locations or ()]
