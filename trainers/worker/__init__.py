"""The code of a worker: the training loop, its engines, the guard, and the search during training."""
