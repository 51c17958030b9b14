"""The process of one host. overlap.py starts it. It runs all variants in turns, and writes their times."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from overlap import SIDES, WARM_UP, arguments, model_of
from peers import PEERS, Stack, missing
from torch import Tensor

from foldray.blueprint import Ownership
from foldray.blueprint.layout import smallest_slice
from foldray.clock import Recording, Span, perfetto, recorded_cost, replay, simulate
from foldray.comm import Groups, Pending
from foldray.finding import Found
from foldray.fold import Fold
from foldray.graph import Graph, Op, SliceCost, StepGraph
from foldray.model import Batch, Transformer, all_losses
from foldray.moe import Exchange, Layer, Received, Rows, Sent
from foldray.orders import Ordering, named_ordering
from foldray.runtime import Execution, Gradients, Trace
from trainers.measure.bench import shifted

_HALVINGS = 12
_STOLEN, _DRIFT, _TRIES = 0.05, 0.1, 4  # accepted share of a core that others take, accepted change of C, most measurements
_APART = 1e-4  # accepted distance of the median token's output from foldray's; a few tokens between two experts may go elsewhere


class Silent:
    """An exchange that sends nothing. As many rows arrive as in a real step, taken from the rows that are here.

    The first step passes everything on to the real exchange, and records the numbers of rows. They are the same in every step,
    because weights do not change.
    """

    def __init__(self, exchange: Exchange):
        self.real = exchange
        self.recorded: tuple[Sent, Received] | None = None
        self.silent = False

    def start_counts(self, sent: Sent) -> Received:
        if self.recorded is None:
            self.recorded = sent, Received.of(self.real.start_counts(sent).counts)
        return self.recorded[1]

    def start_out(self, rows: Rows, sent: Sent, received: Received) -> Pending:
        if not self.silent:
            return self.real.start_out(rows, sent, received)
        return _instead(rows, sum(received.rows_by_rank))

    def start_back(self, rows: Pending, sent: Sent, received: Received, room: int | None = None) -> Pending:
        if not self.silent:
            return self.real.start_back(rows, sent, received, room)
        return _instead(rows.wait(), sum(received.leaving_by_rank) if room is None else room)

    def rows(self) -> tuple[list[int], list[int]]:
        """Return the numbers of rows that come from every rank, and that go to every rank."""
        assert self.recorded is not None, "there was no step"
        _, received = self.recorded
        return received.rows_by_rank, received.leaving_by_rank


def _instead(rows: Sequence[Tensor], count: int) -> Pending:
    return Pending([], [_stretched(rows_NH, count)[:count] for rows_NH in rows])


def _stretched(rows_NH: Tensor, count: int) -> Tensor:
    """Return the rows, again and again, until there are at least `count`."""
    if count <= len(rows_NH):
        return rows_NH
    return rows_NH.repeat(-(-count // len(rows_NH)), 1) if len(rows_NH) else rows_NH.new_zeros(count, rows_NH.shape[1])


class SilentRing(NamedTuple):
    """A context-parallel group that sends nothing. The keys and values of other members are those of this rank."""

    size: int
    index: int  # type: ignore[assignment]  # a tuple has a method of this name

    def shift(self, tensors: Sequence[Tensor]) -> Pending:
        return Pending([], tensors)


class Worker:
    """The process of one host."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.rank = args, args.worker
        self.core = min(os.sched_getaffinity(0))  # the only core that the process may use
        torch.set_num_threads(1)
        torch.manual_seed(args.worker)
        host, port = args.store.split(":")
        store = dist.TCPStore(host, int(port), args.hosts, is_master=self.rank == 0)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=args.hosts)
        fold = Fold(args.hosts, cp=args.cp, ep=args.hosts)
        self.spec, self.groups = model_of(args), Groups.create(fold, self.rank)
        self.model = Transformer(Ownership(self.spec, fold), self.groups)
        self.gradients = Gradients(self.model, self.groups)
        self.execution = Execution(self.model, self.groups, self.gradients, reduces=args.gradients)
        self.execution.trace = Trace()
        self.layers: list[Layer] = [cast(Layer, self.model.block(layer).moe) for layer in self.spec.moe_layers]
        self.silent = [Silent(layer.exchange) for layer in self.layers]
        text = torch.randint(
            0, self.spec.vocab, (args.batch, args.length + 1), generator=torch.Generator().manual_seed(self.groups.dp_rank)
        )
        self.batches = [Batch(text[:, :-1], text[:, 1:])] * args.micro_batches
        self.cost = SliceCost.of_model(self.spec.hidden, self.spec.heads)
        self.chosen: dict[str, Ordering] = {}  # by variant, the ordering after the warm-up rounds
        self.found: dict[str, Found] = {}  # by variant, the list that was found last
        self.predicted: dict[str, Mapping[Op, Span]] = {}  # by variant, the spans of that list by the simulator
        self.measuring = False

    def serve(self) -> None:
        """Measure all variants. The first host writes the results."""
        plan: dict[str, Callable[[], dict[str, float]]] = {name: partial(self.step, name) for name in self.args.variants}
        self.tell("balance of routers")
        self.balance()
        plan |= self.peers()
        results: dict[str, list[dict[str, float]]] = defaultdict(list)
        for number in range(WARM_UP + self.args.rounds):
            self.measuring = number >= WARM_UP
            prefix = f"round {number - WARM_UP + 1} of {self.args.rounds}: "
            if not self.args.peaks:
                self.tell(f"{prefix}C")
                self.alone = self.together(self.compute_alone)
                results["C"].append(self.alone)
                if plan:
                    self.tell(f"{prefix}X")
                    results["X"].append(self.together(self.talk_alone))
            if plan and self.args.gradients and not self.args.peaks:
                results["G"].append(self.together(self.reduce_alone))
            for name, run in plan.items():
                self.tell(f"{prefix}{name}")
                measured = self.together(run) if self.args.peaks or not self.measuring else self.undisturbed(run)
                results[name].append(measured)
            if not self.measuring:
                results.clear()
        self.fullest = self.rows_of_the_fullest()
        if self.rank == 0:
            document = {name: _medians(rounds) for name, rounds in results.items()}
            lags = {name: chosen for name, chosen in self.chosen.items() if self._named(name).open and name not in self.found}
            best = {name: [*chosen.forward, *chosen.backward] for name, chosen in lags.items()}
            found = {name: {**found._asdict(), "schedule": ()} for name, found in self.found.items()}
            facts = {"bytes": self.bytes_sent(), "fullest": self.fullest, "chosen": best, "found": found}
            facts["missing"] = missing(set(self.args.peers) - set(results))
            self.args.result.write_text(json.dumps({**document, **facts}))
        self.groups.close()

    def balance(self) -> None:
        """Bisect the routers' biases, of logits or of the selection, until all experts have the same number of rows (nearly)."""
        for halvings in range(_HALVINGS):
            losses = all_losses(self.execution.evaluate(self.batches), self.groups.control)
            for (_, router), count_E in zip(self.model.routers(), losses.count_ME, strict=True):
                # Scores are at most 1, logits may be some units apart.
                bias_E, first = (router.bias, 0.25) if router.logit_bias is None else (router.logit_bias.data, 4.0)
                bias_E += first * 0.5**halvings * torch.sign(count_E.double().mean() - count_E).to(bias_E.dtype)

    def tell(self, text: str) -> None:
        if self.rank == 0:
            print(f"\r{text:<60}", end="", file=sys.stderr)

    def together(self, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Run on all hosts, and return the largest figures, because a step ends when all hosts have finished.

        `stolen` is the share of a core that other machines took. `busy_ms` is the time that a core worked, including the
        kernel's work for messages.
        """
        of_hosts: list[Any] = [None] * self.args.hosts
        dist.barrier()
        begin, before = time.perf_counter(), _used(self.core)
        measured = run()
        busy, stolen = (now - then for now, then in zip(_used(self.core), before, strict=True))
        measured |= {"stolen": stolen / (time.perf_counter() - begin), "busy_ms": 1e3 * busy}
        dist.all_gather_object(of_hosts, measured)
        return {key: max(figures[key] for figures in of_hosts) for key in measured}

    def undisturbed(self, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Measure between two measurements of computation alone, and repeat until the two agree."""
        tries: list[tuple[float, dict[str, float]]] = []
        while not tries or (tries[-1][0] > 1 and len(tries) < _TRIES):
            measured, before, self.alone = self.together(run), self.alone, self.together(self.compute_alone)
            drift = abs(math.log(self.alone["step_ms"] / before["step_ms"]))
            alone = {f"alone_{side}": (before[side] + self.alone[side]) / 2 for side in SIDES}
            tries.append((max(drift / _DRIFT, measured["stolen"] / _STOLEN), {**measured, **alone}))
        return min(tries, key=lambda attempt: attempt[0])[1]

    def rows_of_the_fullest(self) -> float:
        """Return the rows of the host with most rows over the mean, the largest of all blocks."""
        if self.args.peaks:
            return 1.0
        of_hosts: list[Any] = [None] * self.args.hosts
        dist.all_gather_object(of_hosts, [sum(silent.rows()[0]) for silent in self.silent])
        return max(max(counts) * len(counts) / sum(counts) for counts in zip(*of_hosts, strict=True))

    def bytes_sent(self) -> int:
        """Return the bytes that a host sends in a step: dispatch and combine, forward and backward, of every MoE block."""
        held = self.args.batch * self.args.length // self.args.cp
        rows = held * self.spec.topk * (self.args.hosts - 1) // self.args.hosts
        return self.args.micro_batches * 4 * len(self.spec.moe_layers) * rows * self.spec.hidden * 4

    def compute_alone(self) -> dict[str, float]:
        """Run the uncut blocks without all-to-alls."""
        ring = self.groups.context
        for layer, exchange in zip(self.layers, self.silent, strict=True):
            layer.exchange = exchange  # type: ignore[misc, assignment]  # experts are never padded here
        self._use_ring(SilentRing(ring.size, ring.index))
        self.execution.reduces = False
        if not self.silent[0].silent:
            self.step("sequential")
            for exchange in self.silent:
                exchange.silent = True
        measured = self.step("sequential")
        self.execution.reduces = self.args.gradients
        for layer, exchange in zip(self.layers, self.silent, strict=True):
            layer.exchange = exchange.real  # type: ignore[misc]
        self._use_ring(ring)
        return measured

    def _use_ring(self, ring: Any) -> None:
        for layer in range(self.spec.layers):
            self.model.block(layer).attention.ring = ring

    def reduce_alone(self) -> dict[str, float]:
        begin = time.perf_counter()
        self.gradients.reduce()
        milliseconds = (time.perf_counter() - begin) * 1e3
        return {"step_ms": milliseconds, "forward_ms": 0.0, "backward_ms": milliseconds}

    def talk_alone(self) -> dict[str, float]:
        """Run only the all-to-alls of a step, all at once, so the link carries as much as it can."""
        rows = [exchange.rows() for exchange in self.silent]
        x_NH = torch.randn(max(sum(counts) for both_ways in rows for counts in both_ways), self.spec.hidden)
        tokens = self.args.batch * self.args.length // self.args.cp
        block = torch.randn(tokens, 2 * self.spec.kv_heads * self.spec.head_dim)  # in backward, its gradient is as large
        times = {}
        for direction in ("forward", "backward"):
            dist.barrier()
            begin = time.perf_counter()
            pendings = [
                self.groups.tokens.start_all_to_all(x_NH[: sum(leaving)], arriving, leaving)
                for received, sent in rows * self.args.micro_batches
                for arriving, leaving in ((received, sent), (sent, received))
            ]
            pendings += [self.groups.context.start_all_gather(block) for _ in range(self.spec.layers * self.args.micro_batches)]
            for pending in pendings:
                pending.wait()
            times[f"{direction}_ms"] = (time.perf_counter() - begin) * 1e3
        return {**times, "step_ms": sum(times.values())}

    def step(self, name: str) -> dict[str, float]:
        """Run forward and backward of a variant, without an update."""
        execution, trace = self.execution, self.execution.trace
        assert trace is not None
        ordering = self.chosen.get(name) or self._named(name)
        if ordering != execution.ordering:
            execution.reorder(ordering)
        graph, _ = execution.step(self.batches)  # builds the graph before the clock starts
        before = _resident(anew=True)
        execution.train(self.batches)
        peak = _resident()
        self.gradients.zero()
        recordings: list[Any] = [None] * self.args.hosts
        dist.all_gather_object(recordings, Recording(execution.order(graph), trace.spans))
        if self.args.traces and self.rank == 0:
            self._write_trace(name, graph, recordings, trace.begin)
        if not self.measuring:  # the last warm-up round counts
            execution.reorder(self._named(name)._replace(reduction=ordering.reduction))
            if execution.lacks_costs:
                execution.learn_costs()
                if execution.found:
                    self.found[name] = execution.found
                    self.predicted[name] = simulate(graph, execution.found.schedule, recorded_cost(graph, recordings)).spans
            self.chosen[name] = execution.ordering
        claimed, seen = _overlaps(graph, execution.order(graph), trace.spans)
        simulated = replay(graph, recordings).seconds * 1e3
        counts = {"claimed": claimed, "missed": claimed - seen, "peak_mib": peak, "before_mib": before}
        return {**trace.times(graph), "simulated_ms": simulated, **counts}

    def peers(self) -> dict[str, Callable[[], dict[str, float]]]:
        """Return what runs a step with the layers of each project that is installed. They must compute what foldray does."""
        steps = dict[str, Callable[[], dict[str, float]]]()
        for name in self.args.peers:
            self.tell(name)
            try:
                with redirect_stdout(sys.stderr):  # some greet
                    stack = Stack(self.model, PEERS[name]())
            except ImportError:
                continue
            with torch.no_grad():
                expected_BLH = self.model.hidden(self.batches[0])
                apart_BL = (stack.hidden(self.batches[0]) - expected_BLH).norm(dim=-1) / expected_BLH.norm(dim=-1)
            if (apart := apart_BL.median().item()) > _APART:
                raise SystemExit(f"{name}: the output is off by {apart:.1e}")
            steps[name] = partial(self.step_of_peer, stack)
        return steps

    def step_of_peer(self, stack: Stack) -> dict[str, float]:
        self.execution.reorder(Ordering())  # whole sequences
        begin = time.perf_counter()
        loss = stack(self.batches[0])
        turn = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        stack.zero_grad()
        return {"step_ms": (end - begin) * 1e3, "forward_ms": (turn - begin) * 1e3, "backward_ms": (end - turn) * 1e3}

    def _named(self, name: str) -> Ordering:
        """Return the ordering of a variant before its op times are known."""
        return named_ordering(name, self.args.length, self.cost, smallest_slice(self.args.cp, 1))

    def _write_trace(self, name: str, graph: StepGraph, recordings: Sequence[Recording], begin: float) -> None:
        """Write the last step, and draw it above what the simulator expects: of a found list, what it was found for."""
        from trainers.pictures.timeline import draw_timelines

        self.args.traces.mkdir(parents=True, exist_ok=True)
        path = self.args.traces / f"{name.replace(':', '-').replace('/', '-')}.json"
        path.write_text(json.dumps(perfetto(graph, [recording.spans for recording in recordings], begin)))
        expected = self.predicted.get(name) or replay(graph, recordings, 0).spans
        rows = {"measured": shifted(recordings[0].spans, begin), "simulated": expected}
        draw_timelines(graph, rows, path.with_suffix(".png"), f"{name}: the first host")


def _overlaps(graph: Graph, order: Sequence[Op], spans: Mapping[Op, Span]) -> tuple[int, int]:
    """Count the collectives that a list should hide, and those that were hidden.

    The first number counts collectives that have computation between them and the first op that needs them. The second
    number counts those of them that were in flight during such computation.
    """
    users: dict[Op, int] = {}  # collective → index of the first op that needs it
    for place, op in enumerate(order):
        for need in graph.needs(op):
            if graph.channel(need) is not None:
                users.setdefault(need, place)
    claimed = seen = 0
    for place, op in enumerate(order):
        if graph.channel(op) is None:
            continue
        beside = [spans[between] for between in order[place + 1 : users.get(op, len(order))] if graph.channel(between) is None]
        claimed += bool(beside)
        seen += any(span.start < spans[op].end and spans[op].start < span.end for span in beside)
    return claimed, seen


def _resident(anew: bool = False) -> float:
    """Return the peak memory of this process in MiB. `anew` first resets the peak."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _used(core: int) -> tuple[float, float]:
    """Return the seconds that a core has worked, and the seconds that other machines took while it had work."""
    (line,) = [line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} ")]
    user, nice, system, _, _, interrupts, soft, stolen, *_ = (int(t) / os.sysconf("SC_CLK_TCK") for t in line.split()[1:])
    return user + nice + system + interrupts + soft, stolen


def _medians(rounds: list[dict[str, float]]) -> dict[str, dict[str, float | list[float]]]:
    columns = {key: [times[key] for times in rounds] for key in rounds[0]}
    return {key: {"median": statistics.median(c), "min": min(c), "max": max(c), "rounds": c} for key, c in columns.items()}


if __name__ == "__main__":
    Worker(arguments()).serve()
