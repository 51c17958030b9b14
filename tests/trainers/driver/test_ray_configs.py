"""Ray's configurations and arguments beside a recipe: each is used, or refused in one line. Nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray
from pyarrow.fs import FileSystem, LocalFileSystem, SubTreeFileSystem
from ray.train import Checkpoint, CheckpointConfig, DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig

from foldray.errors import UserError
from foldray.recipe import Recipe
from trainers import FoldTrainer
from trainers.cluster import joining, run_storage
from trainers.driver import checks, ray_configs, trainer
from trainers.driver.ray_configs import check_places
from trainers.folders import Folder
from trainers.sinks.run_folder import RunFolder
from trainers.telemetry.metrics import reported_names

ROWS = [{"text": "some text"}]


def recipe(**sections: Any) -> Recipe:
    base: dict[str, Any] = {"model": {"preset": "tiny"}, "cluster": {"workers": 2, "max_failures": 5}}
    return Recipe.parse({"name": "given", **{key: {**base.get(key, {}), **sections.get(key, {})} for key in base | sections}})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path


def run_of(**options: Any) -> RunConfig:
    return FoldTrainer(recipe(), run_config=RunConfig(**options)).run_config


@pytest.mark.parametrize(
    ("given", "path"),
    [("runs", "runs"), (Path("runs"), "runs"), ("~/runs", "home/runs"), (Path("a/../b"), "a/../b"), ("file://{}/c", "c")],
)
def test_a_storage_path_may_be_relative(folder: Path, given: str | Path, path: str) -> None:
    given = given.format(folder) if isinstance(given, str) else given
    assert run_of(storage_path=given).storage_path == str(folder / path)


def test_a_local_filesystem_is_no_other_storage(folder: Path) -> None:
    config = run_of(storage_path="runs", storage_filesystem=LocalFileSystem())
    assert (config.storage_path, config.storage_filesystem) == (str(folder / "runs"), None)


def test_a_storage_elsewhere_is_told_with_its_scheme(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray knows the path of a checkpoint without the scheme of its storage."""
    monkeypatch.setattr(run_storage, "_reachable", lambda field, uri: uri)
    made = FoldTrainer(recipe(), run_config=RunConfig(name="far", storage_path="s3://bucket/runs?region=x"))
    written = RunFolder(folder / "far", made.recipe, {})
    written.take({"kind": "checkpoint", "step": 2, "path": "bucket/runs/far/step_00000002"})
    assert written.summary("finished").checkpoint == "s3://bucket/runs/far/step_00000002?region=x"


def test_another_filesystem_is_tried(folder: Path) -> None:
    files = SubTreeFileSystem(str(folder), LocalFileSystem())
    made = FoldTrainer(recipe(), run_config=RunConfig(name="x", storage_path="bucket/runs", storage_filesystem=files))
    assert (made.run_config.storage_path, made._root) == ("bucket/runs", folder / "runs")
    assert [path.name for path in folder.iterdir() if path.name != "home"] == ["bucket"]
    assert not list((folder / "bucket" / "runs").iterdir())


class _ReadOnly:
    """A filesystem that takes no file."""

    def create_dir(self, path: str, recursive: bool) -> None:
        raise OSError("the disk is read-only")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"storage_path": "/proc/1/x"}, r"^run_config\.storage_path=/proc/1/x: is not a writable folder"),
        ({"storage_path": "~nobody-there/x"}, r"^run_config\.storage_path=~nobody-there/x: names the home of an unknown user"),
        ({"storage_path": "s3://key:hush@b/x"}, r"^run_config\.storage_path=s3://\*\*\*@b/x: holds a password"),
        ({"storage_path": "nothing://b/x"}, r"^run_config\.storage_path=nothing://b/x: is not a storage that can be reached"),
        (
            {"storage_path": "b", "storage_filesystem": _ReadOnly()},
            r"^run_config\.storage_path=b: cannot .*the disk is read-only",
        ),
        (
            {"checkpoint_config": CheckpointConfig(checkpoint_score_attribute="accuracy")},
            r"^run_config\.checkpoint_config\.checkpoint_score_attribute=accuracy: is not a metric .*legal: step, loss, ",
        ),
        (
            {"checkpoint_config": CheckpointConfig(checkpoint_score_attribute="validation/loss")},
            r"needs a validation at every checkpoint: training\.eval_every must divide checkpoint\.every=6",
        ),
    ],
)
def test_a_bad_run_config_is_one_line(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        FoldTrainer(recipe(checkpoint={"every": 6}, training={"eval_every": 4}), run_config=RunConfig(**options))


def test_a_run_config_leaves_to_the_recipe_what_it_does_not_name(folder: Path) -> None:
    config = run_of(callbacks=[])
    assert config.storage_path == str(folder / "runs")
    assert config.name is not None
    assert config.name.startswith("given-")
    assert config.failure_config.max_failures == 5
    assert config.failure_config.controller_failure_limit == ray_configs._CONTROLLER_FAILURES
    assert config.checkpoint_config.num_to_keep == recipe().checkpoint.keep


def test_what_a_run_config_names_is_kept() -> None:
    checkpoints = CheckpointConfig(num_to_keep=7, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    failures = FailureConfig(max_failures=-1, controller_failure_limit=9)
    config = run_of(name="mine", failure_config=failures, checkpoint_config=checkpoints)
    assert (config.name, config.failure_config, config.checkpoint_config) == ("mine", failures, checkpoints)
    assert {"loss", "validation/loss"} <= set(reported_names(Recipe.parse({"model": {"preset": "tiny"}})))


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("train_loop_per_worker", print, "ray.train.torch.TorchTrainer"),
        ("train_loop_config", {"lr": 1}, "Recipe.load(PATH, ['optimizer.lr=1e-3'])"),
        ("backend_config", TorchConfig(), "torch_config"),
        ("dataset_config", DataConfig(), "datasets alone"),
        ("validation_config", object(), "training.eval_every"),
        ("resume_from_checkpoint", Checkpoint("/x"), "start=CHECKPOINT"),
        ("metadata", {"a": 1}, "MLflow"),
    ],
)
def test_an_argument_without_use_says_what_to_give_instead(name: str, value: Any, instead: str) -> None:
    with pytest.raises(UserError) as told:
        FoldTrainer(recipe(), **{name: value})
    assert str(told.value).startswith(f"{name}=")
    assert instead in str(told.value)
    assert FoldTrainer(recipe(), **{name: None})


