"""The families of models in Hugging Face's transformers that foldray's models can be told as.

A family says which models belong to it, what their `config.json` holds, and how their tensors are called. transformers keeps
matrices as [out, in], foldray as [in, out].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from foldray.blueprint import ModelSpec, parameter_table
from foldray.errors import UserError


class Tensor(NamedTuple):
    """A tensor of a family.

    Args:
        name: its name in the files of transformers.
        ours: the global name of the same parameter (`foldray.blueprint.parameters`).
        turned: whether rows and columns change places.
        keeps: whether it stays in the type that training has it in.
    """

    name: str
    ours: str
    turned: bool = False
    keeps: bool = False


Need = tuple[str, bool, list[Any]]
"""A key of `model`, whether the model has what a family has, and the values that the family has."""


class Family(NamedTuple):
    """A family of models.

    Args:
        model_type: its name in `config.json`.
        architecture: the class in transformers.
        needs: what a model of the family has.
        config: the model's own part of `config.json`.
        model: the keys of `model` for a `config.json`, with all defaults of transformers in it.
        tensors: all tensors.
    """

    model_type: str
    architecture: str
    needs: Callable[[ModelSpec], Iterator[Need]]
    config: Callable[[ModelSpec], dict[str, Any]]
    model: Callable[[dict[str, Any]], dict[str, Any]]
    tensors: Callable[[ModelSpec], Iterator[Tensor]]


def family_of(model: ModelSpec) -> Family:
    """Return the family that a model belongs to.

    Raises:
        UserError: it belongs to none. The message names the key of the model in which it differs from the nearest family.
    """
    found = [[(key, legal) for key, holds, legal in family.needs(model) if not holds] for family in FAMILIES]
    missing, family = min(zip(found, FAMILIES, strict=True), key=lambda each: len(each[0]))
    if missing:
        key, legal = missing[0]
        value: Any = model
        for part in key.split("."):
            value = getattr(value, part)
        known = ", ".join(each.architecture for each in FAMILIES)
        rule = f"is in no model that transformers knows and foldray exports ({known})"
        raise UserError(f"model.{key}", value, rule, legal)
    return family


def tensors_of(family: Family, model: ModelSpec) -> list[Tensor]:
    """Return all tensors of a model. Every parameter is in one of them, and every router's bias if it chooses experts."""
    found = list(family.tensors(model))
    ours = sorted(each.ours for each in found if not each.ours.endswith(".router.bias"))
    assert ours == sorted(row.name for row in parameter_table(model)), f"{family.model_type} leaves out a parameter"
    return found


def _common_needs(model: ModelSpec) -> Iterator[Need]:
    yield "norm", model.norm == "rmsnorm", ["rmsnorm"]
    yield "positions", model.positions == "rope", ["rope"]
    yield "ffn", model.ffn == "gated_silu", ["gated_silu"]
    yield "moe_every", model.moe_every == 1, [1]
    yield "value_dim", model.value_dim in (None, model.head_dim), ["null"]


def _common_config(model: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "num_experts_per_tok": model.topk,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_std,
        "output_router_logits": False,
    }


