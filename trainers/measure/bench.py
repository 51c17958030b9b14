"""The commands `foldray bench` and `foldray timeline`, which measure a recipe's step under several schedules."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foldray.clock import Busy, Recording, Span, busy, busy_table, draw_text, perfetto, replay, slice_timings
from foldray.comm import Groups
from foldray.errors import UserError
from foldray.files import check_folder, check_picture, write_picture, writing
from foldray.finding import recorded_bound
from foldray.graph import SLICINGS, Op, SliceCost, StepGraph
from foldray.model import Losses
from foldray.orders import Ordering
from foldray.recipe import Recipe
from foldray.runtime import Engine, Trace
from trainers.cluster.actors import on_workers
from trainers.measure.comparison import random_batches
from trainers.measure.meter import together, wait_for
from trainers.telemetry.energy import Energy
from trainers.telemetry.records import as_json as to_json
from trainers.worker.engines import make_engine

DEFAULT = ("sequential", "moe_only:2", "moe_only:4", "one_a_one_m:2", "one_a_one_m:4", "stream:4")
APART = ("af_pipe", "af_pipe:2", "af_pipe:4")
"""The same for experts with workers of their own."""
WARM_UP = 2  # rounds that are not measured
_COLUMNS = ("step", "min", "max", "forward", "backward", "compute", "comm", "exposed", "× bound")


class Timed(NamedTuple):
    """A step on a rank: its graph, its seconds without the update, its losses there, and all ranks' joules (NaN: not known)."""

    graph: StepGraph
    seconds: float
    losses: list[Losses]
    joules: float


class Measured(NamedTuple):
    """What the rounds of an ordering have measured on the fold's first rank.

    Args:
        rounds: the times of each round; the largest of all ranks.
        bound: seconds that no order of the ops can beat, and `busy` what these ops and waits were: both of the round whose
            recorded step took the median time.
    """

    rounds: list[dict[str, float]]
    bound: float
    busy: Busy


def bench(recipe: Recipe, names: Sequence[str], rounds: int, lengths: Sequence[int] = (), as_json: bool = False) -> int:
    """Measure schedules and print a report. The schedules take turns within a round.

    Args:
        names: names of schedules (`named_ordering`). Without them, the recipe's own ordering is measured, and those of `DEFAULT`
            or `APART` that are legal for the recipe.
        lengths: lengths of sequences, which are measured one after another; none is the recipe's own.
    """
    if rounds < 1:
        raise UserError("rounds", rounds, "must be at least 1")
    recipes = [_of_length(recipe, length) for length in dict.fromkeys(lengths)] or [recipe]
    chosen = [{name: each.named_ordering(name) for name in names} or _defaults(each) for each in recipes]
    results, slices, lacks_energy = list[dict[str, Any]](), list[tuple[int, int, float]](), None
    for each, orderings in zip(recipes, chosen, strict=True):
        of_length = f" of {each.data.seq_len} tokens" if lengths else ""
        message = f"{len(orderings)} schedules{of_length}, {rounds} rounds, on {each.cluster.workers} workers …"
        timings = on_workers(each, _compare, message, orderings=list(orderings.values()), rounds=rounds)
        measured = dict(zip(orderings, timings["measured"], strict=True))
        found = [_result(each, ordering, measured[name]) for name, ordering in orderings.items()]
        results, slices, lacks_energy = results + found, slices + timings["slices"], timings["lacks_energy"]
        if not as_json:
            print(*[f"sequences{of_length}"] * bool(lengths), _table(list(orderings), found, rounds, lacks_energy), sep="\n")
            print(_busy_tables({name: of_schedule.busy for name, of_schedule in measured.items()}))
    cost = _slice_cost(slices)
    if as_json:
        print(to_json({"results": results, "slice_cost": cost and cost[:2], "lacks_energy": lacks_energy}))
    elif cost:
        print(f"time-uniform slices as measured here: schedule.slice_cost=[{cost[0]:.3e},{cost[1]:.3e}]")
    return 0


def _of_length(recipe: Recipe, length: int) -> Recipe:
    """Return the recipe with sequences of another length.

    Raises:
        UserError: the recipe is illegal with it.
    """
    given = recipe.model_dump()
    given["data"] |= {"seq_len": length}
    return Recipe.parse(given)


