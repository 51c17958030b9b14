"""Folds: axes, rank tables, validity, advice, placement on nodes. This package computes with integers only."""

from foldray.fold.advice import nearest_disjoint, nearest_folds
from foldray.fold.fold import ATTENTION_AXES, FAMILIES, MOE_AXES, Fold, divisors
from foldray.fold.grid import Grid, listed
from foldray.fold.placement import HEAT, Placement, best_order

__all__ = [
    "ATTENTION_AXES", "FAMILIES", "HEAT", "MOE_AXES", "Fold", "Grid", "Placement",
    "best_order", "divisors", "listed", "nearest_disjoint", "nearest_folds",
]  # fmt: skip
