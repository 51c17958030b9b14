"""Floating-point operations of one training step, in closed form. No torch.

These are model FLOPs. Only matrix products count; a product of [a, b] by [b, c] is 2abc. Backward counts twice as much as
forward. With adapters, their own products count in the same way; the model's own weights are frozen, so their products count once
in backward. Recomputation does not count. Attention counts the pairs of a query and a key that it sees, which is half of S×S for
causal attention without a window. `causal=False` counts all of S×S for every window. Linear attention counts three products of a
token with the state of each head: what it reads, what it writes, and what the query reads.
"""

from __future__ import annotations

from collections import Counter

from foldray.blueprint.block import BlockSpec, FeedForwardSpec
from foldray.blueprint.model import ModelSpec
from foldray.blueprint.parameters import count_by_cut
from foldray.errors import UserError


def forward_flops_per_token(model: ModelSpec, seq_len: int, causal: bool = True) -> float:
    """Return the FLOPs of one token's forward, averaged over a sequence of `seq_len` tokens."""
    blocks = Counter(map(model.block, model.all_layers))
    head = 2.0 * model.hidden * model.vocab * (1 + model.mtp_depth)
    return head + sum(count * sum(_halves(model, block, seq_len, causal)) for block, count in blocks.items())


def half_flops(model: ModelSpec, seq_len: int) -> tuple[float, float]:
    """Return the FLOPs of one token's forward in a MoE block: those of attention's half, and those of the experts."""
    if not model.moe_layers:
        raise UserError("model", model.preset or "as given", "has no MoE block")
    last = max(layer for layer in model.moe_layers if layer < model.layers)
    attention, experts = _halves(model, model.block(last), seq_len, causal=True)
    return attention, experts


def _halves(model: ModelSpec, block: BlockSpec, seq_len: int, causal: bool) -> tuple[float, float]:
    """Return the FLOPs of a token in a block: attention with everything dense, and the experts."""
    attention, moe = block.attention, block.moe
    products = sum(width * (inside or model.hidden) for inside, width in attention.inputs.values())
    products += model.hidden * (attention.outputs + sum(attention.downs.values()))
    products += 2 * model.hidden * model.hidden * block.mtp
    flops = 2 * products + _core(block, seq_len, causal)
    if block.dense:
        flops += _feed_forward(model.hidden, block.dense)
    if not moe:
        return flops, 0.0
    flops += 2 * model.hidden * moe.experts + (_feed_forward(model.hidden, moe.shared) if moe.shared else 0)
    return flops, moe.topk * _feed_forward(model.hidden, moe.expert)


def _core(block: BlockSpec, seq_len: int, causal: bool) -> float:
    """Return the FLOPs of a token in attention that have no weights: scores and sums of values, or states."""
    attention = block.attention
    keys = attention.sees.pairs(range(seq_len)) / seq_len if causal else seq_len
    return 6 * attention.state if attention.linear else 2 * (attention.queries + attention.outputs) * keys


def _feed_forward(hidden: int, spec: FeedForwardSpec) -> int:
    return 2 * hidden * (spec.width + spec.inner)


def step_flops(model: ModelSpec, seq_len: int, sequences: int, causal: bool = True) -> float:
    """Return the FLOPs of forward and backward over `sequences` sequences of `seq_len` tokens."""
    token = forward_flops_per_token(model, seq_len, causal)
    if model.adapter is None:
        return 3 * token * seq_len * sequences
    core = sum(_core(model.block(layer), seq_len, causal) for layer in model.all_layers)
    outside, inside = count_by_cut(model, trained=True)
    adapters = 2.0 * (outside + inside * model.topk / model.experts)
    return (2 * token + core + 3 * adapters) * seq_len * sequences
