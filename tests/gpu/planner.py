"""Measures the GPU as `foldray calibrate` does, and compares the planner's times of ops with measured ones."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
import yaml

from foldray.comm import Groups
from foldray.planner.candidate import DTYPES, Candidate, Job
from foldray.planner.costs import OpWork
from foldray.planner.device import Device
from foldray.planner.hardware import Hardware
from foldray.recipe import Recipe
from foldray.runtime import Trace
from foldray.schedule import Op
from tests.gpu.block import BLOCKS, block_recipe, drawn_on_gpu
from tests.gpu.report import Report
from trainers.measure.comparison import random_batch
from trainers.measure.speeds import measured
from trainers.worker.engines import make_engine


def run(report: Report) -> None:
    found = report.check("planner", "hardware", lambda: hardware(report.folder))
    if not isinstance(found, dict):  # it failed
        return
    report.say(yaml.safe_dump(found, sort_keys=False))
    torch.cuda.empty_cache()
    report.check("planner", "predicted over measured", lambda: ops(report, found))


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


def ops(report: Report, found: dict[str, Any]) -> dict[str, float]:
    """Return predicted time over measured time of each kind of op, for one block of 4096/14336 with 8192 tokens.

    Args:
        found: the hardware, as `hardware` returns it.
    """
    shares: dict[str, float] = {}
    for degree in (1, 4):
        model = {
            **BLOCKS["4096/14336, 8 experts, top 2"],
            "layers": 1,
            "head_dim": 128,
            "ffn_hidden": 14336,
            "vocab": 1024,
            "moe_every": 1,
        }
        recipe, device = block_recipe(model, 8192, degree), torch.device("cuda")
        with drawn_on_gpu():
            engine: Any = make_engine(recipe, Groups.create(recipe.placed_fold), device)
        engine.execution.trace = trace = Trace(device)
        given = [random_batch(recipe, 0, 1, 0, device)]
        graph, order = engine.execution.step(given)
        took: dict[Op, list[float]] = {op: [] for op in order}
        for step in range(7):
            engine.train(given)
            for op, span in trace.spans.items():
                took[op] += [span.end - span.start] if step >= 2 else []
        job = Job(recipe.model, 8192, 1, DTYPES[recipe.precision])
        work = OpWork(
            Candidate(job, recipe.placed_fold, recipe.ordering, zero=0), Device.of(job, Hardware.model_validate(found), {})
        )
        sums: dict[str, list[float]] = {}
        for op in order:
            if graph.channel(op) is None:
                pair = sums.setdefault(f"{op.kind} {op.direction}", [0.0, 0.0])
                pair[0] += sum(item.seconds for item in work.work(op))
                pair[1] += statistics.median(took[op])
        for kind, (predicted, measured_) in sums.items():
            report.say(f"  {degree} pieces, {kind}: predicted {predicted * 1e3:.2f} ms, measured {measured_ * 1e3:.2f} ms")
            shares[f"{degree} pieces, {kind}"] = predicted / measured_
        total = [sum(pair[i] for pair in sums.values()) for i in range(2)]
        shares[f"{degree} pieces, all"] = total[0] / total[1]
        del engine
    return shares
