"""Models as hubs have them: what their `config.json` says, and the names and shapes of their tensors.

The configurations were written by other versions of transformers than the tests', and have keys that no class reads. Folders have
tensors that no class loads. `written` makes a folder with such names, but with small sizes and drawn weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_PLAIN = {
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MIXTRAL = _PLAIN | {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "vocab_size": 32000,
}  # fmt: skip
_QWEN3 = _PLAIN | {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_GPT_OSS = _PLAIN | {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880,
    "initial_context_length": 4096, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False,
    },
    "vocab_size": 201088,
}  # fmt: skip
_DEEPSEEK = _PLAIN | {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 4, "topk_method": "noaux_tc",
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
_DENSE = _PLAIN | {"num_hidden_layers": 24, "rms_norm_eps": 1e-06, "vocab_size": 151936}

CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": _MIXTRAL,
    "mixtral-8x22b": _MIXTRAL | {
        "hidden_size": 6144, "intermediate_size": 16384, "max_position_embeddings": 65536, "num_attention_heads": 48,
        "num_hidden_layers": 56, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
    },
    "qwen2-57b-a14b": _PLAIN | {
        "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2_moe", "moe_intermediate_size": 2560,
        "norm_topk_prob": False, "num_attention_heads": 28, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 20480,
        "sliding_window": 65536, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3-30b-a3b": _QWEN3,
    "qwen3-235b-a22b": _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 94, "moe_intermediate_size": 1536,
        "num_attention_heads": 64, "num_hidden_layers": 94,
    },
    "olmoe-1b-7b": _PLAIN | {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "hidden_size": 2048,
        "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "vocab_size": 50304,
    },
    "glm-4.5-air": _PLAIN | {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "eos_token_id": [7, 8, 9], "first_k_dense_replace": 1,
        "head_dim": 128, "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
        "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "minimax-m2": _PLAIN | {
        "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "head_dim": 128, "hidden_size": 3072,
        "intermediate_size": 1536, "layernorm_full_attention_beta": 1.0, "max_position_embeddings": 196608,
        "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
        "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
        "output_router_logits": False, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000,
        "rotary_dim": 64, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "sliding_window": None, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True,
        "vocab_size": 200064,
    },
    "ernie-4.5-21b-a3b": _PLAIN | {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "compression_ratio": 1.0, "hidden_size": 2560, "intermediate_size": 12288,
        "max_position_embeddings": 131072, "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64], "moe_gate": "topk",
        "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": 27, "moe_layer_interval": 1,
        "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_use_aux_free": True,
        "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4, "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False,
        "vocab_size": 103424,
    },
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": _GPT_OSS | {
        "layer_types": ["sliding_attention", "full_attention"] * 18, "num_hidden_layers": 36, "num_local_experts": 128,
    },
    "deepseek-v2-lite": _DEEPSEEK | {
        "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
        "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "q_lora_rank": None, "routed_scaling_factor": 1.0,
        "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "vocab_size": 102400,
        "rope_scaling": _DEEPSEEK["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek-v3": _DEEPSEEK,
    "kimi-k2": _DEEPSEEK | {
        "first_k_dense_replace": 1, "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1,
        "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
        "rope_scaling": _DEEPSEEK["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
    },
    "kimi-linear-48b-a3b": _PLAIN | {
        "architectures": ["KimiLinearForCausalLM"], "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
        "bos_token_id": 163584, "eos_token_id": 163586, "first_k_dense_replace": 1, "head_dim": 72, "hidden_size": 2304,
        "intermediate_size": 9216, "kv_lora_rank": 512, "mla_use_nope": True, "model_max_length": 1048576,
        "model_type": "kimi_linear", "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256,
        "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32, "num_nextn_predict_layers": 0,
        "num_shared_experts": 1, "pad_token_id": 163839, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "topk_group": 1,
        "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        },
    },
    "glm-4.7-flash": _DEEPSEEK | {
        "architectures": ["Glm4MoeLiteForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 2048,
        "intermediate_size": 10240, "max_position_embeddings": 202752, "model_type": "glm4_moe_lite",
        "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "num_attention_heads": 20,
        "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20, "partial_rotary_factor": 1.0,
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.8, "topk_group": 1, "v_head_dim": 256, "vocab_size": 154880,
    },
    "dots.llm1": _PLAIN | {
        "architectures": ["Dots1ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1, "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 32768, "max_window_layers": 62, "model_type": "dots1",
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 62, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "sliding_window": None, "vocab_size": 152064,
    },
    "solar-open-100b": _PLAIN | {
        "architectures": ["SolarOpenForCausalLM"], "first_k_dense_replace": 0, "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 10240, "max_position_embeddings": 131072, "model_type": "solar_open",
        "moe_intermediate_size": 1280, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
        "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 65536, "type": "yarn"}, "vocab_size": 196608,
    },
    "hy3": _PLAIN | {
        "architectures": ["HYV3ForCausalLM"], "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 13312, "max_position_embeddings": 262144, "model_type": "hy_v3", "moe_intermediate_size": 1536,
        "num_attention_heads": 64, "num_experts": 192, "num_experts_per_tok": 8, "num_hidden_layers": 80,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"}, "router_scaling_factor": 2.826,
        "vocab_size": 120832,
    },
    "trinity-mini": _PLAIN | {
        "architectures": ["AfmoeForCausalLM"], "global_attn_every_n_layers": 4, "head_dim": 128, "hidden_size": 2048,
        "intermediate_size": 6144, "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
        "full_attention"] * 8, "max_position_embeddings": 131072, "model_type": "afmoe", "moe_intermediate_size": 1024,
        "mup_enabled": True, "n_group": 1, "num_attention_heads": 32, "num_dense_layers": 2, "num_expert_groups": 1,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 4,
        "num_limited_groups": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
        "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048, "topk_group": 1,
        "use_grouped_mm": True, "vocab_size": 200192,
    },
    "granite-3.1-3b-a800m": _PLAIN | {
        "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0, "hidden_size": 1536, "intermediate_size": 512, "logits_scaling": 6.0,
        "max_position_embeddings": 131072, "model_type": "granitemoe", "num_attention_heads": 24, "num_experts_per_tok": 8,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 40, "output_router_logits": False,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000.0,
        "router_aux_loss_coef": 0.0, "tie_word_embeddings": True, "vocab_size": 49155,
    },
    "llama-3.2-1b": _DENSE | {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "head_dim": 64, "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "deepseek-coder-6.7b": _DENSE | {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 16384, "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000,
    },
    "mistral-7b": _DENSE | {
        "architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    },
    "qwen2.5-0.5b": _DENSE | {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False,
    },
    "qwen3-0.6b": _DENSE | {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_key_value_heads": 8, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
    },
}  # fmt: skip
"""By name, the keys of `config.json` that say what a model computes, and some that say something else."""
LARGER = ("mixtral-8x22b", "qwen3-235b-a22b", "gpt-oss-120b")  # with small sizes, these are like others

# Sizes that tests can compute. A key that a model lacks, or that is null, stays so.
_SMALL = {
    "vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16, "rotary_dim": 8,
    "intermediate_size": 40, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32, "num_experts": 8,
    "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2, "moe_k": 2,
    "kv_lora_rank": 20, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 6,
    "first_k_dense_replace": 1, "moe_layer_end_index": 2, "sliding_window": 8, "num_experts_per_token": 2, "pad_token_id": 0,
    "linear_attn_config": {
        "full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 6, "num_heads": 4, "short_conv_kernel_size": 4,
    },
}  # fmt: skip


def small(name: str) -> dict[str, Any]:
    """Return a `config.json` with small sizes."""
    config = CONFIGS[name]
    found = config | {key: size for key, size in _SMALL.items() if config.get(key) is not None}
    found["num_key_value_heads"] = 4 if config["num_key_value_heads"] == config["num_attention_heads"] else 2
    found |= {key: [*config[key][:3]] for key in ("layer_types", "attn_type_list") if key in config}
    if config.get("first_k_dense_replace") == 0:
        found["first_k_dense_replace"] = 0
    return found | ({"n_group": 4, "topk_group": 2} if config.get("n_group", 1) > 1 else {})


# The tensors of a family, one a line: in which blocks they are, their names in the block, and their shapes. `*` is every expert.
# The letters: V vocabulary, H width, D width of a head, Q and K those of all queries and keys, E experts, I the inner width of a
# dense network, M of an expert, S of all shared experts. Of latent attention: A and C narrow vectors of queries and of keys and
# values, B all keys and values, O all values, T a narrow vector C with the columns that turn. Of Kimi's linear attention (kda): F
# a head, L all heads.
_ENDS = """
- model.embed_tokens.weight V H
- model.norm.weight H
- lm_head.weight V H
all input_layernorm.weight H
all post_attention_layernorm.weight H
"""
_ATTENTION = """
all self_attn.q_proj.weight Q H
all self_attn.k_proj.weight K H
all self_attn.v_proj.weight K H
all self_attn.o_proj.weight H Q
"""
_BIASES = """
all self_attn.q_proj.bias Q
all self_attn.k_proj.bias K
all self_attn.v_proj.bias K
"""
_HEAD_NORMS = """
all self_attn.q_norm.weight D
all self_attn.k_norm.weight D
"""
_NORMS = """
all self_attn.q_norm.weight Q
all self_attn.k_norm.weight K
"""
_LATENT = """
all self_attn.kv_a_proj_with_mqa.weight T H
all self_attn.kv_a_layernorm.weight C
all self_attn.kv_b_proj.weight B C
all self_attn.o_proj.weight H O
"""
_NARROW_QUERIES = """
all self_attn.q_a_proj.weight A H
all self_attn.q_a_layernorm.weight A
all self_attn.q_b_proj.weight Q A
"""
_MLP = """
dense mlp.gate_proj.weight I H
dense mlp.up_proj.weight I H
dense mlp.down_proj.weight H I
"""
_EXPERTS = """
moe mlp.gate.weight E H
moe mlp.experts.*.gate_proj.weight M H
moe mlp.experts.*.up_proj.weight M H
moe mlp.experts.*.down_proj.weight H M
"""
_SHARED = """
moe mlp.shared_experts.gate_proj.weight S H
moe mlp.shared_experts.up_proj.weight S H
moe mlp.shared_experts.down_proj.weight H S
"""
_SPARSE = """
moe block_sparse_moe.gate.weight E H
moe block_sparse_moe.experts.*.w1.weight I H
moe block_sparse_moe.experts.*.w2.weight H I
moe block_sparse_moe.experts.*.w3.weight I H
"""
_NEXT = """
next embed_tokens.weight V H
next enorm.weight H
next hnorm.weight H
next eh_proj.weight H 2H
next shared_head.norm.weight H
next shared_head.head.weight V H
"""
_KIMI = """
kda self_attn.q_proj.weight L H
kda self_attn.k_proj.weight L H
kda self_attn.v_proj.weight L H
kda self_attn.q_conv1d.weight L 1 4
kda self_attn.k_conv1d.weight L 1 4
kda self_attn.v_conv1d.weight L 1 4
kda self_attn.A_log 1 1 4 1
kda self_attn.dt_bias L
kda self_attn.f_a_proj.weight F H
kda self_attn.f_b_proj.weight L F
kda self_attn.b_proj.weight 4 H
kda self_attn.g_a_proj.weight F H
kda self_attn.g_b_proj.weight L F
kda self_attn.o_norm.weight F
kda self_attn.o_proj.weight H L
full self_attn.q_proj.weight Q H
moe block_sparse_moe.gate.weight E H
moe block_sparse_moe.gate.e_score_correction_bias E
moe block_sparse_moe.experts.*.w1.weight M H
moe block_sparse_moe.experts.*.w2.weight H M
moe block_sparse_moe.experts.*.w3.weight M H
"""
_SCORES = "moe mlp.gate.e_score_correction_bias E\n"
_OLD = "all self_attn.rotary_emb.inv_freq D\n"
TENSORS = {
    "mixtral": _ENDS + _ATTENTION + _SPARSE,
    "qwen2_moe": _ENDS + _ATTENTION + _BIASES + _EXPERTS + _SHARED.replace("shared_experts", "shared_expert")
    + "moe mlp.shared_expert_gate.weight 1 H",
    "qwen3_moe": _ENDS + _ATTENTION + _HEAD_NORMS + _EXPERTS,
    "olmoe": _ENDS + _ATTENTION + _NORMS + _EXPERTS.replace("M", "I"),
    "glm4_moe": _ENDS + _ATTENTION + _BIASES + _MLP + _EXPERTS + _SHARED + _SCORES + _NEXT,
    "minimax_m2": _ENDS + _ATTENTION + _NORMS + _SPARSE + "moe block_sparse_moe.e_score_correction_bias E",
    "ernie4_5_moe": _ENDS.replace("- lm_head.weight V H", "") + _ATTENTION + _MLP + _EXPERTS + _SHARED + """
