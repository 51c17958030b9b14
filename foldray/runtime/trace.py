"""What ran when: a record of one step on one rank, as the simulator would draw it."""

from __future__ import annotations

from time import perf_counter

import torch

from foldray.comm import Pending
from foldray.schedule import Graph, Op, Span
from foldray.timeline import usage


class Trace:
    """Spans of the ops of the last step, in seconds of this machine's clock.

    Of an op that computes, waiting for what it needs is left out. One that communicates is in flight from its start to the
    moment when all of it has arrived. On a GPU the host waits for every op, so that its end can be told: that costs time, and
    overlap of the host with the device.
    """

    def __init__(self, device: torch.device | None = None):
        self._gpu = device is not None and device.type == "cuda"
        self.spans: dict[Op, Span] = {}
        self._news: list[torch.futures.Future] = []
        self.begin = self.end = perf_counter()

    def start(self) -> None:
        """A step begins."""
        self.spans = {}
        self.begin = perf_counter()

    def ran(self, op: Op, began: float, pending: Pending | None) -> None:
        """The host has come back from an op.

        Args:
            began: when an op that computes began to.
            pending: what one that communicates has on its way.
        """
        now = perf_counter()
        if pending is not None:
            spans = self.spans  # of this step, whenever the news comes
            self._news += pending.when_done(lambda: spans.update({op: Span(now, perf_counter())}))
            return
        if self._gpu:
            torch.cuda.synchronize()
        self.spans[op] = Span(began, perf_counter())

    def finish(self) -> None:
        """The step is done."""
        self.end = perf_counter()
        while self._news:
            self._news.pop().wait()

    def times(self, graph: Graph) -> dict[str, float]:
        """Milliseconds of the last step: step_ms, forward_ms, backward_ms, compute_ms, comm_ms, exposed_comm_ms (`Usage`)."""
        sides = {"F": 0.0, "B": 0.0}  # by what the step was at: passes take turns when there are several micro-batches
        at = self.begin
        for op, span in sorted(self.spans.items(), key=lambda item: item[1]):
            if graph.channel(op) is None:
                sides["F" if op.direction == "F" else "B"] += span.end - at
                at = span.end
        sides["B"] += self.end - at
        used = usage(graph, self.spans)
        seconds = {
            "step_ms": self.end - self.begin, "forward_ms": sides["F"], "backward_ms": sides["B"],
            "compute_ms": used.compute, "comm_ms": used.communication, "exposed_comm_ms": used.exposed,
        }  # fmt: skip
        return {name: value * 1e3 for name, value in seconds.items()}
