"""Search over recipes."""

from tuners.chunk_size import ChunkSizeSearch

__all__ = ["ChunkSizeSearch"]