def timeline(recipe: Recipe, picture: Path | None, trace: Path | None, as_json: bool = False) -> int:
    """Record a step of the recipe's own schedule, simulate the step from its op times, and draw both.

    `trace` is a Perfetto trace to write.
    """
    if picture is not None:
        check_picture(picture)
    if trace is not None:
        check_folder("trace", trace)
    result = on_workers(recipe, _record, f"a step on {recipe.cluster.workers} workers …")
    graph, recordings = result["graph"], result["recordings"]
    ranks = [recording.spans for recording in recordings]
    expected = {name: replay(graph, recordings, rank) for name, rank in shown(recipe).items()}
    begin = min(span.start for spans in ranks for span in spans.values())
    if trace is not None:
        with writing("trace", trace):
            trace.write_text(json.dumps(perfetto(graph, ranks, begin)))
    if picture is not None:
        rows = {f"measured{name}": shifted(ranks[rank], begin) for name, rank in shown(recipe).items()}
        drawn = rows | {f"simulated{name}": simulation.spans for name, simulation in expected.items()}
        write_picture(picture, lambda path: _draw(recipe, graph, drawn, path))
    simulated, bound = next(iter(expected.values())).seconds * 1e3, recorded_bound(graph, recordings) * 1e3
    measured, used = result["times"]["step_ms"], busy(graph, recordings)
    if as_json:
        print(to_json({"measured": result["times"], "simulated_step_ms": simulated, "bound_ms": bound, **_in_ms(used)}))
        return 0
    print(f"measured: {measured:.1f} ms")
    print(f"the step is {measured / bound:.2f} × the {bound:.1f} ms that no order of its ops can beat")
    for name, rank in shown(recipe).items():
        print(f"the first worker{name}\n{draw_text(graph, ranks[rank])}")
    print(f"\n{busy_table({'all workers': used.ranks, 'critical path': used.path})}")
    print(f"\nsimulated from these op times: {simulated:.1f} ms")
    for name, simulation in expected.items():
        print(f"the first worker{name}\n{draw_text(graph, simulation.spans)}")
    return 0


def shown(recipe: Recipe) -> dict[str, int]:
    """Return the ranks that a timeline shows, by the words behind "worker": the first one, or the first one of each half."""
    return {"": 0} if recipe.placement is None else {" of attention": 0, " of the experts": recipe.placement.attention}


def shifted(spans: Mapping[Op, Span], begin: float) -> dict[Op, Span]:
    """Return the spans with `begin` as their time zero."""
    return {op: Span(span.start - begin, span.end - begin) for op, span in spans.items()}


def _defaults(recipe: Recipe) -> dict[str, Ordering]:
    orderings: dict[str, Ordering] = {"recipe": recipe.ordering} if recipe.slicing else {}
    for name in APART if recipe.placement else DEFAULT:
        try:
            orderings[name] = recipe.named_ordering(name)
        except UserError:  # for example, the sequence is too short for so many pieces
            continue
    return orderings


