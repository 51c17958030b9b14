"""The sizes and choices of one block. They determine its parameters, costs and memory. No torch.

A rank's share of a block is a block as well, with fewer heads and experts and smaller widths (`Ownership.share`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from foldray.activations import Activation, find_activation
from foldray.windows import Window, find_window

QkNorm = Literal["none", "head", "all", "turned_head"]
AttentionBias = Literal["none", "inputs", "all"]
AttentionGate = Literal["none", "head", "element"]
RopeKind = Literal["yarn", "llama3", "linear"]
LinearKind = Literal["gated_delta", "kimi_delta"]


class ScalingSpec(NamedTuple):
    """Rotary positions for sequences that are longer than those of an earlier training.

    Args:
        kind: which pairs of columns turn more slowly. With `linear`, all do.
        factor: how many times as long sequences may be.
        original: tokens of a sequence in the earlier training.
        fast, slow: turns within `original` tokens. Pairs of columns that turn more often than `fast` stay as they are, those
            that turn less often than `slow` turn `factor` times as slowly. In between, it changes linearly with the number of
            the pair (`yarn`, arXiv:2309.00071, section 3), or with its turns (`llama3`).
        truncate: whether the bounds of `yarn` are rounded to whole pairs.
        magnitude: factor on cosines and sines.
    """

    kind: RopeKind
    factor: float
    original: int
    fast: float
    slow: float
    truncate: bool
    magnitude: float


class RopeSpec(NamedTuple):
    """Rotary positions (RoFormer, section 3.2.2).

    Args:
        dim: number of a head's columns that turn: the first ones, or with latent attention the last ones.
        interleaved: whether columns 2i and 2i + 1 are a pair. Otherwise columns i and i + dim/2 are.
    """

    dim: int
    theta: float
    interleaved: bool
    scaling: ScalingSpec | None = None


class GrowthSpec(NamedTuple):
    """Queries that grow with their position p, by the factor 1 + rate · ln(1 + ⌊p / every⌋) (Llama 4's code)."""

    rate: float
    every: int


class LatentSpec(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): narrow vectors from which all heads make keys and values.

    Args:
        query_rank: width of the vector from which heads make queries; 0 makes them from the block's input.
        rank: width of the vector from which heads make keys and values, without the columns of keys that all heads share.
        shared: number of these columns, a head's last ones. They turn if the block has rotary positions.
    """

    query_rank: int
    rank: int
    shared: int


class LinearSpec(NamedTuple):
    """Linear attention: the gated delta rule (Gated Delta Networks, arXiv:2412.06464).

    Args:
        taps: tokens that the convolution in front of queries, keys and values sees.
        kind: `gated_delta`, or Kimi Delta Attention (arXiv:2510.26692, section 3). Its state has a decay for each column of
            keys. Decays and the gate of outputs come from narrow vectors, as wide as a head's values, and the gate is a sigmoid.
    """

    taps: int
    kind: LinearKind = "gated_delta"


class AttentionSpec(NamedTuple):
    """Causal self-attention.

    With linear attention, `heads` are those of values, states and outputs, and `kv_heads` those of queries and keys.

    Args:
        kv_heads: number of key/value heads, which several query heads may share.
        key_dim, value_dim: width of a head's queries and keys, and of its values.
        norm: what an RMSNorm of queries and keys covers: nothing, each head by itself, or all heads of a token together.
        bias: which products have a bias: none, those that make queries, keys and values, or also the one behind the heads.
        latent: latent attention; None without it. Then heads have keys of their own, but share some columns of them.
        scale: factor on scores, beside one over the root of `key_dim`.
        sinks: whether every head has a score that takes a share of the softmax and adds nothing.
        growth: how queries grow with their position; None without it.
        gate: what of the heads' outputs the sigmoid of a product of the block's input weighs: nothing, each head, or each column.
        linear: linear attention; None without it.
        copies: neighbouring TP ranks that have the same key/value head, because there are fewer of these heads than ranks.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: str
    rope: RopeSpec | None = None
    norm: QkNorm = "none"
    bias: AttentionBias = "none"
    latent: LatentSpec | None = None
    scale: float = 1.0
    sinks: bool = False
    growth: GrowthSpec | None = None
    gate: AttentionGate = "none"
    linear: LinearSpec | None = None
    copies: int = 1

    @property
    def queries(self) -> int:
        """Width of all heads' queries."""
        return (self.kv_heads if self.linear else self.heads) * self.key_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.key_dim

    @property
    def values(self) -> int:
        return (self.heads if self.linear else self.kv_heads) * self.value_dim

    @property
    def outputs(self) -> int:
        """Width of all heads' outputs."""
        return self.heads * self.value_dim

    @property
    def gates(self) -> int:
        """Width of the numbers that weigh all heads' outputs."""
        return {"none": 0, "head": self.heads, "element": self.outputs}[self.gate]

    @property
    def mixed(self) -> dict[str, int]:
        """Widths of what linear attention's convolution mixes over tokens."""
        return {"query": self.queries, "key": self.keys, "value": self.values} if self.linear else {}

    @property
    def state(self) -> int:
        """Numbers of linear attention's state of a sequence: a matrix of each head, from keys to values."""
        return self.heads * self.key_dim * self.value_dim if self.linear else 0

    @property
    def tail(self) -> int:
        """Numbers of a sequence's last tokens that linear attention's convolution still sees."""
        return (self.linear.taps - 1) * sum(self.mixed.values()) if self.linear else 0

    @property
    def decays(self) -> int:
        """Numbers by which linear attention's state decays at a token: one of each head, or of each column of its keys."""
        if self.linear is None:
            return 0
        return self.heads * (self.key_dim if self.linear.kind == "kimi_delta" else 1)

    @property
    def still(self) -> int:
        """Number of a head's columns of keys that it does not share with other heads."""
        return self.key_dim - (self.latent.shared if self.latent else 0)

    @property
    def inputs(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the products that make queries, keys and values that TP cuts. Rows of 0 are the block's width."""
        if self.linear:  # and how much each head writes and keeps
            rows = self.value_dim if self.linear.kind == "kimi_delta" else 0
            whole = {part: (0, width) for part, width in self.mixed.items()}
            return whole | {"gate": (rows, self.outputs), "write": (0, self.heads), "decay": (rows, self.decays)}
        if self.latent is None:
            gate = {"gate": (0, self.gates)} if self.gates else {}
            return {"query": (0, self.queries), "key": (0, self.keys), "value": (0, self.values)} | gate
        made = self.heads * (self.still + self.value_dim)
        return {"query": (self.latent.query_rank, self.queries), "key_value": (self.latent.rank, made)}

    @property
    def downs(self) -> dict[str, int]:
        """The widths of narrow vectors, by the product that makes them. Every TP rank has them whole."""
        if self.linear and self.linear.kind == "kimi_delta":
            return dict.fromkeys(("gate_down", "decay_down"), self.value_dim)
        if self.latent is None:
            return {}
        query = {"query_down": self.latent.query_rank} if self.latent.query_rank else {}
        return query | {"key_value_down": self.latent.rank + self.latent.shared}

    @property
    def sees(self) -> Window:
        return find_window(self.window)

    def cut(self, tp: int) -> AttentionSpec:
        copies = self.copied(tp)
        return self._replace(heads=self.heads // tp, kv_heads=self.kv_heads * copies // tp, copies=copies)

    def copied(self, tp: int) -> int:
        """Return how many TP ranks have the same key/value head. Then every rank has the weights of all these heads."""
        return 1 if self.linear else max(1, tp // self.kv_heads)


class FeedForwardSpec(NamedTuple):
    """A feed-forward network: a product into an inner layer of this width, an activation (its name), and a product out of it."""

    inner: int
    ffn: str
    bias: bool = False

    @property
    def activation(self) -> Activation:
        return find_activation(self.ffn)

    @property
    def width(self) -> int:
        """Width of the product into the inner layer: twice `inner` with a gate."""
        return self.inner * len(self.activation.inwards)

    def cut(self, parts: int) -> FeedForwardSpec:
        return self._replace(inner=self.inner // parts)


class MixtureSpec(NamedTuple):
    """A mixture of experts. With `shared_gate`, each token weighs the shared expert's output with the sigmoid of a product."""

    experts: int
    topk: int
    expert: FeedForwardSpec
    shared: FeedForwardSpec | None
    shared_gate: bool = False

    def cut(self, tp: int, ep: int, etp: int) -> MixtureSpec:
        shared = self.shared and self.shared.cut(tp)
        return self._replace(experts=self.experts // ep, expert=self.expert.cut(etp), shared=shared)


@dataclass(frozen=True)
class BlockSpec:
    """Attention, then either a dense feed-forward network or a mixture of experts.

    A block computes its hash only once, because it is a key in many tables.

    Args:
        dense, moe: one of both; the other one is None.
        mtp: whether the block predicts a further token (multi-token prediction, DeepSeek-V3, section 2.2). It then begins with a
            projection of its input and of the embedding of a later token, and a head follows it.
        after: whether norms follow attention and the network, or mixture.
    """

    attention: AttentionSpec
    dense: FeedForwardSpec | None
    moe: MixtureSpec | None
    mtp: bool = False
    after: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.attention, self.dense, self.moe, self.mtp, self.after)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __reduce__(self) -> tuple:
        return make_block, (
            self.attention,
            self.dense,
            self.moe,
            self.mtp,
            self.after,
        )  # the kept hash is wrong in another process

    @property
    def order(self) -> tuple[bool, bool, str]:
        """Sort key of a model's blocks. Dense blocks come first, those of multi-token prediction last."""
        return self.mtp, self.moe is not None, self.attention.window

    def cut(self, tp: int, ep: int, etp: int) -> BlockSpec:
        """Return a rank's share of the block."""
        share = self.attention.cut(tp), self.dense and self.dense.cut(tp), self.moe and self.moe.cut(tp, ep, etp)
        return BlockSpec(*share, self.mtp, self.after)


@lru_cache(maxsize=1024)
def make_block(
    attention: AttentionSpec, dense: FeedForwardSpec | None, moe: MixtureSpec | None, mtp: bool = False, after: bool = False
) -> BlockSpec:
    """Return the same object for equal blocks, so that tables compare keys by identity."""
    return BlockSpec(attention, dense, moe, mtp, after)
