"""Runs a step: its ops, the sum of gradients, their norm, the optimizer."""

from foldray.runtime.engine import Engine, State, TorchEngine, engine_state, shards_of
from foldray.runtime.execution import Execution
from foldray.runtime.gradients import GradientBuffer, Gradients, Norms, Owners, gradient_norms
from foldray.runtime.optimizer import decay_groups, learning_rate, make_optimizer, state_keys
from foldray.runtime.shards import Shard
from foldray.runtime.shell import StepModule
from foldray.runtime.trace import Trace

__all__ = [
    "Engine",
    "Execution",
    "GradientBuffer",
    "Gradients",
    "Norms",
    "Owners",
    "Shard",
    "State",
    "StepModule",
    "TorchEngine",
    "Trace",
    "decay_groups",
    "engine_state",
    "gradient_norms",
    "learning_rate",
    "make_optimizer",
    "shards_of",
    "state_keys",
]
