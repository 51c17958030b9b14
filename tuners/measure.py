"""Measures settings. A setting and the unchanged recipe take turns on the same ranks, so a drift of the machine cancels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foldray.clock import Recording
from foldray.finding import recorded_bound
from foldray.graph import StepGraph
from foldray.recipe import Recipe
from trainers.cluster.actors import RankFailure, Ranks
from trainers.cluster.joining import seats
from trainers.measure.trial import Turn, measure_turn

MeasureTurn = Callable[..., Turn]
"""Type of the function that every rank runs: `trainers.measure.trial.measure_turn`."""

_SURE = 0.95  # level of all intervals
_LEAST_NOISE = 0.01  # smallest assumed noise, relative to the ratio, because a few turns may agree by chance


def interval(ratios: Sequence[float], among: int = 1) -> tuple[float, float]:
    """Return the range that holds the true ratio in 95 % of cases, from some measured ratios.

    From enough ratios their order alone says it: the median lies between the k-th smallest and the k-th largest one, whatever the
    noise is like. For fewer it is Student's interval of their logarithms. It is wide for two of them, and endless for one.

    Args:
        among: number of ranges that shall all hold at once (Bonferroni), where the best of so many settings is chosen.
    """
    from scipy.stats import binom, t

    count, doubt = len(ratios), (1 - _SURE) / among
    if (place := int(binom.ppf(doubt / 2, count, 0.5))) > 0:  # fewer than so many on one side of the median are no chance
        ordered = sorted(ratios)
        return ordered[place - 1], ordered[-place]
    if count < 2:
        return 0.0, math.inf
    logs = np.log(ratios)
    half = t.isf(doubt / 2, count - 1) * max(logs.std(ddof=1), _LEAST_NOISE) / math.sqrt(count)
    low, high = np.exp(np.clip([logs.mean() - half, logs.mean() + half], -700, 700))
    return float(low), float(high)


@dataclass
class Measurement:
    """The measurements of a setting so far.

    Args:
        seconds: seconds of every step on its slowest rank, by turn.
        ratios: median step of the setting over that of the unchanged recipe, by turn.
        peak_bytes: memory of the fullest rank, in bytes.
        recorded: the graph of one step, and every rank's recording of it.
        step_ms, compute_ms, exposed_comm_ms: milliseconds of that step, of its computation and of its exposed communication;
            the largest values of all ranks.
    """

    seconds: list[list[float]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    recorded: tuple[StepGraph, list[Recording]] | None = None
    step_ms: float = 0.0
    compute_ms: float = 0.0
    exposed_comm_ms: float = 0.0

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def half_interval(self) -> float:
        """How far the ratio's interval goes to its farther end; infinite after a single turn."""
        low, high = interval(self.ratios)
        return max(high - self.ratio, self.ratio - low)

    def over_bound(self) -> float | None:
        """Return the recorded step over the time that no order of its ops can beat; None if no step was recorded."""
        return self.step_ms / (recorded_bound(*self.recorded) * 1e3) if self.recorded else None

    def is_surely_slower_than(self, ratio: float) -> bool:
        """Whether the setting's whole interval lies above a ratio, so that the difference is more than noise."""
        return interval(self.ratios)[0] > ratio

    def add(self, turns: Sequence[Turn], reference: Sequence[Turn]) -> None:
        """Add one turn of the setting and one of the unchanged recipe, each given by rank."""
        steps = _slowest(turns)
        self.seconds.append(steps)
        self.ratios.append(statistics.median(steps) / statistics.median(_slowest(reference)))
        self.peak_bytes = max(self.peak_bytes, *(rank.peak for rank in turns))
        if all_recorded := [rank.recorded for rank in turns if rank.recorded]:
            graph = all_recorded[0][0].with_chunks_of(graph.chunks for graph, _ in all_recorded)
            self.recorded = graph, [recording for _, recording in all_recorded]
            self.step_ms = max(rank.step for rank in turns)
            self.compute_ms, self.exposed_comm_ms = max(rank.compute for rank in turns), max(rank.exposed for rank in turns)


