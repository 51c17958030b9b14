"""A fold: one set of ranks, factorised once for attention and once for the experts.

Source: MoE Parallel Folding, section 3.2. The one law: the pipeline groups have the same members in both views.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from foldray.errors import UserError
from foldray.fold.grid import Grid, listed

ATTENTION_AXES = ("tp", "cp", "dp", "pp")
MOE_AXES = ("etp", "ep", "edp", "pp")
FAMILIES = {
    "attention": {
        "tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "pp": ("pp",), "dp_cp": ("dp", "cp"), "tp_cp": ("tp", "cp"),
        "tp_dp_cp": ("tp", "dp", "cp"), "world": ATTENTION_AXES, "embedding": ("pp",),  # of which it has the two ends
    },
    "moe": {"etp": ("etp",), "ep": ("ep",), "edp": ("edp",), "pp": ("pp",), "etp_ep": ("etp", "ep")},
}  # fmt: skip


@dataclass(frozen=True)
class Fold:
    """Sizes of both factorisations of the same `world_size` ranks; dp and edp follow from the rest.

    Args:
        world_size: ranks in the fold.
        tp, cp, pp: tensor, context and pipeline parallel sizes of attention; dp = world_size / (tp·cp·pp).
        ep, etp: expert and expert-tensor parallel sizes; edp = world_size / (etp·ep·pp). etp defaults to 1, whatever tp is.
        order, moe_order: axes of each view, leftmost fastest.
        offset: first rank of the fold in a larger cluster.

    Raises:
        UserError: a size does not divide, an order is not a permutation of its axes, or the two views disagree on the
            pipeline groups.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    order: str = "tp-cp-dp-pp"
    moe_order: str = "etp-ep-edp-pp"
    offset: int = 0

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "cp", "pp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise UserError(name, getattr(self, name), "a size is at least 1")
        for name, axes in (("order", ATTENTION_AXES), ("moe_order", MOE_AXES)):
            if sorted(getattr(self, name).split("-")) != sorted(axes):
                raise UserError(name, getattr(self, name), f"must name each of {'-'.join(axes)} once")
        for product, sizes in (("tp·cp·pp", (self.tp, self.cp, self.pp)), ("etp·ep·pp", (self.etp, self.ep, self.pp))):
            if self.world_size % math.prod(sizes):
                values = "·".join(map(str, sizes))
                raise UserError(
                    "fold", values, f"{product} must divide the world size {self.world_size}", divisors(self.world_size)
                )
        # Groups along one axis are equal when its stride is: the one that begins at the first rank already tells.
        strides = [grid.stride("pp") for grid in (self.attention, self.moe)]
        if self.pp > 1 and strides[0] != strides[1]:
            ours, theirs = (listed(range(self.offset, self.offset + self.pp * stride, stride)) for stride in strides)
            rule = f"the pipeline groups must have the same members in both views, but attention has {ours}, the experts {theirs}"
            legal = " | ".join(order.replace("-pp", "").replace("pp-", "") + "-pp" for order in (self.order, self.moe_order))
            raise UserError("order", f"{self.order} | {self.moe_order}", rule, [legal])

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.world_size // (self.etp * self.ep * self.pp)

    @cached_property
    def attention(self) -> Grid:
        return self._grid(self.order)

    @cached_property
    def moe(self) -> Grid:
        return self._grid(self.moe_order)

    def groups(self, family: str) -> tuple[tuple[int, ...], ...]:
        """The rank table of a group family.

        Attention's: tp, cp, dp, pp; dp_cp (ranks that hold the same weights), tp_cp (ranks that share a sequence), tp_dp_cp (a
        pipeline stage), world, and embedding (first and last stage, which share a tied embedding). The experts': etp, ep, edp, pp
        and etp_ep (ranks that exchange tokens).

        Raises:
            UserError: no such family.
        """
        grid, axes = self.axes(family)
        groups = grid.groups(axes)
        return tuple(tuple(dict.fromkeys((group[0], group[-1]))) for group in groups) if family == "embedding" else groups

    def axes(self, family: str) -> tuple[Grid, tuple[str, ...]]:
        """The view that a group family belongs to, and the axes along which its groups lie.

        Raises:
            UserError: no such family.
        """
        for view, families in FAMILIES.items():
            if family in families:
                return getattr(self, view), families[family]
        legal = [name for families in FAMILIES.values() for name in families]
        raise UserError("family", family, "is no group family", dict.fromkeys(legal))

    def coordinate(self, rank: int) -> dict[str, dict[str, int]]:
        """A rank's place in both views."""
        return {"attention": self.attention.coordinate(rank), "moe": self.moe.coordinate(rank)}

    def as_dict(self) -> dict:
        """The document that `foldray explain --json` prints for a legal fold."""
        views = {
            view: {axis: getattr(self, axis) for axis in axes}
            | {"groups": {family: [list(group) for group in self.groups(family)] for family in FAMILIES[view]}}
            for view, axes in (("attention", ATTENTION_AXES), ("moe", MOE_AXES))
        }
        return {"legal": True, "world_size": self.world_size, **views}

    def __str__(self) -> str:
        attention = " ".join(f"{axis.upper()}{getattr(self, axis)}" for axis in ATTENTION_AXES)
        return f"{attention} | " + " ".join(f"{axis.upper()}{getattr(self, axis)}" for axis in MOE_AXES[:3])

    def _grid(self, order: str) -> Grid:
        axes = tuple(order.split("-"))
        return Grid(axes, tuple(getattr(self, axis) for axis in axes), self.offset)


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
