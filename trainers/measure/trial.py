"""Measures steps of recipes on ranks, for a tuner.

A step is the same as in training: forward, backward, reductions of gradients, and the update. The learning rate is zero, so
weights do not change, and recipes may take turns.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foldray.clock import Recording
from foldray.comm import Groups, nccl
from foldray.graph import StepGraph
from foldray.recipe import Recipe
from foldray.runtime import Engine, Trace
from trainers.measure.comparison import random_batches
from trainers.measure.meter import together, wait_for
from trainers.worker.engines import make_engine
from trainers.worker.online import Knobs
from trainers.worker.orders import online_search


class Turn(NamedTuple):
    """The measurements of one rank.

    Args:
        seconds: seconds of each step.
        peak: largest number of bytes that the recipe needed, as far as possible without the bytes of other recipes.
        recorded: graph and ops of one more step, if they were to be recorded.
        step, compute, exposed: milliseconds of that step, of its computation and of its exposed communication.
    """

    seconds: list[float]
    peak: int
    recorded: tuple[StepGraph, Recording] | None = None
    step: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0


class _Ready(NamedTuple):
    recipe: Recipe
    engine: Engine
    groups: Groups
    batches: list[Any]
    before: int


def measure_turn(state: dict[str, Any], given: dict[str, Any], steps: int, keep: int, record: bool) -> Turn:
    """Measure steps of a recipe, after one step to warm up. All ranks must call this at the same time.

    Args:
        state: state of the rank, which holds engines from call to call.
        given: the recipe, as `Recipe.parse` reads it.
        keep: number of recipes whose engines stay in memory. The engine of the recipe that was used longest ago is closed
            first.
        record: run one more step, and record its ops.
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
    return Turn(seconds, peak, recorded, times["step_ms"], times["compute_ms"], times["exposed_comm_ms"])


def _prepared(state: dict[str, Any], given: dict[str, Any], keep: int) -> _Ready:
    engines: OrderedDict[str, _Ready] = state.setdefault("kept", OrderedDict())
    recipe = Recipe.parse(given)
    key = recipe.model_dump_json()
    if key in engines:
        engines.move_to_end(key)
        return engines[key]
    while len(engines) >= keep:
        _, old = engines.popitem(last=False)
        old.engine.close()
        old.groups.close()
        del old
    device = state["device"]
    _give_back(device)
    before = _now(device)
    nccl.take_adapters(recipe.adapters[state["rank"]])
    groups = Groups.create(recipe.placed_fold, state["rank"])
    engine = make_engine(recipe, groups, device)
    batches = random_batches(recipe, groups, device)
    engines[key] = ready = _Ready(recipe, engine, groups, batches, before)
    execution = engine.execution
    _choose_order(ready, device, state.setdefault("chosen", {}), key)
    _step(ready, device)
    execution.trace = Trace(device)
    while execution.lacks_costs:
        _step(ready, device)
        execution.learn_costs()
    execution.trace = None
    return ready


def _choose_order(ready: _Ready, device: torch.device, chosen: dict[str, Knobs], key: str) -> None:
    """Choose the order of `schedule.kind: auto` as training would, in steps before the measured ones.

    What was chosen for a recipe is kept, so an engine that is built again has the same order.
    """
    search, online = online_search(ready.recipe, ready.engine.execution, device, None, lambda: 0)
    if search is None or not online.worth():
        return
    if key in chosen:
        online.choose(chosen[key])
        return
    steps = online.search(search, lambda record: None)
    with suppress(StopIteration):
        next(steps)
        while True:
            steps.send(_step(ready, device))
    assert online.chosen is not None
    chosen[key] = online.chosen


def _step(ready: _Ready, device: torch.device) -> float:
    """Run a step and return its seconds. The clock starts when all ranks are ready."""
    together(ready.groups.control, device)
    begin = time.perf_counter()
    ready.engine.train(ready.batches)
    ready.engine.update(0.0)
    wait_for(device)
    return time.perf_counter() - begin


# On a GPU, memory is the memory of torch's allocator. On a CPU, it is the memory of the process, whose peak Linux can reset.


def _give_back(device: torch.device) -> None:
    """Return free memory to the system. Otherwise the next recipe would use it, and seem to need less."""
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
