"""When ops of given lists start and end, simulated or recorded: the checker, the clock, sums, drawings and traces. This package
needs no torch."""

from foldray.clock.busy import Busy, busy, busy_table
from foldray.clock.check import check
from foldray.clock.compiled import COMPUTE, CompiledSchedule, Host, LaneSeconds, ScheduleError
from foldray.clock.pictures import draw_text, perfetto
from foldray.clock.recorded import Recording, message_seconds, op_costs, recorded_cost, replay, slice_timings
from foldray.clock.simulator import length, merged, simulate, usage
from foldray.clock.times import Cost, Issue, OpCosts, Span, times, unit_times
