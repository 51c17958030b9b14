"""Damaged and forged checkpoints: foldray names the damage, runs no code, and offers the checkpoint before."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from foldray.errors import UserError
from tests.hostile.row import linked
from tests.trainers.checkpoints.damage import (
    FILE,
    Damage,
    Payload,
    canary,
    flipped,
    holding,
    load,
    make_run,
    manifest,
    metadata,
    progress,
    replaced,
)
from trainers.checkpoints.stored import DamagedCheckpoint
from trainers.driver.resuming import Beginning


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def saved(value: Any, zipped: bool = True) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=zipped)
    return out.getvalue()


def hidden(found: Metadata, folder: Path) -> None:
    """Hide code in an object that checkpoints need: the arguments of a torch.Size."""

    class Size:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch.Size, ((8, Payload(canary(folder))),)

    found.state_dict_metadata["model/a"].size = Size()  # type: ignore[union-attr, assignment]


def deep(_: Path) -> bytes:
    """Return a pickled dictionary whose key is a deeply nested tuple. Hashing it exhausts the stack and ends the process."""
    return b"\x80\x04})" + b"\x85" * 300_000 + b"K\x00s."


def elsewhere(found: Metadata, _: Path) -> None:
    for place in found.storage_data.values():
        place.relative_path = "../../secret"


def behind(found: Metadata, _: Path) -> None:
    for place in found.storage_data.values():
        place.offset = 10**9


def another(found: Metadata, _: Path) -> None:
    found.state_dict_metadata["model/a"].size = torch.Size([6, 8])  # type: ignore[union-attr]
    found.state_dict_metadata["model/a"].chunks[0].sizes = torch.Size([6, 8])  # type: ignore[union-attr]


def typed(found: Metadata, _: Path) -> None:
    found.state_dict_metadata["model/a"].properties.dtype = torch.int32  # type: ignore[union-attr]


def torn(found: Metadata, _: Path) -> None:
    found.state_dict_metadata["model/a"].chunks[0].sizes = torch.Size([8, 5])  # type: ignore[union-attr]


def as_bytes(found: Metadata, _: Path) -> None:
    found.state_dict_metadata["model/a"] = BytesStorageMetadata()


def another_list(folder: Path) -> None:
    shutil.copy(folder.parent / "step_00000002" / "manifest.0.json", folder)


def nested(what: str) -> str:
    return f'{{"step": {"[" * 200_000}{what}{"]" * 200_000}}}'


WRITTEN, REGULAR, BELONGS = (
    "has other bytes than were written",
    "is not a regular file",
    "it is not the pickle of a checkpoint: it holds ",
)
INTEGER, READ, PLAIN = "(step: Input should be a valid integer)", "cannot be read (", "holds no plain tensor for model/b "
TENSORS: list[tuple[str, Damage, str]] = [
    ("a bit of a tensor", flipped(FILE), WRITTEN),
    ("a truncated file", lambda folder: os.truncate(folder / FILE, 1000), "has 1000 bytes instead of"),
    ("a missing file", lambda folder: (folder / FILE).unlink(), "is missing"),
    ("a folder for a file", lambda folder: ((folder / FILE).unlink(), (folder / FILE).mkdir()), REGULAR),
    ("a device for a tensor", linked(FILE, "/dev/zero"), REGULAR),
    ("a link to nowhere", linked(FILE, "/nowhere"), "is missing"),
]
METADATA: list[tuple[str, Damage, str]] = [
    (
        "code",
        replaced(".metadata", lambda folder: pickle.dumps(Payload(canary(folder)))),
        BELONGS + "posix.system where Metadata",
    ),
    ("code inside", metadata(hidden), BELONGS + "something else where a whole number belongs"),
    (
        "code for a dictionary",
        metadata(lambda found, folder: setattr(found, "storage_data", Payload(canary(folder)))),
        "a dictionary",
    ),
    ("code in text", replaced(".metadata", lambda folder: f"cos\nsystem\n(S'touch {canary(folder)}'\ntR."), "it uses GLOBAL"),
    ("a bit of metadata", flipped(".metadata"), WRITTEN),
    ("truncated metadata", replaced(".metadata", lambda folder: (folder / ".metadata").read_bytes()[:-9]), "not the pickle"),
    ("no metadata", lambda folder: (folder / ".metadata").unlink(), "is missing"),
    ("a device for metadata", linked(".metadata", "/dev/zero"), REGULAR),
    ("another's manifest", another_list, WRITTEN),
    ("a tensor in another folder", metadata(elsewhere), "names the file ../../secret, which is in no manifest"),
    ("a tensor behind the end", metadata(behind), f"places a tensor beyond the end of {FILE}"),
    ("half a tensor", metadata(torn), "the parts of model/a do not make up the tensor"),
    ("a tensor without a place", metadata(lambda found, _: found.storage_data.clear()), "names no file for a part of model/a"),
    ("bytes for a tensor", metadata(as_bytes), "BytesStorageMetadata where TensorStorageMetadata belongs"),
    ("no end of tuples", replaced(".metadata", deep), BELONGS + "something else where Metadata"),
    ("a manifest without metadata", manifest(lambda found: {FILE: found[FILE]}), "is in no manifest"),
    (
        "a manifest without a box",
        manifest(lambda found: found[FILE]["boxes"].popitem() and None),
        f"places a tensor in {FILE} where its manifest has no hash",
    ),
    ("a manifest without tensors", manifest(lambda found: found.pop(FILE) and None), f"{FILE}, which is in no manifest"),
]
PROGRESS: list[tuple[str, Damage, str]] = [
    ("a bit of progress", flipped("progress.json"), WRITTEN),
    ("a device for progress", linked("progress.json", "/dev/zero"), REGULAR),
    ("progress that is no JSON", replaced("progress.json", "step 3"), READ + "Invalid JSON"),
    ("progress that is a list", replaced("progress.json", "[3]"), READ),
    ("progress without end", replaced("progress.json", nested("3")), READ),
    ("huge progress", replaced("progress.json", " " * (17 << 20)), "has 17825792 bytes, but may have at most"),
    ("a step in words", progress(step="3"), INTEGER),
    ("a step that is true", progress(step=True), INTEGER),
    ("a step before all", progress(step=-1), READ + "step: Input should be greater than"),
    ("a step beyond all", progress(step=10**30), READ + "step: Input should be less than"),
    ("a step of another", progress(step=2), "belongs to step 2"),
    ("a choice in words", progress(online={"on": {}, "chosen": "many"}), READ + "online.chosen:"),
    ("data that are a number", progress(data=3), READ + "data: Input should be a valid string)"),
]
MANIFEST: list[tuple[str, Damage, str]] = [
    ("a device for a manifest", linked("manifest.0.json", "/dev/zero"), REGULAR),
    ("a file of the kernel's", linked("manifest.0.json", "/proc/kmsg"), READ),
    ("a manifest of other places", manifest(lambda found: {"../../secret": found[FILE], **found}), READ + "../../secret"),
    ("a manifest that steers a terminal", manifest(lambda found: {"\x1b[2J": found[FILE]}), READ + "?[2J"),
    ("a manifest of words", manifest(lambda found: dict.fromkeys(found, "many")), READ),
    ("a manifest of negative sizes", manifest(lambda found: found[FILE].update(size=-1)), READ + f"{FILE}.size: "),
    ("a manifest with short hashes", manifest(lambda found: found[FILE].update(sha256="ab")), READ + f"{FILE}.sha256"),
    ("a manifest with a box of words", manifest(lambda found: found[FILE].update(boxes={"a": "0" * 64})), READ + f"{FILE}.boxes"),
    ("a manifest of a list", manifest(lambda found: [found]), READ),
]
OTHER: list[tuple[str, Damage, str, str]] = [
    ("no manifest", lambda folder: (folder / "manifest.0.json").unlink(), "its manifest", "is missing: the checkpoint was"),
    ("an empty manifest", manifest(lambda _: {}), "its manifest", "is missing"),
    ("a manifest twice", lambda folder: shutil.copy(folder / "manifest.0.json", folder / "manifest.1.json"), "manifest.1.json",
     "which another manifest names"),
]  # fmt: skip
LATE: list[tuple[str, Damage, str, str]] = [
    ("code for a tensor", holding(lambda folder: saved(Payload(canary(folder)))), FILE, PLAIN + "(UnpicklingError)"),
    ("code as torch saved it once", holding(lambda folder: saved(Payload(canary(folder)), zipped=False)), FILE,
     PLAIN + "(UnpicklingError)"),
    ("a dictionary for a tensor", holding(lambda _: saved({"a": 1})), FILE, PLAIN + "(dict)"),
    ("another shape", holding(lambda _: saved(torch.zeros(8, 7))), FILE,
     "holds model/b as (8, 7) in torch.float32, but .metadata says (8, 6)"),
    ("another dtype", holding(lambda _: saved(torch.zeros(8, 6, dtype=torch.int64))), FILE, "as (8, 6) in torch.int64, but"),
    ("a shape that the model has not", metadata(another), ".metadata", "has model/a as (6, 8), not (8, 6)"),
    ("a kind that the model has not", metadata(typed), ".metadata", "has model/a in torch.int32, not torch.float32"),
    ("a tensor less", metadata(lambda found, _: found.state_dict_metadata.pop("model/a") and None), ".metadata",
     "has no tensor model/a"),
]  # fmt: skip
EARLY = [
    *((name, damage, file, what)
      for file, kinds in ((FILE, TENSORS), (".metadata", METADATA), ("progress.json", PROGRESS), ("manifest.0.json", MANIFEST))
      for name, damage, what in kinds),
    *OTHER,
]  # fmt: skip
KINDS = [(*kind, True) for kind in EARLY] + [(*kind, False) for kind in LATE]
"""Name, damage, the damaged file, a part of the message, and whether the driver finds the damage before workers start."""


@pytest.mark.gate(20)
@pytest.mark.parametrize(("damage", "file", "what", "early"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS])
def test_damage_is_named(run: Path, damage: Damage, file: str, what: str, early: bool) -> None:
    folder = run / "step_00000003"
    damage(folder)
    begin = Beginning.at(str(folder))
    if early:
        with pytest.raises(UserError) as told:
            begin.look()
    else:
        begin.look()
    with pytest.raises(DamagedCheckpoint) as found:
        load(folder)
    assert found.value.file == file
    assert what in found.value.what
    line = str(told.value if early else begin.refused(found.value.file, found.value.what))
    print(line)
    assert line.startswith(f"from={folder}"[:80])
    assert f"is damaged: {file} " in line
    assert what in line
    assert line.isprintable()
    assert line.endswith(f"the newest undamaged one before it: foldray train RECIPE --from {run}/step_00000002")
    assert not canary(folder).exists()
