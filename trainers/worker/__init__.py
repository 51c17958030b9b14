"""What runs on every worker: the loop, its engines, the guard, the search while training."""
