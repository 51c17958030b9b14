"""Ray's configurations beside a recipe: what they change in it, and what is refused because foldray has no use for it."""

from __future__ import annotations

import dataclasses
import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from pyarrow.fs import FileSystem, LocalFileSystem
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.constants import DEFAULT_STORAGE_PATH
from ray.train.torch import TorchConfig

from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers.cluster import workers
from trainers.cluster.run_storage import check_filesystem, checked_storage, storage_folder
from trainers.cluster.seating import Seating, traffic_of
from trainers.telemetry.metrics import reported_names
from trainers.telemetry.records import VALIDATED

_CONTROLLER_FAILURES = 2  # how often Ray may fail to place the workers; without a limit it tries forever
_RAYS_NAME = "ray_train_run-"  # the beginning of the name that Ray gives to a run without one
_ONE_OF = re.compile(r"in\((.*)\)")
_INSTEAD = {
    "train_loop_per_worker": "foldray has a loop of its own; another one runs on ray.train.torch.TorchTrainer",
    "train_loop_config": "the recipe has all settings; change them with Recipe.load(PATH, ['optimizer.lr=1e-3'])",
    "backend_config": "give torch_config=TorchConfig(…)",
    "dataset_config": "datasets are packed once, and the recipe's fold says which worker reads what; give datasets alone",
    "validation_config": "training validates itself; set training.eval_every, and give datasets={'validation': …}",
    "resume_from_checkpoint": "give start=CHECKPOINT, which starts a new run from it, or resume=RUN_ID",
    "metadata": "Ray keeps no metadata any more; the recipe and its name are in the run's folder and in MLflow",
}


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments of `TorchTrainer` that would have no effect, and those that it does not have."""
    for name, value in given.items():
        if name not in _INSTEAD:
            raise TypeError(f"FoldTrainer.__init__() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise UserError(name, type(value).__name__, _INSTEAD[name])


def scaled(recipe: Recipe, scaling: ScalingConfig) -> Recipe:
    """Return the recipe with the workers of Ray's configuration."""
    if scaling.use_tpu:
        raise UserError("scaling_config.use_tpu", True, "foldray trains on CPUs and GPUs", [False])
    fewest = None if isinstance(scaling.num_workers, int) else scaling.min_workers
    changes = {
        "workers": scaling.max_workers,
        "min_workers": fewest,
        "gpu": bool(scaling.use_gpu),
        "placement": scaling.placement_strategy,
    }
    resources = scaling.resources_per_worker or {}
    if resources.get("GPU", 1) != 1 and scaling.use_gpu:
        raise UserError("scaling_config.resources_per_worker", f"GPU: {resources['GPU']}", "a worker has one GPU", [1])
    if cpus := resources.get("CPU"):
        if cpus != int(cpus):
            rule = "a worker has a whole number of CPUs, with a thread on each"
            raise UserError("scaling_config.resources_per_worker", f"CPU: {cpus}", rule)
        changes["cpus_per_worker"] = int(cpus)
    values = recipe.model_dump()
    return Recipe.parse({**values, "cluster": {**values["cluster"], **changes}})


def with_storage(recipe: Recipe, run: RunConfig | None) -> Recipe:
    """Return the recipe with the storage of Ray's configuration, if that names one and no filesystem of its own."""
    if run is None or run.storage_path == DEFAULT_STORAGE_PATH or _filesystem(run) is not None:
        return recipe
    return recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"storage": str(run.storage_path)})})


def _filesystem(run: RunConfig) -> FileSystem | None:
    """Return the filesystem of a configuration; None for that of its path."""
    return None if isinstance(run.storage_filesystem, LocalFileSystem) else run.storage_filesystem


def merged_scaling(recipe: Recipe, base: ScalingConfig | None) -> ScalingConfig:
    """Return the user's configuration of workers, with what it leaves open as in the recipe."""
    needed = workers.scaling(recipe)
    if base is None:
        return needed
    resources = {**needed.resources_per_worker, **(base.resources_per_worker or {})}
    labels = needed.label_selector if base.label_selector is None else base.label_selector
    return dataclasses.replace(base, resources_per_worker=resources, label_selector=labels)


