"""The kinds of ops that a step consists of: the one table of what each is.

Ops name their kind by a short text (`Op.kind`), and so do the parameters that an op computes with. What a reader needs to know of
a kind stands here, once: how it is drawn, what it is cut by, what it sends, whether its forward may be computed again. Runtime
and planner hold a function for each kind, and a test holds them against this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Half = Literal["attention", "experts", "both"]
Cut = Literal["slices", "micro_batches", "last", "sequence", "chunk"]
"""What an op works on: a slice of attention's, a MoE micro-batch, a piece of the last block's output, a sequence, a chunk of
gradients."""

EMBED, ATTENTION, FFN, HEAD = "embed", "attention", "ffn", "head"
ROUTE, COUNTS, DISPATCH, EXPERT, COMBINE, MERGE = "route", "counts", "dispatch", "expert", "combine", "merge"
HANDOVER, REDUCE, STAGE = "handover", "reduce", "stage"


class OpKind(NamedTuple):
    """A kind of op.

    Args:
        name: as ops have it.
        cut: what it works on.
        letter, label, colour: in a drawing made of text, in a legend, in a picture.
        does: what an op of this kind does, in one line.
        half: of a block, which of its two halves takes part: attention and all that is dense, its experts, or both.
        travels: the class of traffic that it sends; None for one that computes.
        recomputable: whether its forward may be computed again before its backward.
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


_ROWS = (
    OpKind(
        ATTENTION,
        "slices",
        "A",
        "attention",
        "#2364aa",
        "norm, attention to everything up to this slice, residual",
        recomputable=True,
    ),
    OpKind(EXPERT, "micro_batches", "E", "experts", "#d9630b", "the experts", "experts", recomputable=True),
    OpKind(FFN, "slices", "F", "dense ffn", "#8a6d00", "norm, dense feed-forward, residual", recomputable=True),
    OpKind(ROUTE, "micro_batches", "R", "router", "#7aa6d6", "norm, router, shared expert, rows sorted by expert"),
    OpKind(MERGE, "micro_batches", "M", "weighted sum", "#f0b48a", "weighted sum of a token's rows, residual"),
    OpKind(EMBED, "slices", "i", "embed", "#b8bec8", "rows of the vocabulary"),
    OpKind(HEAD, "last", "H", "head", "#6b7280", "norm, logits, loss"),
    OpKind(DISPATCH, "micro_batches", "D", "dispatch", "#2f855a", "rows to their experts", "both", "tokens"),
    OpKind(COMBINE, "micro_batches", "C", "combine", "#6b4fbb", "rows back", "both", "tokens"),
    OpKind(COUNTS, "micro_batches", "n", "row counts", "#a21caf", "how many rows go where", "both", "counts"),
    OpKind(
        HANDOVER, "sequence", ">", "handover", "#0e7490", "activations or their gradient between stages", travels="activations"
    ),
    OpKind(REDUCE, "chunk", "g", "gradients", "#b8860b", "gradients to their sum over ranks", travels="gradients"),
    OpKind(STAGE, "sequence", "S", "stage", "#6b7280", "all blocks of a virtual stage"),
)

OP_KINDS: Mapping[str, OpKind] = {row.name: row for row in _ROWS}
"""By name, in the order of a legend."""

EXCHANGES = tuple(row.name for row in _ROWS if row.travels == "tokens")
"""What carries the rows of MoE layers."""

RECOMPUTABLE = tuple(row.name for row in _ROWS if row.recomputable)
"""Kinds whose forward may be computed again."""
