"""Losses of tokens with factors of their own, and log-probabilities: every fold and schedule has those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foldray.model import IGNORED, Batch
from tests.foldray.parity import BATCH, check_equal, engine_on, gradients, make_recipe, one_process, own_batches, train
from tests.foldray.test_replay_parity import CASES, FOLDS, SCHEDULES

_OTHERS = {case: CASES[case] for case in ("further tokens, dense blocks", "parts of micro-batches", "ranks of experts")}


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("workers", "fold"), FOLDS, ids=str)
def test_every_fold_and_schedule_equals_one_process(ranks, workers: int, fold: dict[str, int], schedule: dict) -> None:
    recipe = make_recipe(workers, fold, schedule=schedule)
    found = ranks(workers).run(train, recipe, 2, False, True, False, True, timeout=240)
    check_equal(found, one_process(recipe, steps=2, masked=True, weighted=True))


@pytest.mark.gate(1 / 2)
@pytest.mark.parametrize("case", _OTHERS)
def test_where_weights_meet_other_rules(ranks, case: str) -> None:
    workers, fold, sections = _OTHERS[case]
    recipe = make_recipe(workers, fold, **sections)
    found = ranks(workers).run(train, recipe, 2, False, False, False, True, timeout=240)
    check_equal(found, one_process(recipe, steps=2, weighted=True))


def test_weights_are_factors() -> None:
    """The gradient is that of Σ weight · loss over the number of tokens that count."""
    recipe = make_recipe(1, model={"router": {"balance_loss": 0.0, "z_loss": 0.0}}, training={"micro_batch": BATCH})
    with engine_on(recipe) as (engine, groups):
        (batch,) = own_batches(recipe, groups, 0, weighted=True)
        few = [(0, 3), (2, 0), (2, 9), (5, 15)]
        counted = torch.zeros_like(batch.target_BL, dtype=torch.bool)
        counted[tuple(zip(*few, strict=True))] = True

        def gradient(counted_BL: torch.Tensor, weight_BL: torch.Tensor | None) -> dict[str, torch.Tensor]:
            target_BL = batch.target_BL.masked_fill(~counted_BL, IGNORED)
            engine.train([batch._replace(target_BL=target_BL, weight_BL=weight_BL)])
            found = {name: held.tensor for name, held in gradients(engine).items()}
            engine.gradients.zero()
            return found

        found, expected = gradient(counted, batch.weight_BL), dict[str, Any]()
        for row, position in few:
            alone = torch.zeros_like(counted)
            alone[row, position] = True
            for name, part in gradient(alone, None).items():
                expected[name] = expected.get(name, 0) + batch.weight_BL[row, position] * part / len(few)
    for name, part in found.items():
        torch.testing.assert_close(part, expected[name], atol=1e-12, rtol=0)


def log_probs(rank: int, recipe: Any) -> tuple[int, list[torch.Tensor], bool]:
    """Return a rank's data-parallel place, its log-probabilities, and whether it has some of its own."""
    with engine_on(recipe, rank) as (engine, groups):
        found = engine.execution.log_probs(own_batches(recipe, groups, 0, masked=True))
        seat = groups.coordinate.get("attention", {"tp": 1})
        return groups.dp_rank if groups.owns_tokens else -1, found, seat["tp"] == 0


@pytest.mark.gate(1 / 4)
@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=str)
@pytest.mark.parametrize(("workers", "fold"), FOLDS, ids=str)
def test_log_probs_of_every_fold(ranks, workers: int, fold: dict[str, int], schedule: dict) -> None:
    recipe, alone = make_recipe(workers, fold, schedule=schedule), make_recipe(1, training={"micro_batch": BATCH})
    if recipe.model != alone.model:  # a pipeline may have more blocks
        alone = make_recipe(1, training={"micro_batch": BATCH}, model=recipe.model.model_dump(mode="json"))
    with engine_on(alone) as (engine, groups):
        (batch,) = own_batches(alone, groups, 0, masked=True)
        logits_BLV = engine.model.logits(batch.token_BL)
    expected_BL = logits_BLV.log_softmax(-1).gather(-1, batch.target_BL.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    expected_BL = expected_BL.masked_fill(batch.target_BL == IGNORED, 0)
    whole_BL, size = torch.zeros_like(expected_BL), recipe.training.micro_batch
    for place, found, speaks in ranks(workers).run(log_probs, recipe, timeout=240):
        for m, part in enumerate(found if speaks else ()):
            first = (m * recipe.placed_fold.dp + place) * size
            whole_BL[first : first + size] += part
    torch.testing.assert_close(whole_BL, expected_BL, atol=1e-10, rtol=0)


def test_a_further_token_has_the_weight_that_it_has_as_the_next_one() -> None:
    token_BL, weight_BL = torch.arange(12).view(2, 6), torch.arange(12.0).view(2, 6)
    batch = Batch(token_BL, token_BL + 1, weight_BL=weight_BL)
    assert torch.equal(batch.weight(), weight_BL)
    for depth in (1, 2):
        counts_BL = batch.target(depth) != IGNORED
        assert torch.equal(batch.weight(depth)[counts_BL], (batch.target(depth) - 1).double()[counts_BL].to(weight_BL))
