"""What a step will take, before it is run. No torch."""

from foldray.planner.simulator import Simulation, recorded_costs, simulate

__all__ = ["Simulation", "recorded_costs", "simulate"]
