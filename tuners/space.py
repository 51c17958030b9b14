"""What a tuner chooses from: every legal way to train a recipe, as rows of a table.

A search that proposes values freely would mostly propose folds that cannot be. So the legal settings are written out first, each
once (what has no effect has one value), and searches pick rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from foldray.errors import UserError
from foldray.fold import divisors
from foldray.planner.candidate import DTYPES, Candidate, Job
from foldray.recipe import Recipe
from foldray.schedule import SEARCHED, SEQUENTIAL, overlap_kind
from tuners.table import Table

KEYS: Mapping[str, str] = {
    "tp": "fold.tp", "cp": "fold.cp", "pp": "fold.pp", "ep": "fold.ep", "etp": "fold.etp",
    "virtual_stages": "schedule.virtual_stages", "micro_batch": "training.micro_batch", "kind": "schedule.kind",
    "degree": "schedule.degree", "slicing": "schedule.slicing", "batch_degree": "schedule.batch_degree",
    "recompute": "schedule.recompute", "reduction": "schedule.reduction", "sp_bytes": "schedule.sp_bytes",
}  # fmt: skip
"""By name of a parameter: the recipe's key that it sets."""

_AXES = ("tp", "cp", "pp", "ep", "etp")


class Setting(NamedTuple):
    """A row: one way to train.

    Args:
        recompute: kinds of ops, joined by "+", or "none".
        sp_bytes: of gradients that travel at once; 0 where all travel at the end.
    """

    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    virtual_stages: int
    micro_batch: int
    kind: str
    degree: int
    slicing: str
    batch_degree: int
    recompute: str
    reduction: str
    sp_bytes: int

    @classmethod
    def of(cls, recipe: Recipe) -> Setting:
        """How a recipe trains as it stands."""
        schedule = recipe.schedule
        sizes = {axis: getattr(recipe.fold, axis) for axis in _AXES}
        ordering = recipe.ordering
        return cls(
            **sizes, virtual_stages=schedule.virtual_stages, micro_batch=recipe.training.micro_batch, kind=schedule.kind,
            degree=schedule.degree, slicing=schedule.slicing, batch_degree=schedule.batch_degree,
            recompute="+".join(schedule.recompute) or "none", reduction=schedule.reduction, sp_bytes=ordering.reduction.most or 0,
        )._plain()  # fmt: skip

    def _plain(self) -> Setting:
        """The same with one value for what has no effect."""
        return self._replace(
            kind=self.kind if self.degree * self.batch_degree > 1 else SEQUENTIAL.name,
            slicing=self.slicing if self.degree > 1 and overlap_kind(self.kind).cuts_attention else "time_uniform",
            sp_bytes=self.sp_bytes if self.reduction != "end" else 0,
        )

    def __str__(self) -> str:
        """In words that fit a line, without what is as it always is."""
        sizes = [f"{axis.upper()}{getattr(self, axis)}" for axis in _AXES if getattr(self, axis) > 1]
        cut = f" d={self.degree}" if self.degree > 1 else ""
        cut += f" R={self.batch_degree}" if self.batch_degree > 1 else ""
        more = [] if self.micro_batch == 1 else [f"micro-batch {self.micro_batch}"]
        more += [] if self.virtual_stages == 1 else [f"{self.virtual_stages} virtual stages"]
        more += [] if self.recompute == "none" else [f"recomputes {self.recompute}"]
        more += [] if self.reduction == "end" else [f"{self.reduction} of {_short(self.sp_bytes)}"]
        more += [] if self.slicing == "time_uniform" else [self.slicing]
        return ", ".join([f"{' '.join(sizes) or 'DP'} {self.kind}{cut}", *more])


def changed(recipe: Recipe, setting: Setting) -> Recipe:
    """The recipe, trained that way.

    Raises:
        UserError: that cannot be.
    """
    given = recipe.model_dump()
    for name, value in setting._asdict().items():
        section, key = KEYS[name].split(".")
        given[section][key] = value
    given["schedule"]["recompute"] = () if setting.recompute == "none" else tuple(setting.recompute.split("+"))
    given["schedule"] |= {"sp_bytes": setting.sp_bytes or None, "degrees": None}
    if setting.degree == 1 or not overlap_kind(setting.kind).cuts_attention:
        given["schedule"]["slices"] = None
    if setting.kind != recipe.schedule.kind:
        given["schedule"]["backward"] = None
    return Recipe.parse(given)


class Settings(Table[Setting]):
    """All legal settings of a recipe's space.

    Raises:
        UserError: nothing in the space is legal.
    """

    def __init__(self, recipe: Recipe):
        super().__init__(_legal(recipe))
        self.recipe = recipe
        if not self.rows:
            raise UserError("tune.space", "as given", f"has no legal setting for {recipe.cluster.workers} workers and this model")
        self.default = Setting.of(recipe)


def candidate(recipe: Recipe) -> Candidate:
    """A recipe as the planner sees it."""
    job = Job(recipe.model, recipe.data.seq_len, recipe.training.global_batch, DTYPES[recipe.precision])
    schedule, training = recipe.schedule, recipe.training
    return Candidate(job, recipe.placed_fold, recipe.ordering, training.micro_batch, schedule.virtual_stages, recipe.engine.zero)


def _legal(recipe: Recipe) -> Iterator[Setting]:
    """Folds first: most of what cannot be is told by them."""
    space, own = recipe.tune.space, Setting.of(recipe)
    among = divisors(recipe.cluster.workers)
    sizes = itertools.product(*(getattr(space, axis) or among for axis in _AXES))
    plain = own._replace(kind=SEQUENTIAL.name, degree=1, batch_degree=1, virtual_stages=1, micro_batch=1)
    for fold in sizes:
        axes = dict(zip(_AXES, fold, strict=True))
        if math.prod(fold[:3]) > among[-1] or not _is_legal(recipe, plain._replace(**axes)):
            continue
        for setting in _of_fold(recipe, own._replace(**axes)):
            if _is_legal(recipe, setting):
                yield setting


def _of_fold(recipe: Recipe, start: Setting) -> Iterator[Setting]:
    space = recipe.tune.space
    kinds = space.kind or SEARCHED
    virtual = space.virtual_stages or (start.virtual_stages,)
    # Where no token travels there is nothing to hide.
    cuts = [(kind, 1, 1) for kind in kinds if not overlap_kind(kind).cuts]
    if start.ep > 1:
        parts = itertools.product(kinds, space.degree, space.batch_degree)
        cuts += [(kind, degree, batch) for kind, degree, batch in parts if overlap_kind(kind).cuts and degree * batch > 1]
    reductions: Sequence[tuple[str, int]] = [("end", 0)] if None in space.sp_bytes else []
    reductions = [*reductions, *(("chunks", size) for size in space.sp_bytes if size)]
    recompute = ["+".join(each) or "none" for each in space.recompute]
    for stages, batch, (kind, degree, pieces), slicing, again, (how, size) in itertools.product(
        virtual if start.pp > 1 else (1,), space.micro_batch or (start.micro_batch,), cuts, space.slicing, recompute, reductions
    ):
        yield start._replace(
            virtual_stages=stages, micro_batch=batch, kind=kind, degree=degree, slicing=slicing, batch_degree=pieces,
            recompute=again, reduction=how, sp_bytes=size,
        )._plain()  # fmt: skip


def _is_legal(recipe: Recipe, setting: Setting) -> bool:
    try:
        changed(recipe, setting)
    except UserError:
        return False
    return True


def _short(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"
