"""The picture of a fold: its content, and a picture for every kind of fold."""

import re

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from foldray import Fold, UserError
from tests.trainers.pictures.test_training import size
from trainers.pictures.fold import draw_fold

FOLDS = [
    (Fold(1), 1),
    (Fold(2, pp=2), None),
    (Fold(8, tp=2, cp=2, ep=8), 4),
    (Fold(16, tp=2, cp=2, pp=2, ep=8), 6),
    (Fold(26, tp=13, ep=2), 8),
    (Fold(16, 2, 2, 2, 8, order="pp-tp-cp-dp", moe_order="pp-etp-ep-edp", offset=5), 8),
    (Fold(192, tp=4, ep=16), 8),
    (Fold(1024, pp=512), 8),
]


@pytest.mark.gate(5)
@pytest.mark.parametrize(("fold", "ranks_per_node"), FOLDS, ids=[str(fold) for fold, _ in FOLDS])
def test_a_picture_of_any_fold(fold, ranks_per_node, tmp_path):
    draw_fold(fold, tmp_path / "fold.png", ranks_per_node)
    width, height = size(tmp_path / "fold.png")
    assert 900 < width < 3000
    assert 300 < height < 6000
    assert [path.name for path in tmp_path.iterdir()] == ["fold.png"]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """`drawn(fold, ranks_per_node)` draws and returns the axes that were saved."""

    def run(fold: Fold, ranks_per_node: int | None = None) -> Axes:
        figures: list[Figure] = []
        save = Figure.savefig

        def keep(figure: Figure, *arguments, **options):
            figures.append(figure)
            return save(figure, *arguments, **options)

        monkeypatch.setattr(Figure, "savefig", keep)
        draw_fold(fold, tmp_path / "fold.png", ranks_per_node)
        return figures[0].axes[0]

    return run


def cells(axes: Axes) -> dict[str, list[tuple[float, float, tuple]]]:
    """Return (x, y, colour) of every rank's cells from left to right. A number belongs to the cell whose centre it has."""
    patches = [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    found: dict[str, list[tuple[float, float, tuple]]] = {}
    for text in axes.texts:
        x, y = text.get_position()
        for patch in patches:
            left, top, width, height = patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()
            if abs(left + width / 2 - x) < 1e-6 and abs(top + height / 2 - y) < 1e-6 and width < 0.5:
                found.setdefault(text.get_text(), []).append((x, y, patch.get_facecolor()))
    return {rank: sorted(places) for rank, places in found.items()}


def test_a_rank_stands_in_both_grids_in_one_colour(drawn):
    axes = drawn(Fold(8, tp=2, cp=2, ep=8))
    places = cells(axes)
    assert sorted(places) == [str(rank) for rank in range(8)]
    assert all(len(place) == 2 and place[0][2] == place[1][2] for place in places.values())
    attention, experts = ([places[str(rank)][side] for rank in range(8)] for side in (0, 1))
    assert len({y for _, y, _ in attention}) == 2  # dp
    assert len({y for _, y, _ in experts}) == 1
    assert [x for x, *_ in experts] == sorted(x for x, *_ in experts)
    colors = [color for *_, color in attention]
    assert [colors.index(color) for color in colors] == [0, 0, 2, 2, 4, 4, 6, 6]  # TP groups


def test_a_stage_works_on_the_sequences_of_the_one_before(drawn):
    places = cells(drawn(Fold(8, tp=2, pp=2, ep=4)))
    for rank in range(4):
        assert places[str(rank)][0][2] == places[str(rank + 4)][0][2]
    assert places["0"][0][2] != places["2"][0][2]


def test_without_tp_and_cp_colours_are_ep_groups(drawn):
    places = cells(drawn(Fold(8, ep=2)))
    colors = [places[str(rank)][0][2] for rank in range(8)]
    assert [colors.index(color) for color in colors] == [0, 0, 2, 2, 4, 4, 6, 6]


def words(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_it_says_what_is_where(drawn):
    said = words(drawn(Fold(8, tp=2, cp=2, ep=8), 4))
    assert said[0] == "TP2 CP2 DP2 PP1 | ETP1 EP8 EDP1"
    assert said[1].startswith("8 ranks, 4 per node · same hue: same sequences")
    assert {"Attention", "Experts", "cp0", "cp1", "tp0", "tp1", "dp0", "dp1", "ep0", "ep7"} <= set(said)
    assert [text for text in said if re.match("nodes? ", text)] == ["node 0", "node 1", "nodes 0–1"]
    assert not any("rest" in text for text in said)


@pytest.mark.gate(1 / 2)
def test_a_large_fold_is_cut_and_says_so(drawn):
    assert "the other ranks follow the same pattern" in words(drawn(Fold(10_240, tp=8, cp=4, pp=8, ep=8, etp=2)))[1]


def borders(axes: Axes) -> list:
    return [
        tuple(map(tuple, line)) for each in axes.collections if isinstance(each, LineCollection) for line in each.get_segments()
    ]


def test_nodes_have_borders(drawn):
    fold = Fold(8, tp=2, cp=2, ep=8)
    assert borders(drawn(fold)) == []
    for ranks_per_node, between in ((8, 0), (4, 1)):
        axes = drawn(fold, ranks_per_node)
        places = [places[1] for _, places in sorted(cells(axes).items())]
        uprights = {round(start[0], 6) for start, end in borders(axes) if start[0] == pytest.approx(end[0])}
        inner = [x for x in uprights if places[0][0] < x < places[7][0]]  # between the cells of the experts' row
        assert len(inner) == between
        assert all(places[3][0] < x < places[4][0] for x in inner)


def test_a_node_holds_a_rank(tmp_path):
    with pytest.raises(UserError, match="ranks_per_node=0"):
        draw_fold(Fold(8), tmp_path / "fold.png", 0)
    assert not list(tmp_path.iterdir())
