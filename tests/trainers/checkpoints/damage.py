"""Makes small checkpoints, and damages or forges them."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ray.train import Checkpoint
from torch.distributed.checkpoint.metadata import Metadata

from foldray.runtime import Shard
from trainers.checkpoints import tensors
from trainers.checkpoints.stored import range_of
from trainers.checkpoints.tensors import Staged

FILE = "__0_0.distcp"
Damage = Callable[[Path], Any]


def state(step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    drawn = {name: torch.randn(8, 6, generator=random) for name in ("model/a", "model/b", "optimizer/a/exp_avg")}
    return {**drawn, "optimizer/a/step": torch.tensor(float(step))}


def shards_of(state: dict[str, torch.Tensor]) -> list[Shard]:
    return [Shard.whole(key, tensor) for key, tensor in state.items()]


def write(folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    progress = {"step": step, "data": "d", "fold": {}, "validation": {"loss": float("nan")}, "seed": 0, "global_batch": 8}
    tensors.write(folder, Staged(shards_of(state(step))), progress, None)


def make_run(folder: Path) -> Path:
    """Write a run with three checkpoints, which tests then damage."""
    for step in (1, 2, 3):
        write(folder / f"step_{step:08d}", step)
    return folder


def load(folder: Path | Checkpoint, into: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Load a checkpoint as a worker does."""
    found = {key: torch.zeros_like(tensor) for key, tensor in state(0).items()} if into is None else into
    handle = folder if isinstance(folder, Checkpoint) else Checkpoint.from_directory(str(folder))
    with tensors.opened(handle, None) as stored:
        tensors.load(stored, shards_of(found), None)
    return found


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def canary(folder: Path) -> Path:
    return folder.parent.parent / "canary"


def forged(folder: Path, found: Metadata | None = None) -> None:
    """Write a new manifest for the changed files, as a forger would.

    Args:
        found: the new content of `.metadata`; by default, boxes stay where the manifest has them.
    """
    ranges = list(json.loads((folder / "manifest.0.json").read_text())[FILE]["boxes"])
    if found is not None and isinstance(found.storage_data, dict):
        ranges = [range_of(place.offset, place.length) for place in found.storage_data.values() if place.offset >= 0]
    tensors.seal(folder, 0, {FILE: {each: _hash(folder / FILE, each) for each in ranges}})


def _hash(file: Path, of: str) -> str:
    offset, length = map(int, of.split("+"))
    return hashlib.sha256(file.read_bytes()[offset : offset + length]).hexdigest()


def flipped(name: str, at: int | None = None) -> Damage:
    """Change a bit of a file: at a byte, or in its middle."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2 if at is None else at] ^= 1
        (folder / name).write_bytes(content)

    return damage


def replaced(name: str, content: Any, seals: bool = True) -> Damage:
    def damage(folder: Path) -> None:
        made = content(folder) if callable(content) else content
        (folder / name).write_bytes(made if isinstance(made, bytes) else made.encode())
        if seals:
            forged(folder)

    return damage


def metadata(change: Callable[[Metadata, Path], Any]) -> Damage:
    """Change the content of `.metadata`. If `change` returns an object, it is pickled instead."""

    def damage(folder: Path) -> None:
        found = pickle.loads((folder / ".metadata").read_bytes())
        other = change(found, folder)
        (folder / ".metadata").write_bytes(pickle.dumps(found if other is None else other))
        forged(folder, found)

    return damage


def progress(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        found = json.loads((folder / "progress.json").read_text())
        (folder / "progress.json").write_text(json.dumps(found | changes))
        forged(folder)

    return damage


def manifest(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        found = json.loads((folder / "manifest.0.json").read_text())
        other = change(found)
        (folder / "manifest.0.json").write_text(json.dumps(found if other is None else other))

    return damage


def holding(make: Callable[[Path], bytes]) -> Damage:
    """Replace the bytes of the tensor model/b."""

    def damage(folder: Path) -> None:
        content = make(folder)

        def change(found: Metadata, folder: Path) -> None:
            for index, place in found.storage_data.items():
                if index.fqn == "model/b":
                    place.offset, place.length = 0, len(content)
                else:
                    place.offset += len(content)

        (folder / FILE).write_bytes(content + (folder / FILE).read_bytes())
        metadata(change)(folder)

    return damage
