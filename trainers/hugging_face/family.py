"""What a family of models in Hugging Face's transformers is, and what most families have in common.

transformers keeps matrices as [out, in], foldray as [in, out].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from foldray.blueprint import ModelSpec


class Tensor(NamedTuple):
    """A tensor of a family.

    Args:
        name: its name in the files of transformers.
        ours: the global name of the same parameter (`foldray.blueprint.parameters`).
        turned: whether rows and columns change places.
        keeps: whether it stays in the type that training has it in.
        axes: number of axes of size 1 before those of the parameter.
    """

    name: str
    ours: str
    turned: bool = False
    keeps: bool = False
    axes: int = 0


Need = tuple[str, bool, Iterable[Any]]
"""A key of `model`, whether the model has what a family has, and the values that the family has."""

Values = dict[str, Any]
Block = Callable[[ModelSpec, int], Iterator[Tensor]]


class Family(NamedTuple):
    """A family of models.

    Args:
        model_type: its name in `config.json`.
        architecture: the class in transformers.
        keys: keys of `config.json` by keys of `model` with the same value, beside those that all families have.
        fixed: keys of `config.json` with the only value that foldray reads.
        only: keys of `model` with the values that the family has; None is any.
        block: the tensors of a block's feed-forward part.
        needs: further needs.
        config_more: further keys of `config.json` for a model.
        model_more: further keys of `model` for a `config.json`, with all defaults of transformers in it.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str]
    fixed: Values
    only: Mapping[str, Sequence[Any] | None]
    block: Block
    needs: Callable[[ModelSpec], Iterable[Need]]
    config_more: Callable[[ModelSpec], Values]
    model_more: Callable[[Values], Values]

    def misses(self, model: ModelSpec) -> list[tuple[str, Iterable[Any]]]:
        """Return the keys in which a model differs from the family, with the values that the family has."""
        only = {key: legal for key, legal in {**_ONLY, **self.only}.items() if legal is not None}
        checks: list[Need] = [(key, value_at(model, key) in legal, legal) for key, legal in only.items()]
        return [(key, legal) for key, holds, legal in (*checks, *_common_needs(model), *self.needs(model)) if not holds]

    def config(self, model: ModelSpec) -> Values:
        """Return the model's own part of `config.json`."""
        equal = {theirs: value_at(model, ours) for ours, theirs in {**_KEYS, **self.keys}.items()}
        return {**equal, **_FIXED, **self.fixed, **_rope_config(model), **self.config_more(model)}

    def model(self, config: Values) -> Values:
        """Return the keys of `model` for a `config.json` with all defaults of transformers in it.

        Raises:
            ValueError: a key has a value that foldray does not read.
        """
        for key, value in {**_FIXED, **self.fixed}.items():
            if key not in _OF_TRAINING and config.get(key, value) != value:
                raise ValueError(f"says {key}={config[key]}, and foldray reads {value} only")
        equal = {ours: config[theirs] for ours, theirs in {**_KEYS, **self.keys}.items() if theirs in config}
        width = {"head_dim": head_dim(config)}
        return _nested({**equal, **width, **_rope_model({**config, **width}), **self.model_more(config)})

    def tensors(self, model: ModelSpec) -> Iterator[Tensor]:
        """Yield all tensors of a model."""
        yield Tensor("model.embed_tokens.weight", "embedding.weight")
        for layer in range(model.layers):
            theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
            yield Tensor(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight")
            yield from _attention(model, f"{theirs}.self_attn", f"{ours}.attention")
            yield Tensor(f"{theirs}.post_attention_layernorm.weight", f"{ours}.ffn_norm.weight")
            yield from self.block(model, layer)
        yield Tensor("model.norm.weight", "final_norm.weight")
        if not model.tied_embeddings:
            yield Tensor("lm_head.weight", "head.weight")


_KEYS = {
    "vocab": "vocab_size", "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings", "init_std": "initializer_range",
}  # fmt: skip
_FIXED: Values = {"hidden_act": "silu", "output_router_logits": False}
# These say how transformers trains a model, and not what it computes.
_OF_TRAINING = {"output_router_logits", "attention_dropout", "router_jitter_noise"}
_ONLY: dict[str, Sequence[Any]] = {
    "norm": ["rmsnorm"], "positions": ["rope"], "ffn": ["gated_silu"], "router.scale": [1.0], "router.selection_bias": [False],
    "shared_gate": [False], "qk_norm": ["none"], "attention_bias": ["none"], "rope_pairs": ["halves"],
}  # fmt: skip


def value_at(model: ModelSpec, key: str) -> Any:
    """Return the value of a key of `model`, which may be one of `model.router`."""
    found: Any = model
    for part in key.split("."):
        found = getattr(found, part)
    return found


def head_dim(config: Values) -> int:
    """Return the width of a head. transformers derives it from the model's width, if `config.json` does not say it."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def nothing(given: Any) -> Any:
    """The further needs or keys of a family that has none."""
    return {}


# Rotary positions.


def _common_needs(model: ModelSpec) -> Iterator[Need]:
    yield "value_dim", model.value_dim in (None, model.head_dim), ["null"]


def turns_whole_heads(model: ModelSpec) -> Need:
    """Return the need of families whose heads turn as a whole."""
    return "rope_dim", model.rope_dim in (None, model.head_dim), ["null"]


def _rope_config(model: ModelSpec) -> Values:
    found: Values = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_dim not in (None, model.head_dim):
        found["partial_rotary_factor"] = (model.rope_dim or 0) / model.head_dim
    return {"rope_parameters": found}


def _rope_model(config: Values) -> Values:
    rope, width = config["rope_parameters"], config["head_dim"]
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"says rope_parameters={rope}, and foldray reads the rope_type 'default' only")
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    return {"rope_theta": rope["rope_theta"], "rope_dim": None if share == 1 else int(width * share)}


# Dense blocks, windows and routers.


def dense_blocks(config: Values, is_moe: Callable[[int], bool]) -> Values:
    """Return the keys of `model` that say which blocks are dense.

    Raises:
        ValueError: foldray has no such order of blocks.
    """
    layers = config["num_hidden_layers"]
    wanted = [is_moe(layer) for layer in range(layers)]
    for every in range(1, layers + 1):
        for first in range(layers + 1):
            if wanted == [i >= first and (i - first + 1) % every == 0 for i in range(layers)]:
                return {"dense_first": first, "moe_every": every}
    raise ValueError("has dense blocks between those with experts, in an order that foldray does not have")


def dense_layers(model: ModelSpec) -> list[int]:
    return [layer for layer in range(model.layers) if not model.is_moe(layer)]


def windows_of(model: ModelSpec) -> list[str]:
    """Return the window of every block."""
    return [model.block(layer).attention.window for layer in range(model.layers)]


def sees_everything(model: ModelSpec) -> Need:
    """Return the need of families whose blocks see everything."""
    return "windows", set(model.windows) == {"full"}, ["full"]


def one_window(model: ModelSpec) -> Need:
    """Return the need of families whose blocks all see everything, or all slide with the same width."""
    holds = len(set(model.windows)) == 1 and model.windows[0].split(":")[0] in ("full", "sliding")
    return "windows", holds, ["full", "sliding:TOKENS"]


def one_sliding_width(model: ModelSpec) -> Need:
    """Return the need of families whose blocks see everything or slide, all with the same width."""
    sliding = {window for window in model.windows if window != "full"}
    holds = len(sliding) <= 1 and all(window.startswith("sliding:") for window in sliding)
    return "windows", holds, ["full", "sliding:TOKENS of one width"]


def layer_types(model: ModelSpec) -> Values:
    """Return the keys of `config.json` for blocks that see everything or slide."""
    windows = windows_of(model)
    sliding = [int(window.split(":")[1]) for window in windows if window != "full"]
    types = ["full_attention" if window == "full" else "sliding_attention" for window in windows]
    return {"layer_types": types, **({"sliding_window": sliding[0]} if sliding else {})}


def layer_windows(config: Values) -> Values:
    """Return the key of `model` for the blocks' windows."""
    types = config["layer_types"]
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"says layer_types={sorted(unknown)}, and foldray reads full_attention and sliding_attention only")
    windows = ["full" if each == "full_attention" else f"sliding:{config['sliding_window']}" for each in types]
    return {"windows": windows[:1] if len(set(windows)) == 1 else windows}


