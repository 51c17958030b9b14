"""Made-up records of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from trainers.telemetry.expert_health import Health
from trainers.telemetry.history import History
from trainers.telemetry.records import Place, Record, Resumed, Saved, Step, Validation


def place(rank: int) -> Place:
    return Place(
        kind="place", rank=rank, actor=f"a{rank}", node="n0", node_ip="10.0.0.1", pid=100 + rank,
        attention={"tp": 0, "cp": 0, "dp": rank, "pp": 0}, moe={"etp": 0, "ep": rank, "edp": 0, "pp": 0},
    )  # fmt: skip


def step(number: int, loss: float = 2.0, load: list[list[int]] | None = None, mfu: float | None = 0.4) -> Step:
    health = load and Health.of([np.array(load)], ep=2 if len(load[0]) % 2 == 0 else 1)
    return Step(
        kind="step", step=number, loss=loss, lr=1e-3, grad_norm=1.0, balance_loss=1.0, z_loss=0.0, drop_rate=0.01,
        tokens_per_s=12_345.0, step_time_s=0.1, mfu=mfu, product_share=0.5, load=load,
        load_max_over_mean=None if load is None else 1.5, dead_experts=None if load is None else 0,
        rank_max_over_mean=float(health.rank_max_over_mean.max()) if health else None,
        load_entropy=float(health.entropy.min()) if health else None, by_layer=health.by_layer() if health else None,
    )  # fmt: skip


def validation(number: int, bits: float = 3.0) -> Validation:
    return Validation(kind="validation", step=number, loss=bits * math.log(2), bits_per_byte=bits, sequences=8)


def resumed(number: int) -> Resumed:
    return Resumed(kind="resumed", step=number)


def saved(number: int) -> Saved:
    return Saved(kind="checkpoint", step=number, path=f"/storage/run/checkpoint_{number}")


def run(steps: int, layers: int = 4, experts: int = 8, eval_every: int = 10) -> Iterator[Record]:
    """Yield the records of a successful training."""
    chance = np.random.default_rng(0)
    yield from (place(rank) for rank in range(2))
    for number in range(1, steps + 1):
        bits = 2.4 + 5.6 * math.exp(-number / 20) + chance.normal(0, 0.1)
        load = chance.integers(50, 150, (layers, experts)).tolist() if layers else None
        yield {**step(number, bits * math.log(2), load), "time": 1e9 + number}
        if number % eval_every == 0:
            yield validation(number, bits + 0.1)
            yield saved(number)


def history(*records: Record) -> History:
    result = History()
    for record in records:
        result.take(record)
    return result
