"""Generators of the order of ops: pipelines, what overlaps inside a stage, where reductions go. This package needs no torch."""

from foldray.orders.generators import Run
from foldray.orders.handovers import place_handovers, with_handovers
from foldray.orders.lists import ordered_schedule, position_list, stage_order, step_schedule
from foldray.orders.ordering import FoundList, Ordering, Sequences, WeightGradients, named_ordering
from foldray.orders.overlaps import (
    AF_PIPE,
    AUTO,
    KINDS,
    LIST,
    ONE_A_ONE_M,
    OVERLAPS,
    SEARCHED,
    SEQUENTIAL,
    STREAM,
    WEAVE,
    Overlap,
    OverlapKind,
    order_kind,
    overlap_kind,
)
from foldray.orders.pipeline import check_pipeline, passes, pipeline
