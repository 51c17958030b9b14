"""Runs a step: its ops, the sum of gradients, their norm, the optimizer."""

from foldray.runtime.engine import Engine, State, TorchEngine, engine_state, frozen_shards, shards_of
from foldray.runtime.execution import Execution
from foldray.runtime.gradients import Gradients, Norms, Owners, gradient_norms
from foldray.runtime.optimizer import decay_groups, learning_rate, make_optimizer, state_keys
from foldray.runtime.shards import Shard
from foldray.runtime.shell import StepModule
from foldray.runtime.trace import Trace
