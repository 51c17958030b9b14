"""What a step will take, before it is run. No torch."""

from foldray.planner.choice import best_overlaps
from foldray.planner.recorded import Recording, op_costs, recorded_cost, replay, slice_timings
from foldray.planner.simulator import Simulation, simulate

__all__ = ["Recording", "Simulation", "best_overlaps", "op_costs", "recorded_cost", "replay", "simulate", "slice_timings"]
