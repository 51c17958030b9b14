"""Searches for the fastest way to train a recipe and, during training, for the degree and the size of gradient chunks."""

from tuners.online import OnlineSearch
from tuners.outcome import Outcome, Watcher
from tuners.study import FoldTuner

__all__ = ["FoldTuner", "OnlineSearch", "Outcome", "Watcher"]
