"""What a step will take, before it is run. No torch."""

from foldray.planner.simulator import Simulation, recorded_costs, simulate, slice_timings

__all__ = ["Simulation", "recorded_costs", "simulate", "slice_timings"]
