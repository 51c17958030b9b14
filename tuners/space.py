"""The settings that a tuner chooses from: every legal way to train a recipe, as the rows of a table.

Most combinations of values make an illegal fold. So the legal settings are listed first, and a search picks rows of this
list. A key without effect gets a fixed value, so no two rows train in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from foldray.amounts import in_bytes
from foldray.errors import UserError
from foldray.fold import divisors
from foldray.orders import AF_PIPE, SEARCHED, SEQUENTIAL, overlap_kind
from foldray.recipe import Recipe
from foldray.recipe.bounds import MOST_PIECES, MOST_SETTINGS
from foldray.recipe.tuning import DEGREES
from tuners.table import Table

KEYS: Mapping[str, str] = {
    "tp": "fold.tp", "cp": "fold.cp", "pp": "fold.pp", "ep": "fold.ep", "etp": "fold.etp",
    "virtual_stages": "schedule.virtual_stages", "micro_batch": "training.micro_batch", "kind": "schedule.kind",
    "degree": "schedule.degree", "slicing": "schedule.slicing", "batch_degree": "schedule.batch_degree",
    "recompute": "schedule.recompute", "reduction": "schedule.reduction", "sp_bytes": "schedule.sp_bytes",
    "attention": "placement.attention", "expert_pp": "placement.expert_pp", "dispatch": "moe.dispatch",
    "attention_degree": "schedule.attention_degree",
}  # fmt: skip
"""The recipe key that each field of a `Setting` sets."""

_AXES = ("tp", "cp", "pp", "ep", "etp")
_Item = TypeVar("_Item")


class Setting(NamedTuple):
    """A row of the table: one way to train.

    Args:
        recompute: the kinds of ops that run again before their backward, joined by "+"; "none" if there are none.
        sp_bytes: bytes of a bucket or chunk of gradients; 0 if all gradients are reduced at the end of a step.
        attention, expert_pp: workers for attention, and pipeline positions of the experts; 0 if workers have both.
        dispatch: what a token travels for.
        attention_degree: most slices of attention; `MOST_PIECES` if there are as many as pieces.
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
    attention: int = 0
    expert_pp: int = 0
    dispatch: str = "assignment"
    attention_degree: int = MOST_PIECES

    @classmethod
    def of(cls, recipe: Recipe) -> Setting:
        keys = {name: key.split(".") for name, key in KEYS.items()}
        values = {name: getattr(getattr(recipe, section), key) for name, (section, key) in keys.items() if section != "placement"}
        values["recompute"] = "+".join(recipe.schedule.recompute) or "none"
        values["sp_bytes"] = recipe.ordering.reduction.most or 0
        values["attention_degree"] = recipe.schedule.attention_degree or MOST_PIECES
        if recipe.placement is not None:
            values |= {"attention": recipe.placement.attention, "expert_pp": recipe.placed_fold.moe_pp}
        return cls(**values)._normalized()

    def _normalized(self) -> Setting:
        """Return the same setting, with a fixed value for every key that has no effect."""
        uncut = AF_PIPE.name if self.attention else SEQUENTIAL.name
        fewer = self.attention_degree < self.degree and overlap_kind(self.kind).cuts_attention
        return self._replace(
            kind=self.kind if self.degree * self.batch_degree > 1 or not overlap_kind(self.kind).of_stages else uncut,
            slicing=self.slicing if self.degree > 1 and overlap_kind(self.kind).cuts_attention else "time_uniform",
            sp_bytes=self.sp_bytes if self.reduction != "end" else 0,
            dispatch=self.dispatch if self.ep > 1 and not self.attention else "assignment",
            attention_degree=self.attention_degree if fewer else MOST_PIECES,
        )

    def __str__(self) -> str:
        """Return the setting in one line, without keys that have their usual values."""
        sizes = [f"{axis.upper()}{getattr(self, axis)}" for axis in _AXES if getattr(self, axis) > 1]
        cut = f" d={self.degree}" if self.degree > 1 else ""
        cut += f"/{self.attention_degree}" if self.attention_degree < self.degree else ""
        cut += f" R={self.batch_degree}" if self.batch_degree > 1 else ""
        sizes += [f"attention on {self.attention}"] if self.attention else []
        sizes += [f"experts' PP{self.expert_pp}"] if self.expert_pp > 1 else []
        details = [] if self.micro_batch == 1 else [f"micro-batch {self.micro_batch}"]
        details += [] if self.virtual_stages == 1 else [f"{self.virtual_stages} virtual stages"]
        details += [] if self.recompute == "none" else [f"recomputes {self.recompute}"]
        details += [] if self.reduction == "end" else [f"{self.reduction} of {in_bytes(self.sp_bytes)}"]
        details += [] if self.slicing == "time_uniform" else [self.slicing]
        details += [] if self.dispatch == "assignment" else [f"once to each {self.dispatch}"]
        return ", ".join([f"{' '.join(sizes) or 'DP'} {self.kind}{cut}", *details])


