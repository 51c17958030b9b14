"""Rank tables: golden ones, and properties of all."""

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foldray import Fold, UserError
from foldray.fold import Grid, divisors, nearest_folds

FAMILIES = {
    "tp": ["tp"], "cp": ["cp"], "dp": ["dp"], "pp": ["pp"], "dp_cp": ["dp", "cp"],
    "etp": ["etp"], "ep": ["ep"], "edp": ["edp"], "etp_ep": ["etp", "ep"],
}  # fmt: skip
ATTENTION = ("tp", "cp", "dp", "pp", "dp_cp")


def pairs(ranks: int, step: int) -> list[list[int]]:
    """[[r, r + step], …]: all `ranks` ranks in pairs that lie `step` apart."""
    return [[r, r + step] for r in range(ranks) if r // step % 2 == 0]


def runs(ranks: int, length: int) -> list[list[int]]:
    return [list(range(start, start + length)) for start in range(0, ranks, length)]


# What Megatron-Core's RankGenerator makes of the order tp-cp-ep-dp-pp (megatron/core/parallel_state.py).
GOLDEN = {
    "A": (
        Fold(8, tp=2, cp=2, ep=8),
        {"dp": 2, "edp": 1},
        {
            "tp": [[0, 1], [2, 3], [4, 5], [6, 7]], "cp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "dp": [[0, 4], [1, 5], [2, 6], [3, 7]], "dp_cp": [[0, 2, 4, 6], [1, 3, 5, 7]],
            "ep": [[0, 1, 2, 3, 4, 5, 6, 7]], "edp": [[0], [1], [2], [3], [4], [5], [6], [7]],
        },
    ),
    "B": (
        Fold(8, tp=2, pp=2, ep=4),
        {"dp": 2, "edp": 1},
        {
            "tp": [[0, 1], [2, 3], [4, 5], [6, 7]], "dp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "ep": [[0, 1, 2, 3], [4, 5, 6, 7]], "edp": [[0], [1], [2], [3], [4], [5], [6], [7]],
        },
    ),
    "C": (
        Fold(16, tp=4, pp=2, etp=2, ep=4),
        {"dp": 2, "edp": 1},
        {
            "etp": pairs(16, 1), "ep": [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]], "etp_ep": runs(16, 8),
            "tp": runs(16, 4), "dp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]], "pp": pairs(16, 8),
        },
    ),
    "D": (
        Fold(8, cp=2, pp=2, etp=2, ep=2),
        {"dp": 2, "edp": 1},
        {
            "cp": [[0, 1], [2, 3], [4, 5], [6, 7]], "dp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "dp_cp": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "etp": [[0, 1], [2, 3], [4, 5], [6, 7]], "ep": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "etp_ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
        },
    ),
    "E": (
        Fold(16, tp=2, cp=2, pp=2, ep=8),
        {"dp": 2, "edp": 1},
        {
            "cp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
            "dp_cp": [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
            "ep": runs(16, 8), "pp": pairs(16, 8),
        },
    ),
    "F": (
        Fold(8, etp=2, ep=4),
        {"dp": 8, "edp": 1},
        {"etp": [[0, 1], [2, 3], [4, 5], [6, 7]], "ep": [[0, 2, 4, 6], [1, 3, 5, 7]]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_tables(name):
    fold, sizes, tables = GOLDEN[name]
    assert {size: getattr(fold, size) for size in sizes} == sizes
    for family, table in tables.items():
        assert list(map(list, fold.groups(family))) == table, family


@pytest.mark.parametrize(
    ("fold", "attention_pp", "moe_pp"),
    [
        pytest.param(
            {"tp": 2, "pp": 2, "ep": 4, "order": "tp-cp-pp-dp"},
            [[0, 2], [1, 3], [4, 6], [5, 7]],
            [[0, 4], [1, 5], [2, 6], [3, 7]],
            id="G",
        ),
        pytest.param(
            {"tp": 2, "pp": 2, "ep": 4, "order": "tp-cp-pp-dp", "moe_order": "etp-ep-pp-edp"},
            [[0, 2], [1, 3], [4, 6], [5, 7]],
            [[0, 4], [1, 5], [2, 6], [3, 7]],
            id="G, both orders",
        ),
        pytest.param(
            {"pp": 2, "ep": 4, "order": "pp-tp-cp-dp"},
            [[0, 1], [2, 3], [4, 5], [6, 7]],
            [[0, 4], [1, 5], [2, 6], [3, 7]],
            id="H: an EP group would mix stages",
        ),
    ],
)
def test_views_that_disagree_on_the_pipeline_are_refused(fold, attention_pp, moe_pp):
    with pytest.raises(UserError, match="pipeline groups") as error:
        Fold(8, **fold)
    assert error.value.field == "order"
    size = {"tp": 2, "cp": 1, "dp": 2, "pp": 2, "ep": 4, "edp": 1, "etp": 1}
    if "tp" not in fold:
        size |= {"tp": 1, "dp": 4}
    for order, table in (
        (fold["order"], attention_pp),
        (fold.get("moe_order", "etp-ep-edp-pp"), moe_pp),
    ):  # the tables themselves, to show that they do differ
        axes = order.split("-")
        assert list(map(list, Grid(tuple(axes), tuple(size[axis] for axis in axes)).groups(["pp"]))) == table


@st.composite
def folds(draw):
    """Any legal fold of at most 96 ranks, pp outermost."""
    stage = draw(st.integers(1, 24))
    pp = draw(st.integers(1, 4))
    tp = draw(st.sampled_from(divisors(stage)))
    cp = draw(st.sampled_from(divisors(stage // tp)))
    ep = draw(st.sampled_from(divisors(stage)))
    etp = draw(st.sampled_from(divisors(stage // ep)))
    orders = ["-".join([*p, "pp"]) for p in itertools.permutations(("tp", "cp", "dp"))]
    moe_orders = ["-".join([*p, "pp"]) for p in itertools.permutations(("etp", "ep", "edp"))]
    order, moe_order = draw(st.sampled_from(orders)), draw(st.sampled_from(moe_orders))
    return Fold(stage * pp, tp, cp, pp, ep, etp, order, moe_order, offset=draw(st.sampled_from([0, 5])))


def by_reshaping(fold: Fold, family: str) -> list[list[int]]:
    """The same table by numpy: ranks as a block with the slowest axis first, the family's axes moved to the end."""
    order = (fold.order if family in ATTENTION else fold.moe_order).split("-")[::-1]
    block = fold.offset + np.arange(fold.world_size).reshape([getattr(fold, axis) for axis in order])
    inside = [axis for axis in order if axis in FAMILIES[family]]
    across = [axis for axis in order if axis not in inside]
    size = math.prod(getattr(fold, axis) for axis in inside)
    return block.transpose([order.index(axis) for axis in across + inside]).reshape(-1, size).tolist()


@settings(deadline=None)
@given(folds())
def test_every_family_partitions_the_ranks(fold):
    ranks = list(range(fold.offset, fold.offset + fold.world_size))
    for family, axes in FAMILIES.items():
        groups = fold.groups(family)
        assert sorted(rank for group in groups for rank in group) == ranks, family
        assert {len(group) for group in groups} == {math.prod(getattr(fold, axis) for axis in axes)}, family
        assert list(map(list, groups)) == by_reshaping(fold, family), family


@settings(deadline=None)
@given(folds())
def test_both_views_have_the_same_stages(fold):
    assert set(map(frozenset, fold.attention.groups(["pp"]))) == set(map(frozenset, fold.moe.groups(["pp"])))
    stages = fold.attention.groups(["tp", "cp", "dp"])
    assert set(map(frozenset, stages)) == set(map(frozenset, fold.moe.groups(["etp", "ep", "edp"])))
    assert len(stages) == fold.pp


@settings(deadline=None)
@given(folds())
def test_coordinates_agree_with_the_groups(fold):
    for family, axes in FAMILIES.items():
        view = "attention" if family in ATTENTION else "moe"
        for group in fold.groups(family):
            places = [fold.coordinate(rank)[view] for rank in group]
            assert len({tuple(place[axis] for axis in place if axis not in axes) for place in places}) == 1, family
            inside = [tuple(place[axis] for axis in reversed(list(place)) if axis in axes) for place in places]
            assert inside == sorted(set(inside)), f"{family}: the leftmost axis runs fastest"


@pytest.mark.parametrize(
    ("given", "field", "fragment"),
    [
        ({"world_size": 8, "tp": 3}, "fold", "tp·cp·pp must divide the world size 8; legal: 1, 2, 4, 8"),
        ({"world_size": 8, "ep": 16}, "fold", "etp·ep·pp must divide the world size 8"),
        ({"world_size": 8, "tp": 2, "cp": 2, "pp": 4}, "fold", "fold=2·2·4: tp·cp·pp"),
        ({"world_size": 8, "pp": 0}, "pp", "at least 1"),
        ({"world_size": 0}, "world_size", "at least 1"),
        ({"world_size": 8, "etp": -2}, "etp", "at least 1"),
        ({"world_size": 8, "order": "tp-dp-pp"}, "order", "tp-cp-dp-pp once"),
        ({"world_size": 8, "order": "tp-cp-dp-dp"}, "order", "tp-cp-dp-pp once"),
        ({"world_size": 8, "moe_order": "tp-cp-dp-pp"}, "moe_order", "etp-ep-edp-pp once"),
    ],
)
def test_illegal_folds_are_refused_in_one_line(given, field, fragment):
    with pytest.raises(UserError) as error:
        Fold(**given)
    assert error.value.field == field
    assert fragment in str(error.value)
    assert "\n" not in str(error.value)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_unknown_family_lists_the_legal_ones():
    with pytest.raises(UserError, match="legal: tp, cp, dp, pp, dp_cp, etp, ep, edp, etp_ep"):
        Fold(4).groups("tp_ep")


def test_document_of_a_fold():
    document = Fold(4, tp=2, ep=4).as_dict()
    assert document["legal"] is True
    assert document["world_size"] == 4
    assert {axis: document["attention"][axis] for axis in ("tp", "cp", "dp", "pp")} == {"tp": 2, "cp": 1, "dp": 2, "pp": 1}
    assert {axis: document["moe"][axis] for axis in ("etp", "ep", "edp", "pp")} == {"etp": 1, "ep": 4, "edp": 1, "pp": 1}
    assert document["attention"]["groups"] == {
        "tp": [[0, 1], [2, 3]], "cp": [[0], [1], [2], [3]], "dp": [[0, 2], [1, 3]], "pp": [[0], [1], [2], [3]],
        "dp_cp": [[0, 2], [1, 3]],
    }  # fmt: skip
    assert document["moe"]["groups"] == {
        "etp": [[0], [1], [2], [3]], "ep": [[0, 1, 2, 3]], "edp": [[0], [1], [2], [3]], "pp": [[0], [1], [2], [3]],
        "etp_ep": [[0, 1, 2, 3]],
    }  # fmt: skip


def distance(fold: dict[str, int], asked: dict[str, int]) -> float:
    return sum(abs(math.log2(fold[axis] / asked.get(axis, 1))) for axis in ("tp", "cp", "pp", "ep", "etp"))


@settings(deadline=None, max_examples=40)
@given(
    world_size=st.integers(1, 48),
    asked=st.fixed_dictionaries({}, optional={axis: st.integers(1, 16) for axis in ("tp", "cp", "pp", "ep", "etp")}),
    count=st.integers(1, 5),
)
def test_nearest_folds_are_legal_sorted_and_nearest(world_size, asked, count):
    found = nearest_folds(world_size, asked, count)
    distances = [distance(fold, asked) for fold in found]
    for fold in found:
        made = Fold(world_size, **{axis: fold[axis] for axis in ("tp", "cp", "pp", "ep", "etp")})
        assert (made.dp, made.edp) == (fold["dp"], fold["edp"])
    assert len({tuple(fold.items()) for fold in found}) == len(found)
    sizes = divisors(world_size)
    every = sorted(
        distance(dict(zip(("tp", "cp", "pp", "ep", "etp"), candidate, strict=True)), asked)
        for candidate in itertools.product(sizes, repeat=5)
        if world_size % math.prod(candidate[:3]) == 0 and world_size % math.prod(candidate[2:]) == 0
    )
    assert distances == pytest.approx(every[:count])


def test_nearest_folds_of_a_legal_fold_begins_with_itself():
    assert nearest_folds(8, {"tp": 2, "ep": 4})[0] == {"tp": 2, "cp": 1, "dp": 4, "pp": 1, "etp": 1, "ep": 4, "edp": 2}
    assert nearest_folds(0, {"tp": 2}) == []
