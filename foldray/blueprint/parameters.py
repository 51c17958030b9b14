"""The parameter table: every parameter's global name, shape, layer and gradient class. No torch.

The model is built from this table, its names are the keys of checkpoints, and numbers of parameters are counted in it.
Tensor parallelism cuts a matrix along one axis into equal pieces. For this reason, queries, keys and values are three
matrices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from foldray.blueprint.block import AttentionSpec, BlockSpec, FeedForwardSpec
from foldray.blueprint.model import ModelSpec
from foldray.blueprint.sections import AdapterSpec
from foldray.kinds import ATTENTION, EMBED, EXPERT, FFN, HEAD, MERGE, ROUTE, SHARED
from foldray.windows import LINEAR

GradientClass = Literal["dense", "replicated", "expert"]
CLASSES: tuple[GradientClass, ...] = get_args(GradientClass)
DecayInit = Literal["decay_rate", "time_step"]
_FIRST, _SECOND = "_lora.a", "_lora.b"  # ends of the names of an adapter's matrices
_FILTERS = (".query_filter", ".key_filter", ".value_filter")


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the whole model.

    Args:
        name: global name. The name of an expert's parameter has the expert's global id.
        shape: shape in the whole model. Matrices are [in, out], the embedding and the head [vocab, hidden].
        layer: index of the block; -1 for the embeddings. The final norm and the head belong to the last block before those of
            multi-token prediction.
        gradient_class: the ranks over which its gradient is summed. "dense" is summed over DP×CP, "expert" over EDP.
            "replicated" is whole on every tensor-parallel rank, which sees only its piece of the sequence, so its gradient
            is summed over TP×DP×CP.
        cut: the axis along which tp ("dense") or etp ("expert") cuts it; None leaves it whole.
        init: standard deviation of the normal distribution of its initial values; 0 is zeros, None is ones (norm weights). For
            the decay of linear attention, the name of a distribution (`Transformer`).
        trained: whether training changes it. With adapters, it changes them alone.
    """

    name: str
    shape: tuple[int, ...]
    layer: int
    op: str
    gradient_class: GradientClass = "dense"
    cut: int | None = None
    init: float | DecayInit | None = None
    trained: bool = True

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def expert(self) -> int | None:
        """Global id of its expert; None outside of experts."""
        return int(self.name.split(".experts.")[1].split(".")[0]) if self.gradient_class == "expert" else None

    @property
    def in_slices(self) -> bool:
        """Whether every slice of an expert (ETP) has it whole, and a part of its gradient."""
        return self.gradient_class == "expert" and self.cut is None

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is a matrix of the hidden layers, which Muon updates: of attention, a network, an expert or a router.

        The embeddings, the head, norms, biases and other vectors are left to AdamW, as in Muon's post (Jordan et al. 2024) and in
        Moonlight (arXiv:2502.16982, section 2). So are the filters of convolutions, which mix no columns.
        """
        return len(self.shape) == 2 and self.op not in (EMBED, HEAD) and not self.name.endswith(_FILTERS)


def parameter_table(model: ModelSpec, copies: bool = False) -> tuple[ParameterSpec, ...]:
    """Return all parameters of the model, in the order in which forward uses them. Those of adapters are the last ones.

    Args:
        copies: whether several TP ranks have the same key/value head (`ModelSpec.copies_keys`). Each then has the weights of all
            these heads, and adds the gradient of its own queries, as for other weights that every rank has whole.
    """
    std, vocabulary = model.init_std, (model.vocab, model.hidden)
    table = [ParameterSpec("embedding.weight", vocabulary, -1, EMBED, cut=0, init=std)]
    if model.positions == "learned":
        table.append(ParameterSpec("positions.weight", (model.max_positions, model.hidden), -1, EMBED, "replicated", init=std))
    for layer in range(model.layers):
        table += _block(model, layer, copies)
    table += _norm(model, "final_norm", model.layers - 1, HEAD)
    if not model.tied_embeddings:
        table.append(ParameterSpec("head.weight", vocabulary, model.layers - 1, HEAD, cut=0, init=std))
    for layer in model.all_layers[model.layers :]:
        table += _prediction(model, layer, copies)
    if model.adapter is None:
        return tuple(table)
    frozen = (replace(row, trained=False) for row in table)
    return (*frozen, *(row for layer in range(model.layers) for row in _adapters(model, model.adapter, layer)))


def adapter_pairs(model: ModelSpec) -> dict[str, tuple[str, str]]:
    """Return the names of the pair of matrices that is added to a parameter, by the name of the parameter."""
    names = {row.name for row in parameter_table(model) if row.trained and model.adapter}
    pairs = {}
    for name in names:
        if name.endswith(_SECOND):
            own = name.removesuffix(_SECOND)
            shared = f"{own.rsplit('.', 1)[0]}.inwards"  # of an expert's gate and up
            pairs[own] = (f"{own if own + _FIRST in names else shared}{_FIRST}", name)
    return pairs


def count_parameters(model: ModelSpec) -> int:
    return sum(count_by_cut(model))


def count_by_cut(model: ModelSpec, trained: bool = False) -> tuple[int, int]:
    """Return the number of elements outside of the experts, and the number of elements of all experts.

    tp cuts most of the first, ep and etp cut the second. The numbers come from closed forms, because the table of a model
    that must be refused for its size may be too long to make.

    Args:
        trained: whether to count only those that training changes. With adapters, these are theirs alone.
    """
    hidden, matrices = model.hidden, 1 + len(model.activation.inwards)
    norm = hidden * (2 if model.norm == "layernorm" else 1)
    kinds = Counter(model.window(layer) == LINEAR.name for layer in model.all_layers)
    first = {model.window(layer) == LINEAR.name: layer for layer in reversed(model.all_layers)}
    attention = sum(count * _attention_count(model.block(first[kind]).attention, hidden) for kind, count in kinds.items())
    depth, last_is_moe = model.mtp_depth, model.is_moe(model.layers - 1)
    sparse = (model.layers - model.dense_first) // model.moe_every + depth * last_is_moe
    edges = (1 if model.tied_embeddings else 2) * model.vocab + (model.max_positions if model.positions == "learned" else 0)
    norms = 4 if model.norms == "both" else 2
    blocks = attention + (model.layers + depth) * norms * norm + depth * (2 * hidden * hidden + 3 * norm)
    dense = (model.layers + depth - sparse) * matrices * hidden * model.ffn_hidden
    routed = sparse * hidden * (model.experts + matrices * model.shared_hidden + model.shared_gate)
    routed += sparse * model.experts * model.router.logit_bias
    expert = matrices * hidden * model.expert_hidden + model.expert_bias * ((matrices - 1) * model.expert_hidden + hidden)
    outside, inside = edges * hidden + norm + blocks + dense + routed, sparse * model.experts * expert
    if model.adapter is None:
        return outside, inside
    more_outside, more_inside = _adapter_count(model, model.adapter)
    adapters = model.layers * more_outside, sparse * model.experts * more_inside
    return adapters if trained else (outside + adapters[0], inside + adapters[1])


def _adapter_count(model: ModelSpec, adapter: AdapterSpec) -> tuple[int, int]:
    """Return the number of elements of the adapters of a block's attention, and of one expert."""
    attention, hidden, inner = model.block(0).attention, model.hidden, model.expert_hidden
    widths = {part: width for part, (_, width) in attention.inputs.items()} | {"out": attention.outputs}
    outside = sum(hidden + widths[part] for part in adapter.attention)
    inside = adapter.inwards * (hidden + len(model.activation.inwards) * inner) + adapter.outwards * (inner + hidden)
    return adapter.rank * outside, adapter.rank * inside


