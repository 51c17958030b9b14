"""Reads a checkpoint's folder without trust.

A checkpoint is read long after it was written, and may come from another place. So its files must not run code, and training
must not continue from damaged files. Each rank writes a manifest with the sizes and hashes of its files. Before a checkpoint
is loaded, one rank checks the size of every file, and the hashes of `.metadata` and `progress.json`. Files of tensors may be
large, and every rank may need a part of each. So every box in them has a hash of its own, and each rank reads and hashes only
the boxes that it needs.

No file in a folder of runs, of packed data or of a tokenizer can run code:

- JSON (`manifest.N.json`, `progress.json`, `run.json`, `metrics.jsonl`, and Ray's `checkpoint_manager_snapshot.json`, which
  is never unpickled) is checked against its types.
- `.metadata` is a pickle. It is read without unpickling (`metadata.py`).
- Files of tensors are read with `torch.load(weights_only=True)`. DCP's planner would unpickle byte items, so no plan has
  any.
- NumPy maps packed data without `allow_pickle`. transformers opens tokenizers without `trust_remote_code`.
- YAML is read with a safe loader. Optuna would unpickle entries of a Redis storage, so `tune.storage` does not take Redis.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pyarrow import NativeFile
from pydantic import Field, TypeAdapter

from trainers.checkpoints.reading import READERS, Place, read
from trainers.data.order import NEWEST
from trainers.folders import Checked, Count, DamagedFile, Folder, read_json

if TYPE_CHECKING:
    from trainers.checkpoints.metadata import Contents

METADATA, PROGRESS = ".metadata", "progress.json"
_MOST_METADATA = 1 << 30
_MOST_STEPS = 10**12
_MANIFEST, _OLD_MANIFEST = re.compile(r"manifest\.\d+\.json"), re.compile(r"sizes\.\d+\.json")

Name = Annotated[str, Field(pattern=r"^(\.metadata|progress\.json|__\d{1,9}_\d{1,9}\.distcp)$")]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Range = Annotated[str, Field(pattern=r"^\d{1,19}\+\d{1,19}$")]


class DamagedCheckpoint(Exception):
    """Training cannot continue from a checkpoint. All ranks raise this error, and another attempt would fail in the same way."""

    def __init__(self, path: str, file: str, what: str):
        super().__init__(path, file, what)
        self.path, self.file, self.what = path, file, what

    def __str__(self) -> str:
        return f"checkpoint {self.path} is damaged: {self.file} {self.what}"


class Entry(Checked):
    """Size in bytes and hashes of a file as it was written.

    A file of tensors has the SHA-256 of each box, by the box's place (`range_of`). Old checkpoints have a hash of the whole file
    instead, or none.
    """

    size: Count
    sha256: Hash | None = None
    boxes: dict[Range, Hash] | None = None

    @property
    def hashed(self) -> bool:
        return self.sha256 is not None or self.boxes is not None


class Found(Checked):
    """The choice of a search during training, and the ground that it holds for (`worker/ground.py`).

    `on` are settings and machines, `chosen` the degree and the bytes of a chunk of gradients. `speeds` are measured ones by name;
    old checkpoints have none. `seconds` are those of a step with the choice, if they were measured.
    """

    on: dict[str, Any]
    chosen: tuple[Count, Count] | None
    speeds: dict[str, float] = Field(default_factory=dict)
    seconds: float | None = None


class Progress(Checked):
    """The state beside the tensors that training needs to continue: `progress.json` of a checkpoint.

    Attributes:
        data: name of the folder of the packed data.
        content: what these data are, wherever they lie (`PackedData.content`). Old checkpoints do not have it.
        seed, global_batch: of the training. They decide the order of its text. Old checkpoints do not have them.
        skipped: number of these steps that were skipped.
        order: version of this order (`data/order.py`).
    """

    step: Annotated[int, Field(ge=1, le=_MOST_STEPS)]
    data: str
    fold: dict[str, Any]
    validation: dict[str, Any]
    online: Found | None = None
    seed: int | None = None
    global_batch: Annotated[int, Field(ge=1)] | None = None
    skipped: Count = 0
    order: Annotated[int, Field(ge=1, le=NEWEST)] = 1
    content: str | None = None


_ENTRIES, _SIZES, _PROGRESS = TypeAdapter(dict[Name, Entry]), TypeAdapter(dict[Name, Count]), TypeAdapter(Progress)


@dataclass(frozen=True)
class Stored:
    """A checkpoint with all its files.

    Args:
        checked: the files whose sizes, and hashes of the whole file, were compared already. Readers add different files.
    """

    folder: Folder
    entries: dict[str, Entry]
    contents: Contents
    progress: Progress
    checked: set[str] = field(default_factory=set)

    @property
    def hashed(self) -> bool:
        """Whether every file has a hash, so that every damaged bit is detected."""
        return all(entry.hashed for entry in self.entries.values())

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries.values())

    def check(self) -> None:
        """Compare the hashes of all files. Like all that reads one, it raises DamagedFile for other bytes than were written."""
        for name in self.entries:
            self._check(name)
        for _ in self.read(_place(name, box) for name, entry in self.entries.items() for box in entry.boxes or ()):
            pass

    def read(self, places: Iterable[Place]) -> Iterator[tuple[Place, memoryview]]:
        """Yield boxes in files of tensors with their bytes, in the order of places."""
        return read(places, self._open, self._check_box)

    def _open(self, name: str) -> NativeFile:
        self._check(name)
        return self.folder.open(name)

    def _check_box(self, place: Place, content: memoryview) -> None:
        name, offset, length = place
        boxes = self.entries[name].boxes
        if boxes is not None and boxes[range_of(offset, length)] != hashlib.sha256(content).hexdigest():
            raise _other_bytes(name)

    def _check(self, name: str) -> None:
        """Compare a file's size and the hash of the whole file, once. The size may have been checked on another machine."""
        if name not in self.checked:
            _check_size(self.folder, name, self.entries[name])
            _check_hash(self.folder, name, self.entries[name])
            self.checked.add(name)


