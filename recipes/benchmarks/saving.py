"""What a checkpoint costs while training goes on: seconds of the steps beside it, and host memory.

    python recipes/benchmarks/saving.py --rounds 7

One process trains, and takes turns: three steps without a checkpoint; with one that copies a tensor when it is written, as
foldray does; and with one that copies the whole state first. Seconds are those until the third step has ended, memory is the
most that the process has above its memory before.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from foldray.comm import Groups
from foldray.recipe import Recipe
from foldray.runtime import Shard
from trainers.checkpoints import tensors
from trainers.checkpoints.staging import Staged
from trainers.measure.comparison import random_batches
from trainers.worker.engines import make_engine

RECIPE = {
    "model": {
        "layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn_hidden": 1024, "experts": 16, "topk": 2,
        "expert_hidden": 1024, "vocab": 264,
    },
    "data": {"source": "text", "path": "none", "seq_len": 256},
    "training": {"steps": 10, "global_batch": 4, "micro_batch": 4},
    "engine": {"kind": "torch"},
    "cluster": {"workers": 1},
}  # fmt: skip
STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant (default: 7)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe.parse(RECIPE)
    groups, device = Groups.create(recipe.placed_fold, 0), torch.device("cpu")
    engine = make_engine(recipe, groups, device)
    batches = random_batches(recipe, groups, device)
    found: dict[str, list[tuple[float, float]]] = {"no checkpoint": [], "tensor by tensor": [], "whole copy": []}
    for number in range(given.rounds + 1):
        for name, rows in found.items():
            with Memory() as memory:
                began, writer = time.perf_counter(), Writer(name, engine.shards()) if name != "no checkpoint" else None
                for _ in range(STEPS):
                    engine.train(batches)
                    if writer:
                        writer.staged.settle()
                    engine.update(1e-4)
                took = time.perf_counter() - began
                if writer:
                    writer.join()
            if number:
                rows.append((took, memory.most))
    size = sum(shard.tensor.numel() * shard.tensor.element_size() for shard in engine.shards())
    print(f"state of {size / 2**20:.0f} MiB; median (least to most)")
    for name, rows in found.items():
        print(f"{name:<17} {told([took for took, _ in rows])} s, {told([most for _, most in rows])} MiB more")
    return 0


class Writer(threading.Thread):
    """Writes a checkpoint, and counts as begun when it returns from its constructor."""

    def __init__(self, name: str, shards: Sequence[Shard]):
        super().__init__()
        if name == "whole copy":
            shards = [Shard(each.key, each.tensor.detach().clone(), each.shape, each.offset) for each in shards]
        self.staged = Staged(shards)
        self.start()

    def run(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="saving-"))
        tensors.write(folder, self.staged, {"step": 1}, None)
        shutil.rmtree(folder)


class Memory:
    """The most resident memory in MiB while the context is open, above that at its begin."""

    def __enter__(self) -> Memory:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the process has freed, but still holds, would hide what it takes next
        self._before, self.most, self._ends = _resident(), 0.0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ends.wait(0.005):
            self.most = max(self.most, _resident() - self._before)


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def told(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    raise SystemExit(main())
