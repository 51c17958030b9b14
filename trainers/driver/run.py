"""The driver's view of a training: the run's folder, MLflow run and progress line. The workers' records feed all three."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from foldray.recipe import Recipe
from trainers.cluster.elastic import larger_world
from trainers.data.mixture import Mixture, baselines, counts_by_source
from trainers.data.packed import PackedData
from trainers.faults.attempts import Failure
from trainers.faults.failures import failure_of, kinds_of
from trainers.faults.watch import Standstill, Watch
from trainers.sinks.mlflow_run import Status, Tracker
from trainers.sinks.prometheus import Gauges
from trainers.sinks.run_folder import RunFolder, Summary, read_history, read_run
from trainers.sinks.terminal import Console
from trainers.telemetry.history import LOAD_WINDOW
from trainers.telemetry.mailbox import Inbox
from trainers.telemetry.metrics import metrics_of
from trainers.telemetry.records import Beat, Record, Sink

_log = logging.getLogger(__name__)
_SURE = 2  # looks at a cluster that has room
_LOOK_S = 10.0  # between two looks at what all ranks do
_VAIN_S = 600.0  # between two tries to grow, if no more workers have started
_SILENT_S, _SILENT_STEPS = 60.0, 30.0
"""A rank may show no sign of life for so many seconds, or for so many times the longest of the newest steps."""


class Run:
    """A context around the training. Workers send records to `queue`. At the end of the context, `summary` has the results.

    Attributes:
        stopped: whether the workers have stopped because they were asked to.
        grows: whether they were asked to because the cluster has room for more of them.
        asked: whether they were asked to because the user has asked for it. This holds for all further attempts.

    Args:
        name: the run's id, which is also the name of its folder in `root`.
        data: data for the baselines; conversations have none.
        start: the checkpoint that the run starts from.
        worlds: numbers of workers that training may take.
        need: the resources of each; only several numbers of workers need them.
        end: ends the attempt.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        root: Path,
        data: PackedData | Mixture,
        console: Console | None,
        start: str | None = None,
        worlds: Sequence[int] = (),
        need: Mapping[str, float] | None = None,
        end: Callable[[], None] = lambda: None,
    ):
        bits_per_byte, length = baselines(data, recipe.training.eval_sequences)
        # These may raise a UserError. They come first, so that an error leaves no folder behind.
        self.kinds = kinds_of(recipe)
        history = read_history(root / name, metrics=metrics_of(recipe))
        self.tracker = Tracker(recipe, name, root, (read_run(root / name) or {}).get("mlflow_run_id"))
        bits = {} if bits_per_byte is None else bits_per_byte._asdict()
        try:
            self.folder = RunFolder(root / name, recipe, bits, length, history, start, counts_by_source(data))
            self.folder.tracked_by(self.tracker.uri, self.tracker.run_id, self.tracker.view_command())
        except BaseException:
            self.tracker.close("FAILED")
            raise
        self.summary: Summary | None = None
        self.watch, self.stopped, self.grows, self.asked = Watch(), False, False, False
        self._abandoned, self._end_attempt = False, end
        self._ended: Standstill | None = None  # why this attempt was ended
        self._recipe, self._worlds, self._need, self._sees_room = recipe, worlds, need or {}, 0
        self._grew_from, self._grew = 0, -math.inf
        last = recipe.training.stop_after or recipe.training.steps
        self._progress = None if console is None else console.progress(name, last)
        self._stack = ExitStack()
        self._looked = -math.inf

    def __enter__(self) -> Run:
        try:
            self._begin()
        except BaseException as error:  # Python does not call `__exit__`
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _begin(self) -> None:
        self._gauges = Gauges(self.folder.path.name, metrics_of(self._recipe))
        sinks: list[RunFolder | Sink] = [self.folder, self.tracker, self._gauges]
        if self._progress is not None:
            sinks.append(self._stack.enter_context(self._progress))
        self._inbox = self._stack.enter_context(Inbox([sink.take for sink in sinks], self._look))

    def _look(self, beats: Sequence[Beat]) -> None:
        """Take signs of life. From time to time, see which ranks are slow or silent, and write what all ranks do."""
        for beat in beats:
            self.watch.receive(beat)
        if not self.watch.beats or time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        places = self.folder.history.places
        positions = {rank: (place["attention"] or place["moe"] or {}).get("pp", 0) for rank, place in places.items()}
        paces = self.watch.paces(positions)
        self._gauges.look({rank: 1.0 - pace.busy for rank, pace in paces.items()})
        for rank, pace in paces.items():
            if rank in places and pace.is_slow != (rank in self.folder.history.slow):
                self._inbox.tell({
                    "kind": "slow", "rank": rank, "node_ip": places[rank]["node_ip"], "over_before": pace.over_before,
                    "over_others": pace.over_others or 0.0, "goes_on": pace.is_slow, "time": time.time(),
                })  # fmt: skip
        self.folder.write_ranks(self.watch.beats, paces)
        if self._ended is None and (silent := self.watch.silent(self._patience())):
            self._ended = self.watch.standstill(silent)
            self._end_attempt()
        trains = self.watch.beats.keys() == places.keys() and all(beat["trained_s"] for beat in self.watch.beats.values())
        if len(self._worlds) > 1 and trains and not self.grows:
            self._grow(len(places))

    def _patience(self) -> float:
        """Return for how many seconds a rank may show no sign of life while others do."""
        steps = self.folder.history.steps
        longest = float(steps.column("step_time_s")[-LOAD_WINDOW:].max()) if steps else math.inf
        return min(self._recipe.cluster.timeout, max(_SILENT_S, _SILENT_STEPS * longest))

    def _grow(self, workers: int) -> None:
        """Ask the workers to stop, so that more of them start, once the cluster has had room for more several times.

        If no more of them have started the last time, the room is not one that workers fit into, at least for a while.
        """
        if workers <= self._grew_from and time.monotonic() - self._grew < _VAIN_S:
            return
        self._sees_room = self._sees_room + 1 if larger_world(self._need, self._worlds, workers) else 0
        if self._sees_room >= _SURE and not self.asked:
            self._grew_from, self._grew = workers, time.monotonic()
            self.grows = self._inbox.stops = True

    def begin(self) -> None:
        """Forget the ranks of the attempt before, which may be one of an earlier process."""
        with self._inbox.delivering:
            self.watch.clear()
            self.folder.history.forget_places()
        self._inbox.stops = self.asked
        self.grows, self.stopped, self._sees_room, self._ended = False, False, 0, None

    def failure(self, error: Exception) -> Failure:
        with self._inbox.delivering:
            places, timeout = self.folder.history.places, self._recipe.cluster.timeout
            return failure_of(error, places, self.watch, timeout, self._ended, self.kinds)

    def tell(self, record: Record) -> None:
        """Pass a record of the driver itself to the folder, MLflow and the progress line."""
        record["time"] = time.time()
        self._inbox.deliver(record)

    def settle(self) -> None:
        """Wait until all records that the workers have sent are in the history."""
        self._inbox.settle()

    def ask_to_stop(self) -> None:
        """Ask the workers to save a checkpoint after their step, and to stop for good."""
        self.asked, self.grows = True, False
        self._inbox.stops = True

    def abandon(self) -> None:
        """Write nothing more, neither now nor at the end: another driver has the run."""
        self._abandoned = True
        self._inbox.mute()

    @property
    def queue(self) -> Any:
        """Ray's handle of the queue, for the outboxes of workers."""
        return self._inbox.queue

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._stack.__exit__(kind, error, trace)
        finally:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._abandoned:
            return
        killed = self.stopped or isinstance(error, KeyboardInterrupt)
        status: Status = "KILLED" if killed else "FINISHED" if error is None else "FAILED"
        self._close("stopped" if self.stopped else status.lower(), error)
        self.tracker.store(self.folder.artifacts)
        self.tracker.close(status)

    def _close(self, status: str, error: BaseException | None) -> None:
        """Close the folder. A full disk must not hide why training ended."""
        try:
            self.summary = self.folder.close(status)
        except OSError as full:
            self.summary = self.folder.summary(status)
            if error is None:
                raise
            _log.warning("run %s: its folder cannot be written (%s)", self.folder.path.name, full)
