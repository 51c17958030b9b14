"""Untrained models of transformers, computing in float64, and their gradients by foldray's names.

transformers computes norms, routers and rotary tables in float32 even if the model has float64. `widened` lets it use float64
there, so that results can be compared to the last digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foldray.comm import Groups
from foldray.recipe import Recipe
from foldray.runtime import Engine
from tests.foldray.parity import engine_of
from trainers.hugging_face.families import family_of, named_family, tensors_of
from trainers.worker.engines import read_weights

transformers = pytest.importorskip("transformers")
ROPE_INIT_FUNCTIONS = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
MIXTRAL: dict[str, Any] = SIZES | {"intermediate_size": 56, "num_local_experts": 4}
GLM: dict[str, Any] = SIZES | {
    "intermediate_size": 40, "moe_intermediate_size": 56, "n_routed_experts": 4, "n_shared_experts": 2, "head_dim": 12,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
}  # fmt: skip
QWEN: dict[str, Any] = SIZES | {
    "intermediate_size": 40, "moe_intermediate_size": 56, "num_experts": 4, "mlp_only_layers": [0], "num_hidden_layers": 3,
    "norm_topk_prob": True,
}  # fmt: skip
QWEN2 = QWEN | {"shared_expert_intermediate_size": 24}
OLMOE = SIZES | {"intermediate_size": 56, "num_experts": 4}
PART = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
MINIMAX = MIXTRAL | {"head_dim": 16, "rope_parameters": PART}
ERNIE: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "num_experts_per_tok"} | {
    "moe_k": 3, "moe_num_experts": 4, "moe_intermediate_size": 56, "intermediate_size": 40,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0}
DEEPSEEK: dict[str, Any] = SIZES | {
    "intermediate_size": 40, "moe_intermediate_size": 56, "n_routed_experts": 8, "n_shared_experts": 2, "kv_lora_rank": 20,
    "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 10, "v_head_dim": 6, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "num_key_value_heads": 4, "num_hidden_layers": 3,
}  # fmt: skip
DEEPSEEK2 = DEEPSEEK | {"topk_method": "group_limited_greedy", "rope_parameters": YARN}
DEEPSEEK3 = DEEPSEEK | {"num_mtp_layers": 0, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}}
GPT_OSS = MIXTRAL | {"head_dim": 12, "sliding_window": 5, "rope_parameters": YARN | {"truncate": False}}
DOTS = GLM | {
    "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
HY = {
    key: value for key, value in GLM.items() if key not in ("n_routed_experts", "n_shared_experts", "routed_scaling_factor")
} | {"num_experts": 4, "num_shared_experts": 2, "router_scaling_factor": 2.5}  # fmt: skip
SOLAR = {key: value for key, value in GLM.items() if key not in ("intermediate_size", "first_k_dense_replace")} | {
    "attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
GLM_LITE = {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXAONE = {key: value for key, value in HY.items() if key != "router_scaling_factor"} | SLIDING | {
    "routed_scaling_factor": 2.5, "num_hidden_layers": 3, "n_group": 2, "topk_group": 1, "mlp_layer_types": None,
}  # fmt: skip
FLINT = QWEN | SLIDING | {"shared_expert_intermediate_size": 24, "head_dim": 12}
MELLUM = {key: value for key, value in QWEN.items() if key != "mlp_only_layers"} | SLIDING | {
    "mlp_layer_types": ["dense", "sparse", "sparse"], "head_dim": 12,
    "rope_parameters": {
        "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
    },
}  # fmt: skip
GRANITE = MIXTRAL | {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.3, "logits_scaling": 2.5,
}  # fmt: skip
GRANITE_SWA = GRANITE | SLIDING | {
    "shared_intermediate_size": 24, "num_hidden_layers": 3, "layer_rope_theta": [90.0, 0, 90.0],
}  # fmt: skip
MISTRAL = {key: value for key, value in DEEPSEEK.items() if key not in ("n_group", "topk_group")} | {
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "llama_4_scaling_beta": 0.3,
                               "original_max_position_embeddings": 4},
}  # fmt: skip
TRINITY = {key: value for key, value in HY.items() if key not in ("router_scaling_factor", "first_k_dense_replace")} | SLIDING | {
    "num_hidden_layers": 3, "num_dense_layers": 1, "route_scale": 2.5, "mup_enabled": True,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "num_hidden_layers": 4, "head_dim": 12, "rope_parameters": PART,
}  # fmt: skip
NEXT = QWEN2 | LINEAR
QWEN35 = {key: value for key, value in NEXT.items() if key not in ("intermediate_size", "mlp_only_layers", "norm_topk_prob")}
KIMI: dict[str, Any] = {key: value for key, value in GLM_LITE.items() if key not in ("n_routed_experts", "rope_parameters")} | {
    "num_local_experts": 8, "linear_head_dim": 6, "linear_num_heads": 4, "q_lora_rank": None, "pad_token_id": None,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
HUNYUAN: dict[str, Any] = {key: value for key, value in OLMOE.items() if key != "num_experts_per_tok"} | {
    "moe_topk": [2, 2], "head_dim": 12, "eos_token_id": None, "pad_token_id": None,
    "rope_parameters": {"rope_type": "dynamic", "alpha": 3.0, "factor": 1.0, "rope_theta": 500.0},
}  # fmt: skip
ARIA: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "num_experts_per_tok"} | {
    "intermediate_size": 56, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2, "head_dim": 10,
}  # fmt: skip
FLEX = OLMOE | {"pad_token_id": None, "eos_token_id": None}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Mixtral", MIXTRAL), ("Glm4Moe", GLM | {"use_qk_norm": True, "attention_bias": True, "rope_parameters": PART}),
    ("Qwen2Moe", QWEN2), ("Qwen3Moe", QWEN | {"head_dim": 20}), ("Olmoe", OLMOE), ("MiniMaxM2", MINIMAX),
    ("Ernie4_5_Moe", ERNIE), ("DeepseekV2", DEEPSEEK2), ("DeepseekV3", DEEPSEEK3),
    ("GptOss", GPT_OSS), ("Dots1", DOTS), ("HYV3", HY), ("SolarOpen", SOLAR), ("Glm4MoeLite", GLM_LITE),
    ("ExaoneMoe", EXAONE), ("Flint", FLINT), ("Mellum", MELLUM), ("GraniteMoe", GRANITE),
    ("GraniteMoeShared", GRANITE | {"shared_intermediate_size": 24}), ("GraniteMoeSWA", GRANITE_SWA),
    ("Mistral4", MISTRAL), ("Afmoe", TRINITY), ("FlexOlmo", FLEX), ("Qwen3Next", NEXT), ("Qwen3_5Moe", QWEN35),
    ("KimiLinear", KIMI), ("HunYuanMoEV1", HUNYUAN), ("AriaText", ARIA),
]  # fmt: skip
"""One model of each family, with all that the family has."""
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("Mixtral", MIXTRAL | {"head_dim": 10, "tie_word_embeddings": True, "sliding_window": 5, "rms_norm_eps": 1e-3}),
    ("Glm4Moe", GLM),
    ("Glm4Moe", GLM | {"norm_topk_prob": False, "first_k_dense_replace": 0, "tie_word_embeddings": True}),
    ("Qwen2Moe", QWEN2 | {
        "norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 3, "qkv_bias": False,
    }),
    ("Qwen3Moe", QWEN | {"attention_bias": True, "use_sliding_window": True, "sliding_window": 4, "norm_topk_prob": False}),
    ("Olmoe", OLMOE | {"attention_bias": True, "norm_topk_prob": True, "num_key_value_heads": 4}),
    ("Qwen3Moe", QWEN | {"rope_parameters": YARN | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.2}}),
    ("Mixtral", MIXTRAL | {"head_dim": 12, "rope_parameters": YARN | {"attention_factor": 1.5}}),
    ("DeepseekV2", DEEPSEEK | {"topk_method": "greedy", "q_lora_rank": None, "rope_parameters": YARN}),
    ("DeepseekV3", DEEPSEEK3 | {
        "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1,
    }),
    ("GptOss", GPT_OSS | {"attention_bias": False, "layer_types": ["full_attention"] * 2, "num_experts_per_tok": 1}),
    ("Dots1", GLM | {"attention_bias": True, "sliding_window": None, "norm_topk_prob": False, "layer_types": None}),
    ("HYV3", HY | {"attention_bias": True, "num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}),
    ("SolarOpen", SOLAR | {"attention_bias": False, "n_group": 2, "topk_group": 1, "norm_topk_prob": False}),
    ("Glm4MoeLite", GLM_LITE | {
        "rms_norm_eps": 1e-6, "q_lora_rank": None, "rope_interleave": False, "mlp_layer_types": ["sparse"] * 3,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    }),
    ("ExaoneMoe", EXAONE | {"layer_types": ["full_attention"] * 3, "n_group": 1, "norm_topk_prob": False}),
    ("Mistral4", MISTRAL | {
        "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "rms_norm_eps": 1e-5, "first_k_dense_replace": 0,
        "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 3},
    }),
    ("Afmoe", TRINITY | {"mup_enabled": False, "attention_bias": True, "num_dense_layers": 0, "tie_word_embeddings": True}),
    ("FlexOlmo", FLEX | {"attention_bias": True, "norm_topk_prob": True, "num_key_value_heads": 4}),
    ("Flint", FLINT | {"mlp_only_layers": [], "norm_topk_prob": False, "attention_bias": True}),
    ("Mellum", MELLUM | {"rope_parameters": None, "norm_topk_prob": False, "mlp_layer_types": ["sparse"] * 3}),
    ("GraniteMoe", GRANITE | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("GraniteMoeSWA", GRANITE_SWA | {"shared_intermediate_size": 0, "layer_rope_theta": [90.0, 500.0, 90.0]}),
    ("Qwen3Next", NEXT | {
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention"], "norm_topk_prob": False,
        "linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "mlp_only_layers": [], "tie_word_embeddings": True,
    }),
    ("Qwen3_5Moe", QWEN35 | {
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 1, "rms_norm_eps": 1e-3,
    }),
    ("HunYuanMoEV1", HUNYUAN | {
        "moe_topk": 1, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": None,
    }),
    ("AriaText", ARIA | {"attention_bias": True, "tie_word_embeddings": True, "moe_num_shared_experts": 1}),
    ("Ernie4_5_Moe", ERNIE | {"moe_num_shared_experts": 0, "tie_word_embeddings": False, "moe_layer_start_index": 0}),
    ("KimiLinear", KIMI | {
        "q_lora_rank": 12, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "mlp_layer_types": ["sparse"] * 3,
        "linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 2, "rms_norm_eps": 1e-3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    }),
]  # fmt: skip
ALL = [pytest.param(*case, id=f"{case[0]}-{number}") for number, case in enumerate((*FAMILIES, *VARIANTS))]


def saved(folder: Path, family: str, sizes: dict[str, Any], **options: Any) -> Any:
    """Write an untrained model of transformers, and return it as transformers loads it."""
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")
    made = model(model.config_class(**sizes)).double().eval()
    for name, tensor in (*made.named_buffers(), *made.named_parameters()):
        if name.endswith("e_score_correction_bias"):
            tensor.data.copy_(torch.linspace(-1, 1, tensor.numel()))  # this changes which experts are chosen
        elif (tensor.dim() == 1 and name.endswith(("norm.weight", "bias"))) or name.endswith(
            "proj_bias"
        ):  # they begin as ones and zeros
            tensor.data += torch.randn_like(tensor) / 4
    made.save_pretrained(folder, **options)
    as_released(folder)
    return loaded(folder)


def as_released(folder: Path) -> None:
    """Name dense networks of Kimi Linear as released folders do. transformers writes them under the name of mixtures."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    if json.loads((folder / "config.json").read_text())["model_type"] == "kimi_linear":
        dense = re.compile(r"block_sparse_moe(?=\.(gate|up|down)_proj)")
        save_file({dense.sub("mlp", name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def loaded(folder: Path) -> Any:
    """Load a model of transformers, with plain attention, experts one by one, and rotary tables that `widened` takes."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    made = getattr(transformers, name).from_pretrained(folder, **plain).eval()
    made.double()  # ERNIE keeps its routers in float32
    for tensor in made.state_dict(keep_vars=True).values():
        tensor.data = tensor.data.clone()  # weights lie in the file at any place, and some processors' last bits depend on it
    for module in made.modules():
        own = {"default": getattr(module, "compute_default_rope_parameters", None), **ROPE_INIT_FUNCTIONS}
        own["dynamic"] = getattr(module, "compute_ntk_alpha_rope_parameters", own["dynamic"])
        if hasattr(module, "inv_freq"):
            with widened():
                config = getattr(module, "config", made.config)
                module.inv_freq = own[config.rope_parameters["rope_type"]](config)[0]
        for kind in getattr(module, "layer_types", []) if own["default"] else []:
            with widened():
                rates = own[made.config.rope_parameters[kind]["rope_type"]](made.config, layer_type=kind)[0]
            setattr(module, f"{kind}_inv_freq", rates)
    return made


@contextmanager
def widened() -> Iterator[None]:
    """Let code of transformers that asks for float32 get float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def mean_loss(made: Any, text_BL: Tensor) -> Tensor:
    """Return the cross-entropy of the next token, a mean over all of them."""
    with widened():
        logits_BLV = made(text_BL[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), text_BL[:, 1:].flatten())


def by_our_names(made: Any, recipe: Recipe, folder: Path, gradients: bool = False) -> dict[str, Tensor]:
    """Return the weights of a model of transformers, or their gradients, by foldray's names.

    Args:
        folder: a folder to write; it must not exist.
    """
    from safetensors.torch import load_file

    if gradients:
        kept = [parameter.data for parameter in made.parameters()]
        for parameter in made.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    made.save_pretrained(folder)
    as_released(folder)
    if gradients:
        for parameter, value in zip(made.parameters(), kept, strict=True):
            parameter.data = value
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    family = family_of(recipe.model, named_family(recipe.export.family))
    tensors = [each for each in tensors_of(family, recipe.model) if not (gradients and each.keeps)]
    return {each.ours: each.taken(found[each.name]) for each in tensors}


def filled(recipe: Recipe, groups: Groups) -> Engine:
    """Make the engine of a rank, and fill it from the recipe's folder."""
    engine = engine_of(recipe, groups)
    read_weights(engine, recipe)
    engine.load_shards()
    return engine
