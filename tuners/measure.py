"""A trial: turns of a setting and of the reference on the same ranks, so that a drift of the machine cancels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from foldray.recipe import Recipe
from foldray.schedule import StepGraph
from foldray.timeline import Recording
from trainers.cluster.actors import RankFailure, Ranks
from trainers.measure.trial import Turn, turn

TakeTurn = Callable[..., Turn]
"""What every rank runs: `trainers.measure.trial.turn`."""

_SURE = 2.0  # standard errors beyond which a trial is surely slower
_LEAST_NOISE = 0.01  # of a turn's ratio: two turns that happen to agree do not tell that there is none


@dataclass
class Measured:
    """What is known of a setting so far.

    Args:
        seconds: the slowest rank's, of each step, turn by turn.
        ratios: of each turn's median to that of the reference beside it.
        peak: bytes of the fullest rank.
        recorded: a step of it: graph, and every rank's recording.
        compute, exposed: milliseconds of that step, on the slowest rank.
    """

    seconds: list[list[float]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    peak: int = 0
    recorded: tuple[StepGraph, list[Recording]] | None = None
    compute: float = 0.0
    exposed: float = 0.0

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def interval(self) -> float:
        """Half of the width of the ratio's interval, at two standard errors."""
        if len(self.ratios) < 2:
            return math.inf
        noise = max(statistics.stdev(self.ratios), _LEAST_NOISE * self.ratio)
        return _SURE * noise / math.sqrt(len(self.ratios))

    def surely_slower_than(self, ratio: float) -> bool:
        """Beyond what noise can explain."""
        return self.ratio - self.interval > ratio


class Bench:
    """Measures settings on one group of ranks; a rank that fails costs the group, which is started anew.

    Args:
        reference: what all are measured beside.
        take: what the ranks run.
    """

    def __init__(self, reference: Recipe, nodes: list[str] | None = None, take: TakeTurn = turn):
        self.reference, self._nodes, self._take = reference, nodes, take
        self._ranks: Ranks | None = None

    def turns(self, recipe: Recipe, record: bool = True) -> Iterator[Measured]:
        """What is known after each turn; the caller may stop at any.

        Raises:
            RankFailure: a rank ran out of memory or time, was lost, or cannot run this.
        """
        spec, found = self.reference.tune, Measured()
        for number in range(spec.turns):
            # First, second; second, first: a steady drift cancels as well.
            pair = (self.reference, recipe) if number % 2 == 0 else (recipe, self.reference)
            took = {}
            for each in pair:
                last = record and each is recipe and number == spec.turns - 1
                took[each is recipe] = self._turn(each, last)
            own, beside = took[True], took[False]
            steps = [max(each) for each in zip(*(rank.seconds for rank in own), strict=True)]
            other = [max(each) for each in zip(*(rank.seconds for rank in beside), strict=True)]
            found.seconds.append(steps)
            found.ratios.append(statistics.median(steps) / statistics.median(other))
            found.peak = max(found.peak, *(rank.peak for rank in own))
            if own[0].recorded is not None:
                found.recorded = own[0].recorded[0], [rank.recorded[1] for rank in own if rank.recorded]
                found.compute, found.exposed = max(rank.compute for rank in own), max(rank.exposed for rank in own)
            yield found

    def step_seconds(self, recipe: Recipe) -> float:
        """A step of a recipe, one turn's median.

        Raises:
            RankFailure: as `turns` does.
        """
        ranks = self._turn(recipe, False)
        return statistics.median(max(each) for each in zip(*(rank.seconds for rank in ranks), strict=True))

    def _turn(self, recipe: Recipe, record: bool) -> list[Turn]:
        spec = self.reference.tune
        # DeepSpeed knows the groups of one fold at a time.
        keep = 2 if spec.beside and self.reference.engine.kind == "torch" else 1
        try:
            if self._ranks is None:
                self._ranks = Ranks(self.reference, self._nodes)
            return self._ranks.call(self._take, recipe.model_dump(mode="json"), spec.steps, keep, record, timeout=spec.trial_s)
        except RankFailure:
            self.close()
            raise

    @property
    def hosts(self) -> list[str]:
        """Addresses of the nodes that it measures on; none before it has."""
        return self._ranks.hosts if self._ranks is not None else []

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def nodes_apart(workers: int, alive: list[dict[str, Any]], each: dict[str, float], groups: int) -> list[list[str]]:
    """Sets of nodes with room for the workers, none in two sets: at most so many.

    Args:
        alive: as `ray.nodes` tells them.
        each: what a worker needs.
    """
    found: list[list[str]] = []
    free = [(node["NodeID"], min(int(node["Resources"].get(name, 0) // need) for name, need in each.items())) for node in alive]
    free.sort(key=lambda node: -node[1])
    while free and len(found) < groups:
        chosen: list[str] = []
        room = free[0][1]
        while free and room and len(chosen) * room < workers and free[0][1] >= min(room, workers - len(chosen) * room):
            chosen.append(free.pop(0)[0])
        if len(chosen) * room < workers:
            break
        found.append(chosen)
    return found
