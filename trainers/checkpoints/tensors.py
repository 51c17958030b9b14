"""Writes and reads the files of a checkpoint: those of `torch.distributed.checkpoint` (DCP).

Tensors have global names, and every rank writes its boxes of them. A box is a slice of the global tensor along every axis. So a
checkpoint can be read under another fold than it was written under. DCP plans what ranks write. To read, a rank needs no other,
so nothing of DCP but its search for boxes that overlap. Sizes and hashes of all files are written beside them (`seal`), so
damage is detected before training continues from it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from foldray.runtime import Shard
from trainers.checkpoints.reading import Place, time_for
from trainers.checkpoints.stored import METADATA, PROGRESS, DamagedCheckpoint, Stored, look, range_of
from trainers.folders import DamagedFile, Folder

Index = tuple[str, tuple[int, ...]]
"""Key and offset of a shard."""
Plan = dict[Place, list[tuple[ReadItem, torch.Tensor]]]
"""What a rank reads: for each box in a file, the parts of it that shards need, and the tensors of these shards."""


class Staged:
    """The shards of a checkpoint, whose tensors do not change before `settle`.

    A thread takes one after another, and training copies those that are left before it changes them. So the thread holds one copy
    at a time, and training waits for a copy only if it comes first.
    """

    def __init__(self, shards: Sequence[Shard]):
        self.shards = shards
        self._live = {(shard.key, shard.offset): shard.tensor for shard in shards}
        self._copies: dict[Index, torch.Tensor] = {}
        self._lock = threading.Lock()

    def keep(self, wanted: Iterable[Index]) -> None:
        """Forget all shards but these, because other ranks write the rest."""
        with self._lock:
            indices = set(wanted)
            self._live = {index: tensor for index, tensor in self._live.items() if index in indices}
            self._copies = {index: tensor for index, tensor in self._copies.items() if index in indices}

    def take(self, index: Index) -> torch.Tensor:
        """Return the values of a shard, on the CPU, and forget them."""
        with self._lock:
            return self._copies.pop(index) if index in self._copies else _on_host(self._live.pop(index))

    def settle(self) -> None:
        """Copy all shards that were not taken yet. Afterwards, training may change their tensors."""
        with self._lock:
            while self._live:
                index, tensor = self._live.popitem()
                self._copies[index] = _on_host(tensor)

    def drop(self) -> None:
        self.keep(())


def write(folder: Path, staged: Staged, progress: dict[str, Any], group: dist.ProcessGroup | None) -> list[str]:
    """Write this rank's share of a checkpoint into a folder, and return the names of its files.

    Every rank of the group must call this. The folder may be one for all of them. If one cannot write, all raise OSError.
    """
    writer, planner = _WriteBoxes(folder), _SaveBoxes(staged)
    try:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # a BaseException: Ray would neither tell of it nor end the training
        failures = {
            rank: failure[0] if isinstance(failure, tuple) else failure for rank, failure in sorted(error.failures.items())
        }
        ranks = "ranks" if len(failures) > 1 else "rank"
        what = next(iter(failures.values()))
        numbers, step = ", ".join(map(str, failures)), progress["step"]
        raise OSError(f"{ranks} {numbers} cannot write the checkpoint of step {step}: {what}") from None
    rank = 0 if group is None else dist.get_rank(group)
    if rank == 0:
        (folder / PROGRESS).write_text(json.dumps(progress))
    return seal(folder, rank, writer.boxes)


def seal(folder: Path, rank: int, boxes: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Write the manifest of a rank's files, with the hashes of boxes of each file of tensors. Return the names of its files."""
    written, manifest = Folder(str(folder)), f"manifest.{rank}.json"
    entries: dict[str, Any] = {name: {"size": written.size(name), "boxes": hashes} for name, hashes in boxes.items()}
    for name in (METADATA, PROGRESS) if rank == 0 else ():
        entries[name] = {"size": written.size(name), "sha256": written.sha256(name)}
    (folder / manifest).write_text(json.dumps(entries))
    return [*entries, manifest]


@contextmanager
def opened(checkpoint: Checkpoint, group: dist.ProcessGroup | None) -> Iterator[Stored]:
    """Open a checkpoint for `load`, which reads what a rank needs from where the checkpoint is. Every rank must call this.

    If a file is missing on some rank, here or in `load`, or differs from what was written, all raise DamagedCheckpoint.
    """
    try:
        yield _look(Folder(checkpoint.path, checkpoint.filesystem), group)
    except DamagedFile as error:
        raise DamagedCheckpoint(checkpoint.path, error.name, error.what) from None


