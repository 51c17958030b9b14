"""Computations on the tensors of one rank, without communication: attention, experts, permutation, capacity."""
