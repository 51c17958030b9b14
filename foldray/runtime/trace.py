"""The recorded spans of a step's ops on one rank. They have the form of the simulator's spans."""

from __future__ import annotations

from time import perf_counter

import torch

from foldray.comm import Pending
from foldray.schedule import Graph, Op, Span
from foldray.timeline import usage


class Trace:
    """Spans of the ops of the last step, in seconds of this machine's clock.

    The span of an op that computes leaves out the wait for its inputs. The span of an op that communicates lasts from its
    start until all of its data have arrived. On a GPU, the host waits for the end of every op that computes. This takes
    time, and the host no longer overlaps with the device.
    """

    def __init__(self, device: torch.device | None = None):
        self._gpu = device is not None and device.type == "cuda"
        self.spans: dict[Op, Span] = {}
        self._news: list[torch.futures.Future] = []
        self.begin = self.end = perf_counter()

    def start(self) -> None:
        """Begin a step."""
        self.spans = {}
        self.begin = perf_counter()

    def ran(self, op: Op, began: float, pending: Pending | None) -> None:
        """Record an op from which the host has come back.

        Args:
            began: time at which an op that computes began to compute.
            pending: the data in flight of an op that communicates; None for an op that computes.
        """
        if pending is not None:
            spans, flying = self.spans, pending  # the spans of this step, even if the call comes later
            self._news += pending.when_done(lambda: spans.update({op: Span(flying.began, perf_counter())}))
            return
        if self._gpu:
            torch.cuda.synchronize()
        self.spans[op] = Span(began, perf_counter())

    def finish(self) -> None:
        """End the step, and wait until all data have arrived."""
        self.end = perf_counter()
        while self._news:
            self._news.pop().wait()

    def times(self, graph: Graph) -> dict[str, float]:
        """Return times of the last step, in milliseconds.

        The keys are step_ms, forward_ms, backward_ms, compute_ms, comm_ms and exposed_comm_ms (`Usage`).
        """
        sides = {"F": 0.0, "B": 0.0}  # the time up to the end of an op counts for its direction; recomputation is B
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
