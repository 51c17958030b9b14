"""The table of the families of models in Hugging Face's transformers that foldray's models can be told as."""

from __future__ import annotations

from collections.abc import Iterator

from foldray.blueprint import ModelSpec, parameter_table
from foldray.errors import UserError
from foldray.tables import find_row
from trainers.hugging_face.family import (
    Family,
    Need,
    Values,
    dense_blocks,
    dense_layers,
    layer_types,
    layer_windows,
    model_window,
    one_sliding_width,
    one_window,
    rope_config,
    sees_everything,
    turns_whole_heads,
    value_at,
    weighs_to_one,
)
from trainers.hugging_face.names import Tensor, mlp, sparse_moe, stacked

_TOPK = {"topk": "num_experts_per_tok", "experts": "num_experts", "expert_hidden": "moe_intermediate_size"}
_BALANCE = {"router.balance_loss": "router_aux_loss_coef"}
_SOFTMAX, _SIGMOID = {"router.score": ["softmax"]}, {"router.score": ["sigmoid"]}
_NO_DENSE = {"dense_first": [0], "moe_every": [1]}
_BIAS = Tensor("gate.e_score_correction_bias", "")


def own_family(name: str | None) -> Family | None:
    """Return the user's own family that `export.family` names."""
    return None if name is None else find_row("export.family", {}, Family, name)


def family_of(model: ModelSpec, own: Family | None = None) -> Family:
    """Return the family that a model belongs to: the user's own one, if there is one, or one of the table."""
    families = FAMILIES if own is None else (own,)
    nearest = min(families, key=lambda family: len(family.misses(model)))
    if missing := nearest.misses(model):
        key, legal = missing[0]
        known = ", ".join(family.architecture for family in families)
        rule = f"is in no model that transformers knows and foldray exports ({known})"
        raise UserError(f"model.{key}", value_at(model, key), rule, list(legal))
    return nearest


def tensors_of(family: Family, model: ModelSpec) -> list[Tensor]:
    """Return all tensors of a model. Every parameter is in one of them, and every router's bias if it chooses experts.

    The routers of a dense family's models are in none.
    """
    tensors = list(family.tensors(model))
    ours = sorted(tensor.ours for tensor in tensors if not tensor.ours.endswith(".router.bias"))
    wanted = (row.name for row in parameter_table(model) if not (family.dense and row.name.endswith(".router.weight")))
    assert ours == sorted(wanted), f"{family.model_type} leaves out a parameter"
    return tensors


def _normalized(model: ModelSpec) -> Values:
    return {"norm_topk_prob": weighs_to_one(model)}


def _before(config: Values) -> Values:
    """Return the router of families whose softmax runs over all experts."""
    return {"router.softmax": "before_topk", "router.normalize": config["norm_topk_prob"]}


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
        "use_sliding_window": "sliding_window" in windows, **windows, **_normalized(model),
    }  # fmt: skip


def _qwen2_model(config: Values) -> Values:
    return {
        "attention_bias": "inputs" if config["qkv_bias"] else "none", "shared_gate": True,
        **layer_windows(config), **_qwen_blocks(config), **_before(config),
    }  # fmt: skip


def _qwen_blocks(config: Values) -> Values:
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"]
    return dense_blocks(config, lambda layer: layer not in dense and (layer + 1) % step == 0)


# Qwen3-MoE: a norm of each head's queries and keys.


def _qwen3_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield one_window(model)


def _qwen3_config(model: ModelSpec) -> Values:
    window = _whole_window(model)
    return {
        "attention_bias": model.attention_bias == "all", "decoder_sparse_step": 1, "mlp_only_layers": dense_layers(model),
        "use_sliding_window": window["sliding_window"] is not None, **window, **_normalized(model),
    }  # fmt: skip


def _qwen3_model(config: Values) -> Values:
    return {
        "attention_bias": "all" if config["attention_bias"] else "none", "qk_norm": "head",
        **model_window(config), **_qwen_blocks(config), **_before(config),
    }  # fmt: skip


# OLMoE: a norm of all heads' queries, and one of all heads' keys.


def _olmoe_needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield sees_everything(model)
    yield "head_dim", model.head_dim * model.heads == model.hidden, [f"hidden / heads = {model.hidden / model.heads:g}"]


