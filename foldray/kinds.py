"""The table of op kinds. A step consists of ops of these kinds.

An op has the name of its kind (`Op.kind`), and so do the parameters that the op computes with. A row of the table says how a
kind is drawn, what an op of this kind works on, what it sends, and whether its forward may run again. The runtime and the
planner have a function for each kind. A test compares their kinds with this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Half = Literal["attention", "experts", "both"]
Cut = Literal["slices", "micro_batches", "output", "sequence", "chunk", "weights"]
"""The data that an op works on: a slice of attention, a MoE micro-batch, a piece of a block's output (a slice if that block is
dense, else a MoE micro-batch), a sequence, a chunk of gradients, or weights. A handover backward has a slice. What is kept for a
backward is that of a sequence."""

EMBED, PROJECT, GATHER, ATTENTION, FFN, HEAD = "embed", "project", "gather", "attention", "ffn", "head"
ROUTE, COUNTS, DISPATCH, EXPERT, COMBINE, MERGE = "route", "counts", "dispatch", "expert", "combine", "merge"
SHARED = "shared"
INTRA_DISPATCH, INTRA_COMBINE = "intra_dispatch", "intra_combine"
HANDOVER, REDUCE, COPY, OFFLOAD, STAGE = "handover", "reduce", "copy", "offload", "stage"


class OpKind(NamedTuple):
    """A kind of op.

    Args:
        letter: the letter for the op in a text drawing.
        label: the name in a legend.
        colour: the colour in a picture.
        half: the half of a block that takes part: attention with everything dense, the experts, or both.
        travels: the class of traffic that the op sends; None if the op computes.
        weights: whether the backward may leave the gradients of weights to an op of their own (W).
    """

    name: str
    cut: Cut
    letter: str
    label: str
    colour: str
    does: str
    half: Half = "attention"
    travels: str | None = None
    recomputable: bool = False
    weights: bool = False


_ROWS = (
    OpKind(
        ATTENTION,
        "slices",
        "A",
        "attention",
        "#2364aa",
        "norm, attention to everything up to this slice, residual",
        recomputable=True,
        weights=True,
    ),
    OpKind(EXPERT, "micro_batches", "E", "experts", "#d9630b", "the experts", "experts", recomputable=True, weights=True),
    OpKind(FFN, "slices", "F", "dense ffn", "#8a6d00", "norm, dense feed-forward, residual", recomputable=True, weights=True),
    OpKind(ROUTE, "micro_batches", "R", "router", "#7aa6d6", "norm, router, rows sorted by expert"),
    OpKind(SHARED, "micro_batches", "X", "shared expert", "#0f766e", "the shared expert", recomputable=True, weights=True),
    OpKind(MERGE, "micro_batches", "M", "weighted sum", "#f0b48a", "weighted sum of a token's rows, residual"),
    OpKind(
        PROJECT, "slices", "Q", "projection", "#8fb8de", "norm, queries, keys and values, if ranks gather by slices", weights=True
    ),
    OpKind(EMBED, "slices", "i", "embed", "#b8bec8", "rows of the vocabulary"),
    OpKind(HEAD, "output", "H", "head", "#6b7280", "norm, logits, loss", weights=True),
    OpKind(DISPATCH, "micro_batches", "D", "dispatch", "#2f855a", "rows to their experts", "both", "tokens"),
    OpKind(COMBINE, "micro_batches", "C", "combine", "#6b4fbb", "rows back", "both", "tokens"),
    OpKind(INTRA_DISPATCH, "micro_batches", "P", "intra dispatch", "#68b984", "rows inside a node", "both", "tokens_inside"),
    OpKind(INTRA_COMBINE, "micro_batches", "G", "intra combine", "#a795dc", "rows back inside a node", "both", "tokens_inside"),
    OpKind(COUNTS, "micro_batches", "n", "row counts", "#a21caf", "how many rows go where", "both", "counts"),
    OpKind(GATHER, "slices", "K", "keys, values", "#be185d", "keys and values of a slice to the context group", travels="keys"),
    OpKind(HANDOVER, "output", ">", "handover", "#0e7490", "activations or their gradient between stages", travels="handovers"),
    OpKind(REDUCE, "chunk", "g", "gradients", "#b8860b", "gradients to their sum over ranks", travels="gradients"),
    OpKind(
        COPY, "weights", "c", "copies", "#7c3aed", "weights of experts to their copies, gradients back home", "experts", "copies"
    ),
    OpKind(OFFLOAD, "sequence", "o", "to host, back", "#4d7c0f", "what a backward needs to the host, and back", travels="host"),
    OpKind(STAGE, "sequence", "S", "stage", "#6b7280", "all blocks of a virtual stage"),
)

OP_KINDS: Mapping[str, OpKind] = {row.name: row for row in _ROWS}
"""Kinds by name, in the order of a legend."""

EXCHANGES = tuple(row.name for row in _ROWS if row.travels in ("tokens", "tokens_inside"))
"""Kinds that carry the rows of MoE layers, between nodes or inside them."""

RECOMPUTABLE = tuple(row.name for row in _ROWS if row.recomputable)
"""Kinds whose forward may run again."""

WITH_WEIGHTS = tuple(row.name for row in _ROWS if row.weights)
"""Kinds whose backward may leave the gradients of weights to an op of their own."""
