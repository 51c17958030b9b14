"""Spans of ops, recorded or simulated: what they add up to, and how they look."""

from foldray.timeline.perfetto import perfetto
from foldray.timeline.text import draw_text
from foldray.timeline.usage import Usage, held_up, length, merged, overlaps, queued, usage

__all__ = ["Usage", "draw_text", "held_up", "length", "merged", "overlaps", "perfetto", "queued", "usage"]
