"""The parameters of a trained model, one by one: those of its checkpoint, or frozen weights with their adapters added."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from foldray.blueprint import adapter_pairs, parameter_table
from foldray.recipe import Recipe
from foldray.runtime import Shard
from trainers.checkpoints.stored import METADATA, Stored
from trainers.folders import DamagedFile
from trainers.hugging_face.weights import Weights
from trainers.inference.trained import fill
from trainers.worker.engines import DTYPES


class Values:
    """The parameters of a checkpoint by global name.

    With adapters, the frozen weights are those of `training.weights`, in the precision of the training, and each adapter is added
    to its weight in at least float32. They are read block by block.

    Attributes:
        step: number of finished steps of the training.
    """

    def __init__(self, stored: Stored, recipe: Recipe):
        self._stored, self._recipe, self.step = stored, recipe, stored.progress.step
        self._frozen = {row.name: row.shape for row in parameter_table(recipe.model) if not row.trained}
        self._pairs = adapter_pairs(recipe.model)
        self._weights = Weights.of(recipe) if recipe.model.adapter is not None else None
        self._block: tuple[str, dict[str, torch.Tensor]] = "", {}  # the frozen weights of one block

    def described(self, name: str) -> tuple[Sequence[int], torch.dtype]:
        """Return the shape and the type of a parameter."""
        if name in self._frozen:
            return self._frozen[name], DTYPES[self._recipe.precision]
        if (key := f"model/{name}") not in self._stored.contents.tensors:
            raise DamagedFile(METADATA, f"has no tensor {key}")
        known = self._stored.contents.tensors[key]
        return known.size, known.properties.dtype

    def read(self, name: str) -> torch.Tensor:
        """Return a parameter. A weight has what its adapter adds."""
        if name not in self._frozen:
            shape, dtype = self.described(name)
            whole = torch.empty(tuple(shape), dtype=dtype)
            fill(self._stored, {f"model/{name}": whole})
            return whole
        weight, adapter = self._read_frozen(name), self._recipe.model.adapter
        if name not in self._pairs or adapter is None:
            return weight
        first, second = map(self.read, self._pairs[name])
        wide = torch.promote_types(first.dtype, torch.float32)
        return weight.to(wide) + adapter.scale * (first.to(wide) @ second.to(wide))

    def _read_frozen(self, name: str) -> torch.Tensor:
        assert self._weights is not None
        prefix = _block_of(name)
        if name not in self._block[1]:
            self._block = prefix, {}  # the block before is freed first
            dtype = DTYPES[self._recipe.precision]
            names = [each for each in self._frozen if _block_of(each) == prefix]
            block = {each: torch.empty(self._frozen[each], dtype=dtype) for each in names}
            shards = [Shard.whole(f"model/{each}", tensor) for each, tensor in block.items()]
            self._weights.fill(self._recipe.model, shards, {})
            self._block = prefix, block
        return self._block[1][name]


def _block_of(name: str) -> str:
    """Return the first part of a name: `blocks.3`, or `embedding`."""
    found = re.match(r"blocks\.\d+|\w+", name)
    assert found, name
    return found[0]