def computed(model: ModelSpec) -> Values:
    """Return what a model computes by keys of `model`, the same for all ways to write it in a recipe."""
    of_training = {
        "preset",
        "init_std",
        "router",
        "moe_every",
        "max_positions",
        *(("ffn_hidden",) if not dense_layers(model) else ()),
    }
    return model.model_dump(exclude=of_training) | {
        "router.score": model.router.score, "router.scale": model.router.scale,
        "value_dim": model.value_dim or model.head_dim, "rope_dim": model.rope_dim or model.head_dim,
        "windows": windows_of(model), "dense_first": dense_layers(model), "router.normalize": weighs_to_one(model),
        "router.selection_bias": model.router.score == "sigmoid" or model.router.selection_bias,
    }  # fmt: skip


def weighs_to_one(model: ModelSpec) -> bool:
    """Whether the weights of a token's experts sum to 1: the softmax of the chosen logits is that of all of them, rescaled."""
    return model.router.normalize or (model.router.score == "softmax" and model.router.softmax == "after_topk")


# Tensors.


def _attention(model: ModelSpec, theirs: str, ours: str) -> Iterator[Tensor]:
    biased = {"none": "", "inputs": "qkv", "all": "qkvo"}[model.attention_bias]
    for letter, part in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
        yield Tensor(f"{theirs}.{letter}_proj.weight", f"{ours}.{part}", True)
        if letter in biased:
            yield Tensor(f"{theirs}.{letter}_proj.bias", f"{ours}.{part}_bias")
        if letter in "qk" and model.qk_norm != "none":
            yield Tensor(f"{theirs}.{letter}_norm.weight", f"{ours}.norm.{part}")