def test_an_unknown_argument_is_pythons_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'storage'"):
        FoldTrainer(recipe(), storage="runs")


@pytest.mark.parametrize(
    ("scaling", "told"),
    [
        (ScalingConfig(num_workers=0), r"^cluster\.workers=0: "),
        (ScalingConfig(num_workers=1, placement_strategy="ANY"), r"^cluster\.placement=ANY: .*STRICT_SPREAD"),
        (ScalingConfig(num_workers=1, use_tpu=True), r"^scaling_config\.use_tpu=True: foldray trains on CPUs and GPUs"),
        (
            ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5}),
            r"^scaling_config\.resources_per_worker=CPU: 0\.5: a worker has a whole number of CPUs",
        ),
        (
            ScalingConfig(num_workers=1, use_gpu=True, resources_per_worker={"GPU": 2}),
            r"^scaling_config\.resources_per_worker=GPU: 2: a worker has one GPU",
        ),
    ],
)
def test_a_bad_scaling_config_is_one_line(scaling: ScalingConfig, told: str) -> None:
    with pytest.raises(UserError, match=told):
        FoldTrainer(recipe(), scaling_config=scaling)


def test_a_scaling_config_leaves_to_the_recipe_what_it_does_not_name() -> None:
    given = recipe(cluster={"cpus_per_worker": 3})
    made = FoldTrainer(given, scaling_config=ScalingConfig(num_workers=4, use_gpu=True, resources_per_worker={"memory": 2}))
    assert (made.recipe.cluster.workers, made.recipe.cluster.gpu, made.recipe.cluster.cpus_per_worker) == (4, True, 3)
    assert made.scaling_config.resources_per_worker == {"CPU": 3, "GPU": 1, "memory": 2}


def test_an_elastic_scaling_config_names_the_fewest_and_the_most_workers() -> None:
    made = FoldTrainer(recipe(), scaling_config=ScalingConfig(num_workers=(1, 2)))
    assert (made.recipe.cluster.min_workers, made.recipe.cluster.workers, sorted(made.worlds)) == (1, 2, [1, 2])
    assert FoldTrainer(recipe(cluster={"workers": 2, "min_workers": 1})).scaling_config.num_workers == (1, 2)


NODE = {
    "Alive": True,
    "Resources": {"CPU": 4.0, "GPU": 4.0, "memory": 8.0, "accelerator_type:H200": 1.0},
    "Labels": {"zone": "a", "role": "train"},
}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"resources_per_worker": {"memory": 5}}, r"^scaling_config\.resources_per_worker=memory: 5: .*room for 2 such .* 3 are"),
        ({"resources_per_worker": {"disk": 1}}, r"^scaling_config\.resources_per_worker=disk: 1: .*room for 0 such"),
        ({"accelerator_type": "A100"}, r"^scaling_config\.accelerator_type=A100: .*room for 0.*; legal: H200$"),
        ({"label_selector": {"zone": "b"}}, r"^scaling_config\.label_selector=zone=b: 0 node\(s\) .* 0 of 3 workers"),
        ({"label_selector": {"zone": "!in(a, b)"}}, r"zone=!in\(a, b\): 0 node"),
        ({"label_selector": [{"zone": "a"}, {"role": "!train"}, {}]}, r"role=!train: 0 node\(s\) .* 0 of 1 workers"),
        (
            {"resources_per_worker": {"CPU": 4}, "label_selector": {"zone": "a"}},
            r"2 node\(s\) have these labels, with room for 2 of 3",
        ),
        ({"resources_per_worker": {"memory": 2}, "accelerator_type": "H200", "label_selector": {"zone": "in(a, b)"}}, None),
        ({"label_selector": [{"zone": "!b"}, {"role": "train", "zone": "a"}, {}]}, None),
    ],
)
def test_workers_that_no_node_can_take_are_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], told: str | None
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [NODE, NODE, {**NODE, "Alive": False}])
    given = recipe(training={"global_batch": 12})
    scaling = FoldTrainer(given, scaling_config=ScalingConfig(num_workers=3, **options)).scaling_config
    if told is None:
        check_places(scaling, 3)
        return
    with pytest.raises(UserError, match=told):
        check_places(scaling, 3)


