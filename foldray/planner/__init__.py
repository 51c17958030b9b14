"""The planner: it predicts time and memory of a step before the step runs. It does not need torch."""
