"""Tables of ranks: known tables, and properties of all tables."""

import itertools
import math
import pickle
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from foldray import Fold, UserError
from foldray.fold import Grid, divisors, nearest_folds
from tests.gate import examples

FAMILIES = {
    "tp": ["tp"], "cp": ["cp"], "dp": ["dp"], "pp": ["pp"], "dp_cp": ["dp", "cp"], "tp_cp": ["tp", "cp"],
    "tp_dp_cp": ["tp", "dp", "cp"], "world": ["tp", "cp", "dp", "pp"],
    "etp": ["etp"], "ep": ["ep"], "edp": ["edp"], "etp_ep": ["etp", "ep"],
}  # fmt: skip
ATTENTION = ("tp", "cp", "dp", "pp", "dp_cp", "tp_cp", "tp_dp_cp", "world")


def pairs(ranks: int, step: int) -> list[list[int]]:
    """Return [[r, r + step], …]: all ranks from 0 to `ranks` − 1, in pairs that are `step` apart."""
    return [[r, r + step] for r in range(ranks) if r // step % 2 == 0]


def runs(ranks: int, length: int) -> list[list[int]]:
    return [list(range(start, start + length)) for start in range(0, ranks, length)]


# The tables of Megatron-Core's RankGenerator for the order tp-cp-ep-dp-pp (megatron/core/parallel_state.py).
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
    "every family": (
        Fold(8, tp=2, cp=2, pp=2, ep=4),
        {"dp": 1, "edp": 1},
        {
            "tp": [[0, 1], [2, 3], [4, 5], [6, 7]], "cp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "dp": [[0], [1], [2], [3], [4], [5], [6], [7]], "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "dp_cp": [[0, 2], [1, 3], [4, 6], [5, 7]], "tp_cp": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "tp_dp_cp": [[0, 1, 2, 3], [4, 5, 6, 7]], "world": [[0, 1, 2, 3, 4, 5, 6, 7]],
            "embedding": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "etp": [[0], [1], [2], [3], [4], [5], [6], [7]], "ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "edp": [[0], [1], [2], [3], [4], [5], [6], [7]], "etp_ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
        },
    ),
    "a stage with several sequences": (
        Fold(12, tp=2, pp=3, etp=2),
        {"dp": 2, "edp": 2},
        {
            "tp_cp": pairs(12, 1), "tp_dp_cp": runs(12, 4), "world": runs(12, 12),
            "pp": [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]],
            "embedding": [[0, 8], [1, 9], [2, 10], [3, 11]],  # the ends of the pipeline, not its middle
        },
    ),
    "one stage": (Fold(2, tp=2, offset=6), {"pp": 1}, {"embedding": [[6], [7]], "world": [[6, 7]]}),
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
    # The error names groups that differ, and legal orders.
    texts = ["[" + " ".join(map(str, group)) + "]" for group in (attention_pp[0], moe_pp[0])]
    assert f"attention has {texts[0]}, the experts {texts[1]}; legal: " in str(error.value)
    Fold(8, **(fold | dict(zip(("order", "moe_order"), error.value.legal[0].split(" | "), strict=True))))
    size = {"tp": 2, "cp": 1, "dp": 2, "pp": 2, "ep": 4, "edp": 1, "etp": 1}
    if "tp" not in fold:
        size |= {"tp": 1, "dp": 4}
    for order, table in (
        (fold["order"], attention_pp),
        (fold.get("moe_order", "etp-ep-edp-pp"), moe_pp),
    ):  # the tables of both grids, which differ
        axes = order.split("-")
        assert list(map(list, Grid(tuple(axes), tuple(size[axis] for axis in axes)).groups(["pp"]))) == table


@pytest.mark.parametrize(
    ("sizes", "order", "moe_order", "pp"),
    [
        # pp may be inside dp if both grids have the same number of ranks inside pp.
        ({"tp": 2, "cp": 2, "ep": 4}, "tp-cp-pp-dp", "etp-ep-pp-edp", pairs(16, 4)),
        ({"tp": 2, "etp": 2}, "tp-pp-dp-cp", "etp-pp-ep-edp", pairs(16, 2)),
        ({"tp": 2, "ep": 8}, "pp-tp-cp-dp", "pp-etp-ep-edp", pairs(16, 1)),
    ],
)  # fmt: skip
def test_a_pipeline_inside_is_legal_where_the_views_agree(sizes, order, moe_order, pp):
    fold = Fold(16, pp=2, **sizes, order=order, moe_order=moe_order)
    assert list(map(list, fold.attention.groups(["pp"]))) == list(map(list, fold.moe.groups(["pp"]))) == pp
    with pytest.raises(UserError, match="pipeline groups"):
        Fold(16, pp=2, **sizes, order=order)


