"""Named models.

The sizes are those of the papers' tables and of the models' own configuration files. Mixtral-8x22B's G8T8
re-parameterisation and Llama3-8x70B are as in MoE Parallel Folding, section 4.1. GPT-MoE-S/M/L are as in FoldMoE, table 1,
with MoE in every other block; dense inner width 4 × hidden and the GPT-2 vocabulary are assumptions, and so is that no product
has a bias. DeepSeek-MoE is as in DisagMoE's model table, with four experts for each token, and else like the released
deepseek-moe-16b-base, where a token has six.

The models of `_RELEASED` are whole, as their `config.json` describes them, and can be imported and exported. Mixtral-8x22B and
Qwen2-57B-A14B of MoE Parallel Folding, and GPT-OSS-120B and Qwen3-235B-A22B of DisagMoE are among them.
"""

from __future__ import annotations

from typing import Any


def _gpt_moe(layers: int, hidden: int, expert_hidden: int) -> dict[str, Any]:
    return {
        "layers": layers, "hidden": hidden, "heads": 8, "kv_heads": 8, "head_dim": hidden // 8,
        "ffn_hidden": 4 * hidden, "experts": 16, "topk": 1, "expert_hidden": expert_hidden, "vocab": 50257,
        "moe_every": 2, "norm": "layernorm", "positions": "learned", "max_positions": 32768, "ffn": "gelu",
        "tied_embeddings": True, "router": {"softmax": "before_topk"},
    }  # fmt: skip


def _mixtral(experts: int, topk: int, expert_hidden: int) -> dict[str, Any]:
    return {
        "layers": 56, "hidden": 6144, "heads": 48, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 16384,
        "experts": experts, "topk": topk, "expert_hidden": expert_hidden, "vocab": 32000, "rope_theta": 1e6,
    }  # fmt: skip


def _tiny(experts: int, topk: int, **changes: Any) -> dict[str, Any]:
    return {
        "layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn_hidden": 384,
        "experts": experts, "topk": topk, "expert_hidden": 192, "vocab": 320, "tied_embeddings": True, **changes,
    }  # fmt: skip


def _yarn(factor: float, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"factor": factor, "original_positions": 4096, **more}}


def _deepseek(heads: int, **sizes: Any) -> dict[str, Any]:
    return {
        "heads": heads, "kv_heads": heads, "head_dim": 192, "value_dim": 128, "rope_dim": 64, "rope_pairs": "interleaved",
        "latent_rank": 512, "norm_eps": 1e-6, **sizes,
    }  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "layers": layers, "hidden": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "ffn_hidden": 2880,
        "experts": experts, "topk": 4, "expert_hidden": 2880, "vocab": 201088, "rope_theta": 150000.0,
        "windows": ["sliding:128", "full"], "attention_bias": "all", "attention_sinks": True, "expert_bias": True,
        "ffn": "gated_clamped", "router": {"logit_bias": True}, **_yarn(32.0, truncate=False),
    }  # fmt: skip


def _qwen3(layers: int, hidden: int, heads: int, ffn_hidden: int, expert_hidden: int) -> dict[str, Any]:
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 4, "head_dim": 128, "ffn_hidden": ffn_hidden,
        "experts": 128, "topk": 8, "expert_hidden": expert_hidden, "vocab": 151936, "rope_theta": 1e6, "norm_eps": 1e-6,
        "qk_norm": "head", "router": {"softmax": "before_topk", "normalize": True},
    }  # fmt: skip


