"""What a candidate costs: the time of a step, its memory, its traffic, on given hardware. This package needs no torch."""
