"""The health of experts: measures against values made by hand, and what they do not depend on."""

import math
import warnings

import numpy as np
import pytest

from trainers.telemetry.expert_health import Course, Health, entropy, max_over_mean, on_ranks, overlaps, similarity, unused


def test_one_step_by_hand():
    health = Health.of([np.array([[6, 2, 0, 0], [1, 1, 1, 1]])], ep=2)
    assert health.max_over_mean.tolist() == [3.0, 1.0]
    assert health.rank_max_over_mean.tolist() == [2.0, 1.0]
    assert health.entropy == pytest.approx([-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4), 1.0])
    assert (health.dead.tolist(), health.starved.tolist()) == ([2, 0], [2, 0])
    assert health.by_layer() == {
        "max_over_mean": [3.0, 1.0], "rank_max_over_mean": [2.0, 1.0], "entropy": [0.4056, 1.0],
        "dead": [2, 0], "starved": [2, 0],
    }  # fmt: skip


def test_ratios_are_those_of_steps_and_dead_experts_those_of_the_sum():
    health = Health.of([np.array([[2, 0]]), np.array([[0, 2]])], ep=2)
    assert (health.max_over_mean.tolist(), health.rank_max_over_mean.tolist(), health.entropy.tolist()) == ([2.0], [2.0], [0.0])
    assert (health.dead.tolist(), health.starved.tolist()) == ([0], [0])


def test_a_starved_expert_has_less_than_a_tenth_of_the_even_share():
    dead, starved = unused(np.array([[0, 9, 10, 381], [0, 0, 0, 0]]))  # the even share is 100 in the first layer
    assert (dead.tolist(), starved.tolist()) == ([1, 4], [2, 4])


def test_a_rank_has_neighbouring_experts():
    assert on_ranks(np.array([[1, 2, 3, 4, 5, 6]]), 3).tolist() == [[3, 7, 11]]
    with pytest.raises(ValueError, match="cannot reshape"):
        on_ranks(np.array([[1, 2, 3]]), 2)


@pytest.mark.parametrize(("load", "expected"), [([0, 0], 0.0), ([5], 1.0), ([7, 0, 0], 0.0), ([3, 3, 3], 1.0)])
def test_entropy_has_no_exceptions(load, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(entropy(np.array(load))) == pytest.approx(expected)
        assert np.isfinite(max_over_mean(np.array(load)))


def load(step: int) -> np.ndarray:
    return np.array([[step, 1], [0, 2]])


def course(most: int, *steps: int) -> Course:
    made = Course(most)
    for step in steps:
        made.add(step, load(step))
    return made


def test_a_course_joins_columns_and_loses_no_token():
    made = course(4, *range(1, 12))
    assert [(column.first, column.last, column.steps) for column in made.columns] == [(1, 4, 4), (5, 8, 4), (9, 11, 3)]
    assert sum(column.total for column in made.columns).tolist() == [[66, 11], [0, 22]]
    assert made.columns[0].total.tolist() == [[10, 4], [0, 8]]
    assert len(made.full()) == 2


def test_a_long_course_stays_small():
    assert len(course(8, *range(1, 1001)).columns) <= 8


def test_a_course_forgets_columns_that_run_again():
    made = course(4, *range(1, 12))
    made.rewind(6)
    made.add(7, load(7))
    assert [(column.first, column.last) for column in made.columns] == [(1, 4), (7, 7)]


def test_overlap_of_neighbouring_columns():
    load_TME = np.array([[[4, 0], [1, 1]], [[0, 8], [2, 2]], [[4, 4], [2, 0]]])
    assert overlaps(load_TME).tolist() == [[0.0, 1.0], [0.5, 0.5]]


def drawn(chance: np.random.Generator, share_TE: np.ndarray) -> np.ndarray:
    return np.array([chance.multinomial(100_000, share) for share in share_TE / share_TE.sum(-1, keepdims=True)])


def test_layers_that_see_the_same_batches_are_alike_under_any_order_of_experts():
    chance = np.random.default_rng(0)
    one, other = (np.exp(chance.normal(0, 0.3, (128, 16))) for _ in range(2))
    shuffled = one[:, chance.permutation(16)]
    alike = similarity(np.stack([drawn(chance, share) for share in (one, shuffled, other)], axis=1))
    assert alike is not None
    assert np.diag(alike) == pytest.approx([1.0] * 3)
    assert alike[0, 1] > 0.95
    assert abs(alike[0, 2]) < 0.15


def test_unrelated_layers_are_not_alike_with_many_experts_and_few_columns():
    chance = np.random.default_rng(1)
    alike = similarity(np.stack([drawn(chance, np.exp(chance.normal(0, 0.3, (40, 256)))) for _ in range(2)], axis=1))
    assert alike is not None
    assert abs(alike[0, 1]) < 0.2  # the biased estimate is 0.9 here


def test_a_common_drift_does_not_make_layers_alike():
    chance, drift = np.random.default_rng(2), np.linspace(0, 3, 128)[:, None] * np.linspace(-1, 1, 16)
    loads = [drawn(chance, np.exp(drift + chance.normal(0, 0.3, (128, 16)))) for _ in range(2)]
    alike = similarity(np.stack(loads, axis=1))
    assert alike is not None
    assert abs(alike[0, 1]) < 0.2


def test_too_few_columns_and_loads_that_never_change():
    assert similarity(np.ones((7, 2, 4))) is None
    alike = similarity(np.ones((8, 2, 4)))
    assert alike is not None
    assert np.isnan(alike).all()


def unbiased(one: np.ndarray, other: np.ndarray) -> float:
    """Return HSIC of two Gram matrices, as equation 5 of Song et al. 2012 writes it."""
    n, (k, m) = len(one), (gram - np.diag(np.diag(gram)) for gram in (one, other))
    between = k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k @ m).sum()
    return float(np.trace(k @ m) + between) / (n * (n - 3))


def test_similarity_agrees_with_the_formula_of_the_paper():
    chance = np.random.default_rng(3)
    common = chance.normal(0, 0.3, (20, 1, 6))
    share = np.exp(common + chance.normal(0, 0.2, (20, 2, 6)))
    share /= share.sum(-1, keepdims=True)
    k, m = (change @ change.T for change in (share[1::2] - share[::2]).transpose(1, 0, 2))
    alike = similarity(share)
    assert alike is not None
    assert alike[0, 1] == pytest.approx(unbiased(k, m) / math.sqrt(unbiased(k, k) * unbiased(m, m)))
