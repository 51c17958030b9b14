"""The cuts of a sequence: the properties of every kind of slicing, for any length and degree."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foldray.blueprint import ModelSpec
from foldray.errors import UserError
from foldray.graph import SLICINGS, SliceCost, Slicing, slice_sequence
from tests.foldray.model.striding import STRIDES

SMALL = SliceCost.of_model(512, 8)


@given(
    st.sampled_from(SLICINGS),
    st.integers(1, 300),
    st.integers(1, 24),
    st.integers(1, 1024),
    st.integers(1, 64),
    st.integers(1, 9),
    st.integers(0, 24),
)  # fmt: skip
def test_any_slicing_is_whole_and_supplies_the_buffer(kind, units, degree, hidden, heads, multiple_of, fewer) -> None:
    degree = min(degree, units)
    slices = max(1, degree - fewer)
    found = slice_sequence(kind, units * multiple_of, degree, SliceCost.of_model(hidden, heads), multiple_of, slices)
    assert (len(found.attention), len(found.moe)) == (slices, degree)
    for lengths in found:
        assert sum(lengths) == units * multiple_of
        assert min(lengths) >= 1
        assert all(length % multiple_of == 0 for length in lengths)
    assert list(found.moe) == sorted(found.moe, reverse=True)
    assert found.moe[0] - found.moe[-1] in (0, multiple_of)
    assert found.supplies()
    # This is constraint (2) of FoldMoE.
    assert all(done * degree >= (j + 1) * found.length for j, done in enumerate(accumulate(found.attention)))


def test_a_slicing_that_starves_the_buffer_is_told() -> None:
    assert Slicing((4, 2, 2), (3, 3, 2)).supplies()
    assert not Slicing((4, 1, 3), (3, 3, 2)).supplies()


@pytest.mark.parametrize(("degree", "most"), [(4, 0.80), (8, 0.72)])
def test_time_uniform_shortens_the_slowest_slice(degree: int, most: float) -> None:
    uniform, ours = (slice_sequence(kind, 4096, degree, SMALL).attention for kind in ("token_uniform", "time_uniform"))
    assert max(SMALL.slices(ours)) <= most * max(SMALL.slices(uniform))


@given(st.integers(2, 14), st.integers(2, 5), st.integers(1, 30), st.integers(0, 50))
def test_time_uniform_is_the_best_of_all(length: int, degree: int, quadratic: int, linear: int) -> None:
    degree, cost = min(degree, length), SliceCost(quadratic, linear)
    found = slice_sequence("time_uniform", length, degree, cost)
    first = found.attention[0]
    assert first == -(-length // degree)
    slowest = []
    for inner in combinations(range(first + 1, length), degree - 2) if degree > 1 else []:
        ends = (0, first, *inner, length) if degree > 1 else (0, length)
        other = Slicing(tuple(b - a for a, b in pairwise(ends)), found.moe)
        if other.supplies() and min(other.attention) > 0:
            slowest.append(max(cost.slices(other.attention)[1:]))
    if slowest:
        assert max(cost.slices(found.attention)[1:]) == pytest.approx(min(slowest), rel=1e-12)


def test_the_cost_of_slices_adds_up_to_that_of_all_tokens() -> None:
    cost = SliceCost(3, 5)
    assert cost.slices([2, 1, 3]) == [3 * (1 + 2) + 10, 3 * 3 + 5, 3 * (4 + 5 + 6) + 15]
    length, context = 3, 6
    assert cost.slices([3, 3])[1] == 3 * length * (context - (length - 1) / 2) + 5 * length


@pytest.mark.parametrize(("windows", "first"), [
    (("full",), lambda query: 0), (("sliding:5",), lambda query: max(0, query - 4)),
    (("chunked:4",), lambda query: query // 4 * 4), (("tests.foldray.model.striding:STRIDES",), STRIDES.first),
])  # fmt: skip
def test_the_cost_of_a_models_slices_counts_its_products_and_the_pairs_that_it_sees(windows, first) -> None:
    """Grouped keys and values are narrow, heads are together wider than the model, and windows see few pairs."""
    model = ModelSpec(preset="tiny", layers=2, hidden=64, heads=8, kv_heads=2, head_dim=16, windows=windows)
    products = 64 * (8 * 16) * 2 + 64 * (2 * 16) * 2  # of queries and outputs, of keys and values
    ends, lengths = (3, 4, 9, 23), (3, 1, 5, 14)
    pairs = [sum(query - first(query) + 1 for query in range(end - own, end)) for end, own in zip(ends, lengths, strict=True)]
    expected = [(4 * 8 * 16 + 3 * 8) * seen + 2 * products * own for seen, own in zip(pairs, lengths, strict=True)]
    assert SliceCost.of(model).slices(lengths) == expected


def test_the_cost_of_a_models_slices_is_the_papers_where_heads_are_plain() -> None:
    model = ModelSpec(preset="tiny", hidden=128, heads=4, kv_heads=4, head_dim=32)
    assert SliceCost.of(model) == SliceCost.of_model(128, 4)


def test_narrow_vectors_of_latent_attention_are_cheaper_than_whole_heads() -> None:
    model = ModelSpec(preset="deepseek-v3")
    down, up = 1536 + 512 + 64, 1536 * 128 * 192 + 512 * 128 * 256
    assert SliceCost.of(model).linear == 2 * (7168 * down + up + 128 * 128 * 7168)


def test_slices_of_windows_are_nearly_equal() -> None:
    """If every query sees 64 keys, later slices cost no more than earlier ones. Half of the blocks see all keys in the second."""
    narrow, mixed = (SliceCost.of(ModelSpec(preset="tiny", layers=2, windows=windows, max_positions=8192))
                     for windows in (("sliding:64",), ("sliding:64", "full")))  # fmt: skip
    found = slice_sequence("time_uniform", 8192, 4, narrow).attention
    assert max(found) - min(found) < 64
    both, whole = (slice_sequence("time_uniform", 8192, 4, cost).attention for cost in (mixed, mixed._replace(windows=())))
    assert max(found) < max(both[1:]) < max(whole[1:])
    assert max(mixed.slices(both)[1:]) < max(mixed.slices(whole)[1:])


def _listing(length: int, degree: int, cost: SliceCost) -> list[int]:
    """Run FoldMoE's Algorithm 1 line by line, without clamps."""
    flops = lambda tokens, context: cost.quadratic * tokens * context + cost.linear * tokens  # noqa: E731
    ideal = sum(flops(1, i) for i in range(1, length + 1)) / degree
    first = -(-length // degree)
    slices, start = [first], first
    while start < length:
        end = max(start + 1, (len(slices) + 1) * first)
        if length - end >= degree - len(slices):
            end = min(range(end, length + 1), key=lambda i: abs(flops(i - start, i) - ideal))
        slices.append(end - start)
        start = end
    return slices


@pytest.mark.parametrize(("length", "degree"), [(12, 3), (96, 4), (256, 8), (1024, 8), (2048, 16)])
def test_algorithm_1_follows_the_printed_listing(length: int, degree: int) -> None:
    printed = _listing(length, degree, SMALL)
    ours = slice_sequence("algorithm1", length, degree, SMALL).attention
    assert list(ours) == printed, "sizes at which the listing needs no clamp"


def test_algorithm_1_cuts_unevenly_where_attention_is_dear() -> None:
    assert slice_sequence("algorithm1", 4096, 8, SMALL).attention == (512, 703, 562, 479, 424, 392, 512, 512)


def test_measured_costs_are_found_again() -> None:
    truth = SliceCost(2e-9, 3e-6)
    timings = [(n, c, truth.quadratic * n * (c - (n - 1) / 2) + truth.linear * n + 1e-4) for n in (64, 256) for c in (256, 1024)]
    found = SliceCost.measured(timings)
    assert found.quadratic == pytest.approx(truth.quadratic, rel=1e-6)
    assert found.linear == pytest.approx(truth.linear, rel=1e-6)
    with pytest.raises(ValueError, match="1 timings cannot tell"):
        SliceCost.measured(timings[:1])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("time_uniform", 0, 1, SMALL), "data.seq_len=0: must be at least 1"),
        (("time_uniform", 8, 0, SMALL), "schedule.degree=0: must be at least 1"),
        (("time_uniform", 8, 9, SMALL), "schedule.degree=9: a sequence of 8 tokens has at most 8 slices; legal: 1…8"),
        (("time_uniform", 8, 3, SMALL, 4), "schedule.degree=3: a sequence of 8 tokens has at most 2 slices of 4; legal: 1…2"),
        (("time_uniform", 8, 1, SMALL, 3), "data.seq_len=8: must be a multiple of 3, .*; legal: 6, 9"),
        (("thin", 8, 1, SMALL), "schedule.slicing=thin: is no kind of slicing; legal: token_uniform, time_uniform, algorithm1"),
    ],
)
def test_what_cannot_be_cut_is_refused(given, words: str) -> None:
    with pytest.raises(UserError, match=words):
        slice_sequence(*given)


@pytest.mark.parametrize(
    ("slicing", "in_units"),
    [
        (Slicing((4096,), (4096,)), Slicing((1,), (1,))),
        (Slicing((6, 2), (4, 4)), Slicing((3, 1), (2, 2))),
        (Slicing((5, 3), (4, 4)), Slicing((5, 3), (4, 4))),
    ],
)
def test_units_are_as_long_as_pieces_allow(slicing: Slicing, in_units: Slicing) -> None:
    """So pieces that share tokens share units, and no others do."""
    assert slicing.in_units == in_units
