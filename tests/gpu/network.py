"""Overlap on one GPU, with a stand-in for the network: rows travel to the host and back.

One rank of a fold over EP runs, and takes all others to be like itself: their rows for it are its own rows for its experts.
Its all-to-alls copy as many bytes as it would send, and then as many as it would receive, through pinned memory. The copy
engine takes no multiprocessor, as a network card that reads memory itself. A kernel of some CTAs takes one multiprocessor for
each, as NCCL's kernels do. This shows whether lists overlap, and whether a recorded step tells the simulator the truth.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # then rows travel over the copy engine alone
    triton = None

from foldray.clock import Recording, replay
from foldray.comm import Groups, Pending
from foldray.comm.communicator import Communicator
from foldray.model import Batch
from foldray.orders import Ordering
from foldray.recipe import Recipe
from foldray.runtime import Trace
from tests.gpu.block import BLOCKS, block_recipe, drawn_on_gpu, steps_in_turns
from tests.gpu.report import Report
from trainers.measure.comparison import random_batch
from trainers.worker.engines import make_engine

RANKS, ROUNDS, LENGTHS = 8, 5, (8192, 32768)
_OTHERS: dict[str, Any] = {"layers": 2, "head_dim": 128, "vocab": 1024, "moe_every": 1}
MODELS: dict[str, dict[str, Any]] = {name: {**sizes, **_OTHERS, "ffn_hidden": sizes["expert_hidden"]}
                                     for name, sizes in BLOCKS.items() if sizes["hidden"] != 6144}  # fmt: skip
SCHEDULES: dict[str, dict[str, Any]] = {
    "sequential": {}, "stream, 2 pieces": {"kind": "stream", "degree": 2}, "stream, 4 pieces": {"kind": "stream", "degree": 4},
    "list, 2 pieces": {"kind": "list", "degree": 2}, "list, 4 pieces": {"kind": "list", "degree": 4},
}  # fmt: skip
WIRES = ("none", "copy engine", "8 CTAs", "32 CTAs")


class Wire:
    """What stands in for the network.

    Args:
        most: bytes of the largest message.
    """

    def __init__(self, most: int):
        self.kind = WIRES[0]
        self.stream = torch.cuda.Stream(priority=-1)
        self._pinned = torch.empty(most, dtype=torch.uint8, pin_memory=True)

    def travel(self, away: torch.Tensor, back: torch.Tensor) -> None:
        """Copy bytes to the host, and others from there."""
        self._copy(self._pinned[: away.nbytes], away)
        self._copy(back, self._pinned[: back.nbytes])

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.kind == "copy engine":
            target.copy_(source, non_blocking=True)
        elif self.kind.endswith(" CTAs") and len(source):
            ctas = int(self.kind.split()[0])
            _copy_words[(ctas,)](source.view(torch.int32), target.view(torch.int32), len(source) // 4, BLOCK=8192, num_warps=16)


if triton is not None:

    @triton.jit
    def _copy_words(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


class Copies(Communicator):
    """All-to-alls over the stand-in."""

    wire: Wire

    @classmethod
    def of(cls, communicator: Communicator, wire: Wire) -> Copies:
        found = cls(**vars(communicator))
        object.__setattr__(found, "wire", wire)
        return found

    def start_all_to_all(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int], room: int | None = None) -> Pending:
        assert room is None, "tokens travel for each assignment here"
        out = x.new_empty((sum(received), *x.shape[1:]))
        self.wire.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.wire.stream):
            away = self._bytes_of(x, sum(sent) - sent[self.index])
            self.wire.travel(away, self._bytes_of(out, sum(received) - received[self.index]))
            for start in range(0, len(out), max(1, len(x))):  # so that experts compute on real rows
                out[start : start + len(x)].copy_(x[: len(out) - start])
            done = torch.cuda.Event()
            done.record()
        return Pending([_Copied(done)], (out,), (x,))

    def _bytes_of(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        return x[:rows].view(torch.uint8).flatten()


class Same(Communicator):
    """Collectives with ranks that are all like this one, and therefore send what this one sends itself. Nothing travels."""

    def start_all_gather(self, x: torch.Tensor) -> Pending:
        return Pending([], (x.repeat(self.size, *[1] * (x.dim() - 1)),))

    def start_all_reduce(self, x: torch.Tensor, reduction: str = "sum") -> Pending:
        return Pending([], (x.mul_(self.size) if reduction == "sum" else x,))

    def start_all_to_all(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int], room: int | None = None) -> Pending:
        assert room is None, "tokens travel for each assignment here"
        own = x.split(list(sent))[self.index]
        return Pending([], (torch.cat([own[:rows] for rows in received]),))


class _Copied:
    def __init__(self, done: torch.cuda.Event):
        self._done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)


def run(report: Report) -> None:
    for name, model in MODELS.items():
        for length in LENGTHS:
            report.check("network", f"{name}, {RANKS} ranks, {length} tokens", lambda m=model, n=length: measure(report, m, n))
            torch.cuda.empty_cache()


def measure(report: Report, model: dict[str, Any], length: int) -> dict[str, Any]:
    """Measure schedules in turns, wire by wire. Each row has its milliseconds, those of its recorded step, and those that the
    simulator gives."""
    engine, wire, given, recipes = made(model, length)
    rows = {}
    for wire.kind in WIRES if triton is not None else WIRES[:2]:
        for name, row in _in_turns(engine, given, recipes).items():
            rows[f"{wire.kind}, {name}"] = row
            report.say(f"  {wire.kind}, {name}: " + " ".join(f"{key} {value:.4g}" for key, value in row.items()))
    return rows


def made(model: dict[str, Any], length: int) -> tuple[Any, Wire, list[Batch], dict[str, Recipe]]:
    """Return the engine of a rank whose rows travel over a stand-in, the stand-in, a batch, and the recipes of all schedules."""
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    device = torch.device("cuda")
    recipes = {name: block_recipe(model, length, schedule, RANKS) for name, schedule in SCHEDULES.items()}
    first = recipes["sequential"]
    groups = Groups.create(first.placed_fold, 0)
    others = {each.name: Same(**vars(each)) for each in vars(groups).values() if isinstance(each, Communicator)}
    wire = Wire(2 * length * model["topk"] * model["hidden"] * 2)
    with drawn_on_gpu():
        engine: Any = make_engine(first, replace(groups, **others | {"tokens": Copies.of(groups.tokens, wire)}), device)
    return engine, wire, [random_batch(first, 0, 1, 0, device)], recipes


def _in_turns(engine: Any, given: list[Batch], recipes: dict[str, Recipe]) -> dict[str, dict[str, float]]:
    orderings = {name: _learned(engine, given, recipe) for name, recipe in recipes.items()}
    took = steps_in_turns(engine, given, orderings, ROUNDS)
    rows = {}
    for name, ordering in orderings.items():
        engine.execution.reorder(ordering)
        graph, order = engine.execution.step(given)
        engine.execution.trace = trace = Trace(torch.device("cuda"))
        engine.train(given)
        engine.train(given)
        engine.execution.trace = None
        simulated = replay(graph, [Recording(order, trace.spans)]).seconds * 1e3
        times = [statistics.median(took[name]), min(took[name]), max(took[name])]
        rows[name] = dict(zip(("ms", "min", "max"), times, strict=True)) | {"simulated_ms": simulated, **trace.times(graph)}
    return rows


def _learned(engine: Any, given: list[Batch], recipe: Recipe) -> Ordering:
    """Choose what depends on times, as training does. Return the ordering."""
    engine.execution.reorder(recipe.ordering)
    engine.execution.trace = Trace(torch.device("cuda"))
    for _ in range(3):
        engine.train(given)
        if engine.execution.lacks_costs:
            engine.execution.learn_costs()
    engine.execution.trace = None
    return engine.execution.ordering
