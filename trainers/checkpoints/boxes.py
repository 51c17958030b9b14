"""Planners, a writer and a reader for `torch.distributed.checkpoint` (DCP), for tensors of which every rank holds a box.

A box is a slice of the global tensor along every axis. So a checkpoint can be read under another fold than it was written
under.
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
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from foldray.runtime import Shard
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


class LoadBoxes(DefaultLoadPlanner):
    """Fills the tensors of shards. The boxes that were written may be others.

    Raises:
        DamagedFile: (in DCP's CheckpointException) a tensor is missing, or has another shape or kind in the checkpoint.
    """

    def __init__(self, shards: Sequence[Shard]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards = shards
        self._tensors = {(shard.key, shard.offset): shard.tensor for shard in shards}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for shard in self.shards:
            key, tensor, shape, chunk = shard.key, shard.tensor, torch.Size(shard.shape), _chunk(shard)
            stored = self.metadata.state_dict_metadata.get(key)
            if not isinstance(stored, TensorStorageMetadata):
                raise DamagedFile(METADATA, f"has no tensor {key}")
            if stored.size != shape:
                raise DamagedFile(METADATA, f"has {key} as {tuple(stored.size)}, not {tuple(shape)}")
            if stored.properties.dtype.is_floating_point != tensor.dtype.is_floating_point:
                raise DamagedFile(METADATA, f"has {key} in {stored.properties.dtype}, not {tensor.dtype}")
            items += create_read_items_for_chunk_list(key, stored, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._tensors[_index(index)]


class ReadBoxes(FileSystemReader):
    """Reads the boxes in a rank's plan, of which it checks the hashes. It never unpickles.

    Raises:
        DamagedFile: (in DCP's CheckpointException) a file has other bytes than were written, or its tensors differ from
            `.metadata`.
    """

    def __init__(self, stored: Stored):
        super().__init__(stored.folder.path)
        self.stored = stored

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        tensors, places = self.stored.contents
        return Metadata(dict(tensors), storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_box: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            by_box.setdefault(item.storage_index, []).append(item)
        for box in sorted(by_box, key=self._place):
            tensor = self._tensor(box)
            for item in by_box[box]:
                piece = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
                planner.resolve_tensor(item).detach().copy_(piece)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, box: MetadataIndex) -> tuple[str, int, int]:
        place = self.storage_data[box]
        return place.relative_path, place.offset, place.length

    def _tensor(self, box: MetadataIndex) -> torch.Tensor:
        (name, offset, length), key = self._place(box), box.fqn
        content = io.BytesIO(self.stored.read(name, offset, length))
        try:
            tensor = torch.load(content, map_location="cpu", weights_only=True)
        # torch documents no type for its errors. It raises RuntimeError, UnpicklingError, EOFError, KeyError and others.
        except Exception as error:
            raise DamagedFile(name, f"holds no plain tensor for {key} ({type(error).__name__})") from None
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise DamagedFile(name, f"holds no plain tensor for {key} ({type(tensor).__name__})")
        metadata = self.stored.contents.tensors[key]
        shape = tuple(next(chunk.sizes for chunk in metadata.chunks if chunk.offsets == box.offset))
        dtype = metadata.properties.dtype
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            actual = f"{tuple(tensor.shape)} in {tensor.dtype}"
            raise DamagedFile(name, f"holds {key} as {actual}, but {METADATA} says {shape} in {dtype}")
        return tensor


def _chunk(shard: Shard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard.offset), shard.tensor.shape)


def _index(index: MetadataIndex) -> Index:
    return index.fqn, tuple(index.offset or ())
