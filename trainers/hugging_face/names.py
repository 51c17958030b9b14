"""How transformers calls tensors, and where foldray's parameters are in them.

transformers keeps matrices as [out, in], foldray as [in, out].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from foldray.blueprint import ModelSpec


class Tensor(NamedTuple):
    """A parameter of foldray in a tensor of a family.

    Args:
        name: the tensor's name in the files of transformers.
        ours: the global name of the parameter (`foldray.blueprint.parameters`).
        turned: whether rows and columns change places.
        keeps: whether it stays in the type that training has it in.
        axes: number of axes of size 1 before those of the parameter.
        place: where the parameter is in the tensor, if the tensor has several; empty if it is all of it.
        shape: shape of the tensor, if it has several parameters.
        heads: shape of the tensor with its rows by head, if the parameter has some rows of every head. Then `place` is in this.
    """

    name: str
    ours: str
    turned: bool = False
    keeps: bool = False
    axes: int = 0
    place: tuple[int | slice, ...] = ()
    shape: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()

    def shape_for(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the tensor for a parameter of this shape."""
        return self.shape or (*[1] * self.axes, *(shape[::-1] if self.turned else shape))

    def taken(self, tensor: Any, box: tuple[slice, ...] = ()) -> torch.Tensor:
        """Return a box of the parameter; an empty box is all of it.

        The tensor may also be one in files that can be sliced like it (`trainers.hugging_face.quantized`).
        """
        if self.place:
            whole = tensor[...].reshape(self.heads)[self.place].flatten(0, -2) if self.heads else tensor[self.place]
            whole = whole.T if self.turned else whole
            return whole[box] if box else whole
        part = tensor[(*[0] * self.axes, *(box[::-1] if self.turned else box or (...,)))]
        return part.T if self.turned else part

    def put(self, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
        """Write the parameter into the tensor."""
        given = parameter.T if self.turned else parameter
        if self.heads:
            part = tensor.view(self.heads)[self.place]
            part.copy_(given.reshape(part.shape))
        else:
            tensor[self.place or (0,) * self.axes or ...] = given


SCORE_BIAS = Tensor("gate.e_score_correction_bias", "")
"""The selection bias of most families; `mlp` completes both names."""
_MATRICES = ("gate_proj", "up_proj", "down_proj")
Block = Callable[[ModelSpec, int], Iterator[Tensor]]
"""The tensors of a block's feed-forward part."""


def _latent_attention(model: ModelSpec, theirs: str, ours: str) -> Iterator[Tensor]:
    if model.latent_query_rank:
        yield Tensor(f"{theirs}.q_a_proj.weight", f"{ours}.query_down", True)
        yield Tensor(f"{theirs}.q_a_layernorm.weight", f"{ours}.norm.query")
    yield Tensor(f"{theirs}.{'q_b_proj' if model.latent_query_rank else 'q_proj'}.weight", f"{ours}.query", True)
    yield Tensor(f"{theirs}.kv_a_proj_with_mqa.weight", f"{ours}.key_value_down", True)
    yield Tensor(f"{theirs}.kv_a_layernorm.weight", f"{ours}.norm.key_value")
    yield Tensor(f"{theirs}.kv_b_proj.weight", f"{ours}.key_value", True)
    yield Tensor(f"{theirs}.o_proj.weight", f"{ours}.out", True)


def attention(model: ModelSpec, theirs: str, ours: str) -> Iterator[Tensor]:
    """Yield the tensors of a block's attention, which all families call alike."""
    if model.latent_rank:
        yield from _latent_attention(model, theirs, ours)
        return
    biased = {"none": "", "inputs": "qkv", "all": "qkvo"}[model.attention_bias]
    for letter, part in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
        yield Tensor(f"{theirs}.{letter}_proj.weight", f"{ours}.{part}", True)
        if letter in biased:
            yield Tensor(f"{theirs}.{letter}_proj.bias", f"{ours}.{part}_bias")
        if letter in "qk" and model.qk_norm != "none":
            yield Tensor(f"{theirs}.{letter}_norm.weight", f"{ours}.norm.{part}")
    if model.attention_gate != "none":
        yield Tensor(f"{theirs}.gate_proj.weight", f"{ours}.gate", True)
    if model.attention_sinks:
        yield Tensor(f"{theirs}.sinks", f"{ours}.sinks")


def gated_attention(model: ModelSpec, theirs: str, ours: str) -> Iterator[Tensor]:
    """Yield the tensors of a block's attention where the rows of a head's gate follow those of its query."""
    width, columns = model.head_dim, model.hidden
    shape, heads = (2 * model.heads * width, columns), (model.heads, 2 * width, columns)
    for tensor in attention(model, theirs, ours):
        rows = {f"{ours}.query": slice(0, width), f"{ours}.gate": slice(width, None)}.get(tensor.ours)
        if rows is None:
            yield tensor
        else:
            place = (slice(None), rows)
            yield Tensor(f"{theirs}.q_proj.weight", tensor.ours, True, place=place, shape=shape, heads=heads)


def _delta_rule(model: ModelSpec, theirs: str, ours: str) -> Iterator[Tensor]:
    """Yield what all linear attention calls alike, but the product in front."""
    assert model.linear
    first, widths = 0, model.linear.mixed
    for part, width in widths.items():
        place, shape = (slice(first, first + width), 0), (sum(widths.values()), 1, model.linear_taps)
        yield Tensor(f"{theirs}.conv1d.weight", f"{ours}.{part}_filter", True, place=place, shape=shape)
        first += width
    yield Tensor(f"{theirs}.A_log", f"{ours}.decay_rate")
    yield Tensor(f"{theirs}.dt_bias", f"{ours}.time_step")
    yield Tensor(f"{theirs}.norm.weight", f"{ours}.norm.output")
    yield Tensor(f"{theirs}.out_proj.weight", f"{ours}.out", True)


def by_key_head(model: ModelSpec, theirs: str, ours: str) -> Iterator[Tensor]:
    """Yield the tensors of a block's linear attention as Qwen3-Next has them: rows of all parts in turns, by head of keys."""
    spec = model.linear
    assert spec
    keys, group = spec.kv_heads, spec.heads // spec.kv_heads
    values = group * spec.value_dim
    for name, widths in (
        ("in_proj_qkvz", {"query": spec.key_dim, "key": spec.key_dim, "value": values, "gate": values}),
        ("in_proj_ba", {"write": group, "decay": group}),
    ):
        first, together = 0, sum(widths.values())
        for part, width in widths.items():
            place, heads = (slice(None), slice(first, first + width)), (keys, together, model.hidden)
            shape = (keys * together, model.hidden)
            yield Tensor(f"{theirs}.{name}.weight", f"{ours}.{part}", True, place=place, shape=shape, heads=heads)
            first += width
    yield from _delta_rule(model, theirs, ours)


def part_by_part(model: ModelSpec, theirs: str, ours: str) -> Iterator[Tensor]:
    """Yield the tensors of a block's linear attention as Qwen3.5 has them: all heads' queries, then keys, then values."""
    spec = model.linear
    assert spec
    first, shape = 0, (sum(spec.mixed.values()), model.hidden)
    for part, width in spec.mixed.items():
        place = (slice(first, first + width),)
        yield Tensor(f"{theirs}.in_proj_qkv.weight", f"{ours}.{part}", True, place=place, shape=shape)
        first += width
    for letter, part in (("z", "gate"), ("b", "write"), ("a", "decay")):
        yield Tensor(f"{theirs}.in_proj_{letter}.weight", f"{ours}.{part}", True)
    yield from _delta_rule(model, theirs, ours)


def kimi_delta(model: ModelSpec, theirs: str, ours: str) -> Iterator[Tensor]:
    """Yield the tensors of a block's linear attention as Kimi Linear has them, each part in its own."""
    spec = model.linear
    assert spec
    for letter, part in (("q", "query"), ("k", "key"), ("v", "value")):
        place, shape = (slice(None), 0), (spec.mixed[part], 1, model.linear_taps)
        yield Tensor(f"{theirs}.{letter}_proj.weight", f"{ours}.{part}", True)
        yield Tensor(f"{theirs}.{letter}_conv1d.weight", f"{ours}.{part}_filter", True, place=place, shape=shape)
    for letter, part in (("f", "decay"), ("g", "gate")):
        yield Tensor(f"{theirs}.{letter}_a_proj.weight", f"{ours}.{part}_down", True)
        yield Tensor(f"{theirs}.{letter}_b_proj.weight", f"{ours}.{part}", True)
    yield Tensor(f"{theirs}.b_proj.weight", f"{ours}.write", True)
    yield Tensor(f"{theirs}.A_log", f"{ours}.decay_rate", place=(0, 0, slice(None), 0), shape=(1, 1, spec.heads, 1))
    yield Tensor(f"{theirs}.dt_bias", f"{ours}.time_step")
    yield Tensor(f"{theirs}.o_norm.weight", f"{ours}.norm.output")
    yield Tensor(f"{theirs}.o_proj.weight", f"{ours}.out", True)


NORMS = {
    "before": {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "after": {"attention_after": "post_attention_layernorm", "ffn_after": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm", "attention_after": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm", "ffn_after": "post_feedforward_layernorm",
    },
}  # fmt: skip
"""Names of a block's norms, by where they are and by foldray's names."""


def further(theirs: str, ours: str) -> Iterator[Tensor]:
    """Yield what a block of multi-token prediction has beside the block itself (DeepSeek-V3's `README_WEIGHTS.md`)."""
    yield Tensor(f"{theirs}.enorm.weight", f"{ours}.embedding_norm.weight")
    yield Tensor(f"{theirs}.hnorm.weight", f"{ours}.hidden_norm.weight")
    yield Tensor(f"{theirs}.eh_proj.weight", f"{ours}.projection", True)
    yield Tensor(f"{theirs}.shared_head.norm.weight", f"{ours}.final_norm.weight")


def network(theirs: str, ours: str, matrices: Sequence[str] = _MATRICES) -> Iterator[Tensor]:
    """Yield the tensors of a gated feed-forward network: its gate, its values, and the product behind them."""
    for matrix, part in zip(matrices, ("gate", "up", "down"), strict=True):
        yield Tensor(f"{theirs}.{matrix}.weight", f"{ours}.{part}", True)


def mlp(
    shared: str | None = None,
    bias: Tensor | None = None,
    part: str = "mlp",
    matrices: Sequence[str] = _MATRICES,
    router: str = "gate",
    stack: bool = False,
) -> Block:
    """Return the tensors of a block as most families have them.

    Args:
        shared: name of the shared expert in the block's network.
        bias: the selection bias; its names are relative to the block's network.
        part: name of the block's network.
        matrices: names of an expert's matrices.
        router: name of the router in the block's network.
        stack: whether tensors have all experts (`together`).
    """

    def tensors(model: ModelSpec, layer: int) -> Iterator[Tensor]:
        theirs, ours = f"model.layers.{layer}.{part}", f"blocks.{layer}"
        if not model.is_moe(layer):
            yield from network(theirs, f"{ours}.ffn")
            return
        yield Tensor(f"{theirs}.{router}.weight", f"{ours}.moe.router.weight", True)
        if bias:
            yield bias._replace(name=f"{theirs}.{bias.name}", ours=f"{ours}.moe.router.bias", keeps=True)
        if shared and model.shared_hidden:
            yield from network(f"{theirs}.{shared}", f"{ours}.moe.shared")
        if model.shared_gate:
            yield Tensor(f"{theirs}.{shared}_gate.weight", f"{ours}.moe.shared.output_gate", True)
        if stack:
            yield from together(model, f"{theirs}.experts", f"{ours}.moe.experts", "gate_up_proj", "down_proj")
        for expert in range(0 if stack else model.experts):
            yield from network(f"{theirs}.experts.{expert}", f"{ours}.moe.experts.{expert}", matrices)

    return tensors


def sparse_moe(bias: Tensor | None = None) -> Block:
    """Return the tensors of a block as Mixtral has them."""
    return mlp(bias=bias, part="block_sparse_moe", matrices=("w1", "w3", "w2"))


def together(model: ModelSpec, theirs: str, ours: str, inwards: str, out: str) -> Iterator[Tensor]:
    """Yield the tensors of a block's experts where those of all experts are one, with the rows of gate before those of up.

    Args:
        inwards, out: names of the products.
    """
    count, hidden, inner = model.experts, model.hidden, model.expert_hidden
    for expert in range(count):
        for part, rows in (("gate", slice(0, inner)), ("up", slice(inner, None))):
            shape = (count, 2 * inner, hidden)
            yield Tensor(f"{theirs}.{inwards}", f"{ours}.{expert}.{part}", True, place=(expert, rows), shape=shape)
        yield Tensor(f"{theirs}.{out}", f"{ours}.{expert}.down", True, place=(expert,), shape=(count, hidden, inner))


def granite(inwards: str, out: str, router: str) -> Block:
    """Return the tensors of a block as Granite has them. The shared expert's gate and up are one, too."""

    def tensors(model: ModelSpec, layer: int) -> Iterator[Tensor]:
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}.moe"
        yield Tensor(f"{theirs}.block_sparse_moe.{router}.weight", f"{ours}.router.weight", True)
        yield from together(model, f"{theirs}.block_sparse_moe", f"{ours}.experts", inwards, out)
        if width := model.shared_hidden:
            shared, shape = f"{theirs}.shared_mlp", (2 * width, model.hidden)
            for part, rows in (("gate", slice(0, width)), ("up", slice(width, None))):
                yield Tensor(f"{shared}.input_linear.weight", f"{ours}.shared.{part}", True, place=(rows,), shape=shape)
            yield Tensor(f"{shared}.output_linear.weight", f"{ours}.shared.down", True)

    return tensors


def columns_together(
    model: ModelSpec, layer: int, router: str = "gate", inwards: str = "gate_up_proj", out: str = "down_proj"
) -> Iterator[Tensor]:
    """Yield the tensors of a block as Qwen3-VL has them: those of all experts are one, with the columns of gate before those of
    up.

    Args:
        router, inwards, out: names of the router and of the experts' products.
    """
    if not model.is_moe(layer):
        yield from mlp()(model, layer)
        return
    theirs, ours, count = f"model.layers.{layer}.mlp", f"blocks.{layer}.moe", model.experts
    hidden, inner = model.hidden, model.expert_hidden
    yield Tensor(f"{theirs}.{router}.weight", f"{ours}.router.weight", True)
    if model.shared_hidden:
        yield from network(f"{theirs}.shared_experts", f"{ours}.shared")
    for expert in range(count):
        for part, columns in (("gate", slice(0, inner)), ("up", slice(inner, None))):
            place, shape = (expert, slice(None), columns), (count, hidden, 2 * inner)
            yield Tensor(f"{theirs}.experts.{inwards}", f"{ours}.experts.{expert}.{part}", place=place, shape=shape)
        shape = (count, inner, hidden)
        yield Tensor(f"{theirs}.experts.{out}", f"{ours}.experts.{expert}.down", place=(expert,), shape=shape)


def stacked(model: ModelSpec, layer: int) -> Iterator[Tensor]:
    """Yield the tensors of a block as GPT-OSS has them: those of all experts are one, with columns of gate and up in turns."""
    theirs, ours, count = f"model.layers.{layer}.mlp", f"blocks.{layer}.moe", model.experts
    hidden, inner = model.hidden, model.expert_hidden
    yield Tensor(f"{theirs}.router.weight", f"{ours}.router.weight", True)
    yield Tensor(f"{theirs}.router.bias", f"{ours}.router.logit_bias")
    for expert in range(count):
        name = f"{ours}.experts.{expert}"
        for first, part in enumerate(("gate", "up")):
            columns, both = slice(first, None, 2), f"{theirs}.experts.gate_up_proj"
            yield Tensor(both, f"{name}.{part}", place=(expert, slice(None), columns), shape=(count, hidden, 2 * inner))
            yield Tensor(f"{both}_bias", f"{name}.{part}_bias", place=(expert, columns), shape=(count, 2 * inner))
        down = f"{theirs}.experts.down_proj"
        yield Tensor(down, f"{name}.down", place=(expert,), shape=(count, inner, hidden))
        yield Tensor(f"{down}_bias", f"{name}.down_bias", place=(expert,), shape=(count, hidden))
