"""The checkpoint that a training starts from: its checks, its hashes, and the offer in place of a damaged one."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext

from foldray.errors import UserError
from tests.foldray.parity import make_recipe
from tests.trainers.checkpoints.damage import FILE, Damage, flipped, load, make_run, shards_of, state
from trainers.checkpoints import tensors
from trainers.checkpoints.reported import LIST as reported_list
from trainers.checkpoints.stored import DamagedCheckpoint, look
from trainers.driver import resuming
from trainers.driver.resuming import Beginning, list_checkpoints, newest_run
from trainers.folders import Folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def test_what_is_whole_is_read(run: Path) -> None:
    for step in (1, 2, 3):
        stored = Beginning.at(str(run / f"step_{step:08d}")).look()
        assert stored.hashed
        assert stored.progress.step == step
        found = load(run / f"step_{step:08d}")
        assert all(torch.equal(found[key], tensor) for key, tensor in state(step).items())


def test_a_large_checkpoint_is_hashed_where_it_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "_MOST_HASHED", 0)
    flipped(FILE)(run / "step_00000003")
    begin = Beginning.at(str(run / "step_00000003"))
    begin.look()
    with pytest.raises(DamagedCheckpoint, match="has other bytes"):
        load(run / "step_00000003")
    # The offered checkpoint is not hashed either, so the message does not call it undamaged.
    offered = f"the newest one before it with all its files: foldray train RECIPE --from {run}/step_00000002"
    assert str(begin.refused(FILE, "x")).endswith(offered)


def test_only_boxes_of_the_plan_are_hashed(run: Path) -> None:
    """A box is damaged that some rank does not need."""
    folder = run / "step_00000003"
    places = look(Folder(str(folder))).contents.places
    of_b = next(place for index, place in places.items() if index.fqn == "model/b")
    flipped(FILE, at=of_b.offset + of_b.length // 2)(folder)
    load(folder, {"model/a": torch.zeros(8, 6)})
    with pytest.raises(DamagedCheckpoint, match=rf"{FILE} has other bytes"):
        load(folder, {"model/b": torch.zeros(8, 6)})


def test_the_newest_whole_one_is_offered(run: Path) -> None:
    for name in ("step_00000002", "step_00000003"):
        flipped(FILE)(run / name)
    with pytest.raises(UserError, match=r"undamaged one before it: foldray train RECIPE --from \S+step_00000001$"):
        Beginning.at(str(run / "step_00000003")).look()
    flipped(".metadata")(run / "step_00000001")
    for name in ("step_00000001", "step_00000003"):
        with pytest.raises(UserError, match=r"the run has no earlier undamaged checkpoint$"):
            Beginning.at(str(run / name)).look()


def test_checkpoints_from_before_boxes_had_hashes(run: Path) -> None:
    """Their files of tensors have one hash each."""
    folder = run / "step_00000003"
    entries = json.loads((folder / "manifest.0.json").read_text())
    sha256 = Folder(str(folder)).sha256
    before = {name: {"size": entry["size"], "sha256": sha256(name)} for name, entry in entries.items()}
    (folder / "manifest.0.json").write_text(json.dumps(before))
    assert Beginning.at(str(folder)).look().hashed
    assert torch.equal(load(folder)["model/a"], state(3)["model/a"])
    flipped(FILE)(folder)
    with pytest.raises(DamagedCheckpoint, match="has other bytes"):
        load(folder)


def test_checkpoints_from_before_there_were_hashes(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = run / "step_00000003"
    entries = json.loads((folder / "manifest.0.json").read_text())
    (folder / "manifest.0.json").unlink()
    (folder / "sizes.0.json").write_text(json.dumps({name: entry["size"] for name, entry in entries.items()}))
    Beginning.at(str(folder)).look()
    assert [record.message for record in caplog.records] == [
        f"checkpoint {folder} has no hashes, so damaged bits in it are not detected"
    ]
    assert torch.equal(load(folder)["model/a"], state(3)["model/a"])
    (folder / "sizes.0.json").write_text(json.dumps({name: str(entry["size"]) for name, entry in entries.items()}))
    with pytest.raises(UserError, match=r"sizes\.0\.json cannot be read"):
        Beginning.at(str(folder)).look()
    (folder / "sizes.0.json").write_text(json.dumps({**{name: entry["size"] for name, entry in entries.items()}, FILE: 7}))
    with pytest.raises(UserError, match=r"__0_0\.distcp has \d+ bytes instead of 7"):
        Beginning.at(str(folder)).look()


def test_storage_elsewhere(run: Path) -> None:
    """A checkpoint can be named by a URI. Then the offered checkpoint is also a URI."""
    flipped(".metadata")(run / "step_00000003")
    Beginning.at(f"file://{run}/step_00000002").look()
    with pytest.raises(UserError, match=rf"undamaged one before it: foldray train RECIPE --from file://{run}/step_00000002$"):
        Beginning.at(f"file://{run}/step_00000003/").look()
    assert (Folder("s3://bucket/runs?region=x") / "run").name == "s3://bucket/runs/run?region=x"
    with pytest.raises(UserError, match=r"^from=htp://x: is not a storage that can be reached"):
        Beginning.at("htp://x")


def test_what_a_worker_downloads_is_read_and_looked_at(run: Path) -> None:
    remote = SubTreeFileSystem(str(run.parent), LocalFileSystem())  # for Ray, any given filesystem is remote
    handle = Folder("run/step_00000003", remote).checkpoint
    found = {key: torch.zeros_like(tensor) for key, tensor in state(3).items()}
    with tensors.opened(handle, None) as stored:
        assert stored.folder.path != str(run / "step_00000003")
        tensors.load(stored, shards_of(found), None)
    assert all(torch.equal(found[key], tensor) for key, tensor in state(3).items())
    flipped(FILE)(run / "step_00000003")
    Beginning("resume", "run", Folder("run/step_00000003", remote)).look()  # the driver does not hash remote files
    with pytest.raises(DamagedCheckpoint, match=r"^checkpoint run/step_00000003 is damaged: __0_0\.distcp has other bytes"):
        load(handle)


def result(step: int) -> dict[str, Any]:
    return {"version": 0, "checkpoint_dir_name": f"step_{step:08d}", "metrics": {"loss": float("nan")}}


def reported(run: Path, *steps: int, **changes: Any) -> None:
    """Write Ray's list of a run's checkpoints."""
    results = [result(step) for step in steps]
    lists = ("pending_training_results", "pending_validation_specs", "validated_checkpoint_dir_names",
             "timed_out_validation_checkpoint_dir_names", "failed_validation_checkpoint_dir_names")  # fmt: skip
    document = {
        "ray_version": "2", "checkpoint_results": results, "checkpoint_report_indices": list(range(len(steps))),
        "latest_checkpoint_result": results[-1] if results else None, "current_report_index": len(steps),
    } | {key: [] for key in lists}  # fmt: skip
    (run / "checkpoint_manager_snapshot.json").write_text(json.dumps(document | changes))


def newest(run: Path, *without: str) -> str | None:
    begin = Beginning.newest(Folder(str(run)), without)
    return begin and begin.folder.last


def test_the_newest_undamaged_one_is_taken(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint counts once it is whole, whether or not Ray has come to list it."""
    assert newest(run) == "step_00000003"
    reported(run, 1, 2)
    assert newest(run) == "step_00000003"
    assert newest(run, "step_00000003") == "step_00000002"
    assert not caplog.records
    flipped(FILE)(run / "step_00000003")
    assert newest(run) == "step_00000002"
    shutil.rmtree(run / "step_00000002")
    assert newest(run) == "step_00000001"
    assert [record.message for record in caplog.records] == [
        f"run run: its checkpoint step_00000003 is damaged: {FILE} has other bytes than were written (its SHA-256 differs); "
        "foldray takes step_00000002",
        f"run run: its checkpoint step_00000003 is damaged: {FILE} has other bytes than were written (its SHA-256 differs); "
        "foldray takes step_00000001",
        "run run: its checkpoint step_00000002 is damaged: its folder does not exist; foldray takes step_00000001",
    ]


