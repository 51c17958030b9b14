"""Lists the places where the host waits for the GPU within a training step."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from foldray.comm import Groups
from foldray.recipe import Recipe
from tests.gpu.report import Report
from trainers.measure.comparison import random_batch
from trainers.worker.engines import make_engine

_ROOT = Path(__file__).resolve().parents[2]
_MODEL = {"layers": 2, "hidden": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn_hidden": 512, "experts": 8, "topk": 2,
          "expert_hidden": 256, "vocab": 512, "moe_every": 1}  # fmt: skip
_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    # schedule, router, kernels, waits that a step may have: none where one rank has all experts, but for rows with room
    "sequential": ({}, {}, {}, 0),
    "stream, 4 pieces": ({"kind": "stream", "degree": 4}, {}, {}, 0),
    "padded, 4 pieces": ({"kind": "stream", "degree": 4}, {"capacity_factor": 1.0, "pad": True}, {}, 0),
    "once to each rank, 4 pieces": ({"kind": "stream", "degree": 4}, {"capacity_factor": 1.0}, {"dispatch": "rank"}, 8),
}


def run(report: Report) -> None:
    for name, (schedule, router, moe, most) in _CASES.items():
        report.check("waits", name, lambda s=schedule, r=router, k=moe, m=most: waits(report, s, r, k, m))


def waits(report: Report, schedule: dict[str, Any], router: dict[str, Any], moe: dict[str, Any], most: int) -> int:
    """Return how often the host waits in `engine.train`, and say where."""
    recipe = Recipe.parse(
        {
            "model": {**_MODEL, "router": router},
            "data": {"seq_len": 1024},
            "precision": "bfloat16",
            "engine": {"kind": "torch"},
            "training": {"global_batch": 1},
            "schedule": schedule,
            "moe": moe,
        }
    )
    engine = make_engine(recipe, Groups.create(recipe.placed_fold), torch.device("cuda"))
    given = [random_batch(recipe, 0, 1, 0, torch.device("cuda"))]
    for _ in range(2):
        engine.train(given)
    torch.cuda.synchronize()
    places: Counter[str] = Counter()

    def note(*_: Any, **__: Any) -> None:
        ours = [frame for frame in traceback.extract_stack() if "/foldray/" in frame.filename]
        places[" < ".join(f"{Path(f.filename).relative_to(_ROOT)}:{f.lineno}" for f in ours[:-3:-1])] += 1

    # torch's mode does not see waits for events.
    wait = torch.cuda.Event.synchronize
    with warnings.catch_warnings(), mock.patch.object(torch.cuda.Event, "synchronize", lambda self: (note(), wait(self))):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        warnings.showwarning = note
        try:
            engine.train(given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for place, count in places.most_common():
        report.say(f"  waits {count} × {place}")
    found = sum(places.values())
    assert found <= most, f"{found} waits, more than {most}: {dict(places)}"
    return found
