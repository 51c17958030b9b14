"""The checkpoint that a training starts from: its checks, its hashes, and the offer in place of a damaged one."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from ray.train import Checkpoint
from torch.distributed.checkpoint.metadata import Metadata

from foldray.errors import UserError
from tests.trainers.checkpoints.damage import FILE, Damage, flipped, load, make_run, metadata, state
from trainers.checkpoints import tensors
from trainers.checkpoints.stored import look
from trainers.checkpoints.tensors import DamagedCheckpoint
from trainers.driver import resuming
from trainers.driver.resuming import Beginning
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


def test_only_files_of_the_plan_are_hashed(run: Path) -> None:
    """Rank 1's file is damaged, but rank 0 reads nothing from it."""
    folder = run / "step_00000003"
    shutil.copy(folder / FILE, folder / "__1_0.distcp")

    def change(found: Metadata, _: Path) -> None:
        next(place for index, place in found.storage_data.items() if index.fqn == "model/b").relative_path = "__1_0.distcp"

    metadata(change)(folder)
    flipped("__1_0.distcp")(folder)
    load(folder, {"model/a": torch.zeros(8, 6)})
    with pytest.raises(DamagedCheckpoint, match=r"__1_0\.distcp has other bytes"):
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
        tensors.load(stored, found, {}, None)
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


def test_ray_names_the_newest(run: Path) -> None:
    assert Beginning.newest(Folder(str(run))) is None
    reported(run)
    assert Beginning.newest(Folder(str(run))) is None
    reported(run, 1, 2)  # the third was never completed
    begin = Beginning.newest(Folder(str(run)))
    assert begin is not None
    assert begin.folder.last == "step_00000002"
    flipped(FILE)(run / "step_00000002")
    with pytest.raises(UserError) as told:
        begin.look()
    assert str(told.value).startswith(f"resume=run: its checkpoint step_00000002 is damaged: {FILE} has other bytes")
    assert str(told.value).endswith(f"before it: foldray train RECIPE --from {run}/step_00000001")


def _climbing(run: Path) -> None:
    """Name a folder outside the run. Ray would delete it as an old checkpoint."""
    reported(run, 1, 2)
    text = (run / "checkpoint_manager_snapshot.json").read_text()
    (run / "checkpoint_manager_snapshot.json").write_text(text.replace("step_00000001", "../../precious"))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (_climbing, "cannot be read (checkpoint_results.0.checkpoint_dir_name"),
        (lambda run: reported(run, 1, latest_checkpoint_result=result(9)), "contradicts itself"),
        (lambda run: reported(run, 1, checkpoint_report_indices=[]), "contradicts itself"),
        (lambda run: reported(run, 1, current_report_index="1"), "cannot be read (current_report_index"),
        (lambda run: (run / "checkpoint_manager_snapshot.json").write_text("{"), "cannot be read (Invalid JSON"),
        (lambda run: (run / "checkpoint_manager_snapshot.json").symlink_to("/dev/zero"), "is not a regular file"),
        (lambda run: reported(run, 1, 7), "step_00000007 is missing"),
    ],
)
def test_rays_list_is_not_trusted(run: Path, damage: Damage, what: str) -> None:
    damage(run)
    with pytest.raises(UserError) as told:
        Beginning.newest(Folder(str(run)))
    line = str(told.value)
    assert line.startswith("resume=run: its ")
    assert what in line
    assert line.endswith(f"; the newest undamaged one: foldray train RECIPE --from {run}/step_00000003")


def test_a_rank_that_finds_damage_tells_all(ranks: Any, run: Path) -> None:
    """Only rank 1 sees a damaged folder, but all ranks must raise. Otherwise the others would wait for rank 1."""
    flipped(".metadata")(run / "step_00000003")
    found = ranks(2).run(_opened_apart, run)
    assert found == [f"checkpoint {run}/step_0000000{2 + rank} is damaged: .metadata" for rank in range(2)]


def _opened_apart(rank: int, run: Path) -> str:
    folder = run / f"step_0000000{2 + rank}"
    try:
        with tensors.opened(Checkpoint.from_directory(str(folder)), torch.distributed.group.WORLD):
            return "opened"
    except DamagedCheckpoint as error:
        return str(error).partition(" has other")[0]


def test_metadata_is_what_torch_reads(run: Path) -> None:
    folder = run / "step_00000003"
    theirs = pickle.loads((folder / ".metadata").read_bytes())
    ours = look(Folder(str(folder))).contents
    assert ours.tensors == theirs.state_dict_metadata
    assert ours.places == theirs.storage_data
