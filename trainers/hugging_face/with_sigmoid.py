"""Families whose routers score every expert by itself, with a sigmoid."""

from __future__ import annotations

from collections.abc import Iterator

from foldray.blueprint import ModelSpec
from trainers.hugging_face.family import (
    BALANCED,
    NO_DENSE,
    SIGMOID,
    Family,
    Need,
    Values,
    rope_config,
    sees_everything,
    shares_experts,
)
from trainers.hugging_face.names import SCORE_BIAS, Tensor, mlp, sparse_moe

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


WITH_SIGMOID = (
    Family(
        "glm4_moe", "Glm4MoeForCausalLM",
        {"topk": "num_experts_per_tok", "experts": "n_routed_experts", "expert_hidden": "moe_intermediate_size",
         "ffn_hidden": "intermediate_size", "dense_first": "first_k_dense_replace", "router.normalize": "norm_topk_prob",
         "router.scale": "routed_scaling_factor"},
        {"n_group": 1, "topk_group": 1},
        SIGMOID | {"moe_every": [1], "qk_norm": ["none", "head"], "attention_bias": ["none", "inputs"],
                    "router.selection_bias": [False, True], "router.scale": None, "mtp_depth": None},
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
)  # fmt: skip
