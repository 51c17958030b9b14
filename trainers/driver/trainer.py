"""FoldTrainer: a TorchTrainer of Ray that trains a recipe."""

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
from foldray.schedule import AF_PIPE
from trainers.checkpoints.tensors import DamagedCheckpoint
from trainers.cluster import joining, workers
from trainers.cluster.run_storage import storage_folder
from trainers.data.conversations import told
from trainers.data.packed import PackedData
from trainers.data.prepare import prepare
from trainers.driver.mlflow_server import check_reachable
from trainers.driver.recorder import read_run
from trainers.driver.report import Console
from trainers.driver.resuming import Beginning, check_resumable, offer
from trainers.driver.run import Run
from trainers.folders import Folder
from trainers.hugging_face.weights import Weights
from trainers.worker.engines import make_backend
from trainers.worker.loop import train_loop
from trainers.worker.online import MakeSearch

_CONTROLLER_FAILURES = 2  # how often Ray may fail to place the workers; without a limit it tries forever


class FoldTrainer(TorchTrainer):
    """Trains a recipe on Ray.

    `fit()` joins or starts Ray, refuses a recipe that cannot be placed, prepares the data, trains, and returns Ray's
    `Result`. Its `return_value` is the summary of rank 0. After `fit()`, `run` has the run's folder, its MLflow run and its
    results.

    Args:
        recipe: the recipe to train.
        scaling_config: Ray's configuration; its num_workers, use_gpu and placement_strategy replace those of `cluster`.
        run_config: Ray's configuration; its name and storage_path replace those of the recipe.
        torch_config: Ray's configuration; None uses gloo on CPUs and NCCL on GPUs.
        resume: id of a run in the same storage to continue with this recipe. The fold may differ.
        start: folder of a checkpoint, `…/RUN/step_XXXXXXXX` (a path or a URI). A new run starts there, as if it continued
            RUN.
        search: makes the search for `schedule.sp_bytes: auto` and `schedule.degrees`, such as `tuners.OnlineSearch`.
        console: shows the progress; None shows nothing.
        **ray_arguments: other arguments of `TorchTrainer`.

    Raises:
        UserError: the recipe does not fit the scaling configuration, the recipe needs a search but `search` is None, the run
            to resume does not exist, or both `resume` and `start` are set.
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
            raise UserError("from", start, f"starts a new run, but resume={resume} continues an old one; give only one")
        self.console, self.resume, self.start = console, resume, None if start is None else str(start)
        opened = self.recipe.schedule.opened
        if opened and search is None:
            rule = "needs a search: FoldTrainer(recipe, search=tuners.OnlineSearch), or `foldray train`"
            raise UserError(f"schedule.{opened[0]}", getattr(self.recipe.schedule, opened[0]), rule)
        self.search = search if opened else None
        self.run: Run | None = None
        config, own = _run_config(self.recipe, run_config, resume), workers.scaling(self.recipe)
        if scaling_config is not None and scaling_config.label_selector is None:
            scaling_config = dataclasses.replace(scaling_config, label_selector=own.label_selector)
        super().__init__(
            _train_loop_with_notes,
            train_loop_config={},
            torch_config=torch_config,
            scaling_config=scaling_config or own,
            run_config=config,
            **ray_arguments,
        )

    def fit(self) -> Result:
        """Train to the last step of the recipe, or to `training.stop_after`.

        Raises:
            UserError: the recipe cannot run on this cluster, its data cannot be read, a package is missing, or the checkpoint to
                start from is damaged or has other data or another model.
            DamagedCheckpoint: the run lost a worker, and the checkpoint to continue from has been damaged meanwhile.
            ray.train.TrainingFailedError: the workers failed more often than `cluster.max_failures` allows.
        """
        _check_packages(self.recipe)
        begin = self._begin()
        stored = begin and begin.look()
        if begin is None and self.recipe.training.weights is not None:
            Weights.at(self.recipe.training.weights, "training.weights").check(self.recipe.model)
        check_reachable(self.recipe)  # before the data are prepared, which may take hours
        joining.connect(self.recipe)
        joining.check_room(self.recipe)
        data = self._prepare()
        if begin and stored:
            check_resumable(begin, stored, self.recipe, data)
        start = begin.folder if begin and begin.field == "from" else None
        name, origin = str(self.run_config.name), None if start is None else start.name
        self.run = Run(self.recipe, name, self._root, data, self.console, origin)
        with self.run:
            config = {"recipe": self.recipe.model_dump(mode="json"), "data": str(data.folder), "queue": self.run.queue}
            self.train_loop_config = config | {"search": self.search, "start": start and start.checkpoint}
            result = super().fit()
            if damaged := result.return_value.get("damaged"):
                raise self._refused(begin, *damaged)
            return result

    def _begin(self) -> Beginning | None:
        """Return the checkpoint to start from; None for a run that starts at step 0."""
        if self.start is not None:
            if Beginning.newest(self._folder):
                raise UserError("from", self.start, f"starts a new run, but {self.run_config.name} has checkpoints already")
            return Beginning.at(self.start)
        if self.resume is None:
            return None
        # A run may have started from another run's checkpoint, and stopped before its own first one. It starts there again.
        origin = (read_run(self._root / self.resume) or {}).get("started_from")
        return Beginning.newest(self._folder) or (Beginning.at(origin) if origin else None)

    def _refused(self, begin: Beginning | None, path: str, file: str, what: str) -> Exception:
        """Return the error for a checkpoint that the workers found damaged."""
        name = Path(path).name
        if begin and name == begin.folder.last:
            return begin.refused(file, what)
        return DamagedCheckpoint(path, file, f"{what}; {offer(self._folder, name)}")

    def _prepare(self) -> PackedData:
        spec = self.recipe.data
        cache = self._root / "data" if spec.cache is None else Path(spec.cache)
        progress = None if self.console is None else self.console.files
        data = prepare(spec, self.recipe.model.vocab, cache, progress)
        if self.console is not None and spec.masked:
            self.console.say(told(data.meta))
        return data

    @property
    def _folder(self) -> Folder:
        """The run's folder, where Ray stores its checkpoints."""
        return Folder(str(self.run_config.storage_path), self.run_config.storage_filesystem) / str(self.run_config.name)

    @property
    def _root(self) -> Path:
        """Local folder of runs. With a remote storage, the driver writes its files into `runs` in the working directory."""
        storage = str(self.run_config.storage_path)
        return Path("runs" if "://" in storage else storage).absolute()