def _attention_count(spec: AttentionSpec, hidden: int) -> int:
    """Return the number of elements of a block's attention, without the norms around it."""
    matrices = sum(columns * (rows or hidden) for rows, columns in spec.inputs.values()) + hidden * spec.outputs
    matrices += hidden * sum(spec.downs.values())
    vectors = spec.heads * spec.sinks + sum(_norm_widths(spec).values()) + sum(_bias_widths(spec, hidden).values())
    if spec.linear:
        vectors += spec.linear.taps * sum(spec.mixed.values()) + spec.heads + spec.decays
    return matrices + vectors


def count_by_op(
    model: ModelSpec, copies: bool = False, trained: bool = True
) -> Mapping[tuple[str, BlockSpec | None], tuple[int, int]]:
    """Return the number of elements that the ops of one block compute with, by kind of op and block.

    A value is (elements that are cut among ranks, elements that each rank has whole; slices of an expert have some of its
    elements whole). The block of the embedding and of the head is None.

    Args:
        trained: whether to count elements that training changes, or those that it leaves as they are.
    """
    return _counts_by_op(model, copies)[trained]


@lru_cache(maxsize=16)
def _counts_by_op(model: ModelSpec, copies: bool) -> tuple[dict[tuple[str, BlockSpec | None], tuple[int, int]], ...]:
    """Return `count_by_op` of what training leaves as it is, and of what it changes. Both have all kinds of ops and blocks."""
    first: dict[tuple[str, BlockSpec | None], int] = {}
    counts: tuple[dict[tuple[str, BlockSpec | None], tuple[int, int]], ...] = ({}, {})
    for spec in parameter_table(model, copies):
        key = spec.op, None if spec.op in (EMBED, HEAD) else model.block(spec.layer)
        if key[1] is None or first.setdefault(key, spec.layer) == spec.layer:  # equal blocks are counted once
            for of in counts:
                of.setdefault(key, (0, 0))
            cut, whole = counts[spec.trained][key]
            counts[spec.trained][key] = (cut, whole + spec.count) if spec.cut is None else (cut + spec.count, whole)
    return counts


