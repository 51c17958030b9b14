"""Several hosts on one machine: network namespaces on a switch, with links of any rate."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

BURST = 128 * 2**10
"""Bytes that an idle link carries at once. A larger burst would let whole messages pass at no cost. With a smaller burst,
the kernel would have to cut TCP's packets of 64 KiB, which takes processor time from the measurement.
"""

LAB = "needs root, and links with a known rate"
"""Why the lab's tests are nightly."""

_labs = count()


@dataclass(frozen=True)
class Host:
    """A host of the lab: a network namespace with loopback and one link. Hosts share the machine's files and cores.

    Args:
        namespace: name of the host's namespace.
        address: address of the host.
        interface: name of both ends of the host's link.
        switch: namespace of the switch.
    """

    namespace: str
    address: str
    interface: str
    switch: str

    def popen(
        self,
        command: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cpu: int | None = None,
        part: Path | None = None,
        **options: Any,
    ) -> subprocess.Popen:
        """Start a command on this host, in its own session. The command gets SIGTERM if the thread that started it ends.

        Args:
            command: program and arguments. The process id is that of the program.
            env: changes to this process's environment. `GLOO_SOCKET_IFNAME` is set to the host's interface.
            cpu: the only core to run on; None is any core.
            part: the control group of the process (`cores.part_of_core`); None is this process's own.
            **options: other arguments of `subprocess.Popen`.
        """
        pinned = [] if cpu is None else ["taskset", "--cpu-list", str(cpu)]
        # `ip netns exec` hides control groups, so the process joins its group before.
        joined = [] if part is None else ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(part / "cgroup.procs")]
        prefix = [*joined, "ip", "netns", "exec", self.namespace, "setpriv", "--pdeathsig", "TERM", *pinned]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, **(env or {})}
        return subprocess.Popen([*prefix, *map(str, command)], env=environment, start_new_session=True, **options)

    def run(self, command: Sequence[object], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end, and return its output. The caller has to check the exit status.

        Raises:
            subprocess.TimeoutExpired: the command ran longer than `timeout` seconds. It was killed with all its child
                processes.
        """
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = self.popen(command, **{**pipes, **options})
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def limit(self, rate: str) -> None:
        """Give the link a rate in each direction, in the notation of `tc`."""
        for end in (self.namespace, self.switch):  # limits the traffic from the host, and the traffic to the host
            _call("tc", "-n", end, "qdisc", "replace", *_shape(self.interface, rate))

    def processes(self) -> list[int]:
        """Return the ids of all processes on this host."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def stop(self, patience: float = 5.0) -> None:
        """End all processes on this host: with SIGTERM, and after `patience` seconds with SIGKILL."""
        for sign, limit in ((signal.SIGTERM, patience), (signal.SIGKILL, 30.0)):  # a full machine ends them slowly
            deadline = time.monotonic() + limit
            while time.monotonic() < deadline:
                running = self.processes()
                if not running:
                    return
                for pid in running:
                    with suppress(ProcessLookupError):
                        os.kill(pid, sign)
                time.sleep(0.2)
        raise RuntimeError(f"processes {running} of {self.namespace} do not end")


@contextmanager
def hosts(n: int, rate: str | None = None) -> Iterator[list[Host]]:
    """Make `n` hosts that can reach only each other. At the end of the context, their processes are ended and they are
    deleted.

    Args:
        n: number of hosts.
        rate: rate of every host's link in each direction, in the notation of `tc`, such as "200mbit"; None sets no limit.
    """
    lab = next(_labs)
    name, subnet = f"foldray-{os.getpid()}-{lab}", f"10.231.{(os.getpid() + lab) % 256}"
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace(f"{name}-switch"))
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        lab_hosts = []
        for i in range(1, n + 1):
            namespace = stack.enter_context(_namespace(f"{name}-{i}"))
            lab_hosts.append(Host(namespace, f"{subnet}.{i}", f"link{i}", switch))  # interface names differ, as on real machines
            _connect(lab_hosts[-1], rate)
            stack.callback(lab_hosts[-1].stop)
        yield lab_hosts


def why_not() -> str | None:
    """Return the reason why this machine cannot have a lab; None if it can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    missing = [tool for tool in ("ip", "tc", "setpriv", "taskset") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (packages iproute2 and util-linux)"
    try:
        with hosts(1, rate="100mbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"cannot make network namespaces: {error.stderr.strip()}"


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        _ip("netns", "del", name)  # this also deletes both ends of its links


def _connect(host: Host, rate: str | None) -> None:
    """Connect a host to its switch."""
    namespace, port, switch = host.namespace, host.interface, host.switch
    _ip("-n", namespace, "link", "add", port, "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "switch", "up")
    _ip("-n", namespace, "addr", "add", f"{host.address}/24", "dev", port)
    _ip("-n", namespace, "link", "set", port, "up")
    _ip("-n", namespace, "route", "add", "default", "dev", port)  # programs use this route to find their own address
    if rate is not None:
        host.limit(rate)


def _shape(port: str, rate: str) -> list[str]:
    return f"dev {port} root tbf rate {rate} burst {BURST} limit 50mb".split()


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
