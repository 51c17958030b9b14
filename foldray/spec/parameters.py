"""The parameter table: every parameter's global name, shape, layer and gradient class. No torch.

The table is what the model builds from, what a checkpoint is keyed by and what counts are taken from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from foldray.spec.model import ModelSpec

GradientClass = Literal["dense", "expert"]


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the whole model.

    Args:
        name: global name; an expert's carries the expert's global id.
        shape: shape in the whole model, matrices as [in, out].
        layer: block index; -1 for the embeddings, `layers` for the final norm and the head.
        gradient_class: "dense" is summed over DP×CP, "expert" over EDP; both are scaled by 1/(DP·CP).
        init: standard deviation of the normal initialisation; None initialises to one (norm weights), 0 to zero.
    """

    name: str
    shape: tuple[int, ...]
    layer: int
    gradient_class: GradientClass = "dense"
    init: float | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def parameter_table(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    """All parameters of the model, in order of use."""
    std = model.init_std
    table = [ParameterSpec("embedding.weight", (model.vocab, model.hidden), -1, init=std)]
    if model.positions == "learned":
        table.append(ParameterSpec("positions.weight", (model.max_positions, model.hidden), -1, init=std))
    for layer in range(model.layers):
        table += _block(model, layer)
    table += _norm(model, "final_norm", model.layers)
    if not model.tied_embeddings:
        table.append(ParameterSpec("head.weight", (model.vocab, model.hidden), model.layers, init=std))
    return tuple(table)


def count_parameters(model: ModelSpec) -> int:
    return sum(parameter.count for parameter in parameter_table(model))


def _block(model: ModelSpec, layer: int) -> list[ParameterSpec]:
    name, std = f"blocks.{layer}", model.init_std
    out_std = std / math.sqrt(2 * model.layers)  # residual branches add up: GPT-2's scaled initialisation
    heads, hidden = model.heads * model.head_dim, model.hidden
    qkv = heads + 2 * model.kv_heads * model.head_dim
    rows = _norm(model, f"{name}.attention_norm", layer)
    rows.append(ParameterSpec(f"{name}.attention.qkv", (hidden, qkv), layer, init=std))
    rows.append(ParameterSpec(f"{name}.attention.out", (heads, hidden), layer, init=out_std))
    rows += _norm(model, f"{name}.ffn_norm", layer)
    if not model.is_moe(layer):
        return rows + _ffn(model, f"{name}.ffn", model.ffn_hidden, layer, out_std)
    rows.append(ParameterSpec(f"{name}.moe.router.weight", (hidden, model.experts), layer, init=std))
    for expert in range(model.experts):
        rows += _ffn(model, f"{name}.moe.experts.{expert}", model.expert_hidden, layer, out_std, "expert")
    if model.shared_hidden:
        rows += _ffn(model, f"{name}.moe.shared", model.shared_hidden, layer, out_std)
    return rows


def _ffn(
    model: ModelSpec, name: str, inner: int, layer: int, out_std: float, kind: GradientClass = "dense"
) -> list[ParameterSpec]:
    width = 2 * inner if model.ffn == "gated_silu" else inner  # gate and up side by side
    return [
        ParameterSpec(f"{name}.up", (model.hidden, width), layer, kind, model.init_std),
        ParameterSpec(f"{name}.down", (inner, model.hidden), layer, kind, out_std),
    ]


def _norm(model: ModelSpec, name: str, layer: int) -> list[ParameterSpec]:
    rows = [ParameterSpec(f"{name}.weight", (model.hidden,), layer)]
    if model.norm == "layernorm":
        rows.append(ParameterSpec(f"{name}.bias", (model.hidden,), layer, init=0.0))
    return rows
