"""Captured ops on a GPU: whether they compute the same bits, and what they save.

The first checks take a minute, and decide: if one fails, `schedule.graphs` must stay off. `Machine` has all that a GPU does, so a
test rehearses the script on a CPU with the stand-in for graphs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from foldray.comm import Groups
from foldray.model import Batch
from foldray.orders import Ordering
from foldray.recipe import Recipe
from foldray.runtime import Trace
from foldray.runtime.graphs import EAGER_STEPS, Captures, CudaRecorder, Recorder
from tests.gpu import network
from tests.gpu.block import BLOCKS, block_recipe, drawn_on_gpu, kernels_of, peak_of, timed
from tests.gpu.report import Report
from trainers.measure.comparison import random_batch
from trainers.worker.engines import captured_kinds, make_engine

SMALL: dict[str, Any] = {
    "layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn_hidden": 256, "experts": 8, "topk": 2,
    "expert_hidden": 256, "shared_hidden": 128, "vocab": 512, "moe_every": 1, "router": {"balance_loss": 0.01, "z_loss": 0.001},
}  # fmt: skip
LISTS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "stream, 2 pieces": {"kind": "stream", "degree": 2},
    "stream, 4 pieces": {"kind": "stream", "degree": 4},
    "list, 2 pieces": {"kind": "list", "degree": 2},
    "stream, apart": {"kind": "stream", "degree": 4, "weight_gradients": "apart"},
    "attention again": {"kind": "stream", "degree": 2, "recompute": ["attention"]},
}
STEPS, ROUNDS = 6, 7


class Machine(NamedTuple):
    """What captures, and what measures.

    Args:
        eager: a context for the steps before the one that captures.
        timed: step → its milliseconds, and those until the host came back.
        kernels: step → what it has run, by name.
        peak: step → the most memory that it takes, in GiB.
    """

    device: torch.device
    recorder: Callable[[], Recorder]
    timed: Callable[[Any], tuple[float, float]] = timed
    kernels: Callable[[Any], dict[str, Any]] = kernels_of
    peak: Callable[[Any], float] = peak_of
    eager: Callable[[], AbstractContextManager[None]] = nullcontext


def run(report: Report) -> None:
    device = torch.device("cuda")
    machine = Machine(device, lambda: CudaRecorder(device))
    for name, schedule in LISTS.items():
        report.check("graphs", f"bits, {name}", lambda s=schedule: bits(machine, SMALL, 512, s))
    report.check(
        "graphs", "bits, another list", lambda: bits(machine, SMALL, 512, LISTS["sequential"], LISTS["stream, 4 pieces"])
    )
    report.check("graphs", "replay, µs", lambda: {f"{n} kernels": 1e3 * _replay(device, n) for n in (10, 50, 150)})
    fine = {
        **BLOCKS["2048/768, 128 experts, top 8"],
        "layers": 1,
        "head_dim": 128,
        "ffn_hidden": 768,
        "vocab": 1024,
        "moe_every": 1,
    }
    report.check("graphs", "host, 2048/768, 4096 tokens, 4 pieces", lambda: host(machine, fine, 4096))
    for name, model in network.MODELS.items():
        report.check("graphs", f"{name}, one rank, 8192 tokens", lambda m=model: block(machine, m, 8192))
        torch.cuda.empty_cache()
    for name, model in network.MODELS.items():
        report.check("graphs", f"{name}, EP8, 8192 tokens", lambda m=model: over_network(machine, m, 8192))
        torch.cuda.empty_cache()


class Steps:
    """Steps of an engine by one list or another, with graphs and without them."""

    def __init__(self, machine: Machine, engine: Any, given: list[Batch], kinds: set[str]):
        self.machine, self.engine, self.given, self.kinds = machine, engine, given, kinds
        self._captures: dict[str, Captures] = {}
        self._held: list[Any] = []

    @classmethod
    def of(cls, machine: Machine, recipe: Recipe) -> Steps:
        with drawn_on_gpu():
            engine = make_engine(recipe, Groups.create(recipe.placed_fold), machine.device)
        kinds = captured_kinds(recipe, machine.device)
        return cls(machine, engine, [random_batch(recipe, 0, 1, 0, machine.device)], kinds)

    def train(self, given: list[Batch] | None = None) -> list[torch.Tensor]:
        """Train a step, and return its loss and the sums of its gradients."""
        (losses, *_), gradients = self.engine.train(given or self.given), self.engine.execution.gradients
        found = [losses.language.clone(), *(buffer.sums.clone() for buffer in gradients.buffers)]
        gradients.zero()
        return found

    def use(self, name: str, ordering: Ordering, graphs: bool) -> None:
        """Use a list from the next step on. Its graphs are kept by its name, whatever is used meanwhile."""
        execution, model = self.engine.execution, self.engine.model
        self._held.append((dict(model._positions), dict(model._places)))  # graphs read them
        execution.captures = None
        execution.reorder(ordering)
        if graphs and name not in self._captures:
            self._captures[name] = execution.captures = Captures(self.machine.recorder(), self.kinds)
            for _ in range(EAGER_STEPS):
                with self.machine.eager():
                    self.train()
        execution.captures = self._captures[name] if graphs else None
        self.train()

    def learned(self, ordering: Ordering) -> Ordering:
        """Return an ordering with all that depends on times, as training finds it."""
        execution = self.engine.execution
        execution.captures = None
        execution.reorder(ordering)
        execution.trace = Trace(self.machine.device)
        for _ in range(3):
            self.train()
            if execution.lacks_costs:
                execution.learn_costs()
        execution.trace = None
        return execution.ordering

    def in_turns(self, orderings: Mapping[str, Ordering]) -> dict[str, dict[str, Any]]:
        """Measure lists with graphs and without them, in turns."""
        variants = {
            f"{name}{', graphs' * graphs}": (ordering, graphs) for name, ordering in orderings.items() for graphs in (False, True)
        }
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        for _ in range(ROUNDS):
            for name, variant in variants.items():
                self.use(name, *variant)
                took[name].append(self.machine.timed(lambda: self.engine.train(self.given)))
        rows = {}
        for name, variant in variants.items():
            self.use(name, *variant)
            device_ms, host_ms = zip(*took[name], strict=True)
            times = {"ms": statistics.median(device_ms), "min": min(device_ms), "max": max(device_ms)}
            held = {**self.machine.kernels(self.train), "peak_gib": self.machine.peak(self.train)}
            rows[name] = {**times, "host_ms": statistics.median(host_ms), **held}
        return rows


def bits(machine: Machine, model: dict[str, Any], length: int, *schedules: dict[str, Any]) -> dict[str, float]:
    """Compare steps with graphs to steps without, bit by bit, for one list after another. Return the memory of both.

    Raises:
        AssertionError: bits differ.
    """
    recipes = [block_recipe(model, length, schedule) for schedule in schedules]
    steps, found = Steps.of(machine, recipes[0]), dict[str, float]()
    texts = [[random_batch(recipes[0], step, 1, 0, machine.device)] for step in range(STEPS)]
    for number, recipe in enumerate(recipes):
        ordering = steps.learned(recipe.ordering)
        steps.use("eager", ordering, graphs=False)
        eager, found["eager_gib"] = [steps.train(text) for text in texts], machine.peak(steps.train)
        steps.use(str(number), ordering, graphs=True)
        for step, (text, numbers) in enumerate(zip(texts, eager, strict=True)):
            assert all(map(torch.equal, numbers, steps.train(text))), f"list {number}, step {step}: other bits"
        found["graphs_gib"] = machine.peak(steps.train)
    return found


def host(machine: Machine, model: dict[str, Any], length: int) -> dict[str, dict[str, float]]:
    """Return the median microseconds of the host for an op by kind, with graphs and without them."""
    recipe, found = block_recipe(model, length, LISTS["stream, 4 pieces"]), dict[str, dict[str, float]]()
    steps = Steps.of(machine, recipe)
    for name, graphs in {"eager": False, "graphs": True}.items():
        steps.use(name, recipe.ordering, graphs)
        took: dict[str, list[float]] = {}
        steps.engine.execution.trace = trace = Trace()  # the host's clock
        for _ in range(ROUNDS):
            steps.train()
            for op, span in trace.spans.items():
                took.setdefault(f"{op.kind} {op.direction}", []).append((span.end - span.start) * 1e6)
        steps.engine.execution.trace = None
        found[name] = {kind: statistics.median(times) for kind, times in took.items()}
    return found


def block(machine: Machine, model: dict[str, Any], length: int, degrees: tuple[int, ...] = (1, 2, 4)) -> dict[str, Any]:
    """Measure a rank that holds all experts, in pieces."""
    schedules = {f"{d} pieces": {"kind": "stream", "degree": d} if d > 1 else {} for d in degrees}
    orderings = {name: block_recipe(model, length, schedule).ordering for name, schedule in schedules.items()}
    return Steps.of(machine, block_recipe(model, length, {})).in_turns(orderings)


def over_network(machine: Machine, model: dict[str, Any], length: int) -> dict[str, Any]:
    """Measure a rank of EP8 over the stand-in for the network: lists with graphs and without them, wire by wire."""
    engine, wire, given, recipes = network.made(model, length)
    kinds = captured_kinds(next(iter(recipes.values())), machine.device)
    steps, rows = Steps(machine, engine, given, kinds), dict[str, Any]()
    for wire.kind in network.WIRES[:2]:
        orderings = {f"{wire.kind}, {name}": steps.learned(recipe.ordering) for name, recipe in recipes.items()}
        rows |= steps.in_turns(orderings)
    return rows


def _replay(device: torch.device, kernels: int) -> float:
    """Return the milliseconds that the host takes to replay a graph of small kernels."""
    x, recorder = torch.ones(8, device=device), CudaRecorder(device)

    def add() -> torch.Tensor:
        for _ in range(kernels):
            x.add_(1)
        return x

    _, replay = recorder.record(0, None, add, ())  # type: ignore[arg-type]
    return statistics.median(timed(lambda: replay(()))[1] for _ in range(20))
