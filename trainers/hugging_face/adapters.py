"""Adapters in PEFT's format: `adapter_config.json`, and `adapter_model.safetensors` with the pairs of matrices.

The adapter of a linear layer has `lora_A` [R, in] and `lora_B` [out, R]. That of a stack of experts' matrices (PEFT's
`target_parameters`) has the matrices of all experts in two: `lora_A` [E · R, in], expert by expert, and `lora_B` [out, R · E],
whose columns have the numbers of experts inside. Where both stacks of a block have adapters, PEFT puts that of `gate_up_proj`
inside the other one (`base_layer`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foldray.blueprint import ModelSpec, parameter_table
from foldray.errors import UserError
from trainers.hugging_face.families import family_of, named_family
from trainers.hugging_face.family import Family
from trainers.hugging_face.hub_folder import HubFolder
from trainers.hugging_face.names import Tensor

if TYPE_CHECKING:
    from foldray.recipe import Recipe
    from foldray.runtime import Shard

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
_IN_TURNS = ("gpt_oss",)  # families whose columns of gate and up are in turns
_PLAIN: dict[str, Any] = {
    "bias": "none", "fan_in_fan_out": False, "use_dora": False, "lora_bias": False, "modules_to_save": None,
    "rank_pattern": {}, "alpha_pattern": {}, "layer_replication": None, "trainable_token_indices": None,
}  # fmt: skip
"""Keys of a configuration, and the values with which an adapter is what foldray trains."""


def _experts_of(family: Family) -> str:
    """Return the name of the stacks of experts below a block, as transformers has them in memory."""
    return "block_sparse_moe.experts" if family.model_type.startswith("granitemoe") else "mlp.experts"


def adapter_tensors(family: Family, model: ModelSpec) -> list[Tensor]:
    """Return the tensors of a model's adapters. Every matrix of an adapter is in one of them.

    Raises:
        UserError: the family has no product of its own for a target.
    """
    if (adapter := model.adapter) is None:
        return []
    tensors, known = list[Tensor](), {tensor.ours: tensor for tensor in family.tensors(model.base)}
    for layer in range(model.layers):
        for part in adapter.attention:
            ours = f"blocks.{layer}.attention.{part}"
            own = known[ours]
            if own.place or not own.turned:
                rule = f"are no product of their own in {family.architecture}, so PEFT's format has no such adapter"
                raise UserError("model.adapter.targets", [_PROJECTIONS[part]], rule)
            for letter, factor in (("A", "a"), ("B", "b")):
                name = f"{_PREFIX}{own.name.removesuffix('.weight')}.lora_{letter}.weight"
                tensors.append(Tensor(name, f"{ours}_lora.{factor}", True))
        if model.is_moe(layer):
            tensors += _of_experts(family, model, layer)
    return tensors


def _of_experts(family: Family, model: ModelSpec, layer: int) -> Iterator[Tensor]:
    assert model.adapter
    count, rank, inner, hidden = model.experts, model.adapter.rank, model.expert_hidden, model.hidden
    theirs, ours = f"{_PREFIX}model.layers.{layer}.{_experts_of(family)}", f"blocks.{layer}.moe.experts"
    parts = model.activation.inwards
    in_turns = family.model_type in _IN_TURNS
    rows = {part: slice(i, None, len(parts)) if in_turns else slice(i * inner, (i + 1) * inner) for i, part in enumerate(parts)}
    inside = f"{theirs}.base_layer" if model.adapter.outwards else theirs
    for given, name, pair, wide, narrow in (
        (model.adapter.inwards, inside, ("inwards", rows), len(parts) * inner, hidden),
        (model.adapter.outwards, theirs, ("down", {"down": slice(None)}), hidden, inner),
    ):
        first, seconds = pair
        for expert in range(count if given else 0):
            mine, shape = slice(expert * rank, (expert + 1) * rank), (count * rank, narrow)
            yield Tensor(f"{name}.lora_A.weight", f"{ours}.{expert}.{first}_lora.a", True, place=(mine,), shape=shape)
            for part, run in seconds.items():
                both, place = f"{ours}.{expert}.{part}_lora.b", (run, slice(None), expert)
                shape, by_expert = (wide, rank * count), (wide, rank, count)
                yield Tensor(f"{name}.lora_B.weight", both, True, place=place, shape=shape, heads=by_expert)


def adapter_config(recipe: Recipe, family: Family) -> dict[str, Any]:
    """Return the content of `adapter_config.json`."""
    adapter = recipe.model.adapter
    assert adapter
    stacks = [(adapter.inwards, "gate_up_proj"), (adapter.outwards, "down_proj")]
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": recipe.training.weights, "inference_mode": True,
        "r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": 0.0, "use_rslora": False, "init_lora_weights": True,
        "target_modules": [_PROJECTIONS[part] for part in adapter.attention],
        "target_parameters": [f"{_experts_of(family)}.{name}" for given, name in stacks if given], **_PLAIN,
    }  # fmt: skip


@dataclass(frozen=True)
class Adapter(HubFolder):
    """A folder with an adapter."""

    @classmethod
    def of(cls, recipe: Recipe) -> Adapter:
        """Return the adapter from which a recipe's training starts (`training.adapter`)."""
        given = recipe.training.adapter
        assert given is not None
        path = Path(os.path.expanduser(given)).absolute()
        if not path.is_dir():
            raise UserError("training.adapter", given, "must be a folder with an adapter of PEFT; it does not exist on this node")
        return cls(path, "training.adapter")

    def check(self, recipe: Recipe) -> None:
        """Check that the folder has the recipe's adapter: what its configuration says, and the name and shape of each tensor."""
        config, adapter = self.json(CONFIG), recipe.model.adapter
        assert adapter
        if (kind := config.get("peft_type")) != "LORA":
            raise self.refused(f"its {CONFIG} says peft_type={kind!r}; foldray trains LORA")
        if (rank := config.get("r")) != adapter.rank:
            raise self.refused(f"has r={rank}, and model.adapter.rank is {adapter.rank}")
        alpha = config.get("lora_alpha")
        if not isinstance(alpha, (int, float)):
            raise self.refused(f"its {CONFIG} has no number lora_alpha")
        scale = alpha / (math.sqrt(adapter.rank) if config.get("use_rslora") else adapter.rank)
        if not math.isclose(scale, adapter.scale):
            rule = f"weighs its adapters by {scale:g}, and the recipe by {adapter.scale:g} (model.adapter.alpha / rank)"
            raise self.refused(rule)
        for key, plain in _PLAIN.items():
            if (given := config.get(key, plain)) not in (plain, None):
                raise self.refused(f"its {CONFIG} says {key}={given!r}, which foldray does not train", [plain])
        wanted, shapes = self._wanted(recipe), {row.name: row.shape for row in parameter_table(recipe.model) if row.trained}
        with self.opened(self.folder / TENSORS) as file:
            there = set(file.keys())
            if unknown := sorted(there - wanted.keys()):
                raise self.refused(f"has the tensor {unknown[0]}, which model.adapter has not")
            for name, tensors in wanted.items():
                if name not in there:
                    raise self.refused(f"has no tensor {name}, which model.adapter needs")
                shape, needed = list(file.get_slice(name).get_shape()), list(tensors[0].shape_for(shapes[tensors[0].ours]))
                if shape != needed:
                    raise self.refused(f"{name} has shape {shape}; model.adapter needs {needed}")

    def fill(self, recipe: Recipe, shards: Iterable[Shard]) -> None:
        """Copy the adapter into an engine's shards. Other shards stay as they are."""
        held: dict[str, list[Shard]] = {}
        for shard in shards:
            held.setdefault(shard.key.removeprefix("model/"), []).append(shard)
        with self.opened(self.folder / TENSORS) as file:
            for name, tensors in self._wanted(recipe).items():
                mine = [tensor for tensor in tensors if tensor.ours in held]
                whole = file.get_tensor(name) if mine else torch.empty(0)
                if not bool(whole.isfinite().all()):
                    raise self.refused(f"has a number in {name} that is not finite")
                for tensor in mine:
                    for shard in held[tensor.ours]:
                        shard.tensor.copy_(tensor.taken(whole, shard.box))

    def _wanted(self, recipe: Recipe) -> Mapping[str, list[Tensor]]:
        family = family_of(recipe.model, named_family(recipe.export.family))
        wanted: dict[str, list[Tensor]] = {}
        for tensor in adapter_tensors(family, recipe.model):
            wanted.setdefault(tensor.name, []).append(tensor)
        return wanted
