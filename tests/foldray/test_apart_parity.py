"""Training with attention and experts on ranks of their own gives the results of one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from foldray.blueprint import ModelSpec, Ownership
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.graph import SliceCost
from foldray.model import Batch, Transformer, all_losses
from foldray.orders import Ordering, Overlap, Sequences
from foldray.recipe import OptimizerSpec
from foldray.runtime import TorchEngine
from tests.foldray.parity import BATCH, LENGTH, MODEL, check_equal, make_recipe, one_process, sample, weights

STEPS = 2


class Case(NamedTuple):
    """A fold whose experts have ranks of their own, and how it trains.

    Args:
        passes: micro-batches of a data-parallel place.
    """

    fold: Fold
    model: dict[str, Any] | None = None
    virtual_stages: int = 1
    passes: int = 2
    degree: int = 1
    recompute: tuple[str, ...] = ()
    zero: int = 0
    reduction: str = "end"
    alive: int | None = None


def train_apart(rank: int, case: Case, steps: int) -> dict[str, Any]:
    spec, fold = ModelSpec(**{**MODEL, **(case.model or {})}), case.fold
    groups = Groups.create(fold, rank)
    model = Transformer(Ownership(spec, fold, case.virtual_stages), groups, dtype=torch.float64)
    optimizer = OptimizerSpec(kind="sgd", lr=1.0, decay="constant", weight_decay=0.0, clip=None)
    cut = Sequences(LENGTH, SliceCost.of_model(16, 8), 1).cut_for("aaam", case.degree)
    ordering = Ordering(Overlap("aaam"), Overlap("aaam"), cut, recompute=case.recompute)
    ordering = ordering._replace(reduction=ordering.reduction._replace(kind=case.reduction), alive=case.alive)
    engine = TorchEngine(model, groups, optimizer, ordering, case.zero)
    model.slice(None if case.degree == 1 else ordering.slicing.attention if ordering.slicing else None)
    losses, norms = [], []
    for step in range(steps):
        passes = engine.train(_batches(groups, case, step, spec.vocab))
        norms.append(engine.update(1.0).total)
        losses.append(all_losses(passes, groups.control).means().tolist())
    found = {"weights": weights(engine), "losses": losses, "norms": norms}
    engine.close()
    groups.close()
    return found


def _batches(groups: Groups, case: Case, step: int, vocab: int) -> list[Batch]:
    """Return the micro-batches of a rank. Ranks of experts get no sequences."""
    dp = case.fold.dp
    size, tokens = BATCH // (dp * case.passes), sample(step, BATCH, LENGTH + 1, vocab)
    if not groups.owns_tokens:
        return [Batch(*[tokens[:0, :-1]] * 2)] * case.passes
    found = []
    for m in range(case.passes):
        own = tokens[(m * dp + groups.dp_rank) * size :][:size]
        found.append(Batch(own[:, :-1], own[:, 1:]))
    return found


CASES = {
    "1:1": Case(Fold(2, expert_ranks=1)),
    "1:1, two positions each": Case(Fold(4, pp=2, expert_ranks=2, expert_pp=2)),
    "1:1, one micro-batch alive": Case(Fold(4, pp=2, expert_ranks=2, expert_pp=2), passes=4, alive=1),
    "2:1": Case(Fold(3, expert_ranks=1), passes=1),
    "1:2": Case(Fold(3, ep=2, expert_ranks=2)),
    "1:2, edp 2": Case(Fold(3, expert_ranks=2)),
    "3:1": Case(Fold(4, pp=3, expert_ranks=1, expert_pp=1), {"layers": 3}, passes=4),
    "2:2": Case(Fold(4, tp=2, ep=2, expert_ranks=2), zero=1),
    "2:2, two stages each": Case(Fold(4, pp=2, expert_ranks=2, expert_pp=2), {"layers": 4}, virtual_stages=2, passes=4, zero=2),
    "1:3": Case(Fold(4, ep=3, expert_ranks=3), {"experts": 6}),
    "2:1, other numbers of positions": Case(Fold(3, pp=2, expert_ranks=1, expert_pp=1), {"layers": 3}, passes=4),
    "1:2, other numbers of positions": Case(Fold(3, expert_ranks=2, expert_pp=2), {"layers": 3}),
    "4:4": Case(Fold(8, tp=2, cp=2, etp=2, ep=2, expert_ranks=4), degree=2),
    "3:5": Case(Fold(8, pp=3, ep=5, expert_ranks=5, expert_pp=1), {"layers": 3, "experts": 5}, passes=4),
    "top-1": Case(Fold(4, cp=2, ep=2, expert_ranks=2), {"topk": 1}),
    "dropping": Case(Fold(3, ep=2, expert_ranks=2), {"router": {"capacity_factor": 0.75, "balance_loss": 0.1}}),
    "dense blocks between": Case(Fold(4, pp=2, ep=2, expert_ranks=2, expert_pp=1), {"layers": 4, "moe_every": 2}, passes=4),
    "pieces, recomputed": Case(
        Fold(4, pp=2, ep=2, expert_ranks=2, expert_pp=1),
        {"layers": 2},
        passes=2,
        degree=2,
        recompute=("attention", "expert", "shared"),
    ),
    "chunks": Case(Fold(4, ep=1, expert_ranks=2), passes=1, zero=1, reduction="chunks"),
}


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", CASES)
def test_parity_with_one_process(ranks, name: str) -> None:
    case = CASES[name]
    found = ranks(case.fold.world_size).run(train_apart, case, STEPS)
    recipe = make_recipe(1, model={**MODEL, **(case.model or {})})
    reference = one_process(recipe, steps=STEPS)
    check_equal(found, reference)
