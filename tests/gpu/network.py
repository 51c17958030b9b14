"""Overlap on one GPU, with a stand-in for the network: rows travel to the host and back, over the copy engine.

One rank of a fold over EP runs, and takes all others to be like itself: their rows for it are its own rows for its experts.
Its all-to-alls copy as many bytes as it would send, and then as many as it would receive, through pinned memory. This takes no
multiprocessor, as a network card that reads memory itself. It shows whether lists overlap, and whether a recorded step tells
the simulator the truth.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from foldray.comm import Groups, Pending
from foldray.comm.communicator import Communicator
from foldray.recipe import Recipe
from foldray.runtime import Trace
from foldray.timeline import Recording, replay
from tests.gpu.block import drawn_on_gpu, timed
from tests.gpu.report import Report
from trainers.measure.comparison import random_batch
from trainers.worker.engines import make_engine

RANKS, ROUNDS = 8, 5
MODEL = {"layers": 2, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 14336, "experts": 8, "topk": 2,
         "expert_hidden": 14336, "vocab": 1024, "moe_every": 1}  # fmt: skip
SCHEDULES: dict[str, dict[str, Any]] = {
    "sequential": {}, "stream, 2 pieces": {"kind": "stream", "degree": 2}, "stream, 4 pieces": {"kind": "stream", "degree": 4},
    "list, 2 pieces": {"kind": "list", "degree": 2},
}  # fmt: skip


class Copies(Communicator):
    """All-to-alls over the copy engine."""

    stream: torch.cuda.Stream
    pinned: torch.Tensor

    @classmethod
    def of(cls, communicator: Communicator, most: int) -> Copies:
        found = cls(**vars(communicator))
        object.__setattr__(found, "stream", torch.cuda.Stream(priority=-1))
        object.__setattr__(found, "pinned", torch.empty(most, dtype=torch.uint8, pin_memory=True))
        return found

    def start_all_to_all(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int], room: int | None = None) -> Pending:
        assert room is None, "tokens travel for each assignment here"
        out = x.new_zeros((sum(received), *x.shape[1:]))
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            away = self._copied(x, sum(sent) - sent[self.index])
            back = self._copied(out, sum(received) - received[self.index])
            self.pinned[: away.nbytes].copy_(away, non_blocking=True)
            back.copy_(self.pinned[: back.nbytes], non_blocking=True)
            out.copy_(x[torch.arange(len(out), device=x.device) % max(1, len(x))])  # so that experts compute on real rows
            done = torch.cuda.Event()
            done.record()
        return Pending([_Copied(done)], (out,), (x,))

    def _copied(self, x: torch.Tensor, rows: int) -> torch.Tensor:
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
    report.check("network", f"{RANKS} ranks, 8192 tokens", lambda: measure(report, 8192))


def measure(report: Report, length: int) -> dict[str, Any]:
    """Measure schedules in turns; each row has its milliseconds, those of its traced step, and those that the simulator gives."""
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    device, engines = torch.device("cuda"), {}
    recipes = {name: _recipe(length, schedule) for name, schedule in SCHEDULES.items()}
    first = recipes["sequential"]
    groups = Groups.create(first.placed_fold, 0)
    others = {each.name: Same(**vars(each)) for each in vars(groups).values() if isinstance(each, Communicator)}
    groups = replace(groups, **others | {"tokens": Copies.of(groups.tokens, 2 * length * MODEL["topk"] * MODEL["hidden"] * 2)})
    with drawn_on_gpu():
        engine: Any = make_engine(first, groups, device)
    given = [random_batch(first, 0, 1, 0, device)]
    execution, took, rows = engine.execution, {name: list[float]() for name in recipes}, {}
    for name, recipe in recipes.items():  # what depends on times is chosen first
        execution.reorder(recipe.ordering)
        execution.trace = Trace(device)
        for _ in range(3):
            engine.train(given)
            if execution.lacks_costs:
                execution.learn_costs()
        engines[name] = execution.ordering
        execution.trace = None
    for number in range(2 + ROUNDS):
        for name in recipes:
            execution.reorder(engines[name])
            execution.step(given)
            milliseconds, _ = timed(lambda: engine.train(given))
            took[name] += [milliseconds] if number >= 2 else []
    for name in recipes:
        execution.reorder(engines[name])
        execution.trace = trace = Trace(device)
        graph, order = execution.step(given)
        engine.train(given)
        engine.train(given)
        simulated = replay(graph, [Recording(order, trace.spans)]).seconds * 1e3
        times, execution.trace = trace.times(graph), None
        middle = statistics.median(took[name])
        rows[name] = {"ms": middle, "min": min(took[name]), "max": max(took[name]), "simulated_ms": simulated, **times}
        report.say(f"  {name:18} " + " ".join(f"{key} {value:.4g}" for key, value in rows[name].items()))
    return rows


def _recipe(length: int, schedule: dict[str, Any]) -> Recipe:
    return Recipe.parse(
        {
            "model": MODEL,
            "data": {"seq_len": length},
            "precision": "bfloat16",
            "engine": {"kind": "torch"},
            "fold": {"ep": RANKS},
            "cluster": {"workers": RANKS},
            "training": {"global_batch": RANKS},
            "optimizer": {"kind": "sgd"},
            "schedule": schedule,
        }
    )