moe mlp.moe_statics.e_score_correction_bias 1 E
- model.mtp_block.0.input_layernorm.weight H
- model.mtp_block.0.post_attention_layernorm.weight H
- model.mtp_block.0.self_attn.q_proj.weight Q H
- model.mtp_block.0.self_attn.k_proj.weight K H
- model.mtp_block.0.self_attn.v_proj.weight K H
- model.mtp_block.0.self_attn.o_proj.weight H Q
- model.mtp_block.0.mlp.gate_proj.weight I H
- model.mtp_block.0.mlp.up_proj.weight I H
- model.mtp_block.0.mlp.down_proj.weight H I
- model.mtp_emb_norm.0.weight H
- model.mtp_hidden_norm.0.weight H
- model.mtp_linear_proj.0.weight H 2H
""",
    "gpt_oss": _ENDS + _ATTENTION + _BIASES + """
all self_attn.o_proj.bias H
all self_attn.sinks 4
moe mlp.router.weight E H
moe mlp.router.bias E
moe mlp.experts.gate_up_proj E H 2I
moe mlp.experts.gate_up_proj_bias E 2I
moe mlp.experts.down_proj E I H
moe mlp.experts.down_proj_bias E H
""",
    "deepseek_v2": _ENDS + _LATENT + "all self_attn.q_proj.weight Q H" + _MLP + _EXPERTS + _SHARED,
    "deepseek_v3": _ENDS + _LATENT + _NARROW_QUERIES + _MLP + _EXPERTS + _SHARED + _SCORES + _NEXT,
    "kimi_k2": _ENDS + _LATENT + _NARROW_QUERIES + _MLP + _EXPERTS + _SHARED + _SCORES,
    "kimi_linear": _ENDS + _LATENT.replace("all", "full") + _KIMI + _MLP + _SHARED.replace("mlp", "block_sparse_moe"),
    "glm4_moe_lite": _ENDS + _LATENT + _NARROW_QUERIES + _MLP + _EXPERTS + _SHARED + _SCORES + _NEXT,
    "dots1": _ENDS + _ATTENTION + _HEAD_NORMS + _MLP + _EXPERTS + _SHARED + _SCORES,
    "solar_open": _ENDS + _ATTENTION + _EXPERTS + _SHARED + _SCORES,
    "hy_v3": _ENDS + _ATTENTION + _HEAD_NORMS + _MLP + _EXPERTS.replace("mlp.gate", "mlp.router.gate")
    + _SHARED.replace("shared_experts", "shared_mlp") + """
