"""Ranks on nodes: placement, the traffic that crosses nodes, and which rank goes where. This package needs no torch."""

from foldray.nodes.arranging import Room, arrange, filled
from foldray.nodes.placement import HEAT, Arrangement, Placement, best_order
from foldray.nodes.traffic import ROWS, Edges, Flow, Share