def look(folder: Folder) -> Stored:
    """Read a checkpoint's manifests, metadata and progress, and check the size of every file, or raise DamagedFile."""
    names = folder.names()
    if names is None:
        raise DamagedFile("its folder", "does not exist")
    with ThreadPoolExecutor(READERS, "foldray-reader") as pool:  # there may be a manifest and a file of every rank
        entries = _entries(folder, names, pool)
        deque(pool.map(lambda name: _check_size(folder, name, entries[name]), entries), maxlen=0)
    for name in (METADATA, PROGRESS):
        if name not in entries:
            raise DamagedFile(name, "is in no manifest" if name in names else "is missing")
        if entries[name].size > _MOST_METADATA:  # a forged size, whose hash would take for ever
            raise DamagedFile(name, f"has {entries[name].size} bytes, but may have at most {_MOST_METADATA}")
        _check_hash(folder, name, entries[name])
    progress = read_json(folder, PROGRESS, _PROGRESS)
    name_of_step = re.fullmatch(r"step_(\d+)", folder.last)
    if name_of_step and int(name_of_step[1]) != progress.step:
        raise DamagedFile(PROGRESS, f"belongs to step {progress.step}")
    return Stored(folder, entries, _contents(folder, entries), progress)


def range_of(offset: int, length: int) -> str:
    """Return how a manifest names the bytes of a box."""
    return f"{offset}+{length}"


def _place(name: str, box: str) -> Place:
    """Undo `range_of`, for a box in a file."""
    offset, _, length = box.partition("+")
    return name, int(offset), int(length)


def _entries(folder: Folder, names: list[str], pool: ThreadPoolExecutor) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    manifests = [name for name in names if _MANIFEST.fullmatch(name) or _OLD_MANIFEST.fullmatch(name)]
    for manifest, of_manifest in zip(manifests, pool.map(lambda name: _listed(folder, name), manifests), strict=True):
        if twice := of_manifest.keys() & entries.keys():
            raise DamagedFile(manifest, f"names {min(twice)}, which another manifest names, too")
        entries |= of_manifest
    if not entries:
        raise DamagedFile("its manifest", "is missing: the checkpoint was never completed")
    return entries


def _listed(folder: Folder, manifest: str) -> dict[str, Entry]:
    if _MANIFEST.fullmatch(manifest):
        return read_json(folder, manifest, _ENTRIES)
    return {name: Entry(size=size) for name, size in read_json(folder, manifest, _SIZES).items()}


def _check_size(folder: Folder, name: str, entry: Entry) -> None:
    if (size := folder.size(name)) != entry.size:
        raise DamagedFile(name, f"has {size} bytes instead of {entry.size}")


def _check_hash(folder: Folder, name: str, entry: Entry) -> None:
    if entry.sha256 is not None and folder.sha256(name) != entry.sha256:
        raise _other_bytes(name)


def _other_bytes(name: str) -> DamagedFile:
    return DamagedFile(name, "has other bytes than were written (its SHA-256 differs)")


def _contents(folder: Folder, entries: dict[str, Entry]) -> Contents:
    from trainers.checkpoints.metadata import read_metadata  # takes most of a second, with PyTorch's checkpoints

    try:
        contents = read_metadata(folder.read(METADATA, _MOST_METADATA))
    except ValueError as error:
        raise DamagedFile(METADATA, f"cannot be read ({error})") from None
    for place in contents.places.values():
        entry = entries.get(place.relative_path)
        if entry is None:
            raise DamagedFile(METADATA, f"names the file {place.relative_path[:80]}, which is in no manifest")
        if place.offset + place.length > entry.size:
            raise DamagedFile(METADATA, f"places a tensor beyond the end of {place.relative_path}")
        if entry.boxes is not None and range_of(place.offset, place.length) not in entry.boxes:
            raise DamagedFile(METADATA, f"places a tensor in {place.relative_path} where its manifest has no hash")
    return contents
