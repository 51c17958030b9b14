"""Measurements on workers: verify, bench, timeline, calibrate, a tuner's trials."""