def _common_model(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab": config["vocab_size"],
        "hidden": config["hidden_size"],
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_dim": head_dim(config),
        "topk": config["num_experts_per_tok"],
        "norm_eps": config["rms_norm_eps"],
        "tied_embeddings": config["tie_word_embeddings"],
        "init_std": config["initializer_range"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "ffn_hidden": config["intermediate_size"],
        "moe_every": 1,
    }


def head_dim(config: dict[str, Any]) -> int:
    """Return the width of a head. transformers derives it from the model's width, if `config.json` does not say it."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _tensors(model: ModelSpec, block: Callable[[ModelSpec, int], Iterator[Tensor]]) -> Iterator[Tensor]:
    """Yield the tensors that all families call alike, and those of every block's feed-forward part."""
    yield Tensor("model.embed_tokens.weight", "embedding.weight")
    for layer in range(model.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        yield Tensor(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight")
        for letter, part in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
            yield Tensor(f"{theirs}.self_attn.{letter}_proj.weight", f"{ours}.attention.{part}", True)
        yield Tensor(f"{theirs}.post_attention_layernorm.weight", f"{ours}.ffn_norm.weight")
        yield from block(model, layer)
    yield Tensor("model.norm.weight", "final_norm.weight")
    if not model.tied_embeddings:
        yield Tensor("lm_head.weight", "head.weight")


# Mixtral: every block has experts, and the weights of a token's experts are the softmax of their logits.


def _mixtral_needs(model: ModelSpec) -> Iterator[Need]:
    router = model.router
    yield from _common_needs(model)
    yield "router.score", router.score == "softmax", ["softmax"]
    # The softmax of the chosen logits is the softmax of all of them, rescaled to a sum of 1.
    yield "router.normalize", router.softmax == "after_topk" or router.normalize, [True]
    yield "router.scale", router.scale == 1, [1.0]
    yield "dense_first", model.dense_first == 0, [0]
    yield "shared_hidden", model.shared_hidden == 0, [0]
    window, *others = set(model.windows)
    yield "windows", not others and window.split(":")[0] in ("full", "sliding"), ["full", "sliding:TOKENS"]


def _mixtral_config(model: ModelSpec) -> dict[str, Any]:
    kind, _, tokens = model.windows[0].partition(":")
    return _common_config(model) | {
        "intermediate_size": model.expert_hidden,
        "num_local_experts": model.experts,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "sliding_window": int(tokens) if kind == "sliding" else None,
        "router_aux_loss_coef": model.router.balance_loss,
    }


def _mixtral_model(config: dict[str, Any]) -> dict[str, Any]:
    window = config["sliding_window"]
    return _common_model(config) | {
        "expert_hidden": config["intermediate_size"],
        "experts": config["num_local_experts"],
        "windows": [f"sliding:{window}" if window else "full"],
        "router": {"balance_loss": config["router_aux_loss_coef"]},
    }


def _mixtral_block(model: ModelSpec, layer: int) -> Iterator[Tensor]:
    theirs, ours = f"model.layers.{layer}.block_sparse_moe", f"blocks.{layer}.moe"
    yield Tensor(f"{theirs}.gate.weight", f"{ours}.router.weight", True)
    for expert in range(model.experts):
        for number, part in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            yield Tensor(f"{theirs}.experts.{expert}.{number}.weight", f"{ours}.experts.{expert}.{part}", True)


# GLM-4.5 without its norm of queries and keys, as in GLM-4.5-Air: sigmoid scores with a bias, a shared expert, and dense blocks
# at the start.


def _glm_needs(model: ModelSpec) -> Iterator[Need]:
    yield from _common_needs(model)
    yield "router.score", model.router.score == "sigmoid", ["sigmoid"]
    several = model.shared_hidden > 0 and model.shared_hidden % model.expert_hidden == 0
    yield "shared_hidden", several, [f"a multiple of expert_hidden={model.expert_hidden}"]
    yield "windows", set(model.windows) == {"full"}, ["full"]


def _glm_config(model: ModelSpec) -> dict[str, Any]:
    return _common_config(model) | {
        "intermediate_size": model.ffn_hidden,
        "moe_intermediate_size": model.expert_hidden,
        "n_routed_experts": model.experts,
        "n_shared_experts": model.shared_hidden // model.expert_hidden,
        "first_k_dense_replace": model.dense_first,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": model.router.normalize,
        "routed_scaling_factor": model.router.scale,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 1.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta, "partial_rotary_factor": 1.0},
        "num_nextn_predict_layers": 0,
    }


def _glm_model(config: dict[str, Any]) -> dict[str, Any]:
    return _common_model(config) | {
        "expert_hidden": config["moe_intermediate_size"],
        "experts": config["n_routed_experts"],
        "shared_hidden": config["n_shared_experts"] * config["moe_intermediate_size"],
        "dense_first": config["first_k_dense_replace"],
        "router": {"score": "sigmoid", "normalize": config["norm_topk_prob"], "scale": config["routed_scaling_factor"]},
    }


def _glm_block(model: ModelSpec, layer: int) -> Iterator[Tensor]:
    theirs, ours, parts = f"model.layers.{layer}.mlp", f"blocks.{layer}", ("gate", "up", "down")
    if not model.is_moe(layer):
        yield from (Tensor(f"{theirs}.{part}_proj.weight", f"{ours}.ffn.{part}", True) for part in parts)
        return
    yield Tensor(f"{theirs}.gate.weight", f"{ours}.moe.router.weight", True)
    yield Tensor(f"{theirs}.gate.e_score_correction_bias", f"{ours}.moe.router.bias", keeps=True)
    for part in parts:
        yield Tensor(f"{theirs}.shared_experts.{part}_proj.weight", f"{ours}.moe.shared.{part}", True)
        for expert in range(model.experts):
            yield Tensor(f"{theirs}.experts.{expert}.{part}_proj.weight", f"{ours}.moe.experts.{expert}.{part}", True)


FAMILIES = (
    Family(
        "mixtral", "MixtralForCausalLM", _mixtral_needs, _mixtral_config, _mixtral_model,
        lambda model: _tensors(model, _mixtral_block),
    ),
    Family(
        "glm4_moe", "Glm4MoeForCausalLM", _glm_needs, _glm_config, _glm_model, lambda model: _tensors(model, _glm_block)
    ),
)  # fmt: skip
