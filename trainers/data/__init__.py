"""Data: documents become tokens, and tokens become packed sequences on disk, which training reads by global index."""
