"""A Ray cluster over the hosts of a lab, apart from any other Ray on the machine."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab.hosts import Host

PACKAGES = ("foldray", "trainers", "tuners")
_OBJECT_STORE = 100 * 2**20

# Takes folders out of the sight of a command: `ip netns exec` gives it mounts of its own.
_HIDE = 'empty=$1; shift; while [ "$1" != -- ]; do mount --bind "$empty" "$1"; shift; done; shift; exec "$@"'

_WAIT = """
import json, sys, time, urllib.request
address, nodes, token, limit = sys.argv[1], int(sys.argv[2]), sys.argv[3], time.monotonic() + float(sys.argv[4])
def alive(path="/nodes?view=summary"):
    request = urllib.request.Request(address + path, headers={"Authorization": "Bearer " + token})
    answer = json.load(urllib.request.urlopen(request, timeout=5))
    return sum(node["raylet"].get("state") == "ALIVE" for node in answer["data"]["summary"])
why = None
while time.monotonic() < limit:
    try:
        why = alive()
        if why == nodes:
            sys.exit(0)
    except (OSError, ValueError, KeyError) as error:
        why = repr(error)
    time.sleep(0.3)
sys.exit(f"{why} of {nodes} nodes")
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster: where jobs are sent to, and the environment that holds its token."""

    address: str
    env: dict[str, str]


@contextmanager
def ray_cluster(hosts: Sequence[Host], timeout: float = 90.0) -> Iterator[Cluster]:
    """A cluster of one CPU per host, its head with dashboard on the first; on leaving, everything on these hosts is ended.

    Token authentication is on, with a token of its own. The nodes do not see this checkout's packages: what jobs run must
    have travelled with them.

    Raises:
        TimeoutError: the nodes were not there after `timeout` seconds.
    """
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))  # short: a socket's path may have 107 characters
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        token = secrets.token_hex(32)
        (folder / "token").touch(mode=0o600)
        (folder / "token").write_text(token)
        cluster = Cluster(f"http://{hosts[0].address}:8265", _environment(folder))
        for host in hosts:
            stack.callback(host.stop)
        for host in hosts:
            _start(host, hosts[0], folder, cluster.env)
        command = [sys.executable, "-c", _WAIT, cluster.address, len(hosts), token, timeout]
        waited = hosts[0].run(command, timeout=timeout + 15)
        if waited.returncode != 0:
            logs = "\n".join(log.read_text() for log in sorted(folder.glob("*.log")))
            raise TimeoutError(f"no cluster after {timeout:.0f} s: {waited.stderr}\n{logs}")
        yield cluster


def _environment(folder: Path) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # the machine's memory is not ours alone to be judged by
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # jobs are started as `python`
    }


def _start(host: Host, head: Host, folder: Path, env: dict[str, str]) -> subprocess.Popen:
    """A node in the foreground: it ends when its process does."""
    (folder / "empty").mkdir(exist_ok=True)
    role = (
        ["--head", "--port=6379", "--include-dashboard=true", f"--dashboard-host={host.address}"]
        if host is head
        else [f"--address={head.address}:6379"]
    )
    node = [f"--node-ip-address={host.address}", "--num-cpus=1", f"--object-store-memory={_OBJECT_STORE}"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role, *node, f"--temp-dir={folder / host.interface}"]
    with (folder / f"{host.interface}.log").open("w") as log:
        return host.popen(
            ["sh", "-ec", _HIDE, "hide", folder / "empty", *_checkout(), "--", *command],
            env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _checkout() -> list[str]:
    """Where this process would import the project's packages from."""
    specs = [importlib.util.find_spec(package) for package in PACKAGES]
    return [place for spec in specs if spec is not None for place in spec.submodule_search_locations or ()]