def test_a_run_without_an_undamaged_checkpoint(run: Path) -> None:
    """What was never complete does not count. What was complete once is not given up without a word."""
    for step in (1, 2, 3):
        (run / f"step_{step:08d}" / "manifest.0.json").unlink()
    assert newest(run) is None
    reported(run, 1)
    with pytest.raises(UserError, match=r"^resume=run: its checkpoint step_00000003 .*; the run has no undamaged checkpoint$"):
        newest(run)
    with pytest.raises(UserError, match=r"the run has no undamaged checkpoint$"):
        newest(run, "step_00000001")
    shutil.rmtree(run / "step_00000002")
    shutil.rmtree(run / "step_00000003")
    with pytest.raises(UserError, match=r"^resume=run: the run has no undamaged checkpoint$"):
        newest(run, "step_00000001")
    (run / reported_list).write_text("{")
    with pytest.raises(UserError, match=r"^resume=run: its checkpoint_manager_snapshot\.json cannot be read \(Invalid JSON"):
        newest(run)


def _climbing(run: Path) -> None:
    """Name a folder outside the run. Ray would delete it as an old checkpoint."""
    reported(run, 1, 2)
    text = (run / reported_list).read_text()
    (run / reported_list).write_text(text.replace("step_00000001", "../../precious"))


@pytest.mark.parametrize(
    "damage",
    [
        _climbing,
        lambda run: reported(run, 1, latest_checkpoint_result=result(9)),
        lambda run: reported(run, 1, checkpoint_report_indices=[]),
        lambda run: reported(run, 1, current_report_index="1"),
        lambda run: (run / reported_list).write_text("{"),
        lambda run: (run / reported_list).symlink_to("/dev/zero"),
        lambda run: reported(run, 1, 7),
        lambda run: reported(run, pending_training_results=[1]),
        lambda run: None,
    ],
)
def test_rays_list_is_written_anew(run: Path, damage: Damage) -> None:
    """Ray reads a list that is whole, and that ends with the checkpoint to begin with."""
    damage(run)
    begin = Beginning.newest(Folder(str(run)))
    list_checkpoints(Folder(str(run)), begin)
    assert read_by_ray(run) == (["step_00000001", "step_00000002", "step_00000003"], "step_00000003")
    list_checkpoints(Folder(str(run)), Beginning.newest(Folder(str(run)), {"step_00000003"}))
    assert read_by_ray(run) == (["step_00000001", "step_00000002"], "step_00000002")
    list_checkpoints(Folder(str(run)), None)
    assert read_by_ray(run) == ([], None)


