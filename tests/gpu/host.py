"""Measures what the host does in a training step: how long it takes to issue each kind of op, and where that time goes."""

from __future__ import annotations

import cProfile
import pstats
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from foldray.comm import Groups
from foldray.runtime import Trace
from tests.gpu.block import BLOCKS, block_recipe, drawn_on_gpu, pieces, timed
from tests.gpu.report import Report
from trainers.measure.comparison import random_batch
from trainers.worker.engines import make_engine

ROUNDS, PIECES, TOKENS = 7, 4, 4096
_MOST = 32


def run(report: Report) -> None:
    name = "2048/768, 128 experts, top 8"
    report.check("host", f"{name}, {PIECES} pieces", lambda: measure(report, BLOCKS[name]))


def measure(report: Report, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of the host in a step, its microseconds for each op by kind, and the calls of the driver."""
    model = {**sizes, "layers": 1, "head_dim": 128, "ffn_hidden": sizes["expert_hidden"], "vocab": 1024, "moe_every": 1}
    recipe, device = block_recipe(model, TOKENS, pieces(PIECES)), torch.device("cuda")
    with drawn_on_gpu():
        engine: Any = make_engine(recipe, Groups.create(recipe.placed_fold), device)
    given = [random_batch(recipe, 0, 1, 0, device)]
    graph, _ = engine.execution.step(given)
    steps = [timed(lambda: engine.train(given)) for _ in range(3 + ROUNDS)][3:]
    found: dict[str, Any] = {name: statistics.median(step[i] for step in steps) for i, name in enumerate(("ms", "host_ms"))}
    report.say(f"  step {found['ms']:.1f} ms, host {found['host_ms']:.1f} ms")
    found["us_by_op"] = by_op = _by_op(engine, given, graph)
    for kind, microseconds in by_op.items():
        report.say(f"  {kind}: {microseconds:.0f} µs")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        engine.train(given)
        torch.cuda.synchronize()
    own = sorted(profiled.key_averages(), key=lambda each: -each.self_cpu_time_total)
    for each in own[:_MOST]:
        report.say(f"  torch: {each.self_cpu_time_total / 1e3:.2f} ms, {each.count} × {each.key[:80]}")
    found["driver"] = {each.key: (each.count, each.self_cpu_time_total) for each in own if each.key.startswith("cu")}
    calls = cProfile.Profile()
    calls.enable()
    for _ in range(ROUNDS):
        engine.train(given)
    calls.disable()
    lines = sorted(pstats.Stats(calls).stats.items(), key=lambda item: -item[1][2])  # type: ignore[attr-defined]
    for (path, line, function), (_, count, seconds, whole, _) in lines[:_MOST]:
        where = f"{Path(path).name}:{line} {function}"[:80]
        report.say(f"  Python: {seconds / ROUNDS * 1e3:.2f} of {whole / ROUNDS * 1e3:.2f} ms, {count / ROUNDS:.0f} × {where}")
    return found


def _by_op(engine: Any, given: list[Any], graph: Any) -> dict[str, float]:
    """Return the median microseconds that the host takes for an op of a kind, from the begin of one to the begin of the next."""
    took: dict[str, list[float]] = {}
    engine.execution.trace = trace = Trace()  # the host's clock
    for number in range(2 + ROUNDS):
        engine.train(given)
        torch.cuda.synchronize()
        for op, span in trace.spans.items() if number >= 2 else ():
            took.setdefault(f"{op.kind} {op.direction}", []).append((span.end - span.start) * 1e6)
    engine.execution.trace = None
    counts = Counter(f"{op.kind} {op.direction}" for op in trace.spans)
    return {f"{kind} ×{counts[kind]}": statistics.median(each) for kind, each in took.items()}
