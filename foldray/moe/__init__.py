"""Mixture of Experts: router, six-stage dispatcher, experts."""

from foldray.moe.dispatcher import Dispatcher, Permutation, Plan
from foldray.moe.layer import Experts, MoeBackend, MoELayer
from foldray.moe.router import Gate, Router, Routing
from foldray.moe.tally import Tally

__all__ = ["Dispatcher", "Experts", "Gate", "MoELayer", "MoeBackend", "Permutation", "Plan", "Router", "Routing", "Tally"]
