"""A pool of ranks for a whole test session, because starting processes is slow."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import TCPStore

# Ranks are forks of a process that has imported the slow modules, but has no threads and no process groups.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])

_AT_WORK = 0.03  # of a core: ranks that wait for each other for ever use less


class RankFailure(AssertionError):
    """A rank raised an exception, died, or did not answer in time. The message has its traceback."""


class RankPool:
    """`world` processes in one gloo group, with one thread each. They run cases one after another."""

    def __init__(self, world: int):
        self.world = world
        self._store: TCPStore | None = None
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, case: Callable[..., Any], *arguments: Any, timeout: float = 240) -> list[Any]:
        """Call `case(rank, *arguments)` on every rank, and return the results by rank.

        After a failure, the next case starts new processes.

        Args:
            timeout: seconds in which ranks that do nothing have to answer. Ranks that compute get more, on a busy machine.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((case, arguments))
        deadline, used = time.monotonic() + timeout, self._used()
        answers: dict[int, tuple[bool, Any]] = {}  # rank → (success, result or traceback)
        while len(answers) < self.world:
            missing = [connection for rank, connection in enumerate(self._connections) if rank not in answers]
            for ready in wait(missing, timeout=0.5):
                rank = self._connections.index(ready)  # type: ignore[arg-type]  # one of `missing`
                answers[rank] = self._receive(rank, self._connections[rank])
            failed = [text for success, text in answers.values() if not success]
            if time.monotonic() > deadline and (now := self._used()) > used + _AT_WORK * timeout:
                deadline, used = time.monotonic() + timeout, now
            if failed or time.monotonic() > deadline:
                self.close()
                silent = sorted(set(range(self.world)) - set(answers))
                raise RankFailure("\n".join(failed) or f"ranks {silent} did not answer within {timeout} s")
        return [answers[rank][1] for rank in range(self.world)]

    def _used(self) -> float:
        """Return the seconds of a processor that the ranks have used."""
        return sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in self._processes if process.is_alive())

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        # Not a file: ranks that make process groups would poll it, which takes a third of the time of a test.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, self.world, self._store.port, theirs), daemon=True)
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def _receive(self, rank: int, connection: Connection) -> tuple[bool, Any]:
        try:
            return connection.recv()
        except EOFError:
            return False, f"rank {rank} died"


class RankPools:
    """Pools by their number of ranks. A pool starts when it is first used."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world: int) -> RankPool:
        return self._pools.setdefault(world, RankPool(world))

    def close(self) -> None:
        """End all processes. A pool that is used again starts new ones."""
        for pool in self._pools.values():
            pool.close()


def _serve(rank: int, world: int, port: int, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    os.nice(5)  # the tests with Ray, which take longest, go first
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", store=TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=world)
    gc.freeze()  # so that a collection takes milliseconds
    while True:
        try:
            case, arguments = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            connection.send((True, case(rank, *arguments)))
        except BaseException:
            connection.send((False, f"rank {rank} of {world}:\n{traceback.format_exc()}"))
        _drop_groups()


def _drop_groups() -> None:
    """Destroy the process groups that a case has left, even in reference cycles.

    Each has a thread that wakes a hundred times a second. Those of a long session would take half of the processors.
    """
    import torch.distributed as dist

    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def repository() -> Path:
    return Path(__file__).parent.parent
