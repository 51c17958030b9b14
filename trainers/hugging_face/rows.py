"""What rows of the table of families have in common: their needs, and keys of `config.json` beside those of a key each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foldray.blueprint import ModelSpec
from trainers.hugging_face.family import Need, Values, rope_config

TOPK = {"topk": "num_experts_per_tok", "experts": "num_experts", "expert_hidden": "moe_intermediate_size"}
BALANCED = {"router.balance_loss": "router_aux_loss_coef"}
SOFTMAX, SIGMOID = {"router.score": ["softmax"]}, {"router.score": ["sigmoid"]}
NO_DENSE = {"dense_first": [0], "moe_every": [1]}
BY_SCORES: Values = SIGMOID | {"router.selection_bias": [False, True], "router.scale": None}
"""The router of DeepSeek-V3, without its groups of experts."""


def nothing(given: Any) -> Any:
    """The further needs or keys of a family that has none."""
    return {}


def turns_whole_heads(model: ModelSpec) -> Need:
    """Return the need of families whose heads turn as a whole."""
    return "rope_dim", model.rope_dim in (None, model.head_dim), ["null"]


def rope_by_type(model: ModelSpec) -> Values:
    """Return the key of `config.json` for rotary positions, by the type of a block (`layer_types`)."""
    full = rope_config(model)["rope_parameters"]
    other = full if model.window_rope_theta is None else {"rope_type": "default", "rope_theta": model.window_rope_theta}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": other}}


def dense_blocks(config: Values, is_moe: Callable[[int], bool]) -> Values:
    """Return the keys of `model` that say which blocks are dense, or raise a ValueError."""
    layers = config["num_hidden_layers"]
    wanted = [is_moe(layer) for layer in range(layers)]
    for every in range(1, layers + 1):
        for first in range(layers + 1):
            if wanted == [i >= first and (i - first + 1) % every == 0 for i in range(layers)]:
                return {"dense_first": first, "moe_every": every}
    raise ValueError("has dense blocks between those with experts, in an order that foldray does not have")


def dense_layers(model: ModelSpec) -> list[int]:
    return [layer for layer in range(model.layers) if not model.is_moe(layer)]


def mlp_types(model: ModelSpec) -> Values:
    """Return the key of `config.json` that says which blocks are dense."""
    return {"mlp_layer_types": ["sparse" if model.is_moe(layer) else "dense" for layer in range(model.layers)]}


def blocks_of_types(config: Values) -> Values:
    """Return the keys of `model` that say which blocks are dense, from `mlp_layer_types`."""
    return dense_blocks(config, lambda layer: config["mlp_layer_types"][layer] == "sparse")


def step_blocks(config: Values) -> Values:
    """Return the keys of `model` that say which blocks are dense, from a step and a list of dense blocks."""
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"]
    return dense_blocks(config, lambda layer: layer not in dense and (layer + 1) % step == 0)


def windows_of(model: ModelSpec) -> list[str]:
    """Return the window of every block."""
    return [model.block(layer).attention.window for layer in range(model.layers)]


def sees_everything(model: ModelSpec) -> Need:
    """Return the need of families whose blocks see everything."""
    return "windows", set(model.windows) == {"full"}, ["full"]


def one_window(model: ModelSpec) -> Need:
    """Return the need of families whose blocks all see everything, or all slide with the same width."""
    holds = len(set(model.windows)) == 1 and model.windows[0].split(":")[0] in ("full", "sliding")
    return "windows", holds, ["full", "sliding:TOKENS"]


def one_sliding_width(model: ModelSpec) -> Need:
    """Return the need of families whose blocks see everything or slide, all with the same width."""
    sliding = {window for window in model.windows if window != "full"}
    holds = len(sliding) <= 1 and all(window.startswith("sliding:") for window in sliding)
    return "windows", holds, ["full", "sliding:TOKENS of one width"]


def full_or_linear(model: ModelSpec) -> Need:
    """Return the need of families whose blocks see everything or have linear attention."""
    return "windows", set(model.windows) <= {"full", "linear"} and "linear" in model.windows, ["full", "linear"]


def linear_types(model: ModelSpec) -> Values:
    """Return the keys of `config.json` for blocks that see everything or have linear attention."""
    spec = model.linear
    assert spec
    return {
        "layer_types": [f"{window}_attention" for window in windows_of(model)], "linear_num_value_heads": spec.heads,
        "linear_num_key_heads": spec.kv_heads, "linear_key_head_dim": spec.key_dim, "linear_value_head_dim": spec.value_dim,
        "linear_conv_kernel_dim": model.linear_taps,
    }  # fmt: skip


def windows_with_linear(config: Values) -> Values:
    """Return the key of `model` for the windows of blocks that see everything or have linear attention."""
    types = config["layer_types"]
    if "linear_attention" not in types or set(types) - {"full_attention", "linear_attention"}:
        raise ValueError(f"says layer_types={sorted(set(types))}, and foldray reads full_attention with linear_attention only")
    windows = [kind.removesuffix("_attention") for kind in types]
    every = next(n for n in range(1, len(windows) + 1) if windows == [windows[layer % n] for layer in range(len(windows))])
    return {"windows": windows[:every]}


def linear_windows(config: Values) -> Values:
    """Return the keys of `model` for blocks that see everything or have linear attention."""
    return {
        **windows_with_linear(config), "linear_heads": config["linear_num_value_heads"],
        "linear_key_heads": config["linear_num_key_heads"], "linear_key_dim": config["linear_key_head_dim"],
        "linear_value_dim": config["linear_value_head_dim"], "linear_taps": config["linear_conv_kernel_dim"],
    }  # fmt: skip


def full_without_positions(model: ModelSpec) -> Need:
    """Return the need of families whose blocks without a window know no positions."""
    return "full_positions", model.full_positions == "none" or "full" not in model.windows, ["none"]


def layer_types(model: ModelSpec) -> Values:
    """Return the keys of `config.json` for blocks that see everything or slide."""
    windows = windows_of(model)
    sliding = [int(window.split(":")[1]) for window in windows if window != "full"]
    types = ["full_attention" if window == "full" else "sliding_attention" for window in windows]
    return {"layer_types": types, **({"sliding_window": sliding[0]} if sliding else {})}


def layer_windows(config: Values) -> Values:
    """Return the key of `model` for the blocks' windows."""
    types = config["layer_types"]
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"says layer_types={sorted(unknown)}, and foldray reads full_attention and sliding_attention only")
    windows = ["full" if kind == "full_attention" else f"sliding:{config['sliding_window']}" for kind in types]
    return {"windows": windows[:1] if len(set(windows)) == 1 else windows}


