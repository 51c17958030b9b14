"""What training tells the search for a list."""

from __future__ import annotations

from foldray.blueprint import ModelSpec
from foldray.comm import Groups
from foldray.fold import Fold
from foldray.graph import Op, Place, Slicing, StepGraph
from foldray.kinds import COMBINE, COUNTS, DISPATCH
from foldray.runtime.found import lane_of


def test_rows_between_halves_use_one_direction_of_a_link() -> None:
    """Rows to the experts and gradients of results go up; results and gradients of rows come down."""
    block = ModelSpec(preset="tiny").block(0)
    graph = StepGraph(((block, block),), Slicing((16,), (16,)), places=(Place(0, 1), Place(0, 1)))
    groups = Groups.create(Fold(1))
    up, down = (
        {lane_of(graph, groups, Op(kind, direction, 0)) for kind, direction in ops}  # type: ignore[arg-type]
        for ops in (((DISPATCH, "F"), (COMBINE, "B")), ((COMBINE, "F"), (DISPATCH, "B")))
    )
    assert len(up) == len(down) == 1
    assert up != down
    assert lane_of(graph, groups, Op(COUNTS, "F", 0)) not in up | down


def test_an_all_to_all_uses_a_whole_link() -> None:
    block = ModelSpec(preset="tiny").block(0)
    graph = StepGraph(((block, block),), Slicing((16,), (16,)))
    groups = Groups.create(Fold(1))
    assert len({lane_of(graph, groups, Op(kind, "F", 0)) for kind in (DISPATCH, COMBINE)}) == 1
