"""A fold: two grids of ranks, one for attention and one for the experts.

Usually both grids cover the same ranks (MoE Parallel Folding, section 3.2). Then the pipeline groups must have the same
members in both grids. Or the experts have ranks of their own, after attention's ranks (DisagMoE, section 3). Then each grid
has a pipeline of its own, and this rule does not apply. The code calls a grid a view of the fold.
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
        "tp_dp_cp": ("tp", "dp", "cp"), "world": ATTENTION_AXES, "embedding": ("pp",),  # the two ends of a pipeline
    },
    "moe": {"etp": ("etp",), "ep": ("ep",), "edp": ("edp",), "pp": ("pp",), "etp_ep": ("etp", "ep")},
}  # fmt: skip
_TWO_LEVELS = ("ep_inside", "ep_across")


@dataclass(frozen=True)
class Fold:
    """The sizes of both grids of `world_size` ranks. The sizes dp and edp follow from the others.

    Args:
        world_size: ranks in the fold.
        tp, cp, pp: tensor, context and pipeline parallel sizes of attention; dp is attention's ranks / (tp·cp·pp).
        ep, etp: expert and expert-tensor parallel sizes; edp is the experts' ranks / (etp·ep·pp). etp does not follow tp.
        order, moe_order: axes of each grid, the fastest axis first.
        offset: first rank of the fold in a larger cluster.
        expert_ranks: number of ranks that only the experts use, the last ones of the fold; 0 if both grids cover all ranks.
        expert_pp: pipeline positions of experts that have ranks of their own; None is pp.
        ep_inside: how many neighbours of an expert parallel group share a node. These neighbours are a group, and so are the
            ep_across ranks with the same place in such groups.

    Raises:
        UserError: a size is less than 1 or does not divide, `expert_ranks` leaves no rank to attention, `expert_pp` is given
            without `expert_ranks`, an order is not a permutation of its axes, or the pipeline groups of the two grids
            differ.
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
    expert_ranks: int = 0
    expert_pp: int | None = None
    ep_inside: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "cp", "pp", "ep", "etp", "expert_pp", "ep_inside"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise UserError(name, size, "must be at least 1")
        if not 0 <= self.expert_ranks < self.world_size:
            rule = f"must leave at least one of {self.world_size} ranks to attention; 0 puts both grids on the same ranks"
            raise UserError("expert_ranks", self.expert_ranks, rule, [f"0…{self.world_size - 1}"])
        if self.expert_pp is not None and not self.disjoint:
            raise UserError(
                "expert_pp", self.expert_pp, "must be left out unless the experts have ranks of their own (expert_ranks)"
            )
        for name, axes in (("order", ATTENTION_AXES), ("moe_order", MOE_AXES)):
            if sorted(getattr(self, name).split("-")) != sorted(axes):
                raise UserError(name, getattr(self, name), f"must name each of {'-'.join(axes)} once")
        if self.ep % self.ep_inside:
            rule = f"must divide the expert-parallel size {self.ep}"
            raise UserError("ep_inside", self.ep_inside, rule, divisors(self.ep))
        expert_pp = "expert_pp" if self.disjoint else "pp"
        for product, sizes, ranks, whose in (
            ("tp·cp·pp", (self.tp, self.cp, self.pp), self.attention_ranks, "attention's"),
            (f"etp·ep·{expert_pp}", (self.etp, self.ep, self.moe_pp), self.moe_ranks, "the experts'"),
        ):
            if ranks % math.prod(sizes):
                dividend = f"{whose} {ranks} ranks" if self.disjoint else f"the world size {self.world_size}"
                raise UserError("fold", "·".join(map(str, sizes)), f"{product} must divide {dividend}", divisors(ranks))
        if not self.disjoint:
            self._check_pipelines()

    def _check_pipelines(self) -> None:
        # Grids over the same ranks have the same pipeline groups exactly if their strides of pp are equal.
        strides = [grid.stride("pp") for grid in (self.attention, self.moe)]
        if self.pp > 1 and strides[0] != strides[1]:
            ours, theirs = (listed(range(self.offset, self.offset + self.pp * stride, stride)) for stride in strides)
            rule = f"the pipeline groups must have the same members in both views, but attention has {ours}, the experts {theirs}"
            legal = " | ".join(order.replace("-pp", "").replace("pp-", "") + "-pp" for order in (self.order, self.moe_order))
            raise UserError("order", f"{self.order} | {self.moe_order}", rule, [legal])

    @property
    def disjoint(self) -> bool:
        """Whether the experts have ranks of their own."""
        return self.expert_ranks > 0

    @property
    def attention_ranks(self) -> int:
        return self.world_size - self.expert_ranks

    @property
    def moe_ranks(self) -> int:
        return self.expert_ranks or self.world_size

    @property
    def moe_pp(self) -> int:
        """Pipeline positions of the experts."""
        return self.pp if self.expert_pp is None else self.expert_pp

    @property
    def positions(self) -> int:
        """Pipeline positions of both halves. If the experts have ranks of their own, their positions come last."""
        return self.pp + (self.moe_pp if self.disjoint else 0)

    @property
    def dp(self) -> int:
        return self.attention_ranks // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.moe_ranks // (self.etp * self.ep * self.moe_pp)

    @property
    def ep_across(self) -> int:
        """How many nodes an expert parallel group has, if `ep_inside` of its ranks share a node."""
        return self.ep // self.ep_inside

    @cached_property
    def attention(self) -> Grid:
        axes = tuple(self.order.split("-"))
        return Grid(axes, tuple(getattr(self, axis) for axis in axes), self.offset)

    @cached_property
    def moe(self) -> Grid:
        axes = tuple(self.moe_order.split("-"))
        sizes = tuple(self.moe_pp if axis == "pp" else getattr(self, axis) for axis in axes)
        return Grid(axes, sizes, self.offset + (self.attention_ranks if self.disjoint else 0))

    @cached_property
    def _two_levels(self) -> Grid:
        """The experts' grid with two axes in the place of ep."""
        sizes = dict(zip(self.moe.axes, self.moe.sizes, strict=True)) | {axis: getattr(self, axis) for axis in _TWO_LEVELS}
        axes = [level for axis in self.moe.axes for level in (_TWO_LEVELS if axis == "ep" else (axis,))]
        return Grid(tuple(axes), tuple(sizes[axis] for axis in axes), self.moe.offset)

    @property
    def views(self) -> dict[str, Grid]:
        """Both grids by name."""
        return {"attention": self.attention, "moe": self.moe}

    @property
    def families(self) -> dict[str, tuple[str, ...]]:
        """The names of the group families of both grids. Those of the two levels of ep are left out if there is one level."""
        names = {view: tuple(families) for view, families in FAMILIES.items()}
        return names | {"moe": (*names["moe"], *_TWO_LEVELS)} if self.ep_inside > 1 else names

    def groups(self, family: str, view: str | None = None) -> tuple[tuple[int, ...], ...]:
        """Return the rank table of a group family.

        Families of attention are tp, cp, dp, pp, dp_cp (ranks that hold the same weights), tp_cp (ranks that share a
        sequence), tp_dp_cp (a pipeline stage), world, and embedding (first and last stage, which share a tied embedding).
        Families of the experts are etp, ep, edp, pp, and etp_ep (ranks that exchange tokens). Beside these,
        expert_stage has all ranks of a pipeline position of the experts, ep_inside has those of an expert parallel group that
        share a node, and ep_across those with the same place among them.

        Args:
            view: the grid whose pp family is meant; None is attention's grid.
        """
        if family == "expert_stage":
            return self.moe.groups([axis for axis in MOE_AXES if axis != "pp"])
        grid, axes = self.axes(family, view)
        if family == "world":
            return (tuple(range(self.offset, self.offset + self.world_size)),)
        groups = grid.groups(axes)
        return tuple(tuple(dict.fromkeys((group[0], group[-1]))) for group in groups) if family == "embedding" else groups

    def axes(self, family: str, view: str | None = None) -> tuple[Grid, tuple[str, ...]]:
        """Return the grid that a group family belongs to, and the axes along which its groups lie."""
        if family in _TWO_LEVELS:
            return self._two_levels, (family,)
        for name, families in FAMILIES.items():
            if family in families and view in (None, name):
                return self.views[name], families[family]
        legal = [name for families in FAMILIES.values() for name in families]
        raise UserError("family", family, "is not a group family", dict.fromkeys(legal))

    def group_size(self, family: str) -> int:
        """Return the number of ranks in a group of a family."""
        _, axes = self.axes(family)
        return math.prod(getattr(self, axis) for axis in axes)

    def coordinate(self, rank: int) -> dict[str, dict[str, int]]:
        """Return a rank's seat: its place in each grid that it belongs to."""
        return {view: grid.coordinate(rank) for view, grid in self.views.items() if rank in grid.ranks}

    def as_dict(self) -> dict:
        """Return the document that `foldray explain --json` prints for a legal fold."""
        views = {
            view: {axis: grid.length(axis) for axis in (ATTENTION_AXES if view == "attention" else MOE_AXES)}
            | {"ranks": [grid.ranks[0], grid.ranks[-1]]}
            | {"groups": {family: [list(group) for group in self.groups(family, view)] for family in families}}
            for (view, grid), families in zip(self.views.items(), self.families.values(), strict=True)
        }
        return {"legal": True, "world_size": self.world_size, "disjoint": self.disjoint, **views}

    def __str__(self) -> str:
        attention = " ".join(f"{axis.upper()}{getattr(self, axis)}" for axis in ATTENTION_AXES)
        inside = {"ep": f"/{self.ep_inside}" if self.ep_inside > 1 else ""}
        moe = " ".join(f"{axis.upper()}{getattr(self, axis)}{inside.get(axis, '')}" for axis in MOE_AXES[:3])
        return f"{attention} & {moe} PP{self.moe_pp}" if self.disjoint else f"{attention} | {moe}"


def divisors(n: int) -> list[int]:
    """Return all divisors of n, the smallest first."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
