"""Folds: axes, rank tables, validity, advice, placement on nodes, and the traffic that crosses them. This package needs no
torch."""

from foldray.fold.advice import nearest_folds
from foldray.fold.arranging import Room, arrange, filled
from foldray.fold.fold import FAMILIES, Fold, divisors
from foldray.fold.grid import Grid
from foldray.fold.placement import HEAT, Arrangement, Placement, best_order
from foldray.fold.traffic import ROWS, Edges, Flow, Share