class Bench:
    """Measures recipes on one group of ranks. If a rank fails, the group is closed, and the next call starts a new one.

    Args:
        reference: the unchanged recipe, which takes turns with every other recipe.
        nodes: ids of the nodes to measure on; None lets Ray choose them.
    """

    def __init__(self, reference: Recipe, nodes: list[str] | None = None, measure_turn: MeasureTurn = measure_turn):
        self.reference, self._nodes, self._measure_turn = reference, nodes, measure_turn
        self._ranks: Ranks | None = None

    def measure(self, recipe: Recipe) -> Iterator[Measurement]:
        """Yield the measurements so far after every turn. The caller may stop after any turn. The last one records a step.

        Raises:
            RankFailure: a rank ran out of memory or time, was lost, or cannot run the recipe.
        """
        turns, measurement = self.reference.tune.turns, Measurement()
        for number in range(turns):
            record = number == turns - 1
            # The order alternates, so that a steady drift cancels as well.
            if number % 2 == 0:
                reference, setting = self._turn(self.reference), self._turn(recipe, record)
            else:
                setting, reference = self._turn(recipe, record), self._turn(self.reference)
            measurement.add(setting, reference)
            yield measurement

    def measure_step(self, recipe: Recipe) -> float:
        """Return the seconds of a step: the median of one turn."""
        return statistics.median(_slowest(self._turn(recipe)))

    def _turn(self, recipe: Recipe, record: bool = False) -> list[Turn]:
        spec = self.reference.tune
        # DeepSpeed knows the groups of one fold at a time.
        keep = 2 if spec.beside and self.reference.engine.kind == "torch" else 1
        try:
            if self._ranks is None:
                self._ranks = Ranks(self.reference, self._nodes)
            values = recipe.model_dump(mode="json")
            return self._ranks.call(self._measure_turn, values, spec.steps, keep, record, timeout=spec.trial_s)
        except RankFailure:
            self.close()
            raise

    @property
    def hosts(self) -> list[str]:
        """Addresses of the nodes that the ranks are on; empty if no ranks were started."""
        return self._ranks.hosts if self._ranks is not None else []

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _slowest(ranks: Sequence[Turn]) -> list[float]:
    """Return the seconds of every step on its slowest rank."""
    return [max(step) for step in zip(*(rank.seconds for rank in ranks), strict=True)]


@dataclass(frozen=True)
class Gain:
    """The speed of a setting relative to the unchanged recipe, from the run-off at the end of a study.

    Args:
        times: step time of the unchanged recipe over that of the setting, the median of all pairs of neighbouring turns.
        low, high: the interval of `times`. The intervals of all settings of a run-off hold at once in 95 % of cases.
    """

    times: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, times: Sequence[float], among: int = 1) -> Gain:
        """Make the gain of a setting from all pairs, in a run-off among some settings."""
        return cls(statistics.median(times), *interval(times, among), len(times))


def measure_pairs(bench: Bench, recipe: Recipe, pairs: int, among: int = 1, enough: float = 0.0) -> list[float]:
    """Measure how many times as fast as the bench's reference a recipe is, in pairs of a turn of each; one more warms up.

    It stops early once the recipe is surely less than `enough` times as fast.
    """
    times: list[float] = []
    for number in range(pairs + 1):
        ratio = bench.measure_step(bench.reference) / bench.measure_step(recipe)
        times += [ratio] if number else []
        if times and interval(times, among)[1] < enough:
            break
    return times


def disjoint_nodes(workers: int, alive: list[dict[str, Any]], needs: dict[str, float], most: int) -> list[list[str]]:
    """Return disjoint sets of node ids. The nodes of every set have room for all workers.

    `alive` has nodes as `ray.nodes` returns them, and `needs` the resources of one worker. There may be room for fewer sets
    than `most`.
    """
    sets: list[list[str]] = []
    free = [(node["NodeID"], seats(node["Resources"], needs)) for node in alive]
    free.sort(key=lambda node: -node[1])
    while free and len(sets) < most:
        chosen: list[str] = []
        room = free[0][1]
        while free and room and len(chosen) * room < workers and free[0][1] >= min(room, workers - len(chosen) * room):
            chosen.append(free.pop(0)[0])
        if len(chosen) * room < workers:
            break
        sets.append(chosen)
    return sets
