"""Granite: models whose embeddings, scores, residual streams and logits have factors."""

from __future__ import annotations

from collections.abc import Iterator

from foldray.blueprint import ModelSpec
from trainers.hugging_face.family import Family, Need, Values
from trainers.hugging_face.names import granite
from trainers.hugging_face.rows import (
    BALANCED,
    NO_DENSE,
    SOFTMAX,
    layer_types,
    layer_windows,
    one_sliding_width,
    sees_everything,
    turns_whole_heads,
    weighs_to_one,
)

# Granite: Mixtral with factors on embeddings, scores, the residual stream's parts and logits. Later models have windows, scores
# that take a share of every softmax, and bases of rotary positions by block.


def _granite_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield "router.normalize", weighs_to_one(model), [True]
    yield "head_dim", model.head_dim * model.heads == model.hidden, [f"hidden / heads = {model.hidden / model.heads:g}"]


def _granite_full_needs(model: ModelSpec) -> Iterator[Need]:
    yield from _granite_needs(model)
    yield sees_everything(model)


def _granite_config(model: ModelSpec) -> Values:
    scale = model.attention_scale or model.head_dim**-0.5
    return {
        "attention_bias": model.attention_bias == "all", "attention_multiplier": scale, "logits_scaling": 1 / model.logit_scale,
    }  # fmt: skip


def _granite_model(config: Values) -> Values:
    return {
        "attention_bias": "all" if config["attention_bias"] else "none", "ffn_hidden": config["intermediate_size"],
        "attention_scale": config["attention_multiplier"], "logit_scale": 1 / config["logits_scaling"],
    }  # fmt: skip


def _granite_swa_needs(model: ModelSpec) -> Iterator[Need]:
    yield from _granite_needs(model)
    yield one_sliding_width(model)


def _granite_swa_config(model: ModelSpec) -> Values:
    ropes = [model.block(layer).attention.rope for layer in range(model.layers)]
    return _granite_config(model) | layer_types(model) | {"layer_rope_theta": [rope.theta if rope else 0 for rope in ropes]}


def _granite_swa_model(config: Values) -> Values:
    thetas: dict[str, set[float]] = {"full_attention": set(), "sliding_attention": set()}
    for kind, theta in zip(config["layer_types"], config["layer_rope_theta"], strict=True):
        thetas[kind].add(theta)
    full, sliding = ([*thetas[kind]] or [config["rope_parameters"]["rope_theta"]] for kind in thetas)
    if len(full) > 1 or len(sliding) > 1 or sliding == [0]:
        rule = "foldray reads one number for each of layer_types, and 0 for full_attention only"
        raise ValueError(f"says layer_rope_theta={config['layer_rope_theta']}, and {rule}")
    found = {**_granite_model(config), **layer_windows(config), "attention_sinks": True, "rope_theta": full[0] or sliding[0]}
    if not full[0]:
        return found | {"full_positions": "none"}
    return found | ({"window_rope_theta": sliding[0]} if thetas["sliding_attention"] and sliding != full else {})


_GRANITE = BALANCED | {
    "topk": "num_experts_per_tok", "experts": "num_local_experts", "expert_hidden": "intermediate_size", "head_dim": None,
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
}  # fmt: skip
_LINEAR = granite("input_linear.weight", "output_linear.weight", "router.layer")
_FACTORS: Values = SOFTMAX | NO_DENSE | {
    "attention_bias": ["none", "all"], "attention_scale": None, "embedding_scale": None, "residual_scale": None,
    "logit_scale": None,
}  # fmt: skip


WITH_FACTORS = (
    Family(
        "granitemoe", "GraniteMoeForCausalLM", _GRANITE, {}, _FACTORS | {"shared_hidden": [0]},
        _LINEAR,
        _granite_full_needs, _granite_config, _granite_model,
    ),
    Family(
        "granitemoeshared", "GraniteMoeSharedForCausalLM", _GRANITE | {"shared_hidden": "shared_intermediate_size"}, {}, _FACTORS,
        _LINEAR,
        _granite_full_needs, _granite_config, _granite_model,
    ),
    Family(
        "granitemoe_swa", "GraniteMoeSWAForCausalLM", _GRANITE | {"shared_hidden": "shared_intermediate_size"}, {},
        _FACTORS | {"attention_sinks": [True], "full_positions": None, "window_rope_theta": None},
        granite("experts.gate_up_proj", "experts.down_proj", "router"),
        _granite_swa_needs, _granite_swa_config, _granite_swa_model,
    ),
)  # fmt: skip