_RELEASED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 14336,
        "experts": 8, "topk": 2, "expert_hidden": 14336, "vocab": 32000, "rope_theta": 1e6,
    },
    "mixtral-8x22b": _mixtral(8, 2, 16384),
    "qwen2-57b-a14b": {
        "layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "head_dim": 128, "ffn_hidden": 18944,
        "experts": 64, "topk": 8, "expert_hidden": 2560, "shared_hidden": 20480, "shared_gate": True, "vocab": 151936,
        "rope_theta": 1e6, "norm_eps": 1e-6, "attention_bias": "inputs", "router": {"softmax": "before_topk"},
    },
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 12288, 1536),
    "olmoe-1b-7b": {
        "layers": 16, "hidden": 2048, "heads": 16, "kv_heads": 16, "head_dim": 128, "ffn_hidden": 1024,
        "experts": 64, "topk": 8, "expert_hidden": 1024, "vocab": 50304, "qk_norm": "all",
        "router": {"softmax": "before_topk"},
    },
    "glm-4.5-air": {
        "layers": 46, "hidden": 4096, "heads": 96, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 10944, "dense_first": 1,
        "experts": 128, "topk": 8, "expert_hidden": 1408, "shared_hidden": 1408, "vocab": 151552, "rope_theta": 1e6,
        "rope_dim": 64, "attention_bias": "inputs", "router": {"score": "sigmoid", "normalize": True},
    },
    "minimax-m2": {
        "layers": 62, "hidden": 3072, "heads": 48, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 1536,
        "experts": 256, "topk": 8, "expert_hidden": 1536, "vocab": 200064, "rope_theta": 5e6, "norm_eps": 1e-6,
        "rope_dim": 64, "qk_norm": "all", "router": {"score": "sigmoid", "normalize": True},
    },
    "ernie-4.5-21b-a3b": {
        "layers": 28, "hidden": 2560, "heads": 20, "kv_heads": 4, "head_dim": 128, "ffn_hidden": 12288, "dense_first": 1,
        "experts": 64, "topk": 6, "expert_hidden": 1536, "shared_hidden": 3072, "vocab": 103424, "rope_theta": 5e5,
        "rope_pairs": "interleaved", "tied_embeddings": True,
        "router": {"softmax": "before_topk", "normalize": True, "selection_bias": True},
    },
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v2-lite": _deepseek(
        16, layers=27, hidden=2048, ffn_hidden=10944, dense_first=1, experts=64, topk=6, expert_hidden=1408, shared_hidden=2816,
        vocab=102400, router={"softmax": "before_topk"}, **_yarn(40.0, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek-v3": _deepseek(
        128, layers=61, hidden=7168, ffn_hidden=18432, dense_first=3, experts=256, topk=8, expert_hidden=2048,
        shared_hidden=2048, vocab=129280, latent_query_rank=1536, **_yarn(40.0, mscale=1.0, mscale_all_dim=1.0),
        router={"score": "sigmoid", "normalize": True, "scale": 2.5, "groups": 8, "topk_groups": 4},
    ),
    "moonlight-16b-a3b": _deepseek(
        16, layers=27, hidden=2048, ffn_hidden=11264, dense_first=1, experts=64, topk=6, expert_hidden=1408, shared_hidden=2816,
        vocab=163840, rope_theta=50000.0, norm_eps=1e-5, router={"score": "sigmoid", "normalize": True, "scale": 2.446},
    ),
    "kimi-k2": _deepseek(
        64, layers=61, hidden=7168, ffn_hidden=18432, dense_first=1, experts=384, topk=8, expert_hidden=2048,
        shared_hidden=2048, vocab=163840, latent_query_rank=1536, rope_theta=50000.0,
        router={"score": "sigmoid", "normalize": True, "scale": 2.827},
        **_yarn(32.0, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0),
    ),
    "kimi-linear-48b-a3b": {
        "layers": 27, "hidden": 2304, "heads": 32, "kv_heads": 32, "head_dim": 192, "value_dim": 128, "latent_rank": 512,
        "latent_norm_eps": 1e-6, "rope_dim": 64, "full_positions": "none", "ffn_hidden": 9216, "dense_first": 1, "experts": 256,
        "topk": 8, "expert_hidden": 1024, "shared_hidden": 1024, "vocab": 163840,
        "windows": [*["linear", "linear", "linear", "full"] * 6, "linear", "linear", "full"], "linear_kind": "kimi_delta",
        "linear_key_dim": 128, "router": {"score": "sigmoid", "normalize": True, "scale": 2.446},
    },
    "glm-4.7-flash": _deepseek(
        20, layers=47, hidden=2048, head_dim=256, value_dim=256, ffn_hidden=10240, dense_first=1, experts=64, topk=4,
        expert_hidden=1536, shared_hidden=1536, vocab=154880, latent_query_rank=768, rope_theta=1e6, norm_eps=1e-5,
        latent_norm_eps=1e-6, router={"score": "sigmoid", "normalize": True, "scale": 1.8},
    ),
    "dots.llm1": {
        "layers": 62, "hidden": 4096, "heads": 32, "kv_heads": 32, "head_dim": 128, "ffn_hidden": 10944, "dense_first": 1,
        "experts": 128, "topk": 6, "expert_hidden": 1408, "shared_hidden": 2816, "vocab": 152064, "rope_theta": 1e7,
        "qk_norm": "head", "router": {"score": "sigmoid", "normalize": True, "scale": 2.5},
    },
    "solar-open-100b": {
        "layers": 48, "hidden": 4096, "heads": 64, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 1280, "experts": 128,
        "topk": 8, "expert_hidden": 1280, "shared_hidden": 1280, "vocab": 196608, "rope_theta": 1e6,
        "rope_scaling": {"factor": 2.0, "original_positions": 65536}, "router": {"score": "sigmoid", "normalize": True},
    },
    "trinity-mini": {
        "layers": 32, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn_hidden": 6144, "dense_first": 2,
        "experts": 128, "topk": 8, "expert_hidden": 1024, "shared_hidden": 1024, "vocab": 200192, "qk_norm": "head",
        "windows": ["sliding:2048", "sliding:2048", "sliding:2048", "full"], "full_positions": "none", "norms": "both",
        "attention_gate": "element", "embedding_scale": 2048**0.5,
        "router": {"score": "sigmoid", "normalize": True, "scale": 2.826},
    },
    "granite-3.1-3b-a800m": {
        "layers": 32, "hidden": 1536, "heads": 24, "kv_heads": 8, "head_dim": 64, "ffn_hidden": 512, "experts": 40, "topk": 8,
        "expert_hidden": 512, "vocab": 49155, "rope_theta": 1e7, "norm_eps": 1e-6, "tied_embeddings": True,
        "attention_scale": 0.015625, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 1 / 6,
    },
    "qwen3-next-80b-a3b": {
        "layers": 48, "hidden": 2048, "heads": 16, "kv_heads": 2, "head_dim": 256, "ffn_hidden": 5120, "experts": 512, "topk": 10,
        "expert_hidden": 512, "shared_hidden": 512, "shared_gate": True, "vocab": 151936, "rope_theta": 1e7, "rope_dim": 64,
        "norm": "zero_rmsnorm", "norm_eps": 1e-6, "qk_norm": "head", "attention_gate": "element",
        "windows": ["linear", "linear", "linear", "full"], "linear_heads": 32, "linear_key_heads": 16, "linear_key_dim": 128,
        "router": {"softmax": "before_topk", "normalize": True},
    },
    "hy3": {
        "layers": 80, "hidden": 4096, "heads": 64, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 13312, "dense_first": 1,
        "experts": 192, "topk": 8, "expert_hidden": 1536, "shared_hidden": 1536, "vocab": 120832, "rope_theta": 11158840.0,
        "qk_norm": "head", "router": {"score": "sigmoid", "normalize": True, "scale": 2.826},
    },
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _tiny(8, 2),
    "tiny-gpt": _tiny(8, 1, moe_every=2, norm="layernorm", positions="learned", ffn="gelu", router={"softmax": "before_topk"}),
    "tiny-fine": _tiny(32, 4, expert_hidden=64, shared_hidden=128, dense_first=1,
                       router={"score": "sigmoid", "normalize": True, "bias_rate": 1e-3, "balance_loss": 0.0}),
    **_RELEASED,
    "gpt-moe-s": _gpt_moe(6, 512, 1024),
    "gpt-moe-m": _gpt_moe(6, 768, 1536),
    "gpt-moe-l": _gpt_moe(12, 1024, 2048),
    "mixtral-8x22b-g8t8": _mixtral(64, 8, 2048),
    "llama3-8x70b": {
        "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 28672,
        "experts": 8, "topk": 2, "expert_hidden": 28672, "vocab": 128256, "rope_theta": 5e5,
    },
    "deepseek-moe": {
        "layers": 28, "hidden": 2048, "heads": 16, "kv_heads": 16, "head_dim": 128, "ffn_hidden": 10944,
        "experts": 64, "topk": 4, "expert_hidden": 1408, "shared_hidden": 2816, "vocab": 102400, "dense_first": 1,
        "norm_eps": 1e-6, "router": {"softmax": "before_topk"},
    },
}  # fmt: skip