def test_gpus_on_a_cluster_without_one_are_refused_before_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "connect", lambda recipe: None)
    monkeypatch.setattr(checks, "check_reachable", lambda recipe: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{**NODE, "Resources": {"CPU": 4.0}}])
    made = FoldTrainer(recipe(), scaling_config=ScalingConfig(num_workers=2, use_gpu=True))
    with pytest.raises(UserError, match=r"^cluster\.gpu=true: none of the cluster's 1 node\(s\) has a GPU"):
        made.fit()


@pytest.mark.parametrize("backend", ["nccl", "pigeon"])
def test_a_backend_that_workers_cannot_have_is_refused(backend: str) -> None:
    with pytest.raises(UserError, match=rf"^torch_config\.backend={backend}: is not there for workers on CPUs; legal: gloo"):
        FoldTrainer(recipe(), torch_config=TorchConfig(backend=backend))
    assert FoldTrainer(recipe(), torch_config=TorchConfig(backend="gloo", timeout_s=60)).backend_config.timeout_s == 60


@pytest.mark.parametrize(
    ("datasets", "told"),
    [
        ({"train": ROWS}, r"^datasets=train: needs 'validation' beside it: train, validation = dataset\.train_test_split"),
        ({"validation": ROWS}, r"^datasets=validation: must have 'train'"),
        ({"train": ROWS, "test": ROWS}, r"^datasets=test: is not a name of a dataset; legal: train, validation"),
        ({"train": ROWS, "validation": "text.txt"}, r"^datasets\.validation=str: is neither a ray\.data\.Dataset nor rows"),
        ({"train": {"text": ["a"]}, "validation": ROWS}, r"^datasets\.train=dict: is neither"),
    ],
)
def test_a_bad_dataset_is_one_line(datasets: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        FoldTrainer(recipe(), datasets=datasets)


def test_a_run_without_a_recipe_is_not_restored(folder: Path) -> None:
    (folder / "runs" / "x").mkdir(parents=True)
    assert not FoldTrainer.can_restore("runs/x")
    with pytest.raises(UserError, match=r"^path=runs/x: its recipe\.yaml is missing"):
        FoldTrainer.restore("runs/x")


@pytest.mark.parametrize("filesystem", [None, SubTreeFileSystem("/", LocalFileSystem())])
def test_a_run_is_restored_with_its_recipe(folder: Path, filesystem: FileSystem | None) -> None:
    """The recipe of the run counts, and its name and storage."""
    path = folder / "runs" / "x"
    text = json.dumps(recipe(training={"steps": 77}).model_dump(mode="json"))
    Folder(str(path)).write("recipe.yaml", text.encode())
    named = path.relative_to(folder) if filesystem is None else str(path)
    assert FoldTrainer.can_restore(named, filesystem)
    made = FoldTrainer.restore(named, filesystem, run_config=RunConfig(failure_config=FailureConfig(max_failures=2)))
    assert made.recipe.training.steps == 77
    assert (made.resume, made.run_config.storage_path, made.run_config.name) == ("x", str(path.parent), "x")
    assert made.run_config.failure_config.max_failures == 2


def test_a_gpu_of_the_configuration_warns_of_ops_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(made: FoldTrainer) -> None:
        raise InterruptedError

    monkeypatch.setattr(trainer, "check_packages", lambda given: None)
    monkeypatch.setattr(FoldTrainer, "_begin", stop)
    given = recipe(data={"mask_documents": True}, schedule={"graphs": "auto"})
    for uses in (False, True):
        with pytest.raises(InterruptedError):
            FoldTrainer(given, scaling_config=ScalingConfig(num_workers=2, use_gpu=uses)).fit()
    on_cpu, told = [record.message for record in caplog.records if record.name == "trainers.driver.trainer"]
    assert on_cpu == "schedule.graphs=auto: CUDA graphs need GPUs, so ops run without them"
    assert told.startswith("schedule.graphs=auto: these ops run without graphs: attention, project (data.mask_documents")