def test_the_list_keeps_metrics_and_their_order(run: Path) -> None:
    """Ray may keep the best checkpoints by a metric, and lists them by it."""
    reported(run, 2, 1, latest_checkpoint_result=result(2))
    list_checkpoints(Folder(str(run)), Beginning.newest(Folder(str(run))))
    assert read_by_ray(run) == (["step_00000002", "step_00000001", "step_00000003"], "step_00000003")
    entries = json.loads((run / reported_list).read_text())["checkpoint_results"]
    assert [list(entry["metrics"]) for entry in entries] == [["loss"], ["loss"], ["step"]]


def test_a_new_run_has_no_list(tmp_path: Path) -> None:
    list_checkpoints(Folder(str(tmp_path / "new")), None)
    assert not (tmp_path / "new").exists()


def read_by_ray(run: Path) -> tuple[list[str], str | None]:
    """Return the names in the list, and the newest, as Ray's own code reads them."""
    storage = StorageContext(str(run.parent), run.name)
    manager = CheckpointManager(CheckpointConfig(), storage)
    latest = manager.latest_checkpoint_result
    names = [Path(each.checkpoint.path).name for each in manager._checkpoint_results]
    return names, latest and Path(latest.checkpoint.path).name


def test_one_rank_looks_and_all_are_told(ranks: Any, run: Path) -> None:
    """With as many manifests as ranks, a shared disk would be asked for as many files as the square of the ranks."""
    found = ranks(2).run(_opened, [run / "step_00000003"] * 2)
    assert found == [(1, "opened"), (0, "opened")]
    flipped(".metadata")(run / "step_00000003")
    found = ranks(2).run(_opened, [run / "step_00000003"] * 2)
    assert found == [(looks, f"checkpoint {run}/step_00000003 is damaged: .metadata") for looks in (1, 0)]


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: os.truncate(file, 1000)], ids=["missing", "cut"])
@pytest.mark.parametrize("hashed", [True, False])
def test_a_rank_that_finds_damage_tells_all(ranks: Any, run: Path, damage: Callable[[Path], None], hashed: bool) -> None:
    """Only rank 1 has a damaged copy, but all ranks must raise. Otherwise the others would wait for rank 1."""
    whole, damaged = run / "step_00000003", run / "copy" / "step_00000003"
    if not hashed:  # as an old version wrote it
        sizes = {name: entry["size"] for name, entry in json.loads((whole / "manifest.0.json").read_text()).items()}
        (whole / "manifest.0.json").unlink()
        (whole / "sizes.0.json").write_text(json.dumps(sizes))
    shutil.copytree(whole, damaged)
    damage(damaged / FILE)
    found = ranks(2).run(_opened, [whole, damaged])
    assert found == [(1, f"checkpoint {whole} is damaged: {FILE}"), (0, f"checkpoint {damaged} is damaged: {FILE}")]


def _opened(rank: int, folders: list[Path]) -> tuple[int, str]:
    """Load a checkpoint. Return how often this rank looked at all of it, and the checkpoint and the file that are damaged."""
    group = torch.distributed.group.WORLD
    with mock.patch.object(tensors, "look", wraps=look) as looks:
        try:
            with tensors.opened(Checkpoint.from_directory(str(folders[rank])), group) as stored:
                tensors.load(stored, shards_of(state(0)), group)
                return looks.call_count, "opened"
        except DamagedCheckpoint as error:
            return looks.call_count, f"checkpoint {error.path} is damaged: {error.file}"


def test_metadata_is_what_torch_reads(run: Path) -> None:
    folder = run / "step_00000003"
    theirs = pickle.loads((folder / ".metadata").read_bytes())
    ours = look(Folder(str(folder))).contents
    assert ours.tensors == theirs.state_dict_metadata
    assert ours.places == theirs.storage_data


def test_the_newest_run_of_a_recipe(tmp_path: Path) -> None:
    recipe = make_recipe(1).model_copy(update={"name": "a+"})
    recipe = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"storage": str(tmp_path / "runs")})})
    assert newest_run(recipe) is None
    others = ["a+", "a+-20270101", "a+b-20270101-000000-0000", "aa-20270101-000000-0000", "data"]
    for name in ("a+-20261231-235959-ffff", "a+-20260101-000000-0000", *others):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.yaml").touch()
    (tmp_path / "runs" / "a+-20270202-000000-0000").mkdir()  # stopped before it had a recipe
    assert newest_run(recipe) == "a+-20261231-235959-ffff"
    uri = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"storage": f"file://{tmp_path}/runs"})})
    assert newest_run(uri) == "a+-20261231-235959-ffff"
