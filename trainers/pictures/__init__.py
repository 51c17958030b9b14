"""Draws PNGs of a run, a fold, a plan and a step."""