def _compare(
    recipe: Recipe, groups: Groups, device: torch.device, orderings: Sequence[Ordering], rounds: int
) -> dict[str, Any] | None:
    """Measure orderings in turns on a rank, and return their times on the fold's first one."""
    engine = make_engine(recipe, groups, device)
    execution, trace = engine.execution, Trace(device)
    measured: list[list[dict[str, float]]] = [[] for _ in orderings]
    steps: list[list[tuple[float, StepGraph, Recording]]] = [[] for _ in orderings]
    slices: list[tuple[int, int, float]] = []
    energy = Energy(groups.control, device)
    learnt: dict[Ordering, Ordering] = {}  # orderings whose chunks depend on measured op times → the same with these times
    for number in range(WARM_UP + rounds):
        for ordering, turns, kept in zip(orderings, measured, steps, strict=True):
            execution.reorder(learnt.get(ordering, ordering))
            execution.trace = trace
            graph, *_ = timed_step(recipe, engine, groups, device)
            times, of_this_rank = trace.times(graph), Recording(execution.order(graph), trace.spans)
            if execution.lacks_costs:
                execution.learn_costs()
                learnt[ordering] = execution.ordering
            execution.trace = None
            timed = timed_step(recipe, engine, groups, device, energy)  # recording takes time, so another step is timed
            turn = slowest(groups, times | {"recorded_ms": times["step_ms"], "step_ms": timed.seconds * 1e3}, device)
            if number >= WARM_UP:
                kept.append((turn.pop("recorded_ms"), graph, of_this_rank))
                turns.append(turn | {"energy_j": timed.joules})
                slices += slice_timings(graph, of_this_rank.spans, groups.fold.cp * groups.fold.tp)
    medians = [sorted(kept, key=itemgetter(0))[len(kept) // 2] for kept in steps]  # the same rounds on all ranks
    whole = [gathered(groups, graph, of_this_rank) for _, graph, of_this_rank in medians]
    if groups.rank != groups.fold.offset:
        return None
    found = [Measured(turns, recorded_bound(*step), busy(*step)) for turns, step in zip(measured, whole, strict=True)]
    return {"measured": found, "slices": slices, "lacks_energy": energy.lacking}


def _record(recipe: Recipe, groups: Groups, device: torch.device) -> dict[str, Any] | None:
    """Record a step on a rank, and return it as all ranks have recorded it on the fold's first one."""
    engine = make_engine(recipe, groups, device)
    trace = engine.execution.trace = Trace(device)
    for _ in range(WARM_UP + 1):
        graph, *_ = timed_step(recipe, engine, groups, device)
        if engine.execution.lacks_costs:
            engine.execution.learn_costs()
    graph, recordings = recorded(engine, trace, groups, graph)
    times = slowest(groups, trace.times(graph), device)
    if groups.rank != groups.fold.offset:
        return None
    return {"graph": graph, "recordings": recordings, "times": times}


def recorded(engine: Engine, trace: Trace, groups: Groups, graph: StepGraph) -> tuple[StepGraph, list[Recording]]:
    """Return the last step as all ranks have recorded it, and its graph with the chunks of all positions."""
    return gathered(groups, graph, Recording(engine.execution.order(graph), trace.spans))


def gathered(groups: Groups, graph: StepGraph, of_this_rank: Recording) -> tuple[StepGraph, list[Recording]]:
    """Return a step as all ranks have recorded it, and its graph with the chunks of all positions."""
    of_ranks = groups.control.all_gather_object((of_this_rank, graph.chunks))
    return graph.with_chunks_of(chunks for _, chunks in of_ranks), [recording for recording, _ in of_ranks]


def timed_step(recipe: Recipe, engine: Engine, groups: Groups, device: torch.device, energy: Energy | None = None) -> Timed:
    """Run one step on random text with learning rate 0, which changes no weight. Without `energy`, joules are not counted."""
    batches = random_batches(recipe, groups, device)
    execution = engine.execution
    graph, _ = execution.step(batches)  # builds the graph before the clock starts
    together(groups.control, device)
    if energy is not None:
        energy.taken()  # before the step
        together(groups.control, device)
    begin = time.perf_counter()
    losses = engine.train(batches)
    wait_for(device)
    seconds = time.perf_counter() - begin
    joules = math.nan
    if energy is not None:  # those of a rank that waits for slower ones are the step's, too
        together(groups.control, device)
        taken = torch.tensor(energy.taken(), dtype=torch.float64, device=device)
        joules = float(groups.control.all_reduce(taken))
    engine.update(0.0)
    return Timed(graph, seconds, losses, joules)


def slowest(groups: Groups, times: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return the largest value of all ranks for every time, because a step ends when all ranks have finished."""
    values = groups.control.all_reduce(torch.tensor(list(times.values()), dtype=torch.float64, device=device), "max")
    return dict(zip(times, values.tolist(), strict=True))


def _result(recipe: Recipe, ordering: Ordering, measured: Measured) -> dict[str, Any]:
    rounds = measured.rounds
    columns = {key: [times[key] for times in rounds] for key in rounds[0]}
    step, joules = columns.pop("step_ms"), columns.pop("energy_j")
    degree, reduction = ordering.degree, ordering.reduction
    return {
        "seq_len": recipe.data.seq_len,
        "schedule": ordering.forward.kind, "degree": degree, "attention_degree": ordering.fewer_slices,
        "slicing": _slicing(recipe, ordering),
        "batch_degree": ordering.batch_degree, "reduction": reduction.kind, "sp_bytes": reduction.most,
        "engine": recipe.engine.kind, "backend": recipe.moe.backend,
        "step_ms": {"min": min(step), "median": statistics.median(step), "max": max(step)},
        **{key: statistics.median(values) for key, values in columns.items()},
        "energy_j": statistics.mean(joules),  # no median, since a counter may move only every tenth of a second
        "bound_ms": measured.bound * 1e3, **_in_ms(measured.busy),
    }  # fmt: skip


def _in_ms(used: Busy) -> dict[str, dict[str, float]]:
    """Return the entries of a JSON document, in milliseconds by cause."""
    entries = {"by_kind_ms": used.ranks, "critical_path_ms": used.path}
    return {name: {cause: seconds * 1e3 for cause, seconds in causes.items()} for name, causes in entries.items()}


def _busy_tables(used: Mapping[str, Busy]) -> str:
    return "\n".join([
        "", "shares of a step, mean of all workers; what travels counts where nothing computes",
        busy_table({name: each.ranks for name, each in used.items()}),
        "", "shares of its critical path, which goes from worker to worker",
        busy_table({name: each.path for name, each in used.items()}), "",
    ])  # fmt: skip


def _slicing(recipe: Recipe, ordering: Ordering) -> str:
    """Describe how attention is cut: a kind of slicing, `whole` for an uncut sequence, or lengths that no kind gives."""
    cut = ordering.slicing
    if cut is None or len(cut.attention) == 1:
        return "whole"
    given = cut.degree, len(cut.attention)
    kinds = (kind for kind in SLICINGS if recipe.cut(kind, *given).attention == cut.attention)
    return next(kinds, ",".join(map(str, cut.attention)))


def _slice_cost(timings: list[tuple[int, int, float]]) -> SliceCost | None:
    """Fit the cost of attention's slices to measured seconds.

    Return None if too few different slices ran, or if the slices are so short that only the time to start them is measured.
    """
    cost = SliceCost.measured(timings) if len({timing[:2] for timing in timings}) > 2 else None
    return cost if cost and max(cost[:2]) > 0 else None


def _table(names: Sequence[str], results: Sequence[dict[str, Any]], rounds: int, lacks_energy: str | None) -> str:
    fastest = min(result["step_ms"]["median"] for result in results)
    lines = [
        f"milliseconds per step, medians of {rounds} rounds in turns; exposed communication is not hidden by computation",
        "× bound: the step over the time that no order of its ops can beat",
    ]
    if measured := not any(math.isnan(result["energy_j"]) for result in results):
        lines.append("joules: of a step, mean of the rounds, of all GPUs, or without GPUs of all processors")
    else:
        lines.append(f"no joules: {lacks_energy or 'a counter could not be read in every step'}")
    lines.append(f"{'schedule':<22}" + "".join(f"{name:>9}" for name in (*_COLUMNS, *["joules"] * measured)))
    for name, result in zip(names, results, strict=True):
        step = result["step_ms"]
        figures = [step["median"], step["min"], step["max"]]
        figures += [result[key] for key in ("forward_ms", "backward_ms", "compute_ms", "comm_ms", "exposed_comm_ms")]
        over = f"{step['median'] / result['bound_ms']:>9.2f}" + (f"{result['energy_j']:>9.4g}" if measured else "")
        mark = "  fastest" if step["median"] == fastest else ""
        lines.append(f"{name:<22}" + "".join(f"{figure:>9.1f}" for figure in figures) + over + mark)
    return "\n".join(lines)


def _draw(recipe: Recipe, graph: StepGraph, rows: Mapping[str, Mapping[Op, Span]], path: Path) -> None:
    from trainers.pictures.timeline import draw_timelines

    draw_timelines(graph, rows, path, f"{recipe.name}: {recipe.schedule.kind}, degree {recipe.schedule.degree}")
