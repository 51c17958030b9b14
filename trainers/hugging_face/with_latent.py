"""Families with latent attention (DeepSeek-V2, section 2.1)."""

from __future__ import annotations

from collections.abc import Iterator

from foldray.blueprint import ModelSpec
from trainers.hugging_face.family import Family, Need, Values, rope_config
from trainers.hugging_face.names import SCORE_BIAS, Tensor, kimi_delta, mlp
from trainers.hugging_face.rows import (
    BY_SCORES,
    SOFTMAX,
    before_topk,
    blocks_of_types,
    expert_groups,
    full_or_linear,
    full_without_positions,
    mlp_types,
    normalized,
    sees_everything,
    shared_experts,
    shares_experts,
    weighs_to_one,
    windows_of,
    windows_with_linear,
)

# DeepSeek: latent attention, shared experts, and groups of experts. The norms of narrow vectors add a number of their own.


_NARROW_EPS = 1e-6


def _deepseek_needs(model: ModelSpec) -> Iterator[Need]:
    yield "latent_rank", model.latent_rank > 0, ["at least 1"]
    yield shares_experts(model)
    yield sees_everything(model)
    eps = model.latent_norm_eps or model.norm_eps
    yield "latent_norm_eps", eps == _NARROW_EPS, [_NARROW_EPS]


def _deepseek2_needs(model: ModelSpec) -> Iterator[Need]:
    yield from _deepseek_needs(model)
    yield "router.normalize", not weighs_to_one(model), [False]
    yield "heads", model.hidden % model.heads == 0, [f"a divisor of hidden={model.hidden}"]


def _deepseek_config(model: ModelSpec) -> Values:
    return {
        "q_lora_rank": model.latent_query_rank or None, "qk_nope_head_dim": model.head_dim - (model.rope_dim or 0),
        "n_shared_experts": model.shared_hidden // model.expert_hidden, "rope_interleave": model.rope_pairs == "interleaved",
    }  # fmt: skip


def _deepseek2_config(model: ModelSpec) -> Values:
    groups, given = model.router.groups, _deepseek_config(model)
    limited = {"n_group": groups, "topk_group": model.router.topk_groups, "topk_method": "group_limited_greedy"}
    return given | (limited if groups > 1 else {"topk_method": "greedy"})


def _deepseek3_config(model: ModelSpec) -> Values:
    router = {**expert_groups(model), "norm_topk_prob": model.router.normalize}
    return _deepseek_config(model) | router | {"num_nextn_predict_layers": model.mtp_depth}


def _deepseek_model(config: Values) -> Values:
    return {
        "latent_query_rank": config["q_lora_rank"] or 0, "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "rope_dim": config["qk_rope_head_dim"], **shared_experts(config),
        "latent_norm_eps": None if config["rms_norm_eps"] == _NARROW_EPS else _NARROW_EPS,
    }  # fmt: skip


def _deepseek2_model(config: Values) -> Values:
    limited = config["topk_method"] == "group_limited_greedy"
    groups = {"router.groups": config["n_group"], "router.topk_groups": config["topk_group"]} if limited else {}
    return {**_deepseek_model(config), "rope_pairs": "interleaved", "router.softmax": "before_topk", **groups}


def _deepseek3_model(config: Values) -> Values:
    return {
        **_deepseek_model(config), "rope_pairs": "interleaved" if config["rope_interleave"] else "halves",
        "router.score": "sigmoid", "router.normalize": config["norm_topk_prob"], "router.groups": config["n_group"],
        "router.topk_groups": config["topk_group"],
    }  # fmt: skip


# GLM-4.7-Flash: the attention of DeepSeek-V3, and a list of dense blocks.


def _glm_lite_config(model: ModelSpec) -> Values:
    return _deepseek3_config(model) | mlp_types(model)


def _glm_lite_model(config: Values) -> Values:
    return _deepseek3_model(config) | blocks_of_types(config)


# Mistral-Small-4: a softmax, and queries that grow with their position.


def _mistral_needs(model: ModelSpec) -> Iterator[Need]:
    yield from _deepseek_needs(model)
    yield "query_growth", model.query_growth > 0, ["more than 0"]
    yield "router.softmax", model.router.softmax == "before_topk", ["before_topk"]
    scaling = model.rope_scaling  # whose code takes the width of all of a head for other kinds
    yield "rope_scaling", scaling is not None and scaling.kind == "yarn", ["one with kind=yarn"]
    legal = [scaling.original_positions if scaling else None]
    yield "query_growth_positions", model.query_growth_positions in legal, legal


def _mistral_config(model: ModelSpec) -> Values:
    growth = {"llama_4_scaling_beta": model.query_growth, "original_max_position_embeddings": model.query_growth_positions}
    rope = {**rope_config(model)["rope_parameters"], **growth, "partial_rotary_factor": (model.rope_dim or 0) / model.head_dim}
    return {
        **_deepseek_config(model),
        "n_group": 1,
        "topk_group": 1,
        **normalized(model),
        "rope_parameters": rope,
        "rope_scaling": rope,
    }


def _mistral_model(config: Values) -> Values:
    rope = config["rope_parameters"]
    return {
        **_deepseek_model(config), **before_topk(config), "rope_pairs": "interleaved" if config["rope_interleave"] else "halves",
        "query_growth": rope["llama_4_scaling_beta"], "query_growth_positions": rope["original_max_position_embeddings"],
    }  # fmt: skip


