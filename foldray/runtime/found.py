"""A found list on all ranks: rank 0 gets the times of all positions, finds the lists, and gives every rank its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from foldray.clock import COMPUTE, Cost, OpCosts, Recording, Span, check, message_seconds
from foldray.comm import Communicator, Groups
from foldray.finding import Found, find
from foldray.graph import Chunk, Op, StepGraph
from foldray.kinds import OFFLOAD, OP_KINDS, REDUCE
from foldray.orders import FoundList, Ordering


def find_together(
    groups: Groups, graph: StepGraph, recording: Recording, costs: OpCosts, ordering: Ordering, device: torch.device
) -> tuple[FoundList, Found | None]:
    """Find the lists of a step. All ranks must call this.

    Args:
        graph: the graph of the step, with the chunks of this rank's position.
        ordering: this rank's ordering of the recorded step, with the list that was found before, if there was one.

    Returns:
        This rank's list, and, on rank 0, everything that was found.
    """
    position, first = groups.position, groups.control.index == 0
    before = ordering.found if ordering.found and ordering.found.graph == graph else None  # on all ranks, or on none
    report: dict[str, Any] = {"position": position}
    if groups.stage.index == 0:
        chunks = graph.chunks[position] if graph.chunks else ()
        report |= {"costs": costs, "chunks": chunks, "messages": _messages(graph, recording)}
        report["list"] = before.order if before else ()
    reports = _collect(groups.control, report, device)
    found, lists = None, []
    if first:
        leaders = {report["position"]: report for report in reports if "costs" in report}
        of_positions = [leaders[place] for place in range(graph.positions)]
        whole = _whole(graph, of_positions)
        last = tuple(tuple(Op(*op) for op in leader["list"]) for leader in of_positions)
        found = find(whole, _cost(whole, leaders, groups), ordering.ahead, before=last if before else None)
        check(whole, found.schedule)
        lists = [found.schedule[report["position"]] for report in reports]
    order = tuple(Op(*fields) for fields in _deal(groups.control, lists, device))
    return FoundList(graph, order, ordering.found.timed + 1 if ordering.found else 1), found


def _messages(graph: StepGraph, recording: Recording) -> list[tuple[Op, Span]]:
    """Return an op that computes here, and all ops that travel between positions, with their spans."""
    computing = next(op for op in recording.order if graph.channel(op) is None)
    return [(op, recording.spans[op]) for op in (computing, *(op for op in recording.order if len(graph.where(op)) > 1))]


def _whole(graph: StepGraph, leaders: Sequence[dict[str, Any]]) -> StepGraph:
    """Return the graph with the chunks of all positions."""
    if not graph.chunks:
        return graph

    def chunk(name: str, start: int, stop: int, size: int, makers: list) -> Chunk:
        return Chunk(name, start, stop, size, tuple((kind, layer) for kind, layer in makers))

    return replace(graph, chunks=tuple(tuple(chunk(*fields) for fields in leader["chunks"]) for leader in leaders))


def _cost(graph: StepGraph, leaders: dict[int, dict[str, Any]], groups: Groups) -> Cost:
    """Return the measured costs of all ops. What travels between nodes shares one lane, and so does what travels inside nodes."""
    tables = {place: {tuple(key): seconds for key, seconds in leader["costs"][0]} for place, leader in leaders.items()}
    recordings = []
    for place in range(graph.positions):
        spans = {Op(*op): Span(*span) for op, span in leaders[place]["messages"]}
        recordings.append(Recording(tuple(spans), spans))
    messages = message_seconds(graph, recordings)

    def cost(op: Op) -> tuple[tuple[str, float], ...]:
        channel, place = graph.channel(op), graph.where(op)[0]
        if op.kind == REDUCE:
            _, startup, per_byte = leaders[place]["costs"]
            seconds = startup + per_byte * graph.chunk(op).bytes
        else:
            key = op.kind, op.direction, op.part
            seconds = (messages if len(graph.where(op)) > 1 else tables[place]).get(key, 0.0)
        return ((COMPUTE if channel is None else lane_of(graph, groups, op), seconds),)

    return cost


def lane_of(graph: StepGraph, groups: Groups, op: Op) -> str:
    """Return the link that an op uses. Row counts are so small that they use none, and only take time.

    Rows between attention and experts with ranks of their own use one direction of a link, which is duplex (DisagMoE, section
    4.2). In an all-to-all, every rank sends and receives.
    """
    travels = OP_KINDS[op.kind].travels
    if op.kind == OFFLOAD:  # each direction has a lane of its own
        return str(graph.channel(op))
    if travels == "counts":
        return "counts"
    if travels == "tokens" and graph.apart:
        sender, receiver = graph.where(op)
        return "rows up" if sender < receiver else "rows down"
    if travels in ("tokens", "copies"):
        of: tuple[Communicator, ...] = (groups.tokens, groups.rows_up)
    elif travels == "tokens_inside":
        of = (groups.tokens_inside,)
    elif travels == "keys":
        of = (groups.context,)
    elif travels == "handovers":
        of = (groups.handovers_up,)
    else:
        of = (groups.dense_gradients, groups.replicated_gradients, groups.expert_gradients)
    return "between nodes" if any(len(set(communicator.nodes)) > 1 for communicator in of) else "inside nodes"


def _collect(control: Communicator, report: object, device: torch.device) -> list[Any]:
    """Bring what every rank reports to rank 0, as JSON. Other ranks get an empty list."""
    encoded = _encoded(report, device)
    sizes = control.all_gather(torch.tensor([len(encoded)], dtype=torch.int64, device=device)).tolist()
    first = control.index == 0
    bytes_ = control.all_to_all(encoded, sizes if first else [0] * control.size, [len(encoded), *[0] * (control.size - 1)])
    return [_decoded(part) for part in bytes_.split(sizes)] if first else []


def _deal(control: Communicator, things: Sequence[object], device: torch.device) -> Any:
    """Give every rank its own of rank 0's things, as JSON."""
    parts = [_encoded(thing, device) for thing in things] or [torch.empty(0, dtype=torch.uint8, device=device)] * control.size
    sent = list(map(len, parts))
    sizes = control.all_gather(torch.tensor([sent], dtype=torch.int64, device=device))[0].tolist()
    received = [sizes[control.index], *[0] * (control.size - 1)]
    return _decoded(control.all_to_all(torch.cat(parts), received, sent))


def _encoded(thing: object, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(thing).encode()), dtype=torch.uint8).to(device)


def _decoded(part: torch.Tensor) -> Any:
    return json.loads(part.cpu().numpy().tobytes())
