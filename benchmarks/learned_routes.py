"""How unevenly routers load ranks while they learn, and what places and copies of experts leave of it.

A training has recorded its routes (`routes.record`). For windows of its steps, and for several sizes of expert-parallel groups,
the table has the load of the fullest rank over the mean, as a mean over blocks and steps: with experts at home, with places by
the loads of the last `--every` recorded steps (`moe.place_every`), and with one or two copies on each rank by the same loads
(`moe.copies`), where copies by the first half of these steps would have helped the second half. Each choice is measured on the
steps after it, up to the next choice.

    python benchmarks/learned_routes.py runs/RUN [runs/RUN …] --ep 2 4 8 --every 10
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from foldray.blueprint.copying import copy_experts
from foldray.blueprint.placing import overload_of, spread
from foldray.runtime.copying import GAIN
from trainers.routes.recorded import Recorded

WINDOWS = (0, 100, 300, 1000, 3000)
Measure = Callable[[list[float]], float]
Choose = Callable[[np.ndarray, int], Measure]
"""(loads of some steps [S, E], EP) → (load of a later step [E] → overload)"""


def at_home(before_SE: np.ndarray, ep: int) -> Measure:
    return lambda load_E: overload_of(load_E, ep)


def placed(before_SE: np.ndarray, ep: int) -> Measure:
    order = spread(before_SE.sum(0).tolist(), ep)
    return lambda load_E: overload_of(load_E, ep, order)


def copied(room: int) -> Choose:
    def choose(before_SE: np.ndarray, ep: int) -> Measure:
        half = len(before_SE) // 2
        early, late_E = (
            copy_experts(before_SE[:half].mean(0).tolist(), ep, room) if half else None,
            before_SE[half:].mean(0).tolist(),
        )
        if early is None or overload_of(late_E, ep) <= GAIN * max(early.rank_shares(late_E)):
            return at_home(before_SE, ep)
        table = copy_experts(before_SE.mean(0).tolist(), ep, room)
        return (lambda load_E: overload_of(load_E, ep)) if table is None else lambda load_E: max(table.rank_shares(load_E))

    return choose


WAYS: dict[str, Choose] = {"at home": at_home, "placed": placed, "1 copy": copied(1), "2 copies": copied(2)}


def overloads(load_SE: np.ndarray, ep: int, every: int, choose: Choose) -> np.ndarray:
    """Return the overload of every step of a block but the first one: [S − 1]."""
    found = list[float]()
    for step in range(1, len(load_SE)):
        if (step - 1) % every == 0:
            measure = choose(load_SE[max(0, step - every) : step], ep)
        found.append(measure(load_SE[step].tolist()))
    return np.array(found)


def table(run: str, sizes: list[int], every: int) -> str:
    recorded = Recorded(run, "run")
    steps = np.array(recorded.steps)
    load_SME = np.stack([recorded.counts(step).sum(0) for step in recorded.steps]).astype(np.float64)
    lines = [run, f"{'EP':>4} {'steps':>12}" + "".join(f"{name:>10}" for name in WAYS)]
    for ep in sizes:
        by_way = {
            name: np.mean([overloads(load_SE, ep, every, choose) for load_SE in load_SME.transpose(1, 0, 2)], axis=0)
            for name, choose in WAYS.items()
        }
        for first, last in pairwise(WINDOWS):
            inside = (steps[1:] > first) & (steps[1:] <= last)
            if inside.any():
                figures = "".join(f"{found[inside].mean():>10.2f}" for found in by_way.values())
                lines.append(f"{ep:>4} {f'{first + 1}–{last}':>12}{figures}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--ep", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--every", type=int, default=10, metavar="N", help="recorded steps from one choice to the next one")
    given = parser.parse_args()
    print("\n\n".join(table(run, given.ep, given.every) for run in given.runs))


if __name__ == "__main__":
    main()
