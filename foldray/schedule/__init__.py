"""Schedules as data: ops, the graph that binds them, generators, the checker, the drawing. Pure Python."""

from foldray.schedule.check import check, peak
from foldray.schedule.clock import ScheduleError, Span, unit_times
from foldray.schedule.graph import Channel, Graph, PipelineGraph
from foldray.schedule.op import Direction, Op, Schedule, handover, stage
from foldray.schedule.pipeline import check_pipeline, forward_only, interleaved, one_f_one_b, pipeline
from foldray.schedule.slicing import SLICINGS, SliceCost, Slicing, slice_sequence
from foldray.schedule.text import show
from foldray.schedule.weave import weave

__all__ = [
    "SLICINGS",
    "Channel",
    "Direction",
    "Graph",
    "Op",
    "PipelineGraph",
    "Schedule",
    "ScheduleError",
    "SliceCost",
    "Slicing",
    "Span",
    "check",
    "check_pipeline",
    "forward_only",
    "handover",
    "interleaved",
    "one_f_one_b",
    "peak",
    "pipeline",
    "show",
    "slice_sequence",
    "stage",
    "unit_times",
    "weave",
]
