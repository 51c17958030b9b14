"""A family of transformers as a user would add it. foldray's own table has a row for the same models."""

from __future__ import annotations

from collections.abc import Iterator

from foldray.blueprint import ModelSpec
from trainers.hugging_face.family import Family, Need, Values
from trainers.hugging_face.names import Tensor, mlp
from trainers.hugging_face.rows import layer_types, layer_windows, one_sliding_width, turns_whole_heads


def _needs(model: ModelSpec) -> Iterator[Need]:
    yield turns_whole_heads(model)
    yield one_sliding_width(model)
    yield "shared_hidden", model.shared_hidden % model.expert_hidden == 0, [f"a multiple of {model.expert_hidden}"]


def _config(model: ModelSpec) -> Values:
    shared = model.shared_hidden // model.expert_hidden
    return {"n_shared_experts": shared, "attention_bias": model.attention_bias == "all", **layer_types(model)}


def _model(config: Values) -> Values:
    return {
        "shared_hidden": config["n_shared_experts"] * config["moe_intermediate_size"], "router.score": "sigmoid",
        "attention_bias": "all" if config["attention_bias"] else "none", "qk_norm": "head", "moe_every": 1,
        **layer_windows(config),
    }  # fmt: skip


DOTS = Family(
    "dots1", "Dots1ForCausalLM",
    {"topk": "num_experts_per_tok", "experts": "n_routed_experts", "expert_hidden": "moe_intermediate_size",
     "ffn_hidden": "intermediate_size", "dense_first": "first_k_dense_replace", "router.normalize": "norm_topk_prob",
     "router.scale": "routed_scaling_factor"},
    {"n_group": 1, "topk_group": 1},
    {"router.score": ["sigmoid"], "moe_every": [1], "qk_norm": ["head"], "attention_bias": ["none", "all"],
     "router.selection_bias": [False, True], "router.scale": None},
    mlp("shared_experts", Tensor("gate.e_score_correction_bias", "")),
    _needs, _config, _model,
)  # fmt: skip
