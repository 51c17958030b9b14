"""Schedules as data: ops, graphs of their needs, generators of their order, a checker, a clock, a drawing. Pure Python."""

from foldray.schedule.check import check
from foldray.schedule.chunks import REDUCTIONS, Chunk, Reduction, cut_buffer
from foldray.schedule.clock import Cost, Issue, Span, times, unit_times
from foldray.schedule.compiled import COMPUTE, CompiledSchedule, Host, LaneSeconds, ScheduleError
from foldray.schedule.generators import Run
from foldray.schedule.graph import Channel, Graph, PipelineGraph
from foldray.schedule.handovers import place_handovers, with_handovers
from foldray.schedule.lists import ordered_schedule, position_list, stage_order, step_schedule
from foldray.schedule.op import Direction, Op, Schedule, handover, stage
from foldray.schedule.ordering import FoundList, Ordering, Sequences, WeightGradients, named_ordering
from foldray.schedule.overlaps import (
    AF_PIPE,
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
    overlap_kind,
)
from foldray.schedule.pipeline import check_pipeline, passes, pipeline
from foldray.schedule.reduction import OpCosts, place_reductions
from foldray.schedule.slicing import SLICINGS, SliceCost, Slicing, slice_sequence
from foldray.schedule.step_graph import StepGraph
from foldray.schedule.step_ops import Place, gathers
