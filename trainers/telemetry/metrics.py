"""The metrics of a step: the one place that names them, and says what MLflow, Prometheus, a run's summary and Ray make of them.

A recipe adds metrics of its own with `tracking.metrics: [module:NAME]`, where NAME is a `Metric`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from foldray.errors import UserError
from foldray.recipe import Recipe
from foldray.tables import imported
from trainers.telemetry.expert_health import Health
from trainers.telemetry.records import VALIDATED

if TYPE_CHECKING:
    import torch

    from foldray.comm import Count
    from foldray.runtime.copying import Decision


class Totals(NamedTuple):
    """Losses and counts of a step, over all ranks and micro-batches, and whether any rank has to end after it.

    `tokens` are those that count in the loss, `count_ME` the assignments of each MoE layer and expert, `replaced` those among
    them that routers would not have chosen. `joules` is NaN where a rank cannot read them, and in the first step of an attempt.
    """

    tokens: int
    language: float
    balance: float
    z: float
    further: float | None
    dropped: float
    replaced: float
    count_ME: torch.Tensor
    traffic: dict[str, Count]
    joules: float
    stops: bool
    preempted: bool


class Finished(NamedTuple):
    """What a rank knows after a step.

    Args:
        rate: the learning rate.
        norm: the norm of the whole gradient.
        trained: whether weights were changed; a step whose gradient is not finite may be skipped.
        skipped: number of steps that were skipped so far.
        flops: model FLOPs of a step.
        peak, products: FLOP/s of all ranks, by their GPUs' data sheets (NaN if one is not known), and of measured products.
        health: how evenly experts were used; None without MoE layers.
        copied: the last choice of experts with copies; None if there is no room for any, or none was made yet.
    """

    recipe: Recipe
    totals: Totals
    rate: float
    norm: float
    seconds: float
    trained: bool
    skipped: int
    flops: float
    peak: float
    products: float
    health: Health | None
    copied: Decision | None = None


@dataclass(frozen=True)
class Metric:
    """A number of every step.

    Args:
        name: its name in records and `metrics.jsonl`.
        measure: returns it after a step; None where it has no meaning.
        about: what it is, with its unit.
        mlflow: its name in MLflow and Ray; None is `name`.
        gauge: its name in Prometheus, behind `foldray_`; None leaves it out.
        over: how a run's summary puts the values of steps together: that of the last step, the median of all, or the mean of the
            newest ones; None leaves it out.
        shown: the row of the closing table, with a label and a text whose braces hold the number.
        reported: whether Ray gets it with each checkpoint.
        whole, always: whether it is a whole number; whether every step has it, even if it is not finite.

    Raises:
        ValueError: `name` or `gauge` is no identifier, or is taken.
    """

    name: str
    measure: Callable[[Finished], float | None]
    about: str
    mlflow: str | None = None
    gauge: str | None = None
    over: Literal["last", "median", "newest"] | None = None
    shown: tuple[str, str] | None = None
    reported: bool = False
    whole: bool = False
    always: bool = False

    def __post_init__(self) -> None:
        for name in filter(None, (self.name, self.gauge)):
            if not name.isidentifier() or name in _TAKEN:
                raise ValueError(f"a metric cannot have the name {name!r}")

    @property
    def outside(self) -> str:
        """The name in MLflow and Ray."""
        return self.mlflow or self.name


_TAKEN = (
    "kind", "step", "time", "load", "by_layer", "traffic",  # of records
    "checkpoint_age_s", "failed_attempts", "waiting",  # of gauges
)  # fmt: skip


def _of_health(measure: Callable[[Health], float]) -> Callable[[Finished], float | None]:
    return lambda step: None if step.health is None else measure(step.health)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _tokens(recipe: Recipe) -> int:
    return recipe.training.global_batch * recipe.data.seq_len


def _replaced_rate(step: Finished) -> float | None:
    return step.totals.replaced / float(step.totals.count_ME.sum()) if step.recipe.routes.replay and step.health else None


METRICS = (
    Metric("loss", lambda step: step.totals.language, "Cross entropy, nats per token that counts, without other losses",
           gauge="loss", reported=True, always=True),
    Metric("lr", lambda step: step.rate, "Learning rate", "learning_rate", reported=True, always=True),
    Metric("grad_norm", lambda step: step.norm, "Norm of the whole gradient", reported=True),
    Metric("balance_loss", lambda step: step.totals.balance if step.health else None, "Balance loss, before its weight"),
    Metric("z_loss", lambda step: step.totals.z if step.health else None, "Loss of the routers' logits, before its weight"),
    Metric("mtp_loss", lambda step: step.totals.further, "Cross entropy of further tokens, nats per token, mean over depths"),
    Metric("tokens_per_s", lambda step: _tokens(step.recipe) / step.seconds, "Tokens per second",
           gauge="tokens_per_s", over="median", reported=True, always=True, shown=("speed", "{:,.0f} tokens/s (median)")),
    Metric("step_time_s", lambda step: step.seconds, "Seconds of a step", gauge="step_time_s", reported=True, always=True),
    Metric("step_energy_j", lambda step: _known(step.totals.joules),
           "Joules of a step: of all GPUs, or without GPUs of all processors", gauge="step_energy_j", over="newest"),
    Metric("token_energy_j", lambda step: _known(step.totals.joules / _tokens(step.recipe)), "Joules of a step per token",
           gauge="token_energy_j", over="newest", shown=("energy", "{:.3g} J per token (mean of the newest steps)")),
    Metric("mfu", lambda step: _known(step.flops / step.seconds / step.peak),
           "Model FLOPs over those of the GPUs' data sheets, from 0 to 1", gauge="mfu", over="median", reported=True,
           shown=("MFU", "{:.1%} of the data sheet (median)")),
    Metric("product_share", lambda step: step.flops / step.seconds / step.products,
           "Model FLOPs over those of matrix products that the ranks measured before the first step", gauge="product_share",
           over="median", reported=True, shown=("share of products", "{:.1%} of the speed of measured matrix products (median)")),
    Metric("drop_rate", lambda step: step.totals.dropped / float(step.totals.count_ME.sum()) if step.health else None,
           "Share of assignments that experts dropped", gauge="dropped_tokens", over="newest",
           shown=("dropped tokens", "{:.2%}")),
    Metric("replaced_rate", _replaced_rate, "Share of assignments that were replayed, and that routers would not have chosen",
           over="newest", shown=("other experts than the routers'", "{:.2%}")),
    Metric("load_max_over_mean", _of_health(lambda health: float(health.max_over_mean.max())),
           "Load of the fullest expert over the mean load, in the worst layer", "expert_load/max_over_mean", "expert_overload"),
    Metric("rank_max_over_mean", _of_health(lambda health: float(health.rank_max_over_mean.max())),
           "Load of the fullest rank over the mean load, in the worst layer, with each expert at home",
           "expert_load/rank_max_over_mean", "rank_overload"),
    Metric("expert_copies", lambda step: step.copied.copies if step.copied else None,
           "Copies of experts in an expert-parallel group, of all layers", "expert_load/copies", "expert_copies"),
    Metric("copied_rank_max_over_mean", lambda step: step.copied.expected if step.copied else None,
           "Load of the fullest rank over the mean load, with copies, mean over the layers, as expected when they were chosen",
           "expert_load/copied_rank_max_over_mean", "copied_rank_overload", "newest",
           shown=("overload with copies of experts", "{:.2f} (mean of the newest steps)")),
    Metric("load_entropy", _of_health(lambda health: float(health.entropy.min())),
           "Entropy of the load over ln(experts), in the worst layer", "expert_load/entropy"),
    Metric("dead_experts", _of_health(lambda health: int(health.dead.sum())), "Experts of all layers without a token",
           "expert_load/dead", "dead_experts", whole=True),
    Metric("trained_tokens", lambda step: step.totals.tokens if step.trained else 0,
           "Tokens that count in the loss and were trained", whole=True),
    Metric("skipped_steps", lambda step: step.skipped, "Steps so far that were skipped, since their gradients were not finite",
           gauge="skipped_steps", over="last", whole=True),
)  # fmt: skip


def metrics_of(recipe: Recipe) -> tuple[Metric, ...]:
    """Return foldray's metrics, and those of a recipe."""
    metrics = [*METRICS]
    for name in recipe.tracking.metrics:
        if not isinstance(row := imported("tracking.metrics", name), Metric):
            raise UserError("tracking.metrics", name, f"is a {type(row).__name__}, not a trainers.Metric")
        for metric in metrics:
            for attribute in ("name", "outside", "gauge"):
                if (taken := getattr(row, attribute)) is not None and taken == getattr(metric, attribute):
                    raise UserError("tracking.metrics", name, f"has the name {taken!r}, which another metric has")
        metrics.append(row)
    return tuple(metrics)


def reported_names(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of all metrics that Ray gets with checkpoints."""
    return ("step", *(metric.outside for metric in metrics_of(recipe) if metric.reported), *VALIDATED)


def reported(step: Mapping[str, Any], metrics: tuple[Metric, ...]) -> dict[str, float | None]:
    """Return the metrics that Ray gets with a checkpoint after this step, by the names that MLflow has."""
    return {"step": step["step"], **{row.outside: step.get(row.name) for row in metrics if row.reported}}
