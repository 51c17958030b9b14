"""What one block is made of: the sizes and choices that its parameters, costs and memory follow from. No torch.

A rank's share of a block is a block as well, with fewer heads and narrower layers (`Ownership.share`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from foldray.activations import Activation, find_activation
from foldray.windows import Window, find_window


class AttentionSpec(NamedTuple):
    """Causal self-attention.

    Args:
        heads, kv_heads: query heads, and heads of keys and values; several query heads may share one of those.
        key_dim, value_dim: width of a head's queries and keys, and of its values.
        window: how far back queries see, as recipes have it.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: str

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
        """Width of what all heads find."""
        return self.heads * self.value_dim

    @property
    def sees(self) -> Window:
        return find_window(self.window)

    def cut(self, tp: int) -> AttentionSpec:
        return self._replace(heads=self.heads // tp, kv_heads=self.kv_heads // tp)


class FeedForwardSpec(NamedTuple):
    """Products into and out of an inner layer, with an activation between them.

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
        """Columns of the product into it."""
        return self.inner * len(self.activation.inwards)

    def cut(self, parts: int) -> FeedForwardSpec:
        return self._replace(inner=self.inner // parts)


class MixtureSpec(NamedTuple):
    """A mixture of experts.

    Args:
        experts, topk: how many there are, and how many a token goes to.
        expert: each of them.
        shared: the one that every token goes to; None where there is none.
    """

    experts: int
    topk: int
    expert: FeedForwardSpec
    shared: FeedForwardSpec | None

    def cut(self, tp: int, ep: int, etp: int) -> MixtureSpec:
        shared = self.shared and self.shared.cut(tp)
        return self._replace(experts=self.experts // ep, expert=self.expert.cut(etp), shared=shared)


@dataclass(frozen=True)
class BlockSpec:
    """Attention, then either a dense feed-forward layer or a mixture of experts.

    Tables of graphs, costs and memory are keyed by blocks, so a block keeps its hash.
    """

    attention: AttentionSpec
    dense: FeedForwardSpec | None
    moe: MixtureSpec | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.attention, self.dense, self.moe)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __reduce__(self) -> tuple:
        return make_block, (self.attention, self.dense, self.moe)  # another process hashes texts otherwise

    @property
    def order(self) -> tuple[bool, str]:
        """Sorts the blocks of a model: dense ones first."""
        return self.moe is not None, self.attention.window

    def cut(self, tp: int, ep: int, etp: int) -> BlockSpec:
        """A rank's share of it."""
        return BlockSpec(self.attention.cut(tp), self.dense and self.dense.cut(tp), self.moe and self.moe.cut(tp, ep, etp))


@lru_cache(maxsize=1024)
def make_block(attention: AttentionSpec, dense: FeedForwardSpec | None, moe: MixtureSpec | None) -> BlockSpec:
    """One object for equal blocks: tables then compare them by identity."""
    return BlockSpec(attention, dense, moe)
