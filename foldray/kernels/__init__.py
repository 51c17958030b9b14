"""What computes on tensors of one rank, and talks to nobody: attention, experts, permutation, capacity."""
