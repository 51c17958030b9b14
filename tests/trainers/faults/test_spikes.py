"""Losses that stand out."""

from __future__ import annotations

import math
import random

from trainers.faults.guard import Spikes


def found(losses: list[float]) -> list[int]:
    spikes = Spikes()
    return [at for at, loss in enumerate(losses) if spikes.look(loss) is not None]


def falling(steps: int, noise: float = 0.05) -> list[float]:
    chance = random.Random(0)
    return [2.0 + 3.0 * math.exp(-step / 40) + chance.gauss(0.0, noise) for step in range(steps)]


def test_a_spike_is_told_once_when_it_begins() -> None:
    losses = falling(300)
    losses[200:205] = [6.0, 5.5, 5.0, 4.5, 4.0]
    losses[250] = 7.0
    assert found(losses) == [200, 250]


def test_what_is_no_spike() -> None:
    assert found(falling(1000)) == []
    assert found([2.0] * 100 + [2.1] * 100) == [], "less than a fifth of a nat"
    assert found([5.0] * 10 + [9.0]) == [], "training has just begun"
    assert found([2.0] * 100 + [math.nan] * 3) == [], "the guard tells of these"


def test_losses_that_stay_high_are_the_new_usual() -> None:
    spikes = Spikes()
    assert [at for at, loss in enumerate([2.0] * 100 + [8.0] * 200) if spikes.look(loss) is not None] == [100]
    assert spikes.look(8.1) is None
    assert spikes.look(12.0) == 8.0


def test_the_median_is_of_the_losses_before() -> None:
    spikes = Spikes()
    assert [spikes.look(loss) for loss in [2.0] * 50 + [9.0]][-1] == 2.0