class DisagTrainer(FoldTrainer):
    """Trains a recipe whose experts have workers of their own (DisagMoE).

    It is a `FoldTrainer` that sets the recipe's section `placement`. A recipe that has this section already needs nothing
    else; `FoldTrainer` trains it, too. Checkpoints do not depend on the placement, so `resume` and `start` take those of any
    other run of the model.

    Args:
        recipe: the recipe to train.
        attention: number of workers for attention; None is that of the recipe.
        experts: number of workers for the experts; None is that of the recipe.
        expert_pp: pipeline positions of the experts; None is those of the recipe, or `fold.pp`.
        **arguments: the other arguments of `FoldTrainer`.

    Raises:
        UserError: the numbers of workers are missing or illegal, or those of `FoldTrainer`.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        attention: int | None = None,
        experts: int | None = None,
        expert_pp: int | None = None,
        **arguments: Any,
    ):
        given = {"attention": attention, "experts": experts, "expert_pp": expert_pp}
        super().__init__(_placed(recipe, {key: value for key, value in given.items() if value is not None}), **arguments)


def _placed(recipe: Recipe, given: dict[str, int]) -> Recipe:
    """Return the recipe with these keys of `placement`, and with as many workers."""
    values = recipe.model_dump()
    placement = (values["placement"] or {}) | given
    if missing := [key for key in ("attention", "experts") if key not in placement]:
        raise UserError(f"placement.{missing[0]}", "nothing", "is required: the number of workers for this half")
    if recipe.placement is None:
        values["schedule"].update(kind=AF_PIPE.name, backward=None)
    values["cluster"]["workers"] = placement["attention"] + placement["experts"]
    return Recipe.parse({**values, "placement": placement})


def _train_loop_with_notes(config: dict[str, Any]) -> dict[str, Any]:
    """Run `train_loop`, and add the traceback to an exception as a note, because Ray passes on only the exception.

    A damaged checkpoint becomes a result. Ray would retry after an exception, and every attempt would fail in the same way.
    """
    try:
        return train_loop(config)
    except DamagedCheckpoint as error:
        return {"damaged": (error.path, error.file, error.what)}
    except Exception as error:
        error.add_note(traceback.format_exc())
        raise


def _check_packages(recipe: Recipe) -> None:
    """Refuse a recipe whose packages are missing, because every worker would fail in every attempt.

    The function does not import DeepSpeed, which is slow.
    """
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
    values = recipe.model_dump()
    return Recipe.parse({**values, "cluster": {**values["cluster"], **changes}})


def _run_config(recipe: Recipe, base: RunConfig | None, resume: str | None) -> RunConfig:
    storage = (base.storage_path if base else None) or storage_folder(recipe)
    name = resume or (base.name if base else None) or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    runs = sorted(path.parent.name for path in Path(storage).glob("*/recipe.yaml"))
    if resume is not None and "://" not in storage and resume not in runs:
        raise UserError("resume", resume, f"is not a run in {storage}", runs or None)
    config = base or RunConfig(
        failure_config=FailureConfig(max_failures=recipe.cluster.max_failures, controller_failure_limit=_CONTROLLER_FAILURES),
        checkpoint_config=CheckpointConfig(num_to_keep=recipe.checkpoint.keep),
    )
    environment = dict(config.worker_runtime_env or {})
    environment["env_vars"] = {**workers.environment(recipe), **environment.get("env_vars", {})}
    return dataclasses.replace(config, name=name, storage_path=storage, worker_runtime_env=environment)
