"""The orders that a recipe's steps may have, and what the planner expects of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from foldray.costs.device import Device
from foldray.costs.hardware import Hardware, load_hardware
from foldray.costs.memo import Memo
from foldray.costs.memory import ledger
from foldray.costs.ops import OpWork
from foldray.errors import UserError
from foldray.graph.chunks import REDUCTIONS, Reduction
from foldray.orders import AUTO, OVERLAPS, SEQUENTIAL, Ordering
from foldray.plan.listed import step_seconds
from foldray.recipe import Recipe
from foldray.refold import as_candidate

_DEGREES = (1, 2, 4)
_PARTS = (2, 4)  # along the batch
_FITS = 0.9  # share of a device's memory that an order may need
_DEVICE = "h200"  # bytes do not depend on the GPU
_MUCH = 0.9  # of a step; an order that is expected to take less is told


def orders(recipe: Recipe, memory: float | None = None) -> dict[str, Ordering]:
    """Return the orders that a recipe may have, by short name; the first one cuts nothing.

    Nothing is cut if no rows travel, if the order decides which tokens experts drop, or if experts have workers of their own.
    With `auto` and gradients that are summed at the end of a step, every order comes again with each way to sum them before
    (`_with_reductions`).

    Args:
        memory: bytes of a worker's device, if orders must fit there.
    """
    own = recipe.ordering
    plain = Ordering(recompute=own.recompute, offload=own.offload, reduction=own.reduction)
    found = {SEQUENTIAL.name: own if recipe.schedule.kind == AUTO.name else plain}
    if has_choice(recipe):
        for name in _names():
            with suppress(UserError):  # sequences or micro-batches cannot be cut like this
                ordering = recipe.named_ordering(name)._replace(reduction=own.reduction)
                if own.weight_gradients != "together":
                    ordering = ordering._replace(weight_gradients=own.weight_gradients)
                if memory is None or _needed(recipe, ordering) <= _FITS * memory:
                    found[name] = ordering
    return found if own.reduction.kind != "end" else {**found, **_with_reductions(recipe, found)}


def _with_reductions(recipe: Recipe, found: Mapping[str, Ordering]) -> dict[str, Ordering]:
    """Return the same orders, with gradients that are summed before the end of a step; none if nothing can be summed there."""
    fold = recipe.placed_fold
    if recipe.schedule.kind != AUTO.name or recipe.placement is not None or recipe.engine.kind != "torch":
        return {}
    if fold.dp * fold.cp == fold.edp == 1:
        return {}
    kinds = [kind for kind in REDUCTIONS if kind != "end"]
    return {f"{name}+{kind}": order._replace(reduction=Reduction(kind)) for kind in kinds for name, order in found.items()}


def has_choice(recipe: Recipe) -> bool:
    """Whether a recipe's steps may have several orders: rows travel, and the order does not decide which tokens are dropped."""
    fold = recipe.placed_fold
    return recipe.placement is None and fold.ep * fold.etp > 1 and recipe.model.router.capacity_factor is None


def _names() -> Iterator[str]:
    """Cut sequences into pieces, attention into fewer slices, or micro-batches into parts."""
    for kind, row in OVERLAPS.items():
        if row.cuts:
            yield from (f"{kind}@{parts}" for parts in _PARTS if parts != row.batch_degree)
        for degree in _DEGREES if row.cuts else ():
            if degree > 1:
                yield f"{kind}:{degree}"
            elif not row.of_stages or row.batch_degree > 1:
                yield kind
            if degree > 2 and row.cuts_attention:
                yield f"{kind}:{degree}/2"


def _needed(recipe: Recipe, ordering: Ordering) -> float:
    """Return the bytes that the fullest worker needs, as the planner counts them."""
    candidate = replace(as_candidate(recipe), ordering=ordering)
    return ledger(candidate, OpWork(candidate, Device.of(candidate.job, load_hardware(_DEVICE))).rank).total


def expected(recipe: Recipe, hardware: Hardware) -> dict[str, float]:
    """Return the seconds of a step that the planner expects, by short name: of the recipe's own order first (its kind), then of
    all others that order one pass of a stage at a time."""
    candidate, memo = as_candidate(recipe), Memo()
    device = Device.of(candidate.job, hardware)
    among = {recipe.schedule.kind: recipe.ordering}
    for name, ordering in orders(recipe).items():
        if ordering.of_stages and ordering != recipe.ordering:
            among.setdefault(name, ordering)  # the recipe's own `flow` may have other pieces than `flow`
    return {name: step_seconds(replace(candidate, ordering=ordering), device, memo) for name, ordering in among.items()}


def told_of_orders(recipe: Recipe) -> str | None:
    """Return in one line which order the planner expects to be faster by a tenth than the recipe's own; None if there is none.

    The planner goes by the hardware of `tune.hardware`, or for GPUs by `h200`. `auto` measures by itself. Experts with workers of
    their own have other orders.
    """
    known = recipe.tune.hardware or (_DEVICE if recipe.cluster.gpu else None)
    if known is None or recipe.schedule.kind == AUTO.name or recipe.placement is not None:
        return None
    hardware = load_hardware(known, "tune.hardware")
    (own, seconds), *others = expected(recipe, hardware).items()
    name, least = min(others, key=lambda pair: pair[1], default=(own, seconds))
    if least > _MUCH * seconds:
        return None
    share, where = least / seconds, hardware.name
    return f"schedule.kind={own}: on {where}, the planner expects {name} to take {share:.2f} × its time; kind=auto measures both"
