"""Several ranks on one GPU over NCCL: every fold and schedule gives the weights of one process on the CPU, in float64.

NCCL refuses two ranks of one host on one GPU. So every rank says that it is a host of its own. NVIDIA does not support this;
it tests order and streams, not speed.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from foldray.comm import Groups, nccl, probe
from tests.foldray.parity import make_recipe, one_process, worst
from tests.gpu.report import Report

Case = tuple[str, dict[str, int], dict[str, Any]]
"""A name, a fold, and further sections of the recipe."""

_SECONDS = {2: 90, 4: 150}
"""The most that the cases of a number of ranks may take."""
STREAM, WEAVE, LIST = ({"schedule": {"kind": kind, "degree": 2}} for kind in ("stream", "weave", "list"))
ONCE: dict[str, Any] = {"moe": {"experts": "grouped", "dispatch": "rank"}, "model": {"topk": 4}}
CASES: dict[int, list[Case]] = {
    2: [
        ("ep2", {"ep": 2}, {}),
        ("ep2, stream", {"ep": 2}, STREAM),
        ("ep2, 4 pieces", {"ep": 2}, {"schedule": {"kind": "stream", "degree": 4}}),
        ("ep2, once to each rank", {"ep": 2}, {**STREAM, **ONCE}),
        ("ep2, weave", {"ep": 2}, WEAVE),
        ("ep2, a found list", {"ep": 2}, LIST),
        ("ep2, weights apart", {"ep": 2}, {"schedule": {"kind": "stream", "degree": 2, "weight_gradients": "apart"}}),
        ("ep2, recomputed", {"ep": 2}, {"schedule": {"kind": "stream", "degree": 2, "recompute": ["attention", "expert"]}}),
        ("ep2, padded", {"ep": 2}, {**STREAM, "model": {"router": {"capacity_factor": 1.0, "pad": True, "drop": "position"}}}),
        ("ep2, dropped", {"ep": 2}, {**STREAM, "model": {"router": {"capacity_factor": 0.8, "drop": "position"}}}),
        ("dp2, ZeRO 1", {}, {"engine": {"kind": "torch", "zero": 1}}),
        ("dp2, ZeRO 2", {}, {**STREAM, "engine": {"kind": "torch", "zero": 2}}),
        ("tp2", {"tp": 2, "ep": 2}, STREAM),
        ("etp2", {"etp": 2}, STREAM),
        ("cp2, ring", {"cp": 2, "ep": 2}, {}),
        ("cp2, all-gather", {"cp": 2, "ep": 2}, {"schedule": {"context": "all_gather"}}),
        ("cp2, slices", {"cp": 2, "ep": 2}, STREAM),
        ("pp2", {"pp": 2}, {}),
        ("pp2, 2 virtual stages", {"pp": 2}, {"schedule": {"virtual_stages": 2}}),
        ("pp2, stream", {"pp": 2}, STREAM),
    ],
    4: [
        ("tp2 ep4", {"tp": 2, "ep": 4}, STREAM),
        ("ep4, once to each of 2 nodes", {"ep": 4, "ep_inside": 2}, {**STREAM, **ONCE}),
        ("pp2 ep2", {"pp": 2, "ep": 2}, STREAM),
        ("pp2 ep2, weave", {"pp": 2, "ep": 2}, WEAVE),
        ("pp2 ep2, a found list", {"pp": 2, "ep": 2}, LIST),
        ("cp2 ep2 etp2", {"cp": 2, "ep": 2, "etp": 2}, STREAM),
        ("ep2 dp, chunks, ZeRO 2", {"ep": 2}, {**STREAM, "engine": {"kind": "torch", "zero": 2}}),
        ("2 + 2 ranks, af_pipe", {}, {"placement": {"attention": 2, "experts": 2}, "schedule": {"kind": "af_pipe", "degree": 2}}),
    ],
}  # fmt: skip


def run(report: Report) -> None:
    for world, cases in CASES.items():
        for name, off in run_world(report, world, cases).items():
            report.check("ranks", f"{world} ranks, {name}", lambda off=off: _within(off))


def run_world(report: Report, world: int, cases: list[Case]) -> dict[str, float | str]:
    """Run cases one after another on the same ranks. Return the largest difference of each, or why it failed."""
    context = mp.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [context.Process(target=_rank, args=(rank, world, store.port, cases, folder)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        until = time.monotonic() + _SECONDS[world]
        while any(rank.is_alive() for rank in ranks) and time.monotonic() < until:
            time.sleep(0.1)
        for rank in ranks:
            rank.kill()
            rank.join()
        found: dict[str, float | str] = {}
        for number, (case, fold, sections) in enumerate(cases):
            paths = [folder / f"{number}-{rank}" for rank in range(world)]
            missing = [rank for rank, path in enumerate(paths) if not path.exists()]
            if missing:
                found[case] = f"ranks {missing} did not end"
                continue
            results = [torch.load(path, weights_only=False) for path in paths]
            errors = [result for result in results if isinstance(result, str)]
            if errors:
                found[case] = errors[0]
                continue
            reference = one_process(make_recipe(world, fold, **sections), steps=2)
            found[case] = worst([{"weights": result["weights"]} for result in results], reference, relative=False)[0]
            seconds = [result["seconds"] for result in results]
            report.say(f"  {world} ranks, {case}: groups and two steps in {max(seconds):.1f} s")
    return found


def _within(off: float | str) -> float:
    assert isinstance(off, float), off
    assert off < 1e-9, f"differs by {off:.2e}"
    return off


def _rank(rank: int, world: int, port: int, cases: list[Case], folder: Path) -> None:
    from tests.gpu.correct import two_steps

    faulthandler.dump_traceback_later(_SECONDS[world] - 10, file=sys.stderr)
    os.environ |= nccl.ENVIRONMENT
    os.environ |= {
        "NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MAX_NCHANNELS": "2",
        "NCCL_BUFFSIZE": str(1 << 20),
    }  # fmt: skip
    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=world)
    for number, (_, fold, sections) in enumerate(cases):
        begin = time.perf_counter()
        try:
            recipe = make_recipe(world, fold, **{"moe": {"experts": "grouped"}, **sections})
            groups = Groups.create(recipe.placed_fold, rank)
            probe(groups, device, torch.float64)
            found: Any = {"weights": two_steps(recipe, groups, device), "seconds": time.perf_counter() - begin}
        except Exception:
            found = traceback.format_exc()
        part = folder / f"part-{rank}"
        torch.save(found, part)
        part.rename(folder / f"{number}-{rank}")
        if isinstance(found, str):
            print(found, file=sys.stderr, flush=True)
            os._exit(1)  # the other ranks cannot go on, and the parent ends them
    os._exit(0)  # NCCL would take seconds to close the groups of every case
