"""One host's process of overlap.py, which starts it: runs every variant in turn, and writes down what they took."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import GatedMlp
from overlap import SIDES, WARM_UP, arguments, model_of
from overlap_sweep import search, sweep
from torch import Tensor, nn

from foldray.blueprint import ModelSpec, Ownership
from foldray.comm import Communicator, Groups
from foldray.fold import Fold
from foldray.model import Batch, Transformer
from foldray.runtime import Execution, Gradients, Trace
from foldray.schedule import Ordering, SliceCost, named_ordering
from foldray.timeline import Recording, held_up, overlaps, replay

_STOLEN, _DRIFT, _TRIES = 0.05, 0.1, 4  # share of a core that may be missing, of C that it may change by; measurements at most


class Worker:
    """One host's process."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.rank = given, given.worker
        self.core = min(os.sched_getaffinity(0))  # the one that it is given
        torch.set_num_threads(1)
        torch.manual_seed(given.worker)
        host, port = given.store.split(":")
        store = dist.TCPStore(host, int(port), given.hosts, is_master=self.rank == 0)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=given.hosts)
        fold = Fold(given.hosts, ep=given.hosts)
        self.spec, self.groups = model_of(given), Groups.create(fold, self.rank)
        model = Transformer(Ownership(self.spec, fold), self.groups)
        self.gradients = Gradients(model, self.groups)
        self.execution = Execution(model, self.groups, self.gradients, reduces=given.gradients)
        self.execution.trace = Trace()
        self.exchanges = [model.block(layer).moe.exchange for layer in self.spec.moe_layers]
        text = torch.randint(0, self.spec.vocab, (given.batch, given.length + 1))
        self.batches = [Batch(text[:, :-1], text[:, 1:])]
        self.cost = SliceCost.of_model(self.spec.hidden, self.spec.heads)
        self.chosen: dict[str, Ordering] = {}  # by name, with what rounds of warming up have told
        self.picked: dict[str, dict[str, Any]] = {}  # by name, what a search for the size of chunks found
        self.measuring = False
        self.held_up: dict[str, list[float]] = {}  # by name, seconds that all-to-alls shared the link with chunks ahead of them

    def serve(self) -> None:
        """Measure, and let the first host write down what was found."""
        if self.given.sweep:
            found = sweep(self, self.given.sweep)
            if self.rank == 0:
                self.given.result.write_text(json.dumps(found))
            self.groups.close()
            return
        plan: dict[str, Callable[[], dict[str, float]]] = {name: partial(self.step, name) for name in self.given.variants}
        if self.given.peers:
            plan["deepspeed"] = self.peer()
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for number in range(WARM_UP + self.given.rounds):
            self.measuring = number >= WARM_UP
            said = f"round {number - WARM_UP + 1} of {self.given.rounds}: "
            if not self.given.peaks:
                self.tell(f"{said}C")
                self.alone = self.together(self.compute_alone)
                found["C"].append(self.alone)
            if plan and not self.given.peaks:
                self.tell(f"{said}X")
                found["X"].append(self.together(self.talk_alone))
                if self.given.gradients:
                    found["G"].append(self.together(self.reduce_alone))
            for name, run in plan.items():
                self.tell(f"{said}{name}")
                measured = self.together(run) if self.given.peaks or not self.measuring else self.undisturbed(run)
                found[name].append(measured)
            if not self.measuring:
                found.clear()
            if number == WARM_UP - 1:
                self.search_sizes()
        if self.rank == 0:
            document = {name: _medians(each) for name, each in found.items()}
            best = {
                name: [*each.forward, *each.backward]
                for name, each in self.chosen.items()
                if each.forward.row.has_lag or "stream" in name
            }
            found_out = {"bytes": self.bytes_sent(), "chosen": best, "held_up": self.held_up, "picked": self.picked}
            self.given.result.write_text(json.dumps({**document, **found_out}))
        self.groups.close()

    def search_sizes(self) -> None:
        """Of every variant that asks for it: the size of chunks that training's own search finds."""
        for name in (each for each in self.given.variants if each.endswith("=auto")):
            self.tell(f"search of {name}")
            self.execution.reorder(self.chosen[name])
            self.picked[name] = search(self, 0)
            self.chosen[name] = self.execution.ordering
        self.held_up.clear()

    def slowest(self, name: str | None) -> float:
        """Milliseconds of a step on the slowest host."""
        everyone: list[Any] = [None] * self.given.hosts
        dist.barrier()
        dist.all_gather_object(everyone, self.step(name)["step_ms"])
        return max(everyone)

    def tell(self, text: str) -> None:
        if self.rank == 0:
            print(f"\r{text:<60}", end="", file=sys.stderr)

    def together(self, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Run on all hosts; the slowest host's figures, for a step is done when all are. `stolen` is what others had of its core,
        `busy_ms` for how long that had work, the kernel's with messages among it.
        """
        everyone: list[Any] = [None] * self.given.hosts
        dist.barrier()
        begin, before = time.perf_counter(), _used(self.core)
        measured = run()
        busy, stolen = (now - then for now, then in zip(_used(self.core), before, strict=True))
        measured |= {"stolen": stolen / (time.perf_counter() - begin), "busy_ms": 1e3 * busy}
        dist.all_gather_object(everyone, measured)
        return {key: max(each[key] for each in everyone) for key in measured}

    def undisturbed(self, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Measure between two measurements of computation alone, which it is held against, until these agree."""
        tries: list[tuple[float, dict[str, float]]] = []
        while not tries or (tries[-1][0] > 1 and len(tries) < _TRIES):
            measured, before, self.alone = self.together(run), self.alone, self.together(self.compute_alone)
            drift = abs(math.log(self.alone["step_ms"] / before["step_ms"]))
            alone = {f"alone_{side}": (before[side] + self.alone[side]) / 2 for side in SIDES}
            tries.append((max(drift / _DRIFT, measured["stolen"] / _STOLEN), {**measured, **alone}))
        return min(tries, key=lambda each: each[0])[1]

    def bytes_sent(self) -> int:
        """What one host sends to the other in a step's all-to-alls: out and back, forward and backward, of every MoE block."""
        rows = self.given.batch * self.given.length * self.spec.topk * (self.given.hosts - 1) // self.given.hosts
        return 4 * len(self.spec.moe_layers) * rows * self.spec.hidden * 4

    def compute_alone(self) -> dict[str, float]:
        """The blocks uncut, with experts' rows going nowhere."""
        for exchange in self.exchanges:
            exchange.tokens = Communicator("tokens", self.groups.tokens.ranks, self.rank, None)
        self.execution.reduces = False
        measured = self.step("sequential")
        self.execution.reduces = self.given.gradients
        for exchange in self.exchanges:
            exchange.tokens = self.groups.tokens
        return measured

    def reduce_alone(self) -> dict[str, float]:
        """A step's reductions."""
        begin = time.perf_counter()
        self.gradients.reduce()
        took = (time.perf_counter() - begin) * 1e3
        return {"step_ms": took, "forward_ms": 0.0, "backward_ms": took}

    def talk_alone(self) -> dict[str, float]:
        """A step's all-to-alls, all under way at once: the most that the link carries."""
        rows = self.given.batch * self.given.length * self.spec.topk
        x_NH, even = torch.randn(rows, self.spec.hidden), [rows // self.given.hosts] * self.given.hosts
        found = {}
        for direction in ("forward", "backward"):
            dist.barrier()
            begin = time.perf_counter()
            talking = [self.groups.tokens.start_all_to_all(x_NH, even, even) for _ in range(2 * len(self.spec.moe_layers))]
            for pending in talking:
                pending.wait()
            found[f"{direction}_ms"] = (time.perf_counter() - begin) * 1e3
        return {**found, "step_ms": sum(found.values())}

    def step(self, name: str | None) -> dict[str, float]:
        """Forward and backward; the gradients stay where they are.

        Args:
            name: of a variant; None goes on as things are.
        """
        execution, trace = self.execution, self.execution.trace
        assert trace is not None
        ordering = execution.ordering
        if name is not None:
            ordering = self.chosen.get(name) or self._asked(name)
        if ordering != execution.ordering:
            execution.reorder(ordering)
        graph, _ = execution.step(self.batches)  # made before the clock runs
        before = _resident(anew=True)
        execution.train(self.batches)
        peak = _resident()
        self.gradients.zero()
        everyone: list[Any] = [None] * self.given.hosts
        dist.all_gather_object(everyone, Recording(execution.order(graph), trace.spans))
        if self.given.traces and self.rank == 0:
            self._keep_trace(name or "search", graph, [each.spans for each in everyone], trace.begin)
        if name is not None and not self.measuring:  # the last round of warming up counts
            execution.reorder(self._asked(name)._replace(reduction=ordering.reduction))
            if execution.lacks_costs:
                execution.learn_costs()
            self.chosen[name] = execution.ordering
        claimed, seen = overlaps(graph, execution.order(graph), trace.spans)
        simulated = replay(graph, everyone).seconds * 1e3
        if self.measuring:
            self.held_up.setdefault(name or "search", []).extend(held_up(graph, trace.spans))
        counts = {"claimed": claimed, "missed": claimed - seen, "peak_mib": peak, "before_mib": before}
        return {**trace.times(graph), "simulated_ms": simulated, **counts}

    def _asked(self, name: str) -> Ordering:
        """What a variant's name stands for, before anything is known of its ops."""
        return named_ordering(name.removesuffix("=auto"), self.given.length, self.cost)

    def _keep_trace(self, name: str, graph: Any, ranks: list, begin: float) -> None:
        from foldray.timeline import perfetto

        self.given.traces.mkdir(parents=True, exist_ok=True)
        (self.given.traces / f"{name.replace(':', '-')}.json").write_text(json.dumps(perfetto(graph, ranks, begin)))

    def peer(self) -> Callable[[], dict[str, float]]:
        """The same blocks around DeepSpeed's MoE layer."""
        stack = _deepspeed_stack(self.spec, self.execution.model, self.given.hosts)
        x_BLH = torch.randn(self.given.batch, self.given.length, self.spec.hidden)

        def run() -> dict[str, float]:
            self.execution.reorder(Ordering())  # whole sequences
            for parameter in stack.parameters():
                parameter.grad = None
            begin = time.perf_counter()
            loss = stack(x_BLH.clone().requires_grad_()).square().mean()
            turn = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            return {"step_ms": (end - begin) * 1e3, "forward_ms": (turn - begin) * 1e3, "backward_ms": (end - turn) * 1e3}

        return run


def _deepspeed_stack(spec: ModelSpec, model: Transformer, hosts: int) -> nn.Module:
    """Our norms and attention with DeepSpeed's gate, all-to-all and experts of the same size, capacity 1 as ours."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.moe.layer import MoE

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([model.block(layer) for layer in range(spec.layers)])
            settings: dict[str, Any] = {"ep_size": hosts, "k": 1, "capacity_factor": 1.0, "use_rts": False}
            made = [MoE(spec.hidden, GatedMlp(spec.hidden, spec.expert_hidden), hosts, **settings) for _ in spec.moe_layers]
            self.moes = nn.ModuleDict({str(layer): moe for layer, moe in zip(spec.moe_layers, made, strict=True)})
            for moe in made:
                moe.set_deepspeed_parallelism()

        def forward(self, x_BLH: Tensor) -> Tensor:
            (place,) = model.places(Batch(*[torch.zeros(x_BLH.shape[:2], dtype=torch.int64)] * 2))
            for layer in range(spec.layers):
                block = model.block(layer)
                x_BLH = block.attend(x_BLH, place)
                moe = self.moes[str(layer)] if spec.is_moe(layer) else None
                x_BLH = block.feed(x_BLH) if moe is None else x_BLH + moe(block.ffn_norm(x_BLH))[0]
            return x_BLH

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no compiling while we measure
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": "0", "WORLD_SIZE": str(hosts)}
    deepspeed.init_distributed("gloo", verbose=False)
    return Stack()


def _resident(anew: bool = False) -> float:
    """MiB that this process has held at most since it was last asked `anew`."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _used(core: int) -> tuple[float, float]:
    """Seconds for which a core has worked, and those that the machine below gave to others while it had work."""
    (line,) = [line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} ")]
    user, nice, system, _, _, interrupts, soft, stolen, *_ = (int(each) / os.sysconf("SC_CLK_TCK") for each in line.split()[1:])
    return user + nice + system + interrupts + soft, stolen


def _medians(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    columns = {key: [each[key] for each in rounds] for key in rounds[0]}
    return {key: {"median": statistics.median(c), "min": min(c), "max": max(c), "rounds": c} for key, c in columns.items()}


if __name__ == "__main__":
    Worker(arguments()).serve()
