"""The sizes and choices of one block. They determine its parameters, costs and memory. No torch.

A rank's share of a block is a block as well, with fewer heads and experts and smaller widths (`Ownership.share`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from foldray.activations import Activation, find_activation
from foldray.windows import Window, find_window

QkNorm = Literal["none", "head", "all"]
AttentionBias = Literal["none", "inputs", "all"]


class RopeSpec(NamedTuple):
    """Rotary positions (RoFormer, section 3.2.2).

    Args:
        dim: number of a head's columns that turn, from the first one; the others stay as they are.
        theta: base of the angles.
        interleaved: whether columns 2i and 2i + 1 are a pair. Otherwise columns i and i + dim/2 are.
    """

    dim: int
    theta: float
    interleaved: bool


class AttentionSpec(NamedTuple):
    """Causal self-attention.

    Args:
        heads, kv_heads: number of query heads, and of key/value heads. Several query heads may share a key/value head.
        key_dim, value_dim: width of a head's queries and keys, and of its values.
        window: name of the window, as in recipes.
        rope: rotary positions; None leaves them out.
        norm: what an RMSNorm of queries and keys covers: nothing, each head by itself, or all heads of a token together.
        bias: which products have a bias: none, those that make queries, keys and values, or also the one behind the heads.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: str
    rope: RopeSpec | None = None
    norm: QkNorm = "none"
    bias: AttentionBias = "none"

    @property
    def queries(self) -> int:
        """Width of all heads' queries."""
        return self.heads * self.key_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.kv_heads * self.value_dim

    @property
    def outputs(self) -> int:
        """Width of all heads' outputs."""
        return self.heads * self.value_dim

    @property
    def sees(self) -> Window:
        return find_window(self.window)

    def cut(self, tp: int) -> AttentionSpec:
        return self._replace(heads=self.heads // tp, kv_heads=self.kv_heads // tp)


class FeedForwardSpec(NamedTuple):
    """A feed-forward network: a product into an inner layer, an activation, and a product out of it.

    Args:
        inner: width of the inner layer.
        ffn: name of the activation.
    """

    inner: int
    ffn: str

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
    """A mixture of experts.

    Args:
        experts, topk: number of experts, and number of experts per token.
        expert: sizes of every expert.
        shared: sizes of the shared expert; None without one.
        shared_gate: whether each token weighs the shared expert's output, with the sigmoid of a product.
    """

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
    """

    attention: AttentionSpec
    dense: FeedForwardSpec | None
    moe: MixtureSpec | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.attention, self.dense, self.moe)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __reduce__(self) -> tuple:
        return make_block, (self.attention, self.dense, self.moe)  # the kept hash is wrong in another process

    @property
    def order(self) -> tuple[bool, str]:
        """Sort key of a model's blocks. Dense blocks come first."""
        return self.moe is not None, self.attention.window

    def cut(self, tp: int, ep: int, etp: int) -> BlockSpec:
        """Return a rank's share of the block."""
        return BlockSpec(self.attention.cut(tp), self.dense and self.dense.cut(tp), self.moe and self.moe.cut(tp, ep, etp))


@lru_cache(maxsize=1024)
def make_block(attention: AttentionSpec, dense: FeedForwardSpec | None, moe: MixtureSpec | None) -> BlockSpec:
    """Return the same object for equal blocks, so that tables compare keys by identity."""
    return BlockSpec(attention, dense, moe)
