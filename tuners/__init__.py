"""Search: for the fastest way to train a recipe, and, while training, for the size of gradient chunks."""

from tuners.chunk_size import ChunkSizeSearch
from tuners.study import FoldTuner, Outcome, Watcher

__all__ = ["ChunkSizeSearch", "FoldTuner", "Outcome", "Watcher"]
