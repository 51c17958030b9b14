"""How tokens are drawn."""

from __future__ import annotations

import math

import pytest
import torch

from foldray import UserError
from trainers.inference.sampling import Sampling, probabilities

LOGITS = torch.tensor([1.0, 4.0, 2.0, 3.0, -math.inf], dtype=torch.float64)
P = LOGITS.softmax(0).tolist()  # .03 .64 .09 .24 0


@pytest.mark.parametrize(
    ("sampling", "drawn"),
    [
        (Sampling(), [0, 1, 2, 3]),
        (Sampling(top_k=2), [1, 3]),
        (Sampling(top_k=99), [0, 1, 2, 3]),
        (Sampling(top_p=0.64), [1]),
        (Sampling(top_p=0.65), [1, 3]),
        (Sampling(top_p=1e-9), [1]),
        (Sampling(top_p=0.72, top_k=2), [1]),  # of the two that are left, the first one has 0.73
        (Sampling(top_p=0.74, top_k=2), [1, 3]),
    ],
    ids=str,
)
def test_limits_keep_the_most_probable_tokens_and_their_ratios(sampling: Sampling, drawn: list[int]) -> None:
    found = probabilities(LOGITS, sampling)
    assert found.nonzero().flatten().tolist() == drawn
    expected = torch.tensor([P[index] if index in drawn else 0.0 for index in range(5)], dtype=torch.float64)
    torch.testing.assert_close(found, expected / expected.sum())


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_temperature_divides_logits(temperature: float) -> None:
    found = probabilities(LOGITS, Sampling(temperature))
    assert float((found[1] / found[2]).log()) == pytest.approx(2 / temperature)


def test_equal_logits() -> None:
    even = torch.zeros(4, dtype=torch.float64)
    assert int((probabilities(even, Sampling(top_k=2)) > 0).sum()) == 2
    assert probabilities(even, Sampling(top_p=0.5)).tolist() == [0.5, 0.5, 0, 0]  # two of them make up the half


@pytest.mark.parametrize("temperature", [0.0, 1e-310])
def test_a_low_temperature_takes_the_most_probable_token(temperature: float) -> None:
    sampler = Sampling(temperature).sampler()
    assert [sampler.draw(LOGITS) for _ in range(9)] == [1] * 9
    assert Sampling(0.0).sampler().draw(torch.tensor([1.0, 2.0, 2.0])) == 1


def test_draws_have_their_probabilities_and_repeat_with_their_seed() -> None:
    sampler, again, other = (Sampling(seed=seed).sampler() for seed in (1, 1, 2))
    drawn = [sampler.draw(LOGITS.float()) for _ in range(3000)]
    assert [drawn.count(index) / 3000 for index in range(5)] == pytest.approx(P, abs=0.03)
    assert [again.draw(LOGITS.float()) for _ in range(30)] == drawn[:30]
    assert [other.draw(LOGITS.float()) for _ in range(30)] != drawn[:30]
    assert len({Sampling().sampler().seed for _ in range(8)}) > 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_p": 1.1},
        {"top_p": math.nan}, {"top_k": 0}, {"seed": -1}, {"seed": 2**32},
    ],
    ids=str,
)  # fmt: skip
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError) as error:
        Sampling(**wrong)
    assert error.value.field == next(iter(wrong))
