"""Spans of ops, recorded or simulated: what they add up to, and how they look."""

from foldray.timeline.perfetto import perfetto
from foldray.timeline.usage import Usage, merged, queued, usage

__all__ = ["Usage", "merged", "perfetto", "queued", "usage"]
