"""Weaving: the forward of one micro-batch and the backward of another one, so that each computes while rows of the other travel.

The two passes do not need each other. So all-to-alls are hidden without pieces: block i goes forward beside block n − 1 − i,
which goes backward. This is one pair of blocks; what travels is below what computes meanwhile. A is attention with sums and
routers, E the experts; large letters go forward, small ones backward:

    computes   e      A      a      E      e      A
    travels        d      D      c      C      d     …

Sources: DualPipe (DeepSeek-V3, arXiv:2412.19437, figure 4) and Megatron-Core's overlap of expert parallelism weave two passes by
a fixed plan. Here every pass is in the order of `stream`, and gradients of weights may be apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from foldray.kinds import EXCHANGES, HANDOVER
from foldray.schedule.op import Op
from foldray.schedule.step_graph import StepGraph


def weave(graph: StepGraph, forward: Sequence[Op], backward: Sequence[Op]) -> tuple[Op, ...]:
    """Return the ops of two passes of stages in turns. A turn ends with an all-to-all of its pass. The backward begins.

    Args:
        forward, backward: the ops of the two passes, with collectives and handovers.
    """
    turns = zip_longest(_turns(backward), _turns(forward), fillvalue=())
    woven = [op for pair in turns for turn in pair for op in turn]
    # Handovers of both passes on one channel go in the order of the passes, as the receiver has them.
    channels = {graph.channel(op) for op in forward if op.kind == HANDOVER}
    behind = [op for op in backward if op.kind == HANDOVER and graph.channel(op) in channels]
    return (*(op for op in woven if op not in behind), *behind)


def _turns(ops: Sequence[Op]) -> Iterator[tuple[Op, ...]]:
    turn: list[Op] = []
    for op in ops:
        turn.append(op)
        if op.kind in EXCHANGES:
            yield tuple(turn)
            turn = []
    if turn:
        yield tuple(turn)