def load(
    stored: Stored,
    shards: Sequence[Shard],
    group: dist.ProcessGroup | None,
    during: Callable[[float], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> None:
    """Fill the tensors of shards from a checkpoint of any fold. Every rank of the group must call this.

    `during` opens a context for the reading, given the seconds that it may take. Damage raises DamagedFile on all ranks, and a
    file that cannot be read RuntimeError.
    """
    plan: Plan = {}

    _together(lambda: plan.update(_planned(stored, shards)), stored, group)
    limit = time_for(max(_of_all(sum(length for _, _, length in plan), group)))
    with during(limit.total_seconds()):
        _together(lambda: _fill(stored, plan), stored, group, limit)


def _together(do: Callable[[], None], stored: Stored, group: dist.ProcessGroup | None, limit: timedelta | None = None) -> None:
    """Call a function on every rank. If it fails on one, raise an error on all.

    Ranks wait for each other for `limit`; None is the group's own timeout.
    """
    failure: DamagedFile | str | None = None
    try:
        do()
    except DamagedFile as error:
        failure = error
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if group is not None and limit is not None:
        dist.monitored_barrier(group, limit)  # the only wait whose timeout is not that of the group
    failures = [fault for fault in _of_all(failure, group) if fault is not None]
    if damage := [fault for fault in failures if isinstance(fault, DamagedFile)]:
        raise damage[0]
    if failures:
        raise RuntimeError(f"checkpoint {stored.folder.path} cannot be read: {'; '.join(map(str, failures))[:300]}")


def _of_all(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _look(folder: Folder, group: dist.ProcessGroup | None) -> Stored:
    """Check a checkpoint on the first rank alone, and tell all ranks what it found.

    On a shared disk, many ranks would otherwise open all manifests of many ranks at once, and ask for all sizes. Each rank
    checks the files that it reads, so it also finds damage that only its own machine has.
    """
    if group is None:
        return look(folder)
    outcome: list[Stored | DamagedFile | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            outcome = [look(folder)]
        except DamagedFile as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    if isinstance(outcome[0], DamagedFile):
        raise outcome[0]
    assert outcome[0] is not None, "the first rank found a checkpoint or damage"
    return replace(outcome[0], folder=folder)


class _SaveBoxes(dcp.DefaultSavePlanner):
    """Writes shards, of which each is copied when it is written. A box that several ranks hold is written once."""

    def __init__(self, staged: Staged):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.staged = staged

    def create_local_plan(self) -> dcp.SavePlan:
        self.plan = dcp.SavePlan([self._item(shard) for shard in self.staged.shards])
        return self.plan

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        plan = super().finish_plan(new_plan)
        self.staged.keep(map(_index, (item.index for item in plan.items)))
        return plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.staged.take(_index(index))

    def _item(self, shard: Shard) -> WriteItem:
        data = TensorWriteData(_chunk(shard), TensorProperties.create_from_tensor(shard.tensor), torch.Size(shard.shape))
        return WriteItem(MetadataIndex(shard.key, torch.Size(shard.offset)), WriteItemType.SHARD, tensor_data=data)


class _WriteBoxes(dcp.FileSystemWriter):
    """Writes a rank's tensors into one file, and holds no tensor longer than it takes to write it.

    DCP's own writer keeps every tensor until the file is closed, so a rank would hold a copy of its whole share.

    Attributes:
        boxes: SHA-256 of the bytes of every box, as they were before the disk had them (`stored.Entry.boxes`), by file.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.boxes = dict[str, dict[str, str]]()

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        name, results = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}", []
        hashes = self.boxes[name] = {}
        with Path(self.path, name).open("wb") as file:
            for item in plan.items:
                offset, box = file.tell(), _Box(file)
                # A variable would keep the tensor while the next one is copied.
                torch.save(planner.resolve_data(item), cast(IO[bytes], box))
                length = file.tell() - offset
                hashes[range_of(offset, length)] = box.sha256.hexdigest()
                results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _Box:
    """Hashes what is written to a file."""

    def __init__(self, file: IO[bytes]):
        self.file, self.sha256, self.flush = file, hashlib.sha256(), file.flush

    def write(self, content: bytes) -> int:
        self.sha256.update(content)
        return self.file.write(content)


def _planned(stored: Stored, shards: Sequence[Shard]) -> Plan:
    """Return what has to be read to fill shards. The boxes that were written may be others."""
    tensors, places = stored.contents
    plan: Plan = {}
    for shard in shards:
        key, tensor, shape = shard.key, shard.tensor, torch.Size(shard.shape)
        described = tensors.get(key)
        if described is None and shard.optional:
            continue
        if described is None:
            raise DamagedFile(METADATA, f"has no tensor {key}")
        if described.size != shape:
            raise DamagedFile(METADATA, f"has {key} as {tuple(described.size)}, not {tuple(shape)}")
        if described.properties.dtype.is_floating_point != tensor.dtype.is_floating_point:
            raise DamagedFile(METADATA, f"has {key} in {described.properties.dtype}, not {tensor.dtype}")
        for item in create_read_items_for_chunk_list(key, described, [_chunk(shard)]):
            place = places[item.storage_index]
            plan.setdefault((place.relative_path, place.offset, place.length), []).append((item, tensor))
    return plan


def _fill(stored: Stored, plan: Plan) -> None:
    """Read a plan's boxes into the tensors of shards. Hashes are checked, and nothing is unpickled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol")  # of forged tensors, which are refused in one line
        for place, content in stored.read(plan):
            tensors: dict[MetadataIndex, torch.Tensor] = {}
            for item, target in plan[place]:
                if (box := item.storage_index) not in tensors:
                    tensors[box] = _tensor(stored, place[0], box, content)
                piece = narrow_tensor_by_index(tensors[box], item.storage_offsets, item.lengths)
                narrow_tensor_by_index(target, item.dest_offsets, item.lengths).copy_(piece)


def _tensor(stored: Stored, name: str, box: MetadataIndex, content: memoryview) -> torch.Tensor:
    key = box.fqn
    try:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    # torch documents no type for its errors. It raises RuntimeError, UnpicklingError, EOFError, KeyError and others.
    except Exception as error:
        raise DamagedFile(name, f"holds no plain tensor for {key} ({type(error).__name__})") from None
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise DamagedFile(name, f"holds no plain tensor for {key} ({type(tensor).__name__})")
    described = stored.contents.tensors[key]
    shape = tuple(next(chunk.sizes for chunk in described.chunks if chunk.offsets == box.offset))
    dtype = described.properties.dtype
    if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
        actual = f"{tuple(tensor.shape)} in {tensor.dtype}"
        raise DamagedFile(name, f"holds {key} as {actual}, but {METADATA} says {shape} in {dtype}")
    return tensor


def _chunk(shard: Shard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard.offset), shard.tensor.shape)


def _index(index: MetadataIndex) -> Index:
    return index.fqn, tuple(index.offset or ())


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
