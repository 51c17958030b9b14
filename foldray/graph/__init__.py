"""Ops, the graphs of what they need, and how sequences and gradient buffers are cut into pieces. This package needs no torch."""

from foldray.graph.chunks import REDUCTIONS, Chunk, Reduction, cut_buffer
from foldray.graph.op import Direction, Op, Schedule, handover, stage
from foldray.graph.pipeline_graph import Channel, Graph, PipelineGraph
from foldray.graph.slicing import SLICINGS, SliceCost, Slicing, slice_sequence
from foldray.graph.step_graph import StepGraph
from foldray.graph.step_ops import Place, gathers
