"""An overlap kind that foldray does not have: the attention of two pieces, then their experts, and so on."""

from __future__ import annotations

from collections.abc import Iterator

from foldray.graph import Op
from foldray.kinds import MERGE
from foldray.orders import OverlapKind, Run


def in_pairs(run: Run, lag: int) -> Iterator[Op]:
    """Yield the order A0 A1 E0 E1 A2 A3 E2 E3 M0 M1 M2 M3."""
    for step in run.steps:
        yield from run.attend(step)
        if step % 2:
            yield from run.experts(step)
    yield from run.end()


def last_sum_first(run: Run, lag: int) -> Iterator[Op]:
    """Yield the order A0 E0 A1 E1 M1 M0."""
    ops = list(in_pairs(run, lag))
    yield from (op for op in ops if op.kind != MERGE)
    yield from (op for op in reversed(ops) if op.kind == MERGE)


PAIRS = OverlapKind("pairs", "this test", "all-to-alls behind the other piece of a pair", in_pairs)
LAST_SUM_FIRST = OverlapKind("last_sum_first", "this test", "nothing", last_sum_first)
