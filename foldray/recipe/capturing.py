"""Which ops of a recipe can be captured as CUDA graphs."""

from __future__ import annotations

from foldray.kinds import ATTENTION, EMBED, FFN, HEAD, MERGE, PROJECT, ROUTE, SHARED
from foldray.recipe.description import Description

_ATTENTION, _MOE = (ATTENTION, PROJECT), (ROUTE, MERGE)
CAPTURED = (*_ATTENTION, *_MOE, SHARED, FFN, EMBED, HEAD)
"""Kinds of ops whose tensors have the same sizes in every step. Experts, and what travels, have the sizes that routers choose."""


def uncaptured(recipe: Description) -> dict[str, str]:
    """Return why ops of some kinds cannot be captured, by kind.

    A graph repeats the same kernels at the same addresses. So an op in it sends nothing, and the host reads no number.
    """
    fold, router, moe = recipe.placed_fold, recipe.model.router, recipe.moe
    drops, shares = router.capacity_factor is not None, fold.tp > 1 or fold.cp > 1
    by_list = recipe.engine.kind == "torch" or recipe.schedule.reduction != "end"
    rules = (
        (by_list and recipe.engine.zero == 2, CAPTURED, "engine.zero=2 makes the sums of gradients anew in every step"),
        (fold.tp > 1, (*_ATTENTION, SHARED, FFN, EMBED, HEAD), "fold.tp communicates inside of ops"),
        (fold.cp > 1, _ATTENTION, "fold.cp communicates inside of ops"),
        (recipe.data.mask_documents, _ATTENTION, "data.mask_documents makes masks for every batch"),
        (recipe.placement is not None, _MOE, "with workers for experts, the host counts rows"),
        (drops and not router.pad, _MOE, "without model.router.pad, the host counts the rows that are not dropped"),
        (drops and shares and router.drop_scope == "sequence", _MOE, "model.router.drop_scope=sequence communicates"),
        (moe.backend != "torch", _MOE, f"moe.backend={moe.backend} may need the host"),
        (moe.dispatch != "assignment", (MERGE,), f"with moe.dispatch={moe.dispatch}, the number of rows that come back varies"),
    )
    return {kind: why for holds, kinds, why in reversed(rules) if holds for kind in kinds}


def told_of_capture(recipe: Description) -> str | None:
    """Return in one line which ops are not captured, though `schedule.graphs` asks for it; None if there are none."""
    if recipe.schedule.graphs == "off":
        return None
    if not recipe.cluster.gpu:
        return f"schedule.graphs={recipe.schedule.graphs}: CUDA graphs need GPUs, so ops run without them"
    reasons: dict[str, list[str]] = {}
    for kind, why in sorted(uncaptured(recipe).items()):
        reasons.setdefault(why, []).append(kind)
    told = "; ".join(f"{', '.join(kinds)} ({why})" for why, kinds in reasons.items())
    return f"schedule.graphs={recipe.schedule.graphs}: these ops run without graphs: {told}" if told else None
