"""Overlap kinds whose lists cannot run."""

from __future__ import annotations

from collections.abc import Iterator

from foldray.graph import Op
from foldray.orders import OverlapKind, Run


def from_the_end(run: Run, lag: int) -> Iterator[Op]:
    """Begin with the last slice, which needs the keys and values of the others."""
    for step in reversed(run.steps):
        yield from run.attend(step)
    yield from run.end()


def without_an_end(run: Run, lag: int) -> Iterator[Op]:
    """Leave out the sums that end a block."""
    for step in run.steps:
        yield from run.attend(step)
        yield from run.experts(step)


FROM_THE_END = OverlapKind("from_the_end", "this test", "nothing", from_the_end)
WITHOUT_AN_END = OverlapKind("without_an_end", "this test", "nothing", without_an_end)
