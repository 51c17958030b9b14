"""Planners of `torch.distributed.checkpoint` for tensors of which every rank holds a box: any fold reads what any wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from foldray.spec import Piece

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
        RuntimeError: (as DCP's CheckpointException) a tensor is missing, or has another shape in the checkpoint.
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
                raise RuntimeError(f"it has no tensor {key}")
            if stored.size != whole:
                raise RuntimeError(f"its {key} is {tuple(stored.size)}, not {tuple(whole)}")
            items += create_read_items_for_chunk_list(key, stored, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn]


def _box(pieces: Pieces, key: str, tensor: torch.Tensor) -> tuple[torch.Size, ChunkStorageMetadata]:
    """Shape of the whole tensor, and this rank's chunk of it."""
    if key not in pieces:
        return tensor.shape, ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
    piece = pieces[key]
    return torch.Size(piece.spec.shape), ChunkStorageMetadata(torch.Size(piece.offset), tensor.shape)
