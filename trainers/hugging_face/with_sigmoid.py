"""Families whose routers score every expert by itself, with a sigmoid."""

from __future__ import annotations

from collections.abc import Iterator

from foldray.blueprint import ModelSpec
from trainers.hugging_face.family import Family, Need, Values, rope_config
from trainers.hugging_face.names import SCORE_BIAS, Tensor, mlp, sparse_moe
from trainers.hugging_face.rows import (
    BALANCED,
    BY_SCORES,
    NO_DENSE,
    SIGMOID,
    TOPK,
    blocks_of_types,
    dense_layers,
    expert_groups,
    full_without_positions,
    layer_types,
    layer_windows,
    mlp_types,
    one_sliding_width,
    sees_everything,
    shared_experts,
    shares_experts,
    step_blocks,
    turns_whole_heads,
)

# GLM-4.5: sigmoid scores with a bias, a shared expert, dense blocks at the start, and heads that may turn in part.


def _glm_needs(model: ModelSpec) -> Iterator[Need]:
    yield sees_everything(model)
    yield shares_experts(model)


def _glm_config(model: ModelSpec) -> Values:
    share = (model.rope_dim or model.head_dim) / model.head_dim
    rope = {**rope_config(model)["rope_parameters"], "partial_rotary_factor": share}
    return {
        "n_shared_experts": model.shared_hidden // model.expert_hidden, "attention_bias": model.attention_bias == "inputs",
        "use_qk_norm": model.qk_norm == "head", "partial_rotary_factor": share, "rope_parameters": rope,
        "num_nextn_predict_layers": model.mtp_depth,
    }  # fmt: skip


def _glm_model(config: Values) -> Values:
    return {
        "shared_hidden": config["n_shared_experts"] * config["moe_intermediate_size"], "router.score": "sigmoid",
        "attention_bias": "inputs" if config["attention_bias"] else "none",
        "qk_norm": "head" if config["use_qk_norm"] else "none", "moe_every": 1,
    }  # fmt: skip


# MiniMax-M2: sigmoid scores with a bias, a norm of all heads' queries and of all heads' keys, and heads that turn in part.


def _minimax_needs(model: ModelSpec) -> Iterator[Need]:
    yield sees_everything(model)
    yield "router.normalize", model.router.normalize, [True]


def _minimax_config(model: ModelSpec) -> Values:
    return {"rotary_dim": model.rope_dim or model.head_dim}


def _minimax_model(config: Values) -> Values:
    router = {"router.score": "sigmoid", "router.normalize": True}
    return {"qk_norm": "all", "ffn_hidden": config["intermediate_size"], **router}


# dots.llm1: a norm of each head's queries and keys, and groups of experts.


def _dots_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield one_sliding_width(model)
    yield shares_experts(model)


def _dots_config(model: ModelSpec) -> Values:
    return {
        "n_shared_experts": model.shared_hidden // model.expert_hidden, "attention_bias": model.attention_bias == "all",
        **layer_types(model), **expert_groups(model),
    }  # fmt: skip


def _dots_model(config: Values) -> Values:
    return {
        **shared_experts(config), **layer_windows(config), "router.score": "sigmoid", "router.groups": config["n_group"],
        "router.topk_groups": config["topk_group"], "attention_bias": "all" if config["attention_bias"] else "none",
        "qk_norm": "head", "moe_every": 1,
    }  # fmt: skip


# Hy3: the same attention, weights that always sum to their scale, and a list of dense blocks.


def _hy_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield sees_everything(model)
    yield shares_experts(model)
    yield "router.normalize", model.router.normalize, [True]


def _hy_config(model: ModelSpec) -> Values:
    shared = model.shared_hidden // model.expert_hidden
    return {"num_shared_experts": shared, "attention_bias": model.attention_bias == "all", **mlp_types(model)}


