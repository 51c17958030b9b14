"""Measures the GPU as `foldray calibrate` does, and compares the planner's times of steps with measured ones."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
import yaml

from foldray.comm import Groups
from foldray.costs.candidate import DTYPES, Candidate, Job
from foldray.costs.device import Device
from foldray.costs.hardware import Hardware
from foldray.costs.ops import OpWork
from foldray.costs.prediction import Step
from foldray.graph import Op
from foldray.model import Batch
from foldray.recipe import Recipe
from foldray.runtime import Trace
from tests.gpu.block import BLOCKS, block_recipe, drawn_on_gpu, pieces, steps_in_turns
from tests.gpu.report import Report
from trainers.measure.comparison import random_batch
from trainers.measure.speeds import measured
from trainers.worker.engines import make_engine

LAYERS, TOKENS, DEGREES, ROUNDS = 4, 8192, (1, 2, 4), 5


def run(report: Report) -> None:
    found = report.check("planner", "hardware", lambda: hardware(report.folder))
    if not isinstance(found, dict):  # it failed
        return
    report.say(yaml.safe_dump(found, sort_keys=False))
    torch.cuda.empty_cache()
    shares = report.check("planner", "predicted over measured", lambda: steps(report, found))
    if isinstance(shares, dict):
        report.check("planner", "steps are within 10 %", lambda: within(shares, 0.1))


def hardware(folder: Path | None) -> dict[str, Any]:
    """Return the content of a hardware file of one GPU, and write it."""
    recipe = Recipe.parse(
        {
            "model": {"preset": "mixtral-8x22b"},
            "data": {"seq_len": 8192},
            "precision": "bfloat16",
            "engine": {"kind": "torch"},
            "training": {"global_batch": 1},
        }
    )
    name = torch.cuda.get_device_name().split()[1].lower()
    found = Hardware.model_validate(measured(recipe, Groups.create(recipe.placed_fold), torch.device("cuda"), name, 0))
    content = found.model_dump(mode="json")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return content


def steps(report: Report, found: dict[str, Any]) -> dict[str, float]:
    """Return predicted over measured milliseconds of steps of several blocks, and say the same of each kind of op.

    Args:
        found: the hardware, as `hardware` returns it.
    """
    shares: dict[str, float] = {}
    for name in BLOCKS:
        if not name.startswith("6144"):
            shares |= {f"{name}, {degree} pieces": each for degree, each in of_block(report, found, name).items()}
            torch.cuda.empty_cache()
    return shares


def of_block(report: Report, found: dict[str, Any], name: str) -> dict[int, float]:
    sizes = BLOCKS[name]
    model = {**sizes, "layers": LAYERS, "head_dim": 128, "ffn_hidden": sizes["expert_hidden"], "vocab": 1024, "moe_every": 1}
    recipes, device = {d: block_recipe(model, TOKENS, pieces(d)) for d in DEGREES}, torch.device("cuda")
    with drawn_on_gpu():
        engine: Any = make_engine(recipes[1], Groups.create(recipes[1].placed_fold), device)
    given = [random_batch(recipes[1], 0, 1, 0, device)]
    took = steps_in_turns(engine, given, {degree: recipe.ordering for degree, recipe in recipes.items()}, ROUNDS)
    shares = {}
    for degree, recipe in recipes.items():
        job = Job(recipe.model, TOKENS, 1, DTYPES[recipe.precision])
        candidate = Candidate(job, recipe.placed_fold, recipe.ordering, zero=0)
        work = OpWork(candidate, Device.of(job, Hardware.model_validate(found), {}))
        predicted, measured_ = Step(candidate, work).passes() * 1e3, statistics.median(took[degree])
        shares[degree] = predicted / measured_
        report.say(f"  {name}, {degree} pieces: predicted {predicted:.1f} ms, measured {measured_:.1f} ({min(took[degree]):.1f}"
                   f" to {max(took[degree]):.1f}) ms")  # fmt: skip
        engine.execution.reorder(recipe.ordering)
        for kind, pair in _by_kind(engine, given, work).items():
            report.say(f"    {kind}: predicted {pair[0] * 1e3:.2f} ms without waits, measured {pair[1] * 1e3:.2f} ms")
    return shares


def _by_kind(engine: Any, given: list[Batch], work: OpWork) -> dict[str, tuple[float, float]]:
    """Return predicted and measured seconds of all ops of a kind in a step. The latter include waits for the host."""
    engine.execution.trace = trace = Trace(torch.device("cuda"))
    graph, order = engine.execution.step(given)
    spans: dict[Op, list[float]] = {op: [] for op in order}
    for _ in range(3):
        engine.train(given)
        for op, span in trace.spans.items():
            spans[op].append(span.end - span.start)
    engine.execution.trace = None
    sums: dict[str, tuple[float, float]] = {}
    for op in order:
        if graph.channel(op) is None:
            price = work.rank.price(op.kind, op.direction == "B", graph.tokens(op), graph.block(op))
            before = sums.get(f"{op.kind} {op.direction}", (0.0, 0.0))
            sums[f"{op.kind} {op.direction}"] = before[0] + price.seconds, before[1] + statistics.median(spans[op])
    return sums


def within(shares: dict[str, float], limit: float) -> str:
    off = {name: f"{share:.2f}" for name, share in shares.items() if abs(share - 1) > limit}
    assert not off, f"steps are off by more than {limit:.0%}: {off}"
    return f"{len(shares)} steps"
