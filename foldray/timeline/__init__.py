"""Spans of ops, recorded or simulated: their sums, drawings and traces, and simulations that use recorded times."""

from foldray.timeline.pictures import draw_text, perfetto
from foldray.timeline.recorded import Recording, message_seconds, op_costs, recorded_cost, replay, slice_timings
from foldray.timeline.simulator import length, merged, overlaps, simulate, usage