def _olmoe_config(model: ModelSpec) -> Values:
    return {"attention_bias": model.attention_bias == "all", **_normalized(model)}


def _olmoe_model(config: Values) -> Values:
    bias = "all" if config["attention_bias"] else "none"
    return {"attention_bias": bias, "qk_norm": "all", "ffn_hidden": config["intermediate_size"], **_before(config)}


# GLM-4.5: sigmoid scores with a bias, a shared expert, dense blocks at the start, and heads that may turn in part.


def _glm_needs(model: ModelSpec) -> Iterator[Need]:
    yield sees_everything(model)
    yield _shares_experts(model)


def _shares_experts(model: ModelSpec) -> Need:
    several = model.shared_hidden > 0 and model.shared_hidden % model.expert_hidden == 0
    return "shared_hidden", several, [f"a multiple of expert_hidden={model.expert_hidden}"]


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


# DeepSeek: latent attention, shared experts, and groups of experts. The norms of narrow vectors add a number of their own.


def _deepseek_needs(model: ModelSpec) -> Iterator[Need]:
    yield "latent_rank", model.latent_rank > 0, ["at least 1"]
    yield _shares_experts(model)
    yield sees_everything(model)
    yield "norm_eps", model.norm_eps == 1e-6, [1e-6]


def _deepseek2_needs(model: ModelSpec) -> Iterator[Need]:
    yield from _deepseek_needs(model)
    yield "router.normalize", not weighs_to_one(model), [False]
    yield "heads", model.hidden % model.heads == 0, [f"a divisor of hidden={model.hidden}"]


def _deepseek_config(model: ModelSpec) -> Values:
    return {
        "q_lora_rank": model.latent_query_rank or None, "qk_nope_head_dim": model.head_dim - (model.rope_dim or 0),
        "n_shared_experts": model.shared_hidden // model.expert_hidden,
    }  # fmt: skip


def _deepseek2_config(model: ModelSpec) -> Values:
    groups, given = model.router.groups, _deepseek_config(model)
    limited = {"n_group": groups, "topk_group": model.router.topk_groups, "topk_method": "group_limited_greedy"}
    return given | (limited if groups > 1 else {"topk_method": "greedy"})


def _deepseek3_config(model: ModelSpec) -> Values:
    router = {"n_group": model.router.groups, "topk_group": model.router.topk_groups, "norm_topk_prob": model.router.normalize}
    turning = {"rope_interleave": model.rope_pairs == "interleaved", "num_nextn_predict_layers": model.mtp_depth}
    return _deepseek_config(model) | router | turning