@given(
    sizes=st.tuples(*[st.sampled_from([1, 2, 3])] * 4),
    splits=st.tuples(st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2, 3])),
    order=st.permutations(["tp", "cp", "dp", "pp"]),
    moe_order=st.permutations(["etp", "ep", "edp", "pp"]),
    offset=st.sampled_from([0, 3]),
)
def test_a_fold_is_refused_exactly_if_its_pipeline_groups_differ(sizes, splits, order, moe_order, offset):
    tp, cp, dp, pp = sizes
    ep, etp = splits
    assume(tp * cp * dp % (ep * etp) == 0)
    size = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "etp": etp, "edp": tp * cp * dp // (ep * etp)}
    tables = [by_coordinates(axes, [size[axis] for axis in axes], offset, ["pp"]) for axes in (order, moe_order)]
    same = sorted(tables[0]) == sorted(tables[1])
    with nullcontext() if same else pytest.raises(UserError) as error:
        Fold(math.prod(sizes), tp, cp, pp, ep, etp, "-".join(order), "-".join(moe_order), offset)
    if error:
        examples = [f"[{' '.join(map(str, table[0]))}]" for table in tables]
        assert f"attention has {examples[0]}, the experts {examples[1]};" in str(error.value)


def by_coordinates(axes: list[str], sizes: list[int], offset: int, inside: list[str]) -> list[list[int]]:
    """Return the groups by Megatron's rule. The digits of a rank are its coordinates; the leftmost axis is the lowest digit.

    A group has the ranks with equal digits on all axes that are not inside. Groups and members are sorted by their digits.
    """
    groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for rank in range(math.prod(sizes)):
        digits, rest = [], rank
        for size in sizes:
            digits.append(rest % size)
            rest //= size
        spelled = list(zip(axes, digits, strict=True))[::-1]
        outer = tuple(digit for axis, digit in spelled if axis not in inside)
        groups.setdefault(outer, []).append((tuple(digit for axis, digit in spelled if axis in inside), offset + rank))
    return [[rank for _, rank in sorted(members)] for _, members in sorted(groups.items())]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    inside=st.sets(st.sampled_from("abcd")),
    offset=st.integers(0, 9),
    names=st.permutations("abcd"),
)
def test_a_grid_is_megatrons(sizes, inside, offset, names):
    axes = names[: len(sizes)]
    grid = Grid(tuple(axes), tuple(sizes), offset)
    assert list(map(list, grid.groups(sorted(inside)))) == by_coordinates(axes, sizes, offset, sorted(inside))