@lru_cache(maxsize=16)
def hidden_matrices(
    model: ModelSpec, copies: bool = False
) -> Mapping[tuple[str, BlockSpec], Mapping[tuple[GradientClass, int, int], int]]:
    """Return the matrices that Muon updates (`ParameterSpec.is_hidden_matrix`), by kind of op and block.

    A matrix is (gradient class, inputs, outputs) → number of such matrices in one block of the kind.
    """
    first: dict[tuple[str, BlockSpec], int] = {}
    matrices: dict[tuple[str, BlockSpec], Counter[tuple[GradientClass, int, int]]] = {}
    for spec in parameter_table(model, copies):
        if spec.is_hidden_matrix:
            key = spec.op, model.block(spec.layer)
            if first.setdefault(key, spec.layer) == spec.layer:  # equal blocks are counted once
                matrices.setdefault(key, Counter())[spec.gradient_class, spec.shape[0], spec.shape[1]] += 1
    return matrices


def _block(model: ModelSpec, layer: int, copies: bool) -> list[ParameterSpec]:
    name, std, hidden, block = f"blocks.{layer}", model.init_std, model.hidden, model.block(layer)
    out_std = std / math.sqrt(2 * model.layers)  # residual branches add up (GPT-2's scaled initialisation)
    attention, moe = block.attention, block.moe
    before, after = model.norms != "after", model.norms != "before"
    rows = _norm(model, f"{name}.attention_norm", layer, ATTENTION) if before else []
    for part, width in attention.downs.items():
        rows.append(ParameterSpec(f"{name}.attention.{part}", (hidden, width), layer, ATTENTION, "replicated", init=std))
    copied = ("key", "value") if copies and not attention.linear else ()
    for part, (inside, width) in attention.inputs.items():
        kind: tuple[GradientClass, int | None] = ("replicated", None) if part in copied else ("dense", 1)
        rows.append(ParameterSpec(f"{name}.attention.{part}", (inside or hidden, width), layer, ATTENTION, *kind, init=std))
    rows.append(ParameterSpec(f"{name}.attention.out", (attention.outputs, hidden), layer, ATTENTION, cut=0, init=out_std))
    rows += _attention_vectors(model, attention, f"{name}.attention", layer, ("out", *copied))
    if attention.sinks:
        rows.append(ParameterSpec(f"{name}.attention.sinks", (attention.heads,), layer, ATTENTION, cut=0, init=std))
    rows += _norm(model, f"{name}.attention_after", layer, ATTENTION) if after else []
    rows += _norm(model, f"{name}.ffn_norm", layer, FFN if block.dense else ROUTE) if before else []
    if block.dense:
        rows += _ffn(model, f"{name}.ffn", block.dense, layer, out_std, FFN)
    if moe:
        rows.append(ParameterSpec(f"{name}.moe.router.weight", (hidden, moe.experts), layer, ROUTE, "replicated", init=std))
        if model.router.logit_bias:
            bias = (moe.experts,)
            rows.append(ParameterSpec(f"{name}.moe.router.logit_bias", bias, layer, ROUTE, "replicated", init=0.0))
        for expert in range(moe.experts):
            rows += _ffn(model, f"{name}.moe.experts.{expert}", moe.expert, layer, out_std, EXPERT, "expert")
        if moe.shared:
            rows += _ffn(model, f"{name}.moe.shared", moe.shared, layer, out_std, SHARED)
        if moe.shared_gate:
            gate = (hidden, 1)
            rows.append(ParameterSpec(f"{name}.moe.shared.output_gate", gate, layer, SHARED, "replicated", init=std))
    return rows + (_norm(model, f"{name}.ffn_after", layer, FFN if block.dense else MERGE) if after else [])


