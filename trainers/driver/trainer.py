"""FoldTrainer: a TorchTrainer of Ray that trains a recipe."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import ray
from pyarrow.fs import FileSystem
from ray.exceptions import RayError
from ray.train import Checkpoint, Result, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import RayTrainCallback
from ray.train.v2._internal.execution.failure_handling import create_failure_policy

from foldray.errors import UserError
from foldray.recipe import Recipe, check_trains
from foldray.refold import worlds
from trainers.checkpoints.stored import DamagedCheckpoint, Stored
from trainers.cluster import joining, workers
from trainers.cluster.elastic import LegalWorlds
from trainers.cluster.run_storage import refuse_secret
from trainers.data.conversations import summary
from trainers.data.datasets import Documents, check_datasets, store
from trainers.data.mixture import Mixture
from trainers.data.order import NEWEST
from trainers.data.packed import PackedData
from trainers.data.prepare import prepare
from trainers.data.unfit import unfit_summary
from trainers.driver import ray_configs
from trainers.driver.checks import check_replay, check_sources, told
from trainers.driver.continuing import check_resumable
from trainers.driver.resuming import Beginning, list_checkpoints
from trainers.driver.run import Run
from trainers.faults import guardian
from trainers.faults.attempts import Attempt, Failure, GiveUp, GoOn, decide
from trainers.faults.causes import told_first
from trainers.faults.failures import kinds_of
from trainers.faults.lease import Lease
from trainers.faults.stopping import Stopping
from trainers.folders import Folder
from trainers.sinks.mlflow_server import begin_import
from trainers.sinks.run_folder import RECIPE, as_yaml, read_run, recipe_of
from trainers.sinks.terminal import Console
from trainers.telemetry.metrics import metrics_of
from trainers.worker.engines import check_packages
from trainers.worker.online import MakeSearch
from trainers.worker.task import train_on_worker

_log = logging.getLogger(__name__)
_START_S = 120.0
"""Seconds for Ray to start the process of its controller."""


class FoldTrainer(TorchTrainer):
    """Trains a recipe on Ray.

    `fit()` joins or starts Ray, refuses a recipe that cannot be placed, prepares the data, trains, and returns Ray's
    `Result`. Its `return_value` is the summary of rank 0. After `fit()`, `run` has the run's folder, its MLflow run and its
    results.

    Args:
        recipe: the recipe to train.
        scaling_config: Ray's configuration of workers, in place of that of `cluster`. `resources_per_worker` without a number of
            CPUs leaves that of the recipe.
        run_config: Ray's configuration of the run. The recipe has what it leaves open: name, storage_path, max_failures and
            num_to_keep. Ray fills these itself, so a value that equals Ray's default counts as left open. The metrics of a
            checkpoint are `metrics.reported_names`.
        torch_config: Ray's configuration; None uses gloo on CPUs and NCCL on GPUs, with the timeout of the recipe.
        datasets: text in place of the recipe's files, as "train" and "validation": each a `ray.data.Dataset` or rows in memory,
            whose column `data.text_field` has one document in each row. They are stored beside the packed data, and are read
            from there. Without "validation", `data.validation.path` must name Parquet files.
        resume: id of a run in the same storage to continue with this recipe. The fold may differ.
        start: a checkpoint: its folder, `…/RUN/step_XXXXXXXX` (a path or a URI), or Ray's handle, such as `result.checkpoint`. A
            new run starts there, as if it continued RUN. With other data, it takes only weights and the optimizer's state.
        search: makes the search for `schedule.sp_bytes: auto` and `schedule.degrees`, such as `tuners.OnlineSearch`.
        console: shows the progress; None shows nothing.
        **others: other arguments of `TorchTrainer`, which have no use here. The error says what to give instead.

    Attributes:
        worlds: the recipe for every number of workers that training may go on with (`cluster.min_workers`).

    Raises:
        UserError: the recipe is for measurements alone or does not fit Ray's configurations, it needs a search but `search` is
            None, the run to resume does not exist, a dataset is none, an argument has no use, or both `resume` and `start` are
            set.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        torch_config: TorchConfig | None = None,
        datasets: Mapping[str, Documents] | None = None,
        resume: str | None = None,
        start: str | Path | Checkpoint | None = None,
        search: MakeSearch | None = None,
        console: Console | None = None,
        **others: Any,
    ):
        ray_configs.refuse_arguments(others)
        check_trains(recipe)
        metrics_of(recipe), kinds_of(recipe)  # refuse what is no row of theirs
        self.recipe = ray_configs.with_storage(
            recipe if scaling_config is None else ray_configs.scaled(recipe, scaling_config), run_config
        )
        self.worlds = worlds(self.recipe)
        if resume is not None and start is not None:
            raise UserError("from", start, f"starts a new run, but resume={resume} continues an old one; give only one")
        self.console, self.resume, self.start = console, resume, start
        opened = self.recipe.schedule.opened
        if opened and search is None:
            rule = "needs a search: FoldTrainer(recipe, search=tuners.OnlineSearch), or `foldray train`"
            raise UserError(f"schedule.{opened[0]}", getattr(self.recipe.schedule, opened[0]), rule)
        self.search = search if opened else None
        self.run: Run | None = None
        self.attempts = list[Attempt]()
        self.gave_up: GiveUp | None = None
        self.stopped: int | None = None
        self._controller: Any = None
        self._lease: Lease
        ray_configs.check_backend(self.recipe, torch_config)
        if datasets:
            check_datasets(datasets, self.recipe.data)
        self._documents = dict(datasets or {})  # not `datasets`, which Ray would split over the workers
        super().__init__(
            train_on_worker,
            train_loop_config={},
            torch_config=torch_config or TorchConfig(timeout_s=math.ceil(self.recipe.cluster.timeout)),
            scaling_config=ray_configs.merged_scaling(self.recipe, scaling_config),
            run_config=ray_configs.merged_run(self.recipe, run_config, resume, self.worlds),
        )

    @classmethod
    def restore(
        cls, path: str | Path, storage_filesystem: FileSystem | None = None, trust: bool = False, **arguments: Any
    ) -> Self:
        """Return a trainer that continues a run from its last checkpoint, with the recipe of the run.

        Args:
            path: folder of the run, a path or a URI.
            storage_filesystem: the filesystem of the path.
            trust: whether to import the modules that the recipe names (`module:NAME`), which runs their code.
            **arguments: other arguments of the trainer.

        Raises:
            UserError: the folder holds no recipe that can be read.
        """
        folder = Beginning.at(str(path).rstrip("/"), storage_filesystem).folder
        given = arguments.pop("run_config", None) or RunConfig()
        recipe = recipe_of(folder, "path", str(path), trust)
        run = dataclasses.replace(given, storage_path=folder.parent.name, storage_filesystem=storage_filesystem)
        return cls(recipe, run_config=run, resume=folder.last, **arguments)

    @classmethod
    def can_restore(cls, path: str | Path, storage_filesystem: FileSystem | None = None, trust: bool = False) -> bool:
        """Whether a folder holds a run that `restore` can continue, with the same `trust`."""
        try:
            folder = Beginning.at(str(path).rstrip("/"), storage_filesystem).folder
            recipe_of(folder, "path", str(path), trust=trust)
        except (UserError, OSError):
            return False
        return True

    def fit(self) -> Result:
        """Train to the last step of the recipe, or to `training.stop_after`.

        If workers fail, training goes on from the newest undamaged checkpoint. `attempts` has the attempts that failed, and
        `gave_up` the reason if no other one would have helped, else None. After the first Ctrl-C or SIGTERM, the workers save a
        checkpoint and stop; `stopped` is the number of the signal.

        Raises:
            UserError: the recipe cannot run on this cluster, its data cannot be read, a package is missing, another driver has
                the run, or the checkpoint to start from is damaged or does not go with the recipe.
            DamagedCheckpoint: the workers found the last checkpoint of the run damaged, like all others.
            ray.train.TrainingFailedError: the workers failed, and `attempts.decide` gives up, or the run has only damaged
                checkpoints. The first line of the message has the failure.
        """
        check_packages(self.recipe)
        for line in told(self.recipe):
            _log.warning(line)
        field = "run" if self.resume is None else "resume"
        say = self.console.say if self.console else _log.warning
        with Lease(self._folder, field, guardian.holder(), say, self._give_way) as self._lease:
            if self.resume is not None:  # a run that is there already has something to lose
                self._lease.take()
            begin = self._begin()
            stored = begin.look() if begin else None
            check_sources(self.recipe, begin is None)  # before the data are prepared, which may take hours
            begin_import(self.recipe)
            self.run = None
            joining.connect(self.recipe)
            with Stopping(self._ask_to_stop) as stopping:  # Ray has replaced the handlers of before
                try:
                    return self._fit(begin, stored)
                finally:
                    self.stopped = stopping.signal

    def _fit(self, begin: Beginning | None, stored: Stored | None) -> Result:
        joining.check_room(self.worlds[min(self.worlds)])
        ray_configs.check_places(self.scaling_config, min(self.worlds))
        data = self._prepare()
        if begin and stored:
            begin = check_resumable(begin, stored, self.recipe, data)
        check_replay(self.recipe, data, stored.progress.order if begin and stored and not begin.anew else NEWEST)
        start = begin.folder if begin and begin.field == "from" else None
        name, origin = str(self.run_config.name), None if start is None else start.name
        need = self.scaling_config._resources_per_worker_not_none
        self._lease.take()
        self.run = Run(self.recipe, name, self._root, data, self.console, origin, tuple(self.worlds), need, self._end_attempt)
        with self.run:
            recipes = {world: recipe.model_dump(mode="json") for world, recipe in self.worlds.items()}
            config = {"recipes": recipes, "data": str(data.folder), "queue": self.run.queue, "holder": self._lease.holder}
            anew = begin is not None and begin.anew
            self.train_loop_config = config | {"search": self.search, "start": start and start.checkpoint, "anew": anew}
            if self._is_elsewhere:  # whoever loads a checkpoint finds the recipe beside it
                self._folder.write(RECIPE, as_yaml(self.recipe).encode())
            return self._persist(self.run, begin)

    def _ask_to_stop(self) -> bool:
        """Ask the workers to stop after their step. Return whether they train already, and so come to it."""
        # This runs between any two instructions of the main thread, so it takes no lock. A copy cannot change meanwhile.
        if self.run is None or not any(beat["trained_s"] for beat in list(self.run.watch.beats.values())):
            return False
        self.run.ask_to_stop()
        if self.console is not None:
            self.console.say("foldray saves a checkpoint after this step, and stops; a second signal stops it at once")
        return True

    def _register_sigint_handler(self, controller: Any) -> None:
        """Keep Ray's handle of its controller. Ray would end the training at the first Ctrl-C."""
        self._controller = controller
        ray.get(controller.__ray_ready__.remote(), timeout=_START_S)  # Ray would wait for ever for its process to start
        self._lease.check()

    def _persist(self, run: Run, begin: Beginning | None) -> Result:
        """Make attempts until one succeeds, or until no other would help."""
        damaged = set[str]()
        self._list(begin)
        while True:
            self._lease.check()
            outcome = self._attempt(run)
            self._lease.check()
            if not isinstance(outcome, tuple):
                if run.stopped and run.grows:
                    run.tell({"kind": "grows", "step": run.folder.history.last_step})
                    begin = Beginning.newest(self._folder, damaged)
                    self._list(begin)
                    continue
                return outcome
            error, failure = outcome
            next_begin = self._after(error, begin, damaged)
            begin = None if isinstance(next_begin, GiveUp) else next_begin
            saved = begin.step if begin else 0
            reached = run.folder.history.last_step if failure.after is None else failure.after
            self.attempts.append(Attempt(reached, saved, failure))
            allowed = self.run_config.failure_config.max_failures
            most = None if allowed < 0 else allowed
            decision = next_begin if isinstance(next_begin, GiveUp) else decide(self.attempts, most, run.kinds)
            if run.asked and isinstance(decision, GoOn):
                decision = GiveUp("it was asked to stop")
            reason = decision.reason if isinstance(decision, GiveUp) else ""
            run.tell({
                "kind": "failed", "step": reached, "failure": failure.kind, "what": failure.what,
                "ranks": list(failure.ranks), "goes_on": isinstance(decision, GoOn), "saved": saved, "reason": reason,
            })  # fmt: skip
            if isinstance(decision, GiveUp):
                self.gave_up = decision
                raise told_first(error) if isinstance(error, TrainingFailedError) else error

    def _attempt(self, run: Run) -> Result | tuple[Exception, Failure]:
        """Start the workers, and return Ray's result or what made them fail."""
        run.begin()
        try:
            result = super().fit()
        except KeyboardInterrupt:
            if self._controller is not None:
                self._end_attempt()
                workers.release(self._controller)
            raise
        except Exception as error:
            run.settle()
            if isinstance(error, RayError) and self._controller is not None:
                workers.release(self._controller)  # nobody else would
            return error, run.failure(error)
        if damaged := result.return_value.get("damaged"):
            damage = DamagedCheckpoint(*damaged)
            return damage, Failure("damaged", str(damage))
        run.stopped = bool(result.return_value.get("stopped"))
        return result

    def _end_attempt(self) -> None:
        """End the process of Ray Train that starts the workers. `_attempt` gives back what it has reserved."""
        if self._controller is not None:
            with suppress(RayError):
                ray.kill(self._controller)

    def _give_way(self) -> None:
        """End the training without another word in the run's folder, because another driver has it now."""
        if self.run is not None:
            self.run.abandon()
        self._end_attempt()

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        """Let Ray's elastic scaling take legal numbers of workers alone, and leave what follows from failures to `decide`."""
        failures = dataclasses.replace(self.run_config.failure_config, max_failures=0, max_preemption_failures=0)
        arguments["failure_policy"] = create_failure_policy(failures)
        if self.recipe.cluster.min_workers is not None:
            arguments["scaling_policy"] = LegalWorlds(self.scaling_config, tuple(self.worlds))
        return super()._initialize_and_run_controller(**arguments)

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        """Leave out the process that gives back what a lost controller has reserved. `_attempt` does so.

        It would stay for ever. Its thread notices that the controller is lost, but only its main thread could end it.
        """
        callbacks = super()._create_default_callbacks()
        return [callback for callback in callbacks if not isinstance(callback, PlacementGroupCleanerCallback)]

    def _begin(self) -> Beginning | None:
        """Return the checkpoint to start from; None for a run that starts at step 0."""
        if self.start is not None:
            if Beginning.newest(self._folder):
                rule = f"starts a new run, but {self.run_config.name} has checkpoints already"
                raise UserError("from", str(self.start), rule)
            if isinstance(self.start, Checkpoint):
                return Beginning.at(self.start.path, self.start.filesystem)
            refuse_secret("from", str(self.start))
            return Beginning.at(str(self.start))
        if self.resume is None:
            return None
        # A run may have started from another run's checkpoint, and stopped before its own first one. It starts there again.
        origin = (read_run(self._root / self.resume) or {}).get("started_from")
        return Beginning.newest(self._folder) or (Beginning.at(origin) if origin else None)

    def _after(self, error: Exception, begun: Beginning | None, damaged: set[str]) -> Beginning | GiveUp | None:
        """Return the checkpoint for the next attempt, and add the one that the workers found damaged to `damaged`.

        It is None if the run has no checkpoint yet, and so begins anew. It is the end if the run had some, and all are damaged,
        or if the storage takes no files any more.
        """
        if isinstance(error, DamagedCheckpoint):
            damaged.add(Path(error.path).name)
        why = "the run has no other checkpoint"
        try:
            begin = Beginning.newest(self._folder, damaged)
            if begin or not isinstance(error, DamagedCheckpoint):
                begin = begin or (begun if begun and begun.field == "from" else None)
                self._list(begin)
                return begin
        except UserError as none:
            why = none.rule
        if isinstance(error, DamagedCheckpoint) and begun and not self.attempts:
            raise begun.refused(error.file, error.what)
        return GiveUp(why)

    def _list(self, begin: Beginning | None) -> None:
        """Make Ray's list of checkpoints end with the one to begin with. That of another run does not come into it."""
        if begin is None or begin.field == "resume":
            list_checkpoints(self._folder, begin)

    def _prepare(self) -> PackedData | Mixture:
        spec = self.recipe.data
        cache = self._root / "data" if spec.cache is None else spec.cache
        if self._documents:
            spec = store(self._documents, spec, cache)
            self.recipe = self.recipe.model_copy(update={"data": spec})
        progress = None if self.console is None else self.console.files
        data = prepare(spec, self.recipe.model.vocab, cache, progress)
        if self.console is None:
            return data
        for name, part in data.parts.items():
            about = summary(part.meta) if part.train.masked else None
            for line in filter(None, (about, unfit_summary(part.meta))):
                self.console.say(f"{name and f'{name}: '}{line}")
        return data

    @property
    def folder(self) -> Path:
        """The run's folder on this machine. It exists once training begins."""
        return self._root / str(self.run_config.name)

    @property
    def _folder(self) -> Folder:
        """The run's folder, where Ray stores its checkpoints."""
        return Folder(str(self.run_config.storage_path), self.run_config.storage_filesystem) / str(self.run_config.name)

    @property
    def _root(self) -> Path:
        """Local folder of runs. With a storage elsewhere, the driver writes its files into `runs` in the working directory."""
        return Path("runs" if self._is_elsewhere else str(self.run_config.storage_path)).absolute()

    @property
    def _is_elsewhere(self) -> bool:
        return "://" in str(self.run_config.storage_path) or self.run_config.storage_filesystem is not None
