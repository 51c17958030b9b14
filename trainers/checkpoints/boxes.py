"""Writes and reads the files of `torch.distributed.checkpoint` (DCP), for tensors of which every rank holds boxes.

A box is a slice of the global tensor along every axis. So a checkpoint can be read under another fold than it was written
under. DCP plans what ranks write. To read, a rank needs no other, so nothing of DCP but its search for boxes that overlap.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from foldray.runtime import Shard
from trainers.checkpoints.reading import Place
from trainers.checkpoints.staging import Index, Staged
from trainers.checkpoints.stored import METADATA, Stored, range_of
from trainers.folders import DamagedFile


class SaveBoxes(DefaultSavePlanner):
    """Writes shards. A box that several ranks hold is written once.

    Args:
        staged: the shards, of which each is copied when it is written.
    """

    def __init__(self, staged: Staged):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.staged = staged

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(shard) for shard in self.staged.shards])
        return self.plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self.staged.keep(map(_index, (item.index for item in plan.items)))
        return plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.staged.take(_index(index))

    def _item(self, shard: Shard) -> WriteItem:
        data = TensorWriteData(_chunk(shard), TensorProperties.create_from_tensor(shard.tensor), torch.Size(shard.shape))
        return WriteItem(MetadataIndex(shard.key, torch.Size(shard.offset)), WriteItemType.SHARD, tensor_data=data)


class WriteBoxes(FileSystemWriter):
    """Writes a rank's tensors into one file, and holds no tensor longer than it takes to write it.

    DCP's own writer keeps every tensor until the file is closed, so a rank would hold a copy of its whole share.

    Attributes:
        boxes: SHA-256 of the bytes of every box, as they were before the disk had them (`stored.Entry.boxes`), by file.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.boxes = dict[str, dict[str, str]]()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
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


Plan = dict[Place, list[tuple[ReadItem, torch.Tensor]]]
"""What a rank reads: for each box in a file, the parts of it that shards need, and the tensors of these shards."""


def planned(stored: Stored, shards: Sequence[Shard]) -> Plan:
    """Return what has to be read to fill shards. The boxes that were written may be others.

    Raises:
        DamagedFile: a tensor is missing, or has another shape or kind in the checkpoint.
    """
    tensors, places = stored.contents
    found: Plan = {}
    for shard in shards:
        key, tensor, shape = shard.key, shard.tensor, torch.Size(shard.shape)
        described = tensors.get(key)
        if described is None:
            raise DamagedFile(METADATA, f"has no tensor {key}")
        if described.size != shape:
            raise DamagedFile(METADATA, f"has {key} as {tuple(described.size)}, not {tuple(shape)}")
        if described.properties.dtype.is_floating_point != tensor.dtype.is_floating_point:
            raise DamagedFile(METADATA, f"has {key} in {described.properties.dtype}, not {tensor.dtype}")
        for item in create_read_items_for_chunk_list(key, described, [_chunk(shard)]):
            place = places[item.storage_index]
            found.setdefault((place.relative_path, place.offset, place.length), []).append((item, tensor))
    return found


def fill(stored: Stored, plan: Plan) -> None:
    """Read a plan's boxes into the tensors of shards. Hashes are checked, and nothing is unpickled.

    Raises:
        DamagedFile: a file has other bytes than were written, or its tensors differ from `.metadata`.
    """
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
