"""How `torch.distributed.checkpoint` writes and reads tensors of which every rank holds a box: any fold reads what any wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, LoadPlan, LoadPlanner, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from foldray.blueprint import Piece
from trainers.checkpoints.stored import METADATA, Stored
from trainers.folders import DamagedFile

Pieces = Mapping[str, Piece]


class SaveBoxes(DefaultSavePlanner):
    """Writes each tensor as its box of the whole; boxes that several ranks hold are written once.

    Args:
        pieces: the box of each key; a key without one is whole.
    """

    def __init__(self, pieces: Pieces):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(key, tensor) for key, tensor in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]

    def _item(self, key: str, tensor: torch.Tensor) -> WriteItem:
        whole, chunk = _box(self.pieces, key, tensor)
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), whole)
        return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class LoadBoxes(DefaultLoadPlanner):
    """Fills each tensor with its box of what is stored, however that is cut.

    Raises:
        DamagedFile: (in DCP's CheckpointException) a tensor is missing, or has another shape or kind in the checkpoint.
    """

    def __init__(self, pieces: Pieces):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for key, tensor in self.state_dict.items():
            whole, chunk = _box(self.pieces, key, tensor)
            stored = self.metadata.state_dict_metadata.get(key)
            if not isinstance(stored, TensorStorageMetadata):
                raise DamagedFile(METADATA, f"has no tensor {key}")
            if stored.size != whole:
                raise DamagedFile(METADATA, f"has {key} as {tuple(stored.size)}, not {tuple(whole)}")
            if stored.properties.dtype.is_floating_point != tensor.dtype.is_floating_point:
                raise DamagedFile(METADATA, f"has {key} in {stored.properties.dtype}, not {tensor.dtype}")
            items += create_read_items_for_chunk_list(key, stored, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn]


class ReadBoxes(FileSystemReader):
    """Reads what a rank's plan asks for, after a look at the hashes of the files that it is in; never unpickles.

    Raises:
        DamagedFile: (in DCP's CheckpointException) a file has other bytes than were written, or holds other tensors than
            `.metadata` says.
    """

    def __init__(self, stored: Stored):
        super().__init__(stored.folder.path)
        self.stored = stored

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        tensors, places = self.stored.contents
        return Metadata(dict(tensors), storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            self.stored.check(name)
            with Path(self.path, name).open("rb") as file:
                for item in items:
                    tensor = self._tensor(name, file, item)
                    piece = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
                    planner.resolve_tensor(item).detach().copy_(piece)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _tensor(self, name: str, file: IO[bytes], item: ReadItem) -> torch.Tensor:
        place, key = self.storage_data[item.storage_index], item.storage_index.fqn
        try:
            tensor = torch.load(self._slice_file(file, place), map_location="cpu", weights_only=True)
        except Exception as error:  # torch promises no type: RuntimeError, UnpicklingError, EOFError, KeyError were seen
            raise DamagedFile(name, f"holds no plain tensor for {key} ({type(error).__name__})") from None
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise DamagedFile(name, f"holds no plain tensor for {key} ({type(tensor).__name__})")
        said = self.stored.contents.tensors[key]
        size = next(chunk.sizes for chunk in said.chunks if chunk.offsets == item.storage_index.offset)
        found, told = ((tuple(tensor.shape), tensor.dtype), (tuple(size), said.properties.dtype))
        if found != told:
            raise DamagedFile(name, f"holds {key} as {found[0]} in {found[1]}, and {METADATA} says {told[0]} in {told[1]}")
        return tensor


def _box(pieces: Pieces, key: str, tensor: torch.Tensor) -> tuple[torch.Size, ChunkStorageMetadata]:
    """Shape of the whole tensor, and this rank's chunk of it."""
    if key not in pieces:
        return tensor.shape, ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
    piece = pieces[key]
    return torch.Size(piece.spec.shape), ChunkStorageMetadata(torch.Size(piece.offset), tensor.shape)
