"""How many GPUs and network adapters attention and the experts get, if they have workers of their own (DisagMoE, section 4.3).

A step goes at the pace of its slower side. A side takes the longer one of two times: to compute its part of a layer on its
GPUs, and to bring the rows of a layer through its adapters (equations 5 and 6; a roofline):

    T_A = max(F_A / C_A, V / B_A)      T_F = max(F_F / C_F, V / B_F)

F is the FLOPs of a side, C the FLOP/s of its GPUs together, V the bytes that travel each way, B the bytes per second of its
adapters together. The allocation first makes max(T_A, T_F) as small as possible. Among the allocations that do, it makes the
other side as fast as possible, too: the adapters that are left go to the side that waits for its rows (equation 7). If adapters
set the pace of both, the GPUs are shared out so that both sides compute for the same time.

With the pace 1 / T instead of T, all of this is linear: C ≥ F · pace and B ≥ V · pace. So it is a mixed-integer linear
program, and GPUs may be of several kinds, with speeds of their own on either side (HeterMoE, arXiv:2504.03871).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from foldray.errors import UserError

_SLACK = 1e-6  # the share of a best pace that a later program may lose, for the solver's rounding
_FREE = 1e6  # how much faster than computation the adapters are if nothing travels


class Machines(NamedTuple):
    """GPUs of one kind.

    Args:
        gpus: number of GPUs.
        attention, experts: FLOP/s that one GPU reaches on each side.
        unit: GPUs that go to a side together, such as those of a node.
    """

    gpus: int
    attention: float
    experts: float
    unit: int = 1


class Demand(NamedTuple):
    """What a layer needs for one micro-batch.

    Args:
        attention, experts: FLOPs of each side.
        bytes: bytes from attention to the experts; as many come back.
    """

    attention: float
    experts: float
    bytes: float


@dataclass(frozen=True)
class Allocation:
    """GPUs and adapters of both sides.

    Args:
        attention, experts: number of GPUs of every kind.
        attention_nics, expert_nics: number of adapters.
        computing, traveling: seconds of a layer of attention and of the experts, computing and in the adapters.
    """

    attention: tuple[int, ...]
    experts: tuple[int, ...]
    attention_nics: int
    expert_nics: int
    computing: tuple[float, float]
    traveling: tuple[float, float]

    @property
    def sides(self) -> tuple[float, float]:
        """Seconds of a layer of attention and of the experts."""
        return max(self.computing[0], self.traveling[0]), max(self.computing[1], self.traveling[1])

    @property
    def seconds(self) -> float:
        """Seconds of a layer of the slower side, which sets the pace."""
        return max(self.sides)


def allocate(demand: Demand, machines: Sequence[Machines], nics: int, nic_rate: float) -> Allocation:
    """Return the best allocation.

    Args:
        demand: FLOPs and bytes of a layer.
        machines: the GPUs, kind by kind. Every GPU goes to one side.
        nics: number of adapters. Any of them may serve either side.
        nic_rate: bytes per second of an adapter, in each direction.

    Raises:
        UserError: there are fewer than two units of GPUs, or fewer than two adapters.
    """
    if sum(kind.gpus // kind.unit for kind in machines) < 2:
        raise UserError("gpus", sum(kind.gpus for kind in machines), "attention and the experts need one unit of GPUs each")
    if nics < 2:
        raise UserError("nics", nics, "attention and the experts need one network adapter each", ["2…"])
    program = _Program(demand, machines, nics, nic_rate)
    program.fix([1.0, 0.0, 0.0, 0.0])  # the pace of the slower side
    program.fix([0.0, 1.0, 1.0, 0.0])  # the other side, too
    return program.allocation(program.solve([0.0, 0.0, 0.0, 1.0]))


class _Program:
    """The linear program.

    Its variables are four paces (of the slower side, of attention, of the experts, and of the side that computes longer), the
    units of each kind on attention's side, and attention's adapters. Pace 1 is that of a layer whose slowest part has all GPUs
    or all adapters.
    """

    def __init__(self, demand: Demand, machines: Sequence[Machines], nics: int, nic_rate: float):
        self.demand, self.machines, self.nics, self.rate = demand, machines, nics, nic_rate
        units = np.array([kind.gpus // kind.unit for kind in machines])
        # The pace that one unit of each kind, and one adapter, adds to a side.
        attention = np.array([kind.unit * kind.attention for kind in machines]) / demand.attention
        experts = np.array([kind.unit * kind.experts for kind in machines]) / demand.experts
        nic = nic_rate / demand.bytes if demand.bytes else _FREE * max(attention.sum(), experts.sum())
        one = min(units @ attention, units @ experts, nics * nic)
        attention, experts, nic = attention / one, experts / one, nic / one
        none, each = np.zeros(len(machines)), np.ones(len(machines))
        rows = [  # coefficients of the variables, and the least value of their sum
            ([-1, 1, 0, 0, *none, 0], 0),
            ([-1, 0, 1, 0, *none, 0], 0),
            ([0, -1, 0, 0, *attention, 0], 0),
            ([0, 0, -1, 0, *-experts, 0], -units @ experts),
            ([0, -1, 0, 0, *none, nic], 0),
            ([0, 0, -1, 0, *none, -nic], -nics * nic),
            ([0, 0, 0, -1, *attention, 0], 0),
            ([0, 0, 0, -1, *-experts, 0], -units @ experts),
            ([0, 0, 0, 0, *each, 0], 1),  # a unit for attention
            ([0, 0, 0, 0, *-each, 0], 1 - units.sum()),  # and one for the experts
        ]
        self.constraints = [LinearConstraint(np.array([row for row, _ in rows]), np.array([least for _, least in rows]))]
        self.integrality = [0] * 4 + [1] * (len(machines) + 1)
        self.bounds = Bounds([0] * 4 + [*none, 1], [np.inf] * 4 + [*units, nics - 1])

    def fix(self, objective: Sequence[float]) -> None:
        """Make a weighted sum of the paces as large as possible, and keep it so in later solutions."""
        whole = [*objective, *[0.0] * (len(self.machines) + 1)]
        most = float(np.dot(whole, self.solve(objective)))
        self.constraints.append(LinearConstraint(np.array([whole]), np.array([most * (1 - _SLACK)])))

    def solve(self, objective: Sequence[float]) -> np.ndarray:
        """Return the variables that make a weighted sum of the paces largest."""
        costs = [-each for each in objective] + [0.0] * (len(self.machines) + 1)
        found = milp(costs, integrality=self.integrality, bounds=self.bounds, constraints=self.constraints)
        assert found.x is not None, found.message
        return found.x

    def allocation(self, solution: np.ndarray) -> Allocation:
        units, kept = np.rint(solution[4:-1]).astype(int).tolist(), round(solution[-1])
        return assigned(self.demand, self.machines, self.nics, self.rate, units, kept)


def assigned(
    demand: Demand, machines: Sequence[Machines], nics: int, nic_rate: float, units: Sequence[int], attention_nics: int
) -> Allocation:
    """Return the allocation with these units of each kind, and this number of adapters, for attention."""
    attention = tuple(kind.unit * own for kind, own in zip(machines, units, strict=True))
    experts = tuple(kind.gpus // kind.unit * kind.unit - own for kind, own in zip(machines, attention, strict=True))
    compute = (
        demand.attention / sum(own * kind.attention for own, kind in zip(attention, machines, strict=True)),
        demand.experts / sum(own * kind.experts for own, kind in zip(experts, machines, strict=True)),
    )
    travel = (demand.bytes / (attention_nics * nic_rate), demand.bytes / ((nics - attention_nics) * nic_rate))
    return Allocation(attention, experts, attention_nics, nics - attention_nics, compute, travel)
