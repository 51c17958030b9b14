"""The command `foldray calibrate`. It measures the speed of a recipe's workers, and writes a hardware file for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import torch
import yaml

from foldray.comm import Groups
from foldray.costs.hardware import Hardware
from foldray.errors import UserError
from foldray.files import writing
from foldray.recipe import Recipe
from trainers.cluster.actors import on_workers
from trainers.measure.speeds import measured
from trainers.telemetry.records import as_json as to_json


def calibrate(recipe: Recipe, path: Path, as_json: bool = False) -> int:
    """Measure the workers and write the hardware file."""
    if path.suffix not in (".yaml", ".yml") or not path.absolute().parent.is_dir():
        raise UserError("out", path, "must be a .yaml file in a folder that exists")
    message = f"measuring {recipe.cluster.workers} workers …"
    result = on_workers(recipe, _measure, message, by_node=True, name=path.stem)
    hardware = Hardware.model_validate(result["hardware"])
    write_hardware("out", path, hardware)
    print(to_json(hardware.model_dump()) if as_json else _table(hardware, path))
    return 0


def write_hardware(field: str, path: Path, hardware: Hardware) -> None:
    """Write a hardware file. `field` is what the user calls it."""
    with writing(field, path):
        path.write_text(yaml.safe_dump(hardware.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def _measure(recipe: Recipe, groups: Groups, device: torch.device, name: str) -> dict[str, Any] | None:
    node = int(ray.get_runtime_context().get_node_id()[:15], 16)
    hardware = measured(recipe, groups, device, name, node)
    return {"hardware": hardware} if groups.rank == groups.fold.offset else None


def _table(hardware: Hardware, path: Path) -> str:
    lines = [f"{hardware.gpus_per_node} workers per node, {hardware.memory_gib:.1f} GiB each", ""]
    lines += [f"  {'peak ' + dtype:<22}{peak:>10.3f} TFLOP/s" for dtype, peak in hardware.peak_tflops.items()]
    lines += [f"  {'product of ' + f'{(flops / 2) ** (1 / 3):.0f}³':<22}{share:>10.1%} of peak" for flops, share in hardware.gemm]
    lines.append(f"  {'memory':<22}{hardware.memory_gb_s:>10.2f} GB/s")
    lines += [f"  {f'attention, {tokens} tokens':<22}{share:>10.1%} of its best" for tokens, share in hardware.attention]
    for name in ("intra", "inter"):
        link = getattr(hardware, name)
        lines += [
            f"  {f'{name} node, {size} ranks':<22}{gb_s:>10.3f} GB/s, {us:.0f} µs to start" for size, gb_s, us in link.by_size
        ]
    lines += [
        f"  {name:<22}{hardware.constants[name]:>10.3g}"
        for name in ("attention", "grouped", "permute", "exchange", "crowding", "launch", "issue")
        if name in hardware.constants
    ]
    return "\n".join([*lines, "", f"written: {path}; plan with --cluster {path}"])