def _hy_model(config: Values) -> Values:
    return {
        **shared_experts(config, "num_shared_experts"), **blocks_of_types(config), "router.score": "sigmoid",
        "router.normalize": True, "attention_bias": "all" if config["attention_bias"] else "none", "qk_norm": "head",
    }  # fmt: skip


# Solar-Open: GLM-4.5 with experts in every block, and heads that turn as a whole.


def _solar_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield from _glm_needs(model)


def _solar_config(model: ModelSpec) -> Values:
    return {
        "n_shared_experts": model.shared_hidden // model.expert_hidden, "attention_bias": model.attention_bias == "inputs",
        **expert_groups(model),
    }  # fmt: skip


def _solar_model(config: Values) -> Values:
    return {
        **shared_experts(config), "ffn_hidden": config["moe_intermediate_size"], "router.score": "sigmoid",
        "router.groups": config["n_group"], "router.topk_groups": config["topk_group"],
        "attention_bias": "inputs" if config["attention_bias"] else "none",
    }  # fmt: skip


# EXAONE-MoE: windows with rotary positions, between blocks that see everything and know no positions.


def _exaone_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield one_sliding_width(model)
    yield shares_experts(model)
    yield full_without_positions(model)


def _exaone_config(model: ModelSpec) -> Values:
    shared = {"num_shared_experts": model.shared_hidden // model.expert_hidden}
    return shared | layer_types(model) | expert_groups(model) | mlp_types(model)


def _exaone_model(config: Values) -> Values:
    return {
        **shared_experts(config, "num_shared_experts"), **blocks_of_types(config), **layer_windows(config),
        "full_positions": "none", "router.score": "sigmoid", "router.groups": config["n_group"],
        "router.topk_groups": config["topk_group"], "qk_norm": "head",
    }  # fmt: skip


# Flint: the same positions, scores that take a share of every softmax, and no selection bias.


def _flint_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield one_sliding_width(model)
    yield "shared_hidden", model.shared_hidden > 0, ["at least 1"]
    yield full_without_positions(model)
    yield "router.bias_rate", model.router.bias_rate == 0, [0]


def _flint_config(model: ModelSpec) -> Values:
    dense = {"decoder_sparse_step": 1, "mlp_only_layers": dense_layers(model)}
    return {"attention_bias": model.attention_bias == "all", **dense, **layer_types(model)}


def _flint_model(config: Values) -> Values:
    return {
        "attention_bias": "all" if config["attention_bias"] else "none", "qk_norm": "head", "attention_sinks": True,
        "full_positions": "none", "router.score": "sigmoid", **layer_windows(config), **step_blocks(config),
    }  # fmt: skip


# Trinity: the same positions, a gate on what heads put out, norms before and after, and embeddings that may be multiplied.


def _trinity_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield one_sliding_width(model)
    yield shares_experts(model)
    yield full_without_positions(model)
    factors = [1.0, model.hidden**0.5]
    yield "embedding_scale", model.embedding_scale in factors, factors
    yield "router.normalize", model.router.normalize, [True]


def _trinity_config(model: ModelSpec) -> Values:
    return {
        "num_shared_experts": model.shared_hidden // model.expert_hidden, "attention_bias": model.attention_bias == "all",
        "mup_enabled": model.embedding_scale != 1, **layer_types(model),
    }  # fmt: skip


def _trinity_model(config: Values) -> Values:
    return {
        **shared_experts(config, "num_shared_experts"), **layer_windows(config), "full_positions": "none", "norms": "both",
        "attention_gate": "element", "embedding_scale": config["hidden_size"] ** 0.5 if config["mup_enabled"] else 1.0,
        "qk_norm": "head", "router.score": "sigmoid", "router.normalize": True,
        "attention_bias": "all" if config["attention_bias"] else "none",
    }  # fmt: skip


_ROUTED = {
    "topk": "num_experts_per_tok", "experts": "n_routed_experts", "expert_hidden": "moe_intermediate_size",
    "router.normalize": "norm_topk_prob", "router.scale": "routed_scaling_factor",
}  # fmt: skip
_FROM_FIRST = {"ffn_hidden": "intermediate_size", "dense_first": "first_k_dense_replace"}

WITH_SIGMOID = (
    Family(
        "glm4_moe", "Glm4MoeForCausalLM",
        _ROUTED | _FROM_FIRST, {"n_group": 1, "topk_group": 1},
        BY_SCORES | {"moe_every": [1], "qk_norm": ["none", "head"], "attention_bias": ["none", "inputs"], "mtp_depth": None},
        mlp("shared_experts", SCORE_BIAS), _glm_needs, _glm_config, _glm_model,
    ),
    Family(
        "minimax_m2", "MiniMaxM2ForCausalLM",
        BALANCED | {"topk": "num_experts_per_tok", "experts": "num_local_experts", "expert_hidden": "intermediate_size"},
        {"router_jitter_noise": 0.0},
        SIGMOID | NO_DENSE | {"shared_hidden": [0], "qk_norm": ["all"],
                                "router.selection_bias": [False, True]},
        sparse_moe(Tensor("e_score_correction_bias", "")), _minimax_needs, _minimax_config, _minimax_model,
    ),
    Family(
        "dots1", "Dots1ForCausalLM", _ROUTED | _FROM_FIRST, {},
        BY_SCORES | {"moe_every": [1], "qk_norm": ["head"], "attention_bias": ["none", "all"], "router.groups": None},
        mlp("shared_experts", SCORE_BIAS), _dots_needs, _dots_config, _dots_model,
    ),
    Family(
        "hy_v3", "HYV3ForCausalLM", TOPK | {"ffn_hidden": "intermediate_size", "router.scale": "router_scaling_factor"},
        {"mlp_bias": False}, BY_SCORES | {"qk_norm": ["head"], "attention_bias": ["none", "all"]},
        mlp("shared_mlp", Tensor("expert_bias", ""), router="router.gate"), _hy_needs, _hy_config, _hy_model,
    ),
    Family(
        "solar_open", "SolarOpenForCausalLM", _ROUTED, {},
        BY_SCORES | NO_DENSE | {"attention_bias": ["none", "inputs"], "router.groups": None},
        mlp("shared_experts", SCORE_BIAS), _solar_needs, _solar_config, _solar_model,
    ),
    Family(
        "exaone_moe", "ExaoneMoeForCausalLM",
        _ROUTED | TOPK | {"ffn_hidden": "intermediate_size"}, {},
        BY_SCORES | {"qk_norm": ["head"], "router.groups": None, "full_positions": None},
        mlp("shared_experts", Tensor("e_score_correction_bias", "")), _exaone_needs, _exaone_config, _exaone_model,
        ahead=("mtp.",),
    ),
    Family(
        "flint", "FlintForCausalLM",
        BALANCED | TOPK | {"ffn_hidden": "intermediate_size", "shared_hidden": "shared_expert_intermediate_size",
                           "router.normalize": "norm_topk_prob"}, {},
        SIGMOID | {"qk_norm": ["head"], "attention_bias": ["none", "all"], "attention_sinks": [True], "full_positions": None},
        mlp("shared_expert"), _flint_needs, _flint_config, _flint_model, called={"self_attn.sinks": "self_attn.softmax_offset"},
    ),
    Family(
        "afmoe", "AfmoeForCausalLM",
        TOPK | {"ffn_hidden": "intermediate_size", "dense_first": "num_dense_layers", "router.scale": "route_scale"}, {},
        BY_SCORES | {"moe_every": [1], "qk_norm": ["head"], "attention_bias": ["none", "all"], "full_positions": None,
                     "norms": ["both"], "attention_gate": ["element"], "embedding_scale": None},
        mlp("shared_experts", Tensor("expert_bias", ""), router="router.gate"), _trinity_needs, _trinity_config, _trinity_model,
        called={"pre_feedforward_layernorm": "pre_mlp_layernorm", "post_feedforward_layernorm": "post_mlp_layernorm"},
    ),
)  # fmt: skip
