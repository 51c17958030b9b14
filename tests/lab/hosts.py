"""Several hosts on one machine: network namespaces on a switch, with links as slow as wanted."""

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
from typing import Any

BURST = 128 * 2**10
"""Bytes that a link that was idle carries at once. A larger burst would let whole messages through for nothing. A smaller one
would have TCP's packets of 64 KiB cut up, for which the kernel takes the processor from what is to be measured.
"""

_labs = count()


@dataclass(frozen=True)
class Host:
    """A host of the lab: a network namespace with loopback and one link. Files and cores are the machine's own."""

    namespace: str
    address: str
    interface: str

    def popen(
        self, command: Sequence[object], *, env: Mapping[str, str] | None = None, cpu: int | None = None, **options: Any
    ) -> subprocess.Popen:
        """Start a command here, in a session of its own; it is told to end if the thread that started it does.

        Args:
            command: program and arguments; the process id is the program's.
            env: changes to this process's environment; gloo is told which interface to take.
            cpu: the one core to run on.
            **options: everything else that `subprocess.Popen` takes.
        """
        pinned = [] if cpu is None else ["taskset", "--cpu-list", str(cpu)]
        prefix = ["ip", "netns", "exec", self.namespace, "setpriv", "--pdeathsig", "TERM", *pinned]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, **(env or {})}
        return subprocess.Popen([*prefix, *map(str, command)], env=environment, start_new_session=True, **options)

    def run(self, command: Sequence[object], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end and take its output; the exit status is the caller's to look at.

        Raises:
            subprocess.TimeoutExpired: it ran longer than `timeout` seconds and was killed, with all that it had started.
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

    def processes(self) -> list[int]:
        """Ids of all processes that run here."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def stop(self, patience: float = 5.0) -> None:
        """End all processes that run here, gently for `patience` seconds."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + patience
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
    """`n` hosts that reach each other, and nothing else; on leaving, they are gone with all that runs on them.

    Args:
        n: number of hosts.
        rate: speed of every host's link, each way, as `tc` writes it, such as "200mbit"; None is as fast as the kernel copies.
    """
    lab = next(_labs)
    name, subnet = f"foldray-{os.getpid()}-{lab}", f"10.231.{(os.getpid() + lab) % 256}"
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace(f"{name}-switch"))
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        made = []
        for i in range(1, n + 1):
            namespace = stack.enter_context(_namespace(f"{name}-{i}"))
            made.append(Host(namespace, f"{subnet}.{i}", f"link{i}"))  # another name on every host, as between machines
            _connect(made[-1], switch, rate)
            stack.callback(made[-1].stop)
        yield made


def why_not() -> str | None:
    """What keeps this machine from having a lab, if anything."""
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
        _ip("netns", "del", name)  # its ends of the links go with it, and so the other ends


def _connect(host: Host, switch: str, rate: str | None) -> None:
    """A cable from the host to the switch."""
    here, there, port = host.namespace, switch, host.interface
    _ip("-n", here, "link", "add", port, "type", "veth", "peer", "name", port, "netns", there)
    _ip("-n", there, "link", "set", port, "master", "switch", "up")
    _ip("-n", here, "addr", "add", f"{host.address}/24", "dev", port)
    _ip("-n", here, "link", "set", port, "up")
    _ip("-n", here, "route", "add", "default", "dev", port)  # programs look for their own address along it
    if rate is not None:
        shape = f"dev {port} root tbf rate {rate} burst {BURST} limit 50mb".split()
        for end in (here, there):  # what the host sends, and what it is sent
            _call("tc", "-n", end, "qdisc", "add", *shape)


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
