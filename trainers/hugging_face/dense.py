"""Upcycling: models of transformers without experts, whose feed-forward networks become experts.

Each expert begins as a copy of its block's network, or as one of G equal shares of the network's inner width. The G shares of a
copy are a virtual group: their columns of the router begin equal, so every token chooses whole groups, and `router.scale` is G
(Upcycling Large Language Models into Mixture of Experts, arXiv:2410.07524: virtual groups, weight scaling). The weights of a
token's experts sum to 1. So the model begins by computing what the dense model computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from foldray.blueprint import ModelSpec
from trainers.hugging_face.family import Family, Values
from trainers.hugging_face.names import Tensor, network
from trainers.hugging_face.rows import layer_windows, model_window, nothing, weighs_to_one


def granularity(model: ModelSpec) -> int:
    """Return G, the number of experts that a network is cut into."""
    return model.ffn_hidden // model.expert_hidden


def upcycled(dense: Values, experts: int, topk: int, parts: int) -> Values:
    """Return the keys of `model` for a dense model's, with experts in all blocks.

    A token takes `topk` of the `experts` copies of a network. Each copy is cut into `parts` (G) experts. A ValueError says if its
    inner width cannot be cut in this way.
    """
    if dense["ffn_hidden"] % parts:
        raise ValueError(f"must divide the inner width {dense['ffn_hidden']} of the networks")
    sizes = {"experts": experts * parts, "topk": topk * parts, "expert_hidden": dense["ffn_hidden"] // parts}
    return {**dense, **sizes, "router": {"scale": float(parts)}}


def preserves(model: ModelSpec) -> str | None:
    """Return why a model would not begin by computing what the dense one computes; None if it does."""
    parts = granularity(model)
    rules = {
        f"model.expert_hidden={model.expert_hidden} must divide ffn_hidden={model.ffn_hidden}":
            parts > 0 and model.ffn_hidden % model.expert_hidden == 0,
        f"model.experts={model.experts} and model.topk={model.topk} must be multiples of {parts}":
            parts > 0 and model.experts % parts == 0 and model.topk % parts == 0,
        f"model.router.scale={model.router.scale:g} must be {parts}": model.router.scale == parts,
        "the weights of a token's experts must sum to 1 (model.router)": weighs_to_one(model),
        "there must be no shared expert, no groups of experts and no biases of experts":
            not model.shared_hidden and model.router.groups == 1 and not model.expert_bias and not model.router.logit_bias,
        "no expert may drop tokens (model.router.capacity_factor)": model.router.capacity_factor is None,
    }  # fmt: skip
    return next((rule for rule, holds in rules.items() if not holds), None)


def group_columns(weight_HE: torch.Tensor, model: ModelSpec) -> None:
    """Make a router's columns of each virtual group equal to the group's first, in place."""
    grouped_HCG = weight_HE.unflatten(-1, (-1, granularity(model)))
    grouped_HCG.copy_(grouped_HCG[..., :1].clone().expand_as(grouped_HCG))


def _block(model: ModelSpec, layer: int) -> Iterator[Tensor]:
    theirs, ours = f"model.layers.{layer}.mlp", f"blocks.{layer}"
    if not model.is_moe(layer):
        yield from network(theirs, f"{ours}.ffn")
        return
    width, parts, hidden, inner = model.expert_hidden, granularity(model), model.hidden, model.ffn_hidden
    for expert in range(model.experts):
        name, first = f"{ours}.moe.experts.{expert}", expert % parts * width
        share = slice(first, first + width)
        for part in ("gate", "up"):
            yield Tensor(
                f"{theirs}.{part}_proj.weight", f"{name}.{part}", True, place=(share, slice(None)), shape=(inner, hidden)
            )
        yield Tensor(f"{theirs}.down_proj.weight", f"{name}.down", True, place=(slice(None), share), shape=(hidden, inner))


def _qwen2(config: Values) -> Values:
    return {**layer_windows(config), "attention_bias": "inputs"}


def _qwen3(config: Values) -> Values:
    return {**layer_windows(config), "attention_bias": "all" if config["attention_bias"] else "none", "qk_norm": "head"}


def _family(model_type: str, architecture: str, fixed: Values, model_more: Any) -> Family:
    keys = {"ffn_hidden": "intermediate_size"}
    return Family(model_type, architecture, keys, fixed, {}, _block, nothing, nothing, model_more, dense=True)


DENSE = (
    _family("llama", "LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False}, nothing),
    _family("mistral", "MistralForCausalLM", {}, model_window),
    _family("qwen2", "Qwen2ForCausalLM", {}, _qwen2),
    _family("qwen3", "Qwen3ForCausalLM", {}, _qwen3),
)
"""Families without experts. foldray reads them, and does not write them."""