def apply_setting(recipe: Recipe, setting: Setting) -> Recipe:
    """Return the recipe with another setting. Refuse an illegal one."""
    values = recipe.model_dump()
    for name, value in setting._asdict().items():
        section, key = KEYS[name].split(".")
        if section != "placement":
            values[section][key] = value
    values["fold"]["ep_inside"] = math.gcd(recipe.fold.ep_inside, setting.ep) if setting.dispatch == "rank" else 1
    if setting.attention:
        experts = recipe.cluster.workers - setting.attention
        values["placement"] |= {"attention": setting.attention, "experts": experts, "expert_pp": setting.expert_pp}
    values["schedule"]["recompute"] = () if setting.recompute == "none" else tuple(setting.recompute.split("+"))
    fewer = setting.attention_degree if setting.attention_degree < setting.degree else None
    values["schedule"] |= {"sp_bytes": setting.sp_bytes or None, "degrees": None, "attention_degree": fewer}
    cut, own = (setting.degree, fewer or setting.degree), recipe.schedule
    if cut != (own.degree, own.attention_degree or own.degree) or not overlap_kind(setting.kind).cuts_attention:
        values["schedule"]["slices"] = None
    if setting.kind != recipe.schedule.kind:
        values["schedule"] |= {"backward": None, "ahead": None, "alive": None}
        apart = overlap_kind(setting.kind).weights_apart
        if apart != overlap_kind(recipe.schedule.kind).weights_apart:
            values["schedule"]["weight_gradients"] = "apart" if apart else "together"
    return Recipe.parse(values)


class Settings(Table[Setting]):
    """All legal settings of a recipe's space (`tune.space`).

    Attributes:
        recipe: the unchanged recipe.
        default: the setting of the unchanged recipe. The table lacks it only if a list of the space leaves out its value.
    """

    def __init__(self, recipe: Recipe):
        super().__init__(_legal_settings(recipe))
        self.recipe = recipe
        if not self.rows:
            raise UserError("tune.space", "as given", f"has no legal setting for {recipe.cluster.workers} workers and this model")
        self.default = Setting.of(recipe)


def _legal_settings(recipe: Recipe) -> Iterator[Setting]:
    """Return the legal settings. Folds are checked first, because most illegal settings have an illegal fold."""
    unchanged = Setting.of(recipe)
    simplest = unchanged._replace(degree=1, batch_degree=1, virtual_stages=1, micro_batch=1)._normalized()
    folds = [fold for fold in _bounded(recipe, "folds", _folds(recipe)) if _is_legal(recipe, simplest._replace(**fold))]
    settings = (setting for fold in folds for setting in _settings_of_fold(recipe, unchanged._replace(**fold)))
    return (setting for setting in _bounded(recipe, "settings", settings) if _is_legal(recipe, setting))


def _bounded(recipe: Recipe, what: str, items: Iterable[_Item]) -> list[_Item]:
    """List the items, and refuse more than `MOST_SETTINGS`, because each takes milliseconds to check."""
    listed = list(itertools.islice(items, MOST_SETTINGS + 1))
    if len(listed) > MOST_SETTINGS:
        rule = f"is too many to check, for {recipe.cluster.workers} workers; list fewer values"
        raise UserError("tune.space", f"more than {MOST_SETTINGS} {what}", rule)
    return listed


