"""The driver's view of a training: the run's folder, MLflow run and progress line. The workers' records feed all three."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from ray.util.queue import Queue

from foldray.recipe import Recipe
from trainers.cluster.mailbox import Inbox
from trainers.data.packed import PackedData
from trainers.driver.recorder import RunFolder, Summary, read_history, read_run
from trainers.driver.report import Console
from trainers.driver.tracking import Status, Tracker


class Run:
    """A context around the training. Workers send records to `queue`. At the end of the context, `summary` has the results.

    Args:
        recipe: the recipe of the training.
        name: the run's id, which is also the name of its folder.
        root: local folder of runs.
        data: data for the baselines; conversations have none.
        console: shows the progress; None shows nothing.
        start: the checkpoint that the run starts from; None for a run without one.

    Raises:
        UserError: a file of the earlier run cannot be read, or the tracking server does not answer or refuses a request.
    """

    def __init__(
        self, recipe: Recipe, name: str, root: Path, data: PackedData, console: Console | None, start: str | None = None
    ):
        held_back = min(len(data.validation), recipe.training.eval_sequences or len(data.validation))
        baselines, length = data.baselines(held_back), None
        if baselines is not None:
            length = data.validation.bytes(held_back) / (held_back * recipe.data.seq_len)
        # These two may raise a UserError. They come first, so that an error leaves no folder behind.
        history = read_history(root / name)
        self.tracker = Tracker(recipe, name, root, (read_run(root / name) or {}).get("mlflow_run_id"))
        bits = {} if baselines is None else baselines._asdict()
        self.folder = RunFolder(root / name, recipe, bits, length, history, start)
        self.folder.tracked_by(self.tracker.uri, self.tracker.run_id, self.tracker.view_command())
        self.summary: Summary | None = None
        last = recipe.training.stop_after or recipe.training.steps
        self._progress = None if console is None else console.progress(name, last)
        self._stack = ExitStack()

    def __enter__(self) -> Run:
        subscribers = [self.folder.receive, self.tracker.receive]
        if self._progress is not None:
            subscribers.append(self._stack.enter_context(self._progress).receive)
        self._inbox = self._stack.enter_context(Inbox(subscribers))
        return self

    @property
    def queue(self) -> Queue:
        return self._inbox.queue

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._stack.__exit__(kind, error, trace)
        finally:
            status: Status = "FINISHED" if error is None else "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            self.summary = self.folder.close(status.lower())
            self.tracker.store(self.folder.artifacts)
            self.tracker.close(status)
