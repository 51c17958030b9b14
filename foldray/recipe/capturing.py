"""Which ops of a recipe can be captured as CUDA graphs."""

from __future__ import annotations

from foldray.blueprint.grouping import in_groups, summed_in_groups
from foldray.kinds import ATTENTION, EMBED, EXPERT, FFN, HEAD, MERGE, PROJECT, ROUTE, SHARED
from foldray.recipe.description import Description

_ATTENTION, _MOE = (ATTENTION, PROJECT), (ROUTE, MERGE)
CAPTURED = (*_ATTENTION, *_MOE, EXPERT, SHARED, FFN, EMBED, HEAD)
"""Kinds of ops whose tensors have the same sizes in every step, or may have. What travels has the sizes that routers choose."""


def uncaptured(recipe: Description) -> dict[str, str]:
    """Return why ops of some kinds cannot be captured, by kind.

    A graph repeats the same kernels at the same addresses. So an op in it sends nothing, and the host reads no number.
    """
    fold, router, moe = recipe.placed_fold, recipe.model.router, recipe.moe
    drops, shares = router.capacity_factor is not None, fold.tp > 1 or fold.cp > 1
    by_list = recipe.engine.kind == "torch" or recipe.schedule.reduction != "end"
    halves, varies = (*_MOE, EXPERT), not router.pad
    rules = (
        (by_list and recipe.engine.zero == 2, CAPTURED, "engine.zero=2 makes the sums of gradients anew in every step"),
        (fold.tp > 1, (*_ATTENTION, SHARED, FFN, EMBED, HEAD), "fold.tp communicates inside of ops"),
        (fold.cp > 1, _ATTENTION, "fold.cp communicates inside of ops"),
        (recipe.model.linear is not None, _ATTENTION, "the kernel of linear blocks (model.windows) was never captured"),
        (recipe.data.mask_documents, _ATTENTION, "data.mask_documents makes masks for every batch"),
        (recipe.placement is not None, halves, "with workers for experts, the host counts rows"),
        (drops and varies, halves, "without model.router.pad, the host counts the rows that are not dropped"),
        (drops and shares and router.drop_scope == "sequence", _MOE, "model.router.drop_scope=sequence communicates"),
        (moe.backend != "torch", halves, f"moe.backend={moe.backend} may need the host"),
        (moe.dispatch != "assignment", (MERGE, EXPERT), f"with moe.dispatch={moe.dispatch}, the number of rows varies"),
        (fold.etp > 1, (EXPERT,), "fold.etp communicates inside of ops"),
        (varies and fold.ep > 1, (EXPERT,), "without model.router.pad, the number of rows that come to a rank varies"),
        (varies and not _counts_stay(recipe), (EXPERT,), "without model.router.pad, the host counts the rows of these experts"),
    )
    found = {kind: why for holds, kinds, why in reversed(rules) if holds for kind in kinds}
    if varies and ROUTE in found:  # experts read counts where the graph of the router has left them
        found.setdefault(EXPERT, found[ROUTE])
    return found


def _counts_stay(recipe: Description) -> bool:
    """Whether a rank with all experts computes them, and sums their gradients, by counts of rows that only the device knows.

    A GPU must have the products for it (`needs_grouped_products`).
    """
    model = recipe.model
    if recipe.moe.experts == "loop" or recipe.precision != "bfloat16":
        return False
    experts = [moe.expert for moe in (model.block(layer).moe for layer in model.moe_layers) if moe is not None]
    return all(
        in_groups(model.experts, model.hidden, expert.inner) and summed_in_groups(model.hidden * expert.width)
        for expert in experts
    )


def needs_grouped_products(recipe: Description) -> bool:
    """Whether experts can be captured only on GPUs for which torch has a kernel of grouped products."""
    return not recipe.model.router.pad


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
