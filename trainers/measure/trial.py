"""What ranks do for a tuner: steps of one recipe or another, timed as training has them.

A step is everything between two updates: forward, backward, the gradients' sums, the optimizer. The learning rate is zero, so
weights stay and recipes may take turns.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foldray.comm import Groups
from foldray.recipe import Recipe
from foldray.runtime import Engine, Trace
from foldray.schedule import StepGraph
from foldray.timeline import Recording
from trainers.measure.comparison import random_batches
from trainers.worker.engines import make_engine


class Turn(NamedTuple):
    """What one rank measured.

    Args:
        seconds: of each step.
        peak: bytes that the recipe needed at most, the other recipes' left out where that can be told.
        recorded: the ops of one step more, where they were asked for.
        compute, exposed: milliseconds of that step: computing, and communication that nothing hid.
    """

    seconds: list[float]
    peak: int
    recorded: tuple[StepGraph, Recording] | None = None
    compute: float = 0.0
    exposed: float = 0.0


class _Ready(NamedTuple):
    recipe: Recipe
    engine: Engine
    groups: Groups
    batches: list[Any]
    before: int


def measure_turn(state: dict[str, Any], given: dict[str, Any], steps: int, keep: int, record: bool) -> Turn:
    """Steps of a recipe, behind one to warm up. Of every rank at once.

    Args:
        given: the recipe, as `Recipe.parse` reads it.
        keep: how many recipes' engines to keep; those used longest ago are given up.
        record: take a step more, and record its ops.
    """
    ready = _prepared(state, given, keep)
    device = state["device"]
    _forget_peak(device)
    _step(ready, device)
    seconds = [_step(ready, device) for _ in range(steps)]
    peak = _peak(device) - ready.before
    if not record:
        return Turn(seconds, peak)
    execution = ready.engine.execution
    execution.trace = trace = Trace(device)
    graph, _ = execution.step(ready.batches)
    _step(ready, device)
    execution.trace = None
    times = trace.times(graph)
    recorded = (graph, Recording(execution.order(graph), trace.spans))
    return Turn(seconds, peak, recorded, times["compute_ms"], times["exposed_comm_ms"])


def _prepared(state: dict[str, Any], given: dict[str, Any], keep: int) -> _Ready:
    kept: OrderedDict[str, _Ready] = state.setdefault("kept", OrderedDict())
    recipe = Recipe.parse(given)
    key = recipe.model_dump_json()
    if key in kept:
        kept.move_to_end(key)
        return kept[key]
    while len(kept) >= keep:
        _, old = kept.popitem(last=False)
        old.engine.close()
        old.groups.close()
        del old
    device = state["device"]
    _give_back(device)
    before = _now(device)
    groups = Groups.create(recipe.placed_fold, state["rank"])
    engine = make_engine(recipe, groups, device)
    batches = random_batches(recipe, groups, device)
    kept[key] = ready = _Ready(recipe, engine, groups, batches, before)
    execution = engine.execution
    _step(ready, device)
    if execution.lacks_costs:
        execution.trace = Trace(device)
        _step(ready, device)
        execution.learn_costs()
        execution.trace = None
    return ready


def _step(ready: _Ready, device: torch.device) -> float:
    """Seconds of a step, from when all ranks are there."""
    ready.groups.control.all_reduce(torch.zeros(1, device=device))
    _wait(device)
    begin = time.perf_counter()
    ready.engine.train(ready.batches)
    ready.engine.update(0.0)
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Memory: the allocator's on a GPU; on a CPU the process's own, whose peak Linux forgets when told to.


def _give_back(device: torch.device) -> None:
    """What is free goes back, or the next recipe would seem to need less than it does."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc
        trim(0)


def _now(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
