"""Mixtures: shares of sources, which source gives which sample, and reading sequences of several sources."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from foldray.errors import UserError
from foldray.recipe.data import MOST_PARTS, whole
from tests.trainers.data.test_packed import packed
from trainers.data.mixture import FILE, MixedOrder, Mixture, Shares, baselines, deal, document, opened
from trainers.data.order import SampleOrder
from trainers.data.packed import Batches, PackedData
from trainers.telemetry.records import averaged

WEIGHTS = some.lists(some.integers(1, 60), min_size=1, max_size=7)
SEEDS = some.integers(0, 2**63 - 1)


def check_prefixes(sources: np.ndarray, weights: list[int]) -> None:
    """Check that n_i(N) is within one sample of N·w_i for every N and i, in whole numbers."""
    total, n = sum(weights), np.arange(1, len(sources) + 1)
    for source, weight in enumerate(weights):
        given = np.cumsum(sources == source)
        assert (np.abs(given * total - n * weight) < total).all(), (source, weights)


@given(WEIGHTS, SEEDS)
def test_every_prefix_keeps_to_the_weights(weights: list[int], seed: int):
    sources, _ = Shares(weights, seed)(0, 9000)  # more than one table
    check_prefixes(sources, weights)


@pytest.mark.parametrize("weights", [[1], [1, 1], [1, 999], [1] * 256, [1, *[997] * 3], [MOST_PARTS // 8 - 1, 1], [5, 3, 1, 1]])
def test_extreme_weights(weights: list[int]):
    check_prefixes(deal(weights, 1, 3), weights)


@given(WEIGHTS, SEEDS, some.integers(0, 10**13), some.integers(0, 300))
def test_a_sample_depends_on_its_index_alone(weights: list[int], seed: int, start: int, many: int):
    whole_range = Shares(weights, seed)(start, start + many)
    one_by_one = [Shares(weights, seed)(at, at + 1) for at in range(start, start + many, 37)]
    for got, column in zip(zip(*one_by_one, strict=True), whole_range, strict=False):
        assert np.concatenate(got).tolist() == column[::37].tolist()


@given(WEIGHTS, SEEDS)
def test_samples_of_a_source_have_numbers_without_gaps(weights: list[int], seed: int):
    sources, numbers = Shares(weights, seed)(0, 6000)
    for source in range(len(weights)):
        own = numbers[sources == source]
        assert own.tolist() == list(range(len(own)))


@given(some.lists(some.floats(1e-3, 1e3).map(lambda weight: round(weight, 2) or 1.0), min_size=1, max_size=5))
def test_weights_become_whole_numbers_in_the_same_ratio(weights: list[float]):
    numbers = whole(weights)
    assert math.gcd(*numbers) == 1
    for weight, number in zip(weights, numbers, strict=True):
        assert number / numbers[0] == pytest.approx(weight / weights[0], rel=1e-12)


@pytest.mark.parametrize(("weights", "numbers"), [([0.7, 0.2, 0.1], (7, 2, 1)), ([2.0, 4.0], (1, 2)), ([1e12, 5e11], (2, 1))])
def test_weights_as_they_are_written(weights: list[float], numbers: tuple[int, ...]):
    assert whole(weights) == numbers


@pytest.mark.parametrize(
    ("version", "golden"),
    [
        (1, [0, 7, 1, 4, 2, 9, 2, 5, 1, 3, 0, 8, 2, 6, 0, 4, 8, 1, 1, 5, 2, 7, 0, 9]),
        (2, [1, 3, 0, 6, 2, 8, 2, 5, 0, 7, 1, 9, 0, 4, 1, 6, 9, 2, 2, 3, 0, 5, 1, 8]),
    ],
)
def test_the_order_never_changes(version: int, golden: list[int]):
    # A checkpoint resumes in the middle of it.
    assert MixedOrder(0, [3, 5, 2], [3, 2, 1], version)(0, 24).tolist() == golden


def test_sources_do_not_go_in_step():
    """A data-parallel place that takes every second sample gets both sources."""
    sources, _ = Shares([1, 1], 0)(0, 4096)
    assert 1500 < sources[::2].sum() + (1 - sources[1::2]).sum() < 2600


def test_epochs_of_a_source_are_permutations_of_its_own():
    counts, weights = [7, 50], [1, 3]
    order, (sources, _) = MixedOrder(4, counts, weights), Shares(weights, 4)(0, 400)
    found = order(0, 400)
    small, large = found[sources == 0], found[sources == 1] - 7
    for epoch in range(len(small) // 7):
        assert sorted(small[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert small[:7].tolist() != small[7:14].tolist()
    assert small.tolist() == SampleOrder(4, 7)(0, len(small)).tolist()  # the first source, as if it were alone
    assert sorted(large[:50]) == list(range(50))
    equal = MixedOrder(4, [20, 20], [1, 1])(0, 40)
    assert equal[equal < 20].tolist() != (equal[equal >= 20] - 20).tolist()


def mixture(folder: Path, weights: list[int]) -> Mixture:
    """Write two sources, the second with other numbers of tokens, and a mixture of both."""
    names = ["0" * 16, "1" * 16, "2" * 16]
    for name in names[:2]:
        (folder / name).mkdir(parents=True)
        packed(folder / name)
    (folder / names[2]).mkdir()
    parts = [PackedData.open(folder / name) for name in names[:2]]
    (folder / names[2] / FILE).write_text(json.dumps(document(parts, weights)))
    found = opened(folder / names[2], ["one", "two"])
    assert isinstance(found, Mixture)
    return found


def test_reads_the_sequences_of_all_sources(tmp_path: Path):
    data = mixture(tmp_path, [3, 1])
    one, two = (part.train for part in data.parts.values())
    assert (list(data.parts), data.weights, len(data.train)) == (["one", "two"], (3, 1), len(one) + len(two))
    order = [len(one) + 2, 0, 1, len(one), 2, 1]
    for name in ("tokens", "segments", "trained"):
        of_one, of_two, mixed = (getattr(split, name) for split in (one, two, data.train))
        expected = [of_two([2])[0], *of_one([0, 1]), of_two([0])[0], *of_one([2, 1])]
        assert [row.tolist() for row in mixed(order)] == [row.tolist() for row in expected]
        assert mixed([]).shape == (0, *expected[0].shape)
    with pytest.raises(IndexError):
        data.train.tokens([len(data.train)])


def test_every_fold_takes_the_same_samples(tmp_path: Path):
    data, batch = mixture(tmp_path, [2, 1]), 12
    expected = data.train.order(5)(3 * batch, 4 * batch).tolist()
    for dp, micro in ((1, 12), (2, 3), (4, 3), (3, 2)):
        batches = [Batches(data.train, 5) for _ in range(dp)]
        taken = [
            batches[rank].indices(3, m, rank, dp, micro, batch)
            for m in range(-(-batch // (dp * micro)))
            for rank in range(dp)
        ]  # fmt: skip
        assert np.concatenate(taken).tolist() == expected


def test_a_single_source_has_the_baselines_that_it_had(tmp_path: Path):
    data = mixture(tmp_path, [3, 1])
    alone = data.parts["one"]
    found, length = baselines(alone, 4)
    assert found == pytest.approx(alone.baselines(4))
    assert length == alone.validation.bytes(4) / (4 * alone.validation.seq_len)
    assert baselines(data, 4)[0] == pytest.approx(alone.baselines(4))  # two equal sources
    assert baselines(data, None)[1] == pytest.approx(alone.validation.bytes() / (len(alone.validation) * 5))


def test_losses_are_averaged_by_weight_and_bits_by_bytes():
    one, two = {"loss": 2.0, "bits_per_byte": 4.0, "sequences": 3}, {"loss": 1.0, "bits_per_byte": 1.0, "sequences": 5}
    assert averaged([one], [1]) is one  # type: ignore[list-item]
    # Tokens of the first have 1/2 (in units of 1/ln 2), those of the second 1 byte.
    found = averaged([one, two], [3, 1])  # type: ignore[list-item]
    assert found == {"loss": 1.75, "bits_per_byte": pytest.approx(7 / (3 * 0.5 + 1)), "sequences": 8}
    assert averaged([one, {**two, "bits_per_byte": None}], [1, 1])["bits_per_byte"] is None  # type: ignore[list-item]


FORGED: list[Any] = [
    [],
    {"format": 2, "parts": [{"data": "0" * 16, "weight": 1}]},
    {"format": 1, "parts": []},
    {"format": 1, "parts": [{"data": "../../etc/passwd", "weight": 1}]},
    {"format": 1, "parts": [{"data": "0" * 16, "weight": 0}]},
]


@pytest.mark.parametrize("content", FORGED, ids=str)
def test_a_forged_mixture_is_refused(tmp_path: Path, content: Any):
    folder = mixture(tmp_path, [1, 1]).folder
    (folder / FILE).write_text(json.dumps(content))
    with pytest.raises(UserError, match="holds a mixture whose"):
        opened(folder, ["one", "two"])
