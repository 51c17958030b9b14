"""Spans: their sums, and their output as text and as a trace."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foldray.clock import Span, draw_text, length, merged, perfetto, unit_times, usage
from foldray.graph import Op, Slicing, StepGraph
from foldray.orders import Overlap, step_schedule
from tests.foldray.blocks import MOE

GRAPH = StepGraph(((MOE,),), Slicing((4, 4), (4, 4)), ragged=False)
A0, A1 = GRAPH.pieces("attention", 0)
D0, D1 = GRAPH.pieces("dispatch", 0)


def test_exposed_is_what_travels_while_nothing_computes() -> None:
    spans = {A0: Span(0, 2), D0: Span(1, 5), A1: Span(3, 4), D1: Span(6, 7)}
    assert usage(GRAPH, spans) == (3, 5, 3)  # computes 0–2 and 3–4; travels 1–5 and 6–7, alone 2–3, 4–5 and 6–7


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=12))
def test_merged_spans_cover_the_same_time(given: list[tuple[int, int]]) -> None:
    spans = [Span(start, start + size) for start, size in given]
    covered = {second for span in spans for second in range(int(span.start), int(span.end))}
    found = merged(spans)
    assert length(found) == len(covered)
    assert all(a.end < b.start for a, b in pairwise(found))


def test_a_trace_has_a_track_for_each_lane_of_each_rank() -> None:
    document = json.loads(json.dumps(perfetto(GRAPH, [{A0: Span(1.0, 1.5)}, {D0: Span(2.0, 2.25)}], begin=1.0)))
    names = [(e["pid"], e["args"]["name"]) for e in document["traceEvents"] if e["name"] == "thread_name"]
    assert names == [(0, "compute"), (0, "tokens"), (1, "compute"), (1, "tokens")]
    (first, second) = (e for e in document["traceEvents"] if e["ph"] == "X")
    assert (first["pid"], first["tid"], first["ts"], first["dur"]) == (0, 0, 0.0, pytest.approx(5e5))
    assert (second["pid"], second["tid"], second["ts"], second["dur"]) == (1, 1, pytest.approx(1e6), pytest.approx(2.5e5))
    assert second["args"]["kind"] == "dispatch"


def test_text_has_a_line_per_lane() -> None:
    graph = StepGraph(((MOE,),), Slicing((8,), (8,)), ragged=False, backward=False)
    (order,) = step_schedule(graph, Overlap("sequential"))
    assert draw_text(graph, unit_times(graph, (order,)), width=21).split("\n")[:1] == ["compute │i0─A0─R0─X0─E0─M0─H0─"]
    spans = {Op("attention", "F", 0): Span(0, 8), Op("dispatch", "F", 0): Span(8, 12), Op("attention", "B", 0): Span(12, 20)}
    assert draw_text(graph, spans, width=20).split("\n") == [
        "compute │A0──────    A0'─────",
        " tokens │        D0──",
        "         A attention  D dispatch; ' is backward",
    ]
