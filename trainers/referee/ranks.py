"""Ranks of a case: forked from this process, which has imported what they need."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainers.referee.cases import Case
from trainers.referee.comparing import compare
from trainers.referee.rank import Layout, Peer

_AFTER_ERROR_S = 5  # how long ranks may wait for one that failed


def run(kind: type[Peer], layout: Layout, case: Case, dtype: str, limit: float) -> dict[str, Any]:
    """Run a case on forked ranks, for at most `limit` seconds. Return its differences, or the `error` of the first rank."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            fork.Process(target=_rank, args=(number, kind, layout, case, dtype, folder, limit)) for number in range(layout.ranks)
        ]
        try:
            for process in processes:
                process.start()
            deadline = time.monotonic() + limit
            while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
                time.sleep(0.05)
                if any(folder.glob("*.error")):
                    deadline = min(deadline, time.monotonic() + _AFTER_ERROR_S)
            late = sum(process.is_alive() for process in processes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return _result(folder, late, layout.ranks, limit)


def _result(folder: Path, late: int, ranks: int, limit: float) -> dict[str, Any]:
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        return {"error": errors[0].read_text()}
    if late or not (folder / "result.json").exists():
        return {"error": f"{late} of {ranks} ranks did not end in {limit:.0f} s" if late else "a rank ended without a word"}
    return json.loads((folder / "result.json").read_text())


def _rank(number: int, kind: type[Peer], layout: Layout, case: Case, dtype: str, folder: Path, limit: float) -> None:
    log = os.open(folder / f"{number}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(layout.ranks)}
    torch.set_num_threads(1)
    code = 0
    try:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", store, rank=number, world_size=layout.ranks, timeout=timedelta(seconds=limit))
        result = compare(kind, layout, case, getattr(torch, dtype), folder)
        dist.barrier()
        if number == 0:
            _write(folder / "result.json", json.dumps(result))
    except BaseException:
        _write(folder / f"{number}.error", traceback.format_exc())
        code = 1
    os._exit(code)  # without the end of process groups, for which others may wait


def _write(path: Path, text: str) -> None:
    """Write a file so that who finds it finds it whole."""
    part = path.with_suffix(".part" + path.suffix[1:])
    part.write_text(text)
    part.rename(path)
