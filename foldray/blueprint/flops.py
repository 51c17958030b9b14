"""Floating-point operations of one training step, in closed form. No torch.

Counted as model FLOPs: matrix products only, forward plus twice that for backward, no recomputation; a product of
[a, b] by [b, c] is 2abc. Attention scores are counted causally (half of S×S); `causal=False` counts the full square.
"""

from __future__ import annotations

from foldray.blueprint.model import ModelSpec


def forward_flops_per_token(model: ModelSpec, seq_len: int, causal: bool = True) -> float:
    """FLOPs of one token's forward pass, averaged over a sequence of `seq_len` tokens."""
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    matrices = 1 + len(model.activation.inwards)
    keys = (seq_len + 1) / 2 if causal else seq_len
    attention = 2 * model.hidden * (heads + 2 * kv) + 2 * heads * model.hidden + 4 * heads * keys
    dense = 2 * matrices * model.hidden * model.ffn_hidden
    moe = (
        2 * matrices * model.hidden * (model.topk * model.expert_hidden + model.shared_hidden) + 2 * model.hidden * model.experts
    )
    blocks = len(model.moe_layers)
    return model.layers * attention + blocks * moe + (model.layers - blocks) * dense + 2 * model.hidden * model.vocab


def step_flops(model: ModelSpec, seq_len: int, sequences: int, causal: bool = True) -> float:
    """FLOPs of forward and backward over `sequences` sequences."""
    return 3 * forward_flops_per_token(model, seq_len, causal) * seq_len * sequences
