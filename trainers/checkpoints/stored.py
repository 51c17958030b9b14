"""What lies in a checkpoint's folder, looked at without trust in it.

A checkpoint is read long after it was written, and perhaps comes from elsewhere, so nothing in it may run code, and no damage
may be trained on. Each rank leaves a manifest of its files, with their sizes and hashes. Before anything is loaded, every file
must have its size, and `.metadata` and `progress.json` their hashes. Tensors' files, which may be large, are hashed by the ranks
that read them.

All that is read from a folder of runs, of packed data or of a tokenizer was gone through for what might run code:

- JSON (`manifest.N.json`, `progress.json`, `run.json`, `metrics.jsonl`, and Ray's `checkpoint_manager_snapshot.json`, from which
  nothing is unpickled) is checked against its types.
- `.metadata` is a pickle, which is not unpickled (`metadata.py`).
- Tensors' files go through `torch.load(weights_only=True)`; what DCP's planner would unpickle, its byte items, is never planned.
- NumPy maps packed data without `allow_pickle`; transformers opens tokenizers without `trust_remote_code`.
- YAML has a safe loader. Optuna unpickles what Redis holds, which is no legal `tune.storage`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from trainers.checkpoints.metadata import Contents, read_metadata
from trainers.folders import Checked, Count, DamagedFile, Folder, read_json

METADATA, PROGRESS = ".metadata", "progress.json"
_MOST_METADATA = 1 << 30
_MOST_STEPS = 10**12
_MANIFEST, _OLD_MANIFEST = re.compile(r"manifest\.\d+\.json"), re.compile(r"sizes\.\d+\.json")

Name = Annotated[str, Field(pattern=r"^(\.metadata|progress\.json|__\d{1,9}_\d{1,9}\.distcp)$")]


class Entry(Checked):
    """A file, as it was written; checkpoints from before there were hashes have none."""

    size: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None


class Found(Checked):
    """What a search while training chose, and on which cluster that holds."""

    on: dict[str, Any]
    chosen: tuple[Count, Count] | None


class Progress(Checked):
    """What is needed to go on, beside tensors; `progress.json` of a checkpoint.

    Attributes:
        step: done so far.
        data: digest of the packed data.
        seed, global_batch: of the training, which order its text; older checkpoints do not have them.
    """

    step: Annotated[int, Field(ge=1, le=_MOST_STEPS)]
    data: str
    fold: dict[str, Any]
    validation: dict[str, Any]
    online: Found | None = None
    seed: int | None = None
    global_batch: Annotated[int, Field(ge=1)] | None = None


_ENTRIES, _SIZES, _PROGRESS = TypeAdapter(dict[Name, Entry]), TypeAdapter(dict[Name, Count]), TypeAdapter(Progress)


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose files are all there.

    Args:
        entries: every file's size and hash, as written.
    """

    folder: Folder
    entries: dict[str, Entry]
    contents: Contents
    progress: Progress

    @property
    def hashed(self) -> bool:
        """Whether damaged bits would be seen."""
        return all(entry.sha256 for entry in self.entries.values())

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries.values())

    def check(self, name: str) -> None:
        """Hash a file.

        Raises:
            DamagedFile: it is another one than was written.
        """
        _check_hash(self.folder, name, self.entries[name])


def look(folder: Folder) -> Stored:
    """A checkpoint's manifests, metadata and progress, after a look at every file's size.

    Raises:
        DamagedFile: something is missing, or is not what was written.
    """
    names = folder.names()
    if names is None:
        raise DamagedFile("its folder", "is not there")
    entries = _entries(folder, names)
    for name, entry in entries.items():
        if (found := folder.size(name)) != entry.size:
            raise DamagedFile(name, f"has {found} bytes instead of {entry.size}")
    for name in (METADATA, PROGRESS):
        if name not in entries:
            raise DamagedFile(name, "is in no manifest" if name in names else "is missing")
        _check_hash(folder, name, entries[name])
    progress = read_json(folder, PROGRESS, _PROGRESS)
    told = re.fullmatch(r"step_(\d+)", folder.last)
    if told and int(told[1]) != progress.step:
        raise DamagedFile(PROGRESS, f"is of step {progress.step}")
    return Stored(folder, entries, _contents(folder, entries), progress)


def seal(folder: Path, rank: int) -> None:
    """Write the manifest of what a rank has written."""
    here = Folder(str(folder))
    entries = {name: {"size": here.size(name), "sha256": here.sha256(name)} for name in here.names() or ()}
    (folder / f"manifest.{rank}.json").write_text(json.dumps(entries))


def _entries(folder: Folder, names: list[str]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for manifest in names:
        if _MANIFEST.fullmatch(manifest):
            found = read_json(folder, manifest, _ENTRIES)
        elif _OLD_MANIFEST.fullmatch(manifest):
            found = {name: Entry(size=size) for name, size in read_json(folder, manifest, _SIZES).items()}
        else:
            continue
        if twice := found.keys() & entries.keys():
            raise DamagedFile(manifest, f"names {min(twice)}, which another one has")
        entries |= found
    if not entries:
        raise DamagedFile("its manifest", "is missing: it was never completed")
    return entries


def _check_hash(folder: Folder, name: str, entry: Entry) -> None:
    if entry.sha256 is not None and folder.sha256(name) != entry.sha256:
        raise DamagedFile(name, "has other bytes than were written (its SHA-256 differs)")


def _contents(folder: Folder, entries: dict[str, Entry]) -> Contents:
    try:
        contents = read_metadata(folder.read(METADATA, _MOST_METADATA))
    except ValueError as error:
        raise DamagedFile(METADATA, f"cannot be read ({error})") from None
    for place in contents.places.values():
        if place.relative_path not in entries:
            raise DamagedFile(METADATA, f"names the file {place.relative_path[:80]}, which is in no manifest")
        if place.offset + place.length > entries[place.relative_path].size:
            raise DamagedFile(METADATA, f"looks for a tensor behind the end of {place.relative_path}")
    return contents
