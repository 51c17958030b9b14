"""FoldTrainer: Ray's TorchTrainer, made from a recipe."""

from __future__ import annotations

import dataclasses
import importlib.util
import secrets
import time
import traceback
from pathlib import Path
from typing import Any

from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from foldray.errors import MissingPackage, UserError
from foldray.recipe import Recipe
from trainers.checkpoints.tensors import DamagedCheckpoint
from trainers.cluster import joining, workers
from trainers.cluster.run_storage import storage_folder
from trainers.data.packed import PackedData
from trainers.data.prepare import prepare
from trainers.driver.recorder import read_run
from trainers.driver.report import Console
from trainers.driver.resuming import Beginning, check_resumable, offer
from trainers.driver.run import Run
from trainers.folders import Folder
from trainers.worker.engines import make_backend
from trainers.worker.loop import train_loop
from trainers.worker.online import MakeSearch

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
        start: folder of a checkpoint, `…/RUN/step_XXXXXXXX` (a path or a URI); a new run begins there, as if it went on with RUN.
        search: makes what searches for `schedule.sp_bytes: auto` and `schedule.degrees`, such as `tuners.OnlineSearch`.
        console: where progress is shown; None shows nothing.
        **ray_arguments: everything else that `TorchTrainer` takes.

    Raises:
        UserError: the recipe does not fit the scaling configuration, asks for a search that is not given, the run to resume
            is not there, or both a run and a checkpoint are given.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        torch_config: TorchConfig | None = None,
        resume: str | None = None,
        start: str | Path | None = None,
        search: MakeSearch | None = None,
        console: Console | None = None,
        **ray_arguments: Any,
    ):
        self.recipe = recipe if scaling_config is None else _scaled(recipe, scaling_config)
        if resume is not None and start is not None:
            raise UserError("from", start, f"begins a new run, and resume={resume} goes on with an old one; give one of them")
        self.console, self.resume, self.start = console, resume, None if start is None else str(start)
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
            scaling_config=scaling_config or workers.scaling(self.recipe),
            run_config=config,
            **ray_arguments,
        )

    def fit(self) -> Result:
        """Train to the end of the recipe, or to `training.stop_after`.

        Raises:
            UserError: the recipe cannot run on this cluster, its data cannot be read, a package is missing, or the checkpoint to
                begin at is damaged, or has other data or another model.
            DamagedCheckpoint: the run lost a worker, and the checkpoint to go on from has been damaged since.
            ray.train.TrainingFailedError: the workers failed more often than `cluster.max_failures` allows.
        """
        _check_packages(self.recipe)
        begin = self._begin()
        stored = begin and begin.look()
        joining.connect(self.recipe)
        joining.check_room(self.recipe)
        data = self._prepare()
        if begin and stored:
            check_resumable(begin, stored, self.recipe, data)
        start = begin.folder if begin and begin.field == "from" else None
        name, noted = str(self.run_config.name), None if start is None else start.name
        self.run = Run(self.recipe, name, self._root, data, self.console, noted)
        with self.run:
            told = {"recipe": self.recipe.model_dump(mode="json"), "data": str(data.folder), "queue": self.run.queue}
            self.train_loop_config = told | {"search": self.search, "start": start and start.checkpoint}
            result = super().fit()
            if damaged := result.return_value.get("damaged"):
                raise self._refused(begin, *damaged)
            return result

    def _begin(self) -> Beginning | None:
        """Where the training goes on, if it does."""
        if self.start is not None:
            if Beginning.newest(self._folder):
                raise UserError("from", self.start, f"begins a new run, and {self.run_config.name} has checkpoints already")
            return Beginning.at(self.start)
        if self.resume is None:
            return None
        # A run that began at another's checkpoint and was stopped before its own first one begins there again.
        origin = (read_run(self._root / self.resume) or {}).get("started_from")
        return Beginning.newest(self._folder) or (Beginning.at(origin) if origin else None)

    def _refused(self, begin: Beginning | None, path: str, file: str, what: str) -> Exception:
        """What to say of a checkpoint that the workers have found damaged."""
        name = Path(path).name
        if begin and name == begin.folder.last:
            return begin.refused(file, what)
        return DamagedCheckpoint(path, file, f"{what}; {offer(self._folder, name)}")

    def _prepare(self) -> PackedData:
        spec = self.recipe.data
        cache = self._root / "data" if spec.cache is None else Path(spec.cache)
        progress = None if self.console is None else self.console.files
        return prepare(spec, self.recipe.model.vocab, cache, progress)

    @property
    def _folder(self) -> Folder:
        """The run's, where Ray keeps its checkpoints."""
        return Folder(str(self.run_config.storage_path), self.run_config.storage_filesystem) / str(self.run_config.name)

    @property
    def _root(self) -> Path:
        """Local folder of runs; with storage elsewhere, what the driver writes stays beside the caller."""
        storage = str(self.run_config.storage_path)
        return Path("runs" if "://" in storage else storage).absolute()


def _told_train_loop(config: dict[str, Any]) -> dict[str, Any]:
    """`train_loop`, whose exceptions carry their traceback as a note: Ray hands on the exception alone.

    A damaged checkpoint becomes a result: Ray would try again, as often as it may, and find the same.
    """
    try:
        return train_loop(config)
    except DamagedCheckpoint as error:
        return {"damaged": (error.path, error.file, error.what)}
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
    storage = (given.storage_path if given else None) or storage_folder(recipe)
    name = resume or (given.name if given else None) or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    runs = sorted(path.parent.name for path in Path(storage).glob("*/recipe.yaml"))
    if resume is not None and "://" not in storage and resume not in runs:
        raise UserError("resume", resume, f"is no run in {storage}", runs or None)
    config = given or RunConfig(
        failure_config=FailureConfig(max_failures=recipe.cluster.max_failures, controller_failure_limit=_CONTROLLER_FAILURES),
        checkpoint_config=CheckpointConfig(num_to_keep=recipe.checkpoint.keep),
    )
    environment = dict(config.worker_runtime_env or {})
    environment["env_vars"] = {**workers.ALLOCATOR, **environment.get("env_vars", {})}
    return dataclasses.replace(config, name=name, storage_path=storage, worker_runtime_env=environment)
