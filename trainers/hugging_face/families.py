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
    """

    name: str
    ours: str
    turned: bool


class Family(NamedTuple):
    """A family of models.

    Args:
        model_type: its name in `config.json`.
        architecture: the class in transformers.
        needs: yields (key of `model`, whether the model has what the family has, the values that it needs).
        config: the model's own part of `config.json`.
        tensors: all tensors.
    """

    model_type: str
    architecture: str
    needs: Callable[[ModelSpec], Iterator[tuple[str, bool, list[Any]]]]
    config: Callable[[ModelSpec], dict[str, Any]]
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
    """Return all tensors of a model. Every parameter is in one of them."""
    found = list(family.tensors(model))
    ours = sorted(each.ours for each in found)
    assert ours == sorted(row.name for row in parameter_table(model)), f"{family.model_type} leaves out a parameter"
    return found


def _mixtral_needs(model: ModelSpec) -> Iterator[tuple[str, bool, list[Any]]]:
    router = model.router
    yield "norm", model.norm == "rmsnorm", ["rmsnorm"]
    yield "positions", model.positions == "rope", ["rope"]
    yield "ffn", model.ffn == "gated_silu", ["gated_silu"]
    yield "dense_first", model.dense_first == 0, [0]
    yield "moe_every", model.moe_every == 1, [1]
    yield "shared_hidden", model.shared_hidden == 0, [0]
    yield "value_dim", model.value_dim in (None, model.head_dim), ["null"]
    window, *others = set(model.windows)
    yield "windows", not others and window.split(":")[0] in ("full", "sliding"), ["full", "sliding:TOKENS"]
    yield "router.score", router.score == "softmax", ["softmax"]
    # The softmax of the chosen logits is the softmax of all of them, rescaled to a sum of 1.
    yield "router.normalize", router.softmax == "after_topk" or router.normalize, [True]
    yield "router.scale", router.scale == 1, [1.0]


def _mixtral_config(model: ModelSpec) -> dict[str, Any]:
    kind, _, tokens = model.windows[0].partition(":")
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.expert_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.topk,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "sliding_window": int(tokens) if kind == "sliding" else None,
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_std,
        "router_aux_loss_coef": model.router.balance_loss,
        "output_router_logits": False,
    }


def _mixtral_tensors(model: ModelSpec) -> Iterator[Tensor]:
    yield Tensor("model.embed_tokens.weight", "embedding.weight", False)
    for layer in range(model.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        yield Tensor(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight", False)
        for letter, part in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
            yield Tensor(f"{theirs}.self_attn.{letter}_proj.weight", f"{ours}.attention.{part}", True)
        yield Tensor(f"{theirs}.post_attention_layernorm.weight", f"{ours}.ffn_norm.weight", False)
        yield Tensor(f"{theirs}.block_sparse_moe.gate.weight", f"{ours}.moe.router.weight", True)
        for expert in range(model.experts):
            for number, part in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
                name = f"{theirs}.block_sparse_moe.experts.{expert}.{number}.weight"
                yield Tensor(name, f"{ours}.moe.experts.{expert}.{part}", True)
    yield Tensor("model.norm.weight", "final_norm.weight", False)
    if not model.tied_embeddings:
        yield Tensor("lm_head.weight", "head.weight", False)


FAMILIES = (Family("mixtral", "MixtralForCausalLM", _mixtral_needs, _mixtral_config, _mixtral_tensors),)
