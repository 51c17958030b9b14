"""The recorded spans of a step's ops on one rank. They have the form of the simulator's spans."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch.futures import Future

from foldray.clock import Span, usage
from foldray.comm import Pending
from foldray.graph import Graph, Op
from foldray.kinds import HANDOVER

Moment = Any
"""A moment on a clock. `Clock.seconds` reads it."""

Travelled = Callable[[Moment, Moment], None]


class Clock:
    """The clock of the device that computes: here a CPU, where an op is done when its call returns."""

    def __init__(self) -> None:
        self._news: list[Future] = []

    def start(self) -> None:
        """Begin a step."""

    def now(self) -> Moment:
        """Return the moment at which the device has done all that it has been given so far."""
        return perf_counter()

    def travel(self, op: Op, pending: Pending, call: Travelled) -> None:
        """Call a function with the moments at which data have left and arrived. Any thread may make the call."""
        self._news += pending.when_done(lambda: call(pending.began, perf_counter()))

    def finish(self) -> None:
        """Wait until all moments are over, and all calls have been made."""
        while self._news:
            self._news.pop().wait()

    def seconds(self, moment: Moment) -> float:
        """Return a moment in seconds of the host's clock (`time.perf_counter`), after `finish`."""
        return moment


class DeviceClock(Clock):
    """The clock of a GPU, which works later than the host calls. A moment is an event on a stream.

    The host waits for the GPU before and after a step, but not in between. So a recorded step overlaps as any other does. An
    operation that waits in a queue (`comm.DispatchQueue`) counts from the moment at which it lines up.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self._streams: dict[tuple[str, str, int], torch.cuda.Stream] = {}
        self._begin, self._zero = self.now(), perf_counter()

    def start(self) -> None:
        torch.cuda.synchronize(self.device)
        self._begin, self._zero = self.now(), perf_counter()

    def now(self) -> torch.cuda.Event:
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def travel(self, op: Op, pending: Pending, call: Travelled) -> None:
        # A stream of its own waits for the data. On one stream for all, a fast message would seem to wait for a slow one.
        key = op.kind, op.direction, op.layer if op.kind == HANDOVER else 0
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self.device)
        left = self.now()
        self._streams[key].wait_event(left)  # data of a single rank do not travel, and have no work to wait for
        self._news += pending.when_done(lambda: call(left, self.now()), self._streams[key])

    def finish(self) -> None:
        super().finish()
        torch.cuda.synchronize(self.device)

    def seconds(self, moment: torch.cuda.Event) -> float:
        return self._zero + self._begin.elapsed_time(moment) / 1e3


class Trace:
    """Spans of the ops of the last step, in seconds of this machine's clock.

    The span of an op that computes leaves out the wait for its inputs. The span of an op that communicates lasts from its
    start until all of its data have arrived. On a GPU, spans are those of the GPU, and the host does not wait in the step.
    """

    def __init__(self, device: torch.device | None = None):
        self.clock = DeviceClock(device) if device is not None and device.type == "cuda" else Clock()
        self.spans: dict[Op, Span] = {}
        self._moments: dict[Op, tuple[Moment, Moment]] = {}
        self.begin = self.end = 0.0
        self._began: Moment = self.clock.now()

    def start(self) -> None:
        """Begin a step."""
        self.spans, self._moments = {}, {}
        self.clock.start()
        self._began = self.clock.now()

    def ran(self, op: Op, began: Moment, pending: Pending | None) -> None:
        """Record an op from which the host has come back.

        Args:
            began: the moment at which an op that computes began to compute.
            pending: the data in flight of an op that communicates; None for an op that computes.
        """
        if pending is None:
            self._moments[op] = began, self.clock.now()
            return
        moments = self._moments  # those of this step, even if the call comes later
        self.clock.travel(op, pending, lambda left, arrived: moments.update({op: (left, arrived)}))

    def finish(self) -> None:
        """End the step, and wait until all data have arrived."""
        ended = self.clock.now()
        self.clock.finish()
        seconds = self.clock.seconds
        self.begin, self.end = seconds(self._began), seconds(ended)
        self.spans = {op: Span(seconds(start), seconds(end)) for op, (start, end) in self._moments.items()}

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
