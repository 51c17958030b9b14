"""Measures the GPU as `foldray calibrate` does, and compares the planner's times of ops with measured ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from foldray.comm import Groups
from foldray.planner.hardware import Hardware
from foldray.recipe import Recipe
from tests.gpu.report import Report
from trainers.measure.speeds import measured


def run(report: Report) -> None:
    found = report.check("planner", "hardware", lambda: hardware(report.folder))
    report.say(yaml.safe_dump(found, sort_keys=False))


def hardware(folder: Path | None) -> dict[str, Any]:
    """Return the content of a hardware file of one GPU, and write it."""
    recipe = Recipe.parse(
        {
            "model": {"preset": "mixtral-8x7b"},
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