def check_places(scaling: ScalingConfig, count: int) -> None:
    """Check that nodes have the labels and the resources of workers, apart from CPUs and GPUs (`joining.check_room`).

    Otherwise Ray would wait for such nodes. `count` is the fewest workers that training goes on with.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    needs = scaling.additional_resources_per_worker
    kind = "accelerator_type:"
    for name, amount in needs.items():
        room = sum(int(node["Resources"].get(name, 0) // amount) for node in nodes)
        if room < count:
            field, value = "resources_per_worker", f"{name}: {amount:g}"
            if name.startswith(kind):
                field, value = "accelerator_type", name.removeprefix(kind)
            kinds = sorted({name.removeprefix(kind) for node in nodes for name in node["Resources"] if name.startswith(kind)})
            rule = f"the cluster has room for {room} such workers, and {count} are wanted"
            raise UserError(f"scaling_config.{field}", value, rule, kinds if field == "accelerator_type" else None)
    labels = scaling._label_selector_per_worker(count) or []
    for chosen, wanted in Counter(tuple(sorted(selector.items())) for selector in labels).items():
        able = [node for node in nodes if all(_matches(node.get("Labels", {}).get(key), rule) for key, rule in chosen)]
        room = sum(int(node["Resources"].get("CPU", 0) // scaling.num_cpus_per_worker) for node in able)
        if room < wanted:
            selector = ", ".join(f"{key}={rule}" for key, rule in chosen)
            rule = f"{len(able)} node(s) have these labels, with room for {room} of {wanted} workers"
            raise UserError("scaling_config.label_selector", selector, rule)


def _matches(label: str | None, rule: str) -> bool:
    """Whether a node's label is as one of Ray's selectors wants it: `a`, `!a`, `in(a, b)` or `!in(a, b)`."""
    wanted, refuses = rule.removeprefix("!"), rule.startswith("!")
    among = _ONE_OF.fullmatch(wanted)
    labels = {word.strip() for word in among.group(1).split(",")} if among else {wanted}
    return (label in labels) != refuses


def check_backend(recipe: Recipe, config: TorchConfig | None) -> None:
    """Raise a UserError for a backend of torch.distributed that this recipe's workers cannot have."""
    if config is None or not config.backend:
        return
    legal = ["nccl", "gloo"] if recipe.cluster.gpu else ["gloo"]
    if config.backend not in legal and (config.backend == "nccl" or not dist.is_backend_available(config.backend)):
        where = "GPUs" if recipe.cluster.gpu else "CPUs"
        raise UserError("torch_config.backend", config.backend, f"is not there for workers on {where}", legal)


def merged_run(recipe: Recipe, base: RunConfig | None, resume: str | None, worlds: Mapping[int, Recipe]) -> RunConfig:
    """Return Ray's configuration of a run, with what the user leaves open as in the recipe.

    Ray fills what a `RunConfig` does not name. So a value that equals Ray's default counts as not given.
    """
    base = base or RunConfig()
    files = _filesystem(base)
    storage = _storage(recipe, base, files)
    given = None if base.name.startswith(_RAYS_NAME) else base.name
    name = resume or given or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    runs = sorted(path.parent.name for path in Path(storage).glob("*/recipe.yaml"))
    if resume is not None and files is None and "://" not in storage and resume not in runs:
        raise UserError("resume", resume, f"is not a run in {storage}", runs or None)
    environment = dict(base.worker_runtime_env or {})
    environment["env_vars"] = {**workers.environment(recipe), **environment.get("env_vars", {})}
    return dataclasses.replace(
        base,
        name=name,
        storage_path=storage,
        storage_filesystem=files,
        failure_config=_failures(recipe, base.failure_config),
        checkpoint_config=_checkpoints(recipe, base.checkpoint_config),
        worker_runtime_env=environment,
        callbacks=[*(base.callbacks or []), Seating({world: traffic_of(smaller) for world, smaller in worlds.items()})],
    )


def _storage(recipe: Recipe, base: RunConfig, files: FileSystem | None) -> str:
    if base.storage_path == DEFAULT_STORAGE_PATH and files is None:
        return storage_folder(recipe)
    path = str(base.storage_path)
    if files is None:
        return checked_storage("run_config.storage_path", path)
    check_filesystem("run_config.storage_path", files, path)
    return path


def _failures(recipe: Recipe, given: FailureConfig) -> FailureConfig:
    limit, most = given.controller_failure_limit, given.max_failures
    return dataclasses.replace(
        given,
        max_failures=recipe.cluster.max_failures if most == FailureConfig.max_failures else most,
        controller_failure_limit=_CONTROLLER_FAILURES if limit == FailureConfig.controller_failure_limit else limit,
    )


def _checkpoints(recipe: Recipe, given: CheckpointConfig) -> CheckpointConfig:
    field, metric = "run_config.checkpoint_config.checkpoint_score_attribute", given.checkpoint_score_attribute
    if metric is not None and metric not in (names := reported_names(recipe)):
        raise UserError(field, metric, "is not a metric of a checkpoint", names)
    every, between = recipe.training.eval_every, recipe.checkpoint.every
    if metric in VALIDATED and between and (not every or between % every):
        rule = f"needs a validation at every checkpoint: training.eval_every must divide checkpoint.every={between}"
        raise UserError(field, metric, rule)
    return dataclasses.replace(given, num_to_keep=given.num_to_keep or recipe.checkpoint.keep)
