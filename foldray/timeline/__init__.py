"""Spans of ops, recorded or simulated: their sums, drawings and traces, and simulations that use recorded times."""

from foldray.timeline.perfetto import perfetto
from foldray.timeline.recorded import Recording, message_seconds, op_costs, recorded_cost, replay, slice_timings
from foldray.timeline.simulator import simulate
from foldray.timeline.text import draw_text
from foldray.timeline.usage import length, merged, overlaps, queued, usage
