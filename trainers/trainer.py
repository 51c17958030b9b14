"""FoldTrainer: Ray's TorchTrainer, made from a recipe."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import secrets
import time
import traceback
from pathlib import Path
from typing import Any

from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from foldray.errors import MissingPackage, UserError
from foldray.recipe import Recipe
from foldray.runtime import state_keys
from foldray.spec import parameter_table
from trainers import cluster
from trainers.checkpoints import PROGRESS
from trainers.data.packed import PackedData
from trainers.data.prepare import prepare
from trainers.engines import make_backend
from trainers.loop import train_loop
from trainers.online import MakeSearch
from trainers.report import Console
from trainers.run import Run

_CONTROLLER_FAILURES = 2  # times that Ray may fail to place the workers; without a limit it tries for ever


class FoldTrainer(TorchTrainer):
    """Trains a recipe on Ray.

    `fit()` joins or starts Ray, refuses what cannot be placed, prepares the data, trains, and returns Ray's `Result`; rank
    0's summary is `Result.return_value`. The run's folder, MLflow run and closing figures are in `run` afterwards.

    Args:
        recipe: what to train.
        scaling_config: Ray's; its num_workers, use_gpu and placement_strategy take the place of the recipe's `cluster`.
        run_config: Ray's; a name or storage_path given here takes the place of the recipe's.
        torch_config: Ray's; gloo on CPU and NCCL on GPU if not given.
        resume: id of a run in the same storage to go on with, under this recipe (any legal fold).
        search: makes what searches for `schedule.sp_bytes: auto` and `schedule.degrees`, such as `tuners.OnlineSearch`.
        console: where progress is shown; None shows nothing.
        **ray_arguments: everything else that `TorchTrainer` takes.

    Raises:
        UserError: the recipe does not fit the scaling configuration, asks for a search that is not given, or the run to resume
            is not there.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        torch_config: TorchConfig | None = None,
        resume: str | None = None,
        search: MakeSearch | None = None,
        console: Console | None = None,
        **ray_arguments: Any,
    ):
        self.recipe = recipe if scaling_config is None else _scaled(recipe, scaling_config)
        self.console, self.resume = console, resume
        opened = self.recipe.schedule.opened
        if opened and search is None:
            rule = "needs a search: FoldTrainer(recipe, search=tuners.OnlineSearch), or `foldray train`"
            raise UserError(f"schedule.{opened[0]}", getattr(self.recipe.schedule, opened[0]), rule)
        self.search = search if opened else None
        self.run: Run | None = None
        config = _run_config(self.recipe, run_config, resume)
        super().__init__(
            _told_train_loop,
            train_loop_config={},
            torch_config=torch_config,
            scaling_config=scaling_config or cluster.scaling(self.recipe),
            run_config=config,
            **ray_arguments,
        )

    def fit(self) -> Result:
        """Train to the end of the recipe, or to `training.stop_after`.

        Raises:
            UserError: the recipe cannot run on this cluster, its data cannot be read, a package is missing, or the run to resume
                has other data or another model.
            ray.train.TrainingFailedError: the workers failed more often than `cluster.max_failures` allows.
        """
        _check_packages(self.recipe)
        cluster.connect(self.recipe)
        cluster.check_room(self.recipe)
        data = self._prepare()
        if self.resume is not None:
            _check_resumable(self._root / self.resume, self.recipe, data)
        self.run = Run(self.recipe, str(self.run_config.name), self._root, data, self.console)
        with self.run:
            told = {"recipe": self.recipe.model_dump(), "data": str(data.folder), "queue": self.run.queue}
            self.train_loop_config = told | {"search": self.search}
            return super().fit()

    def _prepare(self) -> PackedData:
        spec = self.recipe.data
        cache = self._root / "data" if spec.cache is None else Path(spec.cache)
        progress = None if self.console is None else self.console.files
        return prepare(spec, self.recipe.model.vocab, cache, progress)

    @property
    def _root(self) -> Path:
        """Local folder of runs; with storage elsewhere, what the driver writes stays beside the caller."""
        storage = str(self.run_config.storage_path)
        return Path("runs" if "://" in storage else storage).absolute()