def _folds(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield the parallel sizes whose products divide the workers, for attention and for the experts."""
    workers, space = recipe.cluster.workers, recipe.tune.space
    if recipe.placement is not None:
        yield from _placed_folds(recipe)
        return
    tps, cps, pps, eps, etps = (getattr(space, axis) or divisors(workers) for axis in _AXES)
    for tp, cp in itertools.product(tps, cps):
        for pp in pps if workers % (tp * cp) == 0 else ():
            for ep in eps if workers % (tp * cp * pp) == 0 else ():
                for etp in etps if workers % (ep * pp) == 0 else ():
                    if workers % (ep * etp * pp) == 0:
                        yield dict(zip(_AXES, (tp, cp, pp, ep, etp), strict=True))


def _placed_folds(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield numbers of workers for attention, with the parallel sizes whose products divide the workers of each half."""
    assert recipe.placement
    workers, space = recipe.cluster.workers, recipe.tune.space
    for attention in space.attention or (recipe.placement.attention,):
        if not 0 < attention < workers:
            raise UserError("tune.space.attention", attention, "must leave a worker to each half", [f"1…{workers - 1}"])
        halves = []
        for ranks, axes in ((attention, ("tp", "cp", "pp")), (workers - attention, ("ep", "etp", "pp"))):
            sizes = [getattr(space, axis) or divisors(ranks) for axis in axes]
            halves.append([half for half in itertools.product(*sizes) if ranks % math.prod(half) == 0])
        for (tp, cp, pp), (ep, etp, expert_pp) in itertools.product(*halves):
            fold = dict(zip(_AXES, (tp, cp, pp, ep, etp), strict=True))
            yield fold | {"attention": attention, "expert_pp": expert_pp}


def _settings_of_fold(recipe: Recipe, start: Setting) -> Iterator[Setting]:
    """Yield the settings of a fold. `start` is the setting of the unchanged recipe with this fold."""
    space = recipe.tune.space
    kinds = space.kind or tuple(dict.fromkeys([*((AF_PIPE.name,) if start.attention else SEARCHED), start.kind]))
    degrees = space.degree or sorted({*DEGREES, start.degree})
    batch_degrees = space.batch_degree or sorted({1, start.batch_degree})
    virtual_stages = (space.virtual_stages or (start.virtual_stages,)) if start.pp > 1 else (1,)
    cuts = [(kind, 1, 1) for kind in kinds if not (overlap_kind(kind).cuts and overlap_kind(kind).of_stages)]
    # With ep = 1 no token travels, so there is no all-to-all to hide.
    travels, unchanged = start.ep > 1 or start.attention, (start.kind, start.degree, start.batch_degree)
    pieces = itertools.product(kinds, degrees, batch_degrees)
    cuts += [cut for cut in pieces if overlap_kind(cut[0]).cuts and cut[1] * cut[2] > 1 and (travels or cut == unchanged)]
    reductions = [(start.reduction, start.sp_bytes)]
    if space.sp_bytes is not None:
        reductions = [("chunks", size) if size else ("end", 0) for size in space.sp_bytes]
    recompute = [start.recompute] if space.recompute is None else ["+".join(ops) or "none" for ops in space.recompute]
    micro_batches, ways = space.micro_batch or (start.micro_batch,), space.dispatch or (start.dispatch,)
    slicings, most = space.slicing or (start.slicing,), space.attention_degree or (start.attention_degree,)
    for stages, micro_batch, (kind, degree, batch_degree), slicing, again, (reduction, size), way, slices in itertools.product(
        virtual_stages, micro_batches, cuts, slicings, recompute, reductions, ways, most
    ):
        yield start._replace(
            virtual_stages=stages, micro_batch=micro_batch, kind=kind, degree=degree, slicing=slicing, batch_degree=batch_degree,
            recompute=again, reduction=reduction, sp_bytes=size, dispatch=way, attention_degree=slices,
        )._normalized()  # fmt: skip


def _is_legal(recipe: Recipe, setting: Setting) -> bool:
    try:
        apply_setting(recipe, setting)
    except UserError:
        return False
    return True
