"""Draw the ideas behind woven and found lists, one below the other, from a simulation of two blocks and four micro-batches.

    python benchmarks/found_picture.py [--ratio 0.8] [--picture docs/images/found.png]

All-to-alls take `ratio` times as long as computation. A forward takes one unit of time per block, and a backward two. No time
here is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from common import ROOT

from foldray.blueprint import ModelSpec
from foldray.clock import COMPUTE, LaneSeconds, simulate
from foldray.finding import find
from foldray.graph import Op, SliceCost, StepGraph, slice_sequence
from foldray.kinds import ATTENTION, EXCHANGES, EXPERT, HEAD, MERGE, ROUTE
from foldray.orders import Overlap, step_schedule
from trainers.pictures.timeline import draw_timelines

SHARES = {ATTENTION: 0.45, ROUTE: 0.03, EXPERT: 0.5, MERGE: 0.02, HEAD: 0.05}  # of a block's forward
BLOCKS, MICRO_BATCHES, TOKENS = 2, 4, 4096
MILLISECONDS = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ratio", type=float, default=0.8, help="all-to-alls to computation")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "found.png")
    args = parser.parse_args()
    rows = {}
    for name, degree, later in (
        ("sequential", 1, False), ("stream, two pieces", 2, False), ("sequential, gradients of weights apart", 1, True),
        ("weave, gradients of weights apart", 1, True), ("list", 1, True), ("list, two pieces", 2, True),
    ):  # fmt: skip
        graph = graph_of(degree, later)
        cost = cost_of(graph, args.ratio)
        kind = name.split(",")[0]
        schedule = find(graph, cost).schedule if kind == "list" else step_schedule(graph, Overlap(kind, 1))
        rows[name] = simulate(graph, schedule, cost).spans
    title = f"Two blocks, four micro-batches; all-to-alls take {args.ratio:g} × the time of computation"
    draw_timelines(graph, rows, args.picture, title)


def graph_of(degree: int, later: bool) -> StepGraph:
    model = ModelSpec(
        layers=BLOCKS, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn_hidden=64, experts=4, topk=1, expert_hidden=64, vocab=64
    )
    cut = slice_sequence("token_uniform", TOKENS, degree, SliceCost(0, 1))
    stages = (tuple(map(model.block, range(BLOCKS))),)
    kinds = (ATTENTION, EXPERT, HEAD) if later else ()
    return StepGraph(stages, cut, micro_batches=MICRO_BATCHES, ragged=False, later=kinds)


def cost_of(graph: StepGraph, ratio: float) -> Callable[[Op], LaneSeconds]:
    """Return the seconds of every op: gradients of weights take as long as those of inputs."""

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        if op.kind in EXCHANGES:  # four of them per block and micro-batch, in which it computes for three units
            return (("link", MILLISECONDS * ratio * 3 / 4 / graph.slicing.degree),)
        together = op.direction == "B" and op.kind not in graph.later
        return ((COMPUTE, MILLISECONDS * SHARES.get(op.kind, 0.0) / graph.slicing.degree * (2 if together else 1)),)

    return cost


if __name__ == "__main__":
    main()
