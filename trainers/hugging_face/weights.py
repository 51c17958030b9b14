"""The weights of a folder that transformers has written, or that a hub holds: names, shapes, and parts of tensors.

A rank reads only what it owns of the tensors, so every fold can start from the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foldray.blueprint import ModelSpec, parameter_table
from foldray.errors import MissingPackage, UserError
from trainers.hugging_face.dense import DENSE, group_columns, preserves
from trainers.hugging_face.families import FAMILIES, WITHIN, family_of, named_family, tensors_of
from trainers.hugging_face.family import Balanced, Family
from trainers.hugging_face.hub_folder import INSTALL, HubFolder
from trainers.hugging_face.names import Tensor
from trainers.hugging_face.quantized import Format, Stored, format_of
from trainers.hugging_face.rows import computed

if TYPE_CHECKING:
    from foldray.recipe import Recipe
    from foldray.runtime import Shard

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_NOT_LEARNT = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class Weights(HubFolder):
    """The tensors of a folder.

    Args:
        files: by the name of a tensor, the file that holds it.
        own: the family of the folder's model, if the recipe names it (`export.family`).
    """

    files: Mapping[str, Path]
    own: Family | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> Weights:
        """Find the tensors from which a recipe's training starts (`training.weights`)."""
        assert recipe.training.weights is not None
        return cls.at(recipe.training.weights, "training.weights", named_family(recipe.export.family))

    @classmethod
    def at(cls, folder: str, field: str, own: Family | None = None) -> Weights:
        """Find the tensors of a folder, in the files that transformers would load.

        `config.json` may name them. Otherwise, they are the one file, or those of the index. Other files, such as those of an
        earlier save, may lie beside them.
        """
        path = Path(os.path.expanduser(folder)).absolute()
        if not os.path.isdir(path):
            raise UserError(field, folder, "must be a folder with a model of transformers; it does not exist on this node")
        empty = cls(path, field, {}, own)
        named = empty.json(_CONFIG).get("transformers_weights")
        if named is not None and not _is_name(named):
            raise empty.refused(f"its {_CONFIG} says transformers_weights={named!r}, which is no name of a file in the folder")
        main = next((name for name in ([named] if named else [_WHOLE, _INDEX]) if (path / name).exists()), None)
        if main is None:
            raise empty.refused(f"must hold the weights in {named or f'{_WHOLE}, or in files with {_INDEX}'}, and has none")
        if not main.endswith(".json"):
            with empty.opened(path / main) as file:
                return cls(path, field, dict.fromkeys(file.keys(), path / main), own)
        placed = empty.json(main).get("weight_map")
        if not isinstance(placed, dict):
            raise empty.refused(f"its {main} has no weight_map")
        for name, file in placed.items():
            if not _is_name(file):
                raise empty.refused(f"its {main} places {name} in {file!r}, which is no name of a file in the folder")
        return cls(path, field, {name: path / file for name, file in placed.items()}, own)

    def config(self) -> dict[str, Any]:
        """Return `config.json`, with all defaults of transformers."""
        return self._described()[1]

    def _described(self) -> tuple[Family, dict[str, Any]]:
        """Return the family of the folder's model, and `config`."""
        if (family := self._family) is None:
            kind = self.json(_CONFIG).get("model_type")
            known = [name for family in self._families for name in (family.model_type, *family.others)]
            raise self.refused(f"has a model of type {kind!r}, which foldray does not read", known)
        try:
            from transformers import AutoConfig
        except ModuleNotFoundError:
            raise MissingPackage(self.field, self.folder, "transformers", INSTALL) from None
        try:
            config = type(AutoConfig.for_model(family.model_type)).from_pretrained(str(self.folder), local_files_only=True)
        except Exception as error:  # transformers raises exceptions of many types
            raise self.refused(f"its {_CONFIG} cannot be read ({' '.join(str(error).split())[:160]})") from None
        tied = {"tie_word_embeddings": getattr(config, "tie_word_embeddings", False)}
        for key in family.inside:
            config = getattr(config, key)
        values = config.to_dict() | (tied if family.inside else {})
        return family, values | {alias: values[name] for alias, name in config.attribute_map.items() if name in values}

    def model(self) -> dict[str, Any]:
        """Return the keys of a recipe's `model`. Those of a dense model have no experts."""
        family, config = self._described()
        try:
            model = family.model(config)
        except ValueError as error:
            raise self.refused(f"its {_CONFIG} {error}") from None
        # transformers writes no blocks of multi-token prediction, whatever the configuration says.
        layers, configured = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
        if "mtp_depth" not in family.only:  # then they are left out
            return model
        depth = sum(f"model.layers.{layers + block}.eh_proj.weight" in self.files for block in range(configured))
        return model | ({"mtp_depth": depth} if depth else {})

    @property
    def within(self) -> bool:
        """Whether the folder's model takes other media, too, and only its text model is read."""
        return bool(self._family and self._family.inside)

    @property
    def dense(self) -> str | None:
        """The name of the dense model's family; None if the model has experts."""
        family = self._family
        return family.model_type if family and family.dense else None

    @property
    def _family(self) -> Family | None:
        kind = self.json(_CONFIG).get("model_type")
        named = (family for family in self._families if kind in (family.model_type, *family.others))
        return next((family for family in named if any(name.endswith(family.holds) for name in self.files or [""])), None)

    @property
    def _families(self) -> Sequence[Family]:
        if self.own is None:
            return (*WITHIN, *FAMILIES, *DENSE)
        return (*(family for family in WITHIN if family.leaves == self.own.model_type), self.own)

    def kept(self) -> dict[str, Any]:
        """Return the section `export` of a recipe: what the folder says of its model beside the weights.

        Ids outside of the vocabulary name no token. They are transformers' defaults, which are those of a larger model.
        """
        config, generation = self.config(), self.json(_GENERATION) if (self.folder / _GENERATION).exists() else {}
        bos, eos, pad = (_within(config["vocab_size"], config.get(f"{role}_token_id")) for role in ("bos", "eos", "pad"))
        if (ends := generation.pop("eos_token_id", None)) is not None:
            generation["eos_token_id"] = _within(config["vocab_size"], ends)
        tokens = {"bos": bos[0] if bos else None, "eos": eos, "pad": pad[0] if pad else None}
        return {"max_positions": config.get("max_position_embeddings"), "tokens": tokens, "generation": generation}

    def check(self, model: ModelSpec) -> None:
        """Check that the folder has this model without adapters: what `config.json` says, and name and shape of every tensor."""
        adapter, model = model.adapter, model.base
        family, read = self._owner(model), self.model()
        if family.dense:
            if adapter is not None:
                raise self.refused("has a dense model, whose routers would stay as drawn with adapters (model.adapter)")
            if (rule := preserves(model)) is not None:
                raise self.refused(f"has a dense model, whose networks cannot become these experts: {rule}")
            upcycled = ("experts", "topk", "expert_hidden", "dense_first", "moe_every", "router")
            read |= {key: getattr(model, key) for key in upcycled}
        if model.mtp_depth > (depth := read.get("mtp_depth", 0)):
            raise self.refused(f"has a model of mtp_depth={depth}, and the recipe's model has {model.mtp_depth}")
        ours, theirs = computed(model), computed(ModelSpec.model_validate(read))
        for key, value in theirs.items():
            if ours.get(key) != value:
                raise self.refused(f"its {_CONFIG} means model.{key}={value}, and the recipe's model has {ours.get(key)}")
        self._check_tensors(family, model)

    def fill(self, model: ModelSpec, shards: Iterable[Shard], drawn: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights into an engine's shards. A rank reads no more than it owns, one box after another.

        Args:
            shards: shards of the optimizer, of adapters, and of weights that the folder has not, stay as they are.
            drawn: the parameters of the rank's model so far, by name. It has its routers whole.
        """
        model = model.base
        family, form = self._owner(model), self.format()
        held: dict[str, list[Shard]] = {}
        for shard in shards:
            if shard.key.startswith("model/"):
                held.setdefault(shard.key.removeprefix("model/"), []).append(shard)
        # Routers of some families have no bias, which stays at zero.
        wanted: dict[str, list[Tensor]] = {}
        for tensor in tensors_of(family, model):
            if tensor.ours in held:
                wanted.setdefault(tensor.name, []).append(tensor)
        for paths, names in self._by_files(form, wanted).items():
            with self._reading(form, paths) as read:
                for tensor in chain.from_iterable(wanted[name] for name in names):
                    for shard in held[tensor.ours]:
                        shard.tensor.copy_(tensor.taken(read(tensor.name), shard.box))
                        if not bool(shard.tensor.isfinite().all()):
                            raise self.refused(f"has a number in {tensor.name} that is not finite")
        self._check_copies(family, form, model, held)
        for name in held if family.dense else ():
            if name.endswith(".router.weight"):  # there is none in the folder
                grouped = drawn[name].clone()
                group_columns(grouped, model)
                for shard in held[name]:
                    shard.tensor.copy_(grouped[shard.box])

    def _check_copies(self, family: Family, form: Format, model: ModelSpec, held: Mapping[str, Sequence[Shard]]) -> None:
        """Check that tensors which repeat a parameter have the values that the rank holds of it."""
        copies = {copy.name: copy for copy in family.repeats(model) if copy.name in self.files and copy.ours in held}
        for paths, names in self._by_files(form, copies).items():
            with self._reading(form, paths) as read:
                for tensor in (copies[name] for name in names):
                    for shard in held[tensor.ours]:
                        copy = tensor.taken(read(tensor.name), shard.box)
                        if not torch.equal(copy.to(shard.tensor), shard.tensor):
                            raise self.refused(f"{tensor.name} differs from {tensor.ours}, and the model has one for both")

    def format(self) -> Format:
        """Return how the folder has its tensors."""
        try:
            return format_of(self.json(_CONFIG))
        except ValueError as error:
            raise self.refused(f"its {_CONFIG} {error}") from None

    def quantized(self, model: ModelSpec) -> int:
        """Return how many tensors of the model are quantized."""
        form = self.format()
        names = {tensor.name for tensor in tensors_of(self._owner(model), model)}
        return sum(form.parts(name, self.files) != (name,) for name in names)

    def dropout(self) -> dict[str, float]:
        """Return the keys of `config.json` that ask for dropout in training, which foldray does not have."""
        return {key: value for key, value in self.config().items() if key.endswith(("dropout", "pdrop")) and value}

    def left_out(self, model: ModelSpec) -> list[str]:
        """Return the tensors of parts that the model has not: for further tokens, or for other media than text."""
        family, config = self._described()
        depth = config.get("num_nextn_predict_layers") or 0
        blocks = [f"model.layers.{model.layers + block}." for block in range(model.mtp_depth, depth)]
        return [name for name in self.files if name.startswith((*blocks, *family.ahead))]

    def balance(self, model: ModelSpec) -> Balanced:
        """Return the balance loss that the folder asks for."""
        family, config = self._described()
        return family.balance(config, model)

    def named(self, model: ModelSpec) -> str | None:
        """Return the name of the family as which the folder's model leaves, if an export would take another that has it, too."""
        owner = self._owner(model)
        family = named_family(owner.leaves or None) or owner
        return family.model_type if family in FAMILIES and family_of(model) is not family else None

    def _owner(self, model: ModelSpec) -> Family:
        """Return the family that has both the folder's model and this one."""
        theirs = self._family
        if theirs and theirs.dense:
            return theirs
        if theirs and not theirs.misses(model):
            return theirs
        raise self.refused(f"has a {theirs and theirs.architecture}, and the recipe's model is a {family_of(model).architecture}")

    def _check_tensors(self, family: Family, model: ModelSpec) -> None:
        shapes = {row.name: tuple(row.shape) for row in parameter_table(model)}
        tensors = {tensor.name: tensor for tensor in tensors_of(family, model)}  # one for each tensor in the files
        tensors |= {copy.name: copy for copy in family.repeats(model) if copy.name in self.files}
        form = self.format()
        known = {part for name in tensors for part in form.parts(name, self.files)} | {*self.left_out(model)}
        if unknown := sorted(name for name in self.files if name not in known and not name.endswith(_NOT_LEARNT)):
            raise self.refused(f"has the tensor {unknown[0]}, which the recipe's model has not")
        for paths, names in self._by_files(form, tensors).items():
            with self._reading(form, paths) as read:
                for tensor in (tensors[name] for name in names):
                    wanted = list(tensor.shape_for(shapes.get(tensor.ours, (model.experts,))))
                    if (shape := list(read(tensor.name).shape)) != wanted:
                        raise self.refused(f"{tensor.name} has shape {shape}; the recipe's model needs {wanted}")

    def _by_files(self, form: Format, names: Iterable[str]) -> dict[tuple[Path, ...], list[str]]:
        """Return the tensors by the files that hold them. A tensor and its scales may be in two."""
        groups: dict[tuple[Path, ...], list[str]] = {}
        for name in names:
            paths = (self._file(part) for part in form.parts(name, self.files))
            groups.setdefault(tuple(dict.fromkeys(paths)), []).append(name)
        return groups

    def _file(self, name: str) -> Path:
        if name not in self.files:
            raise self.refused(f"has no tensor {name}, which the recipe's model needs")
        return self.files[name]

    @contextmanager
    def _reading(self, form: Format, paths: Iterable[Path]) -> Iterator[Callable[[str], Stored]]:
        """Open files, and yield a function that finds a tensor in them by its name."""
        with ExitStack() as stack:
            files = {path: stack.enter_context(self.opened(path)) for path in paths}
            names = {path: set(file.keys()) for path, file in files.items()}

            def part(name: str) -> Any:
                path = self._file(name)
                if name not in names[path]:
                    raise self.refused(f"its {path.name} lacks the tensor {name}")
                return files[path].get_slice(name)

            def read(name: str) -> Stored:
                parts = list(map(part, form.parts(name, self.files)))
                try:
                    return form.tensor(name, parts)
                except ValueError as error:
                    raise self.refused(str(error)) from None

            yield read


def _is_name(given: Any) -> bool:
    """Whether a value names a file in a folder."""
    return isinstance(given, str) and given not in ("", "..") and os.path.basename(given) == given


def _within(vocab: int, given: Any) -> list[int]:
    """Return one id or several as a list, without those outside of the vocabulary. The recipe refuses what is no id."""
    listed = given if isinstance(given, list) else [] if given is None else [given]
    return [index for index in listed if type(index) is not int or 0 <= index < vocab]
