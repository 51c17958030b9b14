"""Named models.

The sizes are those of the papers' tables and of the models' own configuration files. Mixtral-8x22B and its G8T8
re-parameterisation, Qwen2-57B-A14B and Llama3-8x70B are as in MoE Parallel Folding, section 4.1. GPT-MoE-S/M/L are as in
FoldMoE, table 1, with MoE in every other block; dense inner width 4 × hidden and the GPT-2 vocabulary are assumptions.
DeepSeek-MoE, GPT-OSS-120B and Qwen3-235B-A22B are as in DisagMoE's model table, with the head counts and vocabularies of
the released models. The presets leave out sliding windows, attention sinks and query/key norms of the released models.
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


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _tiny(8, 2),
    "tiny-gpt": _tiny(8, 1, moe_every=2, norm="layernorm", positions="learned", ffn="gelu", router={"softmax": "before_topk"}),
    "tiny-fine": _tiny(32, 4, expert_hidden=64, shared_hidden=128, dense_first=1,
                       router={"score": "sigmoid", "normalize": True, "bias_rate": 1e-3, "balance_loss": 0.0}),
    "gpt-moe-s": _gpt_moe(6, 512, 1024),
    "gpt-moe-m": _gpt_moe(6, 768, 1536),
    "gpt-moe-l": _gpt_moe(12, 1024, 2048),
    "mixtral-8x22b": _mixtral(8, 2, 16384),
    "mixtral-8x22b-g8t8": _mixtral(64, 8, 2048),
    "qwen2-57b-a14b": {
        "layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "head_dim": 128, "ffn_hidden": 18944,
        "experts": 64, "topk": 8, "expert_hidden": 2560, "shared_hidden": 20480, "vocab": 151936, "rope_theta": 1e6,
        "router": {"softmax": "before_topk"},
    },
    "llama3-8x70b": {
        "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 28672,
        "experts": 8, "topk": 2, "expert_hidden": 28672, "vocab": 128256, "rope_theta": 5e5,
    },
    "deepseek-moe": {
        "layers": 28, "hidden": 2048, "heads": 16, "kv_heads": 16, "head_dim": 128, "ffn_hidden": 10944,
        "experts": 64, "topk": 4, "expert_hidden": 1408, "shared_hidden": 2816, "vocab": 102400, "dense_first": 1,
        "router": {"softmax": "before_topk"},
    },
    "gpt-oss-120b": {
        "layers": 36, "hidden": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "ffn_hidden": 2880,
        "experts": 128, "topk": 4, "expert_hidden": 2880, "vocab": 201088, "rope_theta": 150000.0,
    },
    "qwen3-235b-a22b": {
        "layers": 94, "hidden": 4096, "heads": 64, "kv_heads": 4, "head_dim": 128, "ffn_hidden": 12288,
        "experts": 128, "topk": 8, "expert_hidden": 1536, "vocab": 151936, "rope_theta": 1e6,
        "router": {"softmax": "before_topk", "normalize": True},
    },
}  # fmt: skip
