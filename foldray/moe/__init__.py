"""Mixture of Experts: the router, the two sides of a layer, and the exchange between them."""

from foldray.moe.balance import Balance, Tally
from foldray.moe.contracts import (
    Exchange,
    Layer,
    NodeExchange,
    Received,
    RowCounts,
    Rows,
    Sent,
    combine,
    compute_rows,
    dispatch,
    run_layer,
)
from foldray.moe.exchange import AllToAll
from foldray.moe.layer import Experts, MoeBackend, MoELayer
from foldray.moe.pattern import Pattern
from foldray.moe.router import Gate, Router, Routing, TokenPiece