def model_window(config: Values) -> Values:
    """Return the key of `model` for the window that all blocks have."""
    window = config.get("sliding_window")
    return {"windows": [f"sliding:{window}" if window else "full"]}


def shares_experts(model: ModelSpec) -> Need:
    """Return the need of families whose shared expert is as wide as several experts."""
    several = model.shared_hidden > 0 and model.shared_hidden % model.expert_hidden == 0
    return "shared_hidden", several, [f"a multiple of expert_hidden={model.expert_hidden}"]


def shared_experts(config: Values, key: str = "n_shared_experts") -> Values:
    """Return the key of `model` for a shared expert that is as wide as several experts."""
    return {"shared_hidden": (config[key] or 0) * config["moe_intermediate_size"]}


def expert_groups(model: ModelSpec) -> Values:
    """Return the keys of `config.json` for groups of experts."""
    return {"n_group": model.router.groups, "topk_group": model.router.topk_groups}


def normalized(model: ModelSpec) -> Values:
    """Return the key of `config.json` that says whether the weights of a token's experts sum to 1."""
    return {"norm_topk_prob": weighs_to_one(model)}


def before_topk(config: Values) -> Values:
    """Return the router of families whose softmax runs over all experts."""
    return {"router.softmax": "before_topk", "router.normalize": config["norm_topk_prob"]}


def computed(model: ModelSpec) -> Values:
    """Return what a model computes by keys of `model`, the same for all ways to write it in a recipe."""
    unused = {"preset", "init_std", "router", "moe_every", "max_positions", "mtp_depth", "mtp_weight"}
    if not dense_layers(model):
        unused.add("ffn_hidden")
    return model.model_dump(exclude=unused) | {
        "router.score": model.router.score, "router.scale": model.router.scale, "router.groups": model.router.groups,
        "router.topk_groups": model.router.topk_groups,
        "full_positions": model.full_positions if "full" in windows_of(model) else "rope",
        "attention_scale": model.attention_scale or model.head_dim**-0.5,
        "latent_norm_eps": model.latent_norm_eps or model.norm_eps, "value_dim": model.value_dim or model.head_dim,
        "rope_dim": model.rope_dim or model.head_dim, **_linear_sizes(model),
        "windows": windows_of(model), "dense_first": dense_layers(model), "router.normalize": weighs_to_one(model),
        "router.selection_bias": model.router.score == "sigmoid" or model.router.selection_bias,
    }  # fmt: skip


def _linear_sizes(model: ModelSpec) -> Values:
    if (spec := model.linear) is None:
        return {"linear_taps": None}
    keys = ("linear_heads", "linear_key_heads", "linear_key_dim", "linear_value_dim")
    return dict(zip(keys, spec[:4], strict=True))


def weighs_to_one(model: ModelSpec) -> bool:
    """Whether the weights of a token's experts sum to 1: the softmax of the chosen logits is that of all of them, rescaled."""
    return model.router.normalize or (model.router.score == "softmax" and model.router.softmax == "after_topk")
