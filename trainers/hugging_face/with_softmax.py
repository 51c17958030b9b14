"""Families whose routers have a softmax, and heads of their own for keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from foldray.blueprint import ModelSpec
from trainers.hugging_face.family import Family, Need, Values, head_dim
from trainers.hugging_face.names import (
    SCORE_BIAS,
    by_key_head,
    columns_together,
    gated_attention,
    mlp,
    part_by_part,
    sparse_moe,
    stacked,
)
from trainers.hugging_face.rows import (
    BALANCED,
    NO_DENSE,
    SOFTMAX,
    TOPK,
    before_topk,
    blocks_of_types,
    dense_blocks,
    dense_layers,
    full_or_linear,
    layer_types,
    layer_windows,
    linear_types,
    linear_windows,
    mlp_types,
    model_window,
    normalized,
    one_sliding_width,
    one_window,
    rope_by_type,
    sees_everything,
    shares_experts,
    step_blocks,
    turns_whole_heads,
    weighs_to_one,
)

# Mixtral: every block has experts, and the weights of a token's experts are the softmax of their logits.


def _mixtral_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield one_window(model)
    yield "router.normalize", weighs_to_one(model), [True]


def _whole_window(model: ModelSpec) -> Values:
    kind, _, tokens = model.windows[0].partition(":")
    return {"sliding_window": int(tokens) if kind == "sliding" else None}


def _mixtral_model(config: Values) -> Values:
    return {**model_window(config), "ffn_hidden": config["intermediate_size"]}


# Qwen2-MoE: biases of queries, keys and values, and a shared expert that tokens weigh.


def _qwen2_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield one_sliding_width(model)


def _qwen2_config(model: ModelSpec) -> Values:
    windows = layer_types(model)
    return {
        "qkv_bias": model.attention_bias == "inputs", "decoder_sparse_step": 1, "mlp_only_layers": dense_layers(model),
        "use_sliding_window": "sliding_window" in windows, **windows, **normalized(model),
    }  # fmt: skip


def _qwen2_model(config: Values) -> Values:
    return {
        "attention_bias": "inputs" if config["qkv_bias"] else "none", "shared_gate": True,
        **layer_windows(config), **step_blocks(config), **before_topk(config),
    }  # fmt: skip


# Qwen3-MoE: a norm of each head's queries and keys.


def _qwen3_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield one_window(model)


def _qwen3_config(model: ModelSpec) -> Values:
    window = _whole_window(model)
    return {
        "attention_bias": model.attention_bias == "all", "decoder_sparse_step": 1, "mlp_only_layers": dense_layers(model),
        "use_sliding_window": window["sliding_window"] is not None, **window, **normalized(model),
    }  # fmt: skip


def _qwen3_model(config: Values) -> Values:
    return {
        "attention_bias": "all" if config["attention_bias"] else "none", "qk_norm": "head",
        **model_window(config), **step_blocks(config), **before_topk(config),
    }  # fmt: skip


# Qwen3-Next and Qwen3.5-MoE: linear attention in most blocks. The others have a norm of each head's queries and keys, and a gate.
# Norms multiply by one plus their weight.


def _next_needs(model: ModelSpec) -> Iterator[Need]:
    yield full_or_linear(model)


def _next_config(model: ModelSpec) -> Values:
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense_layers(model), **linear_types(model), **normalized(model)}


_NEXT: Values = {"qk_norm": "head", "norm": "zero_rmsnorm", "attention_gate": "element", "shared_gate": True}


def _next_model(config: Values) -> Values:
    return _NEXT | linear_windows(config) | step_blocks(config) | before_topk(config)


def _next5_needs(model: ModelSpec) -> Iterator[Need]:
    yield full_or_linear(model)
    yield "router.normalize", weighs_to_one(model), [True]


def _next5_model(config: Values) -> Values:
    sizes = {"ffn_hidden": config["moe_intermediate_size"]}  # which no block has
    return _NEXT | sizes | linear_windows(config) | before_topk(config | {"norm_topk_prob": True})


# HunYuan-A13B: a norm of each head's queries and keys once they have turned, and a shared expert as wide as the others.


def _hunyuan_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield sees_everything(model)
    yield "router.normalize", weighs_to_one(model), [True]
    yield "shared_hidden", model.shared_hidden == model.expert_hidden, [f"expert_hidden={model.expert_hidden}"]


def _hunyuan_read(config: Values) -> Values:
    """Return a `config.json` with one number of experts, and with what `alpha` makes of the base of rotary positions."""
    topk, rope = config["moe_topk"], config["rope_parameters"]
    if isinstance(topk, list):
        if len(set(topk)) > 1:
            raise ValueError(f"says moe_topk={topk}, and foldray reads one number for all blocks only")
        topk = topk[0]
    if rope.get("rope_type") == "dynamic":
        if not rope.get("alpha"):
            raise ValueError(f"says rope_parameters={rope}, and foldray reads `dynamic` with alpha only")
        width = head_dim(config)
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))}
    return config | {"moe_topk": topk, "rope_parameters": rope}


def _biased_config(model: ModelSpec) -> Values:
    return {"attention_bias": model.attention_bias == "all"}


def _hunyuan_model(config: Values) -> Values:
    inner, bias = config["intermediate_size"], "all" if config["attention_bias"] else "none"
    widths = {"ffn_hidden": inner, "shared_hidden": inner}
    return {"attention_bias": bias, "qk_norm": "turned_head", **widths, **before_topk(config | {"norm_topk_prob": True})}


# Aria: Mixtral with a shared expert.


def _aria_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield sees_everything(model)
    yield shares_experts(model)
    yield "router.normalize", weighs_to_one(model), [True]
    yield "heads", model.hidden % model.heads == 0, [f"divisors of hidden={model.hidden}"]


def _aria_config(model: ModelSpec) -> Values:
    return {"moe_num_shared_experts": model.shared_hidden // model.expert_hidden, **_biased_config(model)}


def _aria_model(config: Values) -> Values:
    inner, bias = config["intermediate_size"], "all" if config["attention_bias"] else "none"
    return {"attention_bias": bias, "ffn_hidden": inner, "shared_hidden": config["moe_num_shared_experts"] * inner}


# OLMoE: a norm of all heads' queries, and one of all heads' keys.


def _olmoe_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield sees_everything(model)
    yield "head_dim", model.head_dim * model.heads == model.hidden, [f"hidden / heads = {model.hidden / model.heads:g}"]


def _olmoe_config(model: ModelSpec) -> Values:
    return {"attention_bias": model.attention_bias == "all", **normalized(model)}


def _olmoe_model(config: Values) -> Values:
    bias = "all" if config["attention_bias"] else "none"
    return {"attention_bias": bias, "qk_norm": "all", "ffn_hidden": config["intermediate_size"], **before_topk(config)}


def _flex_model(config: Values) -> Values:  # FlexOlmo: the same with norms behind attention and experts
    return _olmoe_model(config) | {"norms": "after"}


# ERNIE-4.5: a softmax with a selection bias, and neighbouring columns that turn together.


def _ernie_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield sees_everything(model)
    yield "router.normalize", weighs_to_one(model), [True]
    yield "shared_hidden", model.shared_hidden % model.expert_hidden == 0, [f"a multiple of expert_hidden={model.expert_hidden}"]
    dense = dense_layers(model)
    yield "moe_every", dense == list(range(len(dense))), [1]


def _ernie_config(model: ModelSpec) -> Values:
    blocks = {"moe_layer_start_index": len(dense_layers(model)), "moe_layer_end_index": model.layers - 1, "moe_layer_interval": 1}
    return {"moe_num_shared_experts": model.shared_hidden // model.expert_hidden, **blocks}


def _ernie_model(config: Values) -> Values:
    start, end, step = (config[f"moe_layer_{key}"] for key in ("start_index", "end_index", "interval"))
    return {
        "rope_pairs": "interleaved", "shared_hidden": config["moe_num_shared_experts"] * config["moe_intermediate_size"],
        "router.softmax": "before_topk", "router.normalize": True, "router.selection_bias": True,
        **dense_blocks(config, lambda layer: start <= layer <= end and (layer + 1) % step == 0),
    }  # fmt: skip


# GPT-OSS: scores that take a share of every softmax, biases everywhere, and an activation of its own.


def _gpt_oss_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield one_sliding_width(model)
    yield "router.softmax", model.router.softmax == "after_topk", ["after_topk"]


def _gpt_oss_config(model: ModelSpec) -> Values:
    return {"attention_bias": model.attention_bias == "all", **layer_types(model)}


def _gpt_oss_model(config: Values) -> Values:
    return {
        "attention_bias": "all" if config["attention_bias"] else "none", "attention_sinks": True, "expert_bias": True,
        "ffn": "gated_clamped", "ffn_hidden": config["intermediate_size"], "router.logit_bias": True, **layer_windows(config),
    }  # fmt: skip


# Mellum: windows whose rotary positions have a base of their own.


def _mellum_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield one_sliding_width(model)


def _mellum_config(model: ModelSpec) -> Values:
    bias = {"attention_bias": model.attention_bias == "all"}
    return bias | layer_types(model) | mlp_types(model) | rope_by_type(model) | normalized(model)


def _mellum_model(config: Values) -> Values:
    bias = {"attention_bias": "all" if config["attention_bias"] else "none"}
    return bias | {"qk_norm": "head"} | layer_windows(config) | blocks_of_types(config) | before_topk(config)


_ONLY_NEXT: Values = {key: [value] for key, value in _NEXT.items()}

WITH_SOFTMAX = (
    Family(
        "mixtral", "MixtralForCausalLM",
        BALANCED | {"topk": "num_experts_per_tok", "experts": "num_local_experts", "expert_hidden": "intermediate_size"},
        {}, SOFTMAX | NO_DENSE | {"shared_hidden": [0]}, sparse_moe(), _mixtral_needs, _whole_window, _mixtral_model,
    ),
    Family(
        "qwen2_moe", "Qwen2MoeForCausalLM",
        BALANCED | TOPK | {"ffn_hidden": "intermediate_size", "shared_hidden": "shared_expert_intermediate_size"},
        {}, SOFTMAX | {"shared_gate": [True], "attention_bias": ["none", "inputs"]}, mlp("shared_expert"),
        _qwen2_needs, _qwen2_config, _qwen2_model,
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", BALANCED | TOPK | {"ffn_hidden": "intermediate_size"},
        {}, SOFTMAX | {"shared_hidden": [0], "qk_norm": ["head"], "attention_bias": ["none", "all"]}, mlp(),
        _qwen3_needs, _qwen3_config, _qwen3_model,
    ),
    Family(
        "qwen3_next", "Qwen3NextForCausalLM",
        BALANCED | TOPK | {"ffn_hidden": "intermediate_size", "shared_hidden": "shared_expert_intermediate_size"},
        {"attention_bias": False}, SOFTMAX | _ONLY_NEXT, mlp("shared_expert"),
        _next_needs, _next_config, _next_model, ahead=("mtp.",), attention=gated_attention, linear=by_key_head,
    ),
    Family(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM",
        BALANCED | TOPK | {"shared_hidden": "shared_expert_intermediate_size"},
        {"attention_bias": False}, SOFTMAX | NO_DENSE | _ONLY_NEXT, mlp("shared_expert"),
        _next5_needs, linear_types, _next5_model, ahead=("mtp.",), attention=gated_attention, linear=part_by_part,
    ),
    Family(
        "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM",
        {"topk": "moe_topk", "experts": "num_experts", "expert_hidden": "intermediate_size"},
        {}, SOFTMAX | NO_DENSE | {"qk_norm": ["turned_head"], "attention_bias": ["none", "all"]},
        mlp("shared_mlp", router="gate.wg"), _hunyuan_needs, _biased_config, _hunyuan_model,
        called={"q_norm": "query_layernorm", "k_norm": "key_layernorm"}, read=_hunyuan_read,
    ),
    Family(
        "aria_text", "AriaTextForCausalLM",
        {"topk": "moe_topk", "experts": "moe_num_experts", "expert_hidden": "intermediate_size"},
        {"mlp_bias": False}, SOFTMAX | NO_DENSE | {"attention_bias": ["none", "all"]},
        partial(columns_together, router="router", inwards="fc1.weight", out="fc2.weight"),
        _aria_needs, _aria_config, _aria_model,
    ),
    Family(
        "olmoe", "OlmoeForCausalLM", BALANCED | TOPK | {"expert_hidden": "intermediate_size"},
        {"clip_qkv": None},
        SOFTMAX | NO_DENSE | {"shared_hidden": [0], "qk_norm": ["all"], "attention_bias": ["none", "all"]},
        mlp(), _olmoe_needs, _olmoe_config, _olmoe_model,
    ),
    Family(
        "flex_olmo", "FlexOlmoForCausalLM", BALANCED | TOPK | {"expert_hidden": "intermediate_size"}, {},
        SOFTMAX | NO_DENSE | {"shared_hidden": [0], "qk_norm": ["all"], "attention_bias": ["none", "all"], "norms": ["after"]},
        mlp(), _olmoe_needs, _olmoe_config, _flex_model,
    ),
    Family(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
        BALANCED | {"topk": "moe_k", "experts": "moe_num_experts", "expert_hidden": "moe_intermediate_size",
                    "ffn_hidden": "intermediate_size"},
        {"use_bias": False, "moe_norm_min": 1e-12},
        SOFTMAX | {"router.selection_bias": [True], "rope_pairs": ["interleaved"]},
        mlp("shared_experts", SCORE_BIAS._replace(name="moe_statics.e_score_correction_bias", axes=1)),
        _ernie_needs, _ernie_config, _ernie_model, ahead=("model.mtp_",),
    ),
    Family(
        "gpt_oss", "GptOssForCausalLM",
        BALANCED | {"topk": "num_experts_per_tok", "experts": "num_local_experts", "expert_hidden": "intermediate_size"},
        {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        SOFTMAX | NO_DENSE | {"shared_hidden": [0], "attention_bias": ["none", "all"], "attention_sinks": [True],
                                "expert_bias": [True], "ffn": ["gated_clamped"], "router.logit_bias": [True]},
        stacked, _gpt_oss_needs, _gpt_oss_config, _gpt_oss_model,
    ),
    Family(
        "mellum", "MellumForCausalLM", BALANCED | TOPK | {"ffn_hidden": "intermediate_size"}, {},
        SOFTMAX | {"shared_hidden": [0], "qk_norm": ["head"], "attention_bias": ["none", "all"], "window_rope_theta": None},
        mlp(), _mellum_needs, _mellum_config, _mellum_model, ahead=("mtp.",),
    ),
)  # fmt: skip
