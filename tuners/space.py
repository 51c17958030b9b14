"""The settings that a tuner chooses from: every legal way to train a recipe, as the rows of a table.

Most combinations of values make an illegal fold. So the legal settings are listed first, and a search picks rows of this
list. A key without effect gets a fixed value, so no two rows train in the same way.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from foldray.amounts import in_bytes
from foldray.choosing import has_choice
from foldray.costs.hardware import load_hardware
from foldray.errors import UserError
from foldray.fold import divisors
from foldray.graph import Reduction
from foldray.orders import AF_PIPE, AUTO, SEARCHED, SEQUENTIAL, overlap_kind
from foldray.plan.placing import roofline
from foldray.plan.space import Space
from foldray.recipe import Recipe
from foldray.recipe.bounds import MOST_PIECES, MOST_SETTINGS
from foldray.recipe.sections import FoldSpec
from foldray.recipe.tuning import DEGREES, SpaceSpec
from foldray.refold import as_candidate
from tuners.table import Table

KEYS: Mapping[str, str] = {
    "tp": "fold.tp", "cp": "fold.cp", "pp": "fold.pp", "ep": "fold.ep", "etp": "fold.etp",
    "virtual_stages": "schedule.virtual_stages", "micro_batch": "training.micro_batch", "kind": "schedule.kind",
    "degree": "schedule.degree", "slicing": "schedule.slicing", "batch_degree": "schedule.batch_degree",
    "recompute": "schedule.recompute", "reduction": "schedule.reduction", "sp_bytes": "schedule.sp_bytes",
    "attention": "placement.attention", "expert_pp": "placement.expert_pp", "dispatch": "moe.dispatch",
    "attention_degree": "schedule.attention_degree", "zero": "engine.zero", "backend": "moe.backend", "order": "fold.order",
    "moe_order": "fold.moe_order", "ep_inside": "fold.ep_inside",
}  # fmt: skip
"""The recipe key that each field of a `Setting` sets."""

_AXES = ("tp", "cp", "pp", "ep", "etp")
_FREE = ("virtual_stages", "micro_batch", "slicing", "dispatch", "attention_degree", "backend", "order", "moe_order", "ep_inside")
"""Fields that a fold and its pieces leave free, whose lists in `tune.space` have the values as they are."""
_Item = TypeVar("_Item")


class Setting(NamedTuple):
    """A row of the table: one way to train.

    Args:
        recompute: the kinds of ops that run again before their backward, joined by "+"; "none" if there are none.
        sp_bytes: bytes of a bucket or chunk of gradients; 0 if all gradients are reduced at the end of a step.
        attention, expert_pp: workers for attention, and pipeline positions of the experts; 0 if workers have both.
        dispatch: what a token travels for.
        attention_degree: most slices of attention; `MOST_PIECES` if there are as many as pieces.
        zero: stage of ZeRO, as a name: the stages are no sizes.
        workers: `own` if the experts have workers of their own, else `shared`.
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
    zero: str = "0"
    backend: str = "torch"
    order: str = FoldSpec.model_fields["order"].default
    moe_order: str = FoldSpec.model_fields["moe_order"].default
    ep_inside: int = 1
    workers: str = "shared"

    @classmethod
    def of(cls, recipe: Recipe) -> Setting:
        keys = {name: key.split(".") for name, key in KEYS.items()}
        values = {name: getattr(getattr(recipe, section), key) for name, (section, key) in keys.items() if section != "placement"}
        values["kind"] = SEQUENTIAL.name if recipe.schedule.kind == AUTO.name and not has_choice(recipe) else recipe.schedule.kind
        values["zero"] = str(recipe.engine.zero)
        values["recompute"] = "+".join(recipe.schedule.recompute) or "none"
        values["sp_bytes"] = recipe.ordering.reduction.most or 0
        values["attention_degree"] = recipe.schedule.attention_degree or MOST_PIECES
        if recipe.placement is not None:
            values |= {"attention": recipe.placement.attention, "expert_pp": recipe.placed_fold.moe_pp}
        return cls(**values)._normalized()

    def _normalized(self) -> Setting:
        """Return the same setting, with a fixed value for every key that has no effect."""
        row, uncut = overlap_kind(self.kind), AF_PIPE.name if self.attention else SEQUENTIAL.name
        if self.kind == AUTO.name and self.ep * self.etp > 1 and not self.attention:
            uncut = AUTO.name
        fewer = self.attention_degree < self.degree and row.cuts_attention
        by_rank = self.dispatch == "rank" and self.ep > 1 and not self.attention
        return self._replace(
            kind=self.kind if self.degree * self.batch_degree > 1 or not row.of_stages else uncut,
            slicing=self.slicing if self.degree > 1 and row.cuts_attention else "time_uniform",
            sp_bytes=self.sp_bytes if self.reduction != "end" else 0,
            dispatch="rank" if by_rank else "assignment",
            attention_degree=self.attention_degree if fewer else MOST_PIECES,
            ep_inside=math.gcd(self.ep_inside, self.ep) if by_rank or self.attention else 1,
            expert_pp=self.expert_pp if self.attention else 0,
            workers="own" if self.attention else "shared",
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
        details += [] if self.ep_inside == 1 else [f"{self.ep_inside} of a group on a node"]
        details += [] if self.zero == "0" else [f"ZeRO-{self.zero}"]
        details += [] if self.backend == "torch" else [self.backend]
        orders = ("order", "moe_order")
        details += [getattr(self, name) for name in orders if getattr(self, name) != self._field_defaults[name]]
        return ", ".join([f"{' '.join(sizes) or 'DP'} {self.kind}{cut}", *details])


def apply_setting(recipe: Recipe, setting: Setting) -> Recipe:
    """Return the recipe with another setting. Refuse an illegal one."""
    values = recipe.model_dump()
    for name, value in setting._asdict().items():
        section, _, key = KEYS.get(name, "placement").partition(".")
        if section != "placement":
            values[section][key] = value
    values["engine"]["zero"] = int(setting.zero)
    placement = None
    if setting.attention:
        experts = recipe.cluster.workers - setting.attention
        own = {"attention": setting.attention, "experts": experts, "expert_pp": setting.expert_pp}
        placement = {**(values["placement"] or {}), **own}
    values["placement"] = placement
    values["schedule"]["recompute"] = () if setting.recompute == "none" else tuple(setting.recompute.split("+"))
    fewer = setting.attention_degree if setting.attention_degree < setting.degree else None
    values["schedule"] |= {"sp_bytes": setting.sp_bytes or None, "degrees": None, "attention_degree": fewer}
    cut, own_cut = (setting.degree, fewer or setting.degree), recipe.schedule
    if cut != (own_cut.degree, own_cut.attention_degree or own_cut.degree) or not overlap_kind(setting.kind).cuts_attention:
        values["schedule"]["slices"] = None
    if setting.pp != recipe.fold.pp or setting.virtual_stages != recipe.schedule.virtual_stages:
        values["schedule"]["stage_layers"] = None
    if setting.kind != recipe.schedule.kind:
        values["schedule"] |= {"backward": None, "ahead": None, "alive": None}
        apart = overlap_kind(setting.kind).weights_apart
        if apart != overlap_kind(recipe.schedule.kind).weights_apart:
            values["schedule"]["weight_gradients"] = "apart" if apart else "together"
    return Recipe.parse(values)


class Settings(Table[Setting]):
    """The recipe's own setting, and all legal settings of its space (`tune.space`).

    Attributes:
        recipe: the unchanged recipe.
        default: the setting of the unchanged recipe, the first row.
    """

    def __init__(self, recipe: Recipe):
        self.recipe, self.default = recipe, Setting.of(recipe)
        legal = list(_legal_settings(recipe))
        if not legal:
            raise UserError("tune.space", "as given", f"has no legal setting for {recipe.cluster.workers} workers and this model")
        super().__init__([self.default, *legal])
        self._splits = sorted({row.attention for row in self.rows if row.attention})
        self._start = self._allocated() if recipe.tune.space.attention == "auto" else None

    def _allocated(self) -> int:
        """Return the split that is nearest to what a roofline of both halves allocates (`foldray.plan.allocator`)."""
        if not self._splits:
            raise UserError("tune.space.attention", "auto", "has no legal split for this model, batch and number of workers")
        hardware, workers = load_hardware(str(self.recipe.tune.hardware), "tune.hardware"), self.recipe.cluster.workers
        _, allocation = roofline(Space(as_candidate(self.recipe).job, hardware, workers))
        return min(self._splits, key=lambda split: abs(split - allocation.attention))

    def within_reach(self, rows: Iterable[int], seconds: Mapping[int, float | None]) -> list[int]:
        """Return the rows that may be tried next, by the seconds of the rows that were tried (None if they failed).

        With `attention: auto`, the walk begins at the allocated split, and goes on from the fastest split to those next to it: a
        local search by measured steps, as DisagMoE's Algorithm 1 (section 4.3).
        """
        if self._start is None:
            return list(rows)
        tried = {row: taken for row, taken in seconds.items() if self.rows[row].attention}
        measured = [row for row, taken in tried.items() if taken is not None]
        here = self.rows[min(measured, key=lambda row: tried[row] or 0.0)].attention if measured else self._start
        place = self._splits.index(here)
        reach = {0, here, *(self._splits[max(0, place - 1) : place + 2] if tried else ())}
        return [row for row in rows if self.rows[row].attention in reach]


def _legal_settings(recipe: Recipe) -> Iterator[Setting]:
    """Return the legal settings. Folds are checked first, because most illegal settings have an illegal fold."""
    unchanged = Setting.of(recipe)
    simplest = unchanged._replace(degree=1, batch_degree=1, virtual_stages=1, micro_batch=1, kind=SEQUENTIAL.name)
    folds = [
        fold for fold in _bounded(recipe, "folds", _folds(recipe)) if _is_legal(recipe, simplest._replace(**fold)._normalized())
    ]
    settings: list[Iterator[Setting]] = [
        (setting for fold in folds for setting in _settings_of_fold(recipe, unchanged._replace(**fold)))
    ]
    settings += [_neighbours(recipe, unchanged)] if recipe.tune.space == SpaceSpec() else []
    distinct = dict.fromkeys(_bounded(recipe, "settings", itertools.chain(*settings)))
    return (setting for setting in distinct if _is_legal(recipe, setting))


def _bounded(recipe: Recipe, what: str, items: Iterable[_Item]) -> list[_Item]:
    """List the items, and refuse more than `MOST_SETTINGS`, because each takes milliseconds to check."""
    listed = list(itertools.islice(items, MOST_SETTINGS + 1))
    if len(listed) > MOST_SETTINGS:
        rule = f"is too many to check, for {recipe.cluster.workers} workers; list fewer values"
        raise UserError("tune.space", f"more than {MOST_SETTINGS} {what}", rule)
    return listed


def _folds(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield numbers of workers for attention, with the parallel sizes whose products divide the workers of each half.

    Without workers of their own (0), both halves are all workers, and have the same pipeline.
    """
    workers, space = recipe.cluster.workers, recipe.tune.space
    for attention in splits(recipe):
        if attention >= workers:
            rule = "must leave a worker to each half; 0 is for workers that have both"
            raise UserError("tune.space.attention", attention, rule, [f"0…{workers - 1}"])
        tokens, experts = (attention, workers - attention) if attention else (workers, workers)
        for tp, cp, pp in _sizes(space, tokens, ("tp", "cp", "pp")):
            for ep, etp, expert_pp in _sizes(space, experts, ("ep", "etp", "pp")):
                if attention or pp == expert_pp:
                    fold = dict(zip(_AXES, (tp, cp, pp, ep, etp), strict=True))
                    yield fold | {"attention": attention, "expert_pp": expert_pp if attention else 0}


def splits(recipe: Recipe) -> tuple[int, ...]:
    """Return the numbers of workers for attention that the space names, in ascending order for `auto`; 0 if workers have both."""
    given = recipe.tune.space.attention
    if given == "auto":
        return tuple(range(1, recipe.cluster.workers))
    return given or (recipe.placement.attention if recipe.placement else 0,)


def _sizes(space: SpaceSpec, ranks: int, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of some axes whose product divides the ranks."""
    first, *others = axes
    for size in getattr(space, first) or divisors(ranks):
        if ranks % size == 0:
            yield from ((size, *rest) for rest in _sizes(space, ranks // size, others)) if others else ((size,),)


def _settings_of_fold(recipe: Recipe, start: Setting) -> Iterator[Setting]:
    """Yield the settings of a fold. `start` is the setting of the unchanged recipe with this fold."""
    space = recipe.tune.space
    degrees = space.degree or sorted({*DEGREES, *_near(start.degree)})
    batch_degrees = space.batch_degree or sorted({1, start.batch_degree})
    kinds = _kinds(space, start)
    cuts = [(kind, 1, 1) for kind in kinds if not (overlap_kind(kind).cuts and overlap_kind(kind).of_stages)]
    # With ep = 1 no token travels, so there is no all-to-all to hide.
    travels, unchanged = start.ep > 1 or start.attention, (start.kind, start.degree, start.batch_degree)
    pieces = itertools.product(kinds, degrees, batch_degrees)
    cuts += [cut for cut in pieces if overlap_kind(cut[0]).cuts and cut[1] * cut[2] > 1 and (travels or cut == unchanged)]
    reductions = [(start.reduction, start.sp_bytes)]
    if space.sp_bytes is not None:
        reductions = [("chunks", size) if size else ("end", 0) for size in space.sp_bytes]
    recompute = [start.recompute] if space.recompute is None else ["+".join(ops) or "none" for ops in space.recompute]
    stages = [start.zero] if space.zero is None else [str(stage) for stage in space.zero]
    free = [getattr(space, name) or (getattr(start, name),) for name in _FREE]
    if start.pp == 1:
        free[_FREE.index("virtual_stages")] = (1,)
    for (kind, degree, parts), again, (reduction, size), zero, *values in itertools.product(
        cuts, recompute, reductions, stages, *free
    ):
        pieces_of = {"kind": kind, "degree": degree, "batch_degree": parts}
        others = {"recompute": again, "reduction": reduction, "sp_bytes": size, "zero": zero}
        yield start._replace(**pieces_of, **others, **dict(zip(_FREE, values, strict=True)))._normalized()


def _kinds(space: SpaceSpec, start: Setting) -> Sequence[str]:
    return space.kind or tuple(dict.fromkeys([*((AF_PIPE.name,) if start.attention else SEARCHED), start.kind]))


def _near(size: int) -> list[int]:
    """Return a size, half of it and twice as much."""
    return [max(1, size // 2), size, 2 * size]


def _neighbours(recipe: Recipe, own: Setting) -> Iterator[Setting]:
    """Yield the settings of the recipe's own fold under every kind and degree, with one more knob at a neighbouring value."""
    changes: list[dict[str, Any]] = [{"micro_batch": size} for size in _near(own.micro_batch)]
    changes += [{"batch_degree": parts} for parts in _near(own.batch_degree)]
    changes += [{"virtual_stages": stages} for stages in _near(own.virtual_stages) if own.pp > 1]
    sizes = {kind: Reduction(kind).most or 0 for kind in ("end", "buckets", "chunks")}
    changes += [{"reduction": kind, "sp_bytes": size} for kind, size in sizes.items()]
    changes += [{"sp_bytes": size} for size in _near(own.sp_bytes)]
    changes += [{"slicing": slicing} for slicing in ("time_uniform", "token_uniform")]
    changes += [{"zero": str(stage)} for stage in (0, 1, 2) if abs(stage - int(own.zero)) <= 1]
    changes += [{"dispatch": way} for way in ("assignment", "rank")]
    changes += [{"backend": "torch"}]
    changes += [{"backend": name} for name in ("tutel", "deepspeed") if importlib.util.find_spec(name)]
    for kind, degree in itertools.product(_kinds(recipe.tune.space, own), sorted({*DEGREES, *_near(own.degree)})):
        cut = own._replace(kind=kind, degree=degree)
        slices = degree if own.attention_degree == MOST_PIECES else own.attention_degree
        for change in [*changes, *({"attention_degree": count} for count in _near(slices))]:
            yield cut._replace(**change)._normalized()


def _is_legal(recipe: Recipe, setting: Setting) -> bool:
    try:
        apply_setting(recipe, setting)
    except UserError:
        return False
    return True
