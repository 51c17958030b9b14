"""Which candidate to take: the space, the search in it, experts with ranks of their own, the report. This needs no torch."""
