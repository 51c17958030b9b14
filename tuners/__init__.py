"""Search: for the fastest way to train a recipe, and, while training, for the size of gradient chunks."""

from tuners.online import OnlineSearch
from tuners.study import FoldTuner, Outcome, Watcher

__all__ = ["FoldTuner", "OnlineSearch", "Outcome", "Watcher"]
