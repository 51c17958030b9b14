"""`foldray train`: a recipe from the command line to its closing table."""

from __future__ import annotations

import sys

from ray.train import TrainingFailedError

from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.report import Console
from trainers.telemetry import as_json as as_json_text
from trainers.trainer import FoldTrainer


def train(recipe: Recipe, resume: str | None = None, as_json: bool = False) -> int:
    """Train and report; 0 on success, 1 when training failed.

    Raises:
        UserError: the recipe cannot run here; nothing has been written.
    """
    console = Console(as_json)
    trainer = FoldTrainer(recipe, resume=resume, console=console)
    failure = None
    try:
        trainer.fit()
    except TrainingFailedError as error:
        failure = root_cause(error)
    if trainer.run is None or trainer.run.summary is None:
        raise RuntimeError("the trainer came back without a summary")
    summary = trainer.run.summary
    if isinstance(failure, UserError):
        raise failure
    if as_json:
        print(as_json_text(summary.as_dict()))
    else:
        console.close(summary, trainer.run.tracker.view_url)
    if failure is not None:
        reason = " ".join(str(failure).split()) or type(failure).__name__
        print(f"foldray: training failed after step {summary.steps}: {reason}; details in {summary.run_dir}", file=sys.stderr)
        return 1
    return 0


def root_cause(error: BaseException) -> BaseException:
    """The first worker's own exception inside what Ray wraps around it."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        return root_cause(next(iter(failures.values())))
    inner = getattr(error, "cause", None) or error.__cause__
    return root_cause(inner) if isinstance(inner, BaseException) else error
