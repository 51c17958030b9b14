"""What a family of models in Hugging Face's transformers is, and what most families have in common."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from foldray.blueprint import BalanceScope, ModelSpec, RopeScaling, RouterSpec
from trainers.hugging_face.names import NORMS, Block, Tensor, attention, further

Need = tuple[str, bool, Iterable[Any]]
"""A key of `model`, whether the model has what a family has, and the values that the family has."""

Values = dict[str, Any]


class Balanced(NamedTuple):
    """A balance loss that a folder asks for: its weight and scope (`RouterSpec`), and where they come from."""

    weight: Any
    origin: str
    scope: BalanceScope = "sequence"


class Family(NamedTuple):
    """A family of models.

    Args:
        model_type: its name in `config.json`.
        architecture: the class in transformers.
        keys: keys of `config.json` by keys of `model` with the same value, beside those that all families have; None is none.
        fixed: keys of `config.json` with the only value that foldray reads.
        only: keys of `model` with the values that the family has; None is any.
        block: the tensors of a block's feed-forward part.
        needs: further needs.
        config_more: further keys of `config.json` for a model.
        model_more: further keys of `model` for a `config.json`, with all defaults of transformers in it.
        others: further names in `config.json` for the same models.
        dense: whether its models have no experts, and their networks become experts (`dense.py`).
        ahead: how names of tensors begin of parts that foldray does not have, such as further tokens in another way, or images.
        called: parts of names that the family calls otherwise, by what `names.py` calls them.
        inside: keys of `config.json` that lead to the part of a model for several media that foldray has: its text model. Such a
            folder is read, and its text model leaves as one of the family that has no other media (`leaves`).
        attention, linear: the tensors of a block's attention, and of its linear attention; None if there is none.
        holds: how the name of a tensor ends that tells folders from those of another family with this name; empty is any folder.
        leaves: with `inside`, the `model_type` of the family as which text models leave.
        read: `config.json` as the other fields take it.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str | None]
    fixed: Values
    only: Mapping[str, Sequence[Any] | None]
    block: Block
    needs: Callable[[ModelSpec], Iterable[Need]]
    config_more: Callable[[ModelSpec], Values]
    model_more: Callable[[Values], Values]
    others: tuple[str, ...] = ()
    dense: bool = False
    ahead: tuple[str, ...] = ()
    called: Mapping[str, str] = {}
    inside: tuple[str, ...] = ()
    attention: Callable[[ModelSpec, str, str], Iterator[Tensor]] = attention
    linear: Callable[[ModelSpec, str, str], Iterator[Tensor]] | None = None
    holds: str = ""
    leaves: str = ""
    read: Callable[[Values], Values] = dict

    def misses(self, model: ModelSpec) -> list[tuple[str, Iterable[Any]]]:
        """Return the keys in which a model differs from the family, with the values that the family has."""
        only = {key: legal for key, legal in {**_ONLY, **self.only}.items() if legal is not None}
        checks: list[Need] = [(key, value_at(model, key) in legal, legal) for key, legal in only.items()]
        common = () if "latent_rank" in self.keys else _heads_of_one_width(model)
        return [(key, legal) for key, holds, legal in (*checks, *common, *self.needs(model)) if not holds]

    def config(self, model: ModelSpec) -> Values:
        """Return the model's own part of `config.json`."""
        equal = {theirs: value_at(model, ours) for ours, theirs in {**_KEYS, **self.keys}.items() if theirs}
        if _COEFFICIENT in equal:
            equal[_COEFFICIENT] /= _shares(model)
        found = {**equal, **_FIXED, **self.fixed, **rope_config(model), **self.config_more(model)}
        by_type = "full_attention" in found["rope_parameters"]  # which versions of transformers before 5 cannot read
        return {key: value for key, value in found.items() if not (by_type and key in ("rope_theta", "rope_scaling"))}

    def model(self, config: Values) -> Values:
        """Return the keys of `model` for a `config.json` with all defaults of transformers in it.

        Raise a ValueError if a key has a value that foldray does not read. It goes on from the file's name.
        """
        config = self.read(config)
        for key, value in {**_FIXED, **self.fixed}.items():
            if key not in _OF_TRAINING and config.get(key, value) != value:
                raise ValueError(f"says {key}={config[key]}, and foldray reads {value} only")
        keys = {ours: theirs for ours, theirs in {**_KEYS, **self.keys}.items() if ours != _BALANCE}
        equal = {ours: config[theirs] for ours, theirs in keys.items() if theirs in config}
        width = {"head_dim": head_dim(config)}
        rope = _rope_model({**config, **width}) if config.get("rope_parameters") else {}
        model = {**equal, **width, **rope, **self.model_more(config)}
        if "latent_rank" not in self.keys:
            _drop_scale(model.get("rope_scaling"))
        return _nested(model)

    def balance(self, config: Values, model: ModelSpec) -> Balanced:
        """Return the balance loss with which a folder's model is trained."""
        key = self.keys.get(_BALANCE)
        if self.dense:
            return Balanced(RouterSpec().balance_loss, "foldray's own: a dense model has none")
        if key is None:
            return Balanced(0.0, f"transformers trains a {self.architecture} without one")
        if (given := config.get(key)) is None:
            return Balanced(0.0, f"config.json has no {key}")
        if key != _COEFFICIENT:
            return Balanced(given, f"{key} in config.json")
        if not config.get("output_router_logits"):
            return Balanced(0.0, f"output_router_logits is off in config.json, and with it {key}={given}")
        share = f"{model.topk} experts of a token / {_moe_blocks(model)} blocks"
        said = f"{key}={given} in config.json · {share}, as transformers sums"
        return Balanced(given * _shares(model), said, "batch" if given else "sequence")

    def tensors(self, model: ModelSpec) -> Iterator[Tensor]:
        for tensor in self._tensors(model):
            name = tensor.name
            for ours, theirs in self.called.items():
                name = name.replace(ours, theirs)
            yield tensor._replace(name=name)

    def _tensors(self, model: ModelSpec) -> Iterator[Tensor]:
        yield Tensor("model.embed_tokens.weight", "embedding.weight")
        for layer in model.all_layers:
            theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
            if layer >= model.layers:
                yield from further(theirs, f"{ours}.mtp")
            for norm, name in NORMS[model.norms].items():
                yield Tensor(f"{theirs}.{name}.weight", f"{ours}.{norm}.weight")
            if self.linear and model.block(layer).attention.linear:
                yield from self.linear(model, f"{theirs}.linear_attn", f"{ours}.attention")
            else:
                yield from self.attention(model, f"{theirs}.self_attn", f"{ours}.attention")
            yield from self.block(model, layer)
        yield Tensor("model.norm.weight", "final_norm.weight")
        if not model.tied_embeddings:
            yield Tensor("lm_head.weight", "head.weight")

    def copies(self, model: ModelSpec) -> Iterator[Tensor]:
        """Yield copies of parameters: blocks of multi-token prediction have the embedding and the head again."""
        head = "embedding.weight" if model.tied_embeddings else "head.weight"
        for layer in model.all_layers[model.layers :]:
            yield Tensor(f"model.layers.{layer}.embed_tokens.weight", "embedding.weight")
            yield Tensor(f"model.layers.{layer}.shared_head.head.weight", head)

    def repeats(self, model: ModelSpec) -> Iterator[Tensor]:
        """Yield tensors that a folder may have again: copies, and the head if it is the embedding."""
        yield from self.copies(model)
        if model.tied_embeddings:
            yield Tensor("lm_head.weight", "embedding.weight")