def _told_train_loop(config: dict[str, Any]) -> dict[str, Any]:
    """`train_loop`, whose exceptions carry their traceback as a note: Ray hands on the exception alone."""
    try:
        return train_loop(config)
    except Exception as error:
        error.add_note(traceback.format_exc())
        raise


def _check_packages(recipe: Recipe) -> None:
    """Refuse at once what every worker would fail on, attempt after attempt; DeepSpeed is slow to import, so only looked for."""
    for field, kind in (("engine.kind", recipe.engine.kind), ("moe.backend", recipe.moe.backend)):
        if kind == "deepspeed" and importlib.util.find_spec(kind) is None:
            raise MissingPackage(field, kind, kind, "pip install deepspeed")
    if recipe.moe.backend == "tutel":
        make_backend(recipe)


def _check_resumable(run: Path, recipe: Recipe, data: PackedData) -> None:
    """Refuse at once a checkpoint that no worker could go on from; one that lies elsewhere is for the workers to look at."""
    saved = sorted(run.glob(f"step_*/{PROGRESS}"))
    if not saved:
        return
    if json.loads(saved[-1].read_text())["data"] != data.folder.name:
        raise UserError("resume", run.name, "was trained on other data, or in other lengths, than this recipe's section data")
    before = Recipe.load(run / "recipe.yaml")
    for key in ("seed", "global_batch"):  # with another one, some text would be trained on twice and some never
        was, now = getattr(before.training, key), getattr(recipe.training, key)
        if was != now:
            raise UserError(f"training.{key}", now, f"run {run.name} takes its text in another order; keep its own", [was])
    theirs, ours = ({row.name: row.shape for row in parameter_table(given.model)} for given in (before, recipe))
    for name in [*ours, *theirs]:
        if theirs.get(name) != ours.get(name):
            rule = f"has another model: its {name} is {_size(theirs.get(name))}, this recipe's is {_size(ours.get(name))}"
            raise UserError("resume", run.name, rule)
    if not set(state_keys(recipe.optimizer)) <= set(state_keys(before.optimizer)):
        rule = f"run {run.name} has no optimizer state for it; keep its own"
        raise UserError("optimizer.kind", recipe.optimizer.kind, rule, [before.optimizer.kind])


def _size(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else "×".join(map(str, shape))


def _scaled(recipe: Recipe, scaling: ScalingConfig) -> Recipe:
    if not isinstance(scaling.num_workers, int):
        raise UserError("scaling_config.num_workers", scaling.num_workers, "a fold needs a fixed number of workers")
    changes = {"workers": scaling.num_workers, "gpu": bool(scaling.use_gpu), "placement": scaling.placement_strategy}
    cpus = (scaling.resources_per_worker or {}).get("CPU")
    if cpus:
        changes["cpus_per_worker"] = int(cpus)
    given = recipe.model_dump()
    return Recipe.parse({**given, "cluster": {**given["cluster"], **changes}})


def _run_config(recipe: Recipe, given: RunConfig | None, resume: str | None) -> RunConfig:
    storage = (given.storage_path if given else None) or cluster.storage_folder(recipe)
    name = resume or (given.name if given else None) or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    runs = sorted(path.parent.name for path in Path(storage).glob("*/recipe.yaml"))
    if resume is not None and "://" not in storage and resume not in runs:
        raise UserError("resume", resume, f"is no run in {storage}", runs or None)
    config = given or RunConfig(
        failure_config=FailureConfig(max_failures=recipe.cluster.max_failures, controller_failure_limit=_CONTROLLER_FAILURES),
        checkpoint_config=CheckpointConfig(num_to_keep=recipe.checkpoint.keep),
    )
    environment = dict(config.worker_runtime_env or {})
    environment["env_vars"] = {**cluster.ALLOCATOR, **environment.get("env_vars", {})}
    return dataclasses.replace(config, name=name, storage_path=storage, worker_runtime_env=environment)