moe mlp.expert_bias E
next enorm.weight H
next hnorm.weight H
next eh_proj.weight H 2H
next final_layernorm.weight H
""",
    "afmoe": _ENDS + _ATTENTION + _HEAD_NORMS + _MLP + _EXPERTS.replace("mlp.gate", "mlp.router.gate") + _SHARED + """
moe mlp.expert_bias E
all self_attn.gate_proj.weight Q H
all pre_mlp_layernorm.weight H
all post_mlp_layernorm.weight H
""",
    "granitemoe": _ENDS.replace("- lm_head.weight V H", "") + _ATTENTION + """
moe block_sparse_moe.router.layer.weight E H
moe block_sparse_moe.input_linear.weight E 2I H
moe block_sparse_moe.output_linear.weight E H I
""",
    "llama": _ENDS + _ATTENTION + _MLP + _OLD,
    "mistral": _ENDS + _ATTENTION + _MLP,
    "qwen2": _ENDS.replace("- lm_head.weight V H", "") + _ATTENTION + _BIASES + _MLP,
    "qwen3": _ENDS + _ATTENTION + _HEAD_NORMS + _MLP,
}  # fmt: skip
TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_k")
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
# These have the values of another tensor, if they are there.
_COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def written(folder: Path, name: str) -> dict[str, Any]:
    """Write a folder with drawn weights, and return its `config.json`."""
    from safetensors.torch import save_file

    config, chance = small(name), torch.Generator().manual_seed(3)
    found = {each: _drawn(each, shape, chance) for each, shape in _shapes(config).items()}
    for each in found:
        if (end := each.partition(".layers.3.")[2]) in _COPIES:
            found[each] = found[_COPIES[end]].clone()
    if config["tie_word_embeddings"] and "lm_head.weight" in found:
        found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
    folder.mkdir()
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return config


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    head, heads, latent = config.get("head_dim", 12), 4, "kv_lora_rank" in config
    firsts = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    first = next((config[key] for key in firsts if key in config), 0)
    blocks = {"all": [0, 1, 2], "dense": [*range(first)], "moe": [*range(first, 3)], "next": [3], "kda": [0, 1], "full": [2]}
    if config.get("num_nextn_predict_layers") and "moe_k" not in config:
        blocks |= {"all": [0, 1, 2, 3], "moe": [*blocks["moe"], 3]}
    if not any(key in config for key in TOPK):
        blocks |= {"dense": [0, 1, 2]}
    shared = next((config[key] for key in _SHARED_COUNTS if config.get(key)), 0)
    size = {
        "V": 320, "H": 48, "2H": 96, "D": head, "Q": heads * (18 if latent else head), "K": config["num_key_value_heads"] * head,
        "E": 8, "I": 40, "2I": 80, "M": 24, "S": config.get("shared_expert_intermediate_size", 24 * shared), "A": 12, "C": 20,
        "B": heads * (10 + 6), "T": 20 + 8, "O": heads * 6, "1": 1, "4": heads, "F": 6, "L": 24,
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {}
    for line in filter(None, TENSORS[config["model_type"]].splitlines()):
        where, name, *letters = line.split()
        shape = tuple(size[letter] for letter in letters)
        for block in blocks.get(where, [-1]):
            whole = name if where == "-" else f"model.layers.{block}.{name}"
            found |= {whole.replace("*", str(expert)): shape for expert in range(8 if "*" in whole else 1)}
    return found


def _drawn(name: str, shape: tuple[int, ...], chance: torch.Generator) -> torch.Tensor:
    found = torch.randn(shape, generator=chance) * (0.25 if len(shape) == 1 else 0.3)
    return (found + (1.0 if name.endswith("norm.weight") else 0.0)).bfloat16()