_KEYS = {
    "vocab": "vocab_size", "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings", "init_std": "initializer_range",
}  # fmt: skip
# Keys of `config.json` for scaled rotary positions by keys of `model.rope_scaling`, for each rope_type that foldray reads.
_SCALED = {
    "yarn": {
        "factor": "factor", "original_positions": "original_max_position_embeddings", "beta_fast": "beta_fast",
        "beta_slow": "beta_slow", "truncate": "truncate", "attention_factor": "attention_factor", "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
    "llama3": {
        "factor": "factor", "original_positions": "original_max_position_embeddings", "beta_fast": "high_freq_factor",
        "beta_slow": "low_freq_factor",
    },
    "linear": {"factor": "factor"},
}  # fmt: skip
_BALANCE, _COEFFICIENT = "router.balance_loss", "router_aux_loss_coef"
_FIXED: Values = {"hidden_act": "silu", "output_router_logits": False}
# These say how transformers trains a model, and not what it computes.
_OF_TRAINING = {"output_router_logits", "router_jitter_noise"}
_ONLY: dict[str, Sequence[Any]] = {
    "norm": ["rmsnorm"], "norms": ["before"], "attention_gate": ["none"], "positions": ["rope"], "ffn": ["gated_silu"],
    "router.scale": [1.0], "router.groups": [1], "router.selection_bias": [False], "router.logit_bias": [False],
    "expert_bias": [False], "attention_sinks": [False],
    "query_growth": [0.0], "full_positions": ["rope"], "window_rope_theta": [None], "attention_scale": [None],
    "embedding_scale": [1.0], "residual_scale": [1.0], "logit_scale": [1.0], "shared_gate": [False], "mtp_depth": [0],
    "qk_norm": ["none"], "attention_bias": ["none"], "rope_pairs": ["halves"], "linear_kind": ["gated_delta"],
}  # fmt: skip


def value_at(model: ModelSpec, key: str) -> Any:
    """Return the value of a key of `model`, which may be one of `model.router`."""
    return operator.attrgetter(key)(model)


def head_dim(config: Values) -> int:
    """Return the width of a head. transformers derives it from the model's width, if `config.json` does not say it."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _moe_blocks(model: ModelSpec) -> int:
    return sum(map(model.is_moe, range(model.layers)))


def _shares(model: ModelSpec) -> float:
    """Return the balance loss of transformers divided by foldray's.

    It is a mean over blocks, and not their sum. If all experts are used evenly, it is the number of a token's experts, and not 1.
    With several blocks, it also multiplies means over all of them, where foldray multiplies those of each block.
    """
    return model.topk / max(_moe_blocks(model), 1)


# Heads and rotary positions.


def _heads_of_one_width(model: ModelSpec) -> Iterator[Need]:
    """Yield the needs of families without latent attention."""
    yield "latent_rank", model.latent_rank == 0, [0]
    yield "value_dim", model.value_dim in (None, model.head_dim), ["null"]
    scaling = model.rope_scaling
    yield "rope_scaling", scaling is None or scaling.mscale_all_dim is None, ["null", "one without mscale_all_dim"]


def rope_config(model: ModelSpec) -> Values:
    """Return the keys of `config.json` for rotary positions, of transformers 5 and before."""
    rope: Values = {"rope_type": "default", "rope_theta": model.rope_theta}
    if scaling := model.rope_scaling:
        values = {theirs: getattr(scaling, ours) for ours, theirs in _SCALED[scaling.kind].items()}
        rope |= {"rope_type": scaling.kind, **{key: value for key, value in values.items() if value is not None}}
    if model.rope_dim not in (None, model.head_dim) and not model.latent_rank:
        rope["partial_rotary_factor"] = (model.rope_dim or 0) / model.head_dim
    older = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return {
        "rope_parameters": rope, "rope_theta": model.rope_theta, "rope_scaling": older if scaling else None,
        **{key: value for key, value in rope.items() if key == "partial_rotary_factor"},
    }  # fmt: skip


def _rope_model(config: Values) -> Values:
    if "full_attention" in (rope := config["rope_parameters"]):
        full, sliding = rope["full_attention"], rope["sliding_attention"]
        found = _rope_model({**config, "rope_parameters": full})
        if sliding == full:
            return found
        other = _rope_model({**config, "rope_parameters": sliding})
        if other["rope_scaling"] or other["rope_dim"] != found["rope_dim"]:
            raise ValueError(f"says rope_parameters={rope}, and foldray reads another rope_theta of sliding blocks only")
        return {**found, "window_rope_theta": other["rope_theta"]}
    width, scaling = config["head_dim"], None
    if (kind := rope.get("rope_type", "default")) not in ("default", *_SCALED):
        legal = ", ".join(["default", *_SCALED])
        raise ValueError(f"says rope_parameters={rope}, and foldray reads the rope_types {legal} only")
    if keys := _SCALED.get(kind):
        scaling = {"kind": kind, **{ours: rope[theirs] for ours, theirs in keys.items() if rope.get(theirs)}}
        if kind == "yarn" and "factor" not in scaling:
            scaling["factor"] = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        if rope.get("truncate") is False:
            scaling["truncate"] = False
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    turning = None if share == 1 else int(width * share)
    return {"rope_theta": rope["rope_theta"], "rope_dim": turning, "rope_scaling": scaling}


def _drop_scale(scaling: Values | None) -> None:
    """Replace DeepSeek's two weights by the factor that the code of other families makes of them."""
    if scaling and scaling.get("mscale_all_dim"):
        scaling["attention_factor"] = RopeScaling.model_validate(scaling).magnitude
        scaling.pop("mscale", None)
        del scaling["mscale_all_dim"]


def _nested(values: Values) -> Values:
    """Return the values with those of `router.…` in a mapping of their own."""
    router = {key.removeprefix("router."): value for key, value in values.items() if key.startswith("router.")}
    return {key: value for key, value in values.items() if not key.startswith("router.")} | ({"router": router} if router else {})
