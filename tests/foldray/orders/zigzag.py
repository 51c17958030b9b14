"""An overlap kind that foldray does not have: the attention of two pieces, then their experts, and so on."""

from __future__ import annotations

from collections.abc import Iterator

from foldray.graph import Op
from foldray.orders import OverlapKind, Run


def in_pairs(run: Run, lag: int) -> Iterator[Op]:
    """Yield the order A0 A1 E0 E1 A2 A3 E2 E3 M0 M1 M2 M3."""
    for step in run.steps:
        yield from run.attend(step)
        if step % 2:
            yield from run.experts(step)
    yield from run.end()


PAIRS = OverlapKind("pairs", "this test", "all-to-alls behind the other piece of a pair", in_pairs)
