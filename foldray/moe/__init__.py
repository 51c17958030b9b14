"""Mixture of Experts: router, six-stage dispatcher, experts."""

from foldray.moe.dispatcher import Dispatcher, Permutation, Plan
from foldray.moe.layer import Experts, MoeBackend, MoELayer, MoeStats
from foldray.moe.router import Gate, Router, Routing

__all__ = ["Dispatcher", "Experts", "Gate", "MoELayer", "MoeBackend", "MoeStats", "Permutation", "Plan", "Router", "Routing"]
