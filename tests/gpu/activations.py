"""Measures steps whose activations stay on the GPU, are computed again, or wait on the host (`schedule.offload`).

The last check limits the GPU's memory, so that the step fits only with activations on the host.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from foldray.comm import Groups
from foldray.costs.activations import moved_bytes
from foldray.costs.device import Device
from foldray.costs.hardware import load_hardware
from foldray.costs.ops import OpWork
from foldray.model import Batch
from foldray.refold import as_candidate
from tests.gpu.block import BLOCKS, block_recipe, drawn_on_gpu, peak_of, steps_in_turns
from tests.gpu.report import Report
from trainers.worker.engines import make_engine

SETTINGS: dict[str, dict[str, Any]] = {
    "kept": {},
    "again": {"recompute": ["attention", "expert"]},
    "on the host": {"offload": ["attention", "expert"]},
}
SIZES, LAYERS, LENGTH, ROUNDS = "2048/768, 128 experts, top 8", 8, 16384, 5


def run(report: Report) -> None:
    report.check("activations", f"{LAYERS} blocks, {SIZES}, {LENGTH} tokens", lambda: measure(report))


def measure(report: Report) -> dict[str, Any]:
    """Return by setting the milliseconds of a step, and GiB at its fullest moment beside weights and sums."""
    sizes = BLOCKS[SIZES]
    model = {**sizes, "layers": LAYERS, "head_dim": 128, "ffn_hidden": sizes["expert_hidden"], "vocab": 1024, "moe_every": 1}
    device, text = torch.device("cuda"), torch.randint(0, 1024, (1, LENGTH + 1), device="cuda")
    given, recipes = (
        [Batch(text[:, :-1], text[:, 1:])],
        {name: block_recipe(model, LENGTH, way) for name, way in SETTINGS.items()},
    )
    with drawn_on_gpu():
        recipe = recipes["kept"]
        engine: Any = make_engine(recipe, Groups.create(recipe.placed_fold), device)
    orderings = {name: each.ordering for name, each in recipes.items()}
    rows = dict[str, Any]()
    for name, took in steps_in_turns(engine, given, orderings, ROUNDS).items():
        engine.execution.reorder(orderings[name])
        peak = peak_of(lambda: engine.train(given))
        rows[name] = {"ms": statistics.median(took), "min": min(took), "max": max(took), "peak_gib": peak}
        report.say(f"  {name:12} " + " ".join(f"{key} {value:.4g}" for key, value in rows[name].items()))
    engine.execution.reorder(orderings["on the host"])
    before = engine.execution.host.sent
    engine.train(given)
    candidate = as_candidate(recipes["on the host"])
    rank = OpWork(candidate, Device.of(candidate.job, load_hardware("h200"))).rank
    counted = sum(moved_bytes(rank, block, kind) for block in candidate.job.blocks[:-1] for kind in candidate.ordering.offload)
    sent = engine.execution.host.sent - before
    assert abs(sent / counted - 1) < 0.03, f"{sent} bytes went to the host, and the planner counts {counted:.0f}"
    rows["sent_gib"] = sent / 2**30
    rows["fits_only_on_the_host"] = _fits(engine, given, orderings, rows)
    return rows


def _fits(engine: Any, given: list[Batch], orderings: dict[str, Any], rows: dict[str, Any]) -> float:
    """Limit the GPU's memory to what is between both peaks. Return the limit in GiB; the step must fit only with the host."""
    torch.cuda.empty_cache()
    between = (rows["kept"]["peak_gib"] + rows["on the host"]["peak_gib"]) / 2
    limit = torch.cuda.memory_allocated() + between * 2**30
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        engine.execution.reorder(orderings["on the host"])
        engine.train(given)
        torch.cuda.empty_cache()
        engine.execution.reorder(orderings["kept"])
        try:
            engine.train(given)
        except torch.cuda.OutOfMemoryError:
            return limit / 2**30
        raise AssertionError(f"the step fits into {limit / 2**30:.1f} GiB as it is")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