def _deepseek_model(config: Values) -> Values:
    return {
        "latent_query_rank": config["q_lora_rank"] or 0, "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "rope_dim": config["qk_rope_head_dim"], "shared_hidden": config["n_shared_experts"] * config["moe_intermediate_size"],
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


_DEEPSEEK: dict[str, str | None] = {
    "topk": "num_experts_per_tok", "experts": "n_routed_experts", "expert_hidden": "moe_intermediate_size",
    "ffn_hidden": "intermediate_size", "dense_first": "first_k_dense_replace", "router.scale": "routed_scaling_factor",
    "latent_rank": "kv_lora_rank", "value_dim": "v_head_dim", "rope_dim": "qk_rope_head_dim", "head_dim": None,
}  # fmt: skip
_ANY: dict[str, None] = {"router.scale": None, "router.groups": None}

FAMILIES = (
    Family(
        "mixtral", "MixtralForCausalLM",
        _BALANCE | {"topk": "num_experts_per_tok", "experts": "num_local_experts", "expert_hidden": "intermediate_size"},
        {}, _SOFTMAX | _NO_DENSE | {"shared_hidden": [0]}, sparse_moe(), _mixtral_needs, _whole_window, _mixtral_model,
    ),
    Family(
        "qwen2_moe", "Qwen2MoeForCausalLM",
        _BALANCE | _TOPK | {"ffn_hidden": "intermediate_size", "shared_hidden": "shared_expert_intermediate_size"},
        {}, _SOFTMAX | {"shared_gate": [True], "attention_bias": ["none", "inputs"]}, mlp("shared_expert"),
        _qwen2_needs, _qwen2_config, _qwen2_model,
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", _BALANCE | _TOPK | {"ffn_hidden": "intermediate_size"},
        {}, _SOFTMAX | {"shared_hidden": [0], "qk_norm": ["head"], "attention_bias": ["none", "all"]}, mlp(),
        _qwen3_needs, _qwen3_config, _qwen3_model,
    ),
    Family(
        "olmoe", "OlmoeForCausalLM", _BALANCE | _TOPK | {"expert_hidden": "intermediate_size"},
        {"clip_qkv": None},
        _SOFTMAX | _NO_DENSE | {"shared_hidden": [0], "qk_norm": ["all"], "attention_bias": ["none", "all"]},
        mlp(), _olmoe_needs, _olmoe_config, _olmoe_model,
    ),
    Family(
        "glm4_moe", "Glm4MoeForCausalLM",
        {"topk": "num_experts_per_tok", "experts": "n_routed_experts", "expert_hidden": "moe_intermediate_size",
         "ffn_hidden": "intermediate_size", "dense_first": "first_k_dense_replace", "router.normalize": "norm_topk_prob",
         "router.scale": "routed_scaling_factor"},
        {"n_group": 1, "topk_group": 1},
        _SIGMOID | {"moe_every": [1], "qk_norm": ["none", "head"], "attention_bias": ["none", "inputs"],
                    "router.selection_bias": [False, True], "router.scale": None, "mtp_depth": None},
        mlp("shared_experts", _BIAS), _glm_needs, _glm_config, _glm_model,
    ),
    Family(
        "minimax_m2", "MiniMaxM2ForCausalLM",
        _BALANCE | {"topk": "num_experts_per_tok", "experts": "num_local_experts", "expert_hidden": "intermediate_size"},
        {"router_jitter_noise": 0.0},
        _SIGMOID | _NO_DENSE | {"shared_hidden": [0], "qk_norm": ["all"],
                                "router.selection_bias": [False, True]},
        sparse_moe(Tensor("e_score_correction_bias", "")), _minimax_needs, _minimax_config, _minimax_model,
    ),
    Family(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
        _BALANCE | {"topk": "moe_k", "experts": "moe_num_experts", "expert_hidden": "moe_intermediate_size",
                    "ffn_hidden": "intermediate_size"},
        {"use_bias": False, "moe_norm_min": 1e-12},
        _SOFTMAX | {"router.selection_bias": [True], "rope_pairs": ["interleaved"]},
        mlp("shared_experts", _BIAS._replace(name="moe_statics.e_score_correction_bias", axes=1)),
        _ernie_needs, _ernie_config, _ernie_model, ahead=("model.mtp_",),
    ),
    Family(
        "gpt_oss", "GptOssForCausalLM",
        _BALANCE | {"topk": "num_experts_per_tok", "experts": "num_local_experts", "expert_hidden": "intermediate_size"},
        {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        _SOFTMAX | _NO_DENSE | {"shared_hidden": [0], "attention_bias": ["none", "all"], "attention_sinks": [True],
                                "expert_bias": [True], "ffn": ["gated_clamped"], "router.logit_bias": [True]},
        stacked, _gpt_oss_needs, _gpt_oss_config, _gpt_oss_model,
    ),
    Family(
        "deepseek_v2", "DeepseekV2ForCausalLM", _DEEPSEEK | {"router.balance_loss": "aux_loss_alpha"},
        {"attention_bias": False, "mlp_bias": False},
        _SOFTMAX | _ANY | {"moe_every": [1], "rope_pairs": ["interleaved"]}, mlp("shared_experts"),
        _deepseek2_needs, _deepseek2_config, _deepseek2_model,
    ),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", _DEEPSEEK, {"attention_bias": False},
        _SIGMOID | _ANY | {"moe_every": [1], "rope_pairs": ["halves", "interleaved"], "router.selection_bias": [False, True],
                           "mtp_depth": None},
        mlp("shared_experts", _BIAS), _deepseek_needs, _deepseek3_config, _deepseek3_model, ("kimi_k2",),
    ),
)  # fmt: skip
