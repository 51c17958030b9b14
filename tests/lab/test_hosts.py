"""The lab: links have the requested rate, and no process or namespace is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.lab.cores import part_of_core
from tests.lab.hosts import BURST, LAB, Host, hosts

pytestmark = pytest.mark.nightly(LAB)

_RECEIVE = """
import socket, sys, time
with socket.create_server(("", 5000)) as server:
    print("listens", flush=True)
    connection, _ = server.accept()
    started, received = time.monotonic(), 0
    while data := connection.recv(1 << 16):
        received += len(data)
print(received, time.monotonic() - started, flush=True)
"""
_SEND = "import socket, sys; socket.create_connection((sys.argv[1], 5000)).sendall(bytes(int(sys.argv[2])))"


@pytest.mark.parametrize("size", [12 * 10**6, 10**6])
def test_a_shaped_link_carries_what_it_should(size: int) -> None:
    with hosts(2, rate="80mbit") as (near, far):
        receiver = far.popen([sys.executable, "-c", _RECEIVE], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listens\n"
        near.run([sys.executable, "-c", _SEND, far.address, size], timeout=600)
        received, seconds = receiver.communicate(timeout=600)[0].split()
    assert int(received) == size
    assert float(seconds) > 0.9 * (size - 2 * BURST) * 8 / 80e6, "faster than the link, which has two ends"


def test_hosts_have_loopback_and_each_other_and_nobody_else() -> None:
    with hosts(2) as (near, far):
        assert _reaches(near, "127.0.0.1") == "ConnectionRefusedError"
        assert _reaches(near, far.address) == "ConnectionRefusedError"
        assert _reaches(near, "198.51.100.1") in ("OSError", "TimeoutError")


def test_nothing_is_left_after_a_failure() -> None:
    seen: list[tuple[Host, subprocess.Popen]] = []
    with pytest.raises(ZeroDivisionError):
        _fail_with_a_stubborn_process(seen)
    host, stubborn = seen[0]
    assert stubborn.wait(timeout=1) == -signal.SIGKILL
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert host.namespace.rpartition("-")[0] not in namespaces


def _fail_with_a_stubborn_process(seen: list[tuple[Host, subprocess.Popen]]) -> None:
    with hosts(1) as (host,):
        stubborn = host.popen(["sh", "-c", "trap '' TERM; echo; while true; do sleep 1; done"], stdout=subprocess.PIPE, text=True)
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        seen.append((host, stubborn))
        raise ZeroDivisionError


def test_a_command_has_its_time_and_its_core() -> None:
    with hosts(1) as (host,):
        cores = "import os; print(os.sched_getaffinity(0), os.environ['GLOO_SOCKET_IFNAME'])"
        assert host.run([sys.executable, "-c", cores], timeout=200, cpu=0).stdout == f"{{0}} {host.interface}\n"
        with pytest.raises(subprocess.TimeoutExpired):
            host.run(["sh", "-c", "sleep 3600 & sleep 3600"], timeout=0.5)
        assert host.processes() == []


def _reaches(host: Host, address: str) -> str:
    connect = f"import socket; socket.create_connection(({address!r}, 9), timeout=2)"
    return host.run([sys.executable, "-c", connect], timeout=200).stderr.splitlines()[-1].partition(":")[0]


def test_a_part_of_a_core_is_no_more() -> None:
    spin = "import time; end = time.monotonic() + 2\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    try:
        with part_of_core(0.25) as part, hosts(1) as (host,):
            took = float(host.run([sys.executable, "-c", spin], timeout=600, part=part).stdout)
    except OSError as error:
        pytest.skip(str(error))
    assert 0 < took < 0.8, "more than a quarter of two seconds, with room for the start"
    assert not part.exists()