@given(st.integers(1, 500))
def test_divisors(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_the_tables_of_ten_thousand_ranks_take_less_than_a_second():
    """The limit is on processor time, because other programs may run at the same time."""
    start = time.process_time()
    document = Fold(10_240, tp=8, cp=4, pp=8, ep=8, etp=2).as_dict()
    assert time.process_time() - start < 1
    assert [len(group) for group in document["attention"]["groups"]["dp_cp"]] == [160] * 64
    assert document["moe"]["groups"]["ep"][-1] == list(range(10_225, 10_240, 2))


@st.composite
def folds(draw):
    """Draw a legal fold of at most 96 ranks with pp as the outermost axis."""
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
    """Make the same table with numpy: an array of ranks, slowest axis first, with the family's axes moved to the end."""
    order = (fold.order if family in ATTENTION else fold.moe_order).split("-")[::-1]
    block = fold.offset + np.arange(fold.world_size).reshape([getattr(fold, axis) for axis in order])
    inside = [axis for axis in order if axis in FAMILIES[family]]
    across = [axis for axis in order if axis not in inside]
    size = math.prod(getattr(fold, axis) for axis in inside)
    return block.transpose([order.index(axis) for axis in across + inside]).reshape(-1, size).tolist()


@given(folds())
def test_every_family_partitions_the_ranks(fold):
    ranks = list(range(fold.offset, fold.offset + fold.world_size))
    for family, axes in FAMILIES.items():
        groups = fold.groups(family)
        assert sorted(rank for group in groups for rank in group) == ranks, family
        assert {len(group) for group in groups} == {math.prod(getattr(fold, axis) for axis in axes)}, family
        assert list(map(list, groups)) == by_reshaping(fold, family), family


@given(folds(), st.data())
def test_two_levels_of_an_expert_parallel_group(fold, data):
    inside = data.draw(st.sampled_from(divisors(fold.ep)))
    fold = replace(fold, ep_inside=inside)
    groups = fold.groups("ep")
    assert sorted(fold.groups("ep_inside")) == sorted(
        group[first : first + inside] for group in groups for first in range(0, fold.ep, inside)
    )
    assert sorted(fold.groups("ep_across")) == sorted(group[place::inside] for group in groups for place in range(inside))
    assert (fold.group_size("ep_inside"), fold.group_size("ep_across")) == (inside, fold.ep // inside)
    assert f"EP{fold.ep}{f'/{inside}' if inside > 1 else ''} " in str(fold)
    assert ("ep_inside" in fold.as_dict()["moe"]["groups"]) == (inside > 1)


@given(folds())
def test_both_views_have_the_same_stages(fold):
    assert set(map(frozenset, fold.attention.groups(["pp"]))) == set(map(frozenset, fold.moe.groups(["pp"])))
    stages = fold.attention.groups(["tp", "cp", "dp"])
    assert set(map(frozenset, stages)) == set(map(frozenset, fold.moe.groups(["etp", "ep", "edp"])))
    assert len(stages) == fold.pp


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
        ({"world_size": 8, "ep": 8, "ep_inside": 3}, "ep_inside", "must divide the expert-parallel size 8; legal: 1, 2, 4, 8"),
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
    with pytest.raises(
        UserError, match=r"legal: tp, cp, dp, pp, dp_cp, tp_cp, tp_dp_cp, world, embedding, etp, ep, edp, etp_ep$"
    ):
        Fold(4).groups("tp_ep")


def test_document_of_a_fold():
    document = Fold(4, tp=2, ep=4).as_dict()
    assert document["legal"] is True
    assert document["world_size"] == 4
    assert {axis: document["attention"][axis] for axis in ("tp", "cp", "dp", "pp")} == {"tp": 2, "cp": 1, "dp": 2, "pp": 1}
    assert {axis: document["moe"][axis] for axis in ("etp", "ep", "edp", "pp")} == {"etp": 1, "ep": 4, "edp": 1, "pp": 1}
    assert document["attention"]["groups"] == {
        "tp": [[0, 1], [2, 3]], "cp": [[0], [1], [2], [3]], "dp": [[0, 2], [1, 3]], "pp": [[0], [1], [2], [3]],
        "dp_cp": [[0, 2], [1, 3]], "tp_cp": [[0, 1], [2, 3]], "tp_dp_cp": [[0, 1, 2, 3]], "world": [[0, 1, 2, 3]],
        "embedding": [[0], [1], [2], [3]],
    }  # fmt: skip
    assert document["moe"]["groups"] == {
        "etp": [[0], [1], [2], [3]], "ep": [[0, 1, 2, 3]], "edp": [[0], [1], [2], [3]], "pp": [[0], [1], [2], [3]],
        "etp_ep": [[0, 1, 2, 3]],
    }  # fmt: skip


def distance(fold: dict[str, int], asked: dict[str, int]) -> float:
    return sum(abs(math.log2(fold[axis] / asked.get(axis, 1))) for axis in ("tp", "cp", "pp", "ep", "etp"))


@examples(40)
@given(
    world_size=st.integers(1, 48),
    asked=st.fixed_dictionaries({}, optional={axis: st.integers(1, 16) for axis in ("tp", "cp", "pp", "ep", "etp")}),
    count=st.integers(1, 5),
)
def test_nearest_folds_are_legal_sorted_and_nearest(world_size, asked, count):
    found = nearest_folds(world_size, asked, count=count)
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