# Kimi Linear: Kimi Delta Attention in most blocks. The others have the attention of DeepSeek-V3, and know no positions.


def _kimi_needs(model: ModelSpec) -> Iterator[Need]:
    yield "latent_rank", model.latent_rank > 0, ["at least 1"]
    yield "latent_norm_eps", (model.latent_norm_eps or model.norm_eps) == _NARROW_EPS, [_NARROW_EPS]
    yield shares_experts(model)
    yield full_or_linear(model)
    yield full_without_positions(model)
    if spec := model.linear:
        yield "linear_key_heads", spec.kv_heads == spec.heads, [spec.heads]
        yield "linear_value_dim", spec.value_dim == spec.key_dim, [spec.key_dim]


def _kimi_config(model: ModelSpec) -> Values:
    spec, windows = model.linear, windows_of(model)
    assert spec
    numbers = {kind: [block for block, window in enumerate(windows, 1) if window == kind] for kind in ("full", "linear")}
    linear = {
        "full_attn_layers": numbers["full"], "kda_layers": numbers["linear"], "head_dim": spec.key_dim, "num_heads": spec.heads,
        "short_conv_kernel_size": model.linear_taps,
    }  # fmt: skip
    return {
        "q_lora_rank": model.latent_query_rank or None, "qk_nope_head_dim": model.head_dim - (model.rope_dim or 0),
        "num_shared_experts": model.shared_hidden // model.expert_hidden, "linear_attn_config": linear,
    }  # fmt: skip


def _kimi_model(config: Values) -> Values:
    heads, width = config["linear_num_heads"], config["linear_head_dim"]
    return {
        **_deepseek_model(config), **blocks_of_types(config), **windows_with_linear(config), "full_positions": "none",
        "linear_kind": "kimi_delta", "linear_heads": heads, "linear_key_dim": width,
        "linear_taps": config["linear_conv_kernel_dim"], "router.score": "sigmoid",
    }  # fmt: skip


_KIMI_MIXTURE = mlp("shared_experts", SCORE_BIAS, part="block_sparse_moe", matrices=("w1", "w3", "w2"))


def _kimi_block(model: ModelSpec, layer: int) -> Iterator[Tensor]:
    return (_KIMI_MIXTURE if model.is_moe(layer) else mlp())(model, layer)


_DEEPSEEK: dict[str, str | None] = {
    "topk": "num_experts_per_tok", "experts": "n_routed_experts", "expert_hidden": "moe_intermediate_size",
    "ffn_hidden": "intermediate_size", "dense_first": "first_k_dense_replace", "router.scale": "routed_scaling_factor",
    "latent_rank": "kv_lora_rank", "value_dim": "v_head_dim", "rope_dim": "qk_rope_head_dim", "head_dim": None,
}  # fmt: skip
_ANY: dict[str, None] = {"router.scale": None, "router.groups": None}


WITH_LATENT = (
    Family(
        "deepseek_v2", "DeepseekV2ForCausalLM", _DEEPSEEK | {"router.balance_loss": "aux_loss_alpha"},
        {"attention_bias": False, "mlp_bias": False},
        SOFTMAX | _ANY | {"moe_every": [1], "rope_pairs": ["interleaved"]}, mlp("shared_experts"),
        _deepseek2_needs, _deepseek2_config, _deepseek2_model,
    ),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", _DEEPSEEK, {"attention_bias": False},
        BY_SCORES | _ANY | {"moe_every": [1], "rope_pairs": ["halves", "interleaved"], "mtp_depth": None},
        mlp("shared_experts", SCORE_BIAS), _deepseek_needs, _deepseek3_config, _deepseek3_model, ("kimi_k2",),
    ),
    Family(
        "glm4_moe_lite", "Glm4MoeLiteForCausalLM", _DEEPSEEK | {"dense_first": None}, {"attention_bias": False},
        BY_SCORES | _ANY | {"moe_every": None, "rope_pairs": ["halves", "interleaved"], "mtp_depth": None},
        mlp("shared_experts", SCORE_BIAS), _deepseek_needs, _glm_lite_config, _glm_lite_model,
    ),
    Family(
        "mistral4", "Mistral4ForCausalLM", _DEEPSEEK, {"attention_bias": False, "n_group": 1},
        SOFTMAX | {"router.scale": None, "moe_every": [1], "rope_pairs": ["halves", "interleaved"], "query_growth": None},
        mlp("shared_experts", stack=True), _mistral_needs, _mistral_config, _mistral_model,
    ),
    Family(
        "kimi_linear", "KimiLinearForCausalLM",
        _DEEPSEEK | {"topk": "num_experts_per_token", "experts": "num_experts", "router.normalize": "moe_renormalize",
                     "router.groups": "num_expert_group", "router.topk_groups": "topk_group"},
        {"attention_bias": False, "mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"},
        BY_SCORES | _ANY | {"moe_every": [1], "linear_kind": ["kimi_delta"], "full_positions": None,
                            "rope_pairs": ["halves", "interleaved"]},
        _kimi_block, _kimi_needs, _kimi_config, _kimi_model, called={".linear_attn.": ".self_attn."}, linear=kimi_delta,
    ),
)  # fmt: skip
KIMI_AS_WRITTEN = WITH_LATENT[-1]._replace(block=_KIMI_MIXTURE, holds=".block_sparse_moe.gate_proj.weight", leaves="kimi_linear")
"""Kimi Linear as transformers writes it: dense networks have the names of mixtures."""