def network(theirs: str, ours: str, names: Iterable[str] = ("gate_proj", "up_proj", "down_proj")) -> Iterator[Tensor]:
    """Yield the tensors of a gated feed-forward network.

    Args:
        theirs, ours: names of the network.
        names: names of its gate, its values and the product behind them.
    """
    for name, part in zip(names, ("gate", "up", "down"), strict=True):
        yield Tensor(f"{theirs}.{name}.weight", f"{ours}.{part}", True)


def mlp(shared: str | None = None, bias: Tensor | None = None) -> Block:
    """Return the tensors of a block as most families have them.

    Args:
        shared: name of the shared expert in the block's network.
        bias: the selection bias; its names are relative to the block's network.
    """

    def tensors(model: ModelSpec, layer: int) -> Iterator[Tensor]:
        theirs, ours = f"model.layers.{layer}.mlp", f"blocks.{layer}"
        if not model.is_moe(layer):
            yield from network(theirs, f"{ours}.ffn")
            return
        yield Tensor(f"{theirs}.gate.weight", f"{ours}.moe.router.weight", True)
        if bias:
            yield bias._replace(name=f"{theirs}.{bias.name}", ours=f"{ours}.moe.router.bias", keeps=True)
        if shared and model.shared_hidden:
            yield from network(f"{theirs}.{shared}", f"{ours}.moe.shared")
        if model.shared_gate:
            yield Tensor(f"{theirs}.{shared}_gate.weight", f"{ours}.moe.shared.output_gate", True)
        for expert in range(model.experts):
            yield from network(f"{theirs}.experts.{expert}", f"{ours}.moe.experts.{expert}")

    return tensors


def sparse_moe(bias: Tensor | None = None) -> Block:
    """Return the tensors of a block as Mixtral has them, whose blocks all have experts."""

    def tensors(model: ModelSpec, layer: int) -> Iterator[Tensor]:
        theirs, ours = f"model.layers.{layer}.block_sparse_moe", f"blocks.{layer}.moe"
        yield Tensor(f"{theirs}.gate.weight", f"{ours}.router.weight", True)
        if bias:
            yield bias._replace(name=f"{theirs}.{bias.name}", ours=f"{ours}.router.bias", keeps=True)
        for expert in range(model.experts):
            yield from network(f"{theirs}.experts.{expert}", f"{ours}.experts.{expert}", ("w1", "w3", "w2"))

    return tensors


def _nested(values: Values) -> Values:
    """Return the values with those of `router.…` in a mapping of their own."""
    router = {key.removeprefix("router."): value for key, value in values.items() if key.startswith("router.")}
    return {key: value for key, value in values.items() if not key.startswith("router.")} | ({"router": router} if router else {})