def _adapters(model: ModelSpec, adapter: AdapterSpec, layer: int) -> list[ParameterSpec]:
    """Return the pairs of a block's adapters: a [in, rank], and b [rank, out], which begins with zeros.

    A product that TP or ETP cuts has one matrix of its pair cut along the same axis, and the other one whole. Each rank then has
    only a part of the gradient of the whole one. The products of an expert's gate and up share one matrix a, as in transformers.
    """
    block, rank, hidden, rows = model.block(layer), adapter.rank, model.hidden, list[ParameterSpec]()

    def add(name: str, inside: int, of: Mapping[str, int], cuts_inside: bool, op: str, kinds: tuple[GradientClass, ...]) -> None:
        cut_class, whole_class = kinds
        first: tuple[GradientClass, int | None] = (cut_class, 0) if cuts_inside else (whole_class, None)
        second: tuple[GradientClass, int | None] = (whole_class, None) if cuts_inside else (cut_class, 1)
        std = 1 / math.sqrt(3 * inside)  # that of PEFT's first matrices, which are uniform within 1 / √in
        rows.append(ParameterSpec(f"{name}{_FIRST}", (inside, rank), layer, op, *first, std))
        for part, width in of.items():
            rows.append(ParameterSpec(f"{part}{_SECOND}", (rank, width), layer, op, *second, 0.0))

    attention, prefix = block.attention, f"blocks.{layer}.attention"
    for part in adapter.attention:
        inside, width = (attention.outputs, hidden) if part == "out" else (hidden, attention.inputs[part][1])
        name = f"{prefix}.{part}"
        add(name, inside, {name: width}, part == "out", ATTENTION, ("dense", "replicated"))
    for expert in range(block.moe.experts if block.moe else 0):
        assert block.moe
        spec, name = block.moe.expert, f"blocks.{layer}.moe.experts.{expert}"
        if adapter.inwards:
            of = {f"{name}.{part}": spec.inner for part in spec.activation.inwards}
            add(f"{name}.inwards", hidden, of, False, EXPERT, ("expert", "expert"))
        if adapter.outwards:
            add(f"{name}.down", spec.inner, {f"{name}.down": hidden}, True, EXPERT, ("expert", "expert"))
    return rows


def _prediction(model: ModelSpec, layer: int, copies: bool) -> list[ParameterSpec]:
    """Return the parameters of a block of multi-token prediction. Rows of the projection are those of the embedding, then those
    of the hidden state, as in DeepSeek-V3's checkpoint."""
    name, both = f"blocks.{layer}.mtp", (2 * model.hidden, model.hidden)
    rows = [row for part in ("embedding_norm", "hidden_norm") for row in _norm(model, f"{name}.{part}", layer, ATTENTION)]
    rows.append(ParameterSpec(f"{name}.projection", both, layer, ATTENTION, "replicated", init=model.init_std))
    return [*rows, *_block(model, layer, copies), *_norm(model, f"{name}.final_norm", layer, HEAD)]


def _attention_vectors(
    model: ModelSpec, spec: AttentionSpec, name: str, layer: int, whole: tuple[str, ...]
) -> list[ParameterSpec]:
    """Return biases and norms of heads, and what linear attention has of each head or column. TP cuts those with a number for
    each column of the heads, but not the biases of the parts that are `whole`."""
    rows = []
    for part, width in spec.mixed.items():
        assert spec.linear
        shape, std = (spec.linear.taps, width), 1 / math.sqrt(3 * spec.linear.taps)  # that of torch's own convolutions
        rows.append(ParameterSpec(f"{name}.{part}_filter", shape, layer, ATTENTION, cut=1, init=std))
    decays: dict[DecayInit, int] = {"decay_rate": spec.heads, "time_step": spec.decays} if spec.linear else {}
    for kind_of, width in decays.items():
        rows.append(ParameterSpec(f"{name}.{kind_of}", (width,), layer, ATTENTION, cut=0, init=kind_of))
    for part, width in _bias_widths(spec, model.hidden).items():
        kind: tuple[GradientClass, int | None] = ("replicated", None) if part in whole else ("dense", 0)
        rows.append(ParameterSpec(f"{name}.{part}_bias", (width,), layer, ATTENTION, *kind, 0.0))
    for part, width in _norm_widths(spec).items():
        kind = ("dense", 0) if spec.norm == "all" else ("replicated", None)
        init = 0.0 if model.norm == "zero_rmsnorm" and not spec.linear else None
        gradient_class, cut = kind
        rows.append(ParameterSpec(f"{name}.norm.{part}", (width,), layer, ATTENTION, gradient_class, cut, init))
    return rows


def _bias_widths(spec: AttentionSpec, hidden: int) -> dict[str, int]:
    inputs = {"query": spec.queries, "key": spec.keys, "value": spec.values}
    return {"none": {}, "inputs": inputs, "all": inputs | {"out": hidden}}[spec.bias]


def _norm_widths(spec: AttentionSpec) -> dict[str, int]:
    if spec.linear:
        return {"output": spec.value_dim}
    if spec.latent:
        query = {"query": spec.latent.query_rank} if spec.latent.query_rank else {}
        return query | {"key_value": spec.latent.rank}
    if spec.norm == "none":
        return {}
    return {"query": spec.queries, "key": spec.keys} if spec.norm == "all" else {"query": spec.key_dim, "key": spec.key_dim}


def _ffn(
    model: ModelSpec, name: str, spec: FeedForwardSpec, layer: int, out_std: float, op: str, kind: GradientClass = "dense"
) -> list[ParameterSpec]:
    parts = spec.activation.inwards
    rows = [ParameterSpec(f"{name}.{part}", (model.hidden, spec.inner), layer, op, kind, 1, model.init_std) for part in parts]
    rows.append(ParameterSpec(f"{name}.down", (spec.inner, model.hidden), layer, op, kind, 0, out_std))
    if spec.bias:  # which only experts have, and then ETP has one rank
        widths = {**dict.fromkeys(parts, spec.inner), "down": model.hidden}
        rows += [ParameterSpec(f"{name}.{part}_bias", (width,), layer, op, kind, 0, 0.0) for part, width in widths.items()]
    return rows


def _norm(model: ModelSpec, name: str, layer: int, op: str) -> list[ParameterSpec]:
    init = 0.0 if model.norm == "zero_rmsnorm" else None
    rows = [ParameterSpec(f"{name}.weight", (model.hidden,), layer, op, "replicated", init=init)]
    if model.norm == "layernorm":
        rows.append(ParameterSpec(f"{name}.bias", (model.hidden,), layer, op, "replicated", init=0.0))
    return rows
